"""Activation shaping: the energy -log sum_k exp(z_k) of z = W s(h) + b, after a change s of the hidden vector h.

react   min(h, c), c the 90th percentile of all training activations: Sun, Guo and Li, NeurIPS 2021, "ReAct"
ash     h exp(r) where h is among the largest 10% of its own activations, else 0: Djurisic et al., ICLR 2023,
        "Extremely simple activation shaping" (ASH-S)
scale   h exp(r), with the largest 15%: Xu et al., ICLR 2024, "Scaling for training time and post-hoc OOD detection"

r is the sum of all activations of h by the sum of the largest ones. All three speak of the output of a ReLU: they apply
where a dense layer follows and no activation is negative. The percentages are those of the papers.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from afield.errors import Unsuitable
from afield.prediction.fitted_score import Constants, FittedScore, dense_logits
from afield.prediction.neighbors import RESERVOIR, Sample
from afield.prediction.prediction import Prediction


class ActivationShaping(FittedScore):
    """The energy of shaped features.

    shape       react, ash or scale
    percentile  from which activations are large; None: 90, for scale 85
    reservoir   how many training features are kept for the percentile of react; beyond, a random sample
    seed        of the sample
    """

    needs = ("output",)

    def __init__(
        self,
        num_features: int,
        num_classes: int = 1,
        *,
        shape: str = "react",
        percentile: float | None = None,
        reservoir: int = RESERVOIR,
        seed: int = 0,
        output: nn.Linear | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if shape not in _PERCENTILES:
            raise ValueError(f"shape must be one of {', '.join(_PERCENTILES)}, got {shape!r}.")
        self.shape, self.percentile = shape, _PERCENTILES[shape] if percentile is None else percentile
        if not 0 < self.percentile < 100:
            raise ValueError(f"percentile must lie strictly between 0 and 100, got {percentile}.")
        self.reservoir, self.seed = reservoir, seed
        super().__init__(num_features, num_classes, output=output, device=device)

    def _options(self) -> dict[str, Any]:
        return {"shape": self.shape, "reservoir": self.reservoir, "seed": self.seed}

    def _clear(self) -> None:
        self.lowest = torch.inf
        self.sample = Sample(self.num_features, self.reservoir, self.seed, self.device)

    def _add(self, h: Tensor, y: Tensor, z: Tensor) -> None:
        self.lowest = min([self.lowest, *h.amin(-1).tolist()])
        if self.shape == "react":
            self.sample.add(h)

    def _join(self, other: "ActivationShaping") -> None:
        self.lowest = min(self.lowest, other.lowest)
        self.sample.join(other.sample)

    def _check(self, prediction: Prediction) -> tuple[Tensor, Tensor]:
        h, z = super()._check(prediction)
        _check_sign(float(h.amin()) if len(h) else 0.0)
        return h, z

    def _fit(self) -> dict[str, Tensor]:
        _check_sign(self.lowest)
        if self.shape != "react":
            return {}
        # Of NumPy, because torch.quantile refuses more than 2^24 numbers.
        most = np.percentile(self.sample.rows.cpu().numpy(), self.percentile)
        return {"most": torch.tensor(most, dtype=torch.float64, device=self.device)}

    def distance(self, constants: Constants, h: Tensor, z: Tensor) -> Tensor:
        return -dense_logits(constants, self._shaped(constants, h.double())).logsumexp(-1)

    def _shaped(self, constants: Constants, h: Tensor) -> Tensor:
        if self.shape == "react":
            return torch.minimum(h, constants["most"])
        largest = max(1, self.num_features - round(self.num_features * self.percentile / 100))
        return _stretch(h, largest, prune=self.shape == "ash")


_PERCENTILES = {"react": 90.0, "ash": 90.0, "scale": 85.0}


def _check_sign(lowest: float) -> None:
    if lowest < 0:
        raise Unsuitable(
            f"This score needs activations that are not negative, as after a ReLU, got {lowest:g}. Use another score."
        )


def _stretch(h: Tensor, largest: int, *, prune: bool) -> Tensor:
    """h exp(sum of all / sum of the largest), without all but the largest if those are pruned."""
    top, where = h.topk(largest)
    ratio = h.sum(-1, keepdim=True) / top.sum(-1, keepdim=True)
    kept = torch.zeros_like(h).scatter(-1, where, top) if prune else h
    return kept * torch.where(ratio.isnan(), 1.0, ratio).exp()  # of activations that are all zero, zero
