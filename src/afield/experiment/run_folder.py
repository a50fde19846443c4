"""Run folders: everything that is known of one run, in plain formats, written atomically.

    runs/<task>/<method>/<seed>/
        config.toml         what was asked for; the same file starts the same run again
        log.jsonl           one line for each epoch: loss and seconds
        checkpoint.pt       the last finished epoch, until the run is finished
        model.safetensors   all tensors of the model; an ensemble has none, its members have them
        predictions.npz     <part>/<field> of every `Prediction`; parts: val, test, shifted/NAME, ood/NAME, grid
        environment.json    versions, machine, command, times
        hashes.json         SHA-256 of the files whose change would go unnoticed, and of itself
        metrics.json        all metrics, and the cost; written last: a folder that has it is finished

A lock, which ends with its process, guards a folder that is being written. Reports read run folders and nothing else.

The hash of a file is written before the file. A kill between the two leaves a run that is not finished, and makes the
file again. Folders from before there were hashes are read as they are.
"""

import contextlib
import functools
import hashlib
import io
import json
import shutil
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from afield.errors import Busy, DamagedRun
from afield.model.files import hash_json, list_arrays, read_arrays, sweep_temporary, write_file
from afield.prediction.prediction import Prediction

CONFIG, LOG, CHECKPOINT, MODEL = "config.toml", "log.jsonl", "checkpoint.pt", "model.safetensors"
PREDICTIONS, ENVIRONMENT, METRICS = "predictions.npz", "environment.json", "metrics.json"
HASHES = "hashes.json"
_FIELDS = ("logits", "variance", "probs", "p_value")
_SCALARS = ("noise", "smallest_p_value", "num_reference")


