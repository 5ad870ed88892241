"""K-FAC in JAX, in loops that do anything in any order, against its equations in NumPy.

The reference keeps sums, averages and inverses as in Martens & Grosse 2015 (arXiv:1503.05671), sections
3, 5 and 6.3. Settings are functions that read a dictionary, so that each program is compiled once.
"""

from __future__ import annotations

import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from jax import lax

from suite.jax import kfac, value_and_grad

SIZES = (2, 5)
MOMENTUM, WEIGHT_DECAY = 0.5, 0.1
PERIODS = {"factor_update_steps": 1, "inv_update_steps": 1}
START = {"learning_rate": 0.1, "damping": 0.01, "kl_clip": 0.001, "factor_decay": 0.7, **PERIODS}
NOW = dict(START)  # what the settings of all optimizers are
LAYERS = ("body", "twice", "norm", "stack 0", "stack 1", "head")
SHARE = ("gate", "expert")  # one input, and one split of the damping


def start(seed: int) -> dict[str, jax.Array]:
    dice = np.random.default_rng(seed)
    shapes = {"body": (3, 4), "head": (4, 2), "stack": (2, 4, 4), "stack_bias": (2, 4)}
    shapes |= dict.fromkeys(("twice", *SHARE), (4, 4))
    shapes |= dict.fromkeys(("body_bias", "twice_bias", "scale", "shift", "slope"), (4,))
    return {name: jnp.asarray(0.5 * dice.normal(size=shape)) for name, shape in shapes.items()}


def loss_fn(p: Any, x: jax.Array, expert: jax.Array) -> jax.Array:
    """A layer that runs twice, two in a scan, a norm, an expert that runs in some passes."""

    def twice(h: jax.Array) -> jax.Array:
        return jnp.tanh(h @ p["twice"] + p["twice_bias"])

    def run_expert(h: jax.Array) -> jax.Array:
        return h + jax.nn.sigmoid(h @ p["gate"]) * jnp.tanh(h @ p["expert"])

    h = jnp.tanh(x @ p["body"] + p["body_bias"])
    h = twice(jax.checkpoint(twice)(h)) * p["scale"] + p["shift"]
    stack = p["stack"], p["stack_bias"]
    h, _ = lax.scan(lambda h, w: (jnp.tanh(jnp.einsum("io,ni->no", w[0], h) + w[1]), None), h, stack)
    h = lax.cond(expert, run_expert, lambda h: h, h * jax.nn.softplus(p["slope"]))
    return jnp.mean(jnp.sum(jnp.square(jax.vmap(lambda row: row @ p["head"])(h)), -1))


@jax.jit
def layer_by_layer(p: Any, x: jax.Array) -> Any:
    """Each layer's inputs and gradients, without and with the expert."""
    inputs: dict[str, list[jax.Array]] = {}

    def loss(zeros: Any) -> Any:
        inputs.clear()

        def layer(name: str, x: jax.Array, w: jax.Array, b: jax.Array | None = None) -> jax.Array:
            calls = inputs.setdefault(name, [])
            calls.append(x)
            y = x @ w + zeros[name][len(calls) - 1]
            return y if b is None else y + b

        h = jnp.tanh(layer("body", x, p["body"], p["body_bias"]))
        for _ in range(2):
            h = jnp.tanh(layer("twice", h, p["twice"], p["twice_bias"]))
        inputs["norm"] = [h]
        h = h * p["scale"] + p["shift"] + zeros["norm"][0]
        for i in range(2):
            h = jnp.tanh(layer(f"stack {i}", h, p["stack"][i], p["stack_bias"][i]))
        h = h * jax.nn.softplus(p["slope"])
        if "gate" in zeros:
            gate, expert = (layer(name, h, p[name]) for name in SHARE)
            h = h + jax.nn.sigmoid(gate) * jnp.tanh(expert)
        return jnp.mean(jnp.sum(jnp.square(layer("head", h, p["head"])), -1)), dict(inputs)

    def of(names: tuple[str, ...]) -> Any:
        zeros = {name: [jnp.zeros((len(x), 2 if name == "head" else 4))] * 2 for name in names}
        gradients, seen = jax.grad(loss, has_aux=True)(zeros)
        return {name: (xs, gradients[name]) for name, xs in seen.items()}

    return of(LAYERS), of((*LAYERS, *SHARE))


