"""Prediction and training steps of whole networks, against the same network with its dense output layer."""

import copy
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afield
from afield.backbones.resnet_cifar import ResNetCIFAR
from afield.backbones.transformer import TransformerEncoder
from afield.backbones.wide_resnet import WideResNet
from bench.speed.measure import Metrics, compared, measure

CLASSES = 10
Networks = tuple[nn.Module, afield.SNGP, Tensor]
"""The dense network, the converted one, inputs."""


def fitted(model: afield.SNGP) -> afield.SNGP:
    """With a posterior and p-values, as after `fit_posterior` and `calibrate`; of which data does not matter here."""
    head, generator = model.eval().head, torch.Generator().manual_seed(1)
    with torch.no_grad():
        head.observe(torch.randn(2000, head.in_features, generator=generator))
        head.set_reference(head.predict(torch.randn(1000, head.in_features, generator=generator)).score())
    return model


def wide_resnet(depth: int, width: int, batch: int, bound: float = 6.0) -> Networks:
    torch.manual_seed(0)
    net = nn.Sequential(WideResNet(depth, width), nn.Linear(64 * width, CLASSES))
    return net, afield.sngp(net, {nn.Conv2d: bound}), torch.rand(batch, 3, 32, 32)


def resnet_56(batch: int) -> Networks:
    torch.manual_seed(0)
    net = ResNetCIFAR(56, CLASSES)
    return net, afield.sngp(net, {nn.Conv2d: 6.0}), torch.rand(batch, 3, 32, 32)


class Block(nn.Module):
    """Two convolutions of a ResNet-18 and their shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False),
            nn.BatchNorm2d(channels),
        )
        same = stride == 1 and in_channels == channels
        shortcut = nn.Conv2d(in_channels, channels, 1, stride, bias=False)
        self.shortcut = nn.Identity() if same else nn.Sequential(shortcut, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


def resnet_18(batch: int) -> Networks:
    """For images of 64 x 64 pixels, which its first convolution keeps."""
    torch.manual_seed(0)
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Block(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(widths)]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    net = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))
    return net, afield.sngp(net, {nn.Conv2d: 6.0}), torch.rand(batch, 3, 64, 64)


def mlp(batch: int = 1) -> Networks:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    return net, afield.sngp(net), torch.rand(batch, 20)


def minilm(batch: int = 32, tokens: int = 32) -> Networks:
    torch.manual_seed(0)
    net = nn.Sequential(TransformerEncoder(), nn.Linear(384, 150))
    return net, afield.sngp(net, {"*pooler": 0.95}), torch.randint(1000, 20000, (batch, tokens))


def predictions(networks: Networks, pairs: int, calls: int = 1) -> Metrics:
    net, model, x = networks
    net.eval()
    fitted(model)

    def dense() -> Tensor:
        with torch.no_grad():
            return net(x).softmax(-1)

    assert model.predict(x).p_value is not None  # convolutions have seen their input
    model.take_fingerprint()  # as `fit_posterior` does: every prediction compares it
    return compared(lambda: model.predict(x), dense, pairs=pairs, calls=calls)


def steps(networks: Networks, optimizer: Callable[[nn.Module], torch.optim.Optimizer], pairs: int) -> Metrics:
    net, model, x = networks
    y = torch.arange(len(x)) % CLASSES

    def step_of(module: nn.Module) -> Callable[[], None]:
        module.train()
        chosen = optimizer(module)

        def step() -> None:
            chosen.zero_grad()
            F.cross_entropy(module(x), y).backward()
            chosen.step()

        return step

    return compared(step_of(model), step_of(copy.deepcopy(net)), pairs=pairs)


@measure("predict-wide-resnet", "predict (probabilities, variance, p-value), WideResNet-28-10, batch 64 / dense", 1.02)
def predict_wide_resnet() -> Metrics:
    return predictions(wide_resnet(28, 10, 64), pairs=9)


@measure("predict-minilm", "the same, MiniLM, batch 32, 32 tokens", 1.03)
def predict_minilm() -> Metrics:
    return predictions(minilm(), pairs=25)


@measure("predict-one-wide-resnet", "the same, WideResNet-16-4, one image", 1.15)
def predict_one_wide_resnet() -> Metrics:
    return predictions(wide_resnet(16, 4, 1), pairs=151)


@measure("predict-one-resnet-56", "the same, ResNet-56, one image", 1.15)
def predict_one_resnet_56() -> Metrics:
    return predictions(resnet_56(1), pairs=201)


@measure("predict-one-resnet-18", "the same, ResNet-18, one image of 64 x 64 pixels", 1.15)
def predict_one_resnet_18() -> Metrics:
    return predictions(resnet_18(1), pairs=51)


@measure("predict-wide-resnet-16-4", "the same, WideResNet-16-4, batch 64", 1.03)
def predict_wide_resnet_16_4() -> Metrics:
    return predictions(wide_resnet(16, 4, 64), pairs=25)


@measure("predict-resnet-56", "the same, ResNet-56, batch 64", 1.03)
def predict_resnet_56() -> Metrics:
    return predictions(resnet_56(64), pairs=25)


@measure("predict-resnet-18", "the same, ResNet-18, batch 64 of 64 x 64 pixels", 1.03)
def predict_resnet_18() -> Metrics:
    return predictions(resnet_18(64), pairs=7)


@measure("predict-one-mlp", "predict, two dense layers, one row: milliseconds more than dense", 0.15, metric="extra_ms")
def predict_one_mlp() -> Metrics:
    metrics = predictions(mlp(), pairs=101, calls=20)
    return metrics | {"extra_ms": 1000 * (metrics["seconds"] - metrics["other_seconds"])}


@measure("train-wide-resnet", "training step, WideResNet-16-4, batch 128, SNGP / dense", 1.08)
def train_wide_resnet() -> Metrics:
    return steps(wide_resnet(16, 4, 128), lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9), pairs=9)


@measure("train-wide-resnet-64", "the same, batch 64", 1.08)
def train_wide_resnet_64() -> Metrics:
    return steps(wide_resnet(16, 4, 64), lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9), pairs=11)


@measure("train-wide-resnet-binding", "the same, batch 64, all bounds binding (0.95)", 1.08)
def train_wide_resnet_binding() -> Metrics:
    return steps(wide_resnet(16, 4, 64, 0.95), lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9), pairs=11)


@measure("train-minilm", "training step, MiniLM with bounded pooler, batch 32 / dense", 1.03)
def train_minilm() -> Metrics:
    return steps(minilm(), lambda m: torch.optim.AdamW(m.parameters(), 1e-5), pairs=15)
