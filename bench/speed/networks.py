"""Prediction and training steps of whole networks, against the same network with its dense output layer."""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afield
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


def wide_resnet(depth: int, width: int, batch: int) -> Networks:
    torch.manual_seed(0)
    net = nn.Sequential(WideResNet(depth, width), nn.Linear(64 * width, CLASSES))
    return net, afield.sngp(net, {nn.Conv2d: 6.0}), torch.rand(batch, 3, 32, 32)


def minilm(batch: int = 32, tokens: int = 32) -> Networks:
    torch.manual_seed(0)
    net = nn.Sequential(TransformerEncoder(), nn.Linear(384, 150))
    return net, afield.sngp(net, {"*pooler": 0.95}), torch.randint(1000, 20000, (batch, tokens))


def predictions(networks: Networks, pairs: int) -> Metrics:
    net, model, x = networks
    net.eval()
    fitted(model)

    def dense() -> Tensor:
        with torch.no_grad():
            return net(x).softmax(-1)

    assert model.predict(x).p_value is not None
    return compared(lambda: model.predict(x), dense, pairs=pairs)


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


@measure("train-wide-resnet", "training step, WideResNet-16-4, batch 128, SNGP / dense", 1.08)
def train_wide_resnet() -> Metrics:
    return steps(wide_resnet(16, 4, 128), lambda m: torch.optim.SGD(m.parameters(), 0.05, momentum=0.9), pairs=9)


@measure("train-minilm", "training step, MiniLM with bounded pooler, batch 32 / dense", 1.03)
def train_minilm() -> Metrics:
    return steps(minilm(), lambda m: torch.optim.AdamW(m.parameters(), 1e-5), pairs=15)
