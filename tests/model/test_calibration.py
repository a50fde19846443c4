"""Calibration: better probabilities from held-out data, a variance that keeps its say, p-values with a guarantee."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import afield
from afield.deploy.score_files import answers
from afield.deploy.traced import chosen_alpha
from afield.errors import NoBetterThanGuessing, NotFitted
from afield.gp.calibration_objective import STANDARD_ERRORS
from afield.model.calibration import check_target, cut_in_two
from afield.model.posterior import downdate, update
from afield.prediction.predictive import MEAN_FIELD_FACTOR, shrink
from afield.prediction.risk_coverage import risk_coverage

few = settings(deadline=None, max_examples=10)


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seed(number), dtype=torch.float64)


def draw(probs: Tensor, number: int = 0) -> Tensor:
    return torch.multinomial(probs, 1, generator=seed(number)).squeeze(1)


def dense(outputs: int = 3, gain: float = 2.0) -> nn.Linear:
    layer = nn.Linear(4, outputs).double()
    with torch.no_grad():
        layer.weight.copy_(gain * normal(outputs, 4, number=100))
        layer.bias.zero_()
    return layer


def attached(net: nn.Module, n: int = 400, **options: Any) -> afield.SNGP:
    model = afield.attach(net, **{"num_random_features": 64, "generator": seed(), "ridge": 1.0} | options)
    afield.fit_posterior(model, [normal(n, 4, number=50)])
    return model


def overconfident(factor: float = 4.0, **options: Any) -> afield.SNGP:
    """Logits `factor` times those that the labels of `held_out` are drawn from."""
    return attached(dense(gain=2.0 * factor), **options)


def held_out(n: int, number: int = 0) -> tuple[Tensor, Tensor]:
    x = normal(n, 4, number=1000 + number)
    return x, draw(F.softmax(dense()(x).detach(), -1), number)


def log_loss(prediction: afield.Prediction, target: Tensor) -> float:
    assert prediction.probs is not None
    return float(F.nll_loss(prediction.probs.log(), target))


def ece(prediction: afield.Prediction, target: Tensor, bins: int = 15) -> float:
    confidence, label = prediction.confidence, prediction.labels
    which = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, confidence - (label == target).double())
    return float(gaps.abs().sum()) / len(target)


# Classes ---------------------------------------------------------------------------------------------------------


def test_an_overconfident_classifier_becomes_calibrated():
    model, (x, y) = overconfident(), held_out(2000, number=7)
    before = model.predict(x)
    found = afield.calibrate(model, [held_out(1500)])
    after = model.predict(x)
    assert found.loss < found.loss_before
    assert log_loss(after, y) < 0.7 * log_loss(before, y)
    assert ece(before, y) > 0.1
    assert ece(after, y) < 0.03


@pytest.mark.parametrize(("score", "fitted", "reference"), [(None, 600, 450), ("dempster_shafer", 600, 300)])
def test_the_losses_it_reports_are_log_losses_of_the_model_before_and_after(score, fitted, reference):
    model, loader = overconfident(), [held_out(900)]
    fit = torch.randperm(900, generator=seed())[:fitted]
    x, y = (t[fit] for t in loader[0])
    before = log_loss(model.predict(x), y)
    found = afield.calibrate(model, loader, score=score)
    assert found.loss_before == pytest.approx(before, rel=1e-9)
    assert found.loss == pytest.approx(log_loss(model.predict(x), y), rel=1e-9)
    assert (found.num_fitted, found.num_reference) == (fitted, reference)
    assert found.smallest_p_value == 1 / (reference + 1)


@pytest.mark.parametrize("factor", [0.2, 1.0, 5.0])
def test_the_confidence_of_the_labels_is_recovered_whatever_the_networks_own(factor):
    """Scale and shrinkage together undo the factor: only their quotient shows in-domain."""
    model = overconfident(factor)
    afield.calibrate(model, [held_out(4000)])
    x, _ = held_out(500, number=9)
    p = model.predict(x)
    assert p.variance is not None
    gain = float(model.head.logit_scale) / (1 + MEAN_FIELD_FACTOR * p.variance.median()).sqrt()
    assert float(gain * factor) == pytest.approx(1, rel=0.12)


def test_scale_and_amplitude_are_recovered_where_the_data_shows_both():
    """Held-out inputs at all distances, labels drawn from the model's own predictive with known parameters."""
    options: dict[str, Any] = {"geometry": "standardized", "length_scale": 3.0}
    truth = attached(dense(gain=3.0), **options)
    truth.head.set_scalars(logit_scale=0.8, amplitude=6.0)

    def sample(n: int, number: int) -> tuple[Tensor, Tensor]:
        x = normal(n, 4, number=number) * torch.rand(n, 1, generator=seed(number), dtype=torch.float64) * 3
        return x, draw(truth.predict(x).probs, number + 100)  # of a seed of their own, or they would know x

    model = attached(dense(gain=3.0), **options)
    afield.calibrate(model, [sample(20_000, 1)])
    x, _ = sample(1000, 2)
    p, q = truth.predict(x), model.predict(x)
    assert float(model.head.logit_scale) == pytest.approx(0.8, rel=0.25)
    assert 6.0 * 0.8 < float(model.head.amplitude) < 6.0 * 2
    divergence = (p.probs * (p.probs / q.probs).log()).sum(-1).mean()
    plain = attached(dense(gain=3.0), **options).predict(x).probs
    assert float(divergence) < 0.002
    assert float(divergence) < 0.02 * float((p.probs * (p.probs / plain).log()).sum(-1).mean())


