"""The score of a position from the region around it: a foreign object has neighbours, an edge has few.

    s(x) = sum_k p_k(x) sum_y w(y) p_k(y) u(y) / sum_y w(y) p_k(y),    y at most `WINDOW` // 2 from x in each direction
    w(y) = 1 inside a region, `EDGE` where a neighbour of y has another class, 0 at padding
    u    = -log sum_k exp(z_k),    z the mean-field logits of a position, centred

A network doubts at every edge between two objects, known ones too, which is why single positions find edges before they
find foreign objects. So x listens to positions that are probably of its class, and to edges hardly at all; what is thin
has nothing but edges, and is judged by them. The variance shrinks z towards zero, so it is a part of u.

Of an input as a whole:

    S = sum_x v(x) s(x) / sum_x v(x),    v(x) = `PRIOR` / |P|, and 1 more inside regions of all but its commonest class

The commonest class of an input is its background: how much of that there is should not count. docs/results.md has the
evidence.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW, EDGE, PRIOR = 7, 0.01, 5.0


def region_mean(values: Tensor, probs: Tensor, classes: Tensor, mask: Tensor | None = None) -> Tensor:
    """The means s (N, *P) of values u (N, *P), by probabilities (N, C, *P) and the predicted classes (N, *P).

    mask  (N, *P): the positions that are no padding; None: all
    """
    weight = torch.full_like(values, EDGE).masked_fill(is_inside(classes, mask), 1.0)
    if mask is not None:
        weight, values = weight * mask, values.masked_fill(~mask, 0.0)
    share = probs * weight[:, None]
    total, count = _window_sum(torch.cat([share * values[:, None], share], 1)).chunk(2, 1)
    return (probs * (total / count.clamp_min(torch.finfo(count.dtype).tiny))).sum(1)


def input_mean(scores: Tensor, classes: Tensor, num_classes: int, mask: Tensor | None = None) -> Tensor:
    """The scores S (N,) of inputs, of scores s (N, *P) of their positions and the predicted classes."""
    flat, counted = classes.flatten(1), torch.ones_like(scores) if mask is None else mask.to(scores)
    counted = counted.flatten(1)
    count = counted.new_zeros(flat.shape[0], num_classes).scatter_add(1, flat, counted)
    other = flat != count.argmax(1, keepdim=True)
    inside = is_inside(classes, mask).flatten(1)
    weight = counted * ((other & inside) + PRIOR / counted.sum(1, keepdim=True).clamp_min(1.0))
    values = scores.flatten(1) if mask is None else scores.flatten(1).masked_fill(~mask.flatten(1), 0.0)
    return (weight * values).sum(1) / weight.sum(1).clamp_min(torch.finfo(weight.dtype).tiny)


def is_inside(classes: Tensor, mask: Tensor | None = None) -> Tensor:
    """Whether (N, *P) all neighbours of a position have its class; padding has any."""
    inside = torch.ones_like(classes, dtype=torch.bool)
    for d in range(1, classes.dim()):
        (before, after), (known, next_known) = _pairs(classes, d), _pairs(inside, d)
        same = before == after
        if mask is not None:
            valid, next_valid = _pairs(mask, d)
            same = same | ~(valid & next_valid)
        border = torch.ones_like(inside.narrow(d, 0, 1))
        inside = inside & torch.cat([same & next_known, border], d) & torch.cat([border, same & known], d)
    return inside


def _pairs(t: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Every position but the last in one direction, and the one after it."""
    return t.narrow(d, 0, t.shape[d] - 1), t.narrow(d, 1, t.shape[d] - 1)


def _window_sum(t: Tensor) -> Tensor:
    """Of t (N, C, *P) over the window, with nothing beyond the border: one direction after the other."""
    for d in range(2, t.dim()):
        padding = [0, 0] * (t.dim() - d - 1) + [WINDOW // 2] * 2
        wide, size = F.pad(t, padding), t.shape[d]
        t = wide.narrow(d, 0, size).clone()
        for start in range(1, WINDOW):
            t.add_(wide.narrow(d, start, size))
    return t
