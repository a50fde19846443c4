"""Image files (JPEG, PNG, ...) in folders or tars, decoded one by one when they are asked for: for large data sets.

    root/n01440764/x.JPEG ...           one folder a class
    root/*.tar                          members n01440764/x.JPEG; no need to unpack

Every image is scaled until its short side is 8/7 of `size`, then cut to the middle `size` x `size`: 256 and 224.

`image_tensors` is for sets that are held in memory, `published_formats` reads those from their authors' own files.
"""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from afield.errors import DataDamaged, DataMissing

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class ImageLocation(NamedTuple):
    """Where an encoded image is stored: a file, or a part of a tar."""

    path: Path
    start: int = 0
    length: int = -1


class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Bytes (3, size, size) and labels; only locations and labels are kept in memory."""

    def __init__(self, locations: list[ImageLocation], labels: list[int], size: int = 224) -> None:
        self.locations, self.targets, self.size = locations, torch.tensor(labels, dtype=torch.int64), size

    def __len__(self) -> int:
        return len(self.locations)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, start, length = self.locations[index]
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(length)
        try:
            pixels = read_square(content, self.size, enlarge=8 / 7)
        except ImportError:
            raise
        except Exception as error:  # Pillow raises OSError for most kinds of damage, and a few others
            raise DataDamaged(f"A picture in {path}, from byte {start}, cannot be read: {error}.") from error
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), int(self.targets[index])


def locate_images(root: Path) -> dict[str, list[ImageLocation]]:
    """The images of each class, in order of their names."""
    found: dict[str, list[tuple[str, ImageLocation]]] = {}
    for folder in sorted(p for p in root.iterdir() if p.is_dir()):
        found[folder.name] = [(str(file.relative_to(folder)), ImageLocation(file)) for file in list_files(folder)]
    for tar in sorted(root.glob("*.tar")):
        for path, location in _locate_in_tar(tar):
            found.setdefault(path.parts[-2], []).append((path.name, location))
    by_class = {name: [location for _, location in sorted(found[name])] for name in sorted(found) if found[name]}
    if not by_class:
        raise DataMissing(f"{root} holds no pictures: expected class/name.jpg, or *.tar with members class/name.jpg.")
    return by_class


def _locate_in_tar(tar: Path) -> Iterator[tuple[Path, ImageLocation]]:
    """The regular files of a tar that are images, where they lie in it. Links and sparse files are passed over."""
    total = tar.stat().st_size
    try:
        with tarfile.open(tar, "r:") as archive:  # not compressed, or the places would mean nothing
            for member in archive:
                path = Path(member.name)
                if not member.isreg() or member.issparse() or path.suffix.lower() not in _SUFFIXES:
                    continue
                if member.offset_data + member.size > total:
                    raise tarfile.ReadError(f"{member.name} ends after the end of the file")
                if len(path.parts) > 1:
                    yield path, ImageLocation(tar, member.offset_data, member.size)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise DataDamaged(
            f"{tar} is not a readable tar ({type(error).__name__}: {error}). It must not be compressed. Get it again."
        ) from error


def list_files(folder: Path) -> list[Path]:
    """The image files in and below a folder, in order of their paths."""
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in _SUFFIXES)


def read_square(image: Any, size: int, channels: int = 3, enlarge: float = 1.0) -> np.ndarray:
    """The middle of an image, encoded (bytes) or opened by Pillow, as bytes (size, size, channels).

    enlarge  the short side is first scaled to this many times `size`
    """
    pillow = import_pillow()
    opened = pillow.open(io.BytesIO(image)) if isinstance(image, bytes) else image
    opened = opened.convert("RGB" if channels == 3 else "L")
    scale = size * enlarge / min(opened.size)
    width, height = (max(size, round(side * scale)) for side in opened.size)
    scaled = opened.resize((width, height), pillow.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return np.asarray(scaled.crop((left, top, left + size, top + size))).reshape(size, size, channels)


def import_pillow() -> Any:
    """The module PIL.Image, which is an extra."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError('Pictures need Pillow: pip install "afield[vision]".') from error
    return Image
