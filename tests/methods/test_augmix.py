"""AugMix: every operation against Pillow, the mixture against its distribution, the whole against Pillow again."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from scipy import stats
from torch import Tensor

from afield.methods import METHODS
from afield.methods.augmix import LONGEST, OPERATIONS, augmix, chains, mixing_weights
from afield.methods.method import Method

BILINEAR, AFFINE = Image.Resampling.BILINEAR, Image.Transform.AFFINE


def bytes_of(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Smooth images with some noise, as bytes: noise alone would hide errors of interpolation."""
    rng = np.random.default_rng(seed)
    *count, height, width = shape
    y, x = np.mgrid[:height, :width] / 8
    phase = rng.uniform(0, 6, (*count, 1, 1))
    image = 128 + 90 * np.sin(x + phase) * np.cos(y - 2 * phase) + rng.normal(0, 12, shape)
    return np.clip(image, 3, 251).astype(np.uint8)


def to_tensor(images: np.ndarray) -> Tensor:
    return torch.from_numpy(images).float() / 255


def whole(level: float, highest: float) -> int:
    return int(level * highest / 10)


def pillow(name: str, image: Image.Image, level: float) -> Image.Image:
    """The operation as AugMix's authors have it, level being signed."""
    width, height = image.size
    matrices = {
        "shear_x": (1, 0.03 * level, 0, 0, 1, 0),
        "shear_y": (1, 0, 0, 0.03 * level, 1, 0),
        "translate_x": (1, 0, whole(level, width / 3), 0, 1, 0),
        "translate_y": (1, 0, 0, 0, 1, whole(level, height / 3)),
    }
    if name in matrices:
        return image.transform(image.size, AFFINE, matrices[name], resample=BILINEAR)
    if name == "rotate":
        return image.rotate(whole(level, 30), resample=BILINEAR)
    if name == "posterize":
        return ImageOps.posterize(image, max(1, 4 - whole(abs(level), 4)))
    if name == "solarize":
        return ImageOps.solarize(image, 256 - whole(abs(level), 256))
    return {"autocontrast": ImageOps.autocontrast, "equalize": ImageOps.equalize}[name](image)


def by_pillow(name: str, images: np.ndarray, levels: list[float]) -> np.ndarray:
    """Images (N, C, H, W) one by one; C is 1 or 3."""
    results = []
    for image, level in zip(images, levels, strict=True):
        pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
        result = np.asarray(pillow(name, Image.fromarray(pixels), level))
        results.append(result[None] if len(image) == 1 else result.transpose(2, 0, 1))
    return np.stack(results)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (3, 24, 40)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_pillows(name: str, shape: tuple[int, ...]):
    levels = [0.0, 0.1, -0.7, 1.3, -2.2, 2.9, 3.0, -4.6, 6.1, -8.8, 10.0, -10.0]
    images = bytes_of((len(levels), *shape), seed=0)
    ours = OPERATIONS[name](to_tensor(images), torch.tensor(levels, dtype=torch.float64)) * 255
    theirs = torch.from_numpy(by_pillow(name, images, levels)).float()
    assert ours.shape == theirs.shape
    exact = name in ("equalize", "posterize", "solarize")  # the others round, at most one byte
    assert float((ours - theirs).abs().max()) <= (1e-3 if exact else 1.001)
    if (name, shape[-1]) != ("equalize", 8):
        assert float((ours - to_tensor(images) * 255).abs().max()) > 1  # it did something


def test_equalize_saturates_as_pillow_does_when_few_values_are_there():
    images = np.random.default_rng(0).choice([0, 7, 200, 255], size=(4, 3, 32, 32), p=[0.1, 0.2, 0.3, 0.4])
    images = images.astype(np.uint8)
    ours = OPERATIONS["equalize"](to_tensor(images), torch.zeros(4)) * 255
    np.testing.assert_allclose(ours.numpy(), by_pillow("equalize", images, [0] * 4), atol=1e-3)


@pytest.mark.parametrize("name", ["rotate", "solarize", "shear_x", "shear_y", "translate_x", "translate_y"])
def test_level_zero_is_the_identity(name: str):
    x = torch.rand(5, 3, 16, 12)
    torch.testing.assert_close(OPERATIONS[name](x, torch.zeros(5, dtype=torch.float64)), x, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["autocontrast", "equalize"])
def test_a_constant_image_has_no_contrast_to_stretch(name: str):
    x = torch.rand(6, 3, 1, 1).expand(6, 3, 32, 32).contiguous()
    torch.testing.assert_close(OPERATIONS[name](x, torch.ones(6)), x, rtol=0, atol=0)


def test_black_stays_black():
    x = torch.zeros(64, 3, 16, 16)
    torch.testing.assert_close(augmix(METHODS["dnn"], severity=9).transform((x, None))[0], x, rtol=0, atol=0)


def test_at_severity_zero_flat_images_of_four_bits_are_fixed_points_whatever_the_weights():
    x = (torch.arange(16) * 16 / 255)[:, None, None, None].expand(16, 3, 8, 8).repeat(20, 1, 1, 1)
    for width, alpha in ((1, 1.0), (3, 0.1), (5, 10.0)):
        mixed, _ = augmix(METHODS["dnn"], severity=0, width=width, alpha=alpha).transform((x, None))
        torch.testing.assert_close(mixed, x, rtol=0, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(1, 6), st.sampled_from([1, 3]), st.integers(1, 20), st.integers(1, 20)),
    severity=st.floats(0, 10),
    width=st.integers(1, 4),
    depth=st.sampled_from([None, 1, 4]),
)
def test_images_stay_images_and_labels_stay(seed, shape, severity, width, depth):
    torch.manual_seed(seed)
    x, y = torch.rand(shape), torch.arange(shape[0])
    before = x.clone()
    mixed, labels = augmix(METHODS["dnn"], severity=severity, width=width, depth=depth).transform([x, y])
    assert mixed.shape == x.shape
    assert mixed.dtype == x.dtype
    assert 0 <= float(mixed.min()) <= float(mixed.max()) <= 1
    assert labels is y
    assert torch.equal(x, before)


