"""The posterior and the calibration of a table's network, on weighted rows.

A classifier that was stopped where its held-out loss was least needs no other scale of its logits, and a few dozen
rows would only add noise to one: there the amplitude a has a^2 pi/8 v = c and the scale is sqrt(1 + c), v the median
variance of held-out rows. The typical row stays as it was, further ones are shrunk. c is 1, or the largest of a few
smaller ones that held-out rows cannot tell from the best of them: where most columns are noise, so is the variance of
rows that belong here. Numbers: docs/scikit-learn.md.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from afield.estimators.network import predict
from afield.estimators.noise import InputNoise, of_targets, without_itself
from afield.estimators.rows import Rows
from afield.estimators.scores import fit_score
from afield.estimators.trees import Trees, with_trees
from afield.gp.likelihoods import LIKELIHOODS
from afield.model.calibration import calibrate
from afield.model.evaluating import evaluating
from afield.model.fingerprint import Fingerprint
from afield.model.output_weights import fit_head
from afield.model.posterior import fit_posterior
from afield.model.sngp_model import SNGP
from afield.outputs.noise import Residuals
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import MEAN_FIELD_FACTOR, shrink

FEWEST_HELD_OUT = 20  # of which `calibrate` can make something
_NEARLY_ALL = 1 - 1e-9  # all but one
_LEVELS_A_DECADE = 8
_LEAST_LOG = math.log(1e-300)  # of a probability
_STRENGTHS = (1.0, 0.5, 0.25, 0.1, 0.03, 0.01)
LEAST_NOISE = 1e-10  # of a target with variance 1: below, targets are all alike


def finish(model: SNGP, rows: Rows, score: str | None = None) -> None:
    """The posterior of the rows and the score; for numbers the output weights and the noise before it."""
    if LIKELIHOODS[model.head.likelihood].noisy:
        fit_head(model, rows.batches(), weights=rows.weight, progress=False)
    fit_posterior(model, rows.batches(), weights=rows.weight, progress=False)
    fit_score(model, rows, score)


def settle_noise(model: SNGP, rows: Rows, held: Rows) -> None:
    """Raise the noise of numbers to where the loss on held-out rows is least.

    A network that was trained on these rows may pass through them, whatever noise they have. What it leaves of them
    then says nothing; nor do rows without themselves, whose targets the hidden layers know.
    """
    head = model.head
    least, ridge = float(head.noise), float(head.ridge)
    values, turn = torch.linalg.eigh(head.precision.data[0])
    cross = turn.T @ _cross(model)
    with evaluating(model):
        phi = torch.cat([head.features(model.hidden(part.x)) for part in held.parts()]) @ turn

    def loss(noise: float) -> float:
        error = held.y - phi @ (cross / (values + noise * ridge)[:, None])
        error = error if head.noise_shape is None else head.noise_shape.whiten(error)
        total = phi.square() @ (1 / (ridge + values / noise)) + noise
        return float(held.weight @ (error.square() / total[:, None] + total.log()[:, None]).sum(1))

    steps = math.ceil(_LEVELS_A_DECADE * max(0.0, -math.log10(least)))  # up to the variance of the targets
    raise_noise(model, rows, min(np.geomspace(least, max(least, 1.0), 1 + steps).tolist(), key=loss))


def raise_noise(model: SNGP, rows: Rows, noise: float) -> None:
    """Let the noise of numbers be at least this, and solve for the output weights anew."""
    head = model.head
    if noise <= float(head.noise):
        return
    cross, penalty = _cross(model), noise * float(head.ridge) * torch.eye(head.weight.shape[1], dtype=torch.float64)
    with evaluating(model):
        head.weight.copy_(torch.linalg.solve(head.precision.data[0] + penalty, cross).T)
        residuals = Residuals(head)
        for part in rows.parts():
            residuals.add(model.hidden(part.x), part.y, part.weight)
    residuals.set_noise()
    head.set_scalars(noise=noise)
    model.fingerprint = Fingerprint(model.net)


def _cross(model: SNGP) -> Tensor:
    """Phi^T W y (D, K), which the output weights were solved with."""
    head, gram = model.head, model.head.precision.data[0]
    return gram @ head.weight.detach().T + float(head.noise) * float(head.ridge) * head.weight.detach().T


def calibrate_on(model: SNGP, held: Rows, *, stopped: bool, seed: int, trees: Trees | None = None) -> None:
    """Calibrate on held-out rows; p-values compare with one row of each cluster, by the score that the model has.

    `stopped`: these rows have chosen when to stop, so that keeping a third of them apart would make no p-value
    stricter; all of them then choose, and all are the reference.
    """
    head, alone = model.head, held.merged().alone()
    name, constants = head.score, head.chosen_score.state_dict()
    own = None if constants else name
    comparable = len(alone) >= FEWEST_HELD_OUT
    rows = alone if comparable and not stopped else held
    batches = rows.batches()
    weights = rows.weight * max(1.0, len(rows) / float(rows.weight.sum()))  # they are worth at least their number
    if LIKELIHOODS[head.likelihood].noisy:
        if float(head.noise) > LEAST_NOISE:
            part = _NEARLY_ALL if stopped else 2 / 3
            calibrate(model, batches, weights=weights, fit_fraction=part, score=own, seed=seed, progress=False)
    else:
        head.set_scalars(amplitude=1.0)
        variance = predict(model, rows.x).variance
        assert variance is not None
        amplitude = 1 / math.sqrt(MEAN_FIELD_FACTOR * float(variance.median()))
        if stopped:
            strength = _strength(model, rows, amplitude, trees)
            head.set_scalars(amplitude=math.sqrt(strength) * amplitude, logit_scale=math.sqrt(1 + strength))
        else:
            calibrate(model, batches, weights=weights, amplitude=amplitude, score=own, seed=seed, progress=False)
    if constants:  # which depend on nothing that was chosen here: all rows can be the reference
        head.chosen_score.take(constants)
        head.set_score(name)
    if not comparable:
        head.forget_reference()
    elif stopped or constants or not head.calibrated:
        head.set_reference(torch.cat([model.predict(part.x).score(head.score) for part in alone.parts()]))


def _strength(model: SNGP, rows: Rows, amplitude: float, trees: Trees | None) -> float:
    """c: how much of the variance the probabilities of rows that belong here bear."""
    model.head.set_scalars(amplitude=amplitude, logit_scale=1.0)
    prediction, losses = with_trees(model, predict(model, rows.x), rows.x, trees), []
    assert prediction.variance is not None
    for strength in _STRENGTHS:
        logits = shrink(math.sqrt(1 + strength) * prediction.logits, strength * prediction.variance)
        log_p = logits.log_softmax(1).gather(1, rows.y[:, None])[:, 0]
        losses.append(-rows.weight * log_p.clamp_min(_LEAST_LOG))
    best = min(losses, key=lambda loss: float(loss.sum()))
    worse = [loss - best for loss in losses]
    allowed = [float(d.mean()) <= float(d.std()) / math.sqrt(len(d)) for d in worse]
    return _STRENGTHS[allowed.index(True)]


def answers_of(
    model: SNGP, rows: Rows, noise: InputNoise | None = None, trees: Trees | None = None
) -> tuple[Prediction, Tensor] | None:
    """What the model says about held-out rows as if they were not learnt, and their targets; None of too few rows.

    Of numbers these are learnt, and the prediction of each is that without itself.
    """
    if len(rows) < FEWEST_HELD_OUT:
        return None
    if LIKELIHOODS[model.head.likelihood].noisy:
        prediction = of_targets(model, without_itself(model, rows), noise)
    else:
        prediction = replace(predict(model, rows.x), features=None)
    return with_trees(model, prediction, rows.x, trees), rows.y
