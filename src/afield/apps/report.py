"""`afield report`: a page on all finished runs below a folder."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from afield.report import report
from afield.report.page import TITLE


@dataclass(frozen=True)
class Report:
    """Write a report on all finished runs: one HTML file, with pictures and tables beside it."""

    runs: tyro.conf.Positional[Path] = Path("runs")
    """Folder of the runs."""
    out: Path | None = None
    """Folder or .html file to write; RUNS/report if not given."""
    title: str = TITLE
    """Heading."""

    def run(self) -> None:
        print(report(self.runs, self.out, title=self.title).resolve())
