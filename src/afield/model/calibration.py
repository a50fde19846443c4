"""Calibration on held-out data: logit scale and amplitude together, and p-values with a guarantee.

    p(y | x) = softmax(s f / sqrt(1 + pi/8 a^2 v))

Held-out in-domain data cannot see what the variance is for: its log loss is flat in the amplitude a, and minimising
it alone often drives a to zero. So every a on a grid gets its own best s, and of all amplitudes that the data cannot
tell from the best one (a paired test of the log loss, at 5%) a classifier takes the *largest*:
its probabilities stay as good, and distance keeps its say. Regression and rates take the amplitude nearest to 1, the
prior's own, and regression fits the noise variance in place of s.

The held-out data is cut in two by a fixed permutation. One part chooses the parameters; the scores of the other are
the reference for p-values. A score chosen by looking at its own reference would void the guarantee.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from afield.errors import NotFitted
from afield.gp.head import GaussianProcessHead
from afield.model.evaluating import evaluating
from afield.model.hidden import Hidden, check_target
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import MEAN_FIELD_FACTOR, shrink
from afield.registry import Registry

STANDARD_ERRORS = 1.645  # by which a mean exceeds another in one case of twenty
_FEWEST = 20
# a^2 pi/8 times the median variance, for classes: beyond 10 the shrinkage has its limiting shape, where a larger
# amplitude with a larger scale gives the same probabilities.
_RELATIVE_GRID = np.logspace(-1, 1, 25)
_ABSOLUTE_GRID = np.logspace(-4, 4, 33)


@dataclass(frozen=True)
class Objective:
    """What is minimised over the nuisance parameter t for each a^2 of the grid."""

    loss: Callable[[float, float], Tensor]  # (t, a^2) -> log loss (N,)
    grid: np.ndarray  # of a^2
    start: float  # of t
    prior: Callable[[float, float], float] = lambda t, a2: 0.0  # -log prior of t, worth one observation or so

    def total(self, t: float, a2: float) -> float:
        losses = self.loss(t, a2)
        return float(losses.mean()) + self.prior(t, a2) / losses.shape[0]


@dataclass(frozen=True)
class Calibration:
    """What `calibrate` found; losses are log losses per example on the part that chose the parameters."""

    logit_scale: float
    amplitude: float
    noise: float
    loss_before: float
    loss: float
    num_fitted: int
    num_reference: int

    @property
    def smallest_p_value(self) -> float:
        """The smallest p-value there can be, hence the smallest useful alpha."""
        return 1 / (self.num_reference + 1)


def calibrate(
    model: SNGP,
    loader: Iterable[Any],
    *,
    amplitude: float | None = None,
    fit_fraction: float = 2 / 3,
    seed: int = 0,
    progress: bool | None = None,
) -> Calibration:
    """Fit logit scale and amplitude (regression: noise and amplitude) and keep reference scores for p-values.

    loader        batches (inputs, target) of in-domain data that the network has not seen. On its own training data
                  a network is overconfident, and calibration would believe it
    amplitude     a positive number to keep, instead of the fitted one
    fit_fraction  the part of the data that chooses the parameters; the rest is the reference
    seed          of the permutation that cuts the data

    Under torch.distributed give every rank the same data: nothing is reduced here.
    """
    head = model.head
    if not head.precision.fitted:
        raise NotFitted("The posterior is not fitted: call afield.fit_posterior(model, train_loader) before calibrate.")
    if amplitude is not None and not 0 < amplitude < math.inf:
        raise ValueError(f"amplitude must be positive and finite, got {amplitude}.")
    if not 0 < fit_fraction < 1:
        raise ValueError(f"fit_fraction must lie strictly between 0 and 1, got {fit_fraction}.")
    with evaluating(model):
        examples = Hidden(model, loader, progress=progress)
        batches = list(examples)
        if not batches:
            raise ValueError("calibrate got an empty loader: there is nothing to calibrate on.")
        if any(target is None for _, target in batches):
            raise examples.without_target("calibrate")
        hidden = torch.cat([h for h, _ in batches])
        target = check_target(torch.cat([t for _, t in batches if t is not None]), head)
        if hidden.shape[0] < _FEWEST:
            raise ValueError(f"calibrate expects at least {_FEWEST} held-out examples, got {hidden.shape[0]}.")
        fit, rest = (part.to(hidden.device) for part in cut_in_two(hidden.shape[0], fit_fraction, seed))
        objective = OBJECTIVES[head.likelihood](head, hidden[fit], target[fit])
        if amplitude is not None:
            objective = dataclasses.replace(objective, grid=np.array([amplitude**2]))
        current = float(head.noise if head.likelihood == "gaussian" else head.logit_scale)
        before = float(objective.loss(current, float(head.amplitude) ** 2).mean())
        nuisance, amplitude, after = _choose(objective, largest=head.likelihood in ("categorical", "bernoulli"))
        scalars = {"amplitude": amplitude}
        if head.likelihood == "gaussian":
            scalars["noise"] = nuisance
        elif head.likelihood != "poisson":
            scalars["logit_scale"] = nuisance
        head.set_scalars(**scalars)
        head.set_reference(Prediction.cat([head.predict(h) for h in hidden[rest].split(4096)]).score())
    return Calibration(
        float(head.logit_scale), amplitude, float(head.noise), before, after, int(fit.numel()), int(rest.numel())
    )


def cut_in_two(count: int, fit_fraction: float = 2 / 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of the held-out data that choose the parameters, and rows whose scores are the reference for p-values."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    cut = min(count - 1, max(1, round(fit_fraction * count)))
    return order[:cut], order[cut:]


def _choose(objective: Objective, *, largest: bool) -> tuple[float, float, float]:
    """The nuisance parameter, the amplitude and the mean loss that the module docstring's rule picks."""
    grid = objective.grid
    nuisance = [_minimize(objective, a2) for a2 in grid]
    losses = torch.stack([objective.loss(t, a2) for t, a2 in zip(nuisance, grid, strict=True)]).cpu()
    mean = losses.mean(1)
    best = int(mean.argmin())
    difference = losses - losses[best]
    error = difference.std(1) / math.sqrt(losses.shape[1])
    allowed = torch.nonzero(difference.mean(1) <= STANDARD_ERRORS * error + 1e-12).flatten().tolist()
    pick = max(allowed) if largest else min(allowed, key=lambda i: abs(math.log(grid[i])))
    return nuisance[pick], math.sqrt(grid[pick]), float(mean[pick])


