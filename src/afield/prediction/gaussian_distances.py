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

from afield.prediction.fitted_score import Distance, FittedScore, Problem


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

    def _fit(self) -> Distance | Problem:
        n, seen = self.count.sum(), self.count > 0
        center = (self.count @ self.mean) / n
        means, count = self.mean[seen] - center, self.count[seen]
        within = self.scatter / n
        if not float(within.trace()):
            return ValueError(
                f"All training features equal the mean of their class ({int(n)} examples, {means.shape[0]} classes), "
                "so there is no covariance. Fit on more examples."
            )
        ridge = self.jitter * within.trace() / self.num_features * torch.eye(self.num_features).to(within)
        lower = torch.linalg.cholesky(within + ridge)
        white = _whiten(lower, means)
        if not self.relative:
            return lambda h, z: _squares(_whiten(lower, self._scaled(h) - center), white)
        background = torch.linalg.cholesky(within + (means.T * (count / n)) @ means + ridge)

        def distance(h: Tensor, z: Tensor) -> Tensor:
            h = self._scaled(h) - center
            return _squares(_whiten(lower, h), white) - _whiten(background, h).square().sum(-1)

        return distance

    def _scaled(self, h: Tensor) -> Tensor:
        h = h.to(self.mean)
        return F.normalize(h, dim=-1) if self.unit else h


def _whiten(lower: Tensor, h: Tensor) -> Tensor:
    """L^-1 h for the rows of h: their squares are Mahalanobis distances."""
    return torch.linalg.solve_triangular(lower, h.T, upper=False).T


def _squares(h: Tensor, means: Tensor) -> Tensor:
    """Squared distance (N,) of rows to the nearest of the means."""
    return torch.cdist(h, means).square().amin(-1)
