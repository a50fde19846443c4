"""Bounded weights in evaluation, kept until something that they are made of changes.

Without gradients in evaluation mode, a bounded weight is a function of the weight, of the bound's vectors and of c; to
make it costs as much as the layer itself on one image. So it is made once. Every read compares what it was made of: the
tensors, their versions, the address and strides of the weight, the count of optimizer steps (fused optimizers do not
count up versions), and some entries of the weight (`p.data.copy_`, by which averages of weights are swapped in, counts
up nothing). What this cannot see: a write through `.data` to a few entries that are not among those compared.

A network with many bounded layers compares all of them at once, before it runs (`kept_weights`): layer by layer, the
comparisons would be a tenth of a small network's time. What changes while it runs then counts from the next run on.

Only on the CPU: elsewhere, a look at the entries would wait for the device. `afield.fold` writes weights out for good.
Threads may read at once: what is kept never changes, it is only replaced.
"""

from collections.abc import Callable
from contextvars import ContextVar
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _get_tracing_state as tracing_state
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import peek_interpreter_stack as transforms
from torch.nn.utils import parametrize

from afield.bounds import optimizer_steps

KEPT = "_kept_"  # and the name of the tensor: where a layer has its `KeptWeight`
KEPT_WEIGHT = KEPT + "weight"
_TOGETHER = "_kept_together"  # where a network has its `_Together`
_FEWEST = 4  # bounded layers for which a comparison of all at once pays
_SAMPLED = 8  # entries of a weight that are compared
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Place = tuple[dict[str, Any], str]
"""Where a tensor is found: a dictionary of a module's parameters or buffers, and a name."""


class Source(Protocol):
    """What makes the weight: a bound."""

    training: bool
    c: float

    def made_of(self) -> list[Place]:
        """The tensors beside the weight itself on which the weight of evaluation mode depends."""
        ...

    def constants(self) -> tuple[float, ...]:
        """The numbers beside c on which it depends."""
        ...


