"""A small U-Net (Ronneberger, Fischer and Brox 2015): images (N, C, H, W) -> hidden vectors of pixels (N, d, H, W).

Two 3x3 convolutions with batch normalisation a level; down by max pooling to twice the width, up by bilinear
interpolation, and what the way down has seen beside what comes up. Height and width are multiples of 2^depth.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UNet(nn.Module):
    """d is the width; `dimensions` tells that hidden vectors stand in a plane."""

    dimensions = 2

    def __init__(self, in_channels: int = 3, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.out_features = width
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(_block(a, b) for a, b in zip([in_channels, *widths], widths, strict=False))
        self.up = nn.ModuleList(_block(a + b, a) for a, b in reversed(list(itertools.pairwise(widths))))

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.max_pool2d(x, 2))
            seen.append(x)
        seen.pop()
        for block in self.up:
            x = block(torch.cat([seen.pop(), F.interpolate(x, scale_factor=2, mode="bilinear")], dim=1))
        return x


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)
