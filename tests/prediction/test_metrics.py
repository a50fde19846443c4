"""Metrics: each against an independent computation, and the theorems that hold for all of them."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from sklearn import metrics as sk
from torch import Tensor

from afield.prediction.metrics import (
    HIGHER_IS_BETTER,
    METRICS,
    OOD_METRICS,
    REGRESSION_METRICS,
    coverage_at_risk,
    interval_coverage,
)
from afield.prediction.prediction import Prediction

few = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 10**6)
sizes = st.integers(1, 60)
CALIBRATION = ("ece", "adaptive_ece", "classwise_ece")
K = 4


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def of(probs: Tensor) -> Prediction:
    return Prediction(probs.log(), probs=probs)


def classes(number: int = 0, n: int = 50, k: int = K) -> tuple[Prediction, Tensor]:
    """Predictions and targets that agree more often than by chance."""
    logits = 2 * normal(n, k, number=number)
    return of(F.softmax(logits, -1)), (logits + normal(n, k, number=number + 1)).argmax(1)


def numbers(number: int = 0, n: int = 30, k: int = 2, noise: float = 0.3) -> tuple[Prediction, Tensor]:
    mean, variance = normal(n, k, number=number), normal(n, k, number=number + 1).square()
    target = mean + (variance + noise).sqrt() * normal(n, k, number=number + 2)
    return Prediction(mean, variance, noise=noise, likelihood="gaussian"), target


def scores(number: int = 0, n: int = 40, m: int = 25) -> tuple[Tensor, Tensor]:
    """In-domain and OOD scores on a coarse grid, so that there are ties."""
    return (2 * normal(n, number=number)).round() / 2, (2 * normal(m, number=number + 1) + 1).round() / 2


# Independent computations ---------------------------------------------------------------------------------------


def arrays(p: Prediction, y: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidence, correctness, and the examples from the most confident on."""
    probs = p.probs.numpy()
    return probs.max(1), probs.argmax(1) == y.numpy(), np.argsort(-probs.max(1))


def binned(confidence: np.ndarray, right: np.ndarray) -> float:
    total = 0.0
    for i in range(15):
        inside = (confidence > i / 15) & (confidence <= (i + 1) / 15)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return total


def equal_mass(p: Prediction, y: Tensor) -> float:
    confidence, right, order = arrays(p, y)
    parts = [part for part in np.array_split(order[::-1], 15) if len(part)]
    return sum(len(part) / len(y) * abs(right[part].mean() - confidence[part].mean()) for part in parts)


def risks(p: Prediction, y: Tensor) -> list[float]:
    _, right, order = arrays(p, y)
    return [1 - right[order[:i]].mean() for i in range(1, len(y) + 1)]


FORMULAS: dict[str, Callable[[Prediction, Tensor], float]] = {
    "accuracy": lambda p, y: sk.accuracy_score(y, p.probs.argmax(1)),
    "nll": lambda p, y: sk.log_loss(y, p.probs, labels=range(K)),
    "brier": lambda p, y: sk.brier_score_loss(y, p.probs, labels=range(K), scale_by_half=False),
    "ece": lambda p, y: binned(*arrays(p, y)[:2]),
    "adaptive_ece": equal_mass,
    "classwise_ece": lambda p, y: np.mean([binned(p.probs[:, k].numpy(), (y == k).numpy()) for k in range(K)]),
    "aurc": lambda p, y: np.mean(risks(p, y)),
    "coverage_at_risk": lambda p, y: max([0, *(i + 1 for i, r in enumerate(risks(p, y)) if r <= 0.01)]) / len(y),
}


def crps_by_quadrature(mean: float, std: float, y: float) -> float:
    cdf = stats.norm(mean, std).cdf
    left = integrate.quad(lambda t: cdf(t) ** 2, min(mean, y) - 12 * std, y, points=[mean] if mean < y else None)[0]
    right = integrate.quad(lambda t: (1 - cdf(t)) ** 2, y, max(mean, y) + 12 * std, points=[mean] if mean > y else None)
    return left + right[0]


REGRESSION_FORMULAS: dict[str, Callable[[Prediction, Tensor], float]] = {
    "rmse": lambda p, y: sk.mean_squared_error(y.flatten(), p.logits.flatten()) ** 0.5,
    "nll": lambda p, y: -stats.norm(p.mean, p.std).logpdf(y).sum(1).mean(),
    "crps": lambda p, y: np.mean([crps_by_quadrature(*map(float, t)) for t in zip(*flat(p, y), strict=True)]),
    "interval_coverage": lambda p, y: float(((p.interval()[0] <= y) & (y <= p.interval()[1])).double().mean()),
}


