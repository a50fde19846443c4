"""The layers of a network: which hold parameters, how to put another in the place of one, how each is trained, and
which can be the output."""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from afield.bounds.spectral import BOUNDABLE
from afield.gp.head import GaussianProcessHead
from afield.model.evaluating import evaluating
from afield.outputs.positions import ChannelsFirst

HEAD_RATE = 10.0  # times the learning rate of the hidden layers; docs/defaults.md


def unwrapped(net: nn.Module) -> nn.Module:
    """A copy of the network without what others have put around it: compilation and copies on several devices.

    A compiled network would go on running the code of its old output layer, and replicas run in threads of their own.
    """
    if isinstance(net, torch.jit.ScriptModule):
        raise ValueError("A scripted or traced network cannot be changed: convert the network that it was made of.")
    if lazy := [name for name, parameter in net.named_parameters() if is_lazy(parameter)]:
        raise ValueError(
            f"{type(net).__name__} has layers whose size is not known yet ({', '.join(lazy[:3])}): run one batch "
            "through it first, net(x), and convert it then."
        )
    while isinstance(inner := _inside(net), nn.Module):
        net = inner
    net = copy.deepcopy(net)
    for parent in list(net.modules()):
        for child, module in list(parent._modules.items()):
            while isinstance(inner := _inside(module), nn.Module):
                parent._modules[child] = module = inner
    return net


