"""How near training comes to the machine's limit: steps of the plain networks against the bare products in them.

    AFIELD_DATA=... python -m bench.throughput      writes results/throughput.json, two minutes on two idle cores

limit   the products of a training step alone: every Linear and convolution of the network on inputs of the shapes that
        it sees, forward and both backward products, in the same memory layout, each timed by itself and added up
step    what `afield.experiment.training` does: fetch a batch, augment, loss, backward, optimiser
share   limit / step: the part of the time that is spent in products which cannot be avoided

Rounds of limit and step are interleaved; the share is the median of their ratios. Data loading is part of a step:
`fetch` is the part of a step that the batch itself takes.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from afield.experiment import training
from afield.methods import METHODS
from afield.model.saving import write_file
from afield.tasks import TASKS

RECORD = Path(__file__).parents[1] / "results" / "throughput.json"
ROUNDS, STEPS = 5, 6
COMPARED = ("clinc", "cifar10", "fashion")
Product = Callable[[], Any]


def main() -> None:
    rows = {name: measure(name) for name in COMPARED}
    record = {
        "command": "python -m bench.throughput",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "tasks": rows,
    }
    write_file(RECORD, (json.dumps(record, indent=1) + "\n").encode())
    print(json.dumps(record, indent=1))


def measure(name: str) -> dict[str, float]:
    """One task under its small preset, dense network."""
    task, method = TASKS[name](0, "small"), METHODS["dnn"]
    settings = task.settings
    torch.manual_seed(0)
    model = method.build(task.backbone, task.num_outputs, settings).train()
    training.freeze(model, settings.frozen)
    optimizer = training.make_optimizer(model, settings)
    loader = training.training_batches(task, settings, torch.Generator().manual_seed(0))
    source = forever(loader)

    def fetch() -> Any:
        return method.transform(task.augment(next(source), settings))

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        method.loss(model, batch).backward()
        optimizer.step()

    step(fetch())
    ratios, fetching, steps = [], [], []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        batches = [fetch() for _ in range(STEPS)]
        fetched = time.perf_counter()
        for batch in batches:
            step(batch)
        stepped = time.perf_counter()
        limit = sum(seconds(product) for batch in batches for product in products(model, batch[0]))
        ratios.append(limit / (stepped - begin))
        fetching.append((fetched - begin) / (stepped - begin))
        steps.append((stepped - begin) / STEPS)
    metrics = {"share": median(ratios), "fetch": median(fetching), "step_seconds": median(steps)}
    return {key: round(value, 4) for key, value in metrics.items()}


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def products(model: nn.Module, x: Tensor) -> list[Product]:
    """The matrix products and convolutions of one training step on x: forward, and backward for input and weight."""
    found: list[Product] = []

    def record(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        found.extend(_products_of_layer(layer, args[0].detach(), torch.ones_like(output)))

    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)]
    handles = [layer.register_forward_hook(record) for layer in layers]
    try:
        with torch.no_grad():
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _products_of_layer(layer: nn.Module, x: Tensor, slope: Tensor) -> list[Product]:
    w = layer.weight.detach()
    if isinstance(layer, nn.Linear):
        x, slope = x.reshape(-1, x.shape[-1]), slope.reshape(-1, slope.shape[-1])
        return [lambda: x @ w.T, lambda: slope @ w, lambda: slope.T @ x]
    geometry = (layer.stride, layer.padding, layer.dilation)
    empty = [0] * len(layer.stride)
    forward = torch.conv1d if isinstance(layer, nn.Conv1d) else torch.conv2d
    return [
        lambda: forward(x, w, None, *geometry, layer.groups),
        lambda: torch.ops.aten.convolution_backward(
            slope, x, w, None, *geometry, False, empty, layer.groups, [True, True, False]
        ),
    ]


def seconds(product: Product) -> float:
    """The best of three: a product that was disturbed says nothing about the limit."""
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        product()
        best = min(best, time.perf_counter() - begin)
    return best


if __name__ == "__main__":
    main()
