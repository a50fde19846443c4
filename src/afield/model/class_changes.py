"""Classes that grow: a new output for a fitted head, from examples of the new class alone; and one less.

What the head keeps of its old data is G = sum phi phi^T. That is enough for the regression of "is it the new class?",
1 on the n new examples and 0 on all old ones, whose posterior mean is

    g(h) = phi(h)^T c,        c = H^-1 sum_new phi,        H = r I + G + sum_new phi phi^T

with H the precision after `afield.posterior.update` with the new examples: the variance learns them as well. The new
logit is the mean of the old logits, whose common level a softmax leaves free, plus a g. The scale a makes the new class
win on its own examples by as much as it loses on the old ones:

    a E_new[g] - l  =  l - a s        ->        a = 2 l / (E_new[g] + s)

    l        mean over the new examples of the log-sum-exp of the old logits above their mean: what there is to beat
    E_new    mean over the new examples, each left out of its own g: (g_i - v_i) / (1 - v_i), v_i = phi_i^T H^-1 phi_i
    s        root mean square of g over the old data, sqrt(c^T G c / N): where an intruder would show

The old logits stay as they are, bit for bit. Neither the paper nor its code adds classes.
"""

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from afield.errors import NotFitted
from afield.gp.head import GaussianProcessHead
from afield.model.evaluating import evaluating
from afield.model.fingerprint import Fingerprint
from afield.model.hidden import Examples, Hidden
from afield.model.posterior import downdate
from afield.model.sngp_model import SNGP

_FEWEST = 2


def add_class(model: SNGP, loader: Iterable[Any], *, progress: bool | None = None) -> SNGP:
    """A copy of a fitted model with one class more, the last; the model itself is not touched.

    loader  batches of the new class, with or without a target, at least two examples: five do, twenty do well

    p-values are off until `afield.calibrate` runs again, on held-out data of all classes.

    returns  the copy
    raises   NotFitted before `afield.fit_posterior`; ValueError with fewer than two examples, or a moving average

    >>> bigger = afield.class_changes.add_class(model, [8 + torch.randn(20, 3)])
    >>> bigger(x).shape[1]
    4
    """
    head = model.head
    _check(head, "add_class", likelihood="categorical", covariance="shared", curvature="unit")
    if head.precision.momentum is not None:
        raise ValueError("add_class expects an exact posterior (momentum=None), got a moving average.")
    if not head.precision.fitted:
        raise NotFitted("The posterior is not fitted: call afield.fit_posterior(model, train_loader) before add_class.")
    model.check_fresh("add a class")
    grown = copy.deepcopy(model)
    head = grown.head
    with evaluating(grown):
        hidden = _own(list(Hidden(grown, loader, progress=progress)), head)
        frozen = not any(p.requires_grad for p in head.parameters())
        zeros = torch.zeros_like(head.features_of_variance.phase)
        change_outputs(grown, [*head.added, nn.Parameter(zeros, requires_grad=not frozen)], head.dropped)
        old, seen = head.precision.data[0].clone(), head.num_observed
        head.observe(hidden, classes=torch.full((len(hidden),), head.out_features - 1, device=hidden.device))
        direction, height = _regression(head, hidden, old, seen)
        head.added[-1].copy_(2 * _to_beat(head, hidden) / height * direction)
    grown.fingerprint = Fingerprint(grown.net)
    return grown


