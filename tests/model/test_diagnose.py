"""Certificates must hold: whatever is measured lies between the proven constants."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from scipy.stats import spearmanr
from torch import Tensor, nn

import afield
from afield.bounds.residual import Residual
from afield.bounds.spectral import bound
from afield.model.diagnose import (
    Lipschitz,
    certified,
    distance_correlation,
    mean_distance,
    measured,
    nearest_distance,
    spearman,
)

few = settings(deadline=None, max_examples=25)
POINT = torch.tensor([3.0, 0.0], dtype=torch.float64)


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seed(number), dtype=torch.float64)


def holds(module: nn.Module, x: Tensor) -> tuple[Lipschitz, Lipschitz]:
    """What is proven contains what is measured, between the examples and in their neighbourhoods."""
    module = module.double().eval()
    proven, found = certified(module), measured(module, x)
    near = x + 1e-4 * normal(*x.shape, number=77)
    with torch.no_grad():
        ratios = (module(near) - module(x)).flatten(1).norm(dim=1) / (near - x).flatten(1).norm(dim=1)
    assert proven.lower <= min(found.lower, float(ratios.min())) * (1 + 1e-7)
    assert max(found.upper, float(ratios.max())) <= proven.upper * (1 + 1e-7)
    return proven, found


# Residual networks -----------------------------------------------------------------------------------------------


def residual_network(width: int, depth: int, c: float, layers: int = 1) -> nn.Sequential:
    """Blocks x + branch(x), each branch a chain of bounded layers and 1-Lipschitz activations."""
    blocks = []
    for _ in range(depth):
        chain = [m for _ in range(layers) for m in (bound(nn.Linear(width, width), c), nn.ReLU())]
        blocks.append(Residual(nn.Sequential(*chain)))
    return nn.Sequential(*blocks)


@few
@given(
    width=st.integers(1, 12),
    depth=st.integers(1, 6),
    c=st.floats(0.05, 0.95),
    gain=st.floats(0.1, 20),
    number=st.integers(0, 10**6),
)
def test_a_bounded_residual_network_keeps_distances_as_the_proposition_says(width, depth, c, gain, number):
    torch.manual_seed(number)
    net = residual_network(width, depth, c)
    for block in net:
        block.branch[0].parametrizations.weight.original.data.mul_(gain)
    proven, found = holds(net, normal(40, width, number=number))
    assert (1 - c) ** depth <= proven.lower * (1 + 1e-5)
    assert proven.upper <= (1 + c) ** depth * (1 + 1e-5)
    assert found.lower > 0


def test_the_proposition_is_tight_where_branches_are_multiples_of_the_identity():
    net = residual_network(3, 4, 0.5)
    for block in net:
        block.branch[1] = nn.Identity()
        block.branch[0].parametrizations.weight.original.data.copy_(-5 * torch.eye(3))
    net.train()(torch.zeros(1, 3))  # the power iteration sees the new weights
    proven, found = holds(net, normal(20, 3))
    assert proven.lower == pytest.approx(0.5**4, rel=1e-5)
    assert found.lower == pytest.approx(proven.lower, rel=1e-5)


def test_branches_of_several_layers_multiply():
    proven, _ = holds(residual_network(6, 3, 0.8, layers=2), normal(60, 6))
    assert proven.upper <= (1 + 0.8**2) ** 3 * (1 + 1e-5)
    assert proven.lower >= (1 - 0.8**2) ** 3 * (1 - 1e-5)


def test_an_unbounded_branch_certifies_nothing_from_below():
    block = Residual(nn.Linear(4, 4))
    block.branch.weight.data.mul_(10)
    proven, _ = holds(block, normal(40, 4))
    assert proven.lower == 0
    assert proven.upper > 1


def test_a_converted_network_is_certified_up_to_its_head():
    net = nn.Sequential(*residual_network(5, 3, 0.9), nn.Linear(5, 2))
    model = afield.sngp(net, bound=0.9, num_random_features=8, length_scale=1.0).double()
    x = normal(40, 5)
    proven, found = certified(model), measured(model, x)
    assert 0 < (1 - 0.9) ** 3 * (1 - 1e-5) <= proven.lower <= found.lower
    assert found.upper <= proven.upper <= (1 + 0.9) ** 3 * (1 + 1e-5)
    alone = afield.sngp(nn.Linear(5, 2), num_random_features=8, length_scale=1.0)
    assert certified(alone) == Lipschitz(1.0, 1.0)


# Layers ----------------------------------------------------------------------------------------------------------


@few
@given(rows=st.integers(1, 7), columns=st.integers(1, 7), number=st.integers(0, 10**6))
def test_linear_layers_are_certified_exactly(rows, columns, number):
    layer = nn.Linear(columns, rows).double()
    layer.weight.data.copy_(normal(rows, columns, number=number))
    _, values, right = torch.linalg.svd(layer.weight.detach())
    proven = certified(layer)
    assert proven.upper == pytest.approx(float(values[0]), rel=1e-9)
    assert proven.lower == pytest.approx(float(values[-1]) if rows >= columns else 0.0, rel=1e-9)
    # The extremes are reached along singular vectors.
    along = measured(layer, torch.stack([torch.zeros(columns, dtype=torch.float64), right[0]]))
    assert proven.upper * (1 - 1e-9) <= along.upper <= proven.upper * (1 + 1e-9)
    holds(layer, normal(20, columns, number=number))


CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(3, 4, 3),
    "padded": lambda: nn.Conv2d(3, 4, 3, padding=1),
    "wide padding": lambda: nn.Conv2d(3, 4, 3, padding=4),
    "strided": lambda: nn.Conv2d(3, 4, 3, padding=1, stride=2),
    "dilated": lambda: nn.Conv2d(3, 4, 3, padding=2, dilation=2),
    "grouped": lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2),
    "even kernel": lambda: nn.Conv2d(3, 4, 4, padding=2),
    "large kernel": lambda: nn.Conv2d(1, 2, 7, padding=3),
    "pointwise": lambda: nn.Conv2d(3, 4, 1),
    "same": lambda: nn.Conv2d(3, 4, 4, padding="same", dilation=2),
    "circular": lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
    "circular, wide padding": lambda: nn.Conv2d(1, 1, 1, padding=3, padding_mode="circular"),
    "1d": lambda: nn.Conv1d(3, 4, 5, padding=2),
    "3d": lambda: nn.Conv3d(2, 3, 3, padding=1),
    "bounded": lambda: bound(nn.Conv2d(3, 4, 3, padding=1), 0.5),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_certified_on_every_input(name):
    """Against the largest singular value of the explicit matrix, on small inputs of several sizes."""
    layer = CONVOLUTIONS[name]().double().eval()
    dims, channels = len(layer.kernel_size), layer.in_channels
    sizes = (5, 6) if dims == 3 else (7, 10)
    layer(torch.zeros(1, channels, *(sizes[0],) * dims).double())  # a bound holds from the first input on
    upper = certified(layer).upper
    for size in sizes:
        shape = (channels, *(size,) * dims)
        with torch.no_grad():
            basis = torch.eye(math.prod(shape), dtype=torch.float64).view(-1, *shape)
            matrix = (layer(basis) - layer(torch.zeros_like(basis[:1]))).flatten(1)
        exact = float(torch.linalg.matrix_norm(matrix, 2))
        assert exact <= upper * (1 + 1e-9)
        if name in ("plain", "padded", "bounded"):
            assert upper < 1.35 * exact  # a certificate, and not an empty one


def test_reflecting_padding_has_no_certificate():
    proven = certified(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"))
    assert proven == Lipschitz(0.0, math.inf, "no certificate for Conv2d")


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_certified_by_its_gains_in_evaluation(affine):
    layer = nn.BatchNorm1d(5, affine=affine).double()
    layer.running_var.copy_(torch.rand(5, generator=seed()) + 0.1)
    layer.running_mean.normal_(generator=seed(1))
    if affine:
        layer.weight.data.copy_(normal(5))
    proven, _ = holds(layer, normal(50, 5))
    gains = layer.eval()(torch.eye(5).double()).detach() - layer(torch.zeros(1, 5).double()).detach()
    assert proven.upper == pytest.approx(float(gains.abs().amax()), rel=1e-12)
    assert proven.lower == pytest.approx(float(gains.diagonal().abs().amin()), rel=1e-12)


def test_a_bounded_batch_norm_is_certified_by_its_bound():
    layer = nn.BatchNorm2d(3).double()
    layer.weight.data.fill_(7)
    layer.running_var.copy_(torch.rand(3, generator=seed()) + 0.1)
    proven, _ = holds(bound(layer, 2.0), normal(20, 3, 4, 4))
    assert proven.upper == pytest.approx(2.0, rel=1e-9)


ACTIVATIONS = [
    nn.ReLU(),
    nn.ReLU6(),
    nn.Tanh(),
    nn.Hardtanh(),
    nn.Softplus(),
    nn.Softplus(beta=5.0),
    nn.Softshrink(),
    nn.Sigmoid(),
    nn.GELU(),
    nn.GELU(approximate="tanh"),
    nn.SiLU(),
    nn.Mish(),
    nn.ELU(),
    nn.ELU(alpha=2.5),
    nn.ELU(alpha=-2.5),
    nn.LeakyReLU(),
    nn.LeakyReLU(0.3),
    nn.LeakyReLU(3.0),
    nn.LeakyReLU(-0.5),
    nn.Identity(),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_slopes_of_activations_are_bounded_and_nearly_reached(activation):
    x = torch.linspace(-12, 12, 2_400_001, dtype=torch.float64, requires_grad=True)
    y = activation(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    proven = certified(activation)
    steepest = float(slope.abs().amax())
    assert steepest <= proven.upper <= steepest * 1.001
    # From below: monotone functions are as flat as their flattest slope; others send two points to one.
    monotone = bool((slope >= 0).all()) or bool((slope <= 0).all())
    assert proven.lower <= (float(slope.abs().amin()) if monotone else 0.0)


@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool1d(2),
        nn.MaxPool1d(3),
        nn.MaxPool1d(3, stride=1),
        nn.MaxPool1d(2, stride=2, dilation=2),
        nn.MaxPool1d(2, stride=2, padding=1),
    ],
    ids=repr,
)
def test_pooling_is_certified_only_where_windows_do_not_share_inputs(layer):
    """One large value that moves shows in every window that holds it."""
    x = torch.zeros(20, 1, 12, dtype=torch.float64)
    x[torch.arange(20), 0, torch.arange(20) % 12] = torch.linspace(1, 3, 20).double()
    holds(layer, x)


def test_pooling_in_two_dimensions_may_have_its_stride_written_out():
    assert certified(nn.MaxPool2d(2, stride=(2, 2))).upper == certified(nn.MaxPool2d(2)).upper == 1.0
    assert certified(nn.MaxPool2d(3, stride=2)).upper == math.inf


@pytest.mark.parametrize("layer", [nn.Flatten(), nn.Dropout(0.9), nn.Unflatten(1, (2, 3))], ids=repr)
def test_layers_that_change_no_distance(layer):
    proven, found = holds(layer, normal(20, 6))
    assert (proven.lower, proven.upper) == (1.0, 1.0)
    assert found.lower == pytest.approx(1) == found.upper


# What cannot be certified ----------------------------------------------------------------------------------------


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()


@pytest.mark.parametrize(
    "layer",
    [Squared(), nn.LayerNorm(4), nn.Softmax(-1), nn.BatchNorm1d(4, track_running_stats=False), nn.PReLU()],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential, Residual, lambda m: nn.Sequential(nn.Linear(4, 4), m)])
def test_unknown_layers_are_named_and_nothing_is_claimed(layer, wrap):
    proven = certified(wrap(layer))
    assert proven.upper == math.inf
    assert proven.lower == 0.0
    assert type(layer).__name__ in proven.reason


class Shortcut(nn.Sequential):
    """A common idiom: a Sequential whose own forward adds the input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("build", [lambda: Shortcut(nn.Linear(4, 4)), lambda: Doubled(4, 4)], ids=["chain", "layer"])
