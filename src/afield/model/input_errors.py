"""What went wrong in a network, said about what went in: which layer would not take it, and what it expects.

A network may take anything, strings too, so nothing is checked beforehand. Only when its forward pass has failed is it
run once more, with an eye on the layers, to find the one that it failed in.

Inputs that are not numbers have NaN for an answer. Finite ones that are so far away that numbers overflow within the
network, as in a layer norm, are what a model is most unsure of.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from afield.bounds.weight_cache import followed
from afield.errors import WrongInput
from afield.gp.head import GaussianProcessHead
from afield.prediction.prediction import Prediction

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_DIMENSIONS = ("length", "height", "width", "depth")


def clearer_error(net: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Exception | None:
    """A clearer error for inputs that `net` has failed on; None where its own says as much."""
    values = [*args, *kwargs.values()]
    for value in values:
        if (kind := _not_a_tensor(value)) is not None:
            return TypeError(f"The network expects tensors of numbers, got {kind}")
    found = _failed_layer(net, args, kwargs)
    expected = None if found is None else _expected(found[1], found[2])
    if found is None or expected is None:
        return _about_a_list(values)
    name, layer, _ = found
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


def _about_a_list(values: list[Any]) -> Exception | None:
    for value in values:
        if isinstance(value, list | tuple) and value and all(isinstance(inner, Tensor) for inner in value):
            return TypeError(
                f"The network cannot take {len(value)} tensors in one {type(value).__name__}. Give several inputs one "
                "by one, as in predict(a, b), and batches (inputs, target) in a list or a loader, as in "
                "predict([(x, y)])."
            )
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


def find_overflow(h: Tensor, inputs: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
    """The hidden vectors h, and which rows (N,) of finite inputs are so far away that h overflows; None: no row.

    Rows whose first input is not finite become NaN: an activation may hide it, and the row would pass as usual.
    """
    x = next((value for value in inputs if isinstance(value, Tensor)), None)
    if x is None or not x.is_floating_point() or x.dim() < 2 or len(x) != len(h):
        return h, None
    # A sum is finite only if all are, and one number. Elsewhere, a look at it would wait for the device.
    may_look = x.is_cpu and not torch.compiler.is_compiling() and not followed()
    if may_look and math.isfinite(x.sum().item()):
        infinite = torch.zeros(len(x), dtype=torch.bool)
        if math.isfinite(h.sum().item()):
            return h, None
    else:
        infinite = ~torch.isfinite(x).flatten(1).all(1)
    if may_look and h.dim() == 2:
        overflown = ~torch.isfinite(h).all(1) & ~infinite
        if bool(overflown.any()):
            return h.masked_fill(infinite[:, None], math.nan), overflown
    return h.masked_fill(infinite.reshape(-1, *[1] * (h.dim() - 1)), math.nan), None


def predict_unsure(
    head: GaussianProcessHead,
    h: Tensor,
    overflown: Tensor,
    *,
    predictive: str | None,
    num_samples: int,
    generator: torch.Generator | None,
) -> Prediction:
    """The `Prediction` for hidden vectors of which some have overflown: the mean there is zero, the variance and the
    score are infinite."""
    head = head.snapshot()
    known = h.masked_fill(overflown[:, None], 0.0)
    mean, variance = head.posterior(known)
    score = head.own_score(mean, variance, known)
    mean = mean.masked_fill(overflown[:, None], 0.0)
    variance = variance.masked_fill(overflown.reshape(-1, *[1] * (variance.dim() - 1)), math.inf)
    score = None if score is None else score.masked_fill(overflown, math.inf)
    prediction = head.prediction(mean, variance, score, known, predictive, num_samples, generator)
    return dataclasses.replace(prediction, features=h)
