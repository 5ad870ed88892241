"""Runs in a process of its own with 8 CPU devices: K-FAC's trajectories under every sharding.

    python many_devices.py CASE

Prints a JSON object.
"""

# ruff: noqa: E402 (devices are set up before anything else)
from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
devices = "--xla_force_host_platform_device_count=8"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_exchange import measured
from suite.core.placement import LayerShape, plan_placement
from suite.jax import (
    Bernoulli,
    Categorical,
    Gaussian,
    adaptive_kfac,
    dense_newton,
    eigenbases,
    kfac,
    kron,
    lra,
    scale_by_kfac,
    scale_by_kron,
    state_specs,
    value_and_grad,
    verify,
)

STEPS = 12
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
SETTINGS = {"damping": 0.01, "factor_update_steps": 2, "inv_update_steps": 3, "kl_clip": 0.01}
FRACTIONS = (1, 1 / 2, 1 / 4, 1 / 8)
METHODS = {
    "eigen": {},
    "inverse": {"compute_method": "inverse"},
    "newton_schulz": {"compute_method": "newton_schulz"},
    "warm": {"warm_start": True},
    "ekfac": {"compute_method": "ekfac"},
}

SOME = {"newton_schulz": ("HYBRID_OPT",), "warm": ("MEM_OPT",), "ekfac": ("COMM_OPT",)}


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


PARAMS = {
    "w": normal(6, 8) * 0.4,
    "b": normal(8, seed=1) * 0.1,
    "scale": jnp.ones(8),
    "shift": 0.1 * normal(8, seed=5),
    "layers": {"w": normal(4, 8, 8) * 0.3, "b": 0.1 * normal(4, 8)},
    "v": normal(8, 4, seed=2) * 0.4,
}
X, Y = normal(16, 6, seed=3), normal(16, 4, seed=4)


def apply(p, x):
    h = jnp.tanh(x @ p["w"] + p["b"]) * p["scale"] + p["shift"]
    h, _ = lax.scan(lambda h, own: (jnp.tanh(h @ own["w"] + own["b"]), None), h, p["layers"])
    return h @ p["v"]


def loss_fn(p, x, y):
    return jnp.mean(jnp.sum((apply(p, x) - y) ** 2, 1))


def with_outputs(p, x, y):
    residuals = apply(p, x) - y
    return jnp.mean(jnp.sum(residuals**2, 1)), residuals


VAG = value_and_grad(loss_fn)
PLAN = VAG.plan(PARAMS, X, Y)


def on_mesh(tree, specs, mesh=MESH):
    """Arrays as `specs` say: a program is compiled again for arguments that lie otherwise."""
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


def train(params, x, y, free=False, **settings):
    """`free`: results lie as XLA chooses, not as parameters and state lay before the step."""
    tx = kfac(PLAN, 0.1, **SETTINGS, **settings)
    state = jax.jit(tx.init)(params)
    where = None
    if len(x.devices()) > 1 and not free:  # as docs/jax_devices.md has it
        where = jax.tree.map(
            lambda s: s.sharding if len(s.devices()) > 1 else NamedSharding(MESH, P()), (params, state)
        )
        params, state = jax.device_put((params, state), where)
    ekfac = settings.get("compute_method") == "ekfac"

    def step(params, state, x, y):
        bases = {"bases": eigenbases(state, PLAN)} if ekfac else {}
        _, grads, statistics = VAG(params, x, y, **bases)
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step, out_shardings=where)
    for _ in range(STEPS):
        params, state = step(params, state, x, y)
    assert free or step._cache_size() == 1
    return params


