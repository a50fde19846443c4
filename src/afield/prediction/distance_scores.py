"""Scores that are fitted to training data first: how far hidden vectors lie from those of the training data.

mahalanobis, relative_mahalanobis              distance to the nearest class mean       `gaussian_distances`
unit_mahalanobis, unit_relative_mahalanobis    the same of unit vectors
knn, nnguide                                   nearest training features                `neighbors`
vim, fdbd, she                                 against the output layer                 `output_geometry`
react, ash, scale                              energy of shaped activations             `activation_shaping`

`FITTED[name](num_features, num_classes, output=layer)` is an empty accumulator: `reset`, `update` with batches,
`merge`, then `score` a `Prediction`; `applies` says whether it can. What each needs besides features is in its `needs`
(`fitted_score`). Options have the published defaults; none asks for OOD data.
"""

from functools import partial
from typing import Protocol

import torch
from torch import nn

from afield.prediction.activation_shaping import ActivationShaping
from afield.prediction.fitted_score import FittedScore
from afield.prediction.gaussian_distances import Mahalanobis
from afield.prediction.neighbors import NearestNeighbors, NeighborGuidance
from afield.prediction.output_geometry import BoundaryDistance, StoredPattern, VirtualLogit
from afield.registry import Registry

__all__ = [
    "FITTED",
    "ActivationShaping",
    "BoundaryDistance",
    "FittedScore",
    "Mahalanobis",
    "NearestNeighbors",
    "NeighborGuidance",
    "StoredPattern",
    "VirtualLogit",
    "make_all",
]


class Make(Protocol):
    """Numbers of features and classes, and the dense output layer if there is one -> an empty accumulator."""

    def __call__(
        self,
        num_features: int,
        num_classes: int,
        *,
        output: nn.Linear | None = None,
        device: torch.device | str | None = None,
    ) -> FittedScore: ...


FITTED: Registry[Make] = Registry(
    "fitted score",
    mahalanobis=Mahalanobis,
    relative_mahalanobis=partial(Mahalanobis, relative=True),
    unit_mahalanobis=partial(Mahalanobis, unit=True),
    unit_relative_mahalanobis=partial(Mahalanobis, relative=True, unit=True),
    knn=NearestNeighbors,
    nnguide=NeighborGuidance,
    vim=VirtualLogit,
    fdbd=BoundaryDistance,
    she=StoredPattern,
    react=partial(ActivationShaping, shape="react"),
    ash=partial(ActivationShaping, shape="ash"),
    scale=partial(ActivationShaping, shape="scale"),
)


def make_all(
    num_features: int,
    num_classes: int,
    *,
    output: nn.Linear | None = None,
    device: torch.device | str | None = None,
) -> dict[str, FittedScore]:
    """An empty accumulator of every fitted score; without an output layer, of those that do not need it.

    num_classes  the first argument is that of hidden features
    output       the dense layer over the hidden vectors

    returns  a dictionary by name
    raises   ValueError if the output layer has other sizes

    >>> fitted = afield.distance_scores.make_all(16, 3)
    >>> fitted["knn"].update(p.features, y)
    >>> fitted["knn"].score(p).shape
    torch.Size([300])
    """
    scores = {name: make(num_features, num_classes, output=output, device=device) for name, make in FITTED.items()}
    return {name: score for name, score in scores.items() if output is not None or "output" not in score.needs}
