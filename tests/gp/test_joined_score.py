"""The joined score: -log p of its sources, which cannot be bought off, and p-values that keep their promise."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import afield
from afield.gp.class_distance import ClassDistance
from afield.gp.joined_score import SOURCES, WEIGHTS, JoinedScore
from afield.prediction.distance_scores import FITTED
from afield.prediction.metrics import auroc
from afield.prediction.prediction import Prediction

few = settings(deadline=None, max_examples=20)


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def fitted(values: Tensor) -> JoinedScore:
    score = JoinedScore()
    score.fit(values)
    return score


def alone(score: JoinedScore, source: int, x: Tensor, values: Tensor) -> Tensor:
    """The part of one source: the others at their smallest held-out values, where -log p is 0."""
    given = values.amin(0).expand(len(x), -1).clone()
    given[:, source] = x
    return score(given) / WEIGHTS[source]


@pytest.mark.parametrize("source", range(len(SOURCES)))
def test_each_source_counts_as_minus_log_p(source):
    """Exponential values: -log P(X >= x) is x itself, in the body and in the tail beyond all held-out values."""
    values = -torch.rand(20_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log()
    x = torch.tensor([0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 20.0, 100.0]).double()
    torch.testing.assert_close(alone(fitted(values), source, x, values), x, rtol=0.08, atol=0.02)


@few
@given(number=st.integers(0, 10**6))
def test_more_of_any_source_is_never_nearer_and_beyond_the_data_further(number):
    values = normal(200, 3, number=number) ** 3
    score = fitted(values)
    for source in range(3):
        x = torch.sort(torch.cat([values[:, source], 10 * values[:, source]])).values
        found = alone(score, source, x, values)
        assert bool((found.diff() >= -1e-12).all())
        assert float(found.min()) >= 0
        beyond = x[x > values[:, source].max()]
        assert bool((alone(score, source, beyond, values).diff() > 0).all())


def test_no_source_buys_off_another():
    """However sure one source is, the score is at least what the others say."""
    values = normal(500, 3)
    score = fitted(values)
    far = torch.tensor([[5.0, -1e9, -1e9], [-1e9, 8.0, -1e9], [-1e9, -1e9, 8.0]]).double()
    assert bool((score(far) > torch.quantile(score(values), 0.9)).all())


def test_equal_values_make_a_step_and_no_nan():
    score = fitted(torch.ones(50, 3))
    found = score(torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]))
    assert not bool(found.isnan().any())
    assert float(found[0]) == 0
    assert float(found[2]) > 100


def test_dtype_and_state_dict():
    values = normal(100, 3)
    score = fitted(values).half().float()
    assert score.knots.dtype == torch.float64
    back = JoinedScore()
    back.load_state_dict(score.state_dict())
    torch.testing.assert_close(back(values.float()), fitted(values)(values.float()), rtol=0, atol=0)
    assert back(values.float()).dtype == torch.float32


# Distance relative to the classes ---------------------------------------------------------------------------------


def moments(h: Tensor, y: Tensor, classes: int, split: int | None = None) -> ClassDistance:
    found = ClassDistance(h.shape[1], classes).double()
    for part, target in zip(h.split(split or len(h)), y.split(split or len(y)), strict=True):
        found.update(part, target)
    found.factor()
    return found


def problem(n: int = 400, number: int = 0) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % 4
    return 3 * normal(4, 6, number=9)[y] + normal(n, 6, number=number), y


def test_it_is_relative_mahalanobis_distance_on_unit_vectors():
    """The accumulator of `afield.distance_scores` sums in another way, and keeps centred moments."""
    (h, y), test = problem(), normal(50, 6, number=5)
    other = FITTED["unit_relative_mahalanobis"](6, 4, jitter=1e-3 + 6 / len(h))
    other.update(h, y)
    expected = other.score(Prediction(test, features=test))
    torch.testing.assert_close(moments(h, y, 4)(test), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("most", [1, 100])
def test_however_many_examples_a_class_has_foreign_directions_are_further_than_its_own(most: int) -> None:
    """Where the background is that of the largest class, its own examples are the furthest from nothing."""
    centers, sizes = 6 * torch.eye(6, dtype=torch.float64), torch.tensor([30 * most, 30, 30])
    y = torch.repeat_interleave(torch.arange(3), sizes)
    found = moments(centers[y] + normal(len(y), 6), y, 3)
    own = [found(centers[k] + normal(200, 6, number=k + 1)) for k in range(3)]
    foreign = found(centers[5] + normal(200, 6, number=9))
    assert auroc(own[0], foreign) > 0.98
    assert min(auroc(of_class, foreign) for of_class in own) > 0.8


def test_batches_order_merging_and_removal():
    h, y = problem()
    whole, test = moments(h, y, 4), normal(20, 6, number=5)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(moments(h[order], y[order], 4, split=7)(test), whole(test), rtol=1e-8, atol=1e-8)
    first, second = moments(h[:150], y[:150], 4), moments(h[150:], y[150:], 4)
    first.merge(second)
    first.factor()
    torch.testing.assert_close(first(test), whole(test), rtol=1e-8, atol=1e-8)
    first.update(h[150:], y[150:], sign=-1.0)
    first.factor()
    torch.testing.assert_close(first(test), moments(h[:150], y[:150], 4)(test), rtol=1e-8, atol=1e-8)


def test_weights_are_repetition_and_a_class_without_examples_is_nowhere():
    h, y = problem(40)
    weights = (torch.arange(40) % 3).double()
    one, many = ClassDistance(6, 5).double(), ClassDistance(6, 5).double()
    one.update(h, y, weights)
    index = torch.repeat_interleave(torch.arange(40), weights.long())
    many.update(h[index], y[index])
    for found in (one, many):
        found.factor()
    torch.testing.assert_close(one(h), many(h), rtol=1e-8, atol=1e-8)
    assert bool(torch.isfinite(one(h)).all())


def test_vectors_that_never_vary_are_finite():
    h = torch.ones(30, 4).double()
    assert bool(torch.isfinite(moments(h, torch.arange(30) % 2, 2)(normal(5, 4))).all())


# In a model -------------------------------------------------------------------------------------------------------


def converted(**options: object) -> afield.SNGP:
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    return afield.sngp(net, None, num_random_features=128, **options)


def model_of(**options: object) -> afield.SNGP:
    torch.manual_seed(0)
    model = converted(**options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    h, y = problem()
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(h), y).backward()
        optimizer.step()
    afield.fit_posterior(model, [(h, y)])
    return model


@pytest.mark.parametrize("form", ["own", "same"])
def test_the_default_score_of_a_calibrated_classifier_is_the_joined_one(form):
    model, (x, y) = model_of(variance_features=form), problem(number=1)
    assert model.predict(x).joined is None
    afield.calibrate(model, [(x, y)])
    p, far = model.predict(x), model.predict(40 * normal(100, 6, number=8))
    assert p.default_score == "joined"
    assert torch.equal(p.score(), p.joined)
    assert float(far.joined.median()) > float(p.joined.quantile(0.99))
    assert float((far.p_value <= 0.05).double().mean()) > 0.9
    afield.calibrate(model, [(x, y)], score="energy")
    assert torch.equal(model.predict(x).score(), model.predict(x).score("energy"))
    copy = converted(variance_features=form)
    copy.load_state_dict(model.state_dict())
    assert copy.head.score == "energy"
    torch.testing.assert_close(copy.predict(x).p_value, model.predict(x).p_value)


def test_false_alarms_of_the_joined_score_are_what_was_promised():
    """Exactly, in the mean over draws of the held-out data: neither tails nor scale nor amplitude see the reference."""
    model, (x, y) = model_of(), problem(360, number=2)
    levels, rates, generator = (0.05, 0.1, 0.3), [], torch.Generator().manual_seed(3)
    for _ in range(60):
        order = torch.randperm(360, generator=generator)
        held, fresh = order[:240], order[240:]
        found = afield.calibrate(model, [(x[held], y[held])])
        p = model.predict(x[fresh]).p_value
        rates.append([float((p <= a).double().mean()) for a in levels])
    n = found.num_reference
    mean, error = np.mean(rates, 0), np.std(rates, 0) / math.sqrt(len(rates))
    exact = np.array([math.floor(a * (n + 1)) / (n + 1) for a in levels])
    assert np.all(np.abs(mean - exact) <= 4 * error)


def test_float32_has_the_digits_of_float64_where_nothing_varies_within_the_classes():
    """Two curves in sixteen dimensions, far from the origin: distances from the origin would cancel."""
    t = torch.rand(400, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(400) % 2
    h = 50 + torch.cat([t, t.square(), t.sin()], 1) @ normal(3, 16) + y[:, None] * normal(1, 16, number=3)
    exact, single = ClassDistance(16, 2).double(), ClassDistance(16, 2)
    for found, x in ((exact, h), (single, h.float())):
        found.update(x.double(), y)
        found.factor()
    right = exact(h)
    torch.testing.assert_close(single(h.float()).double(), right, rtol=0.01, atol=0.02 * float(right.std()))


def test_a_source_that_does_not_vary_makes_no_score_of_rounding():
    score = JoinedScore()
    values = torch.rand(200, 3, generator=torch.Generator().manual_seed(0))
    values[:, 1] = -1.0986123
    score.fit(values)
    rows = values[:5].clone()
    rows[:, 1] = torch.nextafter(rows[:, 1], torch.zeros(5))
    torch.testing.assert_close(score(rows), score(values[:5]), rtol=0, atol=0.01)