def difference(a, b):
    return max(
        float(np.abs(np.asarray(x) - np.asarray(y)).max())
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def moved(params):
    return difference(params, PARAMS)


SHARDED = {
    "data": jax.tree.map(lambda _: P(), PARAMS),
    "fsdp": jax.tree.map(
        lambda p: P(*("data" if n % 4 == 0 and i == 0 else None for i, n in enumerate(p.shape))), PARAMS
    ),
    "tensor": {
        "w": P(None, "model"),
        "b": P("model"),
        "scale": P("model"),
        "shift": P(),
        "layers": {"w": P(None, "model", None), "b": P(None, "model")},
        "v": P("model", None),
    },
}


def sharded(kind, **settings):
    batch = on_mesh((X, Y), (P("data"), P("data")))
    return train(on_mesh(PARAMS, SHARDED[kind]), *batch, **settings)


def trajectories():
    """Every sharding, with and without sharing out the factorizations."""
    out = {}
    expected = train(PARAMS, X, Y)
    out["moved"] = moved(expected)
    for kind in SHARDED:
        for name, given in (
            ("", {}),
            (" spread", {"mesh": MESH}),
            (" kept", {"mesh": MESH, "gradient_worker_fraction": 1 / 8}),
        ):
            found = sharded(kind, free=kind == "tensor", **given)
            out[f"{kind}{name}"] = difference(found, expected)
    return out


def several_axes():
    """Leaves of several axes that are sharded over several axes of the mesh, beside a tied embedding."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(16, size=(8, 6)))
    start = {
        "embedding": normal(16, 8) / 3,
        "layers": {"w": normal(4, 8, 8) / 3, "b": 0.1 * normal(4, 8)},
        "gain": jnp.ones(8),
        "shift": jnp.zeros(8),
    }
    specs = {
        "embedding": P(None, "data"),
        "layers": {"w": P(None, "data", "model"), "b": P()},
        "gain": P(),
        "shift": P(),
    }

    def loss(p, x, y):
        h, _ = lax.scan(
            lambda h, q: (h + jnp.tanh(h @ q["w"] + q["b"]), None), p["embedding"][x], p["layers"]
        )
        h = h - h.mean(-1, keepdims=True)
        h = h / jnp.sqrt((h**2).mean(-1, keepdims=True) + 1e-6) * p["gain"] + p["shift"]
        return optax.softmax_cross_entropy_with_integer_labels(h @ p["embedding"].T, y).mean()

    vag = value_and_grad(loss)
    plan = vag.plan(start, tokens, tokens)

    def train(shards, **settings):
        tx = kfac(plan, 0.1, momentum=0.0, **settings)
        params, x, y = start, tokens, jnp.roll(tokens, -1, 1)
        if shards:
            params, (x, y) = on_mesh(start, specs), on_mesh((x, y), (P("data"), P("data")))
        state = jax.jit(tx.init)(params)

        @jax.jit
        def step(params, state, x, y):
            _, grads, statistics = vag(params, x, y)
            updates, state = tx.update(grads, state, params, statistics=statistics)
            return optax.apply_updates(params, updates), state, grads

        for _ in range(6):
            params, state, _ = step(params, state, x, y)
        return params

    out = {}
    for method in ("eigen", "inverse"):
        settings = {"compute_method": method}
        expected = train(False, **settings)
        out[f"moved {method}"] = difference(expected, start)
        for fraction in (1, 1 / 8):
            given = {"mesh": MESH, "gradient_worker_fraction": fraction}
            out[f"{method} {fraction}"] = difference(train(True, **settings, **given), expected)
    return out


def fractions():
    """Every number of gradient workers, with every kind of inverse."""
    out = {}
    for method, settings in METHODS.items():
        expected = train(PARAMS, X, Y, **settings)
        out[f"moved {method}"] = moved(expected)
        for fraction in SOME.get(method, FRACTIONS):
            for strategy in ("compute", "MEMORY") if fraction == 1 / 4 else ("compute",):
                given = {"mesh": MESH, "gradient_worker_fraction": fraction}
                found = sharded("fsdp", **settings, **given, assignment_strategy=strategy)
                out[f"{method} {fraction} {strategy}"] = difference(found, expected)
    return out


def own_shard_map():
    """Inside the user's own shard_map, gradients and statistics averaged over its axis."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    out = {}
    for method in ("eigen", "inverse"):
        expected = train(PARAMS, X, Y, compute_method=method)
        out[f"moved {method}"] = moved(expected)
        settings = [{}, {"axis_name": "data"}]
        settings += [
            {"axis_name": "data", "mesh": mesh, "gradient_worker_fraction": fraction}
            for fraction in (FRACTIONS if method == "eigen" else (1 / 4,))
        ]
        for number, given in enumerate(settings if method == "eigen" else settings[2:]):
            for check_vma in (True, False) if number % 2 else (number % 4 == 0,):
                found = within(check_vma, compute_method=method, **given)
                name = f"{method} {given.get('axis_name')} {given.get('gradient_worker_fraction')}"
                out[f"{name} check_vma={check_vma}"] = difference(found, expected)
        found = within(True, traced=True, compute_method=method)
        out[f"{method} traced capture"] = difference(found, expected)
    return out


def within(check_vma, traced=False, **settings):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    tx = kfac(PLAN, 0.1, **SETTINGS, **settings)

    def step(params, state, x, y):
        local = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        wanted = {"capture": jnp.all(jnp.isfinite(params["b"]))} if traced else {}
        _, grads, statistics = VAG(local, x, y, **wanted)
        grads, statistics = lax.pmean((grads, statistics), "data")
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(PARAMS)
    specs = state_specs(state, "data")
    params = on_mesh(PARAMS, jax.tree.map(lambda _: P(), PARAMS), mesh)
    state, batch = on_mesh(state, specs, mesh), on_mesh((X, Y), (P("data"), P("data")), mesh)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), specs, P("data"), P("data")),
        out_specs=(P(), specs),
        check_vma=check_vma,
    )
    mapped = jax.jit(mapped)
    for _ in range(STEPS):
        params, state = mapped(params, state, *batch)
    return params


