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
from typing import Any

import torch
from torch import Tensor

from afield.gp.exact_buffers import ExactBuffers

SOURCES = ("variance", "energy", "class_distance")
WEIGHTS = (1.0, 0.5, 0.5)  # docs/defaults.md
_STEPS = 16
_TAIL = 0.1
_STEP = -math.log(_TAIL) / _STEPS
_BUFFERS = ("knots", "widths", "slopes")
_NARROWEST = 1e-4  # of steps, as a part of the values: what varies less is rounding
_PRIOR_ROWS = 5.0  # worth of the tail that the body of the distribution foretells


class JoinedScore(ExactBuffers):
    """Values of the sources (N, 3) -> score (N,).

    t(x) = sum_j slope_j min(max(x - knot_j, 0), width_j): all terms have one sign, so that steep steps cost no digits.
    """

    knots: Tensor  # (3, 17) quantiles, float64; this and the next two are (0, 17) before `fit`
    widths: Tensor  # (3, 17) to the next knot; the last ones are infinite
    slopes: Tensor  # (3, 17), with the weight of the source in them

    def __init__(self) -> None:
        super().__init__()
        for name in _BUFFERS:
            self.register_buffer(name, torch.zeros(0, _STEPS + 1, dtype=torch.float64))

    @torch.no_grad()
    def fit(self, values: Tensor) -> None:
        """Take the distributions of the sources from held-out values (N, 3), which must not be the reference."""
        values = values.double()
        levels = 1 - torch.exp(-_STEP * torch.arange(_STEPS + 1, dtype=torch.float64, device=values.device))
        knots = torch.quantile(values, levels, dim=0).T.contiguous()
        last = knots[:, -1]
        above = (values - last).clamp_min(0)
        foretold = (last - values.median(0).values) / math.log(0.5 / _TAIL)
        excess = (above.sum(0) + _PRIOR_ROWS * foretold) / ((above > 0).sum(0) + _PRIOR_ROWS)
        narrowest = (_NARROWEST * knots.abs().amax(1, keepdim=True)).clamp_min(1e-100)
        steps = torch.maximum(knots.diff(dim=-1), narrowest)
        knots = torch.cat([knots[:, :1], knots[:, :1] + steps.cumsum(-1)], dim=-1)  # values may be equal
        widths = torch.cat([steps, torch.full_like(knots[:, :1], math.inf)], dim=-1)
        rise = torch.cat([_STEP / widths[:, :-1], 1 / torch.maximum(excess[:, None], narrowest)], dim=-1)
        slopes = rise * torch.tensor(WEIGHTS, dtype=rise.dtype, device=rise.device)[:, None]
        for name, value in zip(_BUFFERS, (knots, widths, slopes), strict=True):
            setattr(self, name, value.to(self.knots.device))  # not written into: predictions may read them

    def forget(self) -> None:
        """Until `fit` is called again there is no score."""
        for name in _BUFFERS:
            setattr(self, name, getattr(self, name)[:0].clone())

    @property
    def fitted(self) -> bool:
        return self.knots.shape[0] > 0

    def forward(self, values: Tensor) -> Tensor:
        """Sources (N, 3) -> score (N,)."""
        above = (values.double()[..., None] - self.knots).clamp_min(0)
        return (torch.minimum(above, self.widths) * self.slopes).sum((-1, -2)).to(values.dtype)

    @property
    def exact(self) -> tuple[str, ...]:
        return _BUFFERS

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.make_room(state_dict, prefix, _BUFFERS, rows=(0, len(SOURCES)))
        super()._load_from_state_dict(state_dict, prefix, *args)
