"""What a K-FAC step costs in JAX on the 784-1000-500-250-30 autoencoder, batch 256.

    python benchmarks/jax_kfac_cost.py [--repeats 20] [--cycles 5] [--compilations 3] [--json FILE]

Capture: a step with statistics, over `jax.value_and_grad` plus the same second moments as bare products
of arrays that are given. Compilation: CPU seconds to trace and compile the whole training step, its
inverse branch included, of this package and of kfac-jax, if that one can be imported and run; else what
it raised. Each is run as its users do: what the first step takes longer than a later one that computes
inverses, too. Start: plan or registration, and the optimizer's state. Both take the empirical Fisher;
kfac-jax inverts. Contenders take turns; medians are shown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from options import whole, writable
from suite.core.statistics import second_moment_sum
from suite.jax import kfac, value_and_grad
from versions import versions

SIDES = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
BATCH = 256
PERIOD = 10  # of inverses


def make_params(key):
    keys = jax.random.split(key, len(SIDES))
    return [
        {"w": jax.random.normal(k, (i, o)) / np.sqrt(i), "b": jnp.zeros(o)}
        for k, i, o in zip(keys, SIDES[:-1], SIDES[1:], strict=False)
    ]


def logits_of(params, x):
    for number, layer in enumerate(params):
        x = x @ layer["w"] + layer["b"]
        if number not in (3, len(params) - 1):
            x = jnp.tanh(x)
    return x


def loss_fn(params, x):
    logits = logits_of(params, x)
    return jnp.mean(jnp.sum(optax.sigmoid_binary_cross_entropy(logits, x), -1))


def bare(params, x, inputs, gradients):
    """value_and_grad, and the second moments of arrays that are there already."""
    value = jax.value_and_grad(loss_fn)(params, x)
    pairs = zip(inputs, gradients, strict=True)
    sums = [(second_moment_sum(a[None], bias=True), second_moment_sum(g[None])) for a, g in pairs]
    return value, sums


def medians(functions, repeats):
    times = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function())
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(own)) for name, own in times.items()}


def seconds_of(function):
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    start = clock()
    out = jax.block_until_ready(function())
    return clock() - start, out


def first_steps(start, step) -> tuple[float, float]:
    """CPU seconds of the start, and of the first step beyond a later one that computes inverses, too."""
    jax.clear_caches()
    begun, state = seconds_of(start)
    seconds = []
    for number in range(PERIOD + 1):
        own, state = seconds_of(lambda now=state, t=number: step(now, t))
        seconds.append(own)
    return begun, seconds[0] - seconds[-1]


def compile_ours(params, x, method) -> tuple[float, float]:
    vag = value_and_grad(loss_fn)
    setup = {}

    def start():
        plan = vag.plan(params, x)
        tx = kfac(plan, 0.1, damping=0.01, inv_update_steps=PERIOD, compute_method=method)

        def step(params, state, x):
            loss, grads, statistics = vag(params, x)
            updates, state = tx.update(grads, state, params, statistics=statistics)
            return optax.apply_updates(params, updates), state, loss

        setup["step"] = jax.jit(step, donate_argnums=(0, 1))
        own = jax.tree.map(np.asarray, params)  # not those of the caller, as they are donated
        return jax.device_put(own), tx.init(params)

    return first_steps(start, lambda now, _: setup["step"](*now, x)[:2])


def compile_theirs(params, x) -> tuple[float, float]:
    import kfac_jax

    def registered(params, batch):
        logits = logits_of(params, batch)
        kfac_jax.register_multi_bernoulli_predictive_distribution(logits, batch)
        return jnp.mean(jnp.sum(optax.sigmoid_binary_cross_entropy(logits, batch), -1))

    key, damping = jax.random.PRNGKey(0), jnp.asarray(0.01)
    setup = {}

    def start():
        optimizer = setup["optimizer"] = kfac_jax.Optimizer(
            jax.value_and_grad(registered),
            l2_reg=0.0,
            value_func_has_aux=False,
            use_adaptive_learning_rate=False,
            use_adaptive_momentum=False,
            use_adaptive_damping=False,
            learning_rate_schedule=lambda t: 0.1,
            momentum_schedule=lambda t: 0.9,
            inverse_update_period=PERIOD,
            multi_device=False,
            num_burnin_steps=0,
            estimation_mode="fisher_empirical",
        )
        own = jax.device_put(jax.tree.map(np.asarray, params))
        state = optimizer.init(own, key, x)
        return own, jax.tree.leaves(state), state

    def step(now, number):
        params, _, state = now
        params, state, *_ = setup["optimizer"].step(
            params, state, key, batch=x, global_step_int=number, damping=damping
        )
        return params, jax.tree.leaves(state), state

    return first_steps(start, step)


def adamw(params):
    tx = optax.adamw(1e-3)

    def step(params, state, x):
        _, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(step, donate_argnums=(0, 1))
    return (params, tx.init(params)), lambda now, x, _: run(*now, x)


def ours(params, x, period):
    """K-FAC with inverses in every tenth step, and statistics in every `period`th."""
    vag = value_and_grad(loss_fn)
    plan = vag.plan(params, x)
    settings = {"damping": 0.01, "factor_update_steps": period, "inv_update_steps": PERIOD}
    tx = kfac(plan, 0.01, compute_method="inverse", **settings)

    def step(params, state, x, capture):
        _, grads, statistics = vag(params, x, capture=capture)
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state

    run = jax.jit(step, static_argnums=3, donate_argnums=(0, 1))
    return (params, tx.init(params)), lambda now, x, t: run(*now, x, t % period == 0)


def step_costs(params, x, cycles: int) -> dict[str, list[float]]:
    """Of each of ten steps, AdamW's median being 1."""
    own = lambda: jax.tree.map(jnp.copy, params)  # noqa: E731 (steps donate them)
    contenders = {
        "AdamW": adamw(own()),
        "K-FAC, inverse": ours(own(), x, 1),
        "K-FAC, inverse, statistics every 10": ours(own(), x, PERIOD),
    }
    now = {name: start for name, (start, _) in contenders.items()}
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in range(PERIOD)] for name in contenders}
    for cycle in range(cycles + 1):
        for name, (_, step) in contenders.items():
            for t in range(PERIOD):
                taken, now[name] = seconds_of(lambda n=now[name], t=t, step=step: step(n, x, t))
                if cycle:  # the first compiles
                    seconds[name][t].append(taken)
    one = float(np.median([s for at in seconds["AdamW"] for s in at]))
    return {name: [float(np.median(at)) / one for at in found] for name, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=whole, default=20)
    parser.add_argument("--compilations", type=whole, default=3)
    parser.add_argument("--cycles", type=whole, default=5)
    parser.add_argument("--json", type=writable)
    options = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.default_backend()}, seed 0, {options.repeats} repeats")
    params = make_params(jax.random.key(0))
    x = jax.random.uniform(jax.random.key(1), (BATCH, 784))
    inputs = [jax.random.normal(jax.random.key(i), (BATCH, side)) for i, side in enumerate(SIDES[:-1])]
    gradients = [jax.random.normal(jax.random.key(i), (BATCH, side)) for i, side in enumerate(SIDES[1:])]
    captured, plain = jax.jit(value_and_grad(loss_fn)), jax.jit(jax.value_and_grad(loss_fn))
    products = jax.jit(bare)
    functions = {
        "value_and_grad": lambda: plain(params, x),
        "value_and_grad + products": lambda: products(params, x, inputs, gradients),
        "capture": lambda: captured(params, x),
    }
    medians(functions, 2)
    times = medians(functions, options.repeats)
    for name, seconds in times.items():
        print(f"{name:28} {1e3 * seconds:8.2f} ms")
    ratio = times["capture"] / times["value_and_grad + products"]
    print(f"capture / (value_and_grad + products): {ratio:.2f}")
    costs = step_costs(params, x, options.cycles)
    for name, own in costs.items():
        amortised, plain = np.mean(own), np.median(own[1:])
        print(f"{name:36} amortised {amortised:5.2f}, plain {plain:5.2f}, first {own[0]:5.2f}")
    contenders = {
        "eigen": lambda: compile_ours(params, x, "eigen"),
        "inverse": lambda: compile_ours(params, x, "inverse"),
        "kfac-jax": lambda: compile_theirs(params, x),
    }
    starts: dict[str, list[float]] = {name: [] for name in contenders}
    steps: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.compilations):
        for name, contender in contenders.items():
            try:
                begun, first = contender()
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            else:
                starts[name].append(begun)
                steps[name].append(first)
    found = {"capture / (value_and_grad + products)": ratio}
    for what, seconds in {"start": starts, "compile the training step": steps}.items():
        for name, own in seconds.items():
            if own:
                print(f"{what:25} {name:8} {np.median(own):6.2f} s")
            if own and seconds["kfac-jax"] and name != "kfac-jax":
                key = f"{what}: {name} / kfac-jax"
                found[key] = float(np.median(own) / np.median(seconds["kfac-jax"]))
                print(f"{key}: {found[key]:.2f}")
    if options.json:
        record = {
            "command": " ".join(["python", *sys.argv]),
            "versions": versions("jax", "jaxlib", "optax", "kfac-jax"),
            "device": jax.devices()[0].device_kind,
            "seed": 0,
            "seconds": times,
            "steps / AdamW's": costs,
            "seconds to start": starts,
            "seconds to compile the step": steps,
            "ratios": found,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
