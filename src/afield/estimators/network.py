"""The network for a table: an ensemble of members side by side, which is one Gaussian process.

    x -> columns -> h = [h_1(x), ..., h_M(x)] -> phi(h)^T B,        phi = [phi_1(h_1), ..., phi_M(h_M)] / sqrt(M)

Each member m has a residual network h_m, random features phi_m of it alone, and output weights, and is trained by
itself. The block of B that belongs to it is that of its own weights over sqrt(M), so that the output is the mean of the
members' outputs, and the kernel is the mean of their kernels. Posterior, calibration, updates and files need not know.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from afield.backbones.resffn import ResFFN
from afield.estimators.rows import CHUNK, Rows
from afield.gp.head import GaussianProcessHead
from afield.model.convert import BoundRules, sngp
from afield.model.evaluating import evaluating
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction

LENGTH_SCALE_FRACTION = 1.5  # of the median distance between a member's hidden vectors, where no length scale is given


class Columns(nn.Module):
    """Numbers x (N, d), in which categories are codes from 0 on, as columns (N, d') for a network, in float64.

    A number becomes (x - shift) / scale. A column of c categories becomes c columns, one of them 1; all are 0 for a
    code that is none of them. A number that was constant in training is left at 0, whatever it is later.
    """

    shift: Tensor
    gain: Tensor

    def __init__(self, categories: Sequence[int]) -> None:
        super().__init__()
        self.categories = tuple(categories)  # 0 for a number
        self.register_buffer("shift", torch.zeros(len(self.categories), dtype=torch.float64))
        self.register_buffer("gain", torch.ones(len(self.categories), dtype=torch.float64))

    @property
    def out_features(self) -> int:
        return sum(count or 1 for count in self.categories)

    def learn(self, rows: Rows) -> None:
        """Take shift and scale from the rows."""
        mean, std = rows.moments(rows.x)
        self.shift, self.gain = mean, torch.where(std > 0, 1 / std, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x.double()
        numbers = (x - self.shift) * self.gain
        if not any(self.categories):
            return numbers
        parts = [
            (x[:, j, None] == torch.arange(count, device=x.device)).double() if count else numbers[:, j, None]
            for j, count in enumerate(self.categories)
        ]
        return torch.cat(parts, dim=1)

    def constant(self) -> Tensor:
        """Which columns (d,) are numbers that were constant in training."""
        return (self.gain == 0) & (torch.tensor(self.categories) == 0)


class Members(nn.Module):
    """Networks of one kind side by side: x (N, in_features) -> hidden vectors (N, members * width)."""

    def __init__(self, in_features: int, members: int, *, depth: int, width: int, dropout: float) -> None:
        super().__init__()
        self.members = nn.ModuleList(
            ResFFN(in_features, depth=depth, width=width, dropout=dropout) for _ in range(members)
        )
        self.out_features = members * width

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([member(x) for member in self.members], dim=1)

    @functools.cached_property
    def alike(self) -> bool:
        """Whether all layers are plain ones, without bounds."""
        return not any(is_parametrized(module) for module in self.modules())

    def each(self, x: Tensor) -> Tensor:
        """Hidden vectors (M, N, width): the same layers of all members at once, since small products cost their calls.

        The masks of dropout are those that the members would draw one after the other, as members with bounds do.
        """
        if not self.alike:
            return torch.stack([member(x) for member in self.members])
        first, *blocks = zip(*self.members, strict=True)
        h = _linear(x.expand(len(self.members), *x.shape), first)
        ones = h.new_ones(h.shape[1:])
        masks = [[residual.branch[2](ones) for residual in of_member] for of_member in zip(*blocks, strict=True)]
        for block, of_members in zip(blocks, zip(*masks, strict=True), strict=True):
            h = h + _linear(h, [residual.branch[0] for residual in block]).relu() * torch.stack(of_members)
        return h


def _linear(x: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """x (M, N, in) -> (M, N, out), each part by a layer of its own."""
    bias = torch.stack([layer.bias for layer in layers])[:, None]
    return torch.baddbmm(bias, x, torch.stack([layer.weight for layer in layers]).mT)


def plain_network(
    categories: Sequence[int], out_features: int, *, members: int, depth: int, width: int, dropout: float
) -> nn.Module:
    """The network for a table before it is converted."""
    columns = Columns(categories)
    hidden = Members(columns.out_features, members, depth=depth, width=width, dropout=dropout)
    return nn.Sequential(columns, hidden, nn.Linear(hidden.out_features, out_features))


def network(
    categories: Sequence[int],
    out_features: int,
    *,
    members: int,
    depth: int,
    width: int,
    dropout: float,
    bound: float | None,
    **head: Any,
) -> SNGP:
    """An untrained network for a table; `head`: options of `GaussianProcessHead`."""
    net = plain_network(categories, out_features, members=members, depth=depth, width=width, dropout=dropout)
    # Residual layers with a bound keep the distances of the table: the features of the mean see them best.
    rules: BoundRules = None if bound is None else {"1.*.branch.*": bound}
    model = sngp(net, rules, variance_features="same", **head).double()
    _separate(model.head, members)
    return model


def columns_of(model: SNGP) -> Columns:
    columns = model.net.get_submodule("0")
    assert isinstance(columns, Columns)
    return columns


def members_of(model: SNGP) -> int:
    return len(list(model.net.get_submodule("1.members").children()))


def adapt(model: SNGP, rows: Rows) -> None:
    """Take the moments of the columns and the length scale from the rows."""
    columns_of(model).learn(rows)
    features, members = model.head.random_features, members_of(model)
    with evaluating(model):
        h = model.hidden(rows.x[:CHUNK])
    features.fraction = LENGTH_SCALE_FRACTION / math.sqrt(members)  # distances in all of h are the longer
    features.adapt(h)


def member_logits(head: GaussianProcessHead, h: Tensor) -> Tensor:
    """f_m (M, N, K), the outputs of the members, whose mean is that of the head; h (M, N, width)."""
    features, members = head.random_features, len(h)
    rows, width = features.num_random_features // members, h.shape[2]
    blocks = features.weight.view(members, rows, members, width).diagonal(dim1=0, dim2=2)  # (rows, width, M)
    phase = features.phase.view(members, 1, rows)
    phi = torch.baddbmm(phase, h / features.length_scale.to(h.dtype), blocks.permute(2, 1, 0)).cos()
    scale = members * math.sqrt(2 / features.num_random_features)
    return scale * phi @ head.weight.unflatten(1, (members, rows)).permute(1, 2, 0)


def predict(model: SNGP, x: Tensor) -> Prediction:
    return Prediction.cat([model.predict(part) for part in x.split(CHUNK)])


def predict_mean(model: SNGP, x: Tensor) -> Tensor:
    """The posterior mean (N, K) alone, which costs a fraction of a prediction."""
    with evaluating(model):
        return torch.cat([model(part) for part in x.split(CHUNK)])


def _separate(head: GaussianProcessHead, members: int) -> None:
    """Let each block of random features see the hidden vector of one member only."""
    features = head.random_features
    if features.num_random_features % members:
        raise ValueError(
            f"num_random_features must be a multiple of n_members, got {features.num_random_features} and {members}."
        )
    if members == 1:
        return
    rows, width = features.num_random_features // members, features.in_features // members
    blocks = [type(features)(width, rows).weight for _ in range(members)]
    features.weight.copy_(torch.block_diag(*blocks))
