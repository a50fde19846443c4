"""The report as a reader gets it: one file that needs nothing else and shows what the run folders hold."""

import base64
import json
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from afield.errors import DamagedRun
from afield.experiment import run_folder
from afield.experiment.config import Config
from afield.experiment.one_run import run
from afield.prediction.metrics import auroc, ece, interval_coverage
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import to_probs
from afield.report.claims import claims_far_from_data
from afield.report.curves import reliability_bins, roc_curve
from afield.report.groups import Group
from afield.report.line import interval_coverages
from afield.report.page import record, report
from afield.report.plots import find_lattice

VOID = {"meta", "img", "br", "hr", "link", "input"}
NASTY_TASK, NASTY_METHOD = "<b>&task_1 $x$", 'm<script>"|$_%$'
ENVIRONMENT = {"afield": "0", "torch": "2", "numpy": "2", "python": "3", "machine": "a <fast> one", "command": "x & y"}


class Page(HTMLParser):
    """Tags that balance, what is referred to, and tables as rows of cells by class of their parts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.ids: list[str] = []
        self.tables: list[list[list[dict[str, str]]]] = []
        self.headings: list[str] = []
        self.classes: list[str] = []
        self.feed(text)
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.attributes += [(tag, name, value) for name, value in found.items()]
        self.ids += [found["id"]] if "id" in found else []
        if tag not in VOID:
            self.open.append(tag)
            self.classes.append(found.get("class", ""))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append({"class": found.get("class", ""), "text": ""})
        elif tag in ("h2", "h3"):
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag
        self.classes.pop()

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            cell = self.tables[-1][-1][-1]
            cell["text"] += data
            if "paper" in self.classes:
                cell["paper"] = cell.get("paper", "") + data
            elif self.open[-1] == "span":
                cell[self.classes[-1]] = data
        if self.open and self.open[-1] in ("h2", "h3"):
            self.headings[-1] += data

    def row(self, method: str, table: int = 0) -> list[dict[str, str]]:
        """The row of a method in one of the tables that have it."""
        rows = [row for rows in self.tables for row in rows if row[0]["text"] == method and len(row) > 3]
        return rows[table]


def classes(count: int, seed: int, sure: float = 3.0, labels: Tensor | None = None) -> Prediction:
    logits = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    if labels is not None:
        logits[torch.arange(count), labels] += sure
    return Prediction(logits, torch.rand(count, generator=torch.Generator().manual_seed(seed)), to_probs(logits))


def write(
    root: Path,
    task: str,
    method: str,
    seed: int,
    metrics: Mapping[str, float],
    predictions: Mapping[str, Prediction],
    more: Mapping[str, Tensor],
    folder: str | None = None,
) -> Path:
    """A run folder, fabricated."""
    path = root / (folder or f"{task}/{method}/{seed}")
    path.mkdir(parents=True)
    run_folder.write(
        path / run_folder.CONFIG, run_folder.to_toml({"task": task, "method": method, "seed": seed, "preset": "small"})
    )
    run_folder.write(path / run_folder.PREDICTIONS, run_folder.pack(predictions, more))
    run_folder.write_json(path / run_folder.ENVIRONMENT, ENVIRONMENT)
    cost = {"train_seconds": 1.0 + seed, "ms_per_example": 0.5, "parameters": 1000}
    run_folder.write_json(path / run_folder.METRICS, {"metrics": dict(metrics), "cost": cost})
    return path


CIFAR = {
    "dnn": ([0.951, 0.949], [0.031, 0.033], [0.91, 0.92]),
    "sngp": ([0.958, 0.960], [0.012, 0.014], [0.97, 0.95]),
    "sngp-ensemble": ([0.959], [0.013], [0.94]),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, small_toys: None) -> Path:
    """Runs of four tasks: two trained for an epoch, two fabricated."""
    root = tmp_path_factory.mktemp("runs")
    for method in ("dnn", "sngp"):
        run(Config.of("two-moons", method, epochs=1, num_random_features=64), root)
    made = run(Config.of("toy-regression", "sngp", epochs=1, num_random_features=64), root)
    parts = {part: made.prediction(part) for part in made.parts}
    grid = {
        part: Prediction(p.logits + 0.25, 4 * p.variance, noise=0.0, likelihood="gaussian") for part, p in parts.items()
    }
    more = {
        name: made.array(name) for name in ("test/y", "grid/x", "train/x", "train/y", "ood/between/x", "ood/ends/x")
    }
    write(root, "toy-regression", "gp-exact", 0, made.metrics, grid, more)
    y = torch.arange(40) % 4
    more = {"test/y": y, "test/rows": torch.arange(40), "test/features": torch.randn(40, 5)}
    more |= {"ood/svhn/features": torch.randn(40, 5)}
    for method, (accuracies, eces, aurocs) in CIFAR.items():
        for seed, (accuracy, error, area) in enumerate(zip(accuracies, eces, aurocs, strict=True)):
            metrics = {"accuracy/clean": accuracy, "ece/clean": error, "nll/clean": 0.2}
            metrics |= {"auroc/svhn": area, "auroc/svhn/max_probability": area, "auroc/svhn/dempster_shafer": area}
            predictions = {"test": classes(40, seed, labels=y), "ood/svhn": classes(40, seed + 9)}
            write(
                root, "cifar10", method, seed, metrics, predictions, more if "ensemble" not in method else {"test/y": y}
            )
    nasty = {"accuracy/clean": 0.5, "auroc/<i>": 0.6, "auroc/<i>/energy": 0.6, "auroc/<i>/entropy": 0.7}
    write(root, NASTY_TASK, NASTY_METHOD, 0, nasty, {"test": classes(40, 0, labels=y)}, {"test/y": y}, "nasty/0/0")
    return root


@pytest.fixture(scope="module")
def page(root: Path, coarse_pictures: None) -> Path:
    return report(root)


@pytest.fixture(scope="module")
def parsed(page: Path) -> Page:
    return Page(page.read_text(encoding="utf-8"))


# The file


def test_it_needs_nothing_else(page: Path, parsed: Page):
    text = page.read_text(encoding="utf-8")
    images = [value for tag, name, value in parsed.attributes if tag == "img" and name == "src"]
    assert len(images) > 10
    for image in images:
        kind, _, content = image.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(content, validate=True).startswith(b"\x89PNG")
    for _, name, value in parsed.attributes:
        if name in ("src", "href", "srcset", "action", "data"):
            assert value.startswith(("data:image/png;base64,", "#")), value
    tags = {tag for tag, _, _ in parsed.attributes}
    assert not tags & {"script", "link", "iframe", "object", "base"}
    assert "@import" not in text
    assert "url(" not in text


def test_anchors_lead_somewhere_and_are_unique(parsed: Page):
    assert len(parsed.ids) == len(set(parsed.ids))
    for tag, name, value in parsed.attributes:
        if tag == "a" and name == "href":
            assert value[1:] in parsed.ids


def test_every_picture_is_described_and_lies_beside_the_page(page: Path, parsed: Page):
    described = [value for tag, name, value in parsed.attributes if tag == "img" and name == "alt"]
    images = [value for tag, name, value in parsed.attributes if tag == "img" and name == "src"]
    assert len(described) == len(images)
    assert all(len(text) > 20 for text in described)
    files = {base64.b64encode(file.read_bytes()).decode() for file in page.parent.glob("*.png")}
    assert {image.partition(",")[2] for image in images} == files
    drawn = {file.name for file in page.parent.glob("*.png")}
    wanted = {"two-moons-surfaces.png", "two-moons-landscape.png", "two-moons-hidden.png", "two-moons-reliability.png"}
    wanted |= {"two-moons-roc.png", "two-moons-scores.png", "toy-regression-line.png", "cifar10-landscape.png"}
    assert wanted <= drawn


def test_nothing_is_left_half_written(page: Path):
    names = {file.name for file in page.parent.iterdir()}
    assert {"index.html", "report.md", "report.tex", "report.json"} <= names
    assert not [name for name in names if name.startswith(".") or name.endswith(".tmp")]


def test_a_record_is_the_tables_without_the_pictures(root: Path, page: Path, tmp_path: Path):
    assert record(root, tmp_path / "kept", title="Mine") == tmp_path / "kept" / "report.md"
    assert {file.name for file in (tmp_path / "kept").iterdir()} == {"report.md", "report.json", "runs.jsonl"}
    text = (tmp_path / "kept" / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# Mine")
    assert "![" not in text
    whole = (page.parent / "report.md").read_text(encoding="utf-8")
    lines = {line for line in text.splitlines() if line.startswith("|")}
    assert lines == {line for line in whole.splitlines() if line.startswith("|")}
    data, of_page = (json.loads((f / "report.json").read_text()) for f in (tmp_path / "kept", page.parent))
    assert data["tasks"] == of_page["tasks"]
    for of_task in data["tasks"].values():  # the settings of every run are there, common ones once
        assert set(of_task["own_settings"]) == set(of_task["tables"]["all"]["rows"])
        assert not set(of_task["settings"]) & {key for own in of_task["own_settings"].values() for key in own}
    assert data["command"] == f"afield report {root} --record {tmp_path / 'kept'} --title Mine"


def test_a_record_grows_by_runs_of_other_days_and_takes_those_made_again(tmp_path: Path):
    def made(day: str, *runs: tuple[str, int, float]) -> Path:
        for method, seed, accuracy in runs:
            write(tmp_path / day, "t", method, seed, {"accuracy/clean": accuracy}, {"test": classes(9, 0)}, {})
        record(tmp_path / day, tmp_path / "kept")
        return tmp_path / "kept"

    made("monday", ("dnn", 0, 0.5), ("dnn", 1, 0.7), ("sngp", 0, 0.8))
    kept = made("tuesday", ("dnn", 1, 0.9), ("sngp", 1, 0.6))
    data = json.loads((kept / "report.json").read_text())
    cells = {m: row["accuracy/clean"] for m, row in data["tasks"]["t"]["tables"]["all"]["rows"].items()}
    assert {m: (pytest.approx(c["mean"]), c["runs"]) for m, c in cells.items()} == {"dnn": (70, 2), "sngp": (70, 2)}
    assert data["number_of_runs"] == 4
    again = made("tuesday")
    assert json.loads((again / "report.json").read_text())["tasks"] == data["tasks"]
    (kept / "runs.jsonl").write_text("{")
    with pytest.raises(DamagedRun, match="version control"):
        made("tuesday")


def test_it_is_written_where_asked(root: Path, tmp_path: Path):
    small = tmp_path / "runs"
    write(small, "t", "dnn", 0, {"accuracy/clean": 0.5}, {"test": classes(9, 0)}, {})
    assert report(small, tmp_path / "a b") == tmp_path / "a b" / "index.html"
    assert report(small, tmp_path / "c.html", title="Mine") == tmp_path / "c.html"
    assert (tmp_path / "report.md").read_text(encoding="utf-8").startswith("# Mine")
    assert f"--out &#39;{tmp_path / 'a b'}&#39;" in (tmp_path / "a b" / "index.html").read_text(encoding="utf-8")


# What it shows


def test_numbers_are_the_means_of_the_runs_and_marks_are_right(parsed: Page):
    for method, (accuracies, eces, aurocs) in CIFAR.items():
        _, count, accuracy, error, _, area, *_ = parsed.row(method)
        assert count["text"] == str(len(accuracies))
        assert accuracy["v"] == f"{100 * fmean(accuracies):.2f}"
        assert error["v"] == f"{fmean(eces):.3f}"
        assert area["v"] == f"{fmean(aurocs):.3f}"
        if len(accuracies) > 1:
            assert accuracy["s"] == f"±{100 * stdev(accuracies):.2f}"
        # 95.90 is met twice, .013 too; .960 is alone
        assert ("best" in accuracy["class"]) == (method != "dnn")
        assert ("best" in error["class"]) == (method != "dnn")
        assert ("best" in area["class"]) == (method == "sngp")


def test_the_paper_stands_beside_ours(page: Path, parsed: Page):
    accuracy, error, _, area = parsed.row("sngp")[2:6]
    assert (accuracy["paper"], error["paper"], area["paper"]) == ("95.7±0.14", "0.017±0.003", "0.960±0.004")
    assert "tab:cifar10" in page.read_text(encoding="utf-8")
    assert "| *in the paper* |  | *95.7 ±0.14* |" in (page.parent / "report.md").read_text(encoding="utf-8")


def test_markdown_and_latex_hold_the_same_numbers(page: Path):
    data = json.loads((page.parent / "report.json").read_text(encoding="utf-8"))
    text = (page.parent / "report.md").read_text(encoding="utf-8")
    tex = (page.parent / "report.tex").read_text(encoding="utf-8")
    rows = data["tasks"]["cifar10"]["tables"]["main"]["rows"]
    lines = {name: next(t for t in text.splitlines() if t.startswith(f"| {name} |")) for name in rows}
    tex_lines = {name: next(t for t in tex.splitlines() if t.startswith(f"{name} & ")) for name in rows}
    for name, (accuracies, eces, _) in CIFAR.items():
        assert rows[name]["accuracy/clean"]["mean"] == pytest.approx(100 * fmean(accuracies))
        for value in (f"{100 * fmean(accuracies):.2f}", f"{fmean(eces):.3f}"):
            assert value in lines[name]
            assert value in tex_lines[name]
    assert r"\textbf{95.90}" in tex_lines["sngp"]
    assert "**95.90 ±0.14**" in lines["sngp"]


def test_names_are_escaped_everywhere(page: Path, parsed: Page):
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "<fast>" not in text
    assert "<i>" not in text
    assert NASTY_TASK in parsed.headings
    assert parsed.row(NASTY_METHOD)
    assert r"m\textless{}script\textgreater{}" in (page.parent / "report.tex").read_text(encoding="utf-8")
    assert r"m\<script\>" in (page.parent / "report.md").read_text(encoding="utf-8")


def test_gaussian_processes_are_held_against_the_exact_one(root: Path, page: Path):
    ours, exact = (run_folder.read(root / "toy-regression" / m / "0").prediction("grid") for m in ("sngp", "gp-exact"))
    rows = json.loads((page.parent / "report.json").read_text())["tasks"]["toy-regression"]["tables"]["against-exact"][
        "rows"
    ]
    assert set(rows) == {"sngp"}
    assert rows["sngp"]["mean"]["mean"] == pytest.approx(0.25, rel=1e-5)
    gap = np.sqrt(np.mean((ours.std.numpy() - 2 * ours.variance.sqrt().reshape(-1, 1).numpy()) ** 2))
    assert rows["sngp"]["std"]["mean"] == pytest.approx(float(gap), rel=1e-4)
    assert exact.noise == 0.0


def test_every_metric_seed_and_command_is_there(root: Path, page: Path, parsed: Page):
    text = page.read_text(encoding="utf-8")
    for each in run_folder.find(root):
        assert each.folder.relative_to(root).as_posix().replace("<", "&lt;") in text
    assert "x &amp; y" in text
    two_moons = run_folder.read(root / "two-moons" / "sngp" / "0")
    all_metrics = json.loads((page.parent / "report.json").read_text())["tasks"]["two-moons"]["tables"]["all"]["rows"][
        "sngp"
    ]
    assert set(all_metrics) == {*two_moons.metrics, *two_moons.cost}


def far(method: str, confidence: float, area: float, spearman: float) -> Group:
    metrics = {"confidence/far": confidence, "auroc/far": area, "spearman/distance": spearman}
    config = {"task": "t", "method": method, "seed": 0}
    return Group(method, (run_folder.Run(Path("x"), config, metrics, {}, {}),))


def test_claims_follow_the_metrics():
    for one, other in (("dnn", "sngp"), ("sngp", "dnn")):  # whoever has the metrics gets the sentence
        groups = [far(one, 0.99, 0.3, -0.2), far(other, 0.6, 0.99, 0.8)]
        said = [" ".join(map(str, claim)) for claim in claims_far_from_data(groups, 2)]
        assert said[0].startswith("Unsure far away (mean confidence below 0.75")
        assert f"certainty): {other} (0.60). Sure far away: {one} (0.99)." in said[0]
        assert f"or more): {other} (0.80). It does not, or falls: {one} (-0.20)." in said[1]
        assert f"or more): {other} (0.99). No better than chance: {one} (0.30)." in said[2]


def test_the_limit_of_confidence_lies_between_a_guess_and_certainty():
    said = str(claims_far_from_data([far("dnn", 0.5, 0.5, 0.5)], 5)[0][0])
    assert "below 0.6" in said


# What may be missing


@pytest.mark.parametrize("exists", [True, False])
def test_no_runs_is_one_clear_line(exists: bool, tmp_path: Path):
    folder = tmp_path / "runs"
    if exists:
        folder.mkdir()
    with pytest.raises(ValueError, match="no finished run below" if exists else "There is no folder"):
        report(folder)


def test_one_run_without_ood_is_still_a_report(tmp_path: Path):
    y = torch.arange(20) % 4
    write(tmp_path, "t", "dnn", 0, {"accuracy/clean": 0.5}, {"test": classes(20, 0, labels=y)}, {"test/y": y})
    page = Page(report(tmp_path).read_text(encoding="utf-8"))
    row = page.row("dnn")
    assert row[2]["v"] == "50.00"
    assert "best" not in row[2]["class"]  # nothing to be better than
    assert [cell["text"] for cell in page.tables[0][0]] == ["accuracy, %", "50.00", "dnn"]
    assert "Reliability" in page.headings
    assert "ROC" not in page.headings


def test_without_predictions_there_are_tables_and_a_note(tmp_path: Path):
    path = write(
        tmp_path, "t", "dnn", 0, {"accuracy/clean": 0.5, "spearman/distance": 0.1}, {"test": classes(9, 0)}, {}
    )
    (path / run_folder.PREDICTIONS).unlink()
    text = report(tmp_path).read_text(encoding="utf-8")
    assert f"No picture shows {path}" in text
    assert Page(text).row("dnn")[2]["v"] == "50.00"


# The numbers in the pictures


floats = st.floats(-3, 3, width=32)


@given(arrays(np.float32, st.integers(1, 30), elements=floats), arrays(np.float32, st.integers(1, 30), elements=floats))
def test_area_under_the_drawn_curve_is_the_auroc(inside: np.ndarray, outside: np.ndarray):
    a, b = torch.from_numpy(inside), torch.from_numpy(outside)
    x, y = roc_curve(a, b)
    assert float(torch.trapezoid(y, x)) == pytest.approx(auroc(a, b), abs=1e-9)
    assert (float(x[-1]), float(y[-1])) == (1.0, 1.0)


@given(
    arrays(np.float32, st.tuples(st.integers(1, 40), st.just(3)), elements=floats), st.randoms(use_true_random=False)
)
def test_drawn_bins_make_the_ece(logits: np.ndarray, random):
    prediction = Prediction(torch.from_numpy(logits), None, to_probs(torch.from_numpy(logits)))
    y = torch.tensor([random.randrange(3) for _ in logits])
    count, accuracy, mean = reliability_bins(prediction.confidence.double(), (prediction.labels == y).double())
    assert int(count.sum()) == len(logits)
    assert float((count * (accuracy - mean).abs()).sum()) / len(logits) == pytest.approx(ece(prediction, y), abs=1e-6)


def test_drawn_intervals_are_the_interval_coverage(generator: torch.Generator):
    y = torch.randn(500, 1, generator=generator)
    prediction = Prediction(torch.zeros(500, 1), torch.full((500,), 0.3), noise=0.2, likelihood="gaussian")
    levels = torch.tensor([0.1, 0.5, 0.95], dtype=torch.float64)
    expected = [interval_coverage(prediction, y, level=float(level)) for level in levels]
    assert interval_coverages(prediction, y, levels).tolist() == pytest.approx(expected)


def test_a_lattice_is_an_image_whatever_its_order(generator: torch.Generator):
    x = torch.stack(torch.meshgrid(torch.arange(5.0), torch.arange(3.0), indexing="xy"), dim=-1).flatten(0, 1)
    shuffled = x[torch.randperm(len(x), generator=generator)]
    found = find_lattice(shuffled)
    assert found is not None
    order, rows, columns = found
    assert (rows, columns) == (3, 5)
    assert torch.equal(shuffled[order].reshape(3, 5, 2), x.reshape(3, 5, 2))
    assert find_lattice(torch.randn(9, 2, generator=generator)) is None
    assert find_lattice(torch.arange(4.0)[:, None]) is None
