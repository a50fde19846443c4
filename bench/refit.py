"""Output weights as the last gradient step left them, against their optimum: which validation data prefers.

    python -m bench.refit      runs what results/refit.jsonl lacks, then fills docs/defaults.md (needs $AFIELD_DATA)

One SNGP is trained for each task and seed, with the settings of its runs, and finished twice: as it is, and with
`afield.fit_head`. One half of the validation data calibrates, the other is scored; test and OOD sets are not looked at.
"""

import json
from dataclasses import asdict, replace
from statistics import mean
from typing import Any

import torch
from torch.utils.data import TensorDataset

from afield.experiment.config import Config
from afield.experiment.training import batches, fit
from afield.methods import METHODS
from afield.model.progress import track
from afield.prediction.metrics import METRICS
from afield.prediction.prediction import Prediction
from afield.tasks import TASKS
from bench.defaults import PAGE, ROOT, fill, lines, markdown

RECORD = ROOT / "results" / "refit.jsonl"
SEEDS = {"digits": 3, "fashion": 2, "genomics": 1, "cifar10": 1}
CHOICES = {"last step": False, "solved": True}
COLUMNS = ("accuracy", "nll", "ece")


def finish_both(name: str, seed: int) -> list[dict[str, Any]]:
    task, method = TASKS[name](seed), METHODS["sngp"]
    settings = replace(Config.of(name, "sngp").settings, refit_head=False)
    model: Any = fit(task, method, seed=seed, **asdict(settings))
    x, y = task.val.tensors
    first, second = (TensorDataset(x[part::2], y[part::2]) for part in (0, 1))
    records = []
    for choice, refit in CHOICES.items():
        model.head.set_scalars(amplitude=1.0, logit_scale=1.0)
        method.finish(model, batches(task.train), batches(first), replace(settings, refit_head=refit))
        prediction = Prediction.cat([method.predict(model, part) for part in second.tensors[0].split(500)])
        scored = {metric: round(METRICS[metric](prediction, second.tensors[1]), 5) for metric in COLUMNS}
        records.append({"task": name, "seed": seed, "choice": choice} | scored)
    return records


def tables() -> dict[str, str]:
    """The text between the marks, from the record as it is."""
    records = lines(RECORD)
    rows = [["task", "seeds", *(f"{metric}, {choice}" for metric in COLUMNS for choice in CHOICES)]]
    for task in SEEDS:
        of = {choice: [r for r in records if (r["task"], r["choice"]) == (task, choice)] for choice in CHOICES}
        if all(of.values()):
            cells = (f"{mean(r[metric] for r in of[choice]):.3f}" for metric in COLUMNS for choice in CHOICES)
            rows.append([task, str(len(of["solved"])), *cells])
    return {"refit": markdown(rows, left=1)}


def main() -> None:
    torch.set_num_threads(1)
    done = {(r["task"], r["seed"]) for r in lines(RECORD)}
    missing = [(name, seed) for name, count in SEEDS.items() for seed in range(count) if (name, seed) not in done]
    for name, seed in track(missing, "trainings"):
        found = finish_both(name, seed)
        with RECORD.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in found)
        print(*found, sep="\n", flush=True)
    for name, text in tables().items():
        fill(PAGE, name, text)


if __name__ == "__main__":
    main()
