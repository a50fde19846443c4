"""Gaussian-process output layer: `dnn-gp`, and `sngp` with bounded hidden layers."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from afield.calibrate import calibrate
from afield.convert import SNGP, sngp
from afield.methods.dense import with_output_layer
from afield.methods.method import BackboneFactory, Method
from afield.posterior import fit_posterior
from afield.predictive import Prediction


def gaussian_process(c: float | None = None, **head: Any) -> Method:
    """A network with a Gaussian-process output layer; hidden layers are bounded by c unless that is None."""

    def build(backbone: BackboneFactory, num_outputs: int) -> nn.Module:
        return sngp(with_output_layer(backbone, num_outputs), c, **head)

    return Method(build, _predict, finish=_finish)


def _finish(model: nn.Module, train: Iterable[Any], val: Iterable[Any]) -> None:
    assert isinstance(model, SNGP)
    fit_posterior(model, train, progress=False)
    calibrate(model, val, progress=False)


def _predict(model: nn.Module, x: Any) -> Prediction:
    assert isinstance(model, SNGP)
    return model.predict(x)
