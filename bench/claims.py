"""The paper's claims in a table: what is claimed, where it is checked here, whether it holds.

    python -m bench.claims        fills docs/results.md from the records; nothing is run

A claim of a table is a list of comparisons between means in a record of ours. It holds if all do, in part if some do.
A comparison of accuracy allows half a point: the paper says "competitive". Records that lack a row say "not run".
Claims of theory name the tests that check them.
"""

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from afield.prediction.metrics import HIGHER_IS_BETTER
from bench.ablations import ABLATIONS
from bench.defaults import ROOT, fill, lines, markdown

PAGE = ROOT / "docs" / "results.md"
COMPETITIVE = 0.5  # points of accuracy
MOST_NAMED = 3  # failures with their methods; of more, the metrics
_UP = {**HIGHER_IS_BETTER, "spearman": True, "confidence": False, "mean": False, "std": False}
Names = tuple[str, ...]


@dataclass(frozen=True)
class Claim:
    """Each of `better` is ahead of each of `than` in each of the metrics; accuracies may be half a point behind.

    of_than  the metrics of `than` beside those of `better`, where they are others
    """

    text: str
    label: str
    record: str
    task: str
    better: Names
    than: Names
    metrics: Names
    of_than: Names = ()

    @property
    def methods(self) -> set[str]:
        return {*self.better, *self.than}


@dataclass(frozen=True)
class Place:
    """A table of the paper, and our record of it."""

    label: str
    record: str
    task: str
    name: str

    def claim(self, text: str, better: str, than: str, metrics: Names, of_than: Names = ()) -> Claim:
        """Methods are words of a text."""
        methods = tuple(better.split()), tuple(than.split())
        return Claim(f"{self.name}: {text}", self.label, self.record, self.task, *methods, metrics, of_than)


def _ood(metric: str, *sets: str) -> Names:
    return tuple(f"{metric}/{each}" for each in sets)


def _with(score: str, metrics: Names) -> Names:
    return tuple(f"{metric}/{score}" for metric in metrics)


SHIFTED = ("accuracy/clean", "ece/clean", "nll/clean", "ece/corrupted", "nll/corrupted")
CALIBRATED = ("accuracy/clean", "ece/clean", "nll/clean")
ECE = ("ece/clean", "ece/corrupted")
CIFAR_OOD, NOISE = _ood("auroc", "svhn", "cifar100"), _ood("auroc", "noise")
OOS = ("auroc/oos", "aupr/oos")
GENERA = ("auroc/genera", "aupr/genera")
LINES = ("gp-random-features", "gp-variational")
FAR = ("auroc/far", "spearman/distance", "confidence/far")
CIFAR = Place("tab:cifar10", "cifar10-small", "cifar10", "CIFAR-10")
CROSSES = Place("tab:cifar10-abl", "cifar10-small", "cifar10", "CIFAR-10")
SCORES = Place("tab:cifar-ood", "cifar10-small", "cifar10", "CIFAR-10")
CLINC = Place("tab:clinc", "clinc-older", "clinc", "CLINC")
BACTERIA = Place("genomics", "genomics-small", "genomics", "Bacteria")
LINE = Place("fig:1d_exp", "toy-small", "toy-regression", "One dimension")
MOONS = Place("fig:2d_exp", "toy-small", "two-moons", "Two moons")
OVALS = Place("fig:2d_exp", "toy-small", "two-ovals", "Two ovals")


def _of_table(place: Place, metrics: Names, ood: Names) -> list[Claim]:
    """What every results table of the paper says, once for each form of SNGP."""
    fair = "SNGP ahead of the dense network with temperature (ours, not the paper's)"
    parts = "SNGP ahead of its parts, DNN-SN and DNN-GP, in OOD detection"
    return [
        place.claim("SNGP ahead of the dense network", "sngp", "dnn", metrics + ood),
        place.claim("the same in the paper's form", "sngp-paper", "dnn", metrics + ood),
        place.claim(fair, "sngp", "dnn-temperature", metrics[1:] + ood),
        place.claim(parts, "sngp", "dnn-sn dnn-gp", ood),
        place.claim("SNGP ensemble ahead of deep ensemble", "sngp-ensemble", "deep-ensemble", metrics + ood),
    ]


