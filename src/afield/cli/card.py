"""`afield card`: a page on one model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from afield.report.model_card import write_card


@dataclass(frozen=True)
class Card:
    """Write a model card: data sizes, calibration, guarantees in words, metrics, limits, versions."""

    model: tyro.conf.Positional[Path]
    """A run folder, or one of an estimator or of save_pretrained, or of afield.save, with --net."""
    net: str | None = None
    """Of a folder written by afield.save: the function that makes its network, as module:function."""
    out: Path | None = None
    """File to write; MODEL/card.md if not given."""

    def run(self) -> None:
        net = self.net or _own_network(self.model)
        print(write_card(self.model, self.out or self.model / "card.md", net).resolve())


def _own_network(folder: Path) -> Any:
    """The network, untrained, of a folder that says itself what it is; None where it does not."""
    from afield.experiment.model_folder import is_saved
    from afield.model.saving import read_index

    if not is_saved(folder):
        return None
    if (architecture := read_index(folder)["metadata"].get("estimator")) is not None:
        from afield.estimators.saving import load_network  # scikit-learn is an extra

        return load_network(architecture)
    if (folder / "config.json").is_file():
        from afield.integrations.huggingface import network_of  # and so is this

        return network_of(folder)
    return None
