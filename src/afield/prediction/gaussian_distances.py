"""Distances to class means under one covariance: Mahalanobis scores.

For hidden vectors h with classes y, n_k of them in class k with mean m_k, and n in all with mean m:

mahalanobis            min_k D(h, m_k; S),                      S  = 1/n sum_i (h_i - m_y) (h_i - m_y)^T, one for all
relative_mahalanobis   min_k D(h, m_k; S) - D(h, m; S0),        S0 = 1/n sum_i (h_i - m) (h_i - m)^T, the background
unit_...               the same of h / |h|

with D(h, m; S) = (h - m)^T (S + j I)^-1 (h - m). The jitter j, a small part of the mean diagonal of S, is there for
dead ReLUs, which make both covariances singular. It is *one* number: where no training feature varies, the two
distances of a relative score are then equal and cancel.

Lee et al., NeurIPS 2018; relative: Ren et al. 2021, "A simple fix to Mahalanobis distance for improving near-OOD
detection"; on unit vectors: Mueller and Hein, ICML 2025, "Mahalanobis++".

The state is n_k, m_k and n S, K d + d^2 numbers in float64, joined by Chan's update, which does not cancel digits as
raw second moments would.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afield.errors import Unsuitable
from afield.prediction.fitted_score import Constants, FittedScore


class Mahalanobis(FittedScore):
    """Squared distance to the nearest class mean under one shared covariance; `relative` to a background Gaussian.

    unit    scale all features to length 1 first
    jitter  added to the diagonal of both covariances, as a part of the mean variance within the classes
    """

    needs = ("target",)

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        relative: bool = False,
        unit: bool = False,
        jitter: float = 1e-6,
        output: nn.Linear | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if not jitter > 0:
            raise ValueError(f"jitter must be positive, got {jitter}.")
        self.relative, self.unit, self.jitter = relative, unit, jitter
        super().__init__(num_features, num_classes, output=output, device=device)

    def _options(self) -> dict[str, Any]:
        return {"unit": self.unit}

    def _clear(self) -> None:
        k, d = self.num_classes, self.num_features
        self.count = torch.zeros(k, dtype=torch.float64, device=self.device)
        self.mean = torch.zeros(k, d, dtype=torch.float64, device=self.device)
        self.scatter = torch.zeros(d, d, dtype=torch.float64, device=self.device)  # n S

    def _add(self, h: Tensor, y: Tensor, z: Tensor) -> None:
        h = self._scaled(h)
        classes, index = y.unique(return_inverse=True)
        count = index.bincount(minlength=classes.numel()).double()
        mean = h.new_zeros(classes.numel(), self.num_features).index_add_(0, index, h) / count[:, None]
        residual = h - mean[index]
        self._join_moments(classes, count, mean, residual.T @ residual)

    def _join(self, other: "Mahalanobis") -> None:
        classes = other.count.nonzero().flatten()
        parts = (classes, other.count[classes], other.mean[classes], other.scatter)
        self._join_moments(*(part.to(self.mean.device) for part in parts))

    def _join_moments(self, classes: Tensor, count: Tensor, mean: Tensor, scatter: Tensor) -> None:
        """Chan, Golub and LeVeque (1979): the moments of two sets of examples from the moments of each."""
        before = self.count[classes]
        shift = mean - self.mean[classes]
        share = (count / (before + count))[:, None]
        self.scatter += scatter + (before[:, None] * share * shift).T @ shift
        self.mean[classes] += share * shift
        self.count[classes] += count

    def _fit(self) -> dict[str, Tensor]:
        n, seen = self.count.sum(), self.count > 0
        center = (self.count @ self.mean) / n
        means, count = self.mean[seen] - center, self.count[seen]
        within = self.scatter / n
        if not float(within.trace()):
            raise Unsuitable(
                f"All training features equal the mean of their class ({int(n)} examples, {means.shape[0]} classes), "
                "so there is no covariance. Fit on more examples."
            )
        ridge = self.jitter * within.trace() / self.num_features * torch.eye(self.num_features).to(within)
        root = _inverse_root(within + ridge)
        constants = {"center": center, "root": root, "means": means @ root.T}
        if self.relative:
            constants["background"] = _inverse_root(within + (means.T * (count / n)) @ means + ridge)
        return constants

    def distance(self, constants: Constants, h: Tensor, z: Tensor) -> Tensor:
        h = self._scaled(h) - constants["center"]
        nearest = _nearest_square(h @ constants["root"].T, constants["means"])
        return nearest - (h @ constants["background"].T).square().sum(-1) if self.relative else nearest

    def _scaled(self, h: Tensor) -> Tensor:
        h = h.double()
        return F.normalize(h, dim=-1) if self.unit else h


def _inverse_root(covariance: Tensor) -> Tensor:
    """L^-1 for L L^T = covariance: squares of L^-1 h are Mahalanobis distances."""
    return torch.linalg.inv(torch.linalg.cholesky(covariance))


def _nearest_square(h: Tensor, means: Tensor) -> Tensor:
    """Squared distance (N,) of rows to the nearest of the means; ONNX has no cdist."""
    return h.square().sum(-1) + (means.square().sum(-1) - 2 * h @ means.T).amin(-1)
