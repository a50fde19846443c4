"""Hidden vectors and targets of a loader, batch by batch, and what is learnt from them before anything is fitted."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from afield.gp.head import GaussianProcessHead
from afield.model.batches import device_of, split_batch
from afield.model.progress import track
from afield.model.ranks import several_ranks
from afield.model.sngp_model import SNGP

_CACHE_BYTES = 2**30  # hidden vectors kept in memory between two looks at the data


_SCALE_ROWS = 4096  # hidden vectors whose distances set the length scale


class Hidden:
    """Hidden vectors and targets of a loader, batch by batch; iterated again, from memory if they fit.

    keep  whether to keep them for that; who needs one pass alone keeps the memory constant
    """

    def __init__(self, model: SNGP, loader: Iterable[Any], *, keep: bool = True, progress: bool | None = None) -> None:
        self.model, self.loader, self.keep, self.progress = model, loader, keep, progress
        self.device = device_of(model)
        self.odd_target = ""  # what stood in place of targets
        self._cache: list[tuple[Tensor, Tensor | None]] | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        if self._cache is not None:
            for h, target in self._cache:
                yield h.to(self.device), None if target is None else target.to(self.device)
            return
        cache: list[tuple[Tensor, Tensor | None]] = []
        keep, size, rows = self.keep, 0, 0
        for batch in track(self.loader, "hidden features", show=self.progress):
            args, kwargs, target = split_batch(batch, self.device)
            h = self.model.hidden(*args, **kwargs)
            self.model.head.check_finite(h, before=rows)
            rows += h.shape[0]
            if target is not None and not isinstance(target, Tensor):  # file names and the like
                self.odd_target, target = _kind(target), None
            if target is not None and target.shape[:1] != h.shape[:1]:
                raise ValueError(f"A batch has {h.shape[0]} inputs and targets of shape {tuple(target.shape)}.")
            size += h.nbytes
            if keep and size > _CACHE_BYTES:
                keep, cache = False, []
            if keep:
                cache.append((h.cpu(), None if target is None else target.cpu()))
            yield h, target
        if keep:
            self._cache = cache

    def without_target(self, what: str) -> ValueError:
        """The error to raise where a target is needed and there was none."""
        expected = f"{what} expects batches of (inputs, target)"
        if not self.odd_target:
            return ValueError(f"{expected}, got a batch without a target.")
        return ValueError(
            f"{expected} whose target is a tensor of numbers, got {self.odd_target}. Number the classes from 0, and "
            "give them as torch.tensor(...)."
        )


def _kind(value: Any) -> str:
    inner = f" of {type(value[0]).__name__}" if isinstance(value, list | tuple) and value else ""
    return f"{type(value).__name__}{inner}"


def check_target(target: Tensor, head: GaussianProcessHead) -> Tensor:
    """Targets in the form the likelihood wants: class indices (N,), or numbers (N, K)."""
    if head.likelihood in ("gaussian", "poisson"):
        target = target.reshape(target.shape[0], -1).double()
        if target.shape[1] != head.out_features:
            raise ValueError(f"The head has {head.out_features} outputs, the targets have {target.shape[1]} columns.")
        good = torch.isfinite(target) & ((target >= 0) | (head.likelihood == "gaussian"))
        if not bool(good.all()):
            raise ValueError(
                f"{head.likelihood} targets must be finite{' and not negative' * (head.likelihood != 'gaussian')}, "
                f"got others in rows {_rows(~good.all(1))}."
            )
        return target
    classes = max(head.out_features, 2)
    target = target.reshape(-1) if target.dim() == 2 and target.shape[1] == 1 else target
    whole = target.long()
    if target.dim() != 1 or bool((whole != target).any()):
        where = f" (first: rows {_rows(whole != target)})" if target.dim() == 1 else ""
        raise ValueError(
            f"Class targets must be whole numbers of shape (N,), got {target.dtype} {tuple(target.shape)}{where}."
        )
    if whole.numel() and not (int(whole.min()) >= 0 and int(whole.max()) < classes):
        raise ValueError(
            f"The model has {classes} classes (0 to {classes - 1}), the targets run from {int(whole.min())} to "
            f"{int(whole.max())}. Is this the right output layer, or are labels numbered from 1?"
        )
    return whole


def _rows(bad: Tensor) -> list[int]:
    return bad.nonzero().flatten().tolist()[:5]


def adapt(model: SNGP, examples: Hidden) -> None:
    """Set the head's standardisation and length scale from all hidden vectors, the same on every rank."""
    total, rows, step, kept = None, 0, 1, torch.zeros(0)
    for h, _ in examples:
        double = h.double()
        moments = torch.stack([double.new_full(h.shape[1:], h.shape[0]), double.sum(0), double.square().sum(0)])
        total = moments if total is None else total + moments
        # Every step-th row of all the data, so that a loader sorted by class shows all classes alike.
        new = h[-rows % step :: step]
        kept = torch.cat([kept, new]) if rows else new
        rows += h.shape[0]
        while len(kept) > 2 * _SCALE_ROWS:
            kept, step = kept[::2], 2 * step
    if several_ranks():
        width = model.head.in_features
        total = torch.zeros(3, width, dtype=torch.float64, device=examples.device) if total is None else total
        dist.all_reduce(total)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, kept.cpu() if rows else None)
        kept = torch.cat([k.to(total.device) for k in everyone if k is not None])
    if total is None:
        raise ValueError("The loader is empty: there is nothing to take the length scale from.")
    count, first, second = total
    mean = first / count
    std = (second / count - mean.square()).clamp_min(0).sqrt()
    model.head.random_features.adapt(kept, (mean, std))
