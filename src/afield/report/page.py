"""All finished runs below a folder as one HTML file that needs nothing else.

    report/index.html    tables and pictures, pictures inside
    report/*.png         the pictures
    report/report.md     the tables in Markdown
    report/report.tex    the tables in LaTeX (booktabs, graphicx), to be \\input
    report/report.json   the tables as data

It reads run folders and nothing else. `index.html` is written last. `record` writes the tables alone, and the runs
behind them (`recorded_runs`).
"""

import base64
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from afield.experiment import run_folder
from afield.experiment.run_folder import Run
from afield.model.progress import track
from afield.report.curves import draw_histograms, draw_reliability, draw_risk, draw_roc
from afield.report.groups import Group, GroupPredictions, group_runs, read_predictions
from afield.report.hidden import draw_hidden
from afield.report.line import draw_interval_reliability, draw_line
from afield.report.pixels import draw_pixels
from afield.report.plane import draw_landscape, draw_surfaces
from afield.report.plots import Picture
from afield.report.recorded_runs import add_runs
from afield.report.sections import Section, make_section, slugify
from afield.report.tables import Cell
from afield.report.typeset import escape_markdown, latex, markdown
from afield.version import __version__

try:
    from jinja2 import Environment, StrictUndefined
except ImportError as error:
    raise ImportError(f'{error}. Reports need an extra: pip install "afield[cli]".') from error

TITLE = "Distance-aware uncertainty"
DRAWINGS: tuple[Callable[[str, Sequence[GroupPredictions]], Picture | None], ...] = (
    draw_surfaces,
    draw_line,
    draw_landscape,
    draw_hidden,
    draw_reliability,
    draw_interval_reliability,
    draw_histograms,
    draw_roc,
    draw_risk,
)
"""Each draws one picture of a task, or returns None where the task has nothing of the kind."""


def report(root: Path, out: Path | None = None, *, title: str = TITLE) -> Path:
    """Write the report; returns the path of its HTML file."""
    tasks, notes = group_runs(_found(root))
    page = root / "report" / "index.html" if out is None else out if out.suffix == ".html" else out / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, list[Picture]] = {task: [] for task in tasks}
    for task, draw in track(_drawings(tasks), "drawing", total=len(tasks) * (len(DRAWINGS) + 1)):
        picture = draw()
        if picture is not None:
            pictures[task].append(picture)
    sections = _sections(tasks, pictures, root)
    head = _head(sections, title, [str(root), *["--out", str(out)] * (out is not None)])
    head |= {"notes": [*notes, *_without_predictions(tasks)]}
    for section in sections:
        for picture in section.pictures:
            run_folder.write(page.parent / f"{section.slug}-{picture.name}.png", picture.png)
    run_folder.write(page.parent / "report.tex", _latex(sections, head))
    _write_tables(page.parent, sections, head)
    run_folder.write(page, _template().render(**head, sections=sections))
    return page


def record(root: Path, out: Path, *, title: str = TITLE) -> Path:
    """Write report.md and report.json without pictures, to be kept under version control; returns the first's path.

    Runs that the record holds and `root` does not stay in it.
    """
    found = _found(root)
    out.mkdir(parents=True, exist_ok=True)
    tasks, notes = group_runs(add_runs(out, found))
    sections = _sections(tasks, {task: [] for task in tasks}, root)
    head = _head(sections, title, [str(root), "--record", str(out)])
    return _write_tables(out, sections, head | {"notes": notes})


def _found(root: Path) -> list[Run]:
    """The finished runs below a folder."""
    found = run_folder.find(root)
    if not found:
        raise ValueError(
            f"There is no finished run below {root}. Make one with `afield train`, or name another folder."
        )
    return found


def _sections(
    tasks: Mapping[str, Sequence[Group]], pictures: Mapping[str, Sequence[Picture]], root: Path
) -> list[Section]:
    slugs = _slugs(list(tasks))
    return [make_section(task, slugs[task], groups, pictures[task], root) for task, groups in tasks.items()]


def _write_tables(folder: Path, sections: Sequence[Section], head: dict[str, Any]) -> Path:
    run_folder.write(folder / "report.md", _markdown(sections, head))
    # On one line: with each number on its own it is twice as long, above a megabyte for a suite.
    run_folder.write(folder / "report.json", json.dumps(_data(sections, head)) + "\n")
    return folder / "report.md"


def _drawings(tasks: Mapping[str, Sequence[Group]]) -> Iterator[tuple[str, Callable[[], Picture | None]]]:
    """All pictures that may be drawn, by task; the predictions of one task are in memory at a time."""
    for task, groups in tasks.items():
        predictions = [each for group in groups if (each := read_predictions(group)) is not None]
        for drawing in DRAWINGS:
            yield task, partial(drawing, task, predictions)
        yield task, partial(draw_pixels, task, groups)


def _without_predictions(tasks: Mapping[str, Sequence[Group]]) -> list[str]:
    first = [group.runs[0].folder for groups in tasks.values() for group in groups]
    missing = [folder for folder in first if not (folder / run_folder.PREDICTIONS).is_file()]
    return [f"No picture shows {folder}, which has no {run_folder.PREDICTIONS}; the tables do." for folder in missing]


def _head(sections: Sequence[Section], title: str, arguments: Sequence[str]) -> dict[str, Any]:
    runs = [run for section in sections for group in section.groups for run in group.runs]

    def values_of(name: str) -> str:
        return ", ".join(sorted({str(run.environment.get(name, "unknown")) for run in runs}))

    return {
        "title": title,
        "made": datetime.now(UTC).strftime("%d %B %Y, %H:%M UTC").lstrip("0"),
        "machines": values_of("machine"),
        "versions": "; ".join(f"{name} {values_of(name)}" for name in ("afield", "torch", "numpy", "python")),
        "command": shlex.join(["afield", "report", *arguments, *["--title", title] * (title != TITLE)]),
        "version": __version__,
        "number_of_runs": len(runs),
        "number_of_methods": len({run.method for run in runs}),
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
            "settings": section.common,
            "own_settings": {g.name: {k: g.runs[0].config.get(k) for k in section.differing} for g in section.groups},
        }
        for section in sections
    }
    return {**head, "tasks": tasks}


def _slugs(tasks: Sequence[str]) -> dict[str, str]:
    """Names for files and anchors, each its own."""
    slugs: dict[str, str] = {}
    for task in tasks:
        name, number = slugify(task), 2
        while name in slugs.values():
            name, number = f"{slugify(task)}-{number}", number + 1
        slugs[task] = name
    return slugs


def _template() -> Any:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["base64"] = lambda picture: base64.b64encode(picture.png).decode()
    environment.filters["tint"] = _tint
    environment.filters["slug"] = slugify
    source = resources.files("afield.report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(source)


def _tint(cell: Cell) -> str:
    """How strongly an AUROC is shaded: not at all at 0.5, most at 1."""
    return f"{0.3 * min(max(2 * cell.mean - 1, 0.0), 1.0) ** 2:.3f}"
