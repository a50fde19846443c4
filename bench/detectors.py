"""All scores on the same hidden vectors: how well each tells near and far OOD data from test data.

    AFIELD_DATA=... python -m bench.detectors           every task that results/detectors.json lacks
    AFIELD_DATA=... python -m bench.detectors clinc     these tasks, again

Then fills docs/results.md. Networks and data are those of `bench.detector_sources`. Every score has its published or
default options: none was chosen on OOD data here, but the two public ResNet-56 are those on which the defaults of
afield were chosen (docs/defaults.md).

WEIGHTS says what other weights of the joined score would give, with unit Mahalanobis distance as a fourth source.
"""

import json
import sys
import time
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

import afield
from afield.gp.joined_score import WEIGHTS as OURS
from afield.gp.joined_score import JoinedScore
from afield.model.calibration import sources_of
from afield.model.saving import write_file
from afield.prediction.distance_scores import make_all
from afield.prediction.metrics import auroc
from afield.prediction.prediction import Prediction
from afield.prediction.scores import SCORES
from bench.defaults import ROOT, fill, markdown
from bench.detector_sources import SOURCES, Source, halves

RECORD, PAGE = ROOT / "results" / "detectors.json", ROOT / "docs" / "results.md"
NEEDS_OOD_DATA: frozenset[str] = frozenset()  # scores whose options were chosen on OOD data; published ones are not
WEIGHTS = {
    "1, 1/2, 1/2 (ours)": (1.0, 0.5, 0.5, 0.0),
    "variance alone": (1.0, 0.0, 0.0, 0.0),
    "1, 1/2, 0": (1.0, 0.5, 0.0, 0.0),
    "1, 0, 1/2": (1.0, 0.0, 0.5, 0.0),
    "1/2, 1, 1/2": (0.5, 1.0, 0.5, 0.0),
    "1, 1, 1": (1.0, 1.0, 1.0, 0.0),
    "1, 1/2, 1/2, 1/2": (1.0, 0.5, 0.5, 0.5),
    "1, 1/2, 1/4, 1/2": (1.0, 0.5, 0.25, 0.5),
    "1/2, 1/2, 1/2, 1/2": (0.5, 0.5, 0.5, 0.5),
}
"""Of the variance, the energy, the class distance, and unit Mahalanobis distance."""
Row = dict[str, Any]


def main(names: Iterable[str] = ()) -> None:
    tasks = json.loads(RECORD.read_text(encoding="utf-8"))["tasks"] if RECORD.exists() else {}
    for name in names or [name for name in SOURCES if name not in tasks]:
        _, seeds, make = SOURCES[name]
        tasks[name] = average([compare(make(seed)) for seed in range(seeds)]) | {"seeds": seeds}
        versions = {"afield": afield.__version__, "torch": torch.__version__}
        record = {"command": "python -m bench.detectors", "versions": versions}
        record |= {"tasks": {known: tasks[known] for known in SOURCES if known in tasks}}
        write_file(RECORD, (json.dumps(record, indent=1) + "\n").encode())
        print(name, json.dumps(tasks[name]["scores"]["joined"]), flush=True)
    for name, text in tables().items():
        fill(PAGE, name, text)


def compare(source: Source) -> dict[str, dict[str, Row]]:
    """By score, and by weights of the joined one: AUROC on every OOD set, near and far on average, seconds."""
    train, rows = source.train, {}
    num_features, num_classes = train.features.shape[1], train.logits.shape[1]
    functions: dict[str, Any] = {name: (lambda: None, s, s.applies) for name, s in SCORES.items()}
    for name, score in make_all(num_features, num_classes, output=source.output).items():
        fit = lambda score=score: score.update(train.features, source.labels, train.logits)  # noqa: E731
        functions[name] = (fit, score.score, score.applies)
    sets = {"test": source.test, **source.near, **source.far}
    unit: Mapping[str, Tensor] = {}
    for name, (fit, score, applies) in functions.items():
        begin = time.perf_counter()
        fit()
        between = time.perf_counter()
        if not all(map(applies, sets.values())):
            continue
        values = {of: score(prediction) for of, prediction in sets.items()}
        seconds = {"fit_seconds": between - begin, "score_seconds": time.perf_counter() - between}
        rows[name] = _aurocs(source, values) | {key: round(value, 4) for key, value in seconds.items()}
        if name == "unit_mahalanobis":
            unit = values | {"held": score(source.held)}
    parts = {of: _tails(source, prediction, unit[of], unit["held"]) for of, prediction in sets.items()}
    weights = {
        name: _aurocs(source, {of: t @ torch.tensor(w, dtype=t.dtype) for of, t in parts.items()})
        for name, w in WEIGHTS.items()
    }
    return {"scores": rows, "weights": weights}


