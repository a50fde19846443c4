"""Read files of any size in batches of rows.

    .npy            an array (rows, ...)
    .npz            the same, as the array x or the only one
    .parquet, .csv  a row for each example: columns of numbers, or one column of lists of numbers, nested or not

Memory does not grow with the file. Errors name the file.
"""

import contextlib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SUFFIXES = (".npy", ".npz", ".parquet", ".csv")
_CSV_BLOCK = 2**20  # bytes; pyarrow's own


def read(
    path: Path,
    columns: Sequence[str] = (),
    id: str | None = None,
    batch_size: int = 1024,
    *,
    expected: Sequence[str] = (),
) -> Iterator[tuple[np.ndarray, Any]]:
    """Yield batches (rows, ...) of a file, with the ids of the rows, or None where they have none.

    columns   of Parquet and CSV, in the order of the model; none: all but `id`
    expected  where no columns are chosen: those that a table must have, no more and no fewer, in the order to read them
    """
    if path.suffix in _ARRAY_READERS and (columns or id is not None):
        raise ValueError(f"{path.name} is an array and has no columns: --columns and --id are for Parquet and CSV.")
    try:
        if path.suffix in _ARRAY_READERS:
            yield from _read_array(path, batch_size)
            return
        if expected and not columns:
            _check_expected(path, columns_of(path, id), expected)
        yield from _read_table(path, columns or expected, id, batch_size)
    except ImportError:
        raise
    except Exception as error:  # zip, zlib, numpy and pyarrow raise a dozen kinds between them
        if isinstance(error, ValueError | OSError) and path.name in str(error):
            raise
        raise ValueError(f"{path.name} cannot be read: {error}") from error


def columns_of(path: Path, id: str | None = None) -> tuple[str, ...]:
    """The names of a table's columns without `id`, from the beginning of the file; none for an array."""
    if path.suffix in _ARRAY_READERS:
        return ()
    schema = arrow()[1].read_schema(path) if path.suffix == ".parquet" else _csv_schema(path)
    return tuple(name for name in schema.names if name != id)


def _check_expected(path: Path, found: Sequence[str], expected: Sequence[str]) -> None:
    if set(found) != set(expected):
        raise ValueError(
            f"{path.name} has the columns {', '.join(found)}, other files have {', '.join(expected)}. Choose the "
            "model's inputs with --columns."
        )


def count(path: Path) -> int | None:
    """The number of rows, from the header of the file; None for formats that have none there."""
    with contextlib.suppress(Exception):  # `read` reports what is wrong
        if path.suffix == ".parquet":
            return int(arrow()[1].read_metadata(path).num_rows)
        if path.suffix == ".npy":
            return len(np.load(path, mmap_mode="r"))
    return None


def arrow() -> tuple[Any, Any]:
    """Import (pyarrow, pyarrow.parquet), which are an extra."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError('Scoring writes Parquet: pip install "afield[parquet]".') from error
    return pyarrow, pyarrow.parquet


def _read_array(path: Path, size: int) -> Iterator[tuple[np.ndarray, None]]:
    for values in _ARRAY_READERS[path.suffix](path, size):
        if values.ndim < 2 or values.dtype.kind not in "biuf":
            raise ValueError(f"{path.name} must hold numbers (rows, ...), got {values.dtype} {values.shape}.")
        yield values, None


def _read_table(path: Path, columns: Sequence[str], id: str | None, size: int) -> Iterator[tuple[np.ndarray, Any]]:
    first = 0
    for batch in _read_record_batches(path, columns, id, size):
        names = columns or [name for name in batch.schema.names if name != id]
        yield _to_array(path, batch, names, first), None if id is None else batch.column(id)
        first += len(batch)


def _read_npy(path: Path, size: int) -> Iterator[np.ndarray]:
    array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.ndim == 0:
        raise ValueError(f"{path.name} must hold numbers (rows, ...), got one number.")
    for begin in range(0, len(array), size):
        yield np.array(array[begin : begin + size])  # a copy: torch wants to be able to write


def _read_npz(path: Path, size: int) -> Iterator[np.ndarray]:
    """Unpack one batch at a time; `np.load` would unpack the whole array."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        name = names[0] if len(names) == 1 else "x.npy"
        if name not in names:
            found = ", ".join(n.removesuffix(".npy") for n in names)
            raise ValueError(f"{path.name} should hold an array named x, or a single one, it has: {found or 'none'}.")
        info, whole = archive.getinfo(name), path.stat().st_size
        if info.header_offset + info.compress_size > whole:
            raise ValueError(f"{path.name} is damaged: its directory declares more bytes than the file has.")
        with archive.open(name) as file:
            version = np.lib.format.read_magic(file)
            if version not in _HEADER_READERS:
                raise ValueError(
                    f"{path.name} holds an array in version {version} of the npy format, expected 1.0 or 2.0."
                )
            shape, by_columns, dtype = _HEADER_READERS[version](file)
            if dtype.hasobject or by_columns or not shape:
                raise ValueError(f"{path.name} must hold numbers (rows, ...) in C order, got {dtype} {shape}.")
            width = dtype.itemsize * int(np.prod(shape[1:]))
            for begin in range(0, shape[0], size):
                rows = min(size, shape[0] - begin)
                content = file.read(rows * width)
                yield np.frombuffer(content, dtype).reshape(rows, *shape[1:]).copy()
            if file.read(1):  # and at its end the checksum is compared
                raise ValueError(f"{path.name} is damaged: there is more in it than its header declares.")