class KeptWeight:
    """A bounded weight and what it was made of.

    Few objects, read in one go: between two passes all of them have left the processor's caches, so that it is the
    number of objects that costs.
    """

    __slots__ = (
        "_address", "_chain", "_constants", "_entries", "_entries_then", "_others", "_place", "_steps", "_stride",
        "_value_version", "_version", "_weight", "convolve", "source", "together", "value",
    )  # fmt: skip

    def __init__(self, source: Source, place: Place, chain: dict[str, Any]) -> None:
        weight: Tensor = place[0][place[1]]
        self.source, self._place, self._chain, self._weight = source, place, chain, weight
        self._address, self._stride, self._version = weight.data_ptr(), weight.stride(), weight._version
        self._steps, self._constants = optimizer_steps.count, (source.c, *source.constants())
        others = [(tensors, name, tensors[name]) for tensors, name in source.made_of()]
        self._others = [(tensors, name, tensor, tensor._version) for tensors, name, tensor in others]
        self._entries = _sample(weight)
        self._entries_then = self._entries.clone()
        self.together: _Together | None = None  # the group with which it is compared
        self.convolve: Callable[..., Tensor] | None = None  # what its layer does, if nobody wants more of it

    def fill(self, value: Tensor) -> "KeptWeight":
        """With the weight that was made."""
        self.value, self._value_version = value, value._version
        return self

    def readable(self) -> bool:
        """Whether the weight may be read in its place: nothing needs to follow how it is made, and it stands."""
        return self.readable_together() or (plain_evaluation() and self.stands())

    def readable_together(self) -> bool:
        """The same, because it was compared with its group before the network ran."""
        if self.together is None or _COMPARED.get() is not self.together:
            return False
        tensors, name = self._place
        return tensors[name] is self._weight and not torch.is_grad_enabled()  # a network may do this to its layers

    def stands(self) -> bool:
        """Whether the weight would come out the same now."""
        tensors, name = self._place
        weight = self._weight
        if (
            tensors[name] is not weight
            or list(self._chain.values()) != [self.source]  # another parametrisation came after it
            or self.source.training
            or weight.data_ptr() != self._address  # which says that the entries below are still there
            or weight._version != self._version
            or weight.stride() != self._stride
            or self._steps != optimizer_steps.count
            or self._constants != (self.source.c, *self.source.constants())
            or self.value._version != self._value_version  # somebody wrote into it
        ):
            return False
        for tensors, name, tensor, version in self._others:
            if tensors[name] is not tensor or tensor._version != version:
                return False
        return torch.equal(self._entries, self._entries_then)

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a layer starts without."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class _Together:
    """The kept weights of a network, compared as each compares itself. The loops run in C."""

    __slots__ = (
        "_addresses", "_chains", "_constants", "_entries", "_hooked", "_hooks", "_kept", "_layers", "_names", "_owners",
        "_places", "_settings", "_slots", "_sources", "_states", "_steps", "_strides", "_tensors", "_versions",
        "_weights", "complete", "pays",
    )  # fmt: skip

    def __init__(self, net: nn.Module) -> None:
        layers = [m for m in net.modules() if parametrize.is_parametrized(m)]
        slots = [(m.__dict__, KEPT + name) for m in layers for name in m.parametrizations]  # type: ignore[union-attr]
        self._layers, self._slots = [layer for layer, _ in slots], [slot for _, slot in slots]
        self._kept: list[KeptWeight | None] = [layer.get(slot) for layer, slot in slots]
        kept = [one for one in self._kept if one is not None and one.stands()]
        self.pays, self.complete = len(kept) >= _FEWEST, len(kept) == len(slots)
        self._steps = optimizer_steps.count
        self._sources, self._chains = [one.source for one in kept], [one._chain for one in kept]
        self._states = [source.__dict__ for source in self._sources]
        self._settings = [(False, one._constants[0]) for one in kept]
        self._constants = [(one.source, one._constants[1:]) for one in kept if len(one._constants) > 1]
        convolving = [m for m in layers if isinstance(m, _CONVOLUTIONS)]
        self._hooks = [hooks for m in convolving for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooked = list(chain.from_iterable(map(dict.values, self._hooks)))
        self._weights = [one._weight for one in kept]
        self._addresses, self._strides = [one._address for one in kept], [one._stride for one in kept]
        found = [(*one._place, one._weight, one._version) for one in kept]
        found += [other for one in kept for other in one._others]
        self._owners, self._names = [row[0] for row in found], [row[1] for row in found]
        self._places = [row[2] for row in found]
        self._tensors = [*self._places, *(one.value for one in kept)]
        self._versions = [*(row[3] for row in found), *(one._value_version for one in kept)]
        self._entries = []
        for dtype in {one._entries.dtype for one in kept}:
            same = [one for one in kept if one._entries.dtype == dtype]
            then = torch.cat([one._entries_then for one in same]).numpy().tobytes()
            self._entries.append(([one._entries.numpy() for one in same], then))
        if self.pays:
            for one in kept:
                one.together = self
            for layer in convolving:
                if (of_layer := layer.__dict__.get(KEPT_WEIGHT)) is not None:
                    of_layer.convolve = _convolution(layer, of_layer.source)

    def same_kept(self) -> bool:
        """Whether the layers have kept what they had."""
        return all(map(is_, map(dict.get, self._layers, self._slots), self._kept))

    def stands(self) -> bool:
        """Whether each of them does."""
        return (
            self._steps == optimizer_steps.count
            and all(map(is_, map(dict.get, self._owners, self._names), self._places))
            and list(map(_VERSION, self._tensors)) == self._versions
            and list(map(Tensor.data_ptr, self._weights)) == self._addresses
            and list(map(Tensor.stride, self._weights)) == self._strides
            and list(chain.from_iterable(map(dict.values, self._chains))) == self._sources
            and list(map(_SETTINGS, self._states)) == self._settings
            and all(source.constants() == then for source, then in self._constants)
            and list(chain.from_iterable(map(dict.values, self._hooks))) == self._hooked
            and all(np.concatenate(entries).tobytes() == then for entries, then in self._entries)
        )

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a network starts without."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_VERSION, _SETTINGS = attrgetter("_version"), itemgetter("training", "c")
_COMPARED: ContextVar[_Together | None] = ContextVar("kept weights that were compared", default=None)


class kept_weights:
    """A context for one pass of a network: what its layers have kept is compared once, when the pass begins."""

    __slots__ = ("_net", "_regroups", "_token")

    def __init__(self, net: nn.Module) -> None:
        self._net = net

    def __enter__(self) -> None:
        self._token, self._regroups = None, False
        if torch.compiler.is_compiling() or not plain_evaluation():
            return
        together: _Together | None = self._net.__dict__.get(_TOGETHER)
        if together is not None and together.pays and (together.complete or together.same_kept()) and together.stands():
            self._token = _COMPARED.set(together)
        else:  # each layer compares, and keeps
            self._regroups = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._token is not None:
            _COMPARED.reset(self._token)
        elif self._regroups and kind is None:
            together: _Together | None = self._net.__dict__.get(_TOGETHER)
            if together is None or together.pays or not together.same_kept():
                self._net.__dict__[_TOGETHER] = _Together(self._net)


def regroup() -> None:
    """A layer of the network that runs has something else to keep: the next pass looks who has what."""
    together = _COMPARED.get()
    if together is not None:
        together.complete = False


def make_and_keep(
    source: Source, place: Place, chain: dict[str, Any], make: Callable[[], Tensor]
) -> tuple[Tensor, KeptWeight | None]:
    """The weight, and what may be kept of it; `chain` has the parametrisations of the weight, source among them."""
    tensors = [tensors[name] for tensors, name in (place, *source.made_of())]
    if source.training or not plain_evaluation() or not all(_plain(tensor) for tensor in tensors):
        return make(), None
    kept = KeptWeight(source, place, chain)
    with torch.inference_mode(False), torch.no_grad():
        value = make()
    if value is tensors[0]:  # a convolution that has seen no input
        return value, None
    return value, kept.fill(value) if kept.fill(value).stands() else None  # unless something was written meanwhile


def plain_evaluation() -> bool:
    """Without gradients, and with nothing that follows what is computed."""
    return not (torch.is_grad_enabled() or parametrize._cache_enabled or followed())


def followed() -> bool:
    """Whether something looks at every operation: a trace, vmap and its kin, a dispatch mode."""
    return bool(tracing_state() is not None or transforms() is not None or dispatch_modes())


def _convolution(layer: nn.Module, source: Source) -> Callable[..., Tensor] | None:
    """What the layer does beside its bound's own hook, where that is the convolution of torch and nothing else."""
    kind: Any = type(layer)
    hooks = [*layer._forward_hooks.values(), *layer._forward_pre_hooks.values()]
    if len(hooks) != 1 or getattr(hooks[0], "__self__", None) is not source or layer._forward_hooks:
        return None
    for one, convolve in zip(_CONVOLUTIONS, (torch.conv1d, torch.conv2d, torch.conv3d), strict=True):
        if kind.forward is one.forward and kind._conv_forward is one._conv_forward:
            return convolve
    return None


def _plain(tensor: Tensor | None) -> bool:
    """Of the CPU, with a version, and with all its entries side by side in whatever order."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return False
    assert tensor is not None
    return tensor.is_cpu and not tensor.is_inference() and _in_memory_order(tensor).is_contiguous()


def _in_memory_order(tensor: Tensor) -> Tensor:
    return tensor.detach().permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def _sample(tensor: Tensor) -> Tensor:
    """A view of some entries, as bits: NaN equals itself."""
    flat = _in_memory_order(tensor).view(-1)
    return flat[:: max(1, flat.numel() // _SAMPLED)].view(_BITS[tensor.element_size()])
