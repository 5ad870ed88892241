"""Runs in a process of its own with 8 CPU devices: K-FAC's trajectories under every sharding.

    python many_devices.py CASE

Prints a JSON object.
"""

# ruff: noqa: E402 (devices are set up before anything else)
from __future__ import annotations

import json
import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax

jax.config.update("jax_enable_x64", True)

import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from suite.jax import kfac, value_and_grad

STEPS = 12
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
SETTINGS = {"damping": 0.01, "factor_update_steps": 2, "inv_update_steps": 3, "kl_clip": 0.01}


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


PARAMS = {
    "w": normal(6, 8) * 0.4,
    "b": normal(8, seed=1) * 0.1,
    "scale": jnp.ones(8),
    "layers": {"w": normal(4, 8, 8) * 0.3, "b": 0.1 * normal(4, 8)},
    "v": normal(8, 4, seed=2) * 0.4,
}
X, Y = normal(16, 6, seed=3), normal(16, 4, seed=4)


def loss_fn(p, x, y):
    h = jnp.tanh(x @ p["w"] + p["b"]) * p["scale"]
    h, _ = lax.scan(lambda h, own: (jnp.tanh(h @ own["w"] + own["b"]), None), h, p["layers"])
    return jnp.mean(jnp.sum((h @ p["v"] - y) ** 2, 1))


VAG = value_and_grad(loss_fn)
PLAN = VAG.plan(PARAMS, X, Y)


def train(params, x, y, **settings):
    tx = kfac(PLAN, 0.1, **SETTINGS, **settings)
    state = jax.jit(tx.init)(params)

    def step(params, state, x, y):
        _, grads, statistics = VAG(params, x, y)
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state

    step = jax.jit(step)
    for _ in range(STEPS):
        params, state = step(params, state, x, y)
    return params, state, step


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
        "layers": {"w": P(None, "model", None), "b": P(None, "model")},
        "v": P("model", None),
    },
}


def sharded(kind, **settings):
    place = lambda x, spec: jax.device_put(x, NamedSharding(MESH, spec))  # noqa: E731
    params = jax.tree.map(place, PARAMS, SHARDED[kind])
    return train(params, place(X, P("data")), place(Y, P("data")), **settings)


def trajectories():
    """Every sharding, with and without sharing out the factorizations."""
    out = {}
    for method in ("eigen", "inverse"):
        expected, _, _ = train(PARAMS, X, Y, compute_method=method)
        out[f"moved {method}"] = moved(expected)
        for kind in SHARDED:
            for name, given in (
                ("", {}),
                (" spread", {"mesh": MESH}),
                (" kept", {"mesh": MESH, "gradient_worker_fraction": 1 / 8}),
            ):
                if method == "inverse" and (kind != "fsdp" or not name):
                    continue
                found, _, _ = sharded(kind, compute_method=method, **given)
                out[f"{method} {kind}{name}"] = difference(found, expected)
    return out


def own_shard_map():
    """Inside the user's own shard_map, gradients and statistics averaged over its axis."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    expected, _, _ = train(PARAMS, X, Y)
    out = {"moved": moved(expected)}
    for name, axis in (("", None), (" spread", "data")):
        for check_vma in (True, False):
            tx = kfac(PLAN, 0.1, **SETTINGS, axis_name=axis)

            def step(params, state, x, y, tx=tx):
                local = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
                _, grads, statistics = VAG(local, x, y)
                grads, statistics = lax.pmean((grads, statistics), "data")
                updates, state = tx.update(grads, state, params, statistics=statistics)
                return optax.apply_updates(params, updates), state

            mapped = jax.jit(
                jax.shard_map(
                    step,
                    mesh=mesh,
                    in_specs=(P(), P(), P("data"), P("data")),
                    out_specs=P(),
                    check_vma=check_vma,
                )
            )
            params, state = PARAMS, tx.init(PARAMS)
            for _ in range(STEPS):
                params, state = mapped(params, state, X, Y)
            out[f"check_vma={check_vma}{name}"] = difference(params, expected)
    return out


def cost():
    """What XLA compiles: bytes per device, and how many factorizations a device does."""
    out = {}
    for name, given in (
        ("alone", {}),
        ("spread", {"mesh": MESH}),
        ("kept", {"mesh": MESH, "gradient_worker_fraction": 1 / 8}),
    ):
        params, state, step = sharded("data", compute_method="inverse", **given)
        x = jax.device_put(X, NamedSharding(MESH, P("data")))
        y = jax.device_put(Y, NamedSharding(MESH, P("data")))
        compiled = step.lower(params, state, x, y).compile()
        memory = compiled.memory_analysis()
        text = compiled.as_text()
        out[name] = {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "all-reduce": text.count(" all-reduce("),
            "all-gather": text.count(" all-gather("),
            "state": sum(
                shard.data.nbytes
                for leaf in jax.tree.leaves(state)
                for shard in leaf.addressable_shards[:1]
            ),
        }
    return out


if __name__ == "__main__":
    print(
        json.dumps(
            {"trajectories": trajectories, "own_shard_map": own_shard_map, "cost": cost}[sys.argv[1]]()
        )
    )
