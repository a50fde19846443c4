"""Conformal p-values: how many in-domain scores lie as far out as this one.

    p = (1 + #{reference >= score}) / (n + 1)

If the scores of a new row and of the n reference rows are exchangeable, P(p <= a) <= a for every a, on average over
draws of the reference.

By predicted class (Mondrian: Vovk, Gammerman and Shafer 2005) a row is compared with reference rows of its own class,
and the promise holds within every class. A class with fewer than 99 rows, which alpha = 0.01 needs, cannot have a
reference of its own: all such classes are one group, and if these have fewer than 99 rows together, the smallest other
class joins them. What is small is decided with the new row counted in its class. The groups then depend on the classes
of all n + 1 rows alike, so that the rows of one group are exchangeable, and p-values are exact within it.

With confidence 1 - delta over draws of the reference: p <= k / (n + 1) exactly where the score exceeds the k-th largest
of the reference, which a part of at most Beta(k, n + 1 - k) of all in-domain scores does. The largest k with
P(Beta(k, n + 1 - k) > alpha) = P(Bin(n, alpha) <= k - 1) <= delta is a matter of `binomial.rank`.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from afield.prediction.binomial import rank

if TYPE_CHECKING:
    from afield.prediction.prediction import Prediction

FEWEST_OF_A_CLASS = 99  # reference rows, for a p-value of 0.01


def conformal_p_value(scores: Tensor, reference: Tensor, draws: int = 1) -> tuple[Tensor, float]:
    """(1 + #{reference >= score}) / (n + 1) for sorted reference scores (n,), and its smallest value, 1 / (n + 1).

    draws  how many positions of each input are in the reference (`prediction.positions`); 1: rows are inputs
    """
    n = reference.numel()
    below = torch.searchsorted(reference, scores.detach().to(reference).contiguous())
    return (draws + n - below).to(scores.dtype) / (n + draws), draws / (n + draws)


def class_p_value(scores: Tensor, classes: Tensor, reference: Tensor, spans: Tensor) -> tuple[Tensor, Tensor]:
    """p-values (N,) by predicted class (N,), and how many reference rows (N,) each is compared with.

    `sort_reference` makes reference and spans. The binary search has no branches: it can be traced, and ONNX has it.
    """
    first, end = spans[classes].unbind(-1)
    low, high, key = first, end, scores.detach().to(reference.dtype)
    for _ in range(reference.numel().bit_length()):
        middle = (low + high) // 2
        # "not >=" and not "<": a score that is NaN lies beyond all others.
        beyond = (low < high) & ~(reference[middle.clamp_max(reference.numel() - 1)] >= key)
        low, high = torch.where(beyond, middle + 1, low), torch.where(beyond, high, middle)
    n = end - first
    return (1 + end - low).to(scores.dtype) / (n + 1).to(scores.dtype), n


def sort_reference(scores: Tensor, classes: Tensor | None, num_classes: int) -> tuple[Tensor, Tensor]:
    """Reference scores, sorted within every group of classes, and where the group of each class lies in them (K, 2).

    classes  (N,): the predicted ones; None: one group, and spans are empty
    """
    if classes is None:
        return scores.sort().values, torch.zeros(0, 2, dtype=torch.int64, device=scores.device)
    if not num_classes:
        raise ValueError("p-values by class need classes to predict, and this model predicts numbers.")
    if classes.shape != scores.shape:
        raise ValueError(f"Expected a class for each of {len(scores)} scores, got shape {tuple(classes.shape)}.")
    classes = classes.to(scores.device)
    counts = classes.bincount(minlength=num_classes).tolist()
    groups, group_of = _groups(counts)
    by_class = scores[classes.argsort(stable=True)].split(counts)
    parts = [torch.cat([by_class[k] for k in group]).sort().values for group in groups]
    ends = torch.tensor([len(part) for part in parts], device=scores.device).cumsum(0)
    spans = torch.stack([ends - ends.diff(prepend=ends.new_zeros(1)), ends], 1)
    return torch.cat(parts), spans[group_of]


def _groups(counts: list[int]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Groups of classes, and to which of them a new row of each class belongs."""
    enough = FEWEST_OF_A_CLASS + 1  # with the new row
    small = [k for k, n in enumerate(counts) if n < enough]
    large = sorted((n, k) for k, n in enumerate(counts) if n >= enough)
    total = sum(counts[k] for k in small)
    joining = [large[0][1]] if large and total + 1 < enough else []
    groups, group_of = [tuple(sorted([*small, *joining]))] if small else [], []
    for k, n in enumerate(counts):
        if n + 1 < enough:
            group_of.append(0)
            continue
        others, rows = (len(small) - 1, total - n) if n < enough else (len(small), total)
        rival = next((pair for pair in large[:2] if pair[1] != k), None)
        joins = others and rows < enough and (rival is None or (n + 1, k) < rival)
        group = tuple(sorted({*small, k})) if joins else (k,)
        known = bool(joins) and group == groups[0]
        groups += [] if known else [group]
        group_of.append(0 if known else len(groups) - 1)
    return groups, group_of


def predicted_class(prediction: "Prediction") -> Tensor:
    """The class (N,) by which p-values are taken, whatever the predictive: that of the largest shrunken logit."""
    shared = prediction.variance is None or prediction.variance.dim() == 1  # shrinkage then keeps the order
    logits = (prediction.logits if shared else prediction.adjusted_logits()).detach()
    return (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(-1)


def with_p_values(prediction: "Prediction", reference: Tensor, spans: Tensor, draws: int = 1) -> "Prediction":
    """The prediction with the p-values of its score; `spans` is empty where all classes have one reference."""
    n: int | Tensor | None
    if draws > 1:
        p_value, smallest = conformal_p_value(prediction.score(), reference, draws)
        return dataclasses.replace(prediction, p_value=p_value, smallest_p_value=smallest)
    if len(spans):
        p_value, n = class_p_value(prediction.score(), predicted_class(prediction), reference, spans)
    else:
        p_value, n = conformal_p_value(prediction.score(), reference)[0], reference.numel()
    smallest = 1 / (fewest_rows(reference, spans) + 1)
    return dataclasses.replace(prediction, p_value=p_value, smallest_p_value=smallest, num_reference=n)


def fewest_rows(reference: Tensor, spans: Tensor) -> int:
    """The number of rows in the smallest reference that a new row can be compared with."""
    return int((spans[:, 1] - spans[:, 0]).min()) if len(spans) else reference.numel()


@functools.lru_cache(maxsize=4096)
def largest_rank(n: int, alpha: float, delta: float) -> int:
    """The largest k of the module's docstring, for n reference rows; 0 where not even k = 1 will do."""
    smallest = rank(n, 1 - alpha, delta)
    return 0 if smallest is None else n + 1 - smallest
