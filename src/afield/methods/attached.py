"""`attach` and `attach-sn`: a dense network as it is trained, its output layer kept as the mean, a variance attached.

They are trained as `dnn` and `dnn-sn` are, and have the weights of a finished run of theirs where there is one; what is
added is what `afield.fit_posterior` and `afield.calibrate` find. Predicted classes are those of the dense network.
`attach-sn` is SNGP but for its mean: bounded hidden layers, and a Gaussian process for the variance alone.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from afield.methods.dense import OUTPUT
from afield.methods.gp import finish_gp, of_head, predict_gp
from afield.methods.method import BackboneFactory, Method
from afield.model.convert import attach
from afield.model.sngp_model import SNGP
from afield.settings import Settings


def attached(trained_as: Method[Any]) -> Method[SNGP]:
    """A network of `trained_as`, a dense method, with a variance attached after training."""

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> SNGP:
        net = nn.Sequential(*trained_as.build(backbone, num_outputs, settings))
        with torch.random.fork_rng(devices=[]):  # training draws what it draws without a variance
            return attach(net, **{"likelihood": settings.likelihood, **of_head(settings)}).requires_grad_(True)

    def finish(model: SNGP, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /) -> None:
        finish_gp(model.requires_grad_(False), train, val, settings)

    def take_over(model: SNGP, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's state with the weights of a dense one."""
        mean, kept = f"net.{model.head_name}.mean.", model.state_dict()
        for name, t in state.items():
            own = mean + name.removeprefix(f"{OUTPUT}.") if name.startswith(f"{OUTPUT}.") else f"net.{name}"
            if own in kept:  # an output layer that was a convolution is a Linear here
                kept[own] = t.reshape(kept[own].shape) if own.startswith(mean) else t
        return kept

    return Method(build, predict_gp, finish=finish, trained_as=trained_as, take_over=take_over)
