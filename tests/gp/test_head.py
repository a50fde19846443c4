"""The Gaussian-process head: a mean, a variance, and a posterior that only `observe` and `unobserve` change."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from afield.errors import NotFitted
from afield.gp.features import KERNELS
from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS
from afield.gp.precision import COVARIANCES, curvature_weights
from afield.prediction.p_values import conformal_p_value
from afield.prediction.predictive import PREDICTIVES, mean_field
from afield.registry import UnknownName

few = settings(deadline=None, max_examples=15)
STATIONARY = sorted(set(KERNELS) - {"arccos"})
D = 64


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def normal(*shape: int, number: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=seed(number), dtype=torch.float64)


def outputs(likelihood: str) -> int:
    return 1 if likelihood == "bernoulli" else 3


def make(likelihood: str = "categorical", *, trained: bool = True, **options: object) -> GaussianProcessHead:
    """A float64 head of 4 hidden units whose output weights have moved off zero."""
    options = {"num_random_features": D, "length_scale": 2.0, "generator": seed()} | options
    out = options.pop("out_features", outputs(likelihood))
    head = GaussianProcessHead(4, out, likelihood=likelihood, **options).double()
    if trained and head.mean is None:
        nn.init.normal_(head.weight, generator=seed(1))
    return head


def fitted(likelihood: str = "categorical", n: int = 40, **options: object) -> GaussianProcessHead:
    head = make(likelihood, **options)
    head.observe(normal(n, 4))
    return head


def calibrated(**options: object) -> GaussianProcessHead:
    head = fitted(**options)
    head.set_reference(head.predict(normal(99, 4, number=5)).score())
    return head


def state(module: nn.Module) -> dict[str, bytes]:
    return {name: t.detach().numpy().tobytes() for name, t in module.state_dict().items()}


def ridge_regression(head: GaussianProcessHead, h: torch.Tensor, y: torch.Tensor) -> None:
    """Set the output weights to the posterior mode, and observe."""
    phi, r = head.features(h), float(head.ridge * head.noise)
    weight = phi.T @ torch.linalg.solve(phi @ phi.T + r * torch.eye(len(h), dtype=torch.float64), y)
    head.weight.data.copy_(weight.T)
    head.observe(h)


# A Gaussian process ---------------------------------------------------------------------------------------------


@few
@given(ridge=st.floats(0.01, 10), noise=st.floats(0.05, 5), amplitude=st.floats(0.1, 10), number=st.integers(0, 10**6))
def test_regression_mean_and_variance_are_those_of_the_gaussian_process_with_the_same_kernel(
    ridge, noise, amplitude, number
):
    head = make("gaussian", ridge=ridge, amplitude=amplitude)
    head.set_scalars(noise=noise)
    h, y, new = normal(30, 4, number=number), normal(30, 3, number=number + 1), normal(10, 4, number=number + 2)
    ridge_regression(head, h, y)
    mean, variance = head.posterior(new)

    phi, phi_new = head.features(h), head.features(new)
    gram, cross, prior = (a @ b.T / ridge for a, b in ((phi, phi), (phi, phi_new), (phi_new, phi_new)))
    solved = torch.linalg.solve(gram + noise * torch.eye(30, dtype=torch.float64), cross)
    torch.testing.assert_close(mean, solved.T @ y, rtol=1e-8, atol=1e-8)
    dual = amplitude**2 * (prior - cross.T @ solved).diagonal()
    torch.testing.assert_close(variance, dual, rtol=1e-10, atol=1e-10 * float(prior.max()) * amplitude**2)


@pytest.mark.parametrize("kernel", STATIONARY)
def test_with_many_features_it_is_the_exact_gaussian_process(kernel):
    head = make("gaussian", kernel=kernel, num_random_features=1024, ridge=0.5)
    h, y, new = normal(30, 4), normal(30, 3, number=1), normal(20, 4, number=2)
    ridge_regression(head, h, y)
    with torch.no_grad():
        mean, variance = head.posterior(new)
    exact = KERNELS[kernel].exact
    cross, gram = exact(h / 2, new / 2), exact(h / 2, h / 2) + 0.5 * torch.eye(30, dtype=torch.float64)
    solved = torch.linalg.solve(gram, cross)
    assert float((mean - solved.T @ y).abs().max()) < 0.25
    assert float((variance - (1 - (cross * solved).sum(0)) / 0.5).abs().max()) < 0.15


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_intervals_cover_targets_drawn_from_the_prior(level):
    """300 functions from the prior, with noise: the posterior of each holds new targets at the stated rate."""
    functions, ridge, noise = 300, 0.5, 0.3
    head = make("gaussian", out_features=functions, ridge=ridge)
    head.set_scalars(noise=noise)
    h, new = normal(25, 4), normal(40, 4, number=1)
    truth = normal(D, functions, number=2) / math.sqrt(ridge)
    ridge_regression(head, h, head.features(h) @ truth + math.sqrt(noise) * normal(25, functions, number=3))
    target = head.features(new) @ truth + math.sqrt(noise) * normal(40, functions, number=4)
    with torch.no_grad():
        low, high = head.predict(new).interval(level)
    assert abs(float(((low < target) & (target < high)).double().mean()) - level) < 0.02


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_precision_is_the_weighted_sum_over_the_observed_examples(likelihood, covariance):
    head, h = make(likelihood, covariance=covariance, curvature="likelihood"), normal(30, 4)
    head.observe(h)
    phi, logits = head.features(h), head(h)
    w = curvature_weights(logits, likelihood=likelihood, covariance=covariance, curvature="likelihood")
    expected = torch.einsum("nc,ni,nj->cij", w, phi, phi)
    torch.testing.assert_close(head.precision.data, expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_shapes(likelihood, covariance):
    head, k = fitted(likelihood, covariance=covariance), outputs(likelihood)
    mean, variance = head.posterior(normal(7, 4))
    assert mean.shape == (7, k)
    assert variance.shape == ((7, k) if covariance == "per_class" and k > 1 else (7,))
    assert bool((variance > 0).all())
    p = head.predict(normal(7, 4))
    assert (p.probs is None) == (likelihood in ("gaussian", "poisson"))
    if p.probs is not None:
        assert p.probs.shape == (7, max(k, 2))


@pytest.mark.parametrize("rows", [0, 1])
def test_small_batches_are_predicted(rows):
    head, h = fitted(), normal(7, 4)
    torch.testing.assert_close(head.predict(h[:rows]).probs, head.predict(h).probs[:rows])
    assert len(head.predict(h[:rows])) == rows


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_per_class_with_unit_curvature_is_the_shared_one_for_each_class(likelihood):
    shared, each = (fitted(likelihood, covariance=c, curvature="unit") for c in COVARIANCES)
    h = normal(7, 4, number=1)
    one, many = shared.posterior(h)[1], each.posterior(h)[1]
    torch.testing.assert_close(many.reshape(7, -1), one[:, None].expand(7, outputs(likelihood)))


@few
@given(amplitude=st.floats(0.01, 100))
def test_amplitude_scales_the_variance_by_its_square_and_leaves_the_mean(amplitude):
    h = normal(7, 4, number=1)
    (mean, plain), (other, scaled) = (fitted(amplitude=a).posterior(h) for a in (1.0, amplitude))
    torch.testing.assert_close(scaled, amplitude**2 * plain, rtol=1e-12, atol=0)
    assert torch.equal(mean, other)


def test_output_weights_start_at_the_prior_mean():
    head = make(trained=False, constant=True)
    assert torch.equal(head(normal(7, 4)), torch.zeros(7, 3).double())


def test_the_constant_is_added_and_leaves_the_variance():
    plain, shifted = fitted(), fitted(constant=True)
    shifted.constant.data.copy_(torch.tensor([1.0, -2.0, 3.0]))
    h = normal(7, 4)
    torch.testing.assert_close(shifted(h), plain(h) + torch.tensor([1.0, -2.0, 3.0]).double())
    assert torch.equal(shifted.posterior(h)[1], plain.posterior(h)[1])


def test_gradients_reach_the_output_weights_and_the_backbone():
    head, h = fitted(), normal(7, 4).requires_grad_()
    mean, variance = head.posterior(h)
    (mean.sum() + variance.sum()).backward()
    assert float(h.grad.abs().min()) > 0
    assert float(head.weight.grad.abs().max()) > 0
    assert [name for name, _ in head.named_parameters()] == ["weight"]


# Far away -------------------------------------------------------------------------------------------------------


def far(n: int = 50) -> torch.Tensor:
    return 1e4 * F.normalize(normal(n, 4, number=9), dim=1)


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("kernel", STATIONARY)
def test_far_away_the_variance_is_the_prior_and_the_probabilities_are_uniform(kernel, covariance):
    head = make(kernel=kernel, covariance=covariance, num_random_features=1024, ridge=0.1, amplitude=3.0)
    near = normal(40, 4)
    ridge_regression(head, near, 8 * F.one_hot(near[:, :3].argmax(1), 3).double() - 8 / 3)
    with torch.no_grad():
        inside, outside = head.predict(near), head.predict(far())
    prior = 3.0**2 / 0.1 * head.features(far()).square().sum(1)
    torch.testing.assert_close(prior, torch.full((50,), 90.0).double(), rtol=0.15, atol=0)
    ratio = outside.variance.reshape(50, -1) / prior[:, None]
    assert 0.93 < float(ratio.min()) <= float(ratio.max()) < 1 + 1e-9
    assert float(outside.logits.square().mean().sqrt()) < 0.25 * float(inside.logits.square().mean().sqrt())
    assert float((outside.probs - 1 / 3).abs().max()) < 0.1
    assert float(inside.confidence.mean()) > 0.6
    assert float(outside.score().min()) > float(inside.score().max())


@torch.no_grad()
def test_far_away_the_mean_tends_to_zero_at_rate_root_d():
    def level(num_features: int) -> float:
        squares = []
        for number in range(6):
            head = make("gaussian", num_random_features=num_features, generator=seed(number))
            h, y = normal(20, 4), normal(20, 3, number=1)
            gram = KERNELS["rbf"].exact(h / 2, h / 2) + torch.eye(20, dtype=torch.float64)
            head.weight.data.copy_((head.features(h).T @ torch.linalg.solve(gram, y)).T)
            squares.append(head(far()).square().mean())
        return float(torch.stack(squares).mean().sqrt())

    assert 2.8 < level(256) / level(256 * 16) < 5.6  # sqrt(16) = 4


def test_the_arc_cosine_kernel_grows_with_the_norm_instead():
    head = fitted(kernel="arccos", num_random_features=256)
    h = normal(7, 4, number=1)
    with torch.no_grad():
        near, away = (head.posterior(c * h)[1] for c in (100.0, 1000.0))
    torch.testing.assert_close(away / near, torch.full((7,), 100.0).double(), rtol=0.05, atol=0)


# The posterior is a sum over what was observed ------------------------------------------------------------------


@few
@given(data=st.data())
@pytest.mark.parametrize("covariance", COVARIANCES)
def test_order_and_split_do_not_matter(covariance, data):
    order = torch.tensor(data.draw(st.permutations(range(40))))
    cuts = sorted(data.draw(st.lists(st.integers(0, 40), max_size=5)))
    head = make(covariance=covariance, curvature="likelihood")
    for part in torch.tensor_split(order, cuts):
        head.observe(normal(40, 4)[part])
    assert head.num_observed == 40
    whole, new = fitted(covariance=covariance, curvature="likelihood"), normal(7, 4, number=1)
    torch.testing.assert_close(head.posterior(new)[1], whole.posterior(new)[1], rtol=1e-10, atol=0)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_logits_are_computed_unless_given(likelihood):
    own, given_, other = (make(likelihood, covariance="per_class", curvature="likelihood") for _ in range(3))
    h = normal(20, 4)
    own.observe(h)
    given_.observe(h, own(h))
    other.observe(h, own(h) + normal(20, outputs(likelihood), number=3))
    assert torch.equal(own.precision.data, given_.precision.data)
    assert torch.equal(own.precision.data, other.precision.data) == (likelihood == "gaussian")


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_unobserve_undoes_observe(covariance):
    head, new = fitted(covariance=covariance, curvature="likelihood"), normal(7, 4, number=1)
    before = head.posterior(new)[1]
    extra, logits = normal(9, 4, number=2), normal(9, 3, number=3)
    head.observe(extra, logits)
    assert not torch.allclose(head.posterior(new)[1], before)
    head.unobserve(extra, logits)
    assert head.num_observed == 40
    torch.testing.assert_close(head.posterior(new)[1], before, rtol=1e-10, atol=0)


def test_forward_never_touches_the_posterior():
    head = fitted().train()
    head.posterior(normal(7, 4))
    before = state(head)
    for _ in range(3):
        F.cross_entropy(head(normal(7, 4, number=1)), torch.zeros(7, dtype=torch.int64)).backward()
        head.features(normal(7, 4))
    assert state(head) == before


def test_reading_leaves_the_state_unchanged():
    head = calibrated().eval()
    before = state(head)
    head.posterior(normal(7, 4))
    head.predict(normal(7, 4), predictive="monte_carlo", generator=seed())
    head(normal(7, 4))
    assert state(head) == before


def test_reset_forgets_the_examples_and_keeps_the_scalars():
    head = calibrated()
    head.set_scalars(amplitude=3.0, logit_scale=2.0)
    head.reset_posterior()
    assert head.num_observed == 0
    assert (float(head.amplitude), float(head.logit_scale)) == (3.0, 2.0)
    with pytest.raises(NotFitted):
        head.posterior(normal(7, 4))


def test_two_passes_count_twice():
    head = fitted()
    head.observe(normal(40, 4))
    assert head.num_observed == 80


def test_a_moving_average_head_starts_at_the_batch_sum_and_refuses_removal():
    average, exact, new = fitted(momentum=0.9), fitted(), normal(7, 4, number=1)
    torch.testing.assert_close(average.posterior(new)[1], exact.posterior(new)[1], rtol=1e-9, atol=0)
    with pytest.raises(ValueError, match=r"Cannot remove examples from a moving average \(momentum=0.9\)"):
        average.unobserve(normal(3, 4))


def test_fast_observation_agrees():
    fast, exact, new = make().float(), make().float(), normal(7, 4, number=1).float()
    fast.observe(normal(40, 4).float(), fast=True)
    exact.observe(normal(40, 4).float())
    torch.testing.assert_close(fast.posterior(new)[1], exact.posterior(new)[1], rtol=1e-4, atol=0)


# The length scale is known before anything is observed ----------------------------------------------------------


def test_observing_in_training_mode_takes_the_length_scale_from_the_first_batch():
    head = make(length_scale=None).train()
    head.observe(normal(20, 4))
    scale = float(head.random_features.length_scale)
    head.observe(50 * normal(20, 4, number=1))
    assert float(head.random_features.length_scale) == scale


def test_observing_in_evaluation_mode_does_not_measure_each_batch_with_its_own_length_scale():
    """The variance of an example must not depend on the batch it comes in."""
    head = make(length_scale=None).eval()
    head.observe(normal(20, 4))
    head.observe(50 * normal(20, 4, number=1))
    assert head.random_features.adapted
    new = normal(7, 4, number=2)
    torch.testing.assert_close(head.posterior(new)[1][:2], head.posterior(new[:2])[1])


# Predictions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_default_probabilities_are_mean_field_of_the_scaled_logits(covariance):
    head, h = fitted(covariance=covariance, amplitude=2.0), normal(7, 4, number=1)
    head.set_scalars(logit_scale=1.7)
    mean, variance = head.posterior(h)
    p = head.predict(h)
    torch.testing.assert_close(p.logits, 1.7 * mean)
    torch.testing.assert_close(p.variance, variance)
    torch.testing.assert_close(p.probs, mean_field(1.7 * mean, variance))
    assert torch.equal(p.features, h)


@pytest.mark.parametrize("predictive", PREDICTIVES)
def test_every_predictive_serves_one_logit(predictive):
    head, h = fitted("bernoulli"), normal(7, 4, number=1)
    ours = head.predict(h, predictive=predictive, num_samples=20_000, generator=seed())
    torch.testing.assert_close(ours.probs, head.predict(h, predictive="quadrature").probs, rtol=0, atol=0.02)


def test_monte_carlo_predictions_are_seeded_and_keep_their_members():
    head, h = fitted(), normal(7, 4, number=1)
    one, two = (head.predict(h, predictive="monte_carlo", num_samples=11, generator=seed(3)) for _ in range(2))
    assert one.members.shape == (11, 7, 3)
    assert torch.equal(one.probs, two.probs)


def test_regression_predictions_carry_the_noise_and_no_probabilities():
    head = fitted("gaussian")
    head.set_scalars(noise=0.3)
    p = head.predict(normal(7, 4))
    assert p.noise == pytest.approx(0.3)
    torch.testing.assert_close(p.std[:, 0], (p.variance + 0.3).sqrt())
    assert fitted("poisson").predict(normal(7, 4)).noise is None


def test_an_unknown_predictive_is_answered_with_the_nearest():
    with pytest.raises(UnknownName, match=r"Unknown predictive 'meanfield'\. Did you mean 'mean_field'"):
        fitted().predict(normal(7, 4), predictive="meanfield")


# A kept mean ----------------------------------------------------------------------------------------------------


def test_a_kept_mean_stays_the_mean_and_there_is_nothing_to_train():
    layer, h = nn.Linear(4, 3).double(), normal(7, 4)
    head = fitted(mean=layer)
    assert torch.equal(head(h), layer(h))
    assert torch.equal(head.posterior(h)[0], layer(h))
    assert torch.equal(head.predict(h).labels, layer(h).argmax(1))
    assert {name for name, _ in head.named_parameters()} == {"mean.weight", "mean.bias"}


def test_a_kept_mean_does_not_change_the_unit_curvature_variance():
    h = normal(7, 4)
    assert torch.equal(fitted(mean=nn.Linear(4, 3)).posterior(h)[1], fitted().posterior(h)[1])


def test_a_kept_mean_of_another_width_is_told():
    with pytest.raises(ValueError, match=r"logits must have shape \(\d+, 3\), got \(\d+, 5\)"):
        fitted(mean=nn.Linear(4, 5))


# p-values -------------------------------------------------------------------------------------------------------


def test_p_values_compare_with_the_reference_scores():
    head, h = fitted(), normal(20, 4, number=1)
    assert head.predict(h).p_value is None
    assert not head.calibrated
    scores = head.predict(normal(99, 4, number=5)).score()
    head.set_reference(scores)
    p = head.predict(h)
    assert head.calibrated
    assert torch.equal(p.p_value, conformal_p_value(p.score(), scores.sort().values)[0])
    assert p.smallest_p_value == 1 / 100
    assert p.accept(0.01).shape == (20,)


@torch.no_grad()
def test_inputs_far_away_are_rejected_and_in_domain_ones_are_not():
    head, h = make(num_random_features=1024, amplitude=3.0), normal(300, 4)
    ridge_regression(head, h, 8 * F.one_hot(h[:, :3].argmax(1), 3).double() - 8 / 3)
    head.set_reference(head.predict(normal(199, 4, number=5)).score())
    assert float(head.predict(normal(500, 4, number=6)).accept(0.05).double().mean()) > 0.9
    assert float(head.predict(far()).accept(0.05).double().mean()) < 0.05


CHANGES = {
    "observe": lambda head: head.observe(normal(3, 4, number=7)),
    "unobserve": lambda head: head.unobserve(normal(40, 4)[:3]),
    "merge": lambda head: head.precision.merge(fitted(n=3).precision),
    "reset and observe others": lambda head: (head.reset_posterior(), head.observe(normal(40, 4, number=7))),
    "exchange an example": lambda head: (head.observe(normal(1, 4, number=7)), head.unobserve(normal(40, 4)[:1])),
    "ridge": lambda head: head.set_scalars(ridge=0.01),
    "amplitude": lambda head: head.set_scalars(amplitude=5.0),
    "logit scale": lambda head: head.set_scalars(logit_scale=3.0),
    "noise": lambda head: head.set_scalars(noise=0.1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_p_values_are_off_after_any_change_of_the_posterior(change):
    """Scores of another posterior are no reference, whether or not the number of examples is the same."""
    head = calibrated()
    assert head.predict(normal(7, 4)).p_value is not None
    change(head)
    assert not head.calibrated
    p = head.predict(normal(7, 4))
    assert p.p_value is None
    with pytest.raises(ValueError, match=r"Call afield\.calibrate\(model, held_out_loader\) first, and again after"):
        p.accept()


# Scalars --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ridge", "amplitude"])
def test_setting_a_scalar_is_as_good_as_building_with_it(name):
    head, new = fitted(), normal(7, 4, number=1)
    head.posterior(new)
    head.set_scalars(**{name: 0.03})
    torch.testing.assert_close(head.posterior(new)[1], fitted(**{name: 0.03}).posterior(new)[1], rtol=1e-12, atol=0)


def test_noise_divides_the_data_term():
    head, new = fitted("gaussian", ridge=0.5), normal(7, 4, number=1)
    head.posterior(new)
    head.set_scalars(noise=4.0)
    expected = 4.0 * fitted("gaussian", ridge=2.0).posterior(new)[1]  # (r I + G / s)^-1 = s (r s I + G)^-1
    torch.testing.assert_close(head.posterior(new)[1], expected, rtol=1e-10, atol=0)


def test_logit_scale_changes_neither_the_variance_nor_the_labels():
    head, new = fitted(), normal(7, 4, number=1)
    before = head.predict(new)
    head.set_scalars(logit_scale=5.0)
    after = head.predict(new)
    assert torch.equal(after.variance, before.variance)
    assert torch.equal(after.labels, before.labels)


@pytest.mark.parametrize("wrong", [{"amplitude": 0.0}, {"noise": -1.0}, {"ridge": math.nan}, {"temperature": 1.0}])
def test_wrong_scalars_raise_and_change_nothing(wrong):
    head, new = fitted(), normal(7, 4)
    before = head.posterior(new)[1]
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"takes positive ridge, amplitude, logit_scale, noise, got {name}={value}"):
        head.set_scalars(**({"ridge": 9.0} | wrong))
    assert (float(head.ridge), float(head.amplitude), float(head.noise)) == (1.0, 1.0, 1.0)
    assert torch.equal(head.posterior(new)[1], before)


# Numbers --------------------------------------------------------------------------------------------------------


def test_a_float32_head_at_condition_number_1e9_is_within_one_percent_of_float64():
    double = make(num_random_features=256, trained=False)
    h, new = normal(4000, 4), 1.5 * normal(400, 4, number=1)
    double.observe(h)
    ridge = float(torch.linalg.eigvalsh(double.precision.data[0])[-1]) / 1e9
    double.set_scalars(ridge=ridge)
    single = make(num_random_features=256, trained=False, ridge=ridge).float()
    for part in h.float().split(500):
        single.observe(part)
    ours, truth = single.posterior(new.float())[1], double.posterior(new)[1]
    assert ours.dtype == torch.float32
    assert bool((ours > 0).all())
    assert float((ours.double() / truth - 1).abs().max()) < 0.01


def test_bfloat16_autocast_changes_no_posterior():
    plain, cast = fitted(n=300, ridge=1e-3).float(), make(ridge=1e-3).float()
    new = normal(20, 4, number=1).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast.observe(normal(300, 4).float())
        mean, variance = cast.posterior(new)
    torch.testing.assert_close(mean, plain.posterior(new)[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance, plain.posterior(new)[1], rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_never_cost_the_scalars_the_sum_and_the_reference_their_digits(dtype):
    head = calibrated(ridge=1 / 3, amplitude=1 / 7)
    reference, data = head.reference.clone(), head.precision.data.clone()
    head.to(dtype).double()
    assert (float(head.ridge), float(head.amplitude)) == (1 / 3, 1 / 7)
    assert torch.equal(head.reference, reference)
    assert torch.equal(head.precision.data, data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float64_scalars_do_not_promote(dtype):
    head = calibrated().to(dtype)
    p = head.predict(normal(7, 4).to(dtype))
    assert {name: t.dtype for name, t in vars(p).items() if isinstance(t, torch.Tensor)} == dict.fromkeys(
        ("logits", "variance", "probs", "features", "p_value"), dtype
    )


def test_casting_after_a_first_prediction_is_casting_before_it():
    early, late, new = fitted().float(), fitted().float(), normal(7, 4)
    late.predict(new.float())
    torch.testing.assert_close(late.double().posterior(new)[1], early.double().posterior(new)[1], rtol=1e-12, atol=0)


def test_a_first_prediction_in_inference_mode_leaves_no_trace():
    head, h = fitted(), normal(7, 4)
    with torch.inference_mode():
        expected = head.predict(h).variance.clone()
    variance = head.posterior(h.requires_grad_())[1]
    variance.sum().backward()
    torch.testing.assert_close(variance, expected.clone())


def test_observing_in_inference_mode_leaves_no_trace():
    head = make()
    with torch.inference_mode():
        head.observe(normal(20, 4))
    head.observe(normal(20, 4, number=1))
    assert head.num_observed == 40


# State ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length_scale", [2.0, None])
@pytest.mark.parametrize("covariance", COVARIANCES)
def test_state_dict_round_trip(covariance, length_scale):
    options = {"covariance": covariance, "length_scale": length_scale}
    head, new = calibrated(**options, amplitude=3.0, ridge=0.2), normal(7, 4, number=1)
    fresh = make(**options, trained=False, generator=seed(9))
    fresh.load_state_dict(head.state_dict())
    ours, theirs = fresh.predict(new).numpy(), head.predict(new).numpy()
    assert "p_value" in ours
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert fresh.num_observed == 40


def test_an_unfitted_state_unfits_a_head():
    head = calibrated()
    head.load_state_dict(make().state_dict())
    assert head.num_observed == 0
    assert not head.calibrated
    with pytest.raises(NotFitted):
        head.posterior(normal(7, 4))


@pytest.mark.parametrize(("saved", "own"), [COVARIANCES, COVARIANCES[::-1]])
def test_a_state_of_the_other_covariance_is_refused(saved, own):
    with pytest.raises(RuntimeError, match="size mismatch"):
        make(covariance=own).load_state_dict(fitted(covariance=saved).state_dict())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])
def test_copies_are_equal_and_live_their_own_lives(duplicate):
    head, new = calibrated(), normal(7, 4, number=1)
    before = state(head)
    twin = duplicate(head)
    assert state(twin) == before
    assert torch.equal(twin.predict(new).p_value, head.predict(new).p_value)
    twin.observe(new)
    twin.set_scalars(ridge=5.0)
    assert state(head) == before


# Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["__call__", "features", "observe", "unobserve", "posterior", "predict"])
@pytest.mark.parametrize("shape", [(7, 5), (7,), (7, 4, 1), (7, 4, 4, 3)])
def test_wrong_shapes_are_told_with_advice(call, shape):
    head = fitted()
    before = state(head.precision)["data"]
    expected = rf"expects hidden features of shape \(batch, 4\), got \({', '.join(map(str, shape))},?\)\. Does the back"
    with pytest.raises(ValueError, match=expected):
        getattr(head, call)(normal(*shape))
    assert state(head.precision)["data"] == before


@pytest.mark.parametrize("call", ["observe", "unobserve"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_named_and_nothing_is_added(bad, call):
    head, h = fitted(), normal(10, 4)
    h[1, 2] = h[7, 0] = bad
    before = state(head)
    with pytest.raises(
        ValueError, match=r"NaN or infinity in 2 of 10 rows \(first: \[1, 7\]\)\. Nothing of this batch"
    ):
        getattr(head, call)(h)
    assert state(head) == before


def test_a_broken_first_batch_does_not_set_the_length_scale():
    head, h = make(length_scale=None), normal(10, 4)
    h[3] = math.nan
    with pytest.raises(ValueError, match=r"first: \[3\]"):
        head.observe(h)
    assert not head.random_features.adapted


def test_hidden_features_too_large_for_the_cosine_never_poison_the_posterior():
    """Finite, but their phase overflows float32 and its cosine is NaN."""
    head, h = fitted().float(), normal(10, 4).float()
    h[3] = 3e38
    before = state(head)
    with pytest.raises(ValueError, match=r"1 of 10 rows \(first: \[3\]\)"):
        head.observe(h)
    assert state(head) == before


@pytest.mark.parametrize(("likelihood", "bad"), [("categorical", math.nan), ("bernoulli", math.nan), ("poisson", 1e4)])
def test_logits_without_a_finite_curvature_never_poison_the_posterior(likelihood, bad):
    head, h = fitted(likelihood, curvature="likelihood"), normal(10, 4)
    logits = normal(10, outputs(likelihood))
    logits[3, 0] = bad
    before = state(head)
    with pytest.raises(ValueError, match=r"1 of 10 rows \(first: \[3\]\)"):
        head.observe(h, logits)
    assert state(head) == before


@pytest.mark.parametrize("shape", [(10, 4), (10, 2), (10,), (9, 3)])
def test_logits_of_another_shape_are_told_and_nothing_is_added(shape):
    head = fitted()
    before = state(head)
    with pytest.raises(ValueError, match=r"logits must have shape \(10, 3\), got"):
        head.observe(normal(10, 4), normal(*shape))
    assert state(head) == before


@pytest.mark.parametrize("call", ["posterior", "predict"])
def test_an_unfitted_posterior_says_what_to_call(call):
    with pytest.raises(
        NotFitted, match=r"not fitted.*Call afield\.fit_posterior\(model, train_loader\), or head\.obse"
    ):
        getattr(make(), call)(normal(7, 4))


def test_removing_too_many_and_never_observed_examples():
    with pytest.raises(ValueError, match="Cannot remove 41 examples from a precision of 40"):
        fitted().unobserve(normal(41, 4))
    head = fitted(n=60, ridge=1e-3)
    head.unobserve(5 * normal(50, 4, number=3))
    with pytest.raises(ValueError, match="not positive definite"):
        head.posterior(normal(7, 4))


def test_removing_from_an_unfitted_posterior():
    with pytest.raises(ValueError, match="Cannot remove 3 examples from a precision of 0"):
        make().unobserve(normal(3, 4))


@pytest.mark.parametrize("name", ["ridge", "amplitude"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_ridge_and_amplitude_must_be_positive_and_finite(name, value):
    with pytest.raises(ValueError, match=f"{name} must be positive.*got {value}"):
        make(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"covariance": "per-class"}, "covariance must be one of shared, per_class, got 'per-class'"),
        ({"curvature": "hessian"}, "curvature must be one of auto, likelihood, unit, got 'hessian'"),
        ({"momentum": 1.0}, r"momentum must lie strictly between 0 and 1, or be None \(exact sum\), got 1.0"),
        ({"length_scale": -1.0}, "length_scale must be a positive number or None"),
        ({"out_features": 1}, r'categorical head expects at least 2 outputs; use likelihood="bernoulli" for one logit'),
        ({"likelihood": "bernoulli", "out_features": 2}, "exactly 1 output .a single logit.*got out_features=2"),
        (
            {"likelihood": "gaussian", "out_features": 0},
            "A gaussian head expects at least 1 output, got out_features=0",
        ),
        ({"likelihood": "categorial"}, r"Unknown likelihood 'categorial'\. Did you mean 'categorical'"),
        ({"kernel": "matern3"}, r"Unknown kernel 'matern3'\. Did you mean 'matern32'"),
        ({"geometry": "layernorm"}, r"Unknown geometry 'layernorm'\. Did you mean 'layer'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_wrong_options_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        GaussianProcessHead(4, 3, 64)


def test_repr_shows_the_resolved_curvature():
    assert "likelihood='categorical', covariance='shared', curvature='unit', ridge=1" in repr(make())


def test_a_head_has_a_predictive_of_its_own_that_a_call_can_change():
    head, h = fitted(num_random_features=64, predictive="monte_carlo"), normal(20, 4)
    by_default = head.predict(h, generator=seed(1))
    assert by_default.members is not None
    torch.testing.assert_close(by_default.probs, head.predict(h, predictive="monte_carlo", generator=seed(1)).probs)
    assert head.predict(h, predictive="mean_field").members is None
    with pytest.raises(ValueError, match="magic"):
        make(predictive="magic")


@torch.no_grad()
def test_far_away_monte_carlo_tends_to_uniform_as_samples_grow_and_mean_field_is_there():
    """The paper's proposition on convergence: the mean is zero there, so all classes are drawn alike."""
    head = fitted(num_random_features=128, amplitude=5.0)
    far = 1e4 * F.normalize(normal(100, 4, number=9))
    head.weight.zero_()  # the mean in the limit of many features; with D of them it fluctuates about it
    uniform = torch.full((100, 3), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(head.predict(far).probs, uniform)
    errors = []
    for samples in (16, 256, 4096):
        drawn = head.predict(far, predictive="monte_carlo", num_samples=samples, generator=seed(2))
        errors.append(float((drawn.probs - uniform).square().mean().sqrt()))
        assert float((drawn.members - uniform).abs().mean()) > 0.2  # no single draw is unsure
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.25)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.25)