def test_a_forward_of_ones_own_is_not_mistaken_for_its_base_class(build):
    holds(build(), normal(60, 4))


def test_composition_multiplies_and_keeps_the_first_reason():
    a, b, unknown = Lipschitz(0.5, 2.0), Lipschitz(0.25, 3.0), Lipschitz(0.0, math.inf, "first")
    assert a.then(b) == Lipschitz(0.125, 6.0)
    assert a.then(unknown).then(Lipschitz(0.0, math.inf, "second")) == unknown
    assert Lipschitz(0.0, 0.0).then(unknown).upper == 0.0


# Measured --------------------------------------------------------------------------------------------------------


def test_measured_constants_of_a_scaling_are_its_factor():
    found = measured(lambda x: 3 * x, normal(10, 2, 2))
    assert found.lower == pytest.approx(3) == found.upper


def test_measured_leaves_a_model_as_it_was():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model = afield.sngp(net, num_random_features=8, length_scale=1.0).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(20, 3)
    assert measured(model, x) == measured(model, x)
    assert all(m.training for m in model.modules())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def test_the_seed_chooses_the_pairs():
    x = normal(50, 3)
    assert measured(torch.sin, x, pairs=5) == measured(torch.sin, x, pairs=5)
    assert measured(torch.sin, x, pairs=5) != measured(torch.sin, x, pairs=5, seed=1)
    wide = measured(torch.sin, x, pairs=10_000)
    assert wide.lower <= measured(torch.sin, x, pairs=5).lower


