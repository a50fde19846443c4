"""Does the hidden mapping keep distances, and does the uncertainty follow them?

    L1 |x - x'| <= |h(x) - h(x')| <= L2 |x - x'|                    paper: eq. (dp), proposition resnet_lipschitz

`certified` proves L1 and L2 from the weights where the structure allows it: chains of linear layers, 1-Lipschitz
activations and `Residual` blocks, whose branch of Lipschitz constant a gives 1 - a and 1 + a. `measured` takes them
from pairs of examples. `distance_correlation` is Spearman's rank correlation of a score with the distance to the
nearest training example. `variance_error` bounds what a low-rank posterior gets wrong.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from afield.bounds.residual import Residual
from afield.bounds.spectral import certified_norm
from afield.errors import NotFitted
from afield.gp.head import GaussianProcessHead
from afield.gp.low_rank import LowRank
from afield.model.evaluating import evaluating
from afield.model.hidden import Hidden
from afield.model.sngp_model import SNGP

_ISOMETRIES = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# Lipschitz constant 1; flat somewhere, so nothing can be said from below.
_CONTRACTIONS = (nn.ReLU, nn.Tanh, nn.Softplus, nn.ReLU6, nn.Hardtanh, nn.Softshrink, nn.MaxPool1d, nn.MaxPool2d)
# Largest slope of the activation, rounded up in the last digit.
_SLOPES: dict[type[nn.Module], float] = {
    nn.GELU: 1.12905,
    nn.SiLU: 1.09984,
    nn.Sigmoid: 0.25,
    nn.ELU: 1.0,
    nn.Mish: 1.0885,
}
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Lipschitz:
    """Constants L1 (`lower`) and L2 (`upper`); `reason` names what stopped a certificate (upper is then inf)."""

    lower: float
    upper: float
    reason: str = ""

    def then(self, after: "Lipschitz") -> "Lipschitz":
        """The constants of this map followed by another."""
        upper = 0.0 if 0.0 in (self.upper, after.upper) else self.upper * after.upper
        return Lipschitz(self.lower * after.lower, upper, self.reason or after.reason)


def certified(module: nn.Module) -> Lipschitz:
    """Proven constants of a module as it acts in evaluation mode; `upper` is inf, with a reason, where none is known.

    For an `SNGP` whose network is a Sequential: the part before the head.

    returns  a `Lipschitz`: `lower`, `upper`, and the `reason` where there is no certificate

    >>> layer = afield.bound(torch.nn.Linear(3, 3), 0.5).eval()
    >>> afield.diagnose.certified(layer).upper < 0.6
    True
    """
    if isinstance(module, SNGP):
        return certified(module.net)
    if isinstance(module, GaussianProcessHead):  # the whole network was one Linear
        return Lipschitz(1.0, 1.0)
    if _own_forward(module):
        return Lipschitz(0.0, math.inf, f"{type(module).__name__} has a forward of its own")
    if isinstance(module, nn.Sequential):
        result = Lipschitz(1.0, 1.0)
        for part in module:
            if isinstance(part, GaussianProcessHead):
                break
            result = result.then(certified(part))
        return result
    if isinstance(module, Residual):
        branch = certified(module.branch)
        return Lipschitz(max(0.0, 1 - branch.upper), 1 + branch.upper, branch.reason)
    return _layer(module)


def _own_forward(module: nn.Module) -> bool:
    """Whether a subclass of a known layer acts otherwise: `class Shortcut(nn.Sequential)` with x + ... is common."""
    known = next((k for k in type(module).__mro__ if k.__module__.startswith(("torch.nn.", "afield."))), None)
    return known is not None and type(module).forward is not getattr(known, "forward", None)


def _layer(module: nn.Module) -> Lipschitz:
    if isinstance(module, _ISOMETRIES):
        return Lipschitz(1.0, 1.0)
    if isinstance(module, _CONTRACTIONS):
        if isinstance(module, nn.MaxPool1d | nn.MaxPool2d) and _overlaps(module):
            return Lipschitz(0.0, math.inf, "a MaxPool whose windows overlap")
        return Lipschitz(0.0, 1.0)
    if isinstance(module, nn.LeakyReLU):
        slope = module.negative_slope
        return Lipschitz(min(max(slope, 0.0), 1.0), max(abs(slope), 1.0))
    for kind, slope in _SLOPES.items():
        if isinstance(module, kind):
            return Lipschitz(0.0, slope if not isinstance(module, nn.ELU) else max(1.0, abs(module.alpha)))
    if isinstance(module, nn.Linear):
        values = torch.linalg.svdvals(module.weight.detach().double())
        injective = module.out_features >= module.in_features
        return Lipschitz(float(values[-1]) * (1 - 1e-12) if injective else 0.0, certified_norm(module))
    if isinstance(module, _BATCH_NORM) and module.running_var is not None:
        gain = torch.rsqrt(module.running_var.double() + module.eps)
        gain = gain if module.weight is None else gain * module.weight.detach().double().abs()
        return Lipschitz(float(gain.min()), float(gain.max()))
    statistics = isinstance(module, _BATCH_NORM)  # and has none
    upper = math.inf if statistics else certified_norm(module)
    return Lipschitz(0.0, upper, "" if math.isfinite(upper) else f"no certificate for {type(module).__name__}")


def _overlaps(pool: nn.MaxPool1d | nn.MaxPool2d) -> bool:
    def pair(value: Any) -> tuple[int, ...]:
        return tuple(value) if isinstance(value, tuple) else (value, value)

    sizes = zip(pair(pool.kernel_size), pair(pool.stride), pair(pool.dilation), strict=True)
    return any(stride < kernel or (dilation > 1 and kernel > 1) for kernel, stride, dilation in sizes)


def measured(mapping: SNGP | Callable[[Tensor], Tensor], x: Tensor, *, pairs: int = 4096, seed: int = 0) -> Lipschitz:
    """The smallest and largest |h(x) - h(x')| / |x - x'| over random pairs of the examples x (N, ...).

    returns  a `Lipschitz`: `lower` and `upper`
    raises   ValueError with fewer than two examples, or if all are equal

    >>> afield.diagnose.measured(lambda points: 2 * points, x)
    Lipschitz(lower=2.0, upper=2.0, reason='')
    """
    if x.shape[0] < 2:
        raise ValueError(f"measured expects at least 2 examples, got {x.shape[0]}.")
    with evaluating(mapping) if isinstance(mapping, nn.Module) else torch.no_grad():
        h = mapping.hidden(x) if isinstance(mapping, SNGP) else mapping(x)
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(x.shape[0], (pairs,), generator=generator)
    second = (first + torch.randint(1, x.shape[0], (pairs,), generator=generator)) % x.shape[0]
    before = (x[first] - x[second]).flatten(1).double().norm(dim=1)
    after = (h[first] - h[second]).flatten(1).double().norm(dim=1)
    ratios = (after / before)[before > 0]
    if not ratios.numel():
        raise ValueError("measured needs examples that differ.")
    return Lipschitz(float(ratios.min()), float(ratios.max()))


def nearest_distance(x: Tensor, train: Tensor) -> Tensor:
    """The distance (N,) from each of x to the nearest of the training examples, in the space they are given in.

    train  the training examples (M, ...)

    returns  a tensor (N,)
    raises   RuntimeError if the shapes of examples differ

    >>> afield.diagnose.nearest_distance(torch.tensor([[3.0]]), torch.tensor([[0.0], [1.0]]))
    tensor([2.])
    """
    flat = train.flatten(1)
    return torch.cat(
        [
            torch.cdist(part.flatten(1), flat, compute_mode="donot_use_mm_for_euclid_dist").amin(1)
            for part in x.split(1024)
        ]
    )


def mean_distance(x: Tensor, train: Tensor) -> Tensor:
    """The mean distance (N,) from each of x to the training examples: that of the paper's definition of awareness.

    Between two clusters it is no larger than inside them, so that no function of it says that a gap is foreign.

    train  the training examples (M, ...)

    returns  a tensor (N,)
    raises   RuntimeError if the shapes of examples differ

    >>> afield.diagnose.mean_distance(torch.tensor([[3.0]]), torch.tensor([[0.0], [1.0]]))
    tensor([2.5000])
    """
    return torch.cat([torch.cdist(part.flatten(1), train.flatten(1)).mean(1) for part in x.split(1024)])


def distance_correlation(
    score: Tensor, x: Tensor, train: Tensor, *, distance: Callable[[Tensor, Tensor], Tensor] = nearest_distance
) -> float:
    """Spearman's rank correlation of scores (N,) with the distance of x (N, ...) to the training examples.

    distance  `nearest_distance`, to the nearest of them, or `mean_distance`, as the paper's definition has it

    returns  a number between -1 and 1
    raises   ValueError with fewer than two rows

    >>> far = torch.linspace(0, 50, 40)[:, None] + torch.zeros(40, 3)
    >>> afield.diagnose.distance_correlation(model.predict(far).score(), far, x) > 0.8
    True
    """
    return spearman(score, distance(x, train))


def spearman(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation of two vectors (N,); ties share their average rank.

    b  the other vector

    returns  a number between -1 and 1
    raises   ValueError if their lengths differ

    >>> afield.diagnose.spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 4.0, 9.0]))
    1.0
    """
    if a.shape != b.shape or a.dim() != 1 or a.numel() < 2:
        raise ValueError(f"spearman expects two vectors of one length >= 2, got {tuple(a.shape)} and {tuple(b.shape)}.")
    ranks = torch.stack([_ranks(a), _ranks(b)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Tensor) -> Tensor:
    _, inverse, counts = values.detach().double().unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[inverse]


def variance_error(
    model: SNGP,
    loader: Iterable[Any],
    *,
    probability: float = 0.999,
    starts: int = 4,
    steps: int = 12,
    seed: int = 0,
    progress: bool | None = None,
) -> Tensor:
    """e (K,), at least |vhat_k(h) - v_k(h)| / v_k(h) for all h and all classes k at once, with this probability.

    loader  the training data that `fit_posterior` saw; it is read q times, from memory if its hidden vectors fit
    starts  s, random vectors for each class;  steps  q, products with each: more of them make a closer bound
    probability  that the bound holds for all of them;  seed  of the random vectors

    returns  a tensor (K,)
    raises   ValueError if the posterior is not low-rank; NotFitted before `fit_posterior`

    >>> small = afield.sngp(net, covariance="per_class", rank=20, num_random_features=64)
    >>> afield.fit_posterior(small, train_loader)
    200
    >>> afield.diagnose.variance_error(small, train_loader).shape
    torch.Size([3])

    v is the variance by the exact precision H of a class, vhat the one by Hhat of `afield.gp.low_rank`. With
    E = H - Hhat, M = Hhat^-1/2 E Hhat^-1/2 and u = Hhat^-1/2 phi, v is u^T (I + M)^-1 u and vhat is u^T u, so that

        |vhat - v| = |u^T (I + M)^-1/2 M (I + M)^-1/2 u| <= |M| v

    For z ~ N(0, I) and the unit eigenvector e of M whose eigenvalue is largest, |M|^q |e . z| <= |M^q z|, and
    P(|e . z| < t) <= t sqrt(2/pi). So |M| <= max over s draws of (|M^q z| / t)^(1/q), unless all of them are unlucky;
    over K classes the probability of that is at most K (t sqrt(2/pi))^s, which sets t. With x = Hhat^-1/2 z nothing
    needs a square root of a matrix: z -> M z is x -> Hhat^-1 E x, |z|^2 is x^T Hhat x, and a draw is
    x = Hhat^-1 (U sqrt(d) z_1 + Phi_S^T sqrt(w_S) z_2).
    """
    head = model.head
    if not isinstance(head.precision, LowRank):
        raise ValueError(
            "variance_error expects a low-rank posterior, got an exact one (rank=None): its error is zero."
        )
    if not 0 < probability < 1 or starts < 1 or steps < 1:
        raise ValueError(
            "variance_error expects a probability strictly between 0 and 1 and positive starts and steps, got "
            f"{probability}, {starts} and {steps}."
        )
    if not head.precision.fitted:
        raise NotFitted("The posterior is not fitted: call afield.fit_posterior(model, train_loader) first.")
    with evaluating(model):
        approximate, examples = _Approximate(head, head.precision), Hidden(model, loader, progress=progress)
        x = approximate.draw(starts, torch.Generator(approximate.basis.device).manual_seed(seed))
        known, log_length = approximate.data_term(x), x.new_zeros(len(x), starts)
        for _ in range(steps):
            x = approximate.solve(_data_term(head, examples, x) - known)
            known = approximate.data_term(x)
            length = (x * (known + approximate.ridge * x)).sum(1, keepdim=True).clamp_min(0).sqrt()
            log_length += length.squeeze(1).log()
            unit = length.clamp_min(torch.finfo(x.dtype).tiny)  # the powers of a small M would underflow
            x, known = x / unit, known / unit
    log_t = math.log(math.pi / 2) / 2 + math.log((1 - probability) / len(x)) / starts
    return ((log_length.amax(1) - log_t) / steps).exp()


class _Approximate:
    """Products with Hhat_k and its inverse for all classes, in float64; vectors are (K, D, s)."""

    def __init__(self, head: GaussianProcessHead, precision: LowRank) -> None:
        self.precision, self.ridge, self.noise = precision, float(head.ridge), float(head.noise)
        self.basis, self.diagonal = precision.diagonal(self.ridge, self.noise)
        self.lower = []
        for k, diagonal in enumerate(self.diagonal):
            rows = self._rows(k) @ self.basis
            gram = (rows / diagonal) @ rows.T
            gram.diagonal().add_(1)
            self.lower.append(torch.linalg.cholesky(gram))

    def draw(self, starts: int, generator: torch.Generator) -> Tensor:
        """x ~ N(0, Hhat^-1)."""
        like: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": self.basis.device}
        z = self.basis @ (self.diagonal.sqrt()[..., None] * torch.randn(*self.diagonal.shape, starts, **like))
        for k in range(len(z)):
            z[k] += self._rows(k).T @ torch.randn(self.precision.rank, starts, **like)
        return self.solve(z)

    def solve(self, x: Tensor) -> Tensor:
        """Hhat^-1 x, by Woodbury's identity."""
        first = self._first_solve(x)
        back = torch.empty_like(x)
        for k, lower in enumerate(self.lower):
            rows = self._rows(k)
            back[k] = rows.T @ torch.cholesky_solve(rows @ first[k], lower)
        return first - self._first_solve(back)

    def data_term(self, x: Tensor) -> Tensor:
        """(Hhat - r I) x."""
        result = self.basis @ ((self.diagonal - self.ridge)[..., None] * (self.basis.T @ x))
        for k in range(len(x)):
            rows = self._rows(k)
            result[k] += rows.T @ (rows @ x[k])
        return result

    def _first_solve(self, x: Tensor) -> Tensor:
        return self.basis @ ((self.basis.T @ x) / self.diagonal[..., None])

    def _rows(self, k: int) -> Tensor:
        return self.precision.rows(k, self.noise)


def _data_term(head: GaussianProcessHead, examples: Hidden, x: Tensor) -> Tensor:
    """(H_k - r I) x_k (K, D, s), for all classes in two products a batch."""
    (classes, features, starts), seen = x.shape, 0
    flat = x.transpose(0, 1).reshape(features, -1)
    total = torch.zeros_like(flat)
    for h, _, _ in examples:
        phi = head.variance_phi(h).double()
        weights = head.curvature_weights(head(h))
        along = (phi @ flat).unflatten(1, (classes, starts)) * weights.double()[..., None]
        total.addmm_(phi.T, along.flatten(1))
        seen += len(h)
    if seen != head.num_observed:
        raise ValueError(
            f"variance_error expects the {head.num_observed} examples of the posterior, got {seen}: give the data that "
            "fit_posterior saw, in a loader that can be read more than once."
        )
    return total.reshape(features, classes, starts).transpose(0, 1) / float(head.noise)
