"""Likelihoods: one contract over the table, in float64. What the rest of the library does with a likelihood is this."""

import math

import pytest
import torch
from torch import Tensor

from afield.gp.likelihoods import LIKELIHOODS, Likelihood, likelihood_for
from afield.prediction.scores import SCORES

N = 7
LABELS = "labels"  # bernoulli with several outputs
each = pytest.mark.parametrize("name", [*LIKELIHOODS, LABELS])


def value(name: str) -> Likelihood:
    return LIKELIHOODS["bernoulli" if name == LABELS else name]


def outputs(name: str) -> int:
    return 1 if value(name).of_labels and name != LABELS else 3


def logits(name: str, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(N, outputs(name), generator=generator, dtype=torch.float64)


def targets(name: str) -> Tensor:
    """Some, as a user may give them, in the form that the likelihood wants."""
    likelihood, generator = value(name), torch.Generator().manual_seed(5)
    if name == LABELS:
        raw = torch.randint(2, (N, outputs(name)), generator=generator)
    elif likelihood.of_classes:
        raw = torch.randint(likelihood.num_classes(outputs(name)), (N,), generator=generator)
    else:
        raw = torch.randint(3, (N, outputs(name)), generator=generator).double()
    return likelihood.check_targets(raw, outputs(name))


def log_p(name: str, f: Tensor, y: Tensor, noise: float = 1.0) -> Tensor:
    """(N,): by torch's own distributions."""
    d = torch.distributions
    if name == "categorical":
        return d.Categorical(logits=f).log_prob(y)
    if name in ("bernoulli", LABELS):
        return d.Bernoulli(logits=f).log_prob(y.double().reshape(f.shape)).sum(1)
    if name == "gaussian":
        return d.Normal(f, math.sqrt(noise)).log_prob(y).sum(1)
    return d.Poisson(f.exp()).log_prob(y).sum(1)


@each
def test_the_loss_is_minus_the_log_likelihood_up_to_a_constant_of_the_target(name: str) -> None:
    y, a, b = targets(name), logits(name), logits(name, 1)
    loss = value(name).loss
    assert loss(a, y).shape == (N,)
    torch.testing.assert_close(loss(a, y) - loss(b, y), log_p(name, b, y) - log_p(name, a, y), rtol=1e-12, atol=1e-12)


@each
def test_hessian_and_curvature_are_those_of_the_loss(name: str) -> None:
    likelihood, f, y = value(name), logits(name), targets(name)
    whole = torch.autograd.functional.hessian(lambda g: likelihood.loss(g, y).sum(), f).double()
    for n in range(N):  # examples do not mix
        own = whole[n, :, n]
        torch.testing.assert_close(likelihood.curvature(f)[n], own.diagonal(), rtol=1e-10, atol=1e-12)
        for k in range(f.shape[1]):
            unit = torch.zeros_like(f)
            unit[n, k] = 1
            torch.testing.assert_close(likelihood.hessian(f)(unit)[n], own[:, k], rtol=1e-10, atol=1e-12)


@each
def test_without_variance_the_predictive_loss_is_the_loss_itself(name: str) -> None:
    f, y, noise = logits(name), targets(name), 0.3
    found = value(name).predictive_loss(f, torch.zeros(N).double(), noise, y)
    torch.testing.assert_close(found, -log_p(name, f, y, noise), rtol=1e-9, atol=1e-9)


@each
def test_the_predictive_loss_is_that_of_the_integral(name: str) -> None:
    """Exactly for numbers; for classes mean field, which is near it."""
    likelihood, m, y, noise = value(name), logits(name), targets(name), 0.3
    v = torch.linspace(0.1, 0.6, N).double()
    draws = m + v.sqrt()[:, None] * torch.randn(200_000, *m.shape, generator=torch.Generator().manual_seed(0)).double()
    flat = draws.reshape(-1, m.shape[1])
    many = y.repeat(len(draws), *[1] * (y.dim() - 1))
    integral = -log_p(name, flat, many, noise).reshape(len(draws), N).exp().mean(0).log()
    tolerance = 0.1 if likelihood.of_classes else 0.03
    torch.testing.assert_close(likelihood.predictive_loss(m, v, noise, y), integral, rtol=0.01, atol=tolerance)


@each
def test_mean_and_variance_of_the_target_are_those_of_draws(name: str) -> None:
    likelihood, m, noise = value(name), logits(name), 0.3
    assert (likelihood.mean is None) == (likelihood.variance is None) == likelihood.of_classes
    if likelihood.mean is None or likelihood.variance is None:
        return
    v = torch.linspace(0.05, 0.2, N).double()
    generator = torch.Generator().manual_seed(0)
    g = m + v.sqrt()[:, None] * torch.randn(200_000, *m.shape, generator=generator).double()
    if likelihood.noisy:
        y = g + math.sqrt(noise) * torch.randn(g.shape, generator=generator).double()
    else:
        y = torch.poisson(g.exp(), generator=generator)
    assert float(y.min()) >= likelihood.lowest_target
    torch.testing.assert_close(likelihood.mean(m, v), y.mean(0), rtol=0.03, atol=0.02)
    torch.testing.assert_close(likelihood.variance(m, v, noise), y.var(0), rtol=0.05, atol=0.02)


@each
def test_targets_of_the_wrong_kind_are_refused(name: str) -> None:
    likelihood, k = value(name), outputs(name)
    if likelihood.of_classes:
        wrong = [torch.tensor([0.5, 1.0]), torch.tensor([0, likelihood.num_classes(k)]), torch.tensor([-1, 0])]
    else:
        wrong = [torch.zeros(2, k + 1), torch.full((2, k), math.nan)]
        wrong += [torch.full((2, k), -1.0)] if likelihood.lowest_target == 0 else []
    for y in wrong:
        with pytest.raises(ValueError):
            likelihood.check_targets(y, k)


@each
def test_outputs_and_scores_are_known(name: str) -> None:
    likelihood = value(name)
    assert likelihood.outputs.fewest <= outputs(name) <= likelihood.outputs.most
    assert likelihood.score in SCORES
    assert likelihood.doubt in SCORES
    assert likelihood.calibrated in (None, "logit_scale", "noise")
    assert likelihood.noisy == (likelihood.calibrated == "noise")
    assert bool(likelihood.num_classes(outputs(name))) == (likelihood.of_classes and name != LABELS)


def test_the_likelihood_of_targets_without_a_name() -> None:
    assert likelihood_for(torch.tensor([0.5])) is LIKELIHOODS["gaussian"]
    assert likelihood_for(torch.tensor([1])) is LIKELIHOODS["categorical"]


def test_a_likelihood_is_a_value() -> None:
    assert all(isinstance(value, Likelihood) for value in LIKELIHOODS.values())
    with pytest.raises(AttributeError):
        LIKELIHOODS["gaussian"].noisy = False  # type: ignore[misc]


def test_no_other_module_compares_the_names_of_likelihoods() -> None:
    """What depends on the likelihood is asked of its value: a fifth one touches one file."""
    import ast
    from pathlib import Path

    import afield

    root = Path(afield.__file__).parent
    found = []
    for file in root.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                words = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
                if words & set(LIKELIHOODS):
                    found.append(f"{file.relative_to(root)}:{node.lineno}")
    assert not found
