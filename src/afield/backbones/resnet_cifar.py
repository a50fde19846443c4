"""CIFAR ResNet-20/32/44/56/110 (He et al. 2016): three stages of 16, 32 and 64 channels.

Shortcuts carry no parameters ("option A"): they subsample by two and pad channels with zeros. With `projection` they
are convolutions of size 1 with a batch norm ("option B", `layer2.0.downsample`). Tensor names are those of the public
checkpoints (`conv1`, `layer1.0.conv1`, ..., `linear`), so that their weights load as they are; some call the last layer
`fc`. Input: (N, 3, 32, 32) in [0, 1]; the normalisation is part of the network.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afield.backbones.normalize import IMAGENET_MEAN, IMAGENET_STD


class ResNetCIFAR(nn.Module):
    """6n + 2 layers: x (N, 3, 32, 32) -> logits (N, num_classes), or hidden vectors (N, 64) if that is None.

    projection  whether shortcuts that change the shape are convolutions
    mean, std   of the channels of the data that it was trained on
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        depth: int = 56,
        num_classes: int | None = 10,
        *,
        projection: bool = False,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"ResNetCIFAR expects a depth of 6n + 2 (20, 32, 44, 56, 110), got {depth}.")
        blocks = (depth - 2) // 6
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1), persistent=False)
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, stride=1, projection=projection)
        self.layer2 = _stage(16, 32, blocks, stride=2, projection=projection)
        self.layer3 = _stage(32, 64, blocks, stride=2, projection=projection)
        self.out_features = 64 if num_classes is None else num_classes
        self.linear = nn.Identity() if num_classes is None else nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1((x - self.mean) / self.std)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean(dim=(2, 3)))


class _Block(nn.Module):
    def __init__(self, in_channels: int, channels: int, stride: int, *, projection: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride, self.padding = stride, (channels - in_channels) // 2
        self.downsample = _projection(in_channels, channels, stride) if projection and self.padding else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.downsample is not None:
            x = self.downsample(x)
        elif self.padding:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(x + y)


def _projection(in_channels: int, channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels))


def _stage(in_channels: int, channels: int, blocks: int, *, stride: int, projection: bool) -> nn.Sequential:
    first = _Block(in_channels, channels, stride, projection=projection)
    return nn.Sequential(first, *[_Block(channels, channels, 1) for _ in range(blocks - 1)])
