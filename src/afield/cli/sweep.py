"""`afield sweep`: settings chosen on validation data alone.

Every combination of the grid is one training, a run folder without test figures; amplitudes are judged on the trained
model. Chosen are

1. the settings, other than bound and amplitude, under which the best validation NLL was reached;
2. among these the bound as the paper has it: the smallest that keeps the accuracy, within one standard error of the
   best (for real targets: the best NLL);
3. with that bound, the amplitude with the best NLL.

A training that diverges is told of and left out. Trials live in an optuna study on disk, so that a killed sweep goes
on, and in choice.json, to be kept as a record.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from afield.cli.progress import run_watched
from afield.errors import Diverged
from afield.experiment import one_run, run_folder
from afield.experiment.config import Config
from afield.experiment.evaluation import evaluate_targets, targets
from afield.experiment.training import batches
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
    """Settings and amplitude (None: calibrated, or there is none) with their validation figures."""

    changes: Changes
    amplitude: float | None
    nll: float
    accuracy: float | None
    count: int

    @property
    def others(self) -> Changes:
        """The settings but for the bound."""
        return {name: value for name, value in self.changes.items() if name != "bound"}


def sweep(asked: Sweep, console: Console) -> Config:
    """Run what is missing, choose, tell and write the choice."""
    folder = asked.out / f"{asked.task}-{asked.method}-{asked.preset}-{asked.seed}"
    epochs = {} if asked.epochs is None else {"epochs": asked.epochs}
    base = Config.of(asked.task, asked.method, seed=asked.seed, preset=asked.preset, **epochs)
    tried = combinations(asked.grid)
    configs = {
        _name(changes): replace(base, settings=replace(base.settings, **changes), blind=True) for changes in tried
    }
    names = {config: name for name, config in configs.items()}
    run_watched(
        console,
        list(configs.values()),
        lambda config: folder / names[config],
        jobs=asked.jobs,
        cluster=asked.cluster,
        cpus=asked.cpus_per_run,
        excused=(Diverged,),
    )
    study = _study(folder)
    for (name, config), changes in zip(configs.items(), tried, strict=True):
        _judge(study, changes, folder / name / config.folder, asked.amplitudes)
    trials = [t for t in read(study) if t.changes in tried]
    diverged = [changes for changes in tried if changes not in [t.changes for t in trials]]
    if not trials:
        raise Diverged(f"All {len(tried)} trainings of the sweep diverged: try smaller learning rates.")
    chosen = choose(trials)
    result = replace(base, settings=replace(base.settings, **chosen.changes, amplitude=chosen.amplitude))
    run_folder.write(folder / CHOICE, run_folder.to_toml(result.to_dict()))
    record = {
        "config": result.to_dict(),
        "chosen": asdict(chosen),
        "trials": [asdict(t) for t in trials],
        "diverged": diverged,
    }
    run_folder.write_json(folder / RECORD, record)
    _tell(trials, diverged, chosen, console)
    console.print(f"Train with it: [bold]afield train --config {folder / CHOICE}[/bold]", soft_wrap=True)
    return result


def combinations(grid: Sequence[str]) -> list[Changes]:
    """All combinations of name=value,value,... as settings."""
    known = {f.name: getattr(Settings(), f.name) for f in fields(Settings)}
    axes: dict[str, list[Any]] = {}
    for text in grid:
        name, _, values = text.replace("-", "_", text.split("=")[0].count("-")).partition("=")
        if name not in known or name == "amplitude":
            raise ValueError(f"A sweep's grid expects NAME=VALUE,VALUE with a name of docs/settings.md, got {text!r}.")
        axes[name] = [_value(name, value, known[name]) for value in values.split(",")]
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def choose(trials: Sequence[Trial]) -> Trial:
    """By the three steps above."""
    others = min(trials, key=lambda t: t.nll).others
    trials = [t for t in trials if t.others == others]
    accuracies = [t.accuracy for t in trials if t.accuracy is not None]
    if accuracies and "bound" in trials[0].changes:
        best, count = max(accuracies), trials[0].count
        error = math.sqrt(max(best * (1 - best), 1 / count) / count)
        bound = min(t.changes["bound"] for t in trials if t.accuracy is not None and t.accuracy >= best - error)
        trials = [t for t in trials if t.changes["bound"] == bound]
    return min(trials, key=lambda t: t.nll)


def read(study: Any) -> list[Trial]:
    """The finished trials of a study."""
    found = [Trial(**t.user_attrs) for t in study.trials if t.state.is_finished() and t.user_attrs]
    for trial in found:
        trial.changes.update({name: tuple(v) for name, v in trial.changes.items() if isinstance(v, list)})  # from JSON
    return found


def _judge(study: Any, changes: Changes, folder: Path, amplitudes: Sequence[float]) -> None:
    """Add the trials of one trained model that the study lacks; none if it diverged."""
    finished = run_folder.read(folder) if run_folder.finished(folder) else None
    if finished is None or "nll/val" not in finished.metrics:
        return
    known = [t.amplitude for t in read(study) if t.changes == changes]
    if None not in known:
        figures, count = finished.metrics, len(finished.prediction("val"))
        trial = Trial(changes, None, figures["nll/val"], figures.get("accuracy/val"), count)
        study.add_trial(_recorded(trial))
    wanted = [a for a in amplitudes if a not in known]
    if not wanted or finished.prediction("val").variance is None:
        return
    task, method, model = one_run.load(finished)
    if not isinstance(model, SNGP) or model.head.likelihood == "gaussian":  # where calibration has no amplitude
        return
    for amplitude in wanted:
        calibrate(model, batches(task.val), amplitude=amplitude, progress=False)
        figures = evaluate_targets(one_run.predict(method, model, task.val), targets(task.val), "val", task.scale)
        study.add_trial(
            _recorded(Trial(changes, amplitude, figures["nll/val"], figures["accuracy/val"], len(task.val)))
        )


def _study(folder: Path) -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ImportError('Sweeps need optuna: pip install "afield[sweep]".') from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    storage = f"sqlite:///{(folder / 'study.db').resolve()}"
    return optuna.create_study(study_name="sweep", storage=storage, load_if_exists=True)


def _recorded(trial: Trial) -> Any:
    from optuna.distributions import FloatDistribution
    from optuna.trial import create_trial

    numbers = {k: v for k, v in (trial.changes | {"amplitude": trial.amplitude}).items() if isinstance(v, int | float)}
    return create_trial(
        params=numbers,
        distributions=dict.fromkeys(numbers, FloatDistribution(0.0, 1e9)),  # all that optuna's plots need
        value=trial.nll,
        user_attrs=asdict(trial),
    )


def _tell(trials: Sequence[Trial], diverged: Sequence[Changes], chosen: Trial, console: Console) -> None:
    table = Table(title="On validation data")
    for column in (*chosen.changes, "amplitude", "accuracy", "NLL", ""):
        table.add_column(column.replace("_", " "), justify="right")
    for t in sorted(trials, key=lambda t: (_name(t.changes), t.amplitude or 0.0)):
        amplitude = "calibrated" if t.amplitude is None else f"{t.amplitude:g}"
        accuracy = "" if t.accuracy is None else f"{t.accuracy:.4f}"
        table.add_row(
            *map(_plain, t.changes.values()), amplitude, accuracy, f"{t.nll:.4f}", "chosen" if t == chosen else ""
        )
    for changes in diverged:
        table.add_row(*map(_plain, changes.values()), "", "", "diverged", "")
    console.print(table)


def _name(changes: Changes) -> str:
    """Of the folder of a combination."""
    return ",".join(f"{name}-{_plain(value)}" for name, value in changes.items()) or "as-is"


def _plain(value: Any) -> str:
    return ("+".join(value) or "none") if isinstance(value, tuple) else str(value)


def _value(name: str, text: str, default: Any) -> Any:
    """A value as the setting's type, told by its default."""
    try:
        if isinstance(default, int):
            return int(text)
        if isinstance(default, str):
            return text
        if isinstance(default, tuple):
            return (text,) if text else ()
        return None if text.lower() == "none" else float(text)
    except ValueError:
        raise ValueError(f"The setting {name} expects a number, got {text!r}.") from None
