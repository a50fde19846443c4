"""`afield score`: the answers of a trained model to every row of large files."""

import functools
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from afield.decide.drift import Watch, watch_model
from afield.deploy import flag_files, read_files, score_files, watch_files
from afield.deploy.flag_files import Selection
from afield.deploy.score_files import Request, Scorer, Source
from afield.experiment import ray_cluster, run_folder
from afield.experiment.model_folder import hash_weights, is_saved, open_model, read_labels
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction

OnRows = Callable[[tuple[str, int]], None]
"""Is called with the name of a file and how many of its rows are done."""


@dataclass(frozen=True)
class Score:
    """Write label, probability, score, p-value, variance and decision for every row of files, as Parquet.

    OUT is a folder with one file of answers for each input file, in the order of its rows. The same command, given
    again after a stop, scores the files that are not finished, are new or have changed.
    """

    model: tyro.conf.Positional[Path]
    """A run folder, such as runs/two-moons/sngp/0, or a folder written by afield.save, with --net."""
    input: tyro.conf.Positional[Path]
    """A file, or a folder of files, .npy, .npz, .parquet or .csv, with a row for each example."""
    out: Path
    """Folder of the answers."""
    net: str | None = None
    """Of a folder written by afield.save: the function that makes its network, as module:function."""
    columns: tuple[str, ...] = ()
    """Of Parquet and CSV: the model's inputs, in its order, or one column of lists; none given: all but --id."""
    id: str | None = None
    """Of Parquet and CSV: a column to copy beside the answers."""
    shape: tuple[int, ...] | None = None
    """Of one row, such as 3 32 32; not given: the task's, or as it comes."""
    integers: bool = False
    """Of a folder written by afield.save: inputs are whole numbers, such as token ids."""
    alpha: float | None = None
    """Rate of false alarms behind `accepted`; None: 0.01, or the smallest that the calibration can tell."""
    fdr: float | None = None
    """Add the column `flagged`: rows far from the training data, of which on average at most this part is in-domain."""
    watch: float | None = None
    """Watch the rows, in the order of the files, for drift: the probability that the alarm ever rings without any."""
    missing: Literal["error", "refuse"] = "error"
    """Rows with NaN, infinity or an empty cell: an error, or null answers that are not accepted."""
    batch_size: int = 1024
    """Rows at a time."""
    fresh: bool = False
    """Score everything again, replacing what is there."""
    cluster: str | None = None
    """A Ray cluster that scores the files, several at a time: auto, local, HOST:PORT or ray://HOST:PORT."""
    cpus_per_file: int = 1
    """Cores, and threads, for a file on the cluster."""

    def run(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"--batch-size must be at least 1, got {self.batch_size}.")
        console, started = Console(), time.monotonic()
        if self.shape is not None and any(size < 1 for size in self.shape):
            raise ValueError(f"--shape must be positive numbers, got {' '.join(map(str, self.shape))}.")
        if self.fdr is not None and not 0 < self.fdr < 1:
            raise ValueError(f"--fdr must lie strictly between 0 and 1, got {self.fdr}.")
        if self.watch is not None and not 0 < self.watch < 1:
            raise ValueError(f"--watch must lie strictly between 0 and 1, got {self.watch}.")
        sources = score_files.sources(self.input, self.out)
        request = Request(
            hash_weights(self.model),
            self.columns,
            self.id,
            self.shape,
            self.integers,
            self.alpha,
            self.missing,
            labels=read_labels(self.model),
            found=() if self.columns else score_files.first_columns(sources, self.id),
        )
        try:
            with run_folder.locked(self.out):
                todo = score_files.todo(sources, self.out, request, fresh=self.fresh)
                with _show_progress(console, todo) as on_rows:
                    if self.cluster is None:
                        errors = self._score_locally(todo, request, on_rows)
                    else:
                        errors = self._score_on_cluster(todo, request, on_rows, self.cluster)
                parts = [part for source in sources if (part := self.out / source.part).is_file()]
                selection = None if errors else self._select(parts)
                watch = None if errors or self.watch is None else self._watch(parts, self.watch, request.model)
        except KeyboardInterrupt as stop:
            raise SystemExit("afield: stopped. The same command goes on with the unfinished files.") from stop
        if errors:
            more = f" ({len(errors)} of {len(todo)} files failed; the others are done.)" if len(todo) > 1 else ""
            raise ValueError(f"{errors[0]}{more}") from errors[0]
        before = len(sources) - len(todo)
        _print_summary(console, parts, len(sources), before, self.out, time.monotonic() - started)
        if selection is not None:
            _print_selection(console, selection)
        if watch is not None:
            _print_watch(console, watch)

    def _watch(self, parts: list[Path], alpha: float, identity: str) -> Watch:
        """Count the rows of all parts that are not counted yet."""

        def begin() -> Watch:
            model = open_model(self.model, self.net).model
            if isinstance(model, SNGP) and model.head.calibrated:
                return watch_model(model, alpha=alpha, per_class=False)
            return Watch(alpha=alpha)

        return watch_files.watch_files(parts, self.out / watch_files.STATE, begin, identity=identity, alpha=alpha)

    def _select(self, parts: list[Path]) -> Selection | None:
        """Flag rows of all files together, or take flags away that an earlier command has left."""
        if self.fdr is not None:
            return flag_files.flag_files(parts, self.fdr)
        flag_files.unflag_files(parts)
        return None

    def _score_locally(self, todo: list[Source], request: Request, on_rows: OnRows) -> list[BaseException]:
        """Score the files one after the other in this process; return the errors."""
        errors: list[BaseException] = []
        if not todo:
            return errors
        scorer = open_scorer(self.model, self.net, integers=self.integers, p_values=self.fdr is not None)
        for source in todo:
            try:
                _score_file(source, self.out, scorer, request, self.batch_size, on_rows)
            except Exception as error:  # whatever is wrong with one file, the others are scored
                named = source.name in str(error) or source.path.name in str(error)
                errors.append(error if named else ValueError(f"{source.name}: {type(error).__name__}: {error}"))
        return errors

    def _score_on_cluster(
        self, todo: list[Source], request: Request, on_rows: OnRows, cluster: str
    ) -> list[BaseException]:
        """Score the files on a cluster; return the errors."""
        model = (self.model.resolve(), self.net, self.integers, self.fdr is not None)
        tasks = [((source, request, model, self.batch_size), self.out) for source in todo]
        return ray_cluster.run_on_cluster(cluster, score_on_node, tasks, cpus=self.cpus_per_file, on_progress=on_rows)


