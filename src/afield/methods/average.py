"""Several predictions of the same inputs as one: what ensembles and dropout samples have in common.

    p(y | x) = 1/M sum_m p_m(y | x),       p_m after its own predictive: its own variance, scale and mean field

Logits and variances are averaged as well, so that scores made of them read the average member. How much the members
disagree is not in the variance: it is in `members`, for the mutual information.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from afield.predictive import Prediction


def average(predictions: Sequence[Prediction]) -> Prediction:
    """One prediction with `members` (M, N, C). Hidden vectors and p-values are left to the caller."""
    probs = _stacked([p.probs for p in predictions])
    if probs is None:
        raise ValueError(
            f"Averaging needs class probabilities, which {predictions[0].likelihood} predictions do not have."
        )
    return Prediction(
        torch.stack([p.logits for p in predictions]).mean(0),
        mean_of([p.variance for p in predictions]),
        probs.mean(0),
        probs,
        likelihood=predictions[0].likelihood,
    )


def mean_of(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The mean over the members, or None unless each has one."""
    stacked = _stacked(tensors)
    return None if stacked is None else stacked.mean(0)


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    there = [t for t in tensors if t is not None]
    return torch.stack(there) if len(there) == len(tensors) else None
