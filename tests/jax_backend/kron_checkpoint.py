"""Save Kron's state from eight devices and go on with six, with orbax; run in a process of its own.

    python tests/jax_backend/kron_checkpoint.py FOLDER shared|own

Prints one JSON object: how far the continued run is from the uninterrupted one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(folder: Path, factors: str) -> dict[str, Any]:
    devices = "--xla_force_host_platform_device_count=8"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from suite.jax import get_opt_state_partition_specs, kron

    jax.config.update("jax_enable_x64", True)
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=(12, 15))) for name in "abc"}
    x = jnp.asarray(rng.normal(size=(32, 12)))

    def loss_fn(p: Any) -> Any:
        return sum(jnp.mean((jnp.tanh(x @ w) - 0.3) ** 2) for w in p.values())

    settings = {"learning_rate": 0.01, "block_size": 5, "shared_factors": factors == "shared"}
    meshes = [
        (Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")), P("x", "y")),
        (Mesh(np.array(jax.devices()[:6]), ("z",)), P("z")),
    ]

    def train(tx: Any, params: Any, state: Any, steps: int) -> Any:
        @jax.jit
        def step(params: Any, state: Any) -> Any:
            updates, state = tx.update(jax.grad(loss_fn)(params), state, params)
            return optax.apply_updates(params, updates), state

        for _ in range(steps):
            params, state = step(params, state)
        return params, state

    mesh, spec = meshes[0]
    with jax.set_mesh(mesh):
        tx = kron(**settings, preconditioner_partition_spec=spec)
        placed = jax.device_put(params, NamedSharding(mesh, P()))
        middle, state = train(tx, placed, jax.jit(tx.init)(placed), 7)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / "state", {"params": middle, "state": state})
        arrays = jax.tree.map(np.asarray, (middle, state))
        expected, last = train(tx, middle, state, 7)
        expected = jax.tree.map(np.asarray, expected)

    mesh, spec = meshes[1]
    with jax.set_mesh(mesh):
        tx = kron(**settings, preconditioner_partition_spec=spec)
        specs = get_opt_state_partition_specs(params, **settings, preconditioner_partition_spec=spec)
        target = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
            {"params": params, "state": jax.eval_shape(tx.init, params)},
            {"params": jax.tree.map(lambda _: P(), params), "state": specs},
        )
        with ocp.StandardCheckpointer() as checkpointer:
            # Not strict: the number of blocks is another multiple.
            restored = checkpointer.restore(folder / "state", target, strict=False)
        found, after = train(tx, restored["params"], restored["state"], 7)
        with_six, _ = train(tx, *arrays, 7)
    with_one, last_of_one = train(kron(**settings), *arrays, 7)
    with jax.set_mesh(mesh):  # and back, to more devices
        back, _ = train(tx, *jax.tree.map(np.asarray, (with_one, last_of_one)), 3)
    again, _ = train(kron(**settings), with_one, last_of_one, 3)

    def distance(a: Any, b: Any) -> float:
        return max(float(np.abs(np.asarray(a[k]) - np.asarray(b[k])).max()) for k in params)

    shapes = [s.preconditioner.buckets[0].factors[0].shape for s in (last, after)]
    return {
        "difference": distance(found, expected),
        "from arrays": [
            distance(with_six, expected),
            distance(with_one, expected),
            distance(back, again),
        ],
        "moved": min(float(np.abs(expected[k] - np.asarray(middle[k])).max()) for k in params),
        "shapes": shapes,
    }


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]).resolve(), sys.argv[2])))
