"""Noise of regression: by output, correlated, varying with the input; from the loop that a user writes to a file."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import afield
from afield.decide.conformal import prediction_intervals
from afield.deploy.export import export
from afield.model.posterior import downdate, update

SCALES = torch.tensor([1.0, 10.0, 1000.0])


def data(n: int, number: int = 0) -> tuple[Tensor, Tensor]:
    """y = sin 2x + (.1 + .5 |x|) e."""
    generator = torch.Generator().manual_seed(number)
    x = 6 * torch.rand(n, 1, generator=generator) - 3
    return x, torch.sin(2 * x) + (0.1 + 0.5 * x.abs()) * torch.randn(n, 1, generator=generator)


def several(n: int, number: int = 0) -> tuple[Tensor, Tensor]:
    """Three outputs of scales 1, 10, 1000, with noise that is correlated."""
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(n, 2, generator=generator)
    e = torch.randn(n, 3, generator=generator) @ torch.tensor([[1.0, 0.8, 0.0], [0.0, 0.6, 0.0], [0.0, 0.0, 1.0]])
    return x, SCALES * (x @ torch.tensor([[1.0, 0.5, -1.0], [0.3, -1.0, 0.5]]) + 0.5 * e)


def fitted(noise: str, make: Any, n: int = 1200, **options: Any) -> afield.SNGP:
    """A frozen body under a Gaussian process that is solved for: no training."""
    train, held = make(n), make(800, 1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(train[0].shape[1], 32), nn.Tanh(), nn.Linear(32, train[1].shape[1]))
    model = afield.sngp(
        net, None, freeze=True, likelihood="gaussian", noise=noise, num_random_features=64, ridge=0.01, **options
    )
    afield.fit_head(model, [train])
    afield.fit_posterior(model, [train])
    afield.calibrate(model, [held])
    return model


@pytest.fixture(scope="module")
def varying() -> afield.SNGP:
    return fitted("input", data)


def covered(bounds: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return ((y >= bounds[0]) & (y <= bounds[1])).double()


def test_intervals_follow_noise_that_varies(varying: afield.SNGP) -> None:
    x, y = data(6000, 2)
    sixths = covered(varying.predict(x).interval(0.9), y)[x.abs()[:, 0].argsort(), 0].chunk(6)
    assert all(0.83 <= float(part.mean()) <= 0.96 for part in sixths)
    std = varying.predict(torch.tensor([[0.0], [3.0]])).std[:, 0]
    assert float(std[1] / std[0]) > 5


def test_conformal_intervals_keep_the_marginal_promise_and_follow_the_noise(varying: afield.SNGP) -> None:
    held, (x, y) = data(400, 3), data(6000, 4)
    intervals = prediction_intervals(varying.predict(held[0]), held[1], level=0.9).intervals(varying.predict(x))
    inside = covered(intervals, y.double())[:, 0]
    assert 0.87 <= float(inside.mean()) <= 0.93
    assert all(0.82 <= float(part.mean()) <= 0.97 for part in inside[x.abs()[:, 0].argsort()].chunk(6))


def test_each_output_has_its_own_noise() -> None:
    model, (x, y) = fitted("output", several), several(4000, 2)
    prediction = model.predict(x)
    assert prediction.std.shape == prediction.variance.shape == (4000, 3)  # type: ignore[union-attr]
    shares = covered(prediction.interval(0.9), y).mean(0)
    assert bool(((shares >= 0.88) & (shares <= 0.92)).all()), shares
    torch.testing.assert_close(prediction.std.mean(0) / SCALES, torch.full((3,), 0.5), rtol=0.15, atol=0)


def test_the_covariance_of_the_outputs_is_found() -> None:
    model, x = fitted("full", several), several(4000, 2)[0]
    prediction = model.predict(x)
    covariance = prediction.covariance.mean(0)
    std = covariance.diagonal().sqrt()
    correlation = covariance / std[:, None] / std
    expected = torch.tensor([[1.0, 0.8, 0.0], [0.8, 1.0, 0.0], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(correlation, expected, rtol=0, atol=0.08)
    assert len(prediction[:7].covariance) == 7


@pytest.mark.parametrize(("noise", "make"), [("input", data), ("full", several), ("output", several)])
def test_a_saved_model_answers_to_the_bit(noise: str, make: Any, tmp_path: Path) -> None:
    model = fitted(noise, make, n=200)
    afield.save(model, tmp_path)
    x, y = make(50, 5)
    again = afield.load(tmp_path, nn.Sequential(nn.Linear(x.shape[1], 32), nn.Tanh(), nn.Linear(32, y.shape[1])))
    a, b = model.predict(x), again.predict(x)
    assert torch.equal(a.std, b.std)
    assert torch.equal(a.p_value, b.p_value)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "make"), [("input", data), ("full", several)])
def test_an_export_says_the_same(noise: str, make: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    written = export(fitted(noise, make, n=300), tmp_path / "model.onnx", make(30, 5))
    assert written.difference <= 1e-4


def test_an_export_has_the_covariance_of_outputs_that_err_together(tmp_path: Path) -> None:
    model, batch = fitted("full", several, n=300), several(30, 5)
    written = export(model, tmp_path / "model.pt2", batch, format="torch-export")
    assert "covariance" in written.metadata["outputs"]
    assert written.difference <= 1e-4
    assert "covariance" in written.agreement.everywhere
    answers = torch.export.load(tmp_path / "model.pt2").module()(batch[0])
    torch.testing.assert_close(answers["covariance"], model.predict(batch[0]).covariance)


def test_an_update_is_taken_back_by_a_downdate(varying: afield.SNGP) -> None:
    new, (x, _) = data(50, 6), data(20, 7)
    before = varying.predict(x).variance
    reference = varying.head.reference, varying.head.reference_spans
    update(varying, [new])
    assert not torch.equal(before, varying.predict(x).variance)  # type: ignore[arg-type]
    downdate(varying, [new])
    torch.testing.assert_close(varying.predict(x).variance, before, rtol=1e-4, atol=1e-9)
    varying.head.keep_reference(*reference)


def test_noise_that_varies_needs_targets() -> None:
    net = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))
    model = afield.attach(net, likelihood="gaussian", noise="input", num_random_features=16)
    with pytest.raises(ValueError, match='noise="input" expects batches'):
        afield.fit_posterior(model, [data(30)[0]])


def test_a_network_with_one_undecided_output_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match='give likelihood="gaussian"'):
        afield.attach(nn.Sequential(nn.Linear(1, 1)), noise="input")


def test_one_noise_for_all_inputs_misses_what_varying_noise_catches(varying: afield.SNGP) -> None:
    x, y = data(6000, 2)
    constant = fitted("output", data)
    loss = {}
    for name, model in (("input", varying), ("output", constant)):
        p = model.predict(x)
        loss[name] = float(-torch.distributions.Normal(p.mean, p.std).log_prob(y).mean())
    assert loss["input"] < loss["output"] - 0.15
    assert loss["input"] < 1.2
