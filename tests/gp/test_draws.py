"""Draws from the posterior have its mean and covariance, and are functions: the same whatever the batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import afield
from afield.errors import NotFitted


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def fitted(outputs: int = 3, **options: Any) -> afield.SNGP:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    model = afield.attach(net, num_random_features=40, **options)
    numbers = options.get("likelihood") == "gaussian"
    afield.fit_posterior(model, [(normal(50, 4), normal(50, outputs, number=9))] if numbers else [normal(50, 4)])
    model.head.set_scalars(amplitude=2.0)
    return model


@pytest.mark.parametrize(
    "options", [{"likelihood": "categorical"}, {"likelihood": "bernoulli"}, {"likelihood": "gaussian", "noise": "full"}]
)
def test_draws_have_mean_variance_and_covariance_of_the_posterior(options: dict[str, Any]) -> None:
    model, x = fitted(**options), normal(6, 4, number=3)
    model.head.set_scalars(logit_scale=1.5)
    p, draws = model.predict(x), model.sample(x, num_samples=40_000, generator=seed())
    assert draws.shape == (40_000, 6, 3)
    assert p.variance is not None
    variance = p.variance if p.variance.dim() == 2 else p.variance[:, None].expand(-1, 3)
    torch.testing.assert_close(draws.mean(0), p.logits, rtol=0, atol=5 * float(variance.max() / 40_000) ** 0.5)
    torch.testing.assert_close(draws.var(0), variance, rtol=0.05, atol=0)
    psi = model.head.variance_phi(model.hidden(x))
    h_inverse = model.head.precision.root[0].T @ model.head.precision.root[0]
    expected = 4.0 * (psi @ h_inverse @ psi.T)
    share = variance[0, 0] / expected[0, 0]  # of the first output
    torch.testing.assert_close(
        draws[..., 0].T.cov(), share * expected, rtol=0.1, atol=0.05 * float(variance[:, 0].max())
    )


def test_a_draw_is_a_function_whatever_the_batch() -> None:
    model, x = fitted(), normal(6, 4, number=3)
    whole = model.sample(x, num_samples=5, generator=seed(1))
    parts = [model.sample(part, num_samples=5, generator=seed(1)) for part in x.split(2)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-12)
    assert not torch.equal(whole, model.sample(x, num_samples=5, generator=seed(2)))


def test_labels_and_classes_with_their_own_precision() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model = afield.sngp(net, None, covariance="per_class", num_random_features=40, generator=seed())
    afield.fit_posterior(model, [normal(50, 4)])
    x = normal(4, 4, number=5)
    variance = model.predict(x).variance
    assert variance is not None
    torch.testing.assert_close(
        model.sample(x, num_samples=30_000, generator=seed()).var(0), variance, rtol=0.06, atol=0
    )


def test_positions_come_last() -> None:
    model = afield.attach(nn.Conv2d(3, 2, 1), num_random_features=16)
    x = torch.randn(5, 3, 4, 4, generator=seed())
    afield.fit_posterior(model, [x])
    assert model.sample(x, num_samples=7).shape == (7, 5, 2, 4, 4)


def test_what_cannot_be_drawn_from_is_refused() -> None:
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        fitted().sample(normal(2, 4), num_samples=0)
    with pytest.raises(NotFitted):
        afield.attach(nn.Linear(4, 3)).sample(torch.zeros(2, 4))
