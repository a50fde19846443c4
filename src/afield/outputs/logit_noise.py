"""Label noise that varies with the input: correlated Gaussian noise of the logits, learnt with them.

    u = f(x) + V(x) e + d(x) * e',     e ~ N(0, I_R),  e' ~ N(0, I_K),     p(y | x) = E softmax(u / T)_y

    V(x) = reshape(phi^T A + a, (K, R)),    d(x) = softplus(phi^T B + b)

f is the posterior mean and phi (N, D) are its random features (Collier et al. 2021; with a Gaussian process Fortuin et
al. 2022, "HetSNGP"). V says which classes are mistaken for each other, d how noisy each is by itself. Training
minimises -log p(y | x). A prediction adds the posterior variance v, which is what the model does not know, to d^2,
which is what the labels do not tell.

With two classes only the difference of the logits counts, which is one Gaussian number: its integral is computed, to
about 1e-12. With more, S draws of (e, e') stand for the expectation: new ones at each step of training, and the same
ones for all inputs in predictions, so that a prediction is a function.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afield.prediction.predictive import quadrature

_ROWS = 2**22  # numbers of drawn logits that are in memory at once
_START = (0.5, -2.0)  # standard deviation of the weights of V, without noise of which it would not move; and b


class LogitNoise(nn.Module):
    """phi (N, D) -> the factor V (N, K, R) and the standard deviation d (N, K).

    temperature  T of the softmax over noisy logits in training
    """

    def __init__(self, num_features: int, num_classes: int, rank: int, temperature: float = 1.0) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(f"LogitNoise expects a logit for each of at least 2 classes, got {num_classes}.")
        if not 0 <= rank <= num_classes:
            raise ValueError(f"The rank of logit noise must lie between 0 and {num_classes}, its classes, got {rank}.")
        if not temperature > 0:
            raise ValueError(f"The temperature of logit noise must be positive, got {temperature}.")
        self.num_classes, self.rank, self.temperature = num_classes, rank, temperature
        self.factor = nn.Linear(num_features, num_classes * rank) if rank else None
        self.deviation = nn.Linear(num_features, num_classes)
        if self.factor is not None:
            nn.init.normal_(self.factor.weight, std=_START[0])
            nn.init.zeros_(self.factor.bias)
        nn.init.zeros_(self.deviation.weight)
        nn.init.constant_(self.deviation.bias, _START[1])

    def forward(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        factor = phi.new_zeros(len(phi), self.num_classes, 0)
        if self.factor is not None:
            factor = self.factor(phi).unflatten(1, (self.num_classes, self.rank))
        return factor / self.temperature, F.softplus(self.deviation(phi)) / self.temperature

    def extra_repr(self) -> str:
        return f"rank={self.rank}, temperature={self.temperature:g}"


def noise_variance(factor: Tensor, deviation: Tensor) -> Tensor:
    """The variance (N, K) of the noise of each logit."""
    return factor.square().sum(-1) + deviation.square()


def log_loss(mean: Tensor, factor: Tensor, deviation: Tensor, target: Tensor, num_samples: int) -> Tensor:
    """-log E softmax(mean + noise)_y (N,) of classes y (N,)."""
    if mean.shape[1] == 2:
        both = _of_two(mean, factor, deviation)
        return -both.gather(1, target[:, None])[:, 0].clamp_min(1e-30).log()
    e = torch.randn(num_samples, len(mean), factor.shape[2] + mean.shape[1], dtype=mean.dtype, device=mean.device)
    common, own = e.split([factor.shape[2], mean.shape[1]], dim=-1)
    logits = mean + torch.einsum("nkr,snr->snk", factor, common) + deviation * own
    return math.log(num_samples) - (logits.log_softmax(-1)[:, torch.arange(len(mean)), target]).logsumexp(0)


@torch.no_grad()
def probabilities(mean: Tensor, factor: Tensor, deviation: Tensor, num_samples: int) -> Tensor:
    """E softmax(mean + noise) (N, K), by draws that are the same in every call."""
    if mean.shape[1] == 2:
        return _of_two(mean, factor, deviation)
    rank, classes = factor.shape[2], mean.shape[1]
    generator = torch.Generator().manual_seed(0)
    e = torch.randn(num_samples, rank + classes, generator=generator, dtype=torch.float64).to(mean)
    rows = max(1, _ROWS // (num_samples * classes))
    return torch.cat(
        [
            (m[:, None] + torch.einsum("nkr,sr->nsk", v, e[:, :rank]) + d[:, None] * e[:, rank:]).softmax(-1).mean(1)
            for m, v, d in zip(mean.split(rows), factor.split(rows), deviation.split(rows), strict=True)
        ]
    )


def _of_two(mean: Tensor, factor: Tensor, deviation: Tensor) -> Tensor:
    variance = (factor[:, 1] - factor[:, 0]).square().sum(-1) + deviation.square().sum(-1)
    return quadrature(mean[:, 1:] - mean[:, :1], variance)
