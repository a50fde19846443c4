"""How far a hidden vector lies from the nearest class, relative to all the data: Mahalanobis distance on unit vectors.

    u = h / |h|,    r(h) = min_k |A (u - m_k)|^2 - |B (u - m)|^2,    A^T A = (S + j I)^-1,  B^T B = (S0 + j I)^-1

    m_k, m   mean of class k, and of the classes
    S, S0    covariance within the classes, and that plus the covariance of the class means
    j        a part of the mean diagonal of S: a thousandth, for directions in which nothing varies, and d / n, since n
             examples do not know a covariance of d dimensions any better

Relative Mahalanobis distance (Ren et al. 2021) on unit vectors (Mueller and Hein 2025). What varies in all classes
alike cancels, so it sees what tells the classes apart, where a variance over all of the hidden space is drowned.

In the background m, S0 all classes count alike, which they do not in the published form. Where most examples are of
one class, that form has the background of this class: its own examples are then the furthest from nothing, and the
distance finds less than chance (docs/results.md). With classes of one size the two are the same.

A sum over examples like the precision beside it: n_k, sum_k u and sum u u^T, in float64. Unit vectors are of one size,
so the raw moments lose no digits that matter, and examples can be removed again exactly.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from afield.gp.geometry import GEOMETRIES
from afield.gp.numerics import full_precision
from afield.gp.precision import Accumulator

_JITTER = 1e-3  # of the mean variance within the classes


class ClassDistance(Accumulator):
    """The moments of the unit vectors of each class, and the distance r(h) (N,) that they make."""

    SUMS = ("data", "first")
    FACTORS = ("root", "shift", "centers", "offsets")
    TOTALS = ("count",)
    data: Tensor  # (1, d, d) = sum u u^T, float64; (0, d, d) before the first update
    first: Tensor  # (1, K, d) = sum_k u, float64
    count: Tensor  # (K,) = n_k: the weight of its examples
    root: Tensor  # (2 d, d) = A over B in the model's dtype, at least float32; (0, d) when out of date
    shift: Tensor  # (d,) = m: distances are taken from there, because those from the origin would cancel in float32
    centers: Tensor  # (K, d) = -2 A (m_k - m)
    offsets: Tensor  # (K,) = |A (m_k - m)|^2, infinite where a class has no example

    def __init__(self, in_features: int, num_classes: int) -> None:
        super().__init__()
        self.in_features, self.num_classes = in_features, num_classes
        self.register_buffer("data", torch.zeros(0, in_features, in_features, dtype=torch.float64))
        self.register_buffer("first", torch.zeros(0, num_classes, in_features, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(num_classes, dtype=torch.float64))
        self.register_buffer("root", torch.zeros(0, in_features))
        self.register_buffer("shift", torch.zeros(0))
        self.register_buffer("centers", torch.zeros(0, in_features))
        self.register_buffer("offsets", torch.zeros(0))

    def allocate(self) -> None:
        """Make room for the moments, as zeros, unless it is there."""
        if not self.fitted:
            with torch.inference_mode(False):
                self.data = self.data.new_zeros(1, self.in_features, self.in_features)
                self.first = self.first.new_zeros(1, self.num_classes, self.in_features)

    @torch.no_grad()
    def update(self, h: Tensor, classes: Tensor, weights: Tensor | None = None, *, sign: float = 1.0) -> None:
        """Add examples h (N, d) of these classes (N,), or remove them (sign -1), with weights (N,) or ones."""
        self.allocate()
        u = _unit(h.double())
        weight = torch.full_like(u[:, 0], sign) if weights is None else sign * weights.to(u)
        weighted = u * weight[:, None]
        self.data[0].addmm_(weighted.T, u)
        self.first[0].index_add_(0, classes, weighted)
        self.count = self.count.index_add(0, classes, weight)
        self.stale()

    @torch.no_grad()
    def merge(self, other: "ClassDistance") -> None:
        """Add all examples of another accumulator."""
        if other.fitted:
            self.allocate()
            self.data += other.data.to(self.data.device)
            self.first += other.first.to(self.first.device)
            self.count = self.count + other.count.to(self.count.device)
            self.stale()

    def all_reduce(self) -> None:
        """Sum over the ranks of torch.distributed; a rank without examples adds zeros."""
        self.allocate()
        for part in (self.data, self.first, self.count):
            dist.all_reduce(part)
        self.stale()

    def resize(self, num_classes: int) -> None:
        """Make room for more classes, at the end."""
        more = num_classes - self.num_classes
        if more <= 0:
            return
        self.num_classes = num_classes
        self.first = F.pad(self.first, (0, 0, 0, more))
        self.count = F.pad(self.count, (0, more))
        self.stale()

    @torch.no_grad()
    def drop(self, index: int) -> None:
        """Forget a class whose number the later ones take; of what its examples add to sum u u^T, the expected part."""
        keep = [k for k in range(self.num_classes) if k != index]
        self.num_classes -= 1
        if self.fitted and float(self.count[index]) > 0:
            count, total = self.count[index], self.first[0, index]
            within = self._moments()[2]
            self.data = self.data - (count * within + torch.outer(total, total) / count)
        self.first, self.count = self.first[:, keep], self.count[keep]
        self.stale()

    def _moments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Which classes are there, their means (K, d), covariance within; mean and covariance of the background."""
        count, total = self.count.clamp_min(0), self.count.sum().clamp_min(1e-12)
        there = count > 1e-6 * count.amax()  # what is left of a class that was removed is rounding
        means = self.first[0] / torch.where(there, count, 1.0)[:, None]
        within = self.data[0] / total - (means * (torch.where(there, count, 0.0) / total)[:, None]).T @ means
        share = there.to(means) / there.sum().clamp_min(1)
        mean = share @ means
        between = ((means - mean) * share[:, None]).T @ (means - mean)
        return there, means, within, mean, within + between

    @torch.inference_mode(False)
    @torch.no_grad()
    def factor(self) -> None:
        """Make means and roots of the moments, in float64, and keep them in the model's dtype."""
        there, means, within, mean, background = self._moments()
        few = self.in_features / self.count.clamp_min(0).sum().clamp_min(1.0)  # what so many rows cannot know
        jitter = (_JITTER + few) * within.diagonal().mean().clamp_min(1e-12)
        a, b, kind = _inverse_root(within, jitter), _inverse_root(background, jitter), self.root.dtype
        centers = (means - mean) @ a.T
        self.root, self.centers, self.shift = torch.cat([a, b]).to(kind), (-2 * centers).to(kind), mean.to(kind)
        self.offsets = torch.where(there, centers.square().sum(1), torch.inf).to(kind)

    def forward(self, h: Tensor) -> Tensor:
        """r (N,). Call `factor` first."""
        self.check_factored()
        with full_precision(h.device):
            both = F.linear(_unit(h.to(self.root.dtype)) - self.shift, self.root)  # A (u - m) and B (u - m)
            near = F.linear(both[:, : self.in_features], self.centers, self.offsets).amin(-1)
            a, b = both.square().unflatten(-1, (2, self.in_features)).sum(-1).unbind(-1)
            return a + near - b

    @property
    def exact(self) -> tuple[str, ...]:
        return (*self.SUMS, *self.TOTALS)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.make_room(state_dict, prefix, (*self.SUMS, *self.FACTORS))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.num_classes}"


def _unit(h: Tensor) -> Tensor:
    return GEOMETRIES["unit"].map(h)


def _inverse_root(covariance: Tensor, jitter: Tensor) -> Tensor:
    """L^-1 for L L^T = covariance + jitter I; a covariance that rounding has made indefinite has its negative parts
    left out."""
    identity = torch.eye(len(covariance), dtype=covariance.dtype, device=covariance.device)
    lower, failed = torch.linalg.cholesky_ex(covariance + jitter * identity)
    if int(failed):
        values, vectors = torch.linalg.eigh(covariance)
        return (vectors / (values.clamp_min(0) + jitter).sqrt()).T
    return torch.linalg.solve_triangular(lower, identity, upper=False)
