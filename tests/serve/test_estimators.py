"""Estimators behind HTTP answer as they do in Python: in the units of the target, with categories, strange rows too."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import afield
from tests.serve.conftest import Client, columns, running

pandas = pytest.importorskip("pandas")
sources_of = pytest.importorskip("afield.serve.server").sources_of

pytestmark = pytest.mark.slow  # scikit-learn takes seconds to import
SMALL: dict[str, Any] = {"max_iter": 2, "early_stopping": False, "depth": 1, "width": 8, "num_random_features": 32}
COLOURS = ["red", "green", "blue"]


def table_of(rows: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    frame = pandas.DataFrame({"a": rng.normal(size=rows), "same": 3.5, "colour": rng.choice(COLOURS, rows)})
    return frame.assign(colour=frame["colour"].astype(pandas.CategoricalDtype(COLOURS)))


def check_answers(client: Client, estimator: Any, rows: Any, folder: Path) -> list[dict[str, Any]]:
    """By records, by CSV and by a tensor with codes."""
    mixed = [{"colour": r.colour, "a": r.a, "same": r.same} for r in rows.itertuples()]
    status, answer, _ = client("POST", "/invocations", {"dataframe_records": mixed})
    assert status == 200, answer
    found = answer["predictions"]
    csv = rows[["same", "colour", "a"]].to_csv(index=False).encode()
    assert client("POST", "/invocations", csv, **{"content-type": "text/csv"})[1]["predictions"] == found
    about = client("GET", "/v2/models/m")[1]
    assert about["parameters"]["categories"] == {"2": sorted(COLOURS)}
    codes = [[r.a, r.same, sorted(COLOURS).index(r.colour) if r.colour in COLOURS else -1] for r in rows.itertuples()]
    tensor = {"name": "input", "shape": [len(codes), 3], "datatype": "FP64", "data": codes}
    other = client("POST", "/v2/models/m/infer", {"inputs": [tensor]})[1]
    assert [o["name"] for o in other["outputs"]] == [o["name"] for o in about["outputs"]]
    assert [row["score"] for row in found] == pytest.approx(columns(other)["score"], rel=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the smallest p-value is large
        p_values = estimator.p_value(rows)
    assert [row["p_value"] for row in found] == pytest.approx(p_values, rel=1e-5)
    assert [row["score"] for row in found] == pytest.approx(estimator.ood_score(rows), rel=1e-5)
    return found


def strange_rows() -> Any:
    """Usual ones; a colour that nobody has seen; another value in a column that was constant."""
    rows = table_of(6, seed=1).astype({"colour": object})
    rows.loc[4, "colour"] = "ultraviolet"
    rows.loc[5, "same"] = 4.0
    return rows


def test_a_classifier(tmp_path: Path):
    table = table_of(300, seed=0)
    estimator = afield.SNGPClassifier(**SMALL, random_state=0).fit(table, np.where(table["a"] > 0, "yes", "no"))
    fresh = table_of(200, seed=2)
    rule = estimator.policy(fresh, np.where(fresh["a"] > 0, "yes", "no"), coverage=0.8, false_alarms=0.05)
    folder = estimator.save(tmp_path / "m", policy=rule)
    with running(sources_of([f"m={folder}"], ["nobody:nothing"])) as client:  # an estimator knows its network
        found = check_answers(client, estimator, strange_rows(), tmp_path)
        short = {"dataframe_records": [{"a": 1.0, "same": 2.0}]}
        assert "column colour is missing" in client("POST", "/invocations", short)[1]["error"]
        assert client("GET", "/v2/models/m")[1]["parameters"]["policy"]["guarantee"] == rule.guarantee
    assert [row["decision"] == "answer" for row in found] == estimator.decide(strange_rows(), rule).tolist()
    assert [row["label"] for row in found] == estimator.predict(strange_rows()).tolist()
    assert np.allclose([row["probabilities"] for row in found], estimator.predict_proba(strange_rows()), atol=1e-6)
    assert not any(row["accepted"] for row in found[4:])


@pytest.mark.parametrize("targets", [1, 2])
def test_a_regressor_answers_in_the_units_of_its_target(targets: int, tmp_path: Path):
    table = table_of(300, seed=0)
    y = 1000 + 50 * table["a"].to_numpy()[:, None] * [1.0, -3.0][:targets]
    estimator = afield.SNGPRegressor(**SMALL, random_state=0).fit(table, y[:, 0] if targets == 1 else y)
    rows = strange_rows()
    with running(sources_of([f"m={estimator.save(tmp_path / 'm')}"])) as client:
        found = check_answers(client, estimator, rows, tmp_path)
        assert client("GET", "/v2/models/m/monitor")[0] == 200
    mean, std = estimator.predict(rows, return_std=True)
    for name, expected in (("mean", mean), ("std", std)):
        assert np.allclose(np.squeeze([row[name] for row in found]), expected, rtol=1e-5), name
    assert np.abs(mean - 1000).max() < 500
    variance = np.array([row["variance"] for row in found])
    assert (variance <= np.square(np.squeeze(std)) * (1 + 1e-5)).all()  # of the function alone
    assert not any(row["accepted"] for row in found[4:])
