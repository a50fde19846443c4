"""The observation noise of numbers, from the residuals of the examples that the posterior is fitted to.

    S = sum_i w_i e_i e_i^T / sum_i w_i,    e_i = y_i - f(h_i)

gives the shape between outputs and the level (`gp.noise`). For noise that varies with the input, two passes: the first
sums the precision as if all examples were alike, which tells how much of its own residual each has taken away; its
square over 1 - (leverage) then enters a convex fit. In the second pass, examples count by the noise that was found.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from afield.gp.head import GaussianProcessHead
from afield.gp.noise import fit_log_variance
from afield.model.hidden import Hidden, check_target
from afield.model.ranks import several_ranks

_PRIOR_ROWS = 20.0  # held-out examples that the training data's shares of the noise are worth
_ROWS = 2**15  # examples whose squares the noise is fitted to: 256 weights need no more


class Residuals:
    """Sums over examples: inputs, count, and w e e^T (K, K) of residuals in the units of the noise at their input."""

    def __init__(self, head: GaussianProcessHead) -> None:
        self.head, outputs = head, head.out_features
        self.squares = torch.zeros(outputs, outputs, dtype=torch.float64)
        self.count = torch.zeros((), dtype=torch.float64)
        self.inputs = torch.zeros((), dtype=torch.float64)

    def add(self, h: Tensor, target: Tensor, weight: Tensor | None) -> None:
        residual, log_ratio = self.of(h, target), self.head.log_noise_ratio(h)
        if log_ratio is not None:
            residual = residual * torch.exp(-0.5 * log_ratio.double())
        weighted = residual if weight is None else residual * weight.double()[:, None]
        self.squares += (weighted.T @ residual).cpu()
        self.count += len(h) if weight is None else float(weight.sum())

    def of(self, h: Tensor, target: Tensor) -> Tensor:
        """e (N, K)."""
        return check_target(target, self.head) - self.head(h).double()

    def reduce(self) -> None:
        """Sum over the ranks, once; a rank without examples adds zeros."""
        if several_ranks():
            for part in (self.squares, self.count, self.inputs):
                on_device = part.to(self.head.precision.count.device)
                dist.all_reduce(on_device)
                part.copy_(on_device)

    def set_noise(self) -> None:
        """Level and shape of the head's noise, and the training error in units of the shape, if there were targets."""
        head, outputs = self.head, self.head.out_features
        if not self.count:
            return
        squares = float(self.squares.diagonal().sum())
        if head.noise_shape is not None and outputs > 1:
            head.noise_shape.take_covariance(self.squares / self.count, float(self.count))
            white = head.noise_shape.whiten(torch.linalg.cholesky(_positive(self.squares)).T)
            squares = float(white.square().sum())
        count = float(self.count) * outputs
        head.set_scalars(noise=noise_variance(head, head.precision.data[0], squares, count))
        head.training_error = torch.full_like(head.training_error, squares / count)


def _positive(squares: Tensor) -> Tensor:
    return squares + 1e-12 * float(squares.diagonal().max()) * torch.eye(len(squares), dtype=squares.dtype)


def noise_variance(head: GaussianProcessHead, gram: Tensor, squares: float, count: float) -> float:
    """The noise variance s^2 = RSS / (n - effective parameters), at its fixed point (MacKay's evidence update).

    Weights trained on these examples fit part of the noise: trace((G + r s^2 I)^-1 G) directions' worth of it.
    """
    values = torch.linalg.eigvalsh(gram).clamp_min(0)
    rows, noise = count / head.out_features, max(squares / count, 1e-12)
    for _ in range(100):
        used = 0.0 if head.mean is not None else float((values / (values + float(head.ridge) * noise)).sum())
        before, noise = noise, max(squares / head.out_features / max(rows - used, 1.0), 1e-12)
        if abs(noise / before - 1) < 1e-12:
            break
    return noise


def balance_outputs(head: GaussianProcessHead, hidden: Tensor, target: Tensor, weight: Tensor | None) -> None:
    """Give each output its share of the noise on held-out data, which weighs against the training data's own share."""
    if head.noise_shape is None or head.out_features == 1:
        return
    predictions = [head.of_numbers(head(h), torch.zeros_like(h[:, 0]), h) for h in hidden.split(4096)]
    squares = torch.cat(
        [
            (y - p.mean).double().square() / p.std.double().square()
            for p, y in zip(predictions, target.split(4096), strict=True)
        ]
    )
    w = torch.ones_like(squares[:, 0]) if weight is None else weight.to(squares)
    share = (w @ squares) / w.sum()
    share = share / share.log().mean().exp()
    head.noise_shape.stretch(((w.sum() * share + _PRIOR_ROWS) / (w.sum() + _PRIOR_ROWS)).sqrt())


def learn_input_noise(head: GaussianProcessHead, examples: Hidden) -> None:
    """Fit how the noise varies with the input, to a head that has observed these examples."""
    assert head.noise_features is not None and head.noise_shape is not None
    residuals = Residuals(head)
    head.factor()
    rows, step, kept = 0, 1, None
    for h, target, weight in examples:
        if target is None:
            raise examples.without_target('fit_posterior with noise="input"')
        squares = residuals.of(h, target).square()
        if head.mean is None:  # whose weights were fitted to these examples
            own = head.precision.variance(head.variance_phi(h)).double()[:, None] / float(head.noise)
            squares = squares / (1 - own.reshape(len(h), -1)).clamp_min(0.01)
        part = torch.cat([squares, torch.ones_like(squares[:, :1]) if weight is None else weight[:, None]], 1)
        new = torch.cat([h.double(), part.to(h.device)], 1)[-rows % step :: step]
        kept = new if kept is None else torch.cat([kept, new])
        rows += len(h)
        while len(kept) > 2 * _ROWS:  # every step-th of all the data, as in `hidden.adapt`
            kept, step = kept[::2], 2 * step
    kept = _gathered(kept, head)
    h, squares, weight = kept.split([head.in_features, head.out_features, 1], 1)
    psi = head.noise_features(h.to(head.noise_features.weight.dtype)).double()
    weights, levels, _ = fit_log_variance(psi, squares, weight[:, 0])
    g = psi @ weights.T
    center = (weight * g).sum(0) / weight.sum()
    span = torch.stack([(g - center).amin(0), (g - center).amax(0)])
    head.noise_shape.take({"weight": weights, "center": center, "span": span})


def _gathered(kept: Tensor | None, head: GaussianProcessHead) -> Tensor:
    """Of all ranks, the same on each."""
    device = head.precision.count.device
    everyone: list[Tensor | None] = [None if kept is None else kept.cpu()]
    if several_ranks():
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, None if kept is None else kept.cpu())
    there = [part for part in everyone if part is not None]
    return torch.cat(there).to(device)
