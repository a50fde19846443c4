"""`afield demo`: four networks on two moons, a table of their metrics, and a report; or one that is served."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from afield.cli.demo_stream import serve_demo
from afield.cli.progress import show_progress
from afield.experiment.config import Config
from afield.experiment.many_runs import run_all
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
    serve: bool = False
    """Train sngp alone, serve it, open its page, and send it a stream that drifts until the alarm rings."""
    port: int = 8080
    """Of the page."""

    def run(self) -> None:
        if self.serve:
            run_service(self)
        else:
            run(self)


def run_service(command: Demo, console: Console | None = None) -> None:
    """Train one network and serve it to a stream that drifts."""
    console, task = console or Console(), TASKS[command.task](0)
    config = Config.of(command.task, "sngp", seed=command.seed, epochs=command.epochs)
    with show_progress(console, [config], command.out, fresh=True) as bar:
        (trained,) = run_all([config], command.out, jobs=1, fresh=True, on_progress=bar.on_progress, on_run=bar.on_run)
    serve_demo(trained.folder, task, port=command.port, show=True, console=console)


def run(command: Demo, console: Console | None = None) -> Path:
    """Train, print the table and write the report; its path."""
    console, started = console or Console(), time.monotonic()
    configs = [Config.of(command.task, name, seed=command.seed, epochs=command.epochs) for name in COMPARED]
    task = TASKS[command.task](0)
    if "far" not in task.ood:
        raise ValueError(f"The demo draws tasks in the plane, such as two-moons, not {task.name}.")
    with show_progress(console, configs, command.out, fresh=True) as bar:
        runs = run_all(
            configs, command.out, jobs=command.jobs, fresh=True, on_progress=bar.on_progress, on_run=bar.on_run
        )
    table = Table(title=f"{task.name}: {len(task.train)} training points, {len(task.ood['far'])} points far from all")
    table.add_column("method")
    for column in (*COLUMNS, "train s"):
        table.add_column(column, justify="right")
    for finished in runs:
        metrics = [f"{finished.metrics[name]:.3f}" for name in COLUMNS.values()]
        table.add_row(finished.method, *metrics, f"{finished.cost['train_seconds']:.0f}")
    console.print(table)
    page = report(command.out, title=f"afield on {task.name}")
    console.print(
        "Far away, a dense network is as sure as ever; a Gaussian process knows that it does not know.\n"
        f"Report with pictures: [bold]{page.resolve()}[/bold]   ({time.monotonic() - started:.0f} s)",
        soft_wrap=True,
    )
    return page
