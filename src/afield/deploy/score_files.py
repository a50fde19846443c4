"""Batch scoring: the answers of a model to every row of large files, written as Parquet, in constant memory.

    score_file(source, out, scorer, request)

A file is read (`read_files`), predicted and written in batches. Its answers are one Parquet file, a *part*, which
appears under its name when it is complete. A part records its input and its request (`stamp`), so the same call again
scores only what is missing or has changed, and refuses to mix answers of two models.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from afield.deploy import read_files
from afield.deploy.read_files import SUFFIXES, arrow
from afield.deploy.traced import ALPHA
from afield.prediction.prediction import Prediction
from afield.version import __version__

ROW_GROUP = 65536  # rows that are written at a time
ONE_REFERENCE = b"afield.one_reference"
"""In the metadata of a part: whether all its p-values have one reference, unlike those of an ensemble."""


@dataclass(frozen=True)
class Scorer:
    """A function that predicts, and the inputs that it takes.

    shape   of one row; None: as it comes
    labels  names of the classes; none: their numbers are written
    """

    predict: Callable[[Tensor], Prediction]
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] | None = None
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Request:
    """What is asked about every row.

    model    the hash of the model's weights
    columns  of Parquet and CSV, in the model's order; none given: all but `id`
    id       a column to copy beside the answers
    shape    of one row; None: the scorer's
    integers whether inputs are whole numbers, such as token ids
    alpha    rate of false alarms behind `accepted`; None: 0.01, or the smallest that the calibration can tell
    missing  rows with NaN, infinity or nothing: an error, or answered with nulls and refused
    labels   names of the classes, which are written
    found    the columns of the first table where none are chosen: all tables must have these
    """

    model: str
    columns: tuple[str, ...] = ()
    id: str | None = None
    shape: tuple[int, ...] | None = None
    integers: bool = False
    alpha: float | None = None
    missing: Literal["error", "refuse"] = "error"
    labels: tuple[str, ...] = ()
    found: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """An input file: where it is, and its name below the input folder."""

    path: Path
    name: str

    @property
    def part(self) -> Path:
        """The path of its answers, below the output folder."""
        return Path(self.name if self.name.endswith(".parquet") else f"{self.name}.parquet")


def sources(given: Path, out: Path) -> list[Source]:
    """The input files: one, or all in and below a folder, by name, without hidden ones and those below `out`."""
    if given.is_dir():
        below = [(path, path.relative_to(given)) for path in sorted(given.rglob("*")) if _may_be_read(path)]
        found = [
            Source(path.resolve(), name.as_posix())
            for path, name in below
            if not any(part[0] in "._" for part in name.parts) and out.resolve() not in path.resolve().parents
        ]
    elif given.is_file() and given.suffix in SUFFIXES:
        found = [Source(given.resolve(), given.name)]
    else:
        found = []
    if not found:
        raise ValueError(f"Scoring expects a file or a folder of files {', '.join(SUFFIXES)}, found none at {given}.")
    twice = [s.name for s in found if sum(s.part == other.part for other in found) > 1]
    if twice:
        raise ValueError(f"The answers to {' and '.join(twice)} would have the same name: rename one of them.")
    return found


def _may_be_read(path: Path) -> bool:
    return path.suffix in SUFFIXES and not path.is_dir()


def first_columns(found: Sequence[Source], id: str | None) -> tuple[str, ...]:
    """The columns, without `id`, of the first table that has any; a file that cannot be read is passed over here."""
    for source in found:
        with contextlib.suppress(Exception):  # `score_file` reports what is wrong
            if columns := read_files.columns_of(source.path, id):
                return columns
    return ()


def todo(found: Sequence[Source], out: Path, request: Request, *, fresh: bool = False) -> list[Source]:
    """The files whose part is missing, or older than the file."""
    wanted = []
    for source in found:
        before = {} if fresh else read_stamp(out / source.part)
        try:
            now = stamp(source, request)
        except OSError:  # `score_file` reports what is wrong
            wanted.append(source)
            continue
        changed = [
            f"{name} = {value} there, {now['request'].get(name)} now"
            for name, value in before.get("request", now["request"]).items()
            if value != now["request"].get(name)
        ]
        if changed:
            raise ValueError(
                f"{out} holds answers that were asked for otherwise ({'; '.join(changed)}). Use another --out, or "
                "--fresh to replace them."
            )
        if before.get("source") != now["source"] or before["request"].keys() != now["request"].keys():
            wanted.append(source)
    return wanted


def stamp(source: Source, request: Request) -> dict[str, Any]:
    """What a part records: its input file and the request."""
    status = source.path.stat()
    about = {"name": source.name, "bytes": status.st_size, "modified": status.st_mtime_ns}
    return {"afield": __version__, "source": about, "request": json.loads(json.dumps(asdict(request)))}


def read_stamp(part: Path) -> dict[str, Any]:
    """The stamp of a part; empty where there is none, or not a complete one of ours."""
    _, parquet = arrow()
    try:
        return json.loads(parquet.read_schema(part).metadata[b"afield"])
    except (OSError, ValueError, KeyError, TypeError):  # pyarrow's errors are ValueErrors and OSErrors
        return {}


def score_file(
    source: Source,
    out: Path,
    scorer: Scorer,
    request: Request,
    *,
    batch_size: int = 1024,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> Path | None:
    """Write the part of one file; None if the file has no rows. `on_rows` is called with the number of rows done."""
    pa, parquet = arrow()
    about, part, done = {b"afield": json.dumps(stamp(source, request))}, out / source.part, 0
    with contextlib.ExitStack() as stack:
        writer, waiting = None, []
        for values, ids in read_files.read(
            source.path, request.columns, request.id, batch_size, expected=request.found
        ):
            columns = {"file": pa.repeat(source.name, len(values)), "row": np.arange(done, done + len(values))}
            columns |= {} if ids is None else {"id": ids}
            x, bad = _prepare_inputs(source, values, done, scorer, request)
            prediction = _predict(source, scorer, x)
            waiting.append(pa.table(columns | _to_columns(prediction, bad, request.alpha, scorer.labels)))
            done += len(values)
            if writer is None:
                about[ONE_REFERENCE] = json.dumps(prediction.num_reference is not None)
                file = stack.enter_context(write_in_one_step(part))
                schema = waiting[0].schema.with_metadata(about)
                writer = stack.enter_context(parquet.ParquetWriter(file, schema, compression="zstd"))
            if sum(map(len, waiting)) >= ROW_GROUP:
                writer.write_table(pa.concat_tables(waiting).replace_schema_metadata(about))
                waiting = []
            on_rows(done)
        if writer is not None and waiting:
            writer.write_table(pa.concat_tables(waiting).replace_schema_metadata(about))
    return part if done else None


def answers(prediction: Prediction, alpha: float | None = None, labels: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The columns of a part, by name; answers that the model does not give have none."""
    if prediction.positions:
        return _answers_of_inputs(prediction, alpha)
    p, columns = prediction, {}
    if p.has_labels:
        raise ValueError("A file of answers has one class a row, and this model has several labels: use model.predict.")
    if p.probs is not None:
        chosen = p.labels
        if labels and len(labels) != p.probs.shape[1]:
            raise ValueError(f"The model has {p.probs.shape[1]} classes, but {len(labels)} labels are given.")
        columns["label"] = np.array(labels)[chosen.numpy()] if labels else chosen.numpy()
        columns["probability"] = p.probs.gather(1, chosen[:, None])[:, 0].numpy()
    else:
        columns["mean"] = p.mean.numpy()
        if p.variance is not None:
            columns["std"] = p.std.numpy()
    if p.probs is not None or p.variance is not None:
        columns["score"] = p.score().numpy()
    if p.variance is not None:
        columns["variance"] = p.score("variance").numpy()
    if p.p_value is not None:
        alpha = max(ALPHA, p.smallest_p_value or 0.0) if alpha is None else alpha
        columns |= {"p_value": p.p_value.numpy(), "accepted": p.accept(alpha).numpy()}
    elif alpha is not None:
        raise ValueError(
            f"alpha = {alpha:g} needs p-values, and this model was never calibrated. Call afield.calibrate(model, "
            "held_out_loader) before saving it, or leave alpha out."
        )
    return columns


