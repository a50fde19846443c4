"""Blurs, and the sampling of images between their pixels. Stacks of images are (N, H, W, C) in [0, 1].

The docstring of `corruptions` gives the source of formulas and constants.
"""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

Edge = Literal["edge", "symmetric", "wrap"]


def defocus_blur(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """The mean over a disk whose edge is smoothed by a Gaussian of 3 x 3."""
    radius, smoothing = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))[severity - 1]
    inside = int(radius)
    row, column = np.mgrid[-inside : inside + 1, -inside : inside + 1]
    disk = np.pad((row**2 + column**2 <= radius**2).astype(float), 1)
    return _filter(x, gaussian(disk / disk.sum(), smoothing, axes=(0, 1), truncate=1 / smoothing))


def glass_blur(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Pixels copied from a neighbour above or to the left, from the last to the first, between two Gaussian blurs."""
    width, rounds = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[severity - 1]
    x = np.floor(gaussian(x, width) * 255 + 1e-6) / 255
    images, (rows, columns) = np.arange(len(x)), x.shape[1:3]
    for _ in range(rounds):
        for row in range(rows - 1, 1, -1):
            for column in range(columns - 1, 1, -1):
                up, left = rng.integers(0, 2, size=(2, len(x)))
                x[:, row, column] = x[images, row - up, column - left]
    return gaussian(x, width)


def motion_blur(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    radius, width = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))[severity - 1]
    return along_lines(x, radius, width, rng.uniform(-45, 45, size=len(x)))


def zoom_blur(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """The mean over zooms by 1, 1.01, ... about the centre; the image itself counts twice."""
    factors = np.arange(1, (1.06, 1.11, 1.16, 1.21, 1.26)[severity - 1], 0.01)
    return (x + sum(zoom(x, factor) for factor in factors)) / (len(factors) + 1)


def gaussian(
    x: np.ndarray, width: float, *, axes: tuple[int, ...] = (1, 2), edge: Edge = "edge", truncate: float = 4
) -> np.ndarray:
    """Gaussian blur along some axes, cut at `truncate` widths; `edge`: how the image goes on, in np.pad's words."""
    reach = int(truncate * width + 0.5)
    taps = np.exp(-0.5 * (np.arange(-reach, reach + 1) / (width or 1)) ** 2)
    taps /= taps.sum()
    for axis in axes:
        last = np.moveaxis(x, axis, -1)
        padded = np.pad(last, [(0, 0)] * (x.ndim - 1) + [(reach, reach)], mode=edge)
        blurred: Any = sum(weight * padded[..., i : i + last.shape[-1]] for i, weight in enumerate(taps))
        x = np.moveaxis(blurred, -1, axis)
    return x


def along_lines(x: np.ndarray, radius: int, width: float, degrees: np.ndarray) -> np.ndarray:
    """Motion blur: 2 radius + 1 taps of half a Gaussian, from each pixel along a line at its image's angle (N,).

    As in ImageMagick: taps are whole pixels, the edge continues beyond it.
    """
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * width**2))
    weights /= weights.sum()
    angle, images = np.deg2rad(degrees)[:, None], np.arange(len(x))[:, None, None]
    down, right = (np.ceil(steps * side - 0.5).astype(int) for side in (np.sin(angle), np.cos(angle)))
    rows, columns = (np.arange(size) for size in x.shape[1:3])
    result = np.zeros_like(x)
    for step, weight in enumerate(weights):
        row = np.clip(rows + down[:, step, None], 0, len(rows) - 1)
        column = np.clip(columns + right[:, step, None], 0, len(columns) - 1)
        result += weight * x[images, row[:, :, None], column[:, None, :]]
    return result


def zoom(x: np.ndarray, factor: float) -> np.ndarray:
    """The middle of each image, linearly enlarged to the image's size."""
    rows, columns = (_enlarge(size, factor) for size in x.shape[1:3])
    return np.moveaxis(rows @ np.moveaxis(x, -1, 1) @ columns.T, 1, -1)


def sample(
    x: np.ndarray, row: np.ndarray, column: np.ndarray, *, fold: Callable[[np.ndarray, int], np.ndarray]
) -> np.ndarray:
    """Images at fractional positions (N, H, W), bilinear; `fold` brings indices beyond the edge back inside."""
    top, left = np.floor(row).astype(int), np.floor(column).astype(int)
    below, beside = (row - top)[..., None], (column - left)[..., None]
    images, (height, width) = np.arange(len(x))[:, None, None], x.shape[1:3]
    rows, columns = ([fold(i, size), fold(i + 1, size)] for i, size in ((top, height), (left, width)))
    upper, lower = (x[images, r, columns[0]] * (1 - beside) + x[images, r, columns[1]] * beside for r in rows)
    return upper * (1 - below) + lower * below


def mirror(index: np.ndarray, size: int) -> np.ndarray:
    """d c b | a b c d | c b a: the outermost pixel is not repeated."""
    return np.abs((index + size - 1) % (2 * size - 2) - size + 1)


def reflect(index: np.ndarray, size: int) -> np.ndarray:
    """c b a | a b c d | d c b: the outermost pixel is repeated."""
    index = index % (2 * size)
    return np.minimum(index, 2 * size - 1 - index)


def _filter(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Correlation with a kernel of odd size; the image is mirrored at its edge."""
    reach = len(kernel) // 2
    padded = np.pad(x, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="reflect")
    height, width = x.shape[1:3]
    taps: Any = (
        weight * padded[:, row : row + height, column : column + width]
        for (row, column), weight in np.ndenumerate(kernel)
        if weight
    )
    return sum(taps)


def _enlarge(size: int, factor: float) -> np.ndarray:
    """The matrix (size, size) of `zoom` along one axis."""
    kept = int(np.ceil(size / factor))
    start, enlarged = (size - kept) // 2, round(kept * factor)
    at = (np.arange(size) + (enlarged - size) // 2) * ((kept - 1) / max(1, enlarged - 1))
    below = np.minimum(at.astype(int), max(0, kept - 2))
    matrix = np.zeros((size, size))
    matrix[np.arange(size), start + below] = 1 - (at - below)
    matrix[np.arange(size), start + below + (kept > 1)] += at - below
    return matrix
