"""`lax.ragged_dot`: rows that are sorted by expert, with a stack of matrices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jax_fishers import check, normal
from suite.jax import value_and_grad

SIZES = (4, 0, 3, 2)  # of 9 rows; one expert has none
EXPERTS, ROWS = len(SIZES), sum(SIZES)


def weights():
    return {"up": normal(EXPERTS, 4, 5), "down": normal(EXPERTS, 5, 3, seed=1)}


def by_ragged_dot(p, x, sizes):
    return lax.ragged_dot(jnp.tanh(lax.ragged_dot(x, p["up"], sizes)), p["down"], sizes)


def turned(p, x, sizes):
    """Stacks as (experts, d_out, d_in), or with the experts' axis last."""
    up, down = p["up"].swapaxes(1, 2), p["down"].transpose(1, 2, 0)
    hidden = jnp.tanh(lax.ragged_dot(x, up.swapaxes(1, 2), sizes))
    return lax.ragged_dot(hidden, down.transpose(2, 0, 1), sizes)


def general(p, x, sizes):
    """Contracted along the stack's last axis."""
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    up = p["up"].swapaxes(1, 2)
    hidden = jnp.tanh(lax.ragged_dot_general(x, up, sizes, numbers))
    return lax.ragged_dot(hidden, p["down"], sizes)


RUNS = {
    "ragged_dot": by_ragged_dot,
    "turned": turned,
    "general": general,
    "jit": jax.jit(by_ragged_dot),
    "remat": jax.checkpoint(by_ragged_dot),
    "cond": lambda p, x, sizes: lax.cond(x[0, 0] < 100, by_ragged_dot, turned, p, x, sizes),
}


def each_expert(p, x, target, of=SIZES):
    """For each layer and expert Σ a aᵀ and Σ g gᵀ, by a product with each matrix by itself."""
    of_expert = np.repeat(np.arange(len(of)), of)
    x, target = x[: len(of_expert)], target[: len(of_expert)]

    def loss(shifts):
        hidden = jnp.tanh(
            jnp.stack([row @ p["up"][e] for row, e in zip(x, of_expert, strict=True)]) + shifts[0]
        )
        y = jnp.stack([row @ p["down"][e] for row, e in zip(hidden, of_expert, strict=True)])
        return jnp.sum((y + shifts[1] - target) ** 2), (x, hidden)

    zeros = [jnp.zeros((len(x), n)) for n in (5, 3)]
    gradients, inputs = jax.grad(loss, has_aux=True)(zeros)
    return [
        [jnp.stack([z[of_expert == e].T @ z[of_expert == e] for e in range(len(of))]) for z in (a, g)]
        for a, g in zip(inputs, gradients, strict=True)
    ]


@pytest.mark.parametrize("name", RUNS)
def test_each_expert_has_the_second_moments_of_its_rows(name):
    p, x, target = weights(), normal(ROWS, 4, seed=2), normal(ROWS, 3, seed=3)
    sizes, run = jnp.asarray(SIZES, jnp.int32), RUNS[name]
    plan, statistics = check(
        lambda p, x, sizes: jnp.sum((run(p, x, sizes) - target) ** 2), p, x, sizes, terms=lambda *_: 1
    )
    assert {(layer.kind, layer.groups) for layer in plan.layers} == {("grouped", EXPERTS)}
    for leaf, expected in zip(("up", "down"), each_expert(p, x, target), strict=True):
        main = statistics[f"['{leaf}']"].main
        for got, own in zip((main.A, main.G), expected, strict=True):
            np.testing.assert_allclose(got, own, rtol=1e-12, atol=1e-13)
        np.testing.assert_array_equal(main.rows, SIZES)


