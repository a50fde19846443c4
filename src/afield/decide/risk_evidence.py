"""The accuracy of a stream: with labels that trickle in, and without any.

With labels. `RiskEvidence` tests "at most `risk` of the accepted answers are wrong" while they come. For q > risk

    M_q = prod_t (q / risk)^e_t ((1 - q) / (1 - risk))^(1 - e_t),        e_t = 1 for a wrong answer, else 0

has an expected factor of at most 1 whenever P(e_t = 1 | past) <= risk: a supermartingale, and so is a mixture over q.
So P(it ever reaches 1 / alpha) <= alpha, whatever the dependence between answers. The risks that are not refuted are an
interval [lower, 1] that holds at all times together. Which answers are labelled must not depend on their being right.

Without labels. If P(right | probabilities) is the largest probability c, right minus c is a martingale, and

    |accuracy - mean c|  <=  sqrt((n / 4 + 1) log((n / 4 + 1) / delta^2)) / n,      all n at once, probability 1 - delta

(Robbins' mixture for increments in an interval of length 1). Nobody's probabilities are that good: `gap` is what
accuracy exceeded confidence by on held-out data, and `gap_error` how well that is known. Both speak of data like the
held-out data. When a watch rings, the estimate is void.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

_GRID = np.arange(1, 64) / 64  # q = risk + (1 - risk) g


class RiskEvidence:
    """Evidence that more than `risk` of the accepted answers are wrong.

    risk   the part of them that may be wrong
    alpha  the probability that `alarm` is ever True although no more than that are

    `alarm`, `count` and `errors` say what has been seen, `lower` how large the risk is at least.

    >>> evidence = RiskEvidence(risk=0.05)
    >>> evidence.update([False] * 20 + [True] * 10)  # ten wrong of thirty
    >>> evidence.alarm, evidence.lower > 0.05
    (True, True)
    """

    def __init__(self, risk: float, *, alpha: float = 0.01) -> None:
        for name, value in (("risk", risk), ("alpha", alpha)):
            if not 0 < value < 1:
                raise ValueError(f"{name} must lie strictly between 0 and 1, got {value}.")
        self.risk, self.alpha = risk, alpha
        self.count, self.errors, self.alarm = 0, 0, False

    alarm: bool

    def update(self, wrong: Any) -> None:
        """Count accepted answers, True where they were wrong. The alarm is looked at after each."""
        for one in np.asarray(wrong, dtype=bool).reshape(-1).tolist():
            self.count += 1
            self.errors += one
            self.alarm = self.alarm or self.log_evidence() >= -math.log(self.alpha)

    def resume(self, count: int, errors: int, *, alarm: bool = False) -> None:
        """Go on from these counts; `alarm`: it has rung at this risk before."""
        self.count, self.errors = count, errors
        self.alarm = alarm or self.log_evidence() >= -math.log(self.alpha)

    def log_evidence(self, risk: float | None = None) -> float:
        """The logarithm of the evidence against this risk; None: the one that was asked for."""
        r = self.risk if risk is None else risk
        q = r + (1 - r) * _GRID
        terms = self.errors * np.log(q / r) + (self.count - self.errors) * np.log((1 - q) / (1 - r))
        top = float(terms.max())
        return top + math.log(float(np.exp(terms - top).mean()))

    @property
    def lower(self) -> float:
        """The risk is at least this, with probability 1 - alpha at all times together."""
        low, high = 1e-12, 1 - 1e-12
        if self.log_evidence(low) < -math.log(self.alpha):
            return 0.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.log_evidence(middle) >= -math.log(self.alpha) else (low, middle)
        return low


@dataclass(frozen=True)
class Expected:
    """The accuracy that probabilities promise; `void` says why it does not hold, None: it does."""

    accuracy: float
    error: float
    count: int
    void: str | None = None


class ExpectedAccuracy:
    """The accuracy of answers that nobody has labelled, if the stream is like the held-out data.

    gap, gap_error  what accuracy exceeds confidence by, and how well that is known: `calibration_gap`
    delta           the probability that the bound is ever wrong

    >>> expected = ExpectedAccuracy()
    >>> expected.update(p.confidence)
    >>> expected.estimate().accuracy > 0.9
    True
    """

    def __init__(self, *, gap: float = 0.0, gap_error: float = 0.0, delta: float = 0.05) -> None:
        self.gap, self.gap_error, self.delta = gap, gap_error, delta
        self.count, self.total = 0, 0.0

    def update(self, confidence: Any) -> None:
        """Count the largest probabilities (N,) of answers; NaN, no answer, is left out."""
        values = np.asarray(confidence, dtype=np.float64).reshape(-1)
        values = values[np.isfinite(values)]
        self.count += len(values)
        self.total += float(values.sum())

    def estimate(self, *, drifted: bool = False) -> Expected | None:
        """None before the first answer. `drifted`: a watch has rung."""
        if not self.count:
            return None
        scale = self.count / 4 + 1
        error = math.sqrt(scale * math.log(scale / self.delta**2)) / self.count + self.gap_error
        void = "The stream has drifted: probabilities were calibrated on other data." if drifted else None
        return Expected(min(1.0, max(0.0, self.total / self.count + self.gap)), min(1.0, error), self.count, void)


def calibration_gap(confidence: Any, right: Any, *, delta: float = 0.05) -> tuple[float, float]:
    """Accuracy minus mean confidence on held-out answers, and its Hoeffding bound with confidence 1 - delta.

    confidence  (N,) the largest probabilities;  right  (N,) whether these answers are right
    delta       the probability that the bound is wrong

    returns  the gap and the bound: `gap` and `gap_error` of `ExpectedAccuracy`
    raises   ValueError if the shapes differ

    >>> gap, error = calibration_gap(p.confidence, p.labels == y)
    >>> abs(gap) <= error
    True
    """
    c, r = np.asarray(confidence, dtype=np.float64), np.asarray(right, dtype=np.float64)
    if c.shape != r.shape or c.ndim != 1 or not len(c):
        raise ValueError(f"Expected confidence and right of one shape (N,), got {c.shape} and {r.shape}.")
    return float((r - c).mean()), math.sqrt(2 * math.log(2 / delta) / len(c))
