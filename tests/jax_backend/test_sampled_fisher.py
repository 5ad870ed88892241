"""Statistics of the model's predictions, against the dense Fisher of the outputs' distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from suite.jax import (
    Bernoulli,
    Categorical,
    Gaussian,
    eigenbases,
    kfac,
    scale_by_kfac,
    value_and_grad,
)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


PARAMS = {"w": normal(4, 3), "b": normal(3, seed=1)}
X = normal(1, 4, seed=2)


def hessian(kind, y):
    """Of -log p by the outputs y (C,), by hand."""
    if kind == "categorical":
        p = np.exp(y - y.max()) / np.exp(y - y.max()).sum()
        return np.diag(p) - np.outer(p, p)
    if kind == "bernoulli":
        p = 1 / (1 + np.exp(-y))
        return np.diag(p * (1 - p))
    return np.eye(y.size) / 0.5


KINDS = {
    "categorical": Categorical,
    "bernoulli": Bernoulli,
    "gaussian": lambda *a, **k: Gaussian(*a, variance=0.5, **k),
}


def model(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def loss_fn(p, x, reduce=jnp.mean):
    outputs = model(p, x)
    penalty = 0.1 * jnp.sum(p["w"] ** 2)  # no matter for a sampled Fisher
    return reduce(jnp.sum(outputs**2, 1)) + penalty, {"outputs": outputs, "note": "text"}


def statistics_of(vag, params, x, **kwargs):
    return jax.jit(lambda p, x: vag(p, x, **kwargs)[1:])(params, x)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_is_the_dense_fisher_of_one_example(kind):
    vag = value_and_grad(
        loss_fn, has_aux=True, fisher=KINDS[kind](lambda aux: aux["outputs"], exact=True)
    )
    plan = vag.plan(PARAMS, X)
    assert [r.treatment for r in plan.routing] == ["kfac", "kfac"]
    grads, statistics = statistics_of(vag, PARAMS, X)
    expected = jax.grad(loss_fn, has_aux=True)(PARAMS, X)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), grads, expected)
    own = statistics["['w']"].main
    J = jax.jacobian(lambda p: model(p, X)[0])(PARAMS)
    J = np.concatenate([np.swapaxes(J["w"], 1, 2), np.asarray(J["b"])[:, :, None]], 2).reshape(3, -1)
    dense = J.T @ hessian(kind, np.asarray(model(PARAMS, X)[0])) @ J
    np.testing.assert_allclose(np.kron(own.G[0], own.A[0] / own.rows[0]), dense, rtol=1e-9, atol=1e-12)
    assert float(own.rows[0]) == pytest.approx(1)
    assert float(statistics.terms) == 1


@pytest.mark.parametrize("normalized", [False, True], ids=["attention", "batch norm"])
@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_exact_of_terms_that_one_value_reaches_is_the_sum_over_terms(kind, normalized):
    """But for noise: products of two terms have random signs. The oracle takes terms in turn."""
    params = {"v": normal(4, 5), "w": normal(5, 3, seed=1)}
    x = normal(100, 4, seed=2) if normalized else normal(10, 10, 4, seed=2)

    def outputs_of(p, x, eps=0.0):
        y = x @ p["v"] + eps
        if normalized:
            y = jax.nn.relu((y - y.mean(0)) / y.std(0))
        else:
            scores = jnp.where(jnp.tri(x.shape[1]) > 0, x @ jnp.swapaxes(x, 1, 2), -1e9)
            y = jax.nn.softmax(scores) @ y
        return y @ p["w"]

    def loss(p, x):
        outputs = outputs_of(p, x)
        return jnp.mean(jnp.sum(outputs**2, -1)), outputs

    vag = value_and_grad(loss, has_aux=True, fisher=KINDS[kind](exact=True))
    statistics = statistics_of(vag, params, x)[1]
    found = np.asarray(statistics["['v']"].main.G[0])
    outputs, pull = jax.vjp(lambda eps: outputs_of(params, x, eps), jnp.zeros((*x.shape[:-1], 5)))
    expected = np.zeros((5, 5))
    for place in np.ndindex(*x.shape[:-1]):
        root = np.linalg.cholesky(hessian(kind, np.asarray(outputs[place])) + 1e-12 * np.eye(3))
        columns = np.zeros((3, *outputs.shape))
        columns[(slice(None), *place)] = root.T
        (g,) = jax.vmap(pull)(jnp.asarray(columns))
        g = np.asarray(g).reshape(-1, 5)
        expected += g.T @ g
    assert np.linalg.norm(found - expected) < 0.25 * np.linalg.norm(expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", ["expand", "reduce"])
def test_exact_of_layers_with_many_rows_sums_over_their_positions(kind, rows):
    """A convolution and a dense layer at every position, pooled: J by the products' outputs is dense."""
    params = {"k": normal(2, 2, 3), "b": normal(3, seed=1), "w": normal(3, 4, seed=2), "v": normal(4, 3)}
    x = normal(2, 2, 6, seed=3)  # (examples, channels, positions)

    def outputs_of(p, x, conv=0.0, dense=0.0):
        numbers = ("NCH", "IHO", "NCH")
        y = lax.conv_general_dilated(x, p["k"], (1,), "VALID", dimension_numbers=numbers)
        y = jnp.tanh(y + p["b"][:, None] + conv)
        return jnp.tanh(jnp.swapaxes(y, 1, 2) @ p["w"] + dense).mean(1) @ p["v"]

    def loss(p, x):
        outputs = outputs_of(p, x)
        return jnp.mean(jnp.sum(outputs**2, 1)), outputs

    vag = value_and_grad(loss, has_aux=True, fisher=KINDS[kind](exact=True), rows=rows)
    grads, statistics = statistics_of(vag, params, x)
    expected = jax.grad(loss, has_aux=True)(params, x)[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), grads, expected)
    positions = x.shape[2] - 1
    conv, dense = jnp.zeros((1, 3, positions)), jnp.zeros((1, positions, 4))
    G = {"['k']": 0, "['w']": 0}
    for one in x:
        y = np.asarray(outputs_of(params, one[None])[0])
        J = jax.jacobian(lambda c, d, one=one: outputs_of(params, one[None], c, d)[0], (0, 1))(
            conv, dense
        )
        by_position = {
            "['k']": J[0][:, 0],
            "['w']": np.swapaxes(J[1][:, 0], 1, 2),
        }  # (C, d_out, positions)
        for name, j in by_position.items():
            j = np.asarray(j).sum(2, keepdims=True) if rows == "reduce" else np.asarray(j)
            G[name] = G[name] + np.einsum("aip,ab,bjp->ij", j, hessian(kind, y), j)
    for name, block in G.items():
        own = statistics[name].main
        np.testing.assert_allclose(own.G[0], block, rtol=1e-9, atol=1e-12)
        assert float(own.rows[0]) == pytest.approx(2 if rows == "reduce" else 2 * positions)
    rows_of_k = np.stack([one[:, i : i + 2].reshape(-1) for one in x for i in range(positions)])
    if rows == "reduce":
        rows_of_k = rows_of_k.reshape(2, positions, -1).mean(1)
    A = np.concatenate([rows_of_k, np.ones((len(rows_of_k), 1))], 1)
    np.testing.assert_allclose(statistics["['k']"].main.A[0], A.T @ A, rtol=1e-9)
    assert float(statistics.terms) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_exact_is_the_dense_fisher_of_a_convolution_of_one_place_and_of_a_sequence(kind):
    kernel = normal(3, 2, 4)

    def conv(p, x):
        return lax.conv_general_dilated(x, p, (1,), "VALID")[:, :, 0]

    def each(p, x):  # every position by itself is a term of the loss
        return x @ p

    sequence = normal(1, 5, 4, seed=2)
    for model, p, x in ((conv, kernel, normal(1, 2, 4, seed=1)), (each, normal(4, 3), sequence)):

        def loss(p, x, model=model):
            outputs = model(p, x)
            return jnp.sum(outputs**2), outputs

        vag = value_and_grad(loss, has_aux=True, fisher=KINDS[kind](exact=True))
        _, statistics = statistics_of(vag, p, x)
        own = statistics["params"].main
        outputs = np.asarray(model(p, x)).reshape(-1, 3)
        assert float(statistics.terms) == len(outputs)
        if model is conv:
            J = np.asarray(jax.jacobian(lambda p, model=model, x=x: model(p, x)[0])(p)).reshape(3, -1)
            dense = J.T @ hessian(kind, outputs[0]) @ J
            np.testing.assert_allclose(np.kron(own.G[0], own.A[0]), dense, rtol=1e-9, atol=1e-12)
        else:
            expected = sum(hessian(kind, y) for y in outputs)
            np.testing.assert_allclose(own.G[0], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_approach_the_exact_statistics(kind):
    pick = lambda aux: aux["outputs"]  # noqa: E731
    exact = value_and_grad(loss_fn, has_aux=True, fisher=KINDS[kind](pick, exact=True))
    sampled = value_and_grad(loss_fn, has_aux=True, fisher=KINDS[kind](pick, samples=3000))
    x = normal(5, 4, seed=3)
    _, one = statistics_of(exact, PARAMS, x)
    _, other = statistics_of(sampled, PARAMS, x, key=jax.random.key(0))
    a, b = one["['w']"].main, other["['w']"].main
    np.testing.assert_allclose(a.A, b.A, rtol=1e-9)
    np.testing.assert_allclose(a.rows, b.rows, rtol=1e-6)
    np.testing.assert_allclose(a.G, b.G, atol=0.08 * np.abs(a.G).max())
    assert float(other.terms) == 5


def test_means_and_sums_give_one_direction():
    """The Fisher of a mean of N terms is that of their sum over N, and so is its gradient."""
    x = normal(6, 4, seed=3)
    fisher = Gaussian(lambda aux: aux["outputs"], exact=True)
    directions = []
    for reduce, reduction in ((jnp.mean, "mean"), (jnp.sum, "sum")):

        def loss(p, x, reduce=reduce):
            outputs = model(p, x)
            return 0.5 * reduce(jnp.sum(outputs**2, 1)), {"outputs": outputs}

        for chosen in (fisher, None):
            vag = value_and_grad(loss, has_aux=True, fisher=chosen)
            scale = 1.0 if reduction == "mean" else 6.0
            tx = kfac(
                vag.plan(PARAMS, x), 1.0, momentum=0.0, kl_clip=None, damping=0.01 * scale,
                loss_reduction=reduction,
            )  # fmt: skip
            _, grads, statistics = jax.jit(lambda p, x, vag=vag: vag(p, x))(PARAMS, x)
            updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS, statistics=statistics)
            directions.append(updates)
    for one, other in ((0, 2), (1, 3)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8), directions[one], directions[other]
        )
    assert np.abs(directions[0]["w"] - directions[1]["w"]).max() > 1e-3


