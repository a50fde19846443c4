"""p-values by class and with confidence: exact over all splits and draws, the groups of small classes, the errors."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from afield.prediction import p_values
from afield.prediction.p_values import (
    FEWEST_OF_A_CLASS,
    class_p_value,
    conformal_p_value,
    fewest_rows,
    largest_rank,
    predicted_class,
    sort_reference,
    with_p_values,
)
from afield.prediction.prediction import Prediction

few = settings(max_examples=60, deadline=None)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def groups_of(counts: list[int]) -> list[tuple[int, ...]]:
    """The classes with which each class is compared."""
    groups, group_of = p_values._groups(counts)
    return [groups[i] for i in group_of]


def calibrated(p_value: Tensor, n: int | Tensor, **fields: object) -> Prediction:
    known = {"smallest_p_value": 1 / ((n if isinstance(n, int) else int(n.min())) + 1), "num_reference": n}
    return Prediction(torch.zeros(len(p_value), 3), p_value=p_value, **known | fields)


# By class -------------------------------------------------------------------------------------------------------


@few
@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 3)), min_size=1, max_size=30),
    new=st.lists(st.tuples(st.integers(0, 2), st.integers(-4, 4)), min_size=1, max_size=8),
)
def test_p_values_by_class_count_the_scores_of_the_group(rows, new):
    classes, scores = (torch.tensor(column) for column in zip(*rows, strict=True))
    k, s = (torch.tensor(column) for column in zip(*new, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p_values, "FEWEST_OF_A_CLASS", 3)
        groups = groups_of(classes.bincount(minlength=3).tolist())
        reference, spans = sort_reference(scores.double(), classes, 3)
    found, n = class_p_value(s.double(), k, reference, spans)
    for i in range(len(new)):
        compared = [score for c, score in rows if c in groups[new[i][0]]]
        assert int(n[i]) == len(compared)
        assert float(found[i]) == (1 + sum(r >= new[i][1] for r in compared)) / (len(compared) + 1)


@few
@given(rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=2, max_size=25))
def test_p_values_by_class_are_superuniform_in_every_group_over_every_split(rows):
    """Leave each in turn out. Rows of one group are then compared with exactly the other rows of the group."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p_values, "FEWEST_OF_A_CLASS", 4)
        for i, (k, score) in enumerate(rows):
            others = rows[:i] + rows[i + 1 :]
            classes = torch.tensor([c for c, _ in others])
            reference, spans = sort_reference(torch.tensor([s for _, s in others]).double(), classes, 4)
            p, n = class_p_value(torch.tensor([score]).double(), torch.tensor([k]), reference, spans)
            group = groups_of(classes.bincount(minlength=4).tolist())[k]
            ranks.setdefault(group, []).append(round(float(p) * (int(n) + 1)))
            assert int(n) + 1 == sum(c in group for c, _ in rows)
    for group, found in ranks.items():
        assert len(found) == sum(c in group for c, _ in rows), "all rows of the group have the group"
        assert all(sum(r <= k for r in found) <= k for k in range(1, len(found) + 1))


def test_small_classes_share_a_reference_of_at_least_99_rows():
    assert FEWEST_OF_A_CLASS == 99
    assert groups_of([500, 99, 98, 2, 0]) == [(0,), (1,), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)]
    assert groups_of([500, 300, 10, 0]) == [(0,), (1, 2, 3), (1, 2, 3), (1, 2, 3)]
    assert groups_of([500, 300, 300, 0]) == [(0,), (1,), (2,), (1, 3)]  # a new row makes the other the smallest
    assert groups_of([50, 20]) == [(0, 1), (0, 1)]
    for counts in itertools.product([0, 1, 50, 98, 99, 100, 101, 400], repeat=3):
        for k, group in enumerate(groups_of(list(counts))):
            assert k in group
            assert sum(counts[j] for j in group) >= min(99, sum(counts))


