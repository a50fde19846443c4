"""Do classes that are left out tell which source of the joined score to trust? They do not.

    AFIELD_DATA=... python -m bench.left_out        writes results/left-out.json, fills docs/results.md

Each class of a fitted task in turn plays the foreign one: its examples leave the posterior and the class distance, its
logit the energy, and its held-out rows are to be told from those of the others. The network has been trained on it all
the same. Beside the mean AUROC of weights over classes stands the one on true OOD sets, which no user has: if the first
told the second, weights could be chosen for each task.
"""

import json
from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import Tensor

import afield
from afield.gp.class_distance import ClassDistance
from afield.gp.head import GaussianProcessHead
from afield.model.saving import write_file
from afield.prediction.metrics import auroc
from bench import texts
from bench.defaults import ROOT, fill, markdown
from bench.detector_sources import SOURCES
from bench.detectors import terms

RECORD, PAGE = ROOT / "results" / "left-out.json", ROOT / "docs" / "results.md"
PUBLIC, TABLES, TEXTS = ("resnet56", "resnet56_b"), ("letter", "satellite", "vehicle"), ("TREC", "SNIPS", "ATIS")
WEIGHTS = tuple((v, e, r) for v in (0.0, 0.5, 1.0) for e in (0.0, 0.5, 1.0) for r in (0.0, 0.5, 1.0) if v + e + r)
OURS = (1.0, 0.5, 0.5)
FEWEST, MOST = 15, 10  # held-out rows of a class, classes
Row = dict[str, Any]


def main() -> None:
    rows: list[Row] = []
    for title, *parts in tasks():
        rows.append({"task": title} | compare(*parts))
        print(json.dumps(rows[-1]), flush=True)
    record = {"command": "python -m bench.left_out", "weights": WEIGHTS, "rows": rows}
    write_file(RECORD, (json.dumps(record) + "\n").encode())
    for name, text in tables().items():
        fill(PAGE, name, text)


def tasks() -> Iterator[tuple[Any, ...]]:
    """Title, head, hidden vectors and classes of training and of held-out data, hidden vectors of test and OOD sets."""
    for name in (*PUBLIC, *[f"table-{name}" for name in TABLES]):
        title, _, make = SOURCES[name]
        made = make(0)
        hidden = {part: p.features for part, p in {"test": made.test, **made.near, **made.far}.items()}
        held = made.held.features, made.held.labels
        yield title, made.model.head, (made.train.features, made.labels.long()), held, hidden
    for name in TEXTS:
        train, held, test, ood = texts.split(texts.TASKS[name])
        torch.manual_seed(0)
        model = afield.attach(texts.regression(*train))
        afield.fit_posterior(model, [train])
        yield name, model.head, train, held, {"test": test, **ood}


@torch.no_grad()
def compare(
    head: GaussianProcessHead, train: tuple[Tensor, Tensor], held: tuple[Tensor, Tensor], hidden: Mapping[str, Tensor]
) -> Row:
    """Mean AUROC of every choice of weights, of classes left out and of OOD sets."""
    (h, y), (h_held, y_held) = train, held
    psi = torch.cat([head.variance_phi(part) for part in h.split(2000)]).double()
    total = psi.T @ psi
    distance = _distance(head, h, y)
    known = _sources(head, total, distance, h_held)
    parts = {name: terms(known, _sources(head, total, distance, x)) for name, x in hidden.items()}
    true = [fmean(_auroc(w, parts["test"], parts[name]) for name in parts if name != "test") for w in WEIGHTS]
    left_out: list[list[float]] = []
    for k in [k for k in range(head.out_features) if int((y_held == k).sum()) >= FEWEST][:MOST]:
        out = psi[y == k]
        values = _sources(head, total - out.T @ out, _distance(head, h, y, k), h_held, k)
        inside = y_held != k
        t = terms(values[inside], values)
        left_out.append([_auroc(w, t[inside], t[~inside]) for w in WEIGHTS])
    return {"left_out": [round(fmean(v), 4) for v in zip(*left_out, strict=True)], "true": [round(v, 4) for v in true]}


def _auroc(weights: tuple[float, ...], inside: Tensor, outside: Tensor) -> float:
    w = torch.tensor(weights, dtype=inside.dtype)
    return auroc(inside @ w, outside @ w)


def _distance(head: GaussianProcessHead, h: Tensor, y: Tensor, without: int | None = None) -> ClassDistance:
    distance, keep = ClassDistance(h.shape[1], head.out_features), torch.ones_like(y, dtype=torch.bool)
    if without is not None:
        keep = y != without
    distance.update(h[keep], y[keep])
    distance.factor()
    return distance


def _sources(
    head: GaussianProcessHead, data: Tensor, distance: ClassDistance, h: Tensor, without: int | None = None
) -> Tensor:
    """Variance, energy, class distance (N, 3) for this data term."""
    lower = torch.linalg.cholesky(data + head.ridge.double() * torch.eye(len(data), dtype=data.dtype))
    variance = torch.linalg.solve_triangular(lower, head.variance_phi(h).double().T, upper=False).square().sum(0)
    logits = head(h)
    if without is not None:
        logits = torch.cat([logits[:, :without], logits[:, without + 1 :]], dim=1)
    return torch.stack([variance, -logits.logsumexp(1).double(), distance(h).double()], dim=1)


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the record as it is."""
    rows = [
        ["task", "rank correlation", "true AUROC of the best by classes left out", "of ours", "of the best there is"]
    ]
    for row in json.loads(RECORD.read_text(encoding="utf-8"))["rows"]:
        true, chosen = row["true"], max(range(len(WEIGHTS)), key=row["left_out"].__getitem__)
        correlation = float(spearmanr(row["left_out"], true).statistic)
        cells = (true[chosen], true[WEIGHTS.index(OURS)], max(true))
        rows.append([row["task"], f"{correlation:.2f}", *[f"{cell:.3f}" for cell in cells]])
    return {"classes left out": markdown(rows, left=1)}


if __name__ == "__main__":
    main()
