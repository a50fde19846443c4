"""`afield score`: the answers of a trained model to every row of large files."""

import functools
import hashlib
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

from afield.cli.export import made
from afield.deploy import read_files, score_files
from afield.deploy.score_files import Request, Scorer, Source
from afield.experiment import one_run, ray_cluster, run_folder
from afield.model.saving import INDEX, load, read_index


@dataclass(frozen=True)
class Score:
    """Write label, probability, score, p-value, variance and decision for every row of files, as Parquet.

    OUT is a folder with one file of answers for each input file, in its rows' order. A stopped command goes on with
    the files that are not finished when it is given again; files that are new or have changed are scored then.
    """

    model: tyro.conf.Positional[Path]
    """A run folder, such as runs/two-moons/sngp/0; or a folder written by afield.save, with --net."""
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
        request = Request(
            identity(self.model), self.columns, self.id, self.shape, self.integers, self.alpha, self.missing
        )
        found = score_files.sources(self.input, self.out)
        try:
            with run_folder.locked(self.out):
                todo = score_files.todo(found, self.out, request, fresh=self.fresh)
                with _bar(console, todo) as told:
                    errors = (self._here if self.cluster is None else self._afar)(todo, request, told)
        except KeyboardInterrupt as stop:
            raise SystemExit("afield: stopped. The same command goes on with the unfinished files.") from stop
        if errors:
            more = f" ({len(errors)} of {len(todo)} files failed; the others are done.)" if len(todo) > 1 else ""
            raise ValueError(f"{errors[0]}{more}") from errors[0]
        _tell(console, found, todo, self.out, time.monotonic() - started)

    def _here(self, todo: list[Source], request: Request, told: Callable[[Any], None]) -> list[BaseException]:
        errors: list[BaseException] = []
        scorer = opened(self.model, self.net, self.integers) if todo else None
        for source in todo:
            assert scorer is not None
            try:
                heard = functools.partial(_forward, told, source.name)
                score_files.score_file(source, self.out, scorer, request, batch_size=self.batch_size, on_rows=heard)
            except (ValueError, OSError) as error:
                errors.append(error)
        return errors

    def _afar(self, todo: list[Source], request: Request, told: Callable[[Any], None]) -> list[BaseException]:
        assert self.cluster is not None
        model = (self.model.resolve(), self.net, self.integers)
        tasks = [((source, request, model, self.batch_size), self.out) for source in todo]
        return ray_cluster.spread(self.cluster, score_afar, tasks, cpus=self.cpus_per_file, on_event=told)


def identity(folder: Path) -> str:
    """The hash of a model's weights."""
    if (folder / INDEX).is_file():
        return str(read_index(folder)["tensors"]["sha256"])
    file = run_folder.read(folder).folder / run_folder.MODEL
    if not file.is_file():
        raise ValueError(f"{folder} is an ensemble and has no model of its own: score its members.")
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def opened(folder: Path, net: str | None, integers: bool) -> Scorer:
    """The model of a run folder, or of one written by afield.save."""
    if (folder / INDEX).is_file():
        if net is None:
            raise ValueError(
                f"{folder} was written by afield.save: give --net module:function, which makes its network."
            )
        model = load(folder, made(net))
        labels = read_index(folder)["metadata"].get("labels") or ()
        floating = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        return Scorer(model.predict, torch.int64 if integers else floating, labels=tuple(map(str, labels)))
    if net is not None or integers:
        raise ValueError(f"--net and --integers are for folders written by afield.save; {folder} is not one.")
    task, method, trained = one_run.load(run_folder.read(folder))
    example = task.test.tensors[0]
    return Scorer(lambda x: method.predict(trained, x), example.dtype, tuple(example.shape[1:]))


def score_afar(item: Any, out: Path, tell: ray_cluster.Tell) -> list[Path]:
    """On a node of the cluster: the part of one file."""
    source, request, (folder, net, integers), batch_size = item
    for path in (source.path, folder):
        if not path.exists():
            raise ValueError(
                f"{path} is not there on the node {platform.node()}: with --cluster, MODEL and INPUT must lie where "
                "every node sees them under the same path."
            )
    scorer = _cached(folder, net, integers, request.model)
    heard = functools.partial(_forward, tell, source.name)
    part = score_files.score_file(source, out, scorer, request, batch_size=batch_size, on_rows=heard)
    return [] if part is None else [part]


@functools.lru_cache(maxsize=1)
def _cached(folder: Path, net: str | None, integers: bool, identity: str) -> Scorer:
    """A worker has many files to score with one model."""
    return opened(folder, net, integers)


def _forward(tell: Callable[[Any], None], name: str, done: int) -> None:
    tell((name, done))


@contextmanager
def _bar(console: Console, todo: list[Source]) -> Iterator[Callable[[tuple[str, int]], None]]:
    """A bar over all rows; what it hears is (file, rows done)."""
    counts = [read_files.count(source.path) for source in todo]
    total = None if None in counts else sum(count or 0 for count in counts)
    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), TextColumn("left:"), TimeRemainingColumn())
    done: dict[str, int] = {}
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=total)

        def told(event: tuple[str, int]) -> None:
            done.update([event])  # not added up: a file may begin again
            progress.update(bar, completed=sum(done.values()))

        yield told


def _tell(console: Console, found: list[Source], todo: list[Source], out: Path, seconds: float) -> None:
    _, parquet = read_files.arrow()
    parts = [out / source.part for source in found if (out / source.part).is_file()]
    count = sum(parquet.read_metadata(part).num_rows for part in parts)
    before = f" ({len(found) - len(todo)} were done before)" if len(todo) < len(found) else ""
    console.print(
        f"{count:,} rows of {len(found)} files{before} scored in [bold]{out}{os.sep}[/bold], {seconds:.0f} s.",
        soft_wrap=True,
    )
    if parts and "p_value" not in parquet.read_schema(parts[0]).names:
        console.print("The model is not calibrated: there are no columns p_value and accepted.")
