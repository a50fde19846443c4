"""`het-sngp`: noise of logits that varies with the input. Its integrals, and that it learns where labels are noisy."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from afield.backbones.resffn import ResFFN
from afield.backbones.unet import UNet
from afield.experiment.training import fit
from afield.methods import METHODS
from afield.methods.heteroscedastic import NoisyLogits
from afield.outputs.logit_noise import LogitNoise, log_loss, noise_variance, probabilities
from afield.prediction.metrics import METRICS
from afield.settings import Settings
from afield.tasks import TASKS, Task


def noise_of(classes: int, rank: int = 2, count: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((count, classes), (count, classes, rank), (count, classes))
    mean, factor, deviation = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return mean, factor, deviation.abs()


def test_two_classes_are_integrated_and_more_are_drawn_from_the_same_distribution() -> None:
    mean, factor, deviation = noise_of(2)
    e = torch.randn(200_000, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    noisy = mean[:, None] + torch.einsum("nkr,sr->nsk", factor, e[:, :2]) + deviation[:, None] * e[:, 2:]
    exact = probabilities(mean, factor, deviation, 1)
    torch.testing.assert_close(exact, noisy.softmax(-1).mean(1), rtol=0, atol=4e-3)
    # A third class that is never chosen leaves the other two, which are drawn now.
    never = torch.full_like(mean[:, :1], -200.0)
    more = [torch.cat([part, torch.zeros_like(part[:, :1])], 1) for part in (factor, deviation)]
    drawn = probabilities(torch.cat([mean, never], 1), *more, 20_000)
    torch.testing.assert_close(drawn[:, :2], exact, rtol=0, atol=0.02)
    y = torch.arange(40) % 2
    loss = log_loss(torch.cat([mean, never], 1), *more, y, 20_000)
    torch.testing.assert_close(loss, log_loss(mean, factor, deviation, y, 1), rtol=0, atol=0.06)


@pytest.mark.parametrize("classes", [2, 5])
def test_without_noise_it_is_a_softmax_and_a_prediction_does_not_depend_on_its_neighbours(classes: int) -> None:
    mean, factor, deviation = noise_of(classes)
    torch.testing.assert_close(probabilities(mean, 0 * factor, 0 * deviation, 8), mean.softmax(-1), rtol=1e-9, atol=0)
    whole = probabilities(mean, factor, deviation, 50)
    torch.testing.assert_close(probabilities(mean[7:9], factor[7:9], deviation[7:9], 50), whole[7:9])


def test_the_gradient_of_the_integral_is_that_of_draws() -> None:
    mean, factor, deviation = noise_of(2, count=3)
    found = []
    for padded in (False, True):
        parts = [part.clone().requires_grad_() for part in (mean, factor, deviation)]
        given = parts
        if padded:  # drawn
            torch.manual_seed(0)
            given = [torch.cat([part, torch.zeros_like(part[:, :1])], 1) for part in parts]
            given[0] = given[0] - 200 * torch.eye(3, dtype=mean.dtype)[2]
        log_loss(*given, torch.tensor([0, 1, 1]), 400_000).sum().backward()
        found.append([part.grad for part in parts])
    for exact, drawn in zip(*found, strict=True):
        torch.testing.assert_close(drawn, exact, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((4, 1, 1), "at least 2 classes, got 1"),
        ((4, 3, 5), "between 0 and 3, its classes, got 5"),
        ((4, 3, 1, 0.0), "must be positive, got 0.0"),
    ],
)
def test_what_cannot_be_noise_is_refused(options: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogitNoise(*options)  # type: ignore[arg-type]


def test_pixels_are_refused_and_numbers_sent_to_the_noise_of_regression() -> None:
    with pytest.raises(ValueError, match="het-sngp expects a backbone of one hidden vector an input"):
        METHODS["het-sngp"].build(partial(UNet, width=8), 3, Settings())
    with pytest.raises(ValueError, match=r'het-sngp expects classes.*noise="input"'):
        METHODS["het-sngp"].build(partial(ResFFN, 2, depth=1, width=8), 1, Settings(likelihood="gaussian"))


def noisy_labels() -> Task:
    """Four quadrants of the plane are classes. Where x > 0 half of the labels are of the quadrant above or below."""
    generator = torch.Generator().manual_seed(0)
    parts = []
    for count in (1000, 500, 2000):
        x = 4 * torch.rand(count, 2, generator=generator) - 2
        right, above = (x > 0).long().unbind(1)
        wrong = (right == 1) & (torch.rand(count, generator=generator) < 0.4)
        parts.append(TensorDataset(x, 2 * right + torch.where(wrong, 1 - above, above)))
    moons = TASKS["two-moons"](0)
    settings = dataclasses.replace(moons.settings, num_random_features=128)
    backbone = partial(ResFFN, 2, depth=2, width=32)
    return dataclasses.replace(
        moons,
        name="noisy-labels",
        train=parts[0],
        val=parts[1],
        test=parts[2],
        num_outputs=4,
        backbone=backbone,
        settings=settings,
    )


@pytest.mark.slow
def test_it_learns_where_labels_are_noisy() -> None:
    task = noisy_labels()
    x, y = task.test.tensors  # type: ignore[attr-defined]
    found = {}
    for name in ("het-sngp", "sngp"):
        model = fit(task, METHODS[name], epochs=25, learning_rate=5e-3)
        found[name] = METHODS[name].predict(model, x)
        if name == "het-sngp":
            assert isinstance(model, NoisyLogits)
            noise = noise_variance(*model.of_hidden(model.gp.hidden(x))[1:]).detach()
    inside = (x.abs() > 0.3).all(1)
    loud, quiet = inside & (x[:, 0] > 0), inside & (x[:, 0] < 0)
    own = y[loud]
    paired = noise[loud].gather(1, torch.stack([own, own ^ 1], 1)).mean()
    assert float(paired) > 2 * float(noise[quiet].gather(1, y[quiet, None]).mean())
    nll = {name: METRICS["nll"](p, y) for name, p in found.items()}
    truth = 0.5 * (-(0.6 * math.log(0.6) + 0.4 * math.log(0.4)))
    assert nll["het-sngp"] < nll["sngp"] + 0.01
    assert nll["het-sngp"] < truth + 0.1
