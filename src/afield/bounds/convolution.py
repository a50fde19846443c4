"""The linear operator that a convolution is on inputs of one size, and the norm of an operator, by Lanczos."""

import math
from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ConvolutionSettings:
    """What a convolution is, apart from its weight."""

    def __init__(self, layer: nn.Module) -> None:
        conv = cast(nn.Conv2d, layer)
        self.dims = len(conv.kernel_size)
        self.in_channels, self.kernel_size = conv.in_channels, conv.kernel_size
        self.stride, self.dilation, self.groups = conv.stride, conv.dilation, conv.groups
        explicit = conv.padding_mode != "zeros" or isinstance(conv.padding, str)
        self.padding: tuple[int, ...] = (0,) * self.dims if explicit else cast(tuple[int, ...], conv.padding)
        self.pad = tuple(conv._reversed_padding_repeated_twice) if explicit else None
        self.pad_mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode


class Convolution:
    """The linear operator of a convolution on inputs (1, channels, *size), and its adjoint."""

    def __init__(self, layer: nn.Module | ConvolutionSettings, weight: Tensor, size: tuple[int, ...]) -> None:
        self.s = layer if isinstance(layer, ConvolutionSettings) else ConvolutionSettings(layer)
        self.weight, self.shape = weight, (1, self.s.in_channels, *size)

    def start(self) -> Tensor:
        """A fixed random input, so that all processes of a distributed run iterate on the same vectors."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(self.shape, generator=generator, dtype=torch.float64).to(self.weight)

    def apply(self, x: Tensor) -> Tensor:
        conv = (F.conv1d, F.conv2d, F.conv3d)[self.s.dims - 1]
        s = self.s
        return conv(self._padded(x), self.weight, None, s.stride, s.padding, s.dilation, s.groups)

    def adjoint(self, y: Tensor) -> Tensor:
        transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[self.s.dims - 1]
        s = self.s
        padded = self._padded(y.new_empty(self.shape)).shape if s.pad else self.shape
        # What the stride left over at the far end, so that the adjoint has exactly the input's size.
        extra = [
            n - ((m - 1) * st - 2 * p + di * (k - 1) + 1)
            for n, m, st, p, di, k in zip(
                padded[2:], y.shape[2:], s.stride, s.padding, s.dilation, s.kernel_size, strict=True
            )
        ]
        x = transposed(y, self.weight, None, s.stride, s.padding, extra, s.groups, s.dilation)
        if not s.pad:
            return x
        # By where each padded point came from (0: nowhere), not by autograd: non-reentrant checkpointing forbids it.
        size, count = self.shape[2:], math.prod(self.shape[2:])
        source = torch.arange(1, count + 1, dtype=torch.float64, device=y.device).view(1, 1, *size)
        source = self._padded(source).flatten().long()
        out = x.new_zeros(self.shape[1], count + 1).index_add(1, source, x.reshape(self.shape[1], -1))
        return out[:, 1:].reshape(self.shape)

    def _padded(self, x: Tensor) -> Tensor:
        return F.pad(x, self.s.pad, mode=self.s.pad_mode) if self.s.pad else x


def lanczos(
    apply: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor], start: Tensor, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Largest singular value and its vectors (sigma, u, v), by Lanczos on A^T A; sigma is never too large."""
    basis = [start / start.norm()]
    alphas: list[float] = []
    betas: list[float] = []
    for _ in range(min(steps, start.numel())):
        w = adjoint(apply(basis[-1]))
        alphas.append(float((w * basis[-1]).sum()))
        for _ in range(2):
            stacked = torch.stack(basis).flatten(1)
            w = w - (stacked.T @ (stacked @ w.flatten())).view_as(w)
        beta = float(w.norm())
        if beta <= 1e-7 * max(alphas[0], 1e-30):
            break
        betas.append(beta)
        basis.append(w / beta)
    off = torch.tensor(betas[: len(alphas) - 1], dtype=torch.float64)
    tridiagonal = torch.diag(torch.tensor(alphas, dtype=torch.float64)) + off.diag(1) + off.diag(-1)
    top = torch.linalg.eigh(tridiagonal).eigenvectors[:, -1]
    v = sum(float(c) * b for c, b in zip(top, basis, strict=False))
    assert isinstance(v, Tensor)
    v = v / v.norm()
    u = apply(v)
    sigma = u.norm()
    return sigma, u / sigma.clamp_min(1e-30), v