@dataclass(frozen=True)
class Run:
    """A finished run, read from its folder.

    metrics  by name, `metric/data/score` as in `paper`
    cost     train_seconds, ms_per_example, parameters
    """

    folder: Path
    config: Mapping[str, Any]
    metrics: Mapping[str, float]
    cost: Mapping[str, float]
    environment: Mapping[str, Any]

    @property
    def task(self) -> str:
        return str(self.config["task"])

    @property
    def method(self) -> str:
        return str(self.config["method"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def parts(self) -> list[str]:
        """Names of the parts that have predictions."""
        return [name.removesuffix("/logits") for name in self._names if name.endswith("/logits")]

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of all arrays."""
        return self._names

    def prediction(self, part: str) -> Prediction:
        """The prediction of a part of the task, without members and hidden vectors."""
        fields: dict[str, Any] = {f: self.array(f"{part}/{f}") for f in _FIELDS if f"{part}/{f}" in self}
        fields |= {f: _number(self._read(f"{part}/{f}")) for f in _SCALARS if f"{part}/{f}" in self}
        return Prediction(**fields, likelihood=str(self._read(f"{part}/likelihood")))

    def array(self, name: str) -> Tensor:
        """Another array: train/x, train/y, grid/x, test/y, test/features (a few hundred rows, whose numbers are
        test/rows)."""
        return torch.from_numpy(self._read(name))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    @functools.cached_property
    def _names(self) -> tuple[str, ...]:
        """Of the arrays. What is read is checked here, once."""
        path = self.folder / PREDICTIONS
        check_hash(path)
        try:
            with path.open("rb") as file, zipfile.ZipFile(file) as archive:
                return tuple(list_arrays(archive))
        except FileNotFoundError:
            raise
        except Exception as error:  # a damaged zip can raise a dozen kinds
            raise damaged(path, f"{type(error).__name__}: {error}") from error

    def _read(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise KeyError(f"{self.folder / PREDICTIONS} has no array {name}.")
        try:
            return read_arrays(self.folder / PREDICTIONS, [name])[name]  # this array and no other
        except ValueError as error:
            raise damaged(self.folder / PREDICTIONS, f"it is {error}") from error


@dataclass(frozen=True)
class Results:
    """What a run has measured, before it is written.

    predictions  by part of the task
    arrays       by name: targets, and what pictures are drawn from
    metrics      by name, `metric/data/score`
    cost         train_seconds, ms_per_example, parameters
    """

    predictions: Mapping[str, Prediction]
    arrays: Mapping[str, Tensor]
    metrics: Mapping[str, float]
    cost: Mapping[str, float]


def _number(array: np.ndarray) -> Any:
    """A number, or one for each row."""
    return torch.from_numpy(array) if array.ndim else array.item()


def read(folder: Path) -> Run:
    """The finished run of a folder."""
    try:
        config = _parse(folder / CONFIG, tomllib.loads)
        measured = _parse(folder / METRICS, json.loads)
        environment = _parse(folder / ENVIRONMENT, json.loads)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not a finished run: it has no {Path(error.filename).name}.") from error
    if not all(isinstance(measured.get(name), dict) for name in ("metrics", "cost")):
        raise damaged(folder / METRICS, "it has no metrics and cost")
    if not {"task", "method", "seed"} <= config.keys():
        raise damaged(folder / CONFIG, "it has no task, method and seed")
    return Run(folder, config, measured["metrics"], measured["cost"], environment)


def _parse(file: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """The content of a TOML or JSON file that was found to be what was written."""
    content = read_file(file)
    try:
        values = parse(content.decode())
    except (ValueError, RecursionError) as error:
        raise damaged(file, str(error)) from error
    if not isinstance(values, dict):
        raise damaged(file, "it holds no names and values")
    return values


def damaged(file: Path, reason: str) -> DamagedRun:
    """The error for a file of a run folder that cannot be used."""
    return DamagedRun(
        f"{file} is damaged: {reason}. Run it again from nothing: give the same command with --fresh, or delete "
        f"{file.parent}."
    )


def read_file(file: Path) -> bytes:
    """The content of a file of a run folder, if it is what was written."""
    content = file.read_bytes()
    _compare(file, hashlib.sha256(content).hexdigest())
    return content


def check_hash(file: Path) -> str:
    """The SHA-256 of a file of a run folder, if it is what was written; the file may be large."""
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    _compare(file, found)
    return found


def _compare(file: Path, found: str) -> None:
    if read_hashes(file.parent).get(file.name, found) != found:
        raise damaged(file, f"its hash does not match {HASHES}, so it is not what the run has written")


def read_hashes(folder: Path) -> dict[str, str]:
    """The hashes of a folder's files, by name; none in folders from before there were any."""
    file = folder / HASHES
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
        if content["sha256"] == hash_json(content["files"]) and content.keys() == {"files", "sha256"}:
            return dict(content["files"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(file, str(error)) from error
    raise damaged(file, "the hash inside does not match")


def write_hashed(path: Path, content: str | bytes) -> None:
    """Write a file of a run folder, and its hash before it."""
    content = content.encode() if isinstance(content, str) else content
    hashes = read_hashes(path.parent) | {path.name: hashlib.sha256(content).hexdigest()}
    write_json(path.parent / HASHES, {"files": hashes, "sha256": hash_json(hashes)})
    write(path, content)


def find(root: Path) -> list[Run]:
    """All finished runs in and below a folder, by task, method and seed."""
    if not root.is_dir():
        raise ValueError(f"There is no folder {root}.")
    runs = [read(file.parent) for file in root.rglob(METRICS)]
    return sorted(runs, key=lambda run: (run.task, run.method, run.seed, str(run.folder)))


def is_finished(folder: Path) -> bool:
    return (folder / METRICS).is_file()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder; `Busy` if another process has locked it."""
    from filelock import FileLock, Timeout  # a dependency of torch

    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise Busy(
            f"{folder} is being written by another process. Wait for it, stop it, or choose another --out."
        ) from error


def tidy(folder: Path) -> None:
    """Delete the temporary files that killed processes have left in a locked folder."""
    sweep_temporary(folder, time.time())


def clear(folder: Path) -> None:
    """Delete everything in a locked folder but its lock."""
    for file in folder.iterdir():
        if file.name != ".lock":
            shutil.rmtree(file) if file.is_dir() else file.unlink()


def write(path: Path, content: str | bytes) -> None:
    """Write all of the content, or nothing."""
    write_file(path, content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    write(path, _to_json(value))


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def to_toml(values: Mapping[str, Any]) -> str:
    """Flat TOML without what is None. Strings, numbers, booleans and lists are written alike in JSON and TOML."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def append_log(folder: Path, line: Mapping[str, Any]) -> None:
    """Add a line to log.jsonl."""
    with (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of log.jsonl, without those that a kill has cut short."""
    lines = []
    for line in (folder / LOG).read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def write_results(folder: Path, results: Results, environment: Mapping[str, Any]) -> None:
    """Write what a run has measured, which finishes it: metrics.json comes last."""
    write_hashed(folder / PREDICTIONS, pack(results.predictions, results.arrays))
    write_hashed(folder / ENVIRONMENT, _to_json(environment))
    write_hashed(folder / METRICS, _to_json({"metrics": results.metrics, "cost": results.cost}))
    (folder / CHECKPOINT).unlink(missing_ok=True)


def evenly_spaced_rows(count: int, most: int) -> Tensor:
    """The numbers of at most `most` of `count` rows, from first to last: rows may be sorted by something."""
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64).round().long()


def pack(predictions: Mapping[str, Prediction], arrays: Mapping[str, Tensor]) -> bytes:
    """The content of predictions.npz. Numbers are kept in float32."""
    content: dict[str, np.ndarray] = {}
    for part, prediction in predictions.items():
        for name in _FIELDS:
            if (tensor := getattr(prediction, name)) is not None:
                content[f"{part}/{name}"] = tensor.detach().cpu().float().numpy()
        for name in _SCALARS:
            if (value := getattr(prediction, name)) is not None:
                content[f"{part}/{name}"] = np.array(value)
        content[f"{part}/likelihood"] = np.array(prediction.likelihood)
    for name, tensor in arrays.items():
        content[name] = tensor.detach().cpu().numpy()
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **content)  # type: ignore[arg-type]
    return buffer.getvalue()
