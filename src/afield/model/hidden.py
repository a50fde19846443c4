"""Hidden vectors, targets and weights of a loader, batch by batch, and what is learnt from them before a fit."""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from afield.gp.features import RandomFeatures
from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS
from afield.gp.observing import check_finite
from afield.gp.precision import check_weights
from afield.model.batches import Field, Inputs, device_of, split_batch
from afield.model.evaluating import evaluating
from afield.model.output_check import check_output
from afield.model.progress import track
from afield.model.ranks import several_ranks
from afield.model.sngp_model import SNGP
from afield.model.targets import check_inferred, other_kind
from afield.outputs import positions

_CACHE_BYTES = 2**30  # hidden vectors kept in memory between two looks at the data
_SCALE_ROWS = 4096  # hidden vectors whose distances set the length scale


class Examples(NamedTuple):
    """One batch: hidden vectors (N, d), targets and weights (N,) where there are any."""

    h: Tensor
    target: Tensor | None
    weight: Tensor | None

    def to(self, device: torch.device | None) -> "Examples":
        return Examples(*(None if t is None else t.to(device) for t in self))  # type: ignore[arg-type]


class Sample(NamedTuple):
    """Which positions of an input count, where it has positions: pixels, tokens.

    most          how many, drawn by the input's own content; None: all
    ignore_index  the label of those that never count
    exactly       that many of every input, by turns where it has fewer
    """

    most: int | None = positions.OBSERVED
    ignore_index: int = positions.IGNORED
    exactly: bool = False


class Whole(NamedTuple):
    """Inputs of a batch with all their positions, and which of these were drawn.

    h, mask  (N, *P, d), (N, *P): hidden vectors; the positions that are no padding, or None
    keys     (N,): made of the content of each input
    drawn    (M,): numbers of positions among all (N P,), and
    owner    (M,): of the inputs that they belong to
    """

    h: Tensor
    mask: Tensor | None
    keys: list[int]
    drawn: Tensor
    owner: Tensor

    def drawn_of(self, i: int) -> Tensor:
        """The drawn positions of one input, numbered within it."""
        return self.drawn[self.owner == i] - i * math.prod(self.h.shape[1:-1])


