"""Rows of a table, the network for them, and its training: what both scikit-learn estimators are made of.

    x -> (x - shift) / scale -> ResFFN, bounded -> phi(h)^T B

A row of weight w counts as w rows: in the moments that standardise and in the loss.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afield.backbones.resffn import ResFFN
from afield.errors import Diverged
from afield.experiment.training import make_optimizer, schedule
from afield.model.convert import sngp
from afield.model.evaluating import evaluating
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction
from afield.settings import Settings

CHUNK = 4096  # rows at a time, without gradients
LENGTH_SCALE_FRACTION = 1.5  # of the median distance between hidden vectors, where no length scale is given
_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "categorical": lambda f, y: F.cross_entropy(f, y, reduction="none"),
    "gaussian": lambda f, y: 0.5 * (f - y).square().sum(1),
}


@dataclass(frozen=True)
class Rows:
    """Inputs (N, d) in float64, targets (N,) of classes or (N, K) of numbers, weights (N,)."""

    x: Tensor
    y: Tensor
    weight: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> "Rows":
        return Rows(self.x[index], self.y[index], self.weight[index])

    def __add__(self, other: "Rows") -> "Rows":
        return Rows(torch.cat([self.x, other.x]), torch.cat([self.y, other.y]), torch.cat([self.weight, other.weight]))

    def merged(self) -> "Rows":
        """Equal rows as one, in an order of their own: then a weight of 2 and a row given twice are the same data."""
        table = torch.cat([self.x, self.y.reshape(len(self), -1).double()], dim=1)
        distinct, which = table.unique(dim=0, return_inverse=True)
        first = torch.full((len(distinct),), len(self)).scatter_reduce(0, which, torch.arange(len(self)), "amin")
        weight = torch.zeros(len(distinct), dtype=torch.float64).index_add_(0, which, self.weight)
        return replace(self[first], weight=weight)

    def repeated(self) -> "Rows":
        """Every row as often as its weight says, with weight 1; at least as many rows as there are."""
        weight = self.weight * max(1.0, len(self) / float(self.weight.sum()))
        ends = weight.cumsum(0).round().long()
        again = self[torch.repeat_interleave(torch.arange(len(self)), ends.diff(prepend=ends.new_zeros(1)))]
        return replace(again, weight=torch.ones_like(again.weight))

    def moments(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted mean and standard deviation of the columns of values (N, k); 1 where a column is constant."""
        part = (self.weight / self.weight.sum())[:, None]
        mean = (part * values).sum(0)
        std = (part * (values - mean).square()).sum(0).sqrt()
        return mean, torch.where(std > 1e-9 * (1 + mean.abs()), std, torch.ones_like(std))

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """What `fit_posterior`, `fit_head` and `calibrate` take."""
        return [(part.x, part.y) for part in self.parts()]

    def parts(self) -> Iterator["Rows"]:
        return (self[start : start + CHUNK] for start in range(0, len(self), CHUNK))


def split(groups: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices to train on and `count` to hold out, in proportion to the groups; one of every group is trained on."""
    order = torch.randperm(len(groups), generator=generator)
    order = order[groups[order].argsort(stable=True)]
    ordered = groups[order]
    first = torch.ones(len(order), dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    candidates = order[~first]
    if not 0 < count <= len(candidates):
        return torch.arange(len(groups)), order[:0]
    held = candidates[torch.linspace(0, len(candidates) - 1, count).round().long()]
    rest = torch.ones(len(groups), dtype=torch.bool)
    rest[held] = False
    return rest.nonzero().flatten(), held


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


def network(
    in_features: int, out_features: int, *, depth: int, width: int, dropout: float, bound: float | None, **head: Any
) -> SNGP:
    """An untrained network for a table; `head`: options of `GaussianProcessHead`."""
    hidden = ResFFN(in_features, depth=depth, width=width, dropout=dropout)
    net = nn.Sequential(Standardize(in_features), hidden, nn.Linear(width, out_features))
    model = sngp(net, None if bound is None else {"1.*.branch.*": bound}, **head).double()
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

    epochs: int
    batch_size: int
    learning_rate: float
    head_learning_rate: float
    weight_decay: float
    patience: int | None
    tol: float
    report: Callable[[str], None] = field(default=lambda line: None)


@dataclass(frozen=True)
class History:
    """Mean losses of every epoch, and on the held-out rows where there are any."""

    loss: list[float]
    held_out: list[float]


def train(model: SNGP, rows: Rows, held: Rows, how: Training) -> History:
    """Gradient steps on shuffled batches, in float32; stops on held-out loss, or on training loss without such rows.

    With patience and held-out rows the weights end where the held-out loss was least.
    """
    net = model.net
    assert isinstance(net, nn.Sequential)
    body, loss_of, history = net[1:].float(), _LOSSES[model.head.likelihood], History([], [])
    (z, y, w), (z_held, y_held, w_held) = ((net[0](r.x).float(), _single(r.y), r.weight.float()) for r in (rows, held))
    w, w_held = w / w.mean(), w_held / w_held.sum()
    settings = Settings(
        optimizer="adamw",
        epochs=how.epochs,
        learning_rate=how.learning_rate,
        head_learning_rate=how.head_learning_rate,
        weight_decay=how.weight_decay,
    )
    optimizer = make_optimizer(model, settings)
    steps = how.epochs * math.ceil(len(rows) / how.batch_size)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(settings, steps))
    best, waited, kept = math.inf, 0, None
    for epoch in range(1, how.epochs + 1):
        body.train()
        total = 0.0
        for index in torch.randperm(len(rows)).split(how.batch_size):
            optimizer.zero_grad()
            loss = (w[index] * loss_of(body(z[index]), y[index])).mean()
            loss.backward()
            optimizer.step()
            decay.step()
            total += float(loss.detach()) * len(index)
        if not math.isfinite(total):
            raise Diverged(
                f"The loss became {total} in epoch {epoch}: use a learning_rate below {how.learning_rate:g}, or look "
                "for extreme values in the table."
            )
        history.loss.append(total / len(rows))
        if len(held):
            with evaluating(body):
                history.held_out.append(float((w_held * loss_of(body(z_held), y_held)).sum()))
        watched = (history.held_out or history.loss)[-1]
        how.report(f"epoch {epoch}: loss {history.loss[-1]:.4f}" + f", held out {watched:.4f}" * bool(len(held)))
        if watched < best - how.tol:
            best, waited = watched, 0
            kept = {name: value.clone() for name, value in body.state_dict().items()}
        elif (waited := waited + 1) == how.patience:
            break
    if kept is not None and how.patience is not None and len(held):
        body.load_state_dict(kept)
    body.double().eval()
    return history


def predict(model: SNGP, x: Tensor) -> Prediction:
    return Prediction.cat([model.predict(part) for part in x.split(CHUNK)])


def _single(y: Tensor) -> Tensor:
    return y.float() if y.is_floating_point() else y
