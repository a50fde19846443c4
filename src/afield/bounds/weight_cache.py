"""Bounded weights in evaluation, kept until something that they are made of changes.

Without gradients in evaluation mode, a bounded weight is a function of the weight, of the bound's vectors and of c; to
make it costs as much as the layer itself on one image. So it is made once. Every read compares what it was made of: the
tensors, their versions, the address and strides of the weight, the count of optimizer steps (fused optimizers do not
count up versions), and some entries of the weight (`p.data.copy_`, by which averages of weights are swapped in, counts
up nothing). What this cannot see: a write through `.data` to a few entries that are not among those compared.

Only on the CPU: elsewhere, a look at the entries would wait for the device. `afield.fold` writes weights out for good.
Threads may read at once: what is kept never changes, it is only replaced.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import _get_tracing_state as tracing_state
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C._functorch import peek_interpreter_stack as transforms
from torch.nn.utils import parametrize

from afield.bounds import optimizer_steps

_SAMPLED = 8  # entries of a weight that are compared
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Place = tuple[dict[str, Any], str]
"""Where a tensor is found: a dictionary of a module's parameters or buffers, and a name."""


class Source(Protocol):
    """What makes the weight: a bound."""

    training: bool

    def made_of(self) -> list[Place]:
        """The tensors beside the weight itself on which the weight of evaluation mode depends."""
        ...

    def constants(self) -> tuple[float, ...]:
        """The numbers on which it depends."""
        ...


class KeptWeight:
    """A bounded weight and what it was made of.

    Few objects, read in one go: between two passes all of them have left the processor's caches, so that it is the
    number of objects that costs.
    """

    __slots__ = (
        "_address", "_constants", "_entries", "_entries_then", "_others", "_place", "_steps", "_stride",
        "_value_version", "_version", "_weight", "source", "value",
    )  # fmt: skip

    def __init__(self, source: Source, place: Place) -> None:
        weight: Tensor = place[0][place[1]]
        self.source, self._place, self._weight = source, place, weight
        self._address, self._stride, self._version = weight.data_ptr(), weight.stride(), weight._version
        self._steps, self._constants = optimizer_steps.count, source.constants()
        others = [(tensors, name, tensors[name]) for tensors, name in source.made_of()]
        self._others = [(tensors, name, tensor, tensor._version) for tensors, name, tensor in others]
        self._entries = _sample(weight)
        self._entries_then = self._entries.clone()

    def fill(self, value: Tensor) -> "KeptWeight":
        """With the weight that was made."""
        self.value, self._value_version = value, value._version
        return self

    def stands(self) -> bool:
        """Whether the weight would come out the same now."""
        tensors, name = self._place
        weight = self._weight
        if (
            tensors[name] is not weight
            or self.source.training
            or weight.data_ptr() != self._address  # which says that the entries below are still there
            or weight._version != self._version
            or weight.stride() != self._stride
            or self._steps != optimizer_steps.count
            or self._constants != self.source.constants()
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


def make_and_keep(source: Source, place: Place, make: Callable[[], Tensor]) -> tuple[Tensor, KeptWeight | None]:
    """The weight, and what may be kept of it."""
    tensors = [tensors[name] for tensors, name in (place, *source.made_of())]
    if source.training or not plain_evaluation() or not all(_plain(tensor) for tensor in tensors):
        return make(), None
    kept = KeptWeight(source, place)
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
