"""Tables of a report: rows, marks, the paper's numbers, Markdown and LaTeX."""

import math
import re
import statistics
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afield.experiment import paper
from afield.experiment.metric_name import MetricName
from afield.experiment.run_folder import Run
from afield.report import columns
from afield.report.columns import ood_sets, score_tables
from afield.report.groups import Group, Place, group_runs
from afield.report.tables import Column, best, format_from_paper, format_number, make_table
from afield.report.typeset import escape_latex, escape_markdown, latex, markdown

NASTY = "a_b & 100% $x$ #1 {y} ~z ^w \\v <b>|*"
up, down = (Column("x", "X", "x", goal) for goal in (math.inf, -math.inf))


def a_run(method: str = "dnn", seed: int = 0, metrics: dict[str, float] | None = None, **config: object) -> Run:
    settings = {"task": "t", "method": method, "seed": seed, **config}
    return Run(Path(method, str(seed), str(config)), settings, metrics or {}, {}, {})


def column(name: str) -> Column:
    return columns.column(MetricName.parse(name))


# Rows


@pytest.mark.parametrize(
    ("method", "family", "base"),
    [
        ("dnn", "single", "dnn"),
        ("isomax-plus", "single", "isomax-plus"),
        ("dnn-temperature", "single", "dnn-temperature"),
        ("mc-dropout", "dropout", "dnn"),
        ("deep-ensemble", "ensemble", "dnn"),
        ("dnn-gp-ensemble", "ensemble", "dnn-gp"),
        ("sngp-augmix", "augmix", "sngp"),
        ("sngp-augmix-ensemble", "ensemble", "sngp"),
        ("gp-random-features", "gp", "gp-random-features"),
        ("never-heard-of", "single", "never-heard-of"),
    ],
)
def test_a_method_has_its_place(method: str, family: str, base: str):
    assert (Place.of(method).family, Place.of(method).base) == (family, base)


def test_rows_go_from_dense_to_distance_aware_then_dropout_ensembles_gps():
    wanted = [
        "dnn",
        "dnn-temperature",
        "isomax-plus",
        "dnn-sn",
        "duq-gp",
        "dnn-gp",
        "sngp",
        "unknown",
        "sngp-augmix",
        "mc-dropout",
    ]
    wanted += ["sngp-dropout", "deep-ensemble", "sngp-ensemble", "gp-exact", "gp-hmc"]
    tasks, notes = group_runs(a_run(method) for method in sorted(wanted))
    assert [group.name for group in tasks["t"]] == wanted
    assert notes == []


def test_seeds_share_a_row_settings_do_not():
    runs = [a_run(seed=s, data_seed=d, bound=b) for s in (0, 1) for d in (0, 1) for b in (6.0, 0.95)]
    groups = group_runs(runs)[0]["t"]
    assert [group.name for group in groups] == ["dnn (bound=0.95)", "dnn (bound=6.0)"]
    assert [len(group.runs) for group in groups] == [4, 4]
    seeds = [(run.config["data_seed"], run.seed) for run in groups[0].runs]
    assert seeds == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_setting_that_came_after_a_run_tells_no_rows_apart():
    runs = [a_run(seed=0), a_run(seed=1, constant=False, rank=None), a_run(seed=2, constant=True)]
    groups = group_runs(runs)[0]["t"]
    assert [(group.name, len(group.runs)) for group in groups] == [
        ("dnn (constant=False)", 2),
        ("dnn (constant=True)", 1),
    ]


def test_the_same_run_counts_once_and_has_a_note():
    tasks, notes = group_runs([a_run(seed=3), a_run(seed=3)])
    assert len(tasks["t"][0].runs) == 1
    assert "the same run as" in notes[0]


# Cells


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=8), st.integers(1, 100))
def test_a_cell_is_mean_and_standard_deviation(values: list[float], factor: int):
    table = make_table("t", "T", {"a": {"x": values}}, [Column("x", "X", "x", factor=float(factor))])
    cell = table.rows[0].cells["x"]
    assert cell.mean == pytest.approx(factor * sum(values) / len(values), abs=1e-9)
    assert cell.std == pytest.approx(factor * statistics.stdev(values), abs=1e-9)
    assert cell.count == len(values)
    assert cell.text == format_number(cell.mean, cell.decimals)


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=9), st.sampled_from([math.inf, -math.inf, 0.95]))
def test_marked_cells_are_the_best_of_those_printed(values: list[float], goal: float):
    by_row = {f"m{i}": {"x": [value]} for i, value in enumerate(values)}
    rows = make_table("t", "T", by_row, [Column("x", "X", "x", goal)]).rows

    def worse(text: str) -> Decimal:
        printed = Decimal(text)
        return abs(printed - Decimal("0.95")) if goal == 0.95 else -printed if goal > 0 else printed

    least = min(worse(row.cells["x"].text) for row in rows)
    assert [row.cells["x"].best for row in rows] == [worse(row.cells["x"].text) == least for row in rows]


