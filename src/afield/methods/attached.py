"""`attach`: a dense network as it is trained, its output layer kept as the mean, and a variance attached to it.

It is trained as `dnn` is, and has the weights of a finished `dnn` run where there is one; what is added is what
`afield.fit_posterior` and `afield.calibrate` find. Predicted classes are those of the dense network.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from afield.methods.dense import OUTPUT, Dense
from afield.methods.gp import finish_gp, of_head, predict_gp
from afield.methods.method import BackboneFactory, Method
from afield.model.convert import attach
from afield.model.sngp_model import SNGP
from afield.settings import Settings


def attached(trained_as: Method[Any]) -> Method[SNGP]:
    """A network of `trained_as`, a dense method, with a variance attached after training."""

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> SNGP:
        net = nn.Sequential(*Dense(backbone, num_outputs, settings))
        return attach(net, **{"likelihood": settings.likelihood, **of_head(settings)}).requires_grad_(True)

    def finish(model: SNGP, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /) -> None:
        finish_gp(model.requires_grad_(False), train, val, settings)

    def take_over(model: SNGP, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's state with the weights of a dense one."""
        mean, shapes = f"net.{model.head_name}.mean.", model.state_dict()
        names = {n: mean + n.removeprefix(f"{OUTPUT}.") if n.startswith(f"{OUTPUT}.") else f"net.{n}" for n in state}
        return shapes | {names[n]: t.reshape(shapes[names[n]].shape) for n, t in state.items() if names[n] in shapes}

    return Method(build, predict_gp, finish=finish, trained_as=trained_as, take_over=take_over)
