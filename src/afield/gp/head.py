"""The Gaussian-process output layer: random features, output weights and their Laplace posterior.

    f(h) = phi(h)^T B (+ constant),        v(h) = a^2 phi(h)^T H^-1 phi(h)

`forward` returns f and never touches the posterior: accumulation inside `forward` is silently wrong under
distributed training, gradient checkpointing and repeated passes. `observe` adds examples, `posterior` reads.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afield.gp.capture import handed_over
from afield.gp.features import RandomFeatures
from afield.gp.full_precision import full_precision
from afield.gp.likelihoods import LIKELIHOODS
from afield.gp.low_rank import LowRank
from afield.gp.precision import COVARIANCES, Precision, check_weights, choose_curvature, curvature_weights
from afield.gp.snapshot import Lock, adopt, frozen_copy
from afield.prediction.p_values import conformal_p_value
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import PREDICTIVES

SCALARS = ("ridge", "amplitude", "logit_scale", "noise")
_PARTS = ("random_features", "precision")  # which, with the head itself, are the state of a prediction
KEPT_MEAN_FRACTION = 0.35  # docs/defaults.md


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
    features             options of `RandomFeatures`: num_random_features, length_scale, kernel, orthogonal,
                         normalize_input, projection, generator. With `mean`, where the kernel has only the variance to
                         carry, a length scale from the data is 0.35 of the median distance

    Output weights start at the prior mean, zero, so that f tends to zero far from the data also after training.
    """

    ridge: Tensor
    amplitude: Tensor
    logit_scale: Tensor
    noise: Tensor
    training_error: Tensor
    reference: Tensor
    reference_count: Tensor

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
            features = {"grow": True, "fraction": KEPT_MEAN_FRACTION, **features}
        self.random_features = RandomFeatures(in_features, **features)
        num_random_features = self.random_features.num_random_features
        num_matrices = out_features if covariance == "per_class" else 1
        self.precision: Precision | LowRank
        if rank is None:
            self.precision = Precision(num_random_features, num_matrices, momentum=momentum)
        else:
            self._check_rank(rank, momentum)
            self.precision = LowRank(num_random_features, num_matrices, rank)
        self.mean = mean
        if mean is None:
            self.weight = nn.Parameter(torch.zeros(out_features, num_random_features))
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
        # Sorted held-out scores, and the number of examples observed when they were taken.
        self.register_buffer("reference", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("reference_count", torch.zeros((), dtype=torch.int64))
        self._writing, self._publishing = Lock(rank=0), Lock(rank=1)

    def _check_rank(self, rank: int, momentum: float | None) -> None:
        """A low rank is for many precisions that differ."""
        if self.covariance != "per_class" or self.out_features < 2:
            raise ValueError(
                f"rank={rank} approximates one precision for each of several outputs, got covariance="
                f'{self.covariance!r} and {self.out_features} outputs: use covariance="per_class", or rank=None.'
            )
        if LIKELIHOODS[self.likelihood].noisy or self.curvature == "unit":
            raise ValueError(
                f"With likelihood={self.likelihood!r} and curvature={self.curvature!r} all outputs have the same "
                f'precision: use covariance="shared" with rank=None, which is exact, got rank={rank}.'
            )
        if momentum is not None:
            raise ValueError(f"A moving average (momentum={momentum}) keeps no examples: use rank=None, got {rank}.")

    @property
    def num_observed(self) -> int:
        """Examples in the posterior."""
        return int(self.precision.count)

    def features(self, h: Tensor) -> Tensor:
        """phi (N, D)."""
        return self.random_features(self._checked(h))

    def forward(self, h: Tensor) -> Tensor:
        """The logits f (N, K). No side effect on the posterior, ever."""
        zeros = handed_over(self, h, self.out_features)
        return self._mean(h, None) if zeros is None else zeros

    def observe(
        self, h: Tensor, logits: Tensor | None = None, *, weights: Tensor | None = None, fast: bool = False
    ) -> None:
        """Add examples to the posterior; `logits` are computed from h unless given.

        weights  (N,): an example of weight w counts as w examples; None: one each
        """
        with self._writing, self._publishing:
            self._accumulate(h, logits, weights, lambda phi, w: self.precision.update(phi, w, fast=fast))

    def unobserve(self, h: Tensor, logits: Tensor | None = None, *, weights: Tensor | None = None) -> None:
        """Remove examples that were observed, exactly: same hidden vectors, same logits, same weights."""
        with self._writing, self._publishing:
            self._accumulate(h, logits, weights, self.precision.downdate)

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
            yield draft
            if draft.precision.fitted:
                draft.factor()
            with self._publishing:
                adopt(self, draft, *_PARTS)
                self.random_features.adapted = draft.random_features.adapted

    def reset_posterior(self) -> None:
        """Forget all observed examples. Amplitude and logit scale stay; p-values are off until calibrated again."""
        self.precision.reset()
        self.training_error = torch.zeros_like(self.training_error)
        self.forget_reference()

    def forget_reference(self) -> None:
        """Switch p-values off until calibrated again."""
        self.reference = self.reference[:0].clone()

    def factor(self) -> None:
        """Factorise the posterior precision, unless that is done."""
        if not self.precision.factored:
            self.precision.factor(float(self.ridge), float(self.noise))

    def posterior(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Mean f (N, K) and variance a^2 phi^T H^-1 phi, (N,) shared or (N, K) per class."""
        self.factor()
        phi = self.features(h)
        return self._mean(h, phi), self.amplitude.square() * self.precision.variance(phi)

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
        return head.prediction(*head.posterior(h), h, predictive, num_samples, generator)

    def prediction(
        self,
        mean: Tensor,
        variance: Tensor,
        h: Tensor | None = None,
        predictive: str = "mean_field",
        num_samples: int = 100,
        generator: torch.Generator | None = None,
    ) -> Prediction:
        """The `Prediction` that a posterior mean and variance make."""
        likelihood = LIKELIHOODS[self.likelihood]
        if likelihood.of_classes:
            logits = self.logit_scale * mean
            probs, members = PREDICTIVES[predictive](logits, variance, num_samples, generator)
            prediction = Prediction(logits, variance, probs, members, h, likelihood=self.likelihood)
        else:
            noise = float(self.noise) if likelihood.noisy else None
            prediction = Prediction(mean, variance, features=h, noise=noise, likelihood=self.likelihood)
        if not self.calibrated:
            return prediction
        p_value, smallest_p_value = conformal_p_value(prediction.score(), self.reference)
        return dataclasses.replace(prediction, p_value=p_value, smallest_p_value=smallest_p_value)

    @property
    def calibrated(self) -> bool:
        """Whether p-values stand: reference scores were taken from the posterior as it is now."""
        return self.reference.numel() > 0 and int(self.reference_count) == self.num_observed

    def set_reference(self, scores: Tensor) -> None:
        """Keep the scores of held-out in-domain examples (N,), to which p-values compare new ones."""
        with self._publishing:
            self.reference = scores.detach().double().sort().values.to(self.reference.device)
            self.reference_count = self.precision.count.clone()

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

    def _mean(self, h: Tensor, phi: Tensor | None) -> Tensor:
        if self.mean is not None:
            logits = self.mean(self._checked(h))
        else:
            phi = self.features(h) if phi is None else phi
            with full_precision(h.device):
                logits = F.linear(phi, self.weight, self.constant)
        if self.added:
            logits = self._with_added(logits, self.features(h) if phi is None else phi)
        return logits[:, [k for k in range(logits.shape[-1]) if k not in self.dropped]] if self.dropped else logits

    def _with_added(self, logits: Tensor, phi: Tensor) -> Tensor:
        """Added outputs count from the mean of the first ones: a softmax leaves their common level free.

        Each is a product of its own, because a wider matrix may round the old logits differently.
        """
        level = logits.mean(-1, keepdim=True)
        with full_precision(phi.device):
            return torch.cat([logits, *(level + F.linear(phi, weight[None]) for weight in self.added)], dim=-1)

    @torch.no_grad()
    def _accumulate(
        self,
        h: Tensor,
        logits: Tensor | None,
        weights: Tensor | None,
        add: Callable[[Tensor, Tensor | None], None],
    ) -> None:
        self._checked(h)
        self.check_finite(h)
        if not self.random_features.adapted:
            self.random_features.adapt(h)
        phi = self.random_features(h, limited=False)
        unit = self.curvature == "unit"
        rows = min(1, h.shape[0]) if unit and logits is None else h.shape[0]
        if logits is None:  # unit weights need none: with many classes they would cost more than all the rest
            logits = self._mean(h[:rows], phi[:rows])
        if logits.shape != (rows, self.out_features):
            raise ValueError(f"logits must have shape ({rows}, {self.out_features}), got {tuple(logits.shape)}.")
        w = None if unit else self.curvature_weights(logits)
        if weights is not None:
            given = check_weights(weights, h.shape[0]).to(phi)[:, None]
            w = given.expand(-1, self.precision.num_matrices) if w is None else w * given
        self.check_finite(phi, *([] if w is None else [w]))
        add(phi, w)
        self.forget_reference()

    def curvature_weights(self, logits: Tensor) -> Tensor:
        """The weights of examples with these logits in the precision, (N, 1) shared or (N, K) per class."""
        return curvature_weights(
            logits, likelihood=self.likelihood, covariance=self.covariance, curvature=self.curvature
        )

    def check_finite(self, *tensors: Tensor, before: int = 0) -> None:
        """Name the rows that hold NaN or infinity; `before` examples of the loader came in earlier batches."""
        finite = torch.stack([torch.isfinite(t).all(dim=-1) for t in tensors]).all(0)
        if not bool(finite.all()):
            rows = (~finite).nonzero().flatten().tolist()
            where = f", which are examples {[before + row for row in rows[:5]]} of the loader" if before else ""
            raise ValueError(
                f"Hidden features must be finite, got NaN or infinity in {len(rows)} of {len(finite)} rows "
                f"(first: {rows[:5]}){where}. Nothing of this batch was added; look at the inputs or the backbone."
            )

    def _checked(self, h: Tensor) -> Tensor:
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
        saved = state_dict.get(prefix + "reference")
        if saved is not None and saved.dim() == 1:
            self.reference = self.reference.new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)

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
