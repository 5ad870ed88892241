"""Variational Monte Carlo of two particles in a harmonic trap.

    python examples/jax_vmc.py [--plot energy.png]

The exact energy of two free particles in two dimensions is 2. Statistics are those of log |ψ|², whose
Fisher matrix makes the direction a Kronecker-factored stochastic reconfiguration.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from jax_training import arguments, plot
from suite.jax import kfac, value_and_grad


def log_psi(params, r):
    features = jnp.concatenate([r, jnp.sum(r * r, -1, keepdims=True)], -1)
    h = jnp.tanh(features @ params["a"]["w"] + params["a"]["b"])
    h = jnp.tanh(h @ params["b"]["w"] + params["b"]["b"])
    return jnp.sum(h @ params["out"]) - 0.3 * jnp.sum(r * r)


def local_energy(params, r):
    flat = lambda x: log_psi(params, x.reshape(r.shape))  # noqa: E731
    gradient, hessian = jax.grad(flat)(r.ravel()), jax.hessian(flat)(r.ravel())
    return -0.5 * (jnp.trace(hessian) + jnp.sum(gradient**2)) + 0.5 * jnp.sum(r * r)


def loss_fn(params, r, energies):
    """Its gradient is the energy's: E[2 (E_L - E) ∇ log |ψ|]."""
    logs = jax.vmap(log_psi, (None, 0))(params, r)
    return jnp.mean(2 * logs * jax.lax.stop_gradient(energies - energies.mean()))


def walk(params, r, key, moves=10, width=0.6):
    """Metropolis steps of |ψ|²."""
    density = jax.vmap(lambda r: 2 * log_psi(params, r))

    def move(r, key):
        step, accept = jax.random.split(key)
        proposed = r + width * jax.random.normal(step, r.shape)
        ratio = density(proposed) - density(r)
        yes = jnp.log(jax.random.uniform(accept, ratio.shape)) < ratio
        return jnp.where(yes[:, None, None], proposed, r), None

    return jax.lax.scan(move, r, jax.random.split(key, moves))[0]


def main() -> float:
    options = arguments("VMC", 200)
    walkers, width, steps = (64, 8, 10) if options.tiny else (512, 32, options.steps)
    rng = np.random.default_rng(0)

    def weight(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    params = {
        "a": {"w": weight(3, width), "b": jnp.zeros(width)},
        "b": {"w": weight(width, width), "b": jnp.zeros(width)},
        "out": 0.1 * weight(width, 1),
    }
    r = jnp.asarray(rng.normal(size=(walkers, 2, 2)), jnp.float32)
    # Of log |ψ| alone: walkers are drawn from |ψ|², so that its empirical Fisher is the true one.
    # It is a sum over particles, after the last layer: terms are walkers, not particles.
    score = value_and_grad(lambda p, r: jnp.mean(jax.vmap(log_psi, (None, 0))(p, r)), terms=len)
    plan = score.plan(params, r)
    print(plan)
    tx = kfac(
        plan, 0.05, momentum=0.0, damping=0.01, kl_clip=0.01, inv_update_steps=2,
        fallback=optax.adam(1e-3),
    )  # fmt: skip

    @jax.jit
    def step(params, state, r, key):
        r = walk(params, r, key)
        energies = jax.vmap(local_energy, (None, 0))(params, r)
        grads = jax.grad(loss_fn)(params, r, energies)
        _, _, statistics = score(params, r)
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state, r, energies.mean()

    r = jax.jit(walk)(params, r, jax.random.key(0))
    state, history = tx.init(params), []
    for number in (bar := tqdm(range(steps), mininterval=1.0)):
        params, state, r, energy = step(params, state, r, jax.random.key(number + 1))
        history.append(float(energy))
        bar.set_postfix(energy=f"{history[-1]:.4f}")
    plot(options.plot, history, "energy", log=False)
    final = float(np.mean(history[-max(steps // 10, 1) :]))
    print(f"energy {history[0]:.3f} -> {final:.4f} (exact: 2)")
    return final


if __name__ == "__main__":
    main()
