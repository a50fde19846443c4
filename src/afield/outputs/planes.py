"""The posterior at every position of an input, without turning its hidden vectors into rows.

What comes out of a convolution stands by channel, and a pixel has few random features. Products with matrices on the
left leave it so; what is done to coordinates before the phases, one by one, is folded into the frequencies:

    phase = W ((h / |h|, log |h|) - shift) gain / l + b  =  A h / |h| + a log |h| + c

The same numbers as those of `GaussianProcessHead.posterior`, but for rounding. `Plane.of` tells whether a head is made
of what is folded here; all else, and vectors of no length or too much, goes the way of rows.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from afield.bounds.weight_cache import plain_evaluation
from afield.gp.features import KERNELS, RandomFeatures
from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS
from afield.gp.precision import Precision

FEWEST = 1024  # positions of an input, for which it pays
_COLUMNS = 4096  # positions at a time: what is made of them stays in the processor's caches
_SHORTEST, _LONGEST = 1e-12, 1e12  # vectors whose squares lose nothing
_POLAR = ("direction", "direction_length")
_GEOMETRIES = ("raw", "standardized", *_POLAR)


@dataclass(frozen=True)
class _Phases:
    """A (D, d), a (D,) where the length is a coordinate, c (D, 1); R^-2 where features grow."""

    matrix: Tensor
    along: Tensor | None
    constant: Tensor
    polar: bool
    growth: float | None

    @classmethod
    def of(cls, features: RandomFeatures) -> "_Phases | None":
        if (
            not features.adapted
            or features.projector is not None
            or features.geometry not in _GEOMETRIES
            or KERNELS[features.kernel].activation is not torch.cos
        ):
            return None
        matrix, constant = features.weight.double() / features.length_scale, features.phase.double()
        if features.shift.numel():
            matrix = matrix * features.gain
            constant = constant - matrix @ features.shift.double()
        kind, d = features.weight.dtype, features.in_features
        along = matrix[:, d].to(kind) if matrix.shape[1] > d else None
        growth = 1 / float(features.radius) ** 2 if features.grow else None
        matrix = matrix[:, :d].to(kind).contiguous()
        return cls(matrix, along, constant.to(kind)[:, None], features.geometry in _POLAR, growth)

    def cosines(self, h: Tensor, square: Tensor) -> tuple[Tensor, Tensor | float]:
        """Cosines (D, P) of h (d, P) of squared lengths (P,), and by what (P,) they grow."""
        phase = self.matrix @ h
        if self.polar:
            phase.mul_(square.rsqrt())
        if self.along is not None:
            phase.addr_(self.along, square.log().mul_(0.5))
        growth = 1.0 if self.growth is None else (square * self.growth).clamp_min_(1.0)
        return phase.add_(self.constant).cos_(), growth * math.sqrt(2 / len(self.matrix))


@dataclass(frozen=True)
class Plane:
    """A head at all positions of an input: `posterior`."""

    head: GaussianProcessHead
    phases: _Phases
    own: _Phases | None  # of the variance, where its features are not those of the mean

    @classmethod
    def of(cls, head: GaussianProcessHead, h: Tensor) -> "Plane | None":
        """None for a head, or hidden vectors (N, *P, d), that have to go the way of rows."""
        likelihood, precision = LIKELIHOODS[head.likelihood], head.precision
        if (
            math.prod(h.shape[1:-1]) < FEWEST
            or not plain_evaluation()
            or not isinstance(precision, Precision)
            or h.dtype not in (torch.float32, torch.float64)
            or not (h.dtype == head.random_features.weight.dtype == precision.root.dtype)
            or h.shape[-1] != head.in_features
            or torch.is_autocast_enabled(h.device.type)
            or not precision.factored
            or precision.num_matrices > 1
            or not likelihood.of_classes
            or likelihood.has_labels(head.out_features)
            or bool(head.added)
            or bool(head.dropped)
            or head.chosen_score.fitted
            or (head.joined_score is not None and head.joined_score.fitted)
            or not (head.mean is None or type(head.mean) is nn.Linear)
        ):
            return None
        phases = _Phases.of(head.random_features)
        own = None if head.variance_features is None else _Phases.of(head.variance_features)
        if phases is None or (own is None) != (head.variance_features is None):
            return None
        return cls(head, phases, own)

    def posterior(self, h: Tensor) -> tuple[Tensor, Tensor] | None:
        """Mean (K, P) and variance (P,) at hidden vectors h (d, P); None where a vector is as good as zero or huge."""
        square = h.square().sum(0)
        if not (float(square.amin()) > _SHORTEST**2 and float(square.amax()) < _LONGEST**2):
            return None
        mean, variance = h.new_empty(self.head.out_features, h.shape[1]), torch.empty_like(square)
        for start in range(0, h.shape[1], _COLUMNS):
            block = slice(start, start + _COLUMNS)
            mean[:, block], variance[block] = self._block(h[:, block], square[block])
        return mean, variance

    def _block(self, h: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
        head = self.head
        phi, growth = self.phases.cosines(h, square)
        if isinstance(head.mean, nn.Linear):
            mean, bias = head.mean.weight @ h, head.mean.bias
        else:
            mean, bias = head.weight @ phi * growth, head.constant
        if self.own is not None:
            phi, growth = self.own.cosines(h, square)
        variance = (head.precision.root[0] @ phi).square_().sum(0).mul_(growth * growth)
        return mean if bias is None else mean.add_(bias[:, None]), variance.mul_(head.amplitude.square())
