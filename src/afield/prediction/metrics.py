"""Metrics of a `Prediction` against targets, and of scores in-domain against OOD.

Classes (METRICS), with p_i the probabilities of example i, c_i the largest of them, N examples:

accuracy           fraction of right classes
nll                mean -log p_i(y_i)
brier              mean sum_k (p_ik - [y_i = k])^2, between 0 and 2
ece                sum over 15 equal bins of c of |sum in the bin of (right - c)| / N
adaptive_ece       the same over 15 bins with the same number of examples
classwise_ece      the same over 15 equal bins of p_k against [y = k], averaged over the classes
aurc               area under the risk-coverage curve: the mean, over coverages, of the error rate of the most confident
coverage_at_risk   the largest part of the examples, most confident first, with at most 1% errors

Numbers (REGRESSION_METRICS), for a gaussian with mean m and standard deviation s, noise included, z = (y - m) / s:

rmse               sqrt(mean (y - m)^2)
nll                mean -log N(y; m, s^2), summed over the outputs
crps               mean s (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi)): the integral of (F(t) - [t >= y])^2
interval_coverage  fraction of targets inside the central 95% interval

Scores (OOD_METRICS); the positive class is OOD, as in the authors' code, and a higher score says OOD:

auroc              P(score of an OOD example > score of an in-domain one), ties half
aupr               average precision: sum over thresholds of precision times the gain in recall
aupr_in            the same with in-domain positive and the scores negated
fpr95              fraction of in-domain examples flagged at the strictest threshold that flags 95% of the OOD ones

Every function returns a float. Those of predictions take a `Prediction` and `target`, class indices (N,) or numbers
(N, K); those of scores take `in_domain` (n,) and `ood` (m,). They raise ValueError if the shapes do not fit, if
something is not finite, or if the prediction lacks what the metric needs.

They are written out in torch, not taken from torchmetrics or scikit-learn: `import afield` stays light, they run on
the device of the prediction in float64, and each fits on a few lines. The tests check each against scikit-learn,
scipy or a definition. No metric depends on the order of the examples.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from afield.prediction.checks import check_labels
from afield.prediction.prediction import Prediction, likelihood_of
from afield.prediction.risk_coverage import RiskCoverage, risk_coverage
from afield.prediction.scores import max_probability
from afield.registry import Registry

NUM_BINS = 15

Metric = Callable[[Prediction, Tensor], float]


def accuracy(prediction: Prediction, target: Tensor) -> float:
    """The fraction of examples whose most probable class is right.

    >>> afield.metrics.accuracy(p, y) > 0.9
    True
    """
    _, right = _confidence(prediction, target)
    return float(right.mean())


def nll(prediction: Prediction, target: Tensor) -> float:
    """The mean negative log-likelihood of the right classes.

    >>> afield.metrics.nll(p, y) < 0.5
    True
    """
    probs, target = _classes(prediction, target)
    p = probs.gather(1, target[:, None])
    return float(-p.clamp_min(torch.finfo(torch.float32).tiny).log().mean())


def brier(prediction: Prediction, target: Tensor) -> float:
    """The mean squared distance between the probabilities and the right class, one-hot.

    >>> 0 <= afield.metrics.brier(p, y) < 0.2
    True
    """
    probs, target = _classes(prediction, target)
    truth = torch.zeros_like(probs).scatter_(1, target[:, None], 1.0)
    return float((probs - truth).square().sum(1).mean())


def ece(prediction: Prediction, target: Tensor) -> float:
    """The expected calibration error over bins of equal width.

    >>> 0 <= afield.metrics.ece(p, y) < 0.2
    True
    """
    return _calibration_error(*_confidence(prediction, target))


def adaptive_ece(prediction: Prediction, target: Tensor) -> float:
    """The expected calibration error over bins with equally many examples.

    >>> 0 <= afield.metrics.adaptive_ece(p, y) < 0.2
    True
    """
    confidence, right = _confidence(prediction, target)
    # Equal confidences share their gaps, so that an edge between two bins may cut them anywhere.
    values, group, size = confidence.unique(return_inverse=True, return_counts=True)
    gap = torch.zeros_like(values).index_add_(0, group, right - confidence) / size
    bins = gap.repeat_interleave(size).tensor_split(NUM_BINS)
    return float(torch.stack([b.sum().abs() for b in bins]).sum() / confidence.numel())


def classwise_ece(prediction: Prediction, target: Tensor) -> float:
    """The expected calibration error of each class's probability, averaged over the classes.

    >>> 0 <= afield.metrics.classwise_ece(p, y) < 0.2
    True
    """
    probs, target = _classes(prediction, target)
    errors = [_calibration_error(p, (target == k).double()) for k, p in enumerate(probs.unbind(1))]
    return sum(errors) / len(errors)


def aurc(prediction: Prediction, target: Tensor) -> float:
    """The area under the risk-coverage curve.

    >>> afield.metrics.aurc(p, y) <= 1 - afield.metrics.accuracy(p, y)
    True
    """
    return _risk_coverage(prediction, target).area


def coverage_at_risk(prediction: Prediction, target: Tensor, risk: float = 0.01) -> float:
    """The largest coverage whose error rate is at most `risk`.

    >>> afield.metrics.coverage_at_risk(p, y, risk=0.05) > 0.9
    True
    """
    return _risk_coverage(prediction, target).coverage_at(risk)


METRICS: Registry[Metric] = Registry(
    "metric",
    accuracy=accuracy,
    nll=nll,
    brier=brier,
    ece=ece,
    adaptive_ece=adaptive_ece,
    classwise_ece=classwise_ece,
    aurc=aurc,
    coverage_at_risk=coverage_at_risk,
)


def rmse(prediction: Prediction, target: Tensor) -> float:
    """The root mean squared error of the predicted mean.

    >>> afield.metrics.rmse(numbers, targets) < 1
    True
    """
    return math.sqrt(float((_numbers(prediction, target) - prediction.mean.double()).square().mean()))


def gaussian_nll(prediction: Prediction, target: Tensor) -> float:
    """The mean negative log-likelihood of the targets, summed over the outputs.

    >>> afield.metrics.gaussian_nll(numbers, targets) < 2
    True
    """
    z, std = _standardize(prediction, target)
    return float((0.5 * z.square() + std.log() + 0.5 * math.log(2 * math.pi)).sum(1).mean())


def crps(prediction: Prediction, target: Tensor) -> float:
    """The continuous ranked probability score, averaged over examples and outputs.

    >>> 0 < afield.metrics.crps(numbers, targets) < 1
    True
    """
    z, std = _standardize(prediction, target)
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    # 2 Phi(z) - 1 = erf(z / sqrt(2))
    return float((std * (z * torch.erf(z / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))).mean())


def interval_coverage(prediction: Prediction, target: Tensor, level: float = 0.95) -> float:
    """The fraction of targets inside the central interval of probability `level`.

    >>> afield.metrics.interval_coverage(numbers, targets, level=0.9) > 0.7
    True
    """
    z, _ = _standardize(prediction, target)
    if not 0 < level < 1:
        raise ValueError(f"level must lie strictly between 0 and 1, got {level}.")
    half = torch.special.ndtri(torch.tensor(0.5 + level / 2, dtype=torch.float64))
    return float((z.abs() <= float(half)).double().mean())


REGRESSION_METRICS: Registry[Metric] = Registry(
    "regression metric", rmse=rmse, nll=gaussian_nll, crps=crps, interval_coverage=interval_coverage
)


def auroc(in_domain: Tensor, ood: Tensor) -> float:
    """The area under the ROC curve of scores (n,) and (m,): the Mann-Whitney statistic.

    >>> afield.metrics.auroc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.3, 0.9]))  # one tie in six pairs
    0.9166666666666666
    """
    in_domain, ood = _check_scores(in_domain, ood)
    below = torch.searchsorted(in_domain, ood, right=False)
    upto = torch.searchsorted(in_domain, ood, right=True)
    return float((below + upto).double().mean() / (2 * in_domain.numel()))


def aupr(in_domain: Tensor, ood: Tensor) -> float:
    """The average precision with OOD as the positive class.

    >>> afield.metrics.aupr(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.8, 0.9]))
    1.0
    """
    in_domain, ood = _check_scores(in_domain, ood)
    false, true = _flagged(in_domain, ood)
    recall = true.double() / ood.numel()
    return float((recall.diff(prepend=recall.new_zeros(1)) * true / (true + false)).sum())


def aupr_in(in_domain: Tensor, ood: Tensor) -> float:
    """The average precision with in-domain as the positive class.

    >>> afield.metrics.aupr_in(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.8, 0.9]))
    1.0
    """
    return aupr(-ood, -in_domain)


def fpr95(in_domain: Tensor, ood: Tensor) -> float:
    """The false positive rate at a true positive rate of 95%.

    >>> afield.metrics.fpr95(torch.tensor([0.1, 0.2, 0.3, 0.85]), torch.tensor([0.8, 0.9]))
    0.25
    """
    in_domain, ood = _check_scores(in_domain, ood)
    false, true = _flagged(in_domain, ood)
    enough = 20 * true >= 19 * ood.numel()  # in whole numbers: 0.95 has no exact float
    return int(false[enough][0]) / in_domain.numel()


OOD_METRICS: Registry[Callable[[Tensor, Tensor], float]] = Registry(
    "OOD metric", auroc=auroc, aupr=aupr, aupr_in=aupr_in, fpr95=fpr95
)

HIGHER_IS_BETTER: Mapping[str, bool | None] = MappingProxyType(
    {
        **dict.fromkeys(("accuracy", "coverage_at_risk", "auroc", "aupr", "aupr_in"), True),
        **dict.fromkeys(("nll", "brier", "ece", "adaptive_ece", "classwise_ece", "aurc"), False),
        **dict.fromkeys(("rmse", "crps", "fpr95"), False),
        "interval_coverage": None,
    }
)
"""Whether higher is better, for the names of all three registries. None: an interval coverage is best at its level."""


def _classes(prediction: Prediction, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities (N, C) in float64 and class indices (N,), checked."""
    probs = prediction.probs
    if probs is None:
        raise ValueError(
            f"This metric needs probs, which the {prediction.likelihood} prediction lacks. "
            "See REGRESSION_METRICS for predictions of numbers."
        )
    if not len(prediction):
        raise ValueError("Metrics expect at least one example, got none.")
    if not bool(torch.isfinite(probs).all()):
        raise ValueError("Probabilities must be finite, got NaN or infinity. Has the training diverged?")
    return probs.detach().double(), check_labels(target, *probs.shape).to(probs.device)


