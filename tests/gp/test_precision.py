"""The Laplace posterior: a sum over examples, its curvature the Hessian, its variance the Gaussian process's."""

import copy
import gc
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from afield.errors import NotFitted
from afield.gp.features import RandomFeatures
from afield.gp.likelihoods import LIKELIHOODS
from afield.gp.precision import (
    BLOCK,
    COVARIANCES,
    CURVATURE_CHOICES,
    Precision,
    choose_curvature,
    curvature_weights,
)
from afield.registry import UnknownName

few = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 10**6)


def normal(*shape: int, number: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def uniform(*shape: int, number: int = 0) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def eye(n: int) -> torch.Tensor:
    return torch.eye(n, dtype=torch.float64)


def fitted(phi: torch.Tensor, weights: torch.Tensor | None = None, **options: float) -> Precision:
    weights = torch.ones(len(phi), 1) if weights is None else weights
    precision = Precision(phi.shape[1], weights.shape[1], **options).double()
    precision.update(phi, weights)
    return precision


def variance(precision: Precision, phi: torch.Tensor, ridge: float, noise: float = 1.0) -> torch.Tensor:
    precision.factor(ridge, noise)
    return precision.variance(phi)


def state(module: torch.nn.Module) -> dict[str, bytes]:
    return {name: t.numpy().tobytes() for name, t in module.state_dict().items()}


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


# Blocks of a triangle ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 300])
@pytest.mark.parametrize("num_features", [200, 256, 600])
def test_blocks_make_the_whole_product(n, num_features):
    """More features than a block has rows, and batches that are and are not worth blocks."""
    phi, w, new = normal(n, num_features), uniform(n, 2, number=1), normal(40, num_features, number=2)
    precision = fitted(phi, w)
    expected = torch.stack([phi.T @ (phi * column[:, None]) for column in w.T])
    torch.testing.assert_close(precision.data, expected, rtol=1e-11, atol=1e-11)
    # Upper blocks are copies; within a block on the diagonal, mirrored sums may differ in their last bit.
    if n >= BLOCK:
        assert torch.equal(precision.data[:, :BLOCK, BLOCK:], precision.data[:, BLOCK:, :BLOCK].mT)
    inverse = torch.linalg.inv(expected + 0.5 * eye(num_features))
    found = variance(precision, new, 0.5)
    torch.testing.assert_close(found, torch.einsum("nd,kde,ne->nk", new, inverse, new), rtol=1e-9, atol=1e-9)
    rough = Precision(num_features, 2)
    rough.update(phi.float(), w.float(), fast=True)
    torch.testing.assert_close(rough.data, expected, rtol=1e-4, atol=1e-4)
    precision.downdate(phi, w)
    torch.testing.assert_close(precision.data, torch.zeros_like(expected), rtol=0, atol=1e-10)


def test_the_variance_has_a_gradient_also_at_zero_features():
    precision = fitted(normal(300, 280))
    precision.factor(1.0)
    phi = torch.cat([torch.zeros(1, 280), normal(2, 280, number=1)]).requires_grad_()
    precision.variance(phi).sum().backward()
    inverse = torch.linalg.inv(precision.data[0] + eye(280))
    torch.testing.assert_close(phi.grad, 2 * phi.detach() @ inverse, rtol=1e-9, atol=1e-9)


# The variance is that of a Gaussian process ---------------------------------------------------------------------


@few
@given(
    number=seeds,
    n=st.integers(1, 30),
    num_features=st.integers(1, 20),
    ridge=st.floats(1e-2, 1e2),
    noise=st.floats(0.1, 10.0),
)
def test_primal_variance_is_the_dual_gaussian_process_variance(number, n, num_features, ridge, noise):
    """phi^T (r I + Phi^T W Phi / s)^-1 phi = (k - k*^T (K + r s W^-1)^-1 k*) / r."""
    phi, new, w = normal(n, num_features, number=number), normal(7, num_features), uniform(n, 1, number=number) + 0.1
    primal = variance(fitted(phi, w), new, ridge, noise)
    gram, cross, prior = phi @ phi.T, phi @ new.T, new.square().sum(1)
    dual = (prior - (cross * torch.linalg.solve(gram + ridge * noise * torch.diag(1 / w[:, 0]), cross)).sum(0)) / ridge
    torch.testing.assert_close(primal, dual, rtol=1e-10, atol=1e-10 * float(prior.max()) / ridge)


@few
@given(number=seeds, ridge=st.floats(1e-3, 1e3))
def test_the_reference_code_returns_the_variance_times_the_ridge(number, ridge):
    """r phi^T (G + r I)^-1 phi is the Gaussian process with a unit weight prior and noise r."""
    phi, new = normal(15, 6, number=number), normal(7, 6)
    gram, cross = phi @ phi.T, phi @ new.T
    unit_prior = new.square().sum(1) - (cross * torch.linalg.solve(gram + ridge * eye(15), cross)).sum(0)
    torch.testing.assert_close(ridge * variance(fitted(phi), new, ridge), unit_prior, rtol=1e-8, atol=1e-9)


@few
@given(number=seeds, scale=st.floats(0.05, 20.0), ridge=st.floats(1e-2, 1e2))
def test_scaling_the_features_is_scaling_the_ridge(number, scale, ridge):
    """var(a phi, r) = var(phi, r / a^2); the reference code's r var(phi, r) gains a factor: lambda never transfers."""
    phi, new = normal(15, 6, number=number), normal(7, 6)

    def reference(a: float, r: float) -> torch.Tensor:
        return r * variance(fitted(a * phi), a * new, r)

    scaled, plain = variance(fitted(scale * phi), scale * new, ridge), variance(fitted(phi), new, ridge / scale**2)
    torch.testing.assert_close(scaled, plain, rtol=1e-9, atol=0)
    torch.testing.assert_close(reference(scale, ridge), scale**2 * reference(1.0, ridge / scale**2), rtol=1e-9, atol=0)


@few
@given(number=seeds, sigma=st.floats(0.05, 20.0), ridge=st.floats(1e-2, 1e2), factor=st.floats(1e-3, 30.0))
def test_the_papers_amplitude_and_its_codes_factor_have_their_ridge_and_amplitude_here(number, sigma, ridge, factor):
    """docs/method.md: v = a^2 var(phi, r) with (a, r) = (1, r / sigma^2) and (sqrt(8 lambda r / pi), 2 r / D)."""
    phi, new, d = normal(15, 6, number=number), normal(7, 6), 6

    def ours(amplitude: float, ridge: float) -> torch.Tensor:
        return amplitude**2 * variance(fitted(phi), new, ridge)

    # The paper: f ~ N(0, sigma^2 K), a unit prior over features sigma phi / sqrt(r), unit weights.
    prior, gram, cross = (sigma**2 / ridge * k for k in (new @ new.T, phi @ phi.T, phi @ new.T))
    dual = (prior - cross.T @ torch.linalg.solve(gram + eye(15), cross)).diagonal()
    torch.testing.assert_close(ours(1.0, ridge / sigma**2), dual, rtol=1e-7, atol=1e-9 * float(prior.max()))
    # Its code: features without sqrt(2/D), the ridge once more outside, lambda in the place of pi/8.
    bare, bare_new = (math.sqrt(d / 2) * features for features in (phi, new))
    returned = ridge * (bare_new @ torch.linalg.inv(ridge * eye(d) + bare.T @ bare) * bare_new).sum(1)
    same = ours(math.sqrt(8 * factor * ridge / math.pi), 2 * ridge / d)
    torch.testing.assert_close(math.pi / 8 * same, factor * returned, rtol=1e-8, atol=0)


def test_without_examples_the_variance_is_the_prior():
    new = normal(7, 6)
    torch.testing.assert_close(variance(fitted(normal(0, 6)), new, 4.0), new.square().sum(1) / 4)


@few
@given(number=seeds)
def test_more_examples_never_raise_the_variance(number):
    precision, new = fitted(normal(5, 6, number=number)), normal(20, 6, number=number + 1)
    before = variance(precision, new, 0.3)
    precision.update(normal(3, 6, number=number + 2), torch.ones(3, 1))
    assert bool((variance(precision, new, 0.3) <= before + 1e-12).all())


def test_one_matrix_per_class_is_one_precision_for_each():
    phi, new, w = normal(20, 6), normal(7, 6, number=1), uniform(20, 3)
    together = variance(fitted(phi, w), new, 0.5)
    assert together.shape == (7, 3)
    for k in range(3):
        torch.testing.assert_close(together[:, k], variance(fitted(phi, w[:, k : k + 1]), new, 0.5))


# The data term is a sum over examples ---------------------------------------------------------------------------


@few
@given(number=seeds, n=st.integers(1, 40), data=st.data())
def test_the_sum_does_not_depend_on_order_and_split(number, n, data):
    phi, w = normal(n, 5, number=number), uniform(n, 2, number=number)
    order = torch.tensor(data.draw(st.permutations(range(n))))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=6)))
    precision = Precision(5, 2)
    for part in torch.tensor_split(order, cuts):  # some parts are empty
        precision.update(phi[part], w[part])
    assert int(precision.count) == n
    torch.testing.assert_close(precision.data, fitted(phi, w).data, rtol=1e-12, atol=1e-12)


