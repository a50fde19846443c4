"""The default score of a classifier: what the variance, the logits and the classes know, joined.

    score = sum_s weight_s t_s(x_s),        t_s(x) ~ -log P(X_s >= x),  X_s the source s of a held-out in-domain input

    variance         v at amplitude 1, over all of the hidden space
    energy           -log sum_k exp f_k, of the logits as they are
    class_distance   r(h), relative to the nearest class (`gp.class_distance`)

A sum of -log p, after Fisher's method. Each is at least zero, so that no source can be bought off by another: a dense
network that is ever surer far away has an energy of -log p = 0 there, and the variance decides. The sources depend on
each other, so the sum is no p-value; conformal p-values make one of it, exactly.

Each t_s is piecewise linear. Its knots are quantiles of held-out values, at equal steps of -log p down to a tail of one
in ten; beyond, it rises as for an exponential distribution with the mean excess of the tail, so that it ranks inputs
further out than any held-out one. None of it depends on the amplitude or the scale of the logits.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SOURCES = ("variance", "energy", "class_distance")
WEIGHTS = (1.0, 0.5, 0.5)  # docs/defaults.md
_STEPS = 16
_TAIL = 0.1
_STEP = -math.log(_TAIL) / _STEPS
_PRIOR_ROWS = 5.0  # worth of the tail that the body of the distribution foretells


class JoinedScore(nn.Module):
    """Values of the sources (N, 3) -> score (N,)."""

    knots: Tensor  # (3, 17) quantiles, float64; (0, 17) before `fit`
    excess: Tensor  # (3,) mean excess over the last knot; (0,) before `fit`

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("knots", torch.zeros(0, _STEPS + 1, dtype=torch.float64))
        self.register_buffer("excess", torch.zeros(0, dtype=torch.float64))

    @torch.no_grad()
    def fit(self, values: Tensor) -> None:
        """Take the distributions of the sources from held-out values (N, 3), which must not be the reference."""
        values = values.double()
        levels = 1 - torch.exp(-_STEP * torch.arange(_STEPS + 1, dtype=torch.float64, device=values.device))
        knots = torch.quantile(values, levels, dim=0).T.contiguous()
        last = knots[:, -1]
        above = (values - last).clamp_min(0)
        foretold = (last - values.median(0).values) / math.log(0.5 / _TAIL)
        count = (above > 0).sum(0)
        excess = (above.sum(0) + _PRIOR_ROWS * foretold) / (count + _PRIOR_ROWS)
        # Replaced, not written into: predictions may read them.
        self.knots, self.excess = knots.to(self.knots.device), _positive(excess).to(self.excess.device)

    def forget(self) -> None:
        """Until `fit` is called again there is no score."""
        self.knots, self.excess = self.knots[:0].clone(), self.excess[:0].clone()

    @property
    def fitted(self) -> bool:
        return self.knots.shape[0] > 0

    def forward(self, values: Tensor) -> Tensor:
        """Sources (N, 3) -> score (N,)."""
        x = values.double()[..., None]
        start, width = self.knots[:, :-1], _positive(self.knots.diff(dim=-1))
        # All terms have one sign, so that steep steps cost no digits.
        body = _STEP * ((x - start) / width).clamp(0, 1).sum(-1)
        tail = (x[..., 0] - self.knots[:, -1]).clamp_min(0) / self.excess
        weights = torch.tensor(WEIGHTS, dtype=x.dtype, device=x.device)
        return ((body + tail) * weights).sum(-1).to(values.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "JoinedScore":
        knots, excess = self.knots, self.excess
        super()._apply(fn, recurse)
        self.knots, self.excess = knots.to(self.knots.device), excess.to(self.excess.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("knots", "excess"):  # their first dimension tells whether they are there
            saved, own = state_dict.get(prefix + name), getattr(self, name)
            if saved is not None and saved.shape[1:] == own.shape[1:] and saved.shape[0] in (0, len(SOURCES)):
                setattr(self, name, own.new_zeros(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _positive(width: Tensor) -> Tensor:
    """Held-out values may be equal: a step as steep as numbers allow."""
    return width.clamp_min(1e-300)
