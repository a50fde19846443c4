"""Scores: functions of a Prediction, pure or fitted to training features; higher is further from the training data."""

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
from scipy.spatial import distance
from sklearn import neighbors
from torch import Tensor

from afield.errors import NotFitted
from afield.prediction.distance_scores import FITTED, FittedScore, Mahalanobis, NearestNeighbors
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import mean_field, monte_carlo
from afield.prediction.scores import SCORES

few = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 10**6)
OF_THE_VARIANCE = {"max_probability", "entropy", "dempster_shafer", "variance", "mutual_information"}


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def prediction(logits: Tensor, variance: Tensor, number: int = 0) -> Prediction:
    members = monte_carlo(logits, variance, 500, torch.Generator().manual_seed(number))
    return Prediction(logits, variance, mean_field(logits, variance), members)


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
    "energy": lambda p: -np.log(np.exp(p.logits.numpy()).sum(1)),
    "dempster_shafer": dempster_shafer,
    "variance": lambda p: p.variance.numpy(),
    "mutual_information": lambda p: np.mean(
        [special.rel_entr(m, p.members.numpy().mean(0)).sum(1) for m in p.members.numpy()], axis=0
    ),
}


def test_every_score_has_its_formula() -> None:
    assert set(FORMULAS) == set(SCORES)


@pytest.mark.parametrize("name", SCORES)
@settings(deadline=None, max_examples=10)
@given(number=seeds)
def test_score_is_its_formula(name: str, number: int) -> None:
    p = example(number)
    np.testing.assert_allclose(SCORES[name](p).numpy(), FORMULAS[name](p), rtol=1e-9, atol=1e-12)


# What every score does ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCORES)
def test_one_score_an_example(name: str) -> None:
    p = example()
    whole = SCORES[name](p)
    assert whole.shape == (20,)
    assert bool(torch.isfinite(whole).all())
    torch.testing.assert_close(torch.cat([SCORES[name](p[:7]), SCORES[name](p[7:])]), whole)


@pytest.mark.parametrize("name", SCORES)
def test_the_order_of_the_classes_does_not_matter(name: str) -> None:
    p = example()
    order = torch.tensor([2, 0, 3, 1])
    shuffled = Prediction(p.logits[:, order], p.variance, p.probs[:, order], p.members[..., order])
    torch.testing.assert_close(SCORES[name](shuffled), SCORES[name](p))


def test_min_distance_refuses_logits_that_are_no_distances() -> None:
    with pytest.raises(ValueError, match="needs logits that are minus distances, as isomax-plus has, got positive"):
        SCORES["min_distance"](Prediction(torch.tensor([[-1.0, 0.1]])))


@pytest.mark.parametrize("name", sorted(set(SCORES) - {"min_distance"}))
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


@pytest.mark.parametrize("name", sorted(set(SCORES) - OF_THE_VARIANCE))
def test_scores_of_the_mean_do_not_see_the_variance(name: str) -> None:
    logits, v = -20 + 2 * normal(20, 4), 0.5 + normal(20, number=1).square()
    near, far = (SCORES[name](prediction(logits, s * v)) for s in (1, 8))
    assert torch.equal(near, far)


@pytest.mark.parametrize("name", ["max_probability", "max_logit", "entropy", "energy", "dempster_shafer"])
def test_a_larger_top_logit_is_nearer(name: str) -> None:
    logits = normal(20, 4)
    zero = torch.zeros(20).double()
    far = prediction(logits, zero)
    near = prediction(logits + 2 * F.one_hot(logits.argmax(1), 4), zero)
    assert bool((SCORES[name](near) < SCORES[name](far)).all())


# Range ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_probability", 3 / 4), ("entropy", math.log(4)), ("dempster_shafer", 1 / 2), ("energy", -math.log(4))],
)
def test_knowing_nothing(name: str, value: float) -> None:
    p = prediction(torch.zeros(3, 4).double(), torch.ones(3).double())
    torch.testing.assert_close(SCORES[name](p), torch.full((3,), value).double())


@pytest.mark.parametrize("name", ["max_probability", "max_logit", "entropy", "energy", "dempster_shafer"])
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


