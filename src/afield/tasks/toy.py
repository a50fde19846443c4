"""Small tasks that need no download: what the paper's low-dimensional figures show.

`toy-regression` is one-dimensional with two modes of inputs; `two-moons` and `two-ovals` have 500 training points a
class (paper, section on low-dimensional experiments); `circles` and `blobs` are harder on defaults; `digits` is
scikit-learn's own set of 8 x 8 images, with two classes held out.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from afield.backbones.resffn import ResFFN
from afield.settings import Settings
from afield.tasks.task import Recipe, Task, far_points, presets

_FAR = 1000
_GRID = 100
HELD_OUT = (8, 9)
SETTINGS = Settings(warmup=0.1)  # without it, a head on bounded layers can stay at a poor first solution (circles)
Sampler = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


def toy_regression(seed: int, preset: str) -> Task:
    """y = sin(2 x) + noise 0.1 at inputs around -3 and 3; OOD: between the two modes, and beyond them.

    It is drawn over [-12, 12], as in the paper.
    """
    generator = torch.Generator().manual_seed(seed)

    def sample(count: int) -> TensorDataset:
        mode = torch.where(torch.arange(count) % 2 == 0, -3.0, 3.0)[:, None]
        x = mode + 0.4 * torch.randn(count, 1, generator=generator)
        return TensorDataset(x, (2 * x).sin() + 0.1 * torch.randn(count, 1, generator=generator))

    train, val, test = sample(200), sample(200), sample(200)
    ood = {"between": _line(-1, 1, 200), "ends": torch.cat([_line(-7, -5, 100), _line(5, 7, 100)])}
    return Task(
        "toy-regression",
        train,
        val,
        test,
        ood={name: TensorDataset(x[:, None]) for name, x in ood.items()},
        num_outputs=1,
        backbone=partial(ResFFN, 1),
        grid=_line(-12, 12, 1201)[:, None],
    )


def digits(seed: int, preset: str) -> Task:
    """8 x 8 images of the digits 0 to 7, pixels in [0, 1]; OOD: the digits 8 and 9 (near), inverted and noise images.

    Near OOD are all images of the held-out classes; far OOD are the test images inverted, and uniform noise.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError('The digits task needs scikit-learn: pip install "afield[cli]".') from error
    bunch = load_digits()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(bunch.target), generator=generator)
    x = torch.from_numpy(bunch.images).float()[order, None] / 16
    y = torch.from_numpy(bunch.target).long()[order]
    held_out = torch.isin(y, torch.tensor(HELD_OUT))
    near, x, y = x[held_out], x[~held_out], y[~held_out]
    sizes = [len(y) - 600, 300, 300]
    train, val, test = (TensorDataset(a, b) for a, b in zip(x.split(sizes), y.split(sizes), strict=True))
    noise = torch.rand(_FAR, 1, 8, 8, generator=generator)
    ood = {"held-out": near, "inverted": 1 - test.tensors[0], "noise": noise}
    return Task(
        "digits",
        train,
        val,
        test,
        ood={name: TensorDataset(images) for name, images in ood.items()},
        num_outputs=10 - len(HELD_OUT),
        backbone=_flattening_resffn,
    )


def planar(name: str, sample: Sampler, classes: int = 2) -> Recipe:
    """A task in the plane: 500 training points a class, and points far from all of them as OOD."""

    def load(seed: int, preset: str) -> Task:
        generator = torch.Generator().manual_seed(seed)
        parts = [sample(count, generator) for count in (500 * classes, 250 * classes, 500 * classes)]
        far = far_points(parts[0][0], _FAR, generator)
        train, val, test = (TensorDataset(x, y) for x, y in parts)
        return Task(
            name,
            train,
            val,
            test,
            ood={"far": TensorDataset(far)},
            num_outputs=classes,
            backbone=partial(ResFFN, 2),
            grid=_lattice(torch.cat([parts[0][0], far])),
        )

    return Recipe(load, presets(SETTINGS))


def moons(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two interleaved half circles with Gaussian noise 0.1."""
    y, angle = _labels(count, 2), math.pi * torch.rand(count, generator=generator)
    x = torch.stack([angle.cos(), angle.sin()], dim=1)
    x = torch.where(y[:, None] == 0, x, torch.stack([1 - x[:, 0], 0.5 - x[:, 1]], dim=1))
    return x + 0.1 * torch.randn(count, 2, generator=generator), y


def ovals(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two near-flat Gaussians, one above the other, separable by a line."""
    y = _labels(count, 2)
    x = torch.randn(count, 2, generator=generator) * torch.tensor([1.0, 0.15])
    return x + torch.stack([torch.zeros(count), y - 0.5], dim=1) * 1.5, y


def circles(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two concentric circles with radii 1 and 0.5."""
    y, angle = _labels(count, 2), 2 * math.pi * torch.rand(count, generator=generator)
    x = torch.stack([angle.cos(), angle.sin()], dim=1) * (1 - 0.5 * y)[:, None]
    return x + 0.07 * torch.randn(count, 2, generator=generator), y


def blobs(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Five Gaussian blobs on a circle."""
    y = _labels(count, 5)
    centers = torch.stack([(2 * math.pi * y / 5).cos(), (2 * math.pi * y / 5).sin()], dim=1)
    return 2 * centers + 0.35 * torch.randn(count, 2, generator=generator), y


def _flattening_resffn() -> nn.Module:
    backbone = nn.Sequential(nn.Flatten(), ResFFN(64))
    backbone.out_features = backbone[1].out_features
    return backbone


def _lattice(points: Tensor) -> Tensor:
    """A square lattice over the box of the points, row by row from the bottom."""
    low, high = points.amin(0), points.amax(0)
    lines = [_line(float(a), float(b), _GRID) for a, b in zip(low, high, strict=True)]
    return torch.stack(torch.meshgrid(*lines, indexing="xy"), dim=-1).flatten(0, 1)


def _line(low: float, high: float, count: int) -> Tensor:
    return torch.linspace(low, high, count)


def _labels(count: int, classes: int) -> Tensor:
    return torch.arange(count) % classes
