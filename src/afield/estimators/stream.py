"""Streams: a fitted model of a table learns new rows without the old ones, or forgets rows, hidden layers as they are.

gaussian     B = (G + s^2 r I)^-1 Phi^T W y over all rows, old and new, exactly: Phi^T W y of the old ones is
             (G_old + s_old^2 r I) B_old, s_old^2 the noise that B_old was solved with
categorical  the old posterior is the prior: min over B of sum_new -log p + 1/2 tr (B - B_old)^T A (B - B_old),
             A = max(r, 1) I + q G_old, q the mean curvature that the softmax has on the new rows. A smaller r is for
             distances; here it would let a few rows bend what the old ones say little about (docs/scikit-learn.md)
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from afield.estimators.rows import Rows
from afield.gp.likelihoods import LIKELIHOODS
from afield.model.evaluating import evaluating
from afield.model.fingerprint import Fingerprint
from afield.model.posterior import downdate, update
from afield.model.sngp_model import SNGP

_MOST_STEPS = 200
_LEAST_PRIOR = 1.0  # precision of a class's output weights


def learn_keeping_reference(model: SNGP, rows: Rows, *, noise: float | None = None) -> None:
    """`learn`, and keep the reference of the p-values.

    For numbers this keeps their promise: at a fixed noise and amplitude more rows can only lower a variance, the score
    by which a new input is scored, while the reference scores stay; so no p-value falls. A classifier's score has no
    such order; there, more rows make it lower as a rule.
    """
    reference, spans = model.head.reference, model.head.reference_spans
    learn(model, rows, noise=noise)
    model.head.keep_reference(reference, spans)


def learn(model: SNGP, rows: Rows, *, noise: float | None = None) -> None:
    """Learn new rows; `noise`: the noise variance that the output weights were solved with, if that has changed."""
    score = model.head.joined_score
    if score is None:
        _regress(model, rows, 1.0, noise)
    else:
        kept = score.state_dict()
        _classify(model, rows)
        score.load_state_dict(kept)  # any score will do that does not know its reference
    model.fingerprint = Fingerprint(model.net)  # the output weights are others, and the posterior is theirs


def forget(model: SNGP, rows: Rows) -> None:
    """Forget rows that were learnt, with their weights, exactly. For numbers only."""
    if not LIKELIHOODS[model.head.likelihood].noisy:
        raise ValueError("A classifier cannot forget rows: its output weights do not depend on them linearly.")
    _regress(model, rows, -1.0, None)
    model.fingerprint = Fingerprint(model.net)


@torch.no_grad()
def _regress(model: SNGP, rows: Rows, sign: float, noise: float | None) -> None:
    head = model.head
    identity = torch.eye(head.weight.shape[1], dtype=torch.float64)
    before, ridge = float(head.noise) if noise is None else noise, float(head.ridge)
    cross = (head.precision.data[0] + before * ridge * identity) @ head.weight.T
    cross += sign * (_features(model, rows).T @ (rows.weight[:, None] * rows.y))
    (update if sign > 0 else downdate)(model, rows.batches(), weights=rows.weight, progress=False)
    head.weight.copy_(torch.linalg.solve(head.precision.data[0] + float(head.noise) * ridge * identity, cross).T)


@torch.no_grad()
def _classify(model: SNGP, rows: Rows) -> None:
    head = model.head
    gram, old = head.precision.data[0].clone(), head.weight.T.clone()
    update(model, rows.batches(), weights=rows.weight, progress=False)
    phi, target, weight = _features(model, rows), F.one_hot(rows.y, head.out_features).double(), rows.weight[:, None]
    curvature = (1 - (phi @ old).softmax(1).square().sum(1)).mean() / (head.out_features - 1)
    prior = max(float(head.ridge), _LEAST_PRIOR) * torch.eye(len(gram), dtype=torch.float64) + curvature * gram
    # A softmax has curvature of at most 1/2: steps through this matrix go down, whatever the start.
    lower = torch.linalg.cholesky(prior + 0.5 * (head.precision.data[0] - gram))
    new = old
    for _ in range(_MOST_STEPS):
        slope = phi.T @ (weight * ((phi @ new).softmax(1) - target)) + prior @ (new - old)
        step = torch.cholesky_solve(slope, lower)
        new = new - step
        if float(step.norm()) <= 1e-6 * (1 + float(new.norm())):
            break
    head.weight.copy_(new.T)


def _features(model: SNGP, rows: Rows) -> Tensor:
    with evaluating(model):
        return torch.cat([model.head.features(model.hidden(part.x)) for part in rows.parts()])
