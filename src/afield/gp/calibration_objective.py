"""What calibration minimises: the log loss of held-out data, over the amplitude a and one nuisance parameter t.

t is the scale s of a classifier's logits, or the noise variance of a regression. For each a^2 of a grid t is minimised
out, and `choose` picks one of the amplitudes that the data cannot tell from the best one (`model.calibration`).
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS, Likelihood
from afield.gp.line_search import brent, minimize_near
from afield.prediction.predictive import MEAN_FIELD_FACTOR

STANDARD_ERRORS = 1.0  # within which an amplitude is as good as the best
_DECADES = 3.0  # from its start to either side, in which the nuisance parameter is looked for
# a^2 pi/8 times the median variance, for classes: beyond 10 the shrinkage has its limiting shape, where a larger
# amplitude with a larger scale gives the same probabilities.
_RELATIVE_GRID = np.logspace(-1, 1, 25)
_WIDE_GRID = np.logspace(-4, 2, 49)  # the same where the logit scale is given: there the amplitude does its work
_ABSOLUTE_GRID = np.logspace(-4, 4, 33)
_COARSE, _FINE = 0.03, 0.003  # of the logarithm: to compare amplitudes, and for the one that is chosen
_ONE_IN_TWENTY = 1.645  # standard errors by which a mean exceeds another by chance
_CACHED = 2**18  # numbers that the processor's cache holds


@dataclass(frozen=True)
class Objective:
    """What is minimised over the nuisance parameter t for each a^2 of the grid."""

    loss: Callable[[float, float], Tensor]  # (t, a^2) -> log loss (N,)
    grid: np.ndarray  # of a^2
    start: float  # of t
    weight: Tensor | None  # (N,) of the examples; None: 1
    outputs: Tensor  # (N, K) of the network
    prior: Callable[[float, float], float] = lambda t, a2: 0.0  # -log prior of t, worth one observation or so
    group: int = 1  # examples that depend on each other, one group after the other: the positions of an input

    def total(self, t: float, a2: float) -> float:
        losses = self.loss(t, a2)
        return float(self.mean(losses)) + self.prior(t, a2) / self.count(losses)

    def count(self, losses: Tensor) -> float:
        """How many examples there are: one of weight w is w of them."""
        return losses.shape[-1] if self.weight is None else float(self.weight.sum())

    def mean(self, losses: Tensor) -> Tensor:
        """Over the examples, the last dimension."""
        return losses.mean(-1) if self.weight is None else losses @ (self.weight / self.weight.sum())

    def standard_error(self, losses: Tensor) -> Tensor:
        """Of that mean; the groups are independent."""
        if self.group > 1:
            of_groups = None if self.weight is None else self.weight[:: self.group]
            alone = dataclasses.replace(self, group=1, weight=of_groups)
            return alone.standard_error(losses.unflatten(-1, (-1, self.group)).mean(-1))
        if self.weight is None:
            return losses.std(-1) / math.sqrt(losses.shape[-1])
        squares = (losses - self.mean(losses)[..., None]).square() @ self.weight
        count = self.count(losses)
        return (squares / max(count - 1, 1e-12) / count).sqrt()


def choose(
    objective: Objective, *, largest: bool, standard_errors: float = STANDARD_ERRORS
) -> tuple[float, float, float]:
    """The nuisance parameter, the amplitude and the mean loss that the module docstring's rule picks."""
    grid = objective.grid
    nuisance: list[float] = []
    for a2 in grid:
        # In logs the next minimum lies about as far from the last as that from the one before.
        guess = nuisance[-1] ** 2 / nuisance[-2] if len(nuisance) > 1 else nuisance[0] if nuisance else None
        nuisance.append(_minimize(objective, a2, guess=guess))
    losses = torch.stack([objective.loss(t, a2) for t, a2 in zip(nuisance, grid, strict=True)])
    mean = objective.mean(losses)
    best = int(mean.argmin())
    difference = losses - losses[best]
    error = objective.standard_error(difference)
    allowed = torch.nonzero(objective.mean(difference) <= standard_errors * error + 1e-12).flatten().tolist()
    pick = max(allowed) if largest else min(allowed, key=lambda i: abs(math.log(grid[i])))
    settled = _minimize(objective, grid[pick], guess=nuisance[pick], step=_FINE)
    return settled, math.sqrt(grid[pick]), float(objective.mean(objective.loss(settled, grid[pick])))


