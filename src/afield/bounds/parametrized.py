"""The class that torch injects into a parametrised layer, made to read a kept weight and to pickle."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as any_global_hook
from torch.nn.utils import parametrize

from afield.bounds import optimizer_steps
from afield.bounds.weight_cache import KEPT, KEPT_WEIGHT, KeptWeight, make_and_keep, regroup


def refine_class(layer: nn.Module, name: str) -> None:
    """Let the class of a layer whose tensor `name` is parametrised read it through the cache, and pickle."""
    optimizer_steps.follow()
    kind: Any = type(layer)
    made: property = kind.__dict__[name]
    setattr(kind, name, property(_reader(name, cast(Callable[[nn.Module], Tensor], made.fget)), made.fset))
    kind.__reduce_ex__ = _reduce
    if "__getstate__" in kind.__dict__:  # torch's, which refuses
        del kind.__getstate__
    if kind.forward in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward):
        kind._call_impl = _call


def _reader(name: str, make: Callable[[nn.Module], Tensor]) -> Callable[[nn.Module], Tensor]:
    slot = KEPT + name

    def read(layer: nn.Module) -> Tensor:
        if torch.compiler.is_compiling():
            return make(layer)
        kept: KeptWeight | None = layer.__dict__.get(slot)
        if kept is not None and kept.readable():
            return kept.value
        chain: Any = cast(nn.ModuleDict, layer.parametrizations)[name]
        source, place = chain[0], (chain._parameters, "original")
        if len(chain) > 1 or "original" not in chain._parameters or not hasattr(source, "made_of"):
            return make(layer)  # not a bound alone
        value, layer.__dict__[slot] = make_and_keep(source, place, chain._modules, lambda: make(layer))
        regroup()
        return value

    return read


def _call(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """A convolution whose weight was compared with those of its network, and of which nobody wants anything else.

    In evaluation the hook by which its bound sees the input has nothing to do once the input size is known, and costs a
    third of a small layer. Each bounded layer has a class of its own, whose methods have left the processor's caches
    since the last pass: all that is needed is in the layer's dictionary. Hooks of the backward pass have nothing to do:
    a weight is read in its place only without gradients.
    """
    own = layer.__dict__
    kept: KeptWeight | None = own.get(KEPT_WEIGHT)
    if (
        kept is None
        or kept.convolve is None
        or torch.compiler.is_compiling()
        or kwargs
        or len(args) != 1
        or not kept.readable_together()
        or own["padding_mode"] != "zeros"
        or "forward" in own
        or "_conv_forward" in own
        or "bias" not in own["_parameters"]  # but parametrised
        or any_global_hook()
    ):
        return nn.Module._call_impl(layer, *args, **kwargs)
    bias = own["_parameters"]["bias"]
    return kept.convolve(args[0], kept.value, bias, own["stride"], own["padding"], own["dilation"], own["groups"])


def _reduce(layer: nn.Module, _: Any) -> tuple[Any, ...]:
    """The injected class has no name to be found by: a pickle says how to make it again."""
    names = tuple(cast(nn.ModuleDict, layer.parametrizations))
    return _layer_of, (type(layer).__mro__[1], names), layer.__getstate__()


def _layer_of(kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """An empty layer of that kind, with parametrised tensors of these names."""
    layer = kind.__new__(kind)
    parametrize._inject_new_class(layer)
    for name in names:
        parametrize._inject_property(layer, name)
        refine_class(layer, name)
    return layer
