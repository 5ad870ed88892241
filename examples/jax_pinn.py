"""Poisson's equation on the unit square by a PINN: python examples/jax_pinn.py [--plot loss.png]"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jax_training import arguments, plot, train
from suite.jax import Gaussian


def solution(x):
    return jnp.prod(jnp.sin(jnp.pi * x), -1)


def u(params, x):
    y = x
    for layer in params[:-1]:
        y = jnp.tanh(y @ layer["w"] + layer["b"])
    # zero on the boundary
    return (y @ params[-1]["w"] + params[-1]["b"])[0] * jnp.prod(x * (1 - x)) * 16


def loss_fn(params, x):
    laplacian = jax.vmap(lambda x: jnp.trace(jax.hessian(u, 1)(params, x)))(x)
    residual = laplacian + 2 * jnp.pi**2 * solution(x)
    return 0.5 * jnp.mean(residual**2), residual[:, None]


def main() -> float:
    options = arguments("PINN", 300)
    sides = (2, 8, 8, 1) if options.tiny else (2, 32, 32, 1)
    rng = np.random.default_rng(0)
    params = [
        {"w": jnp.asarray(rng.normal(size=(i, o)) / np.sqrt(i), jnp.float32), "b": jnp.zeros(o)}
        for i, o in itertools.pairwise(sides)
    ]
    points = jnp.asarray(rng.uniform(size=(32 if options.tiny else 500, 2)), jnp.float32)
    params, losses = train(
        loss_fn, params, [(points,)], 10 if options.tiny else options.steps,
        has_aux=True, fisher=Gaussian(exact=True),
        adaptive=True, compute_method="inverse", inv_update_steps=5,
    )  # fmt: skip
    plot(options.plot, losses, "mean squared residual / 2")
    x = jnp.asarray(rng.uniform(size=(1000, 2)), jnp.float32)
    found = jax.vmap(u, (None, 0))(params, x)
    error = float(jnp.linalg.norm(found - solution(x)) / jnp.linalg.norm(solution(x)))
    print(f"loss {losses[0]:.3g} -> {losses[-1]:.3g}, relative error of u {error:.1e}")
    return error


if __name__ == "__main__":
    main()