def ensembles():
    """A member on each device, its state made there, too, is that member by itself."""
    mesh, starts = Mesh(np.array(jax.devices()), ("data",)), normal(8, 4, 3)

    def loss(w):
        return jnp.sum(jnp.cosh(w - jnp.arange(12.0).reshape(4, 3) / 12))

    vag = value_and_grad(lambda w: jnp.mean(jnp.sum((normal(16, 4, seed=1) @ w) ** 2, 1)))
    plan, out = vag.plan(starts[0]), {}

    def of_gradients(tx, **given):
        tx = optax.with_extra_args_support(tx)

        def run(w):
            state = tx.init(w)
            for _ in range(3):
                updates, state = tx.update(jax.grad(loss)(w), state, w, **given)
                w = w + updates
            return w

        return run

    def of_statistics(w):
        tx = kfac(plan, 0.1, damping=0.01, factor_update_steps=2)
        state = tx.init(w)
        for step in range(3):
            _, gradients, statistics = vag(w, capture=jnp.all(jnp.isfinite(w)) & (step % 2 == 0))
            updates, state = tx.update(gradients, state, w, statistics=statistics)
            w = w + updates
        return w

    def squares(w):
        outputs = normal(16, 4, seed=1) @ w
        return jnp.mean(jnp.sum((outputs - 1) ** 2, 1)), outputs

    both = value_and_grad(squares, has_aux=True)
    adaptive_plan = both.plan(starts[0])

    def adaptively(w):
        tx = adaptive_kfac(adaptive_plan)
        state = tx.init(w)
        for _ in range(3):
            _, gradients, statistics = both(w)
            updates, state = tx.update(gradients, state, w, statistics=statistics, value_fn=squares)
            w = w + updates
        return w

    members = {
        "adaptive": adaptively,
        "kron": of_gradients(kron(0.1)),
        "kron newton": of_gradients(kron(0.1), value_fn=loss),
        "lra": of_gradients(lra(0.1, rank=1)),
        "dense_newton": of_gradients(dense_newton(0.1), value_fn=loss),
        "kfac": of_statistics,
    }
    for name, run in members.items():
        expected = jnp.stack([jax.jit(run)(w) for w in starts])
        out[f"moved {name}"] = difference(expected, starts)
        for check_vma in (True, False):
            found = jax.jit(
                jax.shard_map(
                    lambda w, run=run: run(w[0])[None],
                    mesh=mesh,
                    in_specs=P("data"),
                    out_specs=P("data"),
                    check_vma=check_vma,
                )
            )(starts)
            out[f"{name} check_vma={check_vma}"] = difference(found, expected)
    return out


