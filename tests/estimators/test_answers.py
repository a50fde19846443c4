"""What a fitted estimator answers beyond scikit-learn's methods: guarantees, noise by the input, decisions, files."""

import dataclasses
import json
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="estimators need scikit-learn")
from sklearn.datasets import load_wine, make_moons
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import afield
from afield.errors import DamagedModel
from afield.estimators import SNGPClassifier, SNGPRegressor, posterior
from afield.estimators.noise import without_itself
from afield.estimators.posterior import finish, raise_noise, settle_noise
from afield.estimators.rows import Rows, split
from afield.estimators.scores import OF_CLASSES
from afield.prediction.distance_scores import FITTED
from afield.prediction.scores import SCORES

QUICK = {"n_members": 2, "width": 16, "num_random_features": 64, "max_iter": 30, "random_state": 0, "trees": 20}
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")


def varying(rows: int, seed: int):
    """Noise whose standard deviation grows from .1 to 1.1 with |x|."""
    rng = np.random.RandomState(seed)
    x = rng.uniform(-2, 2, (rows, 1))
    return x, 40 * (np.sin(2 * x[:, 0]) + (0.1 + 0.5 * np.abs(x[:, 0])) * rng.normal(size=rows)) + 500


@pytest.fixture(scope="module")
def regressor():
    return SNGPRegressor(**QUICK).fit(*varying(500, 0))


@pytest.fixture(scope="module")
def classifier():
    x, y = make_moons(300, noise=0.2, random_state=0)
    return SNGPClassifier(**QUICK).fit(x, np.array(["no", "yes"])[y])


# Numbers


def test_intervals_cover_and_follow_the_noise(regressor: SNGPRegressor) -> None:
    x, y = varying(3000, 1)
    low, high = regressor.predict_interval(x, coverage=0.9)
    inside = (low <= y) & (y <= high)
    assert 0.84 < inside.mean() < 0.96
    sixths = np.array_split(np.argsort(np.abs(x[:, 0])), 6)  # 1.00 to .70 with one noise for all
    assert all(0.8 < inside[part].mean() < 0.996 for part in sixths)
    wide = regressor.predict_interval(x, coverage=0.95)
    assert ((wide[1] - wide[0]) > (high - low)).all()
    _, std = regressor.predict(x, return_std=True)
    assert np.corrcoef(std, 0.1 + 0.5 * np.abs(x[:, 0]))[0, 1] > 0.8


def test_intervals_keep_their_promise_on_average() -> None:
    """Over draws of a hundred rows, whose targets are far from normal."""
    covered = []
    for seed in range(8):
        rng = np.random.RandomState(seed)
        x = rng.normal(size=(400, 2))
        y = x[:, 0] + rng.exponential(size=400) ** 2
        fitted = SNGPRegressor(**QUICK | {"max_iter": 3, "n_members": 1}).fit(x[:100], y[:100])
        low, high = fitted.predict_interval(x[100:], coverage=0.8)
        covered.append(((low <= y[100:]) & (y[100:] <= high)).mean())
    assert np.mean(covered) >= 0.8 - 2 * np.std(covered) / np.sqrt(8)


def test_quantiles_are_those_of_the_predicted_normal(regressor: SNGPRegressor) -> None:
    x, y = varying(2000, 2)
    mean, std = regressor.predict(x, return_std=True)
    np.testing.assert_allclose(regressor.predict_quantile(x), mean, rtol=1e-9)
    np.testing.assert_allclose(regressor.predict_quantile(x, 0.975), mean + 1.959964 * std, rtol=1e-6)
    assert abs((y < regressor.predict_quantile(x, 0.1)).mean() - 0.1) < 0.05
    with pytest.raises(ValueError, match="q must lie strictly between 0 and 1, got 1"):
        regressor.predict_quantile(x, 1)


def test_constant_noise_stays_constant() -> None:
    """On request; and where it is constant, what is found varies little."""
    rng = np.random.RandomState(0)
    x = rng.uniform(-2, 2, (300, 1))
    y = np.sin(2 * x[:, 0]) + 0.3 * rng.normal(size=300)
    _, std = SNGPRegressor(**QUICK | {"max_iter": 8}).fit(x, y).predict(x, return_std=True)
    assert std.max() < 2 * std.min()
    asked = SNGPRegressor(noise="constant", **QUICK | {"max_iter": 8}).fit(*varying(200, 0))
    assert asked._noise is None


