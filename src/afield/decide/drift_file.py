"""A watch that outlives its process: a snapshot, and a journal of what came since.

    with WatchFile(folder, watch) as kept:        goes on with what is in the folder, if it is of the same watch
        kept.update(scores, classes, inputs)      as `Watch.update`

Rows are appended to the journal in one write for each call, and a process that is killed leaves them to the kernel:
nothing that `update` returned from is lost by kill -9. The next process reads the snapshot, replays the journal, and is
in the same state to the bit, because the numbers that break ties are a function of the seed and the row. A record that
was cut short is dropped. Every `SNAPSHOT` rows a new snapshot is put in place in one step; it names a new journal.
"""

import contextlib
import io
import json
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from afield.decide.drift import Watch, as_scores
from afield.errors import Busy
from afield.model.files import read_arrays, write_file

SNAPSHOT = 20_000  # rows
STATE = "drift.npz"
FORMAT = 1
_RECORD = struct.Struct("<dqII")  # score, class (-1: none), bytes of the input as JSON, CRC-32
_ABOUT = "about"


class WatchFile:
    """A `Watch` in a folder; one process at a time.

    identity  what the watch is of, such as the hash of a model: the state of another one is replaced

    `update` is that of the watch; `watch` is the watch itself.

    >>> with WatchFile("state", afield.drift.watch_model(model)) as kept:
    ...     p_values = kept.update(p.score())
    >>> with WatchFile("state", afield.drift.watch_model(model)) as kept:  # another process goes on
    ...     kept.watch.rows
    300
    """

    def __init__(self, folder: str | os.PathLike[str], watch: Watch, *, identity: str = "") -> None:
        self.folder, self.identity = Path(folder), identity
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.folder)
        self._journal = -1
        try:
            self.watch = self._read() or watch
            self._snapshot()
        except BaseException:
            self._unlock()
            raise

    def __enter__(self) -> "WatchFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, scores: Any, classes: Any = None, inputs: Sequence[Any] | None = None) -> np.ndarray:
        """As `Watch.update`; what it returns from, the next process will know."""
        watch, before = self.watch, self.watch.rows
        p_values = watch.update(scores, classes, inputs)
        kept = {entry.row: entry.input for entry in watch.smallest if entry.row > before}
        values = as_scores(scores)
        labels = np.full(len(values), -1) if watch.num_classes is None else np.asarray(classes)
        records = (
            _pack(score, label, kept.get(row))
            for row, score, label in zip(
                range(before + 1, watch.rows + 1), values.tolist(), labels.tolist(), strict=True
            )
        )
        os.write(self._journal, b"".join(records))
        if watch.rows - self._snapshot_rows >= SNAPSHOT:
            self._snapshot()
        return p_values

    def close(self) -> None:
        """Write a last snapshot, and let the folder go."""
        with contextlib.suppress(OSError):  # the journal has it all
            self._snapshot()
        os.close(self._journal)
        self._unlock()

    def _read(self) -> Watch | None:
        """The watch as the last process left it; None: there is none, or it was of another model."""
        if not (self.folder / STATE).is_file():
            return None
        watch, about = load_watch(self.folder / STATE)
        if about.get("identity") != self.identity:
            return None
        _replay(watch, self.folder / Path(str(about["journal"])).name)
        return watch

    def _snapshot(self) -> None:
        """Replace snapshot and journal. Until the snapshot is in place, the old ones stand."""
        name = f"drift-{self.watch.rows}.log"
        new = os.open(self.folder / f".{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        save_watch(self.watch, self.folder / STATE, {"identity": self.identity, "journal": name})
        os.replace(self.folder / f".{name}", self.folder / name)
        if self._journal >= 0:
            os.close(self._journal)
        self._journal, self._snapshot_rows = new, self.watch.rows
        for old in self.folder.glob("drift-*.log"):
            if old.name != name:
                old.unlink(missing_ok=True)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def save_watch(watch: Watch, file: Path, about: dict[str, Any]) -> None:
    """Write a watch in one step, with what else JSON can hold."""
    state, arrays = watch.state()
    text = json.dumps(about | {"format": FORMAT, "watch": state})
    content = io.BytesIO()
    np.savez(content, **arrays, **{_ABOUT: np.frombuffer(text.encode(), np.uint8)})  # type: ignore[arg-type]
    write_file(file, content.getvalue())


def load_watch(file: Path) -> tuple[Watch, dict[str, Any]]:
    """The watch of a file, and what was saved beside it."""
    try:
        arrays = read_arrays(file)
        about = json.loads(arrays.pop(_ABOUT).tobytes())
        if about["format"] != FORMAT:
            raise ValueError(f"it has format {about['format']}, expected {FORMAT}")
        return Watch.restore(about["watch"], arrays), about
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is no state of a watch, or damaged: {error}. Delete it to begin anew.") from error


def _pack(score: float, label: int, shown: Any) -> bytes:
    payload = b"" if shown is None else json.dumps(shown).encode()
    head = struct.pack("<dqI", score, label, len(payload))
    return head + struct.pack("<I", zlib.crc32(head + payload)) + payload


def _replay(watch: Watch, journal: Path) -> None:
    """Give the watch the rows of a journal, up to the first record that is not whole."""
    content = journal.read_bytes() if journal.is_file() else b""
    at = 0
    while at + _RECORD.size <= len(content):
        score, label, size, check = _RECORD.unpack_from(content, at)
        payload = content[at + _RECORD.size : at + _RECORD.size + size]
        if len(payload) < size or zlib.crc32(content[at : at + _RECORD.size - 4] + payload) != check:
            break
        watch.update([score], None if label < 0 else [label], [json.loads(payload)] if size else None)
        at += _RECORD.size + size


def _lock(folder: Path) -> int | None:
    """Hold the folder; the lock ends with the process. Where there are no such locks, nothing is held."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise Busy(f"{folder} is in use by another process that watches for drift. Give each its own.") from error
    return handle
