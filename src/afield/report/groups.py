"""Runs as the rows of a report: those that differ in their seeds only belong together.

A method's place has two axes, as the paper's section on the landscape of methods has. `base`: how the single model
treats distance, from dense (dnn) to distance-aware (sngp). `family`: how models are combined, from a single one over
augmentation and dropout to ensembles; Gaussian processes on the raw inputs stand apart. Both are read off the name, so
that reports know methods which this version does not.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from afield.experiment import run_folder
from afield.experiment.config import UNNAMED
from afield.experiment.run_folder import Run
from afield.prediction.prediction import Prediction

FAMILIES = ("single", "augmix", "dropout", "ensemble", "gp")
BASES = (
    *("dnn", "dnn-temperature", "isomax-plus", "isomax-plus-temperature", "dnn-sn", "dnn-sn-temperature"),
    *("attach", "attach-sn", "duq-gp", "dnn-gp-paper", "sngp-paper", "dnn-gp", "het-sngp", "sngp"),
)
_SEEDS = ("seed", "data_seed")
_LONG_NAMES = {"mc-dropout": "dnn-dropout", "deep-ensemble": "dnn-ensemble"}


@dataclass(frozen=True)
class Place:
    """Where a method stands: see the module's docstring."""

    family: str
    base: str

    @classmethod
    def of(cls, method: str) -> "Place":
        """The place of a method, from its name: sngp-ensemble is an ensemble of sngp."""
        name = _LONG_NAMES.get(method, method)
        if name.startswith("gp-"):
            return cls("gp", name)
        words = [word for word in FAMILIES[1:4] if f"-{word}" in name]
        for word in words:
            name = name.replace(f"-{word}", "")
        return cls(words[-1] if words else "single", name)

    @property
    def order(self) -> tuple[int, int]:
        return FAMILIES.index(self.family), BASES.index(self.base) if self.base in BASES else len(BASES)


@dataclass(frozen=True)
class Group:
    """Runs of one task, method and setting; `name` is the method's, with the settings that tell it from another."""

    name: str
    runs: tuple[Run, ...]

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def place(self) -> Place:
        return Place.of(self.method)

    @cached_property
    def values(self) -> dict[str, list[float]]:
        """Every metric and cost by name: one value a run that has it."""
        values: dict[str, list[float]] = defaultdict(list)
        for run in self.runs:
            for name, value in (*run.metrics.items(), *run.cost.items()):
                values[name].append(float(value))
        return dict(values)


def group_runs(found: Iterable[Run]) -> tuple[dict[str, list[Group]], list[str]]:
    """Return groups by task, in the order in which a report shows them, and notes on runs that were left out."""
    notes: list[str] = []
    variants: dict[str, dict[str, dict[str, list[Run]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    seen: dict[tuple[Any, ...], Run] = {}
    for run in found:
        setting = str(sorted(_settings_of(run).items()))
        key = (run.task, run.method, setting, *(run.config.get(name) for name in _SEEDS))
        if key in seen:
            notes.append(f"{run.folder} is left out: the same run as {seen[key].folder}.")
            continue
        seen[key] = run
        variants[run.task][run.method][setting].append(run)
    tasks: dict[str, list[Group]] = {}
    for task, methods in variants.items():
        groups = [
            group for method, settings in methods.items() for group in _name_groups(method, list(settings.values()))
        ]
        tasks[task] = sorted(groups, key=lambda group: (group.place.order, group.name))
    return tasks, notes


def _settings_of(run: Run) -> dict[str, Any]:
    """A setting that came after a run was recorded has its default there, and so tells no rows apart."""
    return UNNAMED | {name: value for name, value in run.config.items() if name not in _SEEDS}


def _name_groups(method: str, settings: Sequence[Sequence[Run]]) -> list[Group]:
    """One group a setting; where there are several, they are named by what differs."""
    configs = [_settings_of(members[0]) for members in settings]
    keys = sorted({key for config in configs for key in config})
    differing = [key for key in keys if len({str(config.get(key)) for config in configs}) > 1]
    groups = []
    for config, members in zip(configs, settings, strict=True):
        differences = ", ".join(f"{key}={config.get(key)}" for key in differing)
        name = f"{method} ({differences})" if differences else method
        groups.append(Group(name, tuple(sorted(members, key=lambda run: (run.config.get("data_seed", 0), run.seed)))))
    return groups


@dataclass(frozen=True)
class GroupPredictions:
    """What pictures need of a group: predictions of its first run, kept without that run's other parts."""

    group: Group
    test: Prediction
    ood: Mapping[str, Prediction]
    grid: Prediction | None
    arrays: Mapping[str, Tensor]

    @property
    def name(self) -> str:
        return self.group.name


def read_predictions(group: Group) -> GroupPredictions | None:
    """Read them from the folder anew, so that no other parts stay in memory; None without predictions of inputs."""
    if not (group.runs[0].folder / run_folder.PREDICTIONS).is_file():
        return None
    run = run_folder.read(group.runs[0].folder)
    if "test" not in run.parts:
        return None
    ood = [part for part in run.parts if part.startswith("ood/")]
    names = ["test/y", "grid/x", "train/x", "train/y", "test/features", "test/rows"]
    names += [f"{part}/{field}" for part in ood for field in ("x", "features")]
    return GroupPredictions(
        group,
        run.prediction("test"),
        {part.removeprefix("ood/"): run.prediction(part) for part in ood},
        run.prediction("grid") if "grid" in run.parts else None,
        {name: run.array(name) for name in names if name in run},
    )
