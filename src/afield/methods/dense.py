"""Dense output layer: `dnn`, and `dnn-sn` with bounded hidden layers."""

from typing import Any

from torch import nn

from afield.batch import evaluating
from afield.convert import bound_layers
from afield.methods.method import BackboneFactory, Method
from afield.predictive import Prediction, to_probs


def dense(c: float | None = None) -> Method:
    """A network with a dense output layer; every hidden layer is bounded by c unless that is None."""

    def build(backbone: BackboneFactory, num_outputs: int) -> nn.Module:
        net = with_output_layer(backbone, num_outputs)
        bound_layers(net, c, skip="1")
        return net

    return Method(build, predict)


def with_output_layer(backbone: BackboneFactory, num_outputs: int) -> nn.Sequential:
    """The backbone followed by a Linear."""
    hidden = backbone()
    return nn.Sequential(hidden, nn.Linear(int(hidden.out_features), num_outputs))  # type: ignore[arg-type]


def predict(model: nn.Module, x: Any) -> Prediction:
    assert isinstance(model, nn.Sequential)
    with evaluating(model):
        hidden = model[0](x)
        logits = model[1](hidden)
    return Prediction(logits, probs=to_probs(logits), features=hidden)
