"""A score of the field that was fitted to training data and chosen by its name, as a part of the head.

`afield.calibrate(model, held_out, score="knn", train=train_loader)` fits it; p-values then rest on it. All that scoring
reads of the training data are constants (`prediction.fitted_score`), which are buffers here: they go wherever the model
goes, into files, copies and exports.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from afield.gp.numerics import ExactBuffers
from afield.prediction.distance_scores import FITTED
from afield.prediction.fitted_score import Constants, FittedScore


class ChosenScore(ExactBuffers):
    """Hidden vectors (N, d) and logits (N, K) -> scores (N,), by the constants of a fitted score."""

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.in_features = in_features

    @property
    def fitted(self) -> bool:
        return bool(self._buffers)

    @torch.no_grad()
    def take(self, constants: Constants) -> None:
        """Keep the constants of a fitted score, in place of any others."""
        self.forget()
        for name, value in constants.items():
            # In one layout: a factor comes by columns, a file by rows, and products would differ in the last digit.
            self.register_buffer(name, value.detach().clone(memory_format=torch.contiguous_format))

    def forget(self) -> None:
        self._buffers = {}

    def forward(self, name: str, h: Tensor, logits: Tensor) -> Tensor:
        """The score of this name, whose constants these are."""
        constants = {key: t for key, t in self._buffers.items() if t is not None}
        scores = _empty(name, self.in_features).distance(constants, h, logits)
        return scores.to(torch.promote_types(h.dtype, torch.float32))

    @property
    def exact(self) -> tuple[str, ...]:
        return tuple(self._buffers)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        names = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
        self.take({name: state_dict[prefix + name] for name in names})
        super()._load_from_state_dict(state_dict, prefix, *args)


@lru_cache(maxsize=32)
def _empty(name: str, in_features: int) -> FittedScore:
    """A score that has seen nothing, made once: `distance` reads constants alone."""
    return FITTED[name](in_features, 1)
