"""Names of metrics: text and parts say the same."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afield.experiment.metric_name import MetricName
from afield.experiment.paper import TABLES
from afield.prediction.distance_scores import FITTED
from afield.prediction.scores import SCORES

RECORDS = Path(__file__).resolve().parents[2] / "results"
words = st.text("abcdefghij_0123456789-", min_size=1).filter(lambda word: word not in {*SCORES, *FITTED})


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("auroc/far", ("auroc", "far", "")),
        ("auroc/far/knn", ("auroc", "far", "knn")),
        ("auroc/a/b", ("auroc", "a/b", "")),
        ("auroc/a/b/energy", ("auroc", "a/b", "energy")),
        ("auroc/energy", ("auroc", "energy", "")),
        ("ece", ("ece", "", "")),
    ],
)
def test_a_name_has_a_metric_data_and_a_score(name: str, parts: tuple[str, str, str]):
    assert MetricName.parse(name) == MetricName(*parts)
    assert str(MetricName(*parts)) == name


@given(words, st.lists(words, min_size=1, max_size=3), st.sampled_from(["", *SCORES, *FITTED]))
def test_parsing_undoes_writing(metric: str, data: list[str], score: str):
    name = MetricName(metric, "/".join(data), score)
    assert MetricName.parse(str(name)) == name
    assert str(name) == f"{metric}/{name.qualifier}"


def test_every_name_of_the_paper_and_of_the_records_is_kept():
    names = {column.name for table in TABLES.values() for column in table.columns}
    for file in RECORDS.glob("*/report.json"):
        tasks = json.loads(file.read_text(encoding="utf-8"))["tasks"].values()
        names |= {name for task in tasks for table in task["tables"].values() for name in table["columns"]}
    assert len(names) > 100
    assert [name for name in names if str(MetricName.parse(name)) != name] == []
