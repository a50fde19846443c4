"""`afield reproduce`: all runs of a table or figure of the paper, and a report on them."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from afield.cli.progress import show_progress
from afield.experiment.many_runs import run_all
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

    def run(self) -> None:
        console, started = Console(), time.monotonic()
        suite = SUITES[self.suite]
        out = self.out or Path("runs") / f"{self.suite}-{self.preset}"
        configs = suite.configs(self.preset, methods=self.methods or None, seeds=self.seeds, precision=self.precision)
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
