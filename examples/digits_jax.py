"""The demo's models, optimizers and training step in JAX."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from threadpoolctl import threadpool_limits

import digits
import suite.jax


def autoencoder(params: list[Any], x: jax.Array) -> jax.Array:
    """Linear layers with tanh between them."""
    for weight, bias in params[:-1]:
        x = jnp.tanh(x @ weight.T + bias)
    weight, bias = params[-1]
    return x @ weight.T + bias


def convnet(params: list[Any], x: jax.Array) -> jax.Array:
    """Convolutions with ReLU, then a linear classifier."""
    x = x.reshape(-1, 1, 8, 8)
    for (weight, bias), stride in zip(params[:-1], digits.CONVNET_STRIDES, strict=True):
        x = jax.lax.conv_general_dilated(x, weight, (stride, stride), [(1, 1), (1, 1)])
        x = jax.nn.relu(x + bias[:, None, None])
    weight, bias = params[-1]
    return x.reshape(len(x), -1) @ weight.T + bias


MODELS = {"autoencoder": autoencoder, "convnet": convnet}


def loss_of(problem: str, outputs: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """What is minimized, see `digits.py`."""
    if problem == "autoencoder":
        return jnp.mean(jnp.sum((outputs - x) ** 2, 1))
    targets = optax.smooth_labels(jax.nn.one_hot(y, digits.CLASSES), digits.LABEL_SMOOTHING)
    return jnp.mean(optax.softmax_cross_entropy(outputs, targets)) - digits.LABEL_ENTROPY


def loss_and_accuracy(
    problem: str, params: list[Any], x: jax.Array, y: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The loss, and the share of images whose largest output is the right one."""
    outputs = MODELS[problem](params, x)
    return loss_of(problem, outputs, x, y), jnp.mean(jnp.argmax(outputs, 1) == y)


def make_optimizer(
    name: str, settings: dict[str, Any], seed: int, steps: int, plan: suite.jax.Plan | None
) -> optax.GradientTransformationExtraArgs:
    """A contender, with its settings from `contenders.py`; K-FAC needs the loss function's plan."""
    settings = dict(settings)
    learning_rate = optax.cosine_decay_schedule(settings.pop("lr"), steps)
    if name == "adamw":
        return optax.with_extra_args_support(optax.adamw(learning_rate, **settings))
    if name == "kfac":
        assert plan is not None
        return suite.jax.kfac(plan, learning_rate, **settings)
    return suite.jax.kron(learning_rate, seed=seed, **settings)


class Session:
    """A `digits.Session` in JAX: a step is one compiled program that overwrites parameters and state."""

    def __init__(
        self, problem: str, optimizer: str, settings: dict[str, Any], seed: int, steps: int
    ) -> None:
        self._problem = problem
        start = time.perf_counter()
        x, y = np.zeros((digits.BATCH_SIZE, 64), np.float32), np.zeros(digits.BATCH_SIZE, np.int32)
        params = jax.tree.map(jnp.array, digits.initial_weights(problem, seed))

        def loss(params: list[Any], x: jax.Array, y: jax.Array) -> jax.Array:
            return loss_of(problem, MODELS[problem](params, x), x, y)

        with_statistics = suite.jax.value_and_grad(loss)
        plan = with_statistics.plan(params, x, y) if optimizer == "kfac" else None
        tx = make_optimizer(optimizer, settings, seed, steps, plan)
        state = tx.init(params)

        def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
            value, grads = jax.value_and_grad(loss)(params, x, y)
            none = {"statistics": None} if optimizer == "kfac" else {}
            updates, state = tx.update(grads, state, params, **none)
            return optax.apply_updates(params, updates), state, value

        def factor_step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
            value, grads, statistics = with_statistics(params, x, y)
            updates, state = tx.update(grads, state, params, statistics=statistics)
            return optax.apply_updates(params, updates), state, value

        # Statistics cost time, so K-FAC has a second program for the steps that update its factors. (One
        # program with a `lax.cond` compiles faster, but XLA runs convolutions inside it far slower.)
        self._step = self._compile(step, params, state, x, y)
        self._factor_step, self._factor_update_steps = self._step, 1
        if optimizer == "kfac":
            self._factor_step = self._compile(factor_step, params, state, x, y)
            self._factor_update_steps = settings["factor_update_steps"]
        self._evaluate = jax.jit(partial(loss_and_accuracy, problem))
        self._params, self._state, self._steps = params, state, 0
        self.setup_seconds = time.perf_counter() - start

    def _compile(self, step: Any, params: Any, state: Any, x: np.ndarray, y: np.ndarray) -> Any:
        """The step as a program, run once on copies, as it overwrites what it is given."""
        program = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x, y).compile()
        jax.block_until_ready(program(*jax.tree.map(jnp.copy, (params, state)), x, y))
        return program

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        updates_factors = self._steps % self._factor_update_steps == 0
        program = self._factor_step if updates_factors else self._step
        self._params, self._state, loss = program(self._params, self._state, x, y)
        self._steps += 1
        jax.block_until_ready((self._params, self._state))
        return loss.item()

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        loss, accuracy = self._evaluate(self._params, x, y)
        return loss.item(), math.nan if self._problem == "autoencoder" else accuracy.item()

    def optimizer_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._state))

    def skipped_steps(self) -> int:
        return int(getattr(self._state, "skipped_steps", 0))


@contextmanager
def surroundings() -> Iterator[None]:
    """Where PyTorch runs, too, so that seconds compare: the CPU, with one thread in its linear algebra.

    On small matrices the threads of jaxlib's LAPACK mostly wait for each other; on a busy machine a
    factorization then takes a hundred times as long.
    """
    with threadpool_limits(1), jax.default_device(jax.devices("cpu")[0]):
        yield
