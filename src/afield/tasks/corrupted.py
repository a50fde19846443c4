"""A test set under all corruptions, one set at a time: `Corrupted(images, labels)["corrupted/fog-3"]`.

Sets are made when they are asked for and kept in the user's cache (`afield.tasks.data.cache`), under a hash of the
clean images. Where the published files of CIFAR-10-C or CIFAR-100-C lie on disk, those are read instead.
"""

import contextlib
import hashlib
import io
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from afield.persist import write_file
from afield.tasks.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from afield.tasks.data import DataDamaged, cache
from afield.tasks.images import to_tensor

_VERSION = 1  # of the corruptions: a new one leaves old files alone
GROUP = "corrupted"


class Corrupted(Mapping[str, TensorDataset]):
    """The data sets by name, GROUP/TYPE-SEVERITY; none of them stays in memory.

    images     bytes (N, H, W, 3)
    published  folder with a file TYPE.npy of five severities of the whole test set, one after the other
    rows       (N,) where the images stand in the whole test set, of `total`
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        *,
        published: Path | None = None,
        rows: np.ndarray | None = None,
        total: int = 10_000,
    ) -> None:
        self.images, self.published = images, published
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.rows, self.total = np.arange(len(images)) if rows is None else rows, total
        self._names = {f"{GROUP}/{kind}-{s}": (kind, s) for kind in CORRUPTIONS for s in SEVERITIES}
        content = repr((_VERSION, images.shape)).encode() + np.ascontiguousarray(images).tobytes()
        self.folder = cache() / GROUP / hashlib.sha256(content).hexdigest()[:16]

    def __getitem__(self, name: str) -> TensorDataset:
        return TensorDataset(to_tensor(self._made(*self._names[name])), self.labels)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _made(self, kind: str, severity: int) -> np.ndarray:
        if self.published is not None and (file := self.published / f"{kind}.npy").is_file():
            return self._published(file, severity)
        path = self.folder / f"{kind}-{severity}.npz"
        with contextlib.suppress(Exception), np.load(path, allow_pickle=False) as file:  # missing or damaged: make it
            return file["x"]
        made = corrupt(self.images, kind, severity)
        with contextlib.suppress(OSError):  # a cache that cannot be written to costs time, no more
            self.folder.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            np.savez(content, x=made)
            write_file(path, content.getvalue())
        return made

    def _published(self, file: Path, severity: int) -> np.ndarray:
        sets = np.load(file, mmap_mode="r", allow_pickle=False)
        if sets.dtype != np.uint8 or sets.shape != (len(SEVERITIES) * self.total, *self.images.shape[1:]):
            raise DataDamaged(
                f"{file} should hold bytes of shape {(len(SEVERITIES) * self.total, *self.images.shape[1:])}, "
                f"got {sets.dtype} {sets.shape}. Get it again."
            )
        return np.asarray(sets[(severity - 1) * self.total + self.rows])
