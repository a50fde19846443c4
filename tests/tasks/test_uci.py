"""UCI regression: published splits, standardisation without a look at the test rows, and a sane model."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from afield.experiment.training import fit
from afield.methods import METHODS
from afield.prediction.metrics import REGRESSION_METRICS
from afield.prediction.prediction import Prediction
from afield.tasks.uci import RECIPES, SETS, split
from tests.conftest import data_file


def table(rows: int = 60, columns: int = 3, splits: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    """Random rows whose first column is their number, and masks that mark a tenth as test."""
    rng = np.random.default_rng(seed)
    x = rng.normal(5, 3, (rows, columns))
    x[:, 0] = np.arange(rows)
    masks = np.stack([rng.permutation(rows) < rows // 10 for _ in range(splits)])
    return {"X": x, "y": rng.normal(50, 20, rows), "test_mask": np.packbits(masks, axis=1), "masks": masks}


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(30, 90), number=st.integers(0, 3), seed=st.integers(0, 99))
def test_every_row_is_in_exactly_one_part_and_test_is_the_published_one(rows: int, number: int, seed: int):
    data = table(rows, seed=seed)
    parts = split(data, number)
    total = len(parts.train) + len(parts.val) + len(parts.test)
    assert total == rows
    assert len(parts.test) == rows // 10
    assert len(parts.val) == round(0.1 * (rows - rows // 10))
    x = torch.cat([part.tensors[0][:, 0] for part in (parts.train, parts.val, parts.test)]).double()
    # The first column is the row's number, up to the standardisation, which the largest and smallest undo.
    numbers = ((x - x.min()) / (x.max() - x.min()) * (rows - 1)).round().long()
    assert sorted(numbers.tolist()) == list(range(rows))
    assert sorted(numbers[-len(parts.test) :].tolist()) == np.flatnonzero(data["masks"][number]).tolist()


def test_moments_are_those_of_the_training_rows():
    parts = split(table(), 0)
    for tensor in parts.train.tensors:
        torch.testing.assert_close(tensor.mean(0), torch.zeros(tensor.shape[1]), rtol=0, atol=1e-6)
        torch.testing.assert_close(tensor.std(0, correction=0), torch.ones(tensor.shape[1]))


def test_test_rows_have_no_say():
    data = table()
    other = {**data, "y": np.where(data["masks"][0], 1e6, data["y"]), "X": data["X"] + 1e6 * data["masks"][0][:, None]}
    a, b = split(data, 0), split(other, 0)
    assert a.scale == b.scale
    for part in ("train", "val"):
        for x, y in zip(getattr(a, part).tensors, getattr(b, part).tensors, strict=True):
            assert torch.equal(x, y)
    assert not torch.equal(a.test.tensors[0], b.test.tensors[0])


def test_a_constant_column_stays_finite():
    data = table()
    data["X"][:, 1] = 7.0
    assert all(bool((part.tensors[0][:, 1] == 0).all()) for part in (split(data, 0).train, split(data, 0).test))


def test_the_scale_leads_back_to_the_targets_own_units():
    data = table()
    parts = split(data, 1)
    y = parts.test.tensors[1].double()
    own = torch.from_numpy(data["y"][data["masks"][1]])[:, None]
    torch.testing.assert_close(y.diff(dim=0) * parts.scale, own.diff(dim=0), rtol=1e-4, atol=1e-4)
    # RMSE and CRPS times the scale, log loss plus its logarithm.
    mean, variance, noise, s = torch.zeros_like(y), torch.full((len(y),), 0.5).double(), 0.3, parts.scale
    standardized = Prediction(mean, variance, noise=noise, likelihood="gaussian")
    in_units = Prediction(mean * s, variance * s**2, noise=noise * s**2, likelihood="gaussian")
    values = {name: (metric(standardized, y), metric(in_units, y * s)) for name, metric in REGRESSION_METRICS.items()}
    for name, (ours, units) in values.items():
        expected = {"nll": ours + math.log(s), "interval_coverage": ours}.get(name, ours * s)
        assert units == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("number", [-1, 4])
def test_a_split_that_was_not_published_is_refused(number: int):
    with pytest.raises(ValueError, match=f"has 4 published splits: the seed must lie in 0 to 3, got {number}"):
        split(table(), number)


def test_the_seed_is_the_split():
    first, again, other = split(table(), 1), split(table(), 1), split(table(), 2)
    assert torch.equal(first.train.tensors[0], again.train.tensors[0])
    assert not torch.equal(first.train.tensors[0], other.train.tensors[0])


@pytest.mark.parametrize("name", SETS)
def test_files_are_as_the_list_says(name: str):
    file, rows = SETS[name]
    path = data_file(f"tabular/{file}.npz")
    data = dict(np.load(path))
    assert len(data["y"]) == rows
    assert len(data["test_mask"]) == int(data["n_splits"])
    parts = split(data, 0)
    assert len(parts.test) == pytest.approx(0.1 * rows, abs=1.5)
    x = torch.cat([part.tensors[0] for part in (parts.train, parts.val, parts.test)])
    assert bool(torch.isfinite(x).all())


def test_every_file_has_a_task():
    folder = data_file("tabular/uci_concrete.npz").parent
    assert {p.stem for p in Path(folder).glob("uci*.npz")} == {file for file, _ in SETS.values()}


@pytest.mark.slow
def test_energy_is_predicted_to_a_unit_or_so_and_far_points_are_unsure():
    data_file("tabular/uci_energy.npz")
    task, method = RECIPES["uci-energy"](0), METHODS["sngp"]
    model = fit(task, method, epochs=40)
    x, y = task.test.tensors
    prediction = method.predict(model, x)
    scale = split(dict(np.load(data_file("tabular/uci_energy.npz"))), 0).scale
    assert scale * REGRESSION_METRICS["rmse"](prediction, y) < 1.5  # a linear model has about 3
    assert REGRESSION_METRICS["interval_coverage"](prediction, y) > 0.8  # noise from 46 examples, 77 to test on
    far = method.predict(model, task.ood["far"].tensors[0])
    assert far.variance is not None
    assert prediction.variance is not None
    assert float(far.variance.median()) > 4 * float(prediction.variance.median())
