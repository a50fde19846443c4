"""Random features: the Gram matrix tends to the kernel, and the scales come from the data once and for all."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.gaussian_process import kernels as sklearn_kernels

from afield.gp.features import KERNELS, LENGTH_SCALE_FRACTION, RandomFeatures, median_distance
from afield.gp.geometry import GEOMETRIES
from afield.registry import UnknownName

few = settings(deadline=None, max_examples=25)


def seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def points(n: int = 24, d: int = 8, number: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=seed(number), dtype=torch.float64)


def directions(features: RandomFeatures) -> torch.Tensor:
    return F.normalize(features.weight.double(), dim=1)


def same_scales(a: RandomFeatures, b: RandomFeatures) -> bool:
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("shift", "gain", "length_scale"))


# The kernel -----------------------------------------------------------------------------------------------------


def gram_error(kernel: str, num_features: int, *, orthogonal: bool = True, seeds: int = 12, d: int = 8) -> float:
    """Root mean square of phi phi^T - k over pairs of points and over seeds."""
    h, length_scale = points(d=d), 0.5 * math.sqrt(2 * d)
    exact = KERNELS[kernel].exact(h / length_scale, h / length_scale)
    errors = []
    for number in range(seeds):
        features = RandomFeatures(
            d, num_features, kernel=kernel, length_scale=length_scale, orthogonal=orthogonal, generator=seed(number)
        ).double()
        phi = features(h)
        errors.append((phi @ phi.T - exact).square().mean())
    return float(torch.stack(errors).mean().sqrt())


@pytest.mark.parametrize("orthogonal", [True, False], ids=["orthogonal", "iid"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gram_tends_to_the_kernel_at_rate_root_d(kernel, orthogonal):
    coarse, fine = (gram_error(kernel, n, orthogonal=orthogonal) for n in (128, 128 * 16))
    assert 3.0 < coarse / fine < 5.3  # sqrt(16) = 4
    assert fine < 0.04 * float(KERNELS[kernel].exact(points(), points()).diagonal().mean())


@pytest.mark.parametrize("kernel", KERNELS)
def test_orthogonal_directions_are_no_worse_than_independent_ones(kernel):
    orthogonal, iid = (gram_error(kernel, 64, orthogonal=o, seeds=200) for o in (True, False))
    assert orthogonal < (0.95 if kernel == "rbf" else 1.0) * iid  # copied blocks would be about 1.2 times iid


@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("rbf", sklearn_kernels.RBF()),
        ("matern32", sklearn_kernels.Matern(nu=1.5)),
        ("matern52", sklearn_kernels.Matern(nu=2.5)),
    ],
)
def test_exact_stationary_kernels_agree_with_scikit_learn(name, peer):
    a, b = points(7, 3), points(5, 3, number=1)
    torch.testing.assert_close(
        KERNELS[name].exact(a, b), torch.from_numpy(peer(a.numpy(), b.numpy())), rtol=1e-10, atol=1e-12
    )


def test_exact_arccos_is_the_squared_norm_on_the_diagonal_and_small_for_opposite_points():
    h = points(6, 3)
    gram = KERNELS["arccos"].exact(h, h)
    torch.testing.assert_close(gram.diagonal(), 1 + h.square().sum(1), rtol=1e-7, atol=0)
    far = KERNELS["arccos"].exact(1e4 * h, -1e4 * h).diagonal() / (1e8 * h.square().sum(1))
    assert float(far.abs().max()) < 1e-6


@pytest.mark.parametrize("kernel", KERNELS)
def test_length_scale_divides_the_input(kernel):
    h = points()
    wide, plain = (RandomFeatures(8, 32, kernel=kernel, length_scale=s, generator=seed(3)).double() for s in (2.5, 1.0))
    torch.testing.assert_close(wide(h), plain(h / 2.5), rtol=1e-12, atol=1e-12)


# The directions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("num_features", "d"), [(64, 16), (50, 16), (5, 16), (1, 1), (200, 3)])
def test_directions_are_orthogonal_within_a_block_and_distinct_across_blocks(kernel, num_features, d):
    features = RandomFeatures(d, num_features, kernel=kernel, length_scale=1.0, generator=seed(0))
    assert features.weight.shape == (num_features, d)
    for block in directions(features).split(d):
        torch.testing.assert_close(block @ block.T, torch.eye(len(block)).double(), rtol=0, atol=1e-5)
    rows = features.weight
    assert len(torch.unique(rows, dim=0)) == num_features
    if d > 3:
        cosine = (directions(features) @ directions(features).T).fill_diagonal_(0)
        assert float(cosine.abs().max()) < 0.95


@pytest.mark.parametrize("orthogonal", [True, False])
def test_lengths_of_gaussian_frequencies_follow_a_chi_distribution(orthogonal):
    features = RandomFeatures(6, 3000, length_scale=1.0, orthogonal=orthogonal, generator=seed(0))
    assert stats.kstest(features.weight.norm(dim=1).numpy(), stats.chi(df=6).cdf).pvalue > 1e-3


@pytest.mark.parametrize(("kernel", "degrees"), [("matern32", 3), ("matern52", 5)])
def test_matern_frequencies_follow_a_student_t_distribution(kernel, degrees):
    features = RandomFeatures(4, 4000, kernel=kernel, length_scale=1.0, generator=seed(0))
    first_of_each_block = features.weight[::4, 0].numpy()
    assert stats.kstest(first_of_each_block, stats.t(df=degrees).cdf).pvalue > 1e-3


@pytest.mark.parametrize("row", [0, 1])
def test_orthogonal_directions_are_uniform_on_the_circle(row):
    """A QR factor has its signs fixed: without undoing that, half of the circle is never visited."""
    weight = RandomFeatures(2, 4000, length_scale=1.0, generator=seed(0)).weight[row::2]
    angle = torch.atan2(weight[:, 1], weight[:, 0]) / (2 * math.pi) + 0.5
    assert stats.kstest(angle.numpy(), "uniform").pvalue > 1e-3


def test_the_same_generator_gives_the_same_features_whatever_the_global_seed():
    torch.manual_seed(1)
    a = RandomFeatures(5, 40, kernel="matern32", projection=3, generator=seed(7))
    torch.manual_seed(2)
    b = RandomFeatures(5, 40, kernel="matern32", projection=3, generator=seed(7))
    assert all(torch.equal(a.get_buffer(n), b.get_buffer(n)) for n in ("weight", "phase", "projector"))
    assert not torch.equal(a.weight, RandomFeatures(5, 40, kernel="matern32", generator=seed(8), projection=3).weight)


def test_a_generator_leaves_the_global_state_alone():
    before = torch.get_rng_state()
    RandomFeatures(5, 40, kernel="matern52", projection=3, generator=seed(7))
    assert torch.equal(torch.get_rng_state(), before)


def test_features_are_frozen_and_let_gradients_through():
    features = RandomFeatures(3, 16, length_scale=1.0).double()
    assert not list(features.parameters())
    h = points(4, 3).requires_grad_()
    assert torch.autograd.gradcheck(features, (h,))


# Projection -----------------------------------------------------------------------------------------------------


def test_projection_keeps_squared_distances_in_expectation():
    a, b = points(2, 100)
    ratios = []
    for number in range(200):
        projector = RandomFeatures(100, 4, projection=20, length_scale=1.0, generator=seed(number)).projector.double()
        ratios.append(((a - b) @ projector).square().sum() / (a - b).square().sum())
    # A chi-square of 20 degrees over 20: standard deviation sqrt(2 / 20), over 200 draws
    assert abs(float(torch.stack(ratios).mean()) - 1) < 4 * math.sqrt(2 / 20 / 200)


def test_projected_features_are_features_of_the_projected_vector():
    features = RandomFeatures(12, 64, projection=5, length_scale=2.0, generator=seed(0)).double()
    assert features.weight.shape == (64, 5)
    plain = copy.deepcopy(features)
    plain.projector = None
    h = points(d=12)
    torch.testing.assert_close(features(h), plain(h @ features.projector), rtol=1e-12, atol=1e-12)


# Length scale from the data -------------------------------------------------------------------------------------


def test_median_distance_is_the_median_over_pairs_and_ignores_copies():
    h = points(9, 3)
    pairs = sorted(float((h[i] - h[j]).norm()) for i in range(9) for j in range(i))
    assert median_distance(h) == pytest.approx(pairs[(len(pairs) - 1) // 2], rel=1e-12)
    two = torch.tensor([[0.0], [3.0]]).repeat(10, 1)
    assert median_distance(two) == 3.0


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_median_distance_of_equal_rows_is_unknown(rows):
    assert math.isnan(median_distance(torch.ones(rows, 2)))


def test_median_distance_of_many_rows_uses_all_of_the_batch():
    h = torch.cat([torch.zeros(3000, 1), torch.ones(3000, 1)])  # the first 1024 rows would all be equal
    assert median_distance(h) == 1.0


def test_first_training_batch_sets_the_length_scale_and_later_ones_do_not():
    features = RandomFeatures(8, 16)
    assert not features.adapted
    first = points().float()
    features(first)
    assert features.adapted
    assert float(features.length_scale) == pytest.approx(LENGTH_SCALE_FRACTION * median_distance(first), rel=1e-6)
    before = copy.deepcopy(features)
    features(100 * points(number=1).float())
    assert same_scales(features, before)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_evaluation_before_training_stores_nothing(geometry):
    features = RandomFeatures(8, 16, geometry=geometry).eval()
    before = {name: b.clone() for name, b in features.named_buffers()}
    for rows in (24, 1):
        assert bool(torch.isfinite(features(points(rows).float())).all())
    assert not features.adapted
    for name, buffer in features.named_buffers():
        torch.testing.assert_close(buffer, before[name], rtol=0, atol=0, equal_nan=True)


@few
@given(scale=st.floats(1e-3, 1e3), projection=st.sampled_from([None, 4]), kernel=st.sampled_from(list(KERNELS)))
def test_a_length_scale_from_the_data_makes_features_blind_to_the_unit_of_measurement(scale, projection, kernel):
    phi = [
        RandomFeatures(8, 16, kernel=kernel, projection=projection, generator=seed(0)).double()(c * points())
        for c in (1.0, scale)
    ]
    torch.testing.assert_close(phi[1], phi[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_fixed_length_scale_is_honoured_as_given(geometry):
    features = RandomFeatures(8, 16, length_scale=0.7, geometry=geometry)
    features(points().float())
    features.adapt(100 * points().float())
    assert features.adapted
    assert float(features.length_scale) == 0.7


@pytest.mark.parametrize("first", [torch.zeros(1, 8), torch.ones(5, 8), torch.full((5, 8), math.nan)])
def test_a_first_batch_without_distances_raises_and_stores_nothing(first):
    features = RandomFeatures(8, 16)
    with pytest.raises(
        ValueError, match=rf"needs two finite ones that differ, got {len(first)} row\(s\).*larger first"
    ):
        features(first)
    assert not features.adapted
    features(points().float())
    assert features.adapted


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_state_dict_keeps_the_length_scale_and_the_moments(geometry):
    trained = RandomFeatures(8, 16, geometry=geometry, generator=seed(0))
    trained(points().float())
    fresh = RandomFeatures(8, 16, geometry=geometry, generator=seed(1))
    fresh.load_state_dict(trained.state_dict())
    assert fresh.adapted
    other = 3 * points(number=1).float()
    assert torch.equal(fresh(other), trained(other))
    assert same_scales(fresh, trained)


def test_an_unadapted_state_makes_an_adapted_module_unadapted():
    trained = RandomFeatures(8, 16)
    trained(points().float())
    trained.load_state_dict(RandomFeatures(8, 16).state_dict())
    assert not trained.adapted


def test_an_unadapted_state_never_makes_a_fixed_length_scale_nan():
    features = RandomFeatures(8, 16, length_scale=1.0)
    features.load_state_dict(RandomFeatures(8, 16).state_dict())
    assert bool(torch.isfinite(features(points().float())).all())


# Normalisation of the input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_normalised_features_are_features_of_the_normalised_vector(geometry):
    features = RandomFeatures(8, 32, geometry=geometry, generator=seed(0)).double()
    h = 3 + 2 * points()
    phi = features(h)
    space = GEOMETRIES[geometry]
    z = space.map(h)
    if space.standardized:
        z = (z - z.mean(0)) / z.std(0, correction=0)
    plain = RandomFeatures(8 + space.extra, 32, generator=seed(0)).double()
    torch.testing.assert_close(phi, plain(z))


def test_layer_and_unit_norm_lose_the_radius():
    h = points()
    layer, unit = (RandomFeatures(8, 32, geometry=n, length_scale=1.0).double() for n in ("layer", "unit"))
    torch.testing.assert_close(layer(50 * h + 3), layer(h), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(unit(50 * h), unit(h), rtol=1e-10, atol=1e-10)


@few
@given(number=st.integers(0, 10**6))
def test_standardized_features_are_blind_to_the_unit_of_each_hidden_unit(number):
    shift, gain = 10 * torch.randn(8, generator=seed(number)), torch.rand(8, generator=seed(number)) + 0.1
    phi = [
        RandomFeatures(8, 16, geometry="standardized", generator=seed(0)).double()(h)
        for h in (points(), points() * gain.double() + shift.double())
    ]
    torch.testing.assert_close(phi[1], phi[0], rtol=1e-8, atol=1e-8)


def test_standardize_takes_the_moments_of_the_first_batch():
    features = RandomFeatures(8, 16, geometry="standardized").double()
    h = 5 + 3 * points()
    features(h)
    torch.testing.assert_close(features.shift, h.mean(0))
    torch.testing.assert_close(features.gain, 1 / h.std(0, correction=0))


def test_given_moments_take_the_place_of_the_batch_moments():
    features = RandomFeatures(8, 16, geometry="standardized").double()
    mean, std = torch.arange(8.0).double(), torch.arange(1.0, 9.0).double()
    features.adapt(points(), moments=(mean, std))
    torch.testing.assert_close(features.shift, mean)
    torch.testing.assert_close(features.gain, 1 / std)
    expected = LENGTH_SCALE_FRACTION * median_distance((points() - mean) / std)
    assert float(features.length_scale) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("jitter", [0.0, 1e-9], ids=["constant", "nearly constant"])
def test_a_dead_unit_has_the_scale_of_the_liveliest_and_counts_when_it_wakes(jitter):
    features = RandomFeatures(8, 16, geometry="standardized").double()
    h = points()
    h[:, 2] = jitter * h[:, 2]
    features(h)
    assert float(features.gain[2]) == float(1 / h.std(0, correction=0).max())
    awake = h.clone()
    awake[:, 2] = 4.0
    assert float((features(awake) - features(h)).abs().max()) > 0.05


def test_all_units_dead_with_a_fixed_length_scale_is_finite():
    features = RandomFeatures(8, 16, geometry="standardized", length_scale=1.0)
    assert bool(torch.isfinite(features(torch.ones(5, 8))).all())
    assert torch.equal(features.gain, torch.ones(8))


def test_a_first_batch_with_nan_never_poisons_the_moments():
    features = RandomFeatures(8, 16, geometry="standardized", length_scale=1.0)
    broken = points().float()
    broken[3, 2] = math.nan
    with pytest.raises(ValueError, match="finite"):
        features(broken)
    assert bool(torch.isfinite(features(points().float())).all())


# Precision of the arithmetic ------------------------------------------------------------------------------------


def test_bfloat16_autocast_changes_nothing():
    features = RandomFeatures(8, 16, projection=4, generator=seed(0))
    twin = copy.deepcopy(features)
    h = points().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        phi = features(h)
    assert phi.dtype == torch.float32
    assert torch.equal(phi, twin(h))
    assert same_scales(features, twin)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_never_cost_the_length_scale_its_digits(dtype):
    features = RandomFeatures(8, 16, length_scale=1 / 3).to(dtype)
    assert features.length_scale.dtype == torch.float64
    assert float(features.float().length_scale) == 1 / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_float64_length_scale_does_not_promote(dtype):
    assert RandomFeatures(8, 16).to(dtype)(points().to(dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_modules_compute_phases_in_at_least_float32(dtype):
    """Only the result is rounded: phases of size 10 rounded to bfloat16 would be off by 0.06."""
    features = RandomFeatures(8, 64, length_scale=0.5, generator=seed(0)).to(dtype)
    h = (3 * points()).to(dtype)
    exact = copy.deepcopy(features).double()(h.double())
    worst = float((features(h).double() - exact).abs().max())
    assert worst < torch.finfo(dtype).eps * math.sqrt(2 / 64)


# Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length_scale", [0.0, -1.0, math.inf, math.nan])
def test_length_scale_must_be_positive_and_finite(length_scale):
    with pytest.raises(ValueError, match=r"length_scale must be a positive number or None .*got"):
        RandomFeatures(8, 16, length_scale=length_scale)


@pytest.mark.parametrize(("sizes", "name"), [((0, 16), "in_features"), ((8, 0), "num_random_features")])
def test_sizes_must_be_positive(sizes, name):
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0"):
        RandomFeatures(*sizes)


@pytest.mark.parametrize("projection", [0, -1, 9])
def test_projection_must_not_widen(projection):
    with pytest.raises(ValueError, match=f"projection must lie between 1 and in_features = 8, got {projection}"):
        RandomFeatures(8, 16, projection=projection)


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(UnknownName, match=r"Unknown kernel 'rfb'. Did you mean 'rbf'"):
        RandomFeatures(8, 16, kernel="rfb")
    with pytest.raises(UnknownName, match=r"Unknown geometry 'standardised'. Did you mean 'standardized'"):
        RandomFeatures(8, 16, geometry="standardised")


def test_repr_says_where_the_length_scale_comes_from():
    features = RandomFeatures(8, 16)
    assert "length_scale=from the first batch" in repr(features)
    features(points().float())
    assert f"length_scale={float(features.length_scale):.4g}" in repr(features)


def test_grown_features_are_plain_on_the_data_and_quadratic_beyond():
    h = points()
    grown, plain = (
        RandomFeatures(8, 16, grow=grow, generator=torch.Generator().manual_seed(0)).double() for grow in (True, False)
    )
    for features in (grown, plain):
        features.adapt(h)
    torch.testing.assert_close(grown(h), plain(h), rtol=0, atol=0)
    furthest = h[h.norm(dim=1).argmax()][None]
    for factor in (2.0, 10.0):
        torch.testing.assert_close(grown(factor * furthest), factor**2 * plain(factor * furthest))
