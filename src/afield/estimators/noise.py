"""Noise that varies with the input: y ~ N(f(x), v(x) + s^2 g(x)),  log g_k(x) = phi(x)^T c_k + constant_k.

s^2 is the noise variance of the head, g_k that of target k relative to it. The errors that g is fitted to are those of
each row without itself, exactly: with a row's share u = w v / (a^2 s^2) in its own prediction,

    f_-i = (f - u y) / (1 - u),        v_-i = v / (1 - u)

g is fitted to the training rows by their likelihood. Held-out rows set its level and say whether it is any good: it is
kept if it lowers their loss by more than one standard error.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from afield.estimators.network import predict
from afield.estimators.rows import Rows
from afield.model.evaluating import evaluating
from afield.model.sngp_model import SNGP

_PENALTIES = (3.0, 30.0, 300.0)  # on |c|^2 / 2
_MOST_ROWS = 10_000
_LARGEST_SHARE = 1 - 1e-6
_STEPS = 60


@dataclass(frozen=True)
class InputNoise:
    """weight (K, D), constant (K,)"""

    weight: Tensor
    constant: Tensor

    def __call__(self, phi: Tensor) -> Tensor:
        """g (N, K), of features (N, D)."""
        return (phi.double() @ self.weight.T + self.constant).clamp(-20, 20).exp()


def without_itself(model: SNGP, rows: Rows) -> tuple[Tensor, Tensor]:
    """Mean (N, K) and variance (N,) of each learnt row, as if it had not been learnt."""
    head, prediction = model.head, predict(model, rows.x)
    variance = prediction.variance
    assert variance is not None
    share = rows.weight * variance / (head.amplitude.square() * head.noise)
    left = 1 - share.clamp(0, _LARGEST_SHARE)
    return (prediction.logits - (1 - left)[:, None] * rows.y) / left[:, None], variance / left


def features_of(model: SNGP, x: Tensor) -> Tensor:
    with evaluating(model):
        return torch.cat([model.head.features(model.hidden(part)) for part in x.split(4096)])


def fit_noise(model: SNGP, rows: Rows, held: Rows, seed: int) -> InputNoise | None:
    """Noise that varies with the input; None where held-out rows do not ask for it. All rows are learnt already."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:_MOST_ROWS]
    rows, noise = rows[order], float(model.head.noise)
    of_rows, of_held = (_Errors.of(model, part) for part in (rows, held))
    flat = InputNoise(torch.zeros(held.y.shape[1], of_held.phi.shape[1]).double(), torch.zeros(held.y.shape[1]).double())
    unchanged = best = of_held.losses(of_held.levelled(flat, noise), noise)
    chosen = None
    for penalty in _PENALTIES:
        found = of_held.levelled(of_rows.fit(noise, penalty), noise)
        losses = of_held.losses(found, noise)
        if float(held.weight @ losses) < float(held.weight @ best):
            best, chosen = losses, found
    gain, weight = unchanged - best, held.weight / held.weight.sum()
    mean = float(weight @ gain)
    error = math.sqrt(float(weight.square() @ (gain - mean).square()))
    return chosen if mean > error else None


@dataclass(frozen=True)
class _Errors:
    """Squared errors (N, K) and variances (N,) of rows without themselves, features (N, D) and weights (N,)."""

    square: Tensor
    variance: Tensor
    phi: Tensor
    weight: Tensor

    @staticmethod
    def of(model: SNGP, rows: Rows) -> "_Errors":
        mean, variance = without_itself(model, rows)
        return _Errors((rows.y - mean).square(), variance, features_of(model, rows.x), rows.weight)

    def losses(self, noise: InputNoise, scale: float) -> Tensor:
        """(N,), summed over the targets."""
        total = self.variance[:, None] + scale * noise(self.phi)
        return 0.5 * (self.square / total + total.log()).sum(1)

    def fit(self, scale: float, penalty: float) -> InputNoise:
        """The most probable one under a normal prior of this precision."""
        size = self.phi.shape[1]
        theta = torch.zeros(self.square.shape[1], size + 1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([theta], max_iter=_STEPS, line_search_fn="strong_wolfe", history_size=10)

        def closure() -> Tensor:
            optimizer.zero_grad()
            noise = InputNoise(theta[:, :size], theta[:, size])
            loss = self.weight @ self.losses(noise, scale) + 0.5 * penalty * theta[:, :size].square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        with torch.enable_grad():
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        theta = theta.detach()
        return InputNoise(theta[:, :size], theta[:, size])

    def levelled(self, noise: InputNoise, scale: float) -> InputNoise:
        """With the level that suits these errors best."""
        shifts = torch.linspace(-1.5, 1.5, 31, dtype=torch.float64)
        tried = [InputNoise(noise.weight, noise.constant + shift) for shift in shifts]
        return min(tried, key=lambda n: float(self.weight @ self.losses(n, scale)))