def _minimize(objective: Objective, a2: float, *, decades: float = 3.0, steps: int = 32) -> float:
    """The nuisance parameter within 1000-fold of the start that minimises the objective, by golden section."""

    def fn(t: float) -> float:
        return objective.total(t, a2)

    golden, center, reach = (math.sqrt(5) - 1) / 2, math.log(objective.start), decades * math.log(10)
    low, high = center - reach, center + reach
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = fn(math.exp(left)), fn(math.exp(right))
    for _ in range(steps):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = fn(math.exp(left))
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = fn(math.exp(right))
    return math.exp((low + high) / 2)


def _unit_posterior(head: GaussianProcessHead, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (N, K) and variance at amplitude 1, in float64."""
    parts = [head.posterior(h) for h in hidden.split(4096)]
    mean = torch.cat([m for m, _ in parts]).double()
    return mean, torch.cat([v for _, v in parts]).double() / head.amplitude**2


def _classes(head: GaussianProcessHead, hidden: Tensor, target: Tensor) -> Objective:
    """A log-normal prior on s / sqrt(1 + pi/8 a^2 v), v at its median, keeps s finite where no held-out example is
    misclassified and the likelihood would have it grow without end."""
    mean, variance = _unit_posterior(head, hidden)
    if head.likelihood == "bernoulli":
        signed = torch.where(target == 1, 1.0, -1.0).to(mean)[:, None]

        def loss(s: float, a2: float) -> Tensor:
            return F.softplus(-signed * shrink(s * mean, a2 * variance)).squeeze(1)

    else:

        def loss(s: float, a2: float) -> Tensor:
            return F.cross_entropy(shrink(s * mean, a2 * variance), target, reduction="none")

    middle = MEAN_FIELD_FACTOR * float(variance.median())

    def prior(s: float, a2: float) -> float:
        return 0.5 * math.log(s / math.sqrt(1 + a2 * middle)) ** 2

    return Objective(loss, _RELATIVE_GRID / middle, 1.0, prior)


def _gaussian(head: GaussianProcessHead, hidden: Tensor, target: Tensor) -> Objective:
    """The noise also enters the precision r I + G / noise: the eigenvectors of G give the variance for every noise."""
    values, vectors = torch.linalg.eigh(head.precision.data[0])
    parts = [(head(h).double(), (head.features(h).double() @ vectors).square()) for h in hidden.split(4096)]
    mean, squares = (torch.cat([p[i] for p in parts]) for i in (0, 1))
    values, ridge, error = values.clamp_min(0), float(head.ridge), (target - mean).square()

    def loss(noise: float, a2: float) -> Tensor:
        variance = squares @ (1 / (ridge + values / noise))
        total = (a2 * variance + noise)[:, None]
        return 0.5 * (torch.log(2 * math.pi * total) + error / total).sum(1)

    return Objective(loss, _ABSOLUTE_GRID, max(float(error.mean()), 1e-12))


def _poisson(head: GaussianProcessHead, hidden: Tensor, target: Tensor) -> Objective:
    mean, variance = _unit_posterior(head, hidden)
    deviation = variance.reshape(mean.shape[0], -1).sqrt().expand_as(mean)
    nodes, weights = (torch.from_numpy(a).to(mean) for a in np.polynomial.hermite_e.hermegauss(32))

    def loss(_: float, a2: float) -> Tensor:
        log_rate = mean[..., None] + math.sqrt(a2) * deviation[..., None] * nodes
        log_p = target[..., None] * log_rate - log_rate.exp() - torch.lgamma(target[..., None] + 1)
        return -torch.logsumexp(log_p + (weights / weights.sum()).log(), dim=-1).sum(1)

    return Objective(loss, _ABSOLUTE_GRID, 1.0)


OBJECTIVES: Registry[Callable[[GaussianProcessHead, Tensor, Tensor], Objective]] = Registry(
    "likelihood", categorical=_classes, bernoulli=_classes, gaussian=_gaussian, poisson=_poisson
)
