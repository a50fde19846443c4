"""Exact binomial bounds: what n examples can promise about the next one.

    tail         P(Bin(n, p) <= e)
    upper_bound  the largest p that e errors in n leave possible: P(Bin(n, p) <= e) = delta (Clopper and Pearson)
    rank         the smallest k for which the k-th smallest of n draws has at least a part `level` of its distribution
                 at or below it, with probability 1 - delta

Of n draws from any distribution F, F(k-th smallest) is at least the k-th smallest of n uniform numbers, so

    P(F(k-th smallest) < level) <= P(at least k of n uniform numbers are < level) = P(Bin(n, level) >= k).

Sums of probabilities: scipy, which has the incomplete beta function, is no dependency of the core.
"""

import math


def tail(errors: int, n: int, p: float) -> float:
    """P(Bin(n, p) <= errors), to about 1e-9 of itself for n up to a million."""
    if errors < 0:
        return 0.0
    if errors >= n or p <= 0:
        return 1.0
    if p >= 1:
        return 0.0
    # Away from the mean the terms fall, so that a sum from the edge outwards is short and cannot cancel.
    if errors < p * n:
        return _sum_down(errors, n, math.log(p), math.log1p(-p))
    return 1.0 - _sum_down(n - errors - 1, n, math.log1p(-p), math.log(p))


def _sum_down(k: int, n: int, log_p: float, log_q: float) -> float:
    """P(Bin = k) + P(Bin = k - 1) + ..., for k below the mean."""
    ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    term = total = math.exp(ways + k * log_p + (n - k) * log_q)
    odds = math.exp(log_q - log_p) if k else 0.0  # below the mean and above zero: at most n
    for i in range(k, 0, -1):
        term *= odds * i / (n - i + 1)
        total += term
        if term < 1e-17 * total:
            break
    return total


def upper_bound(errors: int, n: int, delta: float) -> float:
    """With probability 1 - delta the error rate is at most this, for a number of errors in n trials."""
    if errors >= n:
        return 1.0
    low, high = errors / n, 1.0
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if tail(errors, n, middle) > delta:
            low = middle
        else:
            high = middle
    return high


def rank(n: int, level: float, delta: float) -> int | None:
    """The smallest k of the module's docstring; None where not even the largest of n draws is enough."""
    if level**n > delta:
        return None
    low, high = 1, n  # P(Bin(n, level) >= k) falls with k, and is small enough at n
    while low < high:
        middle = (low + high) // 2
        if tail(n - middle, n, 1 - level) <= delta:
            high = middle
        else:
            low = middle + 1
    return low
