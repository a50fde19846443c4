"""`python -m bench.torture`: inject faults for a given time, print the table, and fail if any was not met rightly."""

import argparse
import os
import sys
import time
from collections import Counter

from bench.torture import record, supervise
from bench.torture.fault import Outcome
from bench.torture.kinds import KINDS

SHOWN = 10  # failures of a kind that are told, and recorded


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.torture", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="for all kinds together, by their shares")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--only", type=int, metavar="NUMBER", help="the fault of this number alone, of each kind")
    parser.add_argument("--record", action="store_true", help="write results/torture.json and docs/reliability.md")
    given = parser.parse_args()
    started, shares = time.monotonic(), sum(KINDS[name].share for name in given.kinds)
    counts: dict[str, Counter[str]] = {}
    failures: list[str] = []
    failed_in_all = 0
    for name in given.kinds:
        seconds = given.seconds * KINDS[name].share / shares
        counts[name], failed = run_kind(name, given.seed, seconds=seconds, only=given.only)
        failed_in_all, failures = failed_in_all + len(failed), failures + failed[:SHOWN]
    command = " ".join(["python -m bench.torture", *sys.argv[1:]])
    made = record.make_record(counts, time.monotonic() - started, command, failures)
    print(f"\n{record.table(made)}")
    if given.record:
        record.write(made)
    if failed_in_all:
        raise SystemExit(f"\n{failed_in_all} faults were lost or silently wrong.")


def run_kind(name: str, seed: int, *, seconds: float, only: int | None = None) -> tuple[Counter[str], list[str]]:
    """Inject faults of a kind; counts of outcomes, and the failures with the way to see each again."""
    count: Counter[str] = Counter()
    failures: list[str] = []
    choice = {} if only is None else {"first": only, "most": 1}
    started, shown = time.monotonic(), 0.0
    for number, result in supervise.inject(name, seed, seconds=seconds, **choice):
        count[result.outcome] += 1
        if result.outcome in (Outcome.LOST, Outcome.WRONG):
            again = f"python -m bench.torture --kinds {name} --seed {seed} --only {number}"
            failures.append(f"{name} {number}, {result.outcome}: {result.text}\n    again: {again}")
        elif only is not None and result.text:
            print(f"{name} {number}, {result.outcome}: {result.text}")
        if sys.stdout.isatty() and time.monotonic() - shown > 0.2:
            shown = time.monotonic()
            print(f"\r{_line(name, count, shown - started)}", end="", flush=True)
    print(("\r" if sys.stdout.isatty() else "") + _line(name, count, time.monotonic() - started), flush=True)
    for failure in failures[:SHOWN]:
        print(f"  {failure[:800]}", flush=True)
    if len(failures) > SHOWN:
        print(f"  and {len(failures) - SHOWN} more", flush=True)
    return count, failures


def _line(name: str, count: Counter[str], seconds: float) -> str:
    outcomes = ", ".join(f"{count[outcome]:,} {outcome}" for outcome in Outcome)
    return f"{name:8} {count.total():>7,} in {seconds:4.0f} s: {outcomes}"


if __name__ == "__main__":
    os.environ.update(supervise.ENVIRONMENT)
    main()
