"""Leaves that meet, elementwise, nothing of an example's: the same result is for all of them.

The oracle: of a mean over examples, the Fisher's diagonal is the mean of squared gradients, one example
at a time by `jax.grad`; and data that is repeated has the same.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fishers import normal
from suite.jax import kfac, value_and_grad, verify

N, T, D = 5, 4, 6
DISTANCES = -jnp.abs(jnp.arange(T)[:, None] - jnp.arange(T)).astype(float)
SINES = jnp.sin(jnp.arange(1.0, T + 1)[:, None] * jnp.arange(1, D + 1))
FROZEN = normal(D, D, seed=7)
U, _, VT = np.linalg.svd(FROZEN)


def attention(x, bias):
    weights = jax.nn.softmax(jnp.einsum("nid,njd->nij", x, x)[:, None] + bias)
    return jnp.einsum("nhij,njd->nid", weights, x)


def weight_norm(p, x):
    norm = jnp.sqrt(jnp.sum(p["v"] ** 2, 0, keepdims=True))
    return x @ (p["v"] / norm * p["s"])


def dora(p, x):
    w = FROZEN + p["a"] @ p["b"]
    return x @ (w / jax.lax.stop_gradient(jnp.linalg.norm(w, axis=0)) * p["s"])


def kernel_scale(p, x):
    kernel = jnp.ones((3, 1, D)) * p["s"]
    specs = ("NHC", "HIO", "NHC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), "SAME", dimension_numbers=specs, feature_group_count=D
    )


def side_by_side(p, x):
    row = jnp.broadcast_to(p["s"][:, None], (2, 2, 3))
    column = jnp.broadcast_to(p["t"], (2, 2, 3))
    return x + jnp.concatenate([row, column], -1).reshape(T, D)


def scanned(p, x):
    return jax.lax.scan(lambda h, s: (jnp.tanh(h @ (FROZEN * s)), None), x, p["s"])[0]


def shifted(p, x):
    return x @ (FROZEN * p["s"] + p["t"])


# by name: what is made of x (N, T, D), and of which leaves, once for all examples
ONCE = {
    "slopes": (lambda p, x: attention(x, p["s"][:, None, None] * DISTANCES), {"s": (2,)}),
    "added slopes": (lambda p, x: attention(x, p["s"][:, None, None] + DISTANCES), {"s": (2,)}),
    "sines": (lambda p, x: x + p["s"] * SINES, {"s": ()}),
    "frequencies of sines": (lambda p, x: x + SINES * p["s"], {"s": (D,)}),
    "one plus": (lambda p, x: x @ (FROZEN * (1 + p["s"])), {"s": (D,)}),
    "vmap": (lambda p, x: jax.vmap(lambda x: x @ (FROZEN * p["s"]))(x), {"s": (D,)}),
    "remat": (lambda p, x: jax.checkpoint(lambda s: x @ (FROZEN * s))(p["s"]), {"s": (D,)}),
    "singular values": (lambda p, x: x @ ((U * p["s"]) @ VT), {"s": (D,)}),
    "scale and shift": (shifted, {"s": (D,), "t": (D,)}),
    "weight norm": (weight_norm, {"s": (D,)}),
    "DoRA": (dora, {"s": (D,)}),
    "kernel": (kernel_scale, {"s": (D,)}),
    "side by side": (side_by_side, {"s": (2, 3), "t": (2, 3)}),
    "scanned": (scanned, {"s": (3, D)}),
}
# and of which leaves by themselves, for each example
EACH = {
    "scale": (lambda p, x: x.mean(1) * p["s"], {"s": (D,)}),
    "scale about one": (lambda p, x: x.mean(1) * (1 + p["s"]), {"s": (D,)}),
    "number": (lambda p, x: x.mean(1) * p["s"], {"s": ()}),
    "positions": (lambda p, x: x + p["s"], {"s": (T, D)}),
    "times a number": (lambda p, x: x + 2.0 * p["s"], {"s": (T, D)}),
    "rows, then columns": (lambda p, x: (x + p["s"][:, None]) + p["t"], {"s": (T,), "t": (D,)}),
    "of sines and x": (lambda p, x: (x * SINES).sum(1) * p["s"], {"s": (D,)}),
    "vmap": (lambda p, x: jax.vmap(lambda x: x.mean(0) + p["s"])(x), {"s": (D,)}),
    "token": (
        lambda p, x: jnp.concatenate([jnp.broadcast_to(p["s"], (len(x), 1, D)), x], 1),
        {"s": (D,)},
    ),
    "tangent": (
        lambda p, x: jax.jvp(lambda x: jnp.tanh(x) @ FROZEN * p["s"], (x,), (jnp.ones_like(x),))[1],
        {"s": (D,)},
    ),
    "tangent's scale": (
        lambda p, x: jnp.sin(x) * jax.jvp(lambda x: x * p["s"], (x,), (jnp.ones_like(x),))[1],
        {"s": ()},
    ),
}
READ_ONCE = {"scale", "scale about one", "positions", "vmap", "of sines and x"}  # by an example


def loss_of(make):
    def loss(p, x):
        h = jnp.sin(make(p, x))
        return jnp.mean(jnp.sum(jnp.tanh(h.reshape(len(x), -1, D).sum(1) @ p["head"]) ** 2, 1))

    return loss


def parameters(shapes):
    fixed = {"head": normal(D, 3), "v": normal(D, D, seed=1)}
    fixed |= {"a": 0.1 * normal(D, 2, seed=2), "b": 0.1 * normal(2, D, seed=3)}
    return fixed | {name: 1 + 0.3 * normal(*shape, seed=4) for name, shape in shapes.items()}


def diagonal(loss, params, name, *arguments):
    """The Fisher's diagonal that K-FAC has for a leaf, of a loss that is a mean."""
    _, _, statistics = jax.jit(value_and_grad(loss))(params, *arguments)
    own = statistics[f"['{name}']"].main
    return np.asarray(own.A / own.rows[:, None] * own.G * statistics.terms)


