"""Prediction sets and intervals that hold the truth at a promised rate, whatever the model (split conformal).

A nonconformity e(x, y) is computed for n held-out examples; the answer for a new x is every y whose nonconformity is
at most the k-th smallest of them. If the new example and the held-out ones are exchangeable, the rank of its own
nonconformity is uniform up to ties, so that P(truth in the set) >= k / (n + 1), and with k = ceil((n + 1) level):

    level <= P(truth in the set)          over draws of the held-out data and of the new example

With `delta` the promise is kept with probability 1 - delta over draws of the held-out data: k = `binomial.rank`.

    least ambiguous   e = 1 - p_y                          the smallest sets on average
    adaptive          e = p of the classes before y, most probable first, plus p_y (plus u p_y, u uniform: randomised)
                      sets that grow where the model is unsure; randomised ones are smaller, and may be empty
    intervals         e = |y - mean| / std                 for each output

With `per_class` the promise holds within every class, each with a threshold of its own, at the price of more held-out
data.

The held-out data must be new to the network and to `afield.calibrate`. For sets on what a policy accepts, give what it
accepts: `prediction_sets(held_out[kept], y[kept])` with kept = rule.decide(held_out), of a rule chosen on other data.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from afield.prediction.binomial import rank
from afield.prediction.checks import check_labels
from afield.prediction.positions import refuse_positions
from afield.prediction.prediction import Prediction, likelihood_of

KINDS = ("least_ambiguous", "adaptive")


@dataclass(frozen=True)
class PredictionSets:
    """Which classes are possible. `thresholds`: the largest nonconformity in a set, for all classes or for each."""

    level: float
    thresholds: tuple[float, ...]
    kind: str = "least_ambiguous"
    randomized: bool = False
    delta: float | None = None

    def sets(self, prediction: Prediction, *, generator: torch.Generator | None = None) -> Tensor:
        """True (N, C) for every class in the set. `generator`: of the random numbers of randomised sets."""
        probs = _class_probs(prediction)
        if len(self.thresholds) not in (1, probs.shape[1]):
            raise ValueError(f"These sets were made for {len(self.thresholds)} classes, got {probs.shape[1]}.")
        largest = torch.tensor(self.thresholds, dtype=torch.float64, device=probs.device)
        return _nonconformity(probs, self.kind, self.randomized, generator) <= largest


@dataclass(frozen=True)
class PredictionIntervals:
    """Between which numbers the target lies. `thresholds`: standard deviations to each side, by output."""

    level: float
    thresholds: tuple[float, ...]
    delta: float | None = None

    def intervals(self, prediction: Prediction) -> tuple[Tensor, Tensor]:
        """Lower and upper ends (N, K), in float64; a rate is never below zero."""
        refuse_positions(prediction, "An interval with a promise")
        mean, std = prediction.mean.double(), prediction.std.double()
        half = std * torch.tensor(self.thresholds, dtype=torch.float64, device=std.device)
        lower = mean - half
        return lower.clamp_min(likelihood_of(prediction).lowest_target), mean + half


def prediction_sets(
    prediction: Prediction,
    target: Tensor,
    *,
    level: float = 0.9,
    kind: str = "least_ambiguous",
    per_class: bool = False,
    randomized: bool = False,
    delta: float | None = None,
    generator: torch.Generator | None = None,
) -> PredictionSets:
    """Sets of classes that hold the right one at a rate of at least `level`, from held-out data.

    kind        least_ambiguous, the smallest sets, or adaptive, whose size shows how hard an input is
    per_class   keep the promise within every class
    randomized  adaptive sets that miss the level by no more than 1 / (n + 1), by chance at their edge
    delta       keep the promise with probability 1 - delta for this very held-out data; None: on average over such data
    generator   of the random numbers of randomised sets
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}.")
    if randomized and kind != "adaptive":
        raise ValueError('randomized=True needs kind="adaptive".')
    probs = _class_probs(prediction)
    target = check_labels(target, *probs.shape).to(probs.device)
    nonconformity = _nonconformity(probs, kind, randomized, generator).gather(1, target[:, None]).squeeze(1)
    _check_no_nan(nonconformity)
    classes = range(probs.shape[1]) if per_class else ()
    groups = {f" of class {k}": nonconformity[target == k] for k in classes} or {"": nonconformity}
    thresholds = tuple(_conformal_quantile(values, level, delta, name) for name, values in groups.items())
    return PredictionSets(level, thresholds, kind, randomized, delta)


def prediction_intervals(
    prediction: Prediction, target: Tensor, *, level: float = 0.9, delta: float | None = None
) -> PredictionIntervals:
    """Intervals that hold the target of each output at a rate of at least `level`, from held-out data."""
    refuse_positions(prediction, "An interval with a promise")
    mean, std = prediction.mean.double(), prediction.std.double()
    if target.shape != mean.shape and not (mean.shape[1] == 1 and target.shape == mean.shape[:1]):
        raise ValueError(f"Expected targets of shape {tuple(mean.shape)}, got {tuple(target.shape)}.")
    if not bool((std > 0).all()):
        raise ValueError("Standard deviations must be positive: variance and noise are both zero somewhere, or NaN.")
    nonconformity = (target.to(mean.device).double().reshape(mean.shape) - mean).abs() / std
    _check_no_nan(nonconformity.amax(1))
    return PredictionIntervals(
        level, tuple(_conformal_quantile(column, level, delta) for column in nonconformity.unbind(1)), delta
    )


def _nonconformity(probs: Tensor, kind: str, randomized: bool, generator: torch.Generator | None) -> Tensor:
    """e(x, y) of every class (N, C)."""
    if kind == "least_ambiguous":
        return 1 - probs
    ordered, classes = probs.sort(dim=1, descending=True, stable=True)
    own = ordered
    if randomized:
        own = own * torch.rand(len(probs), 1, generator=generator, dtype=own.dtype, device=own.device)
    return torch.empty_like(probs).scatter_(1, classes, ordered.cumsum(1) - ordered + own)


def _conformal_quantile(nonconformity: Tensor, level: float, delta: float | None, group: str = "") -> float:
    """The k-th smallest nonconformity (N,), with k as in the module's docstring."""
    for name, rate in (("level", level), ("delta", delta)):
        if rate is not None and not 0 < rate < 1:
            raise ValueError(f"{name} must lie strictly between 0 and 1, got {rate}.")
    n = len(nonconformity)
    # Minus 1e-9, because of rounding: 0.9 (n + 1) may come out slightly above the whole number that it is.
    k = math.ceil((n + 1) * level - 1e-9) if delta is None else rank(n, level, delta)
    if k is None or k > n:
        best = n / (n + 1) if delta is None else delta ** (1 / n) if n else 0.0
        wanted = level / (1 - level) if delta is None else math.log(delta) / math.log(level)
        raise ValueError(
            f"{n} held-out examples{group} cannot promise a level of {level:g}, only {best:.3g}. Give at least "
            f"{math.ceil(wanted - 1e-9)}, or ask for less."
        )
    return float(nonconformity.sort().values[k - 1])


def _class_probs(prediction: Prediction) -> Tensor:
    refuse_positions(prediction, "A set of classes")
    if prediction.probs is None:
        raise ValueError(f"Sets of classes need probs, got a {prediction.likelihood} prediction: prediction_intervals.")
    return prediction.probs.detach().double()


def _check_no_nan(nonconformity: Tensor) -> None:
    if bool(nonconformity.isnan().any()):
        rows = nonconformity.isnan().nonzero().flatten().tolist()
        raise ValueError(f"Held-out predictions must be numbers, got NaN in {len(rows)} rows (first: {rows[:5]}).")