class Hidden:
    """The examples of a loader, batch by batch; iterated again, from memory if they fit.

    target, inputs  which fields of a batch are which; None: by the rules of `batches`
    weights         (N,) in the order of the loader, or None
    keep            whether to keep hidden vectors for a second look; who needs one pass alone keeps the memory constant
    fitting         whether the model is being fitted to them: then the first batch shows whether the network returns
                    the head's logits, and whether the targets are of the likelihood's kind
    sample          which positions of an input are taken, where it has positions
    """

    def __init__(
        self,
        model: SNGP,
        loader: Iterable[Any],
        *,
        target: Field | None = None,
        inputs: Inputs = None,
        weights: Tensor | None = None,
        keep: bool = True,
        fitting: bool = False,
        progress: bool | None = None,
        sample: "Sample | None" = None,
    ) -> None:
        self.sample, self.position_dims = sample or Sample(), 0
        self.num_inputs, self.keys = 0, list[int]()  # of the inputs with positions that gave rows, in their order
        self.model, self.loader, self.keep, self.progress = model, loader, keep, progress
        self.target, self.inputs = target, inputs
        self._to_check = fitting
        self.odd_targets: str | None = None  # what is odd about the targets of the first batch
        self.device = device_of(model)
        self.weights = None if weights is None else check_order(torch.as_tensor(weights), loader)
        self.foreign_target = ""  # the type of what stood in place of targets
        self._cache: list[Examples] | None = None

    @property
    def have_positions(self) -> bool:
        return self.position_dims > 0

    def __iter__(self) -> Iterator[Examples]:
        if self._cache is not None:
            yield from (examples.to(self.device) for examples in self._cache)
            return
        cache: list[Examples] = []
        keep, size, self.num_inputs, self.keys = self.keep, 0, 0, []
        for batch in track(self.loader, "hidden features", show=self.progress):
            examples = self._examples(batch, self.num_inputs)
            size += examples.h.nbytes
            if keep and size > _CACHE_BYTES:
                if isinstance(self.loader, Iterator):
                    raise ValueError(
                        "The data is needed twice, and this loader is an iterator that can be read only once: its "
                        f"hidden vectors are too many to keep (over {_CACHE_BYTES / 2**30:g} GiB). Give a DataLoader "
                        "or a list of batches."
                    )
                keep, cache = False, []
            if keep:
                cache.append(examples.to(torch.device("cpu")))
            yield examples
        if self.weights is not None and self.num_inputs != len(self.weights):
            raise ValueError(
                f"weights must hold one number for each example: got {len(self.weights)} for {self.num_inputs}."
            )
        if keep:
            self._cache = cache

    def _examples(self, batch: Any, before: int) -> Examples:
        """Of one batch; `before` it, the loader gave as many examples."""
        args, kwargs, target = split_batch(
            batch, self.device, net=self.model.net, target=self.target, inputs=self.inputs
        )
        h = self.model.hidden(*args, **kwargs)
        if h.dim() < 2:
            self.model.head.checked(h)  # which has the message
        self.num_inputs += len(h)
        check_finite(h.flatten(1), before=before)
        if target is not None and not isinstance(target, Tensor):  # file names and the like
            self.foreign_target, target = _type_name(target), None
        if target is not None and target.shape[:1] != h.shape[:1]:
            raise ValueError(f"A batch has {h.shape[0]} inputs and targets of shape {tuple(target.shape)}.")
        if target is not None:
            check_inferred(self.model, target)
        if self._to_check and len(h):
            self._to_check = False
            self.odd_targets = None if target is None or h.dim() > 2 else other_kind(self.model.head, target)
            check_output(self.model, args, kwargs)
        weight = None
        if self.weights is not None:
            if before + len(h) > len(self.weights):
                raise ValueError(f"weights must hold one number for each example: got only {len(self.weights)}.")
            weight = self.weights[before : before + len(h)].to(h.device)
        return Examples(h, target, weight) if h.dim() == 2 else self._rows(h, target, weight, args, kwargs, before)

    def _rows(
        self, h: Tensor, target: Tensor | None, weight: Tensor | None, args: Any, kwargs: Any, before: int
    ) -> Examples:
        """Rows of the positions (N, *P) that are drawn from a batch."""
        self.position_dims = h.dim() - 2
        target, whole = self._draw(h, target, args, kwargs, before)
        self.keys += [whole.keys[i] for i in whole.owner.unique_consecutive().tolist()]
        return Examples(
            h.flatten(0, -2)[whole.drawn],
            None if target is None else target[whole.drawn],
            None if weight is None else weight[whole.owner],
        )

    def _draw(
        self, h: Tensor, target: Tensor | None, args: Any, kwargs: Any, before: int
    ) -> tuple[Tensor | None, Whole]:
        """Targets as rows, and which positions are drawn."""
        shape = tuple(h.shape[:-1])
        mask = positions.mask_of(kwargs, shape)
        valid = torch.ones(shape, dtype=torch.bool, device=h.device) if mask is None else mask
        if target is not None:
            target = positions.rows_of_target(target, shape, self.model.head.out_features)
            if target.dim() == 1:
                valid = valid & (target != self.sample.ignore_index).reshape(shape)
                check_labels(target[valid.flatten()], self.model.head)
        keys = positions.keys_of(args, kwargs, len(h), before)
        drawn = positions.draw(valid, keys, self.sample.most, exactly=self.sample.exactly)
        return target, Whole(h, mask, keys, *drawn)

    def whole(self) -> Iterator[Whole]:
        """Inputs with positions, in another pass over the loader; the same positions of each are drawn."""
        before = 0
        for batch in track(self.loader, "inputs as a whole", show=self.progress):
            args, kwargs, target = split_batch(
                batch, self.device, net=self.model.net, target=self.target, inputs=self.inputs
            )
            h = self.model.hidden(*args, **kwargs)
            yield self._draw(h, target, args, kwargs, before)[1]
            before += len(h)

    def without_target(self, what: str) -> ValueError:
        """The error to raise where a target is needed and there was none."""
        expected = f"{what} expects batches of (inputs, target)"
        if not self.foreign_target:
            return ValueError(f"{expected}, got a batch without a target.")
        return ValueError(
            f"{expected} whose target is a tensor of numbers, got {self.foreign_target}. Number the classes from 0, "
            "and give them as torch.tensor(...)."
        )


