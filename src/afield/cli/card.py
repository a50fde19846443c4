"""`afield card`: a page on one model."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from afield.report.model_card import write_card


@dataclass(frozen=True)
class Card:
    """Write a model card: data sizes, calibration, guarantees in words, figures, limits, versions."""

    model: tyro.conf.Positional[Path]
    """A run folder, or a folder written by afield.save, with --net."""
    net: str | None = None
    """Of a folder written by afield.save: the function that makes its network, as module:function."""
    out: Path | None = None
    """File to write; MODEL/card.md if not given."""

    def run(self) -> None:
        print(write_card(self.model, self.out or self.model / "card.md", self.net).resolve())
