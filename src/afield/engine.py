"""The training loop, in full view.

A run is decided by its seed: weights, order of examples and dropout masks. With a checkpoint, a training that was
killed goes on after its last finished epoch and ends where it would have ended, bit for bit.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler, TensorDataset

from afield.methods import Method
from afield.tasks import Settings, Task

OnEpoch = Callable[[int, float], None]


def fit(
    task: Task,
    method: Method,
    *,
    seed: int = 0,
    checkpoint: Path | None = None,
    on_epoch: OnEpoch = lambda epoch, loss: None,
    **changes: Any,
) -> nn.Module:
    """Build, train and finish a model on a task.

    checkpoint  file that is written after every epoch, and read at the start if it is there
    on_epoch    hears of every epoch's number, from 1, and mean loss
    changes     to the task's `Settings`, such as epochs=10
    """
    settings = replace(task.settings, **changes)
    torch.manual_seed(seed)
    model = method.build(task.backbone, task.num_outputs, settings)
    if method.loss is not None:
        train(model, task, method, settings, seed=seed, checkpoint=checkpoint, on_epoch=on_epoch)
    method.finish(model, batches(task.train), batches(task.val), settings)
    return model.eval()


def train(
    model: nn.Module,
    task: Task,
    method: Method,
    settings: Settings,
    *,
    seed: int,
    checkpoint: Path | None,
    on_epoch: OnEpoch,
) -> None:
    """Gradient steps on shuffled batches."""
    assert method.loss is not None
    shuffle = torch.Generator()
    loader = training_batches(task, settings, shuffle)
    optimizer = make_optimizer(model, settings)
    factor = schedule(settings, settings.epochs * len(loader))
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    parts = {"model": model, "optimizer": optimizer, "decay": decay}
    done = _resume(checkpoint, parts)
    model.train()
    for epoch in range(done, settings.epochs):
        shuffle.manual_seed(_mixed(seed, epoch))
        total, count = 0.0, 0
        for batch in loader:
            batch = method.transform(task.augment(batch))
            optimizer.zero_grad()
            loss = method.loss(model, batch)
            loss.backward()
            optimizer.step()
            decay.step()
            total, count = total + float(loss.detach()) * len(batch[-1]), count + len(batch[-1])
        if not math.isfinite(total):
            raise ValueError(
                f"The loss became {total} in epoch {epoch + 1}. Use a smaller learning rate than "
                f"{settings.learning_rate:g}, or some warm-up."
            )
        _keep(checkpoint, parts, epoch + 1)
        on_epoch(epoch + 1, total / count)


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The output layer, the last of the model to be registered, may have a learning rate of its own."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    head = _output_parameters(model) if settings.head_learning_rate is not None else set()
    groups = []
    for of_head in (False, True):
        for matrix in (False, True):
            chosen = [p for p in parameters.values() if (id(p) in head) == of_head and (p.dim() > 1) == matrix]
            if chosen:
                rate = settings.head_learning_rate if of_head else settings.learning_rate
                groups.append({"params": chosen, "lr": rate, "weight_decay": settings.weight_decay if matrix else 0.0})
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=0.9, nesterov=True, fused=True)
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=settings.learning_rate, fused=True)


def schedule(settings: Settings, steps: int) -> Callable[[int], float]:
    """The factor of the learning rate at every step: it rises during the warm-up, then falls."""
    warmup = round(settings.warmup * steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        part = min(1.0, (step - warmup) / max(1, steps - warmup))
        if settings.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * part))
        if settings.schedule == "linear":
            return 1 - part
        if settings.schedule == "steps":
            return 0.2 ** sum(part >= milestone for milestone in (0.3, 0.6, 0.8))
        return 1.0

    return factor


def training_batches(task: Task, settings: Settings, shuffle: torch.Generator) -> DataLoader[Any]:
    """Batches in the order that the generator decides, every example once an epoch."""
    if task.order is None:
        return _loader(task.train, settings.batch_size, RandomSampler(task.train, generator=shuffle))
    return DataLoader(task.train, batch_size=None, sampler=_Order(task, settings.batch_size, shuffle))


def batches(data: Dataset[Any], size: int = 1024) -> DataLoader[Any]:
    """Batches in order, every example once."""
    return _loader(data, size, SequentialSampler(data))  # type: ignore[arg-type]


def _loader(data: Dataset[Any], size: int, order: Sampler[int]) -> DataLoader[Any]:
    if isinstance(data, TensorDataset):  # a batch at a time: one by one, small networks would wait for their data
        return DataLoader(data, batch_size=None, sampler=BatchSampler(order, size, drop_last=False))
    return DataLoader(data, size, sampler=order)


class _Order(Sampler[list[int]]):
    """The task's own batches, drawn anew in every epoch."""

    def __init__(self, task: Task, size: int, generator: torch.Generator) -> None:
        self.task, self.size, self.generator = task, size, generator

    def __iter__(self) -> Iterator[list[int]]:
        assert self.task.order is not None
        return (batch.tolist() for batch in self.task.order(self.size, self.generator))

    def __len__(self) -> int:
        return math.ceil(len(self.task.train) / self.size)


def _output_parameters(model: nn.Module) -> set[int]:
    """Parameters of the last child, of every member for an ensemble."""
    if isinstance(model, nn.ModuleList):
        return set().union(*map(_output_parameters, model))
    net = getattr(model, "net", model)
    return {id(p) for p in list(net.children())[-1].parameters()}


def _mixed(seed: int, epoch: int) -> int:
    """One seed of two numbers: neighbouring seeds must not see each other's epochs."""
    return int(torch.randint(2**62, (epoch + 1,), generator=torch.Generator().manual_seed(seed))[-1])


def _keep(checkpoint: Path | None, parts: dict[str, Any], epoch: int) -> None:
    if checkpoint is None:
        return
    state = {name: part.state_dict() for name, part in parts.items()}
    temporary = checkpoint.with_suffix(".tmp")
    torch.save({**state, "epoch": epoch, "random": torch.get_rng_state()}, temporary)
    os.replace(temporary, checkpoint)


def _resume(checkpoint: Path | None, parts: dict[str, Any]) -> int:
    """Bring everything back to the last finished epoch; its number, or 0 where there is nothing to go on from."""
    if checkpoint is None or not checkpoint.exists():
        return 0
    state = torch.load(checkpoint, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["random"])
    return int(state["epoch"])
