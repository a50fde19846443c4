"""Estimators as folders: safetensors and JSON, never a pickle. `afield serve` opens them.

estimator.save("model/")        writes them
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from afield.estimators.network import plain_network
from afield.model.saving import save

if TYPE_CHECKING:
    from afield.estimators.estimator import Fitted

_ARCHITECTURE = ("in_features", "out_features", "depth", "width", "dropout")


def save_estimator(estimator: "Fitted", folder: str | os.PathLike[str], **neighbours: Any) -> Path:
    """Write a fitted estimator: model, architecture, classes, columns; `neighbours` are options of `afield.save`."""
    metadata: dict[str, Any] = {"estimator": {name: estimator._architecture[name] for name in _ARCHITECTURE}}
    for name, values in (("labels", "classes_"), ("columns", "feature_names_in_")):
        if hasattr(estimator, values):
            metadata[name] = [str(value) for value in getattr(estimator, values)]
    return save(estimator.model_, folder, metadata=metadata, **neighbours)


def load_network(architecture: Mapping[str, Any]) -> nn.Module:
    """The network, untrained, that a saved estimator is loaded onto."""
    return plain_network(**{name: architecture[name] for name in _ARCHITECTURE})
