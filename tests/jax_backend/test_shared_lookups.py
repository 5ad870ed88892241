"""Lookups once for all examples, as positions are, against the same rows looked up for each example."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jax_fishers import check, normal
from suite.jax import scale_by_kfac, value_and_grad, verify

N, T, D = 6, 5, 4
TOKENS = np.random.default_rng(0).integers(0, 7, (N, T))
TYPES = jnp.zeros(T, int)


def parameters():
    return {
        "head": normal(D, 3),
        "positions": normal(T + 2, D, seed=1),
        "tokens": normal(7, D, seed=2),
        "types": normal(2, D, seed=3),
    }


def each(x, indices):
    """(...) -> (N, ...): the same for every example."""
    return jnp.broadcast_to(indices, (x.shape[0], *indices.shape))


def once(x, indices):
    return indices


def take(table, indices):
    return jax.jit(functools.partial(jnp.take, axis=0))(table, indices)


# by name: the sum of embeddings, of indices that are `look`ed up once or for each example
SUMS = {
    "indexed": lambda p, x, look: p["tokens"][x] + p["positions"][look(x, jnp.arange(T))],
    "taken": lambda p, x, look: take(p["positions"], look(x, jnp.arange(T))) + take(p["tokens"], x),
    "an axis in front": lambda p, x, look: (
        p["tokens"][x] + p["positions"][look(x, jnp.arange(T))].reshape(-1, T, D)
    ),
    "shifted and cast": lambda p, x, look: (
        p["tokens"][x].astype(jnp.float32)
        + p["positions"].astype(jnp.float32)[look(x, jnp.arange(T) + 2)]
    ),
    "beside types": lambda p, x, look: (
        p["tokens"][x] + (p["positions"][look(x, jnp.arange(T))] + p["types"][look(x, TYPES)])
    ),
    "after types": lambda p, x, look: (
        (p["tokens"][x] + p["types"][look(x, TYPES)]) + p["positions"][look(x, jnp.arange(T))]
    ),
    "scaled": lambda p, x, look: p["tokens"][x] - (0.5 * p["positions"])[look(x, jnp.arange(T))],
    "rematerialized": lambda p, x, look: jax.checkpoint(
        lambda p: p["tokens"][x] + p["positions"][look(x, jnp.arange(T))]
    )(p),
    "broadcast": lambda p, x, look: (
        jnp.broadcast_to(p["positions"][look(x, jnp.arange(T))], (N, T, D)) + p["tokens"][x]
    ),
}


def loss_of(add, look):
    def loss(p, x):
        return jnp.mean(jnp.sin(jnp.tanh(add(p, x, look)) @ p["head"]))

    return loss


def moments(loss, *arguments, **settings):
    statistics = jax.jit(value_and_grad(loss, **settings))(*arguments)[2]
    found = {name: sums.main for name, sums in statistics.layers.items()}
    return {name: (s.A, s.G, s.rows) for name, s in found.items()}, statistics.terms


def assert_same(found, expected, rtol=1e-9):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * 1e-2)


@pytest.mark.parametrize("rows", ["expand", "reduce"])
@pytest.mark.parametrize("name", SUMS)
def test_what_examples_have_in_common_is_as_if_each_had_its_own(name, rows):
    loss, rtol = loss_of(SUMS[name], once), 1e-5 if "cast" in name else 1e-9
    expected = moments(loss_of(SUMS[name], each), parameters(), TOKENS, rows=rows)
    assert_same(moments(loss, parameters(), TOKENS, rows=rows), expected, rtol)
    verify(loss, parameters(), TOKENS, rtol=rtol)


def test_classes_that_are_looked_up_are_no_terms():
    """Prototypes, label embeddings, sampled softmax: as many terms as examples, not as classes."""

    def loss(p, x):
        return jnp.mean(jax.nn.logsumexp(jnp.tanh(x @ p["w"]) @ p["table"][jnp.arange(2)].T, -1))

    params = {"w": normal(3, D), "table": normal(7, D, seed=1)}
    x = normal(N, 3, seed=2)
    once, twice = (moments(loss, params, jnp.tile(x, (k, 1))) for k in (1, 2))
    assert (float(once[1]), float(twice[1])) == (N, 2 * N)
    assert_same(2 * twice[0]["['w']"][1], once[0]["['w']"][1])


def test_examples_by_vmap():
    def loss(p, x):
        embedded = jax.vmap(lambda row: p["tokens"][row] + p["positions"][jnp.arange(T)])(x)
        return jnp.mean(jnp.sin(jnp.tanh(embedded) @ p["head"]))

    expected = moments(loss_of(SUMS["indexed"], each), parameters(), TOKENS)
    assert_same(moments(loss, parameters(), TOKENS), expected)


def test_micro_batches_are_the_whole():
    loss = loss_of(SUMS["indexed"], once)
    (whole, _), parts = moments(loss, parameters(), TOKENS), []
    for rows in np.split(TOKENS, 3):
        parts.append(moments(loss, parameters(), rows)[0]["['positions']"])
    A, G, rows = (sum(x) for x in zip(*parts, strict=True))
    expected = whole["['positions']"]
    assert_same(
        (A, G / 9, rows), expected
    )  # of means over a third of the terms gradients are three times as large


@pytest.mark.parametrize("flat", [False, True])
def test_relative_positions_of_attention(flat):
    """(T, T, heads), transposed, for all examples; the oracle has the gradients by each one's own."""
    heads, distance = 2, jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T))
    params = {"relative": normal(T, heads, seed=4), "w": normal(D, D, seed=5)}
    x = normal(N, T, D, seed=6)

    def attended(bias, p, x):
        h = (x @ p["w"]).reshape(*x.shape[:-1], heads, D // heads)
        logits = jnp.einsum("nqhd,nkhd->nhqk", h, h) + bias
        return jnp.mean(jnp.sin(jax.nn.softmax(logits)) ** 2)

    def loss(p, x):
        if flat:
            found = p["relative"][distance.reshape(-1)].reshape(T, T, heads)
        else:
            found = p["relative"][distance]
        return attended(found.transpose(2, 0, 1)[None], p, x)

    found = moments(loss, params, x)[0]["['relative']"]
    bias = jnp.broadcast_to(params["relative"][distance].transpose(2, 0, 1), (N, heads, T, T))
    g = jnp.moveaxis(jax.grad(attended)(bias, params, x), 1, -1).reshape(-1, heads)
    counts = N * np.bincount(np.asarray(distance).ravel(), minlength=T)
    assert_same(found, (counts[None] * 1.0, (g.T @ g)[None], jnp.asarray([N * T * T * 1.0])))


@pytest.mark.parametrize("how", ["constant", "computed", "column", "permuted"])
def test_numbers_that_are_looked_up_for_all_examples(how):
    """A table without features, as of relative positions of one head, or entries in another order."""
    distance = np.abs(np.arange(T)[:, None] - np.arange(T))
    indices = distance[0, ::-1] if how == "permuted" else distance

    def added(numbers, p, x):
        h = x @ p["w"]
        if how == "permuted":
            return jnp.mean(jnp.sin(h[..., 0] + numbers) ** 2)
        return jnp.mean(jnp.sin(jax.nn.softmax(jnp.einsum("nqd,nkd->nqk", h, h) + numbers)) ** 2)

    def loss(p, x):
        table = p["relative"]
        if how == "computed":
            i = jnp.arange(T)
            return added(table[jnp.abs(i[:, None] - i)], p, x)
        return added(table[:, None][indices][..., 0] if how == "column" else table[indices], p, x)

    params, x = {"relative": normal(T, seed=4), "w": normal(D, D, seed=5)}, normal(N, T, D, seed=6)
    found = moments(loss, params, x)[0]["['relative']"]
    every = jnp.broadcast_to(params["relative"][indices], (N, *indices.shape))
    g = jax.grad(added)(every, params, x)
    counts = N * np.bincount(indices.ravel(), minlength=T)
    assert_same(
        found, (counts[None] * 1.0, jnp.sum(g**2)[None, None, None], jnp.asarray([1.0 * g.size]))
    )
    verify(loss, params, x)


@pytest.mark.parametrize(
    "weights",
    [
        lambda w: w[np.array([2, 0, 1, 3])],
        lambda w: jnp.take(w, jnp.arange(D)[::-1], axis=0),
        lambda w: w.T[np.array([1, 2, 0])].T,
        lambda w: 2 * jnp.tanh(w[np.array([2, 0, 1, 3])]),
        lambda w: jnp.fft.ifft(jnp.fft.fft(w[::-1][np.array([2, 0, 1, 3])])).real,
    ],
)
def test_weights_that_are_looked_up_are_plain(weights):
    """Once for all examples: what they would be preconditioned with vanishes near a minimum."""

    def loss(p, x):
        return jnp.mean(jnp.sum((jnp.tanh(x @ p["v"]) @ weights(p["w"])) ** 2, -1))

    params, x = {"v": normal(3, D), "w": normal(D, 3, seed=1)}, normal(N, 3, seed=2)
    plan = value_and_grad(loss).plan(params, x)
    (route,) = (route for route in plan.routing if route.parameter == "['w']")
    assert route.treatment == "plain"
    assert "a lookup of what is then a product's weight" in route.reason
    assert [layer.name for layer in plan.layers] == ["['v']"]
    assert set(value_and_grad(loss)(params, x[:1])[2].layers) == {"['v']"}  # a last batch of one, too


STEPS = 3


def members(p, x):
    """Each has stacked weights of its own, which `vmap` has a loop look up."""

    def member(w):
        return lax.fori_loop(0, STEPS, lambda i, h: jnp.tanh(h @ w[i]), x)

    return jax.vmap(member)(p["w"])


@pytest.mark.parametrize(
    ("run", "shape"),
    [
        (members, (2, STEPS, D, D)),
        (lambda p, x: jnp.einsum("nd,mde->mne", x, p["w"][np.array([1, 0])]), (2, D, D)),
        (lambda p, x: jax.vmap(lambda w: x @ w.T)(p["w"][np.array([2, 0, 1])]), (3, D, D)),
        (
            lambda p, x: jnp.einsum(
                "ntd,td->nt", x[:, None] * np.array([[[1.0], [2.0]]]), p["w"][np.array([1, 0])]
            ),
            (2, D),
        ),
    ],
)
def test_weights_of_members_that_are_looked_up_are_plain(run, shape):
    """Their gradients are sums over the examples, too: near a minimum those of each do not vanish."""

    def loss(p, x):
        return jnp.sum(jnp.sin(run(p, jnp.tanh(x @ p["v"]))))

    params, x = {"v": normal(3, D), "w": normal(*shape, seed=1)}, normal(N, 3, seed=2)
    plan, statistics = check(loss, params, x, uncovered=["['w']"])
    (route,) = (route for route in plan.routing if route.parameter == "['w']")
    assert "a lookup of what is then a product's weight" in route.reason
    assert set(statistics.layers) == {"['v']"}


def test_spectra_of_what_is_looked_up_are_plain():
    """As of group convolutions: products of data's spectra with those of a weight."""

    def loss(p, x):
        kernel = p["w"][:, np.array([2, 0, 1, 2])]
        spectra = jnp.fft.fft(jnp.tanh(x @ p["v"]))[:, None] * jnp.fft.fft(kernel)
        return jnp.mean(jnp.fft.ifft(spectra).real ** 2)

    params, x = {"v": normal(3, 4), "w": normal(2, 3, seed=1)}, normal(N, 3, seed=2)
    plan = value_and_grad(loss).plan(params, x)
    (route,) = (route for route in plan.routing if route.parameter == "['w']")
    assert route.treatment == "plain"
    assert "a lookup of what then multiplies complex data" in route.reason


def test_within_shard_map_inputs_and_rows_belong_together():
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    local = loss_of(SUMS["indexed"], once)

    def loss(p, x):
        within = {"mesh": mesh, "in_specs": (P(), P("d")), "out_specs": P()}
        return jax.shard_map(lambda p, x: jax.lax.pmean(local(p, x), "d"), **within)(p, x)

    A, _, rows = moments(loss, parameters(), jnp.asarray(TOKENS))[0]["['positions']"]
    assert float(jnp.sum(A)) == float(rows[0]) == T


def test_samples_of_one_lookup_and_loops_are_left_as_they_are():
    """What is multiplied before the sum, read twice, or added within a loop, has one gradient."""

    def twice(p, x):
        positions = p["positions"][jnp.arange(T)]
        hidden = jnp.sin(p["tokens"][x] + positions)
        return jnp.sin(jnp.mean(hidden @ p["head"]) + jnp.sum(positions**2))

    def looped(p, x):
        positions = p["positions"][jnp.arange(T)]
        step = lambda h, _: (jnp.tanh(h + positions), None)  # noqa: E731
        return jnp.mean(jax.lax.scan(step, p["tokens"][x], None, 2)[0] @ p["head"])

    for loss in (twice, looped):
        rows = moments(loss, parameters(), TOKENS)[0]["['positions']"][2]
        assert float(rows[0]) == T
        verify(loss, parameters(), TOKENS)


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_a_slice_of_positions_has_a_row_for_each_example(batch):
    """As many of a table of 32 as there are tokens; by a loop over examples."""
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "tokens": jax.random.normal(keys[0], (11, 4)),
        "positions": jax.random.normal(keys[1], (32, 4)),
        "w": jax.random.normal(keys[2], (4, 3)),
    }
    x, y = jax.random.randint(keys[3], (batch, 7), 0, 11), jax.random.normal(keys[4], (batch, 7, 3))

    def loss(params, x, y):
        hidden = jnp.tanh(params["tokens"][x] + params["positions"][: x.shape[1]])
        return jnp.mean(jnp.sum((hidden @ params["w"] - y) ** 2, -1))

    vag = value_and_grad(loss)
    tx = scale_by_kfac(vag.plan(params, x, y), kl_clip=None, damping=0.01)
    _, grads, statistics = vag(params, x, y)
    updates, _ = tx.update(grads, tx.init(params), params, statistics=statistics)
    terms = batch * 7
    parts = [jax.grad(loss)(params, x[i : i + 1], y[i : i + 1])["positions"][:7] for i in range(batch)]
    squares = sum(jnp.square(part / batch) for part in parts) * terms
    expected = grads["positions"][:7] / (squares + 0.01)
    np.testing.assert_allclose(updates["positions"][:7], expected, rtol=1e-9)


