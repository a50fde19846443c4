"""What a method is: a value made of functions. Variants are made by functions that take a method and return one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from afield.prediction.prediction import Prediction
from afield.settings import Settings

BackboneFactory = Callable[[], nn.Module]
Predict = Callable[[nn.Module, Any], Prediction]


class Build(Protocol):
    """Backbone, number of outputs and settings -> an untrained model."""

    def __call__(self, backbone: BackboneFactory, num_outputs: int, settings: Settings = ..., /) -> nn.Module: ...


def negative_log_likelihood(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy for classes; half the squared error, a Gaussian's up to its noise, for real targets."""
    x, y = batch
    output = model(x)
    return F.mse_loss(output, y.reshape_as(output)) / 2 if y.is_floating_point() else F.cross_entropy(output, y)


class Finish(Protocol):
    """Model, training and validation batches, settings: whatever comes after training."""

    def __call__(
        self, model: nn.Module, train: Iterable[Any], val: Iterable[Any], settings: Settings = ..., /
    ) -> None: ...


def nothing(model: nn.Module, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /) -> None:
    """No posterior to fit and nothing to calibrate."""


def unchanged(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class Members:
    """An ensemble's parts: `size` models of `method`, whose predictions `combine` makes into one.

    size  None: as many as the settings say
    """

    method: "Method"
    size: int | None
    combine: Callable[[Sequence[Prediction]], Prediction]


@dataclass(frozen=True)
class Method:
    """How to build, train, finish and query a model.

    build       backbone, number of outputs, settings -> model
    predict     model, inputs -> Prediction
    loss        model, batch -> loss; None for models that gradient steps on batches do not train: `finish` fits them
    finish      model, training and validation batches, settings: posterior, calibration, whatever comes after training
    transform   batch -> batch, in training only
    members     of an ensemble, or None
    trained_as  the method whose training is the same unless the settings have a rate of dropout, or None
    hidden      as `predict`, where only the hidden vectors of a prediction count; None: `predict`
    """

    build: Build
    predict: Predict
    loss: Callable[[nn.Module, Any], Tensor] | None = negative_log_likelihood
    finish: Finish = nothing
    transform: Callable[[Any], Any] = unchanged
    members: Members | None = None
    trained_as: "Method | None" = None
    hidden: Predict | None = None
