"""Betting against uniform p-values: a test martingale, a mixture over strategies that may change their minds.

    capital_i  <-  ((1 - J) capital_i + J mean(capital)) b_i(p)         evidence  M = sum_i capital_i,   M_0 = 1

Each bet b_i is a density on (0, 1). If p-values are independent and uniform, the expected capital after a bet is the
capital before it, whatever happened until then: M is a nonnegative martingale, and by Ville's inequality

    P(M ever reaches 1 / alpha) <= alpha.

The bets: cash (1), kappa p^(kappa - 1) for inputs that lie further out, kappa (1 - p)^(kappa - 1) for inputs that
crowd further in. A part J of the capital is spread anew at every step, so that money is left for a change that comes
late, and what was won is not lost again to a bet that has had its time (after Vovk's Simple Jumper). Several J have an
equal part of the money each. Two of them are fixed: they follow what changes often. Two fade as c / t: in t rows
without a change they lose a factor of t^c only, so that after millions of rows a change is still found soon. The
capital is kept as a logarithm and shares: it can grow beyond all floating numbers.

When did it begin? For every bet, log b_i(p) summed up is a random walk that falls on average before the change and
rises after it. Its lowest point is the estimate (CUSUM), taken from the bet that has risen furthest.
"""

import math
from typing import Any

import numpy as np

OUTWARDS = (0.1, 0.3, 0.6, 0.85)
INWARDS = (0.3, 0.7)
FIXED = (1e-2, 1e-3)
FADING = (1.0, 0.1)
_KAPPA = np.array([*OUTWARDS, *INWARDS])
_LOG_KAPPA = np.log(_KAPPA)
_SIDE = np.array([0] * len(OUTWARDS) + [1] * len(INWARDS))
_NUM_BETS = 1 + len(_KAPPA)
_FIXED = np.array([[*FIXED, *(0.0 for _ in FADING)]]).T
_FADING = np.array([[*(0.0 for _ in FIXED), *FADING]]).T
_FIRST = 10  # J = c / (t + 10)
_TINY = 1e-300


class Bets:
    """Evidence against uniform p-values, as its natural logarithm, and when it began to grow."""

    def __init__(self) -> None:
        self.rows = 0
        self.log_evidence = 0.0
        self._shares = np.full((len(_FIXED), _NUM_BETS), 1 / (len(_FIXED) * _NUM_BETS))
        self._walks, self._lowest = np.zeros(len(_KAPPA)), np.zeros(len(_KAPPA))
        self._lowest_at = np.zeros(len(_KAPPA), dtype=np.int64)

    def bet(self, p: float) -> float:
        """Bet on the next p-value; the evidence after it, as a logarithm."""
        logs = np.array((math.log(max(p, _TINY)), math.log(max(1 - p, _TINY))))
        gains = _LOG_KAPPA + (_KAPPA - 1) * logs[_SIDE]
        jump = _FIXED + _FADING / (self.rows + _FIRST)
        shares = (1 - jump) * self._shares + jump * (self._shares.sum(1, keepdims=True) / _NUM_BETS)
        shares[:, 1:] *= np.exp(gains)
        total = float(shares.sum())
        self._shares = shares / total
        self.log_evidence += math.log(total)
        self.rows += 1
        self._walks += gains
        lower = self._walks < self._lowest
        if lower.any():
            self._lowest[lower], self._lowest_at[lower] = self._walks[lower], self.rows
        return self.log_evidence

    @property
    def began(self) -> int:
        """The number of rows before the estimated change."""
        return int(self._lowest_at[(self._walks - self._lowest).argmax()])

    def state(self) -> dict[str, Any]:
        """Plain numbers, for `restore`."""
        arrays = {"shares": self._shares, "walks": self._walks, "lowest": self._lowest, "lowest_at": self._lowest_at}
        return {"rows": self.rows, "log_evidence": self.log_evidence} | {k: a.tolist() for k, a in arrays.items()}

    @staticmethod
    def restore(state: dict[str, Any]) -> "Bets":
        """The bets of a `state`, to the bit."""
        bets = Bets()
        bets.rows, bets.log_evidence = int(state["rows"]), float(state["log_evidence"])
        bets._shares = np.array(state["shares"], dtype=np.float64)
        bets._walks, bets._lowest = np.array(state["walks"]), np.array(state["lowest"])
        bets._lowest_at = np.array(state["lowest_at"], dtype=np.int64)
        return bets