@few
@given(factor=st.floats(0.1, 10), number=st.integers(0, 1000), n=st.integers(30, 300))
def test_the_most_probable_class_never_changes(factor, number, n):
    model = overconfident(factor)
    afield.calibrate(model, [held_out(n, number)])
    x = 5 * normal(200, 4, number=number)
    assert torch.equal(model.predict(x).labels, model(x).argmax(-1))


def best_loss(model: afield.SNGP, x: Tensor, y: Tensor, a2: float) -> Tensor:
    """The log loss of each example with the best scale for this amplitude, found by scipy."""
    mean, variance = model.head.posterior(model.hidden(x))
    variance = variance / model.head.amplitude**2

    def loss(log_scale: float) -> Tensor:
        return F.cross_entropy(shrink(math.exp(log_scale) * mean, a2 * variance), y, reduction="none").detach()

    found = minimize_scalar(lambda t: float(loss(t).mean()), bounds=(-7, 7), method="bounded", options={"xatol": 1e-9})
    return loss(found.x)


def test_the_variance_keeps_its_say_where_the_held_out_loss_is_flat_in_it():
    """On a sphere all in-domain variances are alike, so a larger scale makes up for any amplitude: the log loss alone
    may as well choose zero, and the model would then be as sure far away. The rule takes the largest amplitude that
    held-out data cannot tell from the best; where chance tells them apart (a few draws in twenty), the floor is left.
    """
    model = afield.attach(dense(gain=8.0), num_random_features=1024, generator=seed(), length_scale=2.0)
    afield.fit_posterior(model, [2 * F.normalize(normal(2000, 4))])
    shrinkage = []
    for number in range(9):
        x = 2 * F.normalize(normal(600, 4, number=number))
        y = draw(F.softmax(model(x) / 4, -1), number)
        found = afield.calibrate(model, [(x, y)])
        inside, outside = (model.predict(part) for part in (x, 3 * x))
        assert float(outside.variance.median()) > 10 * float(inside.variance.median())
        assert float(outside.confidence.mean()) < float(inside.confidence.mean()) - 0.25
        shrinkage.append(MEAN_FIELD_FACTOR * float(inside.variance.median()))

        fit = torch.randperm(600, generator=seed())[:400]
        none, chosen = (best_loss(model, x[fit], y[fit], a2) for a2 in (1e-12, found.amplitude**2))
        difference = chosen - none
        assert float(difference.mean()) < (STANDARD_ERRORS + 1) * float(difference.std()) / 20
    assert min(shrinkage) > 0.09
    assert sum(s > 1 for s in shrinkage) >= 6


