"""Corruptions: against images made by the script of CIFAR-10-C, and against scipy, colorsys and np.pad part by part."""

import colorsys
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage

from afield.tasks import blur, weather
from afield.tasks.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from tests.conftest import data_file

DETERMINISTIC = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")
STOCHASTIC = tuple(name for name in CORRUPTIONS if name not in (*DETERMINISTIC, "frost"))
COPIES = 8


@cache
def load(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def reference(name: str) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """40 clean images, and what the reference script makes of them, by severity."""
    corrupted, test = (
        load(data_file("images/cifar10c_reference40.npz")),
        load(data_file("images/cifar10_test_dev5k.npz")),
    )
    clean = test["x"][np.searchsorted(test["idx"], corrupted["idx"])]
    assert (test["idx"][np.searchsorted(test["idx"], corrupted["idx"])] == corrupted["idx"]).all()
    row = corrupted["corruptions"].tolist().index(name)
    return clean, dict(zip(corrupted["severities"].tolist(), corrupted["x"][row], strict=True))


@pytest.fixture
def images() -> np.ndarray:
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:32, :32] / 6
    phases = rng.uniform(0, 6, (6, 1, 1, 3))
    waves = np.sin(x[..., None] + phases) * np.cos(y[..., None] - 2 * phases)
    return np.clip(128 + 100 * waves + rng.normal(0, 8, (6, 32, 32, 3)), 0, 255).astype(np.uint8)


def test_names_are_those_of_cifar10_c():
    assert list(CORRUPTIONS) == load(data_file("images/cifar10c_reference40.npz"))["corruptions"].tolist()


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_deterministic_ones_agree_with_the_reference(name: str):
    clean, corrupted = reference(name)
    for severity, expected in corrupted.items():
        difference = np.abs(corrupt(clean, name, severity).astype(int) - expected)
        assert difference.max() <= 1
        assert difference.mean() < 0.01


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_ones_have_the_references_distribution(name: str):
    clean, corrupted = reference(name)
    for severity, expected in corrupted.items():
        ours = corrupt(np.tile(clean, (COPIES, 1, 1, 1)), name, severity).reshape(COPIES, *clean.shape)
        # Each image's change: its mean, strength and standard deviation. Each has its own noise, known from our copies.
        for statistic in (np.mean, lambda d, axis: np.abs(d).mean(axis), np.std):
            theirs, drawn = (statistic(a - clean.astype(float), axis=(-3, -2, -1)) for a in (expected, ours))
            gap, noise = theirs - drawn.mean(0), drawn.std(0, ddof=1) * np.sqrt(1 + 1 / COPIES)
            assert abs(gap.sum()) < 4.5 * np.sqrt((noise**2).sum()) + 0.05 * len(clean), (severity, statistic)


def test_frost_is_as_strong_as_the_references():
    clean, corrupted = reference("frost")
    for severity, expected in corrupted.items():
        ours = corrupt(np.tile(clean, (4, 1, 1, 1)), "frost", severity).reshape(4, *clean.shape)
        for statistic in (np.mean, np.std):
            theirs, drawn = (statistic(a - clean.astype(float)) for a in (expected, ours))
            assert abs(theirs - drawn) < 0.12 * theirs


def test_every_motion_blur_of_the_reference_is_ours_at_some_angle():
    clean, corrupted = reference("motion_blur")
    clean, angles = clean[:6] / 255, np.arange(-45, 46, 1.0)
    for severity, (radius, width) in {1: (6, 1), 3: (6, 2), 5: (9, 2.5)}.items():
        for image, expected in zip(clean, corrupted[severity], strict=False):
            blurred = blur.along_lines(np.tile(image, (len(angles), 1, 1, 1)), radius, width, angles)
            error = np.abs(np.clip(blurred, 0, 1) * 255 - expected - 0.5).mean((1, 2, 3))
            assert error.min() < 0.35  # cutting to bytes alone gives 0.25
            assert np.median(error) > 1


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_contract(name: str, images: np.ndarray):
    before = images.copy()
    for severity in SEVERITIES:
        first, again, other = (corrupt(images, name, severity, seed) for seed in (0, 0, 1))
        assert first.dtype == np.uint8
        assert first.shape == images.shape
        assert (first == again).all()
        assert (first == other).all() == (name in DETERMINISTIC)
        assert (first != images).any()
    assert (images == before).all()


@pytest.mark.parametrize("name", [n for n in CORRUPTIONS if n not in ("glass_blur", "elastic_transform")])
def test_severity_is_strength(name: str, images: np.ndarray):
    # Not so for glass blur and elastic transform, which trade one parameter for another; frost and motion blur have
    # neighbours that are alike.
    many = np.tile(images, (10, 1, 1, 1))
    change = [np.abs(corrupt(many, name, s).astype(float) - many).mean() for s in SEVERITIES]
    assert all(b > (0.85 if name in ("frost", "motion_blur") else 1) * a for a, b in pairwise(change))
    assert change[4] > 1.1 * change[0]


@pytest.mark.parametrize("name", ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "elastic_transform"])
def test_blurs_keep_a_constant_image(name: str):
    flat = np.broadcast_to(np.array([30, 140, 250], dtype=np.uint8), (4, 32, 32, 3)).copy()
    for severity in SEVERITIES:
        assert (corrupt(flat, name, severity) == flat).all()


