"""`python -m bench.speed`: run the measures, keep a record of each, then write the table."""

import argparse
import json
import platform

import torch

from afield.model.saving import write_file
from bench.defaults import ROOT, fill, markdown
from bench.speed import ensembles, networks, one_row, per_class, pixels, posterior
from bench.speed.measure import MEASURES, Missing

RECORDS = ROOT / "bench" / "results"
PARTS = [
    part.__name__ for part in (networks, pixels, ensembles, posterior, per_class)
]  # whose measures the table has, in order
DOCS = ROOT / "docs"
PAGES = {
    "speed": DOCS / "speed.md",
    "costs": ROOT / "README.md",
    "one row": DOCS / "speed.md",
    "every pixel": DOCS / "outputs.md",
}
DETAILS = {"one row": ("predict-one-mlp", one_row.table), "every pixel": ("predict-unet", pixels.table)}
COSTS = {  # of the README: measures by name, what is done, and the factor from seconds to the unit
    "predict-wide-resnet": ("predict 64 images, WideResNet-28-10, s", 1),
    "predict-one-resnet-56": ("predict one image, ResNet-56, ms", 1000),
    "predict-one-mlp": ("predict one row, two dense layers, ms", 1000),
    "train-wide-resnet": ("training step, 128 images, WideResNet-16-4, s", 1),
}
TINY = ("uci-small", "uci-airfoil", "dnn (members=5)")  # record, task, dense row: where it costs most


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
            metrics = {key: float(f"{value:.4g}") for key, value in one.run().items()}
        except Missing as missing:
            print(f"  left out: {missing}")
            continue
        record = {"measure": one.what, "target": one.wanted, "met": one.met(metrics), **metrics}
        record |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
        write_file(file, (json.dumps(record, indent=1) + "\n").encode())
        print(f"  {metrics} target {one.wanted}: {'met' if one.met(metrics) else 'MISSED'}", flush=True)
    for name, text in tables().items():
        fill(PAGES[name], name, text)


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the records as they are."""
    found = {"speed": table(), "costs": costs()}
    for name, (measure, made) in DETAILS.items():
        found[name] = made(json.loads((RECORDS / f"{measure}.json").read_text(encoding="utf-8")))
    return found


def table() -> str:
    """Markdown: one row for each measure that has a record."""
    rows = [["measure", "target", "measured"]]
    for name, one in sorted(MEASURES.items(), key=lambda item: PARTS.index(item[1].run.__module__)):
        file = RECORDS / f"{name}.json"
        if file.exists():
            record = json.loads(file.read_text(encoding="utf-8"))
            value = record[one.metric]
            shown = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
            rows.append([one.what, one.wanted, shown + " (missed)" * (not record["met"])])
    return markdown(rows, left=1)


def costs() -> str:
    """Markdown: seconds of dense networks and of ours, on networks where it costs little and where it costs most."""
    rows = [["", "dense network", "SNGP"]]
    for name, (what, unit) in COSTS.items():
        file = RECORDS / f"{name}.json"
        if file.exists():
            times = json.loads(file.read_text(encoding="utf-8"))
            rows.append([what, *(f"{unit * times[key]:.3g}" for key in ("other_seconds", "seconds"))])
    record, task, dense = TINY
    report = json.loads((ROOT / "results" / record / "report.json").read_text(encoding="utf-8"))
    of = report["tasks"][task]["tables"]["main"]["rows"]
    for metric, what in (("train_seconds", "training, s"), ("ms_per_example", "predict a row, ms")):
        shown = [f"{of[row][metric]['mean']:.3g}" for row in (dense, "sngp")]
        rows.append([f"a table (airfoil), 34,000 weights: {what}", *shown])
    fit = json.loads((RECORDS / "fit.json").read_text(encoding="utf-8"))
    rows.append(["`fit_posterior`, 10,000 examples, 1024 features, s", "", f"{fit['seconds']:.3g}"])
    return markdown(rows, left=1)


if __name__ == "__main__":
    main()