@few
@given(number=seeds, cut=st.integers(0, 20))
def test_merging_is_seeing_both(number, cut):
    phi, w = normal(20, 5, number=number), uniform(20, 2, number=number)
    left, right, whole = fitted(phi[:cut], w[:cut]), fitted(phi[cut:], w[cut:]), fitted(phi, w)
    theirs = state(right)
    left.merge(right)
    torch.testing.assert_close(left.data, whole.data, rtol=1e-12, atol=1e-12)
    assert int(left.count) == 20
    assert state(right) == theirs
    assert not left.factored


def test_merging_integer_features_is_bitwise_exact():
    phi = torch.randint(-9, 10, (20, 5), generator=torch.Generator().manual_seed(0)).float()
    left, right = fitted(phi[:8]), fitted(phi[8:])
    left.merge(right)
    assert torch.equal(left.data, fitted(phi).data)


def test_merging_with_and_into_an_unfitted_precision():
    precision, empty = fitted(normal(9, 4)), Precision(4)
    before = state(precision)
    precision.merge(empty)
    assert state(precision) == before
    empty.merge(precision)
    assert state(empty)["data"] == before["data"]
    assert int(empty.count) == 9
    fresh = Precision(4)
    fresh.merge(Precision(4))
    assert not fresh.fitted


