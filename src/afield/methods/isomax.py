"""IsoMax+: distances to learned prototypes in the place of a dense output layer (Macedo and Ludermir 2021).

    d_k(x) = |s| | h / |h| - w_k / |w_k| |,     loss = cross-entropy of -E d,     p(y | x) = softmax(-d),     E = 10

with h the hidden vector, w_k the prototype of class k and s the learned distance scale. The entropic scale E is there
in the loss and gone at inference: this is what makes its probabilities underconfident (the paper finds an ECE of .5).

The logits of its predictions are -d. Its own score, the smallest distance min_k d_k, is therefore `max_logit`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afield.gp.likelihoods import LIKELIHOODS
from afield.methods.dense import predict
from afield.methods.method import BackboneFactory, Method
from afield.settings import Settings


def isomax_plus(entropic_scale: float = 10.0) -> Method[nn.Sequential]:
    """A network whose logits are minus its scaled distances to one prototype a class."""

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> nn.Sequential:
        if not LIKELIHOODS[settings.likelihood].of_classes:
            raise ValueError(f"IsoMax+ expects classes, got {settings.likelihood} targets.")
        hidden = backbone()
        return nn.Sequential(hidden, Prototypes(int(hidden.out_features), num_outputs))  # type: ignore[arg-type]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(entropic_scale * model(x), y)

    return Method(build, predict, loss)


class Prototypes(nn.Module):
    """h (N, in_features) -> -d (N, out_features)."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        if out_features < 2:
            raise ValueError(f"IsoMax+ expects a prototype for each of at least 2 classes, got {out_features}.")
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.distance_scale = nn.Parameter(torch.ones(()))

    def forward(self, h: Tensor) -> Tensor:
        # Products of unit vectors would lose the digits of small distances.
        distances = torch.cdist(F.normalize(h), F.normalize(self.weight), compute_mode="donot_use_mm_for_euclid_dist")
        return -self.distance_scale.abs() * distances
