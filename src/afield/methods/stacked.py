"""An ensemble of small networks in one pass: M products of matrices become one batched product.

    stack(members).predict(x)        what `methods.ensemble.combine` makes of [m.predict(x) for m in members]

A small network spends its time on calls and not on arithmetic; M of them, one after the other, make M times the calls.
Networks that keep the processor busy by themselves gain nothing. The stack holds a copy of the members' weights, with
the bounded ones written out: members that are trained or fitted again need a new stack. Of the model that `ensemble`
builds it has the calibration too.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from afield.bounds.spectral import fold
from afield.errors import NotFitted
from afield.gp.head import GaussianProcessHead
from afield.methods.ensemble import KIND, combine
from afield.methods.mixture import scales_of
from afield.model.batches import device_of, split_batch
from afield.model.layers import replace_layer
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction


class Stack:
    """Fitted models of one architecture, as one. Made by `stack`."""

    def __init__(self, members: Sequence[SNGP]) -> None:
        self.heads, self.scales = [member.head for member in members], scales_of(members, KIND)
        parts = [_Member(member) for member in members]
        self._tensors = stack_module_state(parts)
        self._member = copy.deepcopy(parts[0]).to("meta")
        self._device = device_of(members[0])

    def __len__(self) -> int:
        return len(self.heads)

    @torch.no_grad()
    def predict(self, *args: Any, **kwargs: Any) -> Prediction:
        """The ensemble's prediction; probabilities of the members are in `members`."""
        if len(args) == 1 and isinstance(args[0], Mapping):  # as `SNGP.predict` takes it
            args, kwargs, _ = split_batch({**args[0], **kwargs}, self._device)

        def one(tensors: Any) -> tuple[Tensor, ...]:
            return functional_call(self._member, tensors, args, kwargs)

        answers = zip(*vmap(one)(self._tensors), strict=True)
        predictions = [head.prediction(*answer) for head, answer in zip(self.heads, answers, strict=True)]
        return combine(predictions, self.scales)


def stack(members: Sequence[SNGP]) -> Stack:
    """The members, fitted and of one architecture, as one model that predicts with all of them at once."""
    if not members:
        raise ValueError("stack expects at least one model, got none.")
    shapes = [{name: tuple(p.shape) for name, p in member.named_parameters()} for member in members]
    for number, (member, shape) in enumerate(zip(members, shapes, strict=True)):
        if not isinstance(member, SNGP):
            raise TypeError(f"stack expects models made by afield.sngp or afield.attach, got {type(member).__name__}.")
        if shape != shapes[0] or _of_head(member) != _of_head(members[0]):
            raise ValueError(f"Members of a stack must have one architecture: member {number} differs from member 0.")
        if not member.head.precision.fitted:
            raise NotFitted(f"Member {number} is not fitted: call afield.fit_posterior(model, train_loader) first.")
    return Stack(members)


def _of_head(model: SNGP) -> str:
    return str((model.settings["head"], model.settings.get("classes")))


class _Member(nn.Module):
    """inputs -> mean, variance and own score where there is one, with nothing in it that differs between members but
    the values of its tensors."""

    def __init__(self, model: SNGP) -> None:
        super().__init__()
        model.head.factor()
        plain = fold(model).eval()
        self.head: GaussianProcessHead = plain.head
        self.net = replace_layer(plain.net, plain.head_name, nn.Identity())
        # Only the factor is read; reference scores, of which members may have different numbers, are the originals'.
        self.head.precision.free()
        self.head.forget_reference()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        h = self.net(*args, **kwargs)
        if not isinstance(h, Tensor):
            raise TypeError(f"stack expects networks that return a tensor of logits, got {type(h).__name__}.")
        mean, variance = self.head.posterior(h)
        score = self.head.own_score(mean, variance, h)
        return (mean, variance) if score is None else (mean, variance, score)