def test_merging_does_not_share_memory():
    precision, empty = fitted(normal(9, 4)), Precision(4)
    empty.merge(precision)
    before = state(precision)
    empty.update(normal(3, 4), torch.ones(3, 1))
    assert state(precision) == before


@few
@given(number=seeds, n=st.integers(1, 20))
def test_downdate_undoes_update(number, n):
    kept, removed = normal(30, 5, number=number), normal(n, 5, number=number + 1)
    w = uniform(n, 2, number=number) + 0.1
    precision = fitted(kept, uniform(30, 2))
    before, new = precision.data.clone(), normal(7, 5)
    expected = variance(precision, new, 0.1)
    precision.update(removed, w)
    precision.downdate(removed, w)
    torch.testing.assert_close(precision.data, before, rtol=0, atol=1e-12)
    assert int(precision.count) == 30
    torch.testing.assert_close(variance(precision, new, 0.1), expected, rtol=1e-9, atol=0)


def test_removing_everything_leaves_the_prior():
    phi, new = normal(12, 5), normal(7, 5)
    precision = fitted(phi)
    precision.downdate(phi, torch.ones(12, 1))
    assert int(precision.count) == 0
    torch.testing.assert_close(variance(precision, new, 0.5), new.square().sum(1) / 0.5)


def test_removing_more_than_was_observed_raises_and_changes_nothing():
    precision = fitted(normal(3, 4))
    before = state(precision)
    with pytest.raises(ValueError, match="Cannot remove 4 examples from a precision of 3: remove only examples that"):
        precision.downdate(normal(4, 4), torch.ones(4, 1))
    assert state(precision) == before