def _answers_of_inputs(p: Prediction, alpha: float | None) -> dict[str, np.ndarray]:
    """Of inputs as a whole: a row of a file is an input, and has no room for an answer at every position."""
    if p.input_score is None or p.input_p_value is None or p.num_inputs is None:
        raise ValueError(
            f"The model answers at positions {p.positions} of every input, and what is written is about inputs as a "
            "whole, which needs calibration: call afield.calibrate(model, held_out_loader) before saving it."
        )
    accepted = p.accept_inputs(max(ALPHA, 1 / (p.num_inputs + 1)) if alpha is None else alpha)
    return {"score": p.input_score.numpy(), "p_value": p.input_p_value.numpy(), "accepted": accepted.numpy()}


# Predicting


def _prepare_inputs(
    source: Source, values: np.ndarray, first: int, scorer: Scorer, request: Request
) -> tuple[Tensor, Tensor]:
    """The rows as the model takes them, and which of them hold NaN or infinity; those are set to zero."""
    shape = request.shape or scorer.shape or values.shape[1:]
    if np.prod(values.shape[1:], dtype=int) != np.prod(shape, dtype=int):
        raise ValueError(
            f"{source.name} has rows of shape {values.shape[1:]}, the model expects {tuple(shape)}. Choose columns "
            "with --columns, or give --shape."
        )
    plain = values if values.dtype.kind == "f" or values.itemsize == 1 else values.astype(np.int64)
    raw = torch.from_numpy(plain.astype(plain.dtype.newbyteorder("="), copy=False)).reshape(len(values), *shape)
    bad = ~raw.isfinite().flatten(1).all(1)
    x = raw.masked_fill(bad.reshape(-1, *[1] * len(shape)), 0).to(scorer.dtype)
    bad |= ~x.isfinite().flatten(1).all(1)  # too large for the model's dtype
    if bool(bad.any()) and request.missing == "error":
        rows = (first + bad.nonzero().flatten()).tolist()
        more = f" and {len(rows) - 5} more" if len(rows) > 5 else ""
        raise ValueError(
            f"{source.name}: a value is missing, NaN or infinite in row {', '.join(map(str, rows[:5]))}{more} (the "
            "first is row 0). Mend them, or give --missing refuse."
        )
    return x.masked_fill(bad.reshape(-1, *[1] * len(shape)), 0), bad


def _predict(source: Source, scorer: Scorer, x: Tensor) -> Prediction:
    try:
        with torch.no_grad():
            return scorer.predict(x)
    except (RuntimeError, IndexError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{source.name}: the model does not take its rows. {error}") from error


def _to_columns(prediction: Prediction, bad: Tensor, alpha: float | None, labels: Sequence[str]) -> dict[str, Any]:
    pa, _ = arrow()
    columns = answers(prediction, alpha, labels)
    mask = bad.numpy()
    if mask.any() and "accepted" in columns:
        columns["accepted"] = columns["accepted"] & ~mask
    return {name: _to_column(pa, a, None if name == "accepted" else mask) for name, a in columns.items()}


def _to_column(pa: Any, values: np.ndarray, mask: np.ndarray | None) -> Any:
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim == 1:
        return pa.array(values, mask=mask)
    flat = pa.array(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1], mask=None if mask is None else pa.array(mask))


# Writing


@contextlib.contextmanager
def write_in_one_step(path: Path) -> Iterator[Path]:
    """A temporary path to write to. It becomes `path`, flushed to disk, unless there was an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.unfinished")  # hidden: readers of the folder pass it over
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
