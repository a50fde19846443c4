"""Thresholds with a finite-sample guarantee: answer where a score is small enough, refer elsewhere.

Given scores and errors of n held-out examples, drawn like the inputs to come; R(t) = P(wrong | score <= t).

`coverage_threshold`  P(score <= t) >= c with probability 1 - delta: the k-th smallest score, `binomial.rank`.
`risk_threshold`      R(t) <= r with probability 1 - delta. A tenth of the examples only places thresholds. On the
                      others, given that k scores are at most t, the errors among them are Bin(k, R(t)), so that
                      P(Bin(k, r) <= errors) is a p-value of "R(t) > r".

From a first threshold on, every t is tested upwards at level d until one fails (fixed-sequence testing, as in Learn
then Test). The first t from there with R(t) > r is not random, and to end beyond it that test had to be passed:
probability d at most. There are eleven such sequences, one from a low threshold with d = 0.8 delta, and one from each
tenth of the scores with d = 0.02 delta, in case the first one fails early; their levels add up to delta. The largest
threshold that any of them reaches is taken. Nothing is assumed about R, and ties are allowed.
"""

import bisect
import math

import torch
from torch import Tensor

from afield.errors import OutOfReach
from afield.prediction.binomial import rank, tail

_PLACING = 10  # one in so many examples places thresholds
_MAIN_SHARE = 0.8  # of delta, for the sequence from a low threshold
_OTHER_SEQUENCES = 10
_SUGGESTED_DIGITS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)


def coverage_threshold(score: Tensor, coverage: float, delta: float) -> float:
    """The score (N,) up to which at least a part `coverage` is answered; infinite scores are never answered."""
    n = len(score)
    k = rank(n, coverage, delta)
    if k is None:
        raise OutOfReach(
            f"{n} held-out examples cannot promise a coverage of {coverage:g} with confidence {1 - delta:g}, only "
            f"{delta ** (1 / n):.3g}. Give at least {math.ceil(math.log(delta) / math.log(coverage))}, or ask for less."
        )
    threshold = float(score.detach().double().sort().values[k - 1])
    if threshold == math.inf:
        refused = int((score == math.inf).sum())
        raise OutOfReach(
            f"A coverage of {coverage:g} cannot be reached: {refused} of {n} held-out examples are refused by their "
            "p-values. Ask for less coverage, or for fewer false alarms."
        )
    return threshold


def risk_threshold(score: Tensor, wrong: Tensor, risk: float, delta: float, *, seed: int = 0) -> float:
    """The largest score (N,) that may be answered, infinity for all, so that at most a part `risk` goes wrong (N,).

    seed  decides which tenth of the examples places thresholds
    """
    score, wrong = score.detach().cpu().double(), wrong.cpu()
    order = torch.randperm(len(score), generator=torch.Generator().manual_seed(seed))
    score, wrong = score[order], wrong[order]
    threshold = _largest_threshold(score, wrong, risk, delta)
    if threshold is None:
        rates = [digit / 10**power for power in (4, 3, 2, 1) for digit in _SUGGESTED_DIGITS]
        reachable = next(
            (r for r in rates if r > risk and _largest_threshold(score, wrong, r, delta) is not None), None
        )
        raise OutOfReach(
            f"An error rate of {risk:g} cannot be promised with confidence {1 - delta:g} from these {len(wrong)} "
            f"held-out examples, {int(wrong.sum())} of them wrong; {reachable or 'no other'} can. Allow more risk, or "
            f"give more held-out data: {_fewest_examples(risk, delta)} without an error are the fewest that could do."
        )
    return threshold


def _largest_threshold(score: Tensor, wrong: Tensor, risk: float, delta: float) -> float | None:
    """The largest threshold that any sequence reaches; the first tenth of the examples places thresholds."""
    n, fewest = len(score), _fewest_examples(risk, _MAIN_SHARE * delta)
    placing = -(-n // _PLACING)
    places, tested = score[:placing].sort().values, n - placing
    if tested <= 2 * fewest:  # too few to choose from: all or nothing, which needs no placing
        return math.inf if tail(int(wrong.sum()), n, risk) <= delta else None
    # Six times as many as an error-free beginning needs can bear some errors, but are not to be most of the data.
    first = max(2 * fewest, min(6 * fewest, tested // 4))
    parts = [first / tested, *(j / _OTHER_SEQUENCES for j in range(1, _OTHER_SEQUENCES))]
    starts = [*places[[math.ceil(part * placing) - 1 for part in parts]].tolist(), math.inf]
    levels = [_MAIN_SHARE * delta] + [(1 - _MAIN_SHARE) * delta / _OTHER_SEQUENCES] * _OTHER_SEQUENCES
    counts = _counts_by_threshold(score[placing:], wrong[placing:], starts)
    ends = [_test_in_sequence(counts, start, risk, level) for start, level in zip(starts, levels, strict=True)]
    return max((end for end in ends if end is not None), default=None)


def _fewest_examples(risk: float, delta: float) -> int:
    """The number of examples without an error that shows a risk."""
    return math.ceil(math.log(delta) / math.log1p(-risk))


def _counts_by_threshold(score: Tensor, wrong: Tensor, starts: list[float]) -> list[tuple[float, int, int]]:
    """(threshold, number of scores up to it, errors among them), upwards, for all starts and wherever these change."""
    score, order = score.sort()
    errors = torch.cat([torch.zeros(1, dtype=torch.int64), wrong[order].long().cumsum(0)])
    thresholds = torch.cat([torch.tensor(starts, dtype=torch.float64), score]).unique()
    counts = torch.searchsorted(score, thresholds, right=True)
    return list(zip(thresholds.tolist(), counts.tolist(), errors[counts].tolist(), strict=True))


def _test_in_sequence(counts: list[tuple[float, int, int]], start: float, risk: float, level: float) -> float | None:
    """The last threshold from `start` on that passes its test before the first that fails."""
    reached, errors_before = None, -1
    for threshold, k, errors in counts[bisect.bisect_left(counts, (start,)) :]:
        # With no further error, more answers can only lower the p-value.
        if errors != errors_before and tail(errors, k, risk) > level:
            break
        reached, errors_before = threshold, errors
    return reached
