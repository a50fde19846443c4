"""Metrics of a `Prediction` against targets, and of scores in-domain against OOD.

accuracy    fraction of right classes
nll         mean -log p(y)
ece         expected calibration error: 15 equal bins on the top probability
auroc       P(score of an OOD example > score of an in-domain one)
"""

from collections.abc import Callable

import torch
from torch import Tensor

from afield.predictive import Prediction
from afield.registry import Registry

NUM_BINS = 15


def accuracy(prediction: Prediction, target: Tensor) -> float:
    return float((prediction.labels == target).double().mean())


def nll(prediction: Prediction, target: Tensor) -> float:
    assert prediction.probs is not None
    p = prediction.probs.double().gather(1, target[:, None])
    return float(-p.clamp_min(torch.finfo(torch.float32).tiny).log().mean())


def ece(prediction: Prediction, target: Tensor) -> float:
    confidence = prediction.confidence.double()
    right = (prediction.labels == target).double()
    # Bins (i / 15, (i + 1) / 15]: a confidence of exactly 1 counts, in the last one.
    bins = (confidence * NUM_BINS).ceil().long().clamp(1, NUM_BINS) - 1
    gap = torch.zeros(NUM_BINS, dtype=torch.float64).index_add_(0, bins.cpu(), (right - confidence).cpu())
    return float(gap.abs().sum() / confidence.numel())


METRICS: Registry[Callable[[Prediction, Tensor], float]] = Registry("metric", accuracy=accuracy, ece=ece, nll=nll)


def auroc(in_domain: Tensor, ood: Tensor) -> float:
    """P(OOD score > in-domain score), ties counted half: the Mann-Whitney statistic."""
    if not in_domain.numel() or not ood.numel():
        raise ValueError(f"auroc expects scores on both sides, got {in_domain.numel()} and {ood.numel()}.")
    reference = in_domain.detach().double().sort().values
    scores = ood.detach().double()
    below = torch.searchsorted(reference, scores, right=False)
    upto = torch.searchsorted(reference, scores, right=True)
    return float((below + upto).double().mean() / (2 * reference.numel()))