def test_a_given_logit_scale_stays_and_the_amplitude_is_the_best_with_it():
    """The paper's calibration: the amplitude alone, as a temperature."""
    model, (x, y) = overconfident(), held_out(600)
    found = afield.calibrate(model, [(x, y)], logit_scale=1.0)
    assert found.logit_scale == float(model.head.logit_scale) == 1.0
    rows, _ = cut_in_two(600)
    mean, variance = model.head.posterior(x[rows])
    losses = [F.cross_entropy(shrink(mean, f**2 * variance), y[rows]) for f in (0.5, 0.8, 1.0, 1.25, 2.0)]
    assert int(torch.stack(losses).argmin()) == 2
    free = afield.calibrate(model, [(x, y)])
    assert free.logit_scale != 1.0


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf])
def test_a_logit_scale_that_is_none_is_refused(value: float):
    with pytest.raises(ValueError, match="logit_scale must be positive and finite"):
        afield.calibrate(overconfident(), [held_out(60)], logit_scale=value)
    gaussian = afield.attach(dense(1), likelihood="gaussian", num_random_features=16)
    afield.fit_posterior(gaussian, [(normal(50, 4), normal(50, 1))])
    with pytest.raises(ValueError, match="logit_scale is of classes, got a gaussian head"):
        afield.calibrate(gaussian, [(normal(50, 4), normal(50, 1))], logit_scale=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"amplitude": 1e300}, "amplitude must lie between 1e-12 and 1e12, got 1e\\+300"),
        ({"amplitude": 1e-300}, "amplitude must lie between 1e-12 and 1e12, got 1e-300"),
        ({"logit_scale": 1e300}, "logit_scale must lie between 1e-12 and 1e12"),
        ({"fit_fraction": 0.001}, "fit_fraction=0.001 leaves 1 of 60 examples .*use 0.033 or more"),
        ({"weights": torch.zeros(60)}, "examples of some weight, got zeros alone"),
    ],
)
def test_extreme_options_of_calibrate_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        afield.calibrate(overconfident(), [held_out(60)], **options)
    model = overconfident()
    with pytest.raises(ValueError, match="logit_scale must lie between"):
        model.head.set_scalars(logit_scale=1e-300)
    with pytest.raises(ValueError, match="All weights are zero"):
        afield.fit_posterior(afield.attach(dense()), [held_out(60)], weights=torch.zeros(60))


def test_far_away_a_calibrated_gaussian_process_knows_nothing():
    model = afield.sngp(dense(), num_random_features=256, generator=seed(), length_scale=2.0)
    afield.fit_head(model, [held_out(1500)])
    afield.fit_posterior(model, [held_out(1500)])
    afield.calibrate(model, [held_out(900, number=3)])
    far, near = (model.predict(r * F.normalize(normal(300, 4))) for r in (60.0, 1.0))
    assert float(far.variance.median()) > 3 * float(near.variance.median())
    assert float((far.p_value <= 0.05).double().mean()) > 0.9
    assert float((near.p_value <= 0.05).double().mean()) < 0.2
    assert float(far.confidence.mean()) < 0.5


def test_a_classifier_without_a_single_mistake_keeps_a_finite_scale():
    model, x = overconfident(), normal(300, 4, number=5)
    found = afield.calibrate(model, [(x, model(x).argmax(-1))])
    assert 0.05 < found.logit_scale < 100
    assert bool(torch.isfinite(model.predict(x).probs).all())