def test_removing_what_was_never_observed_raises_when_factorised():
    precision = fitted(0.1 * normal(9, 4))
    precision.downdate(10 * normal(2, 4, number=1), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"not positive definite. Either examples were removed that had not been obs"):
        precision.factor(1e-3)
    assert not precision.factored


@pytest.mark.parametrize("columns", [1, 3])
def test_a_wrong_number_of_weight_columns_raises_and_changes_nothing(columns):
    precision = fitted(normal(9, 4), uniform(9, 2))
    before = state(precision)
    with pytest.raises(ValueError):
        precision.update(normal(5, 4), torch.ones(5, columns))
    assert state(precision) == before


@pytest.mark.parametrize(("matrices", "features"), [(1, 4), (2, 5)])
def test_merging_other_sizes_raises(matrices, features):
    with pytest.raises(ValueError, match=r"Cannot merge precisions of \(matrices, features\) \(2, 4\) and"):
        Precision(4, 2).merge(Precision(features, matrices))


def test_reset_forgets_everything():
    precision = fitted(normal(9, 4))
    precision.factor(1.0)
    precision.reset()
    assert not precision.fitted
    assert not precision.factored
    assert state(precision) == state(Precision(4).double())


@pytest.mark.parametrize("change", ["update", "downdate", "merge", "reset"])
def test_every_change_drops_the_factor(change):
    phi, ones = normal(9, 4), torch.ones(9, 1)
    precision = fitted(phi)
    precision.factor(1.0)
    arguments = {"merge": (fitted(phi),), "reset": ()}.get(change, (phi, ones))
    getattr(precision, change)(*arguments)
    with pytest.raises(NotFitted, match="not factorised"):
        precision.variance(phi)


def test_an_unfitted_precision_has_no_variance():
    """The reference code answers with glorot noise, negative variances among it."""
    with pytest.raises(NotFitted, match=r"Call afield\.fit_posterior\(model, train_loader\), or head\.observe"):
        Precision(4).factor(1.0)
    with pytest.raises(NotFitted, match=r"call factor\(ridge\) first"):
        fitted(normal(9, 4)).variance(normal(2, 4))


def test_memory_is_flat_over_a_thousand_updates():
    """No graph is kept either, although the features require gradients."""
    phi, w = normal(3, 8).requires_grad_(), uniform(3, 2)
    precision = fitted(phi, w)
    tensors = live_tensors()
    size, place = sum(b.nbytes for b in precision.buffers()), precision.data.data_ptr()
    for _ in range(1000):
        precision.update(phi, w)
    assert live_tensors() <= tensors
    assert sum(b.nbytes for b in precision.buffers()) == size
    assert precision.data.data_ptr() == place
    assert not precision.data.requires_grad
    assert int(precision.count) == 3003


def test_reading_leaves_the_state_unchanged():
    precision = fitted(normal(20, 6))
    precision.factor(1.0)
    before = state(precision)
    for number in range(5):
        precision.variance(normal(7, 6, number=number))
    precision.factor(1.0)
    assert state(precision) == before


# Moving average -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, 0.9, 0.999])
def test_the_first_step_of_a_moving_average_is_the_batch_sum(momentum):
    phi, new = normal(20, 6), normal(7, 6, number=1)
    torch.testing.assert_close(
        variance(fitted(phi, momentum=momentum), new, 0.5), variance(fitted(phi), new, 0.5), rtol=1e-9, atol=0
    )