def check_order(weights: Tensor, loader: Iterable[Any]) -> Tensor:
    """Weights (N,) for a loader that keeps its order: a shuffled one would give them to other examples."""
    loader = getattr(loader, "loader", loader) if hasattr(loader, "over") else loader  # of one head of several
    order = getattr(loader, "sampler", None)
    order = getattr(getattr(loader, "batch_sampler", None), "sampler", order)
    if isinstance(order, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        raise ValueError(
            f"weights are in the order of the loader, and this one has a {type(order).__name__}: use "
            "DataLoader(..., shuffle=False)."
        )
    if weights.dim() != 1:
        raise ValueError(f"weights must have shape (N,), one for each example, got {tuple(weights.shape)}.")
    return check_weights(weights, len(weights)).double()


def check_target(target: Tensor, head: GaussianProcessHead) -> Tensor:
    """Targets in the form that the likelihood wants: class indices (N,), or numbers (N, K)."""
    return LIKELIHOODS[head.likelihood].check_targets(target, head.out_features)


def check_labels(target: Tensor, head: GaussianProcessHead) -> None:
    """An error if a label of a position is no class: the usual reason is that it stands for having none."""
    classes = LIKELIHOODS[head.likelihood].num_classes(head.out_features)
    if not classes or not target.numel():
        return
    least, most = int(target.min()), int(target.max())
    if least < 0 or most >= classes:
        raise ValueError(
            f"Labels of positions run from {least} to {most}, and the model has {classes} classes, 0 to {classes - 1}. "
            f"If one of them marks positions without a label, say which: ignore_index={least if least < 0 else most}."
        )


def adapt(features: RandomFeatures, examples: Hidden) -> None:
    """Set standardisation and length scale of random features from all hidden vectors, the same on every rank.

    Weights count in the moments; the length scale looks at the vectors themselves.
    """
    total, rows, step, kept = None, 0, 1, torch.zeros(0)
    for h, _, weight in examples:
        double = features.mapped(h.double())
        counts = features.counted(h).double() if weight is None else features.counted(h) * weight.double()
        weighted = double * counts[:, None]
        moments = torch.stack([counts.sum().expand(double.shape[1]), weighted.sum(0), (weighted * double).sum(0)])
        total = moments if total is None else total + moments
        # Every step-th row of all the data, so that a loader sorted by class shows all classes alike.
        new = h[-rows % step :: step] if weight is None else h[weight > 0][-rows % step :: step]
        kept = torch.cat([kept, new]) if rows else new
        rows += h.shape[0] if weight is None else int((weight > 0).sum())
        while len(kept) > 2 * _SCALE_ROWS:
            kept, step = kept[::2], 2 * step
    if several_ranks():
        width = features.mapped(torch.zeros(1, features.in_features)).shape[1]
        total = torch.zeros(3, width, dtype=torch.float64, device=examples.device) if total is None else total
        dist.all_reduce(total)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, kept.cpu() if rows else None)
        kept = torch.cat([kept[:0].to(total.device), *(k.to(total.device) for k in everyone if k is not None)])
    if total is None:
        raise ValueError("The loader is empty: there is nothing to take the length scale from.")
    if not len(kept):
        raise ValueError(
            "All weights are zero, or all positions are ignored: there is nothing to take the length scale from."
        )
    count, first, second = total
    count = count.clamp_min(1e-300)  # where all vectors are zero
    mean = first / count
    std = (second / count - mean.square()).clamp_min(0).sqrt()
    features.adapt(kept, (mean, std))


def _type_name(value: Any) -> str:
    inner = f" of {type(value[0]).__name__}" if isinstance(value, list | tuple) and value else ""
    return f"{type(value).__name__}{inner}"


@torch.no_grad()
def draw_examples(model: SNGP, train: Iterable[Any], count: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Some training examples (M, ...), drawn at random: `hidden` vectors, `target` if there is one, and the inputs.

    An input that is one tensor is `input`; of token ids it is `input_ids`, with -1 where they are masked.
    """
    generator = torch.Generator().manual_seed(seed)
    keys, kept = torch.zeros(0), dict[str, Tensor]()
    for batch in train:
        args, kwargs, target = split_batch(batch, device_of(model), net=model.net, wants_target=False)
        with evaluating(model):
            found = {"hidden": model.hidden(*args, **kwargs).float()}
        if len(args) == 1 and isinstance(args[0], Tensor):
            found["input"] = args[0]
        elif isinstance(ids := kwargs.get("input_ids"), Tensor):
            found["input_ids"] = ids.masked_fill(kwargs.get("attention_mask", torch.ones_like(ids)) == 0, -1)
        if isinstance(target, Tensor):
            found["target"] = target
        drawn = torch.rand(len(found["hidden"]), generator=generator)
        keys = torch.cat([keys, drawn])
        chosen = keys.argsort()[:count]
        keys = keys[chosen]
        kept = {name: _join(kept.get(name), new.detach().cpu())[chosen].clone() for name, new in found.items()}
    if not kept:
        raise ValueError("afield.save got no training examples to keep: train is empty. Can it be read only once?")
    return kept


def _join(before: Tensor | None, new: Tensor) -> Tensor:
    """One after the other; token ids of other lengths are filled up with -1."""
    if before is None:
        return new
    if before.dim() == 2 and before.shape[1] != new.shape[1]:
        wide = max(before.shape[1], new.shape[1])
        before, new = (torch.nn.functional.pad(t, (0, wide - t.shape[1]), value=-1) for t in (before, new))
    return torch.cat([before, new])
