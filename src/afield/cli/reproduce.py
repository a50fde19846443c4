"""`afield reproduce`: all runs of a table or figure of the paper, and a report on them."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.table import Table

from afield.cli.progress import show_progress
from afield.experiment.many_runs import run_all
from afield.experiment.plan import RATE, Row, plan
from afield.experiment.suites import SUITES
from afield.report import report


@dataclass(frozen=True)
class Reproduce:
    """Make every run of a suite that is not finished, then the report. After a stop, the same command goes on."""

    suite: tyro.conf.Positional[str]
    """Name of a suite: see the list below."""
    preset: str = "small"
    """Size of tasks and trainings: smoke (seconds), small (two cores), paper (as published)."""
    methods: tuple[str, ...] = ()
    """Only these methods, on every task of the suite; none given: the suite's own."""
    seeds: int | None = None
    """How many; not given: the suite's own number."""
    precision: Literal["float32", "bfloat16"] | None = None
    """Of the products in training; not given: the tasks' own, float32."""
    jobs: int = os.cpu_count() or 1
    """Runs at a time, on this machine."""
    cluster: str | None = None
    """A Ray cluster that makes the runs instead: auto, local, HOST:PORT or ray://HOST:PORT."""
    cpus_per_run: int = 1
    """Cores, and threads, of a run on the cluster, which makes as many at a time as it has room for."""
    out: Path | None = None
    """Folder of the runs; not given: runs/SUITE-PRESET."""
    plan: bool = False
    """Print what would be trained, with estimated GPU hours and memory, and train nothing."""

    def run(self) -> None:
        console, started = Console(), time.monotonic()
        suite = SUITES[self.suite]
        out = self.out or Path("runs") / f"{self.suite}-{self.preset}"
        configs = suite.configs(self.preset, methods=self.methods or None, seeds=self.seeds, precision=self.precision)
        if self.plan:
            console.print(_table_of(plan(configs), f"{suite.title}, preset {self.preset}"))
            console.print(f"Hours of one GPU that sustains {RATE / 1e12:g} TFLOP/s, without decoding of pictures.")
            return
        with show_progress(console, configs, out) as bar:
            run_all(
                configs,
                out,
                jobs=self.jobs,
                cluster=self.cluster,
                cpus=self.cpus_per_run,
                on_progress=bar.on_progress,
                on_run=bar.on_run,
            )
        page = report(out, title=suite.title)
        console.print(
            f"{len(configs)} runs in [bold]{out}[/bold], {time.monotonic() - started:.0f} s. Report: "
            f"[bold]{page.resolve()}[/bold]",
            soft_wrap=True,
        )


def _table_of(rows: Sequence[Row], title: str) -> Table:
    caption = f"{sum(row.gpu_hours for row in rows):,.1f} GPU hours in all. Rows with 0 trainings use those of others."
    table = Table(title=title, caption=caption, box=None)
    several = len({row.task for row in rows}) > 1
    table.add_column("method", no_wrap=True)
    for name in ("trainings", "epochs", "examples", "steps", "GPU hours", "GB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        name = f"{row.task} {row.method}" if several else row.method
        numbers = f"{row.trainings}", f"{row.epochs}", f"{row.examples:,}", f"{row.steps:,}"
        table.add_row(name, *numbers, f"{row.gpu_hours:,.1f}", f"{row.memory:.1f}")
    return table
