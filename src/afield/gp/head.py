"""The Gaussian-process output layer: random features, output weights and their Laplace posterior.

    f(h) = phi(h)^T B (+ constant),        v(h) = a^2 psi(h)^T H^-1 psi(h)

In the paper the variance has the features of the mean, psi = phi. With `variance_features="own"`, which is the default
of `afield.sngp` for classes, the mean keeps the features that it was trained with, and the variance has others, whose
length scale and moments come from all hidden vectors as they are after training (`gp.variance_features`).

`forward` returns f and never touches the posterior: accumulation inside `forward` is silently wrong under
distributed training, gradient checkpointing and repeated passes. `observe` adds examples, `posterior` reads.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afield.bounds.weight_cache import plain_evaluation
from afield.gp.capture import handed_over
from afield.gp.chosen_score import ChosenScore
from afield.gp.class_distance import ClassDistance
from afield.gp.features import RandomFeatures
from afield.gp.head_state import HeadState
from afield.gp.joined_score import JoinedScore
from afield.gp.likelihoods import LIKELIHOODS
from afield.gp.low_rank import LowRank, check_rank
from afield.gp.noise import FEATURES, noise_shape
from afield.gp.numerics import full_precision
from afield.gp.observing import accumulate
from afield.gp.one_row import OneRow
from afield.gp.precision import COVARIANCES, Precision, choose_curvature, curvature_weights
from afield.gp.variance_features import has_own_features, own_features
from afield.prediction.labels import label_p_values
from afield.prediction.p_values import with_p_values
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import PREDICTIVES, of_labels, per_output
from afield.prediction.scores import symmetric


class GaussianProcessHead(HeadState):
    """h (N, in_features) -> logits (N, out_features), with a posterior variance.

    ridge                r, the prior precision of each output weight
    amplitude            a, the prior standard deviation of f in units of the kernel; `afield.calibrate` sets it
    likelihood           categorical, bernoulli (one logit, or one for each of several labels), gaussian, poisson (log
                         rates)
    covariance           "shared" by all outputs, or "per_class" (memory and time times K)
    rank                 None: exact. A number m, for many classes: the m heaviest examples of each class exactly, the
                         rest through one matrix that all classes share (`low_rank`)
    curvature            "likelihood" (the paper's), "unit" (the authors' code), or "auto": unit for
                         classification with a shared covariance
    momentum             None sums over all examples exactly; a number makes a moving average over batches
    constant             add a trained constant to f, outside the prior (far from the data, f tends to it)
    mean                 a trained output layer to keep as f; there are then no output weights to train
    variance_features    "same" as the mean's, "own", or "auto": own for classification. A mapping has options of
                         `RandomFeatures` for own ones, of which there are 512 to 2048, by the width of h, unless
                         `num_random_features` is given
    noise                of a gaussian likelihood: "output", one variance an output; "full", a covariance of the
                         outputs; "input", one that also varies with the input (`gp.noise`)
    predictive           how the posterior makes probabilities: a name of `afield.predictive.PREDICTIVES`
    features             options of `RandomFeatures`: num_random_features, length_scale, kernel, orthogonal, geometry,
                         projection, generator. With `mean` they are those of the variance

    Output weights start at the prior mean, zero, so that f tends to zero far from the data also after training.

    raises  ValueError for an unknown option, or a number of outputs that the likelihood does not have

    >>> head = afield.GaussianProcessHead(16, 3)
    >>> hidden = torch.randn(100, 16)
    >>> head.observe(hidden)
    >>> p = head.predict(hidden[:5])
    >>> p.probs.shape, p.variance.shape
    (torch.Size([5, 3]), torch.Size([5]))
    """

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
        noise: str = "output",
        predictive: str = "mean_field",
        **features: Any,
    ) -> None:
        super().__init__()
        if covariance not in COVARIANCES:
            raise ValueError(f"covariance must be one of {', '.join(COVARIANCES)}, got {covariance!r}.")
        allowed = LIKELIHOODS[likelihood].outputs
        if not allowed.fewest <= out_features <= allowed.most:
            raise ValueError(f"A {likelihood} head expects {allowed.words}, got out_features={out_features}.")
        self.in_features, self.out_features = in_features, out_features
        self.likelihood, self.covariance, self.predictive = likelihood, covariance, PREDICTIVES.check(predictive)
        self.curvature = choose_curvature(curvature, likelihood, covariance)
        if mean is not None:
            features = {"grow": True, **features}
        self.random_features = RandomFeatures(in_features, **features)
        own = mean is None and has_own_features(variance_features, likelihood)
        of_variance = own_features(self.random_features, variance_features, features, covariance) if own else None
        self.register_module("variance_features", of_variance)
        num_random_features = self.features_of_variance.num_random_features
        num_matrices = out_features if covariance == "per_class" else 1
        num_classes = LIKELIHOODS[likelihood].num_classes(out_features)
        self.register_module("class_distance", ClassDistance(in_features, num_classes) if num_classes else None)
        self.register_module("joined_score", JoinedScore() if num_classes else None)
        self.chosen_score = ChosenScore(in_features)
        self.register_module("noise_shape", noise_shape(noise, likelihood, out_features))
        varies = self.noise_shape is not None and self.noise_shape.kind == "input"
        generator = torch.Generator().manual_seed(0)  # training draws the same numbers whatever the noise
        self.register_module(
            "noise_features", RandomFeatures(in_features, **FEATURES, generator=generator) if varies else None
        )
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
        self.register_state(ridge, amplitude)

    def features(self, h: Tensor) -> Tensor:
        """phi (N, D), of the mean."""
        return self.random_features(self.checked(h))

    def variance_phi(self, h: Tensor, phi: Tensor | None = None) -> Tensor:
        """psi (N, D), of the variance; `phi` is the mean's where it is known."""
        if self.variance_features is None:
            return self.features(h) if phi is None else phi
        return self.variance_features(self.checked(h))

    def forward(self, h: Tensor) -> Tensor:
        """The logits f (N, K); of h (N, ..., d), (N, ..., K), like a Linear. No side effect on the posterior, ever."""
        zeros = handed_over(self, h, self.out_features)
        if zeros is not None:
            return zeros
        if h.dim() <= 2 or h.shape[-1] != self.in_features:
            return self.mean_of(h, None)
        return self.mean_of(h.flatten(0, -2), None).unflatten(0, h.shape[:-1])

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

    def own_score(self, mean: Tensor, variance: Tensor, h: Tensor) -> Tensor | None:
        """The score (N,) that goes with a posterior mean and variance: joined, or the fitted one that was chosen.

        None unless calibration has fitted it.
        """
        if self.chosen_score.fitted:
            return self.chosen_score(self.score, h, symmetric(mean))
        if self.joined_score is None or not self.joined_score.fitted:
            return None
        return self.joined_score(self.sources(mean, variance, h))

    def own_fields(self, score: Tensor | None) -> dict[str, Any]:
        """The fields of a `Prediction` that `own_score` fills."""
        return {"fitted": score, "default_score": self.score} if self.chosen_score.fitted else {"joined": score}

    def predict(
        self,
        h: Tensor,
        *,
        predictive: str | None = None,
        num_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """The `Prediction` for hidden vectors h; its logits are s f, s the calibrated logit scale.

        predictive  None: the head's own
        """
        predictive = PREDICTIVES.check(predictive) if predictive else self.predictive
        if torch.compiler.is_compiling():
            head = self
        elif len(h) == 1 and h.is_cpu and plain_evaluation() and not torch.is_autocast_enabled("cpu"):
            row = self._one_row()
            head, prediction = row.head, row.predict(h, predictive, num_samples, generator)
            if prediction is not None:
                return prediction
        else:
            head = self.snapshot()
        mean, variance = head.posterior(h)
        return head.prediction(mean, variance, head.own_score(mean, variance, h), h, predictive, num_samples, generator)

    def _one_row(self) -> OneRow:
        """What is prepared for the head as it is now, factorised."""
        row: OneRow | None = self.__dict__.get("_prepared")
        if row is None or not row.is_of(self):
            with self._publishing:
                row = self.__dict__["_prepared"] = OneRow(self, self.snapshot())
        return row

    def prediction(
        self,
        mean: Tensor,
        variance: Tensor,
        score: Tensor | None = None,
        h: Tensor | None = None,
        predictive: str | None = None,
        num_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """The `Prediction` that a posterior mean and variance make, and their `own_score` where there is one."""
        likelihood = LIKELIHOODS[self.likelihood]
        own = self.own_fields(score)
        if likelihood.of_classes:
            logits, variance = self.scaled(mean, variance)
            predict = PREDICTIVES[predictive or self.predictive]
            predict = of_labels(predict) if likelihood.has_labels(self.out_features) else predict
            probs, members = predict(logits, variance, num_samples, generator)
            prediction = Prediction(logits, variance, probs, members, h, likelihood=self.likelihood, **own)
        else:
            prediction = dataclasses.replace(self.of_numbers(mean, variance, h), features=h, **own)
        if not self.calibrated:
            return prediction
        prediction = dataclasses.replace(prediction, default_score=self.score)
        if len(self.label_reference):
            prediction = dataclasses.replace(prediction, label_p_value=label_p_values(prediction, self.label_reference))
        return with_p_values(prediction, self.reference, self.reference_spans, int(self.reference_draws))

    def scaled(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and their variance after calibration, of a posterior mean and variance."""
        if not len(self.label_scales):
            return self.logit_scale * mean, variance
        scale, amplitude = self.label_scales.to(mean).unbind(1)
        return self.logit_scale * scale * mean, per_output(variance, mean) * amplitude.square()

    def of_numbers(self, mean: Tensor, variance: Tensor, h: Tensor | None) -> Prediction:
        """The `Prediction` of a likelihood without classes; h is needed where the noise varies with it."""
        noise: float | Tensor | None = None
        if LIKELIHOODS[self.likelihood].noisy:  # an export cannot look at a number
            noise = self.noise if torch.compiler.is_compiling() else float(self.noise)
        if self.noise_shape is not None:
            log_ratio = None if h is None else self.log_noise_ratio(h)
            noise = self.noise_shape.noise(self.noise, log_ratio, mean)
            variance = self.noise_shape.of_outputs(variance)
        return Prediction(mean, variance, noise=noise, likelihood=self.likelihood)

    def log_noise_ratio(self, h: Tensor) -> Tensor | None:
        """By how much (N, K), in logarithms, the noise of each input exceeds the usual; None where it does not vary."""
        if self.noise_features is None or self.noise_shape is None or not self.noise_shape.varies:
            return None
        return self.noise_shape.log_ratio(self.noise_features(h))

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

    def extra_repr(self) -> str:
        return (
            f"{self.in_features}, {self.out_features}, likelihood={self.likelihood!r}, "
            f"covariance={self.covariance!r}, curvature={self.curvature!r}, ridge={float(self.ridge):g}"
        )
