"""The network for a table, and its training.

    x -> (x - shift) / scale -> ResFFN, bounded -> phi(h)^T B

Weights of the rows count in the moments that standardise and in the loss.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset

from afield.backbones.resffn import ResFFN
from afield.errors import Diverged
from afield.estimators.rows import CHUNK, Rows
from afield.experiment.training import load_batches, train
from afield.gp.likelihoods import LIKELIHOODS
from afield.model.convert import BoundRules, sngp
from afield.model.evaluating import evaluating
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction
from afield.settings import Settings

LENGTH_SCALE_FRACTION = 1.5  # of the median distance between hidden vectors, where no length scale is given


class Standardize(nn.Module):
    """(x - shift) / scale, column by column, in float64 whatever the rest of the network has."""

    shift: Tensor
    scale: Tensor

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(in_features, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(in_features, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.double() - self.shift) / self.scale


def plain_network(in_features: int, out_features: int, *, depth: int, width: int, dropout: float) -> nn.Module:
    """The network for a table before it is converted."""
    hidden = ResFFN(in_features, depth=depth, width=width, dropout=dropout)
    return nn.Sequential(Standardize(in_features), hidden, nn.Linear(width, out_features))


def network(
    in_features: int, out_features: int, *, depth: int, width: int, dropout: float, bound: float | None, **head: Any
) -> SNGP:
    """An untrained network for a table; `head`: options of `GaussianProcessHead`."""
    net = plain_network(in_features, out_features, depth=depth, width=width, dropout=dropout)
    # Residual layers with a bound keep the distances of the table: the features of the mean see them best.
    rules: BoundRules = None if bound is None else {"1.*.branch.*": bound}
    model = sngp(net, rules, variance_features="same", **head).double()
    model.head.random_features.fraction = LENGTH_SCALE_FRACTION
    return model


def standardize(model: SNGP, rows: Rows) -> None:
    """Take shift, scale and the length scale from the rows."""
    first = model.net.get_submodule("0")
    first.shift, first.scale = rows.moments(rows.x)
    with evaluating(model):
        model.head.random_features.adapt(model.hidden(rows.x[:CHUNK]))


@dataclass(frozen=True)
class Training:
    """How to train. `patience`: epochs without a gain of `tol` after which to stop; None runs them all."""

    settings: Settings
    seed: int
    patience: int | None
    tol: float
    report: Callable[[str], None] = field(default=lambda line: None)


@dataclass(frozen=True)
class History:
    """Mean losses of every epoch, and on the held-out rows where there are any."""

    loss: list[float]
    held_out: list[float]


def train_network(model: SNGP, rows: Rows, held: Rows, how: Training) -> History:
    """Gradient steps on shuffled batches, in float32; stops on held-out loss, or on training loss without such rows.

    With patience and held-out rows the weights end where the held-out loss was least.
    """
    net = model.net
    assert isinstance(net, nn.Sequential)
    body, loss_of, history = net[1:].float(), LIKELIHOODS[model.head.likelihood].loss, History([], [])
    (z, y, w), (z_held, y_held, w_held) = ((net[0](r.x).float(), _single(r.y), r.weight.float()) for r in (rows, held))
    w, w_held = w / w.mean(), w_held / w_held.sum()
    best, waited, kept = math.inf, 0, None

    def loss(body: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        inputs, target, weight = batch
        return (weight * loss_of(body(inputs), target)).mean()

    def after_epoch(epoch: int, mean_loss: float) -> bool:
        """Whether there was no gain for long enough."""
        nonlocal best, waited, kept
        history.loss.append(mean_loss)
        if len(held):
            with evaluating(body):
                history.held_out.append(float((w_held * loss_of(body(z_held), y_held)).sum()))
        watched = (history.held_out or history.loss)[-1]
        how.report(f"epoch {epoch}: loss {history.loss[-1]:.4f}" + f", held out {watched:.4f}" * bool(len(held)))
        if watched < best - how.tol:
            best, waited = watched, 0
            kept = {name: value.clone() for name, value in body.state_dict().items()}
        else:
            waited += 1
        return waited == how.patience

    shuffle, data = torch.Generator(), TensorDataset(z, y, w)
    order = BatchSampler(RandomSampler(data, generator=shuffle), how.settings.batch_size, drop_last=False)
    try:
        train(
            body,
            load_batches(data, order),
            how.settings,
            loss=loss,
            shuffle=shuffle,
            seed=how.seed,
            on_epoch=after_epoch,
        )
    except Diverged as error:
        raise Diverged(f"{error} Or look for extreme values in the table.") from error
    if kept is not None and how.patience is not None and len(held):
        body.load_state_dict(kept)
    body.double().eval()
    return history


def predict(model: SNGP, x: Tensor) -> Prediction:
    return Prediction.cat([model.predict(part) for part in x.split(CHUNK)])


def _single(y: Tensor) -> Tensor:
    return y.float() if y.is_floating_point() else y
