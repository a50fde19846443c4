"""From a Gaussian over the logits to probabilities, rates, intervals and p-values."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special

from afield.prediction.p_values import conformal_p_value
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import (
    MEAN_FIELD_FACTOR,
    PREDICTIVES,
    mean_field,
    minimax,
    monte_carlo,
    poisson_rate,
    quadrature,
    shrink,
    to_probs,
)
from afield.registry import UnknownName

few = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 10**6)


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def normal(*shape: int, number: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=seed(number), dtype=torch.float64)


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def classes(n: int = 6, k: int = 3, **fields: object) -> Prediction:
    """A prediction with every field that a calibrated classifier fills."""
    logits, variance = normal(n, k), normal(n, number=1).square()
    members = monte_carlo(logits, variance, 5, seed())
    everything = {"features": normal(n, 4, number=2), "p_value": torch.linspace(0.01, 1, n), "smallest_p_value": 0.01}
    return Prediction(logits, variance, members.mean(0), members, **everything | fields)


def regression(mean: torch.Tensor, variance: torch.Tensor | None, **fields: object) -> Prediction:
    return Prediction(mean, variance, likelihood="gaussian", **fields)


# Mean field -----------------------------------------------------------------------------------------------------


def test_one_logit_gives_the_probabilities_of_both_classes():
    z = double(-30, -1, 0, 0.5, 30)[:, None]
    both = torch.from_numpy(special.expit(torch.cat([-z, z], 1).numpy()))
    torch.testing.assert_close(to_probs(z), both, rtol=1e-12, atol=0)


@few
@given(number=seeds, k=st.integers(1, 8), per_class=st.booleans())
def test_zero_variance_gives_the_plain_probabilities(number, k, per_class):
    logits = 5 * normal(10, k, number=number)
    zero = torch.zeros((10, k) if per_class else 10).double()
    assert torch.equal(mean_field(logits, zero), to_probs(logits))
    if k > 1:
        assert torch.equal(mean_field(logits, zero), F.softmax(logits, -1))


@pytest.mark.parametrize("k", [2, 5, 16, 17])
def test_probabilities_of_many_rows_are_those_of_each(k):
    logits = 5 * normal(3000, k)
    logits[0, 0] = math.nan
    each = torch.cat([F.softmax(rows, -1) for rows in logits.split(100)])
    torch.testing.assert_close(to_probs(logits), each, equal_nan=True)


@pytest.mark.parametrize("variance", [1e12, math.inf])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_huge_variance_gives_the_uniform_distribution(k, variance):
    p = mean_field(5 * normal(10, k), torch.full((10,), variance).double())
    torch.testing.assert_close(p, torch.full_like(p, 1 / max(k, 2)), rtol=0, atol=1e-4)


@few
@given(number=seeds, k=st.integers(2, 8), scale=st.floats(0, 1e6))
def test_a_shared_variance_keeps_the_order_of_the_classes(number, k, scale):
    logits, variance = normal(20, k, number=number), scale * normal(20, number=number + 1).square()
    order = mean_field(logits, variance).gather(1, logits.argsort(1))
    assert bool((order.diff(dim=1) >= 0).all())
    assert torch.equal(shrink(logits, variance).argmax(1), logits.argmax(1))


@few
@given(number=seeds, more=st.floats(0.01, 100))
def test_more_variance_is_less_confidence(number, more):
    logits, variance = 3 * normal(20, 4, number=number), normal(20, number=number + 1).square()
    sure, unsure = (mean_field(logits, v).amax(1) for v in (variance, variance + more))
    assert bool((unsure < sure).all())


def test_a_variance_per_class_shrinks_each_logit_by_its_own():
    logits, variance = normal(6, 3), normal(6, 3, number=1).square()
    expected = torch.stack([shrink(logits[:, [k]], variance[:, k])[:, 0] for k in range(3)], 1)
    torch.testing.assert_close(shrink(logits, variance), expected)
    torch.testing.assert_close(shrink(logits, variance), logits / (1 + math.pi / 8 * variance).sqrt())


def test_the_mean_field_factor_matches_probit_and_sigmoid_at_zero():
    """Phi(sqrt(f) z) and sigmoid(z) have the same slope at zero for f = pi / 8 only."""
    assert math.sqrt(MEAN_FIELD_FACTOR / (2 * math.pi)) == pytest.approx(1 / 4, rel=1e-12)


@few
@given(variance=st.floats(0, 30), mean=st.floats(-15, 15))
def test_mean_field_of_one_logit_is_close_to_the_integral(mean, variance):
    m, v = double(mean)[:, None], double(variance)
    assert float((mean_field(m, v) - quadrature(m, v)).abs().max()) < 0.02


# Quadrature -----------------------------------------------------------------------------------------------------


def integral(mean: float, std: float) -> float:
    """E[sigmoid(g)], g ~ N(mean, std^2), by adaptive integration."""

    def integrand(z: float) -> float:
        return special.expit(mean + std * z) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    corner = min(9.0, max(-9.0, -mean / std)) if std else 0.0
    return integrate.quad(integrand, -10, 10, points=[corner], epsabs=1e-13, epsrel=1e-13, limit=200)[0]


@settings(deadline=None, max_examples=60)
@given(mean=st.floats(-30, 30), std=st.one_of(st.floats(0, 3), st.floats(3, 100), st.sampled_from([1.0, 1 - 1e-12])))
def test_quadrature_is_the_integral(mean, std):
    p = quadrature(double(mean)[:, None], double(std**2))[0]
    assert float(p[1]) == pytest.approx(integral(mean, std), abs=1e-11)
    assert float(p.sum()) == pytest.approx(1, abs=1e-15)


@few
@given(number=seeds, scale=st.floats(0.01, 50))
def test_quadrature_is_symmetric(number, scale):
    m, v = scale * normal(10, 1, number=number), scale * normal(10, number=number + 1).square()
    torch.testing.assert_close(quadrature(-m, v), quadrature(m, v).flip(1), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("variance", [0.1, 4.0])
@pytest.mark.parametrize("mean", [-25.0, 25.0])
def test_quadrature_keeps_the_digits_of_the_improbable_class_in_float32(mean, variance):
    """1 - p in float32 is zero there, and the log likelihood of a surprise infinite."""
    single = quadrature(torch.tensor([[mean]]), torch.tensor([variance])).amin()
    assert float(single) == pytest.approx(integral(-abs(mean), math.sqrt(variance)), rel=1e-4, abs=0)


def test_quadrature_of_several_logits_raises():
    with pytest.raises(
        ValueError, match=r"quadrature expects a single logit, shape \(N, 1\), got \(6, 3\).*mean_field"
    ):
        quadrature(normal(6, 3), normal(6).square())


# Monte Carlo ----------------------------------------------------------------------------------------------------


def test_monte_carlo_converges_to_the_integral_at_rate_root_s():
    m, v = 2 * normal(200, 1), 3 * normal(200, number=1).square()
    truth = quadrature(m, v)

    def error(samples: int) -> float:
        return float((monte_carlo(m, v, samples, seed(samples)).mean(0) - truth).square().mean().sqrt())

    assert 3.2 < error(64) / error(64 * 16) < 4.8  # sqrt(16) = 4
    assert error(1024) < 0.015


def test_monte_carlo_of_two_classes_is_one_logit_of_twice_the_variance():
    logits, v = normal(50, 2), 2 * normal(50, number=1).square()
    pair = monte_carlo(logits, v, 20_000, seed()).mean(0)
    one = quadrature(logits[:, 1:] - logits[:, :1], 2 * v)
    assert float((pair - one).abs().max()) < 5 * 0.5 / math.sqrt(20_000)


def test_monte_carlo_is_seeded():
    m, v = normal(6, 3), normal(6).square()
    assert torch.equal(monte_carlo(m, v, 7, seed(1)), monte_carlo(m, v, 7, seed(1)))
    assert not torch.equal(monte_carlo(m, v, 7, seed(1)), monte_carlo(m, v, 7, seed(2)))
    before = torch.get_rng_state()
    monte_carlo(m, v, 7, seed(1))
    assert torch.equal(torch.get_rng_state(), before)


def test_monte_carlo_draws_from_each_classes_own_variance():
    variance = double(0.0, 1.0, 9.0).repeat(1, 1)
    draws = monte_carlo(torch.zeros(1, 3).double(), variance, 20_000, seed())[:, 0].log()
    differences = draws - draws[:, :1]  # softmax keeps differences of logits; the first logit does not move
    torch.testing.assert_close(differences.var(0), variance[0], rtol=0.05, atol=1e-12)


@pytest.mark.parametrize("samples", [0, -1])
def test_monte_carlo_needs_a_sample(samples):
    with pytest.raises(ValueError, match=f"num_samples must be at least 1, got {samples}"):
        monte_carlo(normal(6, 3), normal(6).square(), samples)


# Every predictive -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PREDICTIVES)
def test_every_predictive_gives_probabilities_and_agrees_with_the_integral(name):
    m, v = normal(40, 1), normal(40, number=1).square()
    probs, members = PREDICTIVES[name](m, v, 20_000, seed())
    assert probs.shape == (40, 2)
    torch.testing.assert_close(probs.sum(1), torch.ones(40).double())
    assert float((probs - quadrature(m, v)).abs().max()) < 0.02
    if members is not None:
        assert members.shape == (20_000, 40, 2)
        torch.testing.assert_close(members.mean(0), probs)


@pytest.mark.parametrize("name", PREDICTIVES)
def test_every_predictive_without_variance_is_the_sigmoid(name):
    m = normal(40, 1)
    probs, _ = PREDICTIVES[name](m, torch.zeros(40).double(), 3, seed())
    torch.testing.assert_close(probs, to_probs(m), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", PREDICTIVES)
def test_every_predictive_keeps_the_dtype(name, dtype):
    probs, _ = PREDICTIVES[name](normal(4, 1).to(dtype), normal(4).square().to(dtype), 3, None)
    assert probs.dtype == dtype


# Rates and regression -------------------------------------------------------------------------------------------


def poisson(m: torch.Tensor, v: torch.Tensor) -> Prediction:
    return Prediction(m, v, likelihood="poisson")


def test_poisson_mean_and_std_are_those_of_counts_with_a_log_normal_rate():
    m, v = double(-1.0, 0.5, 1.5)[:, None], double(0.1, 0.4, 0.2)
    rates = torch.exp(m + v[:, None].sqrt() * normal(3, 400_000))
    counts = torch.poisson(rates, generator=seed())
    prediction = poisson(m, v)
    torch.testing.assert_close(prediction.mean[:, 0], counts.mean(1), rtol=0.01, atol=0)
    torch.testing.assert_close(prediction.std[:, 0], counts.std(1), rtol=0.01, atol=0)
    torch.testing.assert_close(poisson_rate(m, v), prediction.mean)


def test_poisson_without_variance_is_plain_poisson():
    m = double(-1.0, 0.5, 1.5)[:, None]
    prediction = poisson(m, torch.zeros(3).double())
    torch.testing.assert_close(prediction.mean, m.exp())
    torch.testing.assert_close(prediction.std, (m / 2).exp())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_poisson_std_is_a_number_wherever_mean_and_variance_are(dtype):
    """Factors overflow and vanish; their product, exp(2 m + v) (exp(v) - 1), is taken in logarithms."""
    sizes = [1e-30, 1.0, 50.0, 1e3, 1e10, 1e30, float(torch.finfo(dtype).max)]
    m, v = torch.meshgrid(
        torch.tensor([*sizes, 0.0, *(-s for s in sizes)], dtype=dtype),
        torch.tensor([0.0, *sizes], dtype=dtype),
        indexing="ij",
    )
    prediction = poisson(m.reshape(-1, 1).to(dtype), v.flatten().to(dtype))
    assert not bool(prediction.std.isnan().any())
    assert bool((prediction.std >= 0).all())
    far = poisson(double(-17_935.0)[:, None], double(17_900.0))  # of mean exp(-8985), which is zero here
    torch.testing.assert_close(far.std[:, 0], torch.exp(double(-17_935.0 + 17_900.0)))


def test_poisson_rate_with_a_variance_per_output():
    m, v = normal(4, 2), normal(4, 2, number=1).square()
    torch.testing.assert_close(poisson_rate(m, v), torch.exp(m + v / 2))


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_gaussian_intervals_cover_at_their_level(level):
    mean, variance, noise = normal(5, 2), normal(5, number=1).square() + 0.1, 0.7
    low, high = regression(mean, variance, noise=noise).interval(level)
    target = mean + (variance[:, None] + noise).sqrt() * normal(20_000, 5, 2, number=2)
    covered = ((low < target) & (target < high)).double().mean(0)
    torch.testing.assert_close(covered, torch.full_like(covered, level), rtol=0, atol=0.015)
    torch.testing.assert_close(low + high, 2 * mean)


def test_gaussian_std_adds_epistemic_variance_and_noise():
    mean, variance = normal(5, 2), normal(5, number=1).square()
    torch.testing.assert_close(regression(mean, variance, noise=0.7).std, (variance + 0.7).sqrt()[:, None].expand(5, 2))
    torch.testing.assert_close(regression(mean, variance).std[:, 0], variance.sqrt())
    assert torch.equal(regression(mean, variance).mean, mean)


@pytest.mark.parametrize("level", [0.0, 1.0, -0.5, math.nan])
def test_interval_level_must_lie_between_0_and_1(level):
    with pytest.raises(ValueError, match="level must lie strictly between 0 and 1"):
        regression(normal(5, 2), normal(5).square()).interval(level)


@pytest.mark.parametrize("attribute", ["mean", "std"])
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_class_predictions_have_no_mean_and_std(likelihood, attribute):
    with pytest.raises(
        ValueError, match=rf"A {likelihood} prediction has class probabilities \(probs\), not a {attribute}"
    ):
        getattr(classes(likelihood=likelihood), attribute)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "poisson"])
def test_only_gaussian_predictions_have_intervals(likelihood):
    with pytest.raises(ValueError, match=f"interval expects a gaussian prediction, got a {likelihood} one"):
        classes(likelihood=likelihood).interval()


@pytest.mark.parametrize("attribute", ["labels", "confidence"])
def test_regression_has_no_labels_and_confidence(attribute):
    with pytest.raises(ValueError, match="needs probs, which this gaussian prediction lacks"):
        getattr(regression(normal(5, 2), None), attribute)


def test_std_without_variance_raises():
    with pytest.raises(ValueError, match="a standard deviation needs variance"):
        _ = regression(normal(5, 2), None).std
    with pytest.raises(ValueError, match="a mean rate needs variance, which this poisson prediction lacks"):
        _ = Prediction(normal(5, 2), likelihood="poisson").mean


# Conformal p-values ---------------------------------------------------------------------------------------------


def counted(score: float, reference: list[float]) -> int:
    return 1 + sum(r >= score for r in reference)


@few
@given(reference=st.lists(st.integers(-3, 3), min_size=1, max_size=30), score=st.integers(-4, 4))
def test_p_value_counts_the_reference_scores_at_least_as_large(reference, score):
    p, smallest_p_value = conformal_p_value(double(score), double(*sorted(reference)))
    assert round(float(p) * (len(reference) + 1), 9) == counted(score, reference)
    assert smallest_p_value == 1 / (len(reference) + 1)


@few
@given(scores=st.lists(st.integers(0, 5), min_size=2, max_size=25))
def test_p_values_are_superuniform_over_every_split_also_with_ties(scores):
    """Leave each in turn out: exchangeability makes the share of p <= a the probability of p <= a."""
    n = len(scores)
    ranks = []
    for i in range(n):
        others = sorted(scores[:i] + scores[i + 1 :])
        ranks.append(round(float(conformal_p_value(double(scores[i]), double(*others))[0]) * n))
    assert all(sum(r <= k for r in ranks) <= k for k in range(1, n + 1))


@few
@given(scores=st.lists(st.floats(-5, 5), min_size=2, max_size=25, unique=True))
def test_p_values_are_uniform_without_ties(scores):
    n = len(scores)
    ranks = []
    for i in range(n):
        others = sorted(scores[:i] + scores[i + 1 :])
        ranks.append(round(float(conformal_p_value(double(scores[i]), double(*others))[0]) * n))
    assert sorted(ranks) == list(range(1, n + 1))


def test_in_domain_inputs_fail_at_a_rate_of_at_most_alpha():
    scores = normal(4000, 50, number=3)
    reference, new = scores[:, :49].sort(1).values, scores[:, 49:]
    p = torch.cat([conformal_p_value(s, r)[0] for s, r in zip(new, reference, strict=True)])
    for alpha in (0.02, 0.1, 0.5):
        rate = float((~Prediction(new, p_value=p, smallest_p_value=1 / 50).accept(alpha)).double().mean())
        assert abs(rate - alpha) < 4 * math.sqrt(alpha * (1 - alpha) / 4000)  # 50 alpha is whole: equality


@pytest.mark.parametrize("strange", [math.nan, math.inf])
def test_a_score_that_is_not_a_number_is_not_in_domain(strange):
    p, smallest_p_value = conformal_p_value(torch.tensor([strange]), torch.linspace(0, 1, 99).double())
    assert float(p) == pytest.approx(smallest_p_value)
    assert not bool(Prediction(torch.zeros(1, 2), p_value=p, smallest_p_value=smallest_p_value).accept(0.01))


# Accept ---------------------------------------------------------------------------------------------------------


def test_accept_compares_the_p_value_with_alpha():
    prediction = classes(3, p_value=double(0.009, 0.01, 0.011), smallest_p_value=0.001)
    assert prediction.accept(0.01).tolist() == [False, False, True]
    assert prediction.accept().tolist() == [False, False, True]


def test_accept_before_calibration_says_what_to_call():
    with pytest.raises(
        ValueError, match=r"accept needs p_value.*Call afield\.calibrate\(model, held_out_loader\) first"
    ):
        classes(p_value=None).accept()


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_alpha_must_lie_between_0_and_1(alpha):
    with pytest.raises(ValueError, match="alpha must lie strictly between 0 and 1"):
        classes().accept(alpha)


def test_alpha_finer_than_the_reference_says_how_many_examples_are_needed():
    with pytest.raises(ValueError, match=r"alpha = 0.01 is finer than .* smallest p-value is 0.02.*at least 99 ref"):
        classes(smallest_p_value=1 / 50).accept(0.01)
    classes(smallest_p_value=1 / 100).accept(0.01)  # 99 examples are enough


# Minimax --------------------------------------------------------------------------------------------------------


def test_minimax_trusts_the_model_in_domain_and_knows_nothing_elsewhere():
    probs = F.softmax(normal(6, 4), -1)
    assert torch.equal(minimax(probs, torch.ones(6).double()), probs)
    torch.testing.assert_close(minimax(probs, torch.zeros(6).double()), torch.full_like(probs, 0.25))


@few
@given(number=seeds)
def test_minimax_is_a_mixture_that_keeps_the_order(number):
    probs = F.softmax(normal(6, 4, number=number), -1)
    share = torch.rand(6, generator=seed(number), dtype=torch.float64)
    mixed = minimax(probs, share)
    torch.testing.assert_close(mixed.sum(1), torch.ones(6).double())
    torch.testing.assert_close(mixed - 0.25, share[:, None] * (probs - 0.25))


@pytest.mark.parametrize(
    "loss", [lambda q: -q.log(), lambda q: q.square().sum() - 2 * q + 1], ids=["log score", "Brier score"]
)
def test_minimax_is_the_best_answer_when_every_class_is_as_likely_outside_the_domain(loss):
    probs, share = F.softmax(normal(1, 4), -1), double(0.6)

    def risk(q: torch.Tensor) -> float:
        return float(share * (probs[0] * loss(q)).sum() + (1 - share) * loss(q).mean())

    ours = minimax(probs, share)[0]
    rivals = F.softmax(ours.log() + 0.3 * normal(200, 4, number=5), -1)
    assert all(risk(ours) < risk(q) for q in rivals)


SCORES_OF_CLASS = {
    "log score": lambda q: -q.log(),
    "Brier score": lambda q: q.square().sum(-1, keepdim=True) - 2 * q + 1,
}


def worst_risk(score, q: torch.Tensor, probs: torch.Tensor, share: float) -> torch.Tensor:
    """Of answers q (N, K): in-domain with probability `share`, else the class that an adversary chooses."""
    losses = score(q)
    return share * (probs * losses).sum(-1) + (1 - share) * losses.amax(-1)


def filled_up(probs: torch.Tensor, share: float) -> torch.Tensor:
    """max(share p_k, t), t such that the sum is 1, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        t = (low + high) / 2
        low, high = (t, high) if float((share * probs).clamp_min(t).sum()) < 1 else (low, t)
    return (share * probs).clamp_min(low)


