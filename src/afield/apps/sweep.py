"""`afield sweep`: the spectral bound and the amplitude, chosen on validation data alone.

The paper's recipe: the smallest bound that keeps the accuracy, then the amplitude with the best validation NLL. A
bound keeps the accuracy if its validation accuracy is within one standard error of the best. Every bound is one
training, a run folder; amplitudes are judged on the trained model. Trials live in an optuna study on disk, so that a
killed sweep goes on.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from afield import experiment, runs
from afield.apps.progress import run_watched
from afield.calibrate import calibrate
from afield.convert import SNGP
from afield.engine import batches
from afield.experiment import Config
from afield.metrics import METRICS

CHOICE = "choice.toml"


@dataclass(frozen=True)
class Sweep:
    """Choose bound and amplitude of a method with a Gaussian-process head on validation data.

    Writes choice.toml, a config for `afield train --config`. The same command goes on after a stop.
    """

    task: tyro.conf.Positional[str]
    """Name of a task: see the list below."""
    method: str = "sngp"
    """A method with bounded layers and a Gaussian-process head."""
    seed: int = 0
    """Of every training."""
    preset: str = "small"
    """Size of task and training: smoke (seconds), small (two cores), paper (as published)."""
    bounds: tuple[float, ...] = (0.5, 0.8, 0.9, 0.95, 1.0, 2.0, 6.0)
    """Spectral bounds to try."""
    amplitudes: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
    """Amplitudes to try, beside the one that calibration finds."""
    epochs: int | None = None
    """Of every training; not given: the task's own."""
    jobs: int = 1
    """Trainings at a time."""
    out: Path = Path("runs/sweeps")
    """Folder of the sweep: one below it for each task and method."""

    def run(self) -> None:
        sweep(self, Console())


@dataclass(frozen=True)
class Trial:
    """One bound and amplitude (None: calibrated) with its validation figures."""

    bound: float
    amplitude: float | None
    accuracy: float
    nll: float
    count: int


def sweep(settings: Sweep, console: Console) -> Config:
    """Run what is missing, choose, tell and write the choice."""
    if not settings.bounds:
        raise ValueError("A sweep needs at least one bound.")
    folder = settings.out / f"{settings.task}-{settings.method}-{settings.preset}-{settings.seed}"
    changes = {} if settings.epochs is None else {"epochs": settings.epochs}
    base = Config.of(settings.task, settings.method, seed=settings.seed, preset=settings.preset, **changes)
    configs = {b: replace(base, settings=replace(base.settings, bound=b)) for b in sorted(set(settings.bounds))}

    def place(config: Config) -> Path:
        return folder / f"bound-{config.settings.bound:g}"

    run_watched(console, list(configs.values()), place, jobs=settings.jobs)
    study = _study(folder)
    for bound, config in configs.items():
        _judge(study, bound, place(config) / config.folder, settings.amplitudes)
    trials = read(study)
    chosen = choose([t for t in trials if t.bound in configs])
    result = replace(base, settings=replace(base.settings, bound=chosen.bound, amplitude=chosen.amplitude))
    runs.write(folder / CHOICE, runs.to_toml(result.to_dict()))
    _tell(trials, chosen, console)
    console.print(f"Train with it: [bold]afield train --config {folder / CHOICE}[/bold]", soft_wrap=True)
    return result


def choose(trials: Sequence[Trial]) -> Trial:
    """The smallest bound whose accuracy is within one standard error of the best; there, the smallest NLL."""
    best = max(trials, key=lambda t: t.accuracy)
    error = math.sqrt(max(best.accuracy * (1 - best.accuracy), 1 / best.count) / best.count)
    bound = min(t.bound for t in trials if t.accuracy >= best.accuracy - error)
    return min((t for t in trials if t.bound == bound), key=lambda t: t.nll)


def read(study: Any) -> list[Trial]:
    """The finished trials of a study."""
    return [Trial(**t.user_attrs) for t in study.trials if t.state.is_finished() and t.user_attrs]


def _judge(study: Any, bound: float, folder: Path, amplitudes: Sequence[float]) -> None:
    """Add the trials of one trained model that the study lacks."""
    known = {(t.bound, t.amplitude) for t in read(study)}
    wanted = [a for a in (None, *amplitudes) if (bound, a) not in known]
    if not wanted:
        return
    task, method, model = experiment.load(runs.read(folder))
    if not isinstance(model, SNGP) or task.settings.likelihood != "categorical":
        raise ValueError("A sweep needs a single model with a Gaussian-process head on a classification task.")
    y = task.val.tensors[-1]
    for amplitude in wanted:
        calibrate(model, batches(task.val), amplitude=amplitude, progress=False)
        prediction = experiment.predict(method, model, task.val)
        accuracy, nll = (METRICS[name](prediction, y) for name in ("accuracy", "nll"))
        trial = Trial(bound, amplitude, accuracy, nll, len(y))
        study.add_trial(_recorded(trial, float(model.head.amplitude)))


def _study(folder: Path) -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ImportError('Sweeps need optuna: pip install "afield[sweep]".') from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    storage = f"sqlite:///{(folder / 'study.db').resolve()}"
    return optuna.create_study(study_name="sweep", storage=storage, load_if_exists=True)


def _recorded(trial: Trial, amplitude: float) -> Any:
    from optuna.distributions import FloatDistribution
    from optuna.trial import create_trial

    positive = FloatDistribution(1e-9, 1e9, log=True)
    return create_trial(
        params={"bound": trial.bound, "amplitude": amplitude},
        distributions={"bound": positive, "amplitude": positive},
        value=trial.nll,
        user_attrs=vars(trial),
    )


def _tell(trials: Sequence[Trial], chosen: Trial, console: Console) -> None:
    table = Table(title="On validation data")
    for column in ("bound", "amplitude", "accuracy", "NLL", ""):
        table.add_column(column, justify="right")
    for t in _sorted(trials):
        amplitude = "calibrated" if t.amplitude is None else f"{t.amplitude:g}"
        mark = "chosen" if t == chosen else ""
        table.add_row(f"{t.bound:g}", amplitude, f"{t.accuracy:.4f}", f"{t.nll:.4f}", mark)
    console.print(table)


def _sorted(trials: Sequence[Trial]) -> Iterator[Trial]:
    yield from sorted(trials, key=lambda t: (t.bound, t.amplitude or 0.0))
