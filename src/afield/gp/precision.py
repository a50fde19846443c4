"""The Laplace posterior of the output weights: a precision matrix that is a sum over examples.

    H = r I + sum_i w_i phi_i phi_i^T          v(h) = phi(h)^T H^-1 phi(h) = |L^-1 phi(h)|^2,   H = L L^T

`r` is the ridge, a prior precision. The weight w is the curvature of -log p(y | f) (`gp.likelihoods`), times the weight
of the example where it has one; a gaussian's noise variance enters at factorisation.

One precision per class uses the weight of its class. One shared by all classes uses the largest weight, which
for a softmax is the paper's p* (1 - p*), p* the top probability. The largest weight bounds every class's
precision from above, so its covariance bounds theirs from *below* (the paper's appendix says upper bound).
`curvature="unit"` sets w = 1, as the authors' code does: p (1 - p) vanishes on a network that fits its training
set, and the variance then forgets the data.

The data term is summed and factorised in float64. With a ridge of 1e-3 and 20,000 examples the condition number
is 2e9: a float32 inverse is then off by 340% and has negative variances; |L^-1 phi|^2 cannot be negative.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from afield.errors import NotFitted
from afield.gp.likelihoods import LIKELIHOODS
from afield.gp.numerics import ExactBuffers, full_precision

COVARIANCES = ("shared", "per_class")
CURVATURE_CHOICES = ("auto", "likelihood", "unit")
BLOCK = 256  # rows of a triangle that are multiplied at once: enough for a matrix product to run at full speed
_NARROW = 128  # the same where few examples stand on the other side, which fewer rows feed as well
_FEW = 64  # examples whose products are put together before their norm is taken: fewer calls


def choose_curvature(curvature: str, likelihood: str, covariance: str) -> str:
    """Resolve "auto": unit for shared classification, where the evidence favours it; the likelihood's otherwise."""
    of_classes = LIKELIHOODS[likelihood].of_classes
    if curvature not in CURVATURE_CHOICES:
        raise ValueError(f"curvature must be one of {', '.join(CURVATURE_CHOICES)}, got {curvature!r}.")
    if curvature != "auto":
        return curvature
    return "unit" if of_classes and covariance == "shared" else "likelihood"


def curvature_weights(logits: Tensor, *, likelihood: str, covariance: str, curvature: str) -> Tensor:
    """The weights w (N, 1) shared, or (N, K) per class, for logits (N, K)."""
    weights = torch.ones_like(logits) if curvature == "unit" else LIKELIHOODS[likelihood].curvature(logits)
    return weights.amax(dim=-1, keepdim=True) if covariance == "shared" else weights


def check_weights(weights: Tensor, rows: int) -> Tensor:
    """Weights (N,) of examples, finite and not negative, or an error."""
    if weights.shape != (rows,):
        raise ValueError(f"weights must have shape ({rows},), one for each example, got {tuple(weights.shape)}.")
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise ValueError("weights must be finite and not negative.")
    return weights.detach()


class Accumulator(ExactBuffers):
    """Sums over examples, and a factor made of them; the first dimension of either is 0 where it is not there.

    `SUMS`, `FACTORS` and `TOTALS` (which are always there) name the buffers of a kind.
    """

    SUMS: ClassVar[tuple[str, ...]] = ("data",)
    FACTORS: ClassVar[tuple[str, ...]] = ("root",)
    TOTALS: ClassVar[tuple[str, ...]] = ("count",)
    data: Tensor
    root: Tensor

    @property
    def fitted(self) -> bool:
        return self.data.shape[0] > 0

    @property
    def factored(self) -> bool:
        return self.root.shape[0] > 0

    def reset(self) -> None:
        """Forget all examples."""
        self.free()
        for name in self.TOTALS:
            setattr(self, name, torch.zeros_like(getattr(self, name)))
        self.stale()

    def unshare(self) -> None:
        """Copy the sums, which are added to in place, so that whoever holds the old ones keeps them."""
        for name in (*self.SUMS, *self.TOTALS):
            setattr(self, name, getattr(self, name).clone())

    def stale(self) -> None:
        """Drop the factor: the sums, the ridge or the noise have changed."""
        for name in self.FACTORS:
            setattr(self, name, getattr(self, name)[:0].clone())

    def free(self) -> None:
        """Drop the sums behind the factor: a copy that only predicts does not need them."""
        for name in self.SUMS:
            setattr(self, name, getattr(self, name)[:0].clone())

    def check_fitted(self) -> None:
        if not self.fitted:
            raise NotFitted(
                "The posterior is not fitted, so there is no variance yet. "
                "Call afield.fit_posterior(model, train_loader), or head.observe(hidden) on your training data."
            )

    def check_factored(self) -> None:
        if not self.factored:
            raise NotFitted("The precision is not factorised: call factor(ridge) first.")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = [self._buffers[name] for name in self.FACTORS]
        super()._apply(fn, recurse)
        for name, value in zip(self.FACTORS, before, strict=True):
            own = getattr(self, name)
            if value is not None and own.dtype != value.dtype:  # make it again: half precision overflows at 1 / ridge
                setattr(self, name, own[:0].to(torch.promote_types(own.dtype, torch.float32)))
        return self


