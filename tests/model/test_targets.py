"""Targets and likelihood go together: what one output stands for, and targets that look like another likelihood's."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import afield
from afield.errors import OtherTargets

SMALL: dict[str, Any] = {"num_random_features": 32}
OPEN = r'one output, and nothing says what it stands for.*"bernoulli".*"gaussian".*"poisson"'


def mlp(outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).eval()


X = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
BINARY = torch.arange(40) % 2


# One output ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "likelihood"),
    [
        (BINARY, "bernoulli"),
        (BINARY.float(), "bernoulli"),
        (BINARY[:, None].double(), "bernoulli"),
        (BINARY.bool(), "bernoulli"),
        (BINARY.numpy(), "bernoulli"),
        (X.sum(1), "gaussian"),
        (X[:, :1], "gaussian"),
        (X.sum(1).numpy().astype(np.float64), "gaussian"),
    ],
    ids=["whole", "float", "column", "bool", "array", "real", "real column", "real array"],
)
def test_one_output_stands_for_what_its_targets_show(target: Any, likelihood: str, tmp_path: Any) -> None:
    net = mlp()
    model = afield.attach(net, **SMALL)
    afield.fit_posterior(model, [(X, target)])
    twin = afield.attach(net, likelihood=likelihood, **SMALL)
    assert (model.head.likelihood, model.head.curvature) == (likelihood, twin.head.curvature)
    assert model.settings["head"]["likelihood"] == twin.settings["head"]["likelihood"]
    prediction = model.predict(X)
    assert (prediction.probs is None) == (likelihood == "gaussian")
    if likelihood == "gaussian":
        assert torch.equal(prediction.mean, net(X))
    back = afield.load(afield.save(model, tmp_path), mlp())
    assert back.head.likelihood == likelihood
    torch.testing.assert_close(back.predict(X).numpy(), prediction.numpy(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "loader",
    [
        [X],
        [(X, ["cat"] * 40)],
        [(X, torch.arange(40))],  # numbers, counts or classes
        [(X, torch.arange(40).float())],
        [(X, 2 * BINARY - 1)],
        [(X, X)],
    ],
    ids=["no targets", "names", "whole numbers", "whole floats", "signs", "three columns"],
)
def test_targets_that_leave_it_open_are_an_error_that_asks(loader: list[Any]) -> None:
    model = afield.attach(mlp(), **SMALL)
    with pytest.raises(ValueError, match=OPEN):
        afield.fit_posterior(model, loader)
    afield.fit_posterior(model, [(X, X.sum(1))])  # nothing was decided
    assert model.head.likelihood == "gaussian"


def test_until_then_nothing_is_predicted() -> None:
    model = afield.attach(mlp(), **SMALL)
    with pytest.raises(afield.errors.NotFitted):
        model.predict(X)
    model.head.observe(model.hidden(X))
    with pytest.raises(ValueError, match=OPEN):
        model.predict(X)
    with pytest.raises(ValueError, match=OPEN):
        afield.calibrate(model, [(X, BINARY)])


def test_a_later_batch_of_another_kind_is_an_error_and_decides_nothing() -> None:
    model = afield.attach(mlp(), **SMALL)
    loader = [(X, BINARY.float()), (X, X.sum(1))]
    for given in (loader, iter(loader)):
        with pytest.raises(ValueError, match=r'first batch are zeros and ones.*a later batch are not.*"gaussian"'):
            afield.fit_posterior(model, given)
        assert model.head.likelihood == "undecided"
    assert afield.fit_posterior(model, loader[::-1]) == 80
    assert model.head.likelihood == "gaussian"


def test_the_first_batch_of_a_generator_is_not_lost() -> None:
    loader = list(zip(X.split(7), X.sum(1).split(7), strict=True))
    models = [afield.attach(mlp(), generator=torch.Generator().manual_seed(0), **SMALL) for _ in range(2)]
    assert afield.fit_posterior(models[0], iter(loader)) == afield.fit_posterior(models[1], loader) == 40
    assert torch.equal(models[0].predict(X).std, models[1].predict(X).std)


def test_fitting_again_keeps_the_likelihood_and_copies_know_it() -> None:
    model = afield.attach(mlp(), **SMALL)
    afield.fit_posterior(model, [(X, BINARY)])
    assert afield.attach(model).head.likelihood == "bernoulli"
    afield.fit_posterior(model, [X])
    assert model.head.likelihood == "bernoulli"


# Targets of another kind -----------------------------------------------------------------------------------------


def fit(likelihood: str, outputs: int, target: Tensor) -> None:
    afield.fit_posterior(afield.sngp(mlp(outputs), likelihood=likelihood, **SMALL), [(X, target)])


@pytest.mark.parametrize(
    ("likelihood", "outputs", "target", "message"),
    [
        ("categorical", 2, X[:, :2], r'real numbers, and the model has 2 classes.*likelihood="gaussian"'),
        ("bernoulli", 1, X.sum(1), r'real numbers, and the model has 2 classes.*likelihood="gaussian"'),
        ("categorical", 2, torch.arange(40) % 5, r"run to 4, and the model has 2 classes.*output="),
        ("poisson", 1, X.abs().sum(1), "real numbers, and a poisson model expects counts"),
        ("gaussian", 1, torch.arange(40) % 3, r'whole numbers from 0 to 2, like classes.*likelihood="categorical"'),
    ],
)
def test_targets_of_another_kind_are_told(likelihood: str, outputs: int, target: Tensor, message: str) -> None:
    with pytest.warns(OtherTargets, match=message):
        fit(likelihood, outputs, target)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "target"),
    [
        ("categorical", 3, torch.arange(40) % 3),
        ("categorical", 3, (torch.arange(40) % 3).float()),
        ("categorical", 3, (torch.arange(40) % 3)[:, None]),
        ("categorical", 3, X.softmax(-1)),  # mixed labels
        ("categorical", 3, torch.full((40,), -100)),  # no label
        ("bernoulli", 1, 0.1 + 0.8 * BINARY),  # smoothed labels
        ("gaussian", 1, (torch.arange(40) % 3).float()),
        ("gaussian", 1, torch.arange(40) + 20),  # years, say
        ("gaussian", 2, X[:, :2]),
        ("poisson", 1, torch.arange(40) % 3),
    ],
)
def test_and_others_are_not(likelihood: str, outputs: int, target: Tensor) -> None:
    fit(likelihood, outputs, target)


def test_calibrate_tells_of_classes_for_a_regression_too() -> None:
    model = afield.attach(mlp(), likelihood="gaussian", **SMALL)
    afield.fit_posterior(model, [X])
    with pytest.warns(OtherTargets, match="whole numbers from 0 to 1, like classes"):
        afield.calibrate(model, [(X, BINARY)])
