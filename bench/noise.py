"""Noise that is not one number: how intervals follow it, outputs of several scales, and labels noisy in places.

    python -m bench.noise          three seeds; runs what results/noise.json lacks; docs/outputs.md quotes it

Varying: y = sin 2x + (.1 + .5 |x|) e, x uniform on (-3, 3), e standard normal; 1,500 examples to train on, 500 to
calibrate, 6,000 to test. A network of two hidden layers is trained by its squared error, then attached; or converted
with `afield.sngp` and trained. `truth` knows the mean and the noise. Coverage is that of central 90% intervals, by
sixth of |x|.

Scales: three linear outputs in units of 1, 10 and 1000, each with noise of half its unit.

Labels: the four quadrants of a square are classes; on the right, 40% of the labels are those of the other quadrant
there. `sngp` and `het-sngp`, 1,000 examples to train on, 25 epochs; NLL of fresh labels on the left and on the right.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import afield
from afield.backbones.resffn import ResFFN
from afield.decide.conformal import prediction_intervals
from afield.experiment.training import fit
from afield.methods import METHODS
from afield.tasks import TASKS, Task
from bench.defaults import ROOT

RECORD = ROOT / "results" / "noise.json"
SEEDS = 3
SCALES = torch.tensor([1.0, 10.0, 1000.0])
WRONG = 0.4  # of the labels where they are noisy
Data = tuple[Tensor, Tensor]


def varying(n: int, generator: torch.Generator) -> Data:
    x = 6 * torch.rand(n, 1, generator=generator) - 3
    return x, torch.sin(2 * x) + noise_of(x) * torch.randn(n, 1, generator=generator)


def noise_of(x: Tensor) -> Tensor:
    return 0.1 + 0.5 * x.abs()


def scales(n: int, generator: torch.Generator) -> Data:
    x = torch.randn(n, 3, generator=generator)
    return x, SCALES * (x + 0.5 * torch.randn(n, 3, generator=generator))


def network(inputs: int, outputs: int) -> nn.Module:
    hidden = [nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(64, outputs))


def train(model: nn.Module, parameters: Any, data: Data, unit: Tensor) -> None:
    optimizer, (x, y) = torch.optim.Adam(parameters), data
    for _ in range(60):
        for rows in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            F.mse_loss(model(x[rows]) / unit, y[rows] / unit).backward()
            optimizer.step()


class InUnits(nn.Module):
    """A network that answers in given units: what a user writes for outputs of different scales."""

    def __init__(self, net: nn.Module, unit: Tensor) -> None:
        super().__init__()
        last = net[-1]  # type: ignore[index]
        with torch.no_grad():
            last.weight.mul_(unit[:, None])
            last.bias.mul_(unit)
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


def fitted(
    make: Callable[[int, torch.Generator], Data], how: str, noise: str, seed: int
) -> tuple[afield.SNGP, Data, Data]:
    """A model, held-out data that it has not seen, test data."""
    generator = torch.Generator().manual_seed(seed)
    data, held, fresh, test = (make(n, generator) for n in (1500, 500, 500, 6000))
    torch.manual_seed(seed)
    outputs = data[1].shape[1]
    net, unit = network(data[0].shape[1], outputs), SCALES if outputs > 1 else torch.ones(1)
    options = {"likelihood": "gaussian", "noise": noise}
    if how == "attach":
        train(net, net.parameters(), (data[0], data[1] / unit), torch.ones(outputs))
        model = afield.attach(InUnits(net, unit), **options)
    else:
        model = afield.sngp(net, **options)
        train(model, afield.parameter_groups(model, lr=1e-3), data, unit)
    afield.fit_posterior(model, [data], progress=False)
    afield.calibrate(model, [held], progress=False)
    return model, fresh, test


def covered(bounds: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return ((bounds[0] <= y) & (y <= bounds[1])).double()


def of_varying(how: str, noise: str, seed: int) -> dict[str, float]:
    model, fresh, (x, y) = fitted(varying, how, noise, seed)
    p = model.predict(x)
    conformal = prediction_intervals(model.predict(fresh[0]), fresh[1], level=0.9).intervals(p)
    truth = torch.distributions.Normal(torch.sin(2 * x), noise_of(x))
    found = {
        "nll": float(-torch.distributions.Normal(p.mean, p.std).log_prob(y).mean()),
        "truth": float(-truth.log_prob(y).mean()),
        "conformal": float(covered(conformal, y).mean()),
    }
    order = x.abs()[:, 0].argsort()
    for kind, bounds in (("sixth", p.interval(0.9)), ("conformal-sixth", conformal)):
        parts = covered(bounds, y)[order, 0].chunk(6)
        found |= {f"{kind}/{i}": float(part.mean()) for i, part in enumerate(parts, 1)}
    return found


def of_scales(how: str, noise: str, seed: int) -> dict[str, float]:
    model, _, (x, y) = fitted(scales, how, noise, seed)
    shares = covered(model.predict(x).interval(0.9), y).mean(0)
    return {f"{float(scale):g}": float(share) for scale, share in zip(SCALES, shares, strict=True)}


def quadrants(n: int, generator: torch.Generator) -> TensorDataset:
    x = 4 * torch.rand(n, 2, generator=generator) - 2
    right, above = (x > 0).long().unbind(1)
    wrong = (right == 1) & (torch.rand(n, generator=generator) < WRONG)
    return TensorDataset(x, 2 * right + torch.where(wrong, 1 - above, above))


def of_labels(how: str, noise: str, seed: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    parts = [quadrants(n, generator) for n in (1000, 500, 6000)]
    backbone = partial(ResFFN, 2, depth=2, width=32)
    settings = replace(TASKS["two-moons"](0).settings, num_random_features=128)
    task = Task("quadrants", *parts, ood={}, num_outputs=4, backbone=backbone, settings=settings)
    p = METHODS[how].predict(fit(task, METHODS[how], seed=seed, epochs=25, learning_rate=5e-3), parts[2].tensors[0])
    x, y = parts[2].tensors
    assert p.probs is not None
    loss, right = -p.probs.gather(1, y[:, None])[:, 0].log(), x[:, 0] > 0
    truth = -(WRONG * math.log(WRONG) + (1 - WRONG) * math.log(1 - WRONG)) / 2
    sides = {"left": loss[~right].mean(), "right": loss[right].mean()}
    return {"nll": float(loss.mean()), "truth": truth} | {side: float(value) for side, value in sides.items()}


def main() -> None:
    torch.set_num_threads(1)
    record: dict[str, Any] = (
        json.loads(RECORD.read_text()) if RECORD.is_file() else {"command": "python -m bench.noise"}
    )
    record |= {"afield": afield.__version__, "torch": torch.__version__}
    plan = [("varying", of_varying, "attach", noise) for noise in ("output", "input")]
    plan += [("scales", of_scales, "attach", "output"), ("varying", of_varying, "sngp", "input")]
    plan += [("scales", of_scales, "sngp", "output"), ("varying", of_varying, "sngp", "output")]
    plan += [("labels", of_labels, how, "own") for how in ("sngp", "het-sngp")]
    for name, measure, how, noise in plan:
        own = record.setdefault(name, {}).setdefault(how, {})
        if noise in own:
            continue
        seeds = [measure(how, noise, seed) for seed in range(SEEDS)]
        own[noise] = {
            "mean": {key: mean(found[key] for found in seeds) for key in seeds[0]},
            "least": {key: min(found[key] for found in seeds) for key in seeds[0]},
            "most": {key: max(found[key] for found in seeds) for key in seeds[0]},
        }
        assert all(math.isfinite(value) for found in seeds for value in found.values())
        print(name, how, noise, {key: round(value, 3) for key, value in own[noise]["mean"].items()}, flush=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