@pytest.mark.parametrize(
    ("x", "message"), [(torch.zeros(1, 3), "at least 2 examples, got 1"), (torch.zeros(5, 3), "examples that differ")]
)
def test_examples_that_cannot_be_compared_are_refused(x, message):
    with pytest.raises(ValueError, match=message):
        measured(lambda t: t, x)


# Distance and rank -----------------------------------------------------------------------------------------------


@few
@given(n=st.integers(1, 40), m=st.integers(1, 40), d=st.integers(1, 5), number=st.integers(0, 1000))
def test_nearest_distance_is_the_smallest_of_all(n, m, d, number):
    x, train = normal(n, d, number=number), normal(m, d, number=number + 1)
    expected = cdist(x.numpy(), train.numpy()).min(1)
    torch.testing.assert_close(nearest_distance(x, train), torch.from_numpy(expected), rtol=1e-10, atol=1e-10)


def test_nearest_distance_works_in_parts_and_on_images():
    x, train = normal(2500, 1, 2, 2), normal(30, 1, 2, 2, number=1)
    expected = cdist(x.flatten(1).numpy(), train.flatten(1).numpy()).min(1)
    torch.testing.assert_close(nearest_distance(x, train), torch.from_numpy(expected), rtol=1e-10, atol=1e-10)