@pytest.mark.parametrize("score", SCORES_OF_CLASS.values(), ids=SCORES_OF_CLASS)
def test_the_mixture_is_minimax_at_the_ends_only(score):
    """The paper's equation (minimax_solution) for a fractional in-domain probability has a counter-example."""
    probs = double(0.9, 0.06, 0.04)[None]
    rivals = F.softmax(3 * normal(3000, 3, number=3), -1)
    for share in (0.0, 1.0):
        best = worst_risk(score, minimax(probs, double(share)), probs, share)
        assert bool((worst_risk(score, rivals, probs, share) > best - 1e-12).all())
    mixture, filled = minimax(probs, double(0.5)), filled_up(probs, 0.5)
    assert float(worst_risk(score, mixture, probs, 0.5)) > float(worst_risk(score, filled, probs, 0.5)) + 0.01
    best = worst_risk(score, filled, probs, 0.5)
    assert bool((worst_risk(score, rivals, probs, 0.5) > best - 1e-12).all())


def test_minimax_checks_its_input():
    probs = F.softmax(normal(6, 4), -1)
    with pytest.raises(ValueError, match=r"in_domain must have shape \(6,\), got \(6, 1\)"):
        minimax(probs, torch.ones(6, 1))
    for wrong in (-0.1, 1.1):
        with pytest.raises(ValueError, match="in_domain must hold probabilities between 0 and 1"):
            minimax(probs, torch.full((6,), wrong))


