"""What the paper says of single choices, each as a small sweep: one thing changes, all else stays.

    python -m bench.ablations                               all of them on digits and Fashion-MNIST, and the toys
    python -m bench.ablations bound --tasks cifar10         one of them on one task
    python -m bench.ablations --seeds 3 --plan              what would be trained, and nothing else

Runs what results/ablations.jsonl lacks, one after the other, then fills docs/ablations.md. Where a choice is about the
posterior only (`OF_POSTERIOR`), models share one training. AUROC is the mean over the OOD sets of a task.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import nn

from afield.experiment.config import Config
from afield.experiment.training import batches, fit
from afield.methods import METHODS
from afield.methods.method import Method
from afield.model.diagnose import distance_correlation
from afield.model.sngp_model import SNGP
from afield.prediction.metrics import METRICS, auroc
from afield.prediction.prediction import Prediction
from afield.settings import Settings
from afield.tasks import TASKS, Task
from bench.defaults import ROOT, fill, lines, markdown

Changes = Mapping[str, Any]
RECORD, PAGE = ROOT / "results" / "ablations.jsonl", ROOT / "docs" / "ablations.md"
TASK_NAMES, TOYS = ("digits", "fashion"), ("two-moons", "two-ovals")
REDUCED: dict[str, Changes] = {"fashion": {"epochs": 3}}  # of 8, so that all of them take minutes
SECONDS = {"digits": 10, "fashion": 45, "cifar10": 280, "two-moons": 12, "two-ovals": 12}  # of a training, one core
OF_POSTERIOR = ("curvature", "variance_features", "logit_scale", "amplitude", "momentum", "predictive", "score")
FROZEN_END = "frozen in the last epoch"
COLUMNS = {"accuracy": "accuracy", "ece": "ECE", "nll": "NLL", "auroc": "AUROC", "joined": "AUROC, joined"}


@dataclass(frozen=True)
class Ablation:
    """Choices by name, each as changes of settings; `method` is what they are changes of."""

    choices: Mapping[str, Changes]
    method: str = "sngp"
    tasks: tuple[str, ...] = TASK_NAMES
    columns: tuple[str, ...] = ("accuracy", "ece", "nll", "auroc", "joined")
    others: Mapping[str, str] = field(default_factory=dict)  # choices that are another method


def _each(setting: str, *values: Any) -> dict[str, Changes]:
    return {str(value): {setting: value} for value in values}


_NAIVE = {
    f"{method}, {scale:g}, {rate:g}": (method, {"length_scale": scale, "learning_rate": rate, "warmup": 0.0})
    for method in ("dnn-gp-paper", "sngp-paper")
    for scale, rate in itertools.product((0.5, 1.0, 2.0, 4.0), (1e-4, 1e-3, 3e-3))
}
"""Fixed length scales and learning rates, without a warm-up: name -> method, changes."""
ABLATIONS = {
    "features": Ablation(_each("num_random_features", 256, 512, 1024, 2048, 4096)),
    "input": Ablation(
        {
            "as it is": {},
            "layer norm": {"geometry": "layer"},
            "projection to 32": {"projection": 32},
            "layer norm, projection to 32": {"geometry": "layer", "projection": 32},
        }
    ),
    "directions": Ablation({"orthogonal": {}, "plain": {"orthogonal": False}}),
    "predictive": Ablation(_each("predictive", "mean_field", "monte_carlo")),
    "sum": Ablation(
        {"exact": {}, "moving average, 0.99": {"momentum": 0.99}, "moving average, 0.999": {"momentum": 0.999}}
    ),
    "end": Ablation({"trained as a whole": {}, FROZEN_END: {}}),
    "bound": Ablation(_each("bound", 0.5, 0.9, 0.95, 1.0, 2.0, 6.0, None)),
    "amplitude": Ablation(_each("amplitude", None, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)),
    "form": Ablation(
        {
            "the paper's form": {},
            "unit weights": {"curvature": "unit"},
            "length scale from the data": {"length_scale": None},
            "orthogonal features": {"orthogonal": True},
            "logit scale": {"logit_scale": None},
            "own features of the variance": {"variance_features": "own"},
            "all of them": {},
        },
        method="sngp-paper",
        others={"all of them": "sngp"},
    ),
    "length-scales": Ablation(
        {name: changes for name, (_, changes) in _NAIVE.items()},
        tasks=TOYS,
        columns=("accuracy", "auroc", "spearman"),
        others={name: method for name, (method, _) in _NAIVE.items()},
    ),
}


@functools.cache
def load(name: str) -> Task:
    return TASKS[name](0)


@dataclass(frozen=True)
class Key:
    """One line of the record."""

    ablation: str
    task: str
    choice: str
    seed: int

    @property
    def method(self) -> str:
        ablation = ABLATIONS[self.ablation]
        return ablation.others.get(self.choice, ablation.method)

    @property
    def settings(self) -> Settings:
        changes = {**REDUCED.get(self.task, {}), **ABLATIONS[self.ablation].choices[self.choice]}
        settings = Config.of(self.task, self.method, **changes).settings
        if "momentum" not in changes:
            return settings
        # A sum over a batch on average, in the place of the sum over all: a smaller ridge makes the same of it.
        rows = len(load(self.task).train)
        return dataclasses.replace(settings, ridge=settings.ridge * min(1.0, settings.batch_size / rows))

    @property
    def training(self) -> tuple[Any, ...]:
        """What decides the trained weights."""
        default = Settings()
        free = {name: getattr(default, name) for name in OF_POSTERIOR}
        if self.settings.momentum is not None:
            free["ridge"] = Config.of(self.task, self.method).settings.ridge
        bounded = METHODS[self.method].build.__qualname__, self.method.startswith("sngp")
        return self.task, bounded, self.seed, dataclasses.replace(self.settings, **free), self.choice == FROZEN_END


class Trainings:
    """Trained models, the last one kept."""

    def __init__(self) -> None:
        self.key: tuple[Any, ...] | None = None
        self.seconds = 0.0
        self.model: nn.Module | None = None

    def get(self, key: Key, task: Task) -> nn.Module:
        if self.key != key.training:
            begin = time.perf_counter()
            self.model = _train(key, task)
            self.key, self.seconds = key.training, time.perf_counter() - begin
        assert self.model is not None
        return self.model


def _train(key: Key, task: Task) -> nn.Module:
    if key.choice != FROZEN_END:
        return fit(task, METHODS[key.method], seed=key.seed, **dataclasses.asdict(key.settings))
    built: list[SNGP] = []
    base: Method[SNGP] = METHODS[key.method]

    def build(*arguments: Any) -> SNGP:
        built.append(base.build(*arguments))
        return built[-1]

    def freeze(epoch: int, loss: float) -> None:
        if epoch == key.settings.epochs - 1:
            built[-1].requires_grad_(False)
            built[-1].head.weight.requires_grad_(True)

    method = dataclasses.replace(base, build=build)
    return fit(task, method, seed=key.seed, on_epoch=freeze, **dataclasses.asdict(key.settings))


def finish_again(trained: nn.Module, key: Key, task: Task) -> SNGP:
    """A model with the trained weights and these settings, its posterior fitted and calibrated."""
    method, settings = METHODS[key.method], key.settings
    torch.manual_seed(key.seed)
    model = method.build(task.backbone, task.num_outputs, settings)
    own, kept = model.state_dict(), trained.state_dict()
    parts = ("precision.", "class_distance.", "joined_score.", "variance_features.", "reference", "score_name")
    scalars = (".ridge", ".amplitude", ".logit_scale", ".noise")
    same = {
        name: t
        for name, t in kept.items()
        if name in own and own[name].shape == t.shape and not any(part in name for part in parts)
        if not name.endswith(scalars)
    }
    model.load_state_dict(same, strict=False)
    method.finish(model.eval(), batches(task.train, settings.batch_size), batches(task.val), settings)
    return model


def evaluate(model: nn.Module, method: Method[Any], task: Task) -> dict[str, float]:
    """Metrics of the test set, and of telling it from the OOD sets, on average."""

    def predict(data: Any) -> Prediction:
        return Prediction.cat([method.predict(model, batch[0]) for batch in batches(data)])

    test, ood = predict(task.test), {name: predict(data) for name, data in task.ood.items()}
    metrics = {name: METRICS[name](test, task.test.tensors[1]) for name in ("accuracy", "ece", "nll")}
    scores = {"auroc": "max_probability", "joined": "joined", "variance": "variance"}
    for name, score in scores.items():
        metrics[name] = fmean(auroc(test.score(score), p.score(score)) for p in ood.values())
    if task.grid is not None:
        parts = [(test, task.test), *((ood[name], data) for name, data in task.ood.items())]
        doubt = torch.cat([p.score("max_probability") for p, _ in parts])
        x = torch.cat([data.tensors[0] for _, data in parts])
        metrics["spearman"] = distance_correlation(doubt, x, task.train.tensors[0])
    return {name: round(float(value), 5) for name, value in metrics.items()}


def run(key: Key, trainings: Trainings) -> dict[str, Any]:
    task = load(key.task)
    trained = trainings.get(key, task)
    again = key.choice != FROZEN_END and ABLATIONS[key.ablation].columns[-1] == "joined"
    model = finish_again(trained, key, task) if again else trained
    metrics = evaluate(model, METHODS[key.method], task)
    found = {"logit_scale": float(model.head.logit_scale), "amplitude": float(model.head.amplitude)}
    found["train_seconds"] = round(trainings.seconds, 1)
    default, settings = dataclasses.asdict(Settings()), dataclasses.asdict(key.settings)
    own = {name: value for name, value in settings.items() if value != default[name]}
    return {**dataclasses.asdict(key), "method": key.method, **metrics, **found, "settings": own}


def plan(names: list[str], tasks: list[str], seeds: int) -> list[Key]:
    """All lines that are asked for, those of one training together. Tasks of images may stand for each other."""
    kinds = {name: tuple(SECONDS.keys() - TOYS if ABLATIONS[name].tasks == TASK_NAMES else TOYS) for name in names}
    keys = [
        Key(name, task, choice, seed)
        for name in names
        for task in (sorted({*tasks} & {*kinds[name]}) if tasks else ABLATIONS[name].tasks)
        for seed in range(seeds)
        for choice in ABLATIONS[name].choices
    ]
    trainings = {key: str(key.training) for key in keys}
    return sorted(keys, key=lambda key: trainings[key])


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the record as it is."""
    record = lines(RECORD)
    return {
        f"ablation {name.replace('-', ' ')}": _table(name, [r for r in record if r["ablation"] == name])
        for name in ABLATIONS
    }


