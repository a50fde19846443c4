"""`afield train` and `afield evaluate`: one run, and its metrics."""

import dataclasses
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.utils.data import TensorDataset

from afield.cli.progress import show_progress
from afield.experiment import run_folder
from afield.experiment.config import Config
from afield.experiment.evaluation import evaluate, evaluate_ood
from afield.experiment.launch import Processes, launch
from afield.experiment.many_runs import run_all
from afield.experiment.metric_name import MetricName
from afield.experiment.model_folder import open_model
from afield.experiment.one_run import run
from afield.experiment.run_folder import Run
from afield.experiment.task_parts import parts_of, predict_part
from afield.model.progress import track
from afield.settings import Settings
from afield.tasks.data import arrays

if TYPE_CHECKING:
    from lightning.fabric import Fabric

HEADLINES = ("accuracy", "ece", "nll", "rmse", "interval_coverage", "auroc", "confidence", "false_alarms", "rejected")


@dataclass(frozen=True)
class Train:
    """Train a method on a task: a run folder with the model, its predictions and all its metrics.

    Settings that are not given are the task's own: `afield train TASK --help` shows them. A run that was stopped goes
    on after its last epoch when the same command is given again. A finished run is only shown.
    """

    task: tyro.conf.Positional[str]
    """Name of a task: see the list below."""
    method: str = "sngp"
    """Name of a method: see the list below."""
    seed: int = 0
    """Of weights, batches and dropout masks. An ensemble of M has the members seed * M .. seed * M + M - 1."""
    data_seed: int = 0
    """Of data that is drawn at random, or the number of the split."""
    preset: str = "small"
    """Size of task and training: smoke (seconds), small (two cores), paper (as published)."""
    config: Path | None = None
    """A config.toml with everything that is not given here."""
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
    """Processes that train one model together on this node, each on a GPU or on a share of the CPU."""
    num_nodes: int = 1
    """Nodes that train one model together. All have to see the folder of runs."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """ddp: each process has the whole model; fsdp: during training, each process has a part of it."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: for several devices, GPUs where there are any; for one device, the CPU."""
    settings: Annotated[Settings, tyro.conf.arg(name="")] = field(default_factory=Settings)

    def run(self) -> None:
        config = Config(self.task, self.method, self.seed, self.data_seed, self.preset, self.settings)
        processes = Processes.of(self.devices, self.num_nodes, strategy=self.strategy, accelerator=self.accelerator)
        if processes.need_fabric:
            if self.jobs > 1 or self.cluster is not None:
                raise ValueError("--jobs and --cluster spread runs over processes, --devices one run: use one of them.")
            launch(processes, run_on_rank, config, self.out, self.fresh)
            return
        console = Console()
        with show_progress(console, [config], self.out, fresh=self.fresh) as bar:
            (finished,) = run_all(
                [config],
                self.out,
                jobs=self.jobs,
                cluster=self.cluster,
                cpus=self.cpus_per_run,
                fresh=self.fresh,
                on_progress=bar.on_progress,
                on_run=bar.on_run,
            )
        print_metrics(finished, console)


def run_on_rank(fabric: "Fabric", config: Config, out: Path, fresh: bool) -> None:
    """Make a run as one of the processes of a Fabric; the first process shows it."""
    if not fabric.is_global_zero:
        run(config, out, fresh=fresh, fabric=fabric)
        return
    console = Console()
    with Progress(*Progress.get_default_columns(), console=console, transient=True) as progress:
        title = f"{config.task} {config.method} {config.seed} on {fabric.world_size} processes"
        bar = progress.add_task(title, total=config.settings.epochs)
        finished = run(
            config,
            out,
            fresh=fresh,
            on_epoch=lambda epoch, loss: progress.update(bar, completed=epoch),
            fabric=fabric,
        )
    print_metrics(finished, console)


def defaults(arguments: list[str]) -> Train | None:
    """The defaults of the flags of `afield train`: the task's settings under the preset, or those of a config file.

    None if the arguments name neither task nor file; tyro then says what is missing.
    """
    words = [word for argument in arguments for word in argument.split("=", 1)]
    given = dict(itertools.pairwise(words))
    preset, file = given.get("--preset", "small"), given.get("--config")
    if file is not None:
        config = Config.from_file(Path(file))
    else:
        task = next((a for a in arguments if not a.startswith("-")), None)
        if task is None:
            return None
        config = Config.of(task, given.get("--method", "sngp"), preset=preset)
    return Train(config.task, config.method, config.seed, config.data_seed, config.preset, settings=config.settings)


@dataclass(frozen=True)
class Evaluate:
    """Load the model of a finished run, predict its task again and show all metrics; also on OOD data of your own."""

    folder: tyro.conf.Positional[Path]
    """A run folder, such as runs/two-moons/sngp/0."""
    ood: tuple[Path, ...] = ()
    """OOD data to evaluate it on: npz files with an array x of inputs like the task's."""
    all: bool = False
    """Show every metric, not only the most used."""

    def run(self) -> None:
        finished = run_folder.read(self.folder)
        opened = open_model(self.folder)
        assert opened.task is not None
        parts = parts_of(opened.task) | {f"ood/{file.stem}": _read_inputs(file) for file in self.ood}
        predictions = {name: predict_part(opened.predict, data) for name, data in track(parts.items(), "parts")}
        metrics = evaluate(opened.task, predictions)
        for file in self.ood:
            metrics |= evaluate_ood(predictions["test"], predictions[f"ood/{file.stem}"], file.stem, {})
        print_metrics(dataclasses.replace(finished, metrics=metrics), Console(), everything=self.all)


def print_metrics(finished: Run, console: Console, *, everything: bool = False) -> None:
    """Print the metrics and the cost of a run as a table."""
    table = Table(title=f"{finished.task}, {finished.method}, seed {finished.seed}")
    table.add_column("metric")
    table.add_column("value", justify="right")
    for text, value in finished.metrics.items():
        name = MetricName.parse(text)
        if everything or (name.metric in HEADLINES and name.data != "val" and not name.score):
            table.add_row(text, f"{value:.4f}")
    for text, value in finished.cost.items():
        table.add_row(text.replace("_", " "), f"{value:,.0f}" if value >= 100 else f"{value:.3g}")
    console.print(table)
    console.print(f"Everything is in [bold]{finished.folder}[/bold].", soft_wrap=True)


def _read_inputs(file: Path) -> TensorDataset:
    found = arrays(file)
    if "x" not in found:
        raise ValueError(f"{file} should hold an array named x, it has: {', '.join(found)}.")
    return TensorDataset(torch.from_numpy(found["x"]))
