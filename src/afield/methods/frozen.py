"""A frozen backbone: only the output layer is fitted, by convex optimisation on hidden vectors.

frozen-dnn      a dense layer:  min over W, c   sum_i -log p(y_i | W h_i + c) + r/2 |W|^2
frozen-attach   the same layer, kept as the mean, with a variance over its hidden vectors by `afield.attach`
frozen-gp       a Gaussian-process output layer by `afield.fit_head`

Minutes, where a fine-tuned network takes hours, and as good as the backbone is: meant for pretrained ones. r is the
settings' ridge; their bound, epochs and learning rates do not matter. Most of the time goes into the backbone, which
sees every input once: fitting and predicting remember its hidden vectors.
"""

import hashlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from afield.gp.likelihoods import likelihood_for
from afield.methods.dense import Dense, fit_noise, predict_hidden
from afield.methods.gp import of_calibration, of_head
from afield.methods.method import BackboneFactory, Method
from afield.model.calibration import calibrate
from afield.model.convert import attach, sngp
from afield.model.evaluating import evaluating
from afield.model.output_weights import fit_head
from afield.model.posterior import fit_posterior
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction
from afield.settings import Settings

_STEPS = 100
_MOST_BYTES = 2**30  # of hidden vectors that are remembered
_MEMORY: "weakref.WeakKeyDictionary[nn.Module, dict[bytes, Tensor]]" = weakref.WeakKeyDictionary()
Examples = list[tuple[Tensor, Tensor]]


def frozen_dense() -> Method[Dense]:
    """The backbone with a dense output layer fitted to it."""

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> Dense:
        return Dense(backbone, num_outputs, settings).requires_grad_(False)

    def finish(model: Dense, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /) -> None:
        fit_linear(model[1], hidden(model[0], train), settings.ridge)  # type: ignore[arg-type]
        fit_noise(model, train, val, settings)

    def predict(model: Dense, x: Any) -> Prediction:
        return predict_hidden(model, recall(model[0], x))

    return Method(build, predict, None, finish)


def frozen_attach() -> Method[SNGP]:
    """The backbone with a dense output layer fitted to it, and a variance attached to that."""

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> SNGP:
        return attach(nn.Sequential(*Dense(backbone, num_outputs, settings)), **of_head(settings))

    def finish(model: SNGP, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /) -> None:
        head, (seen, held_out) = _head_alone(model), _hidden_of(model, train, val)
        assert isinstance(head.head.mean, nn.Linear)
        fit_linear(head.head.mean, seen, settings.ridge)
        fit_posterior(head, seen, progress=False)
        calibrate(head, held_out, **of_calibration(settings, seen), progress=False)

    return Method(build, _predict, None, finish)


def frozen_gp() -> Method[SNGP]:
    """The backbone with a Gaussian-process output layer fitted to it."""

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> SNGP:
        return sngp(nn.Sequential(*Dense(backbone, num_outputs, settings)), None, freeze=True, **of_head(settings))

    def finish(model: SNGP, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /) -> None:
        head, (seen, held_out) = _head_alone(model), _hidden_of(model, train, val)
        fit_head(head, seen, progress=False)
        fit_posterior(head, seen, progress=False)
        calibrate(head, held_out, **of_calibration(settings, seen), progress=False)

    return Method(build, _predict, None, finish)


def fit_linear(layer: nn.Linear, examples: Examples, ridge: float) -> None:
    """The optimum of the objective above, by L-BFGS in float64."""
    h, y = (torch.cat(parts) for parts in zip(*examples, strict=True))
    h = torch.cat([h.double(), torch.ones(len(h), 1, dtype=torch.float64, device=h.device)], dim=1)
    loss, y = likelihood_for(y).loss, y.reshape(len(y), -1).double() if y.is_floating_point() else y
    weights = torch.zeros(layer.out_features, h.shape[1], dtype=torch.float64, device=h.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=_STEPS, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def objective() -> Tensor:
        return (loss(h @ weights.T, y).sum() + ridge / 2 * weights[:, :-1].square().sum()) / len(h)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(closure)
    with torch.no_grad():
        layer.weight.copy_(weights[:, :-1])
        layer.bias.copy_(weights[:, -1])


def hidden(backbone: nn.Module, batches: Iterable[Any]) -> Examples:
    """Hidden vectors and targets, batch by batch."""
    return [(recall(backbone, x), y) for x, y in batches]


def recall(backbone: nn.Module, x: Tensor) -> Tensor:
    """The hidden vectors of x: of inputs that this backbone has seen, from memory."""
    memory = _MEMORY.setdefault(backbone, {})
    keys = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in x.cpu().numpy()]
    new = {key: index for index, key in enumerate(keys) if key not in memory}
    with evaluating(backbone):
        found = dict(zip(new, backbone(x[list(new.values())]), strict=True)) if new else {}
    rows = [found[key] if key in found else memory[key] for key in keys]
    if rows and (len(memory) + len(found)) * rows[0].nbytes <= _MOST_BYTES:
        memory |= found
    return torch.stack(rows)


def _predict(model: SNGP, x: Any) -> Prediction:
    return _head_alone(model).predict(recall(_backbone(model), x))


def _hidden_of(model: SNGP, *loaders: Iterable[Any]) -> list[Examples]:
    return [hidden(_backbone(model), loader) for loader in loaders]


def _backbone(model: SNGP) -> nn.Module:
    return model.net.get_submodule("0")


def _head_alone(model: SNGP) -> SNGP:
    """The model's own head as a model of hidden vectors."""
    return SNGP(model.head, "", kind=model.kind, settings=model.settings, reasons={})
