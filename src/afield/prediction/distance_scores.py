"""Scores that are fitted to training features first: how far hidden vectors lie from those of the training data.

For hidden vectors h with classes y, n_k of them in class k with mean m_k, and n in all with mean m:

mahalanobis            min_k D(h, m_k; S),                      S  = 1/n sum_i (h_i - m_y) (h_i - m_y)^T, one for all
relative_mahalanobis   min_k D(h, m_k; S) - D(h, m; S0),        S0 = 1/n sum_i (h_i - m) (h_i - m)^T, the background
knn                    |u - u_(k)|,  u = h / |h|,               u_(k) its k-th nearest among the training features

with D(h, m; S) = (h - m)^T (S + j I)^-1 (h - m). The jitter j, a small part of the mean diagonal of S, is there for
dead ReLUs, which make both covariances singular. It is *one* number: where no training feature varies, the two
distances of relative_mahalanobis are then equal and cancel.

Fitted scores are accumulators: `reset`, `update` with batches, `merge`, then `score` a `Prediction` by its features;
`applies` says whether it has features that can be scored.
Memory does not grow with n. The Gaussians keep n_k, m_k and n S, K d + d^2 numbers in float64, joined by Chan's
update, which does not cancel digits as raw second moments would. The neighbours are a random sample of bounded size,
drawn by a seeded hash of the features. So order, batches and processes do not matter: merged parts are the whole.
"""

from collections.abc import Callable
from typing import Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from afield.errors import NotFitted
from afield.prediction.checks import check_features, check_labels, features_problem
from afield.prediction.prediction import Prediction
from afield.registry import Registry

_CHUNK = 1024  # examples scored at a time: (1024, K) and (1024, reservoir) distances are all there ever is


class FittedScore(Protocol):
    """A score that is fitted to training features (N, d) and their classes (N,) before it can score a prediction."""

    def reset(self) -> None: ...

    def update(self, features: Tensor, target: Tensor) -> None: ...

    def merge(self, other: Self) -> None: ...

    def applies(self, prediction: Prediction) -> bool: ...

    def score(self, prediction: Prediction) -> Tensor: ...


