"""Scores that set a hidden vector h against the dense output layer z = W h + b and what it makes of the training data.

vim    a |R^T (h - u)| - log sum_k exp(z_k)
       u = -W^+ b is where the logits vanish; R spans what the principal subspace of the training features about u
       leaves over; a is the mean largest logit of the training data by their mean |R^T (h - u)|
       Wang et al., CVPR 2022, "ViM: Out-of-distribution with virtual-logit matching"
fdbd   -1/(K - 1) sum over k != c of  (z_c - z_k) / |w_c - w_k|  / |h - m|,   c the predicted class, m the mean feature
       Liu and Qin, ICML 2024, "Fast decision boundary based out-of-distribution detector"
she    -h . m_c,   m_c the mean feature of the training examples of class c that are predicted right
       Zhang et al., ICLR 2023, "Out-of-distribution detection based on in-distribution data patterns memorization"
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from afield.errors import Unsuitable
from afield.prediction.fitted_score import Constants, FittedScore, dense_logits
from afield.prediction.neighbors import RESERVOIR, Sample

_RANKS = ((2048, 1000), (768, 512))  # features from, rank of the principal subspace: the authors' choice


class VirtualLogit(FittedScore):
    """ViM: the part of a feature outside of the principal subspace, as one more logit, against the energy.

    rank       of the principal subspace; None: 1000 from 2048 features, 512 from 768, else half of them
    reservoir  how many training features are kept for the mean of |R^T (h - u)|; beyond, a random sample
    seed       of the sample
    """

    needs = ("output",)

    def __init__(
        self,
        num_features: int,
        num_classes: int = 1,
        *,
        rank: int | None = None,
        reservoir: int = RESERVOIR,
        seed: int = 0,
        output: nn.Linear | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        usual = next((rank for least, rank in _RANKS if num_features >= least), num_features // 2)
        self.rank, self.reservoir, self.seed = usual if rank is None else rank, reservoir, seed
        if not 0 <= self.rank < max(num_features, 1):
            raise ValueError(f"rank must lie between 0 and {num_features - 1}, one less than features, got {rank}.")
        super().__init__(num_features, num_classes, output=output, device=device)

    @cached_property
    def origin(self) -> Tensor:
        """The features u (d,) that are nearest to zero and have no logits."""
        return -torch.linalg.pinv(self.output["weight"]) @ self.output["bias"]

    def _options(self) -> dict[str, Any]:
        return {"reservoir": self.reservoir, "seed": self.seed}

    def _clear(self) -> None:
        d = self.num_features
        self.moment = torch.zeros(d, d, dtype=torch.float64, device=self.device)
        self.largest = torch.zeros((), dtype=torch.float64, device=self.device)
        self.sample = Sample(d, self.reservoir, self.seed, self.device)

    def _add(self, h: Tensor, y: Tensor, z: Tensor) -> None:
        x = h.double() - self.origin
        self.moment += x.T @ x
        self.largest += dense_logits(self.output, h).amax(-1).sum()
        self.sample.add(h)

    def _join(self, other: "VirtualLogit") -> None:
        self.moment += other.moment.to(self.moment)
        self.largest += other.largest.to(self.largest)
        self.sample.join(other.sample)

    def _fit(self) -> dict[str, Tensor]:
        rest = torch.linalg.eigh(self.moment).eigenvectors[:, : self.num_features - self.rank]  # ascending
        typical = ((self.sample.rows.double() - self.origin) @ rest).norm(dim=-1).mean()
        largest = self.largest / self.num_seen
        if not typical > 1e-6 * (self.moment.trace() / self.num_seen).sqrt():
            raise Unsuitable(
                f"All training features lie in a subspace of rank {self.rank}, so none has a residual. "
                "Choose a smaller rank."
            )
        if not largest > 0:
            raise Unsuitable(f"This score needs logits whose largest is positive on average, got {float(largest):g}.")
        return {"rest": largest / typical * rest, "origin": self.origin}

    def distance(self, constants: Constants, h: Tensor, z: Tensor) -> Tensor:
        residual = ((h.double() - constants["origin"]) @ constants["rest"]).norm(dim=-1)
        return residual - dense_logits(constants, h).logsumexp(-1)


class BoundaryDistance(FittedScore):
    """fDBD: the mean distance to the boundaries of the predicted class, by the distance to the mean feature.

    It is low where an example is sure of its class for its distance from the centre, so the score has a minus.
    """

    needs = ("output",)

    def _clear(self) -> None:
        self.total = torch.zeros(self.num_features, dtype=torch.float64, device=self.device)

    def _add(self, h: Tensor, y: Tensor, z: Tensor) -> None:
        self.total += h.double().sum(0)

    def _join(self, other: "BoundaryDistance") -> None:
        self.total += other.total.to(self.total)

    def _fit(self) -> dict[str, Tensor]:
        weight = self.output["weight"]
        between = torch.cdist(weight, weight).fill_diagonal_(1.0)  # a class has no boundary with itself, and no gap
        between = between.clamp_min(torch.finfo(between.dtype).tiny)
        return {"between": between, "mean": self.total / self.num_seen}

    def distance(self, constants: Constants, h: Tensor, z: Tensor) -> Tensor:
        logits = dense_logits(constants, h)
        top, label = logits.max(-1, keepdim=True)
        gaps = (top - logits) / constants["between"][label.squeeze(-1)]
        return -gaps.sum(-1) / (logits.shape[-1] - 1) / (h.double() - constants["mean"]).norm(dim=-1)


class StoredPattern(FittedScore):
    """SHE: minus the product with the mean feature of the predicted class; a class never predicted right has none.

    It needs logits, not the layer that made them, so it serves any network with classes.
    """

    needs = ("target", "logits")

    def _clear(self) -> None:
        self.count = torch.zeros(self.num_classes, dtype=torch.float64, device=self.device)
        self.total = torch.zeros(self.num_classes, self.num_features, dtype=torch.float64, device=self.device)

    def _add(self, h: Tensor, y: Tensor, z: Tensor) -> None:
        right = z.argmax(-1) == y
        self.total.index_add_(0, y[right], h[right].double())
        self.count += y[right].bincount(minlength=self.num_classes)

    def _join(self, other: "StoredPattern") -> None:
        self.total += other.total.to(self.total)
        self.count += other.count.to(self.count)

    def _fit(self) -> dict[str, Tensor]:
        if not bool(self.count.any()):
            raise Unsuitable(
                f"None of the {self.num_seen} training examples is predicted right, so there is no pattern."
            )
        return {"pattern": self.total / self.count.clamp_min(1)[:, None]}

    def distance(self, constants: Constants, h: Tensor, z: Tensor) -> Tensor:
        return -(h.double() * constants["pattern"][z.argmax(-1)]).sum(-1)