def test_a_row_without_itself_is_a_fit_without_it() -> None:
    """Mean and variance, with weights, in closed form against a posterior that has forgotten the row."""
    x, y = varying(40, 0)
    rows = Rows(torch.tensor(x), torch.tensor(y)[:, None] / 40, torch.linspace(0.5, 2, 40).double())
    model = SNGPRegressor(**QUICK | {"max_iter": 2}).fit(x, y).model_
    finish(model, rows)
    left = without_itself(model, rows)
    mean, variance = left.logits.detach(), left.variance.reshape(-1).detach()
    noise = float(model.head.noise)
    phi = model.head.features(model.hidden(rows.x)).detach()
    for i in (0, 17, 39):
        others = torch.arange(40) != i
        weighted = phi[others].T * rows.weight[others]
        precision = weighted @ phi[others] + noise * torch.eye(64).double()
        exact = phi[i] @ torch.linalg.solve(precision, weighted @ rows.y[others])
        assert float(mean[i]) == pytest.approx(float(exact), rel=1e-6)
        spread = noise * phi[i] @ torch.linalg.solve(precision, phi[i])
        assert float(variance[i]) == pytest.approx(float(model.head.amplitude) ** 2 * float(spread), rel=1e-6)


# Classes


def test_sets_of_classes(classifier: SNGPClassifier) -> None:
    x, y = make_moons(2000, noise=0.2, random_state=1)
    sets = classifier.predict_set(x, coverage=0.9)
    assert sets.shape == (2000, 2)
    assert sets[np.arange(2000), y].mean() > 0.85
    assert classifier.predict_set(x, coverage=0.95).sum() >= sets.sum()


# Distance


def test_accept_says_what_it_cannot_promise(classifier: SNGPClassifier) -> None:
    x, _ = make_moons(50, noise=0.2, random_state=1)
    far = x + 50
    assert classifier.accept(x).mean() > 0.7
    assert not classifier.accept(far).any()
    with pytest.raises(ValueError, match="finer than the held-out data can tell"):
        classifier.accept(x, alpha=0.01)
    with pytest.warns(UserWarning, match=r"The smallest p-value is 0.0217, because there are 45 held-out rows"):
        p = classifier.p_value(far)
    np.testing.assert_array_equal(p > 0.05, classifier.accept(far))
    np.testing.assert_array_equal(classifier.score_samples(x), -classifier.ood_score(x))


def test_many_rows_have_p_values_without_a_warning() -> None:
    x, y = make_moons(700, noise=0.1, random_state=0)
    fitted = SNGPRegressor(**QUICK | {"max_iter": 2, "n_members": 1}).fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fitted.p_value(x + 100).max() == 1 / 106


def test_pipeline_reaches_the_detector() -> None:
    x, y = make_moons(120, noise=0.1, random_state=0)
    pipe = make_pipeline(StandardScaler(), SNGPClassifier(**QUICK | {"max_iter": 3})).fit(x, y)
    assert pipe.score_samples(x + 40).max() < pipe.score_samples(x).min()
    search = GridSearchCV(SNGPClassifier(**QUICK | {"max_iter": 2}), {"depth": [1]}, cv=2).fit(x, y)
    assert search.score_samples(x).shape == (120,)


# Decisions


def test_policies_in_original_labels_and_units(classifier: SNGPClassifier, regressor: SNGPRegressor) -> None:
    x, y = make_moons(600, noise=0.2, random_state=1)
    labels = np.array(["no", "yes"])[y]
    rule = classifier.policy(x, labels, risk=0.1)
    answered = classifier.decide(x, rule)
    assert (classifier.answer(x, rule)[answered] == labels[answered]).mean() > 0.9
    costly = classifier.policy(x, labels, error_cost=[[0, 1], [100, 0]], referral_cost=1e9)
    assert (classifier.answer(x, costly) == "yes").mean() > (labels == "yes").mean()
    with pytest.raises(ValueError, match=r"The classes are \['no', 'yes'\], got also \['maybe'\]"):
        classifier.policy(x[:1], ["maybe"], risk=0.1)
    x, y = varying(600, 3)
    rule = regressor.policy(x, y, risk=0.1, tolerance=30.0)
    answered = regressor.decide(x, rule)
    assert 0.2 < answered.mean() < 1
    assert (np.abs(regressor.answer(x, rule) - y)[answered] <= 30).mean() > 0.85
    assert np.abs(x[answered]).mean() < np.abs(x[~answered]).mean()  # where noise is small, it answers