def test_a_better_variance_helps_where_distance_brings_errors():
    """Far from the training data the labels are coin tosses: there a variance has what a scale alone lacks."""
    model = attached(dense(gain=6.0), length_scale=3.0)
    x = normal(6000, 4, number=3)
    x[::2] *= 4
    y = model(x).argmax(-1)
    far = x.norm(dim=1) > 5
    y[far] = torch.randint(3, (int(far.sum()),), generator=seed(4))
    found = afield.calibrate(model, [(x, y)])
    fit = torch.randperm(6000, generator=seed())[:4000]
    assert found.loss < float(best_loss(model, x[fit], y[fit], 1e-12).mean()) - 0.02


def test_calibrating_again_changes_nothing():
    model, loader = overconfident(), [held_out(900)]
    first, second = (afield.calibrate(model, loader) for _ in range(2))
    assert second.logit_scale == pytest.approx(first.logit_scale, rel=1e-4)
    assert second.amplitude == pytest.approx(first.amplitude, rel=1e-9)


def test_bernoulli_agrees_with_two_classes():
    """One logit z and the two logits (0, z) are the same model, so the held-out loss is."""
    x = normal(3000, 4, number=1)
    single, double = dense(1, gain=8.0), nn.Linear(4, 2).double()
    with torch.no_grad():
        double.weight.copy_(torch.cat([torch.zeros_like(single.weight), single.weight]))
        double.bias.zero_()
    y = (torch.rand(3000, generator=seed(2), dtype=torch.float64) < torch.sigmoid(single(x)[:, 0] / 4)).long()
    one, two = attached(single, likelihood="bernoulli"), attached(double)
    found = [afield.calibrate(model, [(x, y)]) for model in (one, two)]
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-6)
    assert found[0].amplitude == pytest.approx(found[1].amplitude, rel=1e-6)
    torch.testing.assert_close(one.predict(x).probs, two.predict(x).probs, rtol=1e-4, atol=1e-6)
    assert found[0].loss < 0.8 * found[0].loss_before


def test_per_class_variances_are_calibrated_too():
    model = afield.sngp(dense(), covariance="per_class", num_random_features=64, generator=seed())
    x, y = held_out(1500)
    afield.fit_head(model, [(x, y)])
    model.head.weight.data.mul_(4)
    afield.fit_posterior(model, [x])
    found = afield.calibrate(model, [held_out(900, number=3)])
    assert found.loss < 0.9 * found.loss_before


# Regression and rates --------------------------------------------------------------------------------------------


def regression(n: int, noise: float, number: int) -> tuple[Tensor, Tensor]:
    x = normal(n, 4, number=number)
    return x, torch.sin(2 * x[:, :1]) + x[:, 1:2] + noise**0.5 * normal(n, 1, number=number + 1)


def test_a_few_easy_rows_do_not_make_a_network_surer_than_on_its_training_data():
    """On 46 of 768 rows chosen by chance, 95% intervals once covered 79%."""
    options = {"num_random_features": 256, "length_scale": 1.0, "ridge": 0.05}
    model = afield.sngp(dense(1), likelihood="gaussian", generator=seed(), **options)
    train = regression(1500, 0.25, 1)
    afield.fit_head(model, [train])
    afield.fit_posterior(model, [train])
    easy = regression(30, 0.0025, 3)  # a tenth of the noise's standard deviation
    found = afield.calibrate(model, [easy])
    x, y = regression(4000, 0.25, 5)
    low, high = model.predict(x).interval(0.95)
    assert float(((low <= y) & (y <= high)).double().mean()) > 0.93
    assert found.noise == float(model.head.noise) > 0.1


@pytest.mark.parametrize("noise", [0.04, 1.0])
def test_regression_intervals_cover_what_they_promise(noise):
    options = {"num_random_features": 256, "length_scale": 1.0, "ridge": 0.05}
    model = afield.sngp(dense(1), likelihood="gaussian", generator=seed(), **options)
    train = regression(1500, noise, 1)
    afield.fit_head(model, [train])
    afield.fit_posterior(model, [train])
    model.head.set_scalars(amplitude=0.05, noise=20 * noise)  # a bad guess
    found = afield.calibrate(model, [regression(1500, noise, 3)])
    x, y = regression(4000, noise, 5)
    for level in (0.5, 0.9):
        low, high = model.predict(x).interval(level)
        covered = float(((low <= y) & (y <= high)).double().mean())
        assert covered == pytest.approx(level, abs=0.035)
    assert found.noise == float(model.head.noise) == pytest.approx(noise, rel=0.2)
    assert found.logit_scale == 1.0


