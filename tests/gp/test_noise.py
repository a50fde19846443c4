"""The shape of the noise: its fit is the minimum of a convex problem, its covariance that of the model it stands for."""

import pytest
import torch
from torch import Tensor

from afield.gp.head import GaussianProcessHead
from afield.gp.noise import NoiseShape, fit_log_variance, noise_shape


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def test_the_gradient_of_the_penalised_loss_vanishes_at_the_fit() -> None:
    psi, squares, weight = normal(200, 5), normal(200, 2, number=1).square(), normal(200, number=2).square()
    c, level, t = fit_log_variance(psi, squares, weight)
    c, level = c.requires_grad_(), level.requires_grad_()
    w = weight * (200 / weight.sum())
    g = level + psi @ c.T
    loss = 0.5 * (w[:, None] * (g + squares * torch.exp(-g))).sum() + 0.5 * (t[:, None] * c.square()).sum()
    gradients = torch.autograd.grad(loss, (c, level))
    assert all(float(gradient.abs().max()) < 1e-3 for gradient in gradients)


def test_an_example_of_weight_two_is_two_examples() -> None:
    psi, squares = normal(50, 3), normal(50, 1, number=1).square()
    twice = torch.arange(60) % 50
    counts = torch.bincount(twice, minlength=50)
    for a, b in zip(fit_log_variance(psi[twice], squares[twice]), fit_log_variance(psi, squares, counts), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_a_pattern_in_the_squares_is_found_and_none_is_invented() -> None:
    psi = normal(4000, 3)
    g = 0.7 * psi[:, 0] - 0.3
    squares = g.exp() * normal(4000, number=1).square()
    c, level, _ = fit_log_variance(psi, torch.stack([squares, normal(4000, number=2).square()], 1))
    torch.testing.assert_close(c[0], torch.tensor([0.7, 0, 0]).double(), rtol=0, atol=0.08)
    assert float(level[0]) == pytest.approx(-0.3, abs=0.08)
    assert float(c[1].abs().max()) < 0.08


def test_the_posterior_covariance_is_that_of_the_matrix_normal_prior() -> None:
    """Weights of K outputs with prior N(0, R / r), noise s^2 R: by Bayes in all K D weights at once."""
    d, k, n, ridge, level = 6, 2, 30, 0.7, 0.3
    head = GaussianProcessHead(
        4, k, likelihood="gaussian", noise="full", ridge=ridge, num_random_features=d, length_scale=2.0
    ).double()
    assert head.noise_shape is not None
    head.noise_shape.take_covariance(torch.tensor([[4.0, 1.0], [1.0, 1.0]]).double(), 1e9)
    head.set_scalars(noise=level)
    h, new = normal(n, 4), normal(5, 4, number=1)
    head.observe(h)
    r = head.noise_shape.root @ head.noise_shape.root.T
    assert float(torch.linalg.det(r)) == pytest.approx(1.0)
    assert float(r[0, 1] / (r[0, 0] * r[1, 1]).sqrt()) == pytest.approx(0.5, abs=1e-6)
    phi, phi_new = head.features(h), head.features(new)
    whole = torch.kron((torch.linalg.inv(r) * ridge).contiguous(), torch.eye(d).double())
    whole += torch.kron(torch.linalg.inv(r).contiguous(), (phi.T @ phi).contiguous()) / level
    p = head.predict(new)
    for i in range(5):
        f = torch.kron(torch.eye(k).double(), phi_new[i : i + 1])
        expected = f @ torch.linalg.inv(whole) @ f.T + level * r
        torch.testing.assert_close(p.covariance[i], expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(p.covariance.diagonal(dim1=1, dim2=2).sqrt(), p.std, rtol=1e-9, atol=0)


def test_whitening_makes_the_residuals_unit_and_keeps_their_volume() -> None:
    shape = NoiseShape("full")
    residual = normal(500, 3) @ normal(3, 3, number=3)
    assert shape.whiten(residual) is residual  # nothing is known yet
    shape.take_covariance(residual.T @ residual / 500, 1e12)
    white = shape.whiten(residual)
    covariance = white.T @ white / 500
    torch.testing.assert_close(covariance, covariance[0, 0] * torch.eye(3).double(), rtol=1e-6, atol=1e-6)
    before = torch.linalg.slogdet(residual.T @ residual / 500)[1]
    assert float(torch.linalg.slogdet(covariance)[1]) == pytest.approx(float(before), abs=1e-6)


def test_stretching_keeps_the_level() -> None:
    shape = NoiseShape("output")
    shape.stretch(torch.tensor([1.0, 10.0, 1000.0]).double())
    variance = shape.of_outputs(torch.ones(1).double())[0]
    assert float(variance.log().mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(variance[2] / variance[0]) == pytest.approx(1e6)


def test_inputs_leave_no_noise_beyond_that_of_the_training_data() -> None:
    shape = NoiseShape("input")
    shape.take({"weight": torch.ones(1, 2), "center": torch.zeros(1), "span": torch.tensor([[-1.0], [2.0]])})
    g = shape.log_ratio(torch.tensor([[9.0, 9.0], [-9.0, 0.0], [0.5, 0.25]]))
    assert g.tolist() == [[2.0], [-1.0], [0.75]]


@pytest.mark.parametrize(
    ("kind", "likelihood", "outputs", "message"),
    [
        ("inputs", "gaussian", 1, "noise must be one of output, full, input, got 'inputs'"),
        ("input", "categorical", 3, 'give likelihood="gaussian"'),
        ("full", "gaussian", 1, "covariance of several outputs"),
    ],
)
def test_what_has_no_meaning_is_refused(kind: str, likelihood: str, outputs: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        noise_shape(kind, likelihood, outputs)


def test_one_noise_needs_no_shape() -> None:
    assert noise_shape("output", "gaussian", 1) is None
    assert noise_shape("output", "categorical", 3) is None
