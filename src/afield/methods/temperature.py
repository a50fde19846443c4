"""Temperature scaling: a logit scale from validation data for a method that has none (Guo et al. 2017).

    p(y | x) = softmax(s f)        s minimises the log loss of held-out examples, with the prior of `afield.calibrate`

Gaussian-process methods get their scale from validation data; a comparison is fair if the dense network may, too.
Predicted classes stay as they are. Real targets have their noise from validation data already, and are left alone.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

from afield.gp.likelihoods import LIKELIHOODS
from afield.methods.method import BackboneFactory, Method, Model
from afield.methods.mixture import (
    AS_THEY_ARE,
    add_scales,
    calibrate_mixture,
    logit_scale_of,
    rescale,
    scales_of,
    set_scales,
)
from afield.prediction.prediction import Prediction
from afield.settings import Settings

_KIND = "temperature"


def with_temperature(method: Method[Model]) -> Method[Model]:
    """The method with its logits scaled; trained as the method is."""

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> Model:
        return add_scales(method.build(backbone, num_outputs, settings), _KIND)

    def calibrate(model: Model, val: Iterable[Any], settings: Settings = Settings(), /) -> None:
        if LIKELIHOODS[settings.likelihood].of_classes:
            set_scales(model, _KIND, AS_THEY_ARE)
            scale = logit_scale_of(model)
            calibrate_mixture(
                model, _KIND, lambda x: [method.predict(model, x)], val, logit_scale=scale, fixed_amplitude=True
            )

    def finish(model: Model, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /) -> None:
        method.finish(model, train, val, settings)
        calibrate(model, val, settings)

    def predict(model: Model, x: Any) -> Prediction:
        prediction = method.predict(model, x)
        return rescale(prediction, scales_of(model, _KIND)) if prediction.probs is not None else prediction

    hidden = method.hidden or method.predict
    return dataclasses.replace(
        method, build=build, predict=predict, finish=finish, calibrate=calibrate, trained_as=method, hidden=hidden
    )
