"""Boosted trees in the mean: they are scikit-learn's, their share is chosen, and distance stays the network's."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import make_moons

from afield.estimators import SNGPClassifier, SNGPRegressor
from afield.estimators.network import columns_of
from afield.estimators.rows import Rows
from afield.estimators.trees import _boosted, _complete, fit_trees, refit
from afield.serve.open_estimator import open_estimator

QUICK = {"n_members": 2, "width": 16, "num_random_features": 64, "max_iter": 5, "random_state": 0}
pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:The smallest p-value is"),
]


def steps(rows: int = 400, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A chessboard, which trees know and a network after five epochs does not."""
    x = np.random.RandomState(seed).uniform(-2, 2, size=(rows, 3))
    return x, (np.floor(x[:, 0]) + np.floor(x[:, 1])) % 2


@pytest.fixture(scope="module")
def classifier() -> SNGPClassifier:
    return SNGPClassifier(**QUICK).fit(*steps())


@pytest.fixture(scope="module")
def regressor() -> SNGPRegressor:
    x, y = steps()
    return SNGPRegressor(**QUICK).fit(x, np.stack([y, x[:, 2]], axis=1))


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_trees_are_those_of_scikit_learn(classes: int) -> None:
    """Also where rows lie on a threshold, and after fewer rounds."""
    z = torch.from_numpy(np.random.RandomState(0).normal(size=(300, 4)).round(1))
    y = z[:, 0] * z[:, 1] if classes == 0 else (z[:, 0] * z[:, 1] * classes).abs().floor().long() % classes
    model = _boosted(z, y, torch.rand(300) + 0.1, 12, seed=0)
    for rounds, trees in ((n, _complete(model, z, y, n, torch.tensor(0.5))) for n in (1, 12)):
        staged = model.staged_predict if classes == 0 else model.staged_decision_function
        want = [torch.from_numpy(stage.copy()).reshape(300, -1) for stage in staged(z.numpy())][rounds - 1]
        found = trees(z)
        found = found[:, 1:] - found[:, :1] if classes == 2 else found
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)


def test_the_share_follows_what_is_better() -> None:
    """Trees where there are steps, the network where they add nothing, both of equals."""
    z = torch.from_numpy(np.random.RandomState(0).uniform(-2, 2, size=(600, 3)))
    step, smooth = (z[:, 0] > 0.3).double(), z[:, 1]
    rows = Rows(z, torch.stack([step, smooth], 1), torch.ones(600, dtype=torch.float64))
    train, held = rows[:400], rows[400:]
    network = torch.stack([step + 0.5 * torch.randn(600).double(), smooth], 1)[400:]
    trees = fit_trees(train.x, train, held.x, held, network, 30, seed=0)
    assert trees is not None
    assert trees.weight[0] > 0.8
    assert trees.weight[1] == 0
    again = refit(trees, rows.x, rows, seed=0)
    assert torch.equal(again.weight, trees.weight)
    assert torch.equal(again.rounds, trees.rounds)
    perfect = rows.y[400:]
    assert fit_trees(train.x, train, held.x, held, perfect, 30, seed=0) is None


