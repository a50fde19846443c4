"""Ranks in a set that grows: the smoothed p-value of a score among all scores before it, in O(log n).

    p = (#{earlier > score} + u (#{earlier = score} + 1)) / (n + 1),        u uniform in (0, 1)

The scores are kept in sorted blocks of bounded size, and a Fenwick tree counts those in the blocks before a block. A
search takes O(log n), an insertion moves at most one block. A set that has grown to `most` scores keeps a random half
of them, chosen without a look at their values: memory is bounded, and p-values stay exact (proof in docs/drift.md).
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

MOST = 2**16
_BLOCK = 1024


class Ranks:
    """A growing set of scores. NaN counts as further out than everything.

    seed  of the random halves, whole numbers: the same seed and the same scores give the same set
    """

    def __init__(self, scores: Iterable[float] = (), *, seed: tuple[int, ...] = (0,), most: int = MOST) -> None:
        self.seed, self.most, self.halvings = seed, most, 0
        self._fill(np.asarray(list(scores), dtype=np.float64))
        self._halve_if_full()

    def __len__(self) -> int:
        return self._count

    def p_value(self, score: float, u: float) -> float:
        """The smoothed p-value of a score, which joins the set."""
        if score != score:
            score = np.inf
        below = self._count_before(score, bisect_left)
        above = self._count - self._count_before(score, bisect_right)
        p = (above + u * (self._count - above - below + 1)) / (self._count + 1)
        self._insert(score)
        self._halve_if_full()
        return p

    def scores(self) -> np.ndarray:
        """All scores that are kept, sorted."""
        return np.concatenate([np.frombuffer(block) for block in self._blocks if block] or [np.zeros(0)])

    def _fill(self, scores: np.ndarray) -> None:
        ordered = np.sort(np.where(np.isnan(scores), np.inf, scores))
        half = _BLOCK // 2
        parts = [ordered[i : i + half] for i in range(0, len(ordered), half)] or [ordered]
        self._blocks = [array("d", part.tobytes()) for part in parts]
        self._count = len(ordered)
        self._index_blocks()

    def _index_blocks(self) -> None:
        """The last score of every block but the last, and the Fenwick tree of their sizes."""
        self._lasts = [block[-1] for block in self._blocks[:-1]]
        self._tree = [0] * (len(self._blocks) + 1)
        for i, block in enumerate(self._blocks):
            self._add(i, len(block))

    def _add(self, block: int, count: int) -> None:
        i = block + 1
        while i < len(self._tree):
            self._tree[i] += count
            i += i & -i

    def _before(self, block: int) -> int:
        """How many scores lie in the blocks before this one."""
        total = 0
        while block:
            total += self._tree[block]
            block -= block & -block
        return total

    def _count_before(self, score: float, bisect: Callable[[Any, float], int]) -> int:
        block = bisect(self._lasts, score)
        return self._before(block) + bisect(self._blocks[block], score)

    def _insert(self, score: float) -> None:
        i = bisect_left(self._lasts, score)
        block = self._blocks[i]
        insort(block, score)
        self._count += 1
        self._add(i, 1)
        if len(block) >= _BLOCK:
            self._blocks[i : i + 1] = [block[: _BLOCK // 2], block[_BLOCK // 2 :]]
            self._index_blocks()

    def _halve_if_full(self) -> None:
        while self._count > self.most:
            kept, self.halvings = self.scores(), self.halvings + 1
            chosen = np.random.default_rng([*self.seed, self.halvings]).permutation(len(kept))[: len(kept) // 2]
            self._fill(kept[chosen])