def test_a_well_specified_regression_keeps_an_amplitude_of_about_one():
    """Targets drawn from the prior itself, and little data, so that the epistemic part shows."""
    model = afield.sngp(dense(1), likelihood="gaussian", num_random_features=128, generator=seed(), length_scale=1.0)
    teacher = copy.deepcopy(model)
    nn.init.normal_(teacher.head.weight, generator=seed(3))

    def sample(n: int, number: int) -> tuple[Tensor, Tensor]:
        x = normal(n, 4, number=number)
        return x, teacher(x).detach() + 0.1 * normal(n, 1, number=number + 1)

    afield.fit_head(model, [sample(80, 10)])
    afield.fit_posterior(model, [sample(80, 10)])
    found = afield.calibrate(model, [sample(2000, 20)])
    assert 0.7 < found.amplitude < 1.5
    x, y = sample(2000, 30)
    p = model.predict(x)
    assert float(((y - p.mean) / p.std).square().mean()) == pytest.approx(1, abs=0.15)
    assert model.head.calibrated


def test_rates_are_calibrated():
    """Counts drawn with a log rate of known variance about the mean: the amplitude finds it."""
    model = afield.sngp(
        dense(1), likelihood="poisson", num_random_features=32, generator=seed(), length_scale=50.0, curvature="unit"
    )
    x = normal(4000, 4, number=1)
    model.head.constant = nn.Parameter(torch.ones(1).double())
    afield.fit_posterior(model, [normal(20, 4)])
    unit = model.predict(x).variance.sqrt()
    true = 8.0
    log_rate = 1 + true * unit * normal(4000, number=2)
    y = torch.poisson(log_rate.exp(), generator=seed(3))
    found = afield.calibrate(model, [(x, y)])
    assert found.loss < found.loss_before
    assert found.amplitude == pytest.approx(true, rel=0.35)
    assert found.logit_scale == found.noise == 1.0


