"""Scores of a `Prediction`: how far an input lies from the training data. Higher is further.

max_probability       1 - max_k p_k
max_logit             -max_k m_k
entropy               -sum_k p_k log p_k
energy                -log sum_k exp(m_k)
dempster_shafer       K / (K + sum_k exp(z_k)),   z the mean-field logits, centred
variance              v, averaged over the classes where there is one per class
mutual_information    entropy of the mean of the members - mean entropy of the members
min_distance          min_k d_k, of a model whose logits are minus its distances d to prototypes (IsoMax+)

These are pure functions. Scores that see the training features first stand in `afield.distance_scores`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from afield.prediction.prediction import Prediction
from afield.registry import Registry

Score = Callable[[Prediction], Tensor]


def max_probability(prediction: Prediction) -> Tensor:
    probs = _need(prediction, "probs")
    # The sum of the others: 1 - max would have no digits left where the model is sure.
    return probs.scatter(-1, probs.argmax(-1, keepdim=True), 0.0).sum(-1)


def max_logit(prediction: Prediction) -> Tensor:
    return -_symmetric(prediction.logits).amax(-1)


def entropy(prediction: Prediction) -> Tensor:
    return _entropy(_need(prediction, "probs"))


def energy(prediction: Prediction) -> Tensor:
    return -torch.logsumexp(_symmetric(prediction.logits), dim=-1)


def dempster_shafer(prediction: Prediction) -> Tensor:
    logits = _symmetric(prediction.adjusted_logits())
    # Softmax leaves the common level of the logits free, and a network trained elsewhere may have any.
    evidence = torch.logsumexp(logits - logits.mean(-1, keepdim=True), dim=-1)
    return torch.sigmoid(math.log(logits.shape[-1]) - evidence)


def variance(prediction: Prediction) -> Tensor:
    v = _need(prediction, "variance")
    return v if v.dim() == 1 else v.mean(-1)


def mutual_information(prediction: Prediction) -> Tensor:
    members = _need(prediction, "members")
    return _entropy(members.mean(0)) - _entropy(members).mean(0)


def min_distance(prediction: Prediction) -> Tensor:
    if bool((prediction.logits > 0).any()):
        raise ValueError("min_distance needs logits that are minus distances, as isomax-plus has, got positive ones.")
    return max_logit(prediction)


SCORES: Registry[Score] = Registry(
    "score",
    max_probability=max_probability,
    max_logit=max_logit,
    entropy=entropy,
    energy=energy,
    dempster_shafer=dempster_shafer,
    variance=variance,
    mutual_information=mutual_information,
    min_distance=min_distance,
)


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(-1)


def _symmetric(logits: Tensor) -> Tensor:
    """One logit z as the two logits (-z / 2, z / 2), so that scores treat both classes alike."""
    return logits if logits.shape[-1] > 1 else torch.cat([-logits / 2, logits / 2], dim=-1)


def _need(prediction: Prediction, field: str) -> Tensor:
    value = getattr(prediction, field)
    if value is None:
        raise ValueError(f"This score needs {field}, which the prediction lacks. Use another score or method.")
    return value
