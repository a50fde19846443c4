"""Every block of code in README and the guides runs, page by page, in the order of the page.

What a page takes as given (a network, loaders, arrays) is in `given`; blocks of a page share their names. A block under
`<!-- not run: REASON -->` is not run, and counted here. Blocks without a language are commands of a shell: those that
begin with afield are parsed by its own parser, extras and modules must exist.
"""

import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import afield

ROOT = Path(__file__).parents[1]
GUIDES = ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))))
HEADING = re.compile(r"^## (.*)$", re.MULTILINE)
BLOCK = re.compile(r"(<!-- not run: [^>]* -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = {  # how many blocks of Python a page may keep from running
    "docs/coming-from.md": 5,  # other libraries
    "docs/distributed.md": 1,  # starts processes
    "docs/integrations.md": 3,  # a download; torchvision; a store of MLflow
    "docs/serving.md": 1,  # serves until it is stopped
}
SLOW = ("docs/coming-from.md", "docs/export.md", "docs/integrations.md", "docs/outputs.md", "docs/scikit-learn.md")
NO_COMMANDS = ("ValueError: ", "runs/<task>")  # how blocks begin that show what is printed


def blocks(page: str, language: str) -> list[tuple[bool, str]]:
    """(whether it runs, code) of every block of a language."""
    return [(runs, code) for _, runs, code in blocks_of_sections(page, language)]


def blocks_of_sections(page: str, language: str) -> list[tuple[str, bool, str]]:
    """The same with the heading that each block stands under."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [match for match in BLOCK.finditer(text) if match[2] == language]
    headings = [["", *HEADING.findall(text, 0, match.start())][-1] for match in found]
    return [(heading, not match[1], match[3]) for heading, match in zip(headings, found, strict=True)]


class Points(nn.Module):
    """A network with a named output layer, as the guides have it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.ReLU())
        self.fc = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x))


def parts() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    y = torch.arange(1000) % 2
    x = 4 * torch.eye(3)[y] + torch.randn(1000, 3)
    cuts = {"train": slice(400), "held_out": slice(400, 700), "policy": slice(700, 900), "new": slice(900, 1000)}
    return {name: (x[rows], y[rows]) for name, rows in cuts.items()}


def given() -> dict[str, Any]:
    """What the guides take as given: two clouds of points, a network that tells them apart, a model of it."""
    data = parts()
    loaders = {name: DataLoader(TensorDataset(*part), batch_size=200) for name, part in data.items()}
    net = Points()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(20):
        for inputs, target in loaders["train"]:
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), target).backward()
            optimizer.step()
    model = afield.attach(net.eval())
    afield.fit_posterior(model, loaders["train"])
    afield.calibrate(model, loaders["held_out"])
    return {
        "afield": afield,
        "torch": torch,
        "F": F,
        "nn": nn,
        "net": net,
        "model": model,
        "loader": loaders["train"],
        "train_loader": loaders["train"],
        "held_out_loader": loaders["held_out"],
        "x": data["new"][0],
        "x_new": data["new"][0],
        "y_new": data["new"][1],
        "x_held_out": data["policy"][0],
        "y_held_out": data["policy"][1],
    }


def of_decisions(names: dict[str, Any]) -> None:
    names["new_class_loader"] = [torch.randn(20, 3) - 8]
    trained = afield.sngp(names["net"])  # classes are added to it and dropped
    afield.fit_posterior(trained, names["loader"])
    add = afield.class_changes.add_class(trained, names["new_class_loader"])
    assert add(names["x"]).shape[1] == 3


def of_drift(names: dict[str, Any]) -> None:
    names["stream"] = (40 + names["x"]).split(10)


def of_export(names: dict[str, Any]) -> None:
    names["x"] = names["x"].numpy()


def of_network(names: dict[str, Any]) -> None:
    names |= {"num_features": 16, "num_classes": 2}


