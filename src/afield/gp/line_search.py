"""The minimum of a function of one number: quickly near a guess, or surely in a range."""

import math
from collections.abc import Callable

_GOLDEN = (3 - math.sqrt(5)) / 2


def minimize_near(fn: Callable[[float], float], guess: float, *, step: float = 0.03, trials: int = 4) -> float | None:
    """The minimum near a guess, by a parabola through three points: off by about step^2 / 6; None where there is none.

    Two functions that differ by a rounding have minima that differ by little: no comparison decides the way.
    """
    for _ in range(trials):
        left, middle, right = (fn(guess + step * x) for x in (-1, 0, 1))
        bend = left - 2 * middle + right
        if not bend > 0:
            return None
        offset = (left - right) / (2 * bend)
        guess += step * max(-8.0, min(8.0, offset))
        if abs(offset) < 1:
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
