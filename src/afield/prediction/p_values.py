"""Conformal p-values: how many in-domain scores lie as far out as this one.

p = (1 + #{reference >= score}) / (n + 1)
"""

import torch
from torch import Tensor


def conformal_p_value(scores: Tensor, reference: Tensor) -> tuple[Tensor, float]:
    """(1 + #{reference >= score}) / (n + 1) for sorted reference scores (n,), and its smallest value, 1 / (n + 1).

    If the scores of a new example and of the reference are exchangeable, P(p <= a) <= a for every a.
    """
    n = reference.numel()
    below = torch.searchsorted(reference, scores.detach().to(reference).contiguous())
    return (1 + n - below).to(scores.dtype) / (n + 1), 1 / (n + 1)
