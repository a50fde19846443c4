"""The observation noise of a gaussian likelihood: how it differs between outputs, and between inputs.

    y = f(h) + e,    e ~ N(0, s^2 N(h)),    f_k = phi(h)^T b_k,    b ~ N(0, R / r)        (matrix normal)

s^2 is the head's `noise`, the level. R (K, K) is the shape of the noise between outputs, with determinant 1, and the
prior of the output weights has it too: an output whose unit is a thousand times smaller has weights a thousand times
larger. One factor of the precision then serves all outputs, and the posterior covariance of f(h) is v(h) R.

    noise     R                       N(h)                          learned from
    output    diagonal                R                             the mean square of each output's residuals
    full      any                     R                             their covariance
    input     diagonal                R diag(exp g_1(h), ...)       their squares, as they vary with h

g_k(h) = psi(h)^T c_k, centred on the training data, over random features of the standardised hidden vector. With
squared residuals e_i^2 of a Gaussian with mean zero,

    min over c    sum_i w_i (g_i + e_i^2 exp(-g_i)) / 2  +  t |c|^2 / 2

is convex; its expected Hessian F = sum w psi psi^T / 2 + t I does not depend on c, so that every step of Fisher scoring
uses one eigendecomposition. The prior precision t is at the fixed point of the evidence (MacKay), t |c|^2 = the number
of directions that the data determine: where the squares show no pattern, it grows until g is flat.

With `input`, examples count in the precision by exp(-mean_k g_k): a quiet one tells more about f than a loud one.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from afield.gp.likelihoods import LIKELIHOODS

NOISES = ("output", "full", "input")
FEATURES: dict[str, Any] = {
    "num_random_features": 256,
    "geometry": "standardized",
    "fraction": 0.5,
}  # of g; docs/method.md
_BUFFERS = ("root", "weight", "center", "span")
_MOST_STEPS = 100
_FLAT = 1e8  # prior precision beyond which g is flat


class NoiseShape(nn.Module):
    """R and g of a head; its buffers are there when they are known.

    root    (K, K) lower triangular, R = root root^T
    weight  (K, D), and
    center  (K,), which is taken off: g = weight psi - center
    span    (2, K), least and largest g of the training data, which no input leaves
    """

    root: Tensor
    weight: Tensor
    center: Tensor
    span: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    @property
    def between_outputs(self) -> bool:
        return "root" in self._buffers

    @property
    def correlated(self) -> bool:
        """Whether the outputs err together, so that their noise is a matrix."""
        return self.kind == "full" and self.between_outputs

    @property
    def varies(self) -> bool:
        return "weight" in self._buffers

    def take(self, buffers: Mapping[str, Tensor]) -> None:
        """Keep these, and what there is beside them."""
        for name, value in buffers.items():
            # In one layout: a factor comes by columns, a file by rows, and products would differ in the last digit.
            self.register_buffer(name, value.detach().clone(memory_format=torch.contiguous_format))

    def forget(self) -> None:
        self._buffers = {}

    def take_covariance(self, covariance: Tensor, count: float) -> None:
        """R of the covariance (K, K) of residuals, of so many examples."""
        variances = covariance.diagonal()
        variances = variances.clamp_min(1e-24 * float(variances.max())).clamp_min(1e-200)
        part = (
            count / (count + len(variances)) if self.kind == "full" else 0.0
        )  # else an example short, none has an end
        mixed = part * covariance + (1 - part) * torch.diag(covariance.diagonal())
        mixed.diagonal().copy_(variances)
        root = torch.linalg.cholesky(mixed)
        self.take({"root": root / math.exp(float(root.diagonal().log().mean()))})

    def stretch(self, factors: Tensor) -> None:
        """Multiply the standard deviations of the outputs by factors (K,), up to their common level."""
        factors = factors / factors.log().mean().exp()
        root = torch.diag(torch.ones_like(factors)) if not self.between_outputs else self.root.to(factors)
        self.take({"root": factors[:, None] * root})

    def whiten(self, values: Tensor) -> Tensor:
        """Residuals or the like (N, K), in units in which R is the identity."""
        if not self.between_outputs:
            return values
        return torch.linalg.solve_triangular(self.root.to(values), values.T, upper=False).T

    def mixed(self, values: Tensor) -> Tensor:
        """The inverse of `whiten`: independent values (..., K) of unit variance, with covariance R."""
        return values @ self.root.to(values).T if self.between_outputs else values

    def of_outputs(self, variance: Tensor) -> Tensor:
        """The variance (N, K) of the outputs, of one (N,) or (N, K) in units of R; as it is while R is not known."""
        if not self.between_outputs:
            return variance
        return (variance[:, None] if variance.dim() == 1 else variance) * self.root.square().sum(1).to(variance)

    def log_ratio(self, psi: Tensor) -> Tensor:
        """g (N, K)."""
        g = psi @ self.weight.to(psi).T - self.center.to(psi)
        return torch.minimum(torch.maximum(g, self.span[0].to(psi)), self.span[1].to(psi))

    def noise(self, level: Tensor, log_ratio: Tensor | None, like: Tensor) -> Tensor | float:
        """Variance of the noise: a number for all, (N, K) by output, or (N, K, K) where outputs are correlated.

        log_ratio  g (N, K), where the noise varies
        like       the outputs (N, K)
        """
        if log_ratio is not None:
            return self.of_outputs(level.to(like) * log_ratio.exp().to(like))
        if not self.between_outputs:
            return float(level)
        root = self.root.to(like)
        if self.correlated:
            return (level.to(like) * (root @ root.T)).expand(like.shape[0], -1, -1)
        return (level.to(like) * root.square().sum(1)).expand_as(like)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "NoiseShape":
        exact = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, value in exact.items():
            if value is not None:
                self._buffers[name] = value.to(self._buffers[name].device)  # type: ignore[union-attr]
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.forget()
        self.take({name: state_dict[prefix + name] for name in _BUFFERS if prefix + name in state_dict})
        super()._load_from_state_dict(state_dict, prefix, *args)


def noise_shape(kind: str, likelihood: str, outputs: int) -> NoiseShape | None:
    """Of a head; None where there is one noise, or none."""
    if kind not in NOISES:
        raise ValueError(f"noise must be one of {', '.join(NOISES)}, got {kind!r}.")
    if not LIKELIHOODS[likelihood].noisy:
        if kind != NOISES[0]:
            raise ValueError(
                f"noise={kind!r} is of numbers with Gaussian noise, got a {likelihood} head: give "
                'likelihood="gaussian", '
                "or leave noise out."
            )
        return None
    if kind == "full" and outputs == 1:
        raise ValueError('noise="full" is the covariance of several outputs, and this head has one: leave it out.')
    return NoiseShape(kind) if outputs > 1 or kind == "input" else None


@torch.no_grad()
def fit_log_variance(psi: Tensor, squares: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Weights (K, D), levels (K,) and prior precisions (K,) of log E[e^2] = level + psi^T c (module docstring).

    psi      (N, D)
    squares  (N, K): e^2
    weight   (N,) of the examples; None: 1
    """
    psi, squares = psi.double(), squares.double()
    w = torch.ones_like(psi[:, 0]) if weight is None else weight.double()
    w = w * (len(w) / w.sum())
    mean = (w @ psi) / len(w)
    psi = psi - mean  # the level is then apart from all else in the expected Hessian
    values, turn = torch.linalg.eigh(0.5 * (psi * w[:, None]).T @ psi)
    values, turned = values.clamp_min(0), psi @ turn
    fits = [_fit_one(turned, values, e2, w) for e2 in squares.unbind(1)]
    weights, levels, precisions = (torch.stack([fit[i] for fit in fits]) for i in range(3))
    weights = weights @ turn.T
    return weights, levels - weights @ mean, precisions