class Things(nn.Module):
    """A network with two output layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.ReLU())
        self.color, self.shape = nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.body(x)
        return {"color": self.color(h), "shape": self.shape(h)}


def of_numbers(names: dict[str, Any]) -> None:
    """Two numbers in place of a class, by a network that is not trained: its noise is what it misses."""
    names |= given()
    for name in ("train_loader", "held_out_loader"):
        names[name] = [(x, x[:, :2] + torch.randn(len(x), 2)) for x, _ in names[name]]
    names["y_new"] = names["x_new"][:, :2] + torch.randn(len(names["x_new"]), 2)


def of_labels(names: dict[str, Any]) -> None:
    """Four labels: on which side of a plane a point lies."""
    names |= given()
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
    labels = {name: (x, (x[:, [0, 1, 2, 0]] > 1).long()) for name, (x, _) in parts().items()}
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        x, y = labels["train"]
        F.binary_cross_entropy_with_logits(net(x), y.float()).backward()
        optimizer.step()
    names |= {"net": net, "train_loader": [labels["train"]], "held_out_loader": [labels["held_out"]]}
    model = afield.attach(net, likelihood="bernoulli")
    afield.fit_posterior(model, names["train_loader"])
    afield.calibrate(model, names["held_out_loader"])
    names |= {"p_held": model.predict(labels["policy"][0]), "y_held": labels["policy"][1], "target": labels["new"][1]}


def of_heads(names: dict[str, Any]) -> None:
    names |= given()
    both = {name: [(x, {"color": y, "shape": y})] for name, (x, y) in parts().items()}
    names |= {"net": Things(), "loader": both["train"], "held_out_loader": both["held_out"]}


def of_tables(names: dict[str, Any]) -> None:
    names |= {"X": names["x_held_out"].numpy(), "y": names["y_held_out"].numpy(), "X_new": names["x"].numpy()}


def of_scores(names: dict[str, Any]) -> None:
    pandas = pytest.importorskip("pandas")
    Path("scores").mkdir()
    table = pandas.DataFrame({"p_value": [0.5, 0.001, 0.002], "accepted": [True, False, False]})
    table.to_parquet("scores/part.parquet")


def of_lightning(names: dict[str, Any]) -> None:
    lightning = pytest.importorskip("lightning")

    class Base(lightning.LightningModule):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "accelerator": "cpu"}
    names["LightningModule"] = Base
    names["Trainer"] = lambda **options: lightning.Trainer(**{**options, **quiet, "max_epochs": 1})
    names["val_loader"] = names["held_out_loader"]


PREPARE: dict[str, Callable[[dict[str, Any]], None]] = {
    "docs/decisions.md": of_decisions,
    "docs/drift.md": of_drift,
    "docs/export.md": of_export,
    "docs/integrations.md": of_lightning,
    "docs/network.md": of_network,
    "docs/scikit-learn.md": of_tables,
    "docs/scoring.md": of_scores,
}


SECTIONS: dict[tuple[str, str], Callable[[dict[str, Any]], None]] = {  # that take other things as given
    ("docs/outputs.md", "Noise of a regression"): of_numbers,
    ("docs/outputs.md", "Several labels"): of_labels,
    ("docs/outputs.md", "Several heads"): of_heads,
    ("docs/outputs.md", "Draws of functions"): lambda names: names.update(given()),
}


def test_the_sections_with_things_of_their_own_are_there():
    headings = {(page, heading) for page in GUIDES for heading, _, _ in blocks_of_sections(page, "python")}
    assert headings >= set(SECTIONS)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW))
        for page in GUIDES[1:]  # README's runs in tests/test_docs.py, with the core alone
        if any(runs for runs, _ in blocks(page, "python"))
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = given()
    PREPARE.get(page, lambda names: None)(names)
    for number, (heading, runs, code) in enumerate(blocks_of_sections(page, "python"), 1):
        SECTIONS.get((page, heading), lambda names: None)(names)
        if runs:
            exec(compile(code, f"{page}, block {number}", "exec"), names)


def test_few_blocks_are_not_run():
    found = {page: sum(not runs for runs, _ in blocks(page, "python")) for page in GUIDES}
    assert {page: count for page, count in found.items() if count} == NOT_RUN


def shell_lines() -> list[tuple[str, str]]:
    lines = []
    for page in GUIDES:
        for _, block in [*blocks(page, ""), *blocks(page, "bash")]:
            if not block.startswith(NO_COMMANDS):
                lines += [(page, line) for line in block.splitlines() if line.strip()]
    return lines


@pytest.mark.parametrize(("page", "line"), shell_lines())
def test_commands_can_be_parsed(page: str, line: str):
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if not words:
        return
    if words[0] == "srun":
        words = words[1:]
    if words[0] == "torchrun":
        words = ["afield", *words[words.index("afield.cli.main") + 1 :]]
    if words[0] == "afield":
        from afield.cli.main import COMMANDS, parse

        assert type(parse(words[1:])) is COMMANDS[words[1]]
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        named = re.search(r"\[([\w,]+)\]", line)
        assert named is None or set(named[1].split(",")) <= set(extras)
    elif words[:2] == ["python", "-m"]:
        assert (ROOT / words[2].replace(".", "/")).exists() or (ROOT / f"{words[2].replace('.', '/')}.py").exists()
    else:
        assert words[0] in ("curl", "make"), f"{page}: who checks {line!r}?"
