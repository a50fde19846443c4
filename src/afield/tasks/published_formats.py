"""Files of small image sets as their authors publish them: CIFAR's pickles, SVHN's .mat, MNIST's idx.

Each function reads one file into arrays of bytes. Folders and tars of JPEGs are read by `image_files`. A pickle
is a program: CIFAR's files are read by an unpickler that knows numpy arrays and nothing else.
"""

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from afield.errors import DataDamaged

_RECONSTRUCT = np.zeros(0).__reduce__()[0]  # numpy's own function, under whatever name this version has it
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


def read_cifar_batch(path: Path, labels: str = "labels") -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 32, 32, 3) and labels of one of CIFAR's Python batches; CIFAR-100 has "fine_labels"."""
    try:
        with path.open("rb") as file:
            content = _ArraysOnly(file, encoding="bytes").load()
        data, y = np.asarray(content[b"data"]), np.asarray(content[labels.encode()])
    except DataDamaged:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DataDamaged(f"{path} is no batch of CIFAR ({type(error).__name__}: {error}). Get it again.") from error
    if data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072 or y.dtype.kind != "i" or len(y) != len(data):
        raise DataDamaged(f"{path} should hold bytes (N, 3072) and N labels, got {data.dtype} {data.shape}, {y.shape}.")
    return data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), y.astype(np.int64)


def read_svhn_mat(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 32, 32, 3) and digits of SVHN's cropped format; it writes zero as 10."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise ImportError('SVHN\'s .mat files need scipy: pip install "afield[vision]".') from error
    try:
        content = loadmat(path, variable_names=["X", "y"])
        return content["X"].transpose(3, 0, 1, 2), content["y"][:, 0].astype(np.int64) % 10
    except Exception as error:
        raise DataDamaged(f"{path} is no SVHN file ({type(error).__name__}: {error}). Get it again.") from error


def read_idx(path: Path) -> np.ndarray:
    """The array of bytes in a file of MNIST's format, .gz or not: two zeros, type 8, number of axes, lengths, data."""
    try:
        body = path.read_bytes()
        body = gzip.decompress(body) if path.suffix == ".gz" else body
        if body[:3] != b"\0\0\x08":
            raise ValueError(f"it begins with {body[:3]!r}")
        shape = np.frombuffer(body, ">i4", count=body[3], offset=4)
        return np.frombuffer(body, np.uint8, offset=4 + 4 * body[3]).reshape(shape)
    except Exception as error:
        raise DataDamaged(f"{path} is no idx file of bytes ({type(error).__name__}: {error}). Get it again.") from error


class _ArraysOnly(pickle.Unpickler):
    """An unpickler that refuses everything but numpy arrays."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise DataDamaged(
                f"This pickle asks for {module}.{name}, which was not run: a batch of CIFAR holds arrays only. "
                "Get the file from https://www.cs.toronto.edu/~kriz/cifar.html."
            )
        return _ALLOWED[module, name]