@pytest.mark.parametrize("name", ONCE)
def test_what_is_applied_once_for_all_examples_is_plain_and_says_so(name):
    make, shapes = ONCE[name]
    loss, params, x = loss_of(make), parameters(shapes), normal(N, T, D, seed=5)
    closed = lambda p: loss(p, x)  # noqa: E731
    plans = [value_and_grad(loss).plan(params, x), value_and_grad(loss).plan(params, x[:1])]
    if "slopes" not in name and "sines" not in name:  # of which nothing tells that they are no data
        plans.append(value_and_grad(closed).plan(params))
    for plan in plans:
        assert plan.routing["['head']"].treatment == "kfac"
        for leaf in shapes:
            assert plan.routing[f"['{leaf}']"].treatment == "plain"
            reason = plan.routing[f"['{leaf}']"].reason
            scaled = "used by `mul`, which scales a weight" if name == "weight norm" else ""
            assert reason == (scaled or "applied elementwise once for all examples")
    verify(closed, params)


def test_a_function_of_a_kernel_that_known_indices_look_up_is_plain_as_the_kernel_is():
    """As in networks that are symmetric by construction (NetKet's), with nothing else that has rows."""
    cyclic = (np.arange(D)[:, None] - np.arange(D)) % D

    def loss(p, x):
        h = jnp.einsum("ni,fji->nfj", x, jnp.exp(p["k"][:, cyclic]))
        return jnp.mean((jnp.tanh(h).sum((1, 2)) - x[:, 0]) ** 2)

    with pytest.raises(ValueError, match="a lookup of what is then a product's weight"):
        value_and_grad(loss).plan({"k": normal(3, D)}, normal(N, D, seed=5))


@pytest.mark.parametrize("how", ["arguments", "as many as examples"])
def test_kernels_of_coefficients_in_a_constant_basis_are_no_examples(how):
    """As of steerable networks; a constant with as many rows as examples may be their features."""
    n = N if how == "arguments" else 6
    bases = normal(6, D, 4), normal(6, 4, 2, seed=1)

    def loss(p, x, y):
        first, second = (
            jnp.einsum("k,kio->io", c, b) for c, b in zip((p["c"], p["d"]), bases, strict=True)
        )
        return jnp.mean(jnp.sum((jnp.tanh(x @ first + p["b"]) @ second - y) ** 2, 1))

    params = {"b": normal(4), "c": normal(6, seed=2), "d": normal(6, seed=3)}
    plan = value_and_grad(loss).plan(params, normal(n, D, seed=5), normal(n, 2, seed=6))
    once = "once for all examples, of whose summed gradient G is" in plan.routing["['c']"].reason
    assert once == (how == "arguments")
    if once:
        assert f"terms of the loss: {n}, by the layer that runs last, ['b']" in str(plan)


