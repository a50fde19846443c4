"""The minimum of a function of one number: quickly near a guess, surely in a range, or to the last bit as always."""

import math
from collections.abc import Callable

import numpy as np

_GOLDEN = (3 - math.sqrt(5)) / 2


def golden_section(fn: Callable[[float], float], low: float, high: float, *, steps: int = 32) -> float:
    """The minimum of a function with one minimum between low and high, by a fixed number of steps."""
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = fn(left), fn(right)
    for _ in range(steps):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = fn(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = fn(right)
    return (low + high) / 2


def minimize_near(fn: Callable[[float], float], guess: float, *, step: float = 0.03, trials: int = 4) -> float | None:
    """The minimum near a guess, by a cubic through four points: off by about step^3 / 24; None where there is none."""
    places = np.array([-1.5, -0.5, 0.5, 1.5])
    for _ in range(trials):
        _, b, c, a = np.linalg.solve(np.vander(places, increasing=True), [fn(guess + step * x) for x in places])
        root = c * c - 3 * a * b  # of 3 a x^2 + 2 c x + b, the cubic's slope
        if c <= 0 or root < 0:
            return None
        offset = float(-b / (c + math.sqrt(root)))
        guess += step * max(-8.0, min(8.0, offset))
        if abs(offset) < 2:
            return guess
    return None


def brent(fn: Callable[[float], float], low: float, start: float, high: float, *, tolerance: float = 1e-6) -> float:
    """The minimum of a function with one minimum between low and high (Brent 1973, chapter 5).

    Parabolas through the three best points, and golden sections where a parabola does not help.
    """
    best = second = third = start
    at_best = at_second = at_third = fn(start)
    step = last = 0.0
    while abs(best - (low + high) / 2) > 2 * tolerance - (high - low) / 2:
        # The parabola's minimum is at best + p / q.
        r, q = (best - second) * (at_best - at_third), (best - third) * (at_best - at_second)
        p, q = (best - third) * q - (best - second) * r, 2 * (q - r)
        p, q = (-p, q) if q > 0 else (p, -q)
        if abs(last) > tolerance and abs(p) < abs(q * last / 2) and q * (low - best) < p < q * (high - best):
            last, step = step, p / q
        else:
            last = (low if best >= (low + high) / 2 else high) - best
            step = _GOLDEN * last
        at = best + (step if abs(step) >= tolerance else math.copysign(tolerance, step))
        value = fn(at)
        if value <= at_best:
            low, high = (best, high) if at >= best else (low, best)
            second, third, at_second, at_third = best, second, at_best, at_second
            best, at_best = at, value
            continue
        low, high = (at, high) if at < best else (low, at)
        if value <= at_second or second == best:
            second, third, at_second, at_third = at, second, value, at_second
        elif value <= at_third or third in (best, second):
            third, at_third = at, value
    return best
