"""Wide ResNet-depth-width (Zagoruyko and Komodakis 2016), as in the paper's experiments on CIFAR.

    block(x) = s(x) + conv(dropout(relu(bn(conv(relu(bn(x)))))))        s: identity, or a 1 x 1 convolution

A stem of 16 channels, three stages of 16, 32 and 64 times `width` channels with (depth - 4) / 6 blocks each, the second
and third at half the size, then batch norm, ReLU and the mean over positions. As in the reference code, and other
than in the original, the 1 x 1 convolution sees the block's input itself, not its activation.

Blocks whose shortcut is the identity are `Residual`. Dropout layers are always there, at rate zero if
none is asked for, so that `mc_dropout` can find them.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from afield.backbones.normalize import CIFAR10_MEAN, CIFAR10_STD, Normalize
from afield.bounds.residual import Residual


class WideResNet(nn.Sequential):
    """x (N, C, H, W), bytes or in [0, 1] -> hidden vectors (N, 64 width). C is the length of `mean` and `std`.

    stride  of the stem; at 2 everything works on images of half the size, four times as fast
    """

    def __init__(
        self,
        depth: int = 28,
        width: int = 10,
        *,
        stride: int = 1,
        dropout: float = 0.0,
        mean: Sequence[float] = CIFAR10_MEAN,
        std: Sequence[float] = CIFAR10_STD,
    ) -> None:
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"WideResNet expects a depth of 6n + 4 (10, 16, 22, 28, 40), got {depth}.")
        if width < 1:
            raise ValueError(f"WideResNet expects a width of at least 1, got {width}.")
        blocks: list[nn.Module] = []
        channels = 16
        for stage in range(3):
            for index in range((depth - 4) // 6):
                wide, step = 16 * width << stage, 2 if stage and not index else 1
                branch = _branch(channels, wide, step, dropout)
                same = channels == wide and step == 1
                blocks.append(Residual(branch) if same else Projected(branch, _conv(channels, wide, 1, step)))
                channels = wide
        super().__init__(
            Normalize(mean, std),
            _conv(len(mean), 16, 3, stride),
            *blocks,
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.out_features = channels


class Projected(nn.Module):
    """shortcut(x) + branch(x), where the two differ in shape from x."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.branch(x)


def _branch(channels: int, wide: int, stride: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        _conv(channels, wide, 3, stride),
        nn.BatchNorm2d(wide),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        _conv(wide, wide, 3, 1),
    )


def _conv(channels: int, wide: int, size: int, stride: int) -> nn.Conv2d:
    conv = nn.Conv2d(channels, wide, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return conv
