"""`Prediction`: what every method returns and every score, metric, plot, export and server consumes."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from afield.prediction import positions
from afield.prediction.p_values import largest_rank
from afield.prediction.predictive import shrink

if TYPE_CHECKING:
    from afield.gp.likelihoods import Likelihood


@dataclass(frozen=True, eq=False)
class Prediction:
    """What a model says about N inputs; tensors have the batch first.

    Where it says something at each position of an input, a pixel or a token, the dimensions of positions come last, as
    in logits (N, K, H, W) and p_value (N, H, W): `prediction.positions`.

    logits    (N, K)     posterior mean (of the log rate for poisson, of the target for gaussian)
    variance  (N,)       posterior variance shared by all outputs, (N, K) one per class, or None
    probs     (N, C)     class probabilities, or None for gaussian and poisson; one bernoulli logit gives C = 2, several
                         are labels, and these the probabilities (N, K) that they apply (`prediction.labels`)
    members   (M, N, C)  probabilities of ensemble members or of samples, or None
    features  (N, d)     hidden vectors, or None
    p_value   (N,)       conformal p-value of "this is in-domain", or None until calibrated
    label_p_value (N, K) of each label, that it is as doubtful in-domain, or None
    joined    (N,)       the joined score, of a calibrated classifier, or None
    fitted    (N,)       the score on which p-values rest, where an answer by itself does not tell it: a fitted one, or
                         one that looks at neighbouring positions; or None
    noise                variance of the observation noise (gaussian): a number for all, (N, K) by output, or where
                         outputs err together (N, K, K); or None
    smallest_p_value     the smallest p-value that every row can have, 1 / (reference rows + 1), of the smallest
                         reference where there is one by class; None until calibrated
    num_reference        reference rows behind the p-values, (N,) where they go by class; None until calibrated, and for
                         ensembles, whose p-values have several references
    default_score        name of the score on which p-values rest; None until calibrated

    Of inputs with positions:

    mask           (N, *P)  the positions that belong to the input, the others being padding; None: all
    input_score    (N,)     how far an input as a whole lies from the training data; None until calibrated
    input_p_value  (N,)     its conformal p-value among held-out inputs; None until calibrated
    num_inputs              the number of these

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
    label_p_value: Tensor | None = None
    joined: Tensor | None = None
    fitted: Tensor | None = None
    noise: float | Tensor | None = None
    smallest_p_value: float | None = None
    num_reference: int | Tensor | None = None
    likelihood: str = "categorical"
    default_score: str | None = None
    mask: Tensor | None = None
    input_score: Tensor | None = None
    input_p_value: Tensor | None = None
    num_inputs: int | None = None

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
                *(p.likelihood, None if isinstance(p.noise, Tensor) else p.noise, p.smallest_p_value, p.default_score),
                p.num_inputs,
                p.num_reference if isinstance(p.num_reference, int) else None,
            )
            for p in predictions
        }
        if len(kinds) > 1:
            raise ValueError(
                f"Cannot join predictions of different likelihood, noise, smallest p-value, score or reference: "
                f"{sorted(map(str, kinds))}."
            )
        if len({p.positions for p in predictions}) > 1:
            raise ValueError(
                f"Cannot join predictions with different positions, got {sorted({p.positions for p in predictions})}: "
                "keep them apart, or join their positions, as Prediction.cat([p.rows() for p in predictions])."
            )
        joined = {n: torch.cat([p[n] for p in parts], dim=1 if n == "members" else 0) for n in parts[0]}
        return dataclasses.replace(predictions[0], **joined)  # type: ignore[arg-type]

    @property
    def positions(self) -> tuple[int, ...]:
        """The dimensions of positions, such as (H, W); () where there is one answer an input."""
        return tuple(self.logits.shape[2:])

    def rows(self) -> "Prediction":
        """The same with every position as an input of its own: what metrics read. Row (n, h, w) is n H W + h W + w."""
        return positions.to_rows(self)

    @property
    def labels(self) -> Tensor:
        """The most probable class (N,), or which of several labels apply (N, K).

        Classes are read off the logits where shrinkage cannot change them, but may round to ties.
        """
        probs = self._need("probs", "class labels")
        if self.has_labels:
            return (probs > 0.5).long()
        shared = self.variance is None or self.variance.dim() == self.logits.dim() - 1
        if self.members is None and shared and self.logits.shape == probs.shape:
            return self.logits.max(1).indices if self.positions else self.logits.argmax(1)  # of pixels, 7 times as fast
        return probs.argmax(1)

    @property
    def confidence(self) -> Tensor:
        """The largest class probability (N,); of several labels, of each that it applies or not (N, K)."""
        probs = self._need("probs", "a confidence")
        return torch.maximum(probs, 1 - probs) if self.has_labels else probs.amax(1)

    @property
    def has_labels(self) -> bool:
        """Whether the outputs are several labels, each of which applies or not."""
        return likelihood_of(self).has_labels(self.logits.shape[1])

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
        noise = 0.0 if self.noise is None else self.noise
        if isinstance(noise, Tensor) and noise.dim() > self.logits.dim():
            noise = noise.diagonal(dim1=-2, dim2=-1)
        return variance(self.logits, self._need("variance", "a standard deviation"), noise).sqrt()

    @property
    def covariance(self) -> Tensor:
        """Covariance of the target (N, K, K), epistemic and noise together, of a gaussian prediction."""
        if not isinstance(self.noise, Tensor) or self.noise.dim() != 3 or self.positions:
            return torch.diag_embed(self.std.square())
        ratio = self._need("variance", "a covariance") / self.noise.diagonal(dim1=-2, dim2=-1)
        return self.noise * (1 + ratio[:, :1, None])

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

    def accept_inputs(self, alpha: float = 0.01, *, delta: float | None = None) -> Tensor:
        """As `accept`, of inputs that have positions as a whole (N,): images, texts. They are refused at a rate of at
        most alpha, because inputs are exchangeable where the positions of one are not."""
        if not self.positions:
            return self.accept(alpha, delta=delta)
        p_value = self._need("input_p_value", "accept_inputs", "Call afield.calibrate(model, held_out_loader) first.")
        assert self.num_inputs is not None
        whole = Prediction(p_value[:, None], p_value=p_value, num_reference=self.num_inputs,
                           smallest_p_value=1 / (self.num_inputs + 1))  # fmt: skip
        return whole.accept(alpha, delta=delta)

    def _accept_with_confidence(self, p_value: Tensor, alpha: float, delta: float) -> Tensor:
        """Refuse ranks p (n + 1) of at most `largest_rank`, which is less than alpha (n + 1)."""
        n = self.num_reference
        if n is None:
            raise ValueError(
                "delta needs p-values of one reference, and these have several, or one that is not known (an "
                "ensemble's are twice the mean of its members'), or one of positions, which are not exchangeable. "
                "Leave delta out: at most alpha on average; of inputs with positions, use accept_inputs."
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

        The default is what p-values rest on, unless `afield.calibrate` was told another one: `joined` for classes,
        `region` for those of pixels, `entropy` for those of tokens, and the variance otherwise. Before calibration it
        is dempster_shafer for classes.
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
