"""Mixtures calibrated as a whole, and temperature: closed forms, and what the combinators do with them."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

import afield
from afield.backbones.resffn import ResFFN
from afield.experiment.training import batches, fit
from afield.gp.calibration_objective import STANDARD_ERRORS
from afield.methods import METHODS, ensemble, mc_dropout, with_temperature
from afield.methods.mixture import (
    AS_THEY_ARE,
    Scales,
    calibrate_mixture,
    fit_scales,
    logit_scale_of,
    mix,
    rescale,
    scales_of,
    set_scales,
)
from afield.methods.stacked import stack
from afield.model.calibration import cut_in_two
from afield.prediction.metrics import METRICS
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import mean_field, to_probs
from afield.tasks import TASKS, Task

N = 400


def of_classes(
    number: int, *, variance: str | None = "shared", sharpness: float = 1.0, error: float = 0.3
) -> Prediction:
    """Logits of three classes, in float64, whose targets are `truth()`."""
    generator = torch.Generator().manual_seed(number)
    noise = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    logits = sharpness * (truth_logits() + error * noise)
    if variance is None:
        return Prediction(logits, probs=to_probs(logits))
    v = torch.rand((N,) if variance == "shared" else (N, 3), generator=generator, dtype=torch.float64) + 0.1
    return Prediction(logits, v, mean_field(logits, v))


def truth_logits() -> Tensor:
    return 2 * torch.randn(N, 3, generator=torch.Generator().manual_seed(99), dtype=torch.float64)


def truth() -> Tensor:
    probs = truth_logits().softmax(1)
    return torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(98)).flatten()


def loss_of(parts: list[Prediction], scales: Scales, rows: Tensor) -> Tensor:
    return -mix(parts, scales).probs[rows, truth()[rows]].log()


@pytest.mark.parametrize("variance", ["shared", "per_class", None])
@pytest.mark.parametrize("logit_scale", [1.0, 0.2])
def test_copies_of_one_model_are_calibrated_as_the_model_is(variance: str | None, logit_scale: float):
    part = of_classes(0, variance=variance, sharpness=2.0)
    one = fit_scales([part], truth(), logit_scale=logit_scale)
    for count in (2, 3, 7):
        assert fit_scales(count * [part], truth(), logit_scale=logit_scale) == pytest.approx(one, rel=1e-6)
    assert one != AS_THEY_ARE
    together, alone = mix(3 * [part], one), rescale(part, one)
    for name in ("logits", "probs") if variance is None else ("logits", "variance", "probs"):
        torch.testing.assert_close(getattr(together, name), getattr(alone, name))


def test_a_calibrated_model_needs_no_other_scales():
    """`afield.calibrate` has chosen them, with the same prior, rule and rows."""
    torch.manual_seed(0)
    model = afield.sngp(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(3, 3)), None).double()
    x, y = truth_logits(), truth()
    afield.fit_head(model, [(x, y)])
    afield.fit_posterior(model, [(x, y)])
    afield.calibrate(model, [(x, y)])
    scale = logit_scale_of(model)
    assert scale != 1
    again = fit_scales(2 * [model.predict(x)], y, logit_scale=scale)
    assert again == pytest.approx(AS_THEY_ARE, rel=1e-5)


def test_temperature_of_equal_margins_is_known():
    """q of all rows are right by the margin z: the derivative of n log loss + (log s)^2 / 2 vanishes at s."""
    z, y = 3.0, torch.zeros(N, dtype=torch.long)
    rows, _ = cut_in_two(N)
    y[rows[: len(rows) // 10]] = 1
    logits = torch.tensor([[z, 0.0]], dtype=torch.float64).expand(N, 2)
    s, amplitude = fit_scales([Prediction(logits, probs=to_probs(logits))], y)
    q = float((y[rows] == 0).double().mean())
    slope = len(rows) * z * (1 / (1 + math.exp(-s * z)) - q) + math.log(s) / s
    assert slope == pytest.approx(0, abs=1e-4 * len(rows))
    assert s == pytest.approx(math.log(q / (1 - q)) / z, rel=0.02)
    assert amplitude == 1


@pytest.mark.parametrize("dense", [True, False])
def test_the_scale_minimises_the_log_loss_of_the_mixture(dense: bool):
    parts = [of_classes(i, variance=None if dense else "shared", sharpness=0.5, error=1.0) for i in range(4)]
    found, (rows, _) = fit_scales(parts, truth()), cut_in_two(N)
    best = float(loss_of(parts, found, rows).mean())
    for factor in (0.8, 0.9, 1.1, 1.25):
        other = found._replace(logit_scale=factor * found.logit_scale)
        assert float(loss_of(parts, other, rows).mean()) > best - 1e-3  # the prior is worth one observation
    assert best < float(loss_of(parts, AS_THEY_ARE, rows).mean())
    if dense:
        assert found.amplitude == 1
        return
    grid = [Scales(s, a) for s in np.logspace(-0.5, 1.5, 60) for a in np.logspace(-1, 1, 15)]
    gain = loss_of(parts, found, rows) - loss_of(parts, min(grid, key=lambda g: loss_of(parts, g, rows).mean()), rows)
    assert float(gain.mean()) <= STANDARD_ERRORS * float(gain.std()) / math.sqrt(len(rows)) + 1e-3


def test_the_scale_is_one_for_all_parts_and_the_amplitude_can_be_kept():
    parts = [of_classes(i, sharpness=2.0) for i in range(3)]
    kept = fit_scales(parts, truth(), fixed_amplitude=True)
    assert kept.amplitude == 1
    assert kept.logit_scale != 1
    mixture = mix(parts, kept)
    for part, probs in zip(parts, mixture.members, strict=True):
        torch.testing.assert_close(probs, mean_field(kept.logit_scale * part.logits, part.variance))


def test_only_the_first_part_of_the_held_out_data_chooses():
    parts, y = [of_classes(i, sharpness=2.0) for i in range(3)], truth()
    _, rest = cut_in_two(N)
    other = y.clone()
    other[rest] = (y[rest] + 1) % 3
    assert fit_scales(parts, other) == fit_scales(parts, y)


def test_averages_are_not_scaled_again():
    parts = [of_classes(i, sharpness=2.0, error=1.0) for i in range(2)]
    assert fit_scales([mix(parts), mix(parts)], truth()) == AS_THEY_ARE


# Real targets


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 1.0), (9.0, 1 / 3), (0.25, 2.0)])
def test_the_whole_variance_of_a_gaussian_mixture_has_one_factor(factor: float, expected: float):
    generator, n = torch.Generator().manual_seed(0), 4000
    mean, shift = (torch.randn(n, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    variance = torch.rand(n, generator=generator, dtype=torch.float64)
    between = 0.3 * shift  # members at mean +- between
    total = between.square() + variance[:, None] + 0.5
    y = mean + total.sqrt() * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    parts = [
        Prediction(mean + sign * factor**0.5 * between, factor * variance, noise=factor * 0.5, likelihood="gaussian")
        for sign in (-1, 1)
    ]
    found = fit_scales(parts, y)
    assert found.logit_scale == 1
    assert found.amplitude == pytest.approx(expected, rel=0.07)
    assert (found == AS_THEY_ARE) == (factor == 1)
    whole = mix(parts, found)
    torch.testing.assert_close(whole.std.square(), found.amplitude**2 * factor * total)
    torch.testing.assert_close(whole.mean, mean)
    assert fit_scales(parts, y, fixed_amplitude=True) == AS_THEY_ARE


# Methods


@pytest.fixture(scope="module")
def two_moons() -> Task:
    task = TASKS["two-moons"](0)
    cut = {part: TensorDataset(*(t[:300] for t in getattr(task, part).tensors)) for part in ("train", "val", "test")}
    return dataclasses.replace(task, **cut, backbone=partial(ResFFN, 2, depth=1, width=16, dropout=0.2))


def test_temperature_keeps_classes_weights_and_hidden_vectors(two_moons: Task):
    x, (val_x, val_y) = two_moons.test.tensors[0], two_moons.val.tensors
    base, method = METHODS["dnn"], METHODS["dnn-temperature"]
    plain, model = (fit(two_moons, m, epochs=3, learning_rate=1e-2) for m in (base, method))
    before, after = base.predict(plain, x), method.predict(model, x)
    scale = scales_of(model, "temperature").logit_scale
    assert method.trained_as is base
    assert scale != 1
    assert torch.equal(base.predict(model, x).logits, before.logits)
    torch.testing.assert_close(after.probs, (scale * before.logits).softmax(1))
    assert torch.equal(before.labels, after.labels)
    assert torch.equal(before.features, after.features)
    rows, _ = cut_in_two(len(val_y))
    losses = [METRICS["nll"](m.predict(model, val_x[rows]), val_y[rows]) for m in (base, method)]
    assert losses[1] < losses[0]
    method.calibrate(model, batches(two_moons.val))  # whatever the scale was before
    assert scales_of(model, "temperature").logit_scale == scale


@pytest.mark.parametrize(
    ("make", "name"), [(ensemble, "dnn"), (ensemble, "sngp"), (mc_dropout, "dnn"), (mc_dropout, "sngp")]
)
def test_a_mixture_is_no_worse_on_validation_data_than_its_parts_as_they_are(
    make: Callable, name: str, two_moons: Task
):
    kind = "ensemble" if make is ensemble else "dropout"
    method, (x, y) = make(METHODS[name], 3), two_moons.val.tensors
    model, (rows, _) = fit(two_moons, method, epochs=5, learning_rate=1e-2, num_random_features=128), cut_in_two(len(y))
    found, whole = scales_of(model, kind), method.predict(model, x)
    assert found != AS_THEY_ARE
    set_scales(model, kind, AS_THEY_ARE)
    before = method.predict(model, x)
    difference = (before.probs.log() - whole.probs.log())[rows, y[rows]]
    assert float(difference.mean()) <= STANDARD_ERRORS * float(difference.std()) / math.sqrt(len(rows))
    assert (whole.p_value is None) == (before.p_value is None)
    if whole.p_value is not None:  # of the members' own scores
        assert torch.equal(whole.p_value, before.p_value)
    method.calibrate(model, batches(two_moons.val))
    assert scales_of(model, kind) == found


def test_a_given_amplitude_is_kept(two_moons: Task):
    model = fit(two_moons, ensemble(METHODS["sngp"], 2), epochs=2, amplitude=3.0, num_random_features=128)
    assert [float(member.head.amplitude) for member in model] == [3.0, 3.0]
    assert scales_of(model, "ensemble").amplitude == 1


def test_regression_mixtures_have_their_factor_and_temperature_leaves_real_targets_alone():
    task = TASKS["toy-regression"](0)
    task = dataclasses.replace(task, backbone=partial(ResFFN, 1, depth=1, width=8, dropout=0.5))
    x = task.val.tensors[0]
    for make in (partial(ensemble, size=3), mc_dropout):
        method = make(METHODS["dnn"])
        model = fit(task, method, epochs=3, members=3)
        kind = "ensemble" if method.members else "dropout"
        set_scales(model, kind, Scales(1.0, 2.0))
        wide = method.predict(model, x)
        set_scales(model, kind, AS_THEY_ARE)
        torch.testing.assert_close(wide.std, 2 * method.predict(model, x).std)
    method = with_temperature(METHODS["dnn"])
    model = fit(task, method, epochs=1)
    assert scales_of(model, "temperature") == AS_THEY_ARE
    assert torch.equal(method.predict(model, x).std, METHODS["dnn"].predict(model, x).std)


def test_a_stack_of_an_ensemble_is_calibrated_as_the_ensemble(two_moons: Task):
    method, x = ensemble(METHODS["sngp"], 2), two_moons.test.tensors[0]
    model = fit(two_moons, method, epochs=2, num_random_features=128)
    assert scales_of(model, "ensemble") != AS_THEY_ARE
    torch.testing.assert_close(stack(model).predict(x).probs, method.predict(model, x).probs, rtol=1e-4, atol=1e-5)


def test_calibration_needs_validation_data(two_moons: Task):
    model = METHODS["dnn-temperature"].build(two_moons.backbone, 2)
    with pytest.raises(ValueError, match="got no validation batches"):
        calibrate_mixture(model, "temperature", lambda x: [], [])