@few
@given(number=seeds, momentum=st.floats(0.05, 0.99), steps=st.integers(1, 8))
def test_a_moving_average_is_the_bias_corrected_weighted_mean_of_the_batch_sums(number, momentum, steps):
    batches = [normal(5, 4, number=number + t) for t in range(steps)]
    precision = Precision(4, momentum=momentum).double()
    for phi in batches:
        precision.update(phi, torch.ones(5, 1))
    ages = torch.tensor([momentum ** (steps - 1 - t) for t in range(steps)], dtype=torch.float64)
    mean = sum(a * phi.T @ phi for a, phi in zip(ages / ages.sum(), batches, strict=True))
    new = normal(7, 4)
    expected = (new * torch.linalg.solve(mean + 0.2 * eye(4), new.T).T).sum(1)
    torch.testing.assert_close(variance(precision, new, 0.2), expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("momentum", [0.5, 0.99])
def test_a_converged_moving_average_is_the_exact_sum_with_a_larger_ridge(momentum):
    """r I + (batch / N) G = (batch / N) (r N / batch I + G)."""
    batch, repeats, ridge = normal(8, 6), 25, 0.3
    average, exact = Precision(6, momentum=momentum).double(), Precision(6).double()
    for _ in range(repeats):
        average.update(batch, torch.ones(8, 1))
        exact.update(batch, torch.ones(8, 1))
    new = normal(7, 6, number=1)
    expected = repeats * variance(exact, new, ridge * repeats)
    torch.testing.assert_close(variance(average, new, ridge), expected, rtol=1e-9, atol=0)


def test_a_slow_moving_average_over_shuffled_epochs_converges_to_that():
    phi, new, shuffle = normal(64, 6), normal(20, 6, number=1), torch.Generator().manual_seed(0)
    average = Precision(6, momentum=0.999).double()
    for _ in range(300):
        for part in torch.randperm(64, generator=shuffle).split(8):
            average.update(phi[part], torch.ones(8, 1))
    expected = 8 * variance(fitted(phi), new, 0.3 * 8)
    torch.testing.assert_close(variance(average, new, 0.3), expected, rtol=0.02, atol=0)


def test_the_ridge_does_not_wash_out_of_a_moving_average():
    """A direction that is never observed keeps its prior variance, however many batches go by."""
    seen, unseen = eye(4)[:1], eye(4)[3:]
    precision = Precision(4, momentum=0.9).double()
    for _ in range(1000):
        precision.update(seen, torch.ones(1, 1))
    assert float(variance(precision, unseen, 0.25)) == pytest.approx(4.0, rel=1e-12)
    assert float(variance(precision, seen, 0.25)) == pytest.approx(1 / 1.25, rel=1e-9)


def test_an_empty_batch_does_not_decay_a_moving_average():
    precision = fitted(normal(8, 4), momentum=0.9)
    expected = variance(precision, normal(7, 4), 0.3)
    precision.update(normal(0, 4), torch.ones(0, 1))
    torch.testing.assert_close(variance(precision, normal(7, 4), 0.3), expected)


def test_a_moving_average_refuses_removal_and_merging():
    average, exact = fitted(normal(8, 4), momentum=0.9), fitted(normal(8, 4))
    with pytest.raises(ValueError, match=r"Cannot remove examples from a moving average \(momentum=0.9\); use mom"):
        average.downdate(normal(8, 4), torch.ones(8, 1))
    for one, other in ((average, exact), (exact, average)):
        with pytest.raises(ValueError, match="Cannot merge a moving average"):
            one.merge(other)


@pytest.mark.parametrize("momentum", [0.0, 1.0, -1.0, 1.5, math.nan])
def test_momentum_must_lie_strictly_between_0_and_1(momentum):
    with pytest.raises(ValueError, match=r"momentum must lie strictly between 0 and 1, or be None \(exact sum\), got"):
        Precision(4, momentum=momentum)


# Numbers --------------------------------------------------------------------------------------------------------


def ill_conditioned() -> tuple[torch.Tensor, torch.Tensor, float]:
    """Float32 features of 4000 examples, of 400 new ones, and the ridge that makes the condition number 1e9."""
    generator = torch.Generator().manual_seed(0)
    features = RandomFeatures(4, 256, length_scale=2.0, generator=generator)
    phi = features(torch.randn(4000, 4, generator=generator))
    new = features(1.5 * torch.randn(400, 4, generator=generator))
    largest = torch.linalg.eigvalsh(phi.double().T @ phi.double())[-1]
    return phi, new, float(largest) / 1e9


def exact_variance(phi: torch.Tensor, new: torch.Tensor, ridge: float) -> torch.Tensor:
    phi, new = phi.double(), new.double()
    precision = phi.T @ phi + ridge * eye(phi.shape[1])
    return (new.T * torch.linalg.solve(precision, new.T)).sum(0)


def test_float32_variance_at_condition_number_1e9_is_within_one_percent_and_never_negative():
    phi, new, ridge = ill_conditioned()
    precision = Precision(256)
    for part in phi.split(500):
        precision.update(part, torch.ones(len(part), 1))
    ours, truth = variance(precision, new, ridge), exact_variance(phi, new, ridge)
    assert ours.dtype == torch.float32
    assert bool((ours >= 0).all())
    assert float((ours.double() / truth - 1).abs().max()) < 0.01
    naive = torch.linalg.inv(phi.T @ phi + ridge * torch.eye(256))  # what we do not do: all in float32
    assert float(((new * (new @ naive)).sum(1).double() / truth - 1).abs().max()) > 1


def test_fast_products_agree_where_the_condition_number_allows():
    phi, new, _ = ill_conditioned()
    fast = Precision(256)
    fast.update(phi, torch.ones(len(phi), 1), fast=True)
    assert fast.data.dtype == torch.float64
    assert float((variance(fast, new, 1.0).double() / exact_variance(phi, new, 1.0) - 1).abs().max()) < 1e-3


@pytest.mark.parametrize("fast", [False, True])
def test_bfloat16_autocast_does_not_change_the_sum(fast):
    phi, _, _ = ill_conditioned()
    plain, cast = Precision(256), Precision(256)
    plain.update(phi, torch.ones(len(phi), 1), fast=fast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast.update(phi, torch.ones(len(phi), 1), fast=fast)
    torch.testing.assert_close(cast.data, plain.data, rtol=1e-5, atol=1e-5)


def test_bfloat16_autocast_does_not_change_the_variance():
    phi, new, ridge = ill_conditioned()
    precision = Precision(256)
    precision.update(phi, torch.ones(len(phi), 1))
    expected = variance(precision, new, ridge)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = variance(precision, new, ridge)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_casts_never_cost_the_sum_its_digits(dtype):
    precision = fitted(normal(20, 6) / 3)
    before = precision.data.clone()
    precision.to(dtype).float()
    assert precision.data.dtype == torch.float64
    assert torch.equal(precision.data, before)


@pytest.mark.parametrize("cast", [torch.float16, torch.bfloat16, torch.float32])
def test_casts_never_cost_the_factor_its_digits(cast):
    """Casting away and back: the variance is either as before, or asked to be factorised again."""
    precision, new = fitted(normal(20, 6) / 3), normal(7, 6)
    expected = variance(precision, new, 1e-3)
    precision.to(cast).double()
    if not precision.factored:
        precision.factor(1e-3)
    torch.testing.assert_close(precision.variance(new), expected, rtol=1e-10, atol=0)


def test_examples_seen_in_inference_mode_can_be_added_to():
    precision, phi, ones = Precision(4), normal(9, 4).float(), torch.ones(9, 1)
    with torch.inference_mode():
        precision.update(phi, ones)
    precision.update(phi, ones)
    assert int(precision.count) == 18


def test_a_factor_made_in_inference_mode_lets_gradients_through():
    precision, phi = fitted(normal(9, 4)), normal(5, 4)
    with torch.inference_mode():
        precision.factor(1.0)
    phi.requires_grad_()
    precision.variance(phi).sum().backward()
    assert float(phi.grad.abs().sum()) > 0


# State ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("factored", [True, False])
def test_state_dict_round_trip_into_an_unfitted_precision(momentum, factored):
    saved, new = fitted(normal(20, 6), uniform(20, 2), momentum=momentum), normal(7, 6)
    if factored:
        saved.factor(0.5)
    fresh = Precision(6, 2, momentum=momentum).double()
    fresh.load_state_dict(saved.state_dict())
    assert state(fresh) == state(saved)
    assert fresh.factored == factored
    assert torch.equal(variance(fresh, new, 0.5), variance(saved, new, 0.5))


def test_an_unfitted_state_empties_a_fitted_precision():
    precision = fitted(normal(20, 6))
    precision.factor(1.0)
    precision.load_state_dict(Precision(6).state_dict())
    assert not precision.fitted
    assert not precision.factored
    assert int(precision.count) == 0


@pytest.mark.parametrize(("matrices", "features"), [(3, 6), (1, 5)], ids=["matrices", "features"])
def test_a_state_of_another_size_is_refused(matrices, features):
    """Else a shared precision would take in one per class and answer for the first class only."""
    other = fitted(normal(20, features), uniform(20, matrices))
    with pytest.raises(RuntimeError, match="size mismatch"):
        Precision(6, 1).load_state_dict(other.state_dict())


def test_a_deep_copy_lives_its_own_life():
    precision = fitted(normal(20, 6))
    twin = copy.deepcopy(precision)
    twin.update(normal(3, 6), torch.ones(3, 1))
    assert int(precision.count) == 20
    assert torch.equal(precision.data, fitted(normal(20, 6)).data)


def test_repr_counts_the_examples():
    assert repr(fitted(normal(20, 6), uniform(20, 2))) == "Precision(2 x 6 x 6, count=20)"


# Curvature ------------------------------------------------------------------------------------------------------

NEGATIVE_LOG_LIKELIHOODS = {
    "gaussian": lambda f, y: 0.5 * (f - y).square().sum(),
    "bernoulli": lambda f, y: F.binary_cross_entropy_with_logits(f, (y > 0).to(f), reduction="sum"),
    "categorical": lambda f, y: F.cross_entropy(f, y.argmax(-1), reduction="sum"),
    "poisson": lambda f, y: F.poisson_nll_loss(f, y.round().abs(), log_input=True, reduction="sum"),
}


def hessian(likelihood: str, phi: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of the negative log likelihood over the output weights (K, D), as (K, D, K, D)."""
    loss = NEGATIVE_LOG_LIKELIHOODS[likelihood]
    return torch.autograd.functional.hessian(lambda b: loss(phi @ b.T, y), weight)


def test_every_likelihood_has_its_hessian_test():
    assert set(NEGATIVE_LOG_LIKELIHOODS) == set(LIKELIHOODS)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@settings(deadline=None, max_examples=8)
@given(number=seeds)
def test_curvature_is_the_diagonal_block_of_the_hessian(likelihood, number):
    outputs = 1 if likelihood == "bernoulli" else 3
    phi, weight, y = normal(6, 4, number=number), normal(outputs, 4, number=number + 1), normal(6, outputs)
    exact = hessian(likelihood, phi, weight, y)
    w = curvature_weights(phi @ weight.T, likelihood=likelihood, covariance="per_class", curvature="likelihood")
    data = fitted(phi, w).data
    for k in range(outputs):
        torch.testing.assert_close(data[k], exact[k, :, k, :], rtol=1e-10, atol=1e-10)


@few
@given(number=seeds, scale=st.floats(0.1, 30.0))
def test_two_classes_agree_with_one_logit_of_their_difference(number, scale):
    logits = scale * normal(20, 2, number=number)
    both = LIKELIHOODS["categorical"].curvature(logits)
    one = LIKELIHOODS["bernoulli"].curvature(logits[:, 1:] - logits[:, :1])
    torch.testing.assert_close(both, one.expand(-1, 2), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("curvature", ["likelihood", "unit"])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_shared_weight_is_the_largest_of_the_classes(likelihood, curvature):
    logits = 3 * normal(50, 1 if likelihood == "bernoulli" else 4)
    shared, each = (
        curvature_weights(logits, likelihood=likelihood, covariance=c, curvature=curvature)
        for c in ("shared", "per_class")
    )
    assert shared.shape == (50, 1)
    assert each.shape == logits.shape
    assert torch.equal(shared[:, 0], each.max(dim=1).values)
    if curvature == "unit":
        assert bool((each == 1).all())


@few
@given(number=seeds, classes=st.integers(2, 12), scale=st.floats(0.01, 30.0))
def test_the_shared_categorical_weight_is_the_papers(number, classes, scale):
    """p* (1 - p*), p* the top probability, also where p* is below one half."""
    logits = scale * normal(30, classes, number=number)
    top = F.softmax(logits, -1).amax(-1, keepdim=True)
    shared = curvature_weights(logits, likelihood="categorical", covariance="shared", curvature="likelihood")
    torch.testing.assert_close(shared, top * (1 - top), rtol=1e-9, atol=1e-15)


@few
@given(number=seeds, scale=st.floats(0.1, 10.0), ridge=st.floats(0.01, 10.0))
def test_unit_below_shared_below_per_class_below_the_full_marginal(number, scale, ridge):
    """As covariances. The paper's appendix calls the shared one an upper bound."""
    classes, d = 3, 4
    phi, new = normal(12, d, number=number), normal(15, d, number=number + 1)
    weight = scale * normal(classes, d, number=number + 2)
    logits = phi @ weight.T

    def of(covariance: str, curvature: str) -> torch.Tensor:
        w = curvature_weights(logits, likelihood="categorical", covariance=covariance, curvature=curvature)
        return variance(fitted(phi, w), new, ridge).reshape(15, -1)

    size = classes * d
    whole = hessian("categorical", phi, weight, logits).reshape(size, size) + ridge * eye(size)
    full = torch.linalg.inv(whole).reshape(classes, d, classes, d)
    marginal = torch.stack([((new @ full[k, :, k, :]) * new).sum(1) for k in range(classes)], dim=1)
    chain = [of("shared", "unit"), of("shared", "likelihood"), of("per_class", "likelihood"), marginal]
    for smaller, larger in itertools.pairwise(chain):
        assert bool((smaller <= larger * (1 + 1e-9)).all())


def test_the_papers_weight_forgets_the_data_of_a_confident_network_and_the_unit_weight_does_not():
    phi, new, confident = normal(200, 6), normal(7, 6, number=1), 40 * F.one_hot(torch.arange(200) % 3).double()
    prior = new.square().sum(1)
    papers, unit = (
        variance(
            fitted(phi, curvature_weights(confident, likelihood="categorical", covariance="shared", curvature=c)),
            new,
            1.0,
        )
        for c in ("likelihood", "unit")
    )
    torch.testing.assert_close(papers, prior, rtol=1e-10, atol=0)
    assert bool((unit < 0.05 * prior).all())


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_auto_is_unit_for_shared_classification_only(likelihood, covariance):
    shared_classes = likelihood in ("bernoulli", "categorical") and covariance == "shared"
    assert choose_curvature("auto", likelihood, covariance) == ("unit" if shared_classes else "likelihood")
    for explicit in set(CURVATURE_CHOICES) - {"auto"}:
        assert choose_curvature(explicit, likelihood, covariance) == explicit


def test_curvature_and_likelihood_names_are_checked():
    with pytest.raises(ValueError, match="curvature must be one of auto, likelihood, unit, got 'units'"):
        choose_curvature("units", "gaussian", "shared")
    with pytest.raises(UnknownName, match=r"Unknown likelihood 'gausian'. Did you mean 'gaussian'"):
        choose_curvature("auto", "gausian", "shared")
