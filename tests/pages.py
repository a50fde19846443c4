"""The blocks of code of README and the guides, and what the pages take as given."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import afield

ROOT = Path(__file__).parents[1]
GUIDES = ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))))
_HEADING = re.compile(r"^## (.*)$", re.MULTILINE)
_BLOCK = re.compile(r"(<!-- (?:run apart|not run): [^>]* -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """Code of a page: the heading that it stands under, and whether it runs apart (`test_guides_apart`)."""

    page: str
    heading: str
    apart: bool
    code: str


def blocks(page: str, *languages: str) -> list[Block]:
    """All blocks of these languages, in the order of the page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [match for match in _BLOCK.finditer(text) if match[2] in languages]
    headings = [["", *_HEADING.findall(text, 0, match.start())][-1] for match in found]
    return [Block(page, heading, bool(match[1]), match[3]) for heading, match in zip(headings, found, strict=True)]


class Points(nn.Module):
    """A network with a named output layer, as the guides have it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.ReLU())
        self.fc = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x))


def parts(classes: int = 2) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Clouds of points, one for each class."""
    torch.manual_seed(0)
    y = torch.arange(1000) % classes
    x = 4 * torch.eye(3)[y] + torch.randn(1000, 3)
    cuts = {"train": slice(400), "held_out": slice(400, 700), "policy": slice(700, 900), "new": slice(900, 1000)}
    return {name: (x[rows], y[rows]) for name, rows in cuts.items()}


def given(net: nn.Module | None = None, classes: int = 2) -> dict[str, Any]:
    """What the guides take as given: two clouds of points, a network that tells them apart, a model of it."""
    data = parts(classes)
    loaders = {name: DataLoader(TensorDataset(*part), batch_size=200) for name, part in data.items()}
    net = Points() if net is None else net
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


def given_three_clouds() -> dict[str, Any]:
    """The same for three classes and a Sequential: what docs/coming-from.md begins with."""
    return given(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3)), classes=3)
