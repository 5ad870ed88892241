"""Kron's bytes per device and its collectives, read from XLA's analysis of the compiled update.

    python benchmarks/kron_memory.py --devices 8

A model of `--layers` matrices of 512 x 512, gradients on every device. Nothing is run: the numbers are
those of the compiled program.
"""

from __future__ import annotations

import argparse
import os
import re
from functools import partial

from options import whole


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=whole, default=8)
    parser.add_argument("--layers", type=whole, default=8)
    arguments = parser.parse_args(argv)
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={arguments.devices}"
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from suite.jax import get_opt_state_partition_specs, scale_by_kron

    def with_sharding(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    shapes = {f"w{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(arguments.layers)}
    print(f"jax {jax.__version__}, {arguments.layers} matrices of 512 x 512 in blocks of 128, MiB")
    print(f"{'devices':>8}{'state':>9}{'arguments':>11}{'temporary':>11}  collectives")
    for devices in (1, arguments.devices):
        mesh = Mesh(jax.devices()[:devices], ("data",))
        settings = {"preconditioner_partition_spec": P("data")} if devices > 1 else {}
        with jax.set_mesh(mesh):
            tx = scale_by_kron(**settings)
            state = jax.eval_shape(tx.init, shapes)
            specs = get_opt_state_partition_specs(shapes, True, **settings)
            shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
            placed = jax.tree.map(with_sharding, state, shardings)
            everywhere = NamedSharding(mesh, P())
            replicated = {name: with_sharding(x, everywhere) for name, x in shapes.items()}
            compiled = jax.jit(tx.update).lower(replicated, placed).compile()
        found = re.findall(
            r"= \S+ (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(",
            compiled.as_text(),
        )
        counts = {name: found.count(name) for name in sorted(set(found))}
        factors = sum(
            x.dtype.itemsize * x.sharding.shard_shape(x.shape)[0] * x.size // x.shape[0]
            for x in jax.tree.leaves(placed.buckets)
        )
        memory = compiled.memory_analysis()
        sizes = (factors, memory.argument_size_in_bytes, memory.temp_size_in_bytes)
        mib = [f"{size / 2**20:.1f}" for size in sizes]
        print(f"{devices:8}{mib[0]:>9}{mib[1]:>11}{mib[2]:>11}  {counts or 'none'}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