_ARRAY_READERS = {".npy": _read_npy, ".npz": _read_npz}
_HEADER_READERS: Mapping[tuple[int, int], Callable[[Any], Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def _read_record_batches(path: Path, columns: Sequence[str], id: str | None, size: int) -> Iterator[Any]:
    pyarrow, parquet = arrow()
    with contextlib.ExitStack() as stack:
        if path.suffix == ".parquet":
            file = stack.enter_context(parquet.ParquetFile(path))
            _check_columns(path, list(file.schema_arrow.names), list(columns), id)
            wanted = [*columns, *([id] if id is not None else [])] if columns else None
            yield from file.iter_batches(batch_size=size, columns=wanted)
            return
        from pyarrow import csv, types

        # Types come from the first lines: a column of whole numbers there may hold fractions further down.
        schema = _csv_schema(path)
        _check_columns(path, list(schema.names), list(columns), id)
        integers = [f.name for f in schema if (types.is_integer(f.type) or types.is_null(f.type)) and f.name != id]
        convert = csv.ConvertOptions(column_types=dict.fromkeys(integers, pyarrow.float64()))
        for batch in stack.enter_context(csv.open_csv(path, convert_options=convert)):  # reads 32 blocks ahead
            for first in range(0, len(batch), size):
                yield batch.slice(first, size)


def _csv_schema(path: Path) -> Any:
    """Names and types by the first block, as a reader of the whole file takes them, without the blocks it reads ahead.

    Those of a reader that is closed are there for a while yet, beside those of the next.
    """
    pyarrow, _ = arrow()
    from pyarrow import csv

    with path.open("rb") as file:
        block = file.read(_CSV_BLOCK)
    if len(block) == _CSV_BLOCK:  # without the row that it cuts
        block = block[: max(block.rfind(b"\n"), block.rfind(b"\r")) + 1] or block
    with csv.open_csv(pyarrow.BufferReader(block)) as begin:
        return begin.schema


def _check_columns(path: Path, available: list[str], columns: list[str], id: str | None) -> None:
    twice = {name for names in (available, columns) for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(
            f"{path.name}: the column {', '.join(map(repr, sorted(twice)))} is there, or asked for, twice."
        )
    if id is not None and id in columns:
        raise ValueError(f"{path.name}: the column {id!r} is the --id and cannot be among --columns as well.")
    missing = [name for name in (*columns, *([id] if id is not None else [])) if name not in available]
    if missing:
        raise ValueError(f"{path.name} has no column {', '.join(map(repr, missing))}. It has: {', '.join(available)}.")


def _to_array(path: Path, batch: Any, names: Sequence[str], first: int) -> np.ndarray:
    """(rows, columns), or (rows, ...) from one column of lists."""
    from pyarrow import types

    columns = {name: batch.column(name) for name in names}
    lists = [name for name, c in columns.items() if types.is_list(c.type) or types.is_fixed_size_list(c.type)]
    if lists and len(columns) == 1:
        return _unnest(path, lists[0], columns[lists[0]], first)
    for name, column in columns.items():
        kind = column.type
        if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)):
            raise ValueError(
                f"The column {name!r} of {path.name} holds {kind}, not numbers. Choose with --columns; --id names one "
                "to be copied."
            )
    numbers = [column.cast("float64", safe=False).to_numpy(zero_copy_only=False) for column in columns.values()]
    return np.stack(numbers, axis=1) if numbers else np.empty((len(batch), 0))


def _unnest(path: Path, name: str, column: Any, first: int) -> np.ndarray:
    """(rows, ...) from lists of equal lengths, nested or not."""
    from pyarrow import compute, types

    rows, shape = len(column), [len(column)]
    while types.is_list(column.type) or types.is_fixed_size_list(column.type):
        lengths = compute.list_value_length(column).to_numpy(zero_copy_only=False)  # NaN where there is no list
        length = lengths[0] if len(lengths) else 0
        different = np.flatnonzero(~(lengths == length))
        if len(different):
            row = first + int(different[0]) * rows // len(lengths)
            raise ValueError(
                f"Row {row} of {path.name}: its list in the column {name!r} is missing, or of another length than that "
                f"of row {first} ({length:g}). All must have the same."
            )
        shape.append(int(length))
        column = column.flatten()
    if not (types.is_integer(column.type) or types.is_floating(column.type)):
        raise ValueError(f"The column {name!r} of {path.name} holds lists of {column.type}, not of numbers.")
    return np.array(column.to_numpy(zero_copy_only=False)).reshape(shape)