class Precision(Accumulator):
    """The data term G = sum w phi phi^T of one precision (or one per class), and the factor of r I + G.

    An accumulator: `reset`, `update`, `downdate`, `merge`, then `factor` and `variance`. The order and the split
    into batches do not matter. With `momentum=m` it is the paper's moving average over batches instead,

        G_t = m G_{t-1} + (1 - m) sum_batch w phi phi^T,        used as G_t / (1 - m^t),

    bias-corrected, with the ridge outside the average so that it cannot wash out. It settles at the expected sum
    of one batch: the exact sum scaled by batch size / N, so that ridge r there plays the part of r N / batch size.
    """

    TOTALS = ("count", "num_updates")
    data: Tensor  # (C, D, D) float64, or (0, D, D) before the first update
    root: Tensor  # (C, D, D) = L^-1 in the model's dtype, at least float32; (0, D, D) when out of date
    count: Tensor  # examples in the sum
    num_updates: Tensor  # batches in the moving average

    def __init__(self, num_features: int, num_matrices: int = 1, *, momentum: float | None = None) -> None:
        super().__init__()
        if momentum is not None and not 0 < momentum < 1:
            raise ValueError(f"momentum must lie strictly between 0 and 1, or be None (exact sum), got {momentum}.")
        self.num_features, self.num_matrices, self.momentum = num_features, num_matrices, momentum
        self.register_buffer("data", torch.zeros(0, num_features, num_features, dtype=torch.float64))
        self.register_buffer("root", torch.zeros(0, num_features, num_features))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("num_updates", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self, phi: Tensor, weights: Tensor | None, *, fast: bool = False) -> None:
        """Add examples phi (N, D) with weights (N, C), None for ones. `fast` forms the batch product in phi's dtype.

        Fast products cost two digits (worst relative error 1.5e-3 instead of 2e-5 at condition number 2e7).
        """
        if weights is not None and weights.shape != (phi.shape[0], self.num_matrices):
            raise ValueError(
                f"weights must have shape ({phi.shape[0]}, {self.num_matrices}), got {tuple(weights.shape)}."
            )
        self.allocate()
        if phi.shape[0] == 0:  # an empty batch must not age a moving average
            return
        if self.momentum is None:
            self._add(phi, weights, 1.0, fast)
        else:
            self.data.mul_(self.momentum)
            self._add(phi, weights, 1.0 - self.momentum, fast)
            self.num_updates = self.num_updates + 1
        self.count = self.count + phi.shape[0]
        self.stale()

    @torch.no_grad()
    def downdate(self, phi: Tensor, weights: Tensor | None) -> None:
        """Remove examples that were added before, with the weights they were added with."""
        self._refuse_moving_average("remove examples from")
        if phi.shape[0] > int(self.count):
            raise ValueError(
                f"Cannot remove {phi.shape[0]} examples from a precision of {int(self.count)}: "
                "remove only examples that were observed."
            )
        self._add(phi, weights, -1.0, fast=False)
        self.count = self.count - phi.shape[0]
        self.stale()

    @torch.no_grad()
    def merge(self, other: nn.Module) -> None:
        """Add all examples of another accumulator: the result is as if this one had seen both, exactly."""
        if not isinstance(other, Precision):
            raise ValueError("Cannot merge an exact posterior with a low-rank one: fit both with the same rank.")
        self._refuse_moving_average("merge")
        other._refuse_moving_average("merge")
        mine, theirs = (self.num_matrices, self.num_features), (other.num_matrices, other.num_features)
        if mine != theirs:
            raise ValueError(f"Cannot merge precisions of (matrices, features) {mine} and {theirs}.")
        if other.fitted:
            self.allocate()
            self.data += other.data.to(self.data.device)
            self.count = self.count + other.count.to(self.count.device)
            self.stale()

    def all_reduce(self) -> None:
        """Sum over the ranks of torch.distributed; a rank without examples adds zeros."""
        self.allocate()
        for part in (self.data, self.count):
            dist.all_reduce(part)
        self.stale()

    @torch.inference_mode(False)
    @torch.no_grad()
    def factor(self, ridge: float, noise: float = 1.0) -> None:
        """Factorise r I + G / noise in float64 and keep L^-1 in the model's dtype."""
        self.check_fitted()
        correction = 1.0 if self.momentum is None else 1.0 - self.momentum ** int(self.num_updates)
        identity = torch.eye(self.num_features, dtype=torch.float64, device=self.data.device)
        root = torch.empty_like(self.data, dtype=self.root.dtype)
        for k, data in enumerate(self.data):  # one at a time: a batched factorisation would triple the memory
            precision = torch.add(ridge * identity, data, alpha=1.0 / (noise * correction))
            lower, failed = torch.linalg.cholesky_ex(precision)
            if int(failed):
                raise ValueError(
                    "The posterior precision is not positive definite. Either examples were removed that had not "
                    f"been observed, or the ridge ({ridge:g}) is too small for this data: use a larger one."
                )
            root[k] = torch.linalg.solve_triangular(lower, identity, upper=False)
        self.root = root

    def variance(self, phi: Tensor) -> Tensor:
        """phi^T H^-1 phi: (N,) for one matrix, (N, C) for one per class. Call `factor` first."""
        self.check_factored()
        with full_precision(phi.device):
            phi = phi.to(self.root.dtype)
            if self.num_matrices == 1:
                return _squared_norm(phi, self.root[0])
            return torch.stack([_squared_norm(phi, root) for root in self.root], dim=-1)

    def allocate(self) -> None:
        """Make room for the data term, as zeros, unless it is there."""
        if not self.fitted:
            with torch.inference_mode(False):
                self.data = self.data.new_zeros(self.num_matrices, self.num_features, self.num_features)

    def _add(self, phi: Tensor, weights: Tensor | None, sign: float, fast: bool) -> None:
        phi = phi if fast else phi.double()
        columns = [None] * self.num_matrices if weights is None else weights.to(phi.dtype).unbind(-1)
        for data, w in zip(self.data, columns, strict=True):
            with full_precision(phi.device):
                add_products(data, phi if w is None else phi * w[:, None], phi, sign)

    def _refuse_moving_average(self, what: str) -> None:
        if self.momentum is not None:
            raise ValueError(f"Cannot {what} a moving average (momentum={self.momentum}); use momentum=None.")

    @property
    def exact(self) -> tuple[str, ...]:
        return self.SUMS

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.make_room(state_dict, prefix, ("data", "root"), rows=(0, self.num_matrices))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{self.num_matrices} x {self.num_features} x {self.num_features}, count={int(self.count)}"


