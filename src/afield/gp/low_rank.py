"""One precision per class for many classes: the heaviest examples of each class exactly, the rest through one matrix.

    H_k  =  r I + sum_i w_ik phi_i phi_i^T   ~   r I + a_k T + sum_{i in S_k} w_ik phi_i phi_i^T  =  Hhat_k

    S_k  the m examples with the largest weights of class k
    T    sum_i (sum_k w_ik) phi_i phi_i^T, one matrix for all classes
    a_k  weight of class k outside S_k, over the total weight of all classes

A trained network is sure of most examples, so that few weights p (1 - p) are more than tiny; but those few do not hold
all the weight, and dropping the rest would lose it. T = U L U^T makes r I + a_k T diagonal for all classes at once:

    q = U^T phi,    d_k = r + a_k L,    A_k = sqrt(w_S) Phi_S U  (m x D)
    v_k = sum_j q_j^2 / d_kj - |B_k q|^2,    B_k = C^-1 A_k D_k^-1,    C C^T = I + A_k D_k^-1 A_k^T

Prediction costs N D m K in place of N D^2 K; the features of the kept examples and B take K m D numbers each. With m
examples or fewer it is the exact posterior, otherwise `afield.diagnose.variance_error` bounds the error. Neither the
paper nor its code has this.

The difference loses digits when it is small against its first term. It is never less than that term over kappa_k,
kappa_k = 1 + |A_k D_k^-1 A_k^T|: that is the smallest value returned, and beyond kappa = 1e4 the factor is kept in
float64. All sums and factorisations are in float64 anyhow.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from afield.gp.likelihoods import LIKELIHOODS
from afield.gp.numerics import full_precision
from afield.gp.precision import Accumulator, add_products

_SINGLE = 1e4  # the largest kappa at which float32 still has three digits of the variance
_COLUMNS = 2048  # of one product in `variance`
_ROWS = 8192  # examples copied at a time


class LowRank(Accumulator):
    """`precision.Precision` for many classes, approximately: the same interface, without `downdate`.

    The order and the split of the examples do not matter, but among equal weights the first ones may stay. T and the
    total weights get every example; a class keeps an example as long as it is among its `rank` heaviest.
    """

    SUMS = ("data", "kept", "kept_weights")
    FACTORS = ("basis", "inverse", "root", "floor")
    TOTALS = ("mass", "count")
    data: Tensor  # (1, D, D) = T, float64; (0, D, D) before the first update
    mass: Tensor  # (K,) total weight of each class, float64
    kept: Tensor  # (K, m, D) = Phi_S in the model's dtype, at least float32; empty places are zero, with weight zero
    kept_weights: Tensor  # (K, m)
    basis: Tensor  # (D, D) = U^T; this and the next three are (0, ...) when out of date
    inverse: Tensor  # (K, D) = 1 / d_k
    root: Tensor  # (K, m, D) = B_k
    floor: Tensor  # (K,) = 1 / kappa_k
    count: Tensor  # examples in the sums
    momentum = None  # what falls out of a moving average cannot be told from what stays

    def __init__(self, num_features: int, num_matrices: int, rank: int) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank must be a positive number of examples to keep for each class, got {rank}.")
        self.num_features, self.num_matrices, self.rank = num_features, num_matrices, rank
        self.register_buffer("data", torch.zeros(0, num_features, num_features, dtype=torch.float64))
        self.register_buffer("mass", torch.zeros(num_matrices, dtype=torch.float64))
        self.register_buffer("kept", torch.zeros(0, rank, num_features))
        self.register_buffer("kept_weights", torch.zeros(0, rank))
        self.register_buffer("basis", torch.zeros(0, num_features))
        self.register_buffer("inverse", torch.zeros(0, num_features))
        self.register_buffer("root", torch.zeros(0, rank, num_features))
        self.register_buffer("floor", torch.zeros(0))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def allocate(self) -> None:
        """Make room for the data, as zeros, unless it is there."""
        if not self.fitted:
            with torch.inference_mode(False):
                self.data = self.data.new_zeros(1, self.num_features, self.num_features)
                self.kept = self.kept.new_zeros(self.num_matrices, self.rank, self.num_features)
                self.kept_weights = self.kept_weights.new_zeros(self.num_matrices, self.rank)

    @torch.no_grad()
    def update(self, phi: Tensor, weights: Tensor | None, *, fast: bool = False) -> None:
        """Add examples phi (N, D) with weights (N, K), None for ones. `fast` forms T's products in phi's dtype."""
        expected = (phi.shape[0], self.num_matrices)
        weights = phi.new_ones(expected) if weights is None else weights
        if weights.shape != expected:
            raise ValueError(f"weights must have shape {expected}, got {tuple(weights.shape)}.")
        if bool((weights < 0).any()):
            self._refuse_removal()
        self.allocate()
        if phi.shape[0] == 0:
            return
        self.mass += weights.sum(0, dtype=torch.float64)
        with full_precision(phi.device):
            rows = phi if fast else phi.double()
            total = weights.sum(1, keepdim=True, dtype=torch.float64).to(rows.dtype)
            add_products(self.data[0], rows * total, rows)
        self._keep(weights.T, phi, stride=0)
        self.count = self.count + phi.shape[0]
        self.stale()

    def downdate(self, phi: Tensor, weights: Tensor | None) -> None:
        """Refused: examples that gave way to the removed ones are gone."""
        self._refuse_removal()

    @torch.no_grad()
    def merge(self, other: nn.Module) -> None:
        """Add all examples of another accumulator: the result is as if this one had seen both."""
        if not isinstance(other, LowRank):
            raise ValueError("Cannot merge a low-rank posterior with an exact one: fit both with the same rank.")
        mine, theirs = ((p.num_matrices, p.num_features, p.rank) for p in (self, other))
        if mine != theirs:
            raise ValueError(f"Cannot merge precisions of (matrices, features, rank) {mine} and {theirs}.")
        if other.fitted:
            self.allocate()
            self.data += other.data.to(self.data.device)
            self.mass += other.mass.to(self.mass.device)
            self._keep(other.kept_weights, other.kept.flatten(0, 1), stride=self.rank)
            self.count = self.count + other.count.to(self.count.device)
            self.stale()

    def _keep(self, weights: Tensor, rows: Tensor, *, stride: int) -> None:
        """Offer examples with weights (K, n) to each class; number i of class k is rows[k * stride + i]."""
        weights = weights.to(self.kept_weights)
        classes = (weights.amax(1) > self.kept_weights.amin(1)).nonzero().flatten()
        if not len(classes):
            return
        both = torch.cat([self.kept_weights[classes], weights[classes]], dim=1)
        chosen = torch.zeros_like(both, dtype=torch.bool).scatter_(1, both.topk(self.rank, dim=1).indices, True)
        # Class by class there are as many places to give away as there are newcomers.
        place, new = (~chosen[:, : self.rank]).nonzero(), chosen[:, self.rank :].nonzero()
        owner = classes[place[:, 0]]
        self.kept_weights[owner, place[:, 1]] = weights[owner, new[:, 1]]
        flat, to, origin = self.kept.flatten(0, 1), owner * self.rank + place[:, 1], owner * stride + new[:, 1]
        for part, source in zip(to.split(_ROWS), origin.to(rows.device).split(_ROWS), strict=True):
            flat[part] = rows[source].to(flat)

    @torch.no_grad()
    def all_reduce(self) -> None:
        """Sum over the ranks of torch.distributed; the heaviest examples of all, each sent by the rank that has it."""
        self.allocate()
        for part in (self.data, self.mass, self.count):
            dist.all_reduce(part)
        everyone = [torch.empty_like(self.kept_weights) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, self.kept_weights)
        ordered = torch.cat(everyone, dim=1).sort(dim=1, descending=True, stable=True)  # the same on every rank
        index = ordered.indices[:, : self.rank]
        mine = index // self.rank == dist.get_rank()
        kept = torch.zeros_like(self.kept)
        kept[mine] = self.kept[mine.nonzero()[:, 0], (index % self.rank)[mine]]
        dist.all_reduce(kept)
        self.kept, self.kept_weights = kept, ordered.values[:, : self.rank].contiguous()
        self.stale()

    def diagonal(self, ridge: float, noise: float = 1.0) -> tuple[Tensor, Tensor]:
        """U (D, D) and d (K, D) in float64."""
        values, basis = torch.linalg.eigh(self.data[0])
        rest = (self.mass - self.kept_weights.sum(1, dtype=torch.float64)).clamp_min(0)
        share = rest / self.mass.sum().clamp_min(torch.finfo(torch.float64).tiny)
        return basis, ridge + torch.outer(share / noise, values.clamp_min(0))

    def rows(self, k: int, noise: float = 1.0) -> Tensor:
        """sqrt(w) Phi_S of class k (m, D) in float64."""
        return self.kept[k].double() * (self.kept_weights[k].double() / noise).sqrt()[:, None]

    @torch.inference_mode(False)
    @torch.no_grad()
    def factor(self, ridge: float, noise: float = 1.0) -> None:
        """U, 1 / d, B and 1 / kappa for the ridge r, formed in float64 and kept in the model's dtype."""
        self.check_fitted()
        basis, diagonal = self.diagonal(ridge, noise)
        inverse, floor = 1 / diagonal, torch.zeros_like(self.mass)
        root = torch.empty_like(self.kept)
        k = 0
        while k < self.num_matrices:
            rows = self.rows(k, noise) @ basis
            whitened = rows * inverse[k]
            gram = whitened @ rows.T
            floor[k] = 1 / (1 + gram.norm())
            if root.dtype != torch.float64 and float(floor[k]) * _SINGLE < 1:
                root, k = root.double(), 0  # once more, in float64
                continue
            gram.diagonal().add_(1)
            root[k] = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), whitened, upper=False)
            k += 1
        self.root = root
        self.basis, self.inverse, self.floor = basis.T.to(root).contiguous(), inverse.to(root), floor.to(root)

    def variance(self, phi: Tensor) -> Tensor:
        """phi^T Hhat_k^-1 phi (N, K). Call `factor` first."""
        self.check_factored()
        with full_precision(phi.device):
            q = F.linear(phi.to(self.root.dtype), self.basis)
            first = F.linear(q.square(), self.inverse)
            second = [
                F.linear(q, part.flatten(0, 1)).square().unflatten(-1, (-1, self.rank)).sum(-1)
                for part in self.root.split(max(1, _COLUMNS // self.rank))
            ]
            return torch.maximum(first - torch.cat(second, dim=-1), first * self.floor).to(self.kept.dtype)

    def _refuse_removal(self) -> None:
        raise ValueError(
            f"Cannot remove examples from a low-rank posterior (rank={self.rank}): those that gave way to them are "
            "gone. Fit again without them, or use rank=None."
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LowRank":
        before = {name: getattr(self, name) for name in (*self.SUMS, *self.FACTORS, "mass")}
        super()._apply(fn, recurse)
        dtype = torch.promote_types(self.kept.dtype, torch.float32)  # half precision overflows at 1 / ridge
        for name, value in before.items():  # .half() and .float() must not cost the sums their digits
            wanted = dtype if name in ("kept", "kept_weights") else value.dtype
            setattr(self, name, value.to(self.kept.device, wanted))
        if dtype != before["kept"].dtype:
            for name in self.FACTORS:
                setattr(self, name, getattr(self, name)[:0].to(dtype))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in (*self.SUMS, *self.FACTORS):  # their first dimension tells whether they are there
            saved, own = state_dict.get(prefix + name), getattr(self, name)
            full = {"data": 1, "basis": self.num_features}.get(name, self.num_matrices)
            if saved is not None and saved.shape[1:] == own.shape[1:] and saved.shape[:1] in ((0,), (full,)):
                # A factor that was kept in float64 stays so.
                dtype = torch.promote_types(own.dtype, saved.dtype) if name in self.FACTORS else own.dtype
                setattr(self, name, own.new_zeros(saved.shape, dtype=dtype))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.num_matrices} x {self.num_features}, rank={self.rank}, count={int(self.count)}"


def check_rank(
    rank: int, out_features: int, likelihood: str, covariance: str, curvature: str, momentum: float | None
) -> None:
    """A low rank is for many precisions that differ."""
    if covariance != "per_class" or out_features < 2:
        raise ValueError(
            f"rank={rank} approximates one precision for each of several outputs, got covariance="
            f'{covariance!r} and {out_features} outputs: use covariance="per_class", or rank=None.'
        )
    if LIKELIHOODS[likelihood].noisy or curvature == "unit":
        raise ValueError(
            f"With likelihood={likelihood!r} and curvature={curvature!r} all outputs have the same "
            f'precision: use covariance="shared" with rank=None, which is exact, got rank={rank}.'
        )
    if momentum is not None:
        raise ValueError(f"A moving average (momentum={momentum}) keeps no examples: use rank=None, got {rank}.")