def objective_of(head: GaussianProcessHead, hidden: Tensor, target: Tensor, weight: Tensor | None) -> Objective:
    """What the likelihood has calibrated beside the amplitude: the scale of the logits, the noise, or nothing."""
    likelihood = LIKELIHOODS[head.likelihood]
    if likelihood.noisy:
        return _with_noise(head, hidden, target, weight)
    mean, variance = _unit_posterior(head, hidden)
    if likelihood.calibrated is None:
        return Objective(
            lambda _, a2: likelihood.predictive_loss(mean, a2 * variance, 0.0, target),
            _ABSOLUTE_GRID,
            1.0,
            weight,
            mean,
        )

    return class_objective(likelihood, mean, variance, target, weight)


def class_objective(
    likelihood: Likelihood, mean: Tensor, variance: Tensor, target: Tensor, weight: Tensor | None = None
) -> Objective:
    """Of classes: logits (N, K) and variance (N,) or (N, K) before their scale s and amplitude a are chosen."""

    def any_loss(s: float, a2: float) -> Tensor:
        return likelihood.predictive_loss(s * mean, a2 * variance, 0.0, target)

    shared = mean.shape[1] > 1 and variance.dim() == 1 and not likelihood.of_labels
    loss = _shared_loss(mean, variance, target) if shared else any_loss
    middle = MEAN_FIELD_FACTOR * median(variance, weight)

    def prior(s: float, a2: float) -> float:
        """Log-normal on s / sqrt(1 + pi/8 a^2 v), v at its median: s stays finite where nothing is misclassified."""
        return 0.5 * math.log(s / math.sqrt(1 + a2 * middle)) ** 2

    return Objective(loss, _RELATIVE_GRID / middle, 1.0, weight, mean, prior)


def with_scale(objective: Objective, scale: float) -> Objective:
    """With one scale of the logits, whatever the amplitude."""
    grid, loss = objective.grid[0] / _RELATIVE_GRID[0] * _WIDE_GRID, objective.loss
    return Objective(lambda _, a2: loss(scale, a2), grid, scale, objective.weight, objective.outputs)


def _with_noise(head: GaussianProcessHead, hidden: Tensor, target: Tensor, weight: Tensor | None) -> Objective:
    """The noise also enters the precision r I + G / noise: the eigenvectors of G give the variance for every noise."""
    values, vectors = torch.linalg.eigh(head.precision.data[0])
    parts = [(head(h).double(), (head.variance_phi(h).double() @ vectors).square()) for h in hidden.split(4096)]
    mean, squares = (torch.cat([p[i] for p in parts]) for i in (0, 1))
    values, ridge, likelihood = values.clamp_min(0), float(head.ridge), LIKELIHOODS[head.likelihood]
    error, ratio = target - mean, torch.ones_like(mean)
    if head.noise_shape is not None:
        error = head.noise_shape.whiten(error)  # its determinant is 1: the loss stays
        ratios = [log_ratio for h in hidden.split(4096) if (log_ratio := head.log_noise_ratio(h)) is not None]
        ratio = torch.cat(ratios).double().exp() if ratios else ratio

    def loss(noise: float, a2: float) -> Tensor:
        variance = squares @ (1 / (ridge + values / noise))
        return likelihood.predictive_loss(torch.zeros_like(error), a2 * variance, noise * ratio, error)

    objective = Objective(loss, _ABSOLUTE_GRID, 1.0, weight, mean)
    return dataclasses.replace(objective, start=max(float(objective.mean((error.square() / ratio).mean(1))), 1e-12))


