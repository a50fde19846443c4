"""A progress bar over the epochs of all runs, with the time that remains."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from afield.experiment.config import Config
from afield.experiment.many_runs import EpochDone, OutFolder, split_ensembles, unfinished
from afield.experiment.run_folder import Run


class ProgressBar:
    """Its methods are what `many_runs.run_all` calls after every epoch and every run."""

    def __init__(self, progress: Progress, configs: Sequence[Config], out: OutFolder, *, fresh: bool) -> None:
        singles, ensembles = split_ensembles(configs)
        self._epochs_left = {c: c.settings.epochs for c in unfinished(singles, out, fresh=fresh)}
        self._num_runs, self._num_finished = len(self._epochs_left) + len(ensembles), 0
        self._progress = progress
        self._bar = progress.add_task("", total=max(1, sum(self._epochs_left.values())), message="", runs="")
        self._show("")

    def on_progress(self, event: EpochDone) -> None:
        left = event.epochs - event.epoch
        gained = self._epochs_left.get(event.config, 0) - left
        self._epochs_left[event.config] = left
        self._progress.update(self._bar, advance=max(0, gained))
        self._show(f"{event.config.task} {event.config.method} {event.config.seed}, loss {event.loss:.4f}")

    def on_run(self, run: Run) -> None:
        self._num_finished += 1
        config = Config.from_dict(run.config)
        self._progress.update(self._bar, advance=self._epochs_left.pop(config, 0))
        self._show(f"{run.task} {run.method} {run.seed} finished")

    def _show(self, message: str) -> None:
        self._progress.update(self._bar, runs=f"{self._num_finished}/{self._num_runs} runs", message=message)


@contextmanager
def show_progress(
    console: Console, configs: Sequence[Config], out: OutFolder, *, fresh: bool = False
) -> Iterator[ProgressBar]:
    """A bar for `many_runs.run_all` with the same arguments; it disappears at the end."""
    columns = (
        TextColumn("{task.fields[runs]}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[message]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield ProgressBar(progress, configs, out, fresh=fresh)
