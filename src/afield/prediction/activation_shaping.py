"""Activation shaping: the energy -log sum_k exp(z_k) of z = W s(h) + b, after a change s of the hidden vector h.

react   min(h, c), c the 90th percentile of all training activations: Sun, Guo and Li, NeurIPS 2021, "ReAct"
ash     h exp(r) where h is among the largest 10% of its own activations, else 0: Djurisic et al., ICLR 2023,
        "Extremely simple activation shaping" (ASH-S)
scale   h exp(r), with the largest 15%: Xu et al., ICLR 2024, "Scaling for training time and post-hoc OOD detection"

r is the sum of all activations of h by the sum of the largest ones. All three speak of the output of a ReLU: they apply
where a dense layer follows and no activation is negative. The percentages are those of the papers.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from afield.prediction.fitted_score import Distance, FittedScore, Problem
from afield.prediction.neighbors import RESERVOIR, Sample
from afield.prediction.prediction import Prediction

Shape = Callable[[Tensor], Tensor]  # features (N, d) -> features (N, d)


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

    def _problem(self, prediction: Prediction) -> Problem | None:
        found, h = super()._problem(prediction), prediction.features
        if found is None and h is not None and len(h):
            found = _negative(float(h.amin()))
        return found

    def _fit(self) -> Distance | Problem:
        if (problem := _negative(self.lowest)) is not None:
            return problem
        shape = self._shape()
        return lambda h, z: -self.output(shape(h.double())).logsumexp(-1)

    def _shape(self) -> Shape:
        if self.shape == "react":
            # Of NumPy, because torch.quantile refuses more than 2^24 numbers.
            most = float(np.percentile(self.sample.rows.cpu().numpy(), self.percentile))
            return lambda h: h.clamp(max=most)
        largest = max(1, self.num_features - round(self.num_features * self.percentile / 100))
        return lambda h: _stretch(h, largest, prune=self.shape == "ash")


_PERCENTILES = {"react": 90.0, "ash": 90.0, "scale": 85.0}


def _negative(lowest: float) -> ValueError | None:
    if lowest >= 0:
        return None
    return ValueError(
        f"This score needs activations that are not negative, as after a ReLU, got {lowest:g}. Use another score."
    )


def _stretch(h: Tensor, largest: int, *, prune: bool) -> Tensor:
    """h exp(sum of all / sum of the largest), without all but the largest if those are pruned."""
    top, where = h.topk(largest)
    ratio = h.sum(-1, keepdim=True) / top.sum(-1, keepdim=True)
    kept = torch.zeros_like(h).scatter(-1, where, top) if prune else h
    return kept * ratio.nan_to_num(1.0).exp()  # of activations that are all zero, zero
