"""Scores: pure functions of a Prediction; higher is further from the training data."""

import math
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from torch import Tensor

from afield.prediction.prediction import Prediction
from afield.prediction.predictive import mean_field, monte_carlo
from afield.prediction.scores import SCORES

few = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 10**6)
OF_POSITIONS = {name for name, score in SCORES.items() if score.whole}  # test_regions.py
OF_ROWS = [name for name in SCORES if name not in OF_POSITIONS]
CARRIED = {"joined"}  # by the prediction: what it is made of is tested in gp/test_joined_score.py
OF_THE_VARIANCE = {*CARRIED, "max_probability", "entropy", "gen", "dempster_shafer", "variance", "mutual_information"}


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def prediction(logits: Tensor, variance: Tensor, number: int = 0) -> Prediction:
    members = monte_carlo(logits, variance, 500, torch.Generator().manual_seed(number))
    joined = variance + logits.amax(-1) if variance.dim() == 1 else None
    return Prediction(logits, variance, mean_field(logits, variance), members, joined=joined)


def example(number: int = 0, n: int = 20, k: int = 4) -> Prediction:
    """Its logits are negative, so that they may be minus distances as well."""
    return prediction(-20 + 2 * normal(n, k, number=number), normal(n, number=number + 1).square())


# Independent one-liners -----------------------------------------------------------------------------------------


def dempster_shafer(p: Prediction) -> np.ndarray:
    k = p.logits.shape[1]
    z = p.logits.numpy() / np.sqrt(1 + np.pi / 8 * p.variance.numpy())[:, None]
    z = z - z.mean(1, keepdims=True)
    return k / (k + np.exp(z).sum(1))


FORMULAS: dict[str, Callable[[Prediction], np.ndarray]] = {
    "max_probability": lambda p: 1 - p.probs.numpy().max(1),
    "max_logit": lambda p: -p.logits.numpy().max(1),
    "min_distance": lambda p: (-p.logits.numpy()).min(1),
    "entropy": lambda p: stats.entropy(p.probs.numpy(), axis=1),
    "gen": lambda p: np.array([sum((q * (1 - q)) ** 0.1 for q in sorted(row)[-100:]) for row in p.probs.tolist()]),
    "energy": lambda p: -np.log(np.exp(p.logits.numpy()).sum(1)),
    "dempster_shafer": dempster_shafer,
    "variance": lambda p: p.variance.numpy(),
    "joined": lambda p: p.joined.numpy(),
    "mutual_information": lambda p: np.mean(
        [special.rel_entr(m, p.members.numpy().mean(0)).sum(1) for m in p.members.numpy()], axis=0
    ),
}


def test_every_score_has_its_formula() -> None:
    assert set(FORMULAS) == set(OF_ROWS)


@pytest.mark.parametrize("name", OF_ROWS)
@settings(deadline=None, max_examples=10)
@given(number=seeds)
def test_score_is_its_formula(name: str, number: int) -> None:
    p = example(number)
    np.testing.assert_allclose(SCORES[name](p).numpy(), FORMULAS[name](p), rtol=1e-9, atol=1e-12)


# What every score does ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_ROWS)
def test_one_score_an_example(name: str) -> None:
    p = example()
    whole = SCORES[name](p)
    assert whole.shape == (20,)
    assert bool(torch.isfinite(whole).all())
    torch.testing.assert_close(torch.cat([SCORES[name](p[:7]), SCORES[name](p[7:])]), whole)


@pytest.mark.parametrize("name", OF_ROWS)
def test_the_order_of_the_classes_does_not_matter(name: str) -> None:
    p = example()
    order = torch.tensor([2, 0, 3, 1])
    shuffled = Prediction(p.logits[:, order], p.variance, p.probs[:, order], p.members[..., order], joined=p.joined)
    torch.testing.assert_close(SCORES[name](shuffled), SCORES[name](p))