def flat(p: Prediction, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return p.mean.flatten(), p.std.flatten(), y.flatten()


def labelled(a: Tensor, b: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """0 for the first, 1 for the second; and the scores."""
    return np.r_[np.zeros(len(a)), np.ones(len(b))], np.r_[a.numpy(), b.numpy()]


def fpr_at_95(a: Tensor, b: Tensor) -> float:
    fpr, tpr, _ = sk.roc_curve(*labelled(a, b), drop_intermediate=False)
    return fpr[tpr >= 0.95 - 1e-12][0]


OOD_FORMULAS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "auroc": lambda a, b: sk.roc_auc_score(*labelled(a, b)),
    "aupr": lambda a, b: sk.average_precision_score(*labelled(a, b)),
    "aupr_in": lambda a, b: sk.average_precision_score(1 - labelled(a, b)[0], -labelled(a, b)[1]),
    "fpr95": fpr_at_95,
}


def test_every_metric_has_its_formula() -> None:
    assert set(FORMULAS) == set(METRICS)
    assert set(REGRESSION_FORMULAS) == set(REGRESSION_METRICS)
    assert set(OOD_FORMULAS) == set(OOD_METRICS)


@pytest.mark.parametrize("name", METRICS)
@few
@given(number=seeds, n=sizes)
def test_metric_is_its_formula(name: str, number: int, n: int) -> None:
    p, y = classes(number, n)
    assert METRICS[name](p, y) == pytest.approx(FORMULAS[name](p, y), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", REGRESSION_METRICS)
@settings(deadline=None, max_examples=5)
@given(number=seeds, n=st.integers(1, 15), k=st.integers(1, 3))
def test_regression_metric_is_its_formula(name: str, number: int, n: int, k: int) -> None:
    p, y = numbers(number, n, k)
    assert REGRESSION_METRICS[name](p, y) == pytest.approx(REGRESSION_FORMULAS[name](p, y), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", OOD_METRICS)
@few
@given(number=seeds, n=sizes, m=sizes)
def test_ood_metric_is_its_formula(name: str, number: int, n: int, m: int) -> None:
    a, b = scores(number, n, m)
    assert OOD_METRICS[name](a, b) == pytest.approx(OOD_FORMULAS[name](a, b), rel=1e-9, abs=1e-12)


# Better and worse -----------------------------------------------------------------------------------------------


def test_every_metric_says_whether_higher_is_better() -> None:
    assert set(HIGHER_IS_BETTER) == {*METRICS, *REGRESSION_METRICS, *OOD_METRICS}
    assert {name for name, higher in HIGHER_IS_BETTER.items() if higher is None} == {"interval_coverage"}


@pytest.mark.parametrize("name", METRICS)
def test_right_and_sure_is_better_than_wrong_and_sure(name: str) -> None:
    y = torch.arange(40) % K
    probs = 0.97 * F.one_hot(y, K).double() + 0.01
    good, bad = METRICS[name](of(probs), y), METRICS[name](of(probs), (y + 1) % K)
    assert (good > bad) == HIGHER_IS_BETTER[name]


@pytest.mark.parametrize("name", sorted({*REGRESSION_METRICS} - {"interval_coverage"}))
def test_near_the_target_is_better_than_far(name: str) -> None:
    p, _ = numbers()
    good, bad = (REGRESSION_METRICS[name](p, shift + p.logits) for shift in (0, 5))
    assert (good > bad) == HIGHER_IS_BETTER[name]


@pytest.mark.parametrize("name", OOD_METRICS)
def test_separated_scores_are_best_and_reversed_ones_worst(name: str) -> None:
    a, b = torch.arange(20.0), torch.arange(30.0) + 100
    best, worst = OOD_METRICS[name](a, b), OOD_METRICS[name](b, a)
    assert (best > worst) == HIGHER_IS_BETTER[name]
    assert best == (1 if HIGHER_IS_BETTER[name] else 0)


# What every metric does -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METRICS)
@few
@given(number=seeds, digits=st.integers(0, 2))
def test_the_order_of_the_examples_does_not_matter_also_with_ties(name: str, number: int, digits: int) -> None:
    p, y = classes(number)
    probs = p.probs.round(decimals=digits) + 1e-3
    p = of(probs / probs.sum(1, keepdim=True))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(number))
    assert METRICS[name](p[order], y[order]) == pytest.approx(METRICS[name](p, y), abs=1e-12)


@pytest.mark.parametrize("name", METRICS)
def test_the_order_of_the_classes_does_not_matter(name: str) -> None:
    (p, y), order = classes(), torch.tensor([2, 0, 3, 1])
    assert METRICS[name](of(p.probs[:, order]), order.argsort()[y]) == pytest.approx(METRICS[name](p, y))


@pytest.mark.parametrize("name", METRICS)
def test_float32_gives_nearly_the_same_and_targets_may_have_any_type(name: str) -> None:
    p, y = classes()
    expected = pytest.approx(METRICS[name](p, y), abs=1e-5)
    assert METRICS[name](p.to(torch.float32), y.to(torch.uint8)) == expected
    assert METRICS[name](p, y[:, None].double()) == expected


@pytest.mark.parametrize("name", OOD_METRICS)
@few
@given(number=seeds)
def test_only_the_order_of_the_scores_matters(name: str, number: int) -> None:
    a, b = scores(number)
    assert OOD_METRICS[name](a.exp() * 3, b.exp() * 3) == pytest.approx(OOD_METRICS[name](a, b))
    assert OOD_METRICS[name](a.flip(0), b.float()) == pytest.approx(OOD_METRICS[name](a, b))


# Classes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("accuracy", 1 / 4),
        ("nll", math.log(4)),
        ("brier", 3 / 4),
        ("ece", 0),
        ("adaptive_ece", 0),
        ("classwise_ece", 0),
    ],
)
def test_knowing_nothing(name: str, value: float) -> None:
    """Uniform probabilities are calibrated where the classes are balanced."""
    p, y = of(torch.full((40, K), 1 / K).double()), torch.arange(40) % K
    assert METRICS[name](p, y) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        *(("accuracy", 1, 0), ("brier", 0, 2), ("ece", 0, 1), ("adaptive_ece", 0, 1), ("classwise_ece", 0, 2 / K)),
        *(("nll", 0, -math.log(torch.finfo(torch.float32).tiny)), ("aurc", 0, 1), ("coverage_at_risk", 1, 0)),
    ],
)
def test_being_certain(name: str, right: float, wrong: float) -> None:
    """The last bin counts, a confidence of exactly 1 being in it; and certain errors cost much, but not infinity."""
    y = torch.arange(40) % K
    p = Prediction(torch.eye(K)[y], probs=torch.eye(K)[y])
    assert METRICS[name](p, y) == pytest.approx(right)
    assert METRICS[name](p, (y + 1) % K) == pytest.approx(wrong)


