"""`afield report`: a page on all finished runs below a folder."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from afield.report import record, report
from afield.report.page import TITLE


@dataclass(frozen=True)
class Report:
    """Write a report on all finished runs: one HTML file, with pictures and tables beside it."""

    runs: tyro.conf.Positional[Path] = Path("runs")
    """Folder of the runs."""
    out: Path | None = None
    """Folder or .html file to write; RUNS/report if not given."""
    record: Path | None = None
    """Write to this folder instead, and the tables alone: report.md and report.json, for version control. Runs that
    it has already (runs.jsonl) and that are not below RUNS stay in it."""
    title: str = TITLE
    """Heading."""

    def run(self) -> None:
        if self.record is not None:
            print(record(self.runs, self.record, title=self.title).resolve())
        else:
            print(report(self.runs, self.out, title=self.title).resolve())