def test_types_severities_and_images_have_noise_of_their_own():
    grey = np.full((2, 32, 32, 3), 128, dtype=np.uint8)
    noises = [corrupt(grey, "gaussian_noise", s).astype(float) - 128 for s in (1, 2)]
    noises.append(corrupt(grey, "shot_noise", 1).astype(float) - 128)
    flat = np.concatenate([n.reshape(2, -1) for n in noises])
    correlations = np.corrcoef(flat)[~np.eye(6, dtype=bool)]
    assert np.abs(correlations).max() < 5 / np.sqrt(flat.shape[1])


def test_more_images_than_are_worked_on_at_once(images: np.ndarray):
    many = np.tile(images, (60, 1, 1, 1))
    result = corrupt(many, "gaussian_noise", 1)
    assert len(np.unique(result.reshape(len(many), -1), axis=0)) == len(many)
    assert (corrupt(many, "contrast", 2)[-6:] == corrupt(images, "contrast", 2)).all()


def test_impulse_noise_hits_its_share():
    grey = np.full((40, 32, 32, 3), 128, dtype=np.uint8)
    noisy = corrupt(grey, "impulse_noise", 5)
    for value in (0, 255):
        share, count = (noisy == value).mean(), noisy.size
        assert abs(share - 0.035) < 5 * np.sqrt(0.035 / count)


def test_brightness_is_value_of_hsv(images: np.ndarray):
    pixels = images[:2].reshape(-1, 3)[::7].copy()
    pixels[0] = 0
    ours = weather.brightness(pixels[None, None] / 255, 4, np.random.default_rng(0))[0, 0]
    for pixel, ours_pixel in zip(pixels / 255, ours, strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        np.testing.assert_allclose(ours_pixel, colorsys.hsv_to_rgb(hue, saturation, min(1, value + 0.2)), atol=1e-12)


@pytest.mark.parametrize(("edge", "mode"), [("edge", "nearest"), ("symmetric", "reflect"), ("wrap", "wrap")])
@pytest.mark.parametrize("width", [0, 0.05, 0.4, 1.92, 6.4])
def test_gaussian_is_scipys(edge: blur.Edge, mode: str, width: float):
    x = np.random.default_rng(0).random((3, 20, 17, 2))
    for truncate in (3, 4):
        expected = ndimage.gaussian_filter(x, width, axes=(1, 2), mode=mode, truncate=truncate)
        np.testing.assert_allclose(blur.gaussian(x, width, edge=edge, truncate=truncate), expected, atol=1e-12)


@pytest.mark.parametrize("factor", [1, 1.01, 1.13, 1.25, 1.75, 2.25])
@pytest.mark.parametrize("size", [32, 21])
def test_zoom_is_scipys(factor: float, size: int):
    x = np.random.default_rng(0).random((size, size, 2))
    kept = int(np.ceil(size / factor))
    start = (size - kept) // 2
    zoomed = ndimage.zoom(x[start : start + kept, start : start + kept], (factor, factor, 1), order=1)
    trim = (len(zoomed) - size) // 2
    expected = zoomed[trim : trim + size, trim : trim + size]
    np.testing.assert_allclose(blur.zoom(x[None], factor)[0], expected, atol=1e-12)


@pytest.mark.parametrize(("fold", "mode"), [(blur.mirror, "mirror"), (blur.reflect, "reflect")])
def test_sampling_between_pixels_is_scipys(fold, mode: str):
    rng = np.random.default_rng(0)
    x, row, column = rng.random((2, 9, 12, 3)), rng.uniform(-20, 30, (2, 9, 12)), rng.uniform(-20, 30, (2, 9, 12))
    sampled = blur.sample(x, row, column, fold=fold)
    for image, r, c, got in zip(x, row, column, sampled, strict=True):
        for channel in range(3):
            expected = ndimage.map_coordinates(image[..., channel], [r, c], order=1, mode=mode)
            np.testing.assert_allclose(got[..., channel], expected, atol=1e-12)


def test_clouds_fill_the_range_and_lose_roughness_with_decay():
    rng = np.random.default_rng(0)
    rough, smooth = (weather.plasma(50, 30, decay, rng) for decay in (1.75, 3))
    for clouds in (rough, smooth):
        assert clouds.shape == (50, 32, 32)
        assert (clouds.min((1, 2)) == 0).all()
        assert (clouds.max((1, 2)) == 1).all()
    steps = [np.abs(np.diff(c, axis=1)).mean() for c in (rough, smooth)]
    assert steps[0] > 1.5 * steps[1]
    seam = np.abs(smooth[:, 0] - smooth[:, -1]).mean()  # a torus: no seam between the last row and the first
    assert seam < 1.5 * steps[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros((1, 32, 32, 3), np.uint8), "fogg", 1), "Unknown corruption 'fogg'. Did you mean 'fog'"),
        ((np.zeros((1, 32, 32, 3), np.uint8), "fog", 6), "whole number from 1 to 5, got 6"),
        ((np.zeros((1, 32, 32, 3)), "fog", 1), "bytes of shape .*got float64"),
        ((np.zeros((1, 3, 32, 32), np.uint8), "fog", 1), r"got uint8 of shape \(1, 3, 32, 32\)"),
    ],
)
def test_errors(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        corrupt(*arguments)


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, images: np.ndarray):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r'pip install "afield\[vision\]"'):
        corrupt(images, "pixelate", 1)
    corrupt(images, "fog", 1)
