"""Training of a table's network, on weighted rows: each member by its own loss, all in the same steps.

The network ends where the held-out loss of the ensemble was least.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, RandomSampler, TensorDataset

from afield.errors import Diverged
from afield.estimators.network import Members, member_logits
from afield.estimators.rows import Rows
from afield.experiment.training import load_batches, train
from afield.gp.likelihoods import LIKELIHOODS
from afield.model.evaluating import evaluating
from afield.model.sngp_model import SNGP
from afield.settings import Settings

_STEPS_OF_COPIES = 16  # an epoch, of a table of thousands of rows with a dozen different ones


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

    @property
    def watched(self) -> list[float]:
        return self.held_out or self.loss


def train_network(model: SNGP, rows: Rows, held: Rows, how: Training) -> History:
    """Gradient steps on shuffled batches, in float32; stops on held-out loss, or on training loss without such rows.

    With patience and held-out rows the weights end where the held-out loss was least.
    """
    net, head = model.net, model.head
    assert isinstance(net, nn.Sequential)
    body, loss_of, history = net[1:].float(), LIKELIHOODS[head.likelihood].loss, History([], [])
    (z, y, w), (z_held, y_held, w_held) = ((net[0](r.x).float(), _single(r.y), r.weight.float()) for r in (rows, held))
    w, w_held = w / w.mean(), w_held / w_held.sum()
    best, waited, kept = math.inf, 0, None

    def loss(body: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        inputs, target, weight = batch
        assert isinstance(body, nn.Sequential)
        hidden = body[0]
        assert isinstance(hidden, Members)
        logits = member_logits(head, hidden.each(inputs))
        losses = loss_of(logits.flatten(0, 1), target.repeat(len(logits), *[1] * (target.dim() - 1)))
        return (weight.repeat(len(logits)) * losses).mean()

    def after_epoch(epoch: int, mean_loss: float) -> bool:
        """Whether there was no gain for long enough."""
        nonlocal best, waited, kept
        history.loss.append(mean_loss)
        if len(held):
            with evaluating(body):
                history.held_out.append(float((w_held * loss_of(body(z_held), y_held)).sum()))
        watched = history.watched[-1]
        how.report(f"epoch {epoch}: loss {history.loss[-1]:.4f}" + f", held out {watched:.4f}" * bool(len(held)))
        if watched < best - how.tol:
            best, waited = watched, 0
            kept = {name: value.clone() for name, value in body.state_dict().items()}
        else:
            waited += 1
        return waited == how.patience

    shuffle, data = torch.Generator(), TensorDataset(z, y, w)
    size = how.settings.batch_size
    passed = max(len(data), min(int(rows.weight.sum()), _STEPS_OF_COPIES * size))
    shuffled = RandomSampler(data, num_samples=passed, generator=shuffle)
    order = BatchSampler(shuffled, size, drop_last=False)
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


def _single(y: Tensor) -> Tensor:
    return y.float() if y.is_floating_point() else y