def test_ties_within_rounding_are_ties():
    table = make_table("t", "T", {"a": {"x": [0.90001]}, "b": {"x": [0.90049]}, "c": {"x": [0.9006]}}, [up])
    assert [row.name for row in table.best("x")] == ["c"]
    table = make_table("t", "T", {"a": {"x": [0.90001]}, "b": {"x": [0.90049]}, "c": {"x": [0.8]}}, [up])
    assert [row.name for row in table.best("x")] == ["a", "b"]


def test_nothing_is_best_alone_or_without_a_goal():
    assert best({"a": 1.0}, math.inf) == set()
    assert best({"a": 1.0, "b": 2.0}, None) == set()
    assert best({"a": 1.0, "b": math.inf}, -math.inf) == {"a"}


def test_columns_and_rows_without_values_are_left_out():
    table = make_table("t", "T", {"a": {"x": [1.0]}, "b": {}}, [up, Column("z", "Z", "z")])
    assert [c.name for c in table.columns] == ["x"]
    assert [row.name for row in table.rows] == ["a"]


@pytest.mark.parametrize(
    ("value", "decimals", "text"),
    [
        (-0.0001, 3, "0.000"),
        (1234567, 0, "1,234,567"),
        (1.5e30, 3, "1.50e+30"),
        (math.inf, 3, "inf"),
        (0.9996, 3, "1.000"),
    ],
)
def test_numbers_are_printed_plainly(value: float, decimals: int, text: str):
    assert format_number(value, decimals) == text


def test_goals_are_in_printed_units():
    assert column("interval_coverage/clean").goal == 0.95
    assert column("false_alarms/clean").goal == 5.0
    assert (column("accuracy/clean").factor, column("accuracy/clean").goal) == (100.0, math.inf)
    assert column("confidence/far").goal == column("ece/clean").goal == -math.inf


# Scores


def test_scores_have_a_table_for_each_ood_set():
    metrics = {
        "auroc/near/knn": 0.7,
        "auroc/near/energy": 0.6,
        "auroc/near": 0.6,
        "auroc/far/energy": 0.9,
        "auroc/far": 0.9,
    }
    groups = [Group("dnn", (a_run(metrics=metrics),))]
    assert ood_sets(groups) == ["near", "far"]
    (table,) = score_tables("t", groups)  # one score alone is no table
    assert {name: cell.mean for name, cell in table.rows[0].cells.items()} == {
        "auroc/near/knn": 0.7,
        "auroc/near/energy": 0.6,
    }


# The paper


def cells_of_the_paper() -> list[tuple[str, str, str, paper.Cell]]:
    """(task, method, column, cell) of every result; where tables disagree, the first one counts."""
    found: dict[tuple[str, str, str], paper.Cell] = {}
    for table in paper.TABLES.values():
        for row in table.rows:
            for each in table.columns:
                if table.task is not None and each.higher_is_better is not None:
                    found.setdefault((table.task, row.method, each.name), row.cells[each.name])
    return [(*key, cell) for key, cell in found.items()]


def test_the_papers_form_stands_beside_the_papers_numbers():
    ours = column("ece/clean")
    assert format_from_paper("cifar10", "sngp-paper", ours) == format_from_paper("cifar10", "sngp", ours) != ""


