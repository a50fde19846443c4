"""KS and MMD of `bench.drift` are those of scipy and of alibi-detect, which the watch is compared with."""

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp

from bench.drift import Mmd, ks


def samples(shift: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(200, 8)).astype(np.float32), (rng.normal(size=(50, 8)) + shift).astype(np.float32)


def mmd2(x: np.ndarray, y: np.ndarray) -> float:
    test = Mmd(x, len(y), level=1 / 1000)
    both = torch.from_numpy(np.concatenate([x, y]))
    kernel = torch.exp(-torch.cdist(both, both).square() / test.width).fill_diagonal_(0)
    return float(test._statistics(kernel, test.chosen[:1])[0])


@pytest.mark.parametrize("shift", [0.0, 0.2, 0.5])
def test_ks_is_scipys_with_bonferronis_correction(shift: float):
    x, y = samples(shift)
    expected = min(ks_2samp(x[:, k], y[:, k], method="asymp").pvalue for k in range(8))
    assert ks(x, y) == pytest.approx(min(1.0, 8 * expected))


def test_mmd_is_the_unbiased_estimate():
    x, y = samples(0.3)
    width = np.median(np.square(x[:, None] - x).sum(-1))
    xx, yy, xy = (np.exp(-np.square(a[:, None] - b).sum(-1) / width) for a, b in ((x, x), (y, y), (x, y)))
    n, m = len(x), len(y)
    expected = (xx.sum() - n) / (n * (n - 1)) + (yy.sum() - m) / (m * (m - 1)) - 2 * xy.mean()
    assert mmd2(x, y) == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of alibi-detect and what it imports
@pytest.mark.parametrize("shift", [0.0, 0.2, 0.5])
def test_both_are_those_of_alibi_detect(shift: float):
    detectors = pytest.importorskip("alibi_detect.cd", reason="needs pip install --no-deps alibi-detect numba llvmlite")
    x, y = samples(shift)
    theirs = detectors.KSDrift(x).predict(y, drift_type="feature")["data"]["p_val"]
    assert ks(x, y) == pytest.approx(min(1.0, 8 * float(theirs.min())), rel=1e-4)
    torch.manual_seed(0)
    found = detectors.MMDDrift(x, backend="pytorch", n_permutations=1000).predict(y)["data"]
    assert mmd2(x, y) == pytest.approx(float(found["distance"]), rel=1e-3, abs=1e-6)
    assert Mmd(x, len(y), level=1 / 1000).p_value(y) == pytest.approx(float(found["p_val"]), abs=0.06)