class Mahalanobis:
    """Squared distance to the nearest class mean under one shared covariance; `relative` to a background Gaussian.

    jitter  added to the diagonal of both covariances, as a part of the mean variance within the classes
    device  where the float64 moments live and distances are computed
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        relative: bool = False,
        jitter: float = 1e-6,
        device: torch.device | str | None = None,
    ) -> None:
        if num_features < 1 or num_classes < 1:
            raise ValueError(f"Expected at least 1 feature and 1 class, got {num_features} and {num_classes}.")
        if not jitter > 0:
            raise ValueError(f"jitter must be positive, got {jitter}.")
        self.num_features, self.num_classes, self.relative, self.jitter = num_features, num_classes, relative, jitter
        self.count = torch.zeros(num_classes, dtype=torch.float64, device=device)
        self.mean = torch.zeros(num_classes, num_features, dtype=torch.float64, device=device)
        self.scatter = torch.zeros(num_features, num_features, dtype=torch.float64, device=device)  # n S
        self._distance: Callable[[Tensor], Tensor] | None = None

    def reset(self) -> None:
        """Forget all examples."""
        for moment in (self.count, self.mean, self.scatter):
            moment.zero_()
        self._distance = None

    @torch.no_grad()
    def update(self, features: Tensor, target: Tensor) -> None:
        """Add training features (N, d) of the classes target (N,)."""
        h = check_features(features, self.num_features).to(self.mean)
        classes, index = check_labels(target, h.shape[0], self.num_classes).to(h.device).unique(return_inverse=True)
        count = index.bincount(minlength=classes.numel()).double()
        mean = h.new_zeros(classes.numel(), self.num_features).index_add_(0, index, h) / count[:, None]
        residual = h - mean[index]
        self._join(classes, count, mean, residual.T @ residual)

    @torch.no_grad()
    def merge(self, other: "Mahalanobis") -> None:
        """Add all examples of another accumulator: the result is as if this one had seen both."""
        if other.mean.shape != self.mean.shape:
            raise ValueError(
                f"Cannot merge moments of (classes, features) {tuple(self.mean.shape)} and {tuple(other.mean.shape)}."
            )
        classes = other.count.nonzero().flatten()
        parts = (classes, other.count[classes], other.mean[classes], other.scatter)
        self._join(*(part.to(self.mean.device) for part in parts))

    def applies(self, prediction: Prediction) -> bool:
        """Whether the prediction has features of the right form, and the training features a covariance."""
        return _has_features(prediction, self.num_features) and bool(self.scatter.trace())

    @torch.no_grad()
    def score(self, prediction: Prediction) -> Tensor:
        """The distance (N,) of each example's features."""
        features = _features(prediction, self.num_features)
        if self._distance is None:
            self._distance = self._factor()
        distance = torch.cat([self._distance(h.to(self.mean)) for h in features.split(_CHUNK)])
        return distance.to(features.device, torch.promote_types(features.dtype, torch.float32))

    def _join(self, classes: Tensor, count: Tensor, mean: Tensor, scatter: Tensor) -> None:
        """Chan, Golub and LeVeque (1979): the moments of two sets of examples from the moments of each."""
        before = self.count[classes]
        shift = mean - self.mean[classes]
        share = (count / (before + count))[:, None]
        self.scatter += scatter + (before[:, None] * share * shift).T @ shift
        self.mean[classes] += share * shift
        self.count[classes] += count
        self._distance = None

    def _factor(self) -> Callable[[Tensor], Tensor]:
        """The function from features (N, d) to distances (N,)."""
        n, seen = self.count.sum(), self.count > 0
        if not n:
            raise NotFitted("This score has seen no training features. Call update(features, target) with them first.")
        center = (self.count @ self.mean) / n
        means, count = self.mean[seen] - center, self.count[seen]
        within = self.scatter / n
        if not float(within.trace()):
            raise ValueError(
                f"All training features equal the mean of their class ({int(n)} examples, {means.shape[0]} classes), "
                "so there is no covariance. Fit on more examples."
            )
        ridge = self.jitter * within.trace() / self.num_features * torch.eye(self.num_features).to(within)
        lower = torch.linalg.cholesky(within + ridge)
        white = _whiten(lower, means)
        if not self.relative:
            return lambda h: _squares(_whiten(lower, h - center), white)
        background = torch.linalg.cholesky(within + (means.T * (count / n)) @ means + ridge)

        def distance(h: Tensor) -> Tensor:
            h = h - center
            return _squares(_whiten(lower, h), white) - _whiten(background, h).square().sum(-1)

        return distance


