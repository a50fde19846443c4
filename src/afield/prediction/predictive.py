"""From a Gaussian posterior over the logits to what a user reads: probabilities, rates, intervals.

For a posterior mean m and variance v of the logits, p(y | x) = E[softmax(g)], g ~ N(m, v):

    mean field    softmax(m / sqrt(1 + pi/8 v))       one pass, the default; eq. (mean_field_approx), lambda = pi/8
    Monte Carlo   mean over S draws of softmax(g)     converges at rate S^-1/2
    quadrature    the integral itself, to about 1e-12, for a single logit

A `Prediction` is what every method returns and every score, metric, plot, export and server consumes.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from afield.registry import Registry

MEAN_FIELD_FACTOR = math.pi / 8
_FEW, _MANY = 16, 1024  # classes, and rows of them


def per_output(variance: Tensor, logits: Tensor) -> Tensor:
    return variance[:, None].expand_as(logits) if variance.dim() < logits.dim() else variance


def shrink(logits: Tensor, variance: Tensor) -> Tensor:
    """m / sqrt(1 + pi/8 v): the logits (N, K) whose softmax or sigmoid is the mean-field probability."""
    return logits / per_output(torch.sqrt(1 + MEAN_FIELD_FACTOR * variance), logits)


def to_probs(logits: Tensor) -> Tensor:
    """Softmax over K > 1 logits; one logit gives (1 - sigmoid, sigmoid)."""
    tracing = torch.compiler.is_compiling()  # to which a number of rows is a constant once it was looked at
    if not tracing and 1 < logits.shape[-1] <= _FEW and logits.dim() == 2 and len(logits) >= _MANY:
        return F.softmax(logits.T, dim=0).T  # of pixels: eight times as fast as along so few classes
    if logits.shape[-1] > 1:
        return F.softmax(logits, dim=-1)
    return torch.cat([torch.sigmoid(-logits), torch.sigmoid(logits)], dim=-1)


def mean_field(logits: Tensor, variance: Tensor) -> Tensor:
    """Mean-field probabilities (N, C). A variance shared by the classes keeps the order of the classes."""
    return to_probs(shrink(logits, variance))


def monte_carlo(
    logits: Tensor, variance: Tensor, num_samples: int = 100, generator: torch.Generator | None = None
) -> Tensor:
    """Probabilities (S, N, C) of S draws of the logits; the average over the first dimension is the prediction."""
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
    noise = torch.randn(num_samples, *logits.shape, generator=generator, dtype=logits.dtype, device=logits.device)
    std, large = per_output(variance, logits).sqrt(), torch.finfo(logits.dtype).max ** 0.5
    draws = torch.where(std == math.inf, large * noise, logits + std.clamp_max(large) * noise)
    return to_probs(draws)


def quadrature(logits: Tensor, variance: Tensor) -> Tensor:
    """E[sigmoid(g)] of one logit (N, 1), to about 1e-12 for every mean and variance, as probabilities (N, 2).

    Gauss-Hermite nodes resolve the sigmoid while the Gaussian is narrower than it. Beyond, with T logistic,
    E[sigmoid(g)] = P(T <= g) = E[Phi((m - T) / s)], whose integrand is smooth: there the trapezoidal rule is exact.
    """
    if logits.shape[-1] != 1:
        raise ValueError(f"quadrature expects a single logit, shape (N, 1), got {tuple(logits.shape)}. Use mean_field.")
    # Both signs are integrated: 1 - p would have no digits left where p is nearly 1.
    m = torch.cat([-logits, logits], dim=-1).double()[..., None]
    s = per_output(variance, logits).double().sqrt()[..., None]
    nodes, weights = (torch.from_numpy(a).to(m) for a in np.polynomial.hermite_e.hermegauss(80))
    narrow = (torch.sigmoid(m + s * nodes) * weights).sum(-1, keepdim=True) / weights.sum()
    t = torch.arange(-40, 40, 0.25, dtype=m.dtype, device=m.device)
    density = torch.sigmoid(t) * torch.sigmoid(-t) * 0.25
    wide = (torch.special.ndtr((m - t) / s.clamp_min(0.5)) * density).sum(-1, keepdim=True)
    return torch.where(s < 1, narrow, wide)[..., 0].to(logits.dtype)


def poisson_rate(logits: Tensor, variance: Tensor) -> Tensor:
    """The mean rate (N, K) of a log-normal posterior, exp(m + v / 2)."""
    return torch.exp(logits + per_output(variance, logits) / 2)


def minimax(probs: Tensor, in_domain: Tensor) -> Tensor:
    """p(y | x, in-domain) P(in-domain) + (1 / K) P(not in-domain): eq. (minimax_solution).

    Trust the model where the input is in-domain, with probability in_domain (N,), and know nothing elsewhere. It is the
    best answer, by every proper score, if outside the domain all classes are equally likely. The paper shows it
    minimax: true at the ends, where an input is in-domain for sure, or not at all. In between an adversary who chooses
    the class outside the domain takes the least probable one, and the answer that holds out best against him is
    max(in_domain p_k, t), the level t making the sum 1: the mixture is not minimax (docs/method.md).
    """
    if in_domain.shape != probs.shape[:1]:
        raise ValueError(f"in_domain must have shape ({probs.shape[0]},), got {tuple(in_domain.shape)}.")
    if bool(((in_domain < 0) | (in_domain > 1)).any()):
        raise ValueError("in_domain must hold probabilities between 0 and 1.")
    weight = in_domain[:, None]
    return weight * probs + (1 - weight) / probs.shape[-1]


Predictive = Callable[[Tensor, Tensor, int, torch.Generator | None], tuple[Tensor, Tensor | None]]
"""(logits, variance, num_samples, generator) -> (probs, members)."""


def of_labels(predictive: Predictive) -> Predictive:
    """The same for K labels, each of which applies or not: probabilities (N, K) that they do, of one logit each."""

    def of_each(m: Tensor, v: Tensor, samples: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
        flat, members = predictive(m.reshape(-1, 1), per_output(v, m).reshape(-1), samples, generator)
        of_members = None if members is None else members[..., 1].unflatten(1, m.shape)
        return flat[:, 1].reshape(m.shape), of_members

    return of_each


def _by_monte_carlo(m: Tensor, v: Tensor, samples: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    members = monte_carlo(m, v, samples, generator)
    return members.mean(0), members


PREDICTIVES: Registry[Predictive] = Registry(
    "predictive",
    mean_field=lambda m, v, samples, generator: (mean_field(m, v), None),
    monte_carlo=_by_monte_carlo,
    quadrature=lambda m, v, samples, generator: (quadrature(m, v), None),
)
