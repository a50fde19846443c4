"""Mutated npy, npz, csv and parquet files for the reader of `afield score`.

Right is a message with the name of the file, or batches of numbers, rows first. An npz has sums over its bytes: what is
read from one must be what was written.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np

from afield.deploy.read_files import arrow, count, read
from bench.torture.fault import Inject, Kind, Lost, Refused, Wrong, refuse_or_fail
from bench.torture.mutations import mutate


@contextmanager
def opened(folder: Path) -> Iterator[Inject]:
    rows = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    contents = list(_contents(rows))

    def inject(random: Random) -> None:
        suffix, content, columns, id = random.choice(contents)
        path, done = folder / f"rows{suffix}", ""
        content = content if random.random() < 0.95 else random.randbytes(random.randint(0, 300))
        for _ in range(random.choice((1, 1, 1, 2, 5))):
            content, done = mutate(content, random)
        path.write_bytes(content)
        done = f"{path.name}: {done}"
        try:
            count(path)
            batches = [batch for batch, _ in read(path, columns, id, batch_size=5)]
        except MemoryError as error:
            raise Lost(f"{done}: MemoryError {error}") from error
        except OSError as error:  # which the command reports, and goes on
            if path.name not in str(error):
                raise Lost(f"{done}: {error!r} does not name the file") from error
            raise Refused(f"{done}: {error}") from error
        except Exception as error:
            refuse_or_fail(error, done, [path.name])
        if any(batch.ndim < 2 or batch.dtype.kind not in "biuf" for batch in batches):
            raise Wrong(f"{done}: read as {[(batch.dtype, batch.shape) for batch in batches][:3]}")
        if suffix == ".npz" and not (batches and np.array_equal(np.concatenate(batches), rows)):
            raise Wrong(f"{done}: other numbers were read than were written")

    yield inject


KIND = Kind("tables", "mutated npy, npz, csv and parquet files for `afield score`", opened, share=0.06, limit=20)


def _contents(rows: np.ndarray) -> Iterator[tuple[str, bytes, tuple[str, ...], str | None]]:
    """Suffix, content, columns and id."""
    file = io.BytesIO()
    np.save(file, rows)
    yield ".npy", file.getvalue(), (), None
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, x=rows)
        yield ".npz", file.getvalue(), (), None
    names = [f"c{i}" for i in range(rows.shape[1])]
    lines = [",".join(["id", *names]), *(f"r{i}," + ",".join(map(repr, row)) for i, row in enumerate(rows.tolist()))]
    csv = ("\n".join(lines) + "\n").encode()
    yield ".csv", csv, (), "id"
    yield ".csv", csv, ("c1", "c0"), None
    pyarrow, parquet = arrow()
    flat = pyarrow.table({name: rows[:, i] for i, name in enumerate(names)})
    nested = pyarrow.table({"x": rows.tolist(), "id": list(range(len(rows)))})
    for table, columns, id in ((flat, (), None), (nested, ("x",), "id")):
        for compression in ("none", "snappy"):
            file = io.BytesIO()
            parquet.write_table(table, file, compression=compression)
            yield ".parquet", file.getvalue(), columns, id
