"""Terms of a loss that are made of parameters alone: in the gradient, and no uses of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fishers import check, normal
from suite.jax import Categorical, kfac, value_and_grad

PARAMS = {
    "w": normal(4, 3),
    "b": normal(3, seed=1),
    "g": 1 + 0.1 * normal(3, seed=2),
    "v": normal(3, 2, seed=3),
}
X = normal(6, 4, seed=4)
OLD = jax.tree.map(lambda p: p + 0.1, PARAMS)


def outputs(p, x):
    return (jnp.tanh(x @ p["w"] + p["b"]) * p["g"]) @ p["v"]


def rows(p, x):
    return jnp.sum(jnp.sin(outputs(p, x)) ** 2, -1)


def of_all(function):
    return lambda p: sum(map(function, jax.tree.leaves(p)))


def norm(p):
    return jnp.sqrt(of_all(lambda q: jnp.sum(q**2))(p))


def orthogonality(p):
    return jnp.sum((p["w"].T @ p["w"] - jnp.eye(3)) ** 2)


@jax.custom_vjp
def own_rule(w):
    return jnp.sum(w**2)


own_rule.defvjp(lambda w: (own_rule(w), w), lambda w, g: (g * w,))

PENALTIES = {
    "squares": of_all(lambda q: jnp.sum(q**2)),
    "products": of_all(lambda q: jnp.vdot(q, q)),
    "sizes": of_all(lambda q: jnp.sum(jnp.abs(q))),
    "a prior": lambda p: -of_all(lambda q: jnp.sum(jax.scipy.stats.norm.logpdf(q, 0.1, 2)))(p),
    "a norm": norm,
    "a bound on the norm": lambda p: jax.nn.relu(norm(p) - 1),
    "orthogonality": orthogonality,
    "largest": lambda p: jnp.max(jnp.abs(p["w"])) + jax.nn.logsumexp(p["v"]),
    "all in one vector": lambda p: jnp.sum(jax.flatten_util.ravel_pytree(p)[0] ** 2),
    "smoothness": lambda p: jnp.sum(jnp.diff(p["w"], axis=0) ** 2),
    "what was known": lambda p: of_all(lambda q: jnp.sum(q**2))(jax.tree.map(jnp.subtract, p, OLD)),
    "a sum": lambda p: jnp.sum(p["b"]) + jnp.mean(p["g"]),
    "jit": jax.jit(of_all(lambda q: jnp.sum(q**2))),
    "remat": lambda p: jnp.sum(p["b"] ** 2) + 1 * jax.jit(orthogonality)(p),
    "an own rule": lambda p: own_rule(p["w"]),
}
LOSSES = {
    "a sum": lambda p, x, penalty: jnp.mean(rows(p, x)) + 0.1 * penalty(p),
    "in each row": lambda p, x, penalty: jnp.mean(rows(p, x) - penalty(p) / 10),
    "by the examples": lambda p, x, penalty: (jnp.sum(rows(p, x)) + penalty(p)) / jnp.sum(x**2),
    "beside others": lambda p, x, penalty: jnp.sum(jnp.stack([jnp.mean(rows(p, x)), penalty(p)])),
}


@pytest.mark.parametrize(
    ("name", "how"), [*((name, "a sum") for name in PENALTIES), *(("a norm", how) for how in LOSSES)]
)
def test_statistics_are_those_of_the_loss_without_it(name, how):
    def loss(p, x, penalty=PENALTIES[name]):
        return LOSSES[how](p, x, penalty)

    plan, statistics = check(loss, PARAMS, X)
    without = value_and_grad(lambda p, x: loss(p, x, lambda p: 0.0))
    expected = jax.jit(without)(PARAMS, X)[2]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14),
        (statistics.layers, statistics.terms),
        (expected.layers, expected.terms),
    )
    assert plan.routing.routes == without.plan(PARAMS, X).routing.routes


def test_the_plan_names_the_parameters():
    def loss(p, x):
        return jnp.mean(rows(p, x)) + 0.1 * orthogonality(p) + jnp.sum(p["unused"] ** 2)

    plan = value_and_grad(loss).plan({**PARAMS, "unused": normal(3)}, X)
    assert "terms of the loss made of nothing but parameters, of ['unused'], ['w']" in str(plan)
    route = plan.routing["['unused']"]
    assert (route.treatment, route.reason) == (
        "plain",
        "used by terms of the loss that are made of parameters alone",
    )


def test_its_weight_may_be_an_argument():
    def loss(p, x, weight):
        return jnp.mean(rows(p, x)) + weight * PENALTIES["squares"](p)

    check(loss, PARAMS, X, jnp.asarray(0.3))
    check(loss, PARAMS, X, 0.3)


def test_the_entropy_of_a_policy_leaves_its_deviations_covered():
    params = {"w": normal(4, 2), "log_std": 0.1 * normal(2)}

    def loss(p, x, actions):
        z = (actions - x @ p["w"]) / jnp.exp(p["log_std"])
        nll = 0.5 * jnp.sum(z**2, -1) + jnp.sum(p["log_std"])
        return jnp.mean(nll) - 0.01 * jnp.sum(p["log_std"] + 0.5 * jnp.log(2 * jnp.pi * jnp.e))

    actions = normal(6, 2, seed=5)
    _, statistics = check(loss, params, X, actions)
    z = (actions - X @ params["w"]) / jnp.exp(params["log_std"])
    found = statistics["['log_std']"].main.G.ravel()
    np.testing.assert_allclose(found, jnp.sum((z**2 / 6) ** 2, 0), rtol=1e-10)


NO_PENALTIES = {
    "of the loss's logarithm": lambda p, x: jnp.log(jnp.mean(rows(p, x)) + jnp.sum(p["w"] ** 2)),
    "times the loss": lambda p, x: jnp.mean(rows(p, x)) * (1 + jnp.sum(p["w"] ** 2)),
    "a term of the loss's square": lambda p, x: (lambda v: v + v**2)(
        jnp.mean(rows(p, x)) + jnp.sum(p["w"] ** 2)
    ),
    "of what examples have": lambda p, x: jnp.mean(rows(p, x)) + jnp.sum((p["w"] - x[:4, :3]) ** 2),
}


@pytest.mark.parametrize("name", NO_PENALTIES)
def test_what_is_more_than_a_term_leaves_a_weight_plain(name):
    plan, _ = check(NO_PENALTIES[name], PARAMS, X, uncovered=["['w']"])
    assert "but also used by" in plan.routing["['w']"].reason
    assert not plan.penalized


def poisson(p, x):
    """A log likelihood has the rate's logarithm in a sum, and elsewhere."""
    z = x @ p["w"] + jax.nn.softplus(p["s"])
    return jnp.sum(jnp.exp(z) - jnp.abs(jnp.cos(3 * x[:, :1])) * z)


