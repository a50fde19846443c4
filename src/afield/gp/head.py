"""The Gaussian-process output layer: random features, output weights and their Laplace posterior.

    f(h) = phi(h)^T B (+ constant),        v(h) = a^2 psi(h)^T H^-1 psi(h)

In the paper the variance has the features of the mean, psi = phi. With `variance_features="own"`, which is the default
of `afield.sngp` for classes, the mean keeps the features that it was trained with, and the variance has others, whose
length scale and moments come from all hidden vectors as they are after training (`gp.variance_features`).

`forward` returns f and never touches the posterior: accumulation inside `forward` is silently wrong under
distributed training, gradient checkpointing and repeated passes. `observe` adds examples, `posterior` reads.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afield.gp.capture import handed_over
from afield.gp.class_distance import ClassDistance
from afield.gp.features import RandomFeatures
from afield.gp.full_precision import full_precision
from afield.gp.joined_score import JoinedScore
from afield.gp.likelihoods import LIKELIHOODS
from afield.gp.low_rank import LowRank, check_rank
from afield.gp.observing import accumulate
from afield.gp.precision import COVARIANCES, Precision, choose_curvature, curvature_weights
from afield.gp.snapshot import Lock, adopt, frozen_copy
from afield.gp.variance_features import has_own_features, own_features
from afield.prediction.p_values import sort_reference, with_p_values
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import PREDICTIVES
from afield.prediction.scores import SCORES, symmetric

SCALARS = ("ridge", "amplitude", "logit_scale", "noise")
_PARTS = ("random_features", "variance_features", "precision", "class_distance", "joined_score")  # of the state


class GaussianProcessHead(nn.Module):
    """h (N, in_features) -> logits (N, out_features), with a posterior variance.

    ridge                r, the prior precision of each output weight
    amplitude            a, the prior standard deviation of f in units of the kernel; `afield.calibrate` sets it
    likelihood           categorical, bernoulli (one logit), gaussian, poisson (log rates)
    covariance           "shared" by all outputs, or "per_class" (memory and time times K)
    rank                 None: exact. A number m, for many classes: the m heaviest examples of each class exactly, the
                         rest through one matrix that all classes share (`low_rank`)
    curvature            "likelihood" (the paper's), "unit" (the authors' code), or "auto": unit for
                         classification with a shared covariance
    momentum             None sums over all examples exactly; a number makes a moving average over batches
    constant             add a trained constant to f, outside the prior (far from the data, f tends to it)
    mean                 a trained output layer to keep as f; there are then no output weights to train
    variance_features    "same" as the mean's, "own", or "auto": own for classification. A mapping has options of
                         `RandomFeatures` for own ones
    features             options of `RandomFeatures`: num_random_features, length_scale, kernel, orthogonal, geometry,
                         projection, generator. With `mean` they are those of the variance

    Output weights start at the prior mean, zero, so that f tends to zero far from the data also after training.
    """

    ridge: Tensor
    amplitude: Tensor
    logit_scale: Tensor
    noise: Tensor
    training_error: Tensor
    reference: Tensor
    reference_spans: Tensor
    reference_count: Tensor
    score_name: Tensor
    score: str

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        ridge: float = 1.0,
        amplitude: float = 1.0,
        likelihood: str = "categorical",
        covariance: str = "shared",
        rank: int | None = None,
        curvature: str = "auto",
        momentum: float | None = None,
        constant: bool = False,
        mean: nn.Module | None = None,
        variance_features: str | Mapping[str, Any] = "same",
        **features: Any,
    ) -> None:
        super().__init__()
        if covariance not in COVARIANCES:
            raise ValueError(f"covariance must be one of {', '.join(COVARIANCES)}, got {covariance!r}.")
        allowed = LIKELIHOODS[likelihood].outputs
        if not allowed.fewest <= out_features <= allowed.most:
            raise ValueError(f"A {likelihood} head expects {allowed.words}, got out_features={out_features}.")
        for name, value in (("ridge", ridge), ("amplitude", amplitude)):
            _check_range(name, value)
        self.in_features, self.out_features = in_features, out_features
        self.likelihood, self.covariance = likelihood, covariance
        self.curvature = choose_curvature(curvature, likelihood, covariance)
        if mean is not None:
            features = {"grow": True, **features}
        self.random_features = RandomFeatures(in_features, **features)
        own = mean is None and has_own_features(variance_features, likelihood)
        self.variance_features: RandomFeatures | None
        self.register_module(
            "variance_features", own_features(self.random_features, variance_features, features) if own else None
        )
        num_random_features = self.features_of_variance.num_random_features
        num_matrices = out_features if covariance == "per_class" else 1
        num_classes = LIKELIHOODS[likelihood].num_classes(out_features)
        self.class_distance: ClassDistance | None
        self.joined_score: JoinedScore | None
        self.register_module("class_distance", ClassDistance(in_features, num_classes) if num_classes else None)
        self.register_module("joined_score", JoinedScore() if num_classes else None)
        self.precision: Precision | LowRank
        if rank is None:
            self.precision = Precision(num_random_features, num_matrices, momentum=momentum)
        else:
            check_rank(rank, out_features, likelihood, covariance, self.curvature, momentum)
            self.precision = LowRank(num_random_features, num_matrices, rank)
        self.mean = mean
        if mean is None:
            self.weight = nn.Parameter(torch.zeros(out_features, self.random_features.num_random_features))
        # What `afield.class_changes` has added after the first outputs, and which of all outputs it has dropped.
        self.first_outputs = out_features
        self.added: nn.ParameterList | tuple[Tensor, ...] = ()
        self.dropped: tuple[int, ...] = ()
        if constant and mean is not None:
            raise ValueError("constant=True adds to the output weights, which a kept output layer (mean=...) replaces.")
        if constant:
            self.constant = nn.Parameter(torch.zeros(out_features))
        else:
            self.register_parameter("constant", None)
        for name, value in zip(SCALARS, (ridge, amplitude, 1.0, 1.0), strict=True):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float64))
        # The mean squared error on the training data, 0 where it is not known; for calibration.
        self.register_buffer("training_error", torch.zeros((), dtype=torch.float64))
        # Sorted held-out scores, where those of each class lie, if they go by class, and the number of examples
        # observed when they were taken.
        self.register_buffer("reference", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("reference_spans", torch.zeros(0, 2, dtype=torch.int64))
        self.register_buffer("reference_count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("score_name", torch.zeros(0, dtype=torch.uint8))
        self.set_score(LIKELIHOODS[likelihood].score)
        self._writing, self._publishing = Lock(rank=0), Lock(rank=1)

    def unadapted(self) -> list[RandomFeatures]:
        """The random features that do not know their length scale and moments yet."""
        return [f for f in (self.random_features, self.variance_features) if f is not None and not f.adapted]

    @property
    def features_of_variance(self) -> RandomFeatures:
        """psi: those of its own, or the mean's."""
        return self.random_features if self.variance_features is None else self.variance_features

    @property
    def num_observed(self) -> int:
        """Examples in the posterior."""
        return int(self.precision.count)

    def features(self, h: Tensor) -> Tensor:
        """phi (N, D), of the mean."""
        return self.random_features(self.checked(h))

    def variance_phi(self, h: Tensor, phi: Tensor | None = None) -> Tensor:
        """psi (N, D), of the variance; `phi` is the mean's where it is known."""
        if self.variance_features is None:
            return self.features(h) if phi is None else phi
        return self.variance_features(self.checked(h))

    def forward(self, h: Tensor) -> Tensor:
        """The logits f (N, K). No side effect on the posterior, ever."""
        zeros = handed_over(self, h, self.out_features)
        return self.mean_of(h, None) if zeros is None else zeros

    def observe(
        self,
        h: Tensor,
        logits: Tensor | None = None,
        *,
        classes: Tensor | None = None,
        weights: Tensor | None = None,
        fast: bool = False,
    ) -> None:
        """Add examples to the posterior; `logits` are computed from h unless given.

        classes  (N,): of the examples, for a classifier; None: the most probable ones
        weights  (N,): an example of weight w counts as w examples; None: one each
        """
        with self._writing, self._publishing:
            accumulate(self, h, logits, classes, weights, fast=fast)

    def unobserve(
        self,
        h: Tensor,
        logits: Tensor | None = None,
        *,
        classes: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Remove examples that were observed, exactly: same hidden vectors, logits, classes and weights."""
        with self._writing, self._publishing:
            accumulate(self, h, logits, classes, weights, remove=True)

    def hold(self) -> Lock:
        """A context in which the state does not change."""
        return self._publishing

    def snapshot(self) -> "GaussianProcessHead":
        """The head as it is now, factorised: a prediction that reads it belongs to one state, whatever goes on."""
        with self._publishing:
            if self.precision.fitted:
                self.factor()
            return frozen_copy(self, *_PARTS)

    @contextlib.contextmanager
    def revision(self, *, afresh: bool = False, observes: bool = True) -> Iterator["GaussianProcessHead"]:
        """A copy to change, which takes the place of the head, in one step, unless something goes wrong.

        One revision at a time; predictions go on meanwhile, with the old state.

        afresh    start without any examples
        observes  whether examples are added or removed; else the sums need no copy
        """
        with self._writing:
            with self._publishing:
                draft = frozen_copy(self, *_PARTS)
            if afresh:
                draft.reset_posterior()
            elif observes:
                draft.precision.unshare()
                if draft.class_distance is not None:
                    draft.class_distance.unshare()
            yield draft
            if draft.precision.fitted:
                draft.factor()
            with self._publishing:
                adopt(self, draft, *_PARTS)
                self.random_features.adapted = draft.random_features.adapted
                self.features_of_variance.adapted = draft.features_of_variance.adapted
                self.score = draft.score

    def reset_posterior(self) -> None:
        """Forget all observed examples. Amplitude and logit scale stay; p-values are off until calibrated again."""
        self.precision.reset()
        if self.class_distance is not None:
            self.class_distance.reset()
        self.training_error = torch.zeros_like(self.training_error)
        self.forget_score()

    def forget_reference(self) -> None:
        """Switch p-values off until calibrated again."""
        self.reference, self.reference_spans = self.reference[:0].clone(), self.reference_spans[:0].clone()

    def forget_score(self) -> None:
        """Switch p-values and the joined score off until calibrated again: their sources have changed."""
        self.forget_reference()
        if self.joined_score is not None:
            self.joined_score.forget()

    def factor(self) -> None:
        """Factorise the posterior precision, unless that is done."""
        if not self.precision.factored:
            self.precision.factor(float(self.ridge), float(self.noise))
        if self.class_distance is not None and self.class_distance.fitted and not self.class_distance.factored:
            self.class_distance.factor()

    def posterior(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Mean f (N, K) and variance a^2 psi^T H^-1 psi, (N,) shared or (N, K) per class."""
        self.factor()
        phi = self.features(h) if self.mean is None else None
        psi = self.variance_phi(h, phi)
        return self.mean_of(h, phi, psi), self.amplitude.square() * self.precision.variance(psi)

    def sources(self, mean: Tensor, variance: Tensor, h: Tensor) -> Tensor:
        """What the joined score is made of (N, 3), of a posterior mean and variance; none depends on calibration."""
        assert self.class_distance is not None
        spread = (variance if variance.dim() == 1 else variance.mean(-1)) / self.amplitude.square()
        energy = -torch.logsumexp(symmetric(mean), dim=-1)
        return torch.stack([spread, energy, self.class_distance(h).to(spread)], dim=-1)

    def join(self, mean: Tensor, variance: Tensor, h: Tensor) -> Tensor | None:
        """The joined score (N,) of a posterior mean and variance; None unless calibration has fitted it."""
        if self.joined_score is None or not self.joined_score.fitted:
            return None
        return self.joined_score(self.sources(mean, variance, h))

    def predict(
        self,
        h: Tensor,
        *,
        predictive: str = "mean_field",
        num_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """The `Prediction` for hidden vectors h; its logits are s f, s the calibrated logit scale."""
        PREDICTIVES.check(predictive)
        head = self if torch.compiler.is_compiling() else self.snapshot()
        mean, variance = head.posterior(h)
        return head.prediction(mean, variance, head.join(mean, variance, h), h, predictive, num_samples, generator)

    def prediction(
        self,
        mean: Tensor,
        variance: Tensor,
        joined: Tensor | None = None,
        h: Tensor | None = None,
        predictive: str = "mean_field",
        num_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """The `Prediction` that a posterior mean and variance make, and the joined score where there is one."""
        likelihood = LIKELIHOODS[self.likelihood]
        if likelihood.of_classes:
            logits = self.logit_scale * mean
            probs, members = PREDICTIVES[predictive](logits, variance, num_samples, generator)
            prediction = Prediction(logits, variance, probs, members, h, joined=joined, likelihood=self.likelihood)
        else:
            noise = float(self.noise) if likelihood.noisy else None
            prediction = Prediction(mean, variance, features=h, noise=noise, likelihood=self.likelihood)
        if not self.calibrated:
            return prediction
        prediction = dataclasses.replace(prediction, default_score=self.score)
        return with_p_values(prediction, self.reference, self.reference_spans)

    @property
    def calibrated(self) -> bool:
        """Whether p-values stand: reference scores were taken from the posterior as it is now."""
        return self.reference.numel() > 0 and int(self.reference_count) == self.num_observed

    def set_reference(self, scores: Tensor, classes: Tensor | None = None) -> None:
        """Keep the scores of held-out in-domain examples (N,), to which p-values compare new ones.

        classes  (N,): the predicted classes, by which p-values are to be taken; None: all are compared with all
        """
        num_classes = LIKELIHOODS[self.likelihood].num_classes(self.out_features)
        self.keep_reference(*sort_reference(scores.detach().double().to(self.reference.device), classes, num_classes))

    def keep_reference(self, reference: Tensor, spans: Tensor) -> None:
        """Take over the reference of another state of the head, as it is."""
        with self._publishing:
            self.reference, self.reference_spans = reference, spans
            self.reference_count = self.precision.count.clone()

    def set_score(self, name: str) -> None:
        """Choose the score on which p-values rest; a buffer carries its name into every copy and file."""
        self.score = SCORES.check(name)
        self.score_name = torch.tensor(list(name.encode()), dtype=torch.uint8, device=self.score_name.device)

    def set_scalars(self, **values: float) -> None:
        """Set ridge, amplitude, logit_scale or noise; the posterior is factorised again when next read."""
        for name, value in values.items():
            if name not in SCALARS or not 0 < value < math.inf:
                raise ValueError(f"set_scalars takes positive {', '.join(SCALARS)}, got {name}={value}.")
            if name in ("ridge", "amplitude"):
                _check_range(name, value)
        with self._publishing:
            for name, value in values.items():
                setattr(self, name, torch.full_like(getattr(self, name), value))
            self.forget_reference()
            if values.keys() & {"ridge", "noise"}:
                self.precision.stale()
                self.forget_score()

    def mean_of(self, h: Tensor, phi: Tensor | None, psi: Tensor | None = None) -> Tensor:
        """f (N, K); phi and psi are the features of h where they are known."""
        if self.mean is not None:
            logits = self.mean(self.checked(h))
        else:
            phi = self.features(h) if phi is None else phi
            with full_precision(h.device):
                logits = F.linear(phi, self.weight, self.constant)
        if self.added:
            logits = self._with_added(logits, self.variance_phi(h, phi) if psi is None else psi)
        return logits[:, [k for k in range(logits.shape[-1]) if k not in self.dropped]] if self.dropped else logits

    def _with_added(self, logits: Tensor, psi: Tensor) -> Tensor:
        """Added outputs count from the mean of the first ones: a softmax leaves their common level free.

        Each is a product of its own, because a wider matrix may round the old logits differently.
        """
        level = logits.mean(-1, keepdim=True)
        with full_precision(psi.device):
            return torch.cat([logits, *(level + F.linear(psi, weight[None]) for weight in self.added)], dim=-1)

    def curvature_weights(self, logits: Tensor) -> Tensor:
        """The weights of examples with these logits in the precision, (N, 1) shared or (N, K) per class."""
        return curvature_weights(
            logits, likelihood=self.likelihood, covariance=self.covariance, curvature=self.curvature
        )

    def checked(self, h: Tensor) -> Tensor:
        """h itself, if it has the right shape."""
        if h.dim() != 2 or h.shape[1] != self.in_features:
            raise ValueError(
                f"GaussianProcessHead expects hidden features of shape (batch, {self.in_features}), "
                f"got {tuple(h.shape)}. Does the backbone pool and flatten its output? Has the input a batch dimension?"
            )
        return h

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GaussianProcessHead":
        names = (*SCALARS, "training_error", "reference")
        exact = {name: getattr(self, name) for name in names}
        super()._apply(fn, recurse)
        for name, value in exact.items():
            setattr(self, name, value.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, dims in (("reference", 1), ("reference_spans", 2), ("score_name", 1)):
            saved = state_dict.get(prefix + name)
            if saved is not None and saved.dim() == dims:
                setattr(self, name, getattr(self, name).new_zeros(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if prefix + "score_name" in state_dict:
            self.set_score(bytes(self.score_name.tolist()).decode())

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, likelihood={self.likelihood!r}, "
            f"covariance={self.covariance!r}, curvature={self.curvature!r}, ridge={float(self.ridge):g}"
        )


def _check_range(name: str, value: float) -> None:
    """Beyond a million million the digits of a variance are gone, though no number is infinite yet."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}.")
    if not 1e-12 <= value <= 1e12:
        raise ValueError(f"{name} must lie between 1e-12 and 1e12, got {value:g}.")
