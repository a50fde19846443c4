"""`afield report runs/`: all finished runs below a folder as one HTML file that needs nothing else.

    report/index.html    tables and pictures, pictures inside
    report/*.png         the pictures
    report/report.md     the tables in Markdown
    report/report.tex    the tables in LaTeX (booktabs, graphicx), to be \\input
    report/report.json   the tables as data

It reads run folders and nothing else. `index.html` is written last.
"""

import base64
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from afield import runs
from afield.apps import columns
from afield.apps.claims import Statement, about_far, leaders
from afield.apps.figures_curves import histograms, reliability, risk, roc
from afield.apps.figures_hidden import hidden
from afield.apps.figures_line import interval_reliability, line
from afield.apps.figures_plane import landscape, surfaces
from afield.apps.groups import Group, Shown, grouped, shown
from afield.apps.plots import Picture
from afield.apps.tables import Cell, Table
from afield.apps.typeset import escape_markdown, latex, markdown
from afield.batch import track
from afield.runs import Run
from afield.version import __version__

try:
    import tyro
    from jinja2 import Environment, StrictUndefined
except ImportError as error:
    raise ImportError(f'{error}. Reports need an extra: pip install "afield[cli]".') from error

DRAWINGS: tuple[Callable[[str, Sequence[Shown]], Picture | None], ...] = (
    *(surfaces, line, landscape, hidden, reliability, interval_reliability, histograms, roc, risk),
)
"""Each draws a task, or says None where the task has nothing of the kind."""


@dataclass(frozen=True)
class Report:
    """Write a report on all finished runs: one HTML file, with pictures and tables beside it."""

    runs: Annotated[Path, tyro.conf.Positional] = Path("runs")
    """Folder of the runs."""
    out: Path | None = None
    """Folder or .html file to write; RUNS/report if not given."""
    title: str = "Distance-aware uncertainty"
    """Heading."""

    def run(self) -> None:
        print(report(self.runs, self.out, title=self.title).resolve())


@dataclass(frozen=True)
class Section:
    """What is told of one task."""

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

    @property
    def tables(self) -> list[Table]:
        several = [self.main, self.far, self.exact, *self.scores, self.p_values]
        return [table for table in several if table is not None]

    @property
    def about(self) -> str:
        count = len(self.runs)
        methods = len({group.method for group in self.groups})
        presets = sorted({str(run.config.get("preset", "")) for group in self.groups for run in group.runs} - {""})
        about = f"{methods} method{'s' * (methods != 1)}, {count} run{'s' * (count != 1)}"
        return about + (f", preset {' and '.join(presets)}" if presets else "")

    @property
    def leaders(self) -> list[tuple[str, str, str]]:
        return leaders(self.main)

    @property
    def contents(self) -> list[tuple[str, str]]:
        """(id, text) of what the table of contents lists."""
        early = [p for p in self.pictures if p.name in ("surfaces", "line")]
        late = [p for p in self.pictures if p not in early]
        listed = [("results", self.main.title)]
        listed += [("far", self.far.title)] if self.far else []
        listed += [(p.name, p.title) for p in early]
        listed += [("exact", self.exact.title)] if self.exact else []
        listed += [(table.name, table.title) for table in self.scores]
        listed += [("p-values", self.p_values.title)] if self.p_values else []
        listed += [(p.name, p.title) for p in late]
        return [(f"{self.slug}-{name}", text) for name, text in [*listed, ("details", "Details")]]

    @property
    def runs(self) -> list[dict[str, Any]]:
        return [_told(run, self.root) for group in self.groups for run in group.runs]

    @property
    def common(self) -> dict[str, Any]:
        configs = [run.config for group in self.groups for run in group.runs]
        keys = [key for key in configs[0] if key not in ("task", "method", "seed", "data_seed")]
        return {key: configs[0][key] for key in keys if all(config.get(key) == configs[0][key] for config in configs)}

    @property
    def differing(self) -> list[str]:
        keys = dict.fromkeys(key for group in self.groups for run in group.runs for key in run.config)
        return [key for key in keys if key not in ("task", "method", "seed", "data_seed", *self.common)]


def report(root: Path, out: Path | None = None, *, title: str = Report.title) -> Path:
    """Write the report; returns the path of its HTML file."""
    found = runs.find(root)
    if not found:
        raise ValueError(
            f"There is no finished run below {root}. Make one with `afield train`, or name another folder."
        )
    page = root / "report" / "index.html" if out is None else out if out.suffix == ".html" else out / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    tasks, notes = grouped(found)
    jobs = _jobs(tasks)
    pictures: dict[str, list[Picture]] = {task: [] for task in tasks}
    for task, draw in track(jobs, "drawing", total=len(tasks) * len(DRAWINGS)):
        picture = draw()
        if picture is not None:
            pictures[task].append(picture)
    slugs = _slugs(list(tasks))
    sections = [_section(task, slugs[task], groups, pictures[task], root) for task, groups in tasks.items()]
    command = " ".join(["afield report", shlex.quote(str(root)), *(["--out", shlex.quote(str(out))] if out else [])])
    head = _head(found, title, command) | {"notes": notes}
    for section in sections:
        for picture in section.pictures:
            runs.write(page.parent / f"{section.slug}-{picture.name}.png", picture.png)
    runs.write(page.parent / "report.md", _markdown(sections, head))
    runs.write(page.parent / "report.tex", _latex(sections, head))
    runs.write_json(page.parent / "report.json", _data(sections, head))
    runs.write(page, _template().render(**head, sections=sections))
    return page


