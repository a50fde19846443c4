"""From a Gaussian posterior over the logits to what a user reads: probabilities, rates, intervals.

For a posterior mean m and variance v of the logits, p(y | x) = E[softmax(g)], g ~ N(m, v):

    mean field    softmax(m / sqrt(1 + pi/8 v))       one pass, the default; eq. (mean_field_approx), lambda = pi/8
    Monte Carlo   mean over S draws of softmax(g)     converges at rate S^-1/2
    quadrature    the integral itself, to about 1e-12, for a single logit

A `Prediction` is what every method returns and every score, metric, plot, export and server consumes.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from afield.registry import Registry

MEAN_FIELD_FACTOR = math.pi / 8


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a model says about N inputs; tensors have the batch first.

    logits    (N, K)     posterior mean (of the log rate for poisson, of the target for gaussian)
    variance  (N,)       posterior variance shared by all outputs, (N, K) one per class, or None
    probs     (N, C)     class probabilities, or None for gaussian and poisson; one bernoulli logit gives C = 2
    members   (M, N, C)  probabilities of ensemble members or of samples, or None
    features  (N, d)     hidden vectors, or None
    p_value   (N,)       conformal p-value of "this is in-domain", or None until calibrated
    noise                variance of the observation noise (gaussian), or None
    finest               the smallest p-value there can be, 1 / (held-out examples + 1); None until calibrated
    """

    logits: Tensor
    variance: Tensor | None = None
    probs: Tensor | None = None
    members: Tensor | None = None
    features: Tensor | None = None
    p_value: Tensor | None = None
    noise: float | None = None
    finest: float | None = None
    likelihood: str = "categorical"

    def __len__(self) -> int:
        return self.logits.shape[0]

    def __getitem__(self, index: Any) -> "Prediction":
        """Select examples: an integer keeps the batch dimension."""
        if isinstance(index, int | np.integer) or (isinstance(index, Tensor) and index.dim() == 0):
            index = int(index)
            if not -len(self) <= index < len(self):
                raise IndexError(f"index {index} out of range for {len(self)} examples")
            index = slice(index, index + 1 or None)
        return self._map(lambda t: t[index], lambda t: t[:, index])

    def to(self, *args: Any, **kwargs: Any) -> "Prediction":
        return self._map(lambda t: t.to(*args, **kwargs))

    def numpy(self) -> dict[str, np.ndarray]:
        """The tensors that are there, by name, as arrays."""
        return {
            name: (t.float() if t.dtype == torch.bfloat16 else t).detach().cpu().numpy()
            for name, t in self._tensors().items()
        }

    @staticmethod
    def cat(predictions: Sequence["Prediction"]) -> "Prediction":
        """Join batches in order."""
        if not predictions:
            raise ValueError("Prediction.cat expects at least one prediction, got none.")
        parts = [p._tensors() for p in predictions]
        if any(p.keys() != parts[0].keys() for p in parts):
            raise ValueError(f"Cannot join predictions with different fields: {[sorted(p) for p in parts]}.")
        kinds = {(p.likelihood, p.noise, p.finest) for p in predictions}
        if len(kinds) > 1:
            raise ValueError(
                f"Cannot join predictions of different (likelihood, noise, finest): {sorted(map(str, kinds))}."
            )
        joined = {n: torch.cat([p[n] for p in parts], dim=1 if n == "members" else 0) for n in parts[0]}
        return dataclasses.replace(predictions[0], **joined)  # type: ignore[arg-type]

    @property
    def labels(self) -> Tensor:
        """The most probable class (N,); read off the logits where shrinkage cannot change it, but may round to ties."""
        probs = self._need("probs", "class labels")
        shared = self.variance is None or self.variance.dim() == 1
        if self.members is None and shared and self.logits.shape == probs.shape:
            return self.logits.argmax(-1)
        return probs.argmax(-1)

    @property
    def confidence(self) -> Tensor:
        """The largest class probability (N,)."""
        return self._need("probs", "a confidence").amax(-1)

    @property
    def mean(self) -> Tensor:
        """The expected target (N, K): the mean for gaussian, exp(m + v / 2) for poisson."""
        if self.likelihood == "gaussian":
            return self.logits
        if self.likelihood == "poisson":
            return poisson_rate(self.logits, self._need("variance", "a mean rate"))
        raise ValueError(f"A {self.likelihood} prediction has class probabilities (probs), not a mean.")

    @property
    def std(self) -> Tensor:
        """Standard deviation of the target (N, K): epistemic and observation noise together."""
        variance = _per_output(self._need("variance", "a standard deviation"), self.logits)
        if self.likelihood == "gaussian":
            return (variance + (self.noise or 0.0)).sqrt()
        if self.likelihood == "poisson":  # the variance of a Poisson with a log-normal rate
            return (self.mean + self.mean**2 * torch.expm1(variance)).sqrt()
        raise ValueError(f"A {self.likelihood} prediction has class probabilities (probs), not a std.")

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval of a gaussian prediction that holds the target with probability `level`."""
        if self.likelihood != "gaussian":
            raise ValueError(f"interval expects a gaussian prediction, got a {self.likelihood} one.")
        if not 0 < level < 1:
            raise ValueError(f"level must lie strictly between 0 and 1, got {level}.")
        half = self.std * float(torch.special.ndtri(torch.tensor(0.5 + level / 2, dtype=torch.float64)))
        return self.mean - half, self.mean + half

    def accept(self, alpha: float = 0.01) -> Tensor:
        """True (N,) where the input passes as in-domain; in-domain inputs fail at a rate of at most alpha."""
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must lie strictly between 0 and 1, got {alpha}.")
        p_value = self._need("p_value", "accept", "Call afield.calibrate(model, held_out_loader) first, and again "
                             "after any change of the posterior.")  # fmt: skip
        if self.finest is not None and alpha < self.finest:
            raise ValueError(
                f"alpha = {alpha:g} is finer than the held-out data can tell: the smallest p-value is "
                f"{self.finest:g}, so nothing would ever be rejected. Calibrate on at least "
                f"{math.ceil(1 / alpha) - 1} reference examples, or use a larger alpha."
            )
        return p_value > alpha

    def score(self, name: str | None = None) -> Tensor:
        """How far (N,) from the training data: higher is further. Names: `afield.scores.SCORES`.

        The default, on which p-values rest, is dempster_shafer for classes and variance otherwise.
        """
        from afield.scores import SCORES  # scores read a Prediction, so they cannot be imported before it

        return SCORES[name or ("variance" if self.probs is None else "dempster_shafer")](self)

    def adjusted_logits(self) -> Tensor:
        """The logits after mean-field shrinkage, m / sqrt(1 + pi/8 v): what the default probabilities are made of."""
        return self.logits if self.variance is None else shrink(self.logits, self.variance)

    def _tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def _map(self, fn: Callable[[Tensor], Tensor], members: Callable[[Tensor], Tensor] | None = None) -> "Prediction":
        new = {n: (members or fn)(t) if n == "members" else fn(t) for n, t in self._tensors().items()}
        return dataclasses.replace(self, **new)  # type: ignore[arg-type]

    def _need(self, field: str, what: str, advice: str = "") -> Tensor:
        value = getattr(self, field)
        if value is None:
            raise ValueError(f"{what} needs {field}, which this {self.likelihood} prediction lacks. {advice}".rstrip())
        return value


def _per_output(variance: Tensor, logits: Tensor) -> Tensor:
    return variance[:, None].expand_as(logits) if variance.dim() == 1 else variance


def shrink(logits: Tensor, variance: Tensor) -> Tensor:
    """m / sqrt(1 + pi/8 v): the logits (N, K) whose softmax or sigmoid is the mean-field probability."""
    return logits / torch.sqrt(1 + MEAN_FIELD_FACTOR * _per_output(variance, logits))


def to_probs(logits: Tensor) -> Tensor:
    """Softmax over K > 1 logits; one logit gives (1 - sigmoid, sigmoid)."""
    if logits.shape[-1] > 1:
        return F.softmax(logits, dim=-1)
    return torch.cat([torch.sigmoid(-logits), torch.sigmoid(logits)], dim=-1)


def mean_field(logits: Tensor, variance: Tensor) -> Tensor:
    """Mean-field probabilities (N, C). A variance shared by the classes keeps the order of the classes."""
    return to_probs(shrink(logits, variance))


def monte_carlo(
    logits: Tensor, variance: Tensor, num_samples: int = 100, generator: torch.Generator | None = None
) -> Tensor:
    """Probabilities (S, N, C) of S draws of the logits; the average over the first dimension is the prediction."""
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}.")
    noise = torch.randn(num_samples, *logits.shape, generator=generator, dtype=logits.dtype, device=logits.device)
    return to_probs(logits + _per_output(variance, logits).sqrt() * noise)


def quadrature(logits: Tensor, variance: Tensor) -> Tensor:
    """E[sigmoid(g)] of one logit (N, 1), to about 1e-12 for every mean and variance, as probabilities (N, 2).

    Gauss-Hermite nodes resolve the sigmoid while the Gaussian is narrower than it. Beyond, with T logistic,
    E[sigmoid(g)] = P(T <= g) = E[Phi((m - T) / s)], whose integrand is smooth: there the trapezoidal rule is exact.
    """
    if logits.shape[-1] != 1:
        raise ValueError(f"quadrature expects a single logit, shape (N, 1), got {tuple(logits.shape)}. Use mean_field.")
    # Both signs are integrated: 1 - p would have no digits left where p is nearly 1.
    m = torch.cat([-logits, logits], dim=-1).double()[..., None]
    s = _per_output(variance, logits).double().sqrt()[..., None]
    nodes, weights = (torch.from_numpy(a).to(m) for a in np.polynomial.hermite_e.hermegauss(80))
    narrow = (torch.sigmoid(m + s * nodes) * weights).sum(-1, keepdim=True) / weights.sum()
    t = torch.arange(-40, 40, 0.25, dtype=m.dtype, device=m.device)
    density = torch.sigmoid(t) * torch.sigmoid(-t) * 0.25
    wide = (torch.special.ndtr((m - t) / s.clamp_min(0.5)) * density).sum(-1, keepdim=True)
    return torch.where(s < 1, narrow, wide)[..., 0].to(logits.dtype)


def poisson_rate(logits: Tensor, variance: Tensor) -> Tensor:
    """The mean rate (N, K) of a log-normal posterior, exp(m + v / 2)."""
    return torch.exp(logits + _per_output(variance, logits) / 2)


def conformal_p_value(scores: Tensor, reference: Tensor) -> tuple[Tensor, float]:
    """(1 + #{reference >= score}) / (n + 1) for sorted reference scores (n,), and its smallest value, 1 / (n + 1).

    If the scores of a new example and of the reference are exchangeable, P(p <= a) <= a for every a.
    """
    n = reference.numel()
    below = torch.searchsorted(reference, scores.detach().to(reference).contiguous())
    return (1 + n - below).to(scores.dtype) / (n + 1), 1 / (n + 1)


def minimax(probs: Tensor, in_domain: Tensor) -> Tensor:
    """p(y | x, in-domain) P(in-domain) + (1 / K) P(not in-domain): eq. (minimax_solution).

    Trust the model where the input is in-domain, with probability in_domain (N,), and know nothing elsewhere. The
    paper shows it optimal against the worst case outside the domain, for every Bregman score, the model's in-domain
    answer being given.
    """
    if in_domain.shape != probs.shape[:1]:
        raise ValueError(f"in_domain must have shape ({probs.shape[0]},), got {tuple(in_domain.shape)}.")
    if bool(((in_domain < 0) | (in_domain > 1)).any()):
        raise ValueError("in_domain must hold probabilities between 0 and 1.")
    weight = in_domain[:, None]
    return weight * probs + (1 - weight) / probs.shape[-1]


Predictive = Callable[[Tensor, Tensor, int, torch.Generator | None], tuple[Tensor, Tensor | None]]
"""(logits, variance, num_samples, generator) -> (probs, members)."""


def _by_monte_carlo(m: Tensor, v: Tensor, samples: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    members = monte_carlo(m, v, samples, generator)
    return members.mean(0), members


PREDICTIVES: Registry[Predictive] = Registry(
    "predictive",
    mean_field=lambda m, v, samples, generator: (mean_field(m, v), None),
    monte_carlo=_by_monte_carlo,
    quadrature=lambda m, v, samples, generator: (quadrature(m, v), None),
)