def capture():
    """Statistics under explicit axes, and of a loss with a shard_map inside, are one device's."""
    batch, axes = (X, Y), ("data", "model")
    expected = jax.jit(VAG)(PARAMS, *batch)
    out = {"moved": difference(expected[1], jax.tree.map(jnp.zeros_like, PARAMS))}
    everywhere = jax.sharding.PartitionSpec(axes)
    for check_vma in (True, False):

        def mapped(p, x, y, check_vma=check_vma):
            def local(p, x, y):
                return lax.pmean(loss_fn(p, x, y), axes)

            specs = (P(), everywhere, everywhere)
            return jax.shard_map(local, mesh=MESH, in_specs=specs, out_specs=P(), check_vma=check_vma)(
                p, x, y
            )

        found = jax.jit(value_and_grad(mapped))(PARAMS, *batch)
        out[f"shard_map check_vma={check_vma}"] = difference(found, expected)
    explicit = jax.make_mesh((4, 2), axes, axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    # Of all sharded weights jax itself only takes this one beside sharded examples.
    specs = {"data": SHARDED["data"], "weights": {**SHARDED["data"], "w": P("model")}}
    for kind, spec in specs.items():
        place = lambda x, spec: jax.device_put(x, NamedSharding(explicit, spec))  # noqa: E731
        params = jax.tree.map(place, PARAMS, spec)
        given = [place(x, P("data")) for x in batch]
        found = jax.jit(VAG)(params, *given)
        out[f"explicit {kind}"] = difference(found, expected)
        with jax.set_mesh(explicit):
            out[f"explicit {kind} set_mesh"] = difference(jax.jit(VAG)(params, *given), expected)
            out[f"explicit {kind} verify"] = max(verify(loss_fn, params, *given).values())
            tx = kfac(PLAN, 0.1, **SETTINGS)

            @jax.jit
            def update(grads, state, params, statistics, tx=tx):
                return tx.update(grads, state, params, statistics=statistics)

            updates, state = update(found[1], tx.init(params), params, found[2])
            updates, _ = update(updates, state, params, found[2])
        alone, state = tx.update(expected[1], tx.init(PARAMS), PARAMS, statistics=expected[2])
        alone, _ = tx.update(alone, state, PARAMS, statistics=expected[2])
        out[f"explicit {kind} update"] = difference(updates, alone)
        alike = lambda u, p: u.sharding.is_equivalent_to(p.sharding, u.ndim)  # noqa: E731
        same = jax.tree.map(alike, updates, params)
        out[f"explicit {kind} shardings"] = float(not all(jax.tree.leaves(same)))
    return out


def predictions():
    """Statistics of a model's predictions in the user's own shard_map are one device's."""
    vag = value_and_grad(with_outputs, has_aux=True, fisher=Categorical(exact=True))
    expected = jax.jit(vag)(PARAMS, X, Y)[1:]
    out = {"moved": difference(expected[0], jax.tree.map(jnp.zeros_like, PARAMS))}

    def of_mean(axes):
        def loss(p, x, y):
            value, outputs = with_outputs(p, x, y)
            return lax.pmean(value, axes), outputs

        return value_and_grad(loss, has_aux=True, fisher=Categorical(exact=True))

    def averaged(axes):
        """Gradients of parameters that devices share are sums, and so are statistics."""
        return lambda *given: of_mean(axes)(*given)[1:]

    def apart(axes):
        def run(p, x, y):
            local = jax.tree.map(lambda leaf: lax.pcast(leaf, axes, to="varying"), p)
            grads, statistics = vag(local, x, y)[1:]
            return lax.pmean(grads, axes), lax.psum(statistics, axes)

        return run

    def divided(axes):
        def run(p, x, y):
            grads, statistics = vag(p, x, y)[1:]
            return jax.tree.map(lambda g: g / lax.psum(1, axes), grads), statistics

        return run

    for axes in (("data",), ("data", "model")):
        specs = (P(), P(axes), P(axes))
        for run in (averaged, apart, divided):
            mapped = jax.shard_map(run(axes), mesh=MESH, in_specs=specs, out_specs=P())
            out[f"{run.__name__} {axes}"] = difference(jax.jit(mapped)(PARAMS, X, Y), expected)
        # A device's own number of terms: by shapes, or by the numbers in them.
        for kind, terms in {
            "len": lambda x, y: len(x),
            "sum": lambda x, y: jnp.isfinite(y).sum(),
        }.items():
            for fisher in (None, Categorical(exact=True)):
                told = value_and_grad(with_outputs, has_aux=True, fisher=fisher, terms=terms)
                count = lambda p, x, y, told=told: told(p, x, y)[2].terms  # noqa: E731
                mapped = jax.shard_map(count, mesh=MESH, in_specs=specs, out_specs=P())
                found = jax.jit(mapped)(PARAMS, X, Y)
                out[f"terms {kind} {fisher is None} {axes}"] = difference(
                    found, terms(X, Y) * jnp.ones(())
                )
    explicit = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    batch = jax.device_put((X, Y), NamedSharding(explicit, P("data")))
    for fisher in (Gaussian(), Gaussian(exact=True), Bernoulli(), Categorical(samples=2)):
        told = value_and_grad(with_outputs, has_aux=True, fisher=fisher)
        run = jax.jit(lambda p, *given, told=told: told(p, *given, key=jax.random.key(0))[1:])
        alone = run(PARAMS, X, Y)
        with jax.set_mesh(explicit):
            out[f"explicit {fisher}"] = difference(run(PARAMS, *batch), alone)
    return out


def adaptive():
    """`adaptive_kfac` on sharded arrays, inside the user's own shard_map, and under explicit axes."""
    settings = {"damping": 1.0, "factor_update_steps": 2, "inv_update_steps": 3}
    vag = value_and_grad(with_outputs, has_aux=True)
    plan = vag.plan(PARAMS, X, Y)

    def run(params, x, y, place=None, own=False, check_vma=True, **given):
        tx = adaptive_kfac(plan, **settings, **given)

        def step(params, state, x, y):
            local = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params) if own else params
            _, grads, statistics = vag(local, x, y)
            if own:
                grads, statistics = lax.pmean((grads, statistics), "data")
            updates, state = tx.update(
                grads, state, params, statistics=statistics, value_fn=lambda p: with_outputs(p, x, y)
            )
            return optax.apply_updates(params, updates), state

        state = jax.jit(tx.init)(params)
        if own:
            specs = state_specs(state, "data")
            step = jax.shard_map(
                step,
                mesh=place,
                in_specs=(P(), specs, P("data"), P("data")),
                out_specs=(P(), specs),
                check_vma=check_vma,
            )
        step = jax.jit(step)
        for _ in range(STEPS):
            params, state = step(params, state, x, y)
        return params, [state.damping, state.momentum, state.learning_rate]

    expected = run(PARAMS, X, Y)
    out = {"moved": moved(expected[0])}
    batch = on_mesh((X, Y), (P("data"), P("data")))
    for kind, given in zip(SHARDED, itertools.cycle(({}, {"mesh": MESH})), strict=False):
        found = run(on_mesh(PARAMS, SHARDED[kind]), *batch, **given)
        out[f"{kind} {list(given)}"] = difference(found, expected)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole = on_mesh(PARAMS, SHARDED["data"], mesh), *on_mesh((X, Y), (P("data"), P("data")), mesh)
    for check_vma, fraction in ((True, 1 / 4), (False, 1)):
        given = {"axis_name": "data"} | ({} if fraction == 1 else {"mesh": mesh})
        given |= {"gradient_worker_fraction": fraction, "own": True, "check_vma": check_vma}
        out[f"own {check_vma} {fraction}"] = difference(run(*whole, place=mesh, **given), expected)
    if hasattr(jax.sharding, "auto_axes"):
        explicit = jax.make_mesh(
            (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
        )
        batch = on_mesh((X, Y), (P("data"), P("data")), explicit)
        for kind in ("data", "weights"):
            specs = SHARDED["data"] if kind == "data" else {**SHARDED["data"], "w": P("model")}
            with jax.set_mesh(explicit):
                found = run(on_mesh(PARAMS, specs, explicit), *batch)
            out[f"explicit {kind}"] = difference(found, expected)
    return out


def injected(make, learning_rate, **settings):
    return lambda: optax.inject_hyperparams(make)(learning_rate=learning_rate, **settings)


def explicit_axes():
    """PSGD on a mesh whose axes are in the types of arrays, which is what `jax.make_mesh` makes."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    specs = {"w": P("data", "model"), "s": P(None, "data", "model"), "b": P()}
    params = {"w": normal(16, 8), "s": normal(3, 8, 4, seed=1), "b": normal(8, seed=2)}
    place = lambda tree: {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in tree.items()}  # noqa: E731
    scanned = {"w": False, "s": True, "b": False}
    blocks = {"block_size": 4, "preconditioner_update_probability": 0.6, "scanned_layers": scanned}
    whole, over = {"params_partition_specs": specs}, {"preconditioner_partition_spec": P("data")}
    batched = {"lax_map_scanned_layers": True, "lax_map_batch_size": 2}
    cases = {
        "kron": (lambda **k: kron(0.01, **blocks, weight_decay=0.1, **k), {}),
        "kron, blocks over data": (lambda **k: kron(0.01, **blocks, **k), over),
        "kron, specs": (lambda **k: kron(0.01, **blocks, **k), whole),
        "kron, both": (lambda **k: kron(0.01, **blocks, **k), whole | over),
        "kron, batched": (lambda **k: kron(0.01, **blocks, **batched, **k), over),
        "chain": (lambda **k: optax.chain(scale_by_kron(**blocks, **k), optax.scale(-0.01)), over),
        "lra": (lambda: lra(0.01, rank=2), {}),
        "kron, injected": (injected(kron, 0.01, weight_decay=0.1, block_size=np.int64(4)), {}),
        "kron, injected schedule": (injected(kron, lambda t: 0.01 / (1 + t), b1=0.8), {}),
        "lra, injected": (injected(lra, 0.01), {}),
        "dense, injected": (injected(dense_newton, 0.01, clip=1.0), {}),
    }

    def train(tx, params, place):
        state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
        for step in range(4):
            grads = place({k: normal(*x.shape, seed=10 + step) for k, x in params.items()})
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    out = {}
    for name, (make, sharded) in cases.items():
        alone = train(make(), params, lambda tree: tree)
        with jax.set_mesh(mesh):
            found = train(make(**sharded), place(params), place)
        out[name] = difference(found, alone)
        kept = [
            found[k].sharding.is_equivalent_to(NamedSharding(mesh, specs[k]), found[k].ndim)
            for k in specs
        ]
        out[f"{name}, shardings"] = float(not all(kept))
        out[f"moved {name}"] = difference(found, params)
    return out


def explicit_mesh():
    """K-FAC given a mesh whose axes are explicit, with arrays on it or not, under `set_mesh` or not."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    settings = {"compute_method": "inverse", "damping": 0.1, "inv_update_steps": 3}
    vag = value_and_grad(with_outputs, has_aux=True)
    plan = vag.plan(PARAMS, X, Y)
    optimizers = {
        "kfac": lambda **given: kfac(plan, 0.1, **settings, **given),
        "scale_by_kfac": lambda **given: scale_by_kfac(plan, **settings, **given),
        "adaptive": lambda **given: adaptive_kfac(plan, **settings, **given),
        "injected": lambda **given: optax.inject_hyperparams(kfac, static_args=("plan", *given))(
            plan=plan, learning_rate=0.1, **settings, **given
        ),
    }

    def run(make, compiled=True, x=X, y=Y, params=PARAMS, **given):
        tx = make(**given)

        @jax.jit
        def step(params, state, x, y):
            _, grads, statistics = vag(params, x, y)
            updates, state = tx.update(
                grads, state, params, statistics=statistics, value_fn=lambda p: with_outputs(p, x, y)
            )
            return optax.apply_updates(params, updates), state

        state = jax.jit(tx.init)(params) if compiled else tx.init(params)
        for _ in range(4):
            params, state = step(params, state, x, y)
        return params

    batch = on_mesh({"x": X, "y": Y}, {"x": P("data"), "y": P("data")}, mesh)
    placed = batch | {"params": on_mesh(PARAMS, SHARDED["data"], mesh)}
    out = {}
    for name, make in optimizers.items():
        expected = run(make)
        out[f"moved {name}"] = moved(expected)
        for fraction in (1, 1 / 4) if name == "kfac" else (1 / 4,):
            given = {"mesh": mesh, "gradient_worker_fraction": fraction}
            for kind, compiled, arrays in (("new", False, {}), ("placed", True, placed)):
                found = run(make, compiled, **arrays, **given)
                whole = [p.sharding.is_fully_replicated for p in jax.tree.leaves(found)]
                out[f"{name} {fraction} {kind}"] = difference(found, expected)
                out[f"{name} {fraction} {kind}, shardings"] = float(not all(whole))
        with jax.set_mesh(mesh):
            out[f"{name} set_mesh"] = difference(run(make, **placed, **given), expected)
    return out


def partly_explicit():
    """Axes of two kinds: the user's own `shard_map`'s beside others, automatic beside explicit ones."""
    explicit, automatic = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
    params, specs, out = {"w": PARAMS["w"]}, {"w": P(None, "model")}, {}

    def loss(p, x):
        return jnp.mean(jnp.sum((x @ p["w"] - 1) ** 2, 1))

    vag = value_and_grad(loss)
    plan = vag.plan(params, X)
    optimizers = {
        "kfac": lambda **given: kfac(plan, 0.1, **SETTINGS, **given),
        "kron": lambda: kron(0.1, block_size=4),
    }
    same = lambda x: x  # noqa: E731

    def run(tx, params, x, within=same, vary=same, average=same):
        tx = optax.with_extra_args_support(tx)

        def step(params, state, x):
            _, grads, statistics = vag(vary(params), x)
            grads, statistics = average((grads, statistics))
            updates, state = tx.update(grads, state, params, statistics=statistics)
            return optax.apply_updates(params, updates), state

        state, step = jax.jit(tx.init)(params), jax.jit(within(step))
        for _ in range(4):
            params, state = step(params, state, x)
        return params

    def over_data(step):
        given = {"in_specs": (P(), P(), P("data")), "out_specs": (P(), P())}
        return jax.shard_map(step, axis_names={"data"}, **given)

    def vary(tree):
        return jax.tree.map(lambda x: lax.pcast(x, "data", to="varying"), tree)

    own = over_data, vary, lambda tree: lax.pmean(tree, "data")
    cases = {"own, explicit": ((explicit, explicit), own, {})}
    of_kfac = {"own, automatic": ((automatic, automatic), own, {})}
    for fraction in (1, 1 / 4):
        given = {"gradient_worker_fraction": fraction}
        of_kfac[str(fraction)] = (automatic, explicit), (), given
    for name, make in optimizers.items():
        expected = run(make(), params, X)
        out[f"moved {name}"] = difference(expected, params)
        for case, (kinds, around, given) in (cases | (of_kfac if name == "kfac" else {})).items():
            mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=kinds)
            tx = make(mesh=mesh, **given) if given else make()
            x = on_mesh(X, P("data"), mesh)
            with jax.set_mesh(mesh):
                found = run(tx, on_mesh(params, specs, mesh), x, *around)
            out[f"{name} {case}"] = difference(found, expected)
            if explicit in kinds:
                divided = NamedSharding(mesh, specs["w"]).is_equivalent_to(found["w"].sharding, 2)
                out[f"{name} {case}, shardings"] = float(not divided)
    return out