def _of_scores() -> list[Claim]:
    """Of the appendix on OOD scores."""
    ds, md, rmd = "dempster_shafer", "mahalanobis", "relative_mahalanobis"
    far, near = CIFAR_OOD[:1], CIFAR_OOD[1:]
    claims = [
        SCORES.claim(f"Dempster-Shafer ahead of maximum probability, {m}", m, m, _with(ds, CIFAR_OOD), CIFAR_OOD)
        for m in ("dnn", "dnn-sn", "dnn-gp", "sngp")
    ]
    worse = "Mahalanobis is worse on Gaussian-process models than on dense ones"
    best = "SNGP is best against noise by maximum probability and Dempster-Shafer"
    text = "Mahalanobis on a dense network ahead of its maximum probability against noise"
    return [
        *claims,
        SCORES.claim(worse, "dnn dnn-sn", "dnn-gp sngp", _with(md, CIFAR_OOD)),
        SCORES.claim("relative Mahalanobis mends that", "sngp", "sngp", _with(rmd, near + far), _with(md, near + far)),
        SCORES.claim(best, "sngp", "dnn dnn-sn dnn-gp", NOISE + _with(ds, NOISE)),
        SCORES.claim(text, "dnn", "dnn", _with(md, NOISE), NOISE),
    ]


