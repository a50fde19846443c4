"""Geometries of the hidden space: in which coordinates z distances between hidden vectors h (N, d) are taken.

    raw                 h
    standardized        h
    layer               layer normalisation of h (the paper's appendix): loses the length, hence distance along a ray
    unit                u = h / |h|: the same
    direction           u
    direction_length    u, and one coordinate more for log |h|

The second, the fifth and the sixth are standardised by the moments of the training data: z = (map(h) - mean) / std,
coordinate by coordinate. A vector of zeros has no direction, and counts in no moments of one: the log of its length, a
huge number, would make all other lengths alike.

Hidden vectors of trained networks differ in length, which grows with confidence, far more than in direction, which says
what a thing is. Standardised distance mostly measures length. Direction alone is blind along a ray; with the log of the
length both a longer and a shorter vector end up arbitrarily far away, and no direction is drowned.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from afield.bounds.weight_cache import plain_evaluation
from afield.registry import Registry

_SHORTEST = 1e-30  # of vectors, whose log is taken: a vector of zeros is far away
_SMALLEST = 1e-12  # and with its inverse the lengths of vectors whose squares lose nothing
_MANY = 1024  # rows, for which a look at their lengths pays


@dataclass(frozen=True)
class Geometry:
    """A map of hidden vectors (N, d) to coordinates (N, d + extra), and whether these are standardised.

    of_row  the same of one vector (d,) as an array, its direction, and its length, which is neither huge nor tiny
    """

    map: Callable[[Tensor], Tensor]
    of_row: Callable[[np.ndarray, np.ndarray, float], np.ndarray]
    extra: int = 0
    standardized: bool = False
    bounded: bool = False  # whether the coordinates of finite vectors cannot overflow


def _layer(h: Tensor) -> Tensor:
    return F.layer_norm(_divided(h)[0], h.shape[-1:])


def _unit(h: Tensor) -> Tensor:
    return _polar(h)[0]


def _direction_length(h: Tensor) -> Tensor:
    direction, log_length = _polar(h)
    return torch.cat([direction, log_length], dim=-1)


def _polar(h: Tensor) -> tuple[Tensor, Tensor]:
    """h / |h|, and log |h|; a vector of zeros has no direction and is short."""
    if not torch.compiler.is_compiling() and h.is_cpu and len(h) >= _MANY and plain_evaluation():
        length = torch.linalg.vector_norm(h, dim=-1, keepdim=True)
        if float(length.amin()) > _SMALLEST and float(length.amax()) < 1 / _SMALLEST:
            return h / length, length.log()
    divided, largest = _divided(h)
    length = torch.linalg.vector_norm(divided, dim=-1, keepdim=True).clamp_min(0.5)  # 1 or more, but for zeros
    return divided / length, largest.log() + length.log()


def _divided(h: Tensor) -> tuple[Tensor, Tensor]:
    """h divided by its largest entry, and that: squares of large or small numbers are none."""
    largest = h.abs().amax(-1, keepdim=True).clamp_min(_SHORTEST)  # several times as fast as the norm of that name
    return h / largest, largest


def _layer_of_row(h: np.ndarray, u: np.ndarray, length: float) -> np.ndarray:
    divided = h / np.abs(h).max()
    centered = divided - divided.mean()
    return centered / np.sqrt(np.square(centered).mean() + 1e-5)


def _of_row(h: np.ndarray, u: np.ndarray, length: float) -> np.ndarray:
    return h


def _direction_of_row(h: np.ndarray, u: np.ndarray, length: float) -> np.ndarray:
    return u


def _direction_length_of_row(h: np.ndarray, u: np.ndarray, length: float) -> np.ndarray:
    z = np.empty(len(u) + 1, u.dtype)
    z[:-1] = u
    z[-1] = math.log(length)
    return z


GEOMETRIES: Registry[Geometry] = Registry(
    "geometry",
    raw=Geometry(lambda h: h, _of_row),
    standardized=Geometry(lambda h: h, _of_row, standardized=True),
    layer=Geometry(_layer, _layer_of_row, bounded=True),
    unit=Geometry(_unit, _direction_of_row, bounded=True),
    direction=Geometry(_unit, _direction_of_row, standardized=True, bounded=True),
    direction_length=Geometry(_direction_length, _direction_length_of_row, extra=1, standardized=True, bounded=True),
)
