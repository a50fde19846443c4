"""Noise that varies with the input: y ~ N(f(x), v(x) + s^2 g(x)),  log g_k(x) = phi(x)^T c_k + constant_k.

s^2 is the noise variance of the head, g_k that of target k relative to it. The errors that g is fitted to are those of
each row without itself, exactly: with a row's share u = w v / (a^2 s^2) in its own prediction,

    f_-i = (f - u y) / (1 - u),        v_-i = v / (1 - u)

g is fitted to the training rows by their likelihood. Held-out rows set its level and say whether it is any good: it is
kept if it lowers their loss by more than one standard error.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from afield.estimators.rows import Rows
from afield.model.evaluating import evaluating
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction

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


def without_itself(model: SNGP, rows: Rows) -> Prediction:
    """The model's function at each learnt row, as if that had not been learnt."""
    head, parts = model.head, []
    with evaluating(model):
        for part in rows.parts():
            h = model.hidden(part.x)
            mean, variance = head.posterior(h)
            share = (part.weight * variance / (head.amplitude.square() * head.noise)).clamp(0, _LARGEST_SHARE)
            left = (mean - share[:, None] * part.y) / (1 - share)[:, None]
            parts.append(replace(head.of_numbers(left, variance / (1 - share), h), features=h))
    return Prediction.cat(parts)


def of_targets(model: SNGP, prediction: Prediction, noise: "InputNoise | None") -> Prediction:
    """A prediction of a model's function as one of targets, whose variance (N, K) has the noise in it."""
    variance, level = spreads(prediction)
    assert prediction.features is not None
    level = level if noise is None else level * noise(model.head.features(prediction.features))
    return replace(prediction, variance=variance + level, noise=None, features=None)


def spreads(prediction: Prediction) -> tuple[Tensor, Tensor]:
    """The variances (N, K) of the function, and of a noise that is everywhere alike."""
    variance, noise = prediction.variance, prediction.noise
    assert variance is not None
    assert noise is not None
    ones = torch.ones_like(prediction.logits)
    return ones * (variance[:, None] if variance.dim() == 1 else variance), ones * noise


def fit_noise(model: SNGP, rows: Rows, held: Rows, seed: int) -> InputNoise | None:
    """Noise that varies with the input; None where held-out rows do not ask for it. All rows are learnt already."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:_MOST_ROWS]
    rows = rows[order]
    of_rows, of_held = (_Errors.of(model, part) for part in (rows, held))
    outputs, size = held.y.shape[1], of_held.phi.shape[1]
    flat = InputNoise(torch.zeros(outputs, size).double(), torch.zeros(outputs).double())
    unchanged = best = of_held.losses(of_held.levelled(flat))
    chosen = None
    for penalty in _PENALTIES:
        found = of_held.levelled(of_rows.fit(penalty))
        losses = of_held.losses(found)
        if float(held.weight @ losses) < float(held.weight @ best):
            best, chosen = losses, found
    gain, weight = unchanged - best, held.weight / held.weight.sum()
    mean = float(weight @ gain)
    error = math.sqrt(float(weight.square() @ (gain - mean).square()))
    return chosen if mean > error else None


@dataclass(frozen=True)
class _Errors:
    """Squared errors, variances and noise (N, K) of rows without themselves, features (N, D) and weights (N,)."""

    square: Tensor
    variance: Tensor
    noise: Tensor
    phi: Tensor
    weight: Tensor

    @staticmethod
    def of(model: SNGP, rows: Rows) -> "_Errors":
        left = without_itself(model, rows)
        assert left.features is not None
        return _Errors((rows.y - left.logits).square(), *spreads(left), model.head.features(left.features), rows.weight)

    def losses(self, noise: InputNoise) -> Tensor:
        """(N,), summed over the targets."""
        total = self.variance + self.noise * noise(self.phi)
        return 0.5 * (self.square / total + total.log()).sum(1)

    def fit(self, penalty: float) -> InputNoise:
        """The most probable one under a normal prior of this precision."""
        size = self.phi.shape[1]
        theta = torch.zeros(self.square.shape[1], size + 1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([theta], max_iter=_STEPS, line_search_fn="strong_wolfe", history_size=10)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.weight @ self.losses(InputNoise(theta[:, :size], theta[:, size]))
            loss = loss + 0.5 * penalty * theta[:, :size].square().sum()
            loss.backward()
            return loss

        with torch.enable_grad():
            optimizer.step(closure)
        theta = theta.detach()
        return InputNoise(theta[:, :size], theta[:, size])

    def levelled(self, noise: InputNoise) -> InputNoise:
        """With the level that suits these errors best."""
        shifts = torch.linspace(-1.5, 1.5, 31, dtype=torch.float64)
        tried = [InputNoise(noise.weight, noise.constant + shift) for shift in shifts]
        return min(tried, key=lambda n: float(self.weight @ self.losses(n)))
