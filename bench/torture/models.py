"""The smallest models that have everything, and what they answer."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afield
from afield.bounds.spectral import bounds_of

N = 60


def data(number: int = 0, *, rows: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    y = torch.arange(rows) % 3
    return torch.randn(rows, 4, generator=generator) + 2 * F.one_hot(y, 4), y


def network(number: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def fitted(make: str = "sngp", number: int = 0) -> afield.SNGP:
    """Trained for a few steps, fitted and calibrated."""
    net = network(number)
    if make == "attach":
        train(net)
    with torch.random.fork_rng():
        torch.manual_seed(number)
        model = getattr(afield, make)(net, num_random_features=16)
    if make == "sngp":
        train(model)
    afield.fit_posterior(model, [data(number)])
    afield.calibrate(model, [data(1)])
    return model.eval()


def train(net: nn.Module, steps: int = 40) -> None:
    optimizer = torch.optim.Adam(net.parameters(), 3e-2)
    x, y = data(0)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


@functools.cache
def inputs() -> Tensor:
    return data(9, rows=6)[0]


Answer = tuple[Any, ...]


def answer(model: afield.SNGP) -> Answer:
    """What a model answers, to the bit."""
    p = model.predict(inputs())
    return tuple(None if t is None else t.numpy().tobytes() for t in (p.variance, p.probs, p.logits, p.p_value))


def identity(model: afield.SNGP) -> Answer:
    """Everything that can be told of a model: its answers, its tensors, its bounds."""
    tensors = {
        name: (str(t.dtype), tuple(t.shape), t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in model.state_dict().items()
    }
    bounds = [bound.c for module in model.modules() for bound in bounds_of(module).values()]
    return answer(model), tensors, bounds, model.kind, model.output, repr(model)