@pytest.mark.parametrize("name", CALIBRATION)
def test_labels_drawn_from_the_probabilities_are_calibrated_and_overconfidence_shows(name: str) -> None:
    logits = 2 * normal(20_000, K)
    probs = F.softmax(logits, -1)
    y = torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(1)).squeeze(1)
    assert METRICS[name](of(probs), y) < 0.02
    assert METRICS[name](of(F.softmax(3 * logits, -1)), y) > 0.05


@pytest.mark.parametrize("name", ["ece", "adaptive_ece"])
@few
@given(number=seeds, n=sizes)
def test_any_bins_lie_between_one_bin_and_one_bin_an_example(name: str, number: int, n: int) -> None:
    """The triangle inequality."""
    p, y = classes(number, n)
    gap = (p.labels == y).double() - p.confidence
    assert abs(float(gap.mean())) - 1e-12 <= METRICS[name](p, y) <= float(gap.abs().mean()) + 1e-12


@few
@given(number=seeds)
def test_equal_mass_is_equal_width_where_confidences_are_uniform(number: int) -> None:
    top = (torch.arange(15 * 8).double() + 0.5) / 240 + 0.5  # 8 of the 120 in each fifteenth of (1/2, 1)
    p = of(torch.stack([top, 1 - top], 1))
    y = (normal(120, number=number) > 0.5).long()
    right = (y == 0).double()
    expected = sum(float((right - top)[8 * i : 8 * i + 8].sum().abs()) for i in range(15)) / 120
    assert METRICS["adaptive_ece"](p, y) == pytest.approx(expected)


def test_one_confidence_for_all_is_one_bin() -> None:
    """Fifteen bins that cut ties at random would show an error of .08 where there is none."""
    p, y = of(torch.tensor([[0.75, 0.25]]).double().expand(100, 2)), (torch.arange(100) % 4 == 0).long()
    assert METRICS["adaptive_ece"](p, y) == pytest.approx(0, abs=1e-12)


@few
@given(number=seeds)
def test_two_classes_have_the_same_classwise_error(number: int) -> None:
    p, y = classes(number, k=2)
    of_one = binned(p.probs[:, 1].numpy(), y.numpy())
    assert METRICS["classwise_ece"](p, y) == pytest.approx(of_one)