# by name: of leaves, frozen weights and x
FROZEN_ARGUMENTS = {
    "dense": lambda p, w, x: x @ (w["square"] * p["s"]),
    "singular values": lambda p, w, x: x @ ((w["square"] * p["s"]) @ w["square"].T),
    "of inner layers": lambda p, w, x: jax.lax.scan(
        lambda h, own: (jnp.tanh(h @ (own * p["s"])), None), x, w["stack"]
    )[0],
    "kernel": lambda p, w, x: jax.lax.conv_general_dilated(
        x, w["kernel"] * p["s"], (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
    ),
    "outputs first": lambda p, w, x: jnp.tanh(x @ (w["wide"] * p["s"][:, None]).T) @ p["out"],
    "outputs first, then another": lambda p, w, x: (
        jnp.tanh(x @ (w["wide"] * p["s"][:, None]).T) @ w["back"]
    ),
    "kernel, outputs first": lambda p, w, x: jax.lax.conv_general_dilated(
        x, (w["kernel"] * p["s"]).T, (1,), "SAME", dimension_numbers=("NHC", "OIH", "NHC")
    ),
}


@pytest.mark.parametrize("examples", [N, D])
@pytest.mark.parametrize("name", FROZEN_ARGUMENTS)
def test_frozen_weights_may_be_arguments(name, examples):
    frozen = {"square": FROZEN, "stack": normal(3, D, D), "kernel": normal(3, D, D)}
    frozen |= {"wide": normal(7, D), "back": normal(7, D, seed=1)}
    side = 7 if name.startswith("outputs") else D
    params, x = parameters({"s": (side,), "out": (7, D)}), normal(examples, T, D, seed=5)

    def loss(p, w, x):
        return loss_of(lambda p, x: FROZEN_ARGUMENTS[name](p, w, x))(p, x)

    reason = value_and_grad(loss).plan(params, frozen, x).routing["['s']"].reason
    assert reason == "applied elementwise once for all examples"


def scaled(p, x):
    return jnp.tanh((x * p["s"]) @ p["head"])


# by name: losses, and shapes of arguments, all of which hold examples
SEVERAL = {
    "contrast": (lambda p, a, b: jax.nn.logsumexp(scaled(p, a) @ scaled(p, b).T, 1).sum(), (N, N)),
    "matched": (
        lambda p, a, b: (jax.nn.softmax(scaled(p, a) @ scaled(p, b).T) @ scaled(p, b)).sum(),
        (N, 3),
    ),
    "correlated": (lambda p, a, b: ((scaled(p, a).T @ scaled(p, b)) ** 2).sum(), (N, N)),
    "two kinds of points": (lambda p, a, b: scaled(p, a).mean() + (scaled(p, b) ** 2).mean(), (N, 3)),
    "weighted": (lambda p, a, b: b[:, 0] @ (scaled(p, a) ** 2).sum(1), (N, N)),
    "one graph": (lambda p, a, b: jnp.sum((b @ b.T @ scaled(p, a)) ** 2), (N, N)),
    "whitened": (
        lambda p, a, b: (scaled(p, jnp.linalg.solve(b.T @ b + jnp.eye(D), a.T).T) ** 2).sum(),
        (N, N),
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_arguments_that_meet_each_other_hold_examples(name):
    loss, lengths = SEVERAL[name]
    a, b = (normal(n, D, seed=i) for i, n in enumerate(lengths))
    plan = value_and_grad(loss).plan(parameters({"s": (D,)}), a, b)
    assert plan.routing["['s']"].treatment == "kfac", str(plan)


@pytest.mark.parametrize("shapes", [((D,), (3,)), ((T, D), ()), ((T, D), (T, T)), ((1, D), (1, 3))])
def test_one_example_without_a_batch_axis_is_data(shapes):
    params = parameters({"s": (T, D)}) if shapes[1] == (T, T) else parameters({"s": (D,)})

    def loss(p, x, y):
        h = jnp.tanh((x[None] if x.ndim < 2 else x) * p["s"])
        if y.ndim == 2 and len(y) == T:  # a mask
            h = jax.nn.softmax((h @ h.T)[None] + y) @ h
        return jnp.sum((h @ p["head"]) ** 2) * jnp.sum(y)

    plan = value_and_grad(loss).plan(params, *(normal(*shape) for shape in shapes))
    assert "once" not in str(plan)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
@pytest.mark.parametrize("shape", [(1, T, D), (T, D)])
def test_a_table_of_one_row_is_no_example_wherever_it_stands(shape, order):
    """A mask or sines, (1, ...), that a leaf is added to before they meet the examples."""
    params = {"pos": normal(*shape), "o": normal(D, 3)}
    table, x, y = normal(1, T, D, seed=1), normal(N, T, D, seed=2), jnp.arange(N) % 3

    def loss(p, *given):
        table, x, y = (given[order.index(i)] for i in range(3))
        outputs = jnp.tanh(x + (p["pos"] + table)).mean(1) @ p["o"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], 1))

    def given(i):
        return [(table, x[i], y[i])[place] for place in order]

    _, _, statistics = value_and_grad(loss)(params, *given(slice(None)))
    each = [jax.grad(loss)(params, *given(slice(i, i + 1)))["pos"] / N for i in range(N)]
    np.testing.assert_allclose(
        statistics["['pos']"].main.G[0], sum(g.ravel() ** 2 for g in each), rtol=1e-12
    )


def lookups(p, frozen, x, y):
    return (jnp.tanh((frozen["table"][x] + p["leaf"]) @ frozen["w"]) @ p["o"]).mean(1)[:, 0] - y


def prompts(p, frozen, x, y):
    h = frozen["table"][x]
    h = jnp.concatenate([jnp.broadcast_to(p["leaf"], (len(h), T, D)), h], 1)
    return (jnp.tanh(h @ frozen["w"]) @ p["o"]).mean(1)[:, 0] - y


def phases(p, frozen, x, y):
    return (jnp.sin(y[:, None] * p["leaf"][0]) @ p["o"])[:, 0]


@pytest.mark.parametrize("model", [lookups, prompts, phases])
def test_a_batch_of_one_has_the_same_plan(model):
    """Of a model whose frozen weights, more than there are data, are an argument."""
    params = {"leaf": normal(T, D), "o": normal(D, 1)}
    frozen = {"table": normal(11, D, seed=3), "w": normal(D, D, seed=4)}
    x, y = jnp.arange(N * T).reshape(N, T) % 11, normal(N, seed=5)
    vag = value_and_grad(lambda p, *given: jnp.mean(model(p, *given) ** 2))
    if model is phases:
        frozen, x = {}, 0
    shapes = []
    for n in (N, 1):
        rows = x[:n] if isinstance(x, jax.Array) else x
        plan = vag.plan(params, frozen, rows, y[:n])
        shapes.append(jax.tree.map(jnp.shape, plan.no_statistics()))
    assert shapes[0] == shapes[1]


def test_statistics_of_another_understanding_are_named():
    params, x = {"w": normal(4, 3)}, normal(5, 4)
    plan = value_and_grad(lambda p, x: jnp.mean((x @ p["w"]) ** 2)).plan(params, x)
    tx = kfac(plan, 0.1)
    _, grads, others = value_and_grad(lambda p, x: jnp.mean((x * p["w"]) ** 2))(params, normal(5, 4, 3))
    with pytest.raises(
        ValueError, match=r"\['w'\] must have second moments of the shapes .*of one example"
    ):
        tx.update(grads, tx.init(params), params, statistics=others)


@pytest.mark.parametrize("name", EACH)
def test_what_meets_each_example_has_the_sum_of_their_squares(name):
    make, shapes = EACH[name]
    loss, params, x = loss_of(make), parameters(shapes), normal(N, T, D, seed=5)
    each = jax.vmap(jax.grad(loss), (None, 0))(params, x[:, None])
    plan = value_and_grad(loss).plan(params, x)
    for leaf in shapes:
        assert plan.routing[f"['{leaf}']"].treatment == "kfac", str(plan)
        found = diagonal(loss, params, leaf, x)
        many = diagonal(loss, params, leaf, jnp.tile(x, (7, 1, 1)))
        np.testing.assert_allclose(many, found, rtol=1e-10)
        np.testing.assert_allclose(diagonal(lambda p, x=x: loss(p, x), params, leaf), found, rtol=1e-12)
        if name in READ_ONCE:
            expected = (np.asarray(each[leaf]) ** 2).mean(0).reshape(1, -1)
            np.testing.assert_allclose(found, expected, rtol=1e-10)


@pytest.mark.parametrize("late", [True, False])
def test_what_is_applied_once_tells_nothing_of_the_number_of_terms(late):
    params = {"s": normal(D), "t": normal(D, seed=1)}

    def loss(p, x):
        h = x * p["s"] if late else x
        h = jnp.tanh(h @ (FROZEN * p["t"]))
        return jnp.mean(jnp.sum((h if late else h * p["s"]) ** 2, 1))

    vag, x = value_and_grad(loss), normal(N, D, seed=2)
    assert [r.treatment for r in vag.plan(params, x).routing] == ["kfac", "plain"]
    assert float(jax.jit(vag)(params, x)[2].terms) == N


def test_a_key_makes_examples_too():
    params = parameters({"s": (D,)})

    def loss(p, key, walls):
        inside = jax.random.normal(key, (N, D))
        ends = [jnp.tanh((x * p["s"]) @ p["head"]) for x in (inside, walls)]
        return sum(jnp.mean(jnp.sum(end**2, 1)) for end in ends)

    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        plan = value_and_grad(loss).plan(params, key, normal(3, D))
        assert plan.routing["['s']"].treatment == "kfac"


REPEATS = {
    "broadcast": lambda p, n: jnp.broadcast_to(p, (n, T, D)),
    "tiled": lambda p, n: jnp.tile(p[None], (n, 1, 1)),
    "repeated": lambda p, n: jnp.repeat(p[None], n, 0),
    "looked up": lambda p, n: p[jnp.broadcast_to(jnp.arange(T), (n, T))],
}


@pytest.mark.parametrize("how", REPEATS)
def test_what_is_repeated_for_each_example_is_each_ones(how):
    """Latents, or queries, that attend to what an example has."""
    p = {"z": normal(T, D), "s": 1 + 0.1 * normal(D), "t": normal(D, seed=1), "q": normal(D, D, seed=2)}
    x = normal(N, 7, D, seed=3)

    def loss(p, x, repeat):
        z = repeat(p["z"], len(x))
        z = (z - z.mean(-1, keepdims=True)) * jax.lax.rsqrt(z.var(-1, keepdims=True) + 0.1)
        q = (z * p["s"] + p["t"]) @ p["q"]
        h = jax.nn.softmax(q @ x.mT) @ x
        return jnp.mean(jnp.sin(h @ p["q"]))

    found = []
    for repeat in (REPEATS[how], lambda z, n: z + jnp.zeros((n, 1, 1))):
        vag = value_and_grad(lambda p, x, repeat=repeat: loss(p, x, repeat))
        plan, statistics = vag.plan(p, x), jax.jit(vag)(p, x)[2]
        assert [plan.routing[f"['{k}']"].treatment for k in "stq"] == ["kfac"] * 3
        assert not any("once for all" in route.reason for route in plan.routing)
        found.append([statistics.layers[f"['{k}']"] for k in "sq"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), *found)


def test_gains_of_as_many_inputs_as_there_are_examples_are_gains():
    params = {"w": normal(D, 3), "g": normal(3, seed=1)}

    def loss(p, x):
        return jnp.mean(jnp.sin(x @ (p["w"] * jnp.broadcast_to(p["g"][None], (D, 3)))))

    for count in (D, N):
        plan = value_and_grad(loss).plan(params, normal(count, D, seed=2))
        assert plan.routing["['w']"].treatment == "kfac"


def test_a_mask_of_positions_tells_nothing_of_examples():
    params = {"z": normal(D), "u": normal(D, 2), "b": normal(2), "v": normal(D, 3, seed=1)}

    def loss(p, x, mask):
        pairs = jnp.broadcast_to(p["z"], (T, T, D)) * DISTANCES[..., None]
        weights = jax.nn.softmax((jnp.tanh(pairs) @ p["u"] + p["b"]).sum(-1) * mask)
        return jnp.mean(jnp.sin(weights @ x @ p["v"]))

    plan = value_and_grad(loss).plan(params, normal(N, T, D, seed=2), jnp.ones((T, T)))
    assert "once for all" in plan.routing["['u']"].reason


def test_where_nothing_is_data_nothing_is_once_for_all():
    params = {"s": jnp.ones(D), "head": normal(D, 3)}

    def loss(p):
        points = jnp.linspace(0, 1, N * D).reshape(N, D)
        return jnp.mean(jnp.sum(jnp.tanh((points * p["s"]) @ p["head"]) ** 2, 1))

    assert value_and_grad(loss).plan(params).routing["['s']"].treatment == "kfac"


NODES, GRAPH = normal(8, D), np.abs(normal(8, 8, seed=1))
POOL = np.repeat(np.eye(2), 4, axis=1)  # nodes of two graphs
OF_NODES = {  # (layers, arguments): a graph's matrix sums over nodes, which are its examples
    "graph convolution": (
        lambda p, x, a: a @ (jnp.tanh((a @ (x @ p["w"])) * p["s"]) @ p["head"]),
        GRAPH,
    ),
    "neighbours": (lambda p, x, a: (a @ (jnp.tanh(x @ p["w"]) * p["s"])) @ p["head"], GRAPH),
    "pooled": (lambda p, x, b: (b @ (jnp.tanh(x @ p["w"]) * p["s"])) @ p["head"], POOL),
}


@pytest.mark.parametrize("name", OF_NODES)
def test_nodes_of_a_graph_are_examples(name):
    model, matrix = OF_NODES[name]
    params = {"w": normal(D, D, seed=2), "s": jnp.ones(D), "head": normal(D, 3, seed=3)}
    plan = value_and_grad(lambda p, x, a: jnp.mean(model(p, x, a) ** 2)).plan(params, NODES, matrix)
    assert [route.treatment for route in plan.routing] == ["kfac"] * 3
    assert "once for all" not in str(plan)


CLOSED = {
    "key": jax.random.key(0),
    "class weights": np.ones(3),
    "number": 0.5,
}


@pytest.mark.parametrize("name", CLOSED)
def test_closed_over_data_is_examples_beside_arguments_that_are_none(name):
    params = {"w": normal(D, D, seed=2), "s": jnp.ones(D), "head": normal(D, 3, seed=3)}

    def loss(p, given):
        z = jnp.tanh(NODES @ p["w"]) * p["s"]
        if name == "key":
            z = z * jax.random.bernoulli(given, 0.5, z.shape)
            given = 1.0
        return jnp.mean(given * (z @ p["head"]) ** 2)

    plan = value_and_grad(loss).plan(params, CLOSED[name])
    assert [route.treatment for route in plan.routing] == ["kfac"] * 3
    assert "once for all" not in str(plan)


def unrolled(p, x, beside=None):
    """A cell without a bias, from zeros that have no axis for examples."""
    h = jnp.zeros(D)
    for t in range(x.shape[1]):
        z = h @ p["w"] if beside is None or t == 0 else h @ p["w"] + beside[t]
        h = jnp.tanh(x[:, t] + z)
    return h


@pytest.mark.parametrize("examples", [N, 8 * N])
def test_a_product_with_zeros_for_all_examples_is_no_use(examples):
    def loss(p, x, beside=None):
        return jnp.mean(jnp.sum(jnp.sin(unrolled(p, x, beside) @ p["head"]), -1))

    params, x = {"w": normal(D, D), "head": normal(D, 3, seed=1)}, normal(examples, T, D, seed=2)
    vag = value_and_grad(loss)
    plan, sums = vag.plan(params, x), vag(params, x)[2].layers["['w']"].main
    assert "once for all" not in str(plan)
    g = jax.grad(loss, 2)(params, x, jnp.zeros((T, examples, D)))[1:]
    np.testing.assert_allclose(sums.G[0], np.einsum("tni,tnj->ij", g, g), rtol=1e-5, atol=1e-9)
    assert float(sums.rows[0]) == examples * (T - 1)
    verify(loss, params, x)


def test_the_report_tells_how_many_uses_are_for_all_examples():
    def loss(p, x):
        h = jnp.ones(D)
        for t in range(T):
            h = jnp.tanh(x[:, t] + h @ p["w"])
        return jnp.mean(jnp.sin(h))

    params = {"w": normal(D, D)}
    reason = value_and_grad(loss).plan(params, normal(N, T, D, seed=2)).routing["['w']"].reason
    assert f"one block for {T} uses, 1 of them {SUMMED}" in reason


TABLE, HEAD = normal(7, D, seed=11), normal(D, 3, seed=12)
SUMMED = "computed once for all examples, of whose summed gradient G is"


def prompted(p, ids, frozen):
    """A prompt from an MLP before a frozen layer of attention."""
    prompt = jnp.tanh(p["z"] @ p["first"]) @ p["last"]
    prompt = jnp.broadcast_to(prompt, (len(ids), *prompt.shape))
    h = jnp.concatenate([prompt, frozen["table"][ids]], 1)
    h = h + jnp.einsum("nqk,nkd->nqd", jax.nn.softmax(jnp.einsum("nqd,nkd->nqk", h, h)), h)
    return jnp.mean(jnp.sin(h[:, 2:] @ frozen["head"]))


def hypernetwork(p, x):
    return jnp.mean(jnp.sin(x @ (jnp.tanh(p["z"] @ p["first"]) @ p["last"]).reshape(D, D)))


def test_what_is_computed_once_says_so_where_all_that_sees_examples_is_frozen():
    frozen, ids = {"table": TABLE, "head": HEAD}, jnp.arange(N * T).reshape(N, T) % 7
    params = {"z": normal(2, D), "first": normal(D, D, seed=1), "last": normal(D, D, seed=2)}
    plans = [
        value_and_grad(prompted).plan(params, ids, frozen),
        value_and_grad(lambda p, ids: prompted(p, ids, frozen)).plan(params, ids),
        value_and_grad(hypernetwork).plan(
            params | {"z": params["z"][:1], "last": normal(D, D * D)}, normal(N, D)
        ),
    ]
    for plan in plans:
        assert SUMMED in plan.routing["['last']"].reason
        assert "give `terms` if that is wrong" in str(plan)


@pytest.mark.parametrize("name", ["targets", "a number", "a dot product"])
def test_points_that_the_loss_makes_are_examples(name):
    """Each has a target or none: no gradient is summed over anything."""
    params = {"first": normal(1, D), "b": normal(D, seed=1), "last": normal(D, 1, seed=2)}

    def loss(p, given):
        points = jnp.linspace(0.0, 1.0, 9)[:, None]
        residual = (jnp.tanh(points @ p["first"] + p["b"]) @ p["last"] - given)[:, 0]
        return residual @ residual / 9 if name == "a dot product" else jnp.mean(residual**2)

    plan = value_and_grad(loss).plan(params, jnp.ones(()) if name == "a number" else normal(9, 1))
    assert not any("once" in route.reason for route in plan.routing)
    assert plan.last[0].terms == 9


def test_what_is_computed_once_sets_the_number_of_terms_only_where_nothing_else_does():
    params = {"tower": normal(D, D), "scale": jnp.ones(D), "z": normal(3, 4, seed=1)}
    params |= {"first": normal(4, 4, seed=2), "classes": normal(4, D, seed=3)}
    x = normal(N, D, seed=6)

    def logits(p, x):
        return x @ (jnp.tanh(p["z"] @ p["first"]) @ p["classes"]).T

    def towers(p, x):
        return jnp.mean(jnp.sin(logits(p, x @ p["tower"])))

    def scaled(p, x):
        return jnp.mean(jnp.sin(logits(p, x * p["scale"])))

    for loss, name in ((towers, "tower"), (scaled, "scale")):
        plan = value_and_grad(loss).plan(params, x)
        assert SUMMED in plan.routing["['classes']"].reason
        assert (plan.last[0].layer, plan.last[0].terms) == (f"['{name}']", N)
        assert float(jax.jit(value_and_grad(loss))(params, x)[2].terms) == N
    alone = value_and_grad(lambda p, x: jnp.mean(jnp.sin(logits(p, x)))).plan(params, x)
    assert (alone.last[0].layer, alone.last[0].terms) == ("['classes']", 3)


def waves():
    """Of positions, as they are usually written."""
    positions, rates = jnp.arange(T)[:, None], jnp.arange(1.0, D / 2 + 1)
    empty = jnp.zeros((T, D))
    return empty.at[:, 0::2].set(jnp.sin(positions * rates)).at[:, 1::2].set(jnp.cos(positions * rates))


def by_head(p):
    return jnp.broadcast_to(DISTANCES, (2, T, T)) * p["s"][:, None, None]


# by name: what is made of leaves and x, the shape of s, and the number of examples that it has by chance
AS_LONG = {
    "scale of waves": (lambda p, x: x + p["s"] * waves(), (), T),
    "scales of waves": (lambda p, x: x + p["s"] * waves(), (D,), T),
    "slopes of heads": (lambda p, x: attention(x, by_head(p)), (2,), 2),
}


@pytest.mark.parametrize("name", AS_LONG)
def test_what_is_as_long_as_there_are_examples_is_no_example(name):
    make, shape, by_chance = AS_LONG[name]

    def loss(p, x):
        return jnp.mean(jnp.sum((jnp.sin(make(p, x)).mean(1) @ p["head"]) ** 2, 1))

    params = parameters({"s": shape})
    for examples in (N, by_chance):
        plan = value_and_grad(loss).plan(params, normal(examples, T, D, seed=5))
        assert plan.routing["['s']"].reason == "applied elementwise once for all examples"


@pytest.mark.parametrize("examples", [N, D])
def test_a_mask_of_a_weight_is_as_good_with_as_many_examples(examples):
    params = {"i": normal(T, D), "w": normal(D, D, seed=1), "b": normal(D, seed=2), "o": normal(D, 2)}

    def loss(p, x, y):
        h = jnp.tanh(x @ p["i"]) @ (p["w"] * jnp.tril(jnp.ones((D, D)))) + p["b"]
        return jnp.mean((jnp.tanh(h) @ p["o"] - y) ** 2)

    plan = value_and_grad(loss).plan(params, normal(examples, T, seed=5), normal(examples, 2, seed=6))
    assert plan.routing["['w']"].reason == "weight of a dense layer"
    assert plan.routing["['b']"].reason == "bias of ['w']"


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("examples", [N, D])
def test_frozen_biases_and_norms_do_not_say_how_many_examples_there_are(examples, stacked):
    """Queries that are repeated for each example, before and behind layers that are an argument."""
    layers = [
        {"w": normal(D, D, seed=i), "b": normal(D, seed=i), "g": normal(D, seed=i), "c": normal(D)}
        for i in range(3)
    ]
    if stacked:
        layers = jax.tree.map(lambda *xs: jnp.stack(xs), *layers)
    params = {"q": normal(2, D), "g": normal(D, seed=1), "b": normal(D, seed=2)}
    params |= {"w": normal(D, D, seed=3), "o": normal(D, 2)}

    def frozen(layers, h):
        def layer(h, f):
            return h + jnp.tanh((h * f["g"] + f["c"]) @ f["w"] + f["b"]), None

        if stacked:
            return jax.lax.scan(layer, h, layers)[0]
        for f in layers:
            h, _ = layer(h, f)
        return h

    def loss(p, layers, x, y):
        queries = (p["q"] + jnp.zeros((len(x), 1, 1))) * p["g"] + p["b"]
        x = frozen(layers, x)
        z = jax.nn.softmax((queries @ p["w"]) @ jnp.swapaxes(x, 1, 2)) @ x
        return jnp.mean((frozen(layers, queries + z).mean(1) @ p["o"] - y) ** 2)

    x, y = normal(examples, T, D, seed=5), normal(examples, 2, seed=6)
    closed = value_and_grad(lambda p, x, y: loss(p, layers, x, y)).plan(params, x, y)
    plan = value_and_grad(loss).plan(params, layers, x, y)
    assert all(route.treatment == "kfac" for route in closed.routing)
    assert str(plan) == str(closed)


@pytest.mark.parametrize("examples", [N, D])
def test_what_is_repeated_meets_products_whatever_the_number_of_examples(examples):
    def loss(p, x):
        repeated = jnp.broadcast_to(SINES, (len(x), T, D))
        return jnp.mean((jnp.tanh(repeated @ p["v"] + x) @ p["head"]) ** 2)

    plan = value_and_grad(loss).plan(parameters({}), normal(examples, T, D, seed=5))
    assert plan.routing["['v']"].reason == "weight of a dense layer"
