"""`afield sweep`: choose settings on validation data alone.

Every combination of the grid is one training: a run folder without metrics on test data. Amplitudes are tried on the
trained models. Chosen are

1. the settings, other than bound and amplitude, under which the best validation NLL was reached;
2. among these the bound as the paper has it: the smallest that keeps the accuracy, within one standard error of the
   best (for real targets: the best NLL);
3. with that bound, the amplitude with the best NLL.

A training that diverges is listed and left out. Trials are kept in an optuna study on disk, so that a killed sweep
goes on, and in choice.json as a record.
"""

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import tyro
from rich.console import Console
from rich.table import Table

from afield.cli.progress import show_progress
from afield.errors import Diverged
from afield.experiment import run_folder
from afield.experiment.config import Config, describe_type, is_of
from afield.experiment.evaluation import evaluate_targets, targets
from afield.experiment.many_runs import run_all
from afield.experiment.model_folder import open_model
from afield.experiment.task_parts import predict_part
from afield.experiment.training import batches
from afield.gp.likelihoods import LIKELIHOODS
from afield.model.calibration import calibrate
from afield.model.sngp_model import SNGP
from afield.settings import Settings

CHOICE, RECORD = "choice.toml", "choice.json"
Changes = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """Choose settings of a method on validation data.

    Writes choice.toml, a config for `afield train --config`, and choice.json with all trials. The same command goes on
    after a stop.
    """

    task: tyro.conf.Positional[str]
    """Name of a task: see the list below."""
    method: str = "sngp"
    """Name of a method: see the list below."""
    seed: int = 0
    """Of every training."""
    preset: str = "small"
    """Size of task and training: smoke (seconds), small (two cores), paper (as published)."""
    grid: tuple[str, ...] = ("bound=0.5,0.8,0.9,0.95,1,2,6",)
    """Settings to try, each as name=value,value; all combinations."""
    amplitudes: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
    """Amplitudes to try, beside the one that calibration finds, where there is a Gaussian-process head."""
    epochs: int | None = None
    """Of every training; not given: the task's own."""
    jobs: int = 1
    """Trainings at a time, on this machine."""
    cluster: str | None = None
    """A Ray cluster that makes the trainings instead: auto, local, HOST:PORT or ray://HOST:PORT."""
    cpus_per_run: int = 1
    """Cores, and threads, of a training on the cluster, which makes as many at a time as it has room for."""
    out: Path = Path("runs/sweeps")
    """Folder of the sweep: one below it for each task and method."""

    def run(self) -> None:
        sweep(self, Console())


@dataclass(frozen=True)
class Trial:
    """Settings, amplitude and their metrics on validation data.

    changes    to the settings of the task
    amplitude  None: as calibrated, or the model has none
    count      examples that the metrics are from
    """

    changes: Changes
    amplitude: float | None
    nll: float
    accuracy: float | None
    count: int

    @property
    def others(self) -> Changes:
        """The settings but for the bound."""
        return {name: value for name, value in self.changes.items() if name != "bound"}


def sweep(command: Sweep, console: Console) -> Config:
    """Make the runs that are missing, choose, print all trials and write the choice."""
    folder = command.out / f"{command.task}-{command.method}-{command.preset}-{command.seed}"
    epochs = {} if command.epochs is None else {"epochs": command.epochs}
    base = Config.of(command.task, command.method, seed=command.seed, preset=command.preset, **epochs)
    grid = combinations(command.grid)
    configs = {
        _folder_name(changes): replace(base, settings=replace(base.settings, **changes), blind=True) for changes in grid
    }
    _run_grid(command, configs, folder, console)
    study = _open_study(folder)
    for (name, config), changes in zip(configs.items(), grid, strict=True):
        _add_trials(study, changes, folder / name / config.folder, command.amplitudes)
    trials = [t for t in read_trials(study) if t.changes in grid]
    diverged = [changes for changes in grid if changes not in [t.changes for t in trials]]
    if not trials:
        raise Diverged(f"All {len(grid)} trainings of the sweep diverged: try smaller learning rates.")
    chosen = choose(trials)
    choice = replace(base, settings=replace(base.settings, **chosen.changes, amplitude=chosen.amplitude))
    run_folder.write(folder / CHOICE, run_folder.to_toml(choice.to_dict()))
    record = {
        "config": choice.to_dict(),
        "chosen": asdict(chosen),
        "trials": [asdict(t) for t in trials],
        "diverged": diverged,
    }
    run_folder.write_json(folder / RECORD, record)
    _print_trials(trials, diverged, chosen, console)
    console.print(f"Train with it: [bold]afield train --config {folder / CHOICE}[/bold]", soft_wrap=True)
    return choice


def _run_grid(command: Sweep, configs: Mapping[str, Config], folder: Path, console: Console) -> None:
    """Make all runs, each in a folder of its name; those that diverge are left out."""
    names = {config: name for name, config in configs.items()}

    def out(config: Config) -> Path:
        return folder / names[config]

    runs = list(configs.values())
    with show_progress(console, runs, out) as bar:
        run_all(
            runs,
            out,
            jobs=command.jobs,
            cluster=command.cluster,
            cpus=command.cpus_per_run,
            ignore=(Diverged,),
            on_progress=bar.on_progress,
            on_run=bar.on_run,
        )