def _blocks(size: int, rows: int = BLOCK) -> list[tuple[int, int]]:
    """(start, end) of blocks of rows; of a triangle, each needs the columns before its end only."""
    return [(start, min(start + rows, size)) for start in range(0, size, rows)]


def _squared_norm(phi: Tensor, root: Tensor) -> Tensor:
    """|L^-1 phi|^2 (N,); L^-1 is lower triangular."""
    parts = (F.linear(phi[:, :end], root[start:end, :end]) for start, end in _blocks(len(root), _NARROW))
    if not torch.compiler.is_compiling() and len(phi) <= _FEW:  # a graph has batches of every size
        return torch.linalg.vector_norm(torch.cat(list(parts), dim=-1), dim=-1).square()
    norms = [torch.linalg.vector_norm(part, dim=-1).square() for part in parts]
    return sum(norms[1:], start=norms[0])


def add_products(data: Tensor, weighted: Tensor, phi: Tensor, sign: float = 1.0) -> None:
    """data += sign * weighted^T phi, which is symmetric: the lower blocks are computed, the upper ones copied."""
    size = len(data)
    for start, end in _blocks(size) if len(phi) >= BLOCK else [(0, size)]:  # a small batch is not worth the copy
        left, right, block = weighted[:, start:end].T, phi[:, :end], data[start:end, :end]
        if phi.dtype == data.dtype:
            block.addmm_(left, right, alpha=sign)
        else:
            block.add_(left @ right, alpha=sign)
        data[:start, start:end] = block[:, :start].T
