"""A mixture calibrated as a whole: one logit scale s and one amplitude a for all of its parts.

    p(y | x) = 1/M sum_m softmax(s f_m / sqrt(1 + pi/8 a^2 v_m)),      f_m, v_m as their own calibration left them

The average of calibrated predictions is not calibrated: where the parts disagree it is less sure than any of them. So s
and a are chosen for the log loss of the mixture, by the rule of a single model and on the same part of the held-out
data (`model.calibration`). The paper, too, gives its ensembles amplitudes of their own (table hyper_param). Dense parts
have no variance: s alone is chosen, their temperature. M copies of one model are calibrated as the model is.

Real targets have one factor a^2 of the mixture's whole variance, noise included: of all factors that the held-out log
loss cannot tell from the best, the nearest to 1.

p-values are not touched: they are the parts' own, of scores that were fixed before their reference was taken.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from afield.gp.calibration_objective import Objective, choose, class_objective, median
from afield.gp.likelihoods import LIKELIHOODS
from afield.methods.method import Model
from afield.model.calibration import cut_in_two
from afield.model.sngp_model import SNGP
from afield.outputs.positions import sample_rows
from afield.prediction.average import average
from afield.prediction.positions import at_positions
from afield.prediction.prediction import Prediction, likelihood_of
from afield.prediction.predictive import shrink, to_probs

KINDS = ("temperature", "dropout", "ensemble")  # a model may be calibrated as each of them, one inside the other
_VARIANCE_GRID = np.logspace(-1, 1, 41)  # 1 is one of them
_SAME = 1e-4  # probabilities that differ by less are the same but for rounding


class Scales(NamedTuple):
    """Factors of all parts' logits and of the square roots of their variances. 1 and 1: the parts as they are."""

    logit_scale: float = 1.0
    amplitude: float = 1.0


AS_THEY_ARE = Scales()


def add_scales(model: Model, kind: str) -> Model:
    """Give a model a buffer for the scales of this kind, so that they are saved, copied and loaded with it."""
    model.register_buffer(_buffer(kind), torch.ones(len(AS_THEY_ARE), dtype=torch.float64))
    return model


def scales_of(model: Any, kind: str) -> Scales:
    """The scales of a model; 1 for what has none."""
    buffer = getattr(model, _buffer(kind), None)
    return AS_THEY_ARE if buffer is None else Scales(*buffer.tolist())


def set_scales(model: nn.Module, kind: str, scales: Scales) -> None:
    buffer: Tensor = getattr(model, _buffer(kind))
    buffer.copy_(torch.tensor(scales, dtype=torch.float64))


def unit_scales(model: nn.Module) -> dict[str, Tensor]:
    """All entries of the model's state that are scales, as 1: for states from before they were chosen."""
    names = tuple(map(_buffer, KINDS))
    return {name: torch.ones_like(t) for name, t in model.state_dict().items() if name.endswith(names)}


def logit_scale_of(model: nn.Module) -> float:
    """The factor that calibration has given to the logits of a single model."""
    own = float(model.head.logit_scale) if isinstance(model, SNGP) else 1.0
    return own * scales_of(model, "temperature").logit_scale


def mix(parts: Sequence[Prediction], scales: Scales = AS_THEY_ARE) -> Prediction:
    """The mixture of the parts' predictions, as `average` has it, with its scales."""
    if likelihood_of(parts[0]).of_classes:
        return average([rescale(part, scales) for part in parts])
    whole, factor = average(parts), scales.amplitude**2
    if factor == 1 or whole.variance is None:
        return whole
    return replace(whole, variance=factor * whole.variance, noise=factor * (whole.noise or 0.0))


def rescale(prediction: Prediction, scales: Scales) -> Prediction:
    """A prediction of classes with other scales."""
    if scales == AS_THEY_ARE:
        return prediction
    logits, variance = scales.logit_scale * prediction.logits, prediction.variance
    variance = None if variance is None else scales.amplitude**2 * variance
    scaled = replace(prediction, logits=logits, variance=variance)
    return replace(scaled, probs=at_positions(scaled, lambda rows: _probs(rows.logits, rows.variance)))


