"""afield in other people's tools: Hugging Face, Lightning, timm. Each module needs its own extra, and says so."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset

_BATCH_SIZE = 64


def in_order(loader: Iterable[Any], *, most: int | None = None) -> Iterable[Any]:
    """The data set and the collation of a loader, every example once: none dropped, repeated, weighted or sharded.

    A training loop shuffles, drops the last batch and, with several processes, shards and pads by repeating. A
    posterior and a calibration must not. What has no length or makes its own batches comes back as it is.

    most   only the first batches, this many
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or not loader.batch_sampler:
        return loader
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or _BATCH_SIZE
    data = loader.dataset
    if most is not None:
        data = Subset(data, range(min(most * size, len(data))))  # type: ignore[arg-type]
    return DataLoader(
        data,
        batch_sampler=BatchSampler(SequentialSampler(data), size, drop_last=False),  # type: ignore[arg-type]
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        pin_memory=loader.pin_memory,
        generator=torch.Generator(),  # a loader draws a seed whenever it starts: not from the training's random state
    )
