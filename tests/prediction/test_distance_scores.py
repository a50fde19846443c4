"""Scores that are fitted to training data: independent computations, contracts over the registry, theorems of each."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import special
from scipy.spatial import distance
from sklearn import neighbors
from torch import Tensor, nn

from afield.errors import NotFitted
from afield.prediction.distance_scores import (
    FITTED,
    ActivationShaping,
    BoundaryDistance,
    FittedScore,
    Mahalanobis,
    NearestNeighbors,
    NeighborGuidance,
    StoredPattern,
    VirtualLogit,
    make_all,
)
from afield.prediction.prediction import Prediction
from afield.prediction.scores import SCORES

few = settings(deadline=None, max_examples=12)
fewer = settings(deadline=None, max_examples=10)
seeds = st.integers(0, 10**6)
JITTER = 1e-6
K, D = 3, 4
Data = tuple[Tensor, Tensor]
GAUSSIANS = ["mahalanobis", "relative_mahalanobis"]
SHAPED = ["react", "ash", "scale"]
OF_THE_OUTPUT = ["vim", "fdbd", *SHAPED]
OF_LOGITS = ["nnguide", "she"]
every_fitted = pytest.mark.parametrize("name", FITTED)
gaussians = pytest.mark.parametrize("name", GAUSSIANS)
of_the_output = pytest.mark.parametrize("name", OF_THE_OUTPUT)
of_logits = pytest.mark.parametrize("name", OF_LOGITS)


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def data(number: int = 0, n: int = 60, d: int = D, k: int = K) -> Data:
    """Correlated features (n, d) around k centres, and their classes; every class has examples."""
    target = torch.arange(n) % k
    mix = normal(d, d, number=number + 1)
    return normal(n, d, number=number) @ mix + 3 * normal(k, d, number=number + 2)[target], target


def dense(d: int = D, k: int = K) -> nn.Linear:
    """An output layer whose logits are mostly positive."""
    layer = nn.Linear(d, k).double().requires_grad_(False)
    layer.weight.copy_(0.3 * normal(k, d, number=8))
    layer.bias.copy_(20 + normal(k, number=9))
    return layer


def of(features: Tensor, k: int = K) -> Prediction:
    return Prediction(dense(features.shape[1], k)(features.detach().double()), features=features)


def asked(name: str, features: Tensor, k: int = K) -> Prediction:
    """A prediction that the score can be asked about: shaped activations are not negative."""
    return of(features.abs() if name in SHAPED else features, k)


def make(name: str, d: int = D, k: int = K) -> FittedScore:
    return FITTED[name](d, k, output=dense(d, k) if d else None)


def fit(score: FittedScore, train: Data, batch: int = 1000) -> FittedScore:
    features = train[0].abs() if isinstance(score, ActivationShaping) else train[0]
    for h, y in zip(features.split(batch), train[1].split(batch), strict=True):
        score.update(h, y, of(h, score.num_classes).logits)
    return score


def fitted(name: str, train: Data, batch: int = 1000) -> FittedScore:
    return fit(make(name), train, batch)


def some_are_right(train: Data) -> bool:
    """SHE has no pattern where the output layer is always wrong."""
    return bool((of(train[0]).logits.argmax(1) == train[1]).any())


# Independent computations ---------------------------------------------------------------------------------------


def squares(x: np.ndarray, centers: np.ndarray, covariance: np.ndarray) -> np.ndarray:
    return (distance.cdist(x, centers, "mahalanobis", VI=np.linalg.inv(covariance)) ** 2).min(1)


def mahalanobis(h: np.ndarray, y: np.ndarray, x: np.ndarray, *, relative: bool = False) -> np.ndarray:
    means = np.stack([h[y == k].mean(0) for k in np.unique(y)])
    within = sum(np.cov(h[y == k].T, bias=True) * np.mean(y == k) for k in np.unique(y))
    jitter = JITTER * np.diag(within).mean() * np.eye(h.shape[1])
    near = squares(x, means, within + jitter)
    return near - relative * squares(x, h.mean(0)[None], np.cov(h.T, bias=True) + jitter)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).sum(1, keepdims=True))


def knn(h: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    return neighbors.NearestNeighbors(n_neighbors=10).fit(unit(h)).kneighbors(unit(x))[0][:, -1]


W, B = (p.numpy() for p in (dense().weight, dense().bias))


def logits(x: np.ndarray) -> np.ndarray:
    return np.einsum("kd,nd->nk", W, x) + B


def nnguide(h: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    bank = unit(h) * np.log(np.exp(logits(h)).sum(1))[:, None]
    similar = np.sort(unit(x) @ bank.T)[:, -10:].mean(1)
    return -similar * np.log(np.exp(logits(x)).sum(1))


def vim(h: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """By singular vectors of the training features, and the length of what their projection leaves over."""
    origin = np.linalg.lstsq(W, -B, rcond=None)[0]
    principal = np.linalg.svd(h - origin, full_matrices=False)[2][: D // 2]

    def residual(x: np.ndarray) -> np.ndarray:
        x = x - origin
        return np.linalg.norm(x - x @ principal.T @ principal, axis=1)

    alpha = logits(h).max(1).mean() / residual(h).mean()
    return alpha * residual(x) - special.logsumexp(logits(x), axis=1)


def fdbd(h: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Row by row, boundary by boundary: the distance to the plane on which two logits are equal."""
    out = []
    for row, z in zip(x, logits(x), strict=True):
        c = int(z.argmax())
        others = [k for k in range(K) if k != c]
        lengths = [abs((W[c] - W[k]) @ row + B[c] - B[k]) / np.linalg.norm(W[c] - W[k]) for k in others]
        out.append(-np.mean(lengths) / np.linalg.norm(row - h.mean(0)))
    return np.array(out)


