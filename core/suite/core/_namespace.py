"""Which array namespace an array belongs to, and where its factorizations live.

Every core function starts with `xp = array_namespace(x)` and then speaks the Python array API
standard (2024.12). numpy, jax.numpy and array_api_strict speak it themselves; `_torch` supplies the
names that torch lacks. Nothing here imports torch or jax: whoever passes a tensor has done so.

The namespace is inferred per call and not cached by type: a cache makes `torch.compile` recompile.
"""

from __future__ import annotations

from typing import Any

_torch: Any = None  # the module, once it is loaded: an import in each call takes longer than the rest

Array = Any
Namespace = Any
Scalar = Any  # a Python number or a 0-d array


def array_namespace(*arrays: Array) -> Namespace:
    """The array namespace of the first array; all arrays are taken to share it."""
    x = arrays[0]
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__()
    if _torch is None:
        import suite.core._torch  # noqa: F401  # lets itself be known here
    return _torch


def factorizations(xp: Namespace) -> Any:
    """What the core needs beyond the standard, for a namespace: a module of functions on matrices.

    `cholesky_inverse`, `eigh`, `qr` and `solve_triangular`, for the standard's own raise on a bad
    matrix, wait for the device to find out, or do not exist; `gram`, `summed_gram`, `correlations`,
    `over_groups`, `diagonal`, `trace`, `are_finite`, `largest_entry`, `largest_row`, `root_mean_square`,
    `inner_product`, `add_diagonal`, `pack` and `unpack`, which in the standard's words compute, copy or
    compile more than they need to; `usually`, a `where` that may look; `parts`, what to work on at a
    time; `wrapping_product`, of integers that overflow; `work_of_a_launch`, what an operation costs
    beside its products; `multiplies_as_it_is`, what hardware is fast at.
    """
    name = xp.__name__
    if name == "suite.core._torch":
        return xp
    if name.startswith("jax"):
        from suite.core import _jax

        return _jax
    from suite.core import _numpy

    return _numpy


def device_of(x: Array) -> Any:
    """A value for `device=` that puts a new array beside `x` (None in JAX: the compiler decides)."""
    return None if array_namespace(x).__name__.startswith("jax") else x.device


def as_scalar(value: Scalar, like: Array) -> Scalar:
    """A hyperparameter ready to multiply `like`: numbers pass, 0-d arrays take its dtype.

    A 0-d float32 array times a bfloat16 one is bfloat16 in torch and float32 in JAX; casting the
    scalar first gives the operand's dtype everywhere.
    """
    if isinstance(value, (int, float)):
        return float(value)
    xp = array_namespace(like)
    return xp.astype(xp.asarray(value), like.dtype)


def padded_axes(x: Array, ndim: int) -> Array:
    """`x` as (1, ..., 1, *shape) with `ndim` axes: JAX may be set to refuse to add them by itself."""
    return x[(None,) * (ndim - x.ndim) + (...,)]


def lift(x: Array) -> Array:
    """`x` in at least single precision: factorizations and squared sums refuse less."""
    xp = array_namespace(x)
    return xp.astype(x, xp.float32) if xp.finfo(x.dtype).bits < 32 else x