def test_min_distance_refuses_logits_that_are_no_distances() -> None:
    with pytest.raises(ValueError, match="needs logits that are minus distances, as isomax-plus has, got positive"):
        SCORES["min_distance"](Prediction(torch.tensor([[-1.0, 0.1]])))


@pytest.mark.parametrize("name", sorted(set(OF_ROWS) - {"min_distance"} - CARRIED))
def test_one_logit_scores_as_two_opposite_ones_and_both_signs_alike(name: str) -> None:
    z, v = 2 * normal(20, 1), normal(20, number=1).square()
    scores = []
    for sign in (1, -1):
        one = prediction(sign * z, v)
        two = Prediction(torch.cat([-sign * z / 2, sign * z / 2], 1), v, one.probs, one.members)
        scores.append(SCORES[name](one))
        torch.testing.assert_close(SCORES[name](two), scores[-1])
    atol = 0.05 if name == "mutual_information" else 1e-12  # of samples
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=atol)


@pytest.mark.parametrize("name", sorted(OF_THE_VARIANCE))
def test_more_variance_is_further(name: str) -> None:
    """For centred logits: Dempster-Shafer also reads the common level of the logits, which a softmax does not."""
    logits, v = 2 * normal(20, 4), 0.5 + normal(20, number=1).square()
    logits = logits - logits.mean(1, keepdim=True)
    near, far = (SCORES[name](prediction(logits, s * v)) for s in (1, 8))
    assert bool((far > near).all())


@pytest.mark.parametrize("name", sorted(set(OF_ROWS) - OF_THE_VARIANCE))
def test_scores_of_the_mean_do_not_see_the_variance(name: str) -> None:
    logits, v = -20 + 2 * normal(20, 4), 0.5 + normal(20, number=1).square()
    near, far = (SCORES[name](prediction(logits, s * v)) for s in (1, 8))
    assert torch.equal(near, far)


@pytest.mark.parametrize("name", ["max_probability", "max_logit", "entropy", "gen", "energy", "dempster_shafer"])
def test_a_larger_top_logit_is_nearer(name: str) -> None:
    logits = normal(20, 4)
    zero = torch.zeros(20).double()
    far = prediction(logits, zero)
    near = prediction(logits + 2 * F.one_hot(logits.argmax(1), 4), zero)
    assert bool((SCORES[name](near) < SCORES[name](far)).all())


# Range ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_probability", 3 / 4), ("entropy", math.log(4)), ("dempster_shafer", 1 / 2), ("energy", -math.log(4))],
        ("gen", 4 * (3 / 16) ** 0.1),
    ],
)
def test_knowing_nothing(name: str, value: float) -> None:
    p = prediction(torch.zeros(3, 4).double(), torch.ones(3).double())
    torch.testing.assert_close(SCORES[name](p), torch.full((3,), value).double())


@pytest.mark.parametrize("name", ["max_probability", "max_logit", "entropy", "gen", "energy", "dempster_shafer"])
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_logits_stay_finite(name: str, size: float) -> None:
    logits = size * torch.eye(4)
    p = Prediction(logits, torch.zeros(4), F.softmax(logits, -1))
    assert bool(torch.isfinite(SCORES[name](p)).all())


def test_dempster_shafer_tells_confident_examples_apart_in_float32() -> None:
    """1 - max p is zero for all of them."""
    logits = torch.tensor([[20.0, 0.0], [40.0, 0.0], [80.0, 0.0]])
    scores = SCORES["dempster_shafer"](Prediction(logits, torch.zeros(3), F.softmax(logits, -1)))
    assert bool((scores.diff() < 0).all())
    assert bool((scores > 0).all())