def test_probabilities_are_of_both_means(classifier: SNGPClassifier) -> None:
    x, y = steps(seed=1)
    trees = classifier._trees
    assert trees is not None
    rows = torch.from_numpy(x)
    prediction = classifier.model_.predict(rows)
    w, t = trees.weight, trees(columns_of(classifier.model_)(rows))
    logits = (1 - w) * prediction.logits + w * float(classifier.model_.head.logit_scale) * t
    shrunk = logits / (1 + torch.pi / 8 * prediction.variance[:, None]).sqrt()
    np.testing.assert_allclose(classifier.predict_proba(x), shrunk.softmax(1).numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_array_equal(classifier.predict(x), classifier.predict_proba(x).argmax(1))
    alone = SNGPClassifier(trees=0, **QUICK).fit(*steps())
    assert classifier.score(x, y) > alone.score(x, y) + 0.1


def test_far_rows_are_uncertain_whatever_trees_say(classifier: SNGPClassifier) -> None:
    near, far = classifier.predict_proba(steps()[0]), classifier.predict_proba(1000 + steps()[0])
    assert far.max() < near.max(1).mean()
    assert not classifier.accept(1000 + steps()[0], alpha=0.1).any()


@pytest.mark.parametrize("kind", [SNGPClassifier, SNGPRegressor])
def test_distance_is_the_networks(kind: type) -> None:
    x, y = steps()
    both, alone = kind(**QUICK).fit(x, y), kind(trees=0, **QUICK).fit(x, y)
    assert both._trees is not None
    new = steps(seed=2)[0]
    if kind is SNGPRegressor:  # of classes the amplitude also depends on how good the mean is
        np.testing.assert_array_equal(both.ood_score(new), alone.ood_score(new))
        np.testing.assert_array_equal(both.p_value(new), alone.p_value(new))
    own = both.model_.predict(torch.from_numpy(new))
    np.testing.assert_array_equal(both.p_value(new), own.p_value.numpy())


def test_numbers_keep_their_coverage(regressor: SNGPRegressor) -> None:
    x, y = steps(4000, seed=3)
    y = np.stack([y, x[:, 2]], axis=1)
    low, high = regressor.predict_interval(x, coverage=0.9)
    assert 0.8 < ((low <= y) & (y <= high)).mean() < 0.99
    mean, std = regressor.predict(x, return_std=True)
    np.testing.assert_array_equal(mean, regressor.predict(x))
    alone = SNGPRegressor(trees=0, **QUICK).fit(steps()[0], np.stack([steps()[1], steps()[0][:, 2]], axis=1))
    before, wide = alone.predict(x, return_std=True)
    assert np.square(mean - y).mean() < 0.8 * np.square(before - y).mean()
    assert std[:, 0].mean() < wide[:, 0].mean()


def test_files_and_the_service_have_them(classifier: SNGPClassifier, regressor: SNGPRegressor, tmp_path: Path) -> None:
    x = steps(seed=4)[0]
    for name, fitted in (("classes", classifier), ("numbers", regressor)):
        assert fitted._trees is not None
        answer = fitted.predict_proba if name == "classes" else fitted.predict
        loaded = type(fitted).load(fitted.save(tmp_path / name))
        for other in (loaded, pickle.loads(pickle.dumps(fitted))):
            np.testing.assert_array_equal(getattr(other, answer.__name__)(x), answer(x))
    engine = open_estimator(classifier)
    served = engine.run({engine.inputs[0].name: x})["probabilities"]
    np.testing.assert_allclose(served, classifier.predict_proba(x), rtol=1e-5, atol=1e-6)


def test_where_there_are_none() -> None:
    """Without held-out rows that choose, in streams, and where they were not wanted."""
    x, y = steps(200)
    assert SNGPClassifier(**QUICK, validation_fraction=None).fit(x, y)._trees is None
    assert SNGPClassifier(**QUICK, early_stopping=False).fit(x, y)._trees is None
    fitted = SNGPRegressor(**QUICK).fit(x, y)
    assert fitted._trees is not None
    assert fitted.partial_fit(*steps(50, seed=5))._trees is None
    assert SNGPClassifier(**QUICK).partial_fit(x, y, classes=[0, 1])._trees is None


def test_moons_need_no_trees() -> None:
    x, y = make_moons(300, noise=0.1, random_state=0)
    fitted = SNGPClassifier(**QUICK | {"max_iter": 40}).fit(x, y)
    assert fitted.score(*make_moons(300, noise=0.1, random_state=1)) > 0.95


def test_few_different_rows_are_learnt() -> None:
    """Of a thousand rows with a dozen different ones an epoch was a single step: rates were off by .09 in the mean."""
    cells = np.stack(np.meshgrid(range(3), range(2), range(2), indexing="ij"), -1).reshape(12, 3)
    rate = np.array([0.98, 0.34, 0.9, 0.9, 0.87, 0.09, 0.9, 0.9, 0.47, 0.15, 0.48, 0.27])
    share = np.array([144, 175, 8, 8, 93, 168, 13, 11, 165, 462, 31, 48])
    rng = np.random.RandomState(0)
    cell = rng.choice(12, 1000, p=share / share.sum())
    y = (rng.uniform(size=1000) < rate[cell]).astype(int)
    x = np.concatenate([np.eye(size)[cells[cell, j]] for j, size in enumerate((3, 2, 2))], axis=1)
    for trees in (0, None):
        found = SNGPClassifier(random_state=0, trees=trees).fit(x, y).predict_proba(x)[:, 1]
        often = [k for k in range(12) if (cell == k).sum() > 60]
        assert np.mean([abs(found[cell == k][0] - y[cell == k].mean()) for k in often]) < 0.06
