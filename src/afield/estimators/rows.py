"""Rows of a table, with weights: a row of weight w counts as w rows.

Rows that belong together, a cluster, are held out together, or held-out rows would not be new: copies of one row, and
rows of one group. Rows with equal inputs and targets are copies, unless the same inputs also come with other targets:
these are observations of their own, of which some agree.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

CHUNK = 4096  # rows at a time, without gradients
_LEAST_SPREAD = 1e-12  # of a column, relative to its mean: below, it is constant up to rounding


@dataclass(frozen=True)
class Rows:
    """Inputs (N, d) in float64, targets (N,) of classes or (N, K) of numbers, weights (N,), groups (N,) where given."""

    x: Tensor
    y: Tensor
    weight: Tensor
    group: Tensor | None = None

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> "Rows":
        return Rows(self.x[index], self.y[index], self.weight[index], None if self.group is None else self.group[index])

    def __add__(self, other: "Rows") -> "Rows":
        return Rows(torch.cat([self.x, other.x]), torch.cat([self.y, other.y]), torch.cat([self.weight, other.weight]))

    def clusters(self) -> Tensor:
        """The number (N,) of each row's cluster."""
        place, which = _which(self.x), _which(self._table())
        targets = place[_first_of_each(which)].bincount()  # how many different ones there are at each place
        which = torch.where(targets[place] > 1, len(self) + torch.arange(len(self)), which)
        which = which.unique(return_inverse=True)[1]
        if self.group is None:
            return which
        size = int(which.max()) + 1
        edges = (which.numpy(), size + self.group.numpy())
        nodes = size + int(self.group.max()) + 1
        _, component = connected_components(coo_array((np.ones(len(self)), edges), shape=(nodes, nodes)), False)
        return torch.from_numpy(component[edges[0]]).long().unique(return_inverse=True)[1]

    def alone(self) -> "Rows":
        """One row of each cluster: these are as exchangeable as the clusters are."""
        return self[_first_of_each(self.clusters())]

    def merged(self) -> "Rows":
        """Equal rows as one, in an order of their own: then a weight of 2 and a row given twice are the same data."""
        which = _which(self._table())
        first = _first_of_each(which)
        weight = torch.zeros(len(first), dtype=torch.float64).index_add_(0, which, self.weight)
        return replace(self[first], weight=weight)

    def moments(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Weighted mean and standard deviation of the columns of values (N, k); exactly 0 where one is constant."""
        part = (self.weight / self.weight.sum())[:, None]
        mean = (part * values).sum(0)
        std = (part * (values - mean).square()).sum(0).sqrt()
        return mean, torch.where(std > _LEAST_SPREAD * mean.abs(), std, torch.zeros_like(std))

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """What `fit_posterior`, `fit_head` and `calibrate` take."""
        return [(part.x, part.y) for part in self.parts()]

    def parts(self) -> Iterator["Rows"]:
        return (self[start : start + CHUNK] for start in range(0, len(self), CHUNK))

    def _table(self) -> Tensor:
        return torch.cat([self.x, self.y.reshape(len(self), -1).double()], dim=1)


def split(strata: Tensor, clusters: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of the rows to train on and to hold out: `count` clusters, in proportion to the strata (N,).

    A cluster has the stratum of its first row. No stratum is without a row to train on.
    """
    first = _first_of_each(clusters)
    order = torch.randperm(len(first), generator=generator)
    order = order[strata[first[order]].argsort(stable=True)]
    ordered = strata[first[order]]
    new = torch.ones(len(order), dtype=torch.bool)
    new[1:] = ordered[1:] != ordered[:-1]
    candidates = order[~new]
    if not 0 < count <= len(candidates):
        return torch.arange(len(strata)), order[:0]
    chosen = torch.zeros(len(first), dtype=torch.bool)
    chosen[candidates[torch.linspace(0, len(candidates) - 1, count).round().long()]] = True
    for stratum in strata.unique():  # all rows of one may lie in clusters that begin with another
        of = clusters[strata == stratum]
        if bool(chosen[of].all()):
            chosen[of[0]] = False
    held = chosen[clusters]
    return (~held).nonzero().flatten(), held.nonzero().flatten()


def _which(values: Tensor) -> Tensor:
    """The number (N,) of each row among the distinct ones."""
    if not len(values):
        return torch.zeros(0, dtype=torch.int64)
    table = values.numpy()
    order = np.lexsort(table.T[::-1])  # by value and not by bytes: the unit of a column must not change the order
    ordered = table[order]
    new = np.concatenate([[False], (ordered[1:] != ordered[:-1]).any(axis=1)])
    which = np.empty(len(table), dtype=np.int64)
    which[order] = new.cumsum()
    return torch.from_numpy(which)


def _first_of_each(which: Tensor) -> Tensor:
    """The first index of each of the numbers 0 to C - 1 in which (N,)."""
    first = torch.full((int(which.max()) + 1 if len(which) else 0,), len(which))
    return first.scatter_reduce(0, which, torch.arange(len(which)), "amin")