def test_a_training_example_is_at_distance_zero_also_far_from_the_origin_in_single_precision():
    """|a|^2 - 2 ab + |b|^2 would leave 0.2 here, as much as real distances."""
    train = torch.randn(200, 10) + 100
    assert float(nearest_distance(train[:50], train).max()) < 1e-3


@few
@given(
    values=st.lists(st.tuples(st.integers(-4, 4), st.integers(-4, 4)), min_size=3, max_size=40).filter(
        lambda v: len({a for a, _ in v}) > 1 and len({b for _, b in v}) > 1
    )
)
def test_spearman_is_scipys_with_ties(values):
    a, b = (torch.tensor(column, dtype=torch.float64) for column in zip(*values, strict=True))
    assert spearman(a, b) == pytest.approx(spearmanr(a.numpy(), b.numpy()).statistic, abs=1e-12)


def test_spearman_sees_only_ranks():
    a = normal(50)
    assert spearman(a, a.exp()) == pytest.approx(1)
    assert spearman(a, -(a**3)) == pytest.approx(-1)


def gaussian_process(train: torch.Tensor) -> afield.SNGP:
    """A Gaussian process on the inputs themselves, which the paper calls distance-aware."""
    net = nn.Sequential(nn.Identity(), nn.Linear(2, 1).double())
    options = {"likelihood": "gaussian", "length_scale": 1.0, "num_random_features": 256, "generator": seed()}
    model = afield.sngp(net, None, **options)
    afield.fit_posterior(model, [(train, torch.zeros(len(train), 1).double())])
    return model


