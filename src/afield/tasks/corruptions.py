"""Common corruptions of small images: the 15 of CIFAR-10-C at severities 1 to 5 (Hendrycks and Dietterich 2019).

`corrupt(images, "fog", 3)` takes bytes (N, H, W, 3) and returns them. Formulas and constants are those of the script
that made CIFAR-10-C, but every corruption acts on a whole stack of images. As there, results are cut, not rounded, to
bytes, and glass blur copies a neighbouring pixel where swapping the two was meant. Two differences:

    motion blur, snow   ImageMagick's motion blur is written anew: taps of half a Gaussian along a line
    frost               the five photographs are not ours to give: plain colours and a grain with their statistics

Random numbers come from the seed, the corruption and the severity, so that any set can be made again by itself.

`CorruptedSets(images, labels)["corrupted/fog-3"]` is a test set under one of them. Sets are made when they are asked
for and kept in the user's cache (`data.cache`), under a hash of the clean images. Where the published files of
CIFAR-10-C or CIFAR-100-C are on disk, those are read instead.
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
from afield.tasks.image_files import import_pillow
from afield.tasks.image_tensors import to_tensor

SEVERITIES = (1, 2, 3, 4, 5)
_BLOCK = 256  # images that are corrupted together: they should fit in the processor's cache
_CACHE_FOLDER = "corrupted"
_CACHE_VERSION = 1  # to be raised when a corruption changes: cached sets of other versions are not read

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
    for start in range(0, len(images), _BLOCK):
        part = slice(start, start + _BLOCK)
        result[part] = _to_bytes(corruption(images[part] / np.float64(255), severity, rng))
    return result


def set_name(corruption: str, severity: int | str) -> str:
    """The name of a set among a task's shifted test sets, such as corrupted/fog-3."""
    return f"corrupted/{corruption}-{severity}"


class CorruptedSets(Mapping[str, TensorDataset]):
    """Test sets by name (`set_name`); none of them stays in memory.

    images     bytes (N, H, W, 3)
    published  folder with a file CORRUPTION.npy, the whole test set at five severities one after the other
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
        self._sets = {set_name(name, s): (name, s) for name in CORRUPTIONS for s in SEVERITIES}
        content = repr((_CACHE_VERSION, images.shape)).encode() + np.ascontiguousarray(images).tobytes()
        self.folder = cache() / _CACHE_FOLDER / hashlib.sha256(content).hexdigest()[:16]

    def __getitem__(self, name: str) -> TensorDataset:
        return TensorDataset(to_tensor(self._images(*self._sets[name])), self.labels)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sets)

    def __len__(self) -> int:
        return len(self._sets)

    def _images(self, corruption: str, severity: int) -> np.ndarray:
        """Published ones, else from the cache, else made now and put into the cache."""
        if self.published is not None and (file := self.published / f"{corruption}.npy").is_file():
            return self._read_published(file, severity)
        path = self.folder / f"{corruption}-{severity}.npz"
        with contextlib.suppress(Exception), np.load(path, allow_pickle=False) as file:  # missing or damaged: make it
            return file["x"]
        images = corrupt(self.images, corruption, severity)
        with contextlib.suppress(OSError):  # a cache that cannot be written to costs time, no more
            self.folder.mkdir(parents=True, exist_ok=True)
            content = io.BytesIO()
            np.savez(content, x=images)
            write_file(path, content.getvalue())
        return images

    def _read_published(self, file: Path, severity: int) -> np.ndarray:
        sets = np.load(file, mmap_mode="r", allow_pickle=False)
        if sets.dtype != np.uint8 or sets.shape != (len(SEVERITIES) * self.total, *self.images.shape[1:]):
            raise DataDamaged(
                f"{file} should hold bytes of shape {(len(SEVERITIES) * self.total, *self.images.shape[1:])}, "
                f"got {sets.dtype} {sets.shape}. Get it again."
            )
        return np.asarray(sets[(severity - 1) * self.total + self.rows])


def gaussian_noise(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    return x + rng.normal(scale=(0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1], size=x.shape)


def shot_noise(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Poisson noise, as of counted photons."""
    rate = (500, 250, 100, 75, 50)[severity - 1]
    return rng.poisson(x * rate) / rate


def impulse_noise(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Salt and pepper, in each channel by itself."""
    part = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    drawn = rng.random(x.shape)
    return np.where(drawn < part, np.where(drawn < part / 2, 0.0, 1.0), x)


def contrast(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Every pixel moves towards the mean colour of its image."""
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
    # Three corners of a square in the middle move; the affine map that moves them is applied to all.
    center, reach = np.array([height // 2, width // 2]), side // 3
    corners = center + reach * np.array([[1, 1], [1, -1], [-1, -1]])
    moved = corners + side * rng.uniform(-corner, corner, size=(count, 3, 2))
    inverse = np.linalg.solve(
        np.concatenate([moved, np.ones((count, 3, 1))], axis=2), np.broadcast_to(corners, moved.shape)
    )
    column, row = np.meshgrid(np.arange(width), np.arange(height))
    points = np.stack([column, row, np.ones_like(row)], axis=-1) @ inverse[:, None]
    x = blur.sample(x, points[..., 1], points[..., 0], fold=blur.mirror)
    noise = rng.uniform(-1, 1, size=(2, count, height, width))
    moves = side * shift * blur.gaussian(noise, smoothness * side, axes=(2, 3), edge="symmetric", truncate=3)
    return blur.sample(x, row + moves[1], column + moves[0], fold=blur.reflect)


def pixelate(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Scaled down and up again by box averages."""
    scale = (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1]
    height, width = x.shape[1:3]
    small, box = (int(width * scale), int(height * scale)), import_pillow().Resampling.BOX
    return _map_images(x, lambda image: image.resize(small, box).resize((width, height), box))


def jpeg_compression(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    pillow, quality = import_pillow(), (80, 65, 58, 50, 40)[severity - 1]

    def compress(image: Any) -> Any:
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=quality)
        return pillow.open(stream)

    return _map_images(x, compress)


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


def _to_bytes(x: np.ndarray) -> np.ndarray:
    # Corruptions that end in bytes must give these very bytes: 1e-6 is far above rounding and far below a byte.
    return (np.clip(x, 0, 1) * 255 + 1e-6).astype(np.uint8)


def _map_images(x: np.ndarray, change: Callable[[Any], Any]) -> np.ndarray:
    """Apply a function of Pillow images to one image at a time."""
    pillow = import_pillow()
    images = (pillow.fromarray(pixels) for pixels in np.rint(x * 255).astype(np.uint8))
    return np.stack([np.asarray(change(image)) for image in images]) / np.float64(255)
