from __future__ import annotations

import numpy as np
import pytest

from conftest import library
from suite.core.checks import check_choice, check_flag, check_integer, check_number


@pytest.mark.parametrize(
    ("bounds", "good", "bad", "rule"),
    [
        ({"above": 0}, [1e-30, 5], [0, 0.0, -1.0], "> 0"),
        ({"at_least": 0}, [0, 0.0, 5.0], [-1e-30, -1], ">= 0"),
        ({"at_most": 1}, [1, 1.0, -5], [1.0000001, 2], "<= 1"),
        ({"below": 1}, [0.9999, -3], [1, 1.0, 2], "< 1"),
        ({"at_least": 0, "below": 1}, [0, 0.5], [-0.1, 1.0], ">= 0 and < 1"),
        ({"above": 0, "at_most": 1}, [1, 0.5], [0.0, 1.1], "> 0 and <= 1"),
    ],
)
def test_number_outside_its_bounds_is_an_error_with_name_rule_and_value(bounds, good, bad, rule):
    for value in good:
        check_number("damping", value, **bounds)
    for value in [*bad, float("nan")]:
        with pytest.raises(ValueError, match=r"^damping must be") as error:
            check_number("damping", value, **bounds)
        assert str(error.value) == f"damping must be {rule}, got {value!r}"


def test_number_without_bounds_must_be_finite():
    check_number("lr", -1e30)
    with pytest.raises(ValueError, match=r"^lr must be finite, got nan$"):
        check_number("lr", float("nan"))


@pytest.mark.parametrize(
    ("bounds", "value", "rule"),
    [
        ({"at_least": 0}, float("inf"), "finite"),
        ({"at_least": 0}, -float("inf"), ">= 0"),
        ({"at_most": 0}, float("inf"), "<= 0"),
        ({"at_most": 0}, -float("inf"), "finite"),
        ({"above": -1, "below": 1}, float("inf"), "> -1 and < 1"),
    ],
)
def test_what_is_infinite_is_out_of_bounds_or_else_not_finite(bounds, value, rule):
    with pytest.raises(ValueError, match=r"^damping must be") as error:
        check_number("damping", value, **bounds)
    assert str(error.value) == f"damping must be {rule}, got {value!r}"


@pytest.mark.parametrize("value", ["0.1", None, True, [0.1], 1j, np.bool_(True), np.array([0.1, 0.2])])
def test_number_of_another_type_is_an_error(value):
    with pytest.raises(TypeError, match=r"^lr must be a number, got "):
        check_number("lr", value)


def test_arrays_without_axes_pass_as_numbers(xp):
    # Their value may be unknown: traced, or on a device.
    check_number("lr", xp.asarray(0.1), above=0)
    if not isinstance(xp.asarray(-1.0), np.ndarray):
        xp.run(lambda lr: check_number("lr", lr, above=0), xp.asarray(-1.0))


NUMBERS = [np.float64(-1), np.float32(-1), np.float64("nan"), np.int64(-1), np.array(-1.0)]


@pytest.mark.parametrize("value", NUMBERS)
def test_numpy_scalars_are_numbers_and_not_arrays(value):
    # They are what np.logspace and sweeps hand over, and their value is known.
    check_number("damping", abs(np.nan_to_num(value)), at_least=0)
    with pytest.raises(ValueError, match=r"^damping must be >= 0, got (-1|-1.0|nan)$"):
        check_number("damping", value, at_least=0)


def test_an_integer_above_all_floats_is_no_number():
    with pytest.raises(ValueError, match=r"^lr must be finite, got 1000"):
        check_number("lr", 10**400, at_least=0)


def test_integer_below_its_bound_is_an_error_with_name_rule_and_value():
    check_integer("block_size", 1, at_least=1)
    with pytest.raises(ValueError, match=r"^block_size must be >= 1, got 0$"):
        check_integer("block_size", 0, at_least=1)


@pytest.mark.parametrize("value", [1.0, "1", None, True])
def test_integer_of_another_type_is_an_error(value):
    with pytest.raises(TypeError, match=r"^block_size must be an integer, got "):
        check_integer("block_size", value, at_least=0)


def test_choice_outside_the_list_is_an_error_that_lists_it():
    check_choice("mode", None, (None, "a"))
    with pytest.raises(ValueError, match=r"^mode must be one of None, 'a', got 'A'$"):
        check_choice("mode", "A", (None, "a"))


@pytest.mark.parametrize("value", [0, ["a"], np.array(["a", "b"]), np.ones(2)])
def test_choice_of_another_type_is_the_same_error(value):
    with pytest.raises(ValueError, match=r"^mode must be one of None, 'a', got "):
        check_choice("mode", value, (None, "a"))


@pytest.mark.parametrize("value", [0, 1, "True", None])
def test_flag_must_be_a_bool(value):
    check_flag("merge", True)
    check_flag("merge", False)
    with pytest.raises(TypeError, match=r"^merge must be True or False, got "):
        check_flag("merge", value)


def test_numbers_of_other_libraries_with_axes_are_refused():
    with pytest.raises(TypeError, match=r"^lr must be a number"):
        check_number("lr", library("torch").asarray([0.1]))
