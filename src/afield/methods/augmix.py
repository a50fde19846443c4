"""AugMix: training images mixed with chains of simple operations on them (Hendrycks et al. 2020).

    x' = m x + (1 - m) sum_i w_i chain_i(x),        w ~ Dirichlet(a, ..., a) over `width` chains,  m ~ Beta(a, a)

A chain is one to three operations drawn with replacement; none of them is among the test corruptions of CIFAR-10-C.
Without the consistency loss, as in the paper: "we do not notice further significant improvements".

Operations are those of AugMix's code, which is Pillow's, at a level drawn from [0.1, severity] of 10. Two differences:
results keep fractions of a byte, where Pillow rounds after every operation, and sizes follow the image, where the code
has 32 written in. On 8 x 8 images equalize never acts (Pillow's needs 256 pixels) and translate only from severity 4.

All chains of a batch advance together, and random numbers come from torch's global CPU generator.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from afield.methods.method import Method, Model

LONGEST = 3
_LOWEST_LEVEL = 0.1
_HIGHEST_LEVEL = 10


def augmix(
    method: Method[Model], *, width: int = 3, alpha: float = 1.0, severity: float = 3, depth: int | None = None
) -> Method[Model]:
    """The method, trained on mixed images; batches are (images, ...) with images (N, C, H, W) in [0, 1].

    width     chains for an image
    alpha     of the Dirichlet and the Beta distribution; large values mix evenly
    severity  0 to 10; at 0 nothing moves, but posterize, autocontrast and equalize, which have no zero, still act
    depth     operations in a chain; None: one to three at random
    """
    for name, value in (("width", width), ("depth", depth)):
        if value is not None and (value < 1 or value != int(value)):
            raise ValueError(f"augmix expects {name} to be a whole number of at least 1, got {value}.")
    if not alpha > 0:
        raise ValueError(f"augmix expects alpha to be positive, got {alpha}.")
    if not 0 <= severity <= _HIGHEST_LEVEL:
        raise ValueError(f"augmix expects a severity from 0 to {_HIGHEST_LEVEL}, got {severity}.")

    def transform(batch: Any) -> Any:
        batch = method.transform(batch)
        if not isinstance(batch, tuple | list):
            raise ValueError(f"augmix expects a batch (images, labels), got {type(batch).__name__}.")
        x, *rest = batch
        _check(x)
        with torch.no_grad():
            mixed = mix(x, chains(x.repeat(width, 1, 1, 1), severity, depth), mixing_weights(len(x), width, alpha))
        return (mixed, *rest)

    return dataclasses.replace(method, transform=transform, trained_as=None)


def mix(x: Tensor, chained: Tensor, weights: Tensor) -> Tensor:
    """Images (N, C, H, W) and their chains (width * N, C, H, W), weighted by (N, 1 + width)."""
    own, *others = weights.T.to(x)[:, :, None, None, None]
    mixed = x * own
    for chain, weight in zip(chained.split(len(x)), others, strict=True):
        mixed.addcmul_(chain, weight)
    return mixed.clamp_(0, 1)  # a convex combination, but for rounding


def mixing_weights(count: int, width: int, alpha: float) -> Tensor:
    """Weights (count, 1 + width) of the image, m, and of its chains, (1 - m) w."""
    m = torch.distributions.Beta(alpha, alpha).sample((count, 1))
    return torch.cat([m, (1 - m) * torch.distributions.Dirichlet(torch.full((width,), alpha)).sample((count,))], dim=1)


def chains(x: Tensor, severity: float, depth: int | None = None) -> Tensor:
    """Every image (M, C, H, W) through a chain of its own; changes x in place."""
    count = len(x)
    lengths = torch.randint(1, LONGEST + 1, (count,)) if depth is None else torch.full((count,), depth)
    for step in range(LONGEST if depth is None else depth):
        choice = torch.randint(len(OPERATIONS), (count,)).where(lengths > step, -1)
        lowest = min(_LOWEST_LEVEL, severity)
        level = lowest + (severity - lowest) * torch.rand(count, dtype=torch.float64)
        level = torch.where(torch.rand(count) < 0.5, level, -level)
        for index, operation in enumerate(OPERATIONS.values()):
            rows = (choice == index).nonzero()[:, 0]
            if len(rows):
                on_device = rows.to(x.device)
                x[on_device] = operation(x[on_device], level[rows].to(x.device))
    return x


def autocontrast(x: Tensor, level: Tensor) -> Tensor:
    """Each channel stretched to [0, 1]; a constant one stays."""
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return torch.where(high > low, (x - low) / (high - low).clamp_min(1e-12), x)


def equalize(x: Tensor, level: Tensor) -> Tensor:
    """Each channel's values by their rank, with Pillow's whole-number arithmetic."""
    values = _bytes(x).flatten(2)
    counts = torch.zeros(*values.shape[:2], 256, dtype=torch.int64, device=x.device)
    counts.scatter_add_(2, values, torch.ones_like(values))
    step = (values.shape[2] - counts.gather(2, values.amax(2, keepdim=True))) // 255
    table = (((counts.cumsum(2) - counts) + step // 2) // step.clamp_min(1)).clamp_max(255)
    ranked = table.gather(2, values).to(x) / 255
    return torch.where(step > 0, ranked, x.flatten(2)).view_as(x)


def posterize(x: Tensor, level: Tensor) -> Tensor:
    """The 4 - level 4/10 highest bits, one at least."""
    dropped = (4 + _whole(level.abs(), 4)).clamp_max(7)
    return ((_bytes(x) >> _column(dropped)) << _column(dropped)).to(x) / 255


def solarize(x: Tensor, level: Tensor) -> Tensor:
    """Values from 256 - level 256/10 on are inverted."""
    return torch.where(_bytes(x) < _column(256 - _whole(level.abs(), 256)), x, 1 - x)


def rotate(x: Tensor, level: Tensor) -> Tensor:
    """Around the centre, by level 30/10 degrees."""
    angle = torch.deg2rad(_whole(level, 30).double())
    cos, sin = angle.cos(), angle.sin()
    center_x, center_y = x.shape[3] / 2, x.shape[2] / 2
    offsets = (center_x - cos * center_x + sin * center_y, center_y - sin * center_x - cos * center_y)
    return affine(x, (cos, -sin, offsets[0]), (sin, cos, offsets[1]))


def shear_x(x: Tensor, level: Tensor) -> Tensor:
    """Rows move by 0.3 level/10 of their distance from the top."""
    return affine(x, (1, level * 0.3 / _HIGHEST_LEVEL, 0), (0, 1, 0))


def shear_y(x: Tensor, level: Tensor) -> Tensor:
    """Columns move by 0.3 level/10 of their distance from the left."""
    return affine(x, (1, 0, 0), (level * 0.3 / _HIGHEST_LEVEL, 1, 0))


def translate_x(x: Tensor, level: Tensor) -> Tensor:
    """By level/10 of a third of the width, in whole pixels."""
    return affine(x, (1, 0, _whole(level, x.shape[3] / 3)), (0, 1, 0))


def translate_y(x: Tensor, level: Tensor) -> Tensor:
    """By level/10 of a third of the height, in whole pixels."""
    return affine(x, (1, 0, 0), (0, 1, _whole(level, x.shape[2] / 3)))


Row = tuple[Tensor | float, Tensor | float, Tensor | float]


def affine(x: Tensor, row_x: Row, row_y: Row) -> Tensor:
    """out(u, v) = in(a u + b v + c, d u + e v + f), bilinear, for coefficients that are numbers or tensors (M,).

    Coordinates count from the image's corner, so that centres of pixels lie at halves. Black beyond the edge.
    """
    height, width = x.shape[2:]
    v, u = (torch.arange(size, dtype=torch.float64, device=x.device) + 0.5 for size in (height, width))
    # In double precision: a pixel on the edge must not fall to the wrong side of it.
    at_x, at_y = (
        (_column(a) * u + _column(b) * v[:, None] + _column(c)).expand(len(x), 1, height, width)[:, 0]
        for a, b, c in (row_x, row_y)
    )
    outside = (at_x < 0) | (at_x >= width) | (at_y < 0) | (at_y >= height)
    grid = torch.stack([2 * at_x / width - 1, 2 * at_y / height - 1], dim=-1).to(x)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False).masked_fill_(outside[:, None], 0)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    operation.__name__: operation
    for operation in (
        autocontrast,
        equalize,
        posterize,
        rotate,
        solarize,
        shear_x,
        shear_y,
        translate_x,
        translate_y,
    )
}
"""Images (M, C, H, W) in [0, 1] and levels (M,) from -10 to 10 -> images; the sign is a direction, if there is one."""


def _check(x: Any) -> None:
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
        got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"augmix expects images, floating-point numbers of shape (N, C, H, W), got {got}.")
    low, high = x.aminmax() if x.numel() else (0, 1)
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"augmix expects pixels in [0, 1], got {float(low):g} to {float(high):g}: normalise inside the network."
        )


def _whole(level: Tensor, highest: float) -> Tensor:
    """A level of 10 as a whole number up to `highest`, cut towards zero."""
    return (level * highest / _HIGHEST_LEVEL).trunc().long()


def _bytes(x: Tensor) -> Tensor:
    return (x * 255).round().long()


def _column(value: Tensor | float) -> Tensor | float:
    """A number for each image, to be broadcast over (M, C, H, W)."""
    return value[:, None, None, None] if isinstance(value, Tensor) else value
