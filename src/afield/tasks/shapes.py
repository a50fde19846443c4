"""Drawn pictures with a class for every pixel, and foreign objects in some: segmentation that needs no download.

A picture is a background of smooth, pale noise and two to four objects of random colours, sizes, angles and places, the
later ones in front, with noise over all. A kind of object has its shape and its pattern; colours say nothing.

    classes             0 background, 1 plain disc, 2 striped square, 3 chequered triangle, 4 cross with dots
    ood/kinds           the same pictures with one object of a kind that no network has seen: a ring of rings, a star of
                        rays, a crescent in zigzags
    ood/patches         the same pictures with one square of noise, as a broken sensor or a wrong decoder makes

OOD sets come with masks (N, H, W), 1 where a foreign pixel is. `small` has 1,000 training pictures of 32 x 32 and a
U-Net of width 8, `paper` 4,000 of 64 x 64 and width 32, though no paper has it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from afield.backbones.unet import UNet
from afield.settings import Settings
from afield.tasks.task import Recipe, Task, presets

_FEWEST, _MOST = 2, 4  # objects
_NOISE = 0.05
_SIZES = {"smoke": (120, 60, 60, 32), "small": (1000, 300, 200, 32), "paper": (4000, 500, 500, 64)}  # and the side
_WIDTHS = {"smoke": 8, "small": 8, "paper": 32}
Field = Callable[[Tensor, Tensor], Tensor]
"""Coordinates (H, W) of pixels in the frame of an object of radius 1 -> whether something is there."""


@dataclass(frozen=True)
class Kind:
    """An object: where it is, and where it has its second colour."""

    name: str
    inside: Field
    second: Field


def _radius(u: Tensor, v: Tensor) -> Tensor:
    return torch.hypot(u, v)


def _turn(u: Tensor, v: Tensor) -> Tensor:
    """The angle in turns."""
    return torch.atan2(v, u) / (2 * math.pi)


def _stripes(x: Tensor) -> Tensor:
    return (3 * x).floor() % 2 == 0


KNOWN = (
    Kind("disc", lambda u, v: _radius(u, v) < 0.9, lambda u, v: u > 9),
    Kind("square", lambda u, v: torch.maximum(u.abs(), v.abs()) < 0.8, lambda u, v: _stripes(u)),
    Kind("triangle", lambda u, v: (v > -0.6) & (v < 1.1 - 1.8 * u.abs()), lambda u, v: _stripes(u) ^ _stripes(v)),
    Kind(
        "cross",
        lambda u, v: (torch.minimum(u.abs(), v.abs()) < 0.4) & (torch.maximum(u.abs(), v.abs()) < 1.0),
        lambda u, v: _radius((1.5 * u) % 1 - 0.5, (1.5 * v) % 1 - 0.5) < 0.3,
    ),
)
"""Of the classes 1, 2, ..."""
FOREIGN = (
    Kind("ring", lambda u, v: (_radius(u, v) < 1) & (_radius(u, v) > 0.3), lambda u, v: _stripes(2 * _radius(u, v))),
    Kind(
        "star",
        lambda u, v: _radius(u, v) < 0.5 + 0.6 * (1 - 2 * (5 * _turn(u, v) % 1 - 0.5).abs()),
        lambda u, v: 10 * _turn(u, v) % 1 < 0.5,
    ),
    Kind(
        "crescent",
        lambda u, v: (_radius(u, v) < 1) & (_radius(u - 0.6, v) > 0.7),
        lambda u, v: _stripes(v + 0.3 * (4 * u % 1 - 0.5).abs() * 2),
    ),
)
CLASSES = ("background", *(kind.name for kind in KNOWN))


def shapes(seed: int, preset: str) -> Task:
    train, val, test, side = _SIZES[preset]
    generator = torch.Generator().manual_seed(seed)
    parts = [TensorDataset(*draw_pictures(count, side, generator)[:2]) for count in (train, val, test)]
    return Task(
        "shapes-segmentation",
        parts[0],
        val=parts[1],
        test=parts[2],
        ood={name: _foreign(test, side, generator, name) for name in ("kinds", "patches")},
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

    foreign  None; "kinds" or "patches": the last object, which nothing hides
    """
    found = [_draw_one(side, generator, foreign) for _ in range(count)]
    x, y, mask = (torch.stack(parts) for parts in zip(*found, strict=True))
    return x, y, mask


def _draw_one(side: int, generator: torch.Generator, foreign: str | None) -> tuple[Tensor, Tensor, Tensor]:
    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=generator)

    def one_of(count: int) -> int:
        return int(torch.randint(count, (1,), generator=generator))

    x = F.interpolate(uniform(0.35, 0.65, 1, 3, 4, 4), size=(side, side), mode="bicubic")[0]
    y = torch.zeros(side, side, dtype=torch.int64)
    mask = torch.zeros(side, side, dtype=torch.bool)
    rows, columns = torch.meshgrid(torch.arange(side) + 0.5, torch.arange(side) + 0.5, indexing="ij")
    number = _FEWEST + one_of(_MOST - _FEWEST + 1)
    for index in range(number):
        strange = foreign is not None and index == number - 1
        radius, angle = float(uniform(0.16, 0.24, 1)) * side, float(uniform(0, 2 * math.pi, 1))
        center, colours = uniform(0.15, 0.85, 2) * side, uniform(0, 1, 3)
        a, b = (columns - center[0]) / radius, (rows - center[1]) / radius
        u, v = math.cos(angle) * a - math.sin(angle) * b, math.sin(angle) * a + math.cos(angle) * b
        which = one_of(len(FOREIGN if strange else KNOWN))
        kind = (FOREIGN if strange else KNOWN)[which]
        inside, first, second = kind.inside(u, v), colours[:, None, None], ((colours + 0.5) % 1)[:, None, None]
        fill = torch.where(kind.second(u, v), second, first)
        if strange and foreign == "patches":
            inside, fill = torch.maximum(a.abs(), b.abs()) < 0.7, uniform(0, 1, 3, side, side)
        x, y = torch.where(inside, fill, x), torch.where(inside, which + 1, y)
        mask = inside if strange else mask
    x = x + _NOISE * torch.randn(x.shape, generator=generator)
    return 2 * x - 1, torch.where(mask, 0, y), mask


_SMALL = Settings(epochs=15, batch_size=16, learning_rate=4e-3, bound=1.0, num_random_features=128)
RECIPE = Recipe(
    shapes,
    presets(_SMALL, smoke=replace(_SMALL, epochs=2), paper=replace(_SMALL, epochs=30)),
    {"*gp*": {"head_learning_rate": 0.04}},
)
