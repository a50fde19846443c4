"""A snapshot of some state, and a journal of what came since, in a folder that one process holds at a time.

    journal = Journal(folder, "drift")
    journal.begin(rows, write)          write(name) puts a snapshot in place that names the new journal `name`
    journal.append([b"...", b"..."])    in one write; a process that is killed leaves it to the kernel
    read_journal(folder / name)         what was appended, up to the first record that is not whole

Until the snapshot is in place, the old one stands with its journal: at no moment is anything lost by kill -9.
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from afield.errors import Busy

_HEAD = struct.Struct("<II")  # bytes of the record, CRC-32 of this number and the record


class Journal:
    """The journal of one state in a folder; `stem` tells it from others."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder, self.stem = folder, stem
        self._file = -1

    def begin(self, mark: int, write_snapshot: Callable[[str], None]) -> None:
        """Put a snapshot in place, and begin the journal that it names; `mark` grows with what was appended."""
        name = f"{self.stem}-{mark}.log"
        new = os.open(self.folder / f".{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
        try:
            write_snapshot(name)
            os.replace(self.folder / f".{name}", self.folder / name)
        except BaseException:
            os.close(new)
            raise
        self.close()
        self._file = new
        for old in self.folder.glob(f"{self.stem}-*.log"):
            if old.name != name:
                old.unlink(missing_ok=True)

    def append(self, records: Iterable[bytes]) -> None:
        """What this returns from, the next process will read."""
        content = b"".join(_frame(record) for record in records)
        while content:
            content = content[os.write(self._file, content) :]

    def close(self) -> None:
        """Nothing is appended any more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_journal(file: Path) -> Iterator[bytes]:
    """The records of a journal, up to the first that is not whole; none if there is no file."""
    content = file.read_bytes() if file.is_file() else b""
    at = 0
    while at + _HEAD.size <= len(content):
        size, check = _HEAD.unpack_from(content, at)
        record = content[at + _HEAD.size : at + _HEAD.size + size]
        if len(record) < size or _check(record) != check:
            return
        yield record
        at += _HEAD.size + size


def lock_folder(folder: Path) -> int | None:
    """Hold a folder; the lock ends with the process, or with `unlock`. Without such locks nothing is held."""
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


def unlock(handle: int | None) -> None:
    """Let a folder go that `lock_folder` holds."""
    if handle is not None:
        with contextlib.suppress(OSError):
            os.close(handle)


def _frame(record: bytes) -> bytes:
    return _HEAD.pack(len(record), _check(record)) + record


def _check(record: bytes) -> int:
    return zlib.crc32(len(record).to_bytes(4, "little") + record)