def failures():
    """A factor that cannot be inverted: counted, and the inverse before it kept, wherever it is."""
    params = {"w": PARAMS["w"], "v": PARAMS["v"]}
    dead = X.at[:, 0].set(0.0)

    def loss_fn(p, x, y):
        return jnp.mean(jnp.sum((jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2, 1))

    vag = value_and_grad(loss_fn)
    plan = vag.plan(params, X, Y)
    out = {}
    for fraction in (None, *FRACTIONS):
        given = {"mesh": MESH, "gradient_worker_fraction": fraction} if fraction else {}
        settings = {"compute_method": "inverse", "damping": lambda t: jnp.where(t < 2, 0.1, 0.0)}
        tx = kfac(plan, 0.1, **settings, **given)

        def step(params, state, x, tx=tx):
            _, grads, statistics = vag(params, x, Y)
            updates, state = tx.update(grads, state, params, statistics=statistics)
            return optax.apply_updates(params, updates), state

        step = jax.jit(step)
        found, state = params, jax.jit(tx.init)(params)
        for _ in range(4):
            found, state = step(found, state, dead)
        failures = state.preconditioner.factors.failures
        out["alone" if fraction is None else str(fraction)] = {
            "failures": [int(n) for n in failures],
            "numbers": [float(x) for x in jnp.concatenate([found["w"].ravel(), found["v"].ravel()])],
        }
    return out


def cost():
    """What XLA compiles, by `gradient_worker_fraction`: bytes of a device, collectives, their bytes."""
    rows = {str(f): measured(256, 12, "inverse", f) for f in (None, *FRACTIONS)}
    placements = {}
    for workers in (8, 4, 2, 1):
        # Of 256 x 256, 24 of 64 x 64 and the last layer's own input.
        layers = [LayerShape((64, 64))] * 12 + [LayerShape((64, 256))]
        placements[str(workers / 8)] = list(
            plan_placement(layers, 8, workers, colocate_factors=workers == 1).loads
        )
    refused = {}
    for fraction in (0.3, 1 / 3, "half"):
        try:
            kfac(PLAN, 0.1, mesh=MESH, gradient_worker_fraction=fraction)
        except ValueError as error:
            refused[str(fraction)] = str(error)
    made = kfac(PLAN, 0.1, mesh=MESH, gradient_worker_fraction=1 / 8).init(PARAMS)
    grads = jax.tree.map(jnp.zeros_like, PARAMS)
    given = {"1/4": {"mesh": MESH, "gradient_worker_fraction": 1 / 4}, "1": {"mesh": MESH}, "alone": {}}
    for name, settings in given.items():
        tx = kfac(PLAN, 0.1, **settings)
        states = {f"a state of 1/8 in one of {name}": (tx, made)}
        if name != "1/4":
            other = kfac(PLAN, 0.1, **given["1/4"])
            states[f"a state of {name} in one of 1/4"] = other, tx.init(PARAMS)
        for what, (one, state) in states.items():
            try:
                one.update(grads, state, PARAMS, statistics=None)
            except ValueError as error:
                refused[what] = str(error)
    return {"rows": rows, "loads": placements, "refused": refused, "alike": alike_in_shape()}


def alike_in_shape():
    """What says no to a state whose arrays have the right shapes, and factors other places in them."""
    sizes = (196, 128, 64, 10)  # the first factor decides on the length
    params = {f"w{i}": jnp.ones(shape) for i, shape in enumerate(itertools.pairwise(sizes))}

    def loss_fn(p, x):
        return jnp.mean((jnp.tanh(jnp.tanh(x @ p["w0"]) @ p["w1"]) @ p["w2"]) ** 2)

    plan = value_and_grad(loss_fn).plan(params, jnp.ones((4, 196)))
    grads, said = jax.tree.map(jnp.zeros_like, params), []
    own = {"gradient_worker_fraction": 1 / 2, "compute_method": "inverse"}
    state = kfac(plan, 0.1, mesh=MESH, **own).init(params)
    for other in (
        {"gradient_worker_fraction": 1 / 4},
        {"gradient_worker_fraction": 1 / 4, "assignment_strategy": "memory"},
    ):
        tx = kfac(plan, 0.1, mesh=MESH, **(own | other))
        shapes = [jax.tree.map(jnp.shape, jax.tree.leaves(s)) for s in (tx.init(params), state)]
        try:
            tx.update(grads, state, params, statistics=None)
        except ValueError as error:
            said.append((shapes[0] == shapes[1], str(error)))
    return said


def draws():
    """Labels that devices draw for like examples, and signs that a key decides on."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

    def loss_fn(p, x):
        out = x @ p["v"]
        return jnp.mean(out**2), out

    x = jnp.tile(X[:3], (4, 1))  # each of the four has the same three
    vag = value_and_grad(loss_fn, has_aux=True, fisher=Categorical())
    params = {"v": jnp.zeros((X.shape[1], 5))}

    def local(p, x, key):
        p = jax.tree.map(lambda v: lax.pcast(v, "data", to="varying"), p)
        return vag(p, x, key=key)[2].layers["['v']"].main.G

    of_each = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P("data"))
    found = np.asarray(jax.jit(of_each)(params, x, jax.random.key(0))).reshape(4, -1)
    return {"kinds": len({tuple(np.round(row, 9)) for row in found})}


if __name__ == "__main__":
    cases = {
        f.__name__: f
        for f in (
            trajectories,
            several_axes,
            fractions,
            own_shard_map,
            ensembles,
            capture,
            predictions,
            adaptive,
            explicit_axes,
            explicit_mesh,
            partly_explicit,
            failures,
            cost,
            draws,
        )
    }
    print(json.dumps(cases[sys.argv[1]]()))
