"""Spectral bounds: the norm is that of the layer's true operator, and bounding it breaks nothing that training needs.

The reference is always the explicit matrix of the layer, column by column, and its singular values.
"""

import copy
import math
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from afield.bounds.convolution import Convolution
from afield.bounds.residual import Residual
from afield.bounds.spectral import bound, bound_of, bounds_of, certified_norm, fold, operator_norm

few = settings(deadline=None, max_examples=25)
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # torch's own
SIZE = (5, 4)  # of the images here: odd and even
# One layer of each kind, with an input for it. All of norm well above 0.3 and below 100.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 4), (3, 6)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, padding=1), (3, 2, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (3, 2, *SIZE)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (3, 1, 3, 4, 3)),
    "batchnorm": (lambda: nn.BatchNorm2d(2), (3, 2, *SIZE)),
}
ITERATED = ["linear", "conv1d", "conv2d", "conv3d"]  # whose norm is followed by power iteration
kinds = pytest.mark.parametrize("kind", LAYERS)
iterated = pytest.mark.parametrize("kind", ITERATED)


def make(kind: str, c: float | None = None) -> tuple[nn.Module, Tensor]:
    """A float64 layer, bounded by c if given, that has seen its input, and that input."""
    build, shape = LAYERS[kind]
    layer, x = build().double(), torch.randn(shape, dtype=torch.float64)
    if c is not None:
        bound(layer, c)
        layer.eval()(x)
    return layer.train(), x


def matrix(layer: Callable[[Tensor], Tensor], *shape: int) -> Tensor:
    """The matrix of the linear part of a map on inputs of this shape, column by column."""
    size = math.prod(shape)
    basis = torch.eye(size, dtype=torch.float64).view(size, *shape)
    return (layer(basis) - layer(torch.zeros(1, *shape, dtype=torch.float64))).flatten(1).T


@torch.no_grad()
def exact_norm(layer: Callable[[Tensor], Tensor], *shape: int) -> float:
    return float(torch.linalg.matrix_norm(matrix(layer, *shape), 2))


def original(layer: nn.Module, name: str = "weight") -> nn.Parameter:
    return layer.parametrizations[name].original


def change(layer: nn.Module, scale: float = 0.0) -> None:
    """An optimiser's step, as far as the bound can tell: the weight was written to."""
    with torch.no_grad():
        original(layer).add_(scale * torch.randn_like(original(layer)))


def iterate(layer: nn.Module, x: Tensor, steps: int) -> None:
    layer.train()
    for _ in range(steps):
        change(layer)
        layer(x)