def open_scorer(folder: Path, net: str | None, *, integers: bool, p_values: bool = False) -> Scorer:
    """The model of a folder, as scoring uses it; `p_values`: it is an error if there are none."""
    if not is_saved(folder) and (net is not None or integers):
        raise ValueError(f"--net and --integers are for folders written by afield.save; {folder} is not one.")
    opened = open_model(folder, net)

    def predict(x: torch.Tensor) -> Prediction:
        prediction = opened.predict(x)
        if p_values and prediction.p_value is None:
            raise ValueError(flag_files.NO_P_VALUES)
        return prediction

    return Scorer(predict, torch.int64 if integers else opened.dtype, opened.shape, opened.labels)


def score_on_node(item: Any, out: Path, on_rows: OnRows) -> list[Path]:
    """Score one file on a node of the cluster; the files that were written."""
    source, request, (folder, net, integers, p_values), batch_size = item
    for path in (source.path, folder):
        if not path.exists():
            raise ValueError(
                f"{path} is not there on the node {platform.node()}: with --cluster, MODEL and INPUT must lie where "
                "every node sees them under the same path."
            )
    scorer = _cached_scorer(folder, net, integers, p_values, request.model)
    part = _score_file(source, out, scorer, request, batch_size, on_rows)
    return [] if part is None else [part]


@functools.lru_cache(maxsize=1)
def _cached_scorer(folder: Path, net: str | None, integers: bool, p_values: bool, identity: str) -> Scorer:
    """A worker scores many files with one model."""
    return open_scorer(folder, net, integers=integers, p_values=p_values)


def _score_file(
    source: Source, out: Path, scorer: Scorer, request: Request, batch_size: int, on_rows: OnRows
) -> Path | None:
    return score_files.score_file(
        source, out, scorer, request, batch_size=batch_size, on_rows=lambda rows: on_rows((source.name, rows))
    )


@contextmanager
def _show_progress(console: Console, todo: list[Source]) -> Iterator[OnRows]:
    """A bar over the rows of all files, and the function that moves it."""
    counts = [read_files.count(source.path) for source in todo]
    total = None if None in counts else sum(count or 0 for count in counts)
    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TextColumn("left:"), TimeRemainingColumn())
    done: dict[str, int] = {}
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=total)

        def on_rows(event: tuple[str, int]) -> None:
            done.update([event])  # not added up: a file may start again
            progress.update(bar, completed=sum(done.values()))

        yield on_rows


def _print_summary(console: Console, parts: list[Path], num_files: int, before: int, out: Path, seconds: float) -> None:
    _, parquet = read_files.arrow()
    count = sum(parquet.read_metadata(part).num_rows for part in parts)
    known = f" ({before} were done before)" if before else ""
    console.print(
        f"{count:,} rows of {num_files} files{known} scored in [bold]{out}{os.sep}[/bold], {seconds:.0f} s.",
        soft_wrap=True,
    )
    if parts and "p_value" not in parquet.read_schema(parts[0]).names:
        console.print("The model is not calibrated: there are no columns p_value and accepted.")


def _print_selection(console: Console, found: Selection) -> None:
    if found.flagged:
        text = f"{found.flagged:,} rows are flagged (p-values up to {found.threshold:.3g}); of such flags at most "
        text += f"{found.fdr:g} are in-domain on average."
    else:
        needed = math.ceil(found.rows * found.smallest / found.fdr)
        text = f"No row is flagged: the smallest p-value, {found.smallest:.3g}, would have to be that of "
        text += f"{needed:,} of {found.rows:,} rows at least. A larger reference has smaller ones."
    if found.any_dependence:
        text += " The p-values may depend on each other in any way, as those of an ensemble do; so fewer are flagged."
    console.print(text, soft_wrap=True, highlight=False)


def _print_watch(console: Console, watch: Watch) -> None:
    if watch.alarm is None:
        text = f"No drift is seen in {watch.rows:,} rows: evidence {watch.evidence:.2g}, the alarm rings at "
        text += f"{watch.line:.2g} (log10)."
    else:
        text = f"[bold]Drift[/bold]: the alarm rang at row {watch.alarm.row:,} of {watch.rows:,}; it began about row "
        text += f"{watch.alarm.began + 1:,}. Without drift it would ever ring with probability {watch.alpha:g} at most."
        most = ", ".join(f"{e.input['file']} row {e.input['row']}" for e in watch.smallest[:3])
        text += f"\nThe furthest rows: {most}."
    if not watch.num_reference:
        text += " The model is not calibrated: rows are compared with earlier rows alone."
    console.print(text, soft_wrap=True, highlight=False)
