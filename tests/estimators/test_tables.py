"""Tables as people have them: copies and groups, weights, sparse and mixed columns, extreme units, constant columns."""

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="estimators need scikit-learn")
from scipy.sparse import csr_array
from sklearn.datasets import load_breast_cancer, load_wine, make_moons

from afield.estimators import SNGPClassifier, SNGPRegressor
from afield.estimators.rows import Rows, split
from afield.estimators.tables import encode, learn_categories

QUICK = {"n_members": 1, "width": 16, "num_random_features": 64, "max_iter": 8, "random_state": 0, "trees": 20}
pytestmark = [
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
    pytest.mark.filterwarnings("ignore:The smallest p-value is"),
]
both = pytest.mark.parametrize("kind", [SNGPClassifier, SNGPRegressor])


@pytest.fixture(scope="module")
def moons():
    return make_moons(200, noise=0.1, random_state=0)


def rows_of(x, y, **more) -> Rows:
    return Rows(torch.tensor(x).double(), torch.tensor(y), torch.ones(len(y)).double(), **more)


# Copies and groups


def test_copies_are_held_out_together_and_count_once() -> None:
    rng = np.random.RandomState(0)
    x, y = rng.normal(size=(60, 2)), rng.randint(0, 2, 60)
    rows = rows_of(np.repeat(x, 4, axis=0), np.repeat(y, 4))
    clusters = rows.clusters()
    assert len(clusters.unique()) == 60
    index, held = split(rows.y, clusters, 12, torch.Generator().manual_seed(0))
    assert len(held) == 48
    assert not set(clusters[index].tolist()) & set(clusters[held].tolist())
    assert len(rows[held].merged().alone()) == 12


def test_equal_inputs_with_other_targets_are_observations_of_their_own() -> None:
    rows = rows_of([[0.0], [0.0], [0.0], [1.0], [1.0]], [0, 0, 1, 1, 1])
    assert rows.clusters().tolist()[3] == rows.clusters().tolist()[4]
    assert len(rows.clusters().unique()) == 4


def test_groups_join_with_copies() -> None:
    """Rows 0 and 1 share a group, rows 1 and 2 are copies: all three go together."""
    rows = rows_of([[0.0], [1.0], [1.0], [2.0]], [0, 1, 1, 0], group=torch.tensor([7, 7, 3, 4]))
    first, second, third, fourth = rows.clusters().tolist()
    assert first == second == third != fourth


def test_no_class_is_without_a_row_to_train_on() -> None:
    """Class 1 is only in clusters that begin with a row of class 0."""
    strata, clusters = torch.tensor([0, 1] * 10), torch.arange(20) // 2
    for seed in range(5):
        index, held = split(strata, clusters, 9, torch.Generator().manual_seed(seed))
        assert set(strata[index].tolist()) == {0, 1}
        assert len(held)


@pytest.mark.parametrize("how", ["four times", "bootstrap"])
def test_p_values_keep_their_promise_on_copies(how: str) -> None:
    """On average over draws; rows given four times had 16.8% false alarms at 5%, a bootstrap 10.9%."""
    rates = []
    for seed in range(6):
        rng = np.random.RandomState(seed)
        x = rng.normal(size=(160 + 500, 3))
        y = x[:, 0] ** 2 + 0.3 * rng.normal(size=len(x))
        chosen = np.repeat(np.arange(160), 4) if how == "four times" else rng.randint(0, 160, 320)
        fitted = SNGPRegressor(**QUICK | {"max_iter": 3, "random_state": seed}).fit(x[chosen], y[chosen])
        rates.append((fitted.p_value(x[160:]) <= 0.1).mean())
    assert np.mean(rates) <= 0.1 + 2 * np.std(rates) / np.sqrt(len(rates))


def test_groups_and_rows_to_validate_on(moons) -> None:
    x, y = moons
    group = np.arange(200) // 2
    fitted = SNGPRegressor(**QUICK).fit(x, y, groups=group)
    held = {tuple(row) for row in fitted._held_out.x.tolist()}
    inside = np.array([tuple(row) in held for row in x.tolist()])
    assert inside.sum() == 48
    np.testing.assert_array_equal(inside[::2], inside[1::2])
    given = SNGPClassifier(**QUICK).fit(x[:100], y[:100], X_val=x[100:], y_val=y[100:])
    assert given.model_.head.reference.numel() == 100
    assert given.model_.head.num_observed == 200
    numbers = SNGPRegressor(**QUICK).fit(x[:100], 9 * y[:100], X_val=x[100:], y_val=9 * y[100:])
    held = numbers._held_out.y * numbers._target_scale + numbers._target_shift
    np.testing.assert_allclose(held[:, 0], 9 * y[100:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": [1, 2]}, r"groups must have shape \(200,\), one for each row, got \(2,\)"),
        ({"X_val": np.zeros((3, 2))}, "X_val and y_val together"),
        ({"X_val": np.zeros((3, 2)), "y_val": [0, 1]}, "X_val has 3 rows, y_val has 2"),
        ({"X_val": np.zeros((1, 2)), "y_val": [5]}, r"The classes are \[0, 1\], got also \[5\]"),
    ],
)
def test_arguments_of_fit_are_checked(arguments: dict[str, object], message: str, moons) -> None:
    with pytest.raises(ValueError, match=message):
        SNGPClassifier(**QUICK).fit(*moons, **arguments)


# Weights


