"""Decisions: the guarantees themselves, by many draws of held-out data; the bounds against scipy; the edges."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

import afield
from afield.decide.conformal import KINDS, PredictionIntervals, PredictionSets, prediction_intervals, prediction_sets
from afield.decide.policies import Outcome, Policy, policy
from afield.decide.thresholds import coverage_threshold, risk_threshold
from afield.prediction.binomial import rank, tail, upper_bound
from afield.prediction.prediction import Prediction

DELTA = 0.05
few = settings(deadline=None, max_examples=40)


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def uniform(*shape: int, number: int = 0) -> Tensor:
    return torch.rand(*shape, generator=seed(number), dtype=torch.float64)


def binary(doubt: Tensor, **fields: Any) -> Prediction:
    """Two classes, class 0 the more probable one; max_probability is `doubt`, at most a half."""
    probs = torch.stack([1 - doubt, doubt], dim=1)
    return Prediction(probs.log(), probs=probs, **fields)


def classes(n: int, number: int = 0, k: int = 3, scale: float = 2.0) -> tuple[Prediction, Tensor]:
    """Calibrated: the labels are drawn from the probabilities."""
    logits = scale * torch.randn(n, k, generator=seed(number), dtype=torch.float64)
    probs = logits.softmax(1)
    return Prediction(logits, probs=probs), torch.multinomial(probs, 1, generator=seed(number + 1)).squeeze(1)


def too_many(missed: int, draws: int, rate: float) -> bool:
    """Whether so many misses would be a wonder (one in a million) if their rate were at most `rate`."""
    return stats.binom.sf(missed - 1, draws, rate) < 1e-6


# Binomial --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.floats(0, 1), st.floats(0, 1))
@few
def test_the_tail_agrees_with_scipy(n, part, p):
    errors = round(part * n)
    assert tail(errors, n, p) == pytest.approx(stats.binom.cdf(errors, n, p), rel=1e-8, abs=1e-300)


@given(st.integers(1, 3000), st.floats(0, 1), st.sampled_from([0.5, 0.05, 1e-3, 1e-8]))
@few
def test_the_upper_bound_is_a_beta_quantile(n, part, delta):
    errors = round(part * n)
    exact = stats.beta.isf(delta, errors + 1, n - errors) if errors < n else 1.0
    assert upper_bound(errors, n, delta) == pytest.approx(exact, rel=1e-7)


@given(st.integers(1, 300), st.floats(0.01, 0.999), st.sampled_from([0.5, 0.05, 1e-6]))
@few
def test_the_rank_is_the_smallest_whose_beta_lies_above_the_level(n, level, delta):
    k = np.arange(1, n + 1)
    below = stats.beta.cdf(level, k, n + 1 - k)
    good = k[below <= delta]
    assert bool(np.isclose(below, delta, rtol=1e-6).any()) or rank(n, level, delta) == (good[0] if len(good) else None)


@given(st.integers(2, 500), st.data())
@few
def test_bounds_are_monotone(n, data):
    errors = data.draw(st.integers(0, n - 1))
    assert upper_bound(errors, n, DELTA) < upper_bound(errors + 1, n, DELTA) + 1e-12
    assert upper_bound(errors, n + 1, DELTA) <= upper_bound(errors, n, DELTA) + 1e-12
    assert upper_bound(errors, n, DELTA) <= upper_bound(errors, n, DELTA / 2)
    ranks = [rank(n, level, DELTA) or n + 1 for level in (0.5, 0.7, 0.9, 0.99)]
    assert ranks == sorted(ranks)


def test_certain_and_impossible_trials():
    assert (tail(-1, 5, 0.3), tail(5, 5, 0.3), tail(0, 5, 0.0), tail(4, 5, 1.0), tail(0, 0, 0.3)) == (0, 1, 1, 0, 1)
    assert upper_bound(5, 5, 0.05) == 1.0
    assert upper_bound(0, 59, 0.05) < 0.05 < upper_bound(0, 58, 0.05)  # the rule of three


# Risk ------------------------------------------------------------------------------------------------------------

Rate = Callable[[Tensor], Tensor]
CURVES: dict[str, tuple[Rate, Rate]] = {  # P(wrong | score = s) for uniform scores, and its mean below t
    "rising": (lambda s: 0.3 * s**2, lambda t: 0.1 * t**2),
    "just above": (lambda s: torch.full_like(s, 0.0501), lambda t: torch.full_like(t, 0.0501)),
    "a bump": (lambda s: 0.3 * (s < 0.1).double(), lambda t: 0.3 * (0.1 / t).clamp(max=1)),
    "falling": (lambda s: 0.1 * (1 - s), lambda t: 0.1 * (1 - t / 2)),
}


def answered_up_to(score: Tensor, wrong: Tensor, risk: float, number: int) -> float:
    """The threshold; minus infinity, nothing at all, where the risk is out of reach."""
    try:
        return risk_threshold(score, wrong, risk, DELTA, seed=number)
    except ValueError:
        return -math.inf


@pytest.mark.parametrize("curve", CURVES)
def test_the_risk_is_kept_with_the_promised_confidence(curve):
    at, below = CURVES[curve]
    draws, n, missed, reached = 300, 600, 0, 0
    for draw in range(draws):
        score = uniform(n, number=draw)
        threshold = answered_up_to(score, uniform(n, number=10_000 + draw) < at(score), 0.05, draw)
        reached += threshold > 0
        missed += threshold > 0 and float(below(torch.tensor(min(threshold, 1.0), dtype=torch.float64))) > 0.05
    assert not too_many(missed, draws, DELTA)
    if curve == "rising":
        assert reached > 0.5 * draws  # the promise is not kept by silence
    if curve == "just above":
        assert missed > 0  # the test can tell: a bound that is never missed would be too careful


def test_the_risk_is_kept_with_ties():
    """Ten values of the score; those below 4 are right, the others wrong at 30%."""
    draws, missed, reached = 300, 0, 0
    for draw in range(draws):
        score = (10 * uniform(300, number=draw)).floor()
        wrong = (uniform(300, number=10_000 + draw) < 0.3) & (score >= 4)
        answered = sum(s <= answered_up_to(score, wrong, 0.09, draw) for s in range(10))
        reached += answered >= 4
        missed += answered > 4 and 0.3 * (answered - 4) / answered > 0.09
    assert not too_many(missed, draws, DELTA)
    assert reached > 0.9 * draws


def test_a_sequence_of_tests_answers_more_than_a_union_bound():
    sequence, union = [], []
    for draw in range(60):
        score = uniform(1000, number=draw)
        wrong = uniform(1000, number=10_000 + draw) < 0.3 * score**2
        sequence.append(max(0.0, answered_up_to(score, wrong, 0.05, draw)))
        ordered, total = score.sort().values, wrong[score.argsort()].cumsum(0)
        good = [k for k in range(100, 1001, 100) if tail(int(total[k - 1]), k, 0.05) <= DELTA / 10]
        union.append(float(ordered[max(good) - 1]) if good else 0.0)
    assert np.mean(sequence) > np.mean(union) + 0.08


def test_far_more_data_comes_near_the_best_threshold():
    """Errors at rate 0.2 s: the risk below t is 0.1 t, so that 5% allows t = 0.5 and no more."""
    score = uniform(50_000)
    threshold = risk_threshold(score, uniform(50_000, number=10_000) < 0.2 * score, 0.05, DELTA)
    assert 0.44 < threshold <= 0.5


@given(st.integers(20, 400), st.integers(0, 10**6), st.sampled_from([0.05, 0.1, 0.3]))
@few
def test_what_is_answered_passes_its_test_on_the_examples_that_were_tested(n, number, risk):
    score = (20 * uniform(n, number=number)).floor()
    wrong = uniform(n, number=number + 1) < 0.01 * score
    tested = torch.randperm(n, generator=seed())[-(-n // 10) :]
    try:
        answered = score <= risk_threshold(score, wrong, risk, DELTA)
    except ValueError:
        return
    parts = [tested, torch.arange(n)] if bool(answered.all()) else [tested]  # few examples: all of them or none
    bounds = [upper_bound(int(wrong[p][answered[p]].sum()), int(answered[p].sum()), DELTA) for p in parts]
    assert min(bounds) <= risk


@pytest.mark.parametrize("n", [59, 60, 130, 1000])
def test_without_errors_everything_is_answered(n):
    assert risk_threshold(uniform(n), torch.zeros(n, dtype=torch.bool), 0.05, DELTA) == math.inf


@pytest.mark.parametrize(("n", "within"), [(58, 0.06), (30, 0.1), (1, "no other")])
def test_too_few_examples_say_what_is_within_reach(n, within):
    message = (
        rf"these {n} held-out examples, 0 of them wrong; {within} can\. .* data: 59 without an error are the fewest"
    )
    with pytest.raises(ValueError, match=message):
        risk_threshold(uniform(n), torch.zeros(n, dtype=torch.bool), 0.05, DELTA)


def test_without_right_answers_no_risk_can_be_promised():
    with pytest.raises(ValueError, match="500 of them wrong; no other can"):
        risk_threshold(uniform(500), torch.ones(500, dtype=torch.bool), 0.1, DELTA)


@given(st.integers(20, 400), st.integers(0, 10**6), st.sampled_from([0.02, 0.1]))
@settings(deadline=None, max_examples=20)
def test_the_suggested_risk_can_be_promised(n, number, risk):
    score = uniform(n, number=number)
    wrong = uniform(n, number=number + 1) < 0.3 * score
    try:
        risk_threshold(score, wrong, risk, DELTA)
    except ValueError as error:
        risk_threshold(score, wrong, float(str(error).split("wrong; ")[1].split(" can.")[0]), DELTA)


def test_tied_scores_are_answered_together():
    """All scores equal: all or nothing, and 10% wrong is too much."""
    wrong = torch.arange(1000) % 10 == 0
    with pytest.raises(ValueError, match="cannot be promised"):
        risk_threshold(torch.zeros(1000), wrong, 0.05, DELTA)
    assert risk_threshold(torch.zeros(1000), wrong, 0.15, DELTA) == math.inf


# Coverage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "coverage"), [(30, 0.9), (100, 0.9), (100, 0.5), (500, 0.99)])
def test_the_coverage_is_kept_with_the_promised_confidence(n, coverage):
    draws = 2000
    scores = uniform(draws, n)
    missed = sum(coverage_threshold(row, coverage, DELTA) < coverage for row in scores)  # P(score <= t) = t
    assert not too_many(missed, draws, DELTA)
    exact = stats.beta.cdf(coverage, k := rank(n, coverage, DELTA), n + 1 - k)
    assert missed / draws == pytest.approx(exact, abs=5 * math.sqrt(exact / draws))  # and not by a wide margin


def test_ties_only_add_to_the_coverage():
    scores = (5 * uniform(200)).floor()
    assert float((scores <= coverage_threshold(scores, 0.5, DELTA)).double().mean()) >= 0.5


def test_a_coverage_out_of_reach_says_what_is_within():
    with pytest.raises(ValueError, match=r"28 held-out examples cannot .*0\.9 .* only 0\.899\. Give at least 29"):
        coverage_threshold(uniform(28), 0.9, DELTA)
    assert coverage_threshold(uniform(29), 0.9, DELTA) == float(uniform(29).max())
    refused = uniform(100).masked_fill(torch.arange(100) < 20, math.inf)
    with pytest.raises(ValueError, match="20 of 100 held-out examples are refused by their p-values"):
        coverage_threshold(refused, 0.8, DELTA)


# Policies --------------------------------------------------------------------------------------------------------


def calibrated(n: int, number: int = 0) -> tuple[Prediction, Tensor]:
    """p-values against 99 reference scores, as a calibrated model gives them."""
    prediction, y = classes(n, number)
    reference = classes(99, number + 777)[0].score().sort().values
    p_value = (1 + (reference[None] >= prediction.score()[:, None]).sum(1)).double() / 100
    return Prediction(prediction.logits, probs=prediction.probs, p_value=p_value, smallest_p_value=0.01), y


def test_a_policy_of_false_alarms_decides_as_accept_does():
    p, y = calibrated(500)
    rule = policy(false_alarms=0.05)
    assert torch.equal(rule.decide(p), p.accept(0.05))
    assert rule.guarantee == "At most 0.05 of in-domain inputs are refused as foreign, on average over calibrations."
    assert rule.held_out is None
    assert policy(p, y, false_alarms=0.05).held_out == rule.outcome(p, y)


def test_a_target_risk():
    p, y = classes(3000)
    rule = policy(p, y, risk=0.05)
    fresh, labels = classes(20_000, number=50)
    found = rule.outcome(fresh, labels)
    assert rule.held_out.risk <= 0.05
    assert found.risk <= 0.055
    assert 0.18 < found.coverage < 0.254  # what the curve of the fresh data itself allows
    assert rule.score == "max_probability"
    assert "At most 0.05 of the answers are wrong, with confidence 0.95 over draws" in rule.guarantee


def test_a_target_coverage_needs_no_targets():
    p, _ = classes(1000)
    rule = policy(p, coverage=0.8, score="entropy")
    assert 0.8 <= rule.held_out.coverage < 0.85
    assert torch.equal(rule.decide(p), p.score("entropy") <= rule.threshold)
    assert math.isnan(rule.held_out.risk)
    assert "At least 0.8 of in-domain inputs are answered" in rule.guarantee


def test_p_values_are_applied_before_the_threshold():
    p, y = calibrated(2000)
    passed = p.accept(0.2)
    risky = policy(p, y, risk=0.1, false_alarms=0.2)
    alone = policy(p[passed], y[passed], risk=0.1)
    assert risky.threshold == alone.threshold  # the risk is that of what passes
    assert torch.equal(risky.decide(p), passed & alone.decide(p))
    answered = policy(p, coverage=0.6, false_alarms=0.2)
    assert answered.held_out.coverage >= 0.6  # the coverage is that of all
    with pytest.raises(ValueError, match="refused by their p-values"):
        policy(p, coverage=0.9, false_alarms=0.2)


def test_real_targets_have_a_tolerance():
    x = uniform(4000)
    p = Prediction(torch.zeros(4000, 1), variance=x**2, noise=0.0, likelihood="gaussian")
    y = x * torch.randn(4000, generator=seed(), dtype=torch.float64)
    rule = policy(p, y, risk=0.05, tolerance=1.0)
    assert rule.score == "variance"
    assert rule.held_out.risk <= 0.05 < float((y.abs() > 1).double().mean())
    assert policy(p, y[:, None], risk=0.05, tolerance=1.0) == rule
    assert policy(p, y, coverage=0.5).held_out.errors is None
    assert torch.equal(rule.answer(p), p.mean)
    with pytest.raises(ValueError, match="needs a tolerance"):
        policy(p, y, risk=0.05)
    with pytest.raises(ValueError, match=r"Expected targets of shape \(4000, 1\), got \(3999,\)"):
        policy(p, y[1:], risk=0.05, tolerance=1.0)


def test_nan_is_referred():
    p, y = classes(500)
    rule = policy(p, y, risk=0.9)
    assert rule.threshold is None
    p.probs[7] = math.nan
    assert (~rule.decide(p)).nonzero().flatten().tolist() == [7]
    with pytest.raises(ValueError, match=r"NaN in 1 rows \(first: \[7\]\)"):
        policy(p, y, risk=0.1)


def test_a_policy_survives_json():
    p, y = classes(500)
    for rule in (policy(p, y, risk=0.9), policy(p, y, error_cost=[[0, 1, 2], [3, 0, 4], [5, 6, 0]], referral_cost=0.5)):
        read = json.loads(json.dumps(asdict(rule), allow_nan=False))
        again = Policy(**read | {"held_out": Outcome(**read["held_out"])})
        assert again == rule
        assert torch.equal(again.decide(p), rule.decide(p))


# Costs -----------------------------------------------------------------------------------------------------------


def test_the_cost_is_the_least_of_all_policies():
    """With the right probabilities, no other answers and referrals are expected to cost less."""
    p, y = classes(20_000)
    matrix = torch.tensor([[0.0, 5, 1], [2, 0, 9], [4, 1, 0]], dtype=torch.float64)
    rule = policy(p, y, error_cost=matrix, referral_cost=1.0)
    expected = torch.stack([sum(p.probs[:, k] * matrix[k, j] for k in range(3)) for j in range(3)], dim=1)
    answer, accept = rule.answer(p), rule.decide(p)
    assert torch.equal(answer, expected.argmin(1))
    assert torch.equal(accept, expected.min(1).values <= 1.0)
    paid = torch.where(accept, matrix[y, answer], torch.tensor(1.0, dtype=torch.float64))
    assert rule.held_out.cost == pytest.approx(float(paid.mean()))
    assert rule.held_out.cost_error == pytest.approx(float(paid.std()) / math.sqrt(20_000))
    best = float(expected.min(1).values.clamp(max=1.0).mean())
    assert abs(rule.held_out.cost - best) < 5 * rule.held_out.cost_error
    for answers in (p.labels, answer):
        for accepted in (torch.ones_like(accept), torch.zeros_like(accept), p.confidence > 0.7):
            other = torch.where(accepted, matrix[y, answers], torch.tensor(1.0, dtype=torch.float64))
            assert float(other.mean()) > rule.held_out.cost


def test_one_cost_of_errors_is_a_threshold_on_the_confidence():
    p, y = classes(1000)
    rule = policy(p, y, error_cost=10, referral_cost=1)
    assert torch.equal(rule.decide(p), 10 * (1 - p.confidence) <= 1)
    assert torch.equal(rule.answer(p), p.labels)
    assert rule.held_out == policy(p, y, error_cost=10 * (1 - torch.eye(3)), referral_cost=1).held_out
    assert policy(error_cost=10, referral_cost=1).held_out is None
    assert "least there is, if the probabilities are right" in rule.guarantee


@given(st.floats(0.01, 100), st.floats(1.01, 10))
@few
def test_dearer_referrals_never_refer_more(cost, factor):
    p, _ = classes(200)
    cheap, dear = (policy(error_cost=10, referral_cost=c) for c in (cost, cost * factor))
    assert bool((dear.decide(p) | ~cheap.decide(p)).all())


# What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expects one goal .* got none"),
        ({"risk": 0.1, "coverage": 0.5}, "got risk and coverage"),
        ({"risk": 0.0}, "risk must lie strictly between 0 and 1, got 0.0"),
        ({"coverage": 1.0}, "coverage must lie strictly"),
        ({"coverage": 0.5, "delta": 2}, "delta must lie strictly"),
        ({"false_alarms": 7}, "false_alarms must lie strictly"),
        ({"error_cost": 1.0}, "error_cost and referral_cost together"),
        ({"error_cost": -1.0, "referral_cost": 1.0}, "finite and not negative, got -1.0"),
        ({"error_cost": [[0, 1], [1, 0]], "referral_cost": 1.0}, r"of shape \(3, 3\), got shape \(2, 2\)"),
        ({"risk": 0.1, "score": "max_probablity"}, "Did you mean 'max_probability'"),
        ({"false_alarms": 0.1}, r"accept needs p_value.*Call afield\.calibrate\(model, held_out_loader\)"),
    ],
)
def test_bad_requests_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        policy(*classes(100), **options)


def test_missing_and_ill_fitting_data_is_refused():
    p, y = classes(100)
    with pytest.raises(
        ValueError, match=r"A risk needs held-out examples and their targets: afield.policy\(model.pred"
    ):
        policy(p, risk=0.1)
    with pytest.raises(ValueError, match=r"A coverage needs held-out examples: .*predict\(x\), coverage=\.\.\."):
        policy(coverage=0.1)
    with pytest.raises(ValueError, match="held-out examples"):
        policy(p[:0], y[:0], risk=0.1)
    with pytest.raises(ValueError, match="at least one example, got none"):
        policy(p[:0], error_cost=1, referral_cost=1)
    with pytest.raises(ValueError, match=r"3 classes \(0 to 2\), the targets run from 1 to 3"):
        policy(p, y + 1, risk=0.5)
    with pytest.raises(ValueError, match=r"shape \(100,\)"):
        policy(p, y[1:], risk=0.5)
    gaussian = Prediction(torch.zeros(9, 1), torch.ones(9), noise=1.0, likelihood="gaussian")
    with pytest.raises(ValueError, match="need class probabilities, got a gaussian"):
        policy(gaussian, error_cost=1, referral_cost=1)


# Sets and intervals ----------------------------------------------------------------------------------------------


def covered(n: int, level: float, draws: int, **options: Any) -> Tensor:
    """(draws, 500): whether each of 500 fresh examples has its class in the set, for held-out data drawn anew."""
    hits = []
    for draw in range(draws):
        p, y = classes(n + 500, number=2 * draw)
        found = prediction_sets(p[:n], y[:n], level=level, generator=seed(draw), **options)
        sets = found.sets(p[n:], generator=seed(10_000 + draw))
        hits.append(sets.gather(1, y[n:, None]).squeeze(1))
    return torch.stack(hits).double()


@pytest.mark.parametrize("options", [{}, {"kind": "adaptive"}, {"kind": "adaptive", "randomized": True}])
@pytest.mark.parametrize(("n", "level"), [(19, 0.9), (50, 0.8)])
def test_sets_hold_the_class_at_the_promised_rate(n, level, options):
    by_draw = covered(n, level, 300, **options).mean(1)
    error = float(by_draw.std()) / math.sqrt(300)
    assert float(by_draw.mean()) > level - 4 * error
    if (
        options.get("randomized") or not options
    ):  # nonconformities without ties: not above it either, by more than 1 / (n + 1)
        assert float(by_draw.mean()) < level + 1 / (n + 1) + 4 * error


def test_with_delta_the_promise_is_for_this_held_out_data():
    """Uniform nonconformities: the coverage of a draw is the k-th smallest itself."""
    missed, draws = 0, 1000
    for draw in range(draws):
        p = binary(uniform(60, number=draw) / 2)
        found = prediction_sets(p, torch.zeros(60), level=0.8, delta=DELTA)
        missed += 2 * found.thresholds[0] < 0.8
    assert not too_many(missed, draws, DELTA)
    assert missed > 0


def test_per_class_sets_keep_the_promise_within_every_class():
    """A model that is ever so sure of class 0, whatever the input: without the option class 1 pays for it."""
    n, rates = 1000, []
    for draw in range(100):
        y = (uniform(2 * n, number=draw) < 0.1).long()
        doubt = torch.where(y == 1, 0.2 + 0.3 * uniform(2 * n, number=draw + 1), 0.3 * uniform(2 * n, number=draw + 2))
        p = binary(doubt)
        plain, own = (prediction_sets(p[:n], y[:n], level=0.9, per_class=c) for c in (False, True))
        fresh = y[n:]
        rates.append([[float(s.sets(p[n:])[fresh == k, k].double().mean()) for k in (0, 1)] for s in (plain, own)])
    (plain_0, plain_1), (own_0, own_1) = np.mean(rates, 0)
    assert plain_1 < 0.5 < plain_0
    assert own_0 > 0.895
    assert own_1 > 0.895


def test_adaptive_sets_grow_where_the_model_is_unsure():
    p, y = classes(4000, k=5)
    sizes = prediction_sets(p, y, kind="adaptive", level=0.95).sets(p).sum(1).double()
    sure = p.confidence > p.confidence.median()
    assert float(sizes[~sure].mean()) > float(sizes[sure].mean()) + 0.5
    smaller = prediction_sets(p, y, level=0.95).sets(p).sum(1).double()
    assert float(smaller.mean()) < float(sizes.mean())  # the least ambiguous are the smallest


def test_the_adaptive_nonconformity_is_the_probability_of_what_comes_before():
    probs = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
    p = Prediction(probs.log(), probs=probs)
    for largest, expected in ((0.49, []), (0.5, [1]), (0.8, [1, 2]), (1.0, [0, 1, 2])):
        sets = PredictionSets(0.9, (largest + 1e-12,), "adaptive").sets(p)
        assert sets[0].nonzero().flatten().tolist() == expected


@given(st.sampled_from(KINDS), st.floats(0.5, 0.95), st.integers(0, 1000))
@few
def test_a_higher_level_never_shrinks_a_set(kind, level, number):
    p, y = classes(300, number)
    lower, higher = (prediction_sets(p, y, level=a, kind=kind).sets(p) for a in (level, level + 0.04))
    assert bool((higher | ~lower).all())


@given(st.integers(0, 10**6))
@settings(deadline=None, max_examples=10)
def test_sets_do_not_depend_on_the_order_of_the_held_out_data(number):
    p, y = classes(100, number)
    order = torch.randperm(100, generator=seed(number))
    assert prediction_sets(p[order], y[order]) == prediction_sets(p, y)


def test_intervals_hold_the_target_at_the_promised_rate_though_the_model_is_wrong_about_its_spread():
    hits = []
    for draw in range(200):
        x = uniform(100 + 500, 2, number=draw) + 0.1
        y = x * torch.randn(x.shape, generator=seed(draw + 1), dtype=torch.float64) * torch.tensor([1.0, 3.0])
        p = Prediction(torch.zeros_like(x), variance=x**2, noise=0.0, likelihood="gaussian")
        lower, upper = prediction_intervals(p[:100], y[:100], level=0.9).intervals(p[100:])
        hits.append(((lower <= y[100:]) & (y[100:] <= upper)).double().mean(0))
    mean, error = torch.stack(hits).mean(0), torch.stack(hits).std(0) / math.sqrt(200)
    assert bool((mean > 0.9 - 4 * error).all())
    assert bool((mean < 0.9 + 1 / 101 + 4 * error).all())


def test_intervals_of_a_right_gaussian_are_its_own():
    p = Prediction(torch.zeros(20_000, 1), variance=torch.full((20_000,), 3.0), noise=1.0, likelihood="gaussian")
    y = 2 * torch.randn(20_000, generator=seed())
    found = prediction_intervals(p, y, level=0.95)
    assert found.thresholds[0] == pytest.approx(1.96, abs=0.05)
    assert prediction_intervals(p, y, level=0.95, delta=DELTA).thresholds[0] > found.thresholds[0]


def test_rates_are_never_below_zero():
    p = Prediction(torch.zeros(2, 1), variance=torch.ones(2), likelihood="poisson")
    lower, upper = PredictionIntervals(0.9, (5.0,)).intervals(p)
    assert float(lower.max()) == 0.0
    assert float(upper.min()) > 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "lack"}, "kind must be one of least_ambiguous, adaptive, got 'lack'"),
        ({"randomized": True}, 'needs kind="adaptive"'),
        ({"level": 1.0}, "level must lie strictly"),
        ({"delta": 0.0}, "delta must lie strictly"),
        ({"level": 0.99}, r"98 held-out examples cannot promise a level of 0\.99, only 0\.99\. Give at least 99"),
        ({"level": 0.97, "delta": 0.05}, r"98 held-out .* only 0\.97\. Give at least 99"),
        ({"level": 0.97, "per_class": True}, r"\d+ held-out examples of class 1 cannot promise"),
    ],
)
def test_bad_sets_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        prediction_sets(*classes(98), **options)


def test_the_fewest_examples_suffice():
    p, y = classes(99)
    assert prediction_sets(p, y, level=0.99).thresholds[0] == float((1 - p.probs.gather(1, y[:, None])).max())
    assert prediction_sets(p, y, level=0.97, delta=0.05).thresholds == prediction_sets(p, y, level=0.99).thresholds
    assert prediction_sets(p[:9], y[:9], level=0.9).thresholds  # 0.9 x 10 is 9, not a hair more


def test_ill_fitting_sets_and_targets_are_refused():
    p, y = classes(98)
    with pytest.raises(ValueError, match="made for 3 classes, got 4"):
        PredictionSets(0.9, (0.1, 0.2, 0.3)).sets(classes(5, k=4)[0])
    p.probs[3] = math.nan
    with pytest.raises(ValueError, match=r"NaN in 1 rows \(first: \[3\]\)"):
        prediction_sets(p, y)
    gaussian = Prediction(torch.zeros(98, 2), torch.ones(98), noise=1.0, likelihood="gaussian")
    with pytest.raises(ValueError, match="got a gaussian prediction: prediction_intervals"):
        prediction_sets(gaussian, y)
    with pytest.raises(ValueError, match=r"shape \(98, 2\), got \(98,\)"):
        prediction_intervals(gaussian, y)
    with pytest.raises(ValueError, match="must be positive"):
        prediction_intervals(Prediction(torch.zeros(98, 1), torch.zeros(98), noise=0.0, likelihood="gaussian"), y)
    with pytest.raises(ValueError, match=r"NaN in 1 rows \(first: \[0\]\)"):
        prediction_intervals(gaussian, torch.full((98, 2), 0.0).index_fill(0, torch.tensor(0), math.nan))


# The page --------------------------------------------------------------------------------------------------------


def test_the_code_of_the_page_runs():
    """Every Python block of docs/decisions.md, one after the other, on a small model."""
    text = (Path(__file__).parents[2] / "docs" / "decisions.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    torch.manual_seed(0)
    centres = 4 * torch.randn(4, 5)

    def blobs(n: int, k: int = 3) -> tuple[Tensor, Tensor]:
        y = torch.arange(n) % k
        return centres[y] + torch.randn(n, 5), y

    net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    x, y = blobs(300)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    model = afield.attach(net, num_random_features=64)
    afield.fit_posterior(model, [x])
    afield.calibrate(model, [blobs(300)])
    names: dict[str, Any] = {"afield": afield, "model": model}
    names["x_held_out"], names["y_held_out"] = blobs(500)
    names["x_new"], names["y_new"] = blobs(200)
    names["new_class_loader"] = [centres[3] + torch.randn(30, 5)]
    for block in blocks:
        exec(block, names)
    rule, p = names["rule"], names["p"]
    assert rule.outcome(p, names["y_new"]).risk < 0.05
    assert rule.outcome(p).coverage > 0.9
    inside = names["sets"].sets(p).gather(1, names["y_new"][:, None])
    assert float(inside.double().mean()) > 0.8
    x, y = blobs(200, 4)
    assert float((names["bigger"].predict(x).labels == y).double().mean()) > 0.9
    assert names["smaller"].predict(x).probs.shape == (200, 3)
