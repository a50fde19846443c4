"""The paper's claims in a table: what is claimed, where it is checked here, whether it holds.

    python -m bench.claims        fills docs/results.md from the records; nothing is run

A claim of a table is a list of comparisons between means in a record of ours. It holds if all do, in part if some do.
A comparison of accuracy allows half a point: the paper says "competitive". Records that lack a row say "not run".
Claims of theory name the tests that check them.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from afield.prediction.metrics import HIGHER_IS_BETTER
from bench.defaults import ROOT, fill, lines, markdown

PAGE = ROOT / "docs" / "results.md"
COMPETITIVE = 0.5  # points of accuracy
_UP = {**HIGHER_IS_BETTER, "spearman": True, "confidence": False}


@dataclass(frozen=True)
class Claim:
    """`better` is ahead of each of `than` in each of the metrics; accuracies may be half a point behind."""

    text: str
    label: str
    record: str
    task: str
    better: str
    than: tuple[str, ...]
    metrics: tuple[str, ...]


SHIFTED = ("accuracy/clean", "ece/clean", "nll/clean", "ece/corrupted", "nll/corrupted")
CIFAR_OOD = ("auroc/svhn", "auroc/cifar100")
OOS = ("auroc/oos", "aupr/oos")
GENERA = ("auroc/genera", "aupr/genera")
CALIBRATED = ("accuracy/clean", "ece/clean", "nll/clean")


def _claims(
    record: str, task: str, label: str, metrics: tuple[str, ...], ood: tuple[str, ...], name: str
) -> list[Claim]:
    """What every results table of the paper says, once for each form of SNGP."""
    return [
        Claim(f"{name}: SNGP ahead of the dense network", label, record, task, "sngp", ("dnn",), metrics + ood),
        Claim(f"{name}: the same in the paper's form", label, record, task, "sngp-paper", ("dnn",), metrics + ood),
        Claim(
            f"{name}: SNGP ahead of the dense network with temperature (ours, not the paper's)",
            label,
            record,
            task,
            "sngp",
            ("dnn-temperature",),
            metrics[1:] + ood,
        ),
        Claim(
            f"{name}: SNGP ahead of its parts, DNN-SN and DNN-GP, in OOD detection",
            label,
            record,
            task,
            "sngp",
            ("dnn-sn", "dnn-gp"),
            ood,
        ),
        Claim(
            f"{name}: SNGP ensemble ahead of deep ensemble",
            label,
            record,
            task,
            "sngp-ensemble",
            ("deep-ensemble",),
            metrics + ood,
        ),
    ]


CLAIMS = [
    *_claims("cifar10-small", "cifar10", "tab:cifar10", SHIFTED, CIFAR_OOD, "CIFAR-10"),
    Claim(
        "CIFAR-10: SNGP ahead of DUQ-GP and IsoMax+ in calibration",
        "tab:cifar10",
        "cifar10-small",
        "cifar10",
        "sngp",
        ("duq-gp", "isomax-plus"),
        SHIFTED[1:],
    ),
    Claim(
        "CIFAR-10: IsoMax+ is best against CIFAR-100",
        "tab:cifar10",
        "cifar10-small",
        "cifar10",
        "isomax-plus",
        ("dnn", "dnn-sn", "dnn-gp", "sngp"),
        ("auroc/cifar100",),
    ),
    *(
        Claim(
            f"CIFAR-10: SNGP + {what} ahead of DNN + {what} in calibration and OOD detection",
            "tab:cifar10-abl",
            "cifar10-small",
            "cifar10",
            ours,
            (theirs,),
            ("ece/clean", "ece/corrupted", *CIFAR_OOD),
        )
        for what, ours, theirs in (
            ("Dropout", "sngp-dropout", "mc-dropout"),
            ("Ensemble", "sngp-ensemble", "deep-ensemble"),
            ("AugMix", "sngp-augmix", "dnn-augmix"),
        )
    ),
    *_claims("clinc-small", "clinc", "tab:clinc", CALIBRATED, OOS, "CLINC"),
    *_claims("genomics-small", "genomics", "genomics", CALIBRATED, GENERA, "Bacteria"),
    Claim(
        "Two moons: SNGP's uncertainty follows distance, that of dense networks and their ensembles does not",
        "fig:2d_exp",
        "toy-small",
        "two-moons",
        "sngp",
        ("dnn", "deep-ensemble", "mc-dropout"),
        ("auroc/far", "spearman/distance", "confidence/far"),
    ),
    *(
        Claim(
            f"{name}: SNGP ahead of DNN-GP{form}",
            "fig:2d_exp",
            "toy-small",
            task,
            f"sngp{suffix}",
            (f"dnn-gp{suffix}",),
            ("auroc/far", "spearman/distance", "confidence/far"),
        )
        for name, task in (("Two moons", "two-moons"), ("Two ovals", "two-ovals"))
        for form, suffix in (("", ""), (", in the paper's form", "-paper"))
    ),
]
# Of single choices: text, ablation, and the largest spread between choices that "not sensitive" allows, by metric.
INSENSITIVE = [
    ("Not sensitive to the number of random features, 512 to 2048", "features", ("512", "1024", "2048")),
    ("Not sensitive to layer norm and projection of the hidden vector", "input", None),
    ("Monte Carlo and mean field perform alike", "predictive", None),
    ("Exact sum and moving average perform alike", "sum", None),
    ("Freezing the hidden layers in the last epoch changes nothing", "end", None),
]
ALIKE = {"accuracy": 0.01, "auroc": 0.01}
THEORY = [
    ("Definition 1, distance awareness", "`tests/model/test_diagnose.py`", "around one cluster; not between two"),
    ("Proposition 1, residual blocks keep distances", "`tests/model/test_diagnose.py`", "yes"),
    ("Proposition 2, distorted distances", "`tests/model/test_diagnose.py`", "yes, with its ratio inverted"),
    ("The mixture is minimax", "`tests/prediction/test_predictive.py`", "at the ends only"),
    ("Far away the probabilities are uniform", "`tests/gp/test_head.py`", "yes"),
    ("The shared covariance bounds the classes' from above", "`tests/gp/test_precision.py`", "no, from below"),
]


def check(claim: Claim) -> str:
    """yes, no, in part with what fails, or not run."""
    rows = _rows(record_of(claim), claim.task)
    failed, count = [], 0
    for other in claim.than:
        if claim.better not in rows or other not in rows:
            return "not run"
        for metric in claim.metrics:
            if metric in rows[claim.better] and metric in rows[other]:
                count += 1
                if not _ahead(metric, rows[claim.better][metric], rows[other][metric]):
                    failed.append(metric if len(claim.than) == 1 else f"{metric} ({other})")
    if not count:
        return "not measured"
    if not failed:
        return "yes"
    return "no" if len(failed) == count else f"in {count - len(failed)} of {count}; not in {', '.join(failed)}"


def record_of(claim: Claim) -> str:
    """The record of the main rows, which is younger, where it has all methods of the claim."""
    main = claim.record.replace("-small", "-main")
    there = (ROOT / "results" / main).is_dir() and {claim.better, *claim.than} <= _rows(main, claim.task).keys()
    return main if there else claim.record


def _ahead(metric: str, ours: float, theirs: float) -> bool:
    name = metric.partition("/")[0]
    if name == "accuracy":
        return ours >= theirs - COMPETITIVE
    return ours > theirs if _UP[name] else ours < theirs


def _rows(record: str, task: str) -> dict[str, dict[str, float]]:
    """Every metric by method: the mean over runs, accuracies in percent."""
    content = json.loads((ROOT / "results" / record / "report.json").read_text(encoding="utf-8"))
    tables = content["tasks"].get(task, {"tables": {}})["tables"]
    rows: dict[str, dict[str, float]] = {}
    for table in tables.values():
        for method, cells in table["rows"].items():
            rows.setdefault(method, {}).update({name: cell["mean"] for name, cell in cells.items()})
    return rows


def check_insensitive(ablation: str, choices: Iterable[str] | None) -> str:
    record: list[dict[str, Any]] = [
        r
        for r in lines(ROOT / "results" / "ablations.jsonl")
        if r["ablation"] == ablation and (choices is None or r["choice"] in choices)
    ]
    if not record:
        return "not run"
    spread = {
        (task, metric): max(values) - min(values)
        for task in dict.fromkeys(r["task"] for r in record)
        for metric in ALIKE
        if (values := [r[metric] for r in record if r["task"] == task])
    }
    wide = [f"{metric} on {task} by {value:.3f}" for (task, metric), value in spread.items() if value > ALIKE[metric]]
    return f"no: {', '.join(wide)}" if wide else "yes"


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the records as they are."""
    rows = [["claim", "in the paper", "checked in", "holds here?"]]
    rows += [[c.text, f"`{c.label}`", f"`results/{record_of(c)}`", check(c)] for c in CLAIMS]
    record = "`results/ablations.jsonl`"
    rows += [[text, "appendix", record, check_insensitive(name, of)] for text, name, of in INSENSITIVE]
    rows += [[text, "theory", where, holds] for text, where, holds in THEORY]
    return {"claims": markdown(rows, left=4)}


def main() -> None:
    for name, text in tables().items():
        fill(PAGE, name, text)


if __name__ == "__main__":
    main()