def state(module: nn.Module) -> dict[str, bytes]:
    return {name: t.detach().cpu().numpy().tobytes() for name, t in module.state_dict().items()}


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, the sign of zero included."""
    return a.dtype == b.dtype and a.detach().numpy().tobytes() == b.detach().numpy().tobytes()


def run(script: str, **environment: str) -> str:
    """A script in a fresh Python, warnings as errors; its output."""
    script = "import warnings, torch\nwarnings.simplefilter('error')\ntorch.set_num_threads(1)\n" + script
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@st.composite
def convolutions(
    draw: st.DrawFn, modes: tuple[str, ...] = ("zeros", "reflect", "replicate", "circular")
) -> tuple[nn.Module, tuple[int, ...]]:
    """Any convolution without a bias, in float64, and a spatial size that it takes."""
    dims = draw(st.integers(1, 3))
    each = lambda values: tuple(draw(st.lists(values, min_size=dims, max_size=dims)))  # noqa: E731
    groups = draw(st.sampled_from([1, 1, 2]))
    mode = draw(st.sampled_from(modes))
    kernel, dilation = each(st.integers(1, 4 if dims < 3 else 2)), each(st.integers(1, 2))
    spread = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    padding = draw(st.sampled_from(["same", "valid", "numbers"]))
    stride = (1,) * dims if padding == "same" else each(st.integers(1, 3))
    if padding == "numbers":
        padding = each(st.integers(0, 2))
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](
        groups * draw(st.integers(1, 2)),
        groups * draw(st.integers(1, 2)),
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        padding_mode=mode,
        bias=False,
    ).double()
    torch.manual_seed(draw(st.integers(0, 99)))
    nn.init.normal_(layer.weight)
    # Padding may not take more from an input than it has: reflection leaves the edge itself out.
    widest = {"same": [(s + 1) // 2 for s in spread], "valid": [0] * dims}.get(str(padding), padding)
    size = tuple(max(s + 1, w + 1) + draw(st.integers(0, 3)) for s, w in zip(spread, widest, strict=True))
    return layer, size


# The operator norm.


@few
@given(convolutions())
def test_norm_of_a_convolution_is_the_largest_singular_value_of_its_matrix(
    case: tuple[nn.Module, tuple[int, ...]],
) -> None:
    layer, size = case
    assert operator_norm(layer, size) == pytest.approx(exact_norm(layer, layer.in_channels, *size), rel=1e-7)


@few
@given(convolutions())
def test_adjoint_identity(case: tuple[nn.Module, tuple[int, ...]]) -> None:
    """<A x, y> = <x, A^T y>, and A is the layer."""
    layer, size = case
    operator = Convolution(layer, layer.weight.detach(), size)
    x = torch.randn(1, layer.in_channels, *size, dtype=torch.float64)
    torch.testing.assert_close(operator.apply(x), layer(x), rtol=1e-12, atol=1e-12)
    y = torch.randn_like(operator.apply(x))
    torch.testing.assert_close((operator.apply(x) * y).sum(), (x * operator.adjoint(y)).sum(), rtol=1e-10, atol=1e-10)


def test_box_blur_has_norm_one_and_not_that_of_its_reshaped_kernel() -> None:
    blur = nn.Conv2d(1, 1, 3, padding=1, bias=False).double()
    nn.init.constant_(blur.weight, 1 / 9)
    assert torch.linalg.matrix_norm(blur.weight.flatten(1), 2).item() == pytest.approx(1 / 3)
    assert 0.98 < operator_norm(blur, (32, 32)) <= 1


@kinds
def test_norm_of_every_kind_of_layer_is_that_of_its_matrix(kind: str) -> None:
    layer, x = make(kind)
    layer(x)  # running statistics, for BatchNorm
    shape = x.shape[1:]
    assert operator_norm(layer.eval(), tuple(shape)) == pytest.approx(exact_norm(layer, *shape), rel=1e-7)


def test_norm_of_a_batchnorm_without_a_scale() -> None:
    layer = nn.BatchNorm1d(3, affine=False).double()
    layer(torch.randn(9, 3, dtype=torch.float64))
    assert operator_norm(layer.eval()) == pytest.approx(exact_norm(layer, 3), rel=1e-12)


@pytest.mark.parametrize("widths", [{}, {"kdim": 3, "vdim": 5}])
def test_norm_of_attention_is_its_largest_projection(widths: dict[str, int]) -> None:
    layer = nn.MultiheadAttention(4, 2, **widths).double()
    assert operator_norm(layer) == pytest.approx(max(float(torch.linalg.matrix_norm(m, 2)) for m in projections(layer)))


def test_norm_of_a_zero_layer_is_zero() -> None:
    layer = nn.Conv2d(2, 2, 3)
    nn.init.zeros_(layer.weight)
    assert operator_norm(layer, SIZE) == 0


def test_norm_of_a_convolution_needs_an_input_size() -> None:
    with pytest.raises(ValueError, match=r"give input_shape, the spatial size, e\.g\. \(32, 32\)"):
        operator_norm(nn.Conv2d(1, 1, 3))


def test_bounded_convolution_knows_its_input_size() -> None:
    layer, x = make("conv2d", 100.0)
    assert operator_norm(layer) == pytest.approx(exact_norm(layer, *x.shape[1:]), rel=1e-9)


def test_norm_of_an_unknown_layer() -> None:
    with pytest.raises(TypeError, match="operator_norm knows Linear, Conv1d/2d/3d"):
        operator_norm(nn.LayerNorm(3))


@kinds
def test_measuring_changes_nothing(kind: str) -> None:
    layer, _ = make(kind, 0.1)
    before = state(layer)
    operator_norm(layer)
    certified_norm(layer)
    assert state(layer) == before


# The certificate.


@few
@given(convolutions(modes=("zeros", "circular")))
def test_certificate_holds_for_every_input_size(case: tuple[nn.Module, tuple[int, ...]]) -> None:
    layer, size = case
    assert certified_norm(layer) >= operator_norm(layer, size) * (1 - 1e-9)


def test_certificate_counts_what_circular_padding_repeats() -> None:
    """The identity, with one more point on either side: some inputs come out twice, so the norm is sqrt(2)."""
    layer = nn.Conv1d(1, 1, 1, padding=1, padding_mode="circular", bias=False)
    nn.init.ones_(layer.weight)
    assert certified_norm(layer) >= operator_norm(layer, (6,)) * (1 - 1e-9)


@few
@given(st.integers(1, 2), st.integers(1, 5), st.integers(1, 2), st.integers(0, 99))
def test_certificate_is_tight_on_large_inputs(dims: int, kernel: int, channels: int, seed: int) -> None:
    torch.manual_seed(seed)
    layer = (nn.Conv1d, nn.Conv2d)[dims - 1](channels, 2, kernel, padding=kernel - 1, bias=False).double()
    assert certified_norm(layer) <= 1.1 * operator_norm(layer, (64, 32)[dims - 1 :][:1] * dims)


@pytest.mark.parametrize("kind", ["linear", "batchnorm"])
def test_certificate_of_a_matrix_is_its_norm(kind: str) -> None:
    layer, _ = make(kind)
    assert operator_norm(layer) <= certified_norm(layer) <= operator_norm(layer) * (1 + 1e-9)


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), nn.LayerNorm(3), nn.MultiheadAttention(4, 2)]
)
def test_no_certificate_is_infinite(layer: nn.Module) -> None:
    assert certified_norm(layer) == math.inf


# The bound.


@kinds
def test_below_the_bound_the_weight_is_untouched(kind: str) -> None:
    plain, x = make(kind)
    layer = bound(copy.deepcopy(plain), 100.0)
    for _ in range(3):
        change(layer, 1e-3)
        layer(x)
        assert equal(layer.weight, original(layer))
    assert bound_of(layer).binding == 0.0


@kinds
def test_a_lower_bound_binds_at_once_in_training(kind: str) -> None:
    """Also on a weight that has not changed since it was found to be below the old one."""
    layer, x = make(kind, 100.0)
    layer(x)
    assert equal(layer.weight, original(layer))
    bound(layer, 0.3)
    torch.testing.assert_close(layer.weight, fold(layer).weight if kind in ITERATED else layer.weight)
    assert float(layer.weight.detach().norm()) < float(original(layer).detach().norm())
    bound(layer, 100.0)
    assert equal(layer.weight, original(layer))
    assert int(bound_of(layer).num_steps) == 1


def test_a_larger_input_may_bind_where_a_smaller_did_not() -> None:
    """On one pixel a blur keeps a ninth, on a large image all."""
    layer = bound(nn.Conv2d(1, 1, 3, padding=1, bias=False).double(), 0.5)
    nn.init.constant_(original(layer), 1 / 9)
    layer(torch.randn(1, 1, 1, 1).double())
    assert equal(layer.weight, original(layer))
    layer(torch.randn(1, 1, 16, 16).double())
    assert operator_norm(layer) == pytest.approx(0.5, rel=1e-3)
    assert not equal(layer.weight, original(layer))


@kinds
def test_above_the_bound_the_norm_is_the_bound(kind: str) -> None:
    layer, x = make(kind, 0.3)
    layer.eval()
    weight, bounded = original(layer), layer.weight
    assert exact_norm(layer, *x.shape[1:]) == pytest.approx(0.3, rel=1e-6)
    torch.testing.assert_close(bounded / bounded.norm(), weight / weight.norm())  # a multiple of the weight


@few
@given(convolutions(), st.floats(0.1, 2.0))
def test_any_convolution_obeys_its_bound(case: tuple[nn.Module, tuple[int, ...]], c: float) -> None:
    layer, size = case
    bound(layer, c).eval()(torch.zeros(1, layer.in_channels, *size, dtype=torch.float64))
    assert operator_norm(layer) <= c * 1.01  # the start is within a percent of the norm


@iterated
def test_training_against_the_bound_stays_within_it(kind: str) -> None:
    layer, x = make(kind, 0.3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)
    before = float(original(layer).detach().norm())
    for _ in range(40):
        optimizer.zero_grad()
        (-layer(x).square().mean()).backward()
        optimizer.step()
        assert operator_norm(layer) <= 0.3 * 1.01
    assert float(original(layer).detach().norm()) > before  # it did push


@iterated
def test_perturbed_it_leaves_the_bound_and_iterated_it_returns(kind: str) -> None:
    layer, x = make(kind, 0.3)
    change(layer, 1.0)
    layer.eval()
    assert operator_norm(layer) > 0.3 * 1.02
    iterate(layer, x, 500)
    assert operator_norm(layer.eval()) == pytest.approx(0.3, rel=1e-6)


@kinds
def test_evaluation_changes_nothing(kind: str) -> None:
    layer, x = make(kind, 0.3)
    change(layer, 0.1)
    layer.eval()
    before, out = state(layer), layer(x)
    for _ in range(3):
        change(layer)
        assert equal(layer(x), out)
        with torch.no_grad():
            layer(torch.cat([x, x]))
    assert state(layer) == before


@kinds
def test_one_iteration_for_each_change_of_the_weight(kind: str) -> None:
    layer, x = make(kind, 0.3)
    layer(x)
    for steps in range(2, 5):
        change(layer, 0.1)
        seen = state(layer)
        out = layer(x)
        after = state(layer) if kind != "batchnorm" else None  # whose statistics move with every pass
        assert int(bound_of(layer).num_steps) == steps
        assert after != seen
        assert equal(layer(x), out)
        assert after is None or state(layer) == after
    assert bound_of(layer).binding == 1.0


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 1e-3, foreach=False),
        lambda p: torch.optim.SGD(p, 1e-3, foreach=True),
        lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
        lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
        lambda p: torch.optim.SGD(p, 1e-3, fused=True),
    ],
    ids=["sgd", "sgd foreach", "adamw foreach", "adamw fused", "sgd fused"],
)
def test_every_optimizer_step_is_noticed(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """Fused optimisers write to the weight without telling its version counter."""
    layer, x = make("linear", 0.3)
    steps = optimizer(layer.parameters())
    for _ in range(5):
        layer(x).square().sum().backward()
        steps.step()
    layer(x)
    assert int(bound_of(layer).num_steps) == 6


@kinds
def test_gradient_is_that_of_the_exact_formula(kind: str) -> None:
    """d/dW of W min(1, c / sigma(W)) with sigma the largest singular value of the explicit matrix."""
    layer, x = make(kind, 0.3)
    if kind in ITERATED:
        iterate(layer, x, 1000)
    layer.eval()
    pull = torch.randn_like(layer.weight)
    (found,) = torch.autograd.grad((layer.weight * pull).sum(), original(layer))

    build, _ = LAYERS[kind]
    plain = build().double().eval()
    weight = original(layer).detach().clone().requires_grad_()
    tensors = {name: t for name, t in layer.state_dict().items() if "parametrizations" not in name}
    explicit = matrix(lambda x: torch.func.functional_call(plain, tensors | {"weight": weight}, (x,)), *x.shape[1:])
    sigma = torch.linalg.matrix_norm(explicit, 2)
    (exact,) = torch.autograd.grad((weight * 0.3 / sigma * pull).sum(), weight)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-8)


@kinds
def test_below_the_bound_the_gradient_is_untouched(kind: str) -> None:
    layer, _ = make(kind, 100.0)
    pull = torch.randn_like(layer.weight)
    (found,) = torch.autograd.grad((layer.weight * pull).sum(), original(layer))
    assert torch.equal(found, pull)


@kinds
def test_zero_weight_trains(kind: str) -> None:
    """Residual branches often end in a zero layer: its gradient is finite, and it is bounded once it grows."""
    layer, x = make(kind)
    nn.init.zeros_(layer.weight)
    bound(layer, 0.3)
    layer(x).sum().backward()
    assert bool(original(layer).grad.isfinite().all())
    change(layer, 1.0)
    iterate(layer, x, 200)
    assert operator_norm(layer) <= 0.3 * 1.01


@iterated
def test_vectors_that_are_out_of_date_never_enlarge_or_flip_a_weight(kind: str) -> None:
    """Weights loaded without their vectors and used in evaluation mode: the estimate is poor, the factor in (0, 1]."""
    layer, _ = make(kind, 0.3)
    layer.eval()
    for seed in range(20):
        torch.manual_seed(seed)
        with torch.no_grad():
            original(layer).normal_()
        factor = (layer.weight / original(layer)).detach()
        assert float(factor.min()) > 0
        assert float(factor.max()) <= 1


def test_bounding_again_sets_the_bound() -> None:
    layer, x = make("conv2d", 0.3)
    assert bound(layer, 0.2) is layer
    assert len(layer.parametrizations["weight"]) == 1
    assert len(layer._forward_pre_hooks) == 1
    assert operator_norm(layer.eval()) == pytest.approx(0.2, rel=1e-3)
    bound(layer, 100.0)
    assert equal(layer.weight, original(layer))
    layer(x)


@pytest.mark.parametrize("c", [0, -1.0, math.nan])
def test_bound_must_be_positive(c: float) -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="The bound c must be positive, got"):
        bound(layer, c)
    assert type(layer) is nn.Linear


@pytest.mark.parametrize(
    "layer",
    [
        nn.ReLU(),
        nn.LayerNorm(3),
        nn.ConvTranspose2d(1, 1, 3),
        nn.Embedding(3, 3),
        nn.BatchNorm2d(3, affine=False),
        nn.BatchNorm2d(3, track_running_stats=False),
    ],
    ids=lambda layer: str(layer),
)
def test_what_cannot_be_bounded_is_refused(layer: nn.Module) -> None:
    before = str(layer)
    with pytest.raises(TypeError, match=f"bound expects one of Linear, .* with a weight, got {type(layer).__name__}"):
        bound(layer)
    assert str(layer) == before


def test_norm_of_a_batchnorm_without_statistics_is_unknown() -> None:
    with pytest.raises(ValueError, match="without running statistics has no fixed operator: use track_running_stats"):
        operator_norm(nn.BatchNorm2d(3, track_running_stats=False))


def test_batchnorm_bound_follows_the_running_statistics() -> None:
    layer = bound(nn.BatchNorm1d(3).double(), 0.5)
    assert operator_norm(layer.eval()) == pytest.approx(0.5)
    with torch.no_grad():
        layer.running_var.copy_(torch.tensor([9.0, 16.0, 25.0]))  # gains 1/3, 1/4, 1/5: below the bound
    assert equal(layer.weight, original(layer))
    assert operator_norm(layer) == pytest.approx(1 / 3, rel=1e-5)


def test_bounds_are_found_by_name() -> None:
    layer = bound(nn.MultiheadAttention(4, 2), 0.3)
    assert list(bounds_of(layer)) == ["in_proj_weight"]
    assert bounds_of(nn.Linear(2, 2)) == bounds_of(nn.ReLU()) == {}
    assert bound_of(nn.Linear(2, 2)) is None
    assert "c=0.3" in repr(layer)
    assert math.isnan(bound_of(layer, "in_proj_weight").binding)


# The input size of a convolution.


def test_input_size_is_followed_in_training_and_kept_in_evaluation() -> None:
    layer = bound(nn.Conv2d(1, 1, 3, padding=1).double(), 0.3)
    small, large = torch.randn(2, 1, 3, 3).double(), torch.randn(2, 1, 8, 8).double()
    assert equal(layer.weight, original(layer))  # no input, no norm, no bound
    layer(small)
    assert bound_of(layer).input_size == (3, 3)
    layer.eval()(large)
    assert bound_of(layer).input_size == (3, 3)
    layer.train()(large)
    assert bound_of(layer).input_size == (8, 8)
    assert operator_norm(layer) == pytest.approx(0.3, rel=1e-3)


def test_input_given_by_keyword_is_seen() -> None:
    layer = bound(nn.Conv2d(1, 1, 3).double(), 0.01)
    layer(input=torch.randn(1, 1, 5, 4).double())
    assert bound_of(layer).input_size == (5, 4)


def test_unbatched_input_is_seen() -> None:
    layer = bound(nn.Conv2d(1, 1, 3).double(), 0.01)
    layer(torch.randn(1, 5, 4).double())
    assert bound_of(layer).input_size == (5, 4)


def test_first_input_in_inference_mode_does_not_stop_training() -> None:
    layer, _ = make("conv2d")
    x = torch.randn(2, 2, *SIZE).double()
    bound(layer, 0.3).eval()
    with torch.inference_mode():
        layer(x)
    layer.train()(x).sum().backward()
    assert int(bound_of(layer).num_steps) == 1


# What training needs.


@kinds
def test_state_dict_into_a_fresh_layer(kind: str) -> None:
    layer, x = make(kind, 0.3)
    change(layer, 0.1)
    layer(x)
    fresh = bound(LAYERS[kind][0]().double(), 0.3)  # a convolution here has seen no input
    fresh.load_state_dict(layer.state_dict())
    assert state(fresh) == state(layer)
    assert equal(fresh.eval()(x), layer.eval()(x))
    change(layer, 0.1)
    fresh.load_state_dict(layer.state_dict())
    assert equal(fresh.train()(x), layer.train()(x))


def test_state_dict_of_a_layer_without_input_into_one_with() -> None:
    layer, x = make("conv2d", 0.3)
    layer.load_state_dict(bound(LAYERS["conv2d"][0]().double(), 0.3).state_dict())
    assert bound_of(layer).input_size is None
    layer(x)
    assert bound_of(layer).input_size == SIZE


@kinds
def test_deepcopy_is_independent(kind: str) -> None:
    layer, x = make(kind, 0.3)
    before = state(layer)
    twin = copy.deepcopy(layer)
    assert state(twin) == before
    twin.train()
    for _ in range(3):
        change(twin, 0.5)
        twin(x)
    assert state(layer) == before
    assert not torch.equal(twin.eval().weight, layer.eval().weight)
    assert operator_norm(twin) == pytest.approx(exact_norm(twin, *x.shape[1:]), rel=1e-6)


@kinds
def test_weight_decay_acts_on_the_original(kind: str) -> None:
    layer, x = make(kind, 0.3)
    names = dict(layer.named_parameters())
    assert set(names) == {"bias", "parametrizations.weight.original"}
    before = original(layer).detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5, weight_decay=0.1)
    (layer(x).sum() * 0).backward()
    optimizer.step()
    torch.testing.assert_close(original(layer).detach(), before * (1 - 0.5 * 0.1), rtol=1e-12, atol=0)


def small_net(c: float = 0.3) -> tuple[nn.Module, Tensor]:
    """Convolution, BatchNorm and Linear, all bounded, in float64, and an input."""
    torch.manual_seed(0)
    net = nn.Sequential(
        bound(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), c),
        bound(nn.BatchNorm2d(3), c),
        nn.Tanh(),
        nn.Flatten(),
        bound(nn.Linear(3 * math.prod(SIZE), 4), c),
    ).double()
    return net, torch.randn(6, 2, *SIZE, dtype=torch.float64)


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(reentrant: bool) -> None:
    net, x = small_net()
    twin = copy.deepcopy(net)
    checkpoint(net, x.clone().requires_grad_(), use_reentrant=reentrant).square().sum().backward()
    twin(x).square().sum().backward()
    assert all(equal(a, b) for a, b in zip(gradients(net).values(), gradients(twin).values(), strict=True))
    vectors, others = (
        {name: value for name, value in state(m).items() if "parametrizations" in name} for m in (net, twin)
    )  # and not BatchNorm's statistics, which a second pass moves, bounded or not
    assert vectors == others


def test_gradient_accumulation_sees_one_layer() -> None:
    net, x = small_net()
    net[1].eval()
    twin = copy.deepcopy(net)
    net(x).square().sum().backward()
    for part in x.split(2):
        twin(part).square().sum().backward()
    torch.testing.assert_close(gradients(twin), gradients(net), rtol=1e-12, atol=1e-12)
    assert state(net) == state(twin)


def test_two_views_in_one_graph() -> None:
    """The weight moves on while an older graph is still waiting for its backward pass: that pass is still right."""
    layer, x = make("linear", 0.3)
    loss = layer(x).sum()
    before = torch.autograd.grad(loss, original(layer), retain_graph=True)[0]
    vectors = bound_of(layer)
    vectors.u.mul_(-1)
    vectors.v.zero_()
    assert equal(torch.autograd.grad(loss, original(layer))[0], before)


@pytest.mark.slow
def test_compiled_training_agrees_with_eager() -> None:
    net, x = small_net()
    twin = copy.deepcopy(net)
    compiled = torch.compile(net, backend="aot_eager")
    for model, forward in ((net, compiled), (twin, twin)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            forward(x).square().sum().backward()
            optimizer.step()
    try:
        torch.testing.assert_close(net.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-12)
        net.eval()
        before = state(net)
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-12, atol=1e-12)
        assert state(net) == before
    finally:
        torch._dynamo.reset()


AMP = textwrap.dedent("""
    import copy
    from torch import nn
    from afield.bounds.spectral import bound, bound_of, operator_norm
    torch.manual_seed(0)
    net = nn.Sequential(
        bound(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), 0.3), nn.Flatten(), bound(nn.Linear(60, 4), 0.3)
    )
    x, twin = torch.randn(6, 2, 5, 4), copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = net(x)
        assert out.dtype == torch.bfloat16
        if step == 0:  # the bound itself works in full precision
            full = twin(x)
            torch.testing.assert_close(out.float(), full, rtol=0.05, atol=0.02)
            for name, tensor in net.state_dict().items():
                assert torch.equal(tensor, twin.state_dict()[name]), name
        optimizer.zero_grad()
        (-out.float().square().sum()).backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in net.parameters())
        optimizer.step()
    for layer in (net[0], net[2]):
        assert int(bound_of(layer).num_steps) == 3
        assert operator_norm(layer.eval()) <= 0.3 * 1.01