def test_gen_tells_confident_examples_apart_in_float32_and_reads_the_largest_hundred() -> None:
    logits = torch.tensor([[20.0, 0.0], [40.0, 0.0], [80.0, 0.0]])
    assert bool((SCORES["gen"](Prediction(logits, probs=logits.softmax(1))).diff() < 0).all())
    probs = normal(5, 150).softmax(1)
    largest = probs.sort().values[:, -100:]
    torch.testing.assert_close(SCORES["gen"](Prediction(probs, probs=probs)), (largest * (1 - largest)).pow(0.1).sum(1))


@few
@given(number=seeds, k=st.integers(2, 6))
def test_mutual_information_lies_between_zero_and_the_entropy(number: int, k: int) -> None:
    p = example(number, k=k)
    p = Prediction(p.logits, probs=p.members.mean(0), members=p.members)
    information = SCORES["mutual_information"](p)
    assert bool((information >= -1e-12).all())
    assert bool((information <= SCORES["entropy"](p)).all())


def test_mutual_information_of_members_that_agree_is_zero_and_of_certain_rivals_is_log_two() -> None:
    same = F.softmax(normal(1, 20, 3), -1).expand(5, -1, -1)
    torch.testing.assert_close(
        SCORES["mutual_information"](Prediction(normal(20, 3), members=same)), torch.zeros(20).double()
    )
    rivals = torch.eye(2).double()[:, None]
    assert float(SCORES["mutual_information"](Prediction(normal(1, 2), members=rivals))) == pytest.approx(math.log(2))


def test_a_variance_per_class_is_averaged() -> None:
    v = normal(20, 4).square()
    torch.testing.assert_close(SCORES["variance"](Prediction(normal(20, 4), v)), v.mean(1))


def test_certain_probabilities_have_zero_entropy() -> None:
    p = Prediction(normal(2, 2), probs=torch.eye(2))
    assert torch.equal(SCORES["entropy"](p), torch.zeros(2))


@pytest.mark.parametrize("name", sorted(set(OF_ROWS) - CARRIED))
def test_what_is_no_number_is_never_near(name: str) -> None:
    logits, variance = example().logits.clone(), torch.ones(20, dtype=torch.float64)
    logits[3], variance[3] = torch.nan, torch.nan
    p = prediction(logits, variance)
    assert SCORES[name](p).isnan().nonzero().flatten().tolist() == [3]


# Missing fields -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("max_probability", "probs"),
        ("entropy", "probs"),
        ("gen", "probs"),
        ("variance", "variance"),
        ("mutual_information", "members"),
    ],
)
def test_a_missing_field_is_named(name: str, field: str) -> None:
    with pytest.raises(ValueError, match=f"This score needs {field}, which the prediction lacks. Use another score"):
        SCORES[name](Prediction(normal(5, 2)))


FIELDS = ("variance", "probs", "members")


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("present", [c for r in range(4) for c in combinations(FIELDS, r)])
def test_a_score_applies_exactly_where_calling_it_is_no_error(name: str, sign: int, present: tuple[str, ...]) -> None:
    whole = example()
    p = Prediction(sign * whole.logits, **{field: getattr(whole, field) for field in present})
    if SCORES[name].applies(p):
        assert SCORES[name](p).shape == (len(p),)
    else:
        with pytest.raises(ValueError, match="needs"):
            SCORES[name](p)


@pytest.mark.parametrize("name", ["max_logit", "energy", "dempster_shafer"])
def test_scores_of_the_logits_need_nothing_else(name: str) -> None:
    """So they also serve a plain network; without a variance, Dempster-Shafer reads the logits as they are."""
    logits, none = normal(5, 3), torch.zeros(5).double()
    torch.testing.assert_close(SCORES[name](Prediction(logits)), SCORES[name](prediction(logits, none)))


def test_dempster_shafer_ignores_the_common_level_of_the_logits_which_softmax_leaves_free() -> None:
    p = example()
    shifted = prediction(p.logits - 10, p.variance)
    torch.testing.assert_close(shifted.score("dempster_shafer"), p.score("dempster_shafer"), rtol=1e-9, atol=0)