def sums_of(seen: Any) -> dict[str, Any]:
    """What layers saw: how many rows, Σ a aᵀ and Σ g gᵀ; of the norm I and Σ z zᵀ of each channel."""
    found = {}
    for name, (inputs, gradients) in seen.items():
        a, g = (np.concatenate([np.asarray(x) for x in xs[: len(inputs)]]) for xs in (inputs, gradients))
        if name == "norm":
            z = np.stack([a * g, g], -1)
            found[name] = len(z), np.eye(2), np.einsum("ncu,ncv->cuv", z, z)
        else:
            biased = name not in (*SHARE, "head")
            a = np.concatenate([a, np.ones((len(a), 1))], 1) if biased else a
            found[name] = len(a), a.T @ a, g.T @ g
    return found


def matrices(tree: Any) -> dict[str, Any]:
    """Of each layer (d_out, d_in), of the norm (channels, 2)."""
    t = {name: np.asarray(x) for name, x in tree.items()}
    found = {name: np.vstack([t[name], t[f"{name}_bias"]]).T for name in ("body", "twice")}
    found |= {f"stack {i}": np.vstack([t["stack"][i], t["stack_bias"][i]]).T for i in range(2)}
    found |= {name: t[name].T for name in (*SHARE, "head")}
    return found | {"norm": np.stack([t["scale"], t["shift"]], -1)}


def leaves(found: dict[str, Any]) -> dict[str, Any]:
    """Undo `matrices`."""
    stack = np.stack([found["stack 0"].T, found["stack 1"].T])
    given = {"stack": stack[:, :-1], "stack_bias": stack[:, -1]}
    given |= {name: found[name].T for name in (*SHARE, "head")}
    for name in ("body", "twice"):
        given |= {name: found[name].T[:-1], f"{name}_bias": found[name].T[-1]}
    return given | {"scale": found["norm"][:, 0], "shift": found["norm"][:, 1]}


class Reference:
    """What K-FAC should do; the momentum is over directions with weight decay."""

    def __init__(self, method: str, params: Any) -> None:
        self.method, self.pending = method, False
        self.steps = self.skipped_steps = self.missed_updates = 0
        self.average: dict[str, Any] = {}
        self.refreshed: dict[str, Any] = {}
        self.momentum = {name: np.zeros(x.shape) for name, x in params.items()}

    def step(self, params: Any, gradients: Any, sums: Any, terms: float) -> dict[str, Any]:
        """Directions, from `sums` of what layers saw, or None."""
        due = self.steps % NOW["factor_update_steps"] == 0
        self.missed_updates += due and self.pending
        wanted = due or self.pending
        first = self.pending and sums and not self.refreshed
        if wanted and sums:
            for name, (rows, A, G) in sums.items():
                decay, new = NOW["factor_decay"], (A / rows, G * terms, 1)
                both = zip(self.average.get(name, (0, 0, 0)), new, strict=True)
                self.average[name] = tuple(decay * x + (1 - decay) * y for x, y in both)
        self.pending = wanted and not sums
        if first or self.steps % NOW["inv_update_steps"] == 0:
            pairs = self.average.items()
            self.refreshed = {name: (A / w, G / w, NOW["damping"]) for name, (A, G, w) in pairs}
        self.steps += 1
        given = matrices(gradients)
        found = {name: self._direction(name, g) for name, g in given.items()}
        change = NOW["learning_rate"] ** 2 * sum((found[name] * g).sum() for name, g in given.items())
        factor = min(1, (NOW["kl_clip"] / max(change, 1e-300)) ** 0.5)
        moved = leaves({name: factor * x for name, x in found.items()}) | {"slope": gradients["slope"]}
        for name, direction in moved.items():
            decayed = np.asarray(direction) + WEIGHT_DECAY * np.asarray(params[name])
            self.momentum[name] = MOMENTUM * self.momentum[name] + decayed
        return {name: -NOW["learning_rate"] * x for name, x in self.momentum.items()}

    def _direction(self, name: str, gradient: Any) -> Any:
        if name not in self.refreshed:
            return gradient
        A, G, damping = self.refreshed[name]
        damping = NOW["damping"] if self.method == "eigen" else damping
        if name == "norm":
            return np.linalg.solve(G + damping * np.eye(2), gradient[..., None])[..., 0]
        if self.method == "eigen":
            dense = np.kron(G, A) + damping * np.eye(gradient.size)
            return np.linalg.solve(dense, gradient.ravel()).reshape(gradient.shape)
        means = [np.trace(self.refreshed[x][1]) / len(G) for x in (SHARE if name in SHARE else (name,))]
        root, ratio = damping**0.5, (np.trace(A) / len(A) / np.mean(means)) ** 0.5
        damped_A, damped_G = A + ratio * root * np.eye(len(A)), G + root / ratio * np.eye(len(G))
        return np.linalg.solve(damped_G, gradient) @ np.linalg.inv(damped_A)


