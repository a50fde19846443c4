"""All figures of one model on one task, named as the columns of `paper` are.

accuracy/clean                  a metric on the test set; /val on validation data; /NAME the mean over the shifted
                                sets NAME or NAME/..., as accuracy/corrupted
auroc/OOD                       in-domain test set against an OOD set, by max_probability (paper), by the variance
                                for real targets; auroc/OOD/SCORE by another score
confidence/OOD                  mean confidence on an OOD set
false_alarms/clean              part of the test set that p-values reject at 5%; rejected/OOD: of an OOD set
spearman/distance               rank correlation of the uncertainty with the distance to the nearest training
                                example, over test and OOD inputs, for tasks whose inputs can be drawn
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from afield.model.diagnose import distance_correlation
from afield.prediction.distance_scores import FITTED, FittedScore
from afield.prediction.metrics import METRICS, OOD_METRICS, REGRESSION_METRICS
from afield.prediction.prediction import Prediction
from afield.prediction.scores import SCORES
from afield.tasks import Task

ALPHA = 0.05
Predict = Callable[[Any], Prediction]


def evaluate(
    task: Task, predictions: Mapping[str, Prediction], fitted: Mapping[str, FittedScore] | None = None
) -> dict[str, float]:
    """The figures of predictions by part: val, test, shifted/NAME, ood/NAME; of val alone, if that is all there is."""
    figures = evaluate_targets(predictions["val"], targets(task.val), "val", task.scale)
    if "test" in predictions:
        figures |= _on_test(task, predictions, fitted or {})
    return {name: value for name, value in figures.items() if math.isfinite(value)}  # no rank without a spread


def _on_test(task: Task, predictions: Mapping[str, Prediction], fitted: Mapping[str, FittedScore]) -> dict[str, float]:
    """The figures of all parts but val."""
    figures = evaluate_targets(predictions["test"], targets(task.test), "clean", task.scale)
    groups: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name, data in task.shifted.items():
        group = name.split("/")[0]
        groups[group].append(evaluate_targets(predictions[f"shifted/{name}"], targets(data), group, task.scale))
    for sets in groups.values():
        figures |= {name: fmean(each[name] for each in sets) for name in sets[0]}
    for name in task.ood:
        figures |= evaluate_ood(predictions["test"], predictions[f"ood/{name}"], name, fitted)
    if task.grid is not None and task.ood:
        figures["spearman/distance"] = _follows_distance(task, predictions)
    return figures


def evaluate_targets(prediction: Prediction, target: Tensor, part: str, scale: float = 1.0) -> dict[str, float]:
    """Every metric of the task's kind on one labelled part; real targets count in units of 1 / scale."""
    if prediction.likelihood == "gaussian" and scale != 1:
        prediction, target = _in_units(prediction, scale), target.double() * scale
    metrics = REGRESSION_METRICS if prediction.likelihood == "gaussian" else METRICS
    return {f"{name}/{part}": metric(prediction, target) for name, metric in metrics.items()}


def _in_units(prediction: Prediction, scale: float) -> Prediction:
    """What a prediction of y / scale says of y; the shift of a standardisation cancels out of every metric."""
    variance = None if prediction.variance is None else prediction.variance.double() * scale**2
    noise = None if prediction.noise is None else prediction.noise * scale**2
    return replace(prediction, logits=prediction.logits.double() * scale, variance=variance, noise=noise)


def evaluate_ood(
    inside: Prediction, outside: Prediction, ood: str, fitted: Mapping[str, FittedScore]
) -> dict[str, float]:
    """Every OOD metric of every score that these predictions have."""
    figures: dict[str, float] = {}
    default = "variance" if inside.probs is None else "max_probability"
    for score, (a, b) in score_both(inside, outside, fitted).items():
        for name, metric in OOD_METRICS.items():
            value = metric(a, b)
            figures[f"{name}/{ood}/{score}"] = value
            if score == default:
                figures[f"{name}/{ood}"] = value
    if outside.probs is not None:
        figures[f"confidence/{ood}"] = float(outside.confidence.mean())
    if outside.p_value is not None and inside.p_value is not None and (outside.smallest_p_value or 0.0) <= ALPHA:
        figures["false_alarms/clean"] = 1 - float(inside.accept(ALPHA).double().mean())
        figures[f"rejected/{ood}"] = 1 - float(outside.accept(ALPHA).double().mean())
    return figures


def score_both(
    inside: Prediction, outside: Prediction, fitted: Mapping[str, FittedScore]
) -> dict[str, tuple[Tensor, Tensor]]:
    """In-domain and OOD scores by name; a score is left out where the predictions lack what it reads."""
    if inside.likelihood == "gaussian":
        return {"variance": (SCORES["variance"](inside), SCORES["variance"](outside))}
    scores: dict[str, Callable[[Prediction], Tensor]] = dict(SCORES)
    scores |= {name: score.score for name, score in fitted.items()}
    found = {}
    for name, score in scores.items():
        try:
            found[name] = (score(inside), score(outside))
        except ValueError:  # the score says which field is missing
            continue
    return found


def fit_scores(predict: Predict, train: Iterable[Any], num_classes: int) -> dict[str, FittedScore]:
    """The scores of `afield.distance_scores`, fitted to hidden vectors of training data; none where there are none."""
    scores: dict[str, FittedScore] = {}
    for x, y in train:
        features = predict(x).features
        if features is None:
            return {}
        if not scores:
            scores = {name: make(features.shape[1], num_classes) for name, make in FITTED.items()}
        for score in scores.values():
            score.update(features, y)
    return scores


def targets(data: Any) -> Tensor:
    """All targets of a data set, in order; from its `tensors` or `targets`, without reading inputs, if it has them."""
    if hasattr(data, "tensors"):
        return data.tensors[-1]
    return torch.as_tensor(data.targets if hasattr(data, "targets") else [y for _, y in data])


def _follows_distance(task: Task, predictions: Mapping[str, Prediction]) -> float:
    parts = {"test": task.test, **{f"ood/{name}": data for name, data in task.ood.items()}}
    score = "variance" if predictions["test"].probs is None else "max_probability"
    uncertainty = torch.cat([predictions[part].score(score) for part in parts])
    x = torch.cat([data.tensors[0] for data in parts.values()])
    return distance_correlation(uncertainty, x, task.train.tensors[0])
