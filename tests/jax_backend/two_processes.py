"""One of two processes that train together over gloo: python two_processes.py ADDRESS RANK."""

# ruff: noqa: E402 (devices are set up before anything else)
from __future__ import annotations

import json
import sys

import jax

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.config.update("jax_enable_x64", True)
ADDRESS, RANK = sys.argv[1], int(sys.argv[2])
if RANK >= 0:
    jax.distributed.initialize(ADDRESS, num_processes=2, process_id=RANK)

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from suite.jax import kfac, value_and_grad

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(6, 5)) / 2, "b": np.zeros(5), "v": RNG.normal(size=(5, 3)) / 2}
X, Y = RNG.normal(size=(16, 6)), RNG.normal(size=(16, 3))
MESH = Mesh(np.array(jax.devices()), ("data",))


def everywhere(x, spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(MESH, spec), lambda index: x[index])


def loss_fn(p, x, y):
    return jnp.mean(jnp.sum((jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] - y) ** 2, 1))


vag = value_and_grad(loss_fn)
tx = kfac(vag.plan(PARAMS, X, Y), 0.1, damping=0.01, inv_update_steps=2, mesh=MESH)
params = jax.tree.map(lambda x: everywhere(x, P()), PARAMS)
x, y = everywhere(X, P("data")), everywhere(Y, P("data"))
state = jax.jit(tx.init)(params)


@jax.jit
def step(params, state, x, y):
    _, grads, statistics = vag(params, x, y)
    updates, state = tx.update(grads, state, params, statistics=statistics)
    moved = optax.apply_updates(params, updates)
    return jax.lax.with_sharding_constraint(moved, NamedSharding(MESH, P())), state


for _ in range(10):
    params, state = step(params, state, x, y)
numbers = [float(n) for p in jax.tree.leaves(params) for n in np.asarray(p.addressable_data(0)).ravel()]
print(json.dumps({"devices": jax.device_count(), "numbers": numbers}))
