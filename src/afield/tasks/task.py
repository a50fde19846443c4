"""What a task is: data in named parts, and the settings under which it is usually trained."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class Defaults:
    """How a task is trained unless told otherwise."""

    epochs: int = 100
    batch_size: int = 128
    learning_rate: float = 1e-3
    bound: float | None = 0.95


@dataclass(frozen=True)
class Task:
    """In-domain parts, shifted test sets, OOD sets by name, and a factory of the usual backbone."""

    name: str
    train: TensorDataset
    val: TensorDataset
    test: TensorDataset
    ood: Mapping[str, TensorDataset]
    num_outputs: int
    backbone: Callable[[], nn.Module]
    shifted: Mapping[str, TensorDataset] = field(default_factory=dict)
    likelihood: str = "categorical"
    defaults: Defaults = Defaults()


def far_points(train: Tensor, count: int, generator: torch.Generator, *, distance: float = 1.5) -> Tensor:
    """Points (count, d) more than `distance` training standard deviations from every training point.

    Uniform in a box three times as wide as the data; the standard deviation is pooled over the coordinates.
    """
    center, reach = train.mean(0), (train - train.mean(0)).abs().amax(0)
    threshold = distance * float((train - center).square().mean().sqrt())
    kept: list[Tensor] = []
    while sum(map(len, kept)) < count:
        candidates = center + 3 * reach * (2 * torch.rand(4 * count, train.shape[1], generator=generator) - 1)
        kept.append(candidates[torch.cdist(candidates, train).amin(1) > threshold])
    return torch.cat(kept)[:count]
