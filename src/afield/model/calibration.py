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
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from afield.errors import NoBetterThanGuessing, NotFitted
from afield.gp.calibration_objective import (
    STANDARD_ERRORS,
    Objective,
    choose,
    objective_of,
    signs_of_guessing,
    with_scale,
)
from afield.gp.head import GaussianProcessHead
from afield.gp.head_state import check_range
from afield.gp.likelihoods import LIKELIHOODS
from afield.model.batches import Field, Inputs
from afield.model.evaluating import evaluating
from afield.model.hidden import Hidden, Sample, check_target
from afield.model.sngp_model import SNGP, for_each_head
from afield.model.targets import other_kind, warn_of_kind
from afield.outputs.labels import calibrate_labels
from afield.outputs.noise import balance_outputs
from afield.outputs.positions import CALIBRATED, IGNORED, JOINED, OBSERVED, input_scores, predict_positions
from afield.outputs.positions import default_score as default_at
from afield.outputs.positions import position_scores as scores_at
from afield.prediction.distance_scores import FITTED
from afield.prediction.fitted_score import Constants
from afield.prediction.labels import doubts
from afield.prediction.p_values import fewest_rows, predicted_class
from afield.prediction.prediction import Prediction
from afield.prediction.scores import symmetric

_ABOUT_TRAIN = (
    "train= goes with a score that is fitted to training data, and such a score needs it, got score={score!r}: use "
    "calibrate(model, held_out_loader, score='knn', train=train_loader), or another score without train."
)
JOINED_FRACTION, FIT_FRACTION = 1 / 2, 2 / 3
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


