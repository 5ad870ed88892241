"""torch, JAX and NumPy follow one trajectory: 100 steps of K-FAC, 200 of Kron, then compared.

In float64 the frameworks' rounding differs by 1e-16 an operation; 1e-9 leaves room for what 200 steps of
an unstable iteration make of it. In float32 the same room is 1e-7 -> 2e-3 (measured: 1.4e-4 at most).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import networks
import numpy as np
import optax
import pytest
import torch

from suite.core import blocks, moments, noise, schedules, statistics
from suite.core import kfac as core_kfac
from suite.core import kron as core_kron
from suite.core.linalg import inner_product
from suite.core.step_size import kl_clip_coefficient, rms_clip
from suite.jax import adaptive_kfac, dense_newton, eigenbases, kfac, kron, lra, value_and_grad
from suite.torch import KFAC, LRA, AdaptiveKFAC, DenseNewton, Kron

pytestmark = pytest.mark.slow

STEPS, KRON_STEPS = 100, 200
NETWORKS = {"mlp": networks.mlp, "cnn": networks.cnn}
KFAC_NETWORKS = {
    **NETWORKS,
    "attention": networks.attention,
    "tied": networks.tied,
    "scanned": networks.scanned,
    "experts": networks.experts,
    "routed": networks.routed,
    "operator": networks.operator,
    "decoder": networks.decoder,
}
KFAC_SETTINGS = {"damping": 0.01, "factor_update_steps": 3, "inv_update_steps": 7}
KRON_SETTINGS = {
    "preconditioner_lr": 0.1,  # longer steps amplify rounding errors
    "weight_decay": 0.01,
    "preconditioner_update_probability": 0.4,
    "block_size": 5,  # several blocks, ragged
}


def assert_same(first: list[np.ndarray], second: list[np.ndarray], rtol: float) -> None:
    for a, b in zip(first, second, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(a).max())


def moved(network: networks.Network, weights: list[np.ndarray]) -> bool:
    """Whether training did something: agreement of two runs that stand still proves nothing."""
    return all(np.abs(a - b).max() > 1e-2 for a, b in zip(network.weights, weights, strict=True))


def jax_kfac_trajectory(network, dtype, **settings):
    weights, x, y = networks.jax_arguments(network, dtype)
    vag = value_and_grad(networks.jax_loss(network))
    plan = vag.plan(weights, x, y)
    tx = kfac(plan, 0.05, **KFAC_SETTINGS, **settings)
    state = jax.jit(tx.init)(weights)
    measures = settings["compute_method"] == "ekfac"

    @jax.jit
    def step(weights, state):
        bases = eigenbases(state, plan) if measures else None
        _, grads, statistics = vag(weights, x, y, bases=bases)
        updates, state = tx.update(grads, state, weights, statistics=statistics)
        return optax.apply_updates(weights, updates), state

    for _ in range(STEPS):
        weights, state = step(weights, state)
    return network.from_jax([np.asarray(w) for w in weights])


def jax_kron_trajectory(network, dtype, steps=KRON_STEPS, **settings):
    weights, x, y = networks.jax_arguments(network, dtype)
    tx = kron(0.01, **KRON_SETTINGS, **settings)
    state = jax.jit(tx.init)(weights)

    @jax.jit
    def step(weights, state):
        grads = jax.grad(networks.jax_loss(network))(weights, x, y)
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    for _ in range(steps):
        weights, state = step(weights, state)
    return [np.asarray(w) for w in weights]


METHODS = ["eigen", "inverse", "newton_schulz", "ekfac"]
PRECISIONS = [("float64", 1e-9), ("float32", 2e-3)]


@pytest.mark.parametrize(
    ("name", "dtype", "rtol"),
    [(name, *PRECISIONS[0]) for name in KFAC_NETWORKS]
    + [(name, *PRECISIONS[1]) for name in ("cnn", "experts")],
)
@pytest.mark.parametrize("compute_method", METHODS)
def test_kfac(name, compute_method, dtype, rtol):
    network = KFAC_NETWORKS[name]()
    ours = networks.torch_trajectory(
        network,
        lambda model: KFAC(
            model,
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            compute_method=compute_method,
            **KFAC_SETTINGS,
        ),
        STEPS,
        getattr(torch, dtype),
    )
    assert moved(network, ours)
    if compute_method == "ekfac" and dtype == "float32":
        rtol *= 5  # its second moments are those of directions that rounding turns
    assert_same(ours, jax_kfac_trajectory(network, dtype, compute_method=compute_method), rtol)


class _Standardized(torch.nn.Linear):
    def forward(self, x):
        deviation, mean = torch.std_mean(self.weight, 1, keepdim=True, correction=0)
        return torch.nn.functional.linear(x, (self.weight - mean) / deviation)


CHANGED = {
    "weight norm": (
        lambda i, o: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(i, o, bias=False)),
        lambda w: w / jnp.linalg.norm(w, axis=0),
    ),
    "standardized": (
        lambda i, o: _Standardized(i, o, bias=False),
        lambda w: (w - jnp.mean(w, 0)) / jnp.std(w, 0),
    ),
}


@pytest.mark.parametrize("compute_method", ["eigen", "inverse"])
@pytest.mark.parametrize("kind", CHANGED)
def test_kfac_of_weights_that_are_changed_by_their_norms(kind, compute_method):
    make, kernel = CHANGED[kind]
    rng = np.random.default_rng(3)
    x, sizes = rng.normal(size=(16, 5)), ((5, 6), (6, 4))
    weights = [rng.normal(size=s) for s in sizes]
    settings = {**KFAC_SETTINGS, "compute_method": compute_method}

    model = torch.nn.Sequential(make(*sizes[0]), torch.nn.Tanh(), make(*sizes[1])).double()
    moving = []
    for name, parameter in model.named_parameters():
        if name.endswith("original0"):  # magnitudes
            parameter.requires_grad_(False).fill_(1.0)
        else:
            moving.append(parameter)
    with torch.no_grad():
        for parameter, weight in zip(moving, weights, strict=True):
            parameter.copy_(torch.from_numpy(weight.T))
    optimizer = KFAC(model, torch.optim.SGD(moving, lr=0.05, momentum=0.9), **settings)
    for _ in range(30):
        optimizer.zero_grad()
        (model(torch.from_numpy(x)) - 1).square().sum(1).mean().backward()
        optimizer.step()
    ours = [p.detach().numpy().T for p in moving]
    assert all(np.abs(a - b).max() > 1e-2 for a, b in zip(weights, ours, strict=True))

    def loss_fn(weights, x):
        first, second = map(kernel, weights)
        return jnp.mean(jnp.sum((jnp.tanh(x @ first) @ second - 1) ** 2, 1))

    weights = [jnp.asarray(w) for w in weights]
    vag = value_and_grad(loss_fn)
    tx = kfac(vag.plan(weights, x), 0.05, **settings)
    state = jax.jit(tx.init)(weights)

    @jax.jit
    def step(weights, state):
        _, grads, statistics = vag(weights, x)
        updates, state = tx.update(grads, state, weights, statistics=statistics)
        return optax.apply_updates(weights, updates), state

    for _ in range(30):
        weights, state = step(weights, state)
    assert_same(ours, [np.asarray(w) for w in weights], 1e-9)


@pytest.mark.parametrize("compute_method", ["eigen", "inverse", "ekfac"])
@pytest.mark.parametrize("values", ["shared", "again", ""], ids=lambda kind: kind or "none")
def test_kfac_of_derivatives(values, compute_method):
    """Second derivatives by the inputs beside a term without any; 30 steps, they are rough.

    Beside their values, which JAX shares with derivatives or computes again; or without.
    """
    rng = np.random.default_rng(6)
    sizes, settings = ((5, 3), (4, 5), (1, 4)), {**KFAC_SETTINGS, "compute_method": compute_method}
    weights = [(rng.normal(size=s) / np.sqrt(s[1]), rng.normal(size=s[0])) for s in sizes]
    given = [rng.normal(size=s) for s in ((6, 3), (6, 1), (6, 3), (4, 3))]

    layers = [m for o, i in sizes for m in (torch.nn.Linear(i, o), torch.nn.Tanh())][:-1]
    model = torch.nn.Sequential(*layers).double()
    flat = [w for pair in weights for w in pair]
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), flat, strict=True):
            parameter.copy_(torch.from_numpy(weight))
    x, along, direction, boundary = map(torch.from_numpy, given)
    x.requires_grad_()
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = KFAC(model, base, **settings)
    for _ in range(30):
        optimizer.zero_grad()
        y = model(x)
        (slopes,) = torch.autograd.grad(y, x, along, create_graph=True)
        (bends,) = torch.autograd.grad(slopes, x, direction, create_graph=True)
        loss = ((bends * direction).sum(1) - 0.3).square().mean() + model(boundary).square().mean()
        (loss + y.square().mean() if values else loss).backward()
        optimizer.step()
    ours = [p.detach().numpy() for p in model.parameters()]
    assert all(np.abs(a - b).max() > 1e-2 for a, b in zip(flat[:-1], ours[:-1], strict=True))

    def network(weights, x):
        for w, b in weights[:-1]:
            x = jnp.tanh(x @ w.T + b)
        return x @ weights[-1][0].T + weights[-1][1]

    def loss_fn(weights, x, along, direction, boundary):
        def slopes(x):
            y, pull = jax.vjp(lambda x: network(weights, x), x)
            return pull(along)[0], y

        _, pull, y = jax.vjp(slopes, x, has_aux=True)
        if values == "again":
            y = network(weights, x)
        second = jnp.sum(pull(direction)[0] * direction, 1)
        loss = jnp.mean((second - 0.3) ** 2) + jnp.mean(network(weights, boundary) ** 2)
        return loss + jnp.mean(y**2) if values else loss

    vag = value_and_grad(loss_fn)
    weights = jax.tree.map(jnp.asarray, weights)
    plan = vag.plan(weights, *given)
    tx = kfac(plan, 0.05, **settings)
    state = jax.jit(tx.init)(weights)

    @jax.jit
    def step(weights, state):
        bases = eigenbases(state, plan) if compute_method == "ekfac" else None
        _, grads, statistics = vag(weights, *given, bases=bases)
        updates, state = tx.update(grads, state, weights, statistics=statistics)
        return optax.apply_updates(weights, updates), state

    for _ in range(30):
        weights, state = step(weights, state)
    assert_same(ours, [np.asarray(w) for w in jax.tree.leaves(weights)], 1e-9)


@pytest.mark.parametrize("name", ["mlp", "cnn", "attention"])
def test_adaptive_kfac(name):
    """Until the loss of the one batch is at rounding, where damping follows rounding errors."""
    network, settings = KFAC_NETWORKS[name](), {"damping": 1.0, "inv_update_steps": 5}
    model, _ = networks.torch_model(network, torch.float64)
    x, y = torch.from_numpy(network.x), torch.from_numpy(network.y)
    optimizer = AdaptiveKFAC(KFAC(model, **settings))

    def closure():
        logits = model(x)
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten()), logits

    for _ in range(20):
        optimizer.step(closure)
    ours = [p.detach().numpy() for p in model.parameters()]
    assert moved(network, ours)
    weights, x, y = networks.jax_arguments(network, "float64")

    def loss_fn(weights):
        logits = network.jax_apply(weights, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.reshape(y.size, -1), y.ravel())
        return jnp.mean(losses), logits

    vag = value_and_grad(loss_fn, has_aux=True)
    tx = adaptive_kfac(vag.plan(weights), **settings)
    state = tx.init(weights)

    @jax.jit
    def step(weights, state):
        _, grads, statistics = vag(weights)
        updates, state = tx.update(grads, state, weights, statistics=statistics, value_fn=loss_fn)
        return optax.apply_updates(weights, updates), state

    for _ in range(20):
        weights, state = step(weights, state)
    assert_same(ours, network.from_jax([np.asarray(w) for w in weights]), 1e-9)
    np.testing.assert_allclose(optimizer.damping, state.damping)
    for name in ("learning_rate", "momentum", "reduction_ratio"):
        np.testing.assert_allclose(optimizer.metrics()[name], getattr(state, name), rtol=1e-6)


@pytest.mark.parametrize(
    ("geometry", "dtype", "steps", "rtol"),
    [(g, "float64", KRON_STEPS, 1e-9) for g in ("Q0.5EQ1.5", "QEQ", "QUAD", "EQ")]
    # Later the convolutions' loss is nearly zero, and rounding errors of float32 grow a thousandfold.
    + [("Q0.5EQ1.5", "float32", 100, 1e-5)],
)
@pytest.mark.parametrize("name", NETWORKS)
def test_kron(name, geometry, dtype, steps, rtol):
    network = NETWORKS[name]()
    ours = networks.torch_trajectory(
        network,
        lambda model: Kron(model.parameters(), lr=0.01, geometry=geometry, **KRON_SETTINGS),
        steps,
        getattr(torch, dtype),
    )
    assert moved(network, ours)
    assert_same(ours, jax_kron_trajectory(network, dtype, steps, geometry=geometry), rtol)


# Settings of Kron, each on a path of its own through both adapters.
KRON_OPTIONS = {
    "gradient": {"whiten": "gradient"},
    "factors of every block": {"shared_factors": False},
    "update after": {"update_first": False},
    "update after, scaled": {"update_first": False, "preconditioner_init_scale": None},
    "clip": {"clip": (0.8, 1.5)},
    "unbounded": {"clip": None, "preconditioner_init_scale": None},
    "normalize": {"normalize_grads": True},
    "skew": {"max_skew": 1.0},
    "QEP": {"geometry": "QEP"},
    "PRO4P": {"geometry": "PRO4P"},
    "QUAD4P": {"geometry": "QUAD4P"},
    "smoothness": {"betaL": 0.5, "damping": 1e-4},
    "default lr": {"preconditioner_lr": None},
}


@pytest.mark.parametrize("option", KRON_OPTIONS)
def test_options_of_kron(option):
    settings = {**KRON_SETTINGS, **KRON_OPTIONS[option]}
    # Long steps amplify rounding errors: by 1e5 within the first 30 at the default.
    steps = 20 if option == "default lr" else KRON_STEPS
    network = networks.mlp()
    ours = networks.torch_trajectory(
        network, lambda model: Kron(model.parameters(), lr=0.005, **settings), steps, torch.float64
    )
    assert moved(network, ours)
    theirs = jax_trajectory(network, kron(0.005, **settings), steps)
    assert_same(ours, theirs, 1e-9)


def jax_trajectory(network, tx, steps, dtype="float64", newton=False):
    weights, x, y = networks.jax_arguments(network, dtype)
    state = jax.jit(tx.init)(weights)

    @jax.jit
    def step(weights, state):
        def value_fn(values):
            return networks.jax_loss(network)(values, x, y)

        extra = {"value_fn": value_fn} if newton else {}
        updates, state = tx.update(jax.grad(value_fn)(weights), state, weights, **extra)
        return optax.apply_updates(weights, updates), state

    for _ in range(steps):
        weights, state = step(weights, state)
    return [np.asarray(w) for w in weights]


@pytest.mark.parametrize("geometry", ["Q0.5EQ1.5", "EQ", "QUAD4P"])
def test_kron_newton(geometry):
    network = networks.mlp()
    settings = {**KRON_SETTINGS, "geometry": geometry}
    model, loss_fn = networks.torch_model(network, torch.float64)
    optimizer = Kron(model.parameters(), lr=0.005, hvp="exact", **settings)
    for _ in range(KRON_STEPS):
        optimizer.step(loss_fn)
    ours = [p.detach().numpy() for p in model.parameters()]
    assert moved(network, ours)
    theirs = jax_trajectory(network, kron(0.005, **settings), KRON_STEPS, newton=True)
    assert_same(ours, theirs, 1e-9)


# Torch's optimizer, JAX's, and whether they are given the loss.
VECTORS = {
    "lra": (LRA, lra, {"lr": 0.005, "rank": 3}, False),
    "diagonal": (LRA, lra, {"lr": 0.005, "rank": 0, "whiten": "gradient"}, False),
    "lra newton": (LRA, lra, {"lr": 0.005, "rank": 3}, True),
    "dense newton": (DenseNewton, dense_newton, {"lr": 0.01, "clip": 1.0}, True),
}


@pytest.mark.parametrize("name", VECTORS)
def test_one_preconditioner_for_all_parameters(name):
    of_torch, of_jax, settings, newton = VECTORS[name]
    settings = {**settings, "weight_decay": 0.01, "preconditioner_lr": 0.1}
    settings |= {"preconditioner_update_probability": 0.4}
    network = networks.mlp()
    model, loss_fn = networks.torch_model(network, torch.float64)
    optimizer = of_torch(model.parameters(), hvp="exact" if newton else None, **settings)
    for _ in range(KRON_STEPS):
        if newton:
            optimizer.step(loss_fn)
            continue
        optimizer.zero_grad()
        loss_fn().backward()
        optimizer.step()
    ours = [p.detach().numpy() for p in model.parameters()]
    assert moved(network, ours)
    settings["learning_rate"] = settings.pop("lr")
    theirs = jax_trajectory(network, of_jax(**settings), KRON_STEPS, newton=newton)
    assert_same(ours, theirs, 1e-9)


def test_bfloat16_state_rounded_by_chance():
    """The same neighbours are chosen; products of bfloat16 numbers then differ in float32 rounding."""
    network = networks.mlp()
    settings = {**KRON_SETTINGS, "stochastic_rounding": True}
    ours = networks.torch_trajectory(
        network,
        lambda model: Kron(
            model.parameters(),
            lr=0.01,
            mu_dtype=torch.bfloat16,
            precond_dtype=torch.bfloat16,
            **settings,
        ),
        STEPS // 5,
        torch.float64,
    )
    tx = kron(0.01, mu_dtype="bfloat16", precond_dtype="bfloat16", **settings)
    assert_same(ours, jax_trajectory(network, tx, STEPS // 5), 1e-2)


# ---- the same in NumPy, layer by layer, with no bucket and no framework --------------------------


def numpy_backward(weights, x, y):
    """Inputs of every layer and gradients of its outputs, for the mean cross-entropy of `mlp`."""
    inputs, a = [], x
    for i in range(0, len(weights), 2):
        inputs.append(a)
        s = a @ weights[i].T + weights[i + 1]
        a = np.tanh(s) if i + 2 < len(weights) else s
    probabilities = np.exp(a - a.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    g = (probabilities - np.eye(a.shape[1])[y]) / len(y)
    outputs = [g]
    for i in range(len(weights) - 2, 0, -2):
        g = (g @ weights[i]) * (1 - inputs[i // 2] ** 2)
        outputs.insert(0, g)
    return inputs, outputs


@pytest.mark.parametrize("compute_method", ["eigen", "inverse"])
def test_kfac_in_numpy(compute_method):
    network = networks.mlp()
    weights = [w.copy() for w in network.weights]
    rule = core_kfac.KFAC(compute_method)
    states = [rule.init(w, (1,), (w.shape[1] + 1, w.shape[0])) for w in weights[::2]]
    momentum = [np.zeros_like(w) for w in weights]
    terms = np.asarray(float(len(network.y)))
    for step in range(STEPS):
        inputs, outputs = numpy_backward(weights, network.x, network.y)
        gradients, directions = [], []
        for i, (a, g) in enumerate(zip(inputs, outputs, strict=True)):
            gradients.append(np.concatenate([g.T @ a, g.sum(0)[:, None]], 1)[None])
            if step % 3 == 0:
                sums = statistics.LayerStatistics(
                    statistics.second_moment_sum(a[None], bias=True),
                    statistics.second_moment_sum(g[None]),
                    terms,
                )
                A, G = statistics.normalize(sums, terms, "mean")
                states[i] = rule.update(states[i], A, G, np.ones(1, bool), 0.95)
            if step % 7 == 0:
                states[i] = rule.refresh(states[i], 0.01)
            directions.append(rule.precondition(states[i], gradients[i], 0.01))
        inner = sum(inner_product(d, g) for d, g in zip(directions, gradients, strict=True))
        coefficient = kl_clip_coefficient(0.05**2 * inner, 0.001)
        for i, direction in enumerate(directions):
            for j, part in ((2 * i, direction[0, :, :-1]), (2 * i + 1, direction[0, :, -1])):
                momentum[j] = 0.9 * momentum[j] + coefficient * part
                weights[j] = weights[j] - 0.05 * momentum[j]
    assert moved(network, weights)
    assert_same(weights, jax_kfac_trajectory(network, "float64", compute_method=compute_method), 1e-9)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("geometry", ["Q0.5EQ1.5", "EQ"])
def test_kron_in_numpy(geometry, shared):
    network = networks.mlp()
    weights = [w.copy() for w in network.weights]
    rule = core_kron.Kron(geometry)
    structure = blocks.Structure(block_size=5, shared_factors=shared)
    plans = [blocks.plan_blocks(w.shape, structure) for w in weights]
    states: list[list[core_kron.KronState]] = [
        [
            rule.init(w, (plan.tile_blocks(t), *t.sizes), plan.diagonal, t.diagonal_blocks)
            for t in plan.tiles
        ]
        for w, plan in zip(weights, plans, strict=True)
    ]
    momentum, evidence, clock = [np.zeros_like(w) for w in weights], np.asarray(0.0), 1.0
    for step in range(1, KRON_STEPS + 1):
        inputs, outputs = numpy_backward(weights, network.x, network.y)
        gradients = [x for a, g in zip(inputs, outputs, strict=True) for x in (g.T @ a, g.sum(0))]
        due, clock = schedules.advance_clock(clock, 0.4)
        evidence = moments.update_average(evidence, np.asarray(1.0), 0.9)
        for i, plan in enumerate(plans):
            momentum[i] = moments.update_average(momentum[i], gradients[i], 0.9)
            signals = blocks.split(plan, moments.unbiased(momentum[i], evidence))
            streams = np.asarray(noise.stream_numbers(i, plan.blocks), np.int32)
            first, directions = 0, []
            for j, signal in enumerate(signals):
                own = streams[first : first + len(signal)]
                first += len(signal)
                if due:
                    unit = noise.unit_noise(own, step, signal.shape[1:], np.float64)
                    states[i][j] = rule.refresh(rule.update(states[i][j], signal, unit, 0.1))
                direction = rule.precondition(states[i][j], signal)
                directions.append(rms_clip(direction, 1.1, signal.ndim - 1))
            weights[i] = weights[i] - 0.01 * (blocks.merge(plan, directions) + 0.01 * weights[i])
    assert moved(network, weights)
    settings = {"geometry": geometry, "shared_factors": shared}
    assert_same(weights, jax_kron_trajectory(network, "float64", **settings), 1e-9)
