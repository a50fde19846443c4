"""Residual blocks: where a bounded branch keeps distances."""

from torch import Tensor, nn


class Residual(nn.Module):
    """x + branch(x): with a branch of Lipschitz constant a < 1, distances change by factors in [1 - a, 1 + a]."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)