# Prediction as a container --------------------------------------------------------------------------------------

PER_EXAMPLE = ("logits", "variance", "probs", "features", "p_value")


def same(a: Prediction, b: Prediction) -> bool:
    ours, theirs = a.numpy(), b.numpy()
    scalars = ("noise", "smallest_p_value", "likelihood")
    return (
        ours.keys() == theirs.keys()
        and all(np.array_equal(ours[name], theirs[name]) for name in ours)
        and all(getattr(a, name) == getattr(b, name) for name in scalars)
    )


@pytest.mark.parametrize(
    "index",
    [
        slice(1, 4),
        slice(None),
        slice(None, None, 2),
        slice(0, 0),
        [3, 0],
        torch.tensor([5, 5, 1]),
        torch.arange(6) > 2,
        np.arange(6) > 2,
    ],
    ids=["slice", "all", "every other", "none", "list", "tensor", "mask", "numpy mask"],
)
def test_indexing_selects_examples_in_every_field(index):
    whole = classes()
    part = whole[index]
    for name in PER_EXAMPLE:
        assert torch.equal(getattr(part, name), getattr(whole, name)[index])
    assert torch.equal(part.members, whole.members[:, index])
    assert len(part) == len(whole.logits[index])
    assert part.smallest_p_value == whole.smallest_p_value


