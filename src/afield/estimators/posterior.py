"""The posterior and the calibration of a table's network, on weighted rows, at once or as a stream.

    H = r I + sum_i w_i c_i phi_i phi_i^T                 c_i the likelihood's curvature, w_i the weight of row i

A row of weight w counts as w rows; where whole rows are needed, a running total of weights is rounded, which leaves
whole numbers as they are. With weights of 1 this is `afield.fit_head` and `afield.fit_posterior`.

A classifier that was stopped where its held-out loss was least needs no other scale of its logits, and a few dozen
rows would only add noise to one: there the amplitude a has a^2 pi/8 v = 1 and the scale is sqrt(2), v the median
variance of held-out rows. The typical row stays as it was, further ones are shrunk. docs/scikit-learn.md has figures.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from afield.estimators.network import Rows, predict
from afield.gp.head import GaussianProcessHead
from afield.gp.precision import curvature_weights
from afield.model.calibration import calibrate
from afield.model.evaluating import evaluating
from afield.model.sngp_model import SNGP
from afield.prediction.predictive import MEAN_FIELD_FACTOR

FEWEST_HELD_OUT = 20  # of which `calibrate` can make something
_NEARLY_ALL = 1 - 1e-9  # all but one
_LEAST_NOISE = 1e-10  # of a target with variance 1
_MOST_STEPS = 200


def finish(model: SNGP, rows: Rows) -> None:
    """The posterior of the rows: `afield.fit_posterior`, with weights; for numbers `afield.fit_head` before it."""
    model.head.reset_posterior()
    cross = observe(model, rows)
    if model.head.likelihood == "gaussian":
        _fit_output(model.head, cross, rows)


def calibrated(model: SNGP, held: Rows, *, stopped: bool, seed: int) -> None:
    """Calibrate on held-out rows.

    `stopped`: these rows have chosen when to stop, so that keeping a third of them apart would make no p-value
    stricter; all of them then choose, and all are the reference.
    """
    head, batches = model.head, held.repeated().batches()
    if head.likelihood == "gaussian":
        if float(head.noise) > _LEAST_NOISE:  # otherwise targets are all alike
            calibrate(model, batches, fit_fraction=_NEARLY_ALL if stopped else 2 / 3, seed=seed, progress=False)
    else:
        head.set_scalars(amplitude=1.0)
        variance = predict(model, held.x).variance
        assert variance is not None
        amplitude = 1 / math.sqrt(MEAN_FIELD_FACTOR * float(variance.median()))
        if stopped:
            head.set_scalars(amplitude=amplitude, logit_scale=math.sqrt(2))
        else:
            calibrate(model, batches, amplitude=amplitude, seed=seed, progress=False)
    if stopped or not head.calibrated:
        head.set_reference(torch.cat([model.predict(x).score() for x, _ in batches]))


def learn_on(model: SNGP, rows: Rows, *, noise: float | None = None) -> None:
    """`learn`, and keep the reference of the p-values.

    For numbers this keeps their promise: at a fixed noise and amplitude more rows can only lower a variance, the score
    by which a new input is judged, while the reference scores stay; so no p-value falls. A classifier's score has no
    such order; there, more rows make it lower as a rule.
    """
    reference = model.head.reference
    learn(model, rows, noise=noise)
    model.head.set_reference(reference)


def observe(model: SNGP, rows: Rows) -> Tensor:
    """Add weighted rows to the posterior: `afield.posterior.update`, with weights. Returns Phi^T W y (D, K)."""
    head, cross = model.head, torch.zeros_like(model.head.weight.T)
    with evaluating(model):
        for part in rows.parts():
            h = model.hidden(part.x)
            phi, weight = head.features(h), part.weight[:, None]
            head.check_finite(h, phi)
            curvature = curvature_weights(
                head(h), likelihood=head.likelihood, covariance=head.covariance, curvature=head.curvature
            )
            head.precision.update(phi, curvature * weight)
            cross += phi.T @ (weight * _targets(part.y, head.out_features))
    return cross


@torch.no_grad()
def learn(model: SNGP, rows: Rows, *, noise: float | None = None) -> None:
    """Learn new rows with the hidden layers as they are and without the old rows; negative weights forget rows.

    gaussian     B = (G + s^2 r I)^-1 Phi^T W y over all rows, old and new, exactly: Phi^T W y of the old ones is
                 (G_old + s_old^2 r I) B_old, `noise` being the s_old^2 that B_old was solved with
    categorical  the old posterior is the prior: min over B of sum_new -log p + 1/2 tr (B - B_old)^T A (B - B_old),
                 A = r I + q G_old, q the mean curvature that the softmax has on the new rows
    """
    head = model.head
    identity = torch.eye(head.weight.shape[1], dtype=torch.float64)
    gram, ridge, old = head.precision.data[0].clone(), float(head.ridge), head.weight.T.clone()
    if head.likelihood == "gaussian":
        before = float(head.noise) if noise is None else noise
        cross = (gram + before * ridge * identity) @ old + observe(model, rows)
        head.weight.copy_(torch.linalg.solve(head.precision.data[0] + float(head.noise) * ridge * identity, cross).T)
        return
    observe(model, rows)
    with evaluating(model):
        phi = torch.cat([head.features(model.hidden(part.x)) for part in rows.parts()])
    target, weight, new = _targets(rows.y, head.out_features), rows.weight[:, None], old
    curvature = (1 - (phi @ old).softmax(1).square().sum(1)).mean() / (head.out_features - 1)
    prior = ridge * identity + curvature * gram
    # A softmax has curvature of at most 1/2: steps through this matrix go down, whatever the start.
    lower = torch.linalg.cholesky(prior + 0.5 * (head.precision.data[0] - gram))
    for _ in range(_MOST_STEPS):
        slope = phi.T @ (weight * ((phi @ new).softmax(1) - target)) + prior @ (new - old)
        step = torch.cholesky_solve(slope, lower)
        new = new - step
        if float(step.norm()) <= 1e-6 * (1 + float(new.norm())):
            break
    head.weight.copy_(new.T)


@torch.no_grad()
def _fit_output(head: GaussianProcessHead, cross: Tensor, rows: Rows) -> None:
    """Output weights and noise variance of weighted rows, from Phi^T W y and the precision: `afield.fit_head`."""
    values, vectors = torch.linalg.eigh(head.precision.data[0])
    values, turned = values.clamp_min(0)[:, None], vectors.T @ cross
    total, count = float((rows.weight[:, None] * rows.y.square()).sum()), float(rows.weight.sum())
    noise = float(head.noise)
    for _ in range(1000):
        denominator = values + float(head.ridge) * noise
        weights = turned / denominator
        squares = total - float((weights * (2 * turned - values * weights)).sum())
        free = max(count - float((values / denominator).sum()), 1.0)
        before, noise = noise, max(squares / head.out_features / free, _LEAST_NOISE)
        if abs(noise / before - 1) < 1e-12:
            break
    head.set_scalars(noise=noise)
    head.weight.copy_((vectors @ (turned / (values + float(head.ridge) * noise))).T)


def _targets(y: Tensor, outputs: int) -> Tensor:
    return y if y.is_floating_point() else F.one_hot(y, outputs).double()
