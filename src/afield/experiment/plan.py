"""What a suite would train, before anybody spends a cluster on it: examples, steps, GPU hours and memory.

    hours  = (3 F (examples x epochs) + F (examples + evaluated)) / rate          F: operations of one forward pass
    memory = bytes of weights, gradients and optimizer state + batch x bytes of one example's activations

A backward pass takes twice a forward pass. F and the activations are counted by running the backbone once on one
example; the output layer is small beside it, but for the D x D precision, which is added. The rate is an assumption,
20 TFLOP/s by default: what an A100 sustains on ResNet-50 in TF32. Decoding of pictures, augmentation and communication
are not in it. Methods that share a training, and ensembles, whose members are other rows' runs, train nothing. What
no gradient steps train, such as a head on a frozen network, passes the data once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from afield.experiment.config import Config
from afield.experiment.many_runs import split_ensembles
from afield.methods import METHODS
from afield.tasks import TASKS
from afield.tasks.task import Outline

RATE = 20e12
_PENALTY = 2.0  # of a gradient penalty, which takes a backward pass through the gradient
_BYTES = 4


@dataclass(frozen=True)
class Work:
    """Of one example in a backbone."""

    operations: float
    activations: int
    parameters: int


@dataclass(frozen=True)
class Row:
    """One method of a suite on one task. `trainings` is 0 where its weights are those of other rows."""

    task: str
    method: str
    trainings: int
    epochs: int
    examples: int
    steps: int
    gpu_hours: float
    memory: float


def plan(configs: Sequence[Config], *, rate: float = RATE) -> list[Row]:
    """A row for each task and method, in the order of the configs."""
    singles, ensembles = split_ensembles(configs)
    groups: dict[tuple[str, str], list[Config]] = {}
    for config in dict.fromkeys([*singles, *ensembles]):
        groups.setdefault((config.task, config.method), []).append(config)
    outlines: dict[tuple[str, str], tuple[Outline, Work]] = {}
    rows = []
    for (task, method), runs in groups.items():
        key = task, runs[0].preset
        if key not in outlines:
            outline = TASKS[task].outline_for(runs[0].preset)
            outlines[key] = outline, count_work(outline.backbone(), outline.example)
        own = [config for config in runs if not config.members and config.same_training not in singles]
        rows.append(_row(task, method, runs[0], len(own), *outlines[key], rate=rate))
    return rows


def _row(task: str, method: str, config: Config, trainings: int, outline: Outline, work: Work, *, rate: float) -> Row:
    settings = config.settings
    epochs = 0 if METHODS[method].loss is None else settings.epochs
    factor = 3 * (_PENALTY if method.startswith("duq") else 1.0)
    seen = factor * outline.train * epochs + outline.train + outline.evaluated
    copies = 4 if settings.optimizer.startswith("adam") else 3  # weights, gradients, one or two moments
    numbers = copies * work.parameters + settings.batch_size * work.activations
    precision = 3 * 8 * settings.num_random_features**2 if "gp" in method else 0
    return Row(
        task,
        method,
        trainings,
        epochs,
        outline.train,
        epochs * math.ceil(outline.train / settings.batch_size),
        trainings * work.operations * seen / rate / 3600,
        (_BYTES * numbers + precision) / 2**30,
    )


def count_work(backbone: nn.Module, example: Tensor) -> Work:
    """Count what one example (1, ...) costs in a backbone."""
    sizes: list[int] = []

    def note(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel())

    leaves = [module for module in backbone.modules() if not list(module.children())]
    hooks = [module.register_forward_hook(note) for module in leaves]
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            backbone.eval()(example)
    finally:
        for hook in hooks:
            hook.remove()
    return Work(float(counter.get_total_flops()), sum(sizes), sum(p.numel() for p in backbone.parameters()))
