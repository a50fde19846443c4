"""Are the logits of the head what the network returns? One pass over one batch tells.

What stands behind the output layer in a network's own forward is not seen by a Gaussian process in its place: with
`fc(x) + bias`, a mask or a temperature the network says one class and its logits say another. So the network runs once
with random numbers in place of the head's logits, and they must be among what it returns: as they are, reshaped, or
as the probabilities (classes) or the rates (counts) that they stand for.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afield.errors import WrongOutput
from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS, UNDECIDED
from afield.model.batches import device_of, split_batch
from afield.model.evaluating import evaluating
from afield.model.sngp_model import RESIZED, SNGP
from afield.prediction.predictive import to_probs

_ROUNDING = {torch.float16: 5e-3, torch.bfloat16: 4e-2}  # of values of size 1; of wider types: 1e-5


def check_example(model: SNGP, example: Any) -> None:
    """Run a batch, as a loader would give it, through the model, and check what it returns."""
    with evaluating(model):
        args, kwargs, _ = split_batch(example, device_of(model), net=model.net, wants_target=False)
        model.hidden(*args, **kwargs)
        check_output(model, args, kwargs)


def check_output(model: SNGP, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """An error unless the network returns the head's logits, and, where nobody named the output layer, no others.

    Expects evaluation mode without gradients, and inputs that `model.hidden` takes. One pass through the network.
    """
    seen = _Seen(model)
    with seen.watching():
        returned = list(_tensors(model.net(*args, **kwargs)))
    if seen.logits is None or seen.h is None:
        return  # `hidden` has run the output layer once and this pass has not: it is out of reach
    shown = _is_among(seen.logits, returned, model.head)
    # What a layer hands to the head is no output of its own, even if the network returns it as well.
    others = [
        name
        for name, output in seen.linears.items()
        if not _same(output, seen.h) and _is_among(output, returned, model.head)
    ]
    if not shown:
        raise WrongOutput(_changed(model, others, list(seen.linears)))
    if others and model.settings.get("output") is None:
        names = ", ".join(map(repr, [*others, model.output]))
        raise WrongOutput(
            f"The network returns the outputs of several Linear layers, {names}, and the last of them is not "
            f"necessarily the one that you mean. Name the layer that makes the logits: output={others[0]!r} or "
            f"output={model.output!r}."
        )
    if model.settings.get("output") is None and _has_rival(seen.logits, seen.h, returned, model.head):
        names = ", ".join(map(repr, [*seen.linears, model.output]))
        raise WrongOutput(
            f"The network returns the logits of {model.output!r} and another tensor of their shape "
            f"{tuple(seen.logits.shape)}, and which of the two are the classes would be a guess. Name the layer that "
            f"makes the logits: output={model.output!r}, or another one (Linear layers: {names})."
        )


class _Seen:
    """What passes the layers of a network in one pass of this thread; others go on undisturbed."""

    def __init__(self, model: SNGP) -> None:
        self.model, self.thread = model, threading.get_ident()
        self.h: Tensor | None = None
        self.logits: Tensor | None = None  # random ones
        self.linears: dict[str, Tensor] = {}  # outputs (N, ..., K) of the Linear layers and convolutions, by name

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        head, net = self.model.head, self.model.net
        inside = set(map(id, head.modules()))
        hooks = [head.register_forward_hook(self._replace)]
        for name, layer in net.named_modules():
            if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and id(layer) not in inside:
                hooks.append(layer.register_forward_hook(self._note(name)))
        compiled = any(hasattr(m, "_orig_mod") or m._compiled_call_impl is not None for m in net.modules())
        try:
            # Compiled code would not call a hook that it has not seen.
            with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _replace(self, head: nn.Module, given: tuple[Any, ...], logits: Tensor) -> Tensor | None:
        if threading.get_ident() != self.thread:
            return None
        self.h = given[0]
        self.logits = _random_like(logits)
        return self.logits.clone()  # the network may go on in place

    def _note(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def seen(layer: nn.Module, given: tuple[Any, ...], output: Any) -> None:
            if threading.get_ident() != self.thread or not isinstance(output, Tensor):
                return
            output = output if isinstance(layer, nn.Linear) else output.movedim(1, -1)
            if output.dim() == 2 or output.shape[-1] == self.model.head.out_features:  # else it may be large
                self.linears[name] = output.clone()

        return seen


def _random_like(logits: Tensor) -> Tensor:
    """Random numbers in the shape of logits, every other one as large as the largest of them: a clamp or a soft cap
    changes large ones only."""
    numbers = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
    largest = logits.detach().abs().amax().nan_to_num(1.0, posinf=1.0)
    every_other = torch.arange(numbers.numel(), device=logits.device).reshape(numbers.shape) % 2 == 0
    return torch.where(every_other, torch.clamp(numbers, -1, 1) * largest.clamp_min(1.0), numbers)


def _changed(model: SNGP, others: list[str], linears: list[str]) -> str:
    what = f"The network does not return the logits of its output layer {model.output!r} as they are: "
    if others:
        names = " or ".join(f"output={name!r}" for name in others)
        return (
            f"{what}it returns those of {', '.join(map(repr, others))}. Name the layer that makes the logits: {names}."
        )
    names = ", ".join(map(repr, [*linears, model.output]))
    return (
        f"{what}something after it changes them, such as an added bias, a mask, a temperature or another layer, and "
        "probabilities and classes would not be the network's own. Leave that step out of forward, or make it part of "
        f"the layer; or name another layer that makes the logits with output=... (Linear layers: {names}). {RESIZED}"
    )


def _is_among(logits: Tensor, returned: list[Tensor], head: GaussianProcessHead) -> bool:
    shown = [form(logits) for form in _forms(head)]
    if logits.dim() > 2:  # a network may return (N, K, *P) or (N, *P, K)
        shown += [form.movedim(-1, 1) for form in shown]
    return any(_same(form, tensor) for form in shown for tensor in returned)


def _has_rival(logits: Tensor, h: Tensor, returned: list[Tensor], head: GaussianProcessHead) -> bool:
    """Whether there is another tensor that could be logits: of another layer, or these after a change."""
    return any(
        t.shape == logits.shape and t.is_floating_point() and not _same(h, t) and not _is_among(logits, [t], head)
        for t in returned
    )


def _forms(head: GaussianProcessHead) -> list[Callable[[Tensor], Tensor]]:
    """What a network may make of its logits without changing what they say."""

    def itself(f: Tensor) -> Tensor:
        return f

    if head.likelihood != UNDECIDED and (mean := LIKELIHOODS[head.likelihood].mean) is not None:
        return [itself, lambda f: mean(rows := f.flatten(0, -2), torch.zeros_like(rows[:, 0])).reshape(f.shape)]
    return [
        itself,
        lambda f: to_probs(f.float()),
        lambda f: F.log_softmax(f.float(), dim=-1) if f.shape[-1] > 1 else to_probs(f.float()).log(),
        lambda f: torch.sigmoid(f.float()),
        lambda f: F.logsigmoid(f.float()),
    ]


def _same(expected: Tensor, found: Tensor) -> bool:
    """The same numbers in the same order, whatever the shape, up to the rounding of the coarser dtype."""
    if expected.numel() != found.numel() or not expected.numel() or not found.is_floating_point():
        return False
    tolerance = max(_ROUNDING.get(t.dtype, 1e-5) for t in (expected, found))
    a, b = expected.detach().flatten().double(), found.detach().flatten().to(expected.device).double()
    return bool(((a - b).abs() <= tolerance * (1 + a.abs())).all())


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in what a network returns."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _tensors(inner)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
    else:
        held = {**getattr(value, "__dict__", {}), "logits": getattr(value, "logits", None)}
        yield from (inner for inner in held.values() if isinstance(inner, Tensor))