""")


def test_autocast() -> None:
    """Without the cap, some processors meet an illegal instruction in their bfloat16 matrix products."""
    run(AMP, ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16")


DDP = textwrap.dedent("""
    import copy
    import torch._dynamo  # once, before the fork
    import torch.distributed as dist, torch.multiprocessing as mp
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from afield.experiment.launch import disconnect
    from afield.bounds.spectral import bound

    def steps(model, net, x):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    def rank(index, file):
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=index, world_size=2)
        torch.manual_seed(0)
        net = nn.Sequential(bound(nn.Conv2d(2, 3, 3), 0.3), nn.Flatten(), bound(nn.Linear(18, 4), 0.3)).double()
        alone, x = copy.deepcopy(net), torch.randn(8, 2, 5, 4).double()
        if index:
            nn.init.normal_(net[0].parametrizations.weight.original)  # DDP starts all ranks from the first
        steps(DistributedDataParallel(net), net, x[index::2])
        states = [None, None]
        dist.all_gather_object(states, net.state_dict())
        steps(alone, alone, x)
        for name, tensor in alone.state_dict().items():
            assert torch.equal(states[0][name], states[1][name]), name
            torch.testing.assert_close(states[0][name], tensor, rtol=1e-9, atol=1e-12)
        disconnect()

    mp.start_processes(rank, (FILE,), nprocs=2, start_method="fork")