# p-values --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_p_values_are_valid_over_repeated_splits():
    """P(p <= a) = floor(a (n + 1)) / (n + 1) <= a on fresh in-domain data, parameters fitted and all.

    A random split of a fixed pool makes reference and test exchangeable, so this is exact, for every pool, on average
    over splits; accept(alpha) raises false alarms at a rate of at most alpha.
    """
    x, y = held_out(240)
    model, levels = overconfident(num_random_features=24), (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
    rates, alarms, generator = [], [], seed(1)
    for _ in range(200):
        order = torch.randperm(240, generator=generator)
        first, second = order[:180], order[180:]
        found = afield.calibrate(model, [(x[first], y[first])], fit_fraction=1 / 3)
        p = model.predict(x[second])
        rates.append([float((p.p_value <= a).double().mean()) for a in levels])
        alarms.append([float((~p.accept(a)).double().mean()) for a in levels])
    n = found.num_reference
    assert n == 120
    mean, error = np.mean(rates, 0), np.std(rates, 0) / math.sqrt(len(rates))
    exact = np.array([math.floor(a * (n + 1)) / (n + 1) for a in levels])
    assert np.all(exact <= levels)
    assert np.all(np.abs(mean - exact) <= 4 * error)
    np.testing.assert_array_equal(alarms, rates)


@pytest.mark.parametrize(("score", "first"), [(None, 45), ("dempster_shafer", 60), ("variance", 60), ("energy", 60)])
def test_rows_that_fix_the_score_are_not_among_the_references(score, first):
    """The parts are disjoint: references are the scores of the last rows of the permutation, and only of those."""
    model, (x, y) = overconfident(), held_out(90)
    afield.calibrate(model, [(x, y)], score=score)
    order = torch.randperm(90, generator=seed())
    p = model.predict(x[order[first:]])
    assert p.default_score == (score or "joined")
    torch.testing.assert_close(model.head.reference, p.score().sort().values, rtol=1e-9, atol=0)
    torch.testing.assert_close(p.score(), p.score(score or "joined"), rtol=0, atol=0)
    if score is None:  # neither scale nor amplitude is in it
        again = overconfident()
        afield.calibrate(again, [(x, y)], amplitude=7.0)
        torch.testing.assert_close(again.predict(x).joined, model.predict(x).joined, rtol=1e-9, atol=1e-12)


def test_p_values_go_with_any_change_of_the_posterior_and_come_back_with_calibration():
    model, x = overconfident(), normal(5, 4)
    assert model.predict(x).p_value is None
    with pytest.raises(ValueError, match="calibrate"):
        model.predict(x).accept(0.1)
    afield.calibrate(model, [held_out(90)])
    assert model.predict(x).p_value is not None
    update(model, [normal(10, 4, number=8)])
    assert model.predict(x).p_value is None
    downdate(model, [normal(10, 4, number=50)])  # the count is as before, the posterior is not
    assert model.predict(x).p_value is None
    with pytest.raises(ValueError, match="again"):
        model.predict(x).accept(0.1)
    afield.calibrate(model, [held_out(90)])
    assert model.predict(x).p_value is not None
    afield.fit_posterior(model, [3 * normal(400, 4, number=9)])
    assert model.predict(x).p_value is None


def test_far_inputs_get_the_smallest_p_value_of_a_variance_score():
    model = afield.sngp(dense(1), likelihood="gaussian", num_random_features=128, generator=seed(), length_scale=3.0)
    train = regression(500, 0.1, 1)
    afield.fit_head(model, [train])
    afield.fit_posterior(model, [train])
    afield.calibrate(model, [regression(300, 0.1, 3)])
    p = model.predict(40 * F.normalize(normal(200, 4)))
    assert float((p.p_value <= 0.05).double().mean()) > 0.9
    assert float(p.p_value.min()) == pytest.approx(p.smallest_p_value)


def test_an_alpha_finer_than_the_reference_is_refused():
    model = overconfident()
    found = afield.calibrate(model, [held_out(90)])
    with pytest.raises(ValueError, match=r"finer.*at least 99 reference examples"):
        model.predict(normal(3, 4)).accept(0.01)
    assert found.smallest_p_value == model.predict(normal(3, 4)).smallest_p_value == 1 / 46


# Determinism and side effects ------------------------------------------------------------------------------------


def state(model: nn.Module) -> dict[str, bytes]:
    return {k: v.numpy().tobytes() for k, v in model.state_dict().items()}


def test_the_seed_decides_and_nothing_else():
    loader, models = [held_out(120)], [overconfident() for _ in range(3)]
    for model, number in zip(models, (0, 0, 1), strict=True):
        afield.calibrate(model, loader, seed=number)
        torch.rand(3)  # the global state moves on
    first, same, other = (state(model) for model in models)
    assert first == same
    assert first["net.reference"] != other["net.reference"]


def test_batches_do_not_matter():
    x, y = held_out(120)
    models = [overconfident() for _ in range(2)]
    afield.calibrate(models[0], [(x, y)])
    afield.calibrate(models[1], zip(x.split(7), y.split(7), strict=True))
    torch.testing.assert_close(models[0].predict(x).probs, models[1].predict(x).probs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(models[0].predict(x).p_value, models[1].predict(x).p_value)


def test_only_the_scalars_and_the_reference_change_and_modes_come_back():
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5), dense()).double()
    model = attached(net).train()
    model.net[0].eval()
    modes, before = [m.training for m in model.modules()], state(model)
    afield.calibrate(model, [held_out(90)])
    after = state(model)
    assert [m.training for m in model.modules()] == modes
    changed = {k.rpartition(".")[2] for k in after if before[k] != after[k]}
    assert changed <= {
        "amplitude",
        "logit_scale",
        "reference",
        "reference_count",
        "score_name",
        "knots",
        "widths",
        "slopes",
    }
    assert {"amplitude", "logit_scale", "reference"} <= changed


