"""Gaussian-process output layer: `dnn-gp`, and `sngp` with bounded hidden layers."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from afield.methods.dense import Dense, bound_rules
from afield.methods.method import BackboneFactory, Method
from afield.model.calibration import calibrate
from afield.model.convert import sngp
from afield.model.posterior import fit_posterior
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction
from afield.settings import Settings

_OF_HEAD = ("likelihood", "num_random_features", "length_scale", "ridge", "covariance", "curvature")


def gaussian_process(*, bounded: bool = False) -> Method[SNGP]:
    """A network with a Gaussian-process output layer; `bounded`: hidden layers have the settings' bound."""

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> SNGP:
        net = Dense(backbone, num_outputs, settings)
        return sngp(nn.Sequential(*net), bound_rules(settings) if bounded else None, **of_head(settings))

    return Method(build, predict_gp, finish=_finish)


def of_head(settings: Settings) -> dict[str, Any]:
    """The settings that are options of the head."""
    return {name: getattr(settings, name) for name in _OF_HEAD}


def _finish(model: SNGP, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /) -> None:
    fit_posterior(model, train, progress=False)
    calibrate(model, val, amplitude=settings.amplitude, progress=False)


def predict_gp(model: SNGP, x: Any) -> Prediction:
    return model.predict(x)