@for_each_head
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
    per_output: bool = False,
    fit_fraction: float | None = None,
    seed: int = 0,
    num_positions: int = CALIBRATED,
    ignore_index: int = IGNORED,
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
                  rest on, and that `Prediction.score` gives by default; None: joined for classes, region for those of
                  pixels, entropy for those of tokens, variance otherwise
    train         batches of training data, to which a score of FITTED is fitted
    per_class     compare a row with reference rows of the same predicted class, so that no class is refused more often
                  than promised, however rare it is. Classes with fewer than 99 such rows share a reference
    per_output    of several labels: a scale and an amplitude for each, besides those of all
    fit_fraction  the part of the data that chooses the parameters and fixes the score; the rest is the reference. None:
                  two thirds, of which the joined score takes a half of all
    seed          of the permutation that cuts the data
    num_positions how many positions of each input are looked at where the network answers at every pixel or token,
                  drawn by a hash of the input. Inputs as a whole are scored by all their positions, in a second pass
    ignore_index  the label of positions that are left out

    Warns where the calibrated model cannot be told from guessing. Under torch.distributed give every rank the same
    data: nothing is reduced here.

    returns  a `Calibration`: the scale, the amplitude, log losses before and after, how many rows did what
    raises   NotFitted before `afield.fit_posterior`; ValueError with fewer than 20 rows or without targets

    >>> found = afield.calibrate(model, held_out_loader)
    >>> found.num_reference, round(found.smallest_p_value, 4)
    (150, 0.0066)
    """
    _check_options(model.head, amplitude, logit_scale, score, train, per_class, per_output, fit_fraction)
    model.check_fresh("calibrate")
    with evaluating(model), model.head.revision(observes=False) as head:
        fields: dict[str, Any] = {"target": target, "inputs": inputs}
        sample = Sample(num_positions, ignore_index, exactly=True)
        examples = Hidden(model, loader, weights=weights, keep=False, progress=progress, sample=sample, **fields)
        held_out, reason = _read(examples, head, num_positions)
        warn_of_kind(reason)
        if per_class and examples.have_positions:
            raise ValueError(
                "per_class=True compares inputs of one class, and the positions of an input have many: leave it out."
            )
        likelihood = LIKELIHOODS[head.likelihood]
        default = JOINED if head.joined_score is not None else likelihood.default_score(head.out_features)
        at_positions = default == JOINED and examples.have_positions
        head.set_score(score or (default_at(examples.position_dims) if at_positions else default))
        head.set_label_scales(head.label_scales[:0])
        head.chosen_score.forget()
        if train is not None and score is not None:
            seen = Hidden(model, train, keep=False, progress=progress, sample=Sample(OBSERVED, ignore_index), **fields)
            head.chosen_score.take(_constants(head, score, seen))
        cut = _cut(head, held_out, fit_fraction, per_class, seed)
        fitted = _fit_scalars(head, held_out.of(cut.fit), amplitude, logit_scale, per_output)
        if head.joined_score is not None:
            head.joined_score.fit(sources_of(head, held_out.hidden[cut.score]))
        if examples.have_positions:
            _keep_maps(head, examples, [examples.keys[i] for i in cut.reference_inputs.tolist()])
        else:
            _keep_reference(head, held_out.hidden[cut.reference], per_class)
        _warn_of_guessing(head, fitted.objective, fitted.losses(head), held_out.y[cut.fit])
    smallest = fewest_rows(head.reference, head.reference_spans) // held_out.draws
    counts = (int(cut.fit.numel()) // held_out.draws, int(cut.reference_inputs.numel()), smallest)
    scalars = (float(head.logit_scale), fitted.amplitude, float(head.noise))
    return Calibration(*scalars, fitted.before, fitted.after, *counts)


def _check_options(
    head: GaussianProcessHead,
    amplitude: float | None,
    logit_scale: float | None,
    score: str | None,
    train: Iterable[Any] | None,
    per_class: bool,
    per_output: bool,
    fit_fraction: float | None,
) -> None:
    if not head.precision.fitted:
        raise NotFitted("The posterior is not fitted: call afield.fit_posterior(model, train_loader) before calibrate.")
    likelihood = LIKELIHOODS[head.likelihood]
    for name, value in (("amplitude", amplitude), ("logit_scale", logit_scale)):
        if value is not None:
            check_range(name, value)
    if logit_scale is not None and not likelihood.of_classes:
        raise ValueError(f"logit_scale is of classes, got a {head.likelihood} head: leave it out.")
    if fit_fraction is not None and not 0 < fit_fraction < 1:
        raise ValueError(f"fit_fraction must lie strictly between 0 and 1, got {fit_fraction}.")
    if per_class and not likelihood.num_classes(head.out_features):
        raise ValueError(f"per_class=True needs classes to predict, got a {head.likelihood} head: leave it out.")
    if per_output and not likelihood.has_labels(head.out_features):
        raise ValueError(
            f"per_output=True needs several labels, got a {head.likelihood} head with {head.out_features} outputs: "
            "leave it out. Outputs of a regression have their own noise in any case."
        )
    if (score in FITTED) != (train is not None):
        raise ValueError(_ABOUT_TRAIN.format(score=score))


@dataclass(frozen=True)
class _HeldOut:
    """Rows of held-out data; each input has as many as `draws`, one after the other."""

    hidden: Tensor
    y: Tensor
    weight: Tensor | None
    draws: int

    def of(self, rows: Tensor) -> "_HeldOut":
        return _HeldOut(self.hidden[rows], self.y[rows], None if self.weight is None else self.weight[rows], self.draws)


def _read(examples: Hidden, head: GaussianProcessHead, num_positions: int) -> tuple[_HeldOut, str | None]:
    """The rows, and what is odd about their targets."""
    batches = list(examples)
    if not batches:
        raise ValueError("calibrate got an empty loader: there is nothing to calibrate on.")
    if any(batch.target is None for batch in batches):
        raise examples.without_target("calibrate")
    hidden = torch.cat([batch.h for batch in batches])
    given = torch.cat([batch.target for batch in batches if batch.target is not None])
    y = check_target(given, head)
    of_examples = [batch.weight for batch in batches if batch.weight is not None]
    draws = num_positions if examples.have_positions else 1
    if (count := hidden.shape[0] // draws) < _FEWEST:
        raise ValueError(f"calibrate expects at least {_FEWEST} held-out examples, got {count}.")
    weight = None if examples.weights is None else torch.cat(of_examples)
    if weight is not None and not bool(weight.any()):
        raise ValueError("calibrate expects examples of some weight, got zeros alone.")
    return _HeldOut(hidden, y, weight, draws), other_kind(head, given)


@dataclass(frozen=True)
class _Cut:
    """Which rows do what: choose the parameters, fix the score, are the reference; and the inputs of the last."""

    fit: Tensor
    score: Tensor
    reference: Tensor
    reference_inputs: Tensor


def _cut(head: GaussianProcessHead, held_out: _HeldOut, fit_fraction: float | None, per_class: bool, seed: int) -> _Cut:
    count, device = len(held_out.hidden) // held_out.draws, held_out.hidden.device
    free = head.score == JOINED or head.chosen_score.fitted  # of the parameters
    fraction = fit_fraction or (JOINED_FRACTION if free else FIT_FRACTION)
    first, rest = (part.to(device) for part in cut_in_two(count, fraction, seed))
    # Parameters may decide the predicted class, by which the reference is then cut.
    of_parameters = fit_fraction or (fraction if per_class else FIT_FRACTION)
    fit = cut_in_two(count, of_parameters, seed)[0].to(device)
    if len(fit) < 2:
        raise ValueError(
            f"fit_fraction={of_parameters} leaves {len(fit)} of {count} examples to choose the parameters by, which "
            f"takes at least two: use {2 / count:.2g} or more."
        )
    fit, first, reference = (_rows_of(part, held_out.draws) for part in (fit, first, rest))
    return _Cut(fit, first, reference, rest)


@dataclass(frozen=True)
class _Fitted:
    objective: Objective
    amplitude: float
    before: float
    after: float

    def losses(self, head: GaussianProcessHead) -> Tensor:
        return self.objective.loss(_nuisance(head), self.amplitude**2)


def _nuisance(head: GaussianProcessHead) -> float:
    """What is fitted beside the amplitude."""
    return float(head.noise if LIKELIHOODS[head.likelihood].noisy else head.logit_scale)


def _fit_scalars(
    head: GaussianProcessHead, rows: _HeldOut, amplitude: float | None, logit_scale: float | None, per_output: bool
) -> _Fitted:
    """Choose amplitude, logit scale and noise by these rows, and give them to the head."""
    likelihood, data = LIKELIHOODS[head.likelihood], (rows.hidden, rows.y, rows.weight)
    balance_outputs(head, *data)
    objective = dataclasses.replace(objective_of(head, *data), group=rows.draws)
    if logit_scale is not None:
        objective = with_scale(objective, logit_scale)
    if amplitude is not None:
        objective = dataclasses.replace(objective, grid=np.array([amplitude**2]))
    before = float(objective.mean(objective.loss(_nuisance(head), float(head.amplitude) ** 2)))
    errors = STANDARD_ERRORS if logit_scale is None else 0.0
    nuisance, best, after = choose(objective, largest=likelihood.of_classes, standard_errors=errors)
    fitted = {} if likelihood.calibrated is None else {likelihood.calibrated: nuisance}
    head.set_scalars(amplitude=best, **fitted)
    if likelihood.noisy and _raise_noise(head, rows.hidden):
        after = float(objective.mean(objective.loss(float(head.noise), best**2)))
    if per_output:
        calibrate_labels(head, *data)
    return _Fitted(objective, best, before, after)


def _keep_reference(head: GaussianProcessHead, hidden: Tensor, per_class: bool) -> None:
    reference = Prediction.cat([head.predict(h) for h in hidden.split(4096)])
    head.set_reference(reference.score(head.score), predicted_class(reference) if per_class else None)
    if reference.has_labels:
        head.set_label_reference(doubts(reference))


def _rows_of(inputs: Tensor, draws: int) -> Tensor:
    """The rows of inputs that have so many each, one input after the other."""
    return (inputs[:, None] * draws + torch.arange(draws, device=inputs.device)).flatten()


def _keep_maps(head: GaussianProcessHead, examples: Hidden, keys: list[int]) -> None:
    """Take the reference from the inputs with these keys, in a pass over the same loader, in whatever order: scores of
    the positions that are drawn from each, and of the inputs as a whole."""
    missing, of_positions, of_inputs = Counter(keys), [], []
    for whole in examples.whole():
        wanted = []
        for i, key in enumerate(whole.keys):
            if missing[key]:
                missing[key] -= 1
                wanted.append(i)
        if wanted:
            mask = None if whole.mask is None else whole.mask[wanted]
            prediction = predict_positions(head, whole.h[wanted], mask)
            maps = scores_at(prediction, head)
            of_inputs.append(input_scores(maps, prediction, head.score))
            of_positions += [maps[place].flatten()[whole.drawn_of(i)] for place, i in enumerate(wanted)]
    if lost := missing.total():
        raise ValueError(
            f"calibrate reads the held-out data twice where inputs have positions, and {lost} of {len(keys)} "
            "inputs were not there the second time. Give a DataLoader or a list of batches, without random changes of "
            "the inputs."
        )
    head.set_reference(torch.cat(of_positions), draws=len(of_positions[0]))
    head.set_input_reference(torch.cat(of_inputs))


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

    With a smaller `fit_fraction` the second part has the rows that it has with a larger one, and more.

    returns  two tensors of row numbers, which together are all

    >>> [len(rows) for rows in cut_in_two(300)]
    [200, 100]
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    cut = min(count - 1, max(1, round(fit_fraction * count)))
    return order[:cut], order[cut:]


def _warn_of_guessing(head: GaussianProcessHead, objective: Objective, losses: Tensor, target: Tensor) -> None:
    if reasons := signs_of_guessing(head, objective, losses, target):
        warnings.warn(
            f"On {len(losses)} held-out examples the calibrated model is no better than guessing: "
            f"{', and '.join(reasons)}. Is the network trained, are these its classes or targets, and are inputs "
            "prepared as in training?",
            NoBetterThanGuessing,
            stacklevel=3,
        )


def _raise_noise(head: GaussianProcessHead, hidden: Tensor) -> bool:
    """A network is no better on new data than on the data it was fitted to: raise the noise where it says so."""
    variance = torch.cat([head.posterior(h)[1] for h in hidden.split(4096)]).mean()
    least = float(head.training_error) - float(variance)
    if least <= float(head.noise):
        return False
    head.set_scalars(noise=least)
    return True