def drop_class(model: SNGP, index: int, loader: Iterable[Any] | None = None, *, progress: bool | None = None) -> SNGP:
    """A copy of a model without one class; later classes move up by one. The other logits stay, bit for bit.

    index   of the class, counted from 0
    loader  the examples of the class that the posterior has observed: it forgets them, and they are foreign again.
            None leaves them in: inputs like them stay familiar, though no class claims them

    p-values are off until `afield.calibrate` runs again.

    returns  the copy
    raises   ValueError if there is no such class, or only two are left

    >>> smaller = afield.class_changes.drop_class(model, 0)
    >>> smaller(x).shape[1]
    2
    """
    head = model.head
    _check(head, "drop_class", likelihood="categorical", covariance="shared")
    if not 0 <= index < head.out_features:
        raise ValueError(f"The model has {head.out_features} classes (0 to {head.out_features - 1}), got {index}.")
    if head.out_features < 3:
        raise ValueError("A classifier keeps at least 2 classes, and this one has no more.")
    model.check_fresh("drop a class")
    shrunk = copy.deepcopy(model)
    if loader is not None:
        downdate(shrunk, loader, progress=progress)
    head = shrunk.head
    shown = [k for k in range(head.first_outputs + len(head.added)) if k not in head.dropped]
    gone = shown[index] - head.first_outputs
    if gone < 0:
        change_outputs(shrunk, head.added, (*head.dropped, shown[index]))
    else:
        if head.class_distance is not None:
            head.class_distance.drop(shown[index])
        change_outputs(shrunk, [*head.added[:gone], *head.added[gone + 1 :]], head.dropped)
    if shrunk.fingerprint is not None:
        shrunk.fingerprint = Fingerprint(shrunk.net)
    return shrunk


def change_outputs(model: SNGP, added: Iterable[Tensor], dropped: Sequence[int]) -> None:
    """Give the head other outputs: weights (D,) of those added after the first ones, and which of all are dropped.

    The settings of the model remember them, so that `afield.load` builds the same.
    """
    head = model.head
    added, dropped = list(added), tuple(dropped)
    del head.added
    head.added = nn.ParameterList(added) if added else ()
    head.dropped, head.out_features = dropped, head.first_outputs + len(added) - len(dropped)
    if head.class_distance is not None:
        head.class_distance.resize(head.first_outputs + len(added))
    model.settings = model.settings | {"classes": {"added": len(added), "dropped": list(dropped)}}
    head.forget_score()
    head.chosen_score.forget()  # it knows the old classes


def _check(head: GaussianProcessHead, what: str, **wanted: str) -> None:
    for name, value in wanted.items():
        if getattr(head, name) != value:
            raise ValueError(f"{what} expects a head with {name}={value!r}, got {getattr(head, name)!r}.")


def _own(batches: list[Examples], head: GaussianProcessHead) -> Tensor:
    """The hidden vectors, if they are of the new class alone."""
    count = sum(len(batch.h) for batch in batches)
    if count < _FEWEST:
        raise ValueError(
            f"add_class expects at least {_FEWEST} examples of the new class, got {count}: how well they predict each "
            "other says how high its logit must be."
        )
    targets = [batch.target for batch in batches if batch.target is not None]
    foreign = {int(k) for target in targets for k in target.unique()} - {head.out_features}
    if foreign:
        raise ValueError(
            f"add_class expects examples of the new class alone, whose number is {head.out_features}, got targets "
            f"{sorted(foreign)[:5]}. Add one class after the other."
        )
    return torch.cat([batch.h for batch in batches])


def _regression(head: GaussianProcessHead, hidden: Tensor, old: Tensor, seen: int) -> tuple[Tensor, float]:
    """c (D,) and E_new[g] + s of the module's docstring, for the data term `old` of `seen` examples."""
    phi = torch.cat([head.variance_phi(h).double() for h in hidden.split(4096)])
    precision = head.precision.data[0] + float(head.ridge) * torch.eye(len(old)).to(old)
    lower = torch.linalg.cholesky(precision)
    c = torch.cholesky_solve(phi.sum(0)[:, None], lower).squeeze(1)
    leverage = torch.linalg.solve_triangular(lower, phi.T, upper=False).square().sum(0)
    left_out = (phi @ c - leverage) / (1 - leverage)
    spread = math.sqrt(max(float(c @ old @ c), 0.0) / seen)
    height = max(float(left_out.mean()), 0.0) + spread
    if not height > 0:
        raise ValueError("The features of the new examples are all zero: nothing tells them from the old data.")
    return c, height


def _to_beat(head: GaussianProcessHead, hidden: Tensor) -> float:
    """How high the old logits stand above the new one, which is zero above their mean; log K where all are equal."""
    logits = torch.cat([head(h).double() for h in hidden.split(4096)])
    height = torch.logsumexp(logits[:, :-1] - logits[:, -1:], dim=-1).mean()
    return max(float(height), math.log(head.out_features - 1))
