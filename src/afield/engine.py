"""The training loop, in full view."""

from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from afield.methods import Method
from afield.tasks import Task


def fit(
    task: Task,
    method: Method,
    *,
    seed: int = 0,
    epochs: int | None = None,
    learning_rate: float | None = None,
    on_epoch: Callable[[int, float], None] = lambda epoch, loss: None,
) -> nn.Module:
    """Build, train and finish a model on a task; `on_epoch` hears of every epoch's number and mean loss.

    Adam with cosine decay: at a constant rate the last step decides how good a bounded network happens to be.
    """
    torch.manual_seed(seed)
    settings = task.defaults
    model = method.build(task.backbone, task.num_outputs)
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate or settings.learning_rate)
    loader = DataLoader(task.train, settings.batch_size, shuffle=True)
    epochs = epochs or settings.epochs
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    model.train()
    for epoch in range(epochs):
        total = 0.0
        for batch in loader:
            optimizer.zero_grad()
            loss = method.loss(model, batch)
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(batch[1])
        on_epoch(epoch + 1, total / len(task.train))
    method.finish(model, batches(task.train), batches(task.val))
    return model.eval()


def batches(data: TensorDataset, size: int = 1024) -> DataLoader:
    """Batches in order, every example once."""
    return DataLoader(data, size)