@pytest.mark.parametrize("method", ["eigen", "ekfac"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_undoes_a_loss_scale_for_each_kind_of_statistics(reduction, method):
    x = normal(6, 4, seed=3)
    params = PARAMS | {"s": jnp.ones(4), "t": normal(4, seed=5)}

    def loss(p, x, scale):
        outputs = model(p, jnp.sin(x @ jnp.eye(4)) * p["s"] + p["t"])
        return scale * 0.5 * getattr(jnp, reduction)(jnp.sum(outputs**2, 1)), outputs

    for fisher in (None, Gaussian(exact=True)):
        vag = value_and_grad(loss, has_aux=True, fisher=fisher)
        plan = vag.plan(params, x, 1.0)
        tx = scale_by_kfac(
            plan, kl_clip=None, loss_reduction=reduction, compute_method=method, inv_update_steps=2
        )

        @jax.jit
        def direction(scale, vag=vag, plan=plan, tx=tx, fisher=fisher):
            state = tx.init(params)
            for _ in range(2):
                bases = {"bases": eigenbases(state, plan)} if method == "ekfac" else {}
                _, grads, statistics = vag(params, x, scale, **bases)
                grads = jax.tree.map(lambda g: g / scale, grads)
                if fisher is None:
                    power = 1 if reduction == "mean" else 2
                    statistics = jax.tree.map(lambda s, power=power: s / scale**power, statistics)
                moved, state = tx.update(grads, state, params, statistics=statistics)
            return moved

        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7), direction(1024.0), direction(1.0)
        )


