"""Likelihoods: how targets come from the outputs of a network. Each is one value, and `LIKELIHOODS` is all of them.

With f (N, K) the outputs and y the targets:

    name          y               -log p(y | f), up to a constant    curvature (diagonal of its Hessian)
    categorical   classes (N,)    -log softmax(f)_y                  p_k (1 - p_k),  the Hessian is diag(p) - p p^T
    bernoulli     0 or 1 (N,)     log(1 + exp(-f)), f for 1          p (1 - p);  of several labels (N, K), their sum
    gaussian      numbers (N, K)  |y - f|^2 / 2                      1       (over the noise variance, as is the loss)
    poisson       counts (N, K)   exp(f) - y f                       exp(f)

What else depends on the likelihood follows from these values: the weights of the posterior (`gp.precision`), the solver
of the output weights (`model.output_weights`), calibration (`model.calibration`), what a `Prediction` says about the
target, and the score that it is evaluated by. A new likelihood is a new entry; the contract test runs over the table.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from afield.prediction.predictive import per_output, poisson_rate, shrink
from afield.registry import Registry


@dataclass(frozen=True)
class Outputs:
    """How many outputs a likelihood takes, in numbers and in words."""

    fewest: int
    most: float
    words: str


@dataclass(frozen=True)
class Likelihood:
    """How targets come from outputs.

    loss             (f, y) -> -log p(y | f) (N,), up to a constant of y; a gaussian's in units of its noise variance
    curvature        f -> the diagonal (N, K) of the Hessian of the loss
    hessian          f -> the function u -> H u, for u (N, K)
    predictive_loss  (m, v, noise, y) -> -log E[p(y | g)] (N,) for outputs g ~ N(m, v), as the default predictive has it;
                     noise is one variance for all, or (N, K)
    check_targets    (y, K) -> targets in the form above, or an error
    num_classes      K -> number of classes; 0 where targets are numbers
    outputs          how many there may be
    calibrated       the scalar of the head that calibration fits beside the amplitude; None: the amplitude alone
    noisy            targets are outputs plus Gaussian noise, whose variance the head estimates; the loss is quadratic
    mean             (m, v) -> expected target (N, K); None for classes
    variance         (m, v, noise) -> variance of the target (N, K); None for classes
    lowest_target    no target lies below
    link             mean target (K,) -> the outputs (K,) that stand for it; None: the classes' are not unique
    of_labels        several outputs are labels, each of which applies or not, whatever the others: K classifiers in one
    score            name of the score that says how far an input lies from the data: p-values rest on it
    doubt            name of the score that says how likely an answer is wrong: policies and the paper's tables read it
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    curvature: Callable[[Tensor], Tensor]
    hessian: Callable[[Tensor], Callable[[Tensor], Tensor]]
    predictive_loss: Callable[[Tensor, Tensor, float | Tensor, Tensor], Tensor]
    check_targets: Callable[[Tensor, int], Tensor]
    num_classes: Callable[[int], int]
    outputs: Outputs = Outputs(1, math.inf, "at least 1 output")
    calibrated: Literal["logit_scale", "noise"] | None = None
    noisy: bool = False
    mean: Callable[[Tensor, Tensor | None], Tensor] | None = None
    variance: Callable[[Tensor, Tensor, float | Tensor], Tensor] | None = None
    lowest_target: float = -math.inf
    link: Callable[[Tensor], Tensor] | None = None
    of_labels: bool = False
    score: str = "variance"
    doubt: str = "variance"

    @property
    def of_classes(self) -> bool:
        """Whether targets are classes, so that a prediction has probabilities."""
        return self.mean is None

    def has_labels(self, outputs: int) -> bool:
        """Whether so many outputs are labels."""
        return self.of_labels and outputs > 1

    def default_score(self, outputs: int) -> str:
        """The score on which p-values rest: that of classes means nothing for several labels."""
        return "variance" if self.has_labels(outputs) else self.score


# Losses and their derivatives


def _categorical_loss(f: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f, y, reduction="none")