# Missing fields -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "field"),
    [("max_probability", "probs"), ("entropy", "probs"), ("variance", "variance"), ("mutual_information", "members")],
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


# Fitted scores: independent computations ------------------------------------------------------------------------

JITTER = 1e-6
K, D = 3, 4
Data = tuple[Tensor, Tensor]


def data(number: int = 0, n: int = 60, d: int = D, k: int = K) -> Data:
    """Correlated features (n, d) around k centres, and their classes; every class has examples."""
    target = torch.arange(n) % k
    mix = normal(d, d, number=number + 1)
    return normal(n, d, number=number) @ mix + 3 * normal(k, d, number=number + 2)[target], target


def of(features: Tensor) -> Prediction:
    return Prediction(torch.zeros(features.shape[0], K), features=features)


def fit(score: FittedScore, train: Data, batch: int = 1000) -> FittedScore:
    for h, y in zip(train[0].split(batch), train[1].split(batch), strict=True):
        score.update(h, y)
    return score


def fitted(name: str, train: Data, batch: int = 1000) -> FittedScore:
    return fit(FITTED[name](D, K), train, batch)


def squares(x: np.ndarray, centers: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    return (distance.cdist(x, centers, "mahalanobis", VI=np.linalg.inv(covariance)) ** 2).min(1)


def mahalanobis(train: Data, x: Tensor, *, relative: bool = False) -> np.ndarray:
    h, y = (t.numpy() for t in train)
    means = np.stack([h[y == k].mean(0) for k in np.unique(y)])
    within = sum(np.cov(h[y == k].T, bias=True) * np.mean(y == k) for k in np.unique(y))
    jitter = JITTER * np.diag(within).mean() * np.eye(h.shape[1])
    near = squares(x.numpy(), means, within + jitter)
    return near - relative * squares(x.numpy(), h.mean(0)[None], np.cov(h.T, bias=True) + jitter)


def knn(train: Data, x: Tensor) -> np.ndarray:
    known, query = (t.numpy() / np.linalg.norm(t.numpy(), axis=1, keepdims=True) for t in (train[0], x))
    return neighbors.NearestNeighbors(n_neighbors=10).fit(known).kneighbors(query)[0][:, -1]


FITTED_FORMULAS: dict[str, Callable[[Data, Tensor], np.ndarray]] = {
    "mahalanobis": mahalanobis,
    "relative_mahalanobis": lambda train, x: mahalanobis(train, x, relative=True),
    "knn": knn,
}
every_fitted = pytest.mark.parametrize("name", FITTED)
gaussians = pytest.mark.parametrize("name", ["mahalanobis", "relative_mahalanobis"])


def test_every_fitted_score_has_its_formula_and_a_name_of_its_own() -> None:
    assert set(FITTED_FORMULAS) == set(FITTED)
    assert not set(FITTED) & set(SCORES)


@every_fitted
@settings(deadline=None, max_examples=10)
@given(number=seeds, batch=st.integers(1, 80))
def test_fitted_score_is_its_formula(name: str, number: int, batch: int) -> None:
    train, x = data(number), 4 * normal(20, D, number=number + 3)
    got = fitted(name, train, batch).score(of(x)).numpy()
    atol = 1e-6 if name == "knn" else 1e-8  # neighbours are kept in float32
    np.testing.assert_allclose(got, FITTED_FORMULAS[name](train, x), rtol=1e-6, atol=atol)


# What every fitted score does -----------------------------------------------------------------------------------


@every_fitted
@few
@given(number=seeds, cut=st.integers(0, 60))
def test_merged_parts_are_the_whole_in_any_order(name: str, number: int, cut: int) -> None:
    h, y = data(number)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(number))
    first, second = fitted(name, (h[:cut], y[:cut])), fitted(name, (h[cut:], y[cut:]), batch=7)
    first.merge(second)
    whole, shuffled = fitted(name, (h, y)), fitted(name, (h[order], y[order]))
    x = of(3 * normal(20, D, number=5))
    torch.testing.assert_close(first.score(x), whole.score(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(shuffled.score(x), whole.score(x), rtol=1e-9, atol=1e-9)


@every_fitted
def test_merging_with_an_empty_accumulator_changes_nothing_and_with_itself_no_gaussian(name: str) -> None:
    score, x = fitted(name, data()), of(normal(20, D, number=5))
    before = score.score(x)
    score.merge(FITTED[name](D, K))
    assert torch.equal(score.score(x), before)
    if name != "knn":
        score.merge(score)
        torch.testing.assert_close(score.score(x), before)


@every_fitted
def test_scores_are_one_an_example_and_leave_the_state_alone(name: str) -> None:
    score, x = fitted(name, data()), of(normal(2500, D, number=5))
    whole = score.score(x)
    assert whole.shape == (2500,)
    assert bool(torch.isfinite(whole).all())
    torch.testing.assert_close(torch.cat([score.score(x[:7]), score.score(x[7:])]), whole)
    assert score.score(x[:0]).shape == (0,)


@every_fitted
def test_an_update_after_a_score_counts_and_reset_forgets_all(name: str) -> None:
    first, second, x = data(), data(10), of(normal(20, D, number=5))
    score = fitted(name, first)
    before = score.score(x)
    fit(score, second)
    assert not torch.equal(score.score(x), before)
    score.reset()
    with pytest.raises(NotFitted):
        score.score(x)
    torch.testing.assert_close(fit(score, first).score(x), before)


@every_fitted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_dtype_goes_in_and_at_least_float32_comes_out(name: str, dtype: torch.dtype) -> None:
    h, y = data()
    got = fitted(name, (h.to(dtype), y)).score(of(h.to(dtype)))
    assert got.dtype == torch.promote_types(dtype, torch.float32)


@every_fitted
def test_gradients_are_not_kept(name: str) -> None:
    h, y = data()
    assert not fitted(name, (h.requires_grad_(), y)).score(of(h)).requires_grad


@every_fitted
def test_memory_does_not_grow_with_the_examples_and_a_thousand_classes_fit(name: str) -> None:
    d, k, reservoir = 512, 1000, 10_000
    score = FITTED[name](d, k)
    h, y = torch.randn(3000, d), torch.arange(3000) % k
    sizes = []
    for _ in range(5):
        score.update(h, y)
        sizes.append(sum(t.numel() for t in vars(score).values() if isinstance(t, Tensor)))
    assert sizes[-1] == sizes[-2]
    assert sizes[-1] <= (reservoir * (d + 1) if name == "knn" else k * d + d * d + k)
    assert score.score(of(h[:10])).shape == (10,)


@every_fitted
def test_far_off_the_data_is_further(name: str) -> None:
    """All training features lie in the positive quarter, as after a ReLU."""
    h, y = data()
    score = fitted(name, (h.abs() + 1, y))
    near, far = score.score(of(h.abs() + 1)), score.score(of(-20 * h.abs() - 20))
    assert float(far.min()) > float(near.max())


# Theorems of the Gaussians --------------------------------------------------------------------------------------


@gaussians
@few
@given(number=seeds)
def test_affine_maps_of_the_features_change_nothing(name: str, number: int) -> None:
    (h, y), x = data(number), normal(20, D, number=number + 5)
    turn = torch.linalg.qr(normal(D, D, number=number + 6)).Q  # with any scale, but no stretch: jitter is isotropic
    shift = 10 * normal(D, number=number + 7)
    moved = fitted(name, (5 * h @ turn + shift, y)).score(of(5 * x @ turn + shift))
    torch.testing.assert_close(moved, fitted(name, (h, y)).score(of(x)), rtol=1e-6, atol=1e-6)


@few
@given(number=seeds)
def test_training_distances_average_to_the_dimension(number: int) -> None:
    """tr S^-1 S = d; the same for the background, so that a single class has a relative distance of zero."""
    h = data(number)[0]
    zero = torch.zeros(60).long()
    plain, relative = (fit(FITTED[name](D, 1), (h, zero)).score(of(h)) for name in FITTED if name != "knn")
    assert float(plain.mean()) == pytest.approx(D, rel=1e-3)
    torch.testing.assert_close(relative, torch.zeros(60).double(), rtol=0, atol=1e-9)


def test_class_means_have_distance_zero() -> None:
    h, y = data()
    means = torch.stack([h[y == k].mean(0) for k in range(K)])
    torch.testing.assert_close(
        fitted("mahalanobis", (h, y)).score(of(means)), torch.zeros(3).double(), atol=1e-9, rtol=0
    )


@gaussians
def test_dead_units_do_not_break_the_covariance_and_cancel_in_the_relative_distance(name: str) -> None:
    (h, y), x = data(), normal(20, D, number=5)
    dead, fires = torch.zeros(60, 2).double(), normal(20, 2, number=6)
    score = fit(FITTED[name](D + 2, K), (torch.cat([h, dead], 1), y))
    silent, firing = (score.score(of(torch.cat([x, unit], 1))) for unit in (0 * fires, fires))
    assert bool(torch.isfinite(firing).all())
    if name == "mahalanobis":
        assert bool((firing > silent).all())
    else:
        torch.testing.assert_close(firing, silent, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(silent, fitted(name, (h, y)).score(of(x)), rtol=1e-4, atol=1e-4)


@gaussians
def test_a_large_common_level_costs_no_digits(name: str) -> None:
    """Raw second moments would lose all of them: 1e8 squared leaves nothing for a variance of 1."""
    (h, y), x = data(), normal(20, D, number=5)
    moved = fitted(name, (h + 1e8, y), batch=9).score(of(x + 1e8))
    torch.testing.assert_close(moved, fitted(name, (h, y)).score(of(x)), rtol=1e-4, atol=1e-4)


@gaussians
def test_a_class_without_examples_attracts_nothing(name: str) -> None:
    (h, y), x = data(), normal(20, D, number=5)
    wider = fit(FITTED[name](D, K + 2), (h, y + 1))
    torch.testing.assert_close(wider.score(of(x)), fitted(name, (h, y)).score(of(x)))


# Theorems of the neighbours -------------------------------------------------------------------------------------


def neighbours(features: Tensor, **options: int) -> NearestNeighbors:
    score = NearestNeighbors(features.shape[1], **options)
    score.update(features)
    return score


@few
@given(number=seeds, scale=st.floats(1e-2, 1e2))
def test_neighbours_see_directions_only_and_lie_within_the_sphere(number: int, scale: float) -> None:
    h, x = data(number)[0], normal(20, D, number=number + 5)
    got = neighbours(h).score(of(x))
    torch.testing.assert_close(neighbours(scale * h).score(of(x / scale)), got, rtol=1e-4, atol=1e-5)
    assert bool(((got >= 0) & (got <= 2)).all())


def test_a_training_feature_is_its_own_nearest_and_later_neighbours_are_further() -> None:
    h = data()[0].float()
    distances = torch.stack([neighbours(h, k=k).score(of(h)) for k in (1, 2, 5, 20)])
    assert float(distances[0].max()) < 1e-6
    assert bool((distances.diff(dim=0) > 0).all())


@few
@given(number=seeds, batch=st.integers(1, 300), cut=st.integers(0, 300))
def test_the_sample_is_the_same_bit_for_bit_in_any_batches_and_processes(number: int, batch: int, cut: int) -> None:
    h = normal(300, D, number=number).float()
    whole = neighbours(h, reservoir=40)
    parts, rest = neighbours(h[:cut], reservoir=40), neighbours(h[cut:], reservoir=40)
    parts.merge(rest)
    batches = NearestNeighbors(D, reservoir=40)
    for part in h.flip(0).split(batch):
        batches.update(part)
    for other in (parts, batches):
        assert torch.equal(other.features, whole.features)
        assert other.num_seen == 300
    assert whole.features.shape == (40, D)


@pytest.mark.parametrize("kind", ["normal", "grid", "one_hot"])
def test_every_training_feature_has_the_same_chance_of_being_kept(kind: str) -> None:
    """Also where features are alike in most of their bits. Counts over seeds are binomial, and pairs independent."""
    n, keep, trials = 120, 30, 400
    grid = torch.arange(n)[:, None].expand(n, D) / 8.0
    h = {"normal": normal(n, D).float(), "grid": grid, "one_hot": torch.eye(n)}[kind]
    kept = torch.zeros(trials, n)
    for seed in range(trials):
        sample = neighbours(h, reservoir=keep, seed=seed).features
        kept[seed] = (h[:, None] == sample[None]).all(-1).any(1)
    p = keep / n
    assert bool((kept.sum(1) == keep).all())
    z = (kept.mean(0) - p) / math.sqrt(p * (1 - p) / trials)
    assert float(z.abs().max()) < 4.5
    assert float(z.square().mean()) == pytest.approx(1, abs=0.5)
    pairs = torch.corrcoef(kept.T).fill_diagonal_(0)
    assert float(pairs.std()) == pytest.approx(1 / math.sqrt(trials), rel=0.1)


def test_seeds_differ_and_repeat() -> None:
    h = normal(300, D)
    one, same, other = (neighbours(h, reservoir=40, seed=seed).features for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_copies_of_a_training_feature_are_all_counted() -> None:
    score = neighbours(torch.cat([torch.ones(5, 2), torch.tensor([[1.0, 0.0]])]), k=5)
    assert float(score.score(of(torch.ones(1, 2)))) == 0


# Errors of the fitted scores ------------------------------------------------------------------------------------


@every_fitted
def test_fitted_scores_say_what_is_missing(name: str) -> None:
    h, y = data()
    with pytest.raises(NotFitted, match=r"Call update\(features"):
        FITTED[name](D, K).score(of(h))
    score = fitted(name, (h, y))
    with pytest.raises(ValueError, match="This score needs features, which the prediction lacks"):
        score.score(Prediction(normal(5, 2)))
    with pytest.raises(ValueError, match=r"Expected features of shape \(batch, 4\), got \(5, 3\)"):
        score.score(of(normal(5, 3)))
    with pytest.raises(ValueError, match=r"Expected features of shape \(batch, 4\), got \(4,\)"):
        score.update(h[0], y[:1])
    with pytest.raises(ValueError, match="Features must be finite"):
        score.update(h.log(), y)
    with pytest.raises(ValueError, match=r"Cannot merge .*features"):
        score.merge(FITTED[name](D + 1, K))
    with pytest.raises(ValueError, match="Expected at least 1 feature"):
        FITTED[name](0, K)


@every_fitted
def test_fitted_scores_apply_to_features_of_their_form_alone(name: str) -> None:
    score = fitted(name, data())
    assert score.applies(of(normal(5, D)))
    for lacking in (Prediction(normal(5, 2)), of(normal(5, D + 1)), of(normal(5, D) * math.nan)):
        assert not score.applies(lacking)


@gaussians
@pytest.mark.parametrize(
    ("target", "message"),
    [
        (torch.tensor([1, 2, 3]), r"There are 3 classes \(0 to 2\), the targets run from 1 to 3"),
        (torch.tensor([-1, 0, 0]), "the targets run from -1 to 0"),
        (torch.tensor([0.5, 0, 0]), r"whole numbers of shape \(3,\), got torch.float32 \(3,\)"),
        (torch.tensor([0, 1]), r"whole numbers of shape \(3,\), got torch.int64 \(2,\)"),
    ],
)
def test_wrong_classes_are_refused(name: str, target: Tensor, message: str) -> None:
    score = FITTED[name](D, K)
    with pytest.raises(ValueError, match=message):
        score.update(normal(3, D), target)
    with pytest.raises(NotFitted):
        score.score(of(normal(3, D)))


def test_options_of_the_fitted_scores_are_checked() -> None:
    with pytest.raises(ValueError, match="jitter must be positive, got 0"):
        Mahalanobis(D, K, jitter=0)
    with pytest.raises(ValueError, match=r"k must lie between 1 and the size of the reservoir \(5\), got 6"):
        NearestNeighbors(D, k=6, reservoir=5)
    with pytest.raises(ValueError, match="Cannot merge samples of"):
        NearestNeighbors(D, seed=1).merge(NearestNeighbors(D, seed=2))
    with pytest.raises(NotFitted, match="needs at least 3 training features, got 2"):
        neighbours(normal(2, D), k=3).score(of(normal(1, D)))


def test_features_that_equal_their_class_mean_have_no_covariance() -> None:
    score = Mahalanobis(D, K)
    score.update(normal(3, D), torch.arange(3))
    assert not score.applies(of(normal(1, D)))
    with pytest.raises(ValueError, match=r"equal the mean of their class \(3 examples, 3 classes\)"):
        score.score(of(normal(1, D)))