def by_rows(p, x):
    return jnp.sum(jnp.sin(x @ p["w"])) + jnp.sum(x[:, 0] * jnp.exp(p["s"]))


@pytest.mark.parametrize("loss", [poisson, by_rows])
def test_what_examples_are_moved_or_multiplied_by_is_no_term(loss):
    params = {"w": normal(4, 1), "s": jnp.asarray(0.3)}
    plan, statistics = check(loss, params, X)
    each = jax.vmap(jax.grad(loss), (None, 0))(params, X[:, None])["s"]
    np.testing.assert_allclose(statistics["['s']"].main.G.ravel(), jnp.sum(each**2, 0), rtol=1e-10)
    assert not plan.penalized


def test_a_critics_bias_is_a_bias_though_the_loss_has_it_alone():
    params = {"w": normal(4, 1), "b": normal(1)}
    plan, statistics = check(lambda p, x: jnp.mean(x @ p["w"] + p["b"]), params, X)
    assert plan.routing["['b']"].reason == "bias of ['w']"
    assert statistics["['w']"].main.A.shape == (1, 5, 5)
    assert not plan.penalized


def test_points_that_the_loss_makes_are_rows():
    def loss(p):
        x = jnp.stack([jnp.linspace(0, 1, 7) ** k for k in range(4)], -1)
        return jnp.mean(jnp.sin(outputs(p, x)) ** 2) + 0.1 * PENALTIES["squares"](p)

    plan, statistics = check(loss, PARAMS)
    assert float(statistics["['w']"].main.rows[0]) == 7
    assert plan.penalized == ("['b']", "['g']", "['v']", "['w']")


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_a_point_at_the_boundary_is_a_row(start):
    """Of zeros or ones, which are written out in the program."""
    params = {name: PARAMS[name] for name in ("w", "b", "v")}

    def loss(p, x):
        h, end = (jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] for x in (x, jnp.full((1, 4), start)))
        return jnp.sum(jnp.sin(h)) + jnp.sum((end - 1) ** 2)

    plan, statistics = check(loss, params, X)
    assert float(statistics["['v']"].main.rows[0]) == 7
    assert not plan.penalized


def test_outputs_have_none():
    """What a sampled Fisher is of may be moved by a number that is made of parameters."""

    def loss(p, x):
        logits = outputs(p, x) * jnp.asarray([1.0, 2.0]) + jnp.sum(p["g"] ** 2)
        return jnp.mean(jax.nn.logsumexp(logits, -1)), logits

    plan = value_and_grad(loss, has_aux=True, fisher=Categorical(exact=True)).plan(PARAMS, X)
    assert plan.routing["['g']"].treatment == "plain"
    assert not plan.penalized


def test_training_with_it_leads_to_ridge_regression():
    y = normal(6, 2, seed=7)

    def loss(w, x, y):
        return jnp.mean((x @ w - y) ** 2) + 0.1 * jnp.sum(w**2)

    vag, w = value_and_grad(loss), normal(4, 2)
    tx = kfac(vag.plan(w, X, y), 0.3, kl_clip=None, momentum=0.0, damping=0.3)

    @jax.jit
    def step(w, state):
        _, grads, statistics = vag(w, X, y)
        updates, state = tx.update(grads, state, w, statistics=statistics)
        return w + updates, state

    state = tx.init(w)
    for _ in range(300):
        w, state = step(w, state)
    expected = np.linalg.solve(X.T @ X / 12 + 0.1 * np.eye(4), X.T @ y / 12)
    np.testing.assert_allclose(w, expected, rtol=1e-5, atol=1e-6)
