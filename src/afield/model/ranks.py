"""The processes of torch.distributed that fit one model: are there several, and what each has to see."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset, default_collate

from afield.errors import LostRank


def several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextlib.contextmanager
def explain_lost_ranks(doing: str) -> Iterator[None]:
    """LostRank in place of the backend's own error, if a collective operation fails because another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if not several_ranks() or not is_of_backend(error):
            raise
        raise LostRank(
            f"Rank {dist.get_rank()} lost another process while {doing}: it was killed, ran out of memory, failed with "
            "an error of its own, or kept the others waiting for longer than the process group's timeout. This model "
            "is as it was before the call. Look for the first error among the other ranks, then start all of them "
            f"again. The backend says: {str(error).splitlines()[0]}"
        ) from error


def is_of_backend(error: RuntimeError) -> bool:
    """Whether the processes' connection failed; gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def share_statistics(model: nn.Module, skip: nn.Module | None = None) -> None:
    """The first rank's buffers on all: DDP shares batch statistics before each step, but not after the last one.

    Those of bounds are the same on every rank by their own doing; so are those of a module to `skip`.
    """
    own = set() if skip is None else set(map(id, skip.buffers()))
    for name, buffer in model.named_buffers():
        if id(buffer) not in own and "parametrizations" not in name.split("."):
            dist.broadcast(buffer, src=0)


def shard_loader(loader: Iterable[Any], sharded: bool | None) -> Iterable[Any]:
    """This rank's part of the loader: every example on exactly one rank, none twice."""
    if sharded or not several_ranks():
        return loader
    over = getattr(loader, "over", None)  # of several heads, one reads its targets from the batches of all
    if over is not None:
        return over(shard_loader(loader.loader, sharded))  # type: ignore[attr-defined]
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            "Under torch.distributed, fit_posterior shards a DataLoader over a map-style data set by itself. For other "
            "loaders give each rank its own part, every example once, and say sharded=True."
        )
    indices = range(dist.get_rank(), len(loader.dataset), dist.get_world_size())  # type: ignore[arg-type]
    part = Subset(loader.dataset, indices)
    size = loader.batch_size if loader.batch_size is not None else 64
    return DataLoader(
        part,
        batch_sampler=BatchSampler(SequentialSampler(part), size, drop_last=False),
        num_workers=loader.num_workers,
        collate_fn=default_collate if loader.batch_sampler is None else loader.collate_fn,
        pin_memory=loader.pin_memory,
    )
