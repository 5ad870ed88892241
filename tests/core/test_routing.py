from __future__ import annotations

import pytest

from suite.core.routing import Route, Routing, describe_factors

ROUTES = (
    Route("layer.weight", (4, 6), "kfac", "4x4, 6x6", "a linear layer"),
    Route("norm.scale", (6,), "plain", "", "no product with the input"),
    Route("conv.kernel", (2, 3, 3), "kron", "2x2, diag 9", "no statistics"),
    Route("temperature", (), "frozen", "", "does not require a gradient"),
)


def test_routes_are_found_by_name_and_kept_in_order():
    routing = Routing(ROUTES)
    assert list(routing) == list(ROUTES)
    assert len(routing) == 4
    assert routing["conv.kernel"] is ROUTES[2]
    with pytest.raises(KeyError, match="nothing"):
        routing["nothing"]


@pytest.mark.parametrize(
    ("treatment", "expected"),
    [("kfac", True), ("kron", True), ("plain", False), ("fallback", False), ("frozen", False)],
)
def test_only_kfac_and_kron_precondition(treatment, expected):
    assert Route("w", (2, 2), treatment, "", "").preconditioned is expected


def test_table_has_a_line_for_each_parameter_and_the_share_that_is_covered():
    lines = str(Routing(ROUTES)).splitlines()
    assert lines[0].split() == ["parameter", "shape", "treatment", "factors", "reason"]
    assert set(lines[1]) == {"-", " "}
    for line, route in zip(lines[2:6], ROUTES, strict=True):
        assert line.startswith(route.parameter)
        assert route.treatment in line
        assert line.endswith(route.reason)
    assert "2x3x3" in lines[4]
    assert "()" in lines[5]
    # 24 + 18 of 24 + 6 + 18 + 1
    assert lines[6:] == ["42 of 49 parameters preconditioned (85.7 %)"]


def test_what_has_diagonals_alone_is_counted():
    routes = (
        Route("w", (4, 3), "kfac", "4x4, diag 3", ""),
        Route("b", (5,), "kfac", "diag 5", ""),
        Route("experts", (2, 3), "kfac", "2 x (diag 3)", ""),
        Route("norm", (2,), "kfac", "2x2", ""),
        Route("rest", (7,), "plain", "", ""),
    )
    line = str(Routing(routes)).splitlines()[-1]
    assert line == "25 of 32 parameters preconditioned (78.1 %), 11 of them by diagonals alone"


def test_columns_line_up():
    lines = str(Routing(ROUTES)).splitlines()
    start = lines[0].index("treatment")
    for line, route in zip(lines[2:6], ROUTES, strict=True):
        assert line[start:].startswith(route.treatment)


def test_empty_report_is_readable():
    assert str(Routing(())).endswith("0 of 0 parameters preconditioned (0.0 %)")


def test_preconditioning_nothing_is_an_error_that_shows_the_table():
    Routing(ROUTES).require_preconditioned("KFAC")
    nothing = Routing((ROUTES[1], ROUTES[3]))
    with pytest.raises(ValueError, match=r"^KFAC would precondition nothing:") as error:
        nothing.require_preconditioned("KFAC")
    assert str(nothing) in str(error.value)


def test_factors_are_described_by_their_sides():
    assert describe_factors((256, 4096), (False, True)) == "256x256, diag 4096"
    assert describe_factors((), ()) == ""