def _shared_loss(mean: Tensor, variance: Tensor, target: Tensor) -> Callable[[float, float], Tensor]:
    """The mean-field log loss of classes that share a variance, (s, a^2) -> (N,).

    A row's logits then have a common factor g, and log sum_k exp(g d_k) - g d_y is its loss, d their distances from the
    largest. The distances do not change, and a few rows at a time stay in the processor's cache.
    """
    distance = mean - mean.amax(1, keepdim=True)
    of_target = distance.gather(1, target[:, None]).squeeze(1)
    rows = max(1, _CACHED // mean.shape[1])

    def loss(s: float, a2: float) -> Tensor:
        gain = s / torch.sqrt(1 + MEAN_FIELD_FACTOR * a2 * variance)
        total, some = torch.empty_like(gain), torch.empty_like(distance[:rows])
        for d, g, out in zip(distance.split(rows), gain[:, None].split(rows), total.split(rows), strict=True):
            torch.sum(torch.mul(d, g, out=some[: len(d)]).exp_(), 1, out=out)
        return total.log() - gain * of_target

    return loss


def _unit_posterior(head: GaussianProcessHead, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (N, K) and variance at amplitude 1, in float64."""
    parts = [head.posterior(h) for h in hidden.split(4096)]
    mean = torch.cat([m for m, _ in parts]).double()
    return mean, torch.cat([v for _, v in parts]).double() / head.amplitude**2


def _minimize(objective: Objective, a2: float, *, guess: float | None, step: float = _COARSE) -> float:
    """The nuisance parameter within 1000-fold of the start that minimises the objective; the better the guess, the
    fewer losses are computed."""

    def fn(log_t: float) -> float:
        return objective.total(math.exp(log_t), a2)

    center, reach = math.log(objective.start), _DECADES * math.log(10)
    low, high = center - reach, center + reach
    if guess is not None:
        found = minimize_near(fn, math.log(guess), step=step)
        if found is not None and low < found < high:
            return math.exp(found)
    if fn(low) == fn(center) == fn(high):  # the likelihood has nothing to calibrate beside the amplitude
        return objective.start
    return math.exp(brent(fn, low, center, high))


def median(values: Tensor, weight: Tensor | None = None) -> float:
    """The lower median; a value of weight w counts as w values."""
    if weight is None:
        return float(values.median())
    weight = weight.reshape(-1, *[1] * (values.dim() - 1)).expand_as(values).flatten()
    values, order = values.flatten().sort()
    total = weight[order].cumsum(0)
    return float(values[int((total >= total[-1] / 2).nonzero()[0])])


def signs_of_guessing(head: GaussianProcessHead, objective: Objective, losses: Tensor, target: Tensor) -> list[str]:
    """In what the losses (N,) are no better than those of a guess, or the classes no better than chance, at 5%."""
    likelihood, reasons = LIKELIHOODS[head.likelihood], []
    classes = likelihood.num_classes(head.out_features)
    if classes:
        guess, name = torch.full_like(losses, math.log(classes)), f"log {classes}, that of the uniform guess"
    else:
        guess, name = _constant_loss(likelihood, objective, target), "that of a constant"
    gain, loss, guessed = guess - losses, float(objective.mean(losses)), float(objective.mean(guess))
    if float(objective.mean(gain)) <= _ONE_IN_TWENTY * float(objective.standard_error(gain)):
        reasons.append(f"its log loss of {loss:.4g} cannot be told from {guessed:.4g} ({name})")
    if classes:
        chosen = objective.outputs.argmax(-1) if head.out_features > 1 else (objective.outputs[:, 0] > 0).long()
        right = (chosen == target).double()
        chance = math.sqrt((1 - 1 / classes) / classes / objective.count(right) * objective.group)
        if float(objective.mean(right)) <= 1 / classes + _ONE_IN_TWENTY * chance:
            reasons.append(f"its accuracy of {float(objective.mean(right)):.4g} cannot be told from chance")
    return reasons


def _constant_loss(likelihood: Likelihood, objective: Objective, target: Tensor) -> Tensor:
    """The losses (N,) of the best answer that does not look at its input."""
    mean = objective.mean(target.T.double())
    if likelihood.noisy:
        variance = objective.mean((target - mean).square().T).clamp_min(1e-300)
        return likelihood.predictive_loss(mean.expand_as(target), variance.expand_as(target), 0.0, target)
    assert likelihood.link is not None
    output = likelihood.link(mean).expand_as(target)
    return likelihood.predictive_loss(output, torch.zeros_like(output), 0.0, target)