def test_targets_may_be_columns_or_floats():
    x, y = held_out(90)
    models = [overconfident() for _ in range(3)]
    for model, target in zip(models, (y, y[:, None], y.float()), strict=True):
        afield.calibrate(model, [(x, target)])
    assert state(models[0]) == state(models[1]) == state(models[2])


# Errors ----------------------------------------------------------------------------------------------------------


def test_an_unfitted_model_is_refused():
    with pytest.raises(NotFitted, match="fit_posterior"):
        afield.calibrate(afield.attach(dense()), [held_out(90)])


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 2, math.nan])
def test_a_fraction_that_leaves_nothing_is_refused(fraction):
    with pytest.raises(ValueError, match="fit_fraction must lie strictly between 0 and 1"):
        afield.calibrate(overconfident(), [held_out(90)], fit_fraction=fraction)


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "empty loader"),
        ([normal(90, 4)], "without a target"),
        ([(normal(90, 4), torch.arange(90) % 3 + 1)], r"3 classes \(0 to 2\).*from 1 to 3.*numbered from 1"),
        ([(normal(90, 4), torch.arange(90) % 3 - 1)], "from -1 to 1"),
        ([(normal(90, 4), torch.full((90,), 0.5))], "whole numbers"),
        ([(normal(90, 4), torch.full((90,), math.nan))], "whole numbers"),
        ([(normal(90, 4), F.one_hot(torch.arange(90) % 3))], r"shape \(N,\), got .*\(90, 3\)"),
        ([held_out(19)], "at least 20 held-out examples, got 19"),
        ([(normal(90, 4) * math.nan, torch.arange(90) % 3)], "must be finite"),
        ([(normal(90, 4), torch.arange(80) % 3)], "90"),
        ([(normal(90, 4), torch.arange(100) % 3)], "90"),
    ],
)
def test_bad_held_out_data_is_refused_and_changes_nothing(loader, message):
    model = overconfident()
    before = state(model)
    with pytest.raises(ValueError, match=message):
        afield.calibrate(model, loader)
    assert state(model) == before


def head(likelihood: str, outputs: int) -> afield.GaussianProcessHead:
    return afield.GaussianProcessHead(4, outputs, likelihood=likelihood, num_random_features=8, length_scale=1.0)


@pytest.mark.parametrize(
    ("likelihood", "target", "message"),
    [
        ("gaussian", normal(5, 3), "2 outputs, the targets have 3 columns"),
        ("gaussian", normal(5, 2) * math.inf, "gaussian targets must be finite"),
        ("poisson", -torch.ones(5, 2), "poisson targets must be finite and not negative"),
        ("bernoulli", torch.full((5,), 2), r"2 classes \(0 to 1\)"),
    ],
)
def test_targets_are_checked_by_likelihood(likelihood, target, message):
    with pytest.raises(ValueError, match=message):
        check_target(target, head(likelihood, 1 if likelihood == "bernoulli" else 2))


# Risk and coverage -----------------------------------------------------------------------------------------------


@few
@given(n=st.integers(1, 40), number=st.integers(0, 1000))
def test_risk_coverage_is_the_error_rate_of_the_accepted(n, number):
    score, correct = normal(n, number=number), torch.rand(n, generator=seed(number)) < 0.6
    curve = risk_coverage(score, correct)
    for k in range(n):
        kept = score <= score.sort().values[k]
        assert float(curve.coverage[k]) == pytest.approx(float(kept.double().mean()))
        assert float(curve.risk[k]) == pytest.approx(float((~correct[kept]).double().mean()))
    best = curve.coverage_at(0.2)
    assert best == max([float(c) for c, r in zip(curve.coverage, curve.risk, strict=True) if r <= 0.2], default=0.0)
    assert curve.area == pytest.approx(float(curve.risk.mean()))


