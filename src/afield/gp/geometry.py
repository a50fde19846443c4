"""Geometries of the hidden space: in which coordinates z distances between hidden vectors h (N, d) are taken.

    raw                 h
    standardized        h
    layer               layer normalisation of h (the paper's appendix): loses the length, hence distance along a ray
    unit                u = h / |h|: the same
    direction           u
    direction_length    u, and one coordinate more for log |h|

The second, the fifth and the sixth are standardised by the moments of the training data: z = (map(h) - mean) / std,
coordinate by coordinate.

Hidden vectors of trained networks differ in length, which grows with confidence, far more than in direction, which says
what a thing is. Standardised distance mostly measures length. Direction alone is blind along a ray; with the log of the
length both a longer and a shorter vector end up arbitrarily far away, and no direction is drowned.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from afield.registry import Registry

_SHORTEST = 1e-30  # of vectors, whose log is taken: a vector of zeros is far away


@dataclass(frozen=True)
class Geometry:
    """A map of hidden vectors (N, d) to coordinates (N, d + extra), and whether these are standardised."""

    map: Callable[[Tensor], Tensor]
    extra: int = 0
    standardized: bool = False


def _layer(h: Tensor) -> Tensor:
    return F.layer_norm(_squarable(h), h.shape[-1:])


def _unit(h: Tensor) -> Tensor:
    return F.normalize(_squarable(h), dim=-1, eps=_SHORTEST)


def _direction_length(h: Tensor) -> Tensor:
    largest = h.abs().amax(-1, keepdim=True).clamp_min(_SHORTEST)
    # Taken apart, because squares of large or small numbers are none.
    log_length = largest.log() + 0.5 * (h / largest).square().sum(-1, keepdim=True).clamp_min(1e-12).log()
    return torch.cat([_unit(h), log_length], dim=-1)


def _squarable(h: Tensor) -> Tensor:
    """h as it is, or divided by its largest entry where squares are no numbers: for maps that do not see the scale."""
    largest = h.abs().amax(-1, keepdim=True)
    odd = (largest > 1e15) | (largest < 1e-15)
    return h / torch.where(odd, largest.clamp_min(_SHORTEST), 1.0)


GEOMETRIES: Registry[Geometry] = Registry(
    "geometry",
    raw=Geometry(lambda h: h),
    standardized=Geometry(lambda h: h, standardized=True),
    layer=Geometry(_layer),
    unit=Geometry(_unit),
    direction=Geometry(_unit, standardized=True),
    direction_length=Geometry(_direction_length, extra=1, standardized=True),
)
