"""Counts of faults: as a table, as a record, and on the page."""

import json
import platform
import re
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from afield.model.files import write_file
from afield.version import __version__
from bench.defaults import markdown
from bench.torture.fault import Outcome
from bench.torture.kinds import KINDS

ROOT = Path(__file__).parents[2]
RECORD, PAGE = ROOT / "results" / "torture.json", ROOT / "docs" / "reliability.md"
COLUMNS = ("injected", *Outcome)
_TABLE = re.compile(r"(<!-- results/torture\.json rows/\*/: [^\n]*-->\n\n)(?:\|[^\n]*\n)*")


def make_record(
    counts: Mapping[str, Counter[str]], seconds: float, command: str, failures: list[str]
) -> dict[str, Any]:
    total = sum(counts.values(), Counter[str]())
    rows = {
        name: {"injected": count.total(), **{outcome.value: count[outcome] for outcome in Outcome}}
        for name, count in {**counts, "all": total}.items()
    }
    return {
        "command": command,
        "seconds": round(seconds),
        "rows": rows,
        "failures": failures,
        "afield": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def table(record: Mapping[str, Any]) -> str:
    """Markdown: a row for each kind, and one for all."""
    head = ["kind", "fault", "injected", "survived", "refused with a message", "lost", "silently wrong"]
    rows = [
        [name, KINDS[name].what if name in KINDS else "", *(f"{row[column]:,}" for column in COLUMNS)]
        for name, row in record["rows"].items()
    ]
    return markdown([head, *rows], left=2)


def write(record: Mapping[str, Any]) -> None:
    """Keep the record, and put its table on the page."""
    write_file(RECORD, (json.dumps(record, indent=1) + "\n").encode())
    text = PAGE.read_text(encoding="utf-8")
    filled, times = _TABLE.subn(lambda match: f"{match[1]}{table(record)}\n", text)
    if times != 1:
        raise ValueError(f"{PAGE} should have one table of results/torture.json, found {times}.")
    write_file(PAGE, filled.encode())
