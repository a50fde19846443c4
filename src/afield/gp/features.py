"""Random features: a finite map phi whose inner products approximate a kernel.

    phi(h) = sqrt(2 / D) a(W z(h) / l + b)          phi(h)^T phi(h') -> k(z, z')  at rate D^-1/2

`W` and `b` are drawn once and frozen; `l` is the length scale; `z` are the coordinates of the hidden vector in a
geometry (`gp.geometry`). Writing r = |z - z'| / l and u = (z / l, 1):

    rbf        a = cos    exp(-r^2 / 2)                                   W rows ~ N(0, I)      b ~ U(0, 2 pi)
    matern32   a = cos    (1 + sqrt(3) r) exp(-sqrt(3) r)                 Student t, 3 degrees  b ~ U(0, 2 pi)
    matern52   a = cos    (1 + sqrt(5) r + 5 r^2 / 3) exp(-sqrt(5) r)     Student t, 5 degrees  b ~ U(0, 2 pi)
    arccos     a = relu   |u||u'| (sin t + (pi - t) cos t) / pi           W rows ~ N(0, I)      b ~ N(0, 1)

with t the angle between u and u'. Paper: eq. (rff_gp) and its footnote on other kernels. The arc-cosine kernel
is not stationary: its variance grows with the norm of z instead of levelling off.

With `orthogonal=True` the rows of W come in blocks of mutually orthogonal directions with independent lengths,
which has the same expectation and a smaller error. Every block is a fresh draw: blocks drawn from one seed
would be copies, and worse than plain sampling.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from afield.bounds.eager import eager
from afield.gp.geometry import GEOMETRIES
from afield.gp.numerics import ExactBuffers, full_precision
from afield.registry import Registry

# The length scale as a fraction of the median distance between hidden vectors; docs/defaults.md has the evidence. A
# fixed number collapses for many learning rates, because it knows nothing of the size of the hidden vectors; a length
# scale that went on following them runs away with them.
LENGTH_SCALE_FRACTION = 1.0
_MOST_PAIRED_ROWS = 1024
_LEARNED = ("shift", "gain", "length_scale", "radius")  # from the data


@dataclass(frozen=True)
class Kernel:
    """A kernel as a recipe for random features, with its exact value for comparison."""

    activation: Callable[[Tensor], Tensor]
    of_row: Callable[[np.ndarray], np.ndarray]  # the activation, of an array
    exact: Callable[[Tensor, Tensor], Tensor]
    degrees: int | None = None  # of the Student t distribution of the frequencies; None: Gaussian
    gaussian_bias: bool = False  # otherwise uniform phases


def _rbf(a: Tensor, b: Tensor) -> Tensor:
    return torch.exp(-0.5 * torch.cdist(a, b) ** 2)


def _matern32(a: Tensor, b: Tensor) -> Tensor:
    r = math.sqrt(3) * torch.cdist(a, b)
    return (1 + r) * torch.exp(-r)


def _matern52(a: Tensor, b: Tensor) -> Tensor:
    r = math.sqrt(5) * torch.cdist(a, b)
    return (1 + r + r**2 / 3) * torch.exp(-r)


def _arccos(a: Tensor, b: Tensor) -> Tensor:
    u, v = F.pad(a, (0, 1), value=1.0), F.pad(b, (0, 1), value=1.0)
    norms = u.norm(dim=-1)[:, None] * v.norm(dim=-1)
    angle = torch.acos((u @ v.T / norms).clamp(-1, 1))
    return norms * (angle.sin() + (math.pi - angle) * angle.cos()) / math.pi


KERNELS: Registry[Kernel] = Registry(
    "kernel",
    rbf=Kernel(torch.cos, np.cos, _rbf),
    matern32=Kernel(torch.cos, np.cos, _matern32, degrees=3),
    matern52=Kernel(torch.cos, np.cos, _matern52, degrees=5),
    arccos=Kernel(torch.relu, lambda phase: np.maximum(phase, 0), _arccos, gaussian_bias=True),
)


def median_distance(h: Tensor) -> float:
    """The median distance between distinct rows of h (N, d), over at most 1024 evenly spaced rows."""
    step = max(1, math.ceil(h.shape[0] / _MOST_PAIRED_ROWS))
    distances = torch.pdist(h[::step].double())
    distances = distances[distances > 0]
    return float(distances.median()) if distances.numel() else math.nan


class RandomFeatures(ExactBuffers):
    """The frozen map h (N, in_features) -> phi (N, num_random_features).

    `length_scale=None` takes a `fraction` of the median distance between the hidden vectors of the first batch seen in
    training mode, the same on every rank; `adapt(h)` sets it from given vectors. Until then, evaluation uses the batch
    at hand and stores nothing.

    `geometry`: a name of `gp.geometry.GEOMETRIES`; moments that it standardises by are taken by `adapt`.

    `grow`: multiply phi by max(1, |h|^2 / R^2), R the largest |h| among the vectors given to `adapt`. Beyond the
    data the prior then outgrows a mean that is linear in h; on the data nothing changes.

    `projection`: multiply wide coordinates by a fixed Gaussian matrix (their number, projection), scaled to keep
    distances in expectation (the paper's appendix: "input dimension projection").
    """

    weight: Tensor
    phase: Tensor
    length_scale: Tensor
    shift: Tensor
    gain: Tensor
    radius: Tensor
    projector: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_random_features: int = 1024,
        *,
        kernel: str = "rbf",
        length_scale: float | None = None,
        orthogonal: bool = True,
        geometry: str = "raw",
        projection: int | None = None,
        grow: bool = False,
        fraction: float = LENGTH_SCALE_FRACTION,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if length_scale is not None and not 0 < length_scale < math.inf:
            raise ValueError(f"length_scale must be a positive number or None (from the data), got {length_scale}.")
        for name, value in (("in_features", in_features), ("num_random_features", num_random_features)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        space = GEOMETRIES[geometry]
        self.in_features, self.num_random_features = in_features, num_random_features
        self.kernel, self.geometry = kernel, geometry
        self.fraction, self.grow = fraction, grow
        width, projector = in_features + space.extra, None
        moments = width if space.standardized else 0
        if projection is not None:
            if not 1 <= projection <= in_features:
                raise ValueError(f"projection must lie between 1 and in_features = {in_features}, got {projection}.")
            projector = torch.randn(width, projection, generator=generator) / math.sqrt(projection)
            width = projection
        self.register_buffer("projector", projector)
        recipe = KERNELS[kernel]
        directions = (_orthogonal_gaussian if orthogonal else torch.randn)(
            num_random_features, width, generator=generator
        )
        if recipe.degrees is not None:
            chi2 = torch.randn(num_random_features, recipe.degrees, generator=generator).square().sum(-1)
            directions = directions * (recipe.degrees / chi2).sqrt()[:, None]
        self.register_buffer("weight", directions)
        if recipe.gaussian_bias:
            phase = torch.randn(num_random_features, generator=generator)
        else:
            phase = 2 * math.pi * torch.rand(num_random_features, generator=generator)
        self.register_buffer("phase", phase)
        # A float64 scalar does not promote float32 activations, and keeps the digits of a float64 model.
        self.register_buffer("length_scale", torch.tensor(length_scale or math.nan, dtype=torch.float64))
        self.register_buffer("shift", torch.full((moments,), math.nan))
        self.register_buffer("gain", torch.full((moments,), math.nan))
        self.register_buffer("radius", torch.tensor(math.nan if grow else math.inf, dtype=torch.float64))
        self._fixed = length_scale is not None
        self.adapted = False  # whether the length scale and the moments are known
        self.forget_data()
        self.register_load_state_dict_post_hook(_after_load)

    def adapt(self, h: Tensor, moments: tuple[Tensor, Tensor] | None = None) -> None:
        """Take the moments and the length scale from the hidden vectors h (N, d).

        `moments`: mean and standard deviation of `mapped` vectors, where they are known from more data than h. A length
        scale that was given as a number stays.
        """
        found = self._from_data(h, moments)
        if any(bool(torch.isnan(t).any()) for t in found):
            raise ValueError("Standardisation needs finite hidden vectors, got NaN or infinity in the first batch.")
        for name, value in zip(_LEARNED, found, strict=True):  # replaced, not written into: predictions may read them
            own = getattr(self, name)
            setattr(self, name, value.to(own.device, own.dtype, copy=True))
        self.adapted = True

    def forget_data(self) -> None:
        """Take what comes from the data anew: `adapt` has to be called again."""
        self.adapted = self._fixed and not self.shift.numel() and not self.grow

    def forward(self, h: Tensor, *, limited: bool = True) -> Tensor:
        """phi (N, D). Computed in at least float32: half-precision phases would drown the cosine.

        limited  far away, numbers overflow, and zero times infinity is NaN: large ones in their place make an infinite
                 variance instead. A posterior must not observe such rows, and asks for NaN
        """
        with full_precision(h.device):
            dtype = self.weight.dtype
            wide = torch.promote_types(dtype, torch.float32)
            h = h.to(wide)
            shift, gain, length_scale, radius = self._learned() if self.adapted else self._first_batch(h)
            large = torch.finfo(dtype).max ** 0.75 if limited else math.inf
            if GEOMETRIES[self.geometry].bounded and self.shift.numel():
                scaled = self._coordinates(h, shift.to(wide), gain.to(wide) / length_scale)
            else:
                z = self._coordinates(h, shift.to(wide), gain.to(wide))
                scaled = (z / length_scale).clamp(-large, large) + 0 * z  # what is infinite itself becomes NaN
            phase = F.linear(scaled, self.weight.to(wide), self.phase.to(wide))
            factor: float | Tensor = math.sqrt(2 / self.num_random_features)
            if self.grow:
                factor = (h / radius).square().sum(-1, keepdim=True).clamp(1.0, large) * factor
            phi = _activate(KERNELS[self.kernel].activation, phase, factor)
            return (phi.clamp(-large, large) if KERNELS[self.kernel].gaussian_bias else phi).to(
                dtype
            )  # a cosine is bounded

    def _learned(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.shift, self.gain, self.length_scale, self.radius

    @eager
    def _first_batch(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if not self.training:
            return self._from_data(h, fallback=1.0)
        self.adapt(h)
        if dist.is_available() and dist.is_initialized():
            for own in self._learned():
                dist.broadcast(own, src=0)
        return self._learned()

    def _from_data(
        self, h: Tensor, moments: tuple[Tensor, Tensor] | None = None, fallback: float | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h = h.detach().to(torch.promote_types(self.weight.dtype, torch.float32))
        shift, gain, scale = self.shift, self.gain, float(self.length_scale)
        if GEOMETRIES[self.geometry].standardized:
            if moments is None:
                mapped = self.mapped(h)[self.counted(h)]
                mapped = mapped if len(mapped) else torch.zeros_like(shift)[None]
                moments = mapped.mean(0), mapped.std(0, correction=0)
            shift, std = moments
            largest = torch.where(std.max() > 0, std.max(), 1.0)
            # A coordinate that never moves in-domain has the scale of the one that moves most, so that it still counts
            # when a foreign input wakes it.
            gain = 1 / torch.where(std > 1e-6 * largest, std, largest)
            shift, gain = shift.to(h), gain.to(h)
        if not self._fixed or math.isnan(scale):
            z = self._coordinates(h, shift, gain)
            scale = self.fraction * median_distance(z)
            if not math.isfinite(scale) and GEOMETRIES[self.geometry].standardized:
                fallback = self.fraction * math.sqrt(2 * z.shape[1])  # of standardised vectors in general
            if not math.isfinite(scale):
                if fallback is None:
                    raise ValueError(
                        "length_scale=None takes the length scale from the distances between the hidden vectors of "
                        f"the first training batch, and needs two finite ones that differ, got {h.shape[0]} row(s). "
                        "Give a larger first batch, or a number as length_scale."
                    )
                scale = fallback
        radius = h.norm(dim=-1).amax().clamp_min(1e-30).to(self.radius) if self.grow else self.radius
        return shift, gain, self.length_scale.new_tensor(scale), radius

    def distances(self, h: Tensor, others: Tensor) -> Tensor:
        """Distances (N, M) between hidden vectors (N, d) and (M, d), as the kernel sees them: in length scales."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        shift, gain, length_scale, _ = (own.to(wide) for own in self._learned())
        z, z_of_others = (self._coordinates(rows.to(wide), shift, gain) / length_scale for rows in (h, others))
        return torch.cdist(z, z_of_others)

    def mapped(self, h: Tensor) -> Tensor:
        """The coordinates of h before they are standardised."""
        return GEOMETRIES[self.geometry].map(h)

    def counted(self, h: Tensor) -> Tensor:
        """Which vectors (N,) count in the moments: of directions, those that have one."""
        return h.any(-1) if GEOMETRIES[self.geometry].bounded else torch.ones_like(h[:, 0], dtype=torch.bool)

    def _coordinates(self, h: Tensor, shift: Tensor, gain: Tensor) -> Tensor:
        z = self.mapped(h)
        if GEOMETRIES[self.geometry].standardized:
            z = (z - shift).mul_(gain)
        return z if self.projector is None else z @ self.projector.to(z.dtype)

    @property
    def exact(self) -> tuple[str, ...]:
        return "length_scale", "radius"

    def extra_repr(self) -> str:
        scale = f"{float(self.length_scale):.4g}" if self.adapted else "from the first batch"
        return (
            f"{self.in_features}, {self.num_random_features}, kernel={self.kernel!r}, geometry={self.geometry!r}, "
            f"length_scale={scale}"
        )


def _activate(activation: Callable[[Tensor], Tensor], phase: Tensor, factor: float | Tensor) -> Tensor:
    """The activation times a factor; in the place of the phases where nobody follows: memory costs more than cosines"""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or activation is not torch.cos:
        return activation(phase) * factor
    return phase.cos_().mul_(factor)


def _after_load(module: nn.Module, _: object) -> None:
    assert isinstance(module, RandomFeatures)
    module.adapted = not any(bool(torch.isnan(t).any()) for t in module._learned())


def _orthogonal_gaussian(rows: int, columns: int, *, generator: torch.Generator | None) -> Tensor:
    """Rows of N(0, I) length in blocks of orthogonal directions, each block its own draw."""
    blocks = []
    for start in range(0, rows, columns):
        q, r = torch.linalg.qr(torch.randn(columns, columns, generator=generator))
        # Householder QR fixes the signs of its columns; undoing that makes the rotation Haar distributed.
        blocks.append((q * r.diagonal().sign())[: rows - start])
    lengths = torch.randn(rows, columns, generator=generator).norm(dim=1)
    return torch.cat(blocks) * lengths[:, None]