def _inside(net: nn.Module | None) -> Any:
    """The network in a container; None in anything else."""
    if isinstance(net, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return net.module
    return getattr(net, "_orig_mod", None)  # torch.compile


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


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    head_lr: float | None = None,
    num_examples: int | None = None,
) -> list[dict[str, Any]]:
    """The parameters to train, in groups for an optimizer: torch.optim.AdamW(afield.parameter_groups(model, lr=1e-3)).

    lr            learning rate of the hidden layers
    weight_decay  of their matrices; biases and other vectors have none
    head_lr       learning rate of the Gaussian process's output weights; None: ten times lr
    num_examples  N, how many training examples there are: output weights get the decay of their prior, ridge / N.
                  None: they get no decay, because it depends on N. `weight_decay` is never theirs

    The prior N(0, I / ridge) adds ridge |B|^2 / (2 N) to the mean negative log-likelihood, such as the cross-entropy.
    SGD and Adam add weight_decay times the weight to its gradient: there ridge / N is exact, and training tends to the
    maximum of the posterior. AdamW shrinks a weight beside the step, which is divided by the root of v, the mean square
    of the weight's gradient: ridge / N then acts as the precision ridge sqrt(v), at most sqrt(2 / D) of the prior's,
    and no one number is exact. Nor is ridge / N for other losses: for a mean squared error it is 2 ridge noise / N.

    Parameters that need no gradient are in no group: freeze first.

    returns  the groups, for any optimizer of PyTorch
    raises   ValueError if a rate is negative, num_examples is below 1, or every parameter is frozen

    >>> groups = afield.parameter_groups(model, lr=1e-3, weight_decay=0.01, num_examples=50_000)
    >>> optimizer = torch.optim.AdamW(groups)
    >>> groups[-1]["lr"]
    0.01
    """
    heads = [module for module in model.modules() if isinstance(module, GaussianProcessHead)]
    if not heads:
        raise TypeError(f"parameter_groups expects a model that afield.sngp made, got {type(model).__name__}.")
    for name, value in (("lr", lr), ("weight_decay", weight_decay), ("head_lr", head_lr)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be zero or more, and finite, got {value}.")
    if num_examples is not None and not num_examples >= 1:
        raise ValueError(f"num_examples must be the number of training examples, at least 1, got {num_examples}.")
    head_lr = HEAD_RATE * lr if head_lr is None else head_lr
    parts: list[tuple[Collection[nn.Parameter], float, float]] = []
    for head in heads:
        weights = [p for name, p in head.named_parameters() if not name.startswith("mean.") and name != "constant"]
        parts.append((weights, head_lr, 0.0 if num_examples is None else float(head.ridge) / num_examples))
        parts.append(([] if head.constant is None else [head.constant], head_lr, 0.0))  # it is outside the prior
    taken = {id(p) for chosen, _, _ in parts for p in chosen}
    rest = [p for p in model.parameters() if id(p) not in taken]
    groups = [*decay_matrices(rest, lr, weight_decay), *(_group(*part) for part in parts)]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError("parameter_groups found nothing to train: afield.attach freezes every parameter.")
    return groups


def decay_matrices(parameters: Collection[nn.Parameter], lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: vectors, which have no decay, and matrices."""
    return [
        _group([p for p in parameters if p.dim() <= 1], lr, 0.0),
        _group([p for p in parameters if p.dim() > 1], lr, weight_decay),
    ]


def _group(parameters: Collection[nn.Parameter], lr: float, weight_decay: float) -> dict[str, Any]:
    return {"params": [p for p in parameters if p.requires_grad], "lr": lr, "weight_decay": weight_decay}


@dataclass(frozen=True)
class OutputLayer:
    """A type of layer that makes logits, and how rows of hidden vectors reach the head that takes its place.

    inputs   the length of a hidden vector
    outputs  the number of logits at a position
    fits     whether every position is computed by itself, so that positions are rows
    of_rows  the same layer over rows (M, d), as the mean of an attached head
    around   the head as the network calls it
    options  of the head, unless others are given
    attached the same where the mean is kept and features are of the variance alone
    """

    inputs: Callable[[Any], int]
    outputs: Callable[[Any], int]
    fits: Callable[[Any], bool] = lambda layer: True
    of_rows: Callable[[Any], nn.Module] = lambda layer: layer
    around: Callable[[GaussianProcessHead], nn.Module] = lambda head: head
    options: Mapping[str, Any] = field(default_factory=dict)
    attached: Mapping[str, Any] = field(default_factory=dict)


def _is_one_position(layer: Any) -> bool:
    own_way = type(layer).forward not in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)
    rest = (*layer.kernel_size, *layer.stride, layer.groups)
    return set(rest) == {1} and not isinstance(layer.padding, str) and not any(layer.padding) and not own_way


def _linear_of(layer: Any) -> nn.Linear:
    linear = nn.Linear(layer.in_channels, layer.out_channels, bias=layer.bias is not None).to(layer.weight)
    with evaluating(layer):
        layer(layer.weight.new_zeros(1, layer.in_channels, *layer.kernel_size))  # weight norm may be in a hook
        linear.weight.copy_(layer.weight.flatten(1))
        if layer.bias is not None:
            linear.bias.copy_(layer.bias)
    return linear


LINEAR = OutputLayer(lambda layer: layer.in_features, lambda layer: layer.out_features)
CONVOLUTION = OutputLayer(
    lambda layer: layer.in_channels,
    lambda layer: layer.out_channels,
    fits=_is_one_position,
    of_rows=_linear_of,
    around=ChannelsFirst,
    options={"num_random_features": 128},  # a row is a pixel, of which there are many
    attached={"num_random_features": 32},  # docs/outputs.md has the evidence
)
OUTPUT_LAYERS: Mapping[type[nn.Module], OutputLayer] = MappingProxyType(
    {nn.Linear: LINEAR, nn.Conv1d: CONVOLUTION, nn.Conv2d: CONVOLUTION, nn.Conv3d: CONVOLUTION}
)
"""What can be the output layer of a network, by type. A Linear may have positions before its features, (N, *P, d)."""


def kind_of(layer: nn.Module) -> OutputLayer | None:
    """How a layer can be the output; None where it cannot."""
    found = next((kind for base, kind in OUTPUT_LAYERS.items() if isinstance(layer, base)), None)
    return found if found is not None and found.fits(layer) else None
