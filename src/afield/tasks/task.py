"""What a task is: data in named parts, and the settings under which it is trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

PRESETS = ("smoke", "small", "paper")


@dataclass(frozen=True)
class Settings:
    """How a model is built and trained. Every field is a flag, a TOML key and a row of docs/settings.md."""

    epochs: int = 100
    """Passes over the training data."""
    batch_size: int = 128
    """Examples in a training step."""
    learning_rate: float = 1e-3
    """At its highest."""
    head_learning_rate: float | None = None
    """Of the output layer alone; None: as the rest."""
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    """sgd has Nesterov momentum 0.9."""
    weight_decay: float = 0.0
    """L2 penalty; decoupled for adamw. Random features and biases have none."""
    head_weight_decay: float | None = None
    """Of the output layer alone; None: as the rest. What the prior asks for is ridge / number of examples."""
    schedule: Literal["cosine", "linear", "steps", "constant"] = "cosine"
    """How the learning rate falls; steps: times 0.2 at 30%, 60% and 80%."""
    warmup: float = 0.0
    """Part of the training in which the learning rate rises from zero."""
    word_dropout: float = 0.0
    """Part of the words of a training sentence that are left out, anew each time; for tasks of text."""
    frozen: tuple[str, ...] = ()
    """Names of parameters that are not trained, * and ? allowed."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the products in training; weights, posterior and predictions stay in float32."""
    likelihood: Literal["categorical", "bernoulli", "gaussian", "poisson"] = "categorical"
    """Of the targets."""
    bound: float | None = 0.95
    """Largest spectral norm of a hidden layer, for methods that bound it; None: none."""
    bounded: tuple[str, ...] = ()
    """Names of the backbone's layers that are bounded, * and ? allowed; none given: all of them."""
    num_random_features: int = 1024
    """Of the Gaussian process."""
    length_scale: float | None = None
    """Of its kernel; None: from the first training batch."""
    ridge: float = 1.0
    """Prior precision of its output weights."""
    amplitude: float | None = None
    """Of its variance; None: calibrated on validation data."""
    covariance: Literal["shared", "per_class"] = "shared"
    """One posterior for all outputs, or one for each."""
    curvature: Literal["auto", "unit", "likelihood"] = "auto"
    """Weight of an example in the posterior; auto: unit for classes with a shared covariance."""
    dropout: float | None = None
    """Rate of the layers that Monte Carlo dropout samples; None: the backbone's own."""
    members: int = 10
    """Of an ensemble."""


@dataclass(frozen=True)
class Task:
    """In-domain parts, shifted test sets, OOD sets by name, and a factory of the usual backbone.

    grid     inputs without labels that the report draws predictions on, for tasks in one or two dimensions
    augment  (batch, settings) -> the training batch (x, y) as the method's own transform gets it
    order    (batch size, generator) -> the batches of an epoch as index tensors; None: shuffled
    scale    what real targets were divided by: figures are reported in their own units
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
    settings: Settings = Settings()


@dataclass(frozen=True)
class Recipe:
    """How to get a task: `recipe(seed, preset)`. Its settings can be read without touching the data.

    load      (seed, preset) -> Task, without its settings; the seed decides what data is drawn or how it is cut
    settings  by preset
    adapted   pattern of method names -> settings that these methods have instead
    """

    load: Callable[[int, str], Task]
    settings: Mapping[str, Settings]
    adapted: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __call__(self, seed: int = 0, preset: str = "small") -> Task:
        settings = self.settings_for(preset)  # before the data: an unknown preset should not wait for it
        return replace(self.load(seed, preset), settings=settings)

    def settings_for(self, preset: str, method: str = "") -> Settings:
        if preset not in self.settings:
            raise ValueError(f"Unknown preset {preset!r}: expected one of {', '.join(self.settings)}.")
        settings = self.settings[preset]
        for pattern, changes in self.adapted.items():
            if fnmatchcase(method, pattern):
                settings = replace(settings, **changes)
        return settings


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