def she(h: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    label, zero = logits(h).argmax(1), np.zeros((1, D))
    right = [h[(y == k) & (label == k)] for k in range(K)]
    patterns = [(part if len(part) else zero).mean(0) for part in right]
    return np.array([-row @ patterns[c] for row, c in zip(x, logits(x).argmax(1), strict=True)])


def react(h: np.ndarray, y: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The percentile by interpolation between sorted values."""
    values = np.sort(np.abs(h).ravel())
    place = 0.9 * (len(values) - 1)
    most = np.interp(place, np.arange(len(values)), values)
    return -special.logsumexp(logits(np.where(x > most, most, x)), axis=1)


def stretched(x: np.ndarray, *, prune: bool) -> np.ndarray:
    """D = 4: 10% and 15% of the activations are less than one, and then it is one."""
    out = []
    for row in x:
        kept = np.where(row >= np.sort(row)[-1], row, 0) if prune else row
        out.append(kept * math.exp(row.sum() / row.max()))
    return -special.logsumexp(logits(np.array(out)), axis=1)


FORMULAS: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "mahalanobis": mahalanobis,
    "relative_mahalanobis": lambda h, y, x: mahalanobis(h, y, x, relative=True),
    "unit_mahalanobis": lambda h, y, x: mahalanobis(unit(h), y, unit(x)),
    "unit_relative_mahalanobis": lambda h, y, x: mahalanobis(unit(h), y, unit(x), relative=True),
    "knn": knn,
    "nnguide": nnguide,
    "vim": vim,
    "fdbd": fdbd,
    "she": she,
    "react": react,
    "ash": lambda h, y, x: stretched(x, prune=True),
    "scale": lambda h, y, x: stretched(x, prune=False),
}


def test_every_fitted_score_has_its_formula_and_a_name_of_its_own() -> None:
    assert set(FORMULAS) == set(FITTED)
    assert not set(FITTED) & set(SCORES)


@every_fitted
@fewer
@given(number=seeds, batch=st.integers(1, 80))
def test_fitted_score_is_its_formula(name: str, number: int, batch: int) -> None:
    train, x = data(number), 4 * normal(20, D, number=number + 3)
    assume(name != "she" or some_are_right(train))
    x = x.abs() if name in SHAPED else x
    got = fitted(name, train, batch).score(of(x)).numpy()
    in_float32 = name in ("knn", "nnguide", "vim", "react")  # neighbours and samples
    expected = FORMULAS[name](*(t.numpy() for t in (*train, x)))
    np.testing.assert_allclose(got, expected, rtol=1e-5 if in_float32 else 1e-6, atol=1e-6 if in_float32 else 1e-8)


# What every fitted score does -----------------------------------------------------------------------------------


@every_fitted
@few
@given(number=seeds, cut=st.integers(0, 60))
def test_merged_parts_are_the_whole_in_any_order(name: str, number: int, cut: int) -> None:
    h, y = data(number)
    assume(name != "she" or some_are_right((h, y)))
    order = torch.randperm(60, generator=torch.Generator().manual_seed(number))
    first, second = fitted(name, (h[:cut], y[:cut])), fitted(name, (h[cut:], y[cut:]), batch=7)
    first.merge(second)
    whole, shuffled = fitted(name, (h, y)), fitted(name, (h[order], y[order]))
    x = asked(name, 3 * normal(20, D, number=5))
    torch.testing.assert_close(first.score(x), whole.score(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(shuffled.score(x), whole.score(x), rtol=1e-9, atol=1e-9)


@every_fitted
def test_merging_with_an_empty_accumulator_changes_nothing_and_with_itself_only_neighbours(name: str) -> None:
    score, x = fitted(name, data()), asked(name, normal(20, D, number=5))
    before = score.score(x)
    score.merge(make(name))
    assert torch.equal(score.score(x), before)
    if name not in ("knn", "nnguide"):
        score.merge(score)
        torch.testing.assert_close(score.score(x), before)


@every_fitted
def test_scores_are_one_an_example_and_leave_the_state_alone(name: str) -> None:
    score, x = fitted(name, data()), asked(name, normal(2500, D, number=5))
    whole = score.score(x)
    assert whole.shape == (2500,)
    assert bool(torch.isfinite(whole).all())
    torch.testing.assert_close(torch.cat([score.score(x[:7]), score.score(x[7:])]), whole)
    assert score.score(x[:0]).shape == (0,)


@every_fitted
def test_an_update_after_a_score_counts_and_reset_forgets_all(name: str) -> None:
    first, second, x = data(), data(10), asked(name, 10 * normal(20, D, number=5))
    score = fitted(name, first)
    before = score.score(x)
    fit(score, second)
    assert (name in ("ash", "scale")) == torch.equal(score.score(x), before)  # which learn nothing but the sign
    score.reset()
    with pytest.raises(NotFitted):
        score.score(x)
    torch.testing.assert_close(fit(score, first).score(x), before)


@every_fitted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_dtype_goes_in_and_at_least_float32_comes_out(name: str, dtype: torch.dtype) -> None:
    h, y = data()
    got = fitted(name, (h.to(dtype), y)).score(asked(name, h.to(dtype)))
    assert got.dtype == torch.promote_types(dtype, torch.float32)


@every_fitted
def test_gradients_are_not_kept(name: str) -> None:
    h, y = data()
    assert not fitted(name, (h.requires_grad_(), y)).score(asked(name, h)).requires_grad


def numbers_in(value: object) -> int:
    """How many numbers of tensors an object holds, its parts included."""
    if isinstance(value, Tensor):
        return value.numel()
    parts = value if isinstance(value, list) else vars(value).values() if hasattr(value, "__dict__") else ()
    return sum(map(numbers_in, parts))


@every_fitted
def test_memory_does_not_grow_with_the_examples_and_a_thousand_classes_fit(name: str) -> None:
    d, k, reservoir = 16, 1000, 10_000
    score = make(name, d, k)
    y = torch.arange(3000) % k
    for seed in range(8):
        h = normal(3000, d, number=seed)
        fit(score, (h, y))
    largest = {"moments": 2 * k * d + d * d + 2 * k, "sample": 2 * reservoir * (d + 2), "layer": k * d + k}
    assert numbers_in(score) <= sum(largest.values())
    assert score.score(asked(name, h[:10], k)).shape == (10,)


@pytest.mark.parametrize("name", sorted(set(FITTED) - {"vim", "fdbd", *SHAPED}))
def test_far_off_the_data_is_further(name: str) -> None:
    """All training features lie in the positive quarter, as after a ReLU. The others see angles and logits alone."""
    h, y = data()
    score = fitted(name, (h.abs() + 1, y))
    near, far = score.score(asked(name, h.abs() + 1)), score.score(asked(name, -20 * h.abs() - 20))
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
    plain, relative = (fit(make(name, D, 1), (h, zero)).score(of(h)) for name in GAUSSIANS)
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
    score = fit(make(name, D + 2), (torch.cat([h, dead], 1), y))
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
    wider = fit(make(name, D, K + 2), (h, y + 1))
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
    n, keep, trials = 120, 30, 250
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


# Theorems of unit vectors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["unit_mahalanobis", "unit_relative_mahalanobis", "knn"])
def test_lengths_do_not_count(name: str) -> None:
    (h, y), x = data(), normal(20, D, number=5)
    lengths = normal(60, 1, number=6).exp()
    moved = fitted(name, (lengths * h, y)).score(of(lengths[:20] * x))
    torch.testing.assert_close(moved, fitted(name, (h, y)).score(of(x)), rtol=1e-5, atol=1e-5)


# Theorems of the output layer -----------------------------------------------------------------------------------


def energy(x: Tensor) -> Tensor:
    return -dense()(x).logsumexp(-1)


def test_vim_is_the_energy_in_the_principal_subspace_and_grows_without_end_off_it() -> None:
    """Training features about the origin of the logits lie near a plane."""
    score = VirtualLogit(D, K, output=dense())
    plane, off = torch.eye(D).double()[:2], torch.eye(D).double()[3]
    h = score.origin + normal(60, 2) @ (10 * plane) + 0.01 * normal(60, 1, number=1) * off
    score.update(h)
    basis = torch.linalg.eigh((h - score.origin).T @ (h - score.origin)).eigenvectors[:, -2:]
    inside = score.origin + normal(20, 2, number=2) @ basis.T
    torch.testing.assert_close(score.score(of(inside)), energy(inside), rtol=1e-5, atol=1e-5)
    steps = torch.stack([score.score(of(inside + step * off)) for step in (0.0, 1.0, 10.0, 100.0)])
    assert bool((steps.diff(dim=0) > 0).all())


def test_the_virtual_logit_is_on_average_as_large_as_the_largest_logit() -> None:
    (h, y), layer = data(n=200), dense()
    score = fit(VirtualLogit(D, K, output=layer), (h, y)).score(of(h))
    virtual = score - energy(h)
    torch.testing.assert_close(virtual.mean(), layer(h).amax(-1).mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("features", "rank"), [(2, 1), (640, 320), (767, 383), (768, 512), (2047, 512), (2048, 1000)])
def test_vim_has_the_ranks_of_its_authors(features: int, rank: int) -> None:
    assert VirtualLogit(features, 2, output=nn.Linear(features, 2)).rank == rank


def test_fdbd_of_two_classes_is_an_angle() -> None:
    """The boundary is the axis x_1 = 0 and the training mean lies on it: minus the cosine, at any distance."""
    layer = nn.Linear(2, 2, bias=False).double()
    layer.weight.data = torch.tensor([[1.0, 0.0], [-3.0, 0.0]]).double()
    score = BoundaryDistance(2, 2, output=layer)
    score.update(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
    x = torch.tensor([[3.0, 4.0], [-30.0, 40.0], [0.0, 1.0], [5.0, 0.0]]).double()
    torch.testing.assert_close(score.score(Prediction(x, features=x)), -torch.tensor([0.6, 0.6, 0.0, 1.0]).double())


def test_she_by_hand_reads_examples_that_are_right_alone() -> None:
    score = StoredPattern(2, 2)
    h = torch.tensor([[2.0, 0.0], [4.0, 0.0], [9.0, 9.0], [0.0, 5.0]])
    first, second = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    score.update(h, torch.tensor([0, 0, 0, 1]), torch.stack([first, first, second, second]))
    x = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    assert score.score(Prediction(torch.stack([first, second]), features=x)).tolist() == [-3.0, -10.0]


def test_nnguide_by_hand() -> None:
    """Two kept features of energies log 2 + 1 and log 2 + 3, along the axes; the query lies between them."""
    score = NeighborGuidance(2, 2, k=1)
    score.update(torch.tensor([[5.0, 0.0], [0.0, 0.1]]), logits=torch.tensor([[1.0, 1.0], [3.0, 3.0]]))
    got = score.score(Prediction(torch.zeros(1, 2), features=torch.tensor([[3.0, 4.0]])))
    assert float(got) == pytest.approx(-math.log(2) * max(0.6 * (math.log(2) + 1), 0.8 * (math.log(2) + 3)), rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "shaped"),
    [
        ("react", [1.0, 2.0, 2.5, 2.5]),  # the median of the training activations
        ("ash", [0.0, 0.0, 3 * math.exp(10 / 7), 4 * math.exp(10 / 7)]),
        ("scale", [n * math.exp(10 / 7) for n in (1, 2, 3, 4)]),
    ],
)
def test_activation_shaping_by_hand(shape: str, shaped: list[float]) -> None:
    h = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).double()
    score = ActivationShaping(D, K, shape=shape, percentile=50, output=dense())
    score.update(h)
    torch.testing.assert_close(score.score(of(h)), energy(torch.tensor([shaped]).double()))


@pytest.mark.parametrize("name", SHAPED)
def test_no_activation_at_all_stays_none(name: str) -> None:
    zero = torch.zeros(1, D).double()
    torch.testing.assert_close(fitted(name, data()).score(of(zero)), energy(zero))


@of_the_output
def test_one_output_is_two_opposite_ones(name: str) -> None:
    h, one, two = data()[0].abs(), nn.Linear(D, 1).double(), nn.Linear(D, 2).double()
    two.weight.data, two.bias.data = torch.cat([-one.weight, one.weight]) / 2, torch.cat([-one.bias, one.bias]) / 2
    scores = [FITTED[name](D, 2, output=layer) for layer in (one, two)]
    for score in scores:
        score.update(h)
    torch.testing.assert_close(*(score.score(Prediction(h, features=h)) for score in scores))


@of_the_output
def test_logits_come_from_the_layer_and_not_from_the_prediction(name: str) -> None:
    score, x = fitted(name, data()), asked(name, normal(5, D))
    assert torch.equal(score.score(x), score.score(Prediction(torch.zeros(5, K), features=x.features)))


# Errors of the fitted scores ------------------------------------------------------------------------------------


@every_fitted
def test_fitted_scores_say_what_is_missing(name: str) -> None:
    h, y = data()
    with pytest.raises(NotFitted, match=r"Call update\(features"):
        make(name).score(asked(name, h))
    score = fitted(name, (h, y))
    with pytest.raises(ValueError, match="This score needs features, which the prediction lacks"):
        score.score(Prediction(normal(5, 2)))
    with pytest.raises(ValueError, match=r"Expected features of shape \(batch, 4\), got \(5, 3\)"):
        score.score(of(normal(5, 3)))
    with pytest.raises(ValueError, match=r"Expected features of shape \(batch, 4\), got \(4,\)"):
        score.update(h[0], y[:1])
    with pytest.raises(ValueError, match="Features must be finite"):
        score.update(h.log(), y, of(h).logits)
    with pytest.raises(ValueError, match=r"Cannot merge .*features"):
        score.merge(make(name, D + 1))
    with pytest.raises(ValueError, match="Expected at least 1 feature"):
        make(name, 0)


@every_fitted
def test_fitted_scores_apply_to_features_of_their_form_alone(name: str) -> None:
    score = fitted(name, data())
    assert score.applies(asked(name, normal(5, D)))
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
    score = make(name)
    with pytest.raises(ValueError, match=message):
        score.update(normal(3, D), target)
    with pytest.raises(NotFitted):
        score.score(of(normal(3, D)))


def test_options_of_the_fitted_scores_are_checked() -> None:
    with pytest.raises(ValueError, match="jitter must be positive, got 0"):
        Mahalanobis(D, K, jitter=0)
    with pytest.raises(ValueError, match=r"k must lie between 1 and the size of the reservoir \(5\), got 6"):
        NearestNeighbors(D, k=6, reservoir=5)
    with pytest.raises(ValueError, match=r"Cannot merge scores of .*'seed': 1.* and .*'seed': 2"):
        NearestNeighbors(D, seed=1).merge(NearestNeighbors(D, seed=2))
    with pytest.raises(NotFitted, match="needs at least 3 training features, got 2"):
        neighbours(normal(2, D), k=3).score(of(normal(1, D)))


def test_features_that_equal_their_class_mean_have_no_covariance() -> None:
    score = Mahalanobis(D, K)
    score.update(normal(3, D), torch.arange(3))
    assert not score.applies(of(normal(1, D)))
    with pytest.raises(ValueError, match=r"equal the mean of their class \(3 examples, 3 classes\)"):
        score.score(of(normal(1, D)))


def test_a_defect_is_not_taken_for_a_score_that_does_not_apply() -> None:
    class Defective(Mahalanobis):
        def _fit(self) -> dict[str, Tensor]:
            raise ValueError("a defect")

    score = Defective(D, K)
    score.update(*data())
    with pytest.raises(ValueError, match="a defect"):
        score.applies(of(normal(1, D)))


# What scores need -----------------------------------------------------------------------------------------------


def test_scores_say_what_they_need_and_only_those_that_can_be_made_are_made() -> None:
    needs = {name: make(name).needs for name in FITTED}
    assert {name for name, of_score in needs.items() if "output" in of_score} == set(OF_THE_OUTPUT)
    assert {name for name, of_score in needs.items() if "logits" in of_score} == set(OF_LOGITS)
    assert set(make_all(D, K, output=dense())) == set(FITTED)
    assert set(make_all(D, K)) == set(FITTED) - set(OF_THE_OUTPUT)


@of_the_output
def test_without_an_output_layer_a_score_never_applies(name: str) -> None:
    score, x = FITTED[name](D, K), asked(name, data()[0])
    with pytest.raises(ValueError, match=r"needs the dense layer over the features, got none. Make it with output="):
        score.update(x.features)
    assert not score.applies(x)
    with pytest.raises(ValueError, match="needs the dense layer"):
        score.score(x)


@of_the_output
def test_other_output_layers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="Expected an output layer over 4 features, got one over 5"):
        FITTED[name](D, K, output=dense(D + 1))
    other = FITTED[name](D, K, output=nn.Linear(D, K))
    with pytest.raises(ValueError, match="whose output layers have different weights"):
        fitted(name, data()).merge(other)


@of_logits
def test_logits_are_asked_for_and_checked(name: str) -> None:
    (h, y), score = data(), make(name)
    with pytest.raises(ValueError, match=r"needs the logits of training examples, got none. Pass logits= to update"):
        score.update(h, y)
    for wrong in (of(h).logits[:, :2], of(h).logits[0], of(h).logits[:5]):
        with pytest.raises(ValueError, match=r"Expected logits of shape \(60, 3\), got"):
            score.update(h, y, wrong)
    with pytest.raises(ValueError, match="Logits must be finite"):
        score.update(h, y, of(h).logits * math.nan)
    fit(score, (h, y))
    assert not score.applies(Prediction(torch.zeros(60, 2), features=h))
    assert not score.applies(Prediction(torch.full((60, K), math.nan), features=h))


@pytest.mark.parametrize("name", ["mahalanobis", "she"])
def test_classes_are_asked_for(name: str) -> None:
    with pytest.raises(ValueError, match=r"needs the target of training examples, got none. Pass target= to update"):
        make(name).update(normal(5, D), logits=normal(5, K))


@pytest.mark.parametrize("name", SHAPED)
def test_negative_activations_are_refused(name: str) -> None:
    h = data()[0]
    score, signed = make(name), make(name)
    score.update(h.abs())
    signed.update(h)
    assert score.applies(of(h.abs()))
    for each, x in ((score, h), (signed, h.abs())):
        assert not each.applies(of(x))
        with pytest.raises(ValueError, match="needs activations that are not negative, as after a ReLU, got -"):
            each.score(of(x))


def test_training_data_that_a_score_cannot_use_are_refused() -> None:
    h = data()[0]
    guided, pattern = NeighborGuidance(D, K), StoredPattern(D, K)
    guided.update(h, logits=of(h).logits - 100)
    with pytest.raises(ValueError, match="needs training logits of positive energy, log sum exp, got -"):
        guided.score(of(h))
    label = of(h).logits.argmax(1)
    pattern.update(h, (label + 1) % K, of(h).logits)
    with pytest.raises(ValueError, match="None of the 60 training examples is predicted right"):
        pattern.score(of(h))
    flat = VirtualLogit(D, K, output=dense())
    flat.update(flat.origin + h[:, :1] * torch.eye(D).double()[0])
    with pytest.raises(ValueError, match=r"lie in a subspace of rank 2, so none has a residual. Choose a smaller rank"):
        flat.score(of(h))
    layer = dense()
    layer.bias -= 100
    low = VirtualLogit(D, K, output=layer)
    low.update(h)
    with pytest.raises(ValueError, match="needs logits whose largest is positive on average, got -"):
        low.score(of(h))
    for score in (guided, pattern, flat, low):
        assert not score.applies(of(h))


def test_options_of_the_new_scores_are_checked() -> None:
    with pytest.raises(ValueError, match="rank must lie between 0 and 3, one less than features, got 4"):
        VirtualLogit(D, K, rank=4)
    with pytest.raises(ValueError, match="percentile must lie strictly between 0 and 100, got 100"):
        ActivationShaping(D, K, percentile=100)
    with pytest.raises(ValueError, match="shape must be one of react, ash, scale, got 'rect'"):
        ActivationShaping(D, K, shape="rect")
    with pytest.raises(ValueError, match=r"k must lie between 1 and the size of the reservoir \(5\), got 6"):
        NeighborGuidance(D, K, k=6, reservoir=5)


def test_a_full_sample_is_read_in_whole_and_its_statistics_are_those_of_the_whole() -> None:
    """Beyond the reservoir, ViM and ReAct estimate a mean and a percentile from a random sample."""
    h, layer = normal(4000, D).abs(), dense()
    for make_score in (VirtualLogit, ActivationShaping):
        whole, sampled = (make_score(D, K, output=layer, reservoir=size) for size in (4000, 1000))
        for score in (whole, sampled):
            for part in h.split(300):
                score.update(part)
        assert len(whole.sample.rows) == 4000
        assert len(sampled.sample.rows) == 1000
        x = 3 * h[:50]
        added, expected = (score.score(of(x)) - energy(x) for score in (sampled, whole))
        torch.testing.assert_close(added, expected, rtol=0.05, atol=0.05)
