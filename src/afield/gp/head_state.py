"""The state of a head: what fitting and calibrating set, read by many while one changes it.

Factor, scalars and reference belong together. Predictions read a `snapshot`, which goes on as it is whatever becomes of
the head; changes are made in a `revision`, a copy that takes the head's place in one step or not at all.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor

from afield.gp.chosen_score import ChosenScore
from afield.gp.class_distance import ClassDistance
from afield.gp.features import RandomFeatures
from afield.gp.joined_score import JoinedScore
from afield.gp.likelihoods import LIKELIHOODS
from afield.gp.low_rank import LowRank
from afield.gp.noise import NoiseShape
from afield.gp.numerics import ExactBuffers
from afield.gp.precision import Precision
from afield.gp.snapshot import Lock, adopt, frozen_copy
from afield.prediction.distance_scores import FITTED
from afield.prediction.p_values import sort_reference
from afield.prediction.scores import SCORES

SCALARS = ("ridge", "amplitude", "logit_scale", "noise")
PARTS = (
    *("random_features", "variance_features", "precision", "class_distance", "joined_score", "chosen_score"),
    *("noise_shape", "noise_features"),
)
RESIZED = ("reference", "reference_spans", "score_name", "input_reference", "label_reference", "label_scales")
ADDED_LATER = ("reference_draws", "input_reference", "label_reference", "label_scales")  # states from before have none


class HeadState(ExactBuffers):
    """Buffers, parts and locks of `GaussianProcessHead`, which has the mathematics."""

    random_features: RandomFeatures
    variance_features: RandomFeatures | None
    precision: Precision | LowRank
    class_distance: ClassDistance | None
    joined_score: JoinedScore | None
    chosen_score: ChosenScore
    noise_shape: NoiseShape | None
    noise_features: RandomFeatures | None
    likelihood: str
    out_features: int
    ridge: Tensor
    amplitude: Tensor
    logit_scale: Tensor
    noise: Tensor
    training_error: Tensor
    reference: Tensor
    reference_spans: Tensor
    reference_count: Tensor
    reference_draws: Tensor
    input_reference: Tensor
    label_reference: Tensor
    label_scales: Tensor
    score_name: Tensor
    score: str

    def register_state(self, ridge: float, amplitude: float) -> None:
        """Make the buffers and locks."""
        for name, value in (("ridge", ridge), ("amplitude", amplitude)):
            check_range(name, value)
        for name, value in zip(SCALARS, (ridge, amplitude, 1.0, 1.0), strict=True):
            self.register_buffer(name, torch.tensor(value, dtype=torch.float64))
        # The mean squared error on the training data, 0 where it is not known; for calibration.
        self.register_buffer("training_error", torch.zeros((), dtype=torch.float64))
        # Sorted held-out scores, where those of each class lie, if they go by class, and the number of examples
        # observed when they were taken.
        self.register_buffer("reference", torch.zeros(0, dtype=torch.float64))
        self.register_buffer("reference_spans", torch.zeros(0, 2, dtype=torch.int64))
        self.register_buffer("reference_count", torch.zeros((), dtype=torch.int64))
        # Of inputs with positions: how many of each input are in the reference, and sorted held-out scores of inputs.
        self.register_buffer("reference_draws", torch.ones((), dtype=torch.int64))
        self.register_buffer("input_reference", torch.zeros(0, dtype=torch.float64))
        # Of several labels: sorted held-out doubts of each (n, K), and scale and amplitude of each (K, 2), in units of
        # the head's own, where each has its own.
        self.register_buffer("label_reference", torch.zeros(0, self.out_features, dtype=torch.float64))
        self.register_buffer("label_scales", torch.zeros(0, 2, dtype=torch.float64))
        self.register_buffer("score_name", torch.zeros(0, dtype=torch.uint8))
        self.set_score(LIKELIHOODS[self.likelihood].default_score(self.out_features))
        self._writing, self._publishing = Lock(rank=0), Lock(rank=1)

    def unadapted(self) -> list[RandomFeatures]:
        """The random features that do not know their length scale and moments yet."""
        all_features = (self.random_features, self.variance_features, self.noise_features)
        return [f for f in all_features if f is not None and not f.adapted]

    @property
    def features_of_variance(self) -> RandomFeatures:
        """psi: those of its own, or the mean's."""
        return self.random_features if self.variance_features is None else self.variance_features

    @property
    def num_observed(self) -> int:
        """Examples in the posterior."""
        return int(self.precision.count)

    def hold(self) -> Lock:
        """A context in which the state does not change."""
        return self._publishing

    def snapshot(self) -> Self:
        """The head as it is now, factorised: a prediction that reads it belongs to one state, whatever goes on."""
        with self._publishing:
            if self.precision.fitted:
                self.factor()
            return frozen_copy(self, *PARTS)

    @contextlib.contextmanager
    def revision(self, *, afresh: bool = False, observes: bool = True) -> Iterator[Self]:
        """A copy to change, which takes the place of the head, in one step, unless something goes wrong.

        One revision at a time; predictions go on meanwhile, with the old state.

        afresh    start without any examples
        observes  whether examples are added or removed; else the sums need no copy
        """
        with self._writing:
            with self._publishing:
                draft = frozen_copy(self, *PARTS)
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
                adopt(self, draft, *PARTS)
                self.random_features.adapted = draft.random_features.adapted
                self.features_of_variance.adapted = draft.features_of_variance.adapted
                if self.noise_features is not None and draft.noise_features is not None:
                    self.noise_features.adapted = draft.noise_features.adapted
                self.score = draft.score

    def reset_posterior(self) -> None:
        """Forget all observed examples. Amplitude and logit scale stay; p-values are off until calibrated again."""
        self.precision.reset()
        if self.class_distance is not None:
            self.class_distance.reset()
        self.training_error = torch.zeros_like(self.training_error)
        self.chosen_score.forget()
        if self.noise_shape is not None:
            self.noise_shape.forget()
        self.forget_score()

    def forget_reference(self) -> None:
        """Switch p-values off until calibrated again."""
        self.reference, self.reference_spans = self.reference[:0].clone(), self.reference_spans[:0].clone()
        self.label_reference = self.label_reference[:0].clone()
        self.input_reference = self.input_reference[:0].clone()
        self.reference_draws = torch.ones_like(self.reference_draws)

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

    @property
    def calibrated(self) -> bool:
        """Whether p-values stand: reference scores were taken from the posterior as it is now."""
        return self.reference.numel() > 0 and int(self.reference_count) == self.num_observed

    def set_reference(self, scores: Tensor, classes: Tensor | None = None, *, draws: int = 1) -> None:
        """Keep the scores of held-out in-domain examples (N,), to which p-values compare new ones.

        classes  (N,): the predicted classes, by which p-values are to be taken; None: all are compared with all
        draws    how many positions of each input they are of
        """
        num_classes = LIKELIHOODS[self.likelihood].num_classes(self.out_features)
        self.reference_draws = torch.full_like(self.reference_draws, draws)
        self.keep_reference(*sort_reference(scores.detach().double().to(self.reference.device), classes, num_classes))

    def set_label_reference(self, doubts: Tensor) -> None:
        """Keep the doubts (n, K) of held-out examples, label by label."""
        self.label_reference = doubts.detach().double().to(self.reference.device).sort(0).values

    def set_label_scales(self, scales: Tensor) -> None:
        """Scale and amplitude (K, 2) of each label, in units of the head's own; (0, 2): all have those."""
        with self._publishing:
            self.label_scales = scales.detach().double().to(self.reference.device)
            self.forget_reference()

    def set_input_reference(self, scores: Tensor) -> None:
        """Keep the scores (n,) of held-out inputs that have positions."""
        self.input_reference = scores.detach().double().to(self.reference.device).sort().values

    def keep_reference(self, reference: Tensor, spans: Tensor) -> None:
        """Take over the reference of another state of the head, as it is."""
        with self._publishing:
            self.reference, self.reference_spans = reference, spans
            self.reference_count = self.precision.count.clone()

    def set_score(self, name: str) -> None:
        """Choose the score on which p-values rest; a buffer carries its name into every copy and file."""
        self.score = name if name in FITTED else SCORES.check(name)
        self.score_name = torch.tensor(list(name.encode()), dtype=torch.uint8, device=self.score_name.device)

    def set_scalars(self, **values: float) -> None:
        """Set ridge, amplitude, logit_scale or noise; the posterior is factorised again when next read."""
        for name, value in values.items():
            if name not in SCALARS or not 0 < value < math.inf:
                raise ValueError(f"set_scalars takes positive {', '.join(SCALARS)}, got {name}={value}.")
            if name != "noise":  # which has the unit of the targets, squared
                check_range(name, value)
        with self._publishing:
            for name, value in values.items():
                setattr(self, name, torch.full_like(getattr(self, name), value))
            self.forget_reference()
            if values.keys() & {"ridge", "noise"}:
                self.precision.stale()
                self.forget_score()

    @property
    def exact(self) -> tuple[str, ...]:
        return (*SCALARS, "training_error", "reference", "input_reference", "label_reference", "label_scales")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ADDED_LATER:
            state_dict.setdefault(prefix + name, getattr(self, name))
        self.make_room(state_dict, prefix, RESIZED)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if prefix + "score_name" in state_dict:
            self.set_score(bytes(self.score_name.tolist()).decode())


def check_range(name: str, value: float) -> None:
    """Beyond a million million the digits of a variance are gone, though no number is infinite yet."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}.")
    if not 1e-12 <= value <= 1e12:
        raise ValueError(f"{name} must lie between 1e-12 and 1e12, got {value:g}.")