KEPT = "bounds and a kept dense mean (`attach-sn`) ahead of the dense network with temperature (ours, not the paper's)"
CLAIMS = [
    *_of_table(CIFAR, SHIFTED, CIFAR_OOD),
    CIFAR.claim(
        KEPT,
        "attach-sn",
        "dnn-temperature",
        SHIFTED + _with("joined", CIFAR_OOD),
        SHIFTED + _with("dempster_shafer", CIFAR_OOD),
    ),
    CIFAR.claim("Gaussian processes ahead of dense outputs in ECE", "dnn-gp sngp", "dnn dnn-sn isomax-plus", ECE),
    CIFAR.claim("IsoMax+ has the highest ECE", "dnn dnn-sn duq-gp dnn-gp sngp", "isomax-plus", ECE),
    CIFAR.claim("SNGP ahead of DUQ-GP in calibration", "sngp", "duq-gp", SHIFTED[1:]),
    CIFAR.claim("IsoMax+ is best against CIFAR-100", "isomax-plus", "dnn dnn-sn dnn-gp sngp", CIFAR_OOD[1:]),
    CIFAR.claim(
        "SNGP ensemble ahead of every other method in OOD detection",
        "sngp-ensemble",
        "dnn isomax-plus duq-gp dnn-sn dnn-gp sngp mc-dropout deep-ensemble",
        CIFAR_OOD,
    ),
    *(
        CROSSES.claim(f"SNGP + {what} ahead of DNN + {what} in ECE and OOD detection", ours, theirs, ECE + CIFAR_OOD)
        for what, ours, theirs in (
            ("Dropout", "sngp-dropout", "mc-dropout"),
            ("Ensemble", "sngp-ensemble", "deep-ensemble"),
            ("AugMix", "sngp-augmix", "dnn-augmix"),
        )
    ),
    CROSSES.claim("an ensemble betters SNGP in everything", "sngp-ensemble", "sngp", SHIFTED + CIFAR_OOD),
    CROSSES.claim("dropout betters SNGP in everything", "sngp-dropout", "sngp", SHIFTED + CIFAR_OOD),
    CROSSES.claim("AugMix betters DNN-GP", "dnn-gp-augmix", "dnn-gp", SHIFTED + CIFAR_OOD),
    *_of_scores(),
    *_of_table(CLINC, ("accuracy/clean", "ece/clean", "nll/combined"), OOS),
    CLINC.claim("SNGP ahead of all in OOD detection, ensembles too", "sngp", "mc-dropout deep-ensemble", OOS),
    *_of_table(BACTERIA, CALIBRATED, GENERA),
    BACTERIA.claim(
        "bound and Gaussian process each better the dense network", "dnn-sn dnn-gp", "dnn", CALIBRATED[1:] + GENERA
    ),
    LINE.claim("random features closer to the exact process than the variational one", *LINES, ("mean", "std")),
    MOONS.claim(
        "SNGP's uncertainty follows distance, that of dense networks, bounded or ensembles, does not",
        "sngp",
        "dnn dnn-sn deep-ensemble mc-dropout",
        FAR,
    ),
    *(
        place.claim(f"SNGP ahead of DNN-GP{form}", f"sngp{suffix}", f"dnn-gp{suffix}", FAR)
        for place in (MOONS, OVALS)
        for form, suffix in (("", ""), (", in the paper's form", "-paper"))
    ),
]
NAIVE = {
    method: tuple(choice for choice in ABLATIONS["length-scales"].choices if choice.startswith(method))
    for method in ("dnn-gp-paper", "sngp-paper")
}
COLLAPSED = 0.9  # accuracy
# Of single choices: text, ablation, and the largest spread between choices that "not sensitive" allows, by metric.
INSENSITIVE = [
    ("Not sensitive to the number of random features, 512 to 2048", "features", ("512", "1024", "2048")),
    ("Not sensitive to the length scale, 0.5 to 4", "length-scales", NAIVE["sngp-paper"]),
    ("Not sensitive to layer norm and projection of the hidden vector", "input", None),
    ("Monte Carlo and mean field perform alike", "predictive", None),
    ("Exact sum and moving average perform alike", "sum", None),
    ("Freezing the hidden layers in the last epoch changes nothing", "end", None),
]
COSTS = {
    "train-wide-resnet": "a step of Wide ResNet-16-4",
    "train-minilm": "of MiniLM",
    "predict-wide-resnet": "a prediction of Wide ResNet-28-10",
    "predict-minilm": "of MiniLM",
}
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
    """yes, no, in part with what fails, or which rows are not run."""
    rows = _rows(claim.record, claim.task)
    if missing := sorted(claim.methods - rows.keys()):
        return f"not run: {', '.join(missing)}"
    failed, count = [], 0
    for better, than in itertools.product(claim.better, claim.than):
        for ours, theirs in zip(claim.metrics, claim.of_than or claim.metrics, strict=True):
            if ours not in rows[better] or theirs not in rows[than]:
                return f"not measured: {ours}"
            count += 1
            if not _ahead(ours, rows[better][ours], rows[than][theirs]):
                several = [name for name, of in ((better, claim.better), (than, claim.than)) if len(of) > 1]
                failed.append(f"{ours} ({', '.join(several)})" if several else ours)
    if not failed:
        return "yes"
    if len(failed) == count:
        return "no"
    named = failed if len(failed) <= MOST_NAMED else dict.fromkeys(each.partition(" ")[0] for each in failed)
    return f"in {count - len(failed)} of {count}; not in {', '.join(named)}"


def _ahead(metric: str, ours: float, theirs: float) -> bool:
    name = metric.partition("/")[0]
    if name == "accuracy":
        return ours >= theirs - COMPETITIVE
    return ours > theirs if _UP[name] else ours < theirs


def _rows(record: str, task: str) -> dict[str, dict[str, float]]:
    """Every metric by method: the mean over runs, accuracies in percent."""
    rows: dict[str, dict[str, float]] = {}
    for table in _tables(record, task):
        for method, cells in table["rows"].items():
            rows.setdefault(method, {}).update({name: cell["mean"] for name, cell in cells.items()})
    return rows