@pytest.mark.parametrize("fisher", [None, Categorical(), Categorical(exact=True)])
@pytest.mark.parametrize("method", ["eigen", "inverse"])
def test_a_batch_all_of_whose_labels_are_ignored_is_no_evidence(fisher, method):
    """In single precision, too, where the square of a tiny number is 0."""
    single = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), PARAMS)
    x, labels = jnp.asarray(normal(6, 4), jnp.float32), jnp.arange(6) % 3

    def loss(p, x, mask):
        z = model(p, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(z, labels)
        outputs = jnp.where(mask[..., None], z, jax.lax.stop_gradient(z))
        return (losses * mask).sum() / jnp.maximum(mask.sum(), 1), outputs

    sampled = {} if fisher is None else {"fisher": fisher}
    vag = value_and_grad(loss, has_aux=True, terms=lambda x, mask: mask.sum(), **sampled)
    tx = kfac(vag.plan(single, x, jnp.ones(6, bool)), 0.1, damping=0.01, compute_method=method)
    state, seen = tx.init(single), []
    for step, mask in enumerate([jnp.ones(6, bool), jnp.zeros(6, bool), jnp.zeros(6, bool)]):
        drawn = {"key": jax.random.key(step)} if fisher == Categorical() else {}
        _, grads, statistics = vag(single, x, mask, **drawn)
        _, state = tx.update(grads, state, single, statistics=statistics)
        factors = state.preconditioner.factors
        seen.append(jax.tree.map(np.asarray, (factors.averages, factors.weight)))
    assert int(state.preconditioner.steps) == 3
    assert all(np.isfinite(x).all() and x.any() for x in jax.tree.leaves(seen[0]))
    jax.tree.map(np.testing.assert_array_equal, seen[1], seen[0])
    jax.tree.map(np.testing.assert_array_equal, seen[2], seen[0])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_where_the_only_product_does_not_run_a_norm_is_evidence_for_a_sum(reduction):
    """Of a mean nobody knows then over how many terms it is."""

    def loss(p, x, runs):
        h = x * p["scale"] + p["shift"]
        h = lax.cond(runs, lambda h: h + jnp.tanh(h @ p["w"]), lambda h: h, h)
        return getattr(jnp, reduction)(jnp.sum(h**2, -1))

    params = {"scale": normal(4), "shift": normal(4, seed=1), "w": normal(4, 4)}
    vag, x = value_and_grad(loss), normal(6, 4)
    tx = scale_by_kfac(vag.plan(params, x, True), loss_reduction=reduction, factor_decay=0.5)
    state = tx.init(params)
    for runs in (True, False, False):
        _, grads, statistics = vag(params, x, runs)
        _, state = tx.update(grads, state, params, statistics=statistics)
    weights = {float(weight) for weight in state.factors.weight}
    assert weights == ({0.5, 0.875} if reduction == "sum" else {0.5})


def test_outputs_whose_gradient_is_stopped_are_no_terms():
    """As the predictions at padded positions, that the loss ignores, are none."""
    x, counted = normal(5, 7, 4, seed=3), jnp.asarray(np.random.default_rng(1).random((5, 7)) < 0.4)

    def loss(p, x, counted):
        logits = model(p, x)
        own = jnp.sum(logits**2, -1) * counted
        return jnp.sum(own) / counted.sum(), jnp.where(
            counted[..., None], logits, lax.stop_gradient(logits)
        )

    exact, total = Categorical(exact=True), lambda x, counted: counted.sum()
    vag = value_and_grad(loss, has_aux=True, fisher=exact)
    statistics = vag(PARAMS, x, counted)[2]
    outputs = np.asarray(model(PARAMS, x))[np.asarray(counted)]
    expected = sum(
        np.diag(1 - y**2) @ hessian("categorical", y) @ np.diag(1 - y**2) for y in outputs
    )  # y = tanh s
    np.testing.assert_allclose(statistics["['w']"].main.G[0], expected, rtol=1e-9)
    assert float(statistics.terms) == 35
    told = value_and_grad(loss, has_aux=True, fisher=exact, terms=total)(PARAMS, x, counted)[2]
    assert float(told.terms) == len(outputs)
    drawn = value_and_grad(loss, has_aux=True, fisher=Categorical(), terms=total)
    assert float(drawn(PARAMS, x, counted, key=jax.random.key(0))[2].terms) == len(outputs)


def test_the_plan_of_a_loss_with_an_axis_name_is_made_where_it_has_one():
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    x = normal(6, 4, seed=3)

    def loss(p, x, mean=lambda h: h):
        hidden = x @ p["w"]
        return jnp.mean((hidden - mean(hidden.mean(0)) + p["b"]) ** 2)

    vag = value_and_grad(lambda p, x: loss(p, x, lambda h: lax.pmean(h, "data")))
    with pytest.raises(NameError, match="unbound axis name"):
        vag.plan(PARAMS, x)
    plans = []
    inside = jax.shard_map(
        lambda p, x: plans.append(vag.plan(p, x)), mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    jax.eval_shape(inside, PARAMS, x)
    assert str(plans[0].routing) == str(value_and_grad(loss).plan(PARAMS, x).routing)


def test_a_sampled_fisher_trains_under_jit():
    x, y = normal(64, 4, seed=3), jnp.asarray(np.random.default_rng(0).integers(0, 3, 64))

    def loss(p, x, y):
        logits = x @ p["w"] + p["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

    vag = value_and_grad(loss, has_aux=True, fisher=Categorical())
    tx = kfac(vag.plan(PARAMS, x, y), 0.5, damping=0.01, kl_clip=None, momentum=0.0)

    @jax.jit
    def step(params, state, key):
        (value, _), grads, statistics = vag(params, x, y, key=key)
        updates, state = tx.update(grads, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state, value

    params, state, values = PARAMS, tx.init(PARAMS), []
    for i in range(20):
        params, state, value = step(params, state, jax.random.key(i))
        values.append(float(value))
    best = jax.grad(lambda p: loss(p, x, y)[0])(params)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(best)) < 0.02
    assert values[-1] < values[0]


@pytest.mark.parametrize("kind", ["bernoulli", "gaussian"])
def test_one_number_for_each_example_is_an_error_and_one_example_of_many_is_none(kind):
    """(n,) would be one term of n coordinates: G would be n times too large."""
    x = normal(6, 4, seed=3)
    params = {"w": PARAMS["w"][:, :1]}

    def loss(p, x):
        outputs = (x @ p["w"])[..., 0]
        return jnp.mean(outputs**2), outputs

    fisher = KINDS[kind]
    for arguments, own in (((x,), loss), ((), lambda p: loss(p, x))):
        with pytest.raises(ValueError, match=r"must be \(..., C\), got \(6,\), as many as examples"):
            value_and_grad(own, has_aux=True, fisher=fisher(exact=True)).plan(params, *arguments)
    vag = value_and_grad(loss, has_aux=True, fisher=fisher(lambda y: y[..., None], exact=True))
    statistics = vag(params, x)[2]
    assert float(statistics.terms) == 6
    outputs = np.asarray(x @ params["w"])
    expected = sum(hessian(kind, y) for y in outputs)
    np.testing.assert_allclose(statistics["['w']"].main.G[0], expected, rtol=1e-9)

    each = value_and_grad(
        lambda p, x: (jnp.sum(x @ p["w"]), x @ p["w"]), True, fisher=fisher(exact=True)
    )
    of_each = jax.vmap(lambda x: each(PARAMS, x)[2])(x)
    np.testing.assert_array_equal(of_each.terms, np.ones(6))
    expected = [hessian(kind, y) for y in np.asarray(x @ PARAMS["w"])]
    np.testing.assert_allclose(of_each["['w']"].main.G[:, 0], expected, rtol=1e-9)


def test_the_key_of_a_sampled_fisher_is_not_taken_for_the_losss_own():
    def loss(p, x, key=None):
        kept = 1.0 if key is None else jax.random.bernoulli(key, 0.5, x.shape)
        outputs = (x * kept) @ p["w"]
        return jnp.sum(outputs**2), outputs

    for taken in (loss, lambda p, x, *, key: loss(p, x, key)):
        with pytest.raises(ValueError, match=r"got \['key'\]: key is the sampled.*dropout_key"):
            value_and_grad(taken, has_aux=True, fisher=Gaussian())
    one, two = jax.random.key(1), jax.random.key(2)
    expected = loss(PARAMS, X, one)[0]
    for other in (None, Gaussian(exact=True)):  # have no use for a key
        (value, _), *_ = value_and_grad(loss, has_aux=True, fisher=other)(PARAMS, X, key=one)
        np.testing.assert_allclose(value, expected, rtol=1e-12)
    own = value_and_grad(
        lambda p, x, dropout_key: loss(p, x, dropout_key), has_aux=True, fisher=Gaussian()
    )
    (value, _), *_ = jax.jit(own)(PARAMS, X, dropout_key=one, key=two)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    assert abs(float(value) - float(loss(PARAMS, X)[0])) > 1e-3
    value_and_grad(lambda p, x, **kwargs: loss(p, x), has_aux=True, fisher=Gaussian())


def test_a_key_decides_on_the_signs_of_an_exact_fisher():
    def loss(p, x):
        hidden = x @ p["w"]  # reaches two terms
        outputs = jnp.stack([hidden, jnp.tanh(hidden)], axis=1)
        return jnp.mean(outputs**2), outputs

    x = normal(5, 4, seed=3)
    vag = value_and_grad(loss, has_aux=True, fisher=Categorical(exact=True))

    compiled = jax.jit(vag)

    def G(x, key=None):
        return np.asarray(compiled(PARAMS, x, key=key)[2].layers["['w']"].main.G)

    keys = [jax.random.key(i) for i in range(400)]
    same = G(x, keys[0])
    np.testing.assert_allclose(G(x * (1 + 1e-9), keys[0]), same, rtol=1e-6)  # not so without a key
    assert not np.allclose(G(x * (1 + 1e-6)), G(x), rtol=1e-3)
    assert not np.allclose(G(x, keys[1]), same, rtol=1e-3)
    mean = np.mean([G(x, key) for key in keys], axis=0)
    np.testing.assert_allclose(
        mean, np.mean([G(x * (1 + 1e-6 * i)) for i in range(400)], axis=0), atol=0.02
    )
    with pytest.raises(TypeError, match="key must be one jax"):
        vag(PARAMS, x, key=3)


def test_sizes_that_are_symbols_are_an_error():
    (batch,) = export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 4), X.dtype)
    vag = value_and_grad(lambda p, x: jnp.mean(model(p, x) ** 2))
    with pytest.raises(TypeError, match=r"sizes that are numbers, got \(batch, 4\)"):
        export.export(jax.jit(lambda x: vag(PARAMS, x)[1]["w"]))(x)


def test_sizes_may_be_numpys():
    vag = value_and_grad(lambda p, x: jnp.mean(model(p, x) ** 2))
    found = vag.plan(PARAMS, jax.ShapeDtypeStruct((np.int64(8), np.int32(4)), X.dtype))
    assert str(found) == str(vag.plan(PARAMS, jax.ShapeDtypeStruct((8, 4), X.dtype)))


def test_statistics_of_a_fisher_do_not_fit_the_plan_of_a_loss_nor_the_reverse():
    fisher = Categorical(lambda aux: aux["outputs"], exact=True)
    kinds = [value_and_grad(loss_fn, has_aux=True, fisher=f) for f in (None, fisher)]
    for one, other in (kinds, kinds[::-1]):
        tx = kfac(one.plan(PARAMS, X), 0.1)
        state = tx.init(PARAMS)
        _, grads, statistics = one(PARAMS, X)
        tx.update(grads, state, PARAMS, statistics=statistics)
        _, grads, statistics = other(PARAMS, X)
        with pytest.raises(ValueError, match="statistics do not fit the plan, which is of"):
            tx.update(grads, state, PARAMS, statistics=statistics)


def test_errors():
    fisher = Categorical(lambda aux: aux["outputs"])
    with pytest.raises(ValueError, match="needs the model's outputs"):
        value_and_grad(loss_fn, fisher=fisher)
    with pytest.raises(TypeError, match="fisher must be None, Categorical"):
        value_and_grad(loss_fn, has_aux=True, fisher="mc")
    with pytest.raises(TypeError, match="needs key="):
        value_and_grad(loss_fn, has_aux=True, fisher=fisher)(PARAMS, X)
    for key in (3, jnp.zeros(2), jax.random.split(jax.random.key(0))):
        with pytest.raises(TypeError, match="key must be one jax"):
            value_and_grad(loss_fn, has_aux=True, fisher=fisher)(PARAMS, X, key=key)
    for capture in (None, "yes", jnp.ones(2, bool)):
        with pytest.raises(TypeError, match="capture must be True, False or a scalar array, got"):
            value_and_grad(loss_fn, has_aux=True)(PARAMS, X, capture=capture)
    with pytest.raises(TypeError, match="must pick an array of floats"):
        value_and_grad(loss_fn, has_aux=True, fisher=Categorical()).plan(PARAMS, X)
    labels = Categorical(lambda aux: jnp.zeros((5, 3), jnp.int32))
    with pytest.raises(TypeError, match=r"must pick an array of floats .* got one of int32"):
        value_and_grad(loss_fn, has_aux=True, fisher=labels).plan(PARAMS, X)
    with pytest.raises(ValueError, match="samples must be >= 1"):
        Categorical(samples=0)
    with pytest.raises(ValueError, match="variance must be > 0"):
        Gaussian(variance=0.0)
    with pytest.raises(TypeError, match="exact must be True or False"):
        Bernoulli(exact=1)
    with pytest.raises(TypeError, match="outputs must be a function"):
        Bernoulli("logits")
