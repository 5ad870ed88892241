"""`capture` as a traced flag: the same statistics, and no pass forward or backward in a `cond`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from suite.jax import Categorical, eigenbases, kfac, value_and_grad


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape))


def dense(p, x):
    return jnp.sin(x @ p["w"] + p["b"]) @ p["v"]


def convolutional(p, x):
    images = lax.conv_general_dilated(x.reshape(5, 1, 3, 4), p["kernel"], (1, 1), "SAME")
    return jnp.sin(images).mean((2, 3)) @ p["v"]


def called(p, x):
    return jax.jit(lambda x: jnp.sin(x @ p["w"]))(x) @ p["v"]


def tied(p, x):
    return jnp.sin(jnp.sin(x @ p["w"]) @ (2.0 * p["w"]).T)


def looked_up(p, x):
    return jnp.sin(p["table"][jnp.argmax(x, 1)] * p["scale"] + p["shift"]) @ p["v"]


def stacked(p, x):
    x, _ = lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, p["layers"])
    return jnp.sin(x @ p["layers"][0]) @ p["out"]


def recomputed(p, x):
    return jax.checkpoint(lambda x: jnp.sin(x @ p["w"] + p["b"]))(x) @ p["v"]


def chosen(p, x):
    return lax.cond(jnp.sum(x) > 0, lambda: jnp.sin(x @ p["w"]), lambda: x @ p["w"]) @ p["v"]


PARAMS = {
    dense: {"w": normal(12, 4), "b": normal(4), "v": normal(4, 3)},
    convolutional: {"kernel": normal(4, 1, 3, 3), "v": normal(4, 3)},
    called: {"w": normal(12, 4), "v": normal(4, 3)},
    tied: {"w": normal(12, 4)},
    looked_up: {
        "table": normal(12, 4),
        "scale": normal(4),
        "shift": normal(4, seed=1),
        "v": normal(4, 3),
    },
    stacked: {"layers": normal(2, 12, 12), "out": normal(12, 3)},
    recomputed: {"w": normal(12, 4), "b": normal(4), "v": normal(4, 3)},
    chosen: {"w": normal(12, 4), "v": normal(4, 3)},
}
X = normal(5, 12, seed=7)
FISHERS = {
    "empirical": None,
    "empirical in eigenbases": None,
    "sampled in eigenbases": Categorical(lambda logits: logits, samples=2),
    "exact": Categorical(lambda logits: logits, exact=True),
}


def loss_of(model):
    def loss(p, x):
        logits = model(p, x)
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0]), logits

    return loss


@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("model", PARAMS, ids=lambda model: model.__name__)
def test_a_traced_flag_chooses_the_statistics_and_nothing_else(model, fisher):
    params, given = PARAMS[model], {}
    vag = value_and_grad(loss_of(model), has_aux=True, fisher=FISHERS[fisher])
    if "sampled" in fisher:
        given["key"] = jax.random.key(3)
    if "eigenbases" in fisher:
        plan = vag.plan(params, X)
        tx = kfac(plan, 0.1, compute_method="ekfac", inv_update_steps=2)
        state = tx.init(params)
        _, grads, statistics = vag(params, X, bases=eigenbases(state, plan), **given)
        _, state = tx.update(grads, state, params, statistics=statistics)
        given["bases"] = eigenbases(state, plan)
    step = jax.jit(lambda due: vag(params, X, capture=due, **given))
    static = jax.jit(lambda: vag(params, X, capture=True, **given))()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-14), step(True), static
    )
    value, grads, nothing = step(False)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-14), (value, grads), static[:2]
    )
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(nothing))
    assert jax.tree.structure(nothing) == jax.tree.structure(static[2])


def inner_programs(jaxpr):
    """Each jaxpr in another one, and whether a `cond` is around it."""
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    inside = equation.primitive.name == "cond"
                    yield inner, inside
                    yield from ((further, inside or deeper) for further, deeper in inner_programs(inner))


def count(jaxpr, primitive: str) -> tuple[int, int]:
    """How many of it there are outside and inside of a `cond`."""
    found = [0, 0]
    for program, inside in [(jaxpr, False), *inner_programs(jaxpr)]:
        found[inside] += sum(equation.primitive.name == primitive for equation in program.eqns)
    return found[0], found[1]


@pytest.mark.parametrize("model", [dense, convolutional, stacked, recomputed], ids=lambda m: m.__name__)
def test_passes_are_compiled_once_and_outside_of_the_cond(model):
    loss, params = loss_of(model), PARAMS[model]
    plain = jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(params, X)
    vag = value_and_grad(loss, has_aux=True)
    traced = jax.make_jaxpr(lambda due: vag(params, X, capture=due))(True)
    for primitive in ("sin", "cos"):
        outside, inside = count(traced.jaxpr, primitive)
        assert (outside, inside) == count(plain.jaxpr, primitive)


def test_what_runs_by_itself_is_summed_in_one_cond():
    params = PARAMS[dense]
    vag = value_and_grad(loss_of(dense), has_aux=True)
    traced = jax.make_jaxpr(lambda due: vag(params, X, capture=due))(True)
    assert count(traced.jaxpr, "cond") == (1, 1)  # the inner one is what `vmap` takes apart
    products = count(
        jax.make_jaxpr(jax.value_and_grad(loss_of(dense), has_aux=True))(params, X).jaxpr, "dot_general"
    )
    assert count(traced.jaxpr, "dot_general")[0] == products[0]


def test_members_of_an_ensemble_choose_for_themselves():
    params, members = PARAMS[dense], 3
    stacked = jax.tree.map(lambda p: jnp.stack([p * (1 + i) for i in range(members)]), params)
    vag = value_and_grad(loss_of(dense), has_aux=True)
    due = jnp.asarray([True, False, True])
    _, _, found = jax.jit(jax.vmap(lambda p, due: vag(p, X, capture=due)))(stacked, due)
    for i in range(members):
        own = jax.tree.map(lambda p, i=i: p[i], stacked)
        _, _, expected = vag(own, X)
        expected = expected if due[i] else jax.tree.map(jnp.zeros_like, expected)
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-11, atol=1e-14),
            found,
            expected,
        )


def test_members_leave_out_what_none_of_them_chooses():
    params = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), PARAMS[dense])
    vag = value_and_grad(loss_of(dense), has_aux=True)
    due = jnp.asarray([False, False])
    mapped = jax.make_jaxpr(jax.vmap(lambda p, due: vag(p, X, capture=due)))(params, due)
    assert count(mapped.jaxpr, "cond") == (1, 0)
    assert count(mapped.jaxpr, "dot_general")[1] > 0  # the sums', in it


def test_in_a_scan_over_steps():
    params = PARAMS[convolutional]
    vag = value_and_grad(loss_of(convolutional), has_aux=True)

    def step(total, number):
        _, _, statistics = vag(params, X, capture=number % 2 == 0)
        return jax.tree.map(jnp.add, total, statistics), None

    nothing = vag.plan(params, X).no_statistics()
    total, _ = jax.jit(lambda: lax.scan(step, nothing, jnp.arange(5)))()
    _, _, once = vag(params, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 3 * b, rtol=1e-11, atol=1e-13), total, once)


@pytest.mark.parametrize("capture", [True, "traced"])
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("how", ["axis_index", "reshard"])
def test_a_loss_may_divide_its_data_itself(how, fisher, capture):
    """Types of products that say so though arguments' do not; of one device they do so, too."""
    if not hasattr(jax, {"reshard": "reshard", "axis_index": "shard_map"}[how]):
        pytest.skip("this jax has no such function")
    params = PARAMS[dense]
    kind = jax.sharding.AxisType.Explicit if how == "reshard" else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))

    def loss(p, x):
        if how == "reshard":
            return loss_of(dense)(p, jax.reshard(x, P("d")))
        value, logits = loss_of(dense)(p, lax.dynamic_slice_in_dim(x, 5 * lax.axis_index("d"), 5))
        return lax.pmean(value, "d"), logits

    vag = value_and_grad(loss, has_aux=True, fisher=FISHERS[fisher])

    def run(p, x, due):
        (value, _), grads, statistics = vag(p, x, capture=due if capture == "traced" else True)
        return value, grads, statistics

    if how == "axis_index":
        run = jax.shard_map(run, mesh=mesh, in_specs=(P(), P(), P()), out_specs=P())
    plain = value_and_grad(loss_of(dense), has_aux=True, fisher=FISHERS[fisher])
    (value, _), grads, statistics = plain(params, X)
    with jax.set_mesh(mesh):
        found = jax.jit(run)(params, X, True)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-14),
        found,
        (value, grads, statistics),
    )
