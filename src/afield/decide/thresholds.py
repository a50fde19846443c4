"""Thresholds with a finite-sample guarantee: answer where a score is small enough, refer elsewhere.

Given scores and errors of n held-out examples, drawn like the inputs to come; R(t) = P(wrong | score <= t).

`coverage_threshold`  P(score <= t) >= c with probability 1 - delta: the k-th smallest score, `binomial.rank`.
`risk_threshold`      R(t) <= r with probability 1 - delta. A tenth of the examples only places thresholds. On the
                      others, given that k scores are at most t, the errors among them are Bin(k, R(t)), so that
                      P(Bin(k, r) <= errors) is a p-value of "R(t) > r".

From a first threshold on, every t is tested upwards at level d until one fails (fixed-sequence testing, as in Learn
then Test). The first t from there with R(t) > r is not random, and to end beyond it that test had to be passed:
probability d at most. There are eleven such climbs, one from low down with d = 0.8 delta, and one from each tenth of
the scores with d = 0.02 delta, so that an unlucky beginning is not the end; their levels add up to delta. The largest
threshold that any of them reaches is taken. Nothing is assumed of R, and ties do no harm.
"""

import bisect
import math

import torch
from torch import Tensor

from afield.decide.binomial import rank, tail

_PLACING = 10  # one in so many examples places thresholds
_MAIN, _OTHERS = 0.8, 10  # share of delta of the climb from low down; number of the others
_DIGITS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)


def coverage_threshold(score: Tensor, coverage: float, delta: float) -> float:
    """The score (N,) up to which at least a part `coverage` is answered; infinite scores are never answered."""
    n = len(score)
    k = rank(n, coverage, delta)
    if k is None:
        raise ValueError(
            f"{n} held-out examples cannot promise a coverage of {coverage:g} with confidence {1 - delta:g}, only "
            f"{delta ** (1 / n):.3g}. Give at least {math.ceil(math.log(delta) / math.log(coverage))}, or ask for less."
        )
    threshold = float(score.detach().double().sort().values[k - 1])
    if threshold == math.inf:
        refused = int((score == math.inf).sum())
        raise ValueError(
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
    found = _search(score, wrong, risk, delta)
    if found is None:
        rates = [digit / 10**power for power in (4, 3, 2, 1) for digit in _DIGITS]
        within = next((r for r in rates if r > risk and _search(score, wrong, r, delta) is not None), None)
        raise ValueError(
            f"An error rate of {risk:g} cannot be promised with confidence {1 - delta:g} from these {len(wrong)} "
            f"held-out examples, {int(wrong.sum())} of them wrong; {within or 'no other'} can. Allow more risk, or "
            f"give more held-out data: {_fewest(risk, delta)} without an error are the fewest that could do."
        )
    return found


def _search(score: Tensor, wrong: Tensor, risk: float, delta: float) -> float | None:
    """The largest threshold that any climb reaches; the first tenth of the examples places thresholds."""
    n, fewest = len(score), _fewest(risk, _MAIN * delta)
    placing = -(-n // _PLACING)
    places, tested = score[:placing].sort().values, n - placing
    if tested <= 2 * fewest:  # too few to choose from: all or nothing, which needs no placing
        return math.inf if tail(int(wrong.sum()), n, risk) <= delta else None
    # Six times as many as an error-free beginning needs can bear some errors, but are not to be most of the data.
    count = max(2 * fewest, min(6 * fewest, tested // 4))
    parts = [count / tested, *(j / _OTHERS for j in range(1, _OTHERS))]
    starts = [*places[[math.ceil(part * placing) - 1 for part in parts]].tolist(), math.inf]
    levels = [_MAIN * delta] + [(1 - _MAIN) * delta / _OTHERS] * _OTHERS
    answered = _answered(score[placing:], wrong[placing:], starts)
    ends = [_climb(answered, start, risk, level) for start, level in zip(starts, levels, strict=True)]
    return max((end for end in ends if end is not None), default=None)


def _fewest(risk: float, delta: float) -> int:
    """Examples without an error that it takes to show a risk."""
    return math.ceil(math.log(delta) / math.log1p(-risk))


def _answered(score: Tensor, wrong: Tensor, starts: list[float]) -> list[tuple[float, int, int]]:
    """(threshold, number of scores up to it, errors among them), upwards, for all starts and wherever these change."""
    score, order = score.sort()
    errors = torch.cat([torch.zeros(1, dtype=torch.int64), wrong[order].long().cumsum(0)])
    thresholds = torch.cat([torch.tensor(starts, dtype=torch.float64), score]).unique()
    counts = torch.searchsorted(score, thresholds, right=True)
    return list(zip(thresholds.tolist(), counts.tolist(), errors[counts].tolist(), strict=True))


def _climb(answered: list[tuple[float, int, int]], start: float, risk: float, level: float) -> float | None:
    """The last threshold from `start` on that passes before the first that fails."""
    reached, errors_before = None, -1
    for threshold, k, errors in answered[bisect.bisect_left(answered, (start,)) :]:
        # With no further error, more answers can only lower the p-value.
        if errors != errors_before and tail(errors, k, risk) > level:
            break
        reached, errors_before = threshold, errors
    return reached
