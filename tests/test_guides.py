"""Every block of Python in README and the guides runs, page by page, in the order of the page.

What a page takes as given (a network, loaders, arrays) is in `tests/pages.py` and below; blocks of a page share their
names. Blocks under `<!-- run apart: REASON -->` need a package, a process or a download of their own and run in
`tests/test_guides_apart.py`. Commands are parsed here and run in `tests/test_guides_commands.py`.
"""

import ast
import re
import shlex
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import afield
from tests.pages import GUIDES, ROOT, blocks, given, given_three_clouds, parts

SLOW = ("docs/coming-from.md", "docs/export.md", "docs/integrations.md", "docs/outputs.md", "docs/scikit-learn.md")
NO_COMMANDS = ("ValueError: ", "runs/<task>")  # how blocks begin that show what is printed


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


def of_tokens(names: dict[str, Any]) -> None:
    """A token classifier and a tokenizer in a folder: the words of a sentence are of three kinds."""
    transformers = pytest.importorskip("transformers")
    from tests.texts import tokenizer_of

    words = ["the", "a", "one", "cat", "dog", "bird", "runs", "sleeps", "sings"]
    tokenizer = tokenizer_of(words)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_labels=3, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    transformers.BertForTokenClassification(config).save_pretrained("tagger")
    tokenizer.save_pretrained("tagger")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(9, (200, 5), generator=generator)
    batch = tokenizer([" ".join(words[k] for k in row) for row in drawn], return_tensors="pt")
    batch["labels"] = torch.nn.functional.pad(drawn // 3, (1, 1), value=-100)  # of [CLS] and [SEP]
    cut = [{name: t[rows] for name, t in batch.items()} for rows in (slice(100), slice(100, None))]
    names |= {"name": "tagger", "train_loader": [cut[0]], "held_out_loader": [cut[1]]}
    names |= {"texts": ["the cat runs", "a dog"], "tokenizer": tokenizer, "of_pixels": names["model"]}
    names |= {"AutoModelForTokenClassification": transformers.AutoModelForTokenClassification}


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
    pytest.importorskip("pyarrow")
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
    "docs/coming-from.md": lambda names: names.update(given_three_clouds()),
    "docs/decisions.md": of_decisions,
    "docs/drift.md": of_drift,
    "docs/export.md": of_export,
    "docs/integrations.md": of_lightning,
    "docs/network.md": of_network,
    "docs/scikit-learn.md": of_tables,
    "docs/scoring.md": of_scores,
}


SECTIONS: dict[tuple[str, str], Callable[[dict[str, Any]], None]] = {  # that take other things as given
    ("docs/outputs.md", "Tokens"): of_tokens,
    ("docs/outputs.md", "Gradients"): lambda names: names.update(model=names["of_pixels"]),
    ("docs/outputs.md", "Noise of a regression"): of_numbers,
    ("docs/outputs.md", "Several labels"): of_labels,
    ("docs/outputs.md", "Several heads"): of_heads,
    ("docs/outputs.md", "Draws of functions"): lambda names: names.update(given()),
}


def test_the_sections_with_things_of_their_own_are_there():
    headings = {(page, block.heading) for page in GUIDES for block in blocks(page, "python")}
    assert headings >= set(SECTIONS)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (page in SLOW))
        for page in GUIDES[1:]  # README's runs in tests/test_docs.py, with the core alone
        if any(not block.apart for block in blocks(page, "python"))
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = given()
    PREPARE.get(page, lambda names: None)(names)
    for number, block in enumerate(blocks(page, "python"), 1):
        if not block.apart:
            SECTIONS.get((page, block.heading), lambda names: None)(names)
            exec(compile(block.code, f"{page}, block {number}", "exec"), names)


def test_no_code_hides_in_indented_text():
    """Code is in blocks with a language, which run. What is only indented is a formula."""
    for page in GUIDES:
        text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for lines in re.findall(r"(?:^ {4}(?![-*|]).*\n)+", text, re.MULTILINE):
            try:
                statements = ast.parse(textwrap.dedent(lines)).body
            except SyntaxError:
                continue
            assert all(isinstance(each, ast.Expr) for each in statements), f"{page}: is this code?\n{lines}"


def test_every_block_has_a_language_that_is_run():
    """Python, or commands; what is printed has none of these and is known by how it begins."""
    for page in GUIDES:
        languages = re.findall(r"^```(\S*)\n", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert {*languages} <= {"python", "bash", ""}, page


def shell_lines() -> list[tuple[str, str]]:
    return [
        (page, line)
        for page in GUIDES
        for block in blocks(page, "", "bash")
        if not block.code.startswith(NO_COMMANDS)
        for line in block.code.splitlines()
        if line.strip()
    ]


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