def _aurocs(source: Source, values: Mapping[str, Tensor]) -> Row:
    row: Row = {f"auroc/{of}": round(auroc(values["test"], v), 4) for of, v in values.items() if of != "test"}
    kinds = {kind: getattr(source, kind) for kind in ("near", "far")}
    means = {kind: fmean(row[f"auroc/{of}"] for of in those) for kind, those in kinds.items() if those}
    return row | {kind: round(value, 4) for kind, value in means.items()}


@torch.no_grad()
def _tails(source: Source, prediction: Prediction, unit: Tensor, unit_held: Tensor) -> Tensor:
    """-log p (N, 4) of the sources of the joined score and of unit Mahalanobis distance."""
    head, first = source.model.head, halves(source.held)
    seen = [sources_of(head, p.features).double() for p in (source.held[first], prediction)]
    fourth = [m.double()[:, None].expand(-1, len(OURS)) for m in (unit_held[first], unit)]
    return torch.cat([terms(*seen), terms(*fourth)[:, :1]], dim=1)


def terms(held: Tensor, values: Tensor) -> Tensor:
    """The terms of a joined score that is fitted to `held`, each without its weight."""
    score = JoinedScore()
    score.fit(held)
    above = (values[..., None] - score.knots).clamp_min(0)
    return (torch.minimum(above, score.widths) * score.slopes).sum(-1) / torch.tensor(OURS, dtype=values.dtype)


def average(seeds: list[dict[str, dict[str, Row]]]) -> dict[str, dict[str, Row]]:
    """The means over seeds, row by row."""
    return {
        kind: {
            name: {key: round(fmean(seed[kind][name][key] for seed in seeds), 4) for key in row}
            for name, row in seeds[0][kind].items()
        }
        for kind in seeds[0]
    }


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the record as it is."""
    tasks = json.loads(RECORD.read_text(encoding="utf-8"))["tasks"]
    of_tables = [task for task in tasks if task.startswith("table-")]
    return {
        "detectors": _table(tasks, [task for task in tasks if task not in of_tables], summary=False),
        "detectors on tables": _table(tasks, of_tables, summary=False),
        "detectors in all": _table(tasks, list(tasks), summary=True),
        "weights of the joined score": _weights(tasks),
    }


def _columns(tasks: Mapping[str, Any], names: Iterable[str]) -> list[tuple[str, str]]:
    return [(task, kind) for task in names for kind in ("near", "far") if kind in tasks[task]["scores"]["joined"]]


def _table(tasks: Mapping[str, Any], names: list[str], *, summary: bool) -> str:
    columns = _columns(tasks, names)
    best = {c: max(row[c[1]] for row in tasks[c[0]]["scores"].values()) for c in columns}
    head = ["score", *[f"{SOURCES[task][0]}, {kind}" for task, kind in columns]]
    if summary:
        head = ["score", "needs OOD data for tuning", "columns", "mean", "mean of `joined` there"]
        head += ["furthest behind the best"]
    body = []
    for name in dict.fromkeys(name for task in tasks.values() for name in task["scores"]):
        of = {c: tasks[c[0]]["scores"][name][c[1]] for c in columns if name in tasks[c[0]]["scores"]}
        ours = fmean(tasks[c[0]]["scores"]["joined"][c[1]] for c in of) if of else 0.0
        cells = [f"{of[c]:.3f}" if c in of else "" for c in columns]
        if summary and of:
            gap = max(best[c] - value for c, value in of.items())
            cells = ["yes" if name in NEEDS_OOD_DATA else "no", str(len(of))]
            cells += [f"{value:.3f}" for value in (fmean(of.values()), ours, gap)]
        if of:
            body.append([f"`{name}`", *cells])
    return markdown([head, *body], left=2 if summary else 1)


def _weights(tasks: Mapping[str, Any]) -> str:
    columns = _columns(tasks, tasks)
    best = {c: max(row[c[1]] for row in tasks[c[0]]["scores"].values()) for c in columns}
    kinds = [("near", "near, mean"), ("far", "far, mean")]
    rows = [["weights", "mean", *[title for _, title in kinds], "furthest behind the best score"]]
    for name in WEIGHTS:
        of = {c: tasks[c[0]]["weights"][name][c[1]] for c in columns}
        means = [fmean(of.values()), *[fmean(v for c, v in of.items() if c[1] == kind) for kind, _ in kinds]]
        rows.append([name, *[f"{value:.3f}" for value in (*means, max(best[c] - v for c, v in of.items()))]])
    return markdown(rows, left=1)


if __name__ == "__main__":
    main(sys.argv[1:])