def _fit_one(psi: Tensor, values: Tensor, squares: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one output, in coordinates in which the expected Hessian is diagonal."""
    squares = squares.clamp_min(1e-12 * float(squares.mean()) + 1e-300)
    level = (w @ squares / len(w)).log()
    c, t = torch.zeros_like(values), 1.0

    def loss(level: Tensor, c: Tensor) -> float:
        g = level + psi @ c
        return float(0.5 * (w @ (g + squares * torch.exp(-g))) + 0.5 * t * c.square().sum())

    for _ in range(_MOST_STEPS):
        slope = 0.5 * w * (1 - squares * torch.exp(-(level + psi @ c)))
        down = slope.sum(), psi.T @ slope + t * c
        step = 2 * down[0] / len(w), down[1] / (values + t)
        gain, length = float(down[0] * step[0] + down[1] @ step[1]), 1.0
        before = loss(level, c)
        while (
            length > 1e-6 and not loss(level - length * step[0], c - length * step[1]) <= before - 1e-4 * length * gain
        ):
            length /= 2
        level, c = level - length * step[0], c - length * step[1]
        known = float((values / (values + t)).sum())
        last, t = t, min(known / max(float(c.square().sum()), 1e-300), _FLAT)
        if gain < 1e-10 * len(w) and abs(t / last - 1) < 1e-3:
            break
    return c, level, torch.tensor(t, dtype=torch.float64)
