"""Files of small image sets as their authors publish them: CIFAR's pickles, SVHN's .mat, MNIST's idx.

Each function reads one file into arrays of bytes. Folders and tars of JPEGs are read by `image_files`. A pickle
is a program: CIFAR's files are read by `plain_pickle`, which makes arrays of integers and runs nothing.
"""

import gzip
import math
from pathlib import Path

import numpy as np

from afield.errors import DataDamaged
from afield.tasks import plain_pickle

_MOST_BYTES = 2**32  # of an idx file


def read_cifar_batch(path: Path, labels: str = "labels") -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 32, 32, 3) and labels of one of CIFAR's Python batches; CIFAR-100 has "fine_labels"."""
    try:
        content = plain_pickle.load(path.read_bytes())
        data, y = content[b"data"], content[labels.encode()]
        if isinstance(y, list) and all(type(label) is int for label in y):
            y = np.array(y, dtype=np.int64)
        if not isinstance(data, np.ndarray) or not isinstance(y, np.ndarray):
            raise ValueError(f"data is a {type(data).__name__}, labels are a {type(y).__name__}")
    except DataDamaged:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DataDamaged(f"{path} is no batch of CIFAR ({type(error).__name__}: {error}). Get it again.") from error
    if (
        data.dtype != np.uint8
        or data.ndim != 2
        or data.shape[1] != 3072
        or y.dtype.kind not in "iu"
        or y.shape != data.shape[:1]
    ):
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
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            magic = file.read(4)
            if magic[:3] != b"\0\0\x08" or len(magic) < 4:
                raise ValueError(f"it begins with {magic!r}")
            shape = np.frombuffer(file.read(4 * magic[3]), ">u4", count=magic[3]).tolist()
            if math.prod(shape) > _MOST_BYTES:
                raise ValueError(f"it declares {math.prod(shape)} bytes")
            body = file.read(math.prod(shape) + 1)  # one more than there should be: no more is unpacked than declared
        return np.frombuffer(body, np.uint8).reshape(shape)
    except Exception as error:
        raise DataDamaged(f"{path} is no idx file of bytes ({type(error).__name__}: {error}). Get it again.") from error
