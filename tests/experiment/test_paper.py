"""The paper's tables: well formed, and number for number what the paper's own source says."""

import math
import re
from collections import Counter
from dataclasses import FrozenInstanceError
from functools import cache
from pathlib import Path

import pytest

from afield.experiment.metric_name import MetricName
from afield.experiment.paper import METHOD_OF, TABLES, Cell, Table
from afield.registry import UnknownName

SOURCE = Path(__file__).resolve().parents[3] / "shared" / "paper" / "sngp.tex"
WORDS_ONLY = "tab:methods"
SETTINGS = ("tb:hyper_param_default", "tb:hyper_param")
RESULTS = list(dict.fromkeys(table.label for table in TABLES.values() if table.label not in SETTINGS))
NUMBER = re.compile(r"(\d+\.\d+)\s*\$\\pm\$\s*(\d+\.\d+)")


# The data by itself


@pytest.mark.parametrize("name", TABLES)
def test_rows_have_exactly_the_columns(name: str) -> None:
    table = TABLES[name]
    names = [column.name for column in table.columns]
    assert table.rows
    assert len(set(names)) == len(names)
    assert all(list(row.cells) == names for row in table.rows)
    assert max(Counter(row.method for row in table.rows).values()) == 1


@pytest.mark.parametrize("name", TABLES)
def test_numbers_are_in_range(name: str) -> None:
    for row in TABLES[name].rows:
        for column, cell in row.cells.items():
            metric = MetricName.parse(column).metric
            if metric in ("accuracy", "auroc", "aupr"):
                assert 0.4 < cell.mean <= 1, (row.method, column)
            elif metric == "ece":
                assert 0 < cell.mean < 1, (row.method, column)
            else:
                assert cell.mean > 0, (row.method, column)
            assert cell.plus_minus is None or 0 <= cell.plus_minus < min(0.12, cell.mean), (row.method, column)


@pytest.mark.parametrize("name", TABLES)
def test_direction_and_plus_minus_go_with_the_kind_of_table(name: str) -> None:
    table = TABLES[name]
    better = {"accuracy": True, "auroc": True, "aupr": True, "ece": False, "nll": False}
    assert all(column.higher_is_better is better.get(MetricName.parse(column.name).metric) for column in table.columns)
    settings = table.label in SETTINGS
    assert all((column.higher_is_better is None) == settings for column in table.columns)
    assert all((cell.plus_minus is None) == settings for row in table.rows for cell in row.cells.values())
    assert table.task is None or name.split("-")[0] == table.task


def test_accuracies_are_fractions() -> None:
    assert TABLES["cifar10"].cell("sngp", "accuracy/clean") == Cell(0.957, 0.0014)
    assert TABLES["cifar10"].cell("sngp", "ece/clean") == Cell(0.017, 0.003)


def test_a_missing_number_is_none() -> None:
    assert TABLES["imagenet"].cell("duq-gp", "accuracy/clean") is None
    assert TABLES["imagenet"].cell("sngp", "auroc/svhn") is None


def test_an_unknown_table_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"Unknown table of the paper 'cifar-10'. Did you mean 'cifar10'"):
        TABLES["cifar-10"]


def test_tables_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        TABLES["cifar10"].task = "cifar100"  # type: ignore[misc]


def test_every_name_of_the_paper_is_used() -> None:
    assert {row.paper_name for table in TABLES.values() for row in table.rows} == set(METHOD_OF)


# Against the paper's source


@cache
def source() -> str:
    if not SOURCE.is_file():
        pytest.skip(f"needs the paper's source at {SOURCE}")
    return SOURCE.read_text(encoding="utf-8")


@cache
def floats() -> dict[str, str]:
    """Label -> text of every table environment of the paper."""
    bodies = re.findall(r"\\begin\{table\}(.*?)\\end\{table\}", source(), flags=re.DOTALL)
    found = {re.findall(r"\\label\{(.*?)\}", body)[-1]: body for body in bodies}
    assert len(found) == len(bodies)
    return found


def plain(tex: str) -> str:
    """A cell's text: acronyms spelled as the paper prints them, markup gone."""
    acronyms = dict(re.findall(r"\\newacronym\{(.*?)\}\{(.*?)\}", source()))
    tex = re.sub(r"\\(midrule|hline|toprule|bottomrule)|\\glsunset\{.*?\}|\\multi(column|row)\{.*?\}\{.*?\}", "", tex)
    tex = re.sub(r"\\gls\{(.*?)\}", lambda match: acronyms[match[1]], tex)
    return re.sub(r"\\textbf|[{}]", "", tex).strip()


