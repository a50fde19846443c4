"""What the metrics say, in plain sentences that are made from the metrics alone.

The limits are stated in the sentences: confidence half-way between a guess, 1 / K, and certainty; a rank correlation of
one half; an AUROC of 0.95, and of 0.5, which is chance.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from afield.experiment.metric_name import MetricName
from afield.report.columns import SPEARMAN, display_name, ood_sets, paper_score_of
from afield.report.groups import Group
from afield.report.tables import Table

CLOSE, CORRELATED, CHANCE = 0.95, 0.5, 0.5
Kinds = Mapping[str, Callable[[float], bool]]


@dataclass(frozen=True)
class Statement:
    """Something that holds of some methods, with the metric that shows it for each; the clearest case is first."""

    what: str
    holds_of: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        return f"{self.what}: {', '.join(f'{name} ({value:.2f})' for name, value in self.holds_of)}."


def claims_far_from_data(groups: Sequence[Group], num_classes: int | None) -> list[list[Statement]]:
    """Statements on confidence, rank correlation and detection far from the data, a paragraph each."""
    oods, paragraphs = ood_sets(groups), []
    confidence = mean_by_group(groups, [MetricName("confidence", ood) for ood in oods])
    if confidence and num_classes:
        limit = (1 + 1 / num_classes) / 2
        unsure = f"Unsure far away (mean confidence below {limit:g}, half-way between a guess and certainty)"
        kinds: Kinds = {unsure: lambda c: c < limit, "Sure far away": lambda c: c >= limit}
        paragraphs.append(sort_into_statements(confidence, kinds, falling=False))
    kinds = {
        f"Uncertainty grows with the distance to the training data (rank correlation of {CORRELATED:g} or more)": (
            lambda c: c >= CORRELATED
        ),
        "It does so weakly": lambda c: 0 < c < CORRELATED,
        "It does not, or falls": lambda c: c <= 0,
    }
    paragraphs.append(sort_into_statements(mean_by_group(groups, [SPEARMAN]), kinds))
    for ood in oods:
        kinds = {
            f"Tells “{ood}” from test data by {display_name(paper_score_of(groups))} (AUROC of {CLOSE:g} or more)": (
                lambda a: a >= CLOSE
            ),
            "In part": lambda a: CHANCE < a < CLOSE,
            "No better than chance": lambda a: a <= CHANCE,
        }
        paragraphs.append(sort_into_statements(mean_by_group(groups, [MetricName("auroc", ood)]), kinds))
    return [paragraph for paragraph in paragraphs if paragraph]


def mean_by_group(groups: Sequence[Group], names: Sequence[MetricName]) -> dict[str, float]:
    """The mean over runs and metrics, of the groups that have any."""
    found = {g.name: [value for name in names for value in g.values.get(str(name), [])] for g in groups}
    return {name: fmean(values) for name, values in found.items() if values}


def sort_into_statements(values: Mapping[str, float], kinds: Kinds, *, falling: bool = True) -> list[Statement]:
    """One statement a kind that holds of any, with values falling or rising."""
    statements = []
    for kind, belongs in kinds.items():
        members = [(name, value) for name, value in values.items() if belongs(value)]
        if members:
            ranked = sorted(members, key=lambda member: -member[1] if falling else member[1])
            statements.append(Statement(kind, tuple(ranked)))
    return statements


@dataclass(frozen=True)
class Leader:
    """Who is best by which metric; `more` others share the first place."""

    what: str
    value: str
    names: tuple[str, ...]
    more: int


def leaders(table: Table, most: int = 3) -> list[Leader]:
    """The best of the first column of every metric, costs aside; of a table with one row, that row."""
    found: dict[str, Leader] = {}
    for column in table.columns:
        name = MetricName.parse(column.name)
        rows = table.best(column.name) if len(table.rows) > 1 else [r for r in table.rows if column.name in r.cells]
        if rows and name.data and name.metric not in found:
            metric = display_name(name.metric)
            what = metric if name.data == "clean" else f"{metric}: {column.title}"
            names = tuple(row.name for row in rows)
            found[name.metric] = Leader(what, rows[0].cells[column.name].text, names[:most], len(names[most:]))
    return list(found.values())
