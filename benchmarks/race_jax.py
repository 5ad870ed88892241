"""The race in JAX: its problems' models and losses, its contenders and peers. Steps are jitted."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import race_problems as problems
from race_grids import (
    KRON_VARIANTS,
    Contender,
    Grid,
    Training,
    adam_grid,
    kfac_grid,
    kron_grid,
    muon_grid,
    sgd_grid,
)
from race_problems import Problem, randoms
from suite.jax import adaptive_kfac, kfac, kron, value_and_grad
from versions import versions

Tree = Any


class Start(NamedTuple):
    """One run, before its first step."""

    params: Tree
    draw: Callable[[], Tree]  # the next minibatch
    loss: Callable[[Tree, Tree], tuple[jax.Array, Tree]]  # and outputs, of parameters and a minibatch
    fixed: Tree  # the minibatch whose loss has to reach the target
    least: float = 0.0  # what is subtracted from that


class Built(NamedTuple):
    """A contender on a problem, for all seeds and points of the grid."""

    init: Callable[..., Tree]  # (params, **hyperparameters) -> state
    step: Callable[..., tuple[Tree, Tree]]  # (params, state, minibatch, hyperparameters), jitted


# ---- problems ------------------------------------------------------------------------------------


def autoencoder(seed: int, data: Callable[[], problems.Autoencoder]) -> Start:
    given = data()
    weights, draws = randoms(seed)
    params = [{"w": jnp.asarray(w.T), "b": jnp.asarray(b)} for w, b in given.first(weights)]
    rows = given.batches(draws)

    def nats(params: Tree, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = images
        for number, layer in enumerate(params):
            y = y @ layer["w"] + layer["b"]
            if number not in (given.code, len(params) - 1):
                y = jnp.tanh(y)
        return optax.sigmoid_binary_cross_entropy(y, images).sum() / len(images), y

    sample = jnp.asarray(given.sample)
    return Start(params, lambda: given.images[next(rows)], nats, sample, given.entropy)


def poisson(seed: int) -> Start:
    """-Δu = 2π² sin(πx) sin(πy) on the unit square, u = 0 around it; the same points in every step."""
    weights, draws = randoms(seed)
    params = [jnp.asarray(w.T) for w in problems.poisson_first(weights)]
    points = problems.poisson_points(draws)
    batch = tuple(jnp.asarray(x) for x in points)

    def loss(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        inside, _ = batch
        u = _with_derivatives(params, jnp.concatenate(batch))
        residual = u[: len(inside), 3] / (2 * jnp.pi**2) + jnp.sin(jnp.pi * inside).prod(1)
        around = u[len(inside) :, 0]
        return jnp.mean(residual**2) + jnp.mean(around**2), (residual, around)

    return Start(params, lambda: batch, loss, batch)


def _with_derivatives(params: Tree, points: jax.Array) -> jax.Array:
    """(n, 4): u, ∂u/∂x, ∂u/∂y and Δu at (n, 2) points; the bias is the weight of one more input."""
    n = len(points)
    unit, nothing = jnp.broadcast_to(jnp.eye(2), (n, 2, 2)), jnp.zeros((n, 1, 2))
    rows = jnp.concatenate([points[:, None], unit, nothing], 1)
    one = jnp.zeros((n, 4, 1)).at[:, 0].set(1)
    for weight in params[:-1]:
        value, gradient, laplacian = jnp.split(jnp.concatenate([rows, one], 2) @ weight, [1, 3], 1)
        y = jnp.tanh(value)
        first = 1 - y * y
        squares = jnp.sum(gradient**2, 1, keepdims=True)
        rows = jnp.concatenate([y, first * gradient, first * (laplacian - 2 * y * squares)], 1)
    return (jnp.concatenate([rows, one], 2) @ params[-1])[..., 0]


def delayed_xor(seed: int) -> Start:
    weights, draws = randoms(seed)
    params = {name: jnp.asarray(w.T) for name, w in problems.xor_first(weights).items()}
    fixed = tuple(jnp.asarray(a) for a in problems.xor_fixed())

    def nats(params: Tree, batch: Tree) -> tuple[jax.Array, jax.Array]:
        x, odd = batch

        def read(h: jax.Array, seen: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(seen @ params["read"] + params["read bias"] + h @ params["keep"]), None

        h = jax.lax.scan(read, jnp.zeros((x.shape[1], len(params["keep"])), x.dtype), x)[0]
        logits = (h @ params["write"] + params["write bias"])[:, 0]
        return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, odd)), logits

    return Start(params, lambda: problems.xor_sequences(draws), nats, fixed)


STARTS: dict[str, Callable[[int], Start]] = {
    "digits": functools.partial(autoencoder, data=problems.digits),
    "curves": functools.partial(autoencoder, data=problems.curves),
    "poisson": poisson,
    "xor": delayed_xor,
}
DOUBLE = ("poisson",)  # problems in float64


# ---- contenders ----------------------------------------------------------------------------------


def contender(name: str, build: Callable[[Start], Built], grid: Grid) -> Contender:
    """One compilation serves all points of the grid and all seeds."""
    ready: list[tuple[Built, Any]] = []  # after the first run has begun

    def begin(seed: int, **point: float) -> Training:
        jax.config.update("jax_enable_x64", name in DOUBLE)
        tuned = {key: jnp.asarray(value) for key, value in point.items()}
        compiling = 0.0
        if not ready:
            start = STARTS[name](seed)
            built = build(start)
            state = built.init(start.params, **point)
            began = time.perf_counter()
            jax.block_until_ready(built.step(_copy(start.params), state, start.draw(), tuned))
            compiling = time.perf_counter() - began
            ready.append((built, jax.jit(start.loss)))
        (init, step), loss = ready[0]
        start = STARTS[name](seed)
        now = [_copy(start.params), init(start.params, **point)]

        def draw(count: int) -> list[Tree]:
            return jax.block_until_ready([start.draw() for _ in range(count)])

        def take(minibatches: Sequence[Tree]) -> None:
            for minibatch in minibatches:
                now[:] = step(now[0], now[1], minibatch, tuned)
            jax.block_until_ready(now)

        def evaluate() -> float:
            return float(loss(now[0], start.fixed)[0]) - start.least

        return Training(draw, take, evaluate, compiling)

    return Contender(begin, grid)


def contenders(name: str, problem: Problem, *, variants: bool = False) -> dict[str, Contender]:
    def sgd(lr: Any, momentum: Any) -> Any:
        return optax.sgd(lr, momentum)

    def adamw(lr: Any, b2: Any) -> Any:
        return optax.adamw(lr, b2=b2, weight_decay=0.0)

    def ours(**settings: Any) -> Contender:
        def make(lr: Any, b1: Any) -> Any:
            return kron(lr, b1=b1, **settings)

        return contender(name, functools.partial(plain, make), kron_grid(problem))

    def layers(**settings: Any) -> Contender:
        settings |= {"compute_method": "inverse", "inv_update_steps": 5}
        return contender(name, functools.partial(captured, settings), kfac_grid(problem))

    found = {
        "SGD": contender(name, functools.partial(plain, sgd), sgd_grid(problem)),
        "AdamW": contender(name, functools.partial(plain, adamw), adam_grid(problem)),
        "Kron": ours(),
        "Kron, every 5": ours(preconditioner_update_probability=0.2),
        "K-FAC": layers(),
        "K-FAC, every 5": layers(factor_update_steps=5),
        "K-FAC, adaptive": contender(name, adapted, {"damping": (0.1,)}),  # nothing to tune
    }
    if variants:
        found |= {label: ours(**settings) for label, settings in KRON_VARIANTS.items()}
    return found


def plain(make: Callable[..., Any], start: Start) -> Built:
    """An optax optimizer, made of hyperparameters that are arguments of the step."""

    def step(params: Tree, state: Tree, batch: Tree, tuned: dict[str, Any]) -> tuple[Tree, Tree]:
        grads, _ = jax.grad(start.loss, has_aux=True)(params, batch)
        updates, state = make(**tuned).update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return Built(lambda params, **point: make(**point).init(params), _jit(step))


def captured(settings: dict[str, Any], start: Start) -> Built:
    """K-FAC, with statistics only in those steps that use them."""
    vag = value_and_grad(start.loss, has_aux=True)
    plan = vag.plan(start.params, start.draw())
    every = settings.get("factor_update_steps", 1)

    def make(damping: Any, lr: Any = 0.1, kl_clip: Any = 0.001) -> Any:
        return kfac(plan, lr, damping=damping, kl_clip=kl_clip, **settings)

    def step(params: Tree, state: Tree, batch: Tree, tuned: dict[str, Any]) -> tuple[Tree, Tree]:
        due = every == 1 or state.preconditioner.steps % every == 0
        _, grads, statistics = vag(params, batch, capture=due)
        updates, state = make(**tuned).update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state

    return Built(lambda params, **point: make(**point).init(params), _jit(step))


def adapted(start: Start) -> Built:
    """K-FAC that finds learning rate, momentum and damping itself."""
    vag = value_and_grad(start.loss, has_aux=True)
    plan = vag.plan(start.params, start.draw())
    make = functools.partial(adaptive_kfac, plan, compute_method="inverse", inv_update_steps=5)

    def step(params: Tree, state: Tree, batch: Tree, tuned: dict[str, Any]) -> tuple[Tree, Tree]:
        _, grads, statistics = vag(params, batch)
        updates, state = make(**tuned).update(
            grads, state, params, statistics=statistics, value_fn=lambda p: start.loss(p, batch)
        )
        return optax.apply_updates(params, updates), state

    return Built(lambda params, **point: make(**point).init(params), _jit(step))


# ---- peers ---------------------------------------------------------------------------------------


def peers(name: str, problem: Problem) -> dict[str, Contender]:
    def theirs(lr: Any, b1: Any) -> Any:
        from distributed_kron import kron as peer

        return peer(lr, b1=b1)

    def muon(lr: Any, momentum: Any) -> Any:
        from optax.contrib import muon as peer

        return peer(lr, beta=momentum, consistent_rms=0.2)  # torch's "match_rms_adamw"

    return {
        "optax.contrib.muon": contender(name, functools.partial(plain, muon), muon_grid(problem)),
        "distributed_kron": contender(name, functools.partial(plain, theirs), kron_grid(problem)),
        "kfac-jax": contender(name, functools.partial(kfac_jax, name), kfac_grid(problem)),
    }


def kfac_jax(name: str, start: Start) -> Built:
    """As ours: empirical Fisher, inverses every 5 steps. It jits its own steps, one for every bound."""
    import kfac_jax as peer

    def registered(params: Tree, batch: Tree) -> jax.Array:
        if name not in ("digits", "curves"):
            raise NotImplementedError(f"no outputs to register in the loss of {name}")
        loss, logits = start.loss(params, batch)
        peer.register_multi_bernoulli_predictive_distribution(logits, batch)
        return loss

    @functools.cache
    def optimizer(kl_clip: float) -> Any:
        return peer.Optimizer(
            jax.value_and_grad(registered),
            l2_reg=0.0,
            momentum_schedule=lambda t: 0.9,
            norm_constraint=kl_clip,
            num_burnin_steps=0,
            estimation_mode="fisher_empirical",
            inverse_update_period=5,
        )

    key, batch = jax.random.PRNGKey(0), start.draw()

    def init(params: Tree, kl_clip: float, damping: float) -> Tree:
        return optimizer(kl_clip).init(_copy(params), key, batch)

    def step(params: Tree, state: Tree, batch: Tree, tuned: dict[str, Any]) -> tuple[Tree, Tree]:
        given = {"learning_rate": jnp.asarray(0.1), "damping": tuned["damping"], "batch": batch}
        return optimizer(float(tuned["kl_clip"])).step(params, state, key, **given)[:2]

    return Built(init, step)


def _jit(step: Callable[..., Any]) -> Any:
    return jax.jit(step, donate_argnums=(0, 1))


def _copy(tree: Tree) -> Tree:
    """Steps donate what they are given."""
    return jax.tree.map(jnp.copy, tree)


def prepare() -> dict[str, str]:
    """Versions."""
    return versions("jax", "jaxlib", "optax", "distributed_kron", "kfac-jax")