def _tables(record: str, task: str) -> list[dict[str, Any]]:
    content = json.loads((ROOT / "results" / record / "report.json").read_text(encoding="utf-8"))
    return list(content["tasks"].get(task, {"tables": {}})["tables"].values())


def seeds(claim: Claim) -> str:
    """Of the single model with the fewest; ensembles are made of these."""
    single = [name for name in claim.methods if not name.endswith("ensemble")]
    found = _tables(claim.record, claim.task)
    runs = {name: cell["runs"] for table in found for name, row in table["rows"].items() for cell in row.values()}
    return str(min(runs.get(name, 0) for name in single)) if single else ""


def check_gap() -> str:
    """Of the sums of absolute differences between SNGP and DNN-GP, with AugMix and without."""
    rows = _rows(CROSSES.record, CROSSES.task)
    pairs = [("sngp-augmix", "dnn-gp-augmix"), ("sngp", "dnn-gp")]
    if not {name for pair in pairs for name in pair} <= rows.keys():
        return "not run"
    with_it, without = (sum(abs(rows[a][m] - rows[b][m]) for m in ECE + CIFAR_OOD) for a, b in pairs)
    return "yes" if with_it < without else "no"


def _of_ablation(name: str, choices: Iterable[str] | None = None) -> list[dict[str, Any]]:
    record = [r for r in lines(ROOT / "results" / "ablations.jsonl") if r["ablation"] == name]
    return [r for r in record if choices is None or r["choice"] in choices]


def check_insensitive(ablation: str, choices: Iterable[str] | None) -> str:
    record = _of_ablation(ablation, choices)
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


def check_collapse() -> str:
    """How many trainings with a fixed length scale stay below an accuracy of 0.9, without a bound and with it."""
    low = {m: [r["accuracy"] < COLLAPSED for r in _of_ablation("length-scales", NAIVE[m])] for m in NAIVE}
    without, with_it = (f"{sum(found)} of {len(found)}" for found in low.values())
    holds = "yes" if sum(low["sngp-paper"]) < sum(low["dnn-gp-paper"]) else "no"
    return f"{holds}: {without} trainings on toys, with the bound {with_it}"


def check_amplitude() -> str:
    found = [r["ece"] for r in _of_ablation("amplitude")]
    return f"not beside a logit scale: ECE from {min(found):.3f} to {max(found):.3f}"


def check_costs() -> str:
    files = {name: ROOT / "bench" / "results" / f"{name}.json" for name in COSTS}
    ratios = {name: json.loads(file.read_text(encoding="utf-8"))["ratio"] for name, file in files.items()}
    return ", ".join(f"{what} {ratios[name]:.2f} times" for name, what in COSTS.items())


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the records as they are."""
    rows = [["claim", "in the paper", "checked in", "seeds", "holds here?"]]
    rows += [[c.text, f"`{c.label}`", f"`results/{c.record}`", seeds(c), check(c)] for c in CLAIMS]
    one, crosses = ("`results/ablations.jsonl`", "1"), CROSSES.claim("", "sngp-augmix", "dnn-gp-augmix", ECE)
    rows += [
        [
            "AugMix narrows the gap between DNN-GP and SNGP",
            "text",
            f"`results/{CROSSES.record}`",
            seeds(crosses),
            check_gap(),
        ],
        ["Without a bound a Gaussian process on a network collapses", "introduction", *one, check_collapse()],
        ["Calibration is sensitive to the amplitude", "appendix", *one, check_amplitude()],
        *([text, "appendix", *one, check_insensitive(name, of)] for text, name, of in INSENSITIVE),
        ["Time is comparable to a dense network's", "text", "`bench/results`", "", check_costs()],
        *([text, "theory", where, "", holds] for text, where, holds in THEORY),
    ]
    return {"claims": markdown(rows, left=5)}


def main() -> None:
    for name, text in tables().items():
        fill(PAGE, name, text)


if __name__ == "__main__":
    main()
