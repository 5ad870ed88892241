"""What 8 devices keep and send in a K-FAC step in JAX, read from the program that XLA compiled.

    python benchmarks/jax_exchange.py [--large 1024] [--layers 24] [--method inverse]

Small layers and a large one, data parallel under `jit`, by `gradient_worker_fraction`: bytes on a device
of the optimizer's state, of all arguments, of temporaries, and of what collectives return in every step
and in steps that compute inverses.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from options import whole
from suite.jax import kfac, value_and_grad

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8}
BYTES |= {"u64": 8, "f64": 8}


class Collective(NamedTuple):
    """One instruction."""

    kind: str
    size: int  # bytes of its result on a device
    branch: bool  # in a branch of a condition, and so not in every step


def collectives(program: str) -> list[Collective]:
    """All of a compiled program's text."""
    bodies = dict(_computations(program))
    conditional: set[str] = set()
    for lines in bodies.values():
        for line in lines:
            if " conditional(" in line:
                conditional |= set(re.findall(r"%([\w.\-]+)", line.split("computation", 1)[1]))
    reached, waiting = set(), list(conditional)
    while waiting:
        name = waiting.pop()
        if name in bodies and name not in reached:
            reached.add(name)
            waiting += re.findall(r"%([\w.\-]+)", "\n".join(bodies[name]))
    return [
        Collective(kind, size, name in reached)
        for name, lines in bodies.items()
        for kind, size in filter(None, map(_collective, lines))
    ]


def _computations(program: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = None, []
    for line in program.splitlines():
        start = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if start:
            name, lines = start.group(1), []
        elif line == "}" and name is not None:
            yield name, lines
            name = None
        elif name is not None:
            lines.append(line)


def _collective(line: str) -> tuple[str, int] | None:
    found = re.search(rf" = (.*?) ({'|'.join(KINDS)})(?:-start)?\(", line)
    if not found:
        return None
    shapes = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", found.group(1))
    size = sum(BYTES[kind] * math.prod(map(int, filter(None, s.split(",")))) for kind, s in shapes)
    return found.group(2), size


def on_one_device(tree: Any) -> int:
    """Bytes of a pytree's arrays that are on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def loss_fn(params: Any, x: Any) -> Any:
    for w in params["small"]:
        x = jnp.tanh(x @ w)
    return jnp.mean(jnp.sum((x @ params["large"]) ** 2, 1))


def measured(large: int, layers: int, method: str, fraction: float | None) -> dict[str, Any]:
    """One line of the table; fraction None: without `mesh`, every device computes everything."""
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, divided = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    rng = np.random.default_rng(0)
    params = {
        "small": [jnp.asarray(rng.normal(size=(64, 64)) / 8, jnp.float32) for _ in range(layers)],
        "large": jnp.asarray(rng.normal(size=(64, large)) / 8, jnp.float32),
    }
    params = jax.device_put(params, everywhere)
    x = jax.device_put(jnp.asarray(rng.normal(size=(64, 64)), jnp.float32), divided)
    vag = value_and_grad(loss_fn)
    given = {} if fraction is None else {"mesh": mesh, "gradient_worker_fraction": fraction}
    settings = {"damping": 0.01, "compute_method": method, "momentum": 0.0, "inv_update_steps": 10}
    tx = kfac(vag.plan(params, x), 0.1, **settings, **given)
    state = jax.jit(tx.init)(params)

    def step(params: Any, state: Any, x: Any) -> Any:
        _, grads, statistics = vag(params, x)
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x).compile()
    found = collectives(compiled.as_text())
    params, state = compiled(params, state, x)
    return {
        "fraction": fraction,
        "state": on_one_device(state),
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
        "arguments": compiled.memory_analysis().argument_size_in_bytes,
        "step": sum(c.size for c in found if not c.branch),
        "step collectives": sum(not c.branch for c in found),
        "branches": sum(c.size for c in found if c.branch),
        "branch collectives": sum(c.branch for c in found),
        "kinds": {kind: sum(c.kind == kind for c in found) for kind in KINDS},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--large", type=whole, default=1024)
    parser.add_argument("--layers", type=whole, default=24)
    parser.add_argument("--method", default="inverse")
    options = parser.parse_args()
    print(
        f"jax {jax.__version__}, {jax.device_count()} {jax.default_backend()} devices, float32, seed 0"
    )
    print(f"{options.layers} layers 64 x 64 and one 64 x {options.large}, {options.method}; MB a device")
    print("fraction    state  arguments  temporary   each step (number)   refresh (number)  kinds")
    for fraction in (None, 1, 1 / 2, 1 / 4, 1 / 8):
        row = measured(options.large, options.layers, options.method, fraction)
        name = "no mesh" if fraction is None else f"{fraction:g}"
        kinds = ", ".join(f"{n} {kind}" for kind, n in row["kinds"].items() if n)
        print(
            f"{name:8} {row['state'] / 1e6:8.2f} {row['arguments'] / 1e6:10.2f} "
            f"{row['temporary'] / 1e6:10.2f} {row['step'] / 1e6:12.2f} ({row['step collectives']:3}) "
            f"{row['branches'] / 1e6:12.2f} ({row['branch collectives']:3})      {kinds}"
        )


if __name__ == "__main__":
    main()