def test_groups_of_many_classes_take_no_time():
    counts = torch.randint(0, 200, (20_000,), generator=generator()).tolist()
    groups = groups_of(counts)
    assert all(group == (k,) for k, group in enumerate(groups) if counts[k] >= 99)
    assert len({id(group) for group in groups if len(group) > 1}) == 1


def test_a_minority_class_is_not_refused_wholesale():
    """99:1, and the minority lies further out: by one reference it is refused, by its own at the rate that is asked."""
    rates = []
    for seed in range(40):
        g = generator(seed)
        k = (torch.rand(24_000, generator=g) < 0.01).long()
        scores = torch.randn(24_000, generator=g, dtype=torch.float64) + 4 * k
        old, new, y = scores[:14_000], scores[14_000:], k[14_000:]
        assert int(k[:14_000].sum()) >= 99
        together = conformal_p_value(new, old.sort().values)[0] <= 0.01
        apart = class_p_value(new, y, *sort_reference(old, k[:14_000], 2))[0] <= 0.01
        rates.append([float(refused[y == c].double().mean()) for refused in (together, apart) for c in (0, 1)])
    mean = np.mean(rates, 0)
    assert mean[1] > 0.6
    assert mean[2] == pytest.approx(0.01, abs=0.001)
    assert mean[3] <= 0.02


def test_a_score_that_is_not_a_number_is_in_no_class():
    reference, spans = sort_reference(torch.rand(300, dtype=torch.float64), torch.arange(300) % 2, 2)
    p, n = class_p_value(torch.tensor([math.nan, math.inf, -math.inf]), torch.tensor([0, 1, 1]), reference, spans)
    assert (p * (n + 1)).round().tolist() == [1, 1, 151]


def test_the_class_does_not_depend_on_the_predictive():
    logits = torch.tensor([[1.0, 0.9], [0.2, 0.3]])
    variance = torch.tensor([[100.0, 0.0], [0.0, 0.0]])
    assert predicted_class(Prediction(logits, variance, probs=torch.tensor([[0.9, 0.1], [0.9, 0.1]]))).tolist() == [
        1,
        1,
    ]
    assert predicted_class(Prediction(logits, variance[:, 0])).tolist() == [0, 1]
    assert predicted_class(Prediction(torch.tensor([[0.5], [-0.5], [math.nan]]))).tolist() == [1, 0, 0]


def test_numbers_have_no_classes():
    with pytest.raises(ValueError, match="need classes to predict"):
        sort_reference(torch.rand(5), torch.zeros(5, dtype=torch.int64), 0)
    with pytest.raises(ValueError, match=r"a class for each of 5 scores, got shape \(4,\)"):
        sort_reference(torch.rand(5), torch.zeros(4, dtype=torch.int64), 2)