def _confidence(prediction: Prediction, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest probability (N,), and 1.0 where its class is right (N,)."""
    probs, target = _classes(prediction, target)
    return probs.amax(1), (prediction.labels == target).double()


def _calibration_error(confidence: Tensor, right: Tensor) -> float:
    """The gap between confidence and accuracy, averaged over bins of equal width."""
    # Bins (i / 15, (i + 1) / 15]: a confidence of exactly 1 counts, in the last one.
    bins = (confidence * NUM_BINS).ceil().long().clamp(1, NUM_BINS) - 1
    gap = confidence.new_zeros(NUM_BINS).index_add_(0, bins, right - confidence)
    return float(gap.abs().sum() / confidence.numel())


def _risk_coverage(prediction: Prediction, target: Tensor) -> RiskCoverage:
    """The curve by 1 - confidence."""
    _, target = _classes(prediction, target)
    return risk_coverage(max_probability(prediction), prediction.labels == target, errors_first=True)


def _numbers(prediction: Prediction, target: Tensor) -> Tensor:
    """Return the targets (N, K) of a gaussian prediction in float64, checked."""
    if not likelihood_of(prediction).noisy:
        raise ValueError(f"This metric expects a gaussian prediction, got a {prediction.likelihood} one. See METRICS.")
    if not len(prediction):
        raise ValueError("Metrics expect at least one example, got none.")
    shape = tuple(prediction.logits.shape)
    if target.shape != shape and not (shape[1] == 1 and target.shape == shape[:1]):
        raise ValueError(f"Expected targets of shape {shape}, got {tuple(target.shape)}.")
    target = target.to(prediction.logits.device).double().reshape(shape)
    if not bool(torch.isfinite(target).all() and torch.isfinite(prediction.logits).all()):
        raise ValueError("Targets and means must be finite, got NaN or infinity.")
    return target


def _standardize(prediction: Prediction, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return z = (y - m) / s and s, both (N, K) in float64."""
    target = _numbers(prediction, target)
    for field in ("variance", "noise"):
        if getattr(prediction, field) is None:
            raise ValueError(f"This metric needs {field}, which the prediction lacks. rmse needs neither.")
    prediction = prediction.to(torch.float64)
    if not bool((prediction.std > 0).all()):
        raise ValueError("Standard deviations must be positive: variance and noise are both zero somewhere, or NaN.")
    return (target - prediction.mean) / prediction.std, prediction.std


def _check_scores(in_domain: Tensor, ood: Tensor) -> tuple[Tensor, Tensor]:
    """Return both scores in float64, checked and sorted."""
    if in_domain.dim() != 1 or ood.dim() != 1:
        raise ValueError(
            f"Expected scores of shape (n,) and (m,), got {tuple(in_domain.shape)} and {tuple(ood.shape)}."
        )
    if not in_domain.numel() or not ood.numel():
        raise ValueError(f"Expected scores on both sides, got {in_domain.numel()} in-domain and {ood.numel()} OOD.")
    if bool(in_domain.isnan().any() or ood.isnan().any()):
        raise ValueError("Scores must be numbers, got NaN.")
    return in_domain.detach().to(ood.device).double().sort().values, ood.detach().double().sort().values


def _flagged(in_domain: Tensor, ood: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many of each side (T,) score at least t, for every threshold t from the highest score down."""
    thresholds = torch.cat([in_domain, ood]).unique().flip(0)
    below = torch.searchsorted(in_domain, thresholds), torch.searchsorted(ood, thresholds)
    return in_domain.numel() - below[0], ood.numel() - below[1]
