"""Progress of runs on the terminal: one bar over all epochs, with the time that remains."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from afield.experiment import many_runs
from afield.experiment.config import Config
from afield.experiment.run_folder import Run


class Watch:
    """What `many_runs.run_all` tells, as a bar."""

    def __init__(self, progress: Progress, configs: Sequence[Config], out: many_runs.Where, fresh: bool) -> None:
        singles, ensembles = many_runs.plan(configs)
        self._left = {c: c.settings.epochs for c in many_runs.missing(singles, out, fresh)}
        self._count, self._done = len(self._left) + len(ensembles), 0
        self._progress = progress
        self._bar = progress.add_task("", total=max(1, sum(self._left.values())), what="", runs="")
        self._tell("")

    def on_event(self, event: many_runs.Event) -> None:
        config, epoch, epochs, loss = event
        gained = self._left.get(config, 0) - (epochs - epoch)
        self._left[config] = epochs - epoch
        self._progress.update(self._bar, advance=max(0, gained))
        self._tell(f"{config.task} {config.method} {config.seed}, loss {loss:.4f}")

    def on_run(self, run: Run) -> None:
        self._done += 1
        config = Config.from_dict(run.config)
        self._progress.update(self._bar, advance=self._left.pop(config, 0))
        self._tell(f"{run.task} {run.method} {run.seed} finished")

    def _tell(self, what: str) -> None:
        self._progress.update(self._bar, runs=f"{self._done}/{self._count} runs", what=what)


def run_watched(
    console: Console,
    configs: Sequence[Config],
    out: many_runs.Where,
    *,
    jobs: int = 1,
    cluster: str | None = None,
    cpus: int = 1,
    fresh: bool = False,
    excused: tuple[type[Exception], ...] = (),
) -> list[Run]:
    """`many_runs.run_all` under a bar; `cluster` is the address of one."""
    columns = (
        TextColumn("{task.fields[runs]}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        watch = Watch(progress, configs, out, fresh)
        return many_runs.run_all(
            configs,
            out,
            jobs=jobs,
            address=cluster,
            cpus=cpus,
            fresh=fresh,
            excused=excused,
            on_event=watch.on_event,
            on_run=watch.on_run,
        )
