"""Draws of functions from the posterior: coherent over inputs, where probabilities and variances look at each alone.

    g = m + a psi^T w,    w ~ N(0, H^-1),    w = L^-T z,  z ~ N(0, I),  H = L L^T

z is drawn before any input is looked at, so that a generator in one state gives the same functions for all inputs. m, a
and the scale are those of the prediction: the draws have its logits as mean, its variance as variance, and between
inputs x, x' the covariance a^2 psi(x)^T H^-1 psi(x'). Outputs are independent, or of a regression as its noise is.
"""

import torch
from torch import Tensor

from afield.gp.full_precision import full_precision
from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS
from afield.gp.precision import Precision

BLOCK = 4096  # rows at a time


@torch.no_grad()
def sample_functions(
    head: GaussianProcessHead, h: Tensor, num_samples: int, generator: torch.Generator | None = None
) -> Tensor:
    """Values (S, N, K) of S functions at hidden vectors (N, d): logits of classes, targets without noise of numbers."""
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
    head = head.snapshot()
    precision = head.precision
    precision.check_fitted()
    if not isinstance(precision, Precision):
        raise ValueError("sample draws from an exact posterior, and this one has a rank: convert with rank=None.")
    device = generator.device if generator is not None else precision.root.device
    size = (num_samples, head.out_features, precision.num_features)
    z = torch.randn(size, generator=generator, dtype=precision.root.dtype, device=device).to(precision.root.device)
    return torch.cat([_values(head, precision, part, z) for part in h.split(BLOCK)], 1)


def _values(head: GaussianProcessHead, precision: Precision, h: Tensor, z: Tensor) -> Tensor:
    mean = head.mean_of(h, None)
    psi = head.variance_phi(h).to(z.dtype)
    with full_precision(psi.device):
        white = psi @ precision.root.mT  # (C, N, D)
        deviation = torch.einsum("knd,skd->snk", white.expand(head.out_features, -1, -1), z)
    deviation = head.amplitude.to(z) * deviation
    if LIKELIHOODS[head.likelihood].of_classes:
        mean, spread = head.scaled(mean, torch.ones_like(mean))
        return (mean + spread.sqrt() * deviation).to(mean.dtype)
    return mean + (deviation if head.noise_shape is None else head.noise_shape.mixed(deviation)).to(mean.dtype)