@functools.cache
def programs(method: str) -> Any:
    """What gives statistics and what takes them, each compiled once."""
    vag = value_and_grad(loss_fn, plain=["['slope']"])
    now: dict[str, Any] = {name: lambda _, name=name: NOW[name] for name in START}
    now |= {"momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY, "compute_method": method}
    return jax.jit(vag), kfac(vag.plan(start(0), jnp.ones((SIZES[0], 3)), True), **now)


few, passes = st.integers(1, 3), st.lists(st.booleans(), min_size=1, max_size=3)
kinds = st.sampled_from(["captured", "captured", "of nothing", "none"])
spoils = st.sampled_from([None] * 6 + ["gradients", "statistics"])


class Loop(RuleBasedStateMachine):
    @initialize(inverts=st.booleans(), periods=st.tuples(few, few), seed=st.integers(0, 99))
    def start(self, inverts: bool, periods: tuple[int, int], seed: int) -> None:
        method = "inverse" if inverts else "eigen"
        self.vag, self.tx = programs(method)
        self.dice, self.params = np.random.default_rng(seed), start(seed)
        self.state, self.reference = self.tx.init(self.params), Reference(method, self.params)
        NOW.update(START, factor_update_steps=periods[0], inv_update_steps=periods[1])

    @rule(name=st.sampled_from([*START]), value=few)
    def set(self, name: str, value: int) -> None:
        NOW[name] = value if name.endswith("steps") else 0.01 * 4**value

    @rule()
    def go_on_with_another(self) -> None:
        self.state = jax.tree.map(jnp.array, pickle.loads(pickle.dumps(jax.device_get(self.state))))

    @rule(size=st.sampled_from(SIZES), experts=passes, given=kinds, spoiled=spoils)
    def step(self, size: int, experts: list[bool], given: str, spoiled: str | None) -> None:
        """Micro-batches of one size, in some of which the expert runs, whose results are averaged."""
        captures, results = given == "captured", []
        sums: dict[str, Any] = {}
        for expert in experts:
            x = jnp.asarray(self.dice.normal(size=(size, 3)))
            results.append(self.vag(self.params, x, expert, capture=captures)[1:])
            for name, own in sums_of(layer_by_layer(self.params, x)[expert]).items():
                pairs = zip(sums.get(name, (0, 0, 0)), own, strict=True)
                sums[name] = tuple(x + y for x, y in pairs)
        gradients, statistics = jax.tree.map(lambda *xs: sum(xs) / len(xs), *results)
        before, skips = self.state, spoiled == "gradients" or (spoiled and given != "none")
        gradients = self.spoil(gradients) if spoiled == "gradients" else gradients
        statistics = self.spoil(statistics) if spoiled == "statistics" else statistics
        extra = {"statistics": None if given == "none" else statistics}
        updates, self.state = self.tx.update(gradients, self.state, self.params, **extra)
        inner = self.state.preconditioner
        if skips:
            self.reference.skipped_steps += 1
            assert not any(np.any(x) for x in updates.values())
            kept, now = ((x.momentum, x.preconditioner.factors) for x in (before, self.state))
            jax.tree.map(np.testing.assert_array_equal, kept, now)
        else:
            terms = size / len(experts)  # N Σ g gᵀ of the mean of losses, whose g are smaller, N larger
            expected = self.reference.step(self.params, gradients, sums if captures else {}, terms)
            for name, x in updates.items():
                scale = 1e-7 * np.abs(expected[name]).max()
                np.testing.assert_allclose(x, expected[name], rtol=1e-6, atol=scale, err_msg=name)
        for name in ("steps", "skipped_steps", "missed_updates", "pending"):
            assert int(getattr(inner, name)) == getattr(self.reference, name), name
        self.params = {name: p + 0.1 * jnp.tanh(updates[name]) for name, p in self.params.items()}

    def spoil(self, tree: Any) -> Any:
        flat, treedef = jax.tree.flatten(tree)
        i = self.dice.integers(len(flat))
        flat[i] = flat[i].at[(-1,) * flat[i].ndim].set(float(self.dice.choice([np.nan, np.inf])))
        return jax.tree.unflatten(treedef, flat)


TestLoop = Loop.TestCase
TestLoop.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)
