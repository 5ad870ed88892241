"""Ensembles under `vmap`: what is due in no member is not computed, and each goes its own way."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from suite.jax import kfac, kron, value_and_grad
from suite.jax.varying import cond

PERIOD = 3


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["first"]) @ params["second"] ** 2)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


PARAMS = {"first": normal(4, 5), "second": normal(5, 3, seed=1)}
X = normal(16, 4, seed=2)


def step_of_kfac(method, warm_start, late=None):
    vag = value_and_grad(loss)
    tx = kfac(
        vag.plan(PARAMS, X),
        0.1,
        compute_method=method,
        warm_start=warm_start,
        factor_update_steps=1 if late is None else PERIOD,
        inv_update_steps=PERIOD,
    )

    def step(params, state):
        capture = True if late is None else state.preconditioner.steps % PERIOD == late
        _, gradients, statistics = vag(params, X, capture=capture)
        updates, state = tx.update(gradients, state, params, statistics=statistics)
        return optax.apply_updates(params, updates), state

    return tx, step


def step_of_kron():
    tx = kron(0.1, preconditioner_update_probability=1 / PERIOD)

    def step(params, state):
        updates, state = tx.update(jax.grad(loss)(params, X), state, params)
        return optax.apply_updates(params, updates), state

    return tx, step


STEPS = {
    "inverse": lambda: step_of_kfac("inverse", False),
    "inverse, late": lambda: step_of_kfac("inverse", False, late=1),
    "eigen": lambda: step_of_kfac("eigen", False),
    "eigen, warm": lambda: step_of_kfac("eigen", True),
    "kron": step_of_kron,
}


@pytest.mark.parametrize("kind", STEPS)
def test_members_that_are_due_at_other_times_go_their_own_ways(kind):
    tx, step = STEPS[kind]()
    step = jax.jit(step)
    members = []
    aheads = (PERIOD,) * 3 if kind == "eigen, warm" else range(3)  # the first bases are not warm, of all
    for i, ahead in enumerate(aheads):
        member = jax.tree.map(lambda p, i=i: p * (1 + 0.1 * i), PARAMS)
        member = member, tx.init(member)
        for _ in range(ahead):
            member = step(*member)
        members.append(member)
    mapped = jax.jit(jax.vmap(step))
    together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    for _ in range(2 * PERIOD):
        together = mapped(*together)
        members = [step(*member) for member in members]
    for i, member in enumerate(members):
        for ours, theirs in zip(jax.tree.leaves(together[0]), jax.tree.leaves(member[0]), strict=True):
            np.testing.assert_allclose(ours[i], theirs, rtol=1e-9, atol=1e-12)


def double_where(chosen, x):
    return cond(chosen, lambda: 2 * x, lambda: x, like=x)


def test_what_no_member_chooses_is_left_out():
    chosen, x = jnp.asarray([True, False]), jnp.asarray([1.0, 3.0])
    mapped = jax.make_jaxpr(jax.vmap(double_where))(chosen, x)
    assert [e.primitive.name for e in mapped.eqns].count("cond") == 1
    assert "mul" not in [e.primitive.name for e in mapped.eqns]
    np.testing.assert_array_equal(jax.vmap(double_where)(chosen, x), [2.0, 3.0])
    np.testing.assert_array_equal(jax.vmap(double_where, (None, 0))(True, x), [2.0, 6.0])


def test_members_of_members():
    chosen, x = jnp.asarray([[True, False], [False, False]]), jnp.ones((2, 2))
    twice = jax.vmap(jax.vmap(double_where))
    assert [e.primitive.name for e in jax.make_jaxpr(twice)(chosen, x).eqns].count("cond") == 1
    np.testing.assert_array_equal(twice(chosen, x), [[2.0, 1.0], [1.0, 1.0]])


def test_gradients_go_through_on_both_sides():
    chosen, x = jnp.asarray([True, False]), jnp.asarray([1.0, 3.0])
    np.testing.assert_array_equal(jax.vmap(jax.grad(double_where, 1))(chosen, x), [2.0, 1.0])
    found = jax.grad(lambda x: jax.vmap(double_where)(chosen, x).sum())(x)
    np.testing.assert_array_equal(found, [2.0, 1.0])
