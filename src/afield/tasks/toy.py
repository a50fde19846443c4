"""Two-dimensional and small tasks that need no download: what the paper's low-dimensional figures show.

`two-moons` and `two-ovals` have 500 training points a class (paper, section on low-dimensional experiments);
`circles` and `blobs` are harder on defaults; `digits` is scikit-learn's own set of 8 x 8 images.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from afield.backbones.resffn import ResFFN
from afield.tasks.task import Task, far_points

_FAR = 1000
Sampler = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]


def two_moons(seed: int = 0) -> Task:
    """Two interleaved half circles with Gaussian noise 0.1."""
    return _planar("two-moons", _moons, seed)


def two_ovals(seed: int = 0) -> Task:
    """Two near-flat Gaussians, one above the other, separable by a line."""
    return _planar("two-ovals", _ovals, seed)


def circles(seed: int = 0) -> Task:
    """Two concentric circles with radii 1 and 0.5."""
    return _planar("circles", _circles, seed)


def blobs(seed: int = 0) -> Task:
    """Five Gaussian blobs on a circle."""
    return _planar("blobs", _blobs, seed, classes=5)


def digits(seed: int = 0) -> Task:
    """8 x 8 images of digits, pixels in [0, 1]; OOD: uniform noise images and inverted digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError('The digits task needs scikit-learn: pip install "afield[cli]".') from error
    bunch = load_digits()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(bunch.target), generator=generator)
    x = torch.from_numpy(bunch.data).float()[order] / 16
    y = torch.from_numpy(bunch.target).long()[order]
    sizes = [1097, 300, 400]
    train, val, test = (TensorDataset(a, b) for a, b in zip(x.split(sizes), y.split(sizes), strict=True))
    ood = {"noise": torch.rand(_FAR, 64, generator=generator), "inverted": 1 - x[-400:]}
    return Task(
        "digits",
        train,
        val,
        test,
        ood={name: TensorDataset(points) for name, points in ood.items()},
        num_outputs=10,
        backbone=partial(ResFFN, 64),
    )


def _planar(name: str, sample: Sampler, seed: int, classes: int = 2) -> Task:
    generator = torch.Generator().manual_seed(seed)
    parts = [sample(count, generator) for count in (500 * classes, 250 * classes, 500 * classes)]
    far = far_points(parts[0][0], _FAR, generator)
    train, val, test = (TensorDataset(x, y) for x, y in parts)
    return Task(
        name, train, val, test, ood={"far": TensorDataset(far)}, num_outputs=classes, backbone=partial(ResFFN, 2)
    )


def _moons(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    y, angle = _labels(count, 2), math.pi * torch.rand(count, generator=generator)
    x = torch.stack([angle.cos(), angle.sin()], dim=1)
    x = torch.where(y[:, None] == 0, x, torch.stack([1 - x[:, 0], 0.5 - x[:, 1]], dim=1))
    return x + 0.1 * torch.randn(count, 2, generator=generator), y


def _ovals(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    y = _labels(count, 2)
    x = torch.randn(count, 2, generator=generator) * torch.tensor([1.0, 0.15])
    return x + torch.stack([torch.zeros(count), y - 0.5], dim=1) * 1.5, y


def _circles(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    y, angle = _labels(count, 2), 2 * math.pi * torch.rand(count, generator=generator)
    x = torch.stack([angle.cos(), angle.sin()], dim=1) * (1 - 0.5 * y)[:, None]
    return x + 0.07 * torch.randn(count, 2, generator=generator), y


def _blobs(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    y = _labels(count, 5)
    centers = torch.stack([(2 * math.pi * y / 5).cos(), (2 * math.pi * y / 5).sin()], dim=1)
    return 2 * centers + 0.35 * torch.randn(count, 2, generator=generator), y


def _labels(count: int, classes: int) -> Tensor:
    return torch.arange(count) % classes
