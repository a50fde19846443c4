"""The layers of a network, by name: which hold parameters, how to put another in the place of one."""

from collections.abc import Iterator

from torch import nn

from afield.bounds.spectral import BOUNDABLE
from afield.gp.head import GaussianProcessHead


def replace_layer(net: nn.Module, name: str, new: nn.Module) -> nn.Module:
    if not name:
        return new
    old = net.get_submodule(name)
    for parent in list(net.modules()):  # under every name that it has
        for child, module in list(parent._modules.items()):
            if module is old:
                setattr(parent, child, new)
    return net


def layers_of(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that holds parameters of its own; what a GP head or an attention layer owns goes with it."""
    covered: list[str] = []
    for name, module in net.named_modules():
        if any(name.startswith(prefix) for prefix in covered) or ".parametrizations" in f".{name}":
            continue
        if isinstance(module, GaussianProcessHead | nn.MultiheadAttention):
            covered.append(f"{name}." if name else "")
            yield name, module
        elif (
            isinstance(module, BOUNDABLE)  # also without parameters: a BatchNorm without a scale still has a gain
            or next(module.parameters(recurse=False), None) is not None
            or "parametrizations" in module._modules
        ):
            yield name, module


def type_name(layer: nn.Module) -> str:
    return type(layer).__name__.removeprefix("Parametrized")