def test_a_perfect_score_has_no_risk_until_the_errors_begin():
    correct = torch.tensor([True] * 7 + [False] * 3)
    curve = risk_coverage(torch.arange(10.0), correct)
    assert curve.coverage_at(0.0) == pytest.approx(0.7)
    with pytest.raises(ValueError, match="two vectors of one length"):
        risk_coverage(torch.zeros(3), torch.zeros(4))


# Warnings --------------------------------------------------------------------------------------------------------


def test_a_model_that_is_no_better_than_the_uniform_guess_is_told():
    model = overconfident()
    x, y = normal(300, 4, number=1), torch.randint(3, (300,), generator=seed(5))
    with pytest.warns(
        NoBetterThanGuessing,
        match=r"On 200 held-out examples .* no better than guessing: its log loss of [\d.]+ cannot be told from 1\.099 "
        r"\(log 3, that of the uniform guess\), and its accuracy of 0\.\d+ cannot be told from chance\. Is the network",
    ):
        afield.calibrate(model, [(x, y)])


def test_an_accuracy_at_chance_is_told_beside_a_loss_that_is_better():
    """Probabilities that know which class is rare, and prefer the wrong one of the other two."""
    net = nn.Linear(4, 3).double()
    with torch.no_grad():
        net.weight.mul_(1e-9)
        net.bias.copy_(torch.tensor([0.3, 0.0, -9.0]))
    x, y = normal(300, 4, number=1), (torch.arange(300) % 3 > 0).long()
    with pytest.warns(NoBetterThanGuessing, match=r"no better than guessing: its accuracy of 0\.\d+ cannot be told"):
        afield.calibrate(attached(net), [(x, y)])


@pytest.mark.parametrize("likelihood", ["gaussian", "poisson"])
def test_numbers_no_better_than_a_constant_are_told(likelihood):
    model = attached(dense(1, gain=0.5), likelihood=likelihood)
    x = normal(300, 4, number=1)
    y = torch.poisson(torch.full((300,), 4.0), generator=seed(5)) if likelihood == "poisson" else normal(300, number=6)
    with pytest.warns(NoBetterThanGuessing, match=r"its log loss of .* told from .* \(that of a constant\)\. Is"):
        afield.calibrate(model, [(x, y)])


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian", "poisson"])
def test_a_model_that_knows_something_is_not(likelihood, recwarn):
    model = attached(dense(3 if likelihood == "categorical" else 1, gain=1.0), likelihood=likelihood)
    x = normal(120, 4, number=1)
    f = model(x)
    y = {
        "categorical": lambda: draw(f.softmax(-1)),
        "bernoulli": lambda: (f[:, 0] > 0).long(),
        "gaussian": lambda: f + 0.5 * normal(120, 1, number=7),
        "poisson": lambda: torch.poisson(f.exp(), generator=seed(5)),
    }[likelihood]()
    afield.calibrate(model, [(x, y)])
    assert not [w for w in recwarn if w.category is NoBetterThanGuessing]


def test_an_alpha_finer_than_the_reference_is_refused_by_policies_exports_and_scoring_too():
    model = overconfident()
    x, y = held_out(60)
    afield.calibrate(model, [(x, y)])  # 30 references
    prediction = model.predict(x)
    message = r"alpha = 0\.01 is finer than the held-out data can tell: the smallest p-value is 0\.0322581"
    for refused in (
        lambda: afield.policy(false_alarms=0.01).decide(prediction),
        lambda: afield.policy(prediction, false_alarms=0.01),
        lambda: afield.policy(prediction, y, false_alarms=0.01, risk=0.5),
        lambda: chosen_alpha(model, 0.01),
        lambda: answers(prediction, alpha=0.01),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
