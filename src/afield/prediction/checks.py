"""Checks of features and class labels, shared by scores, metrics and policies."""

import torch
from torch import Tensor


def check_features(features: Tensor, num_features: int) -> Tensor:
    """Return the features if they have the shape (N, d) and are finite; raise an error otherwise."""
    if problem := features_problem(features, num_features):
        raise ValueError(problem)
    return features.detach()


def features_problem(features: Tensor, num_features: int) -> str | None:
    """What is wrong with features that should be finite and of shape (N, d); None if nothing is."""
    if features.dim() != 2 or features.shape[1] != num_features:
        return f"Expected features of shape (batch, {num_features}), got {tuple(features.shape)}."
    if not bool(torch.isfinite(features).all()):
        return "Features must be finite, got NaN or infinity."
    return None


def check_labels(target: Tensor, num_examples: int, num_classes: int) -> Tensor:
    """Return class indices (N,) from 0 to K - 1 as integers; raise an error if the target holds anything else."""
    target = target.reshape(-1) if target.dim() == 2 and target.shape[1] == 1 else target
    whole = target.long()
    if target.shape != (num_examples,) or bool((whole != target).any()):
        raise ValueError(
            f"Expected class targets, whole numbers of shape ({num_examples},), got {target.dtype} "
            f"{tuple(target.shape)}."
        )
    if num_examples and not (int(whole.min()) >= 0 and int(whole.max()) < num_classes):
        raise ValueError(
            f"There are {num_classes} classes (0 to {num_classes - 1}), the targets run from {int(whole.min())} to "
            f"{int(whole.max())}. Are labels numbered from 1?"
        )
    return whole