def _table(name: str, record: list[dict[str, Any]]) -> str:
    ablation = ABLATIONS[name]
    tasks = list(dict.fromkeys(r["task"] for r in record))
    heads = {**COLUMNS, "spearman": "Spearman"}
    rows = [["", *[f"{task}: {heads[column]}" for task in tasks for column in ablation.columns]]]
    for choice in ablation.choices:
        cells = []
        for task, column in itertools.product(tasks, ablation.columns):
            values = [r[column] for r in record if (r["task"], r["choice"]) == (task, choice)]
            cells.append(f"{fmean(values):.3f}" if values else "")
        rows.append([choice, *cells])
    return markdown(rows, left=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ablation", help=f"of {', '.join(ABLATIONS)}; none: all")
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--plan", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ABLATIONS):
        parser.error(f"unknown: {', '.join(unknown)}")
    done = {(r["ablation"], r["task"], r["choice"], r["seed"]) for r in lines(RECORD)}
    keys = plan(options.names or list(ABLATIONS), options.tasks, options.seeds)
    keys = [key for key in keys if dataclasses.astuple(key) not in done]
    minutes = sum(SECONDS[task] for task in [k[0] for k in dict.fromkeys(key.training for key in keys)]) / 60
    print(f"{len(keys)} rows, {len({key.training for key in keys})} trainings, about {minutes:.0f} core-minutes")
    if options.plan:
        return
    torch.set_num_threads(1)
    trainings = Trainings()
    for key in keys:
        line = run(key, trainings)
        with RECORD.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(key, {name: line[name] for name in ("accuracy", "ece", "auroc")}, flush=True)
    for name, text in tables().items():
        fill(PAGE, name, text)


if __name__ == "__main__":
    main()
