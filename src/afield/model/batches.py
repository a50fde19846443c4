"""How batches reach a model: what is input and what is target, on which device, in which dtype.

A batch is a tensor; a tuple or list (inputs..., target); or a mapping of keyword arguments (Hugging Face) whose target
is under "labels" or "label". NumPy arrays are taken wherever tensors are. Two fields are an input and its target. More
than two are a guess unless the network's forward tells: it needs as many inputs as there are fields before the last, or
as there are fields. Otherwise `target` and `inputs` have to name them, by index or by key.
"""

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Field = int | str
Inputs = Field | Sequence[Field] | None
_TARGETS = ("labels", "label")


def split_batch(
    batch: Any,
    device: torch.device | None = None,
    *,
    net: nn.Module | None = None,
    target: Field | None = None,
    inputs: Inputs = None,
    wants_target: bool = True,
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """(args, kwargs, target) of a batch, moved to `device`; target is None if the batch has none.

    net           the network that takes the inputs: its forward tells inputs from the target, and arrays of real
                  numbers come in its dtype. None: the last of several fields is the target
    target        index or key of the target; None: by the rules of the module
    inputs        index or key of the input, or a list of them; None: by the rules of the module
    wants_target  whether to ask for `target` where several fields might be it
    """
    if isinstance(batch, Mapping):
        args, kwargs, found = _of_mapping(batch, net, target, inputs)
    elif isinstance(batch, tuple | list):
        args, kwargs, found = _of_fields(batch, net, target, inputs, wants_target)
    elif isinstance(batch, Tensor | np.ndarray):
        if target is not None or inputs is not None:
            raise ValueError(
                f"target={target!r} and inputs={inputs!r} choose fields of a batch, got a batch that is one tensor."
            )
        args, kwargs, found = (batch,), {}, None
    else:
        raise TypeError(
            f"A batch must be a tensor, a tuple or list (inputs..., target), or a mapping, got {type(batch)}."
        )
    dtype = None if net is None else dtype_of(net)
    args = tuple(as_tensors(value, device, dtype) for value in args)
    return args, {k: as_tensors(v, device, dtype) for k, v in kwargs.items()}, as_tensors(found, device)


def device_of(module: nn.Module) -> torch.device | None:
    """The device of a module's first parameter or buffer."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        return tensor.device
    return None


def dtype_of(module: nn.Module) -> torch.dtype | None:
    """The dtype of a module's first parameter of real numbers."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), None)


def as_tensors(value: Any, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
    """The value with its tensors on `device`, and its arrays as tensors there; arrays of real numbers in `dtype`."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        # torch shares neither reversed, nor read-only, nor foreign-endian memory
        native = np.require(value, value.dtype.newbyteorder("="), ["C", "W"])
        tensor = torch.as_tensor(native, device=device)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor
    if isinstance(value, Tensor):
        return value if device is None else value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {k: as_tensors(v, device, dtype) for k, v in value.items()} if _holds(value, device) else value
    if isinstance(value, tuple | list):
        return [as_tensors(v, device, dtype) for v in value] if _holds(value, device) else value
    return value


def is_loader(value: Any) -> bool:
    """Whether a value is batches one after the other, and not one input: a DataLoader, a list of batches, a generator.

    A tuple, a mapping, text and a list of anything but tensors are inputs; so is what moves to a device by itself.
    """
    if isinstance(value, Tensor | np.ndarray | Mapping | str | bytes | tuple) or hasattr(value, "to"):
        return False
    if isinstance(value, list):
        return bool(value) and next(_leaves(value[0]), None) is not None
    return isinstance(value, Iterable)


def _of_mapping(
    batch: Mapping[Any, Any], net: nn.Module | None, target: Field | None, inputs: Inputs
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    for key in [*([] if target is None else [target]), *_listed(inputs)]:
        if key not in batch:
            raise ValueError(f"The batch has no field {key!r}: its fields are {', '.join(map(repr, batch))}.")
    targets = _TARGETS if target is None else (target, *_TARGETS)
    found = next((batch[name] for name in targets if name in batch), None)
    if inputs is None:
        rest = {k: v for k, v in batch.items() if k not in targets}
        if net is not None and not _takes(net, rest):
            raise ValueError(
                f"The fields {', '.join(map(repr, rest))} of the batch are not what the network's forward takes: "
                f"{_signature(net)}. Say which is which by key: inputs={next(iter(rest))!r}, target=..."
            )
        return (), rest, found
    chosen: dict[Any, Any] = {key: batch[key] for key in _listed(inputs)}
    if net is None or _takes(net, chosen):
        return (), chosen, found
    return tuple(chosen.values()), {}, found


def _of_fields(
    batch: Sequence[Any], net: nn.Module | None, target: Field | None, inputs: Inputs, wants_target: bool
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    if not batch:
        raise ValueError("A batch must hold at least the input, got an empty tuple or list.")
    at_target = None if target is None else _position(batch, target)
    rest = [i for i in range(len(batch)) if i != at_target]
    if inputs is not None:
        at_inputs = [_position(batch, field) for field in _listed(inputs)]
        rest = [i for i in rest if i not in at_inputs]
        if at_target is None and rest:
            if len(rest) > 1 and wants_target:
                raise _ambiguous(batch, net)
            at_target = rest[0] if len(rest) == 1 else None
    elif at_target is not None:
        at_inputs = rest
        if len(rest) > 1 and net is not None and _num_required(net) != len(rest):
            raise _ambiguous(batch, net)
    else:
        required = None if net is None else _num_required(net)
        all_inputs = len(batch) in (1, required)
        if net is not None and len(batch) > 2 and required not in (len(batch), len(batch) - 1):
            raise _ambiguous(batch, net)
        at_inputs = rest if all_inputs else rest[:-1]
        at_target = None if all_inputs else rest[-1]
    args = tuple(batch[i] for i in at_inputs)
    found = None if at_target is None else batch[at_target]
    if len(args) == 1 and isinstance(args[0], Mapping):
        return (), dict(args[0]), found
    return args, {}, found


def _position(batch: Sequence[Any], field: Field) -> int:
    names = getattr(batch, "_fields", ())
    if field in names:
        return names.index(field)
    if not isinstance(field, int) or not -len(batch) <= field < len(batch):
        by_name = f", or {', '.join(map(repr, names))}" if names else ""
        raise ValueError(
            f"The batch has no field {field!r}: it has {len(batch)} fields, 0 to {len(batch) - 1}{by_name}."
        )
    return field % len(batch)


def _ambiguous(batch: Sequence[Any], net: nn.Module | None) -> ValueError:
    required = None if net is None else _num_required(net)
    needs = "" if required is None else f", and the network's forward needs {required} of them"
    return ValueError(
        f"A batch has {len(batch)} fields{needs}: which are inputs and which is the target would be a guess. Say so "
        "by index: inputs=0, target=1 for batches (x, y, ...), inputs=[0, 1], target=2 for batches (a, b, y)."
    )


def _listed(inputs: Inputs) -> list[Field]:
    if inputs is None:
        return []
    return [inputs] if isinstance(inputs, int | str) else list(inputs)


def _signature(net: nn.Module) -> inspect.Signature | None:
    own = getattr(net, "_orig_mod", None)  # torch.compile
    with_forward = own if isinstance(own, nn.Module) else net
    try:
        return inspect.signature(with_forward.forward)
    except (TypeError, ValueError):
        return None


def _num_required(net: nn.Module) -> int | None:
    """Inputs that a network's forward takes by position and cannot do without; None if it does not say."""
    signature = _signature(net)
    if signature is None:
        return None
    parameters = signature.parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters)


def _takes(net: nn.Module, names: Iterable[Any]) -> bool:
    """Whether a network's forward takes keyword arguments of these names."""
    signature = _signature(net)
    if signature is None:
        return True
    parameters = signature.parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return True
    return all(name in parameters and parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY for name in names)


def _holds(value: Any, device: torch.device | None) -> bool:
    """Whether there is anything to convert or move: what has nothing stays the object that it is."""
    return device is not None or any(isinstance(leaf, np.ndarray) for leaf in _leaves(value))


def _leaves(value: Any) -> Iterator[Tensor | np.ndarray]:
    """The tensors and arrays in a nest of tuples, lists and mappings."""
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _leaves(inner)
