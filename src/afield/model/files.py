"""Files that are written whole or not at all, and that are checked before they are believed.

write_file      a temporary name, flushed to disk, then renamed
read_tensors    safetensors: the sizes that the header declares are compared with the file, then tensors are made
read_arrays     npz: the same for every array in it; nothing is unpickled
hash_json       SHA-256 of what a JSON value says, however it is laid out
"""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import secrets
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_STALE_SECONDS = 600  # a temporary file that nobody has written to for so long has lost its writer
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
_ITEM_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_MOST_DIMENSIONS = 32


def write_file(path: Path, content: bytes | Callable[[IO[bytes]], Any]) -> None:
    """Write to a temporary name, flush to disk, rename. The permissions are those of the umask.

    content  the bytes, or a function that writes them to the file it is given
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(temporary, flags, 0o666), "w+b") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def is_temporary(name: str) -> bool:
    """Whether this is a name that `write_file` gives to what is not finished."""
    return _TEMPORARY.fullmatch(name) is not None


def sweep_temporary(folder: Path, now: float) -> None:
    """Delete the temporary files of writers that were killed; `now` is by the clock of the file system."""
    sweep(folder, now, is_temporary)


def sweep(
    folder: Path, now: float, chosen: Callable[[str], bool], keep: Collection[str] = (), age: float = _STALE_SECONDS
) -> None:
    """Delete the files of these names that nobody has written to for so many seconds; ten minutes by default."""
    for file in folder.iterdir():
        if file.name not in keep and chosen(file.name):
            with contextlib.suppress(OSError):  # another process was first
                if now - file.stat().st_mtime > age:
                    file.unlink()


def hash_json(value: Any) -> str:
    """SHA-256 of a JSON value: spaces and the order of keys do not matter."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def read_tensors(payload: bytes) -> "dict[str, Tensor]":
    """The tensors of a safetensors file; ValueError if it is none, or declares other sizes than it has."""
    from safetensors.torch import load  # here: a service of ONNX files reads and writes without torch

    tensor_shapes(payload)
    try:
        return load(payload)
    except Exception as error:  # safetensors' own error is no ValueError, and a missing dtype is a KeyError
        raise ValueError(f"it is not a safetensors file ({type(error).__name__}: {error})") from error


def tensor_shapes(payload: bytes) -> dict[str, tuple[int, ...]]:
    """The shapes that a safetensors file declares, after all its sizes were found to agree. No tensor is made."""
    try:
        size = int.from_bytes(payload[:8], "little")
        if len(payload) < 8 or not 0 < size <= len(payload) - 8:
            raise ValueError(f"it declares a header of {size} bytes and has {len(payload)} in all")
        header = json.loads(payload[8 : 8 + size])
        header.pop("__metadata__", None)
        shapes, places = {}, []
        for name, entry in header.items():
            shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
            numbers = (*shape, begin, end)
            if len(shape) > _MOST_DIMENSIONS or not all(type(n) is int and n >= 0 for n in numbers):
                raise ValueError(f"{name} has no proper shape or place")
            if math.prod(shape) * _ITEM_SIZES[entry["dtype"]] != end - begin:
                raise ValueError(f"{name} declares {entry['dtype']} {list(shape)} in {end - begin} bytes")
            shapes[str(name)] = shape
            places.append((begin, end))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is not a safetensors file ({type(error).__name__}: {error})") from error
    at = 0
    for begin, end in sorted(places):
        if begin != at:
            raise ValueError("it is not a safetensors file (its tensors overlap or leave gaps)")
        at = end
    if at != len(payload) - 8 - size:
        raise ValueError(f"it is not a safetensors file (tensors of {at} bytes in {len(payload) - 8 - size})")
    return shapes


def read_arrays(content: Path | bytes, names: Collection[str] | None = None) -> dict[str, np.ndarray]:
    """The arrays of an npz file, or those of these names. ValueError if it is none of plain arrays.

    The shape that an array declares is compared with the bytes that there are before anything is made. Sums over the
    bytes (CRC) are checked by the zip format.
    """
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                wanted = list_arrays(archive) if names is None else names
                return {name: _read_array(archive, name) for name in wanted}
        except Exception as error:  # zip, zlib and numpy raise a dozen kinds between them
            raise ValueError(f"not a readable npz file of plain arrays ({type(error).__name__}: {error})") from error


def list_arrays(archive: zipfile.ZipFile) -> list[str]:
    """The names of the arrays in an opened npz file."""
    return [name.removesuffix(".npy") for name in archive.namelist()]


def _read_array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    entry = archive.getinfo(f"{name}.npy")
    with archive.open(entry) as file:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, by_columns, dtype = readers[version](file)
        if dtype.hasobject:
            raise ValueError(f"{name} holds objects, which only a pickle could bring back")
        if math.prod(shape) * dtype.itemsize != entry.file_size - file.tell():
            raise ValueError(f"{name} declares {dtype} {shape} in {entry.file_size - file.tell()} bytes")
        data = file.read()
    flat = np.frombuffer(data, dtype).copy() if data else np.zeros(math.prod(shape), dtype)
    return flat.reshape(shape[::-1]).T if by_columns else flat.reshape(shape)


def _flush_folder(folder: Path) -> None:
    """Make the renaming last as well; not every system and file system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
