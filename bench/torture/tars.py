"""Tar archives with links, devices and paths that lead out, for the unpacking of data sets.

Right is `DataDamaged`, or regular files below the folder. Nothing outside may change.
"""

import io
import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from afield.tasks.data import unpack
from bench.torture.fault import Inject, Kind, Wrong, refuse_or_fail
from bench.torture.mutations import mutate

NAMES = (
    *(
        "set/a",
        "set/b/c",
        "set",
        "../out",
        "set/../../out",
        "/tmp/torture-out",
        "set/a/../../..",
        ".",
        "..",
        "",
        "a\\b",
    ),
    *("set/\n", "s" * 300, "set/" * 60 + "x", "C:/x", "set/ü", "link", "link/x"),
)
TYPES = (
    *(tarfile.REGTYPE,) * 6,
    *(tarfile.DIRTYPE,) * 3,
    *(tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.CONTTYPE),
    tarfile.GNUTYPE_SPARSE,
)


@contextmanager
def opened(folder: Path) -> Iterator[Inject]:
    inside = folder / "cache"

    def inject(random: Random) -> None:
        shutil.rmtree(inside, ignore_errors=True)
        inside.mkdir()
        (folder / "secret").write_text("secret")
        content, done = _archive(random)
        if random.random() < 0.5:
            content, more = mutate(content, random)
            done += f", {more}"
        (folder / "archive").write_bytes(content)
        before = set(os.listdir(folder))
        try:
            unpack(folder / "archive", inside / "unpacked", "https://example.org/set.tar")
        except Exception as error:
            refuse_or_fail(error, done, ["https://example.org/set.tar"])
        finally:
            _check(folder, inside, before, done)

    yield inject


KIND = Kind("tars", "archives with links, devices and paths that lead out", opened, share=0.04, limit=20)


def _archive(random: Random) -> tuple[bytes, str]:
    file, done = io.BytesIO(), []
    mode = random.choice(("w", "w", "w:gz", "w:xz", "w:bz2"))
    harmless = random.random() < 0.2
    kind = random.choice((tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))
    with tarfile.open(fileobj=file, mode=mode, format=kind) as tar:
        for number in range(random.randint(1, 4)):
            member = tarfile.TarInfo(f"set/{number}" if harmless else random.choice(NAMES))
            member.type = tarfile.REGTYPE if harmless else random.choice(TYPES)
            member.linkname = random.choice(("../../secret", "/etc/passwd", "set/a", "..", "."))
            member.mode = random.choice((0o644, 0o755, 0o4755, 0, 0o777))
            content = random.randbytes(random.choice((0, 10, 600))) if member.isreg() else b""
            member.size = len(content)
            try:
                tar.addfile(member, io.BytesIO(content))
            except ValueError:  # a name that this format cannot hold
                continue
            done.append(f"{member.name[:20]!r} of type {member.type!r}")
    return file.getvalue(), f"{mode}: {', '.join(done)}"


def _check(folder: Path, inside: Path, before: set[str], done: str) -> None:
    if set(os.listdir(folder)) != before or os.listdir(inside) not in ([], ["unpacked"]):
        raise Wrong(f"{done}: something was written outside of the folder")
    if (folder / "secret").read_text() != "secret" or Path("/tmp/torture-out").exists():
        raise Wrong(f"{done}: a file outside of the folder was changed")
    for place, folders, files in os.walk(inside):
        for name in (*folders, *files):
            path = Path(place, name)
            if (
                path.is_symlink()
                or not (path.is_file() or path.is_dir())
                or (path.stat().st_nlink > 1 and path.is_file())
            ):
                raise Wrong(f"{done}: {name!r} is neither a regular file nor a folder")