""")


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path: os.PathLike[str]) -> None:
    """Vectors and parameters agree on all ranks, and with one process that sees all the data."""
    run(f"FILE = {os.fspath(tmp_path)!r} + '/store'\n" + DDP)


# Attention.


def projections(layer: nn.MultiheadAttention) -> list[Tensor]:
    names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    packed = layer.in_proj_weight.chunk(3) if layer._qkv_same_embed_dim else [getattr(layer, n) for n in names]
    return [m.detach() for m in (*packed, layer.out_proj.weight)]


@pytest.mark.parametrize("widths", [{}, {"kdim": 6, "vdim": 3}], ids=["packed", "unpacked"])
def test_attention(widths: dict[str, int]) -> None:
    """Every projection is bounded by itself: a large one does not shrink its neighbour, which stays untouched."""
    plain = nn.MultiheadAttention(4, 2, batch_first=True, **widths).double()
    with torch.no_grad():
        first = plain.in_proj_weight[:4] if not widths else plain.q_proj_weight
        first.mul_(0.01)
    layer = bound(copy.deepcopy(plain), 0.3)
    q, k, v = torch.randn(2, 3, 4), torch.randn(2, 5, layer.kdim), torch.randn(2, 5, layer.vdim)
    inputs = q.double(), k.double(), v.double()
    norms = [float(torch.linalg.matrix_norm(m, 2)) for m in projections(layer)]
    assert norms[0] < 0.05
    assert norms[1:] == pytest.approx([0.3] * 3, rel=1e-9)
    assert equal(projections(layer)[0].contiguous(), projections(plain)[0].contiguous())

    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        layer(*inputs)[0].square().sum().backward()
        optimizer.step()
    assert operator_norm(layer.eval()) <= 0.3 * 1.01

    folded = fold(layer)
    assert equal(folded(*inputs)[0], layer(*inputs)[0])
    with torch.no_grad():  # where torch takes its fast path, by the same weights
        fast = layer(*inputs, need_weights=False)[0]
        assert equal(folded.requires_grad_(False)(*inputs, need_weights=False)[0], fast)
    torch.testing.assert_close(fast, layer(*inputs, need_weights=False)[0], rtol=1e-9, atol=1e-12)
    assert type(folded.out_proj) is type(plain.out_proj)
    assert set(dict(folded.named_parameters())) == set(dict(plain.named_parameters()))


def test_transformer_layer_on_its_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double().eval()
    plain, x = copy.deepcopy(layer), torch.randn(2, 3, 8, dtype=torch.float64)
    for part in list(layer.modules()):
        if isinstance(part, nn.Linear | nn.MultiheadAttention):
            bound(part, 0.1)
    with torch.no_grad():
        fast = layer(x)
        assert equal(fast, fold(layer)(x))
    torch.testing.assert_close(fast, layer(x), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(fast, plain(x), rtol=1e-2)


# Folding.


def test_fold_is_the_same_function_by_plain_layers() -> None:
    net, x = small_net()
    net(x)
    net.eval()
    before, folded = state(net), fold(net)
    assert equal(folded(x), net(x))
    assert state(net) == before
    plain = [nn.Conv2d, nn.BatchNorm2d, nn.Tanh, nn.Flatten, nn.Linear]
    assert [type(m) for m in folded] == plain
    assert set(folded.state_dict()) == {f"{i}.{name}" for i, kind in enumerate(plain) for name in names_of(kind)}
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in folded.modules())
    assert not folded.training
    assert equal(pickle.loads(pickle.dumps(folded))(x), net(x))


def names_of(kind: type[nn.Module]) -> list[str]:
    if kind in (nn.Tanh, nn.Flatten):
        return []
    statistics = ["running_mean", "running_var", "num_batches_tracked"] if kind is nn.BatchNorm2d else []
    return ["weight", "bias", *statistics]


def test_original_lives_on_after_a_fold() -> None:
    net, x = small_net()
    net(x)
    folded = fold(net)
    frozen = folded.eval()(x)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
        assert int(bound_of(net[0]).num_steps) >= step + 1
    assert operator_norm(net[4].eval()) <= 0.3 * 1.1
    assert not equal(net.eval()(x), frozen)
    assert equal(folded(x), frozen)
    fold(net)


def test_folded_copy_trains_without_a_bound() -> None:
    net, x = small_net()
    net(x)
    folded = fold(net)
    assert folded.training
    with torch.no_grad():
        folded[4].weight.mul_(10)
    assert operator_norm(folded[4]) == pytest.approx(3.0, rel=1e-3)
    folded(x).sum().backward()
    assert all(p.grad is not None for p in folded.parameters())


def test_fold_keeps_what_is_frozen_frozen() -> None:
    net, _ = small_net()
    net[0].requires_grad_(False)
    assert {n: p.requires_grad for n, p in fold(net).named_parameters()} == {
        "0.weight": False, "0.bias": False, "1.weight": True, "1.bias": True, "4.weight": True, "4.bias": True
    }  # fmt: skip


def test_fold_of_a_convolution_that_has_seen_nothing() -> None:
    layer = bound(nn.Conv2d(1, 1, 3), 0.01)
    assert equal(fold(layer).weight, original(layer))


def test_fold_of_a_plain_network_is_a_copy() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    folded = fold(net)
    assert folded is not net
    assert state(folded) == state(net)


# Residual blocks.


def test_residual_adds_its_branch() -> None:
    branch, x = nn.Linear(3, 3), torch.randn(4, 3)
    assert equal(Residual(branch)(x), x + branch(x))


@few
@given(st.floats(0.1, 0.9), st.integers(1, 6), st.integers(0, 99))
def test_residual_linear_map_has_its_singular_values_between_1_minus_and_1_plus_a(a: float, width: int, seed: int):
    torch.manual_seed(seed)
    layer = nn.Linear(width, width).double()
    nn.init.normal_(layer.weight, std=3.0)
    values = torch.linalg.svdvals(matrix(Residual(bound(layer, a)), width).detach())
    assert 1 - a - 1e-9 <= float(values.min())
    assert float(values.max()) <= 1 + a + 1e-9
