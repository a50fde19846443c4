"""Betting against uniform p-values: a test martingale, a mixture over strategies that may change their minds.

    capital_i  <-  ((1 - J) capital_i + J mean(capital)) b_i(p)         evidence  M = sum_i capital_i,   M_0 = 1

Each bet b_i is a density on (0, 1). If p-values are independent and uniform, the expected capital after a bet is the
capital before it, whatever happened until then: M is a nonnegative martingale, and by Ville's inequality

    P(M ever reaches 1 / alpha) <= alpha.

The bets: cash (1), kappa p^(kappa - 1) for inputs that lie further out, kappa (1 - p)^(kappa - 1) for inputs that
crowd further in. A part J of the capital is spread anew at every eighth step, so that money is left for a change that
comes late, and what was won is not lost again to a bet that has had its time (after Vovk's Simple Jumper). Several J
have an equal part of the money each. Two of them are fixed: they follow what changes often. Two fade as c / t: in t
rows without a change they lose a power of t only, so that after millions of rows a change is still found soon. The
capital is kept as a logarithm and shares: it can grow beyond all floating numbers.

When did it begin? For every bet, log b_i(p) summed up is a random walk that falls on average before the change and
rises after it. Its lowest point is the estimate (CUSUM), taken from the bet that has risen furthest.
"""

import math
from typing import Any

import numpy as np

OUTWARDS = (0.1, 0.3, 0.6, 0.85)
INWARDS = (0.3, 0.7)
EVERY = 8  # rows between two spreadings
FIXED = (8e-2, 8e-3)
FADING = (8.0, 0.8)
_KAPPA = np.array([*OUTWARDS, *INWARDS])
_LOG_KAPPA = np.log(_KAPPA)
_SIDE = np.array([0] * len(OUTWARDS) + [1] * len(INWARDS))
_NUM_BETS = 1 + len(_KAPPA)
_FIXED = np.array([[*FIXED, *(0.0 for _ in FADING)]]).T
_FADING = np.array([[*(0.0 for _ in FIXED), *FADING]]).T
_FIRST = 10  # J = c / (t + 10)
_SCALARS, _ARRAYS = ("rows", "log_evidence", "_before"), ("_shares", "_gains", "_walks", "_lowest", "_lowest_at")
_TINY = 1e-300


class Bets:
    """Evidence against uniform p-values, as its natural logarithm, and when it began to grow."""

    def __init__(self) -> None:
        self.rows = 0
        self.log_evidence = 0.0
        self._before = 0.0  # the logarithm of the capital when it was spread last
        self._shares = np.full((len(_FIXED), _NUM_BETS), 1 / (len(_FIXED) * _NUM_BETS))
        self._gains = np.zeros(len(_KAPPA))  # of the bets since then, as logarithms
        self._walks, self._lowest = np.zeros(len(_KAPPA)), np.zeros(len(_KAPPA))
        self._lowest_at = np.zeros(len(_KAPPA), dtype=np.int64)

    def bet(self, p_values: np.ndarray, at: np.ndarray | None = None) -> np.ndarray:
        """Bet on the next p-values (N,), one after the other; the evidence after each, as logarithms.

        at  the numbers of their rows, for `began`; None: they follow each other
        """
        numbers = np.arange(self.rows, self.rows + len(p_values)) + 1 if at is None else at
        logs = np.log(np.maximum(np.stack([p_values, 1 - p_values], axis=1), _TINY))
        gains = _LOG_KAPPA + (_KAPPA - 1) * logs[:, _SIDE]
        found, done = np.empty(len(p_values)), 0
        while done < len(p_values):
            if self.rows % EVERY == 0:
                self._spread()
            part = gains[done : done + EVERY - self.rows % EVERY]
            grown = np.cumsum(np.concatenate([self._gains[None], part]), axis=0)[1:]
            stakes = self._shares.sum(0)
            totals = stakes[0] + (np.exp(grown) * stakes[1:]).sum(1)
            found[done : done + len(part)] = self._before + np.log(totals)
            self._gains, done, self.rows = grown[-1], done + len(part), self.rows + len(part)
        if len(found):
            self.log_evidence = float(found[-1])
            self._walk(gains, numbers)
        return found

    def _spread(self) -> None:
        """Settle the bets, and spread a part of the capital anew."""
        shares = self._shares.copy()
        shares[:, 1:] *= np.exp(self._gains)
        total = float(shares.sum())
        jump = _FIXED + _FADING / (self.rows + _FIRST)
        shares = (1 - jump) * shares + jump * (shares.sum(1, keepdims=True) / _NUM_BETS)
        self._shares, self._before = shares / total, self._before + math.log(total)
        self._gains = np.zeros(len(_KAPPA))

    def _walk(self, gains: np.ndarray, numbers: np.ndarray) -> None:
        walks = np.cumsum(np.concatenate([self._walks[None], gains]), axis=0)[1:]
        self._walks, first = walks[-1], walks.argmin(0)
        lowest = walks[first, np.arange(len(_KAPPA))]
        self._lowest_at = np.where(lowest < self._lowest, numbers[first], self._lowest_at)
        self._lowest = np.minimum(lowest, self._lowest)

    @property
    def began(self) -> int:
        """The number of the last row before the estimated change."""
        return int(self._lowest_at[(self._walks - self._lowest).argmax()])

    def state(self) -> dict[str, Any]:
        """Plain numbers, for `restore`."""
        return {name.strip("_"): getattr(self, name) for name in _SCALARS} | {
            name.strip("_"): getattr(self, name).tolist() for name in _ARRAYS
        }

    @staticmethod
    def restore(state: dict[str, Any]) -> "Bets":
        """The bets of a `state`, to the bit."""
        bets = Bets()
        for name in _SCALARS:
            setattr(bets, name, state[name.strip("_")])
        for name in _ARRAYS:
            setattr(bets, name, np.array(state[name.strip("_")], dtype=getattr(bets, name).dtype))
        return bets