def combinations(grid: Sequence[str]) -> list[Changes]:
    """All combinations of name=value,value,... as settings."""
    known = {f.name for f in fields(Settings)}
    axes: dict[str, list[Any]] = {}
    for text in grid:
        name, _, values = text.replace("-", "_", text.split("=")[0].count("-")).partition("=")
        if name not in known or name == "amplitude":
            raise ValueError(f"A sweep's grid expects NAME=VALUE,VALUE with a name of docs/settings.md, got {text!r}.")
        axes[name] = [_parse_value(name, value) for value in values.split(",")]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def choose(trials: Sequence[Trial]) -> Trial:
    """The best trial by the three steps above."""
    others = min(trials, key=lambda t: t.nll).others
    trials = [t for t in trials if t.others == others]
    accuracies = [t.accuracy for t in trials if t.accuracy is not None]
    if accuracies and "bound" in trials[0].changes:
        best, count = max(accuracies), trials[0].count
        error = math.sqrt(max(best * (1 - best), 1 / count) / count)
        bound = min(t.changes["bound"] for t in trials if t.accuracy is not None and t.accuracy >= best - error)
        trials = [t for t in trials if t.changes["bound"] == bound]
    return min(trials, key=lambda t: t.nll)


def read_trials(study: Any) -> list[Trial]:
    """The finished trials of a study."""
    trials = [Trial(**t.user_attrs) for t in study.trials if t.state.is_finished() and t.user_attrs]
    for trial in trials:
        trial.changes.update({name: tuple(v) for name, v in trial.changes.items() if isinstance(v, list)})  # from JSON
    return trials


def _add_trials(study: Any, changes: Changes, folder: Path, amplitudes: Sequence[float]) -> None:
    """Add the trials of one run that the study lacks; none if the run diverged."""
    finished = run_folder.read(folder) if run_folder.is_finished(folder) else None
    if finished is None or "nll/val" not in finished.metrics:
        return
    known = [t.amplitude for t in read_trials(study) if t.changes == changes]
    if None not in known:
        metrics, count = finished.metrics, len(finished.prediction("val"))
        trial = Trial(changes, None, metrics["nll/val"], metrics.get("accuracy/val"), count)
        study.add_trial(_to_optuna(trial))
    wanted = [a for a in amplitudes if a not in known]
    if not wanted or finished.prediction("val").variance is None:
        return
    opened = open_model(folder)
    model, task = opened.model, opened.task
    assert task is not None
    if not isinstance(model, SNGP) or LIKELIHOODS[model.head.likelihood].noisy:  # where calibration has no amplitude
        return
    for amplitude in wanted:
        calibrate(model, batches(task.val), amplitude=amplitude, progress=False)
        metrics = evaluate_targets(predict_part(opened.predict, task.val), targets(task.val), "val", task.scale)
        trial = Trial(changes, amplitude, metrics["nll/val"], metrics["accuracy/val"], len(task.val))
        study.add_trial(_to_optuna(trial))


def _open_study(folder: Path) -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ImportError('Sweeps need optuna: pip install "afield[sweep]".') from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    storage = f"sqlite:///{(folder / 'study.db').resolve()}"
    return optuna.create_study(study_name="sweep", storage=storage, load_if_exists=True)


def _to_optuna(trial: Trial) -> Any:
    from optuna.distributions import FloatDistribution
    from optuna.trial import create_trial

    numbers = {k: v for k, v in (trial.changes | {"amplitude": trial.amplitude}).items() if isinstance(v, int | float)}
    return create_trial(
        params=numbers,
        distributions=dict.fromkeys(numbers, FloatDistribution(0.0, 1e9)),  # all that optuna's plots need
        value=trial.nll,
        user_attrs=asdict(trial),
    )


def _print_trials(trials: Sequence[Trial], diverged: Sequence[Changes], chosen: Trial, console: Console) -> None:
    table = Table(title="On validation data")
    for column in (*chosen.changes, "amplitude", "accuracy", "NLL", ""):
        table.add_column(column.replace("_", " "), justify="right")
    for t in sorted(trials, key=lambda t: (_folder_name(t.changes), t.amplitude or 0.0)):
        amplitude = "calibrated" if t.amplitude is None else f"{t.amplitude:g}"
        accuracy = "" if t.accuracy is None else f"{t.accuracy:.4f}"
        table.add_row(
            *map(_format, t.changes.values()), amplitude, accuracy, f"{t.nll:.4f}", "chosen" if t == chosen else ""
        )
    for changes in diverged:
        table.add_row(*map(_format, changes.values()), "", "", "diverged", "")
    console.print(table)


def _folder_name(changes: Changes) -> str:
    """The folder of a combination."""
    return ",".join(f"{name}-{_format(value)}" for name, value in changes.items()) or "as-is"


def _format(value: Any) -> str:
    return ("+".join(value) or "none") if isinstance(value, tuple) else str(value)


def _parse_value(name: str, text: str) -> Any:
    """A value of the setting: the first reading of the text that is of its type."""
    kind = get_type_hints(Settings)[name]
    readings: list[Any] = [{"none": None, "true": True, "false": False}.get(text.lower(), text)]
    for read in (float, int, lambda text: (text,) if text else ()):
        with contextlib.suppress(ValueError):
            readings.append(read(text))
    fitting = [value for value in readings if is_of(value, kind)]
    if not fitting:
        raise ValueError(f"The setting {name} expects {describe_type(kind)}, got {text!r}.")
    return fitting[0]