def test_guarantees_need_held_out_rows() -> None:
    x, y = make_moons(40, random_state=0)
    few = SNGPClassifier(**QUICK | {"max_iter": 2}).fit(x, y)
    with pytest.raises(ValueError, match="A guarantee needs held-out rows, and this SNGPClassifier has none"):
        few.predict_set(x)
    with pytest.raises(ValueError, match="p-values compare with at least 20 held-out rows that differ"):
        few.accept(x)


# Training


def test_a_warning_where_max_iter_ends_the_training() -> None:
    x, y = make_moons(300, noise=0.1, random_state=0)
    with pytest.warns(ConvergenceWarning, match="Training reached max_iter=3 epochs, and its loss was least after 3"):
        SNGPClassifier(**QUICK | {"max_iter": 3}).fit(x, y)


# Files


def test_pickles_are_small() -> None:
    """18 MB for 178 rows, once."""
    x, y = load_wine(return_X_y=True)
    fitted = SNGPClassifier(max_iter=1, random_state=0).fit(x, y)
    assert len(pickle.dumps(fitted)) < 2e6


@pytest.mark.parametrize("name", ["classifier", "regressor"])
def test_saved_estimators_answer_alike(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    fitted = request.getfixturevalue(name)
    fitted.save(tmp_path)
    again = type(fitted).load(tmp_path)
    x = np.random.RandomState(0).normal(size=(20, fitted.n_features_in_))
    np.testing.assert_array_equal(again.predict(x), fitted.predict(x))
    np.testing.assert_array_equal(again.accept(x, alpha=0.05), fitted.accept(x, alpha=0.05))
    np.testing.assert_array_equal(again.ood_score(x), fitted.ood_score(x))
    assert again.get_params() == fitted.get_params()
    if name == "regressor":
        np.testing.assert_array_equal(again.predict_interval(x), fitted.predict_interval(x))
        np.testing.assert_allclose(again.partial_fit(x, x[:, 0]).predict(x), pickled(fitted, x).predict(x), rtol=1e-12)
    else:
        assert again.classes_.tolist() == ["no", "yes"]
        np.testing.assert_array_equal(again.predict_set(x), fitted.predict_set(x))
    with pytest.raises(ValueError, match=r"holds a saved SNGP(Classifier|Regressor), not a saved"):
        (SNGPRegressor if name == "classifier" else SNGPClassifier).load(tmp_path)


def pickled(fitted: SNGPRegressor, x: np.ndarray) -> SNGPRegressor:
    return pickle.loads(pickle.dumps(fitted)).partial_fit(x, x[:, 0])


def test_damaged_folders_are_refused(classifier: SNGPClassifier, tmp_path: Path) -> None:
    classifier.save(tmp_path)
    rest = tmp_path / "estimator.safetensors"
    content = bytearray(rest.read_bytes())
    content[-1] ^= 1
    rest.write_bytes(content)
    with pytest.raises(DamagedModel, match="is damaged, or of another estimator than the rest"):
        SNGPClassifier.load(tmp_path)
    rest.unlink()
    with pytest.raises(DamagedModel, match="is damaged, or of another"):
        SNGPClassifier.load(tmp_path)
    afield.save(classifier.model_, tmp_path)
    with pytest.raises(ValueError, match="holds no estimator"):
        SNGPClassifier.load(tmp_path)


def test_parameters_survive_a_folder(tmp_path: Path) -> None:
    x, y = make_moons(40, random_state=0)
    options = {"class_weight": {0: 1.0, 1: 2.5}, "max_iter": 1, "random_state": np.random.RandomState(0)}
    fitted = SNGPClassifier(**QUICK | options).fit(x, y).save(tmp_path)
    again = SNGPClassifier.load(tmp_path)
    assert again.class_weight == {0: 1.0, 1: 2.5}
    assert again.random_state is None
    assert json.loads((fitted / "afield.json").read_text())["metadata"]["labels"] == ["0", "1"]


@pytest.mark.parametrize(("rows", "options"), [(125, {"dropout": 0.0}), (60, {})])
def test_a_network_that_passes_through_its_rows_knows_the_noise(rows: int, options: dict[str, float]) -> None:
    """Coverage was .006 of 125 rows, and .45 of 60: of what it had learnt by heart, the network left nothing."""
    generator = np.random.default_rng(1)
    x = generator.normal(size=(rows + 1000, 20))
    y = x[:, 0] + 0.5 * generator.normal(size=len(x))
    fitted = SNGPRegressor(random_state=0, max_iter=60, trees=0, **options).fit(x[:rows], y[:rows])
    x, y = x[rows:], y[rows:]
    mean, std = fitted.predict(x, return_std=True)
    assert 0.84 < (np.abs(y - mean) < 1.645 * std).mean() < 0.99
    if rows == 125:
        low, high = fitted.predict_interval(x, coverage=0.9)
        assert 0.84 < ((low <= y) & (y <= high)).mean() < 0.99


def test_the_settled_noise_has_its_output_weights() -> None:
    """Weights, posterior and noise are those of a fit with this noise; a smaller one changes nothing."""
    x, y = varying(40, 0)
    rows = Rows(torch.tensor(x), torch.tensor(y)[:, None] / 40 - 12, torch.linspace(0.5, 2, 40).double())
    model = SNGPRegressor(**QUICK | {"max_iter": 2}).fit(x, y).model_
    finish(model, rows)
    before = float(model.head.noise)
    raise_noise(model, rows, before / 2)
    assert float(model.head.noise) == before
    settle_noise(model, rows, Rows(rows.x + 0.01, rows.y + 1, rows.weight))  # which are missed
    noise = float(model.head.noise)
    assert noise > 2 * before
    phi = model.head.features(model.hidden(rows.x)).detach()
    weighted = phi.T * rows.weight
    exact = torch.linalg.solve(weighted @ phi + noise * torch.eye(64).double(), weighted @ rows.y)
    torch.testing.assert_close(model.head.weight.detach(), exact.T, rtol=1e-6, atol=1e-9)
    error = (rows.y - phi @ exact)[:, 0]
    assert float(model.head.training_error) == pytest.approx(float(rows.weight @ error**2 / rows.weight.sum()))


# How much of the variance probabilities bear


def rare_values(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Few positives, which two columns tell; most columns say nothing, and have values far out."""
    random = np.random.default_rng(seed)
    x = random.standard_t(2.5, size=(rows, 12))
    return x, (random.random(rows) < 1 / (1 + np.exp(3.2 - 1.2 * np.clip(x[:, 0] + x[:, 1], -4, 4)))).astype(int)


def test_a_variance_that_is_noise_is_kept_from_the_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    (x, y), (new, truth) = rare_values(1500, 0), rare_values(4000, 100)
    options = {"n_members": 1, "width": 16, "max_iter": 20, "random_state": 0}
    chosen = SNGPClassifier(**options).fit(x, y)
    monkeypatch.setattr(posterior, "_STRENGTHS", (1.0,))
    whole = SNGPClassifier(**options).fit(x, y)
    losses = [log_loss(truth, fitted.predict_proba(new)) for fitted in (chosen, whole)]
    assert losses[0] < losses[1] - 0.004
    assert float(chosen.model_.head.logit_scale) < float(whole.model_.head.logit_scale) == pytest.approx(2**0.5)
    assert chosen.predict_proba(100 * new).max(1).mean() < 0.65 < chosen.predict_proba(new).max(1).mean()
    np.testing.assert_allclose(chosen.p_value(new), whole.p_value(new), atol=1e-6)  # distance is another matter


# Scores


@pytest.mark.parametrize("name", sorted(OF_CLASSES))
@pytest.mark.parametrize("stopped", [True, False])
def test_a_classifier_rests_on_the_score_that_it_is_given(name: str, stopped: bool, tmp_path: Path) -> None:
    """p-values, acceptance, score_samples and ood_score are those of the score, also in copies and files."""
    x, y = make_moons(160, noise=0.2, random_state=0)
    options = {"detection_score": name, "max_iter": 10, "early_stopping": stopped}
    fitted = SNGPClassifier(**QUICK | options).fit(x, y)
    head, rows = fitted.model_.head, torch.tensor(x)
    prediction = fitted.model_.predict(rows)
    if name in FITTED:
        score = FITTED[name](head.in_features, 2)
        index = np.isin(np.arange(160), held_out(fitted, x, y), invert=True)
        h = fitted.model_.hidden(rows[index])
        score.update(h, torch.tensor(y[index]), head(h))
        if "logits" not in score.needs or not stopped:  # held-out rows are learnt then, and logits others
            raw = dataclasses.replace(prediction, logits=head(prediction.features))
            np.testing.assert_allclose(fitted.ood_score(x), score.score(raw).numpy(), rtol=1e-5)
    else:
        np.testing.assert_array_equal(fitted.ood_score(x), SCORES[name](prediction).numpy())
    np.testing.assert_array_equal(fitted.score_samples(x), -fitted.ood_score(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p = fitted.p_value(x)
    assert (np.diff(p[np.argsort(fitted.ood_score(x))]) <= 0).all()
    assert len(head.reference) == 24 if stopped or name in FITTED else len(head.reference) < 24
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).ood_score(x), fitted.ood_score(x))
    fitted.save(tmp_path)
    np.testing.assert_array_equal(SNGPClassifier.load(tmp_path).accept(x, alpha=0.2), fitted.accept(x, alpha=0.2))


def held_out(fitted: SNGPClassifier, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which rows `fit` holds out."""
    rows = Rows(torch.tensor(x), torch.tensor(y), torch.ones(len(x)))
    seed = int(np.random.RandomState(0).randint(2**31 - 1))
    return split(rows.y, rows.clusters(), 24, torch.Generator().manual_seed(seed))[1].numpy()


def test_a_regressor_rests_on_the_score_that_it_is_given() -> None:
    x, y = varying(200, 0)
    fitted = SNGPRegressor(detection_score="knn", **QUICK | {"max_iter": 5}).fit(x, y)
    assert fitted.model_.head.score == "knn"
    before = fitted.ood_score(x)
    assert fitted.ood_score(x + 50).min() > before.max()
    assert not fitted.accept(x + 50, alpha=0.05).any()
    assert len(fitted.model_.head.reference) == 30
    fitted.partial_fit(x[:50] + 0.01, y[:50])  # hidden layers stay, and the score with them
    np.testing.assert_array_equal(fitted.ood_score(x), before)
    assert not fitted.accept(x + 50, alpha=0.05).any()
    few = SNGPRegressor(detection_score="knn", **QUICK | {"max_iter": 5}).fit(x[:40], y[:40])
    knn, rows = FITTED["knn"](few.model_.head.in_features, 1), torch.tensor(x[:40])
    knn.update(few.model_.hidden(rows))
    np.testing.assert_allclose(few.ood_score(x[:40]), knn.score(few.model_.predict(rows)).numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "name"), [(SNGPClassifier, "vim"), (SNGPRegressor, "joined"), (SNGPRegressor, "mahalanobis")]
)
def test_scores_that_an_estimator_has_not(kind, name: str) -> None:
    x, y = make_moons(30, random_state=0)
    with pytest.raises(ValueError, match=rf"The 'detection_score' parameter of {kind.__name__} must be a str among"):
        kind(detection_score=name).fit(x, y)


# Noisy tables


def test_a_noisy_table_has_the_width_that_held_out_rows_ask_for() -> None:
    """Sixty columns of which one says something about a rarer class."""
    rng = np.random.RandomState(0)
    x = rng.normal(size=(600, 60))
    y = (rng.uniform(size=600) < 1 / (1 + np.exp(2 - 1.5 * x[:, 0]))).astype(int)
    widths = []
    for seed in (0, 1):
        options = {"n_members": 1, "num_random_features": 64, "random_state": seed}
        chosen = SNGPClassifier(**options).fit(x, y)
        losses = [min(SNGPClassifier(width=width, **options).fit(x, y).held_out_loss_curve_) for width in (16, 64)]
        assert min(chosen.held_out_loss_curve_) == min(losses)
        widths.append(chosen._architecture["width"])
    assert widths == [64, 16]
    strict = SNGPClassifier(early_stopping=False, max_iter=2, **options).fit(x, y)  # held-out rows choose nothing
    assert strict._architecture["width"] == 64


def test_a_clear_table_has_a_wide_network() -> None:
    x, y = make_moons(300, noise=0.1, random_state=0)
    fitted = SNGPClassifier(n_members=1, num_random_features=64, random_state=0).fit(x, y)
    assert fitted._architecture["width"] == 64
