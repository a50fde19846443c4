"""Predictions of many answers an input, one at each *position*: a pixel of an image, a token of a text.

Positions P = (H, W), (L,) and so on stand behind the batch: logits (N, K, *P), variance (N, *P), probs (N, C, *P),
score and p-value (N, *P). `to_rows` makes a plain prediction of it with every position a row, and all that reads rows
reads that; `at_positions` puts the answers back.

The positions of one input depend on each other, so a decision about inputs rests on one number an input,

    s = mean of the largest part q of the position scores of the input,        q = `LARGEST_PART`

compared with those of held-out inputs: inputs are exchangeable where positions are not. A part that is small finds
small foreign objects, a mean is steadier than a maximum.

p-values of positions have a reference of m positions drawn from each of n held-out inputs:

    p = (1 + 1/m #{reference >= score}) / (n + 1)

It counts inputs, not positions. With the m positions of a fresh input the n + 1 groups are exchangeable, and a position
drawn from the fresh group is as likely in each of them; so P(p <= a) <= a for a position drawn at random from a fresh
input, on average over inputs (hierarchical conformal prediction: Lee, Barber and Willett 2023). It promises nothing of
one input by itself: all pixels of an unusual image may be refused together.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from afield.prediction.prediction import Prediction

LARGEST_PART = 0.02
_OF_ROWS = (
    "logits",
    "variance",
    "probs",
    "members",
    "features",
    "p_value",
    "label_p_value",
    "joined",
    "fitted",
    "noise",
)
_OF_INPUTS = ("mask", "input_score", "input_p_value")


def to_rows(prediction: "Prediction") -> "Prediction":
    """The same with every position a row (N P, ...), the last position dimension fastest."""
    if not prediction.positions:
        return prediction
    count = len(prediction.positions)

    def flat(name: str, t: Tensor) -> Tensor:
        batch = 1 if name == "members" else 0  # dimension of the inputs
        if t.dim() == batch + 2 + count:
            t = t.movedim(batch + 1, -1)
        return t.flatten(batch, batch + count)

    rows: dict[str, Any] = {n: flat(n, t) for n in _OF_ROWS if isinstance(t := getattr(prediction, n), Tensor)}
    fields: dict[str, Any] = {**rows, **dict.fromkeys(_OF_INPUTS), "num_inputs": None}
    return dataclasses.replace(prediction, **fields)


def from_rows(rows: "Prediction", inputs: int, positions: tuple[int, ...], **fields: Any) -> "Prediction":
    """The inverse of `to_rows`; `fields` are those of inputs."""
    shape = (inputs, *positions)
    found = {n: t for n in _OF_ROWS if isinstance(t := getattr(rows, n), Tensor)}
    shaped: dict[str, Any] = {n: unflatten(t, shape, int(n == "members")) for n, t in found.items()}
    return dataclasses.replace(rows, **shaped, **fields)


def unflatten(values: Tensor, shape: tuple[int, ...], batch: int = 0) -> Tensor:
    """Values of rows (N P,) or (N P, K) as (N, *P) or (N, K, *P); `batch` is the dimension of the rows."""
    shaped = values.unflatten(batch, shape)
    return shaped if values.dim() == batch + 1 else shaped.movedim(-1, batch + 1)


def at_positions(prediction: "Prediction", function: Callable[["Prediction"], Tensor]) -> Tensor:
    """A function of rows, (N,) or (N, K), at every position."""
    values = function(to_rows(prediction))
    inputs = prediction.logits.shape[0]  # not len: of an export it is a constant
    return unflatten(values, (inputs, *prediction.positions)) if prediction.positions else values


def input_score(scores: Tensor, mask: Tensor | None = None, part: float = LARGEST_PART) -> Tensor:
    """Of position scores (N, *P), the mean (N,) of their largest part, of one position at least.

    mask  (N, *P): the positions that belong to the input; None: all
    """
    flat = scores.flatten(1)
    if mask is None:
        return flat.topk(max(1, math.ceil(part * flat.shape[1])), dim=1).values.mean(1)
    kept = mask.flatten(1)
    # Where the number of positions varies, the last one counts in part.
    count = (part * kept.sum(1, keepdim=True)).clamp_min(1.0).to(flat)
    lowest = torch.where(kept, flat, math.inf).amin(1, keepdim=True)
    ordered = torch.where(kept, flat, lowest).sort(1, descending=True).values
    share = (count - torch.arange(flat.shape[1], device=flat.device)).clamp(0, 1)
    return (ordered * share).sum(1) / count[:, 0]


def refuse_positions(prediction: "Prediction", what: str) -> "Prediction":
    """The prediction, unless it has positions: an error about what takes one answer an input."""
    if prediction.positions:
        raise ValueError(
            f"{what} takes predictions of one answer an input, got one with positions {prediction.positions}: pixels "
            "or tokens of one input are not exchangeable, and no promise would hold. Decide about inputs by "
            "accept_inputs(alpha) and input_score, or treat positions as rows, without a promise, by p.rows()."
        )
    return prediction