@pytest.mark.parametrize("i", [0, 2, 5, -1, -6])
@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor], ids=["int", "numpy", "torch"])
def test_an_integer_keeps_the_batch_dimension(i, kind):
    whole = classes()
    assert same(whole[kind(i)], whole[[i]])


@pytest.mark.parametrize("i", [6, 100, -7])
def test_an_integer_out_of_range_raises(i):
    with pytest.raises(IndexError):
        classes()[i]


def test_iterating_ends_after_the_last_example():
    whole = classes()
    parts = list(itertools.islice(whole, 20))
    assert len(parts) == 6
    assert same(Prediction.cat(parts), whole)


@few
@given(cuts=st.lists(st.integers(0, 6), max_size=4))
def test_joining_the_parts_gives_the_whole(cuts):
    whole, edges = classes(), [0, *sorted(cuts), 6]
    parts = [whole[a:b] for a, b in itertools.pairwise(edges)]
    assert same(Prediction.cat(parts), whole)


def test_joining_nothing_or_different_fields_raises():
    with pytest.raises(ValueError, match="expects at least one prediction, got none"):
        Prediction.cat([])
    with pytest.raises(ValueError, match="Cannot join predictions with different fields"):
        Prediction.cat([classes(), classes(features=None)])


def test_joining_different_likelihoods_raises():
    mean, variance = normal(5, 2), normal(5).square()
    with pytest.raises(ValueError, match="Cannot join"):
        Prediction.cat([regression(mean, variance), Prediction(mean, variance, likelihood="poisson")])


