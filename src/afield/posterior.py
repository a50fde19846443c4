"""Fit the posterior in one pass over the training data, exactly, on one process or many.

The sum of a sharded pass is the sum of the shards: each rank adds up its own examples from zero, the sums are
reduced once, the ridge enters once at factorisation. Each example must be seen exactly once, so under
torch.distributed the pass shards a map-style data set itself: DistributedSampler pads by repeating.
"""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset, default_collate

from afield.batch import device_of, evaluating, split_batch, track
from afield.convert import SNGP
from afield.head import GaussianProcessHead
from afield.laplace import NotFitted, Precision
from afield.lowrank import LowRank

_CACHE_BYTES = 2**30  # hidden vectors kept in memory between two looks at the data
_SCALE_ROWS = 4096  # hidden vectors whose distances set the length scale


def fit_posterior(
    model: SNGP, loader: Iterable[Any], *, fast: bool = False, sharded: bool | None = None, progress: bool | None = None
) -> int:
    """Fit the posterior precision by one pass without gradients, in evaluation mode; returns the examples it saw.

    loader    batches of training data, without augmentation; any earlier posterior is forgotten
    fast      form batch products in the model's dtype: quicker, and two digits poorer
    sharded   under torch.distributed: whether each rank's loader already yields its own part, every example once.
              None shards a map-style data set here, whatever its sampler, and refuses what it cannot shard
    progress  show a progress bar; None shows it on a terminal

    For a gaussian likelihood with targets in the batches, the noise variance is estimated from the residuals.
    """
    head = model.head
    if head.precision.momentum is not None and _distributed():
        raise ValueError("Moving averages of several processes do not add up: use momentum=None.")
    with evaluating(model):
        head.reset_posterior()
        if _distributed():
            share_statistics(model.net, skip=model.head)
        try:
            twice = not head.random_features.adapted
            _fit(model, Hidden(model, _shard(loader, sharded), keep=twice, progress=progress), fast)
        except BaseException:
            head.reset_posterior()  # part of the data is worse than none: it would answer as if it were all
            raise
    if not (sharded and _distributed()):  # a rank's own part says nothing about the whole
        _warn_if_incomplete(loader, head.num_observed)
    return head.num_observed


def _fit(model: SNGP, examples: "Hidden", fast: bool) -> None:
    head = model.head
    if not head.random_features.adapted:
        adapt(model, examples)
    residuals = torch.zeros(2, dtype=torch.float64)
    for h, target in examples:
        head.observe(h, fast=fast)
        if head.likelihood == "gaussian" and target is not None:
            error = check_target(target, head) - head(h).double()
            residuals += torch.tensor([float(error.square().sum()), float(error.numel())], dtype=torch.float64)
    residuals = _reduce(head.precision, residuals)
    if not head.num_observed:
        raise ValueError("fit_posterior got an empty loader: there is nothing to fit the posterior to.")
    if residuals[1]:
        gram = head.precision.data[0]
        head.set_scalars(noise=noise_variance(head, gram, float(residuals[0]), int(residuals[1])))
    head.precision.factor(float(head.ridge), float(head.noise))


def update(model: SNGP, loader: Iterable[Any], *, progress: bool | None = None) -> int:
    """Add new examples to a fitted posterior, after deployment, without the old data; returns the total.

    The output weights stay: only the variance learns. p-values are off until `afield.calibrate` runs again.
    """
    return _revise(model, loader, model.head.observe, progress)


def downdate(model: SNGP, loader: Iterable[Any], *, progress: bool | None = None) -> int:
    """Remove examples from a fitted posterior, exactly, as if they had never been observed; returns the total.

    The model must be the one that observed them (same weights), because their features and curvature are recomputed.
    """
    return _revise(model, loader, model.head.unobserve, progress)


def merge(model: SNGP, other: SNGP) -> int:
    """Add all examples that a copy of the same model has observed, elsewhere, exactly; returns the total.

    Both must map inputs to the same features: copies of one trained model, each fitted on its own part of the data.
    """
    mine, theirs = model.head.random_features.state_dict(), other.head.random_features.state_dict()
    if mine.keys() != theirs.keys() or any(not torch.equal(mine[k], theirs[k].to(mine[k].device)) for k in mine):
        raise ValueError("Cannot merge posteriors over different random features: fit copies of one model.")
    model.head.precision.merge(other.head.precision)
    return model.head.num_observed


def _revise(model: SNGP, loader: Iterable[Any], change: Any, progress: bool | None) -> int:
    if not model.head.precision.fitted:
        raise NotFitted("The posterior is not fitted: call afield.fit_posterior(model, train_loader) first.")
    with evaluating(model):
        for h, _ in Hidden(model, loader, keep=False, progress=progress):
            change(h)
    return model.head.num_observed


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
    if _distributed():
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


def noise_variance(head: GaussianProcessHead, gram: Tensor, squares: float, count: int) -> float:
    """The noise variance s^2 = RSS / (n - effective parameters), at its fixed point (MacKay's evidence update).

    Weights trained on these examples fit part of the noise: trace((G + r s^2 I)^-1 G) directions' worth of it.
    """
    values = torch.linalg.eigvalsh(gram).clamp_min(0)
    rows, noise = count / head.out_features, squares / count
    for _ in range(100):
        used = 0.0 if head.mean is not None else float((values / (values + float(head.ridge) * noise)).sum())
        before, noise = noise, max(squares / head.out_features / max(rows - used, 1.0), 1e-12)
        if abs(noise / before - 1) < 1e-12:
            break
    return noise


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def share_statistics(model: nn.Module, skip: nn.Module | None = None) -> None:
    """The first rank's buffers on all: DDP shares batch statistics before each step, but not after the last one.

    Those of bounds are the same on every rank by their own doing; so are those of a module to `skip`.
    """
    own = set() if skip is None else set(map(id, skip.buffers()))
    for name, buffer in model.named_buffers():
        if id(buffer) not in own and "parametrizations" not in name.split("."):
            dist.broadcast(buffer, src=0)


def _reduce(precision: Precision | LowRank, residuals: Tensor) -> Tensor:
    """Sum over the ranks, once; a rank without examples adds zeros."""
    residuals = residuals.to(precision.count.device)
    if _distributed():
        precision.all_reduce()
        dist.all_reduce(residuals)
    return residuals


def _shard(loader: Iterable[Any], sharded: bool | None) -> Iterable[Any]:
    """This rank's part of the loader: every example on exactly one rank, none twice."""
    if sharded or not _distributed():
        return loader
    plain = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not plain:
        raise ValueError(
            "Under torch.distributed, fit_posterior shards a DataLoader over a map-style data set by itself. For other "
            "loaders give each rank its own part, every example once, and say sharded=True."
        )
    assert isinstance(loader, DataLoader)
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


def _warn_if_incomplete(loader: Iterable[Any], seen: int) -> None:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return
    expected = len(loader.dataset)  # type: ignore[arg-type]
    if seen != expected:
        warnings.warn(
            f"The posterior saw {seen} examples, the data set has {expected}. Use a loader with drop_last=False and "
            "without a resampling sampler, so that every example counts once.",
            stacklevel=3,
        )
