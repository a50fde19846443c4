"""What all fitted scores do: accumulate training examples, then score predictions by their hidden vectors.

`reset`, `update` with batches, `merge`, then `score`; `applies` says whether `score` can be called. Every score reads
features (hidden vectors h). Its `needs` say what else:

target   the classes of the training examples, in `update`
logits   of the training examples, in `update`, and of the prediction
output   the dense layer over the features, given at construction; it makes logits W h + b of features by itself

Order, batches and processes do not matter: merged parts are the whole. Memory does not grow with the examples.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from afield.errors import NotFitted, Unsuitable
from afield.prediction.checks import check_features, check_labels, features_problem
from afield.prediction.prediction import Prediction
from afield.prediction.scores import symmetric

_CHUNK = 1024  # examples scored at a time: (1024, K) and (1024, reservoir) distances are all there ever is
Constants = Mapping[str, Tensor]  # by name: all that scoring reads of the training data


def dense_logits(constants: Constants, h: Tensor) -> Tensor:
    """z (N, K) = W h + b of the dense output layer, in float64."""
    return h.to(constants["weight"]) @ constants["weight"].T + constants["bias"]


class FittedScore(ABC):
    """A score that is fitted to training features (N, d) before it can score a prediction.

    output  the dense layer over the features; None where there is none, and then a score that needs it never applies
    device  where the state lives and scores are computed

    A subclass keeps its state in `_clear`, `_add` and `_join`, makes `constants` of it in `_fit`, and scores by these
    alone in `distance`: so they can be kept elsewhere, and a tracer can follow.
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
        self.layer: Constants | None = None
        if output is not None and "output" in self.needs:
            self.layer = _of_layer(output, num_features, self.device)
        self.reset()

    def reset(self) -> None:
        """Forget all examples."""
        self.num_seen = 0
        self._constants: Constants | None = None
        self._clear()

    @torch.no_grad()
    def update(self, features: Tensor, target: Tensor | None = None, logits: Tensor | None = None) -> None:
        """Add training features (N, d), with their classes (N,) and logits (N, K) if this score needs them."""
        h = check_features(features, self.num_features)
        y = z = h.new_zeros(0)
        if "target" in self.needs:
            y = check_labels(self._given(target, "target"), len(h), self.num_classes)
        if "logits" in self.needs:
            z = self._checked(self._given(logits, "logits"), len(h))
        if "output" in self.needs:
            _ = self.output
        self._add(h.to(self.device), y.to(self.device), z.to(self.device))
        self.num_seen += len(h)
        self._constants = None

    @torch.no_grad()
    def merge(self, other: Self) -> None:
        """Add all examples of another accumulator: the result is as if this one had seen both."""
        mine, theirs = self._all_options(), other._all_options()
        if mine != theirs:
            raise ValueError(f"Cannot merge scores of {mine} and {theirs}.")
        layer = other.layer or {}
        if any(not torch.equal(t, layer[name].to(t)) for name, t in (self.layer or {}).items()):
            raise ValueError("Cannot merge scores whose output layers have different weights.")
        self._join(other)
        self.num_seen += other.num_seen
        self._constants = None

    def applies(self, prediction: Prediction) -> bool:
        """Whether `score` has all that it needs. Calling it is an error where it has not."""
        try:
            self._check(prediction)
        except (Unsuitable, NotFitted):
            return False
        return True

    @torch.no_grad()
    def score(self, prediction: Prediction) -> Tensor:
        """How far (N,) each example lies from the training data; higher is further."""
        features, logits = self._check(prediction)
        parts = zip(features.split(_CHUNK), logits.split(_CHUNK), strict=True)
        constants = self.constants
        scores = torch.cat([self.distance(constants, h.to(self.device), z.to(self.device)) for h, z in parts])
        return scores.to(features.device, torch.promote_types(features.dtype, torch.float32))

    @property
    @torch.no_grad()
    def constants(self) -> Constants:
        """What `distance` reads; an error says what the training data lacks."""
        layer = self.output if "output" in self.needs else {}
        if not self.num_seen:
            arguments = ", ".join(["features", *(name for name in self.needs if name != "output")])
            raise NotFitted(f"This score has seen no training features. Call update({arguments}) with them first.")
        if self._constants is None:
            self._constants = {**layer, **self._fit()}
        return self._constants

    @property
    def output(self) -> Constants:
        """`weight` (K, d) and `bias` (K,) of the dense output layer, in float64."""
        if self.layer is None:
            raise Unsuitable(
                "This score needs the dense layer over the features, got none. Make it with output=, an nn.Linear; a "
                "network without such a layer needs another score."
            )
        return self.layer

    def _check(self, prediction: Prediction) -> tuple[Tensor, Tensor]:
        """Features, and logits if they are needed."""
        if prediction.features is None:
            raise Unsuitable("This score needs features, which the prediction lacks. Use another score or method.")
        if problem := features_problem(prediction.features, self.num_features):
            raise Unsuitable(problem)
        h = prediction.features.detach()
        z = self._checked(prediction.logits, len(h)) if "logits" in self.needs else h[:, :0]
        _ = self.constants
        return h, z

    def _checked(self, logits: Tensor, num_examples: int) -> Tensor:
        """Logits (N, K), in the form of at least two, if they are those of as many examples and classes."""
        z = symmetric(logits.detach()) if logits.dim() == 2 else logits
        if z.shape != (num_examples, self.num_classes):
            raise Unsuitable(f"Expected logits of shape {(num_examples, self.num_classes)}, got {tuple(logits.shape)}.")
        if not bool(torch.isfinite(z).all()):
            raise Unsuitable("Logits must be finite, got NaN or infinity.")
        return z

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
    def _fit(self) -> dict[str, Tensor]:
        """The constants, made of the state; an error says what the state lacks."""

    @abstractmethod
    def distance(self, constants: Constants, h: Tensor, z: Tensor) -> Tensor:
        """Scores (N,) of features (N, d) and logits (N, K), which are empty unless needed, by the constants alone."""


@torch.no_grad()
def _of_layer(layer: nn.Linear, num_features: int, device: torch.device) -> Constants:
    """The weight and bias of a dense output layer, in float64; one output counts as two opposite ones."""
    if layer.in_features != num_features:
        raise ValueError(f"Expected an output layer over {num_features} features, got one over {layer.in_features}.")
    weight = layer.weight.detach().to(device, torch.float64, copy=True)
    bias = weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach().to(weight, copy=True)
    return {"weight": symmetric(weight.T).T, "bias": symmetric(bias)}