def test_the_area_under_the_curve_sees_the_order_behind_saturated_confidences() -> None:
    """In float32, 1 - max p is zero for all three, and the order of the data would decide."""
    logits = torch.tensor([[20.0, 0.0], [40.0, 0.0], [80.0, 0.0]])
    p = Prediction(logits, probs=F.softmax(logits, -1))
    assert METRICS["aurc"](p, torch.tensor([1, 0, 0])) == pytest.approx(1 / 9)
    assert METRICS["aurc"](p, torch.tensor([0, 0, 1])) == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)


@few
@given(number=seeds)
def test_more_risk_covers_more(number: int) -> None:
    p, y = classes(number)
    covered = [coverage_at_risk(p, y, risk) for risk in (0, 0.01, 0.1, 0.5, 1)]
    assert covered == sorted(covered)
    assert covered[-1] == 1


def test_one_logit_is_judged_by_its_two_probabilities() -> None:
    z, y = normal(50, 1), torch.arange(50) % 2
    p = Prediction(z, probs=torch.cat([torch.sigmoid(-z), torch.sigmoid(z)], 1), likelihood="bernoulli")
    assert METRICS["accuracy"](p, y) == float(((z[:, 0] > 0) == y.bool()).double().mean())
    assert METRICS["nll"](p, y) == pytest.approx(float(F.binary_cross_entropy_with_logits(z[:, 0], y.double())))


# Numbers --------------------------------------------------------------------------------------------------------


@few
@given(number=seeds, scale=st.floats(0.1, 10))
def test_crps_has_the_unit_of_the_target_and_tends_to_the_absolute_error(number: int, scale: float) -> None:
    p, y = numbers(number)
    scaled = Prediction(scale * p.logits, scale**2 * p.variance, noise=scale**2 * p.noise, likelihood="gaussian")
    crps = REGRESSION_METRICS["crps"]
    assert crps(scaled, scale * y) == pytest.approx(scale * crps(p, y))
    sharp = Prediction(p.logits, 0 * p.variance, noise=1e-12, likelihood="gaussian")
    assert crps(sharp, y) == pytest.approx(float((p.logits - y).abs().mean()), abs=1e-5)


@pytest.mark.parametrize("name", ["nll", "crps"])
def test_the_true_spread_is_best(name: str) -> None:
    """Both are proper."""
    y = normal(5000, 1)
    values = [
        REGRESSION_METRICS[name](Prediction(0 * y, torch.zeros(5000), noise=s, likelihood="gaussian"), y)
        for s in (1.0, 0.5, 2.0)
    ]
    assert values[0] == min(values)


@pytest.mark.parametrize("level", [0.5, 0.95])
def test_intervals_cover_their_part_of_the_quantiles(level: float) -> None:
    y = torch.special.ndtri((torch.arange(1000).double() + 0.5) / 1000)
    p = Prediction(torch.zeros(1000, 1).double(), torch.full((1000,), 0.75).double(), noise=0.25, likelihood="gaussian")
    assert interval_coverage(p, y, level) == pytest.approx(level)
    if level == 0.95:
        assert REGRESSION_METRICS["interval_coverage"](p, y) == pytest.approx(level)


@pytest.mark.parametrize("name", REGRESSION_METRICS)
def test_one_output_takes_a_vector_and_many_their_shared_variance(name: str) -> None:
    p, y = numbers(k=1)
    assert REGRESSION_METRICS[name](p, y[:, 0]) == REGRESSION_METRICS[name](p, y)
    p, y = numbers(k=2)
    shared = Prediction(p.logits, p.variance[:, 0], noise=p.noise, likelihood="gaussian")
    spread = Prediction(p.logits, p.variance[:, :1].expand(-1, 2), noise=p.noise, likelihood="gaussian")
    assert REGRESSION_METRICS[name](shared, y) == REGRESSION_METRICS[name](spread, y)


def test_rmse_needs_no_spread() -> None:
    assert REGRESSION_METRICS["rmse"](Prediction(torch.zeros(2, 1), likelihood="gaussian"), torch.ones(2)) == 1


# Scores ---------------------------------------------------------------------------------------------------------


@few
@given(number=seeds, n=sizes, m=sizes)
def test_auroc_is_the_mann_whitney_statistic_with_ties_half(number: int, n: int, m: int) -> None:
    a, b = scores(number, n, m)
    pairs = (b[:, None] > a).double() + (b[:, None] == a).double() / 2
    assert OOD_METRICS["auroc"](a, b) == pytest.approx(float(pairs.mean()))
    assert OOD_METRICS["auroc"](a, b) + OOD_METRICS["auroc"](b, a) == pytest.approx(1)