def tex_rows(label: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """(method, [(mean, plus-minus), ...]) of every line that holds numbers, in order."""
    lines = [line for line in floats()[label].split(r"\\") if r"\pm" in line]
    return [(plain(line.split("&")[0]), NUMBER.findall(line)) for line in lines]


def tables_of(label: str) -> list[Table]:
    return [table for table in TABLES.values() if table.label == label]


def fraction(column: str, printed: str) -> float:
    return float(printed) / 100 if column.startswith("accuracy") else float(printed)


def test_no_table_of_the_paper_is_missing() -> None:
    assert set(floats()) == {table.label for table in TABLES.values()} | {WORDS_ONLY}
    assert r"\pm" not in floats()[WORDS_ONLY]


@pytest.mark.parametrize("label", RESULTS)
def test_results_are_the_papers_row_for_row(label: str) -> None:
    ours = [row for table in tables_of(label) for row in table.rows]
    theirs = tex_rows(label)
    assert [row.paper_name for row in ours] == [name for name, _ in theirs]
    assert sum(len(numbers) for _, numbers in theirs) == floats()[label].count(r"\pm")
    for row, (name, numbers) in zip(ours, theirs, strict=True):
        for (column, cell), (mean, plus_minus) in zip(row.cells.items(), numbers, strict=True):
            assert cell.plus_minus is not None
            assert math.isclose(cell.mean, fraction(column, mean), abs_tol=1e-9), (name, column)
            assert math.isclose(cell.plus_minus, fraction(column, plus_minus), abs_tol=1e-9), (name, column)


@pytest.mark.parametrize("label", RESULTS)
def test_columns_are_the_papers_in_order_and_direction(label: str) -> None:
    if label == "tab:cifar-ood":
        heads = [plain(cell) for cell in floats()[label].split(r"\\")[0].split(r"\toprule")[1].split("&")[1:]]
        assert heads == ["MSP", "Dempster Shafer", "Mahalanobis", "Relative Mahalanobis"]
        scores = [["max_probability", "dempster_shafer", "mahalanobis", "relative_mahalanobis"]] * 6
        assert [
            [MetricName.parse(column.name).score for column in table.columns] for table in tables_of(label)
        ] == scores
        return
    [table] = tables_of(label)
    head = floats()[label].split(r"\midrule")[0]
    arrows = re.findall(r"(Acc|ECE|NLL|AUROC|AUPR)[^$]*\(\$\\(up|down)arrow\$\)", head)
    theirs = [({"Acc": "accuracy"}.get(metric, metric.lower()), arrow == "up") for metric, arrow in arrows]
    ours = [(MetricName.parse(column.name).metric, column.higher_is_better) for column in table.columns]
    assert list(dict.fromkeys(ours)) == theirs
    shifts = re.findall("Clean|Corrupted", re.sub(r"(Acc|ECE) / c\1", "Clean Corrupted", head))
    parts = [MetricName.parse(column.name).data for column in table.columns]
    assert [part for part in parts if part in ("clean", "corrupted")] == [shift.lower() for shift in shifts]
    if "SVHN" in head:
        pair = re.search(r"SVHN\s*[&/]\s*CIFAR-(\d+)", head)
        assert pair is not None
        assert [column.name for column in table.columns[-2:]] == ["auroc/svhn", f"auroc/cifar{pair[1]}"]


def test_pairs_of_the_score_tables_are_the_papers() -> None:
    names = {
        "Random Gaussian": "noise",
        "DTD": "dtd",
        "SVHN": "svhn",
        "CIFAR-10": "cifar10",
        "CIFAR-100": "cifar100",
    }
    theirs = re.findall(r"\{4\}\{c\}\{(CIFAR-\d+) vs\.? (.*?) ?\}", floats()["tab:cifar-ood"])
    tables = tables_of("tab:cifar-ood")
    assert [(table.task, MetricName.parse(table.columns[0].name).data) for table in tables] == [
        (names[inside], names[outside]) for inside, outside in theirs
    ]


def test_settings_by_task_are_the_papers() -> None:
    lines = [line.split("&") for line in floats()["tb:hyper_param"].split(r"\\") if line.count("&") == 2][1:]
    tables = tables_of("tb:hyper_param")
    assert [table.title for table in tables] == [plain(line[0]) for line in lines]
    for table, (_, bound, amplitudes) in zip(tables, lines, strict=True):
        variants = re.findall(r"([\d.]+)(?: \(\+(\w+)\))?", amplitudes)
        theirs = [("sngp" + (f"-{name.lower()}" if name else ""), float(bound), float(a)) for a, name in variants]
        assert [(row.method, row.cells["bound"].mean, row.cells["amplitude"].mean) for row in table.rows] == theirs


def test_default_settings_are_the_papers() -> None:
    [table] = tables_of("tb:hyper_param_default")
    words = {
        "power_iterations": r"Power Iteration\s*&\s*([\d.]+)",
        "num_random_features/bert": r"Hidden Dimension\s*&\s*(\d+) \{\\tiny \(BERT\)\}",
        "num_random_features/otherwise": r"/ (\d+) \{\\tiny \(Otherwise\)\}",
        "length_scale": r"Length-scale Parameter\s*&\s*([\d.]+)",
        "ridge": r"Ridge Factor\}\s*&\s*([\d.]+)",
        "momentum": r"Discount Factor\}\s*&\s*([\d.]+)",
    }
    theirs = {}
    for column, pattern in words.items():
        [number] = re.findall(pattern, floats()[table.label])
        theirs[column] = Cell(float(number))
    assert table.rows[0].cells == theirs