def test_seed_decides():
    x = torch.rand(8, 3, 32, 32)
    transform = augmix(METHODS["dnn"]).transform
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(transform((x, None))[0])
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert not torch.equal(transform((x, None))[0], transform((x, None))[0])  # every step draws anew


@pytest.mark.parametrize("alpha", [0.3, 1.0, 4.0])
def test_weights_have_their_distributions(alpha: float):
    width, count = 3, 20_000
    weights = mixing_weights(count, width, alpha).double()
    torch.testing.assert_close(weights.sum(1), torch.ones(count).double(), rtol=0, atol=1e-6)
    assert float(weights.min()) >= 0
    own = weights[:, 0].numpy()
    assert stats.kstest(own, stats.beta(alpha, alpha).cdf).pvalue > 1e-3
    kept = own < 0.99  # where 1 - m has digits left to divide by
    share = weights[kept, 1].numpy() / (1 - own[kept])
    assert stats.kstest(share, stats.beta(alpha, (width - 1) * alpha).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(own[kept], share)[0, 1]) < 4 / math.sqrt(kept.sum())


def test_large_alpha_mixes_evenly():
    weights = mixing_weights(100, 3, 1e6)
    torch.testing.assert_close(weights, torch.tensor([3.0, 1, 1, 1]).div(6).expand(100, 4), rtol=0, atol=5e-3)


def augmix_by_pillow(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The algorithm of the article, one image (3, H, W) at a time."""
    mixed = np.zeros(image.shape)
    for weight in rng.dirichlet([1, 1, 1]):
        chained = image
        for _ in range(rng.integers(1, 4)):
            level = rng.uniform(0.1, 3) * rng.choice([-1, 1])
            chained = by_pillow(str(rng.choice(list(OPERATIONS))), chained[None], [level])[0]
        mixed += weight * chained / 255
    own = rng.beta(1, 1)
    return own * image / 255 + (1 - own) * mixed


@pytest.mark.slow
def test_whole_transform_has_the_distribution_of_pillows():
    count, image = 1500, bytes_of((3, 16, 16), seed=3)
    rng = np.random.default_rng(0)
    theirs = np.stack([augmix_by_pillow(image, rng) for _ in range(count)])
    ours = augmix(METHODS["dnn"]).transform((to_tensor(image).repeat(count, 1, 1, 1), None))[0].numpy()
    noise = np.sqrt((ours.var(0) + theirs.var(0)) / count)
    difference = ours.mean(0) - theirs.mean(0)
    assert np.abs(difference).max() < 5.5 * noise.max() + 1 / 255  # Pillow cuts to bytes after every operation
    strength = [np.abs(a - image / 255).mean((1, 2, 3)) for a in (ours, theirs)]
    assert stats.ks_2samp(*strength).pvalue > 1e-3
    assert strength[0].mean() > 0.02


def test_chains_are_one_to_three_operations_unless_said():
    # Once changed, a white image never becomes white again, so each operation leaves it white at the same rate.
    x = torch.ones(20_000, 1, 3, 3)
    changed = {d: chains(x.clone(), 10, d).ne(x).flatten(1).any(1).float().mean() for d in (None, 1, 3)}
    assert 0.3 < float(changed[1]) < 0.9
    expected = [1 - (1 - changed[1]) ** d for d in range(1, LONGEST + 1)]
    assert abs(float(changed[3] - expected[-1])) < 0.015
    assert abs(float(changed[None] - sum(expected) / LONGEST)) < 0.015


def test_comes_after_the_methods_own_transform():
    darken = Method(METHODS["dnn"].build, METHODS["dnn"].predict, transform=lambda batch: (batch[0] * 0, *batch[1:]))
    mixed, y, extra = augmix(darken).transform((torch.rand(4, 1, 8, 8), 1, "kept"))
    assert not mixed.any()
    assert (y, extra) == (1, "kept")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (
            torch.rand(4, 2),
            r"images, floating-point numbers of shape \(N, C, H, W\), got torch.float32 of shape \(4, 2\)",
        ),
        (torch.zeros(4, 3, 8, 8, dtype=torch.uint8), "got torch.uint8"),
        (["some", "text"], "got list"),
        (torch.randn(4, 3, 8, 8), r"pixels in \[0, 1\].*normalise inside the network"),
        (torch.full((4, 3, 8, 8), math.nan), r"pixels in \[0, 1\]"),
    ],
)
def test_what_is_no_image_is_refused(x, message: str):
    with pytest.raises(ValueError, match=message):
        augmix(METHODS["dnn"]).transform((x, torch.zeros(4)))


def test_a_batch_of_keywords_is_refused():
    with pytest.raises(ValueError, match=r"batch \(images, labels\), got dict"):
        augmix(METHODS["dnn"]).transform({"pixels": torch.rand(1, 3, 8, 8)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "width to be a whole number of at least 1, got 0"),
        ({"depth": 1.5}, "depth to be a whole number"),
        ({"alpha": 0.0}, "alpha to be positive"),
        ({"severity": 11}, "severity from 0 to 10, got 11"),
    ],
)
def test_options_are_checked(options: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        augmix(METHODS["dnn"], **options)
