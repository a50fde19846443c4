"""How batches reach a model: what is input and what is target, on which device, in which mode, with what progress.

A batch is a tensor; a tuple or list whose last element is the target when there are at least two; or a mapping of
keyword arguments (Hugging Face) whose target is under "labels" or "label".
"""

import itertools
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
_TARGETS = ("labels", "label")


def split_batch(batch: Any, device: torch.device | None = None) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """(args, kwargs, target) of a batch, moved to `device`; target is None if the batch has none."""
    batch = _to(batch, device)
    if isinstance(batch, Mapping):
        target = next((batch[name] for name in _TARGETS if name in batch), None)
        return (), {k: v for k, v in batch.items() if k not in _TARGETS}, target
    if isinstance(batch, tuple | list):
        if not batch:
            raise ValueError("A batch must hold at least the input, got an empty tuple or list.")
        args, target = (tuple(batch[:-1]), batch[-1]) if len(batch) > 1 else (tuple(batch), None)
        if len(args) == 1 and isinstance(args[0], Mapping):
            return (), dict(args[0]), target
        return args, {}, target
    if isinstance(batch, Tensor):
        return (batch,), {}, None
    raise TypeError(f"A batch must be a tensor, a tuple or list (inputs..., target), or a mapping, got {type(batch)}.")


def device_of(module: nn.Module) -> torch.device | None:
    """The device of a module's first parameter or buffer."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        return tensor.device
    return None


def _to(value: Any, device: torch.device | None) -> Any:
    if device is None:
        return value
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {k: _to(v, device) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_to(v, device) for v in value]
    return value
