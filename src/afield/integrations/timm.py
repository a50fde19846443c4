"""timm: image networks with a Gaussian-process output layer, their weights and statistics kept bit for bit.

    model = timm.sngp("resnet18", pretrained=True, num_classes=10)       or a network that timm made
    model = timm.attach(trained)                                         keeps its predictions, adds the distance

These call `afield.sngp` and `afield.attach` with what timm records about a network (`pretrained_cfg`): which layer
makes the logits, and with which mean and standard deviation images are normalised. With `normalize=True`
that step becomes part of the model, which then takes bytes or numbers in [0, 1], as an exported file should.

timm needs torchvision, whose wheel must match the installed torch; it is no dependency of afield.
"""

from collections import OrderedDict
from typing import Any

from torch import nn

from afield.backbones.normalize import Normalize
from afield.model import convert
from afield.model.convert import BoundRules
from afield.model.sngp_model import SNGP

try:
    import timm
except ImportError as error:
    raise ImportError('The timm integration needs timm: pip install "afield[timm]".') from error


def sngp(
    net: str | nn.Module,
    bound: BoundRules = 6.0,
    *,
    pretrained: bool = False,
    num_classes: int | None = None,
    normalize: bool = False,
    **options: Any,
) -> SNGP:
    """`afield.sngp` for a network of timm.

    net          the name of a network, or one that timm made
    bound        6, the paper's bound for convolutional networks, is above the norm of a fresh convolution (about 3),
                 so that it only holds back what grows. Trained convolutions may exceed it: None leaves them as they are
    pretrained   download the weights that timm has for the name
    num_classes  outputs; None: as many as the network has
    normalize    begin with the network's own normalisation
    options      of `afield.sngp`

    returns  the `SNGP`
    raises   ValueError if the network has several output layers, or one that is not a Linear

    >>> afield_timm.sngp("resnet10t", num_classes=3).head.out_features
    3
    """
    network, output = _prepare(net, pretrained, normalize)
    if num_classes is not None:
        options["out_features"] = num_classes
    return convert.sngp(network, bound, output=output, **options)


def attach(net: str | nn.Module, *, normalize: bool = False, **options: Any) -> SNGP:
    """`afield.attach` for a trained network of timm; a name loads its pretrained weights.

    normalize  begin with the network's own normalisation
    options    of `afield.attach`

    returns  the `SNGP`
    raises   ValueError if the network has several output layers, or one that is not a Linear

    >>> torch.equal(afield_timm.attach(resnet)(images), resnet(images))
    True
    """
    network, output = _prepare(net, True, normalize)
    return convert.attach(network, output=output, **options)


def normalization(net: nn.Module) -> Normalize:
    """The first step of the network's own preprocessing: bytes or numbers in [0, 1] -> (x - mean) / std.

    returns  a module

    >>> afield_timm.normalization(resnet)(images).shape == images.shape
    True
    """
    config = _config(net)
    return Normalize(config["mean"], config["std"])


def _prepare(net: str | nn.Module, pretrained: bool, normalize: bool) -> tuple[nn.Module, str]:
    """The network that will be converted, and the name of its output layer."""
    network = timm.create_model(net, pretrained=pretrained) if isinstance(net, str) else net
    output = _config(network)["classifier"]
    if not isinstance(output, str):
        raise ValueError(
            f"{type(network).__name__} has {len(output)} output layers ({', '.join(output)}) and averages their "
            "logits; a Gaussian process replaces one. Choose a network with a single output layer."
        )
    layer = network.get_submodule(output)
    if not isinstance(layer, nn.Linear):
        raise ValueError(
            f"The output layer {output!r} of {type(network).__name__} is a {type(layer).__name__}, expected a Linear. "
            "Choose a network that pools before a Linear, or one made with num_classes > 0."
        )
    if not normalize:
        return network, output
    return nn.Sequential(OrderedDict(normalize=normalization(network), net=network)), f"net.{output}"


def _config(net: nn.Module) -> dict[str, Any]:
    config = getattr(net, "pretrained_cfg", None)
    if not config or "classifier" not in config:
        raise TypeError(f"Expected a network made by timm, got {type(net).__name__}: use afield.sngp or afield.attach.")
    return config
