"""Minima of functions of one number whose minima are known."""

import math

import pytest

from afield.gp.line_search import brent, minimize_near


@pytest.mark.parametrize("at", [-2.0, 0.0, 3.7])
def test_a_parabola_is_solved_at_once(at: float) -> None:
    calls = []

    def fn(x: float) -> float:
        calls.append(x)
        return 5 + (x - at) ** 2

    assert minimize_near(fn, at + 0.02, step=0.03) == pytest.approx(at, abs=1e-10)
    assert len(calls) == 3


@pytest.mark.parametrize("step", [0.03, 0.003])
def test_the_error_is_a_sixth_of_the_squared_step(step: float) -> None:
    """exp(x) - x has its minimum at 0, and there a third derivative as large as its second."""
    found = minimize_near(lambda x: math.exp(x) - x, step / 3, step=step)
    assert found is not None
    assert abs(found) < step**2 / 5


def test_a_far_guess_is_followed_for_some_steps_only() -> None:
    fn = lambda x: (x - 1) ** 2  # noqa: E731
    assert minimize_near(fn, 0.5, step=0.03) == pytest.approx(1, abs=1e-9)
    assert minimize_near(fn, -50, step=0.03) is None


@pytest.mark.parametrize("fn", [lambda x: -(x**2), lambda x: 0.0, lambda x: x, lambda x: math.nan])
def test_where_nothing_bends_upwards_there_is_none(fn) -> None:
    assert minimize_near(fn, 0.0) is None


@pytest.mark.parametrize("at", [-6.0, -0.1, 2.0])
def test_brent_finds_the_minimum_in_a_range(at: float) -> None:
    assert brent(lambda x: math.cosh(x - at), -7, 0, 7) == pytest.approx(at, abs=1e-5)
