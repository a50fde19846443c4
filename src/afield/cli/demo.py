"""`afield demo`: four networks on two moons, a table, and a report of what each is unsure about."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from afield.cli.progress import run_watched
from afield.experiment.config import Config
from afield.report import report
from afield.tasks import TASKS

COMPARED = ("dnn", "dnn-sn", "dnn-gp", "sngp")
COLUMNS = {
    "accuracy": "accuracy/clean",
    "ECE": "ece/clean",
    "NLL": "nll/clean",
    "far-OOD AUROC": "auroc/far",
    "confidence far away": "confidence/far",
}


@dataclass(frozen=True)
class Demo:
    """Train dnn, dnn-sn, dnn-gp and sngp on a task in the plane; print a table and write a report with pictures."""

    out: Path = Path("demo")
    """Folder for runs and report."""
    task: str = "two-moons"
    """two-moons, two-ovals, circles or blobs."""
    epochs: int = 100
    """Passes over the training data."""
    seed: int = 0
    """Of weights and batches."""
    jobs: int = min(2, os.cpu_count() or 1)
    """Trainings at a time."""

    def run(self) -> None:
        run(self)


def run(settings: Demo, console: Console | None = None) -> Path:
    """Train, tell and draw; returns the report's path."""
    console, started = console or Console(), time.monotonic()
    configs = [Config.of(settings.task, name, seed=settings.seed, epochs=settings.epochs) for name in COMPARED]
    task = TASKS[settings.task](0)
    if "far" not in task.ood:
        raise ValueError(f"The demo draws tasks in the plane, such as two-moons, not {task.name}.")
    runs = run_watched(console, configs, settings.out, jobs=settings.jobs, fresh=True)
    table = Table(title=f"{task.name}: {len(task.train)} training points, {len(task.ood['far'])} points far from all")
    table.add_column("method")
    for column in (*COLUMNS, "train s"):
        table.add_column(column, justify="right")
    for made in runs:
        figures = [f"{made.metrics[name]:.3f}" for name in COLUMNS.values()]
        table.add_row(made.method, *figures, f"{made.cost['train_seconds']:.0f}")
    console.print(table)
    page = report(settings.out, title=f"afield on {task.name}")
    console.print(
        "Far away, a dense network is as sure as ever; a Gaussian process knows that it does not know.\n"
        f"Report with pictures: [bold]{page.resolve()}[/bold]   ({time.monotonic() - started:.0f} s)",
        soft_wrap=True,
    )
    return page
