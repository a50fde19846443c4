"""Deep ensemble: M models that differ only in their random numbers, each with its own predictive.

    loss = sum_m loss_m(theta_m),        p(y | x) = 1/M sum_m p_m(y | x)

Members share no parameter, so the gradient of the sum is each member's own gradient, and an optimiser that works
element by element (SGD, Adam) trains M independent models; what couples them, as clipping the norm of the whole
gradient does, would not. Members start from different weights and draw different dropout masks. They see the same
batches in the same order, where the paper also shuffles for each. When all are finished, the ensemble is calibrated as
a whole (`mixture`).

Twice the mean of p-values is a p-value, however they depend on each other (Vovk and Wang 2020): so the ensemble's
`accept` keeps its guarantee, and is at most as eager to reject. It is made of the members' own, so the calibration of
the whole leaves it alone. It is on average over all classes, also where members have p-values by class: these are by
the members' own classes, which may differ.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from afield.methods.method import BackboneFactory, Members, Method, Model
from afield.methods.mixture import AS_THEY_ARE, Scales, add_scales, calibrate_mixture, logit_scale_of, mix, scales_of
from afield.prediction.average import mean_of
from afield.prediction.prediction import Prediction
from afield.settings import Settings

KIND = "ensemble"


def ensemble(method: Method[Model], size: int | None = None) -> Method[nn.ModuleList]:
    """`size` models of a method, trained side by side; their model is the ModuleList of the members, with the scales.

    size  None: the settings' `members`
    """
    if size is not None and size < 1:
        raise ValueError(f"An ensemble needs at least one member, got size={size}.")

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> nn.ModuleList:
        count = size or settings.members
        members = nn.ModuleList([method.build(backbone, num_outputs, settings) for _ in range(count)])
        if len(list(members.parameters())) < sum(len(list(m.parameters())) for m in members):
            raise ValueError(
                "Members of an ensemble must not share parameters: the backbone factory must return a new network at "
                "every call."
            )
        return add_scales(members, KIND)

    def loss(model: nn.ModuleList, batch: Any) -> Tensor:
        assert method.loss is not None
        return torch.stack([method.loss(member, batch) for member in members_of(model)]).sum()

    def members_of(model: nn.ModuleList) -> Iterator[Model]:
        return cast(Iterator[Model], iter(model))

    def finish(
        model: nn.ModuleList, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /
    ) -> None:
        for member in members_of(model):
            method.finish(member, train, val, settings)
        calibrate(model, val, settings)

    def calibrate(model: nn.ModuleList, val: Iterable[Any], settings: Settings = Settings(), /) -> None:
        calibrate_mixture(
            model,
            KIND,
            lambda x: predict_members(model, x),
            val,
            logit_scale=mean_scale(map(logit_scale_of, model)),
            fixed_amplitude=settings.amplitude is not None,
        )

    def predict(model: nn.ModuleList, x: Any) -> Prediction:
        return combine(predict_members(model, x), scales_of(model, KIND))

    def predict_members(model: nn.ModuleList, x: Any) -> list[Prediction]:
        return [method.predict(member, x) for member in members_of(model)]

    return Method(
        build,
        predict,
        loss if method.loss else None,
        finish,
        method.transform,
        members=Members(method, size),
        calibrate=calibrate,
        settings=method.settings,
    )


def mean_scale(scales: Iterable[float]) -> float:
    """The geometric mean."""
    logs = [math.log(scale) for scale in scales]
    return math.exp(sum(logs) / len(logs))


def combine(predictions: Sequence[Prediction], scales: Scales = AS_THEY_ARE) -> Prediction:
    """The members' predictions as one; without hidden vectors, which members do not share.

    scales  of the ensemble as a whole
    """
    mixture, p_value = mix(predictions, scales), mean_of([p.p_value for p in predictions])
    if p_value is None:
        return mixture
    smallest = max(p.smallest_p_value or 0.0 for p in predictions)
    if len(predictions) == 1:
        rows = predictions[0].num_reference
        return dataclasses.replace(mixture, p_value=p_value, smallest_p_value=smallest or None, num_reference=rows)
    return dataclasses.replace(mixture, p_value=(2 * p_value).clamp_max(1), smallest_p_value=min(1.0, 2 * smallest))
