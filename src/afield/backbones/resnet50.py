"""ResNet-50 (He et al. 2016) for ImageNet, with the stride in the 3 x 3 convolution.

Tensor names are those of the public checkpoints (`conv1`, `layer1.0.conv1`, `layer1.0.downsample.0`, ..., `fc`), so
that their weights load as they are. Input: (N, 3, H, W), bytes or in [0, 1]; the normalisation is part of the network.

In the paper every convolution but the stem is bounded: Settings(bounded=BOUNDED).
"""

import torch.nn.functional as F
from torch import Tensor, nn

from afield.backbones.normalize import IMAGENET_MEAN, IMAGENET_STD, Normalize

BOUNDED = ("layer*.conv?", "layer*.downsample.0")
"""Names of the convolutions that the paper bounds."""


class ResNet50(nn.Module):
    """x (N, 3, H, W) -> logits (N, num_classes), or hidden vectors (N, 2048) if that is None."""

    def __init__(self, num_classes: int | None = None, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.normalize = Normalize(IMAGENET_MEAN, IMAGENET_STD)
        self.conv1 = _conv(3, 64, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(64, 64, 3, 1, dropout)
        self.layer2 = _stage(256, 128, 4, 2, dropout)
        self.layer3 = _stage(512, 256, 6, 2, dropout)
        self.layer4 = _stage(1024, 512, 3, 2, dropout)
        self.out_features = 2048 if num_classes is None else num_classes
        self.fc = nn.Identity() if num_classes is None else nn.Linear(2048, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(self.normalize(x)))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, narrow: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = _conv(channels, narrow, 1)
        self.bn1 = nn.BatchNorm2d(narrow)
        self.conv2 = _conv(narrow, narrow, 3, stride=stride)
        self.bn2 = nn.BatchNorm2d(narrow)
        self.dropout = nn.Dropout(dropout)
        self.conv3 = _conv(narrow, 4 * narrow, 1)
        self.bn3 = nn.BatchNorm2d(4 * narrow)
        self.downsample: nn.Module = nn.Identity()
        if channels != 4 * narrow or stride > 1:
            self.downsample = nn.Sequential(_conv(channels, 4 * narrow, 1, stride=stride), nn.BatchNorm2d(4 * narrow))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.dropout(F.relu(self.bn2(self.conv2(y))))
        return F.relu(self.downsample(x) + self.bn3(self.conv3(y)))


def _stage(channels: int, narrow: int, blocks: int, stride: int, dropout: float) -> nn.Sequential:
    first = _Bottleneck(channels, narrow, stride, dropout)
    return nn.Sequential(first, *[_Bottleneck(4 * narrow, narrow, 1, dropout) for _ in range(blocks - 1)])


def _conv(channels: int, wide: int, size: int, *, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(channels, wide, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
