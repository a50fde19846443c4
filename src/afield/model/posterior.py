"""Fit the posterior in one pass over the training data, exactly, on one process or many.

The sum of a sharded pass is the sum of the shards: each rank adds up its own examples from zero, the sums are
reduced once, the ridge enters once at factorisation. Each example must be seen exactly once, so under
torch.distributed the pass shards a map-style data set itself: DistributedSampler pads by repeating.
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from afield.errors import NotFitted
from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS
from afield.model.batches import Field, Inputs
from afield.model.evaluating import evaluating
from afield.model.fingerprint import Fingerprint, digest
from afield.model.hidden import Hidden, Sample, adapt, check_order
from afield.model.ranks import explain_lost_ranks, several_ranks, shard_loader, share_statistics
from afield.model.sngp_model import SNGP, for_each_head
from afield.model.targets import likelihood_from_targets, warn_of_kind
from afield.outputs.noise import Residuals, learn_input_noise
from afield.outputs.positions import IGNORED, OBSERVED


@for_each_head
def fit_posterior(
    model: SNGP,
    loader: Iterable[Any],
    *,
    target: Field | None = None,
    inputs: Inputs = None,
    weights: Tensor | None = None,
    adapts: bool = True,
    fast: bool = False,
    sharded: bool | None = None,
    num_positions: int | None = OBSERVED,
    ignore_index: int = IGNORED,
    progress: bool | None = None,
) -> int:
    """Fit the posterior precision by one pass without gradients, in evaluation mode; returns the examples it saw.

    loader    batches of training data, without augmentation. They take the place of any earlier posterior, which
              stays if this fit fails; a standardisation that came from the data comes from the new data
    target    index or key of the target in a batch; None: the last of (inputs, target), or "labels" of a mapping
    inputs    index or key of the input, or a list of them, where a batch has more fields than that
    weights   (N,) of the examples, in the order of the loader: one of weight w counts as w examples; None: one each
    adapts    take length scale and moments of a variance with its own features from these examples. False keeps those
              of an earlier fit, for parts of the data that are fitted apart and put together by `merge`
    fast      form batch products in the model's dtype: quicker, and two digits poorer
    sharded   under torch.distributed: whether each rank's loader already yields its own part, every example once.
              None shards a map-style data set here, whatever its sampler, and refuses what it cannot shard
    num_positions  how many positions of each input are observed where the network answers at every pixel or token,
              drawn by a hash of the input; None: all, which for images are many. The examples seen are then positions
    ignore_index   the label of positions that are left out; so are those that an attention mask leaves out
    progress  show a progress bar; None shows it on a terminal

    For a gaussian likelihood with targets in the batches, the noise is estimated from the residuals (`outputs.noise`).
    On the first batch the network must return the logits of its output layer, which are the head's.

    raises    ValueError if the loader is empty, or holds NaN; WrongOutput if the network does not return its logits

    >>> afield.fit_posterior(model, train_loader)
    200
    """
    head = model.head
    if head.precision.momentum is not None and several_ranks():
        raise ValueError("Moving averages of several processes do not add up: use momentum=None.")
    fields: dict[str, Any] = {"target": target, "inputs": inputs}
    with (
        explain_lost_ranks("the posterior was fitted"),
        evaluating(model),
        likelihood_from_targets(model, loader, **fields) as loader,
        head.revision(afresh=True) as draft,
    ):
        if several_ranks():
            share_statistics(model.net, skip=model.head)
            if weights is not None and not sharded:
                weights = check_order(weights, loader)[dist.get_rank() :: dist.get_world_size()]
        if adapts and (draft.mean is not None or draft.variance_features is not None):  # only the variance rests on it
            draft.features_of_variance.forget_data()
        if draft.noise_features is not None:
            draft.noise_features.forget_data()
        twice = bool(draft.unadapted())
        part = shard_loader(loader, sharded)
        sample = Sample(num_positions, ignore_index)
        examples = Hidden(
            model, part, weights=weights, keep=twice, fitting=True, progress=progress, sample=sample, **fields
        )
        _check_ranks_agree(model)
        _fit(draft, examples, fast)
        seen = _num_inputs(examples)
        model.fingerprint = Fingerprint(model.net)
    warn_of_kind(examples.odd_targets)
    if not (sharded and several_ranks()):  # a rank's own part says nothing about the whole
        _warn_if_incomplete(loader, seen)
    return head.num_observed


def _num_inputs(examples: Hidden) -> int:
    """Inputs that all ranks have seen: where they have positions, the posterior counts those."""
    total = torch.tensor(examples.num_inputs, device=examples.device)
    if several_ranks():
        dist.all_reduce(total)
    return int(total)


def _fit(head: GaussianProcessHead, examples: Hidden, fast: bool) -> None:
    for features in head.unadapted():
        adapt(features, examples)
    _observe(head, examples, fast)
    if head.noise_features is not None:
        learn_input_noise(head, examples)
        head.precision.reset()
        _observe(head, examples, fast)


def _observe(head: GaussianProcessHead, examples: Hidden, fast: bool) -> None:
    """Add all examples, of all ranks, and take the noise from their residuals."""
    residuals, noisy = Residuals(head), LIKELIHOODS[head.likelihood].noisy
    for h, target, weight in examples:
        head.observe(h, classes=_classes(head, target), weights=weight, fast=fast)
        if noisy and target is not None:
            residuals.add(h, target, weight)
    if examples.have_positions and head.noise_shape is not None and head.noise_shape.kind == "full":
        raise ValueError('noise="full" is of one answer an input, and this network answers at positions: use "output".')
    _reduce(head)
    residuals.reduce()
    if not head.num_observed:
        raise ValueError("fit_posterior got an empty loader: there is nothing to fit the posterior to.")
    residuals.set_noise()


def update(
    model: SNGP,
    loader: Iterable[Any],
    *,
    target: Field | None = None,
    inputs: Inputs = None,
    weights: Tensor | None = None,
    num_positions: int | None = OBSERVED,
    ignore_index: int = IGNORED,
    progress: bool | None = None,
) -> int:
    """Add new examples to a fitted posterior, after deployment, without the old data; returns the total.

    The output weights stay: only the variance learns. p-values are off until `afield.calibrate` runs again.
    `loader`, `target`, `inputs`, `weights`, `num_positions` and `ignore_index` are those of `afield.fit_posterior`.

    raises  NotFitted before `afield.fit_posterior`, Stale if the network has changed since

    >>> afield.posterior.update(model, [(x[:20] + 1, y[:20])])
    220
    """
    fields: dict[str, Any] = {"target": target, "inputs": inputs}
    sample = Sample(num_positions, ignore_index)
    examples = Hidden(model, loader, weights=weights, keep=False, progress=progress, sample=sample, **fields)
    return _revise(model, examples, GaussianProcessHead.observe)


def downdate(
    model: SNGP,
    loader: Iterable[Any],
    *,
    target: Field | None = None,
    inputs: Inputs = None,
    weights: Tensor | None = None,
    num_positions: int | None = OBSERVED,
    ignore_index: int = IGNORED,
    progress: bool | None = None,
) -> int:
    """Remove examples from a fitted posterior, exactly, as if they had never been observed; returns the total.

    The model must be the one that observed them, with the same `weights` of the examples, `num_positions` and
    `ignore_index`: features and curvature are computed again. All are those of `afield.fit_posterior`, as are `loader`,
    `target` and `inputs`.

    raises  NotFitted before `afield.fit_posterior`, Stale if the network has changed since

    >>> afield.posterior.downdate(model, [(x[:20], y[:20])])
    180
    """
    fields: dict[str, Any] = {"target": target, "inputs": inputs}
    sample = Sample(num_positions, ignore_index)
    examples = Hidden(model, loader, weights=weights, keep=False, progress=progress, sample=sample, **fields)
    return _revise(model, examples, GaussianProcessHead.unobserve)


def merge(model: SNGP, other: SNGP) -> int:
    """Add all examples that `other`, a copy of the same model, has observed elsewhere, exactly; returns the total.

    Both must map inputs to the same features: copies of one trained model, each fitted on its own part of the data.

    raises  ValueError if the two are not copies of one model; NotFitted, Stale

    >>> parts = [copy.deepcopy(model) for _ in range(2)]
    >>> _ = [afield.fit_posterior(part, [(x[k::2], y[k::2])], adapts=False) for k, part in enumerate(parts)]
    >>> afield.posterior.merge(parts[0], parts[1])
    300
    """
    _check_same(model, other)
    with model.head.revision() as draft:
        theirs = other.head.snapshot()
        draft.precision.merge(theirs.precision)
        if draft.class_distance is not None and theirs.class_distance is not None:
            draft.class_distance.merge(theirs.class_distance)
        draft.forget_score()
    return model.head.num_observed


def _check_same(model: SNGP, other: SNGP) -> None:
    """An error unless the two are copies of one model, fitted apart."""
    if model.head is other.head:
        raise ValueError("Cannot merge a posterior with itself: every example would count twice.")
    model.check_fresh("merge")
    other.check_fresh("merge")
    for name in ("likelihood", "covariance", "curvature"):
        mine, theirs = getattr(model.head, name), getattr(other.head, name)
        if mine != theirs:
            raise ValueError(f"Cannot merge posteriors with {name}={mine!r} and {theirs!r}.")
    mine, theirs = model.head.features_of_variance.state_dict(), other.head.features_of_variance.state_dict()
    if mine.keys() != theirs.keys() or any(not torch.equal(mine[k], theirs[k].to(mine[k].device)) for k in mine):
        raise ValueError(
            "Cannot merge posteriors over different random features: fit copies of one fitted model, with "
            "fit_posterior(..., adapts=False), so that they keep its length scale and moments."
        )
    if digest(model.net) != digest(other.net):
        raise ValueError("Cannot merge posteriors of networks with different weights: fit copies of one model.")
    mine, theirs = model.head.precision, other.head.precision
    if mine.fitted and all(torch.equal(getattr(mine, k), getattr(theirs, k).to(mine.data.device)) for k in mine.SUMS):
        raise ValueError(
            f"Cannot merge posteriors of the same examples: the sums of both over {int(mine.count)} examples are equal "
            "to the last bit, and every example would count twice. Fit each copy on a part of its own."
        )


def _check_ranks_agree(model: SNGP) -> None:
    """An error unless all ranks have the same weights and random features: their sums would mean nothing."""
    if not several_ranks():
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digest(model.net, buffers=False))
    if different := [rank for rank, other in enumerate(everyone) if other != everyone[0]]:
        raise ValueError(
            f"fit_posterior sums over ranks that have one model: the weights or random features of ranks {different} "
            "differ from those of rank 0. Seed all ranks alike, or load one state on all."
        )


def _revise(model: SNGP, examples: Hidden, change: Callable[..., None]) -> int:
    if not model.head.precision.fitted:
        raise NotFitted("The posterior is not fitted: call afield.fit_posterior(model, train_loader) first.")
    model.check_fresh("update or downdate the posterior")
    with evaluating(model), model.head.revision() as draft:
        for h, target, weight in examples:
            change(draft, h, classes=_classes(draft, target), weights=weight)
    return model.head.num_observed


def _classes(head: GaussianProcessHead, target: Tensor | None) -> Tensor | None:
    """Targets (N,) that are classes of the head; None: there are none, and the most probable ones will do."""
    if target is None or head.class_distance is None or target.numel() != target.shape[0]:
        return None
    target, classes = target.reshape(-1), LIKELIHOODS[head.likelihood].num_classes(head.out_features)
    whole = target.long()
    return whole if bool(((whole == target) & (whole >= 0) & (whole < classes)).all()) else None


def _reduce(head: GaussianProcessHead) -> None:
    """Sum over the ranks, once; a rank without examples adds zeros."""
    if several_ranks():
        head.precision.all_reduce()
        if head.class_distance is not None:
            head.class_distance.all_reduce()


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