def _bernoulli_loss(f: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(f, y.to(f).reshape(f.shape), reduction="none").sum(1)


def _gaussian_loss(f: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (f - y).square().sum(1)


def _poisson_loss(f: Tensor, y: Tensor) -> Tensor:
    return (f.exp() - y * f).sum(1)


def _categorical_curvature(f: Tensor) -> Tensor:
    p = F.softmax(f, dim=-1)
    return p * (1 - p)


def _bernoulli_curvature(f: Tensor) -> Tensor:
    return torch.sigmoid(f) * torch.sigmoid(-f)


def _categorical_hessian(f: Tensor) -> Callable[[Tensor], Tensor]:
    p = F.softmax(f, dim=-1)
    return lambda u: p * u - p * (p * u).sum(-1, keepdim=True)


def _diagonal(curvature: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Callable[[Tensor], Tensor]]:
    def hessian(f: Tensor) -> Callable[[Tensor], Tensor]:
        weights = curvature(f)
        return lambda u: weights * u

    return hessian


# Losses of predictions


def _mean_field(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, float | Tensor, Tensor], Tensor]:
    return lambda m, v, noise, y: loss(shrink(m, v), y)


def _gaussian_predictive(m: Tensor, v: Tensor, noise: float | Tensor, y: Tensor) -> Tensor:
    total = per_output(v, m) + noise
    return 0.5 * (torch.log(2 * math.pi * total) + (y - m).square() / total).sum(1)


def _poisson_predictive(m: Tensor, v: Tensor, noise: float | Tensor, y: Tensor) -> Tensor:
    """By Gauss-Hermite quadrature over the log rate."""
    nodes, weights = (torch.from_numpy(a).to(m) for a in np.polynomial.hermite_e.hermegauss(32))
    log_rate = m[..., None] + per_output(v, m).sqrt()[..., None] * nodes
    log_p = y[..., None] * log_rate - log_rate.exp() - torch.lgamma(y[..., None] + 1)
    return -torch.logsumexp(log_p + (weights / weights.sum()).log(), dim=-1).sum(1)


# What a prediction says about the target


def _poisson_mean(m: Tensor, v: Tensor | None) -> Tensor:
    if v is None:
        raise ValueError("a mean rate needs variance, which this poisson prediction lacks.")
    return poisson_rate(m, v)


def _poisson_variance(m: Tensor, v: Tensor, noise: float | Tensor) -> Tensor:
    """Of a Poisson with a log-normal rate: r + r^2 (e^v - 1), in logarithms, since r may vanish where e^v overflows."""
    v = per_output(v, m)
    root = m + v + torch.log(-torch.expm1(-v)) / 2  # of the second term
    return poisson_rate(m, v) + torch.exp(2 * root)


# Checks of targets


def _check_classes(num_classes: Callable[[int], int]) -> Callable[[Tensor, int], Tensor]:
    def check(y: Tensor, outputs: int) -> Tensor:
        classes = num_classes(outputs)
        y = y.reshape(-1) if y.dim() == 2 and y.shape[1] == 1 else y
        whole = y.long()
        if y.dim() != 1 or bool((whole != y).any()):
            where = f" (first: rows {_first_rows(whole != y)})" if y.dim() == 1 else ""
            raise ValueError(
                f"Class targets must be whole numbers of shape (N,), got {y.dtype} {tuple(y.shape)}{where}."
            )
        if whole.numel() and not (int(whole.min()) >= 0 and int(whole.max()) < classes):
            raise ValueError(
                f"The model has {classes} classes (0 to {classes - 1}), the targets run from {int(whole.min())} to "
                f"{int(whole.max())}. Is this the right output layer, or are labels numbered from 1?"
            )
        return whole

    return check


def _check_labels(y: Tensor, outputs: int) -> Tensor:
    """0 or 1: (N,) of one logit, (N, K) of several labels."""
    if outputs == 1:
        return _check_classes(lambda outputs: 2)(y, outputs)
    if y.dim() != 2 or y.shape[1] != outputs:
        raise ValueError(
            f"The model has {outputs} labels, each of which applies or not: targets must have shape (N, {outputs}), got "
            f'{tuple(y.shape)}. For classes, one of which applies, convert the network with likelihood="categorical".'
        )
    good = ((y == 0) | (y == 1)).all(1)
    if not bool(good.all()):
        raise ValueError(f"Labels must be 0 or 1, got others in rows {_first_rows(~good)}.")
    return y.long()


def _check_numbers(name: str, lowest: float = -math.inf) -> Callable[[Tensor, int], Tensor]:
    def check(y: Tensor, outputs: int) -> Tensor:
        y = y.reshape(y.shape[0], -1).double()
        if y.shape[1] != outputs:
            raise ValueError(f"The head has {outputs} outputs, the targets have {y.shape[1]} columns.")
        good = torch.isfinite(y) & (y >= lowest)
        if not bool(good.all()):
            raise ValueError(
                f"{name} targets must be finite{' and not negative' * (lowest == 0)}, "
                f"got others in rows {_first_rows(~good.all(1))}."
            )
        return y

    return check


def _first_rows(bad: Tensor) -> list[int]:
    return bad.nonzero().flatten().tolist()[:5]


UNDECIDED = "undecided"  # of a network with one output that is kept, until its targets show what it stands for


class _Likelihoods(Registry[Likelihood]):
    def check(self, name: str) -> str:
        if name == UNDECIDED:
            raise ValueError(
                "This network has one output, and nothing says what it stands for. Give afield.attach the likelihood: "
                '"bernoulli" for the logit of a class, "gaussian" for a number, "poisson" for the logarithm of a rate; '
                "or call afield.fit_posterior with batches (inputs, target) whose targets show it."
            )
        return super().check(name)


LIKELIHOODS: Registry[Likelihood] = _Likelihoods(
    "likelihood",
    categorical=Likelihood(
        loss=_categorical_loss,
        curvature=_categorical_curvature,
        hessian=_categorical_hessian,
        predictive_loss=_mean_field(_categorical_loss),
        check_targets=_check_classes(lambda outputs: outputs),
        num_classes=lambda outputs: outputs,
        outputs=Outputs(
            2, math.inf, 'at least 2 outputs; use likelihood="bernoulli" for one logit, "gaussian" for one number'
        ),
        calibrated="logit_scale",
        score="dempster_shafer",
        doubt="max_probability",
    ),
    bernoulli=Likelihood(
        loss=_bernoulli_loss,
        curvature=_bernoulli_curvature,
        hessian=_diagonal(_bernoulli_curvature),
        predictive_loss=_mean_field(_bernoulli_loss),
        check_targets=_check_labels,
        num_classes=lambda outputs: 2 if outputs == 1 else 0,
        calibrated="logit_scale",
        link=lambda mean: torch.logit(mean, eps=1e-6),
        of_labels=True,
        score="dempster_shafer",
        doubt="max_probability",
    ),
    gaussian=Likelihood(
        loss=_gaussian_loss,
        curvature=torch.ones_like,
        hessian=_diagonal(torch.ones_like),
        predictive_loss=_gaussian_predictive,
        check_targets=_check_numbers("gaussian"),
        num_classes=lambda outputs: 0,
        calibrated="noise",
        noisy=True,
        link=lambda mean: mean,
        mean=lambda m, v: m,
        variance=lambda m, v, noise: per_output(v, m) + noise,
    ),
    poisson=Likelihood(
        loss=_poisson_loss,
        curvature=torch.exp,
        hessian=_diagonal(torch.exp),
        predictive_loss=_poisson_predictive,
        check_targets=_check_numbers("poisson", lowest=0.0),
        num_classes=lambda outputs: 0,
        link=lambda mean: mean.clamp_min(1e-12).log(),
        mean=_poisson_mean,
        variance=_poisson_variance,
        lowest_target=0.0,
    ),
)


def likelihood_for(target: Tensor) -> Likelihood:
    """Of targets that come without a name: gaussian for real numbers, categorical for whole ones."""
    return LIKELIHOODS["gaussian" if target.is_floating_point() else "categorical"]


def shown_by(target: Tensor) -> str | None:
    """The likelihood of one output that its targets show; None where they leave it open.

    Zeros and ones are classes, fractions are numbers. Other whole numbers may be numbers, counts or classes.
    """
    if not target.numel() or target.dim() == 0 or target.numel() != target.shape[0]:
        return None
    if bool(((target == 0) | (target == 1)).all()):
        return "bernoulli"
    return "gaussian" if bool((target != target.round()).any()) else None
