"""What a task is: data in named parts, and the settings under which it is trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from afield.settings import Settings

PRESETS = ("smoke", "small", "paper")
REFIT: Mapping[str, Mapping[str, Any]] = {
    "dnn-gp*": {"refit_head": True},
    "sngp*": {"refit_head": True},
    "*-paper": {"refit_head": False},
}
"""Adapted settings of tasks on which output weights that are solved for have the lower validation loss."""


@dataclass(frozen=True)
class Task:
    """In-domain parts, shifted test sets, OOD sets by name, and a factory of the usual backbone.

    grid     inputs without labels that the report draws predictions on, for tasks in one or two dimensions
    augment  (batch, settings) -> the training batch (x, y) as the method's own transform gets it
    order    (batch size, generator) -> the batches of an epoch as index tensors; None: shuffled
    scale    what real targets were divided by: metrics are reported in the targets' own units
    ood_label  the number of an output that no example is trained on: OOD examples count under it in nll/combined
    """

    name: str
    train: TensorDataset
    val: TensorDataset
    test: TensorDataset
    ood: Mapping[str, TensorDataset]
    num_outputs: int
    backbone: Callable[[], nn.Module]
    shifted: Mapping[str, TensorDataset] = field(default_factory=dict)
    grid: Tensor | None = None
    augment: Callable[[Any, Settings], Any] = lambda batch, settings: batch
    order: Callable[[int, torch.Generator], Sequence[Tensor]] | None = None
    scale: float = 1.0
    ood_label: int | None = None
    settings: Settings = Settings()


@dataclass(frozen=True)
class Outline:
    """What a training on a task costs depends on, known before its data is at hand.

    evaluated  examples that are predicted once a model is trained
    example    one input (1, ...)
    """

    train: int
    evaluated: int
    example: Tensor
    backbone: Callable[[], nn.Module]


@dataclass(frozen=True)
class Recipe:
    """How to get a task: `recipe(seed, preset)`. Its settings can be read without touching the data.

    load      (seed, preset) -> Task, without its settings; the seed decides what data is drawn or how it is cut
    settings  by preset
    adapted   pattern of method names -> settings that these methods have instead
    outlines  by preset, where the whole data may not be at hand
    """

    load: Callable[[int, str], Task]
    settings: Mapping[str, Settings]
    adapted: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    outlines: Mapping[str, Outline] = field(default_factory=dict)

    def __call__(self, seed: int = 0, preset: str = "small") -> Task:
        settings = self.settings_for(preset)  # before the data: an unknown preset should not wait for it
        return replace(self.load(seed, preset), settings=settings)

    def settings_for(self, preset: str, method: str = "", own: Mapping[str, Any] = MappingProxyType({})) -> Settings:
        """The settings of a preset, adapted to a method, which may have settings of its own."""
        if preset not in self.settings:
            raise ValueError(f"Unknown preset {preset!r}: expected one of {', '.join(self.settings)}.")
        settings = replace(self.settings[preset], **own)
        for pattern, changes in self.adapted.items():
            if fnmatchcase(method, pattern):
                settings = replace(settings, **changes)
        return settings

    def outline_for(self, preset: str) -> Outline:
        """The outline of a preset: as it is known, else from the data."""
        if preset in self.outlines:
            return self.outlines[preset]
        task = self.load(0, preset)
        evaluated = [task.val, task.test, *task.ood.values(), *task.shifted.values()]
        return Outline(len(task.train), sum(map(len, evaluated)), task.train[0][0][None], task.backbone)


def presets(small: Settings, *, smoke: Settings | None = None, paper: Settings | None = None) -> dict[str, Settings]:
    """Settings by preset: smoke is small with two epochs, paper is small, unless they are given."""
    return {"smoke": smoke or replace(small, epochs=2), "small": small, "paper": paper or small}


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