def prediction_by_class() -> Prediction:
    logits = torch.randn(40, 3, generator=generator(1))
    reference, spans = sort_reference(torch.rand(600, dtype=torch.float64), torch.arange(600) % 6 // 3, 3)
    return with_p_values(Prediction(logits, torch.rand(40, generator=generator(2))), reference, spans)


def test_predictions_by_class_are_cut_joined_and_cast_with_their_numbers():
    whole = prediction_by_class()
    assert set(whole.num_reference.tolist()) == {300}
    assert whole.smallest_p_value == 1 / 301
    again = Prediction.cat([whole[:7], whole[7], whole[8:]])
    assert torch.equal(again.num_reference, whole.num_reference)
    half = whole.to(torch.float16)
    assert (half.logits.dtype, half.num_reference.dtype) == (torch.float16, torch.int64)
    assert torch.equal(half.to("cpu").num_reference, whole.num_reference)
    assert copy.deepcopy(whole).numpy()["num_reference"].tolist() == [300] * 40
    marginal = with_p_values(whole, torch.rand(99).double().sort().values, torch.zeros(0, 2, dtype=torch.int64))
    assert marginal.num_reference == 99
    with pytest.raises(ValueError, match="Cannot join"):
        Prediction.cat([whole, marginal])


def test_alpha_finer_than_the_smallest_class_can_tell_is_refused_whatever_the_batch():
    p = calibrated(torch.ones(3), torch.tensor([999, 999, 999]), smallest_p_value=1 / 100)
    with pytest.raises(ValueError, match=r"alpha = 0\.005 is finer .* at least 199 reference examples of each class"):
        p.accept(0.005)
    with pytest.raises(ValueError, match=r"from 99 reference examples of each class.* at least 230, or use a larger"):
        p.accept(0.01, delta=0.1)
    assert p.accept(0.05, delta=0.1).all()


def test_the_smallest_reference_is_that_of_the_smallest_group():
    reference, spans = sort_reference(torch.rand(700), torch.arange(700).clamp_max(200) // 200, 2)
    assert fewest_rows(reference, spans) == 200
    assert fewest_rows(reference, spans[:0]) == 700


# With confidence ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("delta", [0.01, 0.1, 0.5])
def test_the_rank_is_the_largest_that_keeps_the_promise(alpha: float, delta: float):
    for n in (10, 44, 45, 229, 230, 333, 5000):
        k = largest_rank(n, alpha, delta)
        broken = stats.beta.sf(alpha, np.arange(1, n + 1), n - np.arange(n))
        assert k == int((broken <= delta).sum())


def test_of_many_draws_at_most_a_part_delta_exceeds_alpha():
    """With uniform scores the false-alarm rate of a reference is known exactly: one minus the threshold."""
    n, alpha, delta, draws = 500, 0.05, 0.1, 10_000
    reference = torch.rand(draws, n, generator=generator(3), dtype=torch.float64).sort().values
    prediction = calibrated(conformal_p_value(reference[0], reference[0])[0], n)  # ranks are alike in all draws
    broken = []
    for options in ({}, {"delta": delta}):
        threshold = int(prediction.accept(alpha, **options).sum()) - 1  # the last reference score that is accepted
        broken.append(float((1 - reference[:, threshold] > alpha).double().mean()))
    k = largest_rank(n, alpha, delta)
    exact = stats.beta.sf(alpha, [math.floor(alpha * (n + 1)), k], n + 1 - np.array([25, k]))
    assert exact[1] <= delta
    np.testing.assert_allclose(broken, exact, atol=4 * math.sqrt(0.25 / draws))
    assert 0.4 < exact[0] < 0.6  # on average is not for every draw


def test_every_class_keeps_its_own_promise():
    sizes = torch.tensor([99, 230, 1000, 230])
    ranks = [largest_rank(int(n), 0.05, 0.1) for n in sizes]
    at = torch.tensor([k / (n + 1) for k, n in zip(ranks, sizes.tolist(), strict=True)])
    above = torch.tensor([(k + 1) / (n + 1) for k, n in zip(ranks, sizes.tolist(), strict=True)])
    assert not calibrated(at, sizes).accept(0.05, delta=0.1).any()
    assert calibrated(above, sizes).accept(0.05, delta=0.1).all()


def test_too_small_a_reference_says_how_many_rows_are_needed():
    with pytest.raises(ValueError, match=r"alpha = 0\.01 cannot .* confidence 0\.9 from 229 .*at least 230"):
        calibrated(torch.ones(2), 229).accept(0.01, delta=0.1)
    calibrated(torch.ones(2), 230).accept(0.01, delta=0.1)


def test_delta_needs_one_reference_and_a_rate():
    with pytest.raises(ValueError, match=r"delta needs p-values of one reference.*Leave delta out"):
        calibrated(torch.ones(2), 500, num_reference=None).accept(0.1, delta=0.1)
    for delta in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="delta must lie strictly between 0 and 1"):
            calibrated(torch.ones(2), 500).accept(0.1, delta=delta)
