"""Derivatives along a direction of parameters, in forward mode."""

import pytest
import torch

from suite.torch.replay import derivatives_along

NUMBERS = {
    "2 w": (lambda w: 2 * w, lambda w: 2.0 + 0 * w),
    "w 2.5": (lambda w: torch.mul(w, 2.5), lambda w: 2.5 + 0 * w),
    "w / 4": (lambda w: w / 4, lambda w: 0.25 + 0 * w),
    "3 / w": (lambda w: 3 / w, lambda w: -3 / w**2),
    "1 - w": (lambda w: 1 - w, lambda w: -1.0 + 0 * w),
    "w - 1": (lambda w: w - 1, lambda w: 1.0 + 0 * w),
    "w + 1": (lambda w: torch.add(w, 1), lambda w: 1.0 + 0 * w),
    "w + 2 w": (lambda w: torch.add(w, w, alpha=2), lambda w: 3.0 + 0 * w),
    "w // 2": (lambda w: torch.div(w, 2, rounding_mode="floor"), lambda w: 0 * w),
    "w True": (lambda w: w * True, lambda w: 1.0 + 0 * w),
    "a constant": (lambda w: w * torch.arange(5), lambda w: torch.arange(5.0, dtype=w.dtype)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_arithmetic_with_numbers(name):
    """Values to the last bit, and derivatives from the rules of school."""
    function, derivative = NUMBERS[name]
    model = torch.nn.ParameterList([torch.linspace(0.5, 2.5, 5, dtype=torch.float64)])
    w, v = model[0], torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0], dtype=torch.float64)
    with torch.no_grad():
        expected = function(w.detach())
        [(value, along)] = derivatives_along(lambda: [function(model[0])], model, {id(w): v})
    assert torch.equal(value, expected)
    torch.testing.assert_close(along, derivative(w.detach()) * v, rtol=1e-15, atol=0)


def test_whole_numbers_stay_what_they_are():
    model = torch.nn.ParameterList([torch.ones(3)])
    steps = torch.arange(3)
    with torch.no_grad():
        found = derivatives_along(
            lambda: [model[0], steps * 2, steps * 0.5, steps / 2], model, {id(model[0]): torch.ones(3)}
        )
    for value, expected in zip(found[1:], (steps * 2, steps * 0.5, steps / 2), strict=True):
        assert value[0].dtype == expected.dtype
        assert torch.equal(value[0], expected)


def test_a_subclass_that_tells_functions_apart_gets_those_of_the_user():
    class Counted(torch.Tensor):
        seen: list[object] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            Counted.seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    model = torch.nn.ParameterList([torch.ones(3)])
    constant = torch.ones(3).as_subclass(Counted)
    with torch.no_grad():
        derivatives_along(
            lambda: [model[0] + 0 * (constant * 2.0)], model, {id(model[0]): torch.ones(3)}
        )
    assert torch.Tensor.mul in Counted.seen
    assert not any(isinstance(func, torch._ops.OpOverload) for func in Counted.seen)