def test_awareness_by_the_mean_distance_holds_around_one_cluster_and_fails_between_two():
    """Definition 1 of the paper: uncertainty is a monotonic function of the mean distance to the training data."""
    cluster = 0.3 * normal(200, 2)
    away = F.normalize(normal(150, 2, number=2)) * torch.linspace(0, 4, 150).double()[:, None]
    variance = gaussian_process(cluster).predict(away).variance.flatten()
    assert distance_correlation(variance, away, cluster, distance=mean_distance) > 0.9

    two = torch.cat([cluster + POINT, cluster - POINT])
    between, inside = torch.zeros(1, 2).double(), torch.stack([POINT, -POINT])
    assert float(mean_distance(between, two)) < float(mean_distance(inside, two).amin())
    model = gaussian_process(two)
    assert float(model.predict(between).variance) > 10 * float(model.predict(inside).variance.amax())
    assert float(nearest_distance(between, two)) > 10 * float(nearest_distance(inside, two).amax())


@few
@given(number=st.integers(0, 2**31))
def test_a_map_that_keeps_surface_distance_keeps_a_distorted_one(number: int):
    """Proposition 2 of the paper, with the distortion as d_S / d_X; as printed, d_X / d_S, its constants are inverted.

    d_X is the distance after an unknown map m, d_S the one before; h keeps d_S up to L1 and L2.
    """
    x, y = normal(40, 3, number=number), normal(40, 3, number=number + 1)
    h, m = (normal(3, 3, number=number + k) for k in (2, 3))
    least, most = (float(s) for s in torch.linalg.svdvals(h)[[-1, 0]])
    surface, true, hidden = ((a.norm(dim=1)) for a in (x - y, (x - y) @ m, (x - y) @ h))
    ratio = surface / true
    contracted = true < surface
    slack = 1 + 1e-9
    assert bool((least * true <= hidden * slack)[contracted].all())
    assert bool((hidden <= most * ratio * true * slack)[contracted].all())
    assert bool((least * ratio * true <= hidden * slack)[~contracted].all())
    assert bool((hidden <= most * true * slack)[~contracted].all())


def test_the_constant_that_is_printed_in_proposition_2_is_inverted():
    """h keeps all distances, and the true ones are a tenth of them: 1/10 L2 d_X < |h - h'|."""
    surface, true, hidden, most = 1.0, 0.1, 1.0, 1.0
    assert hidden <= most * (surface / true) * true
    assert hidden > most * (true / surface) * true


def test_variance_follows_the_distance_to_the_training_data():
    model = afield.sngp(nn.Linear(2, 2).double(), num_random_features=512, length_scale=1.0, generator=seed())
    train = normal(200, 2)
    afield.fit_posterior(model, [train])
    x = 6 * torch.rand(400, 2, generator=seed(1), dtype=torch.float64) - 3
    variance = model.predict(x).variance
    assert distance_correlation(variance, x, train) > 0.6
    assert distance_correlation(variance, x, train) == spearman(variance, nearest_distance(x, train))


@pytest.mark.parametrize(
    ("a", "b"),
    [(torch.zeros(3), torch.zeros(4)), (torch.zeros(3, 1), torch.zeros(3, 1)), (torch.zeros(1), torch.zeros(1))],
)
def test_vectors_that_have_no_rank_correlation_are_refused(a, b):
    with pytest.raises(ValueError, match="two vectors of one length >= 2"):
        spearman(a, b)
