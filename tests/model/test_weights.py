"""Weights of examples: one of weight w counts as w examples, in the posterior, the output weights and calibration."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import afield
from afield.gp.calibration_objective import choose, objective_of
from afield.gp.likelihoods import LIKELIHOODS

N = 60
each = pytest.mark.parametrize("likelihood", LIKELIHOODS)
whole = st.lists(st.integers(0, 3), min_size=N, max_size=N).filter(lambda w: sum(map(bool, w)) > 30)


def make(likelihood: str, **head: object) -> afield.SNGP:
    torch.manual_seed(0)
    outputs = 1 if LIKELIHOODS[likelihood].of_labels else 3
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))
    options = {"num_random_features": 16, "length_scale": 2.0, "ridge": 0.3, "variance_features": "same"} | head
    return afield.sngp(net, likelihood=likelihood, **options).double()


def data(likelihood: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 4, generator=generator, dtype=torch.float64)
    outputs = 1 if LIKELIHOODS[likelihood].of_labels else 3
    if LIKELIHOODS[likelihood].of_classes:
        return x, torch.randint(LIKELIHOODS[likelihood].num_classes(outputs), (N,), generator=generator)
    return x, torch.randint(5, (N, outputs), generator=generator).double()


def repeated(x: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    index = torch.repeat_interleave(torch.arange(N), weights.long())
    return x[index], y[index]


def batches(x: Tensor, y: Tensor, size: int = 17) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


@each
@settings(max_examples=8, deadline=None)
@given(weights=whole)
def test_whole_weights_are_repeated_examples(likelihood: str, weights: list[int]) -> None:
    weight, (x, y) = torch.tensor(weights, dtype=torch.float64), data(likelihood)
    one, many = make(likelihood), make(likelihood)
    found = afield.fit_head(one, batches(x, y), weights=weight, tolerance=1e-10)
    expected = afield.fit_head(many, batches(*repeated(x, y, weight)), tolerance=1e-10)
    assert found.loss == pytest.approx(expected.loss, rel=1e-8)
    torch.testing.assert_close(one.head.weight, many.head.weight, rtol=1e-5, atol=1e-6)
    afield.fit_posterior(one, batches(x, y), weights=weight)
    afield.fit_posterior(many, batches(*repeated(x, y, weight)))
    torch.testing.assert_close(one.head.noise, many.head.noise, rtol=1e-6, atol=0)
    torch.testing.assert_close(one.predict(x).variance, many.predict(x).variance, rtol=1e-6, atol=1e-9)


@each
@pytest.mark.parametrize("covariance", ["shared", "per_class"])
@pytest.mark.parametrize("curvature", ["unit", "likelihood"])
def test_weights_enter_the_precision_linearly(likelihood: str, covariance: str, curvature: str) -> None:
    x, _ = data(likelihood)
    a, b = torch.rand(2, N, dtype=torch.float64)
    models = [make(likelihood, covariance=covariance, curvature=curvature) for _ in range(3)]
    for model, weight in zip(models, (a, b, a + b), strict=True):
        afield.fit_posterior(model, [x], weights=weight)
    first, second, both = (model.head.precision.data for model in models)
    torch.testing.assert_close(first + second, both, rtol=1e-12, atol=1e-12)
    assert models[0].head.num_observed == N


def test_weights_of_one_change_nothing() -> None:
    x, y = data("categorical")
    plain, weighted = make("categorical"), make("categorical")
    for model, weight in ((plain, None), (weighted, torch.ones(N))):
        afield.fit_head(model, batches(x, y), weights=weight)
        afield.fit_posterior(model, batches(x, y), weights=weight)
        afield.calibrate(model, batches(x, y), weights=weight)
    torch.testing.assert_close(plain.predict(x).probs, weighted.predict(x).probs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(plain.head.reference, weighted.head.reference, rtol=1e-9, atol=1e-12)


@each
def test_calibration_by_weights_is_calibration_on_repeated_examples(likelihood: str) -> None:
    x, y = data(likelihood)
    model = make(likelihood)
    afield.fit_head(model, batches(x, y))
    afield.fit_posterior(model, batches(x, y))
    weight = torch.arange(N, dtype=torch.float64) % 4
    x_again, y_again = repeated(x, y, weight)
    with torch.no_grad():
        one = objective_of(model.head, model.hidden(x), y, weight)
        many = objective_of(model.head, model.hidden(x_again), y_again, None)
        assert one.total(0.7, 2.0) == pytest.approx(many.total(0.7, 2.0), rel=1e-10)
        apart = [o.standard_error(o.loss(0.7, 2.0) - o.loss(0.9, 1.0)) for o in (one, many)]
        assert float(apart[0]) == pytest.approx(float(apart[1]), rel=1e-9)
        largest = LIKELIHOODS[likelihood].of_classes
        found, expected = (choose(o, largest=largest) for o in (one, many))
    assert found == pytest.approx(expected, rel=1e-5)


def test_p_values_compare_with_every_example_once() -> None:
    x, y = data("categorical")
    model = make("categorical")
    afield.fit_posterior(model, batches(x, y))
    found = afield.calibrate(model, batches(x, y), weights=torch.full((N,), 1e6))
    assert (found.num_fitted, found.num_reference) == (40, 30)


def test_update_and_downdate_take_weights() -> None:
    x, y = data("categorical")
    model, weight = make("categorical"), torch.rand(N, dtype=torch.float64)
    afield.fit_posterior(model, batches(x[:40], y[:40]), weights=weight[:40])
    before = model.head.precision.data.clone()
    afield.posterior.update(model, [x[40:]], weights=weight[40:])
    whole_fit = make("categorical")
    afield.fit_posterior(whole_fit, [x], weights=weight)
    torch.testing.assert_close(model.head.precision.data, whole_fit.head.precision.data, rtol=1e-12, atol=1e-12)
    afield.posterior.downdate(model, [x[40:]], weights=weight[40:])
    torch.testing.assert_close(model.head.precision.data, before, rtol=1e-9, atol=1e-9)


def test_standardisation_weighs_the_moments() -> None:
    x, _ = data("categorical")
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    weight = torch.arange(N, dtype=torch.float64) % 2
    model, other = afield.attach(net, num_random_features=16), afield.attach(net, num_random_features=16)
    afield.fit_posterior(model, [x], weights=weight)
    afield.fit_posterior(other, [x[weight > 0]])
    torch.testing.assert_close(model.head.random_features.shift, other.head.random_features.shift)
    torch.testing.assert_close(model.head.random_features.gain, other.head.random_features.gain)


# Errors


def test_a_shuffled_loader_is_refused() -> None:
    x, y = data("categorical")
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    with pytest.raises(ValueError, match=r"order of the loader, and this one has a RandomSampler.*shuffle=False"):
        afield.fit_posterior(make("categorical"), loader, weights=torch.ones(N))
    ordered = DataLoader(TensorDataset(x, y), batch_size=8)
    assert afield.fit_posterior(make("categorical"), ordered, weights=torch.ones(N)) == N


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(N, 1), r"weights must have shape \(N,\)"),
        (torch.ones(N - 1), "one number for each example: got only 59"),
        (torch.ones(N + 1), "one number for each example: got 61 for 60"),
        (-torch.ones(N), "finite and not negative"),
        (torch.full((N,), float("nan")), "finite and not negative"),
    ],
)
def test_wrong_weights_are_refused_and_leave_nothing_behind(weights: Tensor, message: str) -> None:
    x, y = data("categorical")
    model = make("categorical")
    with pytest.raises(ValueError, match=message):
        afield.fit_posterior(model, batches(x, y), weights=weights)
    assert not model.head.precision.fitted
