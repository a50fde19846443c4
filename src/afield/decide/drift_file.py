"""A watch that outlives its process: a snapshot, and a journal of what came since.

    with WatchFile(folder, watch) as kept:        goes on with what is in the folder, if it is of the same watch
        kept.update(scores, classes, inputs)      as `Watch.update`

Rows are appended to the journal in one write for each call: nothing that `update` returned from is lost by kill -9. The
next process reads the snapshot, replays the journal, and is in the same state to the bit, because the numbers that
break ties are a function of the seed and the row. A record that was cut short is dropped. Every `SNAPSHOT` rows a new
snapshot is put in place in one step; it names a new journal.
"""

import contextlib
import io
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from afield.decide.drift import Watch, as_scores
from afield.decide.journal import Journal, lock_folder, read_journal, unlock
from afield.model.files import read_arrays, write_file

SNAPSHOT = 20_000  # rows
STATE = "drift.npz"
FORMAT = 2
_ROW = struct.Struct("<dq")  # score, class (-1: none); behind them the input as JSON, if it is kept
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
        self._lock = lock_folder(self.folder)
        self._journal = Journal(self.folder, "drift")
        try:
            self.watch = self._read() or watch
            self._snapshot()
        except BaseException:
            self._let_go()
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
        rows = range(before + 1, watch.rows + 1)
        self._journal.append(
            _ROW.pack(score, label) + (b"" if kept.get(row) is None else json.dumps(kept[row]).encode())
            for row, score, label in zip(rows, values.tolist(), labels.tolist(), strict=True)
        )
        if watch.rows - self._snapshot_rows >= SNAPSHOT:
            self._snapshot()
        return p_values

    def close(self) -> None:
        """Write a last snapshot, and let the folder go."""
        with contextlib.suppress(OSError):  # the journal has it all
            self._snapshot()
        self._let_go()

    def _read(self) -> Watch | None:
        """The watch as the last process left it; None: there is none, or it was of another model."""
        if not (self.folder / STATE).is_file():
            return None
        watch, about = load_watch(self.folder / STATE)
        if about.get("identity") != self.identity:
            return None
        for record in read_journal(self.folder / Path(str(about["journal"])).name):
            (score, label), shown = _ROW.unpack_from(record), record[_ROW.size :]
            watch.update([score], None if label < 0 else [label], [json.loads(shown)] if shown else None)
        return watch

    def _snapshot(self) -> None:
        """Replace snapshot and journal."""

        def write(name: str) -> None:
            save_watch(self.watch, self.folder / STATE, {"identity": self.identity, "journal": name})

        self._journal.begin(self.watch.rows, write)
        self._snapshot_rows = self.watch.rows

    def _let_go(self) -> None:
        self._journal.close()
        unlock(self._lock)
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
