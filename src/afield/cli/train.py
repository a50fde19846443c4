"""`afield train` and `afield evaluate`: one run, and its figures."""

import dataclasses
import itertools
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.utils.data import TensorDataset

from afield.cli.progress import run_watched
from afield.experiment import one_run, run_folder
from afield.experiment.config import Config
from afield.experiment.evaluation import evaluate, evaluate_ood
from afield.experiment.launch import Processes, launch
from afield.experiment.run_folder import Run
from afield.methods import METHODS
from afield.model.progress import track
from afield.settings import Settings
from afield.tasks import TASKS

if TYPE_CHECKING:
    from lightning.fabric import Fabric

HEADLINES = ("accuracy", "ece", "nll", "rmse", "interval_coverage", "auroc", "confidence", "false_alarms", "rejected")


@dataclass(frozen=True)
class Train:
    """Train a method on a task: a run folder with the model, its predictions and all its figures.

    Settings that are not given are the task's own: `afield train TASK --help` shows them. A run that was stopped goes
    on after its last epoch when the same command is given again; a finished run is only shown.
    """

    task: tyro.conf.Positional[str]
    """Name of a task: see the list below."""
    method: str = "sngp"
    """Name of a method: see the list below."""
    seed: int = 0
    """Of weights, batches and masks. An ensemble of M has the members seed * M .. seed * M + M - 1."""
    data_seed: int = 0
    """Of the data that is drawn, or the number of the split."""
    preset: str = "small"
    """Size of task and training: smoke (seconds), small (two cores), paper (as published)."""
    config: Path | None = None
    """A config.toml to take everything from that is not given here."""
    out: Path = Path("runs")
    """Folder of all runs."""
    fresh: bool = False
    """Start again from nothing, replacing what is there."""
    jobs: int = 1
    """Processes, for members of an ensemble."""
    cluster: str | None = None
    """A Ray cluster that makes the run, or the members of an ensemble: auto, local, HOST:PORT or ray://HOST:PORT."""
    cpus_per_run: int = 1
    """Cores, and threads, of a run on the cluster."""
    devices: int = 1
    """Processes that train one model together, on this node: a GPU each, or a share of the CPU."""
    num_nodes: int = 1
    """Machines that do so. All have to see the folder of runs."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """ddp: each has the whole model; fsdp: while training, each has a part of it."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda for several devices where there are any; one device is the CPU unless it says cuda."""
    settings: Annotated[Settings, tyro.conf.arg(name="")] = field(default_factory=Settings)

    def run(self) -> None:
        config = Config(self.task, self.method, self.seed, self.data_seed, self.preset, self.settings)
        METHODS.check(config.method)
        TASKS[config.task].settings_for(config.preset)
        processes = Processes.of(self.devices, self.num_nodes, self.strategy, self.accelerator)
        if not processes.alone:
            if self.jobs > 1 or self.cluster is not None:
                raise ValueError("--jobs and --cluster spread runs over processes, --devices one run: use one of them.")
            launch(processes, train_together, config, self.out, self.fresh)
            return
        console = Console()
        (finished,) = run_watched(
            console,
            [config],
            self.out,
            jobs=self.jobs,
            cluster=self.cluster,
            cpus=self.cpus_per_run,
            fresh=self.fresh,
        )
        show(finished, console)


def train_together(fabric: "Fabric", config: Config, out: Path, fresh: bool) -> None:
    """One run on all processes of a Fabric; the first shows it."""
    if not fabric.is_global_zero:
        one_run.run(config, out, fresh=fresh, fabric=fabric)
        return
    console = Console()
    with Progress(*Progress.get_default_columns(), console=console, transient=True) as progress:
        bar = progress.add_task(f"{config.task} {config.method} {config.seed} on {fabric.world_size} processes")

        def heard(epoch: int, epochs: int, loss: float) -> None:
            progress.update(bar, completed=epoch, total=epochs)

        finished = one_run.run(config, out, fresh=fresh, on_epoch=heard, fabric=fabric)
    show(finished, console)


def defaults(arguments: list[str]) -> Train | None:
    """What the flags of `afield train` start from: the task's settings under the preset, or a config file.

    None where the arguments do not say enough; tyro then says what is missing.
    """
    words = [word for argument in arguments for word in argument.split("=", 1)]
    given = dict(itertools.pairwise(words))
    preset, file = given.get("--preset", "small"), given.get("--config")
    if file is not None:
        config = Config.from_dict(tomllib.loads(Path(file).read_text(encoding="utf-8")))
    else:
        task = next((a for a in arguments if not a.startswith("-")), None)
        if task is None:
            return None
        config = Config.of(task, given.get("--method", "sngp"), preset=preset)
    return Train(config.task, config.method, config.seed, config.data_seed, config.preset, settings=config.settings)


@dataclass(frozen=True)
class Evaluate:
    """Load the model of a finished run, predict its task again and show all figures; or judge it on data of yours."""

    folder: tyro.conf.Positional[Path]
    """A run folder, such as runs/two-moons/sngp/0."""
    ood: tuple[Path, ...] = ()
    """OOD data to judge it on: npz files with an array x of inputs like the task's."""
    all: bool = False
    """Show every figure, not only the most used."""

    def run(self) -> None:
        finished = run_folder.read(self.folder)
        task, method, model = one_run.load(finished)
        parts = one_run.parts_of(task) | {f"ood/{file.stem}": _inputs(file) for file in self.ood}
        predictions = {name: one_run.predict(method, model, data) for name, data in track(parts.items(), "parts")}
        figures = evaluate(task, predictions)
        for file in self.ood:
            figures |= evaluate_ood(predictions["test"], predictions[f"ood/{file.stem}"], file.stem, {})
        show(dataclasses.replace(finished, metrics=figures), Console(), everything=self.all)


def show(run: Run, console: Console, *, everything: bool = False) -> None:
    """The figures of a run as a table."""
    table = Table(title=f"{run.task}, {run.method}, seed {run.seed}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, value in run.metrics.items():
        metric, part, *score = name.split("/")
        if everything or (metric in HEADLINES and part != "val" and not score):
            table.add_row(name, f"{value:.4f}")
    for name, value in run.cost.items():
        table.add_row(name.replace("_", " "), f"{value:,.0f}" if value >= 100 else f"{value:.3g}")
    console.print(table)
    console.print(f"Everything is in [bold]{run.folder}[/bold].", soft_wrap=True)


def _inputs(file: Path) -> TensorDataset:
    import numpy as np

    with np.load(file, allow_pickle=False) as arrays:
        if "x" not in arrays:
            raise ValueError(f"{file} should hold an array named x, it has: {', '.join(arrays.files)}.")
        return TensorDataset(torch.from_numpy(arrays["x"]))