class NearestNeighbors:
    """Distance to the k-th nearest training feature, all scaled to unit norm (Sun et al. 2022).

    k          which neighbour
    reservoir  how many training features are kept; beyond, a random sample of them
    seed       of the sample

    The sample is the features with the smallest hashes. Each is in it with the same chance, and it is the same set
    in whatever order, batches or processes the features came; copies of one feature stand or fall together.
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int = 1,  # not read: one signature for all fitted scores
        *,
        k: int = 10,
        reservoir: int = 10_000,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        if num_features < 1:
            raise ValueError(f"Expected at least 1 feature, got {num_features}.")
        if not 1 <= k <= reservoir:
            raise ValueError(f"k must lie between 1 and the size of the reservoir ({reservoir}), got {k}.")
        self.num_features, self.k, self.reservoir, self.seed = num_features, k, reservoir, seed
        self.features = torch.zeros(0, num_features, dtype=torch.float32, device=device)
        self.keys = torch.zeros(0, dtype=torch.int64, device=device)
        self.num_seen = 0

    def reset(self) -> None:
        """Forget all examples."""
        self.features, self.keys, self.num_seen = self.features[:0].clone(), self.keys[:0].clone(), 0

    @torch.no_grad()
    def update(self, features: Tensor, target: Tensor | None = None) -> None:
        """Add training features (N, d); classes are not read."""
        h = check_features(features, self.num_features).to(self.features)
        self._join(h, _hash(h, self.seed), h.shape[0])

    @torch.no_grad()
    def merge(self, other: "NearestNeighbors") -> None:
        """Add all examples of another accumulator: the result is as if this one had seen both, exactly."""
        mine, theirs = ((s.num_features, s.reservoir, s.seed) for s in (self, other))
        if mine != theirs:
            raise ValueError(f"Cannot merge samples of (features, reservoir, seed) {mine} and {theirs}.")
        self._join(other.features.to(self.features), other.keys.to(self.keys), other.num_seen)

    def applies(self, prediction: Prediction) -> bool:
        """Whether the prediction has features of the right form."""
        return _has_features(prediction, self.num_features)

    @torch.no_grad()
    def score(self, prediction: Prediction) -> Tensor:
        """The distance (N,) of each example's features, between 0 and 2."""
        features = _features(prediction, self.num_features)
        if self.features.shape[0] < self.k:
            raise NotFitted(
                f"The {self.k}-th nearest neighbour needs at least {self.k} training features, got "
                f"{self.features.shape[0]}. Call update(features) with more of them, or choose a smaller k."
            )
        known = F.normalize(self.features, dim=-1)
        distances = []
        for part in features.split(_CHUNK):
            h = F.normalize(part.to(known), dim=-1)
            kth = (h @ known.T).topk(self.k).indices[:, -1]
            distances.append((h - known[kth]).norm(dim=-1))  # sqrt(2 - 2 cos) would lose half the digits
        return torch.cat(distances).to(features.device, torch.promote_types(features.dtype, torch.float32))

    def _join(self, features: Tensor, keys: Tensor, num_seen: int) -> None:
        keys, order = torch.cat([self.keys, keys]).sort()
        self.keys = keys[: self.reservoir].clone()
        self.features = torch.cat([self.features, features])[order[: self.reservoir]]
        self.num_seen += num_seen


FITTED: Registry[Callable[[int, int], FittedScore]] = Registry(
    "fitted score",
    mahalanobis=Mahalanobis,
    relative_mahalanobis=lambda num_features, num_classes: Mahalanobis(num_features, num_classes, relative=True),
    knn=NearestNeighbors,
)
"""(num_features, num_classes) -> an empty accumulator."""


def _has_features(prediction: Prediction, num_features: int) -> bool:
    return prediction.features is not None and features_problem(prediction.features, num_features) is None


def _features(prediction: Prediction, num_features: int) -> Tensor:
    if prediction.features is None:
        raise ValueError("This score needs features, which the prediction lacks. Use another score or method.")
    return check_features(prediction.features, num_features)


def _whiten(lower: Tensor, h: Tensor) -> Tensor:
    """L^-1 h for the rows of h: their squares are Mahalanobis distances."""
    return torch.linalg.solve_triangular(lower, h.T, upper=False).T


def _squares(h: Tensor, means: Tensor) -> Tensor:
    """Squared distance (N,) of rows to the nearest of the means."""
    return torch.cdist(h, means).square().amin(-1)


def _hash(features: Tensor, seed: int) -> Tensor:
    """A 64-bit hash (N,) of the bits of float32 rows; integer sums are exact, so the batch does not matter."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randint(-(2**63), 2**63 - 1, (1 + features.shape[1],), generator=generator).to(features.device)
    key = (features.contiguous().view(torch.int32) * (factors[1:] | 1)).sum(-1) + factors[0]
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):  # splitmix64's finaliser
        key = (key ^ ((key >> shift) & (2 ** (64 - shift) - 1))) * factor
    return key
