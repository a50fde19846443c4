"""Prediction and training steps of whole networks, against the same network with its dense output layer."""

import copy
import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afield
from afield.backbones.resnet_cifar import ResNetCIFAR
from afield.backbones.transformer import TransformerEncoder
from afield.backbones.wide_resnet import WideResNet
from afield.gp.head import GaussianProcessHead
from afield.model.calibration import sources_of
from bench.speed.measure import Metrics, compared, measure
from bench.speed.one_row import steps_of

CLASSES = 10
Networks = tuple[nn.Module, afield.SNGP, Tensor]
"""The dense network, the converted one, inputs."""


def fitted(model: afield.SNGP) -> afield.SNGP:
    """With a posterior and p-values, as after `fit_posterior` and `calibrate`; of which data does not matter here."""
    head, generator = model.eval().head, torch.Generator().manual_seed(1)
    observed, held_out = (torch.rand(rows, head.in_features, generator=generator) for rows in (2000, 1000))
    with torch.no_grad():
        if head.mean is None:
            head.weight.normal_(generator=generator)  # all logits are equal otherwise
        head.observe(observed, classes=torch.arange(2000) % max(2, head.out_features))
        assert head.joined_score is not None
        head.joined_score.fit(sources_of(head, held_out))
        head.set_score("joined")
        head.set_reference(head.predict(held_out).score())
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
    """Against the dense network, with one thread and with all."""
    net, model, x = networks
    net.eval()
    fitted(model)

    def dense() -> Tensor:
        with torch.no_grad():
            return net(x).softmax(-1)

    assert model.predict(x).p_value is not None  # convolutions have seen their input
    model.take_fingerprint()  # as `fit_posterior` does: every prediction compares it
    metrics, threads = {}, torch.get_num_threads()
    for prefix, number in (("one_thread_", 1), ("", threads)):
        torch.set_num_threads(number)
        metrics |= {
            prefix + key: v for key, v in compared(lambda: model.predict(x), dense, pairs=pairs, calls=calls).items()
        }
    return metrics | {"worst": max(metrics["ratio"], metrics["one_thread_ratio"])}


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


@measure("predict-one-wide-resnet", "the same, WideResNet-16-4, one image", 1.15, metric="worst")
def predict_one_wide_resnet() -> Metrics:
    return predictions(wide_resnet(16, 4, 1), pairs=151)


@measure("predict-one-resnet-56", "the same, ResNet-56, one image", 1.15, metric="worst")
def predict_one_resnet_56() -> Metrics:
    return predictions(resnet_56(1), pairs=201)


@measure("predict-one-resnet-18", "the same, ResNet-18, one image of 64 x 64 pixels", 1.15, metric="worst")
def predict_one_resnet_18() -> Metrics:
    return predictions(resnet_18(1), pairs=51)


@measure("predict-wide-resnet-16-4", "the same, WideResNet-16-4, batch 64", 1.03, metric="worst")
def predict_wide_resnet_16_4() -> Metrics:
    return predictions(wide_resnet(16, 4, 64), pairs=25)


@measure("predict-resnet-56", "the same, ResNet-56, batch 64", 1.03, metric="worst")
def predict_resnet_56() -> Metrics:
    return predictions(resnet_56(64), pairs=25)


@measure("predict-resnet-18", "the same, ResNet-18, batch 64 of 64 x 64 pixels", 1.03, metric="worst")
def predict_resnet_18() -> Metrics:
    return predictions(resnet_18(64), pairs=7)


@measure("predict-one-mlp", "predict, two dense layers, one row: milliseconds more than dense", 0.15, metric="extra_ms")
def predict_one_mlp() -> Metrics:
    networks = mlp()
    metrics = predictions(networks, pairs=101, calls=20)
    extra = [metrics[f"{threads}seconds"] - metrics[f"{threads}other_seconds"] for threads in ("", "one_thread_")]
    return metrics | {"extra_ms": 1000 * max(extra)} | steps_of(*networks)


@measure("predict-one-bare", "the Gaussian process of that row alone / bare NumPy calls", 1.2)
def predict_one_bare() -> Metrics:
    """The same products, cosines and exponentials for one hidden vector (64,), and nothing else."""
    head = fitted(mlp()[1]).head
    h = torch.rand(1, head.in_features)
    with torch.no_grad():
        bare = bare_row(head)
        found, right = bare(h.numpy()[0]), head.predict(h)
        for value, name in zip(found, ("logits", "variance", "probs", "joined", "p_value"), strict=True):
            np.testing.assert_allclose(np.atleast_1d(value), getattr(right, name).numpy().ravel(), rtol=1e-3, atol=1e-3)
        return compared(lambda: head.predict(h), lambda: bare(h.numpy()[0]), pairs=101, calls=20)


def bare_row(head: GaussianProcessHead) -> Callable[[np.ndarray], tuple[object, ...]]:
    """One hidden vector (d,) -> logits, variance, probabilities, joined score, p-value."""
    features, own, distance = head.random_features, head.variance_features, head.class_distance
    assert own is not None
    assert distance is not None
    assert head.joined_score is not None
    v, w = (features.weight / features.length_scale).numpy(), (own.weight * own.gain / own.length_scale).numpy()
    phase, own_phase, shift = features.phase.numpy(), own.phase.numpy(), own.shift.numpy()
    weight, scale, own_scale = head.weight.detach().numpy(), math.sqrt(2 / len(v)), math.sqrt(2 / len(w))
    root = head.precision.root[0]
    blocks = [(end, root[end - 128 : end, :end].contiguous().numpy()) for end in range(128, len(root) + 1, 128)]
    m, ab = distance.shift.numpy(), distance.root.numpy()
    centers, offsets, d = distance.centers.numpy(), distance.offsets.numpy(), distance.in_features
    knots, widths, slopes = (getattr(head.joined_score, name).numpy() for name in ("knots", "widths", "slopes"))
    reference = head.reference.numpy()

    def bare(x: np.ndarray) -> tuple[object, ...]:
        length = math.sqrt(x.dot(x))
        u = x / length
        logits = np.vecdot(weight, np.cos(np.vecdot(v, x) + phase)) * scale
        psi = np.cos(np.vecdot(w, np.append(u, np.float32(math.log(length))) - shift) + own_phase)
        parts = [np.vecdot(block, psi[:end]) for end, block in blocks]
        variance = float(sum(part.dot(part) for part in parts)) * own_scale**2
        both = np.vecdot(ab, u - m)
        r = both[:d].dot(both[:d]) + (np.vecdot(centers, both[:d]) + offsets).min() - both[d:].dot(both[d:])
        energy = -math.log(np.exp(logits).sum())
        values = np.array([[variance], [energy], [r]])
        joined = float((np.minimum(np.maximum(values - knots, 0), widths) * slopes).sum())
        p_value = (1 + len(reference) - reference.searchsorted(joined)) / (1 + len(reference))
        probs = np.exp(logits / math.sqrt(1 + math.pi / 8 * variance))
        return logits, variance, probs / probs.sum(), joined, p_value

    return bare


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
