"""Drawn pictures with a class for every pixel, and foreign objects in some: segmentation that needs no download.

A picture is a background of smooth coloured noise and three to five objects of random colour, size, angle and place,
the later ones in front, with noise over all. Colours say nothing: a class is a shape.

    classes             0 background, 1 disc, 2 square, 3 triangle, 4 cross
    ood/kinds           the same pictures with one object of a kind that no network has seen: ring, star, crescent
    ood/textures        the same pictures with one object of a known shape in stripes, which no network has seen

OOD sets come with masks (N, H, W), 1 where a foreign pixel is. `small` has 1,000 training pictures of 48 x 48 and a
U-Net of width 16, `paper` 4,000 of 64 x 64 and width 32, though no paper is meant.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from afield.backbones.unet import UNet
from afield.settings import Settings
from afield.tasks.task import Recipe, Task, presets

CLASSES = ("background", "disc", "square", "triangle", "cross")
_FEWEST, _MOST = 3, 5  # objects
_NOISE = 0.08
_SIZES = {"smoke": (120, 60, 60, 32), "small": (1000, 200, 200, 48), "paper": (4000, 500, 500, 64)}  # and the side
_WIDTHS = {"smoke": 8, "small": 16, "paper": 32}
Inside = Callable[[Tensor, Tensor], Tensor]
"""Coordinates (H, W) of a pixel in the frame of an object of radius 1 -> whether it belongs to the object."""


def _triangle(u: Tensor, v: Tensor) -> Tensor:
    return (v > -0.55) & (v < 1.0 - 1.8 * u.abs())


def _star(u: Tensor, v: Tensor) -> Tensor:
    angle, radius = torch.atan2(v, u), torch.hypot(u, v)
    return radius < 0.45 + 0.6 * (1 - (5 * angle / (2 * math.pi) % 1 - 0.5).abs() * 2) ** 1.5


KNOWN: tuple[Inside, ...] = (
    lambda u, v: torch.hypot(u, v) < 0.85,
    lambda u, v: torch.maximum(u.abs(), v.abs()) < 0.75,
    _triangle,
    lambda u, v: (torch.minimum(u.abs(), v.abs()) < 0.28) & (torch.maximum(u.abs(), v.abs()) < 0.95),
)
"""Of the classes 1, 2, ..., in the order of `CLASSES`."""
FOREIGN: tuple[Inside, ...] = (
    lambda u, v: (torch.hypot(u, v) < 1.0) & (torch.hypot(u, v) > 0.55),
    _star,
    lambda u, v: (torch.hypot(u, v) < 0.95) & (torch.hypot(u - 0.5, v) > 0.75),
)


def shapes(seed: int, preset: str) -> Task:
    train, val, test, side = _SIZES[preset]
    generator = torch.Generator().manual_seed(seed)
    parts = [draw_pictures(count, side, generator) for count in (train, val, test)]
    return Task(
        "shapes-segmentation",
        *(TensorDataset(x, y) for x, y, _ in parts),
        ood={name: _foreign(test, side, generator, name) for name in ("kinds", "textures")},
        num_outputs=len(CLASSES),
        backbone=partial(UNet, width=_WIDTHS[preset]),
    )


def _foreign(count: int, side: int, generator: torch.Generator, what: str) -> TensorDataset:
    x, _, mask = draw_pictures(count, side, generator, foreign=what)
    return TensorDataset(x, mask.long())


def draw_pictures(
    count: int, side: int, generator: torch.Generator, *, foreign: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures (N, 3, H, W), classes (N, H, W), and where something foreign is (N, H, W).

    foreign  None; "kinds" or "textures": the last object, which nothing hides, is foreign in its shape or its stripes
    """
    found = [_draw_one(side, generator, foreign) for _ in range(count)]
    x, y, mask = (torch.stack(parts) for parts in zip(*found, strict=True))
    return x, y, mask


def _draw_one(side: int, generator: torch.Generator, foreign: str | None) -> tuple[Tensor, Tensor, Tensor]:
    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    def one_of(count: int) -> int:
        return int(torch.randint(count, (1,), generator=generator))

    x = F.interpolate(uniform(0.2, 0.8, 1, 3, 4, 4), size=(side, side), mode="bicubic")[0]
    y = torch.zeros(side, side, dtype=torch.int64)
    mask = torch.zeros(side, side, dtype=torch.bool)
    rows, columns = torch.meshgrid(torch.arange(side) + 0.5, torch.arange(side) + 0.5, indexing="ij")
    number = _FEWEST + one_of(_MOST - _FEWEST + 1)
    for index in range(number):
        strange = foreign is not None and index == number - 1
        radius = float(uniform(0.12, 0.22, 1)) * side
        center, angle = uniform(0.15, 0.85, 2) * side, float(uniform(0, 2 * math.pi, 1))
        a, b = (columns - center[0]) / radius, (rows - center[1]) / radius
        u, v = math.cos(angle) * a - math.sin(angle) * b, math.sin(angle) * a + math.cos(angle) * b
        kind = one_of(len(FOREIGN) if strange and foreign == "kinds" else len(KNOWN))
        inside = (FOREIGN if strange and foreign == "kinds" else KNOWN)[kind](u, v)
        colour = uniform(0, 1, 3)
        fill = colour[:, None, None].expand(3, side, side)
        if strange and foreign == "textures":
            other = (colour + 0.5) % 1
            fill = torch.where((4 * u).floor() % 2 == 0, fill, other[:, None, None])
        x = torch.where(inside, fill, x)
        y = torch.where(inside, kind + 1, y)
        mask = inside if strange else mask
    x = x + _NOISE * torch.randn(x.shape, generator=generator)
    return 2 * x - 1, torch.where(mask, 0, y), mask


_SMALL = Settings(epochs=12, batch_size=16, learning_rate=2e-3, optimizer="adam", weight_decay=0.0, bound=6.0, warmup=0.1)
RECIPE = Recipe(shapes, presets(_SMALL, smoke=replace(_SMALL, epochs=2), paper=replace(_SMALL, epochs=30)))
