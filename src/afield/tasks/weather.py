"""Weather: snow, frost, fog and light on stacks of images (N, H, W, 3) in [0, 1].

The docstring of `corruptions` gives the source of formulas and constants.
"""

import numpy as np

from afield.tasks import blur

_LUMA = np.array([0.299, 0.587, 0.114])
# Mean colour and standard deviation of the grain of frosted windows, in bytes: dark, blue, grey and white frost.
_FROSTS = (
    ((91, 103, 115), 31),
    ((71, 143, 160), 12),
    ((145, 157, 169), 27),
    ((199, 203, 212), 19),
    ((199, 203, 212), 19),
)


def snow(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """Flakes, that is noise above a threshold, drawn out by the wind both ways over a paler image."""
    mean, deviation, factor, threshold, radius, width, kept = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[severity - 1]
    flakes = blur.zoom(rng.normal(mean, deviation, size=(*x.shape[:3], 1)), factor)
    flakes = np.where(flakes < threshold, 0, np.minimum(flakes, 1))
    flakes = blur.along_lines(flakes, radius, width, rng.uniform(-135, -45, size=len(x)))
    pale = np.maximum(x, (x @ _LUMA)[..., None] * 1.5 + 0.5)
    return kept * x + (1 - kept) * pale + flakes + flakes[:, ::-1, ::-1]


def frost(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """A frosted window before the image: one of five colours, with a grain that is a little smooth."""
    kept, added = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity - 1]
    colors, grains = (np.array(values, dtype=float) for values in zip(*_FROSTS, strict=True))
    which = rng.integers(len(_FROSTS), size=len(x))
    fine, coarse = rng.normal(size=(2, *x.shape[:3], 1))
    coarse = blur.gaussian(coarse, 1.5, edge="wrap")
    grain = 0.8 * fine + 0.6 * coarse / coarse.std()
    shade = rng.normal(0, 9, size=(len(x), 1, 1, 1))
    window = colors[which][:, None, None] + shade + grains[which][:, None, None, None] * grain
    return kept * x + added * np.clip(window, 0, 255) / 255


def fog(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    thickness, decay = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))[severity - 1]
    brightest = x.max(axis=(1, 2, 3), keepdims=True)
    clouds = plasma(len(x), max(x.shape[1:3]), decay, rng)[:, : x.shape[1], : x.shape[2], None]
    return (x + thickness * clouds) * brightest / (brightest + thickness)


def brightness(x: np.ndarray, severity: int, rng: np.random.Generator) -> np.ndarray:
    """The value of each pixel's hue, saturation and value goes up: its colour is scaled, and black becomes grey."""
    value = x.max(axis=-1, keepdims=True)
    brighter = np.minimum(value + (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1], 1)
    return np.where(value > 0, x / np.maximum(value, 1e-9), 1) * brighter


def plasma(count: int, side: int, decay: float, rng: np.random.Generator) -> np.ndarray:
    """Clouds (count, n, n) in [0, 1], n the next power of two: diamond-square on a torus.

    Each round halves the distance of the points. New points are means of four neighbours plus uniform noise whose
    amplitude, squared as in the original, falls by decay^2.
    """
    size = 1 << (side - 1).bit_length()
    clouds = np.zeros((count, size, size))
    step, amplitude = size, 100.0

    def with_noise(total: np.ndarray) -> np.ndarray:
        return total / 4 + amplitude * rng.uniform(-amplitude, amplitude, size=total.shape)

    while step >= 2:
        half = step // 2
        corners = clouds[:, ::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=1)
        clouds[:, half::step, half::step] = with_noise(pairs + np.roll(pairs, -1, axis=2))
        middles = clouds[:, half::step, half::step]
        for axis, target in ((1, np.s_[:, ::step, half::step]), (2, np.s_[:, half::step, ::step])):
            beside = middles + np.roll(middles, 1, axis=axis)
            clouds[target] = with_noise(beside + corners + np.roll(corners, -1, axis=3 - axis))
        step, amplitude = half, amplitude / decay
    clouds -= clouds.min(axis=(1, 2), keepdims=True)
    return clouds / clouds.max(axis=(1, 2), keepdims=True)
