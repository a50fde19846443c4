"""Calibration on held-out data: logit scale and amplitude together, and p-values with a guarantee.

    p(y | x) = softmax(s f / sqrt(1 + pi/8 a^2 v))

Held-out in-domain data cannot see what the variance is for: its log loss is flat in the amplitude a, and minimising
it alone often drives a to zero. So every a on a grid gets its own best s, and of all amplitudes that the data cannot
tell from the best one (the log losses differ by less than one standard error) a classifier takes the *largest*:
its probabilities stay as good, and distance keeps its say. Regression and rates take the amplitude nearest to 1, the
prior's own, and regression fits the noise variance in place of s. A few held-out rows may be easy by chance, so the
noise is raised until the variance of the target is, on average, at least the mean squared error on the training data.

The held-out data is cut in two by a fixed permutation. One part fixes the score; the scores of the other are the
reference for p-values. A score chosen by looking at its own reference would void the guarantee. Parameters come from
the first two thirds. The joined score of a classifier depends on none of them, and is fixed by the first half: p-values
then compare with a half of the data, other scores' with a third.
"""

import dataclasses
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from afield.errors import NoBetterThanGuessing, NotFitted
from afield.gp.calibration_objective import STANDARD_ERRORS, Objective, choose, objective_of, with_scale
from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS, Likelihood
from afield.model.batches import Field, Inputs
from afield.model.evaluating import evaluating
from afield.model.hidden import Hidden, check_target
from afield.model.sngp_model import SNGP
from afield.model.targets import other_kind, warn_of_kind
from afield.prediction.distance_scores import FITTED
from afield.prediction.fitted_score import Constants
from afield.prediction.p_values import fewest_rows, predicted_class
from afield.prediction.prediction import Prediction
from afield.prediction.scores import symmetric

JOINED = "joined"
_ABOUT_TRAIN = (
    "train= goes with a score that is fitted to training data, and such a score needs it, got score={score!r}: use "
    "calibrate(model, held_out_loader, score='knn', train=train_loader), or another score without train."
)
JOINED_FRACTION, FIT_FRACTION = 1 / 2, 2 / 3
_ONE_IN_TWENTY = 1.645  # standard errors by which a mean exceeds another by chance
_FEWEST = 20


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
    smallest_reference: int  # of the classes; all rows where p-values do not go by class

    @property
    def smallest_p_value(self) -> float:
        """The smallest p-value that every row can have, hence the smallest useful alpha."""
        return 1 / (self.smallest_reference + 1)