def test_rows_behind_the_last_group_are_none():
    p, x, target = weights(), normal(ROWS + 2, 4, seed=2), normal(ROWS + 2, 3, seed=3)
    sizes = jnp.asarray(SIZES, jnp.int32)
    _, statistics = check(lambda p, x: jnp.sum((by_ragged_dot(p, x, sizes) - target) ** 2), p, x)
    for leaf, expected in zip(("up", "down"), each_expert(p, x, target), strict=True):
        main = statistics[f"['{leaf}']"].main
        np.testing.assert_allclose(main.A, expected[0], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(main.G, expected[1], rtol=1e-12, atol=1e-13)


def test_long_sides_are_diagonal():
    p, x, target = weights(), normal(ROWS, 4, seed=2), normal(ROWS, 3, seed=3)
    sizes = jnp.asarray(SIZES, jnp.int32)

    def loss(p, x):
        return jnp.sum((by_ragged_dot(p, x, sizes) - target) ** 2)

    _, statistics = check(loss, p, x, max_factor_size=3)
    up, down = each_expert(p, x, target)
    diagonals = [np.diagonal(both, axis1=1, axis2=2) for both in (*up, down[0])]
    mains = [statistics[f"['{leaf}']"].main for leaf in ("up", "down")]
    for got, expected in zip((mains[0].A, mains[0].G, mains[1].A), diagonals, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(mains[1].G, down[1], rtol=1e-12, atol=1e-13)


def test_a_gate_shares_the_inputs_of_what_it_multiplies():
    p = {**weights(), "gate": normal(EXPERTS, 4, 5, seed=4)}
    x, sizes = normal(ROWS, 4, seed=2), jnp.asarray(SIZES, jnp.int32)

    def loss(p, x, sizes):
        hidden = jax.nn.silu(lax.ragged_dot(x, p["gate"], sizes)) * lax.ragged_dot(x, p["up"], sizes)
        return jnp.mean(lax.ragged_dot(hidden, p["down"], sizes) ** 2)

    plan, _ = check(loss, p, x, sizes)
    assert {layer.name: layer.input_of for layer in plan.layers} == {
        "['down']": None,
        "['gate']": None,
        "['up']": "['gate']",
    }


def test_a_routed_model_of_which_layers_are_scanned():
    """Tokens go to their two experts, sorted by a router."""
    layers, count, chosen = 2, 3, 2
    p = {
        "router": normal(layers, 4, count),
        "up": normal(layers, count, 4, 5, seed=1),
        "down": normal(layers, count, 5, 4, seed=2),
        "head": normal(4, 2, seed=3),
    }
    x = normal(6, 4, seed=4)

    def routed(p, h):
        gates, experts = lax.top_k(jax.nn.softmax(h @ p["router"]), chosen)
        order = jnp.argsort(experts.reshape(-1))
        sizes = jnp.bincount(experts.reshape(-1), length=count).astype(jnp.int32)
        y = jnp.tanh(lax.ragged_dot(h[order // chosen], p["up"], sizes))
        y = lax.ragged_dot(y, p["down"], sizes)[jnp.argsort(order)]
        return h + jnp.einsum("nkd,nk->nd", y.reshape(-1, chosen, 4), gates)

    def run(p, x):
        stacks = {name: stack for name, stack in p.items() if name != "head"}
        h, _ = lax.scan(lambda h, own: (routed(own, h), None), x, stacks)
        return jnp.mean(jnp.sum((h @ p["head"]) ** 2, 1))

    def by_all(shifts):
        """Every expert for every token, of which those that were not chosen count nothing."""
        h, seen = x, []
        for i in range(layers):
            gates, experts = lax.top_k(jax.nn.softmax(h @ p["router"][i]), chosen)
            one_hot = jax.nn.one_hot(experts, count)
            hidden = jnp.tanh(jnp.einsum("nd,edh->neh", h, p["up"][i]) + shifts["up"][i])
            y = jnp.einsum("neh,ehd->ned", hidden, p["down"][i]) + shifts["down"][i]
            seen.append((one_hot.sum(1), h, hidden))
            h = h + jnp.einsum("nke,nk,ned->nd", one_hot, gates, y)
        return jnp.mean(jnp.sum((h @ p["head"]) ** 2, 1)), seen

    _, statistics = check(run, p, x)
    assert float(statistics.terms) == len(x)
    zeros = {name: jnp.zeros((layers, len(x), count, n)) for name, n in (("up", 5), ("down", 4))}
    gradients, seen = jax.grad(by_all, has_aux=True)(zeros)
    of, h, hidden = (jnp.stack(each) for each in zip(*seen, strict=True))
    inputs = {"up": jnp.einsum("lne,lnd,lnf->ledf", of, h, h)}
    inputs["down"] = jnp.einsum("lne,lneh,lnek->lehk", of, hidden, hidden)
    for name in ("up", "down"):
        outputs = jnp.einsum("lneh,lnek->lehk", gradients[name], gradients[name])
        main = statistics[f"['{name}']"].main
        for got, expected in ((main.A, inputs[name]), (main.G, outputs), (main.rows, of.sum(1))):
            np.testing.assert_allclose(got.reshape(expected.shape), expected, rtol=1e-10, atol=1e-12)


def test_terms_are_rows_where_the_last_product_is_grouped():
    p, x = weights(), normal(ROWS, 4, seed=2)
    sizes = jnp.asarray(SIZES, jnp.int32)
    vag = value_and_grad(lambda p, x, sizes: jnp.mean(jnp.sum(by_ragged_dot(p, x, sizes) ** 2, 1)))
    assert float(vag(p, x, sizes)[2].terms) == ROWS


def test_members_under_vmap_are_named():
    p = {"up": normal(2, EXPERTS, 4, 5), "head": normal(5, 3, seed=1)}
    x, sizes = normal(2, ROWS, 4, seed=2), jnp.asarray([SIZES, SIZES], jnp.int32)

    def loss(p, x):
        hidden = jax.vmap(lax.ragged_dot)(x, p["up"], sizes)
        return jnp.sum((jnp.tanh(hidden.mean(0)) @ p["head"]) ** 2)

    check(loss, p, x, uncovered=["['up']"])
