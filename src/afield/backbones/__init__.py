"""Backbones: x -> hidden vectors (N, out_features). They know no head."""

from collections.abc import Callable

from torch import nn

from afield.backbones.resffn import ResFFN
from afield.backbones.resnet_cifar import ResNetCIFAR
from afield.registry import Registry

BACKBONES: Registry[Callable[..., nn.Module]] = Registry("backbone", resffn=ResFFN, resnet_cifar=ResNetCIFAR)
