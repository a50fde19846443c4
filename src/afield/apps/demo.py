"""`afield demo`: four networks on two moons, a table, and a picture of what each is unsure about."""

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from afield.apps.plots import uncertainty_surfaces
from afield.engine import fit
from afield.methods import METHODS
from afield.metrics import METRICS, auroc
from afield.tasks import TASKS

COMPARED = ("dnn", "dnn-sn", "dnn-gp", "sngp")


@dataclass(frozen=True)
class Demo:
    """Train dnn, dnn-sn, dnn-gp and sngp on a toy task; print a table and write a picture."""

    out: Path = Path("demo")
    """Folder for the picture."""
    task: str = "two-moons"
    """two-moons, two-ovals, circles or blobs."""
    epochs: int = 100
    """Passes over the training data."""
    seed: int = 0
    """Of data, weights and batches."""

    def run(self) -> None:
        run(self)


def run(settings: Demo, console: Console | None = None) -> Path:
    """Train, tell and draw; returns the picture's path."""
    console = console or Console()
    started = time.monotonic()
    task = TASKS[settings.task](settings.seed)
    points = next(iter(task.ood.values())).tensors[0]
    if points.shape[1] != 2:
        raise ValueError(f"The demo draws tasks in the plane, {task.name} has {points.shape[1]} dimensions.")
    x, y = task.test.tensors
    train = (task.train.tensors[0], task.train.tensors[1])
    table = Table(title=f"{task.name}: {len(task.train)} training points, {len(points)} points far from all of them")
    table.add_column("method")
    for column in ("accuracy", "ECE", "NLL", "far-OOD AUROC", "confidence far away", "train s"):
        table.add_column(column, justify="right")
    predictors = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # layers this small run faster on one
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("loss {task.fields[loss]:.4f}"))
    try:
        with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
            bar = progress.add_task("", total=settings.epochs * len(COMPARED), loss=float("nan"))
            for name in COMPARED:
                method, begin = METHODS[name], time.monotonic()
                progress.update(bar, description=name)
                model = fit(
                    task,
                    method,
                    seed=settings.seed,
                    epochs=settings.epochs,
                    on_epoch=lambda _, loss: progress.update(bar, advance=1, loss=loss),
                )
                seconds = time.monotonic() - begin
                inside, outside = method.predict(model, x), method.predict(model, points)
                figures = [METRICS[m](inside, y) for m in ("accuracy", "ece", "nll")]
                figures += [auroc(inside.score(), outside.score()), float(outside.confidence.mean())]
                table.add_row(name, *[f"{f:.3f}" for f in figures], f"{seconds:.0f}")
                predictors[name] = lambda grid, method=method, model=model: method.predict(model, grid)
        settings.out.mkdir(parents=True, exist_ok=True)
        path = settings.out / f"{task.name}.png"
        with tempfile.TemporaryDirectory(dir=settings.out) as scratch:
            drawn = uncertainty_surfaces(predictors, train, points, Path(scratch) / "surfaces.png")
            os.replace(drawn, path)
    finally:
        torch.set_num_threads(threads)
    console.print(table)
    console.print(
        "Far away, a dense network is as sure as ever; a Gaussian process knows that it does not know.\n"
        f"Four uncertainty surfaces: [bold]{path.resolve()}[/bold]   ({time.monotonic() - started:.0f} s)",
        soft_wrap=True,
    )
    return path
