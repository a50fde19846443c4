"""Gaussian-process output layer: `dnn-gp`, and `sngp` with bounded hidden layers.

`dnn-gp-paper` and `sngp-paper` are the same in the paper's form: weights p*(1 - p*) in the posterior, a length scale of
2, plain random features, one set of them for mean and variance, and the amplitude alone chosen by validation NLL.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from afield.methods.dense import Dense, bound_rules
from afield.methods.method import BackboneFactory, Method
from afield.model.batches import device_of
from afield.model.calibration import calibrate
from afield.model.convert import sngp
from afield.model.output_weights import fit_head
from afield.model.posterior import fit_posterior
from afield.model.sngp_model import SNGP
from afield.prediction.distance_scores import FITTED
from afield.prediction.prediction import Prediction
from afield.settings import Settings

_OF_FEATURES = ("num_random_features", "kernel", "orthogonal", "geometry", "projection", "length_scale", "fraction")
_OF_HEAD = (
    *_OF_FEATURES,
    "likelihood",
    "ridge",
    "covariance",
    "rank",
    "constant",
    "curvature",
    "momentum",
    "variance_features",
    "predictive",
)
PAPER_FORM = MappingProxyType(
    {
        "curvature": "likelihood",
        "length_scale": 2.0,
        "orthogonal": False,
        "variance_features": "same",
        "logit_scale": 1.0,
        "refit_head": False,
        "score": "max_probability",
    }
)
"""Settings under which a Gaussian process is the paper's."""


def gaussian_process(*, bounded: bool = False, settings: Mapping[str, Any] = MappingProxyType({})) -> Method[SNGP]:
    """A network with a Gaussian-process output layer.

    bounded   hidden layers have the settings' bound
    settings  that it has unless others are given
    """

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> SNGP:
        net = Dense(backbone, num_outputs, settings)
        return sngp(nn.Sequential(*net), bound_rules(settings) if bounded else None, **of_head(settings))

    return Method(build, predict_gp, finish=finish_gp, settings=settings)


def of_head(settings: Settings) -> dict[str, Any]:
    """The settings that are options of the head; None leaves an option as it is."""
    return {name: value for name in _OF_HEAD if (value := getattr(settings, name)) is not None}


def of_calibration(settings: Settings, train: Iterable[Any]) -> dict[str, Any]:
    """The settings that are options of `afield.calibrate`, and the training data where the score is fitted to it."""
    fitted = {"train": train} if settings.score in FITTED else {}
    return {"amplitude": settings.amplitude, "logit_scale": settings.logit_scale, "score": settings.score} | fitted


def finish_gp(model: SNGP, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /) -> None:
    """Fit the posterior, and calibrate; before it the output weights, if they are solved for."""
    if settings.refit_head and model.head.mean is None:
        fit_head(model, train, progress=False)
    fit_posterior(model, train, progress=False)
    calibrate(model, val, **of_calibration(settings, train), progress=False)


def predict_gp(model: SNGP, x: Any) -> Prediction:
    device = device_of(model) or torch.device("cpu")
    generator = torch.Generator(device).manual_seed(0)  # of Monte Carlo, where it is asked for
    return model.predict(x, generator=generator, joined=True)  # for its column in the tables
