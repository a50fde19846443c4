"""Pictures in files, decoded when they are asked for: folders class/name.jpg, or tars that hold such paths.

    root/n01440764/x.JPEG ...           one folder a class
    root/*.tar                          members n01440764/x.JPEG; no need to unpack

Every picture is scaled until its short side is 8/7 of `size`, then cut to the middle `size` x `size`: 256 and 224.
"""

import io
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from afield.errors import DataDamaged, DataMissing

_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class Source(NamedTuple):
    """Where a picture lies: a file, or a part of a tar."""

    path: Path
    start: int = 0
    length: int = -1


class Pictures(Dataset[tuple[Tensor, int]]):
    """Bytes (3, size, size) and labels; nothing but names and labels is kept in memory."""

    def __init__(self, sources: list[Source], labels: list[int], size: int = 224) -> None:
        self.sources, self.targets, self.size = sources, torch.tensor(labels, dtype=torch.int64), size

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, start, length = self.sources[index]
        with path.open("rb") as file:
            file.seek(start)
            body = file.read(length)
        try:
            picture = read_picture(body, self.size, enlarge=8 / 7)
        except OSError as error:  # Pillow's word for whatever is wrong with a picture
            raise DataDamaged(f"A picture in {path}, from byte {start}, cannot be read: {error}.") from error
        return torch.from_numpy(picture.transpose(2, 0, 1).copy()), int(self.targets[index])


def listed(root: Path) -> dict[str, list[Source]]:
    """Pictures by class, in order of their names."""
    found: dict[str, list[tuple[str, Source]]] = {}
    for folder in sorted(p for p in root.iterdir() if p.is_dir()):
        found[folder.name] = [(str(file.relative_to(folder)), Source(file)) for file in picture_files(folder)]
    for tar in sorted(root.glob("*.tar")):
        with tarfile.open(tar) as archive:
            for member in archive:
                path = Path(member.name)
                if member.isfile() and path.suffix.lower() in _ENDINGS and len(path.parts) > 1:
                    source = Source(tar, member.offset_data, member.size)
                    found.setdefault(path.parts[-2], []).append((path.name, source))
    result = {name: [source for _, source in sorted(found[name])] for name in sorted(found) if found[name]}
    if not result:
        raise DataMissing(f"{root} holds no pictures: expected class/name.jpg, or *.tar with members class/name.jpg.")
    return result


def picture_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in _ENDINGS)


def read_picture(picture: Any, size: int, channels: int = 3, enlarge: float = 1.0) -> np.ndarray:
    """The middle of a picture, an encoded one or Pillow's own, as bytes (size, size, channels)."""
    image = pillow()
    opened = image.open(io.BytesIO(picture)) if isinstance(picture, bytes) else picture
    opened = opened.convert("RGB" if channels == 3 else "L")
    scale = size * enlarge / min(opened.size)
    width, height = (max(size, round(side * scale)) for side in opened.size)
    scaled = opened.resize((width, height), image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return np.asarray(scaled.crop((left, top, left + size, top + size))).reshape(size, size, channels)


def pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError('Pictures need Pillow: pip install "afield[vision]".') from error
    return Image
