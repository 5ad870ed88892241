"""JAX's strictest settings, where every broadcast of shapes and change of dtype is to be written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from suite.jax import (
    Categorical,
    adaptive_kfac,
    dense_newton,
    eigenbases,
    kfac,
    kron,
    lra,
    value_and_grad,
)

IMAGES = np.random.default_rng(0).normal(size=(6, 6, 6, 2))
TOKENS = np.arange(18).reshape(6, 3) % 5
LABELS = np.arange(6) % 4


def parameters(dtype):
    rng = np.random.default_rng(1)
    shapes = {
        "kernel": (3, 3, 2, 4),
        "table": (5, 4),
        "scale": (4,),
        "w": (4, 7),
        "b": (7,),
        "head": (7, 4),
    }
    return {name: jnp.asarray(rng.normal(size=shape) / 2, dtype) for name, shape in shapes.items()}


def logits_of(p):
    """A convolution, an embedding, a normalization that scales, and two linear layers times numbers."""
    dtype = p["w"].dtype
    layout = jax.lax.conv_dimension_numbers(IMAGES.shape, p["kernel"].shape, ("NHWC", "HWIO", "NHWC"))
    x = jax.lax.conv_general_dilated(
        jnp.asarray(IMAGES, dtype), p["kernel"], (2, 2), "SAME", dimension_numbers=layout
    )
    x = jnp.mean(jnp.tanh(x), axis=(1, 2)) + jnp.mean(p["table"][TOKENS], axis=1)
    x = x - jnp.mean(x, axis=1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-3) * p["scale"][None]
    times = jnp.asarray(1.5, dtype)
    return jnp.tanh(x @ (times * p["w"]) + p["b"][None]) @ (p["head"] / 2)


def with_logits(p):
    logits = logits_of(p).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)), logits


def loss_fn(p):
    return with_logits(p)[0]


# name: (factory, settings, whether it is given the loss)
KFAC = {
    "kfac eigen": {},
    "kfac inverse": {"compute_method": "inverse", "weight_decay": 0.01},
    "kfac newton_schulz": {"compute_method": "newton_schulz"},
    "kfac ekfac": {"compute_method": "ekfac", "inv_update_steps": 2},
    "kfac warm": {"warm_start": True},
    "kfac halves": {
        "compute_method": "inverse",
        "factor_dtype": jnp.bfloat16,
        "inv_dtype": jnp.bfloat16,
    },
    "kfac sampled": {"compute_method": "inverse"},
    "kfac exact": {"compute_method": "inverse"},
    "adaptive eigen": {},
    "adaptive inverse": {"compute_method": "inverse"},
}
SMALL = {"block_size": np.int64(4), "preconditioner_update_probability": 1.0}
OTHERS = {
    **{
        f"kron {geometry}": (kron, {"geometry": geometry, **SMALL}, False)
        for geometry in ("Q0.5EQ1.5", "QEQ", "QUAD", "EQ", "QEP", "PRO4P", "QUAD4P")
    },
    "kron newton": (kron, SMALL, True),
    "kron newton EQ": (kron, {"geometry": "EQ", **SMALL}, True),
    "kron difference": (kron, {"hvp_method": "finite_difference", **SMALL}, True),
    "kron whole": (kron, {"whiten": "gradient", "normalize_grads": True, "clip": (1.1, 2.0)}, False),
    "kron first": (kron, {"preconditioner_init_scale": None, "weight_decay": 0.1, **SMALL}, False),
    "kron diagonal": (kron, {"memory_save_mode": "all_diag", **SMALL}, False),
    "kron apart": (kron, {"shared_factors": False, "update_first": False, **SMALL}, False),
    "kron mapped": (
        kron,
        {"lax_map_scanned_layers": True, "lax_map_batch_size": np.int64(2), **SMALL},
        False,
    ),
    "kron halves": (
        kron,
        {"mu_dtype": jnp.bfloat16, "precond_dtype": jnp.bfloat16, "stochastic_rounding": True, **SMALL},
        False,
    ),
    "lra": (lra, {"rank": np.int64(2)}, False),
    "lra newton": (lra, {"rank": np.int64(2)}, True),
    "dense newton": (dense_newton, {}, True),
    "dense EQ": (dense_newton, {"geometry": "EQ"}, True),
    "dense QEP": (dense_newton, {"geometry": "QEP"}, True),
}


def a_step(name, params):
    """A step of an optimizer, and its first state."""
    adapts = name.startswith("adaptive")
    if name in KFAC:
        fisher = {"sampled": Categorical(), "exact": Categorical(exact=True)}.get(name.split()[1])
        aux = adapts or fisher is not None
        vag = value_and_grad(with_logits if aux else loss_fn, has_aux=aux, fisher=fisher)
        key = {"key": jax.random.key(0)} if "sampled" in name else {}
        plan = vag.plan(params)
        assert all(plan.covered())
        tx = adaptive_kfac(plan, **KFAC[name]) if adapts else kfac(plan, 0.01, **KFAC[name])
    else:
        factory, settings, newton = OTHERS[name]
        tx = factory(0.1, **settings)

    def step(params, state):
        if name in KFAC:
            bases = {"bases": eigenbases(state, plan)} if "ekfac" in name else {}
            _, grads, statistics = vag(params, **key, **bases)
            extra = {"statistics": statistics} | ({"value_fn": with_logits} if adapts else {})
        else:
            grads, extra = jax.grad(loss_fn)(params), {"value_fn": loss_fn} if newton else {}
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step, tx.init(params)


def described(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.parametrize("name", [*KFAC, *OTHERS])
def test_optimizers_run_where_jax_promotes_no_shape(name):
    """JAX refuses when it traces a step, which nobody has to compile for that."""
    params = parameters(jnp.float32)
    with jax.numpy_rank_promotion("raise"):
        step, state = a_step(name, params)
        found = jax.eval_shape(step, params, state)
    assert described(found) == described((params, state))


@pytest.mark.parametrize("name", [*KFAC, *OTHERS])
def test_optimizers_run_where_jax_promotes_no_dtype(name):
    params = parameters(jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        step, state = a_step(name, params)
        step, found = jax.jit(step), params
        for _ in range(2):
            found, state = step(found, state)
    assert int(state.skipped_steps) == 0
    assert all(bool(jnp.any(found[leaf] != params[leaf])) for leaf in params)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, params)
