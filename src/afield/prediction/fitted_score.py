"""What all fitted scores do: accumulate training examples, then score predictions by their hidden vectors.

`reset`, `update` with batches, `merge`, then `score`; `applies` says whether `score` can be called. Every score reads
features (hidden vectors h). Its `needs` say what else:

target   the classes of the training examples, in `update`
logits   of the training examples, in `update`, and of the prediction
output   the dense layer over the features, given at construction; it makes logits W h + b of features by itself

Order, batches and processes do not matter: merged parts are the whole. Memory does not grow with the examples.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from afield.errors import NotFitted
from afield.prediction.checks import check_features, check_labels, features_problem
from afield.prediction.prediction import Prediction
from afield.prediction.scores import symmetric

_CHUNK = 1024  # examples scored at a time: (1024, K) and (1024, reservoir) distances are all there ever is
Distance = Callable[[Tensor, Tensor], Tensor]  # features (N, d), logits (N, K) -> scores (N,)
Problem = ValueError | NotFitted
_NO_LAYER = (
    "This score needs the dense layer over the features, got none. Make it with output=, an nn.Linear; a network "
    "without such a layer needs another score."
)


@dataclass(frozen=True)
class OutputLayer:
    """The weight (K, d) and bias (K,) of a dense output layer, in float64; one output counts as two opposite ones."""

    weight: Tensor
    bias: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, layer: nn.Linear, num_features: int, device: torch.device) -> "OutputLayer":
        if layer.in_features != num_features:
            raise ValueError(
                f"Expected an output layer over {num_features} features, got one over {layer.in_features}."
            )
        weight = layer.weight.detach().to(device, torch.float64, copy=True)
        bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach().to(weight, copy=True)
        return cls(symmetric(weight.T).T, symmetric(bias))

    def __call__(self, h: Tensor) -> Tensor:
        return h.to(self.weight) @ self.weight.T + self.bias


class FittedScore(ABC):
    """A score that is fitted to training features (N, d) before it can score a prediction.

    output  the dense layer over the features; None where there is none, and then a score that needs it never applies
    device  where the state lives and scores are computed

    A subclass keeps its state in `_clear`, `_add` and `_join`, and makes a function of it in `_fit`.
    """

    needs: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        num_features: int,
        num_classes: int = 1,
        *,
        output: nn.Linear | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if num_features < 1 or num_classes < 1:
            raise ValueError(f"Expected at least 1 feature and 1 class, got {num_features} and {num_classes}.")
        self.num_features, self.num_classes = num_features, num_classes
        self.device = torch.zeros(0, device=device).device
        self.layer: OutputLayer | None = None
        if output is not None and "output" in self.needs:
            self.layer = OutputLayer.of(output, num_features, self.device)
        self.reset()

    def reset(self) -> None:
        """Forget all examples."""
        self.num_seen = 0
        self._distance: Distance | Problem | None = None
        self._clear()

    @torch.no_grad()
    def update(self, features: Tensor, target: Tensor | None = None, logits: Tensor | None = None) -> None:
        """Add training features (N, d), with their classes (N,) and logits (N, K) if this score needs them."""
        h = check_features(features, self.num_features)
        y = z = h.new_zeros(0)
        if "target" in self.needs:
            y = check_labels(self._given(target, "target"), len(h), self.num_classes)
        if "logits" in self.needs:
            z = self._check_logits(self._given(logits, "logits"), len(h))
        if "output" in self.needs:
            _ = self.output
        self._add(h.to(self.device), y.to(self.device), z.to(self.device))
        self.num_seen += len(h)
        self._distance = None

    @torch.no_grad()
    def merge(self, other: Self) -> None:
        """Add all examples of another accumulator: the result is as if this one had seen both."""
        mine, theirs = self._all_options(), other._all_options()
        if mine != theirs:
            raise ValueError(f"Cannot merge scores of {mine} and {theirs}.")
        if self.layer is not None and other.layer is not None:
            pairs = ((self.layer.weight, other.layer.weight), (self.layer.bias, other.layer.bias))
            if not all(torch.equal(a, b.to(a)) for a, b in pairs):
                raise ValueError("Cannot merge scores whose output layers have different weights.")
        self._join(other)
        self.num_seen += other.num_seen
        self._distance = None

    def applies(self, prediction: Prediction) -> bool:
        """Whether `score` has all that it needs. Calling it is an error where it has not."""
        return self._problem(prediction) is None

    @torch.no_grad()
    def score(self, prediction: Prediction) -> Tensor:
        """How far (N,) each example lies from the training data; higher is further."""
        if (problem := self._problem(prediction)) is not None:
            raise problem
        features, distance = cast(Tensor, prediction.features).detach(), cast(Distance, self._distance)
        logits = symmetric(prediction.logits.detach()) if "logits" in self.needs else features[:, :0]
        parts = zip(features.split(_CHUNK), logits.split(_CHUNK), strict=True)
        scores = torch.cat([distance(h.to(self.device), z.to(self.device)) for h, z in parts])
        return scores.to(features.device, torch.promote_types(features.dtype, torch.float32))

    @property
    def output(self) -> OutputLayer:
        if self.layer is None:
            raise ValueError(_NO_LAYER)
        return self.layer

    @torch.no_grad()
    def _problem(self, prediction: Prediction) -> Problem | None:
        """Why a prediction cannot be scored; None if it can."""
        h = prediction.features
        if h is None:
            return ValueError("This score needs features, which the prediction lacks. Use another score or method.")
        text = features_problem(h, self.num_features)
        if text is None and "logits" in self.needs:
            text = self._logits_problem(prediction.logits, len(h))
        if text is None and "output" in self.needs and self.layer is None:
            text = _NO_LAYER
        if text is not None:
            return ValueError(text)
        if not self.num_seen:
            arguments = ", ".join(["features", *(name for name in self.needs if name != "output")])
            return NotFitted(f"This score has seen no training features. Call update({arguments}) with them first.")
        if self._distance is None:
            self._distance = self._fit()
        return self._distance if isinstance(self._distance, Exception) else None

    def _logits_problem(self, logits: Tensor, num_examples: int) -> str | None:
        """What is wrong with logits that should be those of as many examples and classes; None if nothing is."""
        z = symmetric(logits.detach()) if logits.dim() == 2 else logits
        if z.shape != (num_examples, self.num_classes):
            return f"Expected logits of shape {(num_examples, self.num_classes)}, got {tuple(logits.shape)}."
        if not bool(torch.isfinite(z).all()):
            return "Logits must be finite, got NaN or infinity."
        return None

    def _check_logits(self, logits: Tensor, num_examples: int) -> Tensor:
        """Logits (N, K), in the form of at least two; an error says what is wrong with others."""
        if problem := self._logits_problem(logits, num_examples):
            raise ValueError(problem)
        return symmetric(logits.detach())

    @staticmethod
    def _given(value: Tensor | None, name: str) -> Tensor:
        if value is None:
            raise ValueError(f"This score needs the {name} of training examples, got none. Pass {name}= to update.")
        return value

    def _all_options(self) -> dict[str, Any]:
        own = {"score": type(self).__name__, "features": self.num_features, "classes": self.num_classes}
        return own | {"output": self.layer is not None} | self._options()

    def _options(self) -> dict[str, Any]:
        """What must be alike in accumulators that are merged."""
        return {}

    @abstractmethod
    def _clear(self) -> None:
        """Start an empty state."""

    @abstractmethod
    def _add(self, h: Tensor, y: Tensor, z: Tensor) -> None:
        """Add features (N, d), classes (N,) and logits (N, K); those that the score does not need are empty."""

    @abstractmethod
    def _join(self, other: Self) -> None:
        """Add another's state."""

    @abstractmethod
    def _fit(self) -> Distance | Problem:
        """The function that scores, made of the state, or the error that says what the state lacks."""
