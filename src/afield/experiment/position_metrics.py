"""Metrics of a task whose answers stand at positions, such as pixels, and the pictures that are kept of it.

accuracy/clean ... nll/val      the metrics of `evaluation`, over all labelled positions
miou/clean                      intersection over union, the mean over the classes that are there
auroc/OOD/SCORE                 foreign positions of an OOD set against the other positions of the same inputs
input_auroc/OOD/SCORE           its inputs against those of the test set, by the scores that their positions make
false_alarms/clean              part of the test positions that p-values reject at 5%; rejected/OOD: of foreign ones
input_false_alarms/clean        the same of inputs as a whole; input_rejected/OOD

An OOD set comes with masks (N, *P), other than zero at foreign positions. Of all predictions a run folder keeps a few
inputs: every number of every pixel would be gigabytes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from afield.experiment.metric_name import MetricName
from afield.experiment.run_folder import evenly_spaced_rows
from afield.prediction.metrics import OOD_METRICS
from afield.prediction.prediction import Prediction, likelihood_of
from afield.prediction.scores import SCORES
from afield.tasks import Task

IGNORED = -100
PICTURES = "pictures"
_KEPT = 6


def labelled_rows(prediction: Prediction, target: Tensor) -> tuple[Prediction, Tensor]:
    """Positions that have a label, as rows; a prediction without positions as it is."""
    if not prediction.positions:
        return prediction, target
    labelled = target.flatten() != IGNORED
    return prediction.rows()[labelled], target.flatten()[labelled]


def mean_iou(prediction: Prediction, target: Tensor) -> float:
    """Intersection over union of predicted and true positions, averaged over the classes that either has."""
    rows, y = labelled_rows(prediction, target)
    assert rows.probs is not None
    classes = rows.probs.shape[1]
    pairs = torch.bincount(y * classes + rows.labels, minlength=classes**2).reshape(classes, classes).double()
    union = pairs.sum(0) + pairs.sum(1) - pairs.diagonal()
    return float((pairs.diagonal() / union)[union > 0].mean())


def evaluate_foreign(test: Prediction, ood: Prediction, mask: Tensor, name: str, alpha: float) -> dict[str, float]:
    """The metrics of an OOD set whose foreign positions the mask (N, *P) tells; `test` is in-domain."""
    metrics: dict[str, float] = {}
    foreign, default = mask != 0, likelihood_of(test).doubt
    for score_name, score in SCORES.items():
        if not (score.applies(test) and score.applies(ood)):
            continue
        inside, outside = score(test), score(ood)
        values = {
            "": (outside[~foreign], outside[foreign]),
            "input_": (score.of_input(inside, test), score.of_input(outside, ood)),
        }
        for prefix, both in values.items():
            for metric in ("auroc", "aupr", "fpr95") if not prefix else ("auroc",):
                value = OOD_METRICS[metric](*both)
                metrics[str(MetricName(f"{prefix}{metric}", name, score_name))] = value
                if score_name == default:
                    metrics[str(MetricName(f"{prefix}{metric}", name))] = value
    if test.p_value is not None and ood.p_value is not None:
        metrics[str(MetricName("false_alarms", "clean"))] = _refused(test.accept(alpha))
        metrics[str(MetricName("rejected", name))] = _refused(ood.accept(alpha)[foreign])
    if test.input_p_value is not None:
        metrics[str(MetricName("input_false_alarms", "clean"))] = _refused(test.accept_inputs(alpha))
        metrics[str(MetricName("input_rejected", name))] = _refused(ood.accept_inputs(alpha))
    return metrics


def kept_pictures(task: Task, predictions: Mapping[str, Prediction]) -> dict[str, Tensor]:
    """A few inputs of the test set and of each OOD set, with what was said about them."""
    arrays: dict[str, Tensor] = {}
    parts: dict[str, Any] = {"test": task.test, **{f"ood/{name}": data for name, data in task.ood.items()}}
    for part, data in parts.items():
        chosen = evenly_spaced_rows(len(data), _KEPT)
        p = predictions[part][chosen]
        doubt = p.score(likelihood_of(p).doubt)
        found = {"x": data.tensors[0][chosen].half(), "y": data.tensors[1][chosen].short(), "label": p.labels.short()}
        found |= {"doubt": doubt.half(), "score": p.score().half()}
        found |= {n: t.half() for n in ("variance", "p_value") if (t := getattr(p, n)) is not None}
        arrays |= {f"{PICTURES}/{part}/{name}": t for name, t in found.items()}
    return arrays


def _refused(accepted: Tensor) -> float:
    return 1 - float(accepted.double().mean())
