"""The tables of the suites: means over seeds, rows that are not there yet, and the paper's rows one by one."""

import json
from pathlib import Path
from typing import Any

import pytest

from afield.experiment import paper
from bench import suite_tables
from bench.suite_tables import NOT_AT_HAND, TABLES, Shown, means, rows_of_the_paper, table


def _run(method: str, seed: int, accuracy: float, members: int = 10) -> dict[str, Any]:
    config = {"task": "x", "method": method, "seed": seed, "members": members}
    return {"config": config, "metrics": {"accuracy/clean": accuracy}}


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [_run("dnn", 0, 0.8), _run("dnn", 1, 0.9), _run("deep-ensemble", 0, 0.95, members=2)]
    file = tmp_path / "results" / "x-small" / "runs.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(run) + "\n" for run in runs))
    monkeypatch.setattr(suite_tables, "ROOT", tmp_path)
    means.cache_clear()


@pytest.mark.usefixtures("record")
def test_a_row_is_a_mean_over_seeds_and_says_how_many():
    shown = Shown("x-small", "x", ("dnn", "sngp", "deep-ensemble"), {"accuracy": ("accuracy/clean",), "ECE": ("ece",)})
    assert table(shown).splitlines()[2:] == [
        "| dnn | 2 | 0.850 |  |",
        "| sngp | 0 |  |  |",
        "| deep-ensemble | 2 | 0.950 |  |",
    ]


def test_every_row_of_every_results_table_of_the_paper_is_accounted_for():
    said = rows_of_the_paper().splitlines()[2:]
    of = {line.split("`")[1]: line for line in said}
    labels = {t.label for t in paper.TABLES.values() if not t.label.startswith("tb:")}
    assert of.keys() == labels
    for label, line in of.items():
        here, wanted = map(int, line.split("|")[2].split(" of "))
        assert wanted == sum(len(t.rows) for t in paper.TABLES.values() if t.label == label)
        assert (here == wanted) == (not line.split("|")[3].strip())
    assert NOT_AT_HAND["imagenet"] in of["tab:imagenet"]


def test_a_row_is_not_here_if_a_column_was_not_measured(monkeypatch: pytest.MonkeyPatch):
    block = paper.TABLES["cifar10"]
    measured = {f"{column.name}": 0.5 for column in block.columns}
    monkeypatch.setattr(suite_tables, "means", lambda record, task: {"dnn": measured, "sngp": measured})
    assert suite_tables._why_not(block, "dnn") == ""
    assert suite_tables._why_not(block, "duq-gp") == "not trained yet"
    assert suite_tables._why_not(paper.TABLES["cifar10-scores-dtd"], "dnn") == NOT_AT_HAND["dtd"]
    del measured["nll/clean"]
    assert suite_tables._why_not(block, "dnn") == "not measured: nll/clean"


def test_tables_have_the_rows_of_their_suites():
    for shown in TABLES.values():
        assert len(set(shown.methods)) == len(shown.methods) > 0
