"""Do the defaults work untouched? Every toy task, three learning rates, five seeds, dense network against GP heads.

    python -m bench.defaults      runs what results/defaults.jsonl lacks, on two processes, then fills docs/defaults.md

A run is `experiment.training.fit` with nothing changed but the learning rate. "Far" points lie more than 1.5 training
standard deviations from every training point; for digits they are uniform noise images.
"""

import itertools
import json
import multiprocessing
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from afield.experiment.training import fit
from afield.methods import METHODS
from afield.model.progress import track
from afield.model.saving import write_file
from afield.prediction.metrics import METRICS, auroc
from afield.tasks import TASKS

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results" / "defaults.jsonl"
PAGE = ROOT / "docs" / "defaults.md"
COMPARED = ("dnn", "dnn-gp", "sngp")
TOYS = ("two-moons", "two-ovals", "circles", "blobs", "digits")
FAR = {"digits": "noise"}  # "far" elsewhere
RATES = (1e-4, 1e-3, 3e-3)
SEEDS = range(5)


def run(task_name: str, method_name: str, rate: float, seed: int) -> dict[str, Any]:
    """Train one model; its test metrics and how it tells far points apart."""
    torch.set_num_threads(1)
    task, method = TASKS[task_name](seed), METHODS[method_name]
    model = fit(task, method, seed=seed, learning_rate=rate)
    inside = method.predict(model, task.test.tensors[0])
    outside = method.predict(model, task.ood[FAR.get(task_name, "far")].tensors[0])
    metrics = {name: METRICS[name](inside, task.test.tensors[1]) for name in ("accuracy", "ece", "nll")}
    metrics |= {"auroc": auroc(inside.score(), outside.score()), "confidence_far": float(outside.confidence.mean())}
    key = {"task": task_name, "method": method_name, "learning_rate": rate, "seed": seed}
    return key | {name: round(value, 5) for name, value in metrics.items()}


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: one row for each task and learning rate."""
    head = ["task", "learning rate", "dnn accuracy", "dnn-gp accuracy", "sngp accuracy", "worst gap to dnn"]
    head += ["dnn far AUROC", "dnn-gp far AUROC", "sngp far AUROC", "sngp worst"]
    rows = [head]
    for task, rate in itertools.product(dict.fromkeys(r["task"] for r in records), RATES):
        of = {
            m: [r for r in records if (r["task"], r["learning_rate"], r["method"]) == (task, rate, m)] for m in COMPARED
        }
        accuracy = {m: {r["seed"]: r["accuracy"] for r in rs} for m, rs in of.items()}
        gap = max(accuracy["dnn"][s] - accuracy[m][s] for m in ("dnn-gp", "sngp") for s in accuracy["dnn"])
        row = [task, f"{rate:g}", *[f"{mean(accuracy[m].values()):.3f}" for m in COMPARED], f"{gap:+.3f}"]
        row += [f"{mean(r['auroc'] for r in of[m]):.3f}" for m in COMPARED]
        rows.append([*row, f"{min(r['auroc'] for r in of['sngp']):.3f}"])
    return markdown(rows, left=2)


def markdown(rows: list[list[str]], *, left: int) -> str:
    """A table whose first row is the head, and whose first `left` columns are text."""
    rule = ["---"] * left + ["---:"] * (len(rows[0]) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])


def fill(page: Path, name: str, text: str) -> None:
    """Put a table between its marks in a page; tests/test_docs.py makes it again and compares."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    write_file(page, f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}".encode())
    print(text)


def main() -> None:
    RECORD.parent.mkdir(exist_ok=True)
    done = {(r["task"], r["method"], r["learning_rate"], r["seed"]) for r in lines(RECORD)}
    wanted = [(t, m, r, s) for m, r, t, s in itertools.product(COMPARED[::-1], RATES[::-1], TOYS, SEEDS)]
    wanted = [key for key in wanted if key not in done]
    with multiprocessing.get_context("spawn").Pool(2) as pool, RECORD.open("a") as file:
        for record in track(pool.imap_unordered(_star, wanted), "runs", total=len(wanted)):
            file.write(json.dumps(record) + "\n")
            file.flush()
    for name, text in tables().items():
        fill(PAGE, name, text)


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the record as it is."""
    return {"defaults": table(lines(RECORD))}


def lines(record: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()] if record.exists() else []


def _star(key: tuple[str, str, float, int]) -> dict[str, Any]:
    return run(*key)


if __name__ == "__main__":
    main()
