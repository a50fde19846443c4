"""Dense output layer: `dnn`, and `dnn-sn` with bounded hidden layers."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from afield.gp.likelihoods import LIKELIHOODS
from afield.methods.method import BackboneFactory, Method, check_likelihood
from afield.model.convert import BoundRules, bound_layers
from afield.model.evaluating import evaluating
from afield.prediction.positions import at_positions
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import to_probs
from afield.settings import Settings

OUTPUT = "1"  # name of the output layer
_LAYERS = {0: nn.Linear, 1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Dense(nn.Sequential):
    """A backbone and a Linear; a 1x1 convolution over hidden vectors at positions, of which `dimensions` tells.

    For real targets it has a noise variance, which `finish` takes from validation data."""

    noise: Tensor

    def __init__(self, backbone: BackboneFactory, num_outputs: int, settings: Settings) -> None:
        hidden = backbone()
        dimensions, width = getattr(hidden, "dimensions", 0), int(hidden.out_features)  # type: ignore[arg-type]
        output = _LAYERS[dimensions](width, num_outputs, *[1] * bool(dimensions))  # type: ignore[arg-type]
        super().__init__(hidden, output)
        self.likelihood = check_likelihood(settings)
        self.register_buffer("noise", torch.ones((), dtype=torch.float64))


def dense(*, bounded: bool = False) -> Method[Dense]:
    """A network with a dense output layer; `bounded`: hidden layers have the settings' bound."""

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> Dense:
        net = Dense(backbone, num_outputs, settings)
        bound_layers(net, bound_rules(settings) if bounded else None, skip=OUTPUT)
        return net

    return Method(build, predict, finish=fit_noise)


def bound_rules(settings: Settings) -> BoundRules:
    """What is bounded in a network whose part 0 is the backbone."""
    if not settings.bounded or settings.bound is None:
        return settings.bound
    return {f"0.{name}": settings.bound for name in settings.bounded}


def predict(model: nn.Sequential, x: Any) -> Prediction:
    with evaluating(model):
        return predict_hidden(model, model[0](x))


@torch.no_grad()
def predict_hidden(model: nn.Sequential, hidden: Tensor) -> Prediction:
    """From the hidden vectors on."""
    output = model[1](hidden)
    if isinstance(model, Dense) and LIKELIHOODS[model.likelihood].noisy:
        variance = torch.zeros_like(output[:, 0])
        return Prediction(output, variance, features=hidden, noise=float(model.noise), likelihood=model.likelihood)
    prediction = Prediction(output, features=hidden)
    return dataclasses.replace(prediction, probs=at_positions(prediction, lambda rows: to_probs(rows.logits)))


def fit_noise(model: Dense, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /) -> None:
    """The noise of a gaussian model: its mean squared error on data that it was not trained on."""
    if not LIKELIHOODS[model.likelihood].noisy:
        return
    squares = [(predict(model, x).logits - y.reshape(len(y), -1)).double().square() for x, y in val]
    model.noise.copy_(torch.cat(squares).mean())