def _jobs(tasks: dict[str, list[Group]]) -> Iterator[tuple[str, Callable[[], Picture | None]]]:
    """One drawing at a time; the predictions of one task are in memory at a time."""
    for task, groups in tasks.items():
        predictions = [shown(group) for group in groups]
        for drawing in DRAWINGS:
            yield task, lambda drawing=drawing, task=task, drawn=predictions: drawing(task, drawn)  # type: ignore[misc]


def _section(task: str, slug: str, groups: Sequence[Group], pictures: Sequence[Picture], root: Path) -> Section:
    far = columns.far_table(task, groups)
    return Section(
        task,
        slug,
        groups,
        columns.main_table(task, groups),
        far,
        about_far(groups, _num_classes(groups[0])) if far else [],
        columns.against_exact(task, groups),
        columns.score_tables(task, groups),
        columns.p_value_table(task, groups),
        columns.all_metrics(task, groups),
        pictures,
        root,
    )


def _num_classes(group: Group) -> int | None:
    probs = runs.read(group.runs[0].folder).prediction("test").probs
    return None if probs is None else probs.shape[1]


def _head(found: Sequence[Run], title: str, command: str) -> dict[str, Any]:
    def seen(*names: str) -> str:
        values = {" ".join(str(run.environment.get(name, "?")) for name in names) for run in found}
        return ", ".join(sorted(values))

    return {
        "title": title,
        "made": datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0"),
        "machines": seen("machine"),
        "versions": "; ".join(f"{name} {seen(name)}" for name in ("afield", "torch", "numpy", "python")),
        "command": command,
        "version": __version__,
        "number_of_runs": len(found),
        "number_of_methods": len({run.method for run in found}),
    }


def _told(run: Run, root: Path) -> dict[str, Any]:
    where = run.environment
    return {
        "folder": run.folder.relative_to(root).as_posix() if run.folder.is_relative_to(root) else str(run.folder),
        "seed": run.seed,
        "data_seed": run.config.get("data_seed", 0),
        "versions": ", ".join(f"{name} {where[name]}" for name in ("afield", "torch", "python") if name in where),
        **{name: where.get(name, "") for name in ("begun", "ended", "machine", "command")},
    }


def _markdown(sections: Sequence[Section], head: dict[str, Any]) -> str:
    parts = [f"# {escape_markdown(head['title'])}\n", f"{head['made']}. {head['versions']}. `{head['command']}`\n"]
    parts.append("Mean over runs ± standard deviation; bold: best of the column as printed.\n")
    for section in sections:
        parts += [f"## {escape_markdown(section.task)}\n", f"{section.about}.\n"]
        for table in section.tables:
            parts.append(markdown(table))
            if table is section.far:
                parts += [escape_markdown(" ".join(map(str, claim))) + "\n" for claim in section.claims]
        parts += [
            f"![{escape_markdown(picture.alt)}]({section.slug}-{picture.name}.png)\n\n{escape_markdown(picture.caption)}\n"
            for picture in section.pictures
        ]
    return "\n".join(parts)


def _latex(sections: Sequence[Section], head: dict[str, Any]) -> str:
    lines = [f"% {head['title']}, {head['made']}", f"% {head['command']}", r"% \usepackage{booktabs,graphicx}", ""]
    comments = "\n".join(re.sub(r"\s+", " ", line) for line in lines)
    tables = [latex(table, f"{s.slug}-{table.name}", s.task) for s in sections for table in s.tables]
    return comments + "\n\n" + "\n".join(tables)


def _data(sections: Sequence[Section], head: dict[str, Any]) -> dict[str, Any]:
    tasks = {
        section.task: {
            "tables": {table.name: table.to_dict() for table in [*section.tables, section.all]},
            "claims": [" ".join(map(str, claim)) for claim in section.claims],
        }
        for section in sections
    }
    return {**head, "tasks": tasks}


def _slugs(tasks: Sequence[str]) -> dict[str, str]:
    """Names for files and anchors, each its own."""
    slugs: dict[str, str] = {}
    for task in tasks:
        slug = base = re.sub(r"[^a-z0-9]+", "-", task.lower()).strip("-") or "task"
        number = 2
        while slug in slugs.values():
            slug, number = f"{base}-{number}", number + 1
        slugs[task] = slug
    return slugs


def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["base64"] = lambda picture: base64.b64encode(picture.png).decode()
    environment.filters["tint"] = _tint
    source = resources.files("afield.apps").joinpath("report.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(source)


def _tint(cell: Cell) -> str:
    """How strongly an AUROC is shaded: not at all at 0.5, most at 1."""
    return f"{0.3 * min(max(2 * cell.mean - 1, 0.0), 1.0) ** 2:.3f}"
