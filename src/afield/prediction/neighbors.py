"""Scores by the nearest training features, all scaled to length 1, u = h / |h|; `Sample`, which keeps some of them.

knn       |u - u_(k)|,  u_(k) the k-th nearest training feature: Sun et al., ICML 2022
nnguide   -e(z) mean over the k largest of  e(z_i) u_i . u,  e(z) = log sum_k exp(z_k) of the logits: Park et al.,
          ICCV 2023, "Nearest neighbor guidance for out-of-distribution detection"

Both read a random sample of the training features, of bounded size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afield.errors import NotFitted, Unsuitable
from afield.prediction.fitted_score import Constants, FittedScore

RESERVOIR = 10_000


class Sample:
    """A random sample of at most `size` rows, drawn by a seeded hash of the features that come with each.

    The sample is the rows with the smallest hashes. Each is in it with the same chance, and it is the same set in
    whatever order, batches or processes the rows came; copies of one row stand or fall together.
    """

    def __init__(self, width: int, size: int, seed: int, device: torch.device | str | None = None) -> None:
        self.size, self.seed = size, seed
        self._rows = [torch.zeros(0, width, dtype=torch.float32, device=device)]
        self._keys = [torch.zeros(0, dtype=torch.int64, device=device)]

    def add(self, features: Tensor, rows: Tensor | None = None) -> None:
        """Add rows (N, width), by default the features themselves."""
        features = features.to(self._rows[0])
        self._append(features.clone() if rows is None else rows.to(features), _hash(features, self.seed))

    def join(self, other: "Sample") -> None:
        """Add all that another sample has seen."""
        for rows, keys in zip(list(other._rows), list(other._keys), strict=True):
            self._append(rows.to(self._rows[0]), keys.to(self._keys[0]))

    @property
    def rows(self) -> Tensor:
        """The sample (at most size, width), in the order of the hashes."""
        keys, order = torch.cat(self._keys).sort()
        if len(self._keys) > 1:
            self._keys = [keys[: self.size].clone()]
            self._rows = [torch.cat(self._rows)[order[: self.size]]]
        return self._rows[0]

    def _append(self, rows: Tensor, keys: Tensor) -> None:
        """Rows wait in a list, twice the size at most, because to sort all at every batch would take too long."""
        if len(self._keys[0]) == self.size:
            kept = keys < self._keys[0][-1]
            rows, keys = rows[kept], keys[kept]
        self._rows.append(rows)
        self._keys.append(keys)
        if sum(map(len, self._keys)) > 2 * self.size:
            _ = self.rows


class NearestNeighbors(FittedScore):
    """Distance to the k-th nearest training feature, all scaled to unit norm (Sun et al. 2022); between 0 and 2.

    k          which neighbour
    reservoir  how many training features are kept; beyond, a random sample of them
    seed       of the sample
    """

    def __init__(
        self,
        num_features: int,
        num_classes: int = 1,  # not read
        *,
        k: int = 10,
        reservoir: int = RESERVOIR,
        seed: int = 0,
        output: nn.Linear | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.k, self.reservoir, self.seed = _check_k(k, reservoir), reservoir, seed
        super().__init__(num_features, num_classes, output=output, device=device)

    @property
    def features(self) -> Tensor:
        """The training features that are kept."""
        return self.sample.rows

    def _options(self) -> dict[str, Any]:
        return {"reservoir": self.reservoir, "seed": self.seed}

    def _clear(self) -> None:
        self.sample = Sample(self.num_features, self.reservoir, self.seed, self.device)

    def _add(self, h: Tensor, y: Tensor, z: Tensor) -> None:
        self.sample.add(h)

    def _join(self, other: "NearestNeighbors") -> None:
        self.sample.join(other.sample)

    def _fit(self) -> dict[str, Tensor]:
        return {"known": F.normalize(_enough(self.features, self.k), dim=-1)}

    def distance(self, constants: Constants, h: Tensor, z: Tensor) -> Tensor:
        known = constants["known"]
        h = F.normalize(h.to(known), dim=-1)
        kth = (h @ known.T).topk(self.k).indices[:, -1]
        return (h - known[kth]).norm(dim=-1)  # sqrt(2 - 2 cos) would lose half the digits


class NeighborGuidance(FittedScore):
    """The energy, guided by the similarity to the k training features that are nearest and surest (Park et al. 2023).

    Options are those of `NearestNeighbors`. It applies where the energies of all training examples are positive: a
    negative one would turn its feature round.
    """

    needs = ("logits",)

    def __init__(
        self,
        num_features: int,
        num_classes: int,
        *,
        k: int = 10,
        reservoir: int = RESERVOIR,
        seed: int = 0,
        output: nn.Linear | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.k, self.reservoir, self.seed = _check_k(k, reservoir), reservoir, seed
        super().__init__(num_features, num_classes, output=output, device=device)

    def _options(self) -> dict[str, Any]:
        return {"reservoir": self.reservoir, "seed": self.seed}

    def _clear(self) -> None:
        self.sample = Sample(self.num_features + 1, self.reservoir, self.seed, self.device)
        self.lowest = torch.inf

    def _add(self, h: Tensor, y: Tensor, z: Tensor) -> None:
        energy = z.double().logsumexp(-1, keepdim=True)
        self.lowest = min([self.lowest, *energy.flatten().tolist()])
        self.sample.add(h, torch.cat([h.float(), energy.float()], dim=1))

    def _join(self, other: "NeighborGuidance") -> None:
        self.lowest = min(self.lowest, other.lowest)
        self.sample.join(other.sample)

    def _fit(self) -> dict[str, Tensor]:
        if self.lowest <= 0:
            raise Unsuitable(
                f"This score needs training logits of positive energy, log sum exp, got {self.lowest:g}. "
                "Use another score."
            )
        rows = _enough(self.sample.rows, self.k)
        return {"bank": F.normalize(rows[:, :-1], dim=-1) * rows[:, -1:]}

    def distance(self, constants: Constants, h: Tensor, z: Tensor) -> Tensor:
        bank = constants["bank"]
        guidance = (F.normalize(h.to(bank), dim=-1) @ bank.T).topk(self.k).values.mean(-1)
        return -guidance * z.to(bank).logsumexp(-1)


def _check_k(k: int, reservoir: int) -> int:
    if not 1 <= k <= reservoir:
        raise ValueError(f"k must lie between 1 and the size of the reservoir ({reservoir}), got {k}.")
    return k


def _enough(rows: Tensor, k: int) -> Tensor:
    if len(rows) < k:
        raise NotFitted(
            f"The {k}-th nearest neighbour needs at least {k} training features, got {len(rows)}. "
            "Call update(features) with more of them, or choose a smaller k."
        )
    return rows


def _hash(features: Tensor, seed: int) -> Tensor:
    """A 64-bit hash (N,) of the bits of float32 rows; integer sums are exact, so the batch does not matter."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.randint(-(2**63), 2**63 - 1, (1 + features.shape[1],), generator=generator).to(features.device)
    key = (features.contiguous().view(torch.int32) * (factors[1:] | 1)).sum(-1) + factors[0]
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):  # splitmix64's finaliser
        key = (key ^ ((key >> shift) & (2 ** (64 - shift) - 1))) * factor
    return key
