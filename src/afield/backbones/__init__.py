"""Backbones: x -> hidden vectors (N, out_features). They know no head."""

from collections.abc import Callable

from torch import nn

from afield.backbones.genomics_cnn import GenomicsCNN
from afield.backbones.resffn import ResFFN
from afield.backbones.resnet50 import ResNet50
from afield.backbones.resnet_cifar import ResNetCIFAR
from afield.backbones.transformer import TransformerEncoder
from afield.backbones.unet import UNet
from afield.backbones.wide_resnet import WideResNet
from afield.registry import Registry

BACKBONES: Registry[Callable[..., nn.Module]] = Registry("backbone")
BACKBONES["resffn"] = ResFFN
BACKBONES["resnet-cifar"] = ResNetCIFAR
BACKBONES["wide-resnet"] = WideResNet
BACKBONES["resnet50"] = ResNet50
BACKBONES["genomics-cnn"] = GenomicsCNN
BACKBONES["unet"] = UNet
BACKBONES["transformer"] = TransformerEncoder
