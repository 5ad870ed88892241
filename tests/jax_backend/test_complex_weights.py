"""Complex weights of real leaves, as of a Fourier neural operator: the diagonal of their parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_fishers import normal
from suite.jax import value_and_grad, verify

N, WIDTH, MODES = 6, 3, 4


def params(**more):
    shape = (WIDTH, WIDTH, MODES)
    return {"re": normal(*shape), "im": normal(*shape, seed=1), **more}


# Complex weights (i, o, m) of two real leaves.
MADE = {
    "complex": lambda p: lax.complex(p["re"], p["im"]),
    "1j": lambda p: p["re"] + 1j * p["im"],
    "a difference": lambda p: p["re"] - p["im"] * 2j,
    "turned over": lambda p: 0.5j * p["im"] + p["re"],
    "cast": lambda p: p["re"].astype(complex) + 1j * p["im"],
    "scaled": lambda p: 0.5 * lax.complex(p["re"], p["im"]),
    "divided": lambda p: lax.complex(p["re"], p["im"]) / 3,
    "turned": lambda p: 1j * lax.complex(p["re"], p["im"]),
    "negative": lambda p: -lax.complex(p["re"], p["im"]),
    "a number": lambda p: lax.complex(p["re"], p["im"]) + (0.3 - 1j),
    "multiplied before": lambda p: lax.complex(2 * p["re"], -p["im"]),
    "moved": lambda p: lax.complex(p["re"].swapaxes(0, 2), p["im"].swapaxes(0, 2)).swapaxes(0, 2),
    "jit": lambda p: jax.jit(lax.complex)(p["re"], p["im"]),
}
# Of spectra (n, i, m) and weights; and how many rows an example has.
USES = {
    "modes": lambda z, w: jnp.einsum("nim,iom->nom", z, w),
    "modes, weights first": lambda z, w: jnp.einsum("iom,nim->nom", w, z),
    "a mode": lambda z, w: z[..., 0] @ w[..., 0],
    "entries": lambda z, w: z * w[0],
    "sums": lambda z, w: z + w[0],
    "differences": lambda z, w: w[0] - z,
    "part of the modes": lambda z, w: jnp.einsum("nim,iom->nom", z[..., :2], w[..., :2]),
}


def loss_of(make, use):
    """A loss whose terms are examples, each with one row of every weight."""

    def loss(p, x):
        z = use(jnp.fft.rfft(x, axis=-1)[..., :MODES], make(p))
        y = jnp.concatenate([z.real, z.imag], axis=-1).reshape(len(x), -1)
        return jnp.mean(jnp.sum(jnp.sin(y) * jnp.arange(1.0, y.shape[1] + 1), axis=1))

    return loss


def squares_of_each(loss, p, x):
    """Σ over examples of the squares of what each adds to the gradient."""
    each = jax.vmap(lambda row: jax.grad(loss)(p, row[None]))(x)
    return {name: np.sum((np.asarray(g) / len(x)) ** 2, 0) for name, g in each.items()}


def summed(statistics):
    return {name: np.asarray(sums.main.G).ravel() for name, sums in statistics.layers.items()}


def check(loss, p, x, rtol=1e-9):
    verify(loss, p, x, rtol=1e-9)
    vag = value_and_grad(loss, require="all")
    value, grads, statistics = jax.jit(vag)(p, x)
    expected = squares_of_each(loss, p, x)
    assert value == pytest.approx(loss(p, x))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), grads, jax.grad(loss)(p, x)
    )
    found = summed(statistics)
    for name, squares in expected.items():
        np.testing.assert_allclose(found[f"['{name}']"], squares.ravel(), rtol=rtol, atol=1e-12)
    return vag.plan(p, x)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("made", MADE)
def test_two_real_leaves_make_a_complex_weight(made, use):
    plan = check(loss_of(MADE[made], USES[use]), params(), normal(N, WIDTH, 8, seed=2))
    route = next(r for r in plan.routing if r.parameter == "['re']")
    assert route.reason.startswith("diagonal: a part of a complex weight")


def complexes(*shape, seed=20):
    return normal(*shape, seed=seed) + 1j * normal(*shape, seed=seed + 1)


# Weights (i, o, m) whose inputs' or outputs' numbers are multiplied, known ones or of other leaves.
SCALES = {
    "outputs": lambda p: p["g"][:, None],
    "inputs": lambda p: p["g"][:, None, None],
    "modes": lambda p: p["g"],
    "outputs and modes": lambda p: jnp.outer(p["g"], p["g"]),
    "known numbers": lambda p: complexes(WIDTH, 1),
    "a known number each": lambda p: complexes(WIDTH, 1, 1) + jnp.exp(p["g"][:, None, None]),
    "of complex numbers": lambda p: jnp.exp(-jnp.exp(p["g"]) + 1j * p["h"])[:, None],
}


@pytest.mark.parametrize("turned", ["times", "before", "divided"])
@pytest.mark.parametrize(
    ("name", "use"),
    # What is closed over may be examples', unless it leads to products.
    [(name, use) for name in SCALES for use in ("modes", "a mode", "entries", "sums")
     if "known" not in name or "mode" in use],
)  # fmt: skip
def test_rows_and_columns_of_a_complex_weight_are_multiplied(name, use, turned):
    modes = WIDTH if "modes" in name else 1
    leaf = normal(modes if name == "modes" else WIDTH, seed=8)

    def made(p):
        w, scale = lax.complex(p["re"], p["im"])[..., :WIDTH], SCALES[name](p)
        w = {"times": lambda: w * scale, "before": lambda: scale * w, "divided": lambda: w / scale}[
            turned
        ]()
        return w

    def loss(p, x):
        z = USES[use](jnp.fft.rfft(x, axis=-1)[..., :WIDTH], made(p))
        y = jnp.concatenate([z.real, z.imag], axis=-1).reshape(len(x), -1)
        return jnp.mean(jnp.sum(jnp.sin(y) * jnp.arange(1.0, y.shape[1] + 1), axis=1))

    shape = (WIDTH, WIDTH, WIDTH)
    p = {"re": normal(*shape), "im": normal(*shape, seed=1), "g": leaf, "h": normal(WIDTH, seed=9)}
    x = normal(N, WIDTH, 8, seed=2)
    verify(loss, p, x, rtol=1e-9)
    *_, statistics = value_and_grad(loss)(p, x)
    expected, found = squares_of_each(loss, p, x), summed(statistics)
    for part in ("re", "im"):
        np.testing.assert_allclose(
            found[f"['{part}']"], expected[part].ravel(), rtol=1e-9, atol=1e-12 * expected[part].max()
        )


def test_halves_of_one_leaf_are_the_parts():
    """As layers of state spaces have them, (..., 2)."""
    p = {"both": normal(WIDTH, WIDTH, MODES, 2)}
    loss = loss_of(lambda p: p["both"][..., 0] + 1j * p["both"][..., 1], USES["modes"])
    x = normal(N, WIDTH, 8, seed=2)
    verify(loss, p, x, rtol=1e-9)
    _, _, statistics = value_and_grad(loss)(p, x)
    apart = {"re": p["both"][..., 0], "im": p["both"][..., 1]}
    _, _, expected = value_and_grad(loss_of(MADE["complex"], USES["modes"]))(apart, x)
    own = summed(statistics)["['both']"].reshape(-1, 2)
    for i, name in enumerate(("re", "im")):
        np.testing.assert_allclose(own[:, i], summed(expected)[f"['{name}']"], rtol=1e-12)


def test_real_gains_of_a_spectrum():
    p, x = {"gain": normal(WIDTH, MODES)}, normal(N, WIDTH, 8, seed=2)
    check(loss_of(lambda p: p["gain"], lambda z, gain: gain * z), p, x)


def test_positions_that_share_a_gain_are_rows():
    """Or with 'reduce' all positions of an example are one."""
    p, x = {"re": normal(WIDTH, 1), "im": normal(WIDTH, 1, seed=1)}, normal(N, WIDTH, 8, seed=2)
    loss = loss_of(MADE["complex"], lambda z, w: z * w)
    verify(loss, p, x, rtol=1e-9)
    *_, reduced = value_and_grad(loss, rows="reduce")(p, x)
    for name, expected in squares_of_each(loss, p, x).items():
        # At each of the positions that share an example's sum, and over how many these are.
        np.testing.assert_allclose(summed(reduced)[f"['{name}']"], expected.ravel(), rtol=1e-9)
    each = {name: jnp.broadcast_to(leaf, (N, WIDTH, MODES)) for name, leaf in p.items()}
    by_position = jax.grad(lambda p: loss_of(MADE["complex"], lambda z, w: z * w)(p, x))(each)
    *_, statistics = value_and_grad(loss)(p, x)
    for name, rows in by_position.items():
        expected = np.sum(np.asarray(rows) ** 2, (0, 2))
        np.testing.assert_allclose(summed(statistics)[f"['{name}']"], expected, rtol=1e-9)


def stacked(p, x):
    """Layers one behind the other."""

    def layer(h, own):
        z = jnp.fft.rfft(h, axis=-1)
        z = jnp.einsum("nim,iom->nom", z[..., :MODES], own["re"] + 1j * own["im"])
        return jnp.tanh(h + jnp.fft.irfft(z, n=h.shape[-1], axis=-1)), None

    return jnp.mean(jnp.sum(lax.scan(layer, x, p)[0] ** 2, (1, 2)))


def test_a_scan_over_stacked_layers_has_those_of_each():
    p = {name: jnp.stack([leaf, 0.5 * leaf]) for name, leaf in params().items()}
    check(stacked, p, normal(N, WIDTH, 8, seed=2))


def test_losses_of_one_example_each_are_the_same_under_vmap():
    p, x = params(), normal(N, WIDTH, 8, seed=2)
    loss = loss_of(MADE["1j"], USES["modes"])
    each = jax.vmap(lambda p, row: loss(p, row[None]), (None, 0))
    check(lambda p, x: jnp.mean(each(p, x)), p, x)
    check(jax.checkpoint(loss), p, x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_factors_have_the_types_of_the_leaves(dtype):
    loss, x = (
        loss_of(lambda p: MADE["1j"](jax.tree.map(jnp.float32, p)), USES["modes"]),
        normal(N, WIDTH, 8),
    )
    p = jax.tree.map(lambda leaf: leaf.astype(dtype), params())
    *_, statistics = value_and_grad(loss, require="all")(p, jnp.float32(x))
    expected = squares_of_each(loss, jax.tree.map(jnp.float32, p), jnp.float32(x))
    for name, squares in expected.items():
        found = statistics.layers[f"['{name}']"].main.G
        np.testing.assert_allclose(found.ravel(), squares.ravel(), rtol=1e-4)


PLAIN = {
    "a function": lambda z, p: z * jnp.exp(lax.complex(p["re"], p["im"])[0]),
    "both parts of one": lambda z, p: z * ((1 + 1j) * p["re"][0]) + z * p["im"][0],
    "a conjugate": lambda z, p: z * jnp.conj(lax.complex(p["re"], p["im"])[0]),
    "a length": lambda z, p: z * jnp.abs(lax.complex(p["re"], p["im"])[0]),
    "with each other": lambda z, p: z * (lax.complex(p["re"], p["im"])[0] * (p["re"][0] + 1j)),
    "turned": lambda z, p: z * jnp.exp(1j * p["re"][0]) + z * p["im"][0],
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_not_understood_is_plain_and_named(name):
    p, x = params(w=normal(8, 8)), normal(N, WIDTH, 8, seed=2)

    def loss(p, x):
        z = PLAIN[name](jnp.fft.rfft(x @ p["w"], axis=-1)[..., :MODES], p)
        return jnp.mean(jnp.abs(z) ** 2)

    routing = value_and_grad(loss).plan(p, x).routing
    route = next(r for r in routing if r.parameter == "['re']")
    assert route.treatment == "plain"
    assert "used by" in route.reason
    verify(loss, p, x, rtol=1e-9)