@pytest.mark.parametrize(("name", "value"), [("auroc", 1 / 2), ("aupr", 3 / 4), ("aupr_in", 1 / 4), ("fpr95", 1)])
def test_a_constant_score_is_chance(name: str, value: float) -> None:
    assert OOD_METRICS[name](torch.zeros(10), torch.zeros(30)) == pytest.approx(value)


def test_fpr95_may_miss_one_of_twenty_but_not_two() -> None:
    a = torch.tensor([0.0, 0.0, 2.0, 4.0])
    one, two = (torch.cat([torch.full((missed,), -1.0), torch.full((20 - missed,), 3.0)]) for missed in (1, 2))
    assert OOD_METRICS["fpr95"](a, one) == 1 / 4
    assert OOD_METRICS["fpr95"](a, two) == 1


@pytest.mark.parametrize("name", OOD_METRICS)
def test_infinite_scores_are_the_highest(name: str) -> None:
    a, b = scores()
    top = torch.cat([b, torch.tensor([math.inf]).double()])
    assert OOD_METRICS[name](a, top) == OOD_METRICS[name](a, torch.cat([b, torch.tensor([1e9]).double()]))


# Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METRICS)
def test_metrics_say_what_is_wrong(name: str) -> None:
    p, y = classes()
    for prediction, target, message in [
        (numbers()[0], y, "This metric needs probs, which the gaussian prediction lacks. See REGRESSION_METRICS"),
        (p[:0], y[:0], "at least one example, got none"),
        (of(p.probs * math.nan), y, "Probabilities must be finite, got NaN or infinity. Has the training diverged?"),
        (p, y[:-1], r"whole numbers of shape \(50,\), got torch.int64 \(49,\)"),
        (p, p.probs, r"whole numbers of shape \(50,\), got torch.float64 \(50, 4\)"),
        (p, y + 0.5, "whole numbers"),
        (p, y + 1, r"There are 4 classes \(0 to 3\), the targets run from 1 to 4. Are labels numbered from 1?"),
        (p, y - 1, "the targets run from -1 to 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            METRICS[name](prediction, target)


@pytest.mark.parametrize("name", REGRESSION_METRICS)
def test_regression_metrics_say_what_is_wrong(name: str) -> None:
    p, y = numbers()
    for prediction, target, message in [
        (classes()[0], y, "expects a gaussian prediction, got a categorical one. See METRICS"),
        (p[:0], y[:0], "at least one example, got none"),
        (p, y[:-1], r"Expected targets of shape \(30, 2\), got \(29, 2\)"),
        (p, y[:, 0], r"Expected targets of shape \(30, 2\), got \(30,\)"),
        (p, y * math.nan, "Targets and means must be finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            REGRESSION_METRICS[name](prediction, target)


@pytest.mark.parametrize("name", sorted({*REGRESSION_METRICS} - {"rmse"}))
def test_spreads_must_be_there_and_positive(name: str) -> None:
    mean, variance, y = normal(5, 1), torch.zeros(5), normal(5)
    for prediction, message in [
        (Prediction(mean, noise=1.0, likelihood="gaussian"), "This metric needs variance, which the prediction lacks"),
        (Prediction(mean, variance, likelihood="gaussian"), "This metric needs noise, which the prediction lacks"),
        (Prediction(mean, variance, noise=0.0, likelihood="gaussian"), "Standard deviations must be positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            REGRESSION_METRICS[name](prediction, y)


def test_a_level_is_a_probability() -> None:
    with pytest.raises(ValueError, match="level must lie strictly between 0 and 1, got 95"):
        interval_coverage(*numbers(), level=95)


@pytest.mark.parametrize("name", OOD_METRICS)
def test_ood_metrics_say_what_is_wrong(name: str) -> None:
    a, b = scores()
    for inside, outside in [(a[:0], b), (a, b[:0])]:
        with pytest.raises(ValueError, match=r"Expected scores on both sides, got \d+ in-domain and \d+ OOD"):
            OOD_METRICS[name](inside, outside)
    with pytest.raises(ValueError, match=r"Expected scores of shape \(n,\) and \(m,\), got"):
        OOD_METRICS[name](a[:, None], b)
    with pytest.raises(ValueError, match="Scores must be numbers, got NaN"):
        OOD_METRICS[name](a, b * math.nan)


@pytest.mark.parametrize(
    ("registry", "name"), [(METRICS, "ecee"), (REGRESSION_METRICS, "rsme"), (OOD_METRICS, "aurocc")]
)
def test_unknown_names_are_answered_with_near_ones(registry: object, name: str) -> None:
    with pytest.raises(KeyError, match="Did you mean"):
        registry[name]  # type: ignore[index]