def test_rows_and_sets_of_the_paper_that_are_missing_are_told():
    methods = dict.fromkeys(row.method for row in paper.TABLES["genomics"].rows)
    groups = [Group(m, (a_run(m, metrics={"auroc/genera": 0.6, "aupr/genera": 0.5}),)) for m in methods]
    assert columns.missing_from_paper("genomics", groups) == []
    (sentence,) = columns.missing_from_paper("genomics", groups[1:])
    assert sentence == "Of genomics, 1D CNN on bacteria genomics, no runs are here of DNN."
    cifar = [Group("dnn", (a_run("dnn", metrics={"auroc/svhn": 0.6, "auroc/noise": 0.9}),))]
    told = columns.missing_from_paper("cifar10", cifar)
    assert any("CIFAR-10 vs DTD, nothing was measured on dtd: the images are not at hand" in line for line in told)
    assert any("tab:cifar10-abl" in line and "SNGP + AugMix" in line for line in told)
    assert columns.missing_from_paper("two-moons", cifar) == []


def test_every_number_of_the_paper_is_found_and_keeps_its_value():
    cells = cells_of_the_paper()
    assert len(cells) > 300
    for task, method, name, cell in cells:
        ours = column(name if "/" in name else f"{name}/clean")
        mean, _, plus_minus = format_from_paper(task, method, ours).partition(" ±")
        assert float(mean) == pytest.approx(cell.mean * ours.factor, abs=1e-9), (task, method, name)
        assert float(plus_minus) == pytest.approx((cell.plus_minus or 0.0) * ours.factor, abs=1e-9), (
            task,
            method,
            name,
        )


def test_the_papers_number_is_found_under_both_names_of_the_maximum_probability():
    printed = {
        ("dnn", "auroc/noise"): "0.981 ±0.014",  # the paper has it with its score, our main table without
        ("isomax-plus", "auroc/svhn/max_probability"): "0.959 ±0.006",  # the other way round
        ("sngp", "auroc/cifar100"): "0.902 ±0.003",  # two tables that differ: each keeps its own
        ("sngp", "auroc/cifar100/max_probability"): "0.905 ±0.002",
        ("isomax-plus", "auroc/svhn/dempster_shafer"): "",
    }
    assert {key: format_from_paper("cifar10", key[0], column(key[1])) for key in printed} == printed


def test_no_number_of_the_paper_for_other_tasks_methods_columns():
    assert format_from_paper("cifar10", "sngp", column("auroc/svhn")) == "0.960 ±0.004"
    for task, method, name in (
        ("digits", "sngp", "auroc/svhn"),
        ("cifar10", "x", "auroc/svhn"),
        ("cifar10", "sngp", "y"),
    ):
        assert format_from_paper(task, method, column(name)) == ""


# Markdown and LaTeX


@pytest.fixture
def table():
    values = {NASTY: {"a/b": [0.5, 0.7], "c": [1.0]}, "other": {"a/b": [0.1]}}
    columns = [
        Column("a/b", "A_%", "b&", math.inf),
        Column("c", "A_%", "c", -math.inf),
        Column("a/b", "other", "", 0.95),
    ]
    return make_table(
        "t", "Title_1", values, columns[:2], printed=lambda row, c: ".3 ±.1" if row == "other" else "", note="50%"
    )


def test_markdown_is_one_grid(table):
    lines = [line for line in markdown(table).splitlines() if line.startswith("|")]
    columns = [len(re.findall(r"(?<!\\)\|", line)) for line in lines]
    assert len(lines) == 2 + 3
    assert set(columns) == {5}
    assert escape_markdown(NASTY) in lines[2]
    assert "**0.600 ±0.141**" in lines[2]
    assert lines[3].split("|")[3].strip() == "0.100"
    assert "*.3 ±.1*" in lines[4]


def test_latex_is_one_grid_and_escaped(table):
    text = latex(table, "T/1", "task_1")
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    body = [line for line in rows if r"\multicolumn" not in line]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {3}
    assert escape_latex(NASTY) in text
    assert r"\textbf{0.600} $\pm$0.141" in text
    assert r"\textit{.3 $\pm$.1}" in text
    assert r"\label{tab:t-1}" in text
    for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"\cmidrule(lr){3-4}"):
        assert rule in text


@given(st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126)))
def test_no_special_character_survives_latex(text: str):
    escaped = escape_latex(text)
    bare = re.sub(r"\\text[a-z]+\{\}|\\[&%$#_{}]", "", escaped)
    assert not set(bare) & set("\\&%$#_{}~^<>")


def test_arrows_show_the_goal():
    assert (up.arrow, down.arrow, Column("x", "X", "x", 0.95).arrow, Column("x", "X", "x").arrow) == (
        "↑",
        "↓",
        "→ 0.95",
        "",
    )