def calibrate_mixture(
    model: nn.Module,
    kind: str,
    parts: Callable[[Any], Sequence[Prediction]],
    val: Iterable[Any],
    *,
    logit_scale: float = 1.0,
    fixed_amplitude: bool = False,
) -> None:
    """Choose the scales of a model on validation batches (inputs, target), and keep them in it.

    parts  inputs -> predictions of the parts; the rest is as in `fit_scales`
    """
    found, targets = [], []
    for x, y in val:
        whole = [replace(part, features=None, p_value=None).to("cpu") for part in parts(x)]
        rows, y = sample_rows(whole, x, y.cpu())
        found.append(rows)
        targets.append(y)
    if not found:
        raise ValueError("Calibration got no validation batches: there is nothing to calibrate on.")
    joined = [Prediction.cat(batches) for batches in zip(*found, strict=True)]
    scales = fit_scales(joined, torch.cat(targets), logit_scale=logit_scale, fixed_amplitude=fixed_amplitude)
    set_scales(model, kind, scales)


def fit_scales(
    parts: Sequence[Prediction], target: Tensor, *, logit_scale: float = 1.0, fixed_amplitude: bool = False
) -> Scales:
    """The scales of the mixture of these predictions of held-out examples.

    logit_scale      that the logits of the parts have on average: the prior is on the scale as a whole
    fixed_amplitude  choose the logit scale alone

    Parts whose probabilities are not the mean field of their logits, such as mixtures, are left as they are.
    """
    rows, _ = cut_in_two(len(target))
    chosen, target = [part[rows] for part in parts], target[rows]
    likelihood = LIKELIHOODS[parts[0].likelihood]
    target = likelihood.check_targets(target, parts[0].logits.shape[1])
    if not likelihood.of_classes:
        return AS_THEY_ARE if fixed_amplitude else Scales(1.0, _fit_variance(average(chosen), target))
    if not all(map(_is_mean_field, chosen)):
        return AS_THEY_ARE
    logits = torch.cat([part.logits for part in chosen]).double() / logit_scale
    variances = [part.variance for part in chosen if part.variance is not None]
    variance = torch.cat(variances).double() if len(variances) == len(chosen) else torch.zeros(len(logits))
    without = median(variance) == 0  # nothing for an amplitude to scale
    unit = torch.ones_like(logits[:, 0])
    repeated = target.repeat(len(chosen))
    pooled = class_objective(likelihood, logits, unit if without else variance, repeated)
    grid = np.zeros(1) if without else np.ones(1) if fixed_amplitude else pooled.grid
    scale, amplitude, _ = choose(_mixed(pooled, len(chosen), grid), largest=True)
    return Scales(scale / logit_scale, 1.0 if without else amplitude)


def _mixed(pooled: Objective, count: int, grid: np.ndarray) -> Objective:
    """The objective of a mixture from that of its parts' examples, one part after the other."""

    def loss(s: float, a2: float) -> Tensor:
        return math.log(count) - torch.logsumexp(-pooled.loss(s, a2).reshape(count, -1), 0)

    return replace(pooled, loss=loss, grid=grid)


def _fit_variance(whole: Prediction, target: Tensor) -> float:
    """The square root of the factor of a gaussian mixture's variance."""
    mean, noise = whole.logits.double(), whole.noise or 0.0
    assert whole.variance is not None
    variance, loss = whole.variance.double(), LIKELIHOODS[whole.likelihood].predictive_loss
    objective = Objective(
        lambda _, factor: loss(mean, factor * variance, factor * noise, target), _VARIANCE_GRID, 1.0, None, mean
    )
    return choose(objective, largest=False)[1]


def _is_mean_field(part: Prediction) -> bool:
    assert part.probs is not None
    return bool(((_probs(part.logits, part.variance) - part.probs).abs() < _SAME).all())


def _probs(logits: Tensor, variance: Tensor | None) -> Tensor:
    return to_probs(logits if variance is None else shrink(logits, variance))


def _buffer(kind: str) -> str:
    return f"{kind}_scales"
