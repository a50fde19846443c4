"""What went wrong in a network, said about what went in: which layer would not take it, and what it expects.

A network may take anything, strings too, so nothing is checked beforehand. Only when its forward pass has failed is it
run once more, with an eye on the layers, to find the one that it failed in.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from afield.errors import WrongInput

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_DIMENSIONS = ("length", "height", "width", "depth")


def clearer_error(net: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exception | None:
    """A clearer error for inputs that `net` has failed on; None where its own says as much."""
    values = [*args, *kwargs.values()]
    for value in values:
        if (kind := _not_a_tensor(value)) is not None:
            return TypeError(f"The network expects tensors of numbers, got {kind}")
    found = _failed_layer(net, args, kwargs)
    if found is None:
        return None
    name, layer, x = found
    expected = _expected(layer, x)
    if expected is None:
        return None
    shapes = " and ".join(str(tuple(value.shape)) for value in values if isinstance(value, Tensor))
    kind = type(layer).__name__.removeprefix("Parametrized")
    return WrongInput(
        f"The network cannot take inputs of shape {shapes}: its layer {name!r} ({kind}) expects {expected}. Give "
        "inputs as they were in training, with a batch dimension first."
    )


def _not_a_tensor(value: Any) -> str | None:
    first = value
    while isinstance(first, list | tuple) and first:
        first = first[0]
    if isinstance(first, str | bytes) or (isinstance(first, np.ndarray) and first.dtype.kind not in "biuf"):
        return "text. Encode it first, as a tokenizer does; class names and categories are to be numbered."
    if isinstance(value, list | tuple) and isinstance(first, int | float):
        return "a list of numbers. Use torch.tensor(x), in the dtype of the network."
    return None


def _failed_layer(
    net: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[str, nn.Module, Tensor] | None:
    """The last layer that was entered, and what it was given."""
    entered: list[tuple[str, nn.Module, Tensor]] = []

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def seen(layer: nn.Module, given: tuple[Any, ...]) -> None:
            if given and isinstance(given[0], Tensor):
                entered.append((name, layer, given[0]))

        return seen

    layers = [(name, layer) for name, layer in net.named_modules() if ".parametrizations" not in f".{name}"]
    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers]
    try:
        with contextlib.suppress(Exception):
            net(*args, **kwargs)
            return None  # it does not fail twice
    finally:
        for hook in hooks:
            hook.remove()
    return entered[-1] if entered else None


def _expected(layer: nn.Module, x: Tensor) -> str | None:
    """What the layer expects where x is something else."""
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        if x.is_floating_point():
            return f"whole numbers, such as token ids, got {x.dtype}"
        if x.numel() and not (int(x.min()) >= 0 and int(x.max()) < layer.num_embeddings):
            count = layer.num_embeddings
            return f"numbers from 0 to {count - 1}, got {int(x.min())} to {int(x.max())}"
        return None
    if isinstance(layer, nn.Linear):
        if x.dim() == 0 or x.shape[-1] != layer.in_features:
            return f"{layer.in_features} features in the last dimension, got shape {tuple(x.shape)}"
    elif isinstance(layer, _CONVOLUTIONS):
        size = len(layer.kernel_size)
        if x.dim() != size + 2 or x.shape[1] != layer.in_channels:
            rest = ", ".join(_DIMENSIONS[:1] if size == 1 else _DIMENSIONS[1 : size + 1])
            return f"{layer.in_channels} channels, (batch, {layer.in_channels}, {rest}), got {tuple(x.shape)}"
    else:
        return None
    if x.dtype != layer.weight.dtype:
        return f"{layer.weight.dtype}, got {x.dtype}"
    return None
