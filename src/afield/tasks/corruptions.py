"""Common corruptions of small images: the 15 types of CIFAR-10-C at severities 1 to 5 (Hendrycks and Dietterich 2019).

`corrupt(images, "fog", 3)` takes bytes (N, H, W, 3) and returns them. Formulas and constants are those of the script
that made CIFAR-10-C, but every corruption acts on a whole stack of images. As there, results are cut, not rounded, to
bytes, and glass blur copies a neighbouring pixel where swapping the two was meant. Two differences:

    motion blur, snow   ImageMagick's motion blur is written anew: taps of half a Gaussian along a line
    frost               the five photographs are not ours to give: plain colours and a grain with their statistics

Random numbers come from the seed, the type and the severity, so that any set can be made again by itself.

`Corrupted(images, labels)["corrupted/fog-3"]` is a test set under one of them. Sets are made when they are asked for
and kept in the user's cache (`data.cache`), under a hash of the clean images. Where the published files of
CIFAR-10-C or CIFAR-100-C lie on disk, those are read instead.
"""

import contextlib
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from afield.errors import DataDamaged
from afield.model.saving import write_file
from afield.registry import Registry
from afield.tasks import blur, weather
from afield.tasks.data import cache
from afield.tasks.image_files import pillow
from afield.tasks.image_tensors import to_tensor

SEVERITIES = (1, 2, 3, 4, 5)
_AT_ONCE = 256  # images: what is worked on should stay in the processor's cache

Corruption = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]
"""Images (N, H, W, 3) in [0, 1], severity, generator -> images, which are then clipped to [0, 1]."""


def corrupt(images: np.ndarray, name: str, severity: int, seed: int = 0) -> np.ndarray:
    """Bytes (N, H, W, 3) -> bytes; `name` is one of `CORRUPTIONS`."""
    corruption = CORRUPTIONS[name]
    if severity not in SEVERITIES:
        raise ValueError(f"A severity is a whole number from 1 to 5, got {severity}.")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3:
        raise ValueError(f"corrupt expects bytes of shape (N, H, W, 3), got {images.dtype} of shape {images.shape}.")
    rng = np.random.default_rng([seed, severity, zlib.crc32(name.encode())])
    result = np.empty_like(images)
    for start in range(0, len(images), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        result[part] = _cut(corruption(images[part] / np.float64(255), severity, rng))
    return result


def gaussian_noise(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    return x + rng.normal(scale=(0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1], size=x.shape)


def shot_noise(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Photons counted: Poisson."""
    rate = (500, 250, 100, 75, 50)[severity - 1]
    return rng.poisson(x * rate) / rate


def impulse_noise(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Salt and pepper, in each channel by itself."""
    part = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    drawn = rng.random(x.shape)
    return np.where(drawn < part, np.where(drawn < part / 2, 0.0, 1.0), x)


def contrast(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Towards the mean colour of the image."""
    mean = x.mean(axis=(1, 2), keepdims=True)
    return (x - mean) * (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1] + mean


def elastic_transform(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """A random affine map, then every pixel moved by smooth noise; lengths are parts of the image's side."""
    shift, smoothness, corner = (
        (0, 0, 0.08),
        (0.05, 0.2, 0.07),
        (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05),
        (0.1, 0.03, 0.03),
    )[severity - 1]
    count, height, width, _ = x.shape
    side = min(height, width)
    # Three corners of a square in the middle move; the map that moves them goes from here to there.
    center, reach = np.array([height // 2, width // 2]), side // 3
    here = center + reach * np.array([[1, 1], [1, -1], [-1, -1]])
    there = here + side * rng.uniform(-corner, corner, size=(count, 3, 2))
    back = np.linalg.solve(np.concatenate([there, np.ones((count, 3, 1))], axis=2), np.broadcast_to(here, there.shape))
    column, row = np.meshgrid(np.arange(width), np.arange(height))
    points = np.stack([column, row, np.ones_like(row)], axis=-1) @ back[:, None]
    x = blur.sample(x, points[..., 1], points[..., 0], fold=blur.mirror)
    noise = rng.uniform(-1, 1, size=(2, count, height, width))
    moves = side * shift * blur.gaussian(noise, smoothness * side, axes=(2, 3), edge="symmetric", truncate=3)
    return blur.sample(x, row + moves[1], column + moves[0], fold=blur.reflect)


def pixelate(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Down and up again by box averages."""
    scale = (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1]
    image = pillow()
    height, width = x.shape[1:3]
    small, box = (int(width * scale), int(height * scale)), image.Resampling.BOX
    return _each(x, lambda picture: picture.resize(small, box).resize((width, height), box))


def jpeg_compression(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    image, quality = pillow(), (80, 65, 58, 50, 40)[severity - 1]

    def again(picture: Any) -> Any:
        stream = io.BytesIO()
        picture.save(stream, "JPEG", quality=quality)
        return image.open(stream)

    return _each(x, again)


CORRUPTIONS: Registry[Corruption] = Registry(
    "corruption",
    gaussian_noise=gaussian_noise,
    shot_noise=shot_noise,
    impulse_noise=impulse_noise,
    defocus_blur=blur.defocus_blur,
    glass_blur=blur.glass_blur,
    motion_blur=blur.motion_blur,
    zoom_blur=blur.zoom_blur,
    snow=weather.snow,
    frost=weather.frost,
    fog=weather.fog,
    brightness=weather.brightness,
    contrast=contrast,
    elastic_transform=elastic_transform,
    pixelate=pixelate,
    jpeg_compression=jpeg_compression,
)


def _cut(x: np.ndarray) -> np.ndarray:
    # Corruptions that end in bytes must give these very bytes: 1e-6 is far above rounding and far below a byte.
    return (np.clip(x, 0, 1) * 255 + 1e-6).astype(np.uint8)


def _each(x: np.ndarray, change: Callable[[Any], Any]) -> np.ndarray:
    """Through Pillow, one image at a time."""
    image = pillow()
    pictures = (image.fromarray(pixels) for pixels in np.rint(x * 255).astype(np.uint8))
    return np.stack([np.asarray(change(picture)) for picture in pictures]) / np.float64(255)


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
