"""Tables of a report: rows are methods, columns are metrics, a cell is the mean and standard deviation over runs.

The standard deviation (n - 1) is over the runs of a row. A column has a goal: inf where more is better, -inf
where less is, a number where nearest is best (interval coverage: 0.95), None where nothing is. Cells that are best
*as printed* are marked: a tie within rounding is a tie. Accuracies are printed in percent, as the paper prints them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import Any

from afield.experiment import paper
from afield.experiment.metric_name import MetricName

MAX_PROBABILITY = "max_probability"  # the paper's score where a column of it names none
Values = Mapping[str, Sequence[float]]
"""By column: one value a run."""


@dataclass(frozen=True)
class Column:
    """`name` as in metrics.json; `above` is the heading that neighbours share; the goal is in printed units."""

    name: str
    above: str
    title: str
    goal: float | None = None
    decimals: int | None = None
    factor: float = 1.0

    @property
    def label(self) -> str:
        """Both headings in one; `clean`, the test set as it is, goes without saying."""
        return self.above if self.title in ("", "clean") else f"{self.above}: {self.title}"

    @property
    def arrow(self) -> str:
        if self.goal is None:
            return ""
        return {math.inf: "↑", -math.inf: "↓"}.get(self.goal, f"→ {self.goal:g}")


@dataclass(frozen=True)
class Cell:
    """Mean and standard deviation in the column's unit (percent for accuracies), and how they are printed."""

    mean: float
    std: float | None
    count: int
    decimals: int
    best: bool = False
    paper: str = ""

    @property
    def text(self) -> str:
        return format_number(self.mean, self.decimals)

    @property
    def std_text(self) -> str:
        return "" if self.std is None else "±" + format_number(self.std, self.decimals)


@dataclass(frozen=True)
class Row:
    name: str
    count: int
    cells: Mapping[str, Cell]


@dataclass(frozen=True)
class Table:
    """`note` says what is to be known about it, in one or more sentences."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    note: str = ""
    head: str = "method"

    @property
    def headings(self) -> list[tuple[str, int]]:
        """The upper headings, each with the number of columns it spans."""
        spans: list[tuple[str, int]] = []
        for column in self.columns:
            if spans and spans[-1][0] == column.above:
                spans[-1] = (column.above, spans[-1][1] + 1)
            else:
                spans.append((column.above, 1))
        return spans

    @property
    def has_paper(self) -> bool:
        return any(cell.paper for row in self.rows for cell in row.cells.values())

    def has_std(self, column: str) -> bool:
        """Whether any cell of the column, ours or the paper's, prints a ±: then all leave room for one."""
        cells = [row.cells[column] for row in self.rows if column in row.cells]
        return any(cell.std is not None or "±" in cell.paper for cell in cells)

    def best(self, column: str) -> list[Row]:
        """The rows whose cell is marked."""
        return [row for row in self.rows if column in row.cells and row.cells[column].best]

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON; `spread` is what the records call the standard deviation."""
        rows = {
            row.name: {
                name: {"mean": cell.mean, "spread": cell.std, "runs": cell.count, "best": cell.best}
                | ({"paper": cell.paper} if cell.paper else {})
                for name, cell in row.cells.items()
            }
            for row in self.rows
        }
        return {"title": self.title, "columns": [column.name for column in self.columns], "rows": rows}


def make_table(
    name: str,
    title: str,
    values: Mapping[str, Values],
    columns: Sequence[Column],
    *,
    counts: Mapping[str, int] | None = None,
    printed: Callable[[str, Column], str] = lambda row, column: "",
    note: str = "",
) -> Table:
    """Make a table of the values by row; columns without any value are left out, and so are rows without any.

    counts   number of runs by row; the largest number of values if it is not given
    printed  the paper's number for a row and a column, as text
    """
    kept = [column for column in columns if any(by_column.get(column.name) for by_column in values.values())]
    cells: dict[str, dict[str, Cell]] = {row: {} for row in values}
    for column in kept:
        by_row = {row: by_column[column.name] for row, by_column in values.items() if by_column.get(column.name)}
        means = {row: column.factor * fmean(v) for row, v in by_row.items()}
        decimals = _decimals(column, means.values())
        winners = best({row: round(mean, decimals) for row, mean in means.items()}, column.goal)
        for row, v in by_row.items():
            std = column.factor * stdev(v) if len(v) > 1 else None
            cells[row][column.name] = Cell(means[row], std, len(v), decimals, row in winners, printed(row, column))
    rows = tuple(
        Row(row, (counts or {}).get(row, max(cell.count for cell in found.values())), found)
        for row, found in cells.items()
        if found
    )
    return Table(name, title, tuple(kept), rows, note)


def best(values: Mapping[str, float], goal: float | None) -> set[str]:
    """The names of the best values; none where there is nothing to compare."""
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    if goal is None or len(values) < 2 or not finite:
        return set()
    gaps = {name: -math.copysign(1, goal) * v if math.isinf(goal) else abs(v - goal) for name, v in finite.items()}
    least = min(gaps.values())
    return {name for name, gap in gaps.items() if math.isclose(gap, least, rel_tol=1e-12, abs_tol=1e-12)}


def format_number(value: float, decimals: int) -> str:
    """Write a number with a fixed number of decimals; a very large one in powers of ten."""
    if not math.isfinite(value):
        return str(value)
    if decimals and abs(value) >= 1e6:
        return f"{value:.2e}"
    return f"{round(value, decimals) + 0.0:,.{decimals}f}"  # + 0.0: no minus zero


def find_in_paper(task: str, method: str, column: str) -> tuple[paper.Table, paper.Cell] | None:
    """The paper's number for a cell of ours, and the table that it is from; sngp-paper is its SNGP, too."""
    method, name, names = method.removesuffix("-paper"), MetricName.parse(column), [column]
    if name.data == "clean":  # the paper's tables leave out what is the only part
        names.append(name.metric)
    if name.metric == "auroc" and name.score in ("", MAX_PROBABILITY):  # two names of one thing
        names.append(str(replace(name, score="" if name.score else MAX_PROBABILITY)))
    tables = [table for table in paper.TABLES.values() if table.task == task]
    found = ((table, table.cell(method, name)) for name in names for table in tables)
    return next(((table, cell) for table, cell in found if cell is not None), None)


def format_from_paper(task: str, method: str, column: Column) -> str:
    """The paper's number for a cell of ours as it is printed, or an empty text."""
    found = find_in_paper(task, method, column.name)
    if found is None:
        return ""
    digits = 1 if column.factor != 1 else 3
    mean, plus_minus = found[1].mean * column.factor, found[1].plus_minus
    text = _with_digits(mean, digits)
    return text if plus_minus is None else f"{text} ±{_with_digits(plus_minus * column.factor, digits)}"


def _with_digits(value: float, digits: int) -> str:
    """The shortest decimal form that has at least so many digits after the point."""
    short = f"{round(value, 6):f}".rstrip("0")
    return short if len(short.partition(".")[2]) >= digits else f"{value:.{digits}f}"


def _decimals(column: Column, means: Any) -> int:
    if column.decimals is not None:
        return column.decimals
    finite = [abs(mean) for mean in means if math.isfinite(mean)]
    return 4 if finite and median(finite) < 0.01 else 3
