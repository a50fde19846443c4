"""The section of a report on one task: its tables, statements and pictures, in the order of the page."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afield.experiment import run_folder
from afield.experiment.run_folder import Run
from afield.report import columns
from afield.report.claims import Leader, Statement, claims_far_from_data, leaders
from afield.report.decisions import PolicyResults, decision_table, draw_decisions, evaluate_policies
from afield.report.groups import Group, read_predictions
from afield.report.plots import Picture
from afield.report.tables import Table

FIRST = ("surfaces", "line")  # pictures that come before the scores
_OWN = ("task", "method", "seed", "data_seed")


@dataclass(frozen=True)
class Section:
    """Everything that the report has on one task."""

    task: str
    slug: str
    groups: Sequence[Group]
    main: Table
    far: Table | None
    claims: Sequence[Sequence[Statement]]
    exact: Table | None
    scores: Sequence[Table]
    p_values: Table | None
    all: Table
    pictures: Sequence[Picture]
    root: Path
    decisions: Table | None = None

    @property
    def tables(self) -> list[Table]:
        several = [self.main, self.far, self.exact, *self.scores, self.p_values, self.decisions]
        return [table for table in several if table is not None]

    @property
    def early(self) -> list[Picture]:
        return [picture for picture in self.pictures if picture.name in FIRST]

    @property
    def late(self) -> list[Picture]:
        return [picture for picture in self.pictures if picture.name not in FIRST]

    @property
    def about(self) -> str:
        count = len(self.runs)
        methods = len({group.method for group in self.groups})
        presets = sorted({str(run.config.get("preset", "")) for group in self.groups for run in group.runs} - {""})
        about = f"{methods} method{'s' * (methods != 1)}, {count} run{'s' * (count != 1)}"
        return about + (f", preset {' and '.join(presets)}" if presets else "")

    @property
    def leaders(self) -> list[Leader]:
        return leaders(self.main)

    @property
    def contents(self) -> list[tuple[str, str]]:
        """(id, text) of what the table of contents lists."""
        listed = [("results", self.main.title)]
        listed += [("far", self.far.title)] if self.far else []
        listed += [(p.name, p.title) for p in self.early]
        listed += [("exact", self.exact.title)] if self.exact else []
        listed += [(table.name, table.title) for table in self.scores]
        listed += [("p-values", self.p_values.title)] if self.p_values else []
        listed += [("decisions", self.decisions.title)] if self.decisions else []
        listed += [(p.name, p.title) for p in self.late]
        return [(f"{self.slug}-{slugify(name)}", text) for name, text in [*listed, ("details", "Details")]]

    @property
    def runs(self) -> list[dict[str, Any]]:
        return [_describe_run(run, self.root) for group in self.groups for run in group.runs]

    @property
    def common(self) -> dict[str, Any]:
        configs = [run.config for group in self.groups for run in group.runs]
        keys = [key for key in configs[0] if key not in _OWN]
        return {key: configs[0][key] for key in keys if all(config.get(key) == configs[0][key] for config in configs)}

    @property
    def differing(self) -> list[str]:
        keys = dict.fromkeys(key for group in self.groups for run in group.runs for key in run.config)
        return [key for key in keys if key not in (*_OWN, *self.common)]


def slugify(text: str) -> str:
    """Turn a text into a name for anchors, labels and files."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def make_section(task: str, slug: str, groups: Sequence[Group], pictures: Sequence[Picture], root: Path) -> Section:
    """Make the tables and statements; the picture of risks is drawn again with the points that policies choose."""
    far = columns.far_table(task, groups)
    decided = {group.name: _evaluate_policies(group) for group in groups}
    marked = draw_decisions(task, groups, decided) if pictures else None
    pictures = [marked if marked is not None and picture.name == marked.name else picture for picture in pictures]
    return Section(
        task,
        slug,
        groups,
        columns.main_table(task, groups),
        far,
        claims_far_from_data(groups, _num_classes(groups)) if far else [],
        columns.against_exact(task, groups),
        columns.score_tables(task, groups),
        columns.p_value_table(task, groups),
        columns.all_metrics(task, groups),
        pictures,
        root,
        decision_table(groups, decided),
    )


def _evaluate_policies(group: Group) -> list[PolicyResults]:
    """The results of every run that has what policies need."""
    there = [run for run in group.runs if (run.folder / run_folder.PREDICTIONS).is_file()]
    # Read anew, so that no predictions stay in memory.
    results = [evaluate_policies(run_folder.read(run.folder)) for run in there]
    return [result for result in results if result is not None]


def _num_classes(groups: Sequence[Group]) -> int | None:
    """The number of classes in the first predictions that there are; None for real targets."""
    each = next((each for group in groups if (each := read_predictions(group)) is not None), None)
    return None if each is None or each.test.probs is None else each.test.probs.shape[1]


def _describe_run(run: Run, root: Path) -> dict[str, Any]:
    """Where a run is, its seeds, and how and when it was made."""
    where = run.environment
    return {
        "folder": run.folder.relative_to(root).as_posix() if run.folder.is_relative_to(root) else str(run.folder),
        "seed": run.seed,
        "data_seed": run.config.get("data_seed", 0),
        "versions": ", ".join(f"{name} {where[name]}" for name in ("afield", "torch", "python") if name in where),
        **{name: where.get(name, "") for name in ("begun", "ended", "machine", "command")},
    }