@pytest.mark.parametrize("how", ["time first", "samples", "pairs"])
def test_what_arguments_look_up_is_each_examples_own(how):
    """Along whatever new axis it is broadcast: G is of the lookups' own gradients, one a row."""
    p = {"table": normal(7, D), "head": normal(D, 3, seed=1)}
    looked, others = jnp.asarray([1, 4, 1]), normal(T, 3, D, seed=2)

    def of_rows(found, p):
        if how == "samples":
            keys = jax.random.split(jax.random.key(0), 4)
            h = jax.vmap(lambda key: found + jax.random.normal(key, (3, D)))(keys)
        else:
            h = found[:, None] + found[None] if how == "pairs" else others + found[None]
        return jnp.mean(jnp.sin(jnp.tanh(h) @ p["head"]) ** 2)

    def loss(p, looked):
        return of_rows(p["table"][looked], p)

    A, G, rows = moments(loss, p, looked)[0]["['table']"]
    g = np.asarray(jax.grad(of_rows)(p["table"][looked], p))
    np.testing.assert_allclose(G[0], g.T @ g, rtol=1e-9)
    np.testing.assert_array_equal(A[0], [0, 2, 0, 0, 1, 0, 0])
    assert rows[0] == 3


@pytest.mark.parametrize("how", ["a start", "a key"])
def test_positions_may_begin_at_a_number_that_is_an_argument(how):
    def loss(p, x, given):
        start = jax.random.randint(given, (), 1, 2) if how == "a key" else given
        return loss_of(SUMS["indexed"], lambda x, indices: indices + start)(p, x)

    given = jax.random.PRNGKey(0) if how == "a key" else 1
    expected = moments(
        loss_of(SUMS["indexed"], lambda x, indices: each(x, indices + 1)), parameters(), TOKENS
    )[0]["['positions']"]
    assert_same(moments(loss, parameters(), TOKENS, given)[0]["['positions']"], expected)


def test_positions_that_are_an_argument_say_by_an_axis_of_their_own_that_they_are_for_all():
    def loss(p, x, places):
        return loss_of(SUMS["indexed"], lambda x, indices: places)(p, x)

    places = jnp.arange(T)[None]
    expected = moments(loss_of(SUMS["indexed"], each), parameters(), TOKENS)[0]["['positions']"]
    found = moments(loss, parameters(), TOKENS, places)[0]["['positions']"]
    assert_same(found, expected)