def calibrate(
    model: SNGP,
    loader: Iterable[Any],
    *,
    target: Field | None = None,
    inputs: Inputs = None,
    weights: Tensor | None = None,
    amplitude: float | None = None,
    logit_scale: float | None = None,
    score: str | None = None,
    train: Iterable[Any] | None = None,
    per_class: bool = False,
    fit_fraction: float | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Calibration:
    """Fit logit scale and amplitude (regression: noise and amplitude) and keep reference scores for p-values.

    loader        batches (inputs, target) of in-domain data that the network has not seen. On its own training data
                  a network is overconfident, and calibration would believe it
    target        index or key of the target in a batch, and
    inputs        of the input or a list of them, where a batch has more fields than those two
    weights       (N,) of the examples, in the order of the loader: in the loss, one of weight w counts as w examples;
                  p-values compare with examples, each of which counts once
    amplitude     a positive number to keep, instead of the fitted one
    logit_scale   the same of a classifier's logits. The log loss then sees the amplitude, which does the work of a
                  temperature, and the best one is taken: with 1 this is the paper's calibration
    score         name of the score in `afield.scores.SCORES` or `afield.distance_scores.FITTED` that p-values shall
                  rest on, and that `Prediction.score` gives by default; None: joined for classes, variance otherwise
    train         batches of training data, to which a score of FITTED is fitted
    per_class     compare a row with reference rows of the same predicted class, so that no class is refused more often
                  than promised, however rare it is. Classes with fewer than 99 such rows share a reference
    fit_fraction  the part of the data that chooses the parameters and fixes the score; the rest is the reference. None:
                  two thirds, of which the joined score takes a half of all
    seed          of the permutation that cuts the data

    Warns where the calibrated model cannot be told from guessing. Under torch.distributed give every rank the same
    data: nothing is reduced here.

    returns  a `Calibration`: the scale, the amplitude, log losses before and after, how many rows did what
    raises   NotFitted before `afield.fit_posterior`; ValueError with fewer than 20 rows or without targets

    >>> found = afield.calibrate(model, held_out_loader)
    >>> found.num_reference, round(found.smallest_p_value, 4)
    (150, 0.0066)
    """
    head = model.head
    if not head.precision.fitted:
        raise NotFitted("The posterior is not fitted: call afield.fit_posterior(model, train_loader) before calibrate.")
    for name, value in (("amplitude", amplitude), ("logit_scale", logit_scale)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}.")
    if logit_scale is not None and not LIKELIHOODS[head.likelihood].of_classes:
        raise ValueError(f"logit_scale is of classes, got a {head.likelihood} head: leave it out.")
    if fit_fraction is not None and not 0 < fit_fraction < 1:
        raise ValueError(f"fit_fraction must lie strictly between 0 and 1, got {fit_fraction}.")
    if per_class and not LIKELIHOODS[head.likelihood].of_classes:
        raise ValueError(f"per_class=True needs classes to predict, got a {head.likelihood} head: leave it out.")
    if (score in FITTED) != (train is not None):
        raise ValueError(_ABOUT_TRAIN.format(score=score))
    model.check_fresh("calibrate")
    with evaluating(model), model.head.revision(observes=False) as head:
        fields: dict[str, Any] = {"target": target, "inputs": inputs}
        examples = Hidden(model, loader, weights=weights, keep=False, progress=progress, **fields)
        batches = list(examples)
        if not batches:
            raise ValueError("calibrate got an empty loader: there is nothing to calibrate on.")
        if any(batch.target is None for batch in batches):
            raise examples.without_target("calibrate")
        hidden = torch.cat([batch.h for batch in batches])
        given = torch.cat([batch.target for batch in batches if batch.target is not None])
        y = check_target(given, head)
        warn_of_kind(other_kind(head, given))
        weight = None if examples.weights is None else examples.weights.to(hidden.device)
        if hidden.shape[0] < _FEWEST:
            raise ValueError(f"calibrate expects at least {_FEWEST} held-out examples, got {hidden.shape[0]}.")
        likelihood = LIKELIHOODS[head.likelihood]
        head.set_score(score or (JOINED if head.joined_score is not None else likelihood.score))
        head.chosen_score.forget()
        if train is not None and score is not None:
            seen = Hidden(model, train, keep=False, progress=progress, **fields)
            head.chosen_score.take(_constants(head, score, seen))
        free = head.score == JOINED or head.chosen_score.fitted  # of the parameters
        fraction = fit_fraction or (JOINED_FRACTION if free else FIT_FRACTION)
        first, rest = (part.to(hidden.device) for part in cut_in_two(hidden.shape[0], fraction, seed))
        # Parameters may decide the predicted class, by which the reference is then cut.
        of_parameters = fit_fraction or (fraction if per_class else FIT_FRACTION)
        fit = cut_in_two(hidden.shape[0], of_parameters, seed)[0].to(hidden.device)
        objective = objective_of(head, hidden[fit], y[fit], None if weight is None else weight[fit])
        if logit_scale is not None:
            objective = with_scale(objective, logit_scale)
        if amplitude is not None:
            objective = dataclasses.replace(objective, grid=np.array([amplitude**2]))
        current = float(head.noise if likelihood.noisy else head.logit_scale)
        before = float(objective.mean(objective.loss(current, float(head.amplitude) ** 2)))
        errors = STANDARD_ERRORS if logit_scale is None else 0.0
        nuisance, amplitude, after = choose(objective, largest=likelihood.of_classes, standard_errors=errors)
        fitted = {} if likelihood.calibrated is None else {likelihood.calibrated: nuisance}
        head.set_scalars(amplitude=amplitude, **fitted)
        if likelihood.noisy and _raise_noise(head, hidden[fit]):
            after = float(objective.mean(objective.loss(float(head.noise), amplitude**2)))
        if head.joined_score is not None:
            head.joined_score.fit(sources_of(head, hidden[first]))
        reference = Prediction.cat([head.predict(h) for h in hidden[rest].split(4096)])
        head.set_reference(reference.score(head.score), predicted_class(reference) if per_class else None)
        nuisance = float(head.noise if likelihood.noisy else head.logit_scale)
        _warn_of_guessing(head, objective, objective.loss(nuisance, amplitude**2), y[fit])
    smallest = fewest_rows(head.reference, head.reference_spans)
    counts = (int(fit.numel()), int(rest.numel()), smallest)
    return Calibration(float(head.logit_scale), amplitude, float(head.noise), before, after, *counts)


def sources_of(head: GaussianProcessHead, hidden: Tensor) -> Tensor:
    """What the joined score is made of (N, 3)."""
    return torch.cat([head.sources(*head.posterior(h), h) for h in hidden.split(4096)])


def _constants(head: GaussianProcessHead, name: str, examples: Hidden) -> Constants:
    """Of a score of this name, fitted to training examples."""
    likelihood = LIKELIHOODS[head.likelihood]
    layer = head.mean if isinstance(head.mean, nn.Linear) else None
    num_classes = likelihood.num_classes(head.out_features)
    score = FITTED[name](head.in_features, num_classes or 1, output=layer, device=head.ridge.device)
    if score.needs and not num_classes:
        raise ValueError(f"The score {name} needs classes, got a {head.likelihood} head: use score='knn'.")
    for h, target, _ in examples:
        if "target" in score.needs and target is None:
            raise examples.without_target(f"The score {name}")
        classes = None if target is None or not num_classes else check_target(target, head)
        score.update(h, classes, symmetric(head(h)))
    return score.constants


def cut_in_two(count: int, fit_fraction: float = FIT_FRACTION, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of the held-out data that choose the parameters, and rows whose scores are the reference for p-values.

    With a smaller fraction the second part has the rows that it has with a larger one, and more.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    cut = min(count - 1, max(1, round(fit_fraction * count)))
    return order[:cut], order[cut:]


def _warn_of_guessing(head: GaussianProcessHead, objective: Objective, losses: Tensor, target: Tensor) -> None:
    """Warn where the losses (N,) are no better than those of a guess, or the classes no better than chance, at 5%."""
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
        chance = math.sqrt((1 - 1 / classes) / classes / objective.count(right))
        if float(objective.mean(right)) <= 1 / classes + _ONE_IN_TWENTY * chance:
            reasons.append(f"its accuracy of {float(objective.mean(right)):.4g} cannot be told from chance")
    if reasons:
        warnings.warn(
            f"On {len(losses)} held-out examples the calibrated model is no better than guessing: "
            f"{', and '.join(reasons)}. Is the network trained, are these its classes or targets, and are inputs "
            "prepared as in training?",
            NoBetterThanGuessing,
            stacklevel=3,
        )


def _constant_loss(likelihood: Likelihood, objective: Objective, target: Tensor) -> Tensor:
    """The losses (N,) of the best answer that does not look at its input."""
    mean = objective.mean(target.T)
    if likelihood.noisy:
        variance = objective.mean((target - mean).square().T).clamp_min(1e-300)
        return likelihood.predictive_loss(mean.expand_as(target), variance.expand_as(target), 0.0, target)
    rate = mean.clamp_min(1e-12).log().expand_as(target)
    return likelihood.predictive_loss(rate, torch.zeros_like(rate), 0.0, target)


def _raise_noise(head: GaussianProcessHead, hidden: Tensor) -> bool:
    """A network is no better on new data than on the data it was fitted to: raise the noise where it says so."""
    variance = torch.cat([head.posterior(h)[1] for h in hidden.split(4096)]).mean()
    least = float(head.training_error) - float(variance)
    if least <= float(head.noise):
        return False
    head.set_scalars(noise=least)
    return True
