"""Images in memory, as tensors of bytes (N, C, H, W): conversion, splits, augmentation and OOD sets of image tasks.

Backbones turn the bytes into numbers. Sets that are too large for memory are read one by one (`image_files`).

`AFIELD_OOD` names more OOD sets for every image task: npz files with an array x of bytes (N, H, W[, C]), or folders of
image files, separated as in PATH. A set has the name of its file; its images are cut square and scaled to the task's.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from afield.backbones.normalize import as_numbers
from afield.errors import DataDamaged, DataMissing
from afield.tasks.data import arrays
from afield.tasks.image_files import import_pillow, list_files, read_square

LabelledImages = tuple[np.ndarray, np.ndarray]
"""Images (N, H, W[, C]) and labels (N,)."""


def to_tensor(images: np.ndarray) -> Tensor:
    """Bytes (N, H, W[, C]) -> (N, C, H, W)."""
    if images.dtype != np.uint8:
        raise ValueError(f"Images are expected as bytes (N, H, W) or (N, H, W, C), got {images.dtype}.")
    images = images[..., None] if images.ndim == 3 else images
    return torch.from_numpy(np.array(images.transpose(0, 3, 1, 2), order="C"))  # a copy: bytes of files are read-only


def to_dataset(images: np.ndarray, labels: np.ndarray) -> TensorDataset:
    """Bytes (N, H, W[, C]) and labels (N,) as tensors."""
    return TensorDataset(to_tensor(images), torch.from_numpy(labels.astype(np.int64)))


def first_per_class(labels: np.ndarray, count: int) -> np.ndarray:
    """Indices, in order, of the first `count` examples of every class."""
    chosen = [np.flatnonzero(labels == label)[:count] for label in np.unique(labels)]
    return np.sort(np.concatenate(chosen))


def split_train_val(images: np.ndarray, labels: np.ndarray, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Training data, and validation data with a tenth of every class."""
    train, val = split_rows(labels, seed, 0.1)
    return to_dataset(images[train], labels[train]), to_dataset(images[val], labels[val])


def split_rows(labels: np.ndarray, seed: int, part: float) -> tuple[np.ndarray, np.ndarray]:
    """All rows in random order, in two parts: the second has `part` of every class, one example at least."""
    order = np.random.default_rng(seed).permutation(len(labels))
    rank = np.empty(len(labels))
    for label in np.unique(labels):
        rows = order[labels[order] == label]
        rank[rows] = np.arange(len(rows)) / len(rows)
    held_out = rank[order] < part
    return order[~held_out], order[held_out]


def crop_and_flip(batch: Any, padding: int = 4) -> tuple[Tensor, Tensor]:
    """Random crops of the images with black all around, half of them mirrored; as numbers in [0, 1]."""
    x, y = batch
    count, channels, height, width = x.shape
    x = F.pad(x, (padding,) * 4)
    top, left = torch.randint(2 * padding + 1, (2, count, 1))
    rows, columns = top + torch.arange(height), left + torch.arange(width)
    columns = torch.where(torch.rand(count, 1) < 0.5, columns, columns.flip(1))
    x = x.gather(2, rows[:, None, :, None].expand(-1, channels, -1, x.shape[3]).to(x.device))
    x = x.gather(3, columns[:, None, None, :].expand(-1, channels, height, -1).to(x.device))
    return as_numbers(x), y


def noise(count: int, shape: Sequence[int], seed: int) -> TensorDataset:
    """Gaussian noise around grey, a quarter of the range wide."""
    drawn = np.random.default_rng(seed).normal(127.5, 63.75, size=(count, *shape))
    return TensorDataset(torch.from_numpy(np.clip(drawn, 0, 255).astype(np.uint8)))


def ood_from_environment(channels: int, size: int) -> dict[str, TensorDataset]:
    """The sets of AFIELD_OOD, by name."""
    paths = [Path(text) for text in os.environ.get("AFIELD_OOD", "").split(os.pathsep) if text]
    return {path.stem: TensorDataset(to_tensor(_read_images(path, channels, size))) for path in paths}


def read_pictures(folder: Path, size: int, channels: int = 3, *, most: int | None = None) -> np.ndarray:
    """Bytes (N, size, size, channels) of the image files in and below a folder: all, or so many at even distances."""
    files = list_files(folder)
    if not files:
        raise DataMissing(f"{folder} is a folder without pictures.")
    chosen = np.linspace(0, len(files) - 1, min(most or len(files), len(files))).astype(int)
    return np.stack([_read_picture(files[i], size, channels) for i in chosen])


def _read_picture(file: Path, size: int, channels: int) -> np.ndarray:
    try:
        return read_square(file.read_bytes(), size, channels)
    except ImportError:
        raise
    except Exception as error:  # Pillow raises OSError for most kinds of damage, and a few others
        raise DataDamaged(f"The picture {file} cannot be read: {error}.") from error


def _read_images(path: Path, channels: int, size: int) -> np.ndarray:
    """Bytes (N, size, size, channels) of an npz file, or of a folder of image files."""
    if path.is_dir():
        return read_pictures(path, size, channels)
    if not path.is_file():
        raise DataMissing(f"AFIELD_OOD names {path}, which is neither a file nor a folder.")
    images = arrays(path).get("x")
    if images is None or images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise ValueError(f"AFIELD_OOD expects npz files with an array x of bytes (N, H, W[, C]); {path} has none.")
    if images.ndim == 3:
        images = images[..., None].repeat(channels, axis=-1)
    if images.shape[1:] == (size, size, channels):
        return images
    pillow = import_pillow()
    squeezed = images[..., 0] if images.shape[-1] == 1 else images
    return np.stack([read_square(pillow.fromarray(image), size, channels) for image in squeezed])
