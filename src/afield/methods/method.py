"""What a method is: a value made of functions. Variants are made by functions that take a method and return one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from afield.predictive import Prediction

BackboneFactory = Callable[[], nn.Module]


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def nothing(model: nn.Module, train: Iterable[Any], val: Iterable[Any]) -> None:
    """No posterior to fit and nothing to calibrate."""


@dataclass(frozen=True)
class Method:
    """How to build, train, finish and query a model."""

    build: Callable[[BackboneFactory, int], nn.Module]
    predict: Callable[[nn.Module, Any], Prediction]
    loss: Callable[[nn.Module, Any], Tensor] = cross_entropy
    finish: Callable[[nn.Module, Iterable[Any], Iterable[Any]], None] = nothing
