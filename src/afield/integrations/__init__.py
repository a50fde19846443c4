"""afield in other people's tools: Hugging Face, Lightning, timm. Each module needs its own extra, and says so."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset

_DEFAULT_BATCH_SIZE = 64


def every_example_once(loader: Iterable[Any], *, max_batches: int | None = None) -> Iterable[Any]:
    """A loader of the same data set that gives every example once, in order: none dropped, repeated or sharded.

    A training loader may shuffle, drop the last batch and, with several processes, shard and pad by repeating; a
    posterior and a calibration must see the data as they are. Loaders without a length and loaders that make their own
    batches are returned unchanged.

    max_batches  take only this many batches, the first ones
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or not loader.batch_sampler:
        return loader
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or _DEFAULT_BATCH_SIZE
    data = loader.dataset
    if max_batches is not None:
        data = Subset(data, range(min(max_batches * size, len(data))))  # type: ignore[arg-type]
    return DataLoader(
        data,
        batch_sampler=BatchSampler(SequentialSampler(data), size, drop_last=False),  # type: ignore[arg-type]
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        pin_memory=loader.pin_memory,
        generator=torch.Generator(),  # a loader draws a seed whenever it starts: not from the training's random state
    )