def test_to_moves_and_casts_every_tensor():
    single = classes().to(torch.float32)
    assert all(a.dtype == np.float32 for a in single.numpy().values())
    assert single.likelihood == "categorical"
    assert single.smallest_p_value == 0.01
    assert same(classes().to("cpu"), classes())


def test_numpy_names_the_tensors_that_are_there():
    assert set(classes().numpy()) == {*PER_EXAMPLE, "members"}
    arrays = Prediction(normal(5, 2).requires_grad_()).numpy()
    assert list(arrays) == ["logits"]
    np.testing.assert_array_equal(arrays["logits"], normal(5, 2).numpy())


def test_numpy_of_bfloat16_is_float32():
    """As autocast gives them; numpy has no bfloat16."""
    logits = torch.tensor([[0.5, -1.25]])
    np.testing.assert_array_equal(Prediction(logits.bfloat16()).numpy()["logits"], logits.numpy())


def test_a_prediction_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        classes().logits = normal(6, 3)


def test_labels_and_confidence_are_the_top_class():
    prediction = classes()
    assert torch.equal(prediction.labels, prediction.probs.argmax(1))
    assert torch.equal(prediction.confidence, prediction.probs.max(1).values)


def test_adjusted_logits_make_the_mean_field_probabilities():
    prediction = classes()
    torch.testing.assert_close(
        to_probs(prediction.adjusted_logits()), mean_field(prediction.logits, prediction.variance)
    )
    assert torch.equal(Prediction(normal(5, 2)).adjusted_logits(), normal(5, 2))


def test_the_default_score_is_dempster_shafer_for_classes_and_variance_otherwise():
    prediction = classes()
    assert torch.equal(prediction.score(), prediction.score("dempster_shafer"))
    target = regression(normal(5, 2), normal(5).square())
    assert torch.equal(target.score(), target.variance)
    with pytest.raises(UnknownName, match=r"Unknown score 'entropi'. Did you mean 'entropy'"):
        prediction.score("entropi")
