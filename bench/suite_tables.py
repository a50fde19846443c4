"""The tables of docs/results.md on the suites, from the runs in their records; and which of the paper's rows are here.

    python -m bench.suite_tables        fills docs/results.md; nothing is run

A cell is the mean over the runs of a row; the column "seeds" says how many those are, and of an ensemble how many
members it has. A row that the suite has and the record lacks has zero seeds.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from afield.experiment import paper
from afield.experiment.metric_name import MetricName
from afield.experiment.suites import CIFAR_ROWS, CROSSES, FOUR, FROZEN, KEPT, ROWS, SINGLE
from bench.defaults import ROOT, fill, lines, markdown

PAGE = ROOT / "docs" / "results.md"
SINGLE_ROWS = ("dnn", "dnn-temperature", "dnn-sn", "dnn-sn-temperature", *KEPT, *FOUR[2:])
ORDER = tuple(dict.fromkeys((*SINGLE_ROWS, *SINGLE, *CIFAR_ROWS[:3], *CROSSES, *FROZEN)))
Columns = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Shown:
    """A table: the rows of a task in a record, and the metrics of each column."""

    record: str
    task: str
    methods: Sequence[str]
    columns: Columns


def _each(metric: str, sets: Sequence[str], score: str = "") -> tuple[str, ...]:
    return tuple("/".join(filter(None, (metric, of, score))) for of in sets)


def _detection(sets: Sequence[str], names: str) -> dict[str, Sequence[str]]:
    """AUROC by scores that all methods have, and by the default one of a Gaussian process."""
    by_max_probability = {f"AUROC, max probability: {names}": _each("auroc", sets)}
    scores = {"Dempster-Shafer": "dempster_shafer", "joined score": "joined"}
    return by_max_probability | {title: _each("auroc", sets, score) for title, score in scores.items()}


def _in_order(methods: Sequence[str]) -> list[str]:
    """Single models, what is added to them, and ensembles."""
    return [name for name in ORDER if name in methods]


CLEAN = {"accuracy": ("accuracy/clean",), "ECE": ("ece/clean",), "NLL": ("nll/clean",)}
SCORES = {
    "max probability": "max_probability",
    "Dempster-Shafer": "dempster_shafer",
    "Mahalanobis": "mahalanobis",
    "relative Mahalanobis": "relative_mahalanobis",
    "k nearest neighbours": "knn",
    "variance": "variance",
    "joined": "joined",
}
OOS = ("auroc/oos", "aupr/oos")
CIFAR, CLOTHES = ("svhn", "cifar100", "noise"), ("mnist", "notmnist", "noise")
CIFAR_METHODS, FASHION_METHODS = _in_order((*CIFAR_ROWS, *CROSSES)), _in_order((*SINGLE, *KEPT, *CROSSES))
TABLES = {
    "clinc suite": Shown(
        "clinc-small",
        "clinc",
        _in_order((*ROWS, *FROZEN)),
        CLEAN
        | {"NLL with out of scope": ("nll/combined",)}
        | {"AUROC, AUPR: max probability": OOS, "joined score": tuple(f"{metric}/joined" for metric in OOS)},
    ),
    "cifar10 suite": Shown(
        "cifar10-small",
        "cifar10",
        CIFAR_METHODS,
        CLEAN
        | {"corrupted: accuracy, ECE, NLL": [f"{metric}/corrupted" for metric in ("accuracy", "ece", "nll")]}
        | _detection(CIFAR, "SVHN, CIFAR-100, noise"),
    ),
    "cifar10 scores": Shown(
        "cifar10-small",
        "cifar10",
        [name for name in CIFAR_METHODS if "ensemble" not in name and "temperature" not in name],
        {title: _each("auroc", CIFAR[:2], score) for title, score in SCORES.items()},
    ),
    "fashion suite": Shown(
        "fashion-small", "fashion", FASHION_METHODS, CLEAN | _detection(CLOTHES, "MNIST, notMNIST, noise")
    ),
    "genomics suite": Shown(
        "genomics-small",
        "genomics",
        _in_order(ROWS),
        CLEAN
        | {"new strains: accuracy, ECE, NLL": [f"{metric}/new-strains" for metric in ("accuracy", "ece", "nll")]}
        | {"AUROC, AUPR": ("auroc/genera", "aupr/genera"), "AUROC, joined score": ("auroc/genera/joined",)},
    ),
}
NOT_AT_HAND = {
    "imagenet": "ImageNet is not at hand; `afield reproduce imagenet --preset paper --plan` says what it takes",
    "cifar100": "of CIFAR-100 3,000 images are at hand, their official split lost: `cifar100-3k` trains on them",
    "dtd": "DTD is not at hand; it joins CIFAR-10 where it is",
}
NOT_TRAINED = {"clinc": "in the older record alone, which lacks the NLL over both sets"}
RECORDS = {"cifar10": "cifar10-small", "clinc": "clinc-small", "genomics": "genomics-small"}


@functools.cache
def means(record: str, task: str) -> dict[str, dict[str, float]]:
    """Method -> the means over its runs, and the number of "seeds"."""
    runs = [r for r in lines(ROOT / "results" / record / "runs.jsonl") if r["config"]["task"] == task]
    of = {r["config"]["method"]: [s for s in runs if s["config"]["method"] == r["config"]["method"]] for r in runs}
    return {method: _mean(those) for method, those in of.items()}


def _mean(runs: list[dict[str, Any]]) -> dict[str, float]:
    seeds = runs[0]["config"]["members"] if runs[0]["config"]["method"].endswith("ensemble") else len(runs)
    names = [name for name in runs[0]["metrics"] if all(name in r["metrics"] for r in runs)]
    return {name: fmean(r["metrics"][name] for r in runs) for name in names} | {"seeds": seeds}


def table(shown: Shown) -> str:
    of = means(shown.record, shown.task)
    rows = [["", "seeds", *shown.columns]]
    for method in shown.methods:
        row = of.get(method, {"seeds": 0})
        cells = [", ".join(f"{row[m]:.3f}" for m in metrics if m in row) for metrics in shown.columns.values()]
        rows.append([method, str(row["seeds"]), *cells])
    return markdown(rows, left=1)


def rows_of_the_paper() -> str:
    """For each table: how many rows we have, and why not the others."""
    rows = [["table", "rows here", "not here, and why"]]
    for label in dict.fromkeys(t.label for t in paper.TABLES.values()):
        blocks = [t for t in paper.TABLES.values() if t.label == label and not t.columns[0].name.startswith(_SETTINGS)]
        wanted = [(block, row.method, row.paper_name) for block in blocks for row in block.rows]
        missing: dict[str, list[str]] = {}
        for block, method, name in wanted:
            if why := _why_not(block, method):
                missing.setdefault(why, []).append(name)
        if wanted:
            here = len(wanted) - sum(map(len, missing.values()))
            said = "; ".join(f"{_named(names, wanted)}: {why}" for why, names in missing.items())
            rows.append([f"`{label}`", f"{here} of {len(wanted)}", said])
    return markdown(rows, left=3)


def _named(names: list[str], wanted: Sequence[Any]) -> str:
    return "all" if len(names) == len(wanted) else ", ".join(dict.fromkeys(names))


_SETTINGS = ("power_iterations", "bound")


def _why_not(block: paper.Table, method: str) -> str:
    """Why a row of a block of the paper is not in our records; empty where it is."""
    assert block.task is not None
    if block.task in NOT_AT_HAND:
        return NOT_AT_HAND[block.task]
    row = means(RECORDS[block.task], block.task).get(method)
    if row is None:
        return NOT_TRAINED.get(block.task, "not trained yet")
    absent = [c.name for c in block.columns if not any(f"{c.name}{more}" in row for more in ("", "/clean"))]
    sets = {MetricName.parse(name).data for name in absent}
    return "" if not absent else NOT_AT_HAND.get("".join(sets), f"not measured: {', '.join(absent)}")


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the records as they are."""
    return {name: table(shown) for name, shown in TABLES.items()} | {"rows of the paper": rows_of_the_paper()}


def main() -> None:
    for name, text in tables().items():
        fill(PAGE, name, text)


if __name__ == "__main__":
    main()
