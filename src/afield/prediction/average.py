"""Several predictions of the same inputs as one: what ensembles and dropout samples have in common.

    p(y | x) = 1/M sum_m p_m(y | x),       p_m after its own predictive: its own variance, scale and mean field

For classes, logits, variances and joined scores are averaged as well, so that scores read the average member; how much
the members disagree is not in the variance, it is in `members`, for the mutual information. For real targets the
mixture has a variance of its own, the members' mean variance plus the variance of their means.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from afield.prediction.prediction import Prediction, likelihood_of


def average(predictions: Sequence[Prediction]) -> Prediction:
    """One prediction, with `members` (M, N, C) for classes. Hidden vectors and p-values are left to the caller."""
    likelihood = predictions[0].likelihood
    outputs = torch.stack([p.logits for p in predictions])
    variance = mean_of([p.variance for p in predictions])
    if likelihood_of(predictions[0]).noisy:
        between = outputs.var(0, correction=0)
        if variance is None:
            raise ValueError("Averaging gaussian predictions needs their variance.")
        within = variance[:, None] if variance.dim() == 1 else variance
        noise = sum(0.0 if p.noise is None else p.noise for p in predictions) / len(predictions)
        return Prediction(outputs.mean(0), between + within, noise=noise, likelihood=likelihood)
    probs = _stacked([p.probs for p in predictions])
    if probs is None:
        raise ValueError(f"Averaging expects class probabilities or gaussian targets, got {likelihood} predictions.")
    return Prediction(
        outputs.mean(0),
        variance,
        probs.mean(0),
        probs,
        joined=mean_of([p.joined for p in predictions]),
        fitted=mean_of([p.fitted for p in predictions]),
        likelihood=likelihood,
        default_score=predictions[0].default_score,
    )


def mean_of(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The mean over the members, or None unless each has one."""
    stacked = _stacked(tensors)
    return None if stacked is None else stacked.mean(0)


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    there = [t for t in tensors if t is not None]
    return torch.stack(there) if len(there) == len(tensors) else None
