"""A training run whose state is spread over many CPU devices; run in a process of its own.

    python tests/jax_backend/kron_devices.py shared|own [process count address]

`shared` or `own`: factors of all blocks of a row or column, few for eight devices, or of each block.

Prints one JSON object: differences to one device, shardings, bytes and collectives.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any
from unittest import mock

DEVICES = 8


def main(arguments: list[str]) -> dict[str, Any]:
    factors, *rest = arguments
    process, count = (int(rest[0]), int(rest[1])) if rest else (0, 1)
    devices = f"--xla_force_host_platform_device_count={DEVICES // count}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices}"
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from suite.jax import get_opt_state_partition_specs, kron

    jax.config.update("jax_enable_x64", True)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(rest[2], count, process)
    assert jax.device_count() == DEVICES

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(12, 20)), "s": rng.normal(size=(3, 6, 10)), "b": rng.normal(size=20)}
    x, y, z = (rng.normal(size=shape) for shape in ((32, 12), (32, 20), (16, 6)))

    def loss_fn(p: Any) -> Any:
        own = jnp.mean((jnp.tanh(x @ p["w"] + p["b"]) - y) ** 2)
        return own + jnp.mean((jnp.tanh(jnp.einsum("ij,kjl->kil", z, p["s"])) - 0.3) ** 2)

    settings = {
        "learning_rate": 0.01,
        "weight_decay": 0.01,
        "scanned_layers": {"w": False, "s": True, "b": False},
        "block_size": 5,
        "shared_factors": {"shared": True, "own": False}[factors],
        "preconditioner_update_probability": 0.5,
    }

    def train(tx: Any, params: Any, steps: int = 30) -> Any:
        state = jax.jit(tx.init)(params)

        def step(params: Any, state: Any) -> Any:
            updates, state = tx.update(jax.grad(loss_fn)(params), state, params)
            return optax.apply_updates(params, updates), state

        compiled = jax.jit(step).lower(params, state).compile()
        for _ in range(steps):
            params, state = compiled(params, state)
        return params, state, compiled

    def numbers_placed(make: Any) -> int:
        """Numbers in arrays that were made whole, to be divided among devices afterwards."""
        given: list[int] = []
        constrain = jax.lax.with_sharding_constraint

        def spy(array: Any, sharding: Any) -> Any:
            if array.ndim and not isinstance(array, jax.core.Tracer):
                given.append(array.size if array.sharding.is_fully_replicated else 0)
            return constrain(array, sharding)

        with mock.patch.object(jax.lax, "with_sharding_constraint", spy):
            make()
        return sum(given)

    alone, plain, compiled_alone = train(kron(**settings), jax.tree.map(jnp.asarray, params))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tp"))
    specs = {"w": P("fsdp", None), "s": P(None, None, "tp"), "b": P()}
    spread = settings | {
        "params_partition_specs": specs,
        "preconditioner_partition_spec": P("fsdp", "tp"),
    }
    placed = {
        k: jax.make_array_from_callback(v.shape, NamedSharding(mesh, specs[k]), lambda i, v=v: v[i])
        for k, v in params.items()
    }
    with jax.set_mesh(mesh):
        whole_at_init = numbers_placed(lambda: kron(**spread).init(placed))
        found, state, compiled = train(kron(**spread), placed)
        gather = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))
        whole = jax.device_get(gather(found))
        two_at_a_time = {"lax_map_scanned_layers": True, "lax_map_batch_size": 2}
        batched = jax.device_get(gather(train(kron(**spread, **two_at_a_time), placed)[0]))
        # Gradients on every device, as in data parallelism: what the optimizer itself communicates.
        everywhere = jax.device_put(whole, NamedSharding(mesh, P()))
        tx = kron(**settings, preconditioner_partition_spec=P("fsdp", "tp"))
        lowered = jax.jit(tx.update).lower(everywhere, jax.jit(tx.init)(everywhere), everywhere)
        own = lowered.compile().as_text()
    expected = get_opt_state_partition_specs(params, **spread)
    agree = jax.tree.map(
        lambda spec, leaf: NamedSharding(mesh, spec).is_equivalent_to(leaf.sharding, leaf.ndim),
        expected,
        state,
    )

    def local_bytes(tree: Any) -> int:
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))

    return {
        "difference": max(float(np.abs(whole[k] - np.asarray(alone[k])).max()) for k in params),
        "batched_difference": max(
            float(np.abs(batched[k] - np.asarray(alone[k])).max()) for k in params
        ),
        "moved": min(float(np.abs(whole[k] - params[k]).max()) for k in params),
        "whole_at_init": whole_at_init,
        "specs_agree": all(jax.tree.leaves(agree)),
        "bucket_bytes": [local_bytes(s.preconditioner.buckets) for s in (plain, state)],
        "argument_bytes": [
            c.memory_analysis().argument_size_in_bytes for c in (compiled_alone, compiled)
        ],
        "buckets": len(state.preconditioner.buckets),
        "collectives": {
            name: len(re.findall(rf" {name}(?:-start)?\(", own))
            for name in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
        },
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
