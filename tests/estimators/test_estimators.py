"""scikit-learn estimators: their own battery, and that every answer is that of the library's functions."""

import copy
import importlib.util
import io
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("sklearn", reason="estimators need scikit-learn")
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_diabetes, load_iris, load_wine, make_classification, make_moons
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import afield
from afield import estimators
from afield.estimators import SNGPClassifier, SNGPRegressor, network, posterior, stream, training
from afield.estimators.rows import Rows, split
from afield.prediction.metrics import auroc
from afield.settings import Settings

SMALL = {"n_members": 2, "width": 8, "num_random_features": 32, "batch_size": 64}
QUICK = {
    "n_members": 2,
    "width": 16,
    "num_random_features": 64,
    "max_iter": 15,
    "random_state": 0,
    "dropout": 0.1,
    "trees": 20,
}
# Tests train for a few epochs only, and most hold out fewer than the 99 rows that a p-value of 0.01 needs.
pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:The smallest p-value is"),
]
both = pytest.mark.parametrize("kind", [SNGPClassifier, SNGPRegressor])
likelihoods = pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])


@parametrize_with_checks(
    [SNGPClassifier(**SMALL, max_iter=6), SNGPRegressor(**SMALL, max_iter=10)], expected_failed_checks=lambda e: {}
)
def test_battery(estimator, check):
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks([SNGPClassifier(), SNGPRegressor()], expected_failed_checks=lambda e: {})
def test_battery_with_default_parameters(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def moons():
    return make_moons(400, noise=0.1, random_state=0)


@pytest.fixture(scope="module")
def classifier(moons):
    return SNGPClassifier(**QUICK | {"trees": 0}).fit(*moons)


@pytest.fixture(scope="module")
def curve():
    x = np.random.RandomState(0).uniform(-2, 2, (300, 1))
    return x, np.sin(2 * x[:, 0]) * 10 + 50 + np.random.RandomState(1).normal(size=300)


@pytest.fixture(scope="module")
def regressor(curve):
    return SNGPRegressor(**QUICK | {"noise": "constant", "trees": 0}).fit(*curve)


def model_and_rows(likelihood: str, rows: int = 40, seed: int = 0) -> tuple[afield.SNGP, Rows]:
    """A network in float64 with some output weights, and rows with targets of two columns or three classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    outputs = 2
    if likelihood == "categorical":
        y, outputs = torch.arange(rows) % 3, 3
    data = Rows(x, y, torch.ones(rows, dtype=torch.float64))
    options = {"members": 2, "depth": 1, "width": 4, "dropout": 0.0, "bound": 0.95, "num_random_features": 24}
    model = network.network([0, 0, 0], outputs, **options, likelihood=likelihood)
    network.adapt(model, data)
    with torch.no_grad():
        model.head.weight.copy_(torch.randn(model.head.weight.shape, generator=generator, dtype=torch.float64))
    return model.eval(), data


# The estimator is the functions


def by_hand(estimator, x: np.ndarray, y: torch.Tensor) -> tuple[afield.SNGP, Rows, Rows]:
    """The fitted network with its posterior forgotten, and the rows that it was trained on and that were held out."""
    rows = Rows(torch.from_numpy(x), y, torch.ones(len(x), dtype=torch.float64))
    strata = y if y.dim() == 1 else torch.zeros(len(y))
    generator = torch.Generator().manual_seed(estimator._seed)
    index, held = split(strata, rows.clusters(), estimator._num_held_out(len(x), len(x)), generator)
    model = copy.deepcopy(estimator.model_)
    model.head.reset_posterior()
    return model, rows[index], rows[held]


def test_classifier_is_the_functions(classifier: SNGPClassifier, moons) -> None:
    """The posterior is that of all rows; every answer is one of the model's."""
    x, y = moons
    model, trained, held = by_hand(classifier, x, torch.from_numpy(y))
    assert len(held) == 60
    assert afield.fit_posterior(model, (trained + held).batches()) == 400
    prediction = model.predict(torch.from_numpy(x))
    np.testing.assert_allclose(classifier.predict_proba(x), prediction.probs.numpy(), rtol=1e-9)
    np.testing.assert_allclose(classifier.ood_score(x), classifier.model_.predict(torch.from_numpy(x)).joined.numpy())
    own = classifier.model_.predict(torch.from_numpy(x))
    np.testing.assert_array_equal(classifier.predict(x), own.labels.numpy())
    np.testing.assert_array_equal(classifier.p_value(x), own.p_value.numpy())


def test_classifier_without_early_stopping_is_the_functions(moons) -> None:
    """fit_posterior and calibrate by hand, held-out rows never learnt: p-values are strict."""
    x, y = moons
    fitted = SNGPClassifier(**QUICK | {"early_stopping": False, "max_iter": 3}).fit(x, y)
    model, trained, held = by_hand(fitted, x, torch.from_numpy(y))
    held = held.merged().alone()
    assert afield.fit_posterior(model, trained.batches()) == 340
    model.head.set_scalars(amplitude=1.0)
    variance = model.predict(held.x).variance.median()
    afield.calibrate(model, held.batches(), amplitude=float((variance * torch.pi / 8) ** -0.5), seed=fitted._seed)
    fresh = x + 0.01  # a row of the reference ties with itself, and rounding would decide
    prediction = model.predict(torch.from_numpy(fresh))
    np.testing.assert_allclose(fitted.predict_proba(fresh), prediction.probs.numpy(), rtol=1e-9)
    np.testing.assert_array_equal(fitted.p_value(fresh), prediction.p_value.numpy())
    assert prediction.smallest_p_value == 1 / 31


def test_regressor_is_the_functions(regressor: SNGPRegressor, curve) -> None:
    """fit_head, fit_posterior and calibrate by hand; then the held-out rows at the calibrated noise."""
    x, y = curve
    standard = torch.from_numpy((y - y.mean()) / y.std())[:, None]
    model, trained, held = by_hand(regressor, x, standard)
    afield.fit_head(model, trained.batches())
    afield.fit_posterior(model, trained.batches())
    afield.calibrate(model, held.batches(), fit_fraction=1 - 1e-9, seed=regressor._seed)
    variance_before = model.predict(torch.from_numpy(x)).variance
    afield.posterior.update(model, held.batches())
    phi, noise = model.head.features(model.hidden(torch.from_numpy(x))), float(model.head.noise)
    weight = torch.linalg.solve(phi.T @ phi + noise * torch.eye(phi.shape[1]).double(), phi.T @ standard)
    mean, std = regressor.predict(x, return_std=True)
    np.testing.assert_allclose(mean, (phi @ weight)[:, 0].detach() * y.std() + y.mean(), rtol=1e-6)
    prediction = model.predict(torch.from_numpy(x))
    np.testing.assert_allclose(std, (prediction.variance + noise).sqrt() * y.std(), rtol=1e-6)
    assert bool((prediction.variance <= variance_before).all())  # why p-values keep their guarantee


# Weights


@likelihoods
@settings(max_examples=15, deadline=None)
@given(weights=st.lists(st.integers(0, 4), min_size=40, max_size=40).filter(lambda w: sum(map(bool, w)) > 5))
def test_whole_weights_are_repeated_rows(likelihood: str, weights: list[int]) -> None:
    """In the posterior, the output weights, the noise, and the rows that calibration sees."""
    model, rows = model_and_rows(likelihood)
    weight = torch.tensor(weights, dtype=torch.float64)
    once = replace(rows, weight=weight)[weight > 0]
    repeated = rows[torch.repeat_interleave(torch.arange(40), weight.long())]
    other = copy.deepcopy(model)
    posterior.finish(model, once)
    posterior.finish(other, repeated)
    torch.testing.assert_close(model.head.precision.data, other.head.precision.data, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.head.noise, other.head.noise, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(model.head.weight, other.head.weight, rtol=1e-5, atol=1e-6)
    mean, std = once.moments(once.x)
    torch.testing.assert_close(mean, repeated.x.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(std, repeated.x.std(0, correction=0), rtol=1e-12, atol=1e-12)


@likelihoods
def test_fractional_weights_enter_the_precision_linearly(likelihood: str) -> None:
    model, rows = model_and_rows(likelihood)
    weight = torch.rand(40, dtype=torch.float64)
    posterior.finish(model, replace(rows, weight=weight))
    phi = model.head.features(model.hidden(rows.x))
    torch.testing.assert_close(model.head.precision.data[0], (phi * weight[:, None]).T @ phi, rtol=1e-10, atol=1e-12)


def test_gaussian_finish_is_fit_head_and_fit_posterior() -> None:
    model, rows = model_and_rows("gaussian")
    other = copy.deepcopy(model)
    posterior.finish(model, rows)
    afield.fit_head(other, rows.batches())
    afield.fit_posterior(other, rows.batches())
    torch.testing.assert_close(model.head.weight, other.head.weight, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(model.head.noise, other.head.noise, rtol=1e-8, atol=0.0)
    torch.testing.assert_close(model.predict(rows.x).variance, other.predict(rows.x).variance, rtol=1e-7, atol=1e-9)


def test_merged_rows_are_the_same_data_in_any_order() -> None:
    _, rows = model_and_rows("categorical")
    twice = (rows + rows[:10])[torch.randperm(50)]
    merged = twice.merged()
    assert len(merged) == 40
    assert float(merged.weight.sum()) == 50
    again = rows.merged()
    assert torch.equal(merged.x, again.x)
    assert torch.equal(merged.y, again.y)


def test_held_out_rows_calibrate_by_their_weights() -> None:
    """Whole weights calibrate as repeated rows do, tiny ones as their number; no row is copied, however heavy."""
    model, rows = model_and_rows("gaussian", rows=80)
    weight = torch.arange(40, dtype=torch.float64) % 3 + 1
    held = replace(rows[40:], weight=weight)
    posterior.finish(model, rows[:40])
    models = [copy.deepcopy(model) for _ in range(4)]
    again = rows[40 + torch.repeat_interleave(torch.arange(40), weight.long())]
    for other, given_rows in zip(
        models, (held, again, replace(held, weight=1e-9 * weight), replace(held, weight=1e9 * weight)), strict=True
    ):
        posterior.calibrate_on(other, given_rows, stopped=True, seed=0)
    noise = [float(m.head.noise) for m in models]
    assert noise[0] == pytest.approx(noise[1], rel=0.05)  # all but one of the rows choose, and which one differs
    assert noise[2] == pytest.approx(noise[0], rel=0.05)
    assert [m.head.reference.numel() for m in models] == [40, 40, 40, 40]  # a copy tells nothing new


def test_balanced_classes_are_weights_by_class() -> None:
    x, y = make_classification(150, weights=[0.85], random_state=0)
    count = np.bincount(y)
    by_class = {k: 150 / (2 * count[k]) for k in (0, 1)}
    balanced = SNGPClassifier(class_weight="balanced", **QUICK).fit(x, y)
    given_by_class = SNGPClassifier(class_weight=by_class, **QUICK).fit(x, y)
    as_weights = SNGPClassifier(**QUICK).fit(x, y, sample_weight=np.array([by_class[k] for k in y]))
    for other in (given_by_class, as_weights):
        np.testing.assert_allclose(balanced.predict_proba(x), other.predict_proba(x), rtol=1e-6)
    plain = SNGPClassifier(**QUICK).fit(x, y)
    assert balanced.predict_proba(x)[:, 1].mean() > plain.predict_proba(x)[:, 1].mean()


# Streams


def test_gaussian_stream_is_all_rows_at_once() -> None:
    model, rows = model_and_rows("gaussian", rows=90)
    posterior.finish(model, rows[:30])
    stream.learn(model, rows[30:60])
    stream.learn(model, rows[60:])
    phi, noise = model.head.features(model.hidden(rows.x)), float(model.head.noise)
    exact = torch.linalg.solve(phi.T @ phi + noise * torch.eye(24).double(), phi.T @ rows.y)
    torch.testing.assert_close(model.head.weight.T, exact, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(model.head.precision.data[0], phi.T @ phi, rtol=1e-10, atol=1e-12)


def test_gaussian_stream_forgets() -> None:
    model, rows = model_and_rows("gaussian", rows=60)
    posterior.finish(model, rows[:40])
    before = copy.deepcopy(model.head.state_dict())
    stream.learn(model, rows[40:])
    assert not torch.allclose(model.head.weight, before["weight"], rtol=1e-3)
    stream.forget(model, rows[40:])
    torch.testing.assert_close(model.head.weight.data, before["weight"], rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(model.head.precision.data, before["precision.data"], rtol=1e-9, atol=1e-9)


def test_a_change_of_noise_between_two_parts_is_taken_into_account() -> None:
    model, rows = model_and_rows("gaussian", rows=60)
    posterior.finish(model, rows[:40])
    before = float(model.head.noise)
    model.head.set_scalars(noise=3 * before)
    stream.learn(model, rows[40:], noise=before)
    phi = model.head.features(model.hidden(rows.x))
    exact = torch.linalg.solve(phi.T @ phi + 3 * before * torch.eye(24).double(), phi.T @ rows.y)
    torch.testing.assert_close(model.head.weight.T, exact, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("ridge", [1.0, 0.03])  # of which the smaller one is that of the variance alone
def test_categorical_stream_minimises_its_objective(ridge: float) -> None:
    model, rows = model_and_rows("categorical", rows=60)
    model.head.set_scalars(ridge=ridge)
    posterior.finish(model, rows[:40])
    old, gram, new = model.head.weight.detach().clone(), model.head.precision.data[0].clone(), rows[40:]
    new = replace(new, weight=torch.linspace(0.5, 2, 20, dtype=torch.float64))
    stream.learn(model, new)
    phi = model.head.features(model.hidden(new.x)).detach()
    p = (phi @ old.T).softmax(1)
    q = float((1 - p.square().sum(1)).mean()) / 2
    weight = model.head.weight.detach().requires_grad_()
    loss = (new.weight * torch.nn.functional.cross_entropy(phi @ weight.T, new.y, reduction="none")).sum()
    moved = weight - old
    objective = loss + 0.5 * (moved @ (torch.eye(24).double() + q * gram) * moved).sum()
    (gradient,) = torch.autograd.grad(objective, weight)
    assert float(gradient.norm()) < 1e-3 * float((gram @ old.T).norm())
    assert float(moved.detach().norm()) > 1e-2


def test_partial_fit_learns_and_stays_calibrated(moons) -> None:
    x, y = moons
    labels = np.array(["no", "yes"])[y]
    left = np.argsort(x[:, 0])  # the stream drifts from left to right
    stream = SNGPClassifier(**QUICK)
    stream.partial_fit(x[left[:200]], labels[left[:200]], classes=["yes", "no"])
    before, far = stream.score(x, labels), stream.ood_score(x[left[300:]]).mean()
    for part in (left[200:250], left[250:300], left[300::2]):
        stream.partial_fit(x[part], labels[part])
    assert stream.score(x, labels) > before + 0.05
    assert stream.ood_score(x[left[301::2]]).mean() < far
    assert stream.classes_.tolist() == ["no", "yes"]
    assert stream.p_value(x).min() < 0.2
    assert 20 < len(stream._held_out) < 40
    other = pickle.loads(pickle.dumps(stream)).partial_fit(x[:20], labels[:20])  # goes on elsewhere
    np.testing.assert_allclose(
        other.predict_proba(x), stream.partial_fit(x[:20], labels[:20]).predict_proba(x), rtol=1e-9
    )


def test_partial_fit_of_numbers(curve) -> None:
    x, y = curve
    order = np.random.RandomState(0).permutation(300)
    stream = SNGPRegressor(**QUICK).partial_fit(x[order[:100]], y[order[:100]])
    first = stream.score(x, y)
    for part in np.split(order[100:], 4):
        stream.partial_fit(x[part], y[part])
    assert stream.score(x, y) > max(first, 0.9)
    head, rows = stream.model_.head, torch.from_numpy(x)
    phi, target = (
        head.features(stream.model_.hidden(rows)),
        (y[:, None] - np.asarray(stream._target_shift)) / np.asarray(stream._target_scale),
    )
    exact = torch.linalg.solve(phi.T @ phi + head.noise * torch.eye(64).double(), phi.T @ torch.from_numpy(target))
    torch.testing.assert_close(phi @ head.weight.T, phi @ exact, rtol=1e-4, atol=1e-4)  # as if all rows came at once
    assert (stream.p_value(x) < 0.05).mean() < 0.05
    assert stream.p_value([[40.0]]) < 0.05


def test_partial_fit_errors(moons) -> None:
    x, y = moons
    with pytest.raises(ValueError, match="first call of partial_fit needs classes="):
        SNGPClassifier(**QUICK).partial_fit(x, y)
    with pytest.raises(ValueError, match=r"classes are \[0, 1\], got also \[2\]"):
        SNGPClassifier(**QUICK).partial_fit(x, y + 1, classes=[0, 1])
    with pytest.raises(ValueError, match="needs all rows at once"):
        SNGPClassifier(class_weight="balanced", **QUICK).partial_fit(x, y, classes=[0, 1])
    with pytest.raises(ValueError, match="at least 2 classes, got 1 class"):
        SNGPClassifier(**QUICK).partial_fit(x[y == 0], y[y == 0], classes=[0])


# Distance


def test_far_away_knows_nothing(classifier: SNGPClassifier, moons) -> None:
    x, _ = moons
    far = np.random.RandomState(0).normal(size=(200, 2)) * 30 + 200
    assert auroc(torch.from_numpy(classifier.ood_score(x)), torch.from_numpy(classifier.ood_score(far))) > 0.98
    assert classifier.predict_proba(far).max(1).mean() < 0.75
    assert classifier.p_value(far).mean() < 0.05
    assert (classifier.p_value(x) <= 0.1).mean() < 0.2


def test_std_grows_to_the_prior_and_has_the_noise(regressor: SNGPRegressor, curve) -> None:
    """As in scikit-learn's GaussianProcessRegressor with a WhiteKernel: the noise is part of the std."""
    x, y = curve
    mean, std = regressor.predict(x, return_std=True)
    assert 0.7 < std.mean() < 1.5  # the noise has standard deviation 1
    _, far = regressor.predict(np.array([[100.0], [-300.0]]), return_std=True)
    assert far.min() > 3 * std.max()
    head = regressor.model_.head
    prior = np.sqrt(float(head.amplitude) ** 2 / float(head.ridge) + float(head.noise)) * y.std()
    assert far.max() < 1.6 * prior
    assert regressor.p_value(np.array([[100.0]]))[0] < 0.05
    np.testing.assert_array_equal(mean, regressor.predict(x))


def test_p_values_keep_their_promise() -> None:
    """P(p <= alpha) <= alpha over fresh rows, on average over draws; ten draws of 160 rows."""
    rates = []
    for seed in range(10):
        rng = np.random.RandomState(seed)
        x = rng.normal(size=(760, 2))
        y = x[:, 0] ** 2 + 0.3 * rng.normal(size=760)
        fitted = SNGPRegressor(**QUICK | {"max_iter": 2, "random_state": seed}).fit(x[:160], y[:160])
        rates.append((fitted.p_value(x[160:]) <= 0.2).mean())
    assert np.mean(rates) <= 0.2 + 3 * np.std(rates) / np.sqrt(10)
    assert np.mean(rates) > 0.02


# scikit-learn's world


def test_pipeline_grid_search_and_calibration() -> None:
    x, y = load_iris(return_X_y=True)
    pipe = make_pipeline(StandardScaler(), SNGPClassifier(**QUICK))
    assert cross_val_score(pipe, x, y, cv=3).mean() > 0.9
    search = GridSearchCV(SNGPClassifier(**QUICK), {"depth": [1, 2], "bound": [None]}, cv=2).fit(x, y)
    assert search.best_estimator_.bound is None
    calibrated = CalibratedClassifierCV(SNGPClassifier(**QUICK), cv=2).fit(x, y)
    assert calibrated.score(x, y) > 0.9


def test_frames() -> None:
    pandas = pytest.importorskip("pandas", reason="frames need pandas")
    x, y = load_wine(return_X_y=True, as_frame=True)
    named = SNGPClassifier(**QUICK).fit(x, y)
    assert named.feature_names_in_.tolist() == list(x.columns)
    plain = SNGPClassifier(**QUICK).fit(x.to_numpy(), y.to_numpy())
    np.testing.assert_array_equal(named.predict_proba(x), plain.predict_proba(x.to_numpy()))
    with pytest.raises(ValueError, match="feature names should match"):
        named.predict(x[x.columns[::-1]])
    text = x.assign(colour=pandas.Series(["red", "white"] * 89))
    with pytest.raises(ValueError, match=r"got text in column\(s\) 'colour'.*OneHotEncoder"):
        SNGPClassifier(**QUICK).fit(text, y)


@both
def test_copies_answer_alike(kind) -> None:
    x, y = load_diabetes(return_X_y=True)
    x, y = x[:120], y[:120] > 150 if kind is SNGPClassifier else y[:120]
    fitted = kind(bound=0.95, **QUICK).fit(x, y)
    for other in (pickle.loads(pickle.dumps(fitted)), copy.deepcopy(fitted)):
        np.testing.assert_array_equal(other.ood_score(x), fitted.ood_score(x))
        np.testing.assert_array_equal(other.p_value(x), fitted.p_value(x))
        np.testing.assert_array_equal(other.predict(x), fitted.predict(x))
        bounds = [row.bound for row in other.model_.audit(file=io.StringIO())]
        assert bounds == [None, 0.95, 0.95, None, 0.95, 0.95, None]
    fresh = clone(fitted)
    assert not hasattr(fresh, "model_")
    assert fresh.get_params() == fitted.get_params()


def test_model_is_saved_and_loaded_by_afield(classifier: SNGPClassifier, moons, tmp_path: Path) -> None:
    """`model_` takes raw rows: standardisation is inside."""
    x = torch.from_numpy(moons[0])
    afield.save(classifier.model_, tmp_path)
    net = network.plain_network([0, 0], 2, members=2, depth=2, width=16, dropout=0.1)
    again = afield.load(tmp_path, net)
    torch.testing.assert_close(again.predict(x).probs, classifier.model_.predict(x).probs, rtol=1e-6, atol=1e-6)


def test_seeds(moons) -> None:
    x, y = moons
    state = torch.get_rng_state()
    quick = QUICK | {"max_iter": 2}

    def answer(seed) -> np.ndarray:
        return SNGPClassifier(**quick | {"random_state": seed}).fit(x, y).predict_proba(x)

    np.testing.assert_array_equal(answer(1), answer(1))
    np.testing.assert_array_equal(answer(np.random.RandomState(1)), answer(np.random.RandomState(1)))
    assert not np.array_equal(answer(1), answer(2))
    assert not np.array_equal(answer(None), answer(None))
    assert torch.equal(torch.get_rng_state(), state)  # torch's own stream of numbers is left alone
    order = np.random.RandomState(0).permutation(80)
    fitted = [SNGPClassifier(**quick).fit(x[i], y[i]) for i in (np.arange(80), order)]
    np.testing.assert_array_equal(*(f.predict_proba(x) for f in fitted))  # without held-out rows order is nothing


def test_decision_function_makes_the_probabilities(classifier: SNGPClassifier, moons) -> None:
    x, _ = moons
    odds = classifier.decision_function(x)
    assert odds.shape == (400,)
    np.testing.assert_allclose(1 / (1 + np.exp(-odds)), classifier.predict_proba(x)[:, 1], rtol=1e-9)
    wine = load_wine(return_X_y=True)
    three = SNGPClassifier(**QUICK).fit(*wine)
    logits = torch.from_numpy(three.decision_function(wine[0]))
    np.testing.assert_allclose(logits.softmax(1), three.predict_proba(wine[0]), rtol=1e-9)


def test_several_targets(curve) -> None:
    x, y = curve
    two = SNGPRegressor(noise="constant", **QUICK).fit(x, np.stack([y, -3 * y + 7], axis=1))
    mean, std = two.predict(x, return_std=True)
    assert mean.shape == std.shape == (300, 2)
    np.testing.assert_allclose(std[:, 1], 3 * std[:, 0], rtol=1e-9)
    assert two.score(x, np.stack([y, -3 * y + 7], axis=1)) > 0.9
    with pytest.raises(ValueError, match=r"Expected 2 target column\(s\), got 1"):
        two.partial_fit(x, y)


def test_constant_target_and_column() -> None:
    x = np.stack([np.arange(120.0), np.full(120, 7.0)], axis=1)
    fitted = SNGPRegressor(**QUICK).fit(x, np.full(120, 5.0))
    mean, std = fitted.predict(x, return_std=True)
    np.testing.assert_allclose(mean, 5.0, atol=1e-6)
    assert np.isfinite(std).all()
    moved = x + np.array([0.0, 500.0])  # a column that never moved counts when it does
    assert fitted.ood_score(moved).min() > fitted.ood_score(x).max()


# Training


def test_early_stopping_ends_at_the_least_held_out_loss() -> None:
    model, rows = model_and_rows("categorical", rows=150)
    rows, held = rows[:100], rows[100:]
    chosen = Settings(optimizer="adamw", epochs=60, batch_size=32, learning_rate=3e-2, head_learning_rate=3e-2)
    how = training.Training(chosen, seed=0, patience=3, tol=1e-4)
    losses = training.train_network(model, rows, held, how).held_out
    assert 3 < len(losses) < 60
    assert min(losses) == min(losses[:-3])
    end = torch.nn.functional.cross_entropy(model(held.x).detach(), held.y)
    assert float(end) == pytest.approx(min(losses), abs=2e-4)  # tol: a smaller gain does not count
    whole = training.train_network(
        model, rows, held, replace(how, settings=replace(chosen, epochs=4), patience=None)
    ).held_out
    end = torch.nn.functional.cross_entropy(model(held.x).detach(), held.y)
    assert len(whole) == 4
    assert float(end) == pytest.approx(whole[-1], abs=1e-5)


def test_small_tables_stop_on_the_training_loss_and_have_no_p_values() -> None:
    x, y = load_iris(return_X_y=True)
    few = SNGPClassifier(**QUICK | {"max_iter": 400, "tol": 1e-2}).fit(x[::2], y[::2])
    assert few.held_out_loss_curve_ == []
    assert few.n_iter_ < 400
    with pytest.raises(ValueError, match=r"at least 20 held-out rows that differ, .* this SNGPClassifier has too few"):
        few.p_value(x)
    never = SNGPClassifier(**QUICK | {"validation_fraction": None, "max_iter": 2}).fit(x, y)
    assert never.held_out_loss_curve_ == []


def test_warm_start_goes_on(moons) -> None:
    x, y = moons
    warm = SNGPClassifier(warm_start=True, **QUICK | {"max_iter": 5}).fit(x, y)
    first, scale = warm.loss_curve_, warm.model_.net[0].gain.clone()
    warm.fit(x, y)
    assert warm.loss_curve_[0] < first[0] / 2
    assert torch.equal(warm.model_.net[0].gain, scale)
    with pytest.raises(ValueError, match=r"warm_start goes on with the classes \[0, 1\], got \[0, 1, 2\]"):
        warm.fit(x, np.arange(400) % 3)
    cold = SNGPClassifier(**QUICK | {"max_iter": 5}).fit(x, y)
    assert cold.fit(x, y).loss_curve_ == first


def test_split_keeps_every_class_and_its_share() -> None:
    groups = torch.tensor([0] * 60 + [1] * 39 + [2])
    index, held = split(groups, torch.arange(100), 24, torch.Generator().manual_seed(0))
    assert sorted(torch.cat([index, held]).tolist()) == list(range(100))
    assert 2 in groups[index]
    assert abs(int((groups[held] == 0).sum()) - 0.6 * 24) <= 1


def test_verbose(moons, capsys: pytest.CaptureFixture[str]) -> None:
    SNGPClassifier(verbose=True, **QUICK | {"max_iter": 2}).fit(*moons)
    assert capsys.readouterr().out.splitlines()[1].startswith("epoch 2: loss ")


# Errors


@both
def test_rows_that_are_not_finite_are_named(kind, moons) -> None:
    x, y = moons
    x = x.copy()
    x[[3, 17], 1] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"NaN or infinity in 2 of 400 rows \(first: 3, 17, counted from 0\)"):
        kind(**QUICK).fit(x, y)
    fitted = kind(**QUICK | {"max_iter": 1}).fit(moons[0], y)
    with pytest.raises(ValueError, match=r"first: 3, 17"):
        fitted.predict(x)
    with pytest.raises(ValueError, match=r"X has 1 features, but .* is expecting 2 features"):
        fitted.predict(x[:, :1])
    with pytest.raises(ValueError, match="Expected numbers, got text: could not convert string"):
        fitted.predict([["a", "b"]])
    with pytest.raises(NotFittedError):
        kind().ood_score(moons[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"validation_fraction": 1.0},
            r"'validation_fraction' parameter of SNGPClassifier must be .* in the range \(0",
        ),
        ({"max_iter": 0}, r"'max_iter' parameter of SNGPClassifier must be an int in the range \[1, inf\)"),
        ({"depth": None}, "'depth' parameter of SNGPClassifier must be an int"),
        ({"ridge": 0.0}, "'ridge' parameter of SNGPClassifier must be a float in the range"),
        ({"ridge": "1"}, "'ridge' parameter of SNGPClassifier must be a float"),
        ({"num_random_features": 63}, "must be a multiple of n_members, got 63 and 2"),
        ({"learning_rate": 1e30}, "The loss became"),
    ],
)
def test_parameters(changes: dict[str, object], message: str, moons) -> None:
    with pytest.raises(ValueError, match=message):
        SNGPClassifier(**QUICK | changes).fit(*moons)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (-np.ones(400), "sample_weight must not be negative"),
        (np.zeros(400), "zero for every row"),
        (np.ones(3), r"must have shape \(400,\), one for each row, got \(3,\)"),
        (np.full(400, np.nan), "NaN"),
    ],
)
@both
def test_sample_weights_are_checked(kind, weight: np.ndarray, message: str, moons) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**QUICK).fit(*moons, sample_weight=weight)


def test_one_class(moons) -> None:
    x, y = moons
    with pytest.raises(ValueError, match="at least 2 classes with positive weights, got 1 class"):
        SNGPClassifier(**QUICK).fit(x, y, sample_weight=1.0 * (y == 1))


def test_scikit_learn_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    spec = importlib.util.spec_from_file_location("without_sklearn", str(estimators.__file__))
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r'pip install "afield\[sklearn\]"'):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
