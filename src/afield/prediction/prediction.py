"""`Prediction`: what every method returns and every score, metric, plot, export and server consumes."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from afield.prediction.p_values import largest_rank
from afield.prediction.predictive import shrink

if TYPE_CHECKING:
    from afield.gp.likelihoods import Likelihood


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a model says about N inputs; tensors have the batch first.

    logits    (N, K)     posterior mean (of the log rate for poisson, of the target for gaussian)
    variance  (N,)       posterior variance shared by all outputs, (N, K) one per class, or None
    probs     (N, C)     class probabilities, or None for gaussian and poisson; one bernoulli logit gives C = 2
    members   (M, N, C)  probabilities of ensemble members or of samples, or None
    features  (N, d)     hidden vectors, or None
    p_value   (N,)       conformal p-value of "this is in-domain", or None until calibrated
    joined    (N,)       the joined score, of a calibrated classifier, or None
    fitted    (N,)       the fitted score that `afield.calibrate` was told to rest p-values on, or None
    noise                variance of the observation noise (gaussian), or None
    smallest_p_value     the smallest p-value that every row can have, 1 / (reference rows + 1), of the smallest
                         reference where there is one by class; None until calibrated
    num_reference        reference rows behind the p-values, (N,) where they go by class; None until calibrated, and for
                         ensembles, whose p-values have several references
    default_score        name of the score on which p-values rest; None until calibrated

    >>> p = model.predict(x)
    >>> p.labels.shape, p.confidence.shape, p.score("energy").shape
    (torch.Size([300]), torch.Size([300]), torch.Size([300]))
    >>> len(p[:10])
    10
    """

    logits: Tensor
    variance: Tensor | None = None
    probs: Tensor | None = None
    members: Tensor | None = None
    features: Tensor | None = None
    p_value: Tensor | None = None
    joined: Tensor | None = None
    fitted: Tensor | None = None
    noise: float | None = None
    smallest_p_value: float | None = None
    num_reference: int | Tensor | None = None
    likelihood: str = "categorical"
    default_score: str | None = None

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
        def move(t: Tensor) -> Tensor:
            moved = t.to(*args, **kwargs)
            return moved if t.is_floating_point() else t.to(moved.device)  # counts stay whole

        return self._map(move)

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
        kinds = {
            (
                *(p.likelihood, p.noise, p.smallest_p_value, p.default_score),
                p.num_reference if isinstance(p.num_reference, int) else None,
            )
            for p in predictions
        }
        if len(kinds) > 1:
            raise ValueError(
                f"Cannot join predictions of different likelihood, noise, smallest p-value, score or reference: "
                f"{sorted(map(str, kinds))}."
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
        mean = likelihood_of(self).mean
        if mean is None:
            raise ValueError(f"A {self.likelihood} prediction has class probabilities (probs), not a mean.")
        return mean(self.logits, self.variance)

    @property
    def std(self) -> Tensor:
        """Standard deviation of the target (N, K): epistemic and observation noise together."""
        variance = likelihood_of(self).variance
        if variance is None:
            raise ValueError(f"A {self.likelihood} prediction has class probabilities (probs), not a std.")
        return variance(self.logits, self._need("variance", "a standard deviation"), self.noise or 0.0).sqrt()

    def interval(self, level: float = 0.95) -> tuple[Tensor, Tensor]:
        """The central interval of a gaussian prediction that holds the target with probability `level`."""
        if not likelihood_of(self).noisy:
            raise ValueError(f"interval expects a gaussian prediction, got a {self.likelihood} one.")
        if not 0 < level < 1:
            raise ValueError(f"level must lie strictly between 0 and 1, got {level}.")
        half = self.std * float(torch.special.ndtri(torch.tensor(0.5 + level / 2, dtype=torch.float64)))
        return self.mean - half, self.mean + half

    def accept(self, alpha: float = 0.01, *, delta: float | None = None) -> Tensor:
        """True (N,) where the input passes as in-domain; in-domain inputs fail at a rate of at most alpha.

        delta  None: on average over draws of the held-out data. A number: with probability 1 - delta over these draws,
               for every class by itself where p-values go by class

        raises  ValueError if the model is not calibrated, or its reference is too small for alpha

        >>> model.predict(torch.tensor([[5.0, 0.0, 0.0], [60.0, -40.0, 80.0]])).accept(alpha=0.05)
        tensor([ True, False])
        """
        for name, rate in (("alpha", alpha), ("delta", delta)):
            if rate is not None and not 0 < rate < 1:
                raise ValueError(f"{name} must lie strictly between 0 and 1, got {rate}.")
        p_value = self._need("p_value", "accept", "Call afield.calibrate(model, held_out_loader) first, and again "
                             "after any change of the posterior.")  # fmt: skip
        if delta is not None:
            return self._accept_with_confidence(p_value, alpha, delta)
        if self.smallest_p_value is not None and alpha < self.smallest_p_value:
            raise ValueError(
                f"alpha = {alpha:g} is finer than the held-out data can tell: the smallest p-value is "
                f"{self.smallest_p_value:g}, so nothing would ever be rejected. Calibrate on at least "
                f"{math.ceil(1 / alpha) - 1} reference examples{self._of_each_class}, or use a larger alpha."
            )
        return p_value > alpha

    def _accept_with_confidence(self, p_value: Tensor, alpha: float, delta: float) -> Tensor:
        """Refuse ranks p (n + 1) of at most `largest_rank`, which is less than alpha (n + 1)."""
        n = self.num_reference
        if n is None:
            raise ValueError(
                "delta needs p-values of one reference, and these have several, or one that is not known (an "
                "ensemble's are twice the mean of its members'). Leave delta out: at most alpha on average."
            )
        sizes = {n} if isinstance(n, int) else set(n.unique().tolist())
        if self.smallest_p_value is not None:
            sizes.add(round(1 / self.smallest_p_value) - 1)  # whether there are enough does not depend on the batch
        ranks = {size: largest_rank(size, alpha, delta) for size in sorted(sizes)}
        if not all(ranks.values()):
            raise ValueError(
                f"alpha = {alpha:g} cannot be promised with confidence {1 - delta:g} from {min(sizes)} reference "
                f"examples{self._of_each_class}. Calibrate on at least "
                f"{math.ceil(math.log(delta) / math.log1p(-alpha))}, or use a larger alpha or delta."
            )
        if isinstance(n, int):
            return (p_value.double() * (n + 1)).round() > ranks[n]
        most = torch.zeros_like(n)
        for size, k in ranks.items():
            most = torch.where(n == size, k, most)
        return (p_value.double() * (n + 1)).round() > most

    @property
    def _of_each_class(self) -> str:
        return " of each class or group of small classes" if isinstance(self.num_reference, Tensor) else ""

    def score(self, name: str | None = None) -> Tensor:
        """How far (N,) from the training data: higher is further. Names: `afield.scores.SCORES`.

        The default is what p-values rest on: `joined` for classes, unless `afield.calibrate` was told another one, and
        the variance otherwise. Before calibration it is dempster_shafer for classes.
        """
        from afield.prediction.scores import SCORES  # scores read a Prediction, so they cannot be imported before it

        name = name or self.default_score or likelihood_of(self).score
        if self.fitted is not None and name == self.default_score:
            return self.fitted
        return SCORES[name](self)

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


def likelihood_of(prediction: Prediction) -> "Likelihood":
    """The value behind the name that a prediction carries: likelihoods are made of predictives, one room further."""
    from afield.gp.likelihoods import LIKELIHOODS

    return LIKELIHOODS[prediction.likelihood]
