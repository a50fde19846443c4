"""Selection with few false discoveries: against scipy's adjusted p-values, over many batches, in pieces."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import afield
from afield.decide.selection import Counts, flag
from afield.prediction.p_values import class_p_value, conformal_p_value, sort_reference

ranks = st.integers(1, 100)


@settings(max_examples=100, deadline=None)
@given(st.lists(ranks, min_size=1, max_size=60), st.sampled_from([0.05, 0.1, 0.3]), st.booleans())
def test_flags_are_those_of_scipy(drawn: list[int], fdr: float, any_dependence: bool):
    p = np.array(drawn) / 100
    adjusted = stats.false_discovery_control(p, method="by" if any_dependence else "bh")
    found = flag(torch.from_numpy(p), fdr=fdr, any_dependence=any_dependence).numpy()
    clear = abs(adjusted - fdr) > 1e-9
    assert np.array_equal(found[clear], (adjusted <= fdr)[clear])
    assert found[abs(adjusted - fdr) <= 1e-12].all()  # equality counts


@settings(max_examples=50, deadline=None)
@given(st.lists(ranks, min_size=1, max_size=80), st.lists(st.integers(0, 80), max_size=5))
def test_pieces_in_any_order_are_the_whole(drawn: list[int], cuts: list[int]):
    p = (np.array(drawn) / 100).astype(np.float32)
    counts = Counts()
    for piece in reversed(np.split(p, sorted(cuts))):
        counts.add(piece)
    assert counts.total == len(p)
    assert len(counts.values) <= 100
    whole = flag(torch.from_numpy(p), fdr=0.2)
    assert np.array_equal(p <= counts.threshold(0.2), whole.numpy())
    assert counts.count_to(counts.threshold(0.2)) == int(whole.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equality_counts_whatever_the_rounding(dtype: torch.dtype):
    """N t = fdr #{p <= t}: for t = k / N with k of N p-values there and fdr = 1 up to a factor."""
    for n in range(2, 60):
        p = torch.full((10 * n,), 1.0, dtype=dtype)
        p[:10] = torch.tensor(1.0, dtype=dtype) / (2 * n)  # N t = 5, fdr #{p <= t} = 10 fdr
        assert int(flag(p, fdr=0.5).sum()) == 10
        assert int(flag(p, fdr=0.4999).sum()) == 0


def test_ties_stand_or_fall_together():
    p = torch.tensor([0.02] * 5 + [0.5] * 5)
    assert flag(p, fdr=0.04).tolist() == [True] * 5 + [False] * 5
    assert flag(p, fdr=0.03).tolist() == [False] * 10
    assert flag(torch.ones(4), fdr=0.5).tolist() == [False] * 4
    assert flag(torch.zeros(0), fdr=0.5).tolist() == []


@pytest.mark.parametrize("by_class", [False, True])
def test_the_mean_part_of_in_domain_inputs_among_the_flagged_is_at_most_fdr(by_class: bool):
    """400 references and batches of 200, a fifth of them far; p-values of one batch share their reference."""
    g, fdr = torch.Generator().manual_seed(0), 0.2
    parts, found = [], []
    far = torch.arange(200) < 40
    for _ in range(400):
        reference = torch.randn(600, generator=g, dtype=torch.float64)
        scores = torch.randn(200, generator=g, dtype=torch.float64) + 3.5 * far
        if by_class:  # two classes, the second one twice as wide
            old, new = torch.arange(600) % 2, torch.arange(200) % 2
            table, spans = sort_reference(reference * (1 + old), old, 2)
            p, _ = class_p_value(scores * (1 + new), new, table, spans)
        else:
            p, _ = conformal_p_value(scores, reference.sort().values)
        flagged = flag(p, fdr=fdr)
        parts.append(float((flagged & ~far).sum()) / max(1, int(flagged.sum())))
        found.append(float(flagged[far].double().mean()))
    error = np.std(parts) / math.sqrt(len(parts))
    assert np.mean(parts) <= fdr * 0.8 + 3 * error  # times the part of the batch that is in-domain
    assert np.mean(parts) >= fdr * 0.8 - 0.05  # and not far below: the level is used
    assert np.mean(found) > 0.8


def test_a_batch_from_the_domain_is_flagged_in_one_of_ten():
    g, flagged = torch.Generator().manual_seed(1), 0
    for _ in range(500):
        scores = torch.rand(550, generator=g, dtype=torch.float64)
        flagged += int(flag(conformal_p_value(scores[500:], scores[:500].sort().values)[0], fdr=0.1).any())
    assert flagged / 500 <= 0.1 + 3 * math.sqrt(0.09 / 500)


def test_harmonic_numbers():
    from afield.decide.selection import _harmonic

    for n in (1, 2, 999, 1000, 100_000):
        assert _harmonic(n) == pytest.approx(math.fsum(1 / i for i in range(1, n + 1)), rel=1e-12)


def test_errors():
    with pytest.raises(ValueError, match="fdr must lie strictly between 0 and 1, got 1"):
        flag(torch.ones(3), fdr=1.0)
    with pytest.raises(ValueError, match=r"Expected p-values of shape \(batch,\), got \(3, 1\)"):
        flag(torch.ones(3, 1))
    for wrong in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="p-values must lie above 0 and be at most 1"):
            flag(torch.tensor([0.5, wrong]))


def test_it_has_a_short_name():
    assert afield.selection.flag is flag
