"""Rows of a table, with weights: a row of weight w counts as w rows."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

CHUNK = 4096  # rows at a time, without gradients


@dataclass(frozen=True)
class Rows:
    """Inputs (N, d) in float64, targets (N,) of classes or (N, K) of numbers, weights (N,)."""

    x: Tensor
    y: Tensor
    weight: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> "Rows":
        return Rows(self.x[index], self.y[index], self.weight[index])

    def __add__(self, other: "Rows") -> "Rows":
        return Rows(torch.cat([self.x, other.x]), torch.cat([self.y, other.y]), torch.cat([self.weight, other.weight]))

    def merged(self) -> "Rows":
        """Equal rows as one, in an order of their own: then a weight of 2 and a row given twice are the same data."""
        table = torch.cat([self.x, self.y.reshape(len(self), -1).double()], dim=1)
        distinct, which = table.unique(dim=0, return_inverse=True)
        first = torch.full((len(distinct),), len(self)).scatter_reduce(0, which, torch.arange(len(self)), "amin")
        weight = torch.zeros(len(distinct), dtype=torch.float64).index_add_(0, which, self.weight)
        return replace(self[first], weight=weight)

    def moments(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted mean and standard deviation of the columns of values (N, k); 1 where a column is constant."""
        part = (self.weight / self.weight.sum())[:, None]
        mean = (part * values).sum(0)
        std = (part * (values - mean).square()).sum(0).sqrt()
        return mean, torch.where(std > 1e-9 * (1 + mean.abs()), std, torch.ones_like(std))

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """What `fit_posterior`, `fit_head` and `calibrate` take."""
        return [(part.x, part.y) for part in self.parts()]

    def parts(self) -> Iterator["Rows"]:
        return (self[start : start + CHUNK] for start in range(0, len(self), CHUNK))


def split(groups: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices to train on and `count` to hold out, in proportion to the groups; one of every group is trained on."""
    order = torch.randperm(len(groups), generator=generator)
    order = order[groups[order].argsort(stable=True)]
    ordered = groups[order]
    first = torch.ones(len(order), dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    candidates = order[~first]
    if not 0 < count <= len(candidates):
        return torch.arange(len(groups)), order[:0]
    held = candidates[torch.linspace(0, len(candidates) - 1, count).round().long()]
    rest = torch.ones(len(groups), dtype=torch.bool)
    rest[held] = False
    return rest.nonzero().flatten(), held
