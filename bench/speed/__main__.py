"""`python -m bench.speed`: run the measures, keep a record of each, then write the table."""

import argparse
import json
import platform

import torch

from afield.model.saving import write_file
from bench.defaults import ROOT, fill, markdown
from bench.speed import ensembles, networks, per_class, posterior  # noqa: F401 (they register their measures)
from bench.speed.measure import MEASURES, Missing

RECORDS, PAGES = ROOT / "bench" / "results", (ROOT / "README.md", ROOT / "docs" / "speed.md")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.speed", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MEASURES)}; none given: all")
    parser.add_argument("--missing", action="store_true", help="leave out what has a record")
    given = parser.parse_args()
    RECORDS.mkdir(exist_ok=True)
    for name in given.names or MEASURES:
        one, file = MEASURES[name], RECORDS / f"{name}.json"
        if given.missing and file.exists():
            continue
        print(f"{name}: {one.what} ...", flush=True)
        try:
            figures = {key: float(f"{value:.4g}") for key, value in one.run().items()}
        except Missing as missing:
            print(f"  left out: {missing}")
            continue
        record = {"measure": one.what, "target": one.wanted, "met": one.met(figures), **figures}
        record |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
        write_file(file, (json.dumps(record, indent=1) + "\n").encode())
        print(f"  {figures} target {one.wanted}: {'met' if one.met(figures) else 'MISSED'}", flush=True)
    text = table()
    for page in PAGES:
        fill(page, "speed", text)


def table() -> str:
    """Markdown: one row for each measure that has a record."""
    rows = [["measure", "target", "measured"]]
    for name, one in MEASURES.items():
        file = RECORDS / f"{name}.json"
        if file.exists():
            record = json.loads(file.read_text(encoding="utf-8"))
            value = record[one.figure]
            shown = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
            rows.append([one.what, one.wanted, shown + " (missed)" * (not record["met"])])
    return markdown(rows, left=1)


if __name__ == "__main__":
    main()
