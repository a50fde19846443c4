"""Evidence for two defaults: the curvature of the posterior, and the length scale as a fraction of the median distance.

    python -m bench.choices        runs what results/choices.jsonl lacks, on two processes, then fills docs/defaults.md

Curvature: one trained SNGP, its posterior fitted with each weight, so that only the posterior differs. AUROC of far
points by the variance alone and by the default score. Length scale: SNGP trained with each fraction.
"""

import itertools
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from statistics import mean
from typing import Any

import torch

from afield.experiment.training import batches, fit
from afield.methods import METHODS
from afield.methods.method import Method
from afield.model.sngp_model import SNGP
from afield.prediction.metrics import METRICS, auroc
from afield.tasks import TASKS
from bench.defaults import FAR, PAGE, ROOT, TOYS, fill, lines, markdown

RECORD = ROOT / "results" / "choices.jsonl"
CURVATURES = {"unit": "unit", "p*(1-p*)": "likelihood"}
FRACTIONS = (0.35, 0.5, 0.7, 1.0)
HARD = ("digits", "circles")


def curvature(task_name: str, seed: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    task, method = TASKS[task_name](seed), METHODS["sngp"]
    model = fit(task, method, seed=seed)
    records = []
    for name, weight in CURVATURES.items():
        model.head.curvature = weight
        method.finish(model, batches(task.train), batches(task.val))
        inside = method.predict(model, task.test.tensors[0])
        outside = method.predict(model, task.ood[FAR.get(task_name, "far")].tensors[0])
        metrics = {"nll": METRICS["nll"](inside, task.test.tensors[1])}
        for score in ("variance", "dempster_shafer"):
            metrics[score] = auroc(inside.score(score), outside.score(score))
        records.append({"kind": "curvature", "task": task_name, "seed": seed, "choice": name} | metrics)
    return records


def length_scale(task_name: str, seed: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    task, method, records = TASKS[task_name](seed), METHODS["sngp"], []
    for fraction, rate in itertools.product(FRACTIONS, (1e-4, 3e-3)):
        model = fit(task, with_fraction(method, fraction), seed=seed, learning_rate=rate)
        inside = method.predict(model, task.test.tensors[0])
        outside = method.predict(model, task.ood[FAR.get(task_name, "far")].tensors[0])
        metrics = {name: METRICS[name](inside, task.test.tensors[1]) for name in ("accuracy", "nll")}
        metrics["dempster_shafer"] = auroc(inside.score(), outside.score())
        key = {"kind": "length_scale", "task": task_name, "seed": seed, "choice": fraction, "learning_rate": rate}
        records.append(key | metrics)
    return records


def with_fraction(method: Method[SNGP], fraction: float) -> Method[SNGP]:
    """The method with another length scale, as a fraction of the median distance between hidden vectors."""

    def build(*arguments: Any) -> SNGP:
        model = method.build(*arguments)
        model.head.random_features.fraction = fraction
        return model

    return replace(method, build=build)


def curvature_table(records: list[dict[str, Any]]) -> str:
    rows = [["task", *[f"{name}: {what}" for name in CURVATURES for what in ("variance", "default score", "NLL")]]]
    for task in dict.fromkeys(r["task"] for r in records):
        row = [task]
        for name in CURVATURES:
            of = [r for r in records if (r["task"], r["choice"]) == (task, name)]
            row += [f"{mean(r[key] for r in of):.3f}" for key in ("variance", "dempster_shafer", "nll")]
        rows.append(row)
    return markdown(rows, left=1)


def length_scale_table(records: list[dict[str, Any]]) -> str:
    rows = [["task", "learning rate", *[f"{f:g}" for f in FRACTIONS]]]
    for task, rate in dict.fromkeys((r["task"], r["learning_rate"]) for r in records):
        row = [task, f"{rate:g}"]
        for fraction in FRACTIONS:
            of = [r for r in records if (r["task"], r["learning_rate"], r["choice"]) == (task, rate, fraction)]
            row.append(f"{mean(r['accuracy'] for r in of):.3f} / {mean(r['dempster_shafer'] for r in of):.3f}")
        rows.append(row)
    return markdown(rows, left=2)


EXPERIMENTS: dict[str, Callable[[str, int], list[dict[str, Any]]]] = {
    "curvature": curvature,
    "length_scale": length_scale,
}


def _run(job: tuple[str, str, int]) -> list[dict[str, Any]]:
    return EXPERIMENTS[job[0]](*job[1:])


def main() -> None:
    done = {(r["kind"], r["task"], r["seed"]) for r in lines(RECORD)}
    jobs = [("curvature", task, seed) for task in TOYS for seed in range(2)]
    jobs += [("length_scale", task, seed) for task in HARD for seed in range(1)]
    with multiprocessing.get_context("spawn").Pool(2) as pool, RECORD.open("a") as file:
        for new in pool.imap_unordered(_run, [job for job in jobs if job not in done]):
            file.writelines(json.dumps(record) + "\n" for record in new)
            file.flush()
    for name, text in tables().items():
        fill(PAGE, name, text)


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the record as it is."""
    records = lines(RECORD)
    return {
        "curvature": curvature_table([r for r in records if r["kind"] == "curvature"]),
        "length scale": length_scale_table([r for r in records if r["kind"] == "length_scale"]),
    }


if __name__ == "__main__":
    main()
