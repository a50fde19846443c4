"""ResFFN-depth-width: the residual feed-forward network of the paper's low-dimensional experiments.

    x -> W x + b -> h + dropout(relu(W_l h + b_l)),  l = 1 .. depth            ResFFN-12-128: depth 12, width 128

With every W_l bounded by c < 1 each block changes distances by factors in [1 - c, 1 + c].
"""

from torch import nn

from afield.bounds.residual import Residual


class ResFFN(nn.Sequential):
    """x (N, in_features) -> hidden vectors (N, width)."""

    def __init__(self, in_features: int, *, depth: int = 12, width: int = 128, dropout: float = 0.01) -> None:
        branches = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout)) for _ in range(depth)]
        super().__init__(nn.Linear(in_features, width), *map(Residual, branches))
        self.out_features = width
