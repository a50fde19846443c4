"""What a method is: a value made of functions. Variants are made by functions that take a method and return one."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor, nn

from afield.gp.likelihoods import likelihood_for
from afield.prediction.prediction import Prediction
from afield.settings import Settings

Model = TypeVar("Model", bound=nn.Module)
Built = TypeVar("Built", bound=nn.Module, covariant=True)
Finished = TypeVar("Finished", bound=nn.Module, contravariant=True)
BackboneFactory = Callable[[], nn.Module]
Predict = Callable[[Model, Any], Prediction]
TRAINABLE = ("categorical", "gaussian")  # which the type of the targets tells apart


class Build(Protocol[Built]):
    """Backbone, number of outputs and settings -> an untrained model."""

    def __call__(self, backbone: BackboneFactory, num_outputs: int, settings: Settings = ..., /) -> Built: ...


def negative_log_likelihood(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy for classes; half the squared error, a Gaussian's up to its noise, for real targets."""
    x, y = batch
    output = model(x)
    return likelihood_for(y).loss(output, y.reshape_as(output) if y.is_floating_point() else y).mean()


def check_likelihood(settings: Settings) -> str:
    """The likelihood of the settings, if it is one of those that methods know."""
    if settings.likelihood not in TRAINABLE:
        raise ValueError(f"Methods expect categorical or gaussian targets, got {settings.likelihood}.")
    return settings.likelihood


class Finish(Protocol[Finished]):
    """Model, training and validation batches, settings: whatever comes after training."""

    def __call__(
        self, model: Finished, train: Iterable[Any], val: Iterable[Any], settings: Settings = ..., /
    ) -> None: ...


class Calibrate(Protocol[Finished]):
    """Model, validation batches, settings."""

    def __call__(self, model: Finished, val: Iterable[Any], settings: Settings = ..., /) -> None: ...


def nothing(model: nn.Module, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /) -> None:
    """No posterior to fit and nothing to calibrate."""


def unchanged(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class Members:
    """An ensemble's parts: `size` models of `method`.

    size  None: as many as the settings say
    """

    method: "Method[Any]"
    size: int | None


@dataclass(frozen=True)
class Method(Generic[Model]):
    """How to build, train, finish and query a model, of the type that `build` makes.

    build       backbone, number of outputs, settings -> model
    predict     model, inputs -> Prediction
    loss        model, batch -> loss; None for models that gradient steps on batches do not train: `finish` fits them
    finish      model, training and validation batches, settings: posterior, calibration, whatever comes after training
    transform   batch -> batch, in training only
    members     of an ensemble, or None
    trained_as  the method whose training is the same, or None
    hidden      as `predict`, where only the hidden vectors of a prediction count; None: `predict`
    calibrate   model, validation batches, settings: the last step of `finish`, which `trained_as` lacks, or None
    take_over   (model, state of a model of `trained_as`) -> state of the model, whose `finish` then does the rest;
                None: the states are the same but for what `calibrate` sets
    own_dropout  whether a rate of dropout in the settings makes the training another one
    settings    that it has unless others are given
    """

    build: Build[Model]
    predict: Predict[Model]
    loss: Callable[[Model, Any], Tensor] | None = negative_log_likelihood
    finish: Finish[Model] = nothing
    transform: Callable[[Any], Any] = unchanged
    members: Members | None = None
    trained_as: "Method[Model] | None" = None
    hidden: Predict[Model] | None = None
    calibrate: Calibrate[Model] | None = None
    take_over: Callable[[Model, Mapping[str, Tensor]], dict[str, Tensor]] | None = None
    own_dropout: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
