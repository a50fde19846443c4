"""The runs behind a record, one line each, so that a record can grow: over days, and on several machines.

    runs.jsonl      config, metrics, cost and environment of every run; no model and no predictions

A run that is made again takes the place of its line; all others stay as they were. What is made of predictions (what
policies decide, errors against the exact process) is of the runs at hand alone.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from afield.errors import DamagedRun
from afield.experiment import run_folder
from afield.experiment.run_folder import Run

RUNS = "runs.jsonl"
_SAME = ("task", "method", "preset", "seed", "data_seed", "members")
_MEASURED = ("metrics", "cost")  # written without digits that say nothing


def add_runs(out: Path, made: Iterable[Run]) -> list[Run]:
    """Put the runs made into the record of a folder; returns all that it now holds."""
    runs = {_key(run): run for run in [*read_runs(out), *made]}
    ordered = [runs[key] for key in sorted(runs, key=str)]
    run_folder.write(out / RUNS, "".join(_line(run) + "\n" for run in ordered))
    return ordered


def read_runs(out: Path) -> list[Run]:
    """The runs in the record of a folder; none where there is no record."""
    file = out / RUNS
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    try:
        return [Run(folder=out, **json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise DamagedRun(f"{file} is damaged: {error}. Take it from version control again, or delete it.") from error


def _key(run: Run) -> tuple[Any, ...]:
    return tuple(run.config.get(name) for name in _SAME)


def _line(run: Run) -> str:
    values = {name: value for name, value in asdict(run).items() if name != "folder"}
    for name in _MEASURED:
        values[name] = {key: float(f"{value:.6g}") for key, value in values[name].items()}
    return json.dumps(values, sort_keys=True)