@both
def test_a_huge_weight_costs_nothing(kind, moons) -> None:
    """Rows were repeated, once; a million of each would not fit in memory."""
    x, y = moons
    heavy = kind(**QUICK | {"max_iter": 2}).fit(x, y, sample_weight=np.full(200, 1e6))
    assert len(heavy._held_out) <= 30
    assert heavy.model_.head.num_observed == 200
    assert heavy.score(x, y) > 0.2


# Columns


@both
def test_sparse_rows_are_dense_ones(kind, moons) -> None:
    x, y = moons
    x = np.concatenate([x, np.eye(4)[np.arange(200) % 4]], axis=1)
    dense, sparse = kind(**QUICK).fit(x, y), kind(**QUICK).fit(csr_array(x), y)
    np.testing.assert_array_equal(dense.predict(x), sparse.predict(csr_array(x)))


def test_categories_of_a_frame() -> None:
    pandas = pytest.importorskip("pandas", reason="frames need pandas")
    rng = np.random.RandomState(0)
    colour = rng.choice(["blue", "green", "red"], 300)
    frame = pandas.DataFrame({"colour": pandas.Categorical(colour), "size": rng.normal(size=300)})
    y = (colour == "red") ^ (frame["size"] > 0)
    fitted = SNGPClassifier(**QUICK | {"max_iter": 30}).fit(frame, y)
    assert fitted.score(frame, y) > 0.9
    assert fitted.n_features_in_ == 2
    new = pandas.DataFrame({"colour": ["red", "purple"], "size": [0.5, 0.5]})
    known, strange = fitted.ood_score(new)
    assert strange > known
    assert fitted.accept(new, alpha=0.05).tolist()[1] is False
    by_number = SNGPClassifier(**QUICK | {"max_iter": 30}, categorical_features=[0]).fit(frame.to_numpy(), y)
    np.testing.assert_allclose(by_number.predict_proba(frame.to_numpy()), fitted.predict_proba(frame), rtol=1e-9)


def test_which_columns_are_categories() -> None:
    table = np.array([["a", 1.0], ["b", np.nan], ["a", 2.0]], dtype=object)
    assert learn_categories(table, [True, False]) == {0: ["a", "b"]}
    assert learn_categories(table, "from_dtype") == learn_categories(table, None) == {}
    missing = learn_categories(table, [1])
    assert missing == {1: [1.0, 2.0, None]}
    assert encode(table, missing)[:, 1].tolist() == [0, 2, 1]
    assert encode(np.array([[0, 7.0]]), missing)[:, 1].tolist() == [-1]
    with pytest.raises(ValueError, match=r"columns from 0 to 1, got \[2\]"):
        learn_categories(table, [2])
    with pytest.raises(ValueError, match=r"must have shape \(2,\), got \(3,\)"):
        learn_categories(table, [True, False, True])
    with pytest.raises(ValueError, match="names columns that X does not have: size"):
        learn_categories(table, ["size"])


def test_dates_are_refused_by_name(moons) -> None:
    pandas = pytest.importorskip("pandas", reason="frames need pandas")
    x, y = moons
    frame = pandas.DataFrame({"a": x[:, 0], "when": pandas.date_range("2026-01-01", periods=200)})
    with pytest.raises(ValueError, match=r"got dates or times in column\(s\) 'when'.*days since"):
        SNGPClassifier(**QUICK).fit(frame, y)
    with pytest.raises(ValueError, match=r"got dates or times\. Make numbers"):
        SNGPClassifier(**QUICK).fit(frame[["when"]].to_numpy(), y)


@both
@pytest.mark.parametrize("unit", [1e-12, 1e9])
def test_units_do_not_matter(kind, unit: float) -> None:
    x, y = make_moons(120, noise=0.1, random_state=0)
    target, scaled = (y, y) if kind is SNGPClassifier else (x[:, 0] + y, (x[:, 0] + y) * unit)
    plain, other = kind(**QUICK).fit(x, target), kind(**QUICK).fit(x * unit, scaled)
    np.testing.assert_allclose(other.ood_score(x * unit), plain.ood_score(x), rtol=1e-3, atol=1e-6)
    if kind is SNGPRegressor:
        np.testing.assert_allclose(other.predict(x * unit) / unit, plain.predict(x), rtol=1e-3, atol=1e-3)
        low, _ = other.predict_interval(x * unit)
        np.testing.assert_allclose(low / unit, plain.predict_interval(x)[0], rtol=1e-2, atol=1e-2)
    else:
        np.testing.assert_allclose(other.predict_proba(x * unit), plain.predict_proba(x), rtol=1e-3, atol=1e-4)


@both
def test_a_constant_column_carries_no_weight_and_its_change_is_flagged(kind) -> None:
    x, y = load_wine(return_X_y=True)
    x = np.concatenate([x, np.full((178, 1), 7.0)], axis=1)
    fitted = kind(**QUICK).fit(x, y)
    moved = x + np.eye(14)[13]
    np.testing.assert_array_equal(fitted.predict(moved), fitted.predict(x))
    assert fitted.ood_score(moved).min() > fitted.ood_score(x).max()
    assert not fitted.accept(moved, alpha=0.05).any()


def test_rows_that_lie_ever_further_away_are_refused() -> None:
    """More dimensions than rows can know must not give in-domain rows distances that dwarf those of foreign ones."""
    x, y = load_breast_cancer(return_X_y=True)
    fitted = SNGPClassifier(random_state=0).fit(x[::2], y[::2])
    assert (fitted.p_value(x[1::2]) <= 0.05).mean() < 0.15
    assert all((fitted.p_value(factor * x[1::2]) <= 0.05).mean() > 0.9 for factor in (4, 10, 100))
