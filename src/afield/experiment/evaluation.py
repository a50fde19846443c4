"""All metrics of one model on one task. Names are as in `metric_name`; these are the columns of the paper, and more.

accuracy/clean                  a metric on the test set; /val on validation data; /NAME the mean over the shifted
                                sets NAME or NAME/..., as accuracy/corrupted
nll/combined                    of test and OOD sets together, where the task has an output for OOD (CLINC)
auroc/OOD                       in-domain test set against an OOD set, by max_probability (paper), by the variance
                                for real targets; auroc/OOD/SCORE by another score
confidence/OOD                  mean confidence on an OOD set
false_alarms/clean              part of the test set that p-values reject at 5%; rejected/OOD: of an OOD set
spearman/distance               rank correlation of the uncertainty with the distance to the nearest training
                                example, over test and OOD inputs, for tasks whose inputs can be drawn;
                                spearman/mean_distance: to all of them on average, as the paper defines it
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from afield.experiment.metric_name import MetricName
from afield.experiment.position_metrics import evaluate_foreign, labelled_rows, mean_iou
from afield.model.diagnose import distance_correlation, mean_distance, nearest_distance
from afield.model.sngp_model import SNGP
from afield.prediction.distance_scores import FittedScore, make_all
from afield.prediction.metrics import METRICS, OOD_METRICS, REGRESSION_METRICS
from afield.prediction.prediction import Prediction, likelihood_of
from afield.prediction.scores import SCORES
from afield.tasks import Task

ALPHA = 0.05


def evaluate(
    task: Task, predictions: Mapping[str, Prediction], fitted: Mapping[str, FittedScore] | None = None
) -> dict[str, float]:
    """Return the metrics of predictions by part: val, test, shifted/NAME, ood/NAME. Predictions of val alone will do.

    A metric without a finite value is left out: constant scores have no rank correlation.
    """
    metrics = evaluate_targets(predictions["val"], targets(task.val), "val", task.scale)
    if "test" in predictions:
        metrics |= _evaluate_test(task, predictions, fitted or {})
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _evaluate_test(
    task: Task, predictions: Mapping[str, Prediction], fitted: Mapping[str, FittedScore]
) -> dict[str, float]:
    """The metrics of all parts but val."""
    metrics = evaluate_targets(predictions["test"], targets(task.test), "clean", task.scale)
    groups: dict[str, list[dict[str, float]]] = defaultdict(list)
    for name, data in task.shifted.items():
        group = name.split("/")[0]
        groups[group].append(evaluate_targets(predictions[f"shifted/{name}"], targets(data), group, task.scale))
    for sets in groups.values():
        metrics |= {name: fmean(each[name] for each in sets) for name in sets[0]}
    for name, data in task.ood.items():
        test, ood = predictions["test"], predictions[f"ood/{name}"]
        if test.positions:
            metrics |= evaluate_foreign(test, ood, targets(data), name, ALPHA)
        else:
            metrics |= evaluate_ood(test, ood, name, fitted)
    if task.ood_label is not None:
        metrics[str(MetricName("nll", "combined"))] = _combined_nll(task, predictions, task.ood_label)
    if task.grid is not None and task.ood:
        metrics |= _distance_correlations(task, predictions)
    return metrics


def evaluate_targets(prediction: Prediction, target: Tensor, part: str, scale: float = 1.0) -> dict[str, float]:
    """Every metric of the task's kind on one labelled part; real targets count in units of 1 / scale."""
    likelihood = likelihood_of(prediction)
    if likelihood.noisy and scale != 1:
        prediction, target = _rescale(prediction, scale), target.double() * scale
    metrics = METRICS if likelihood.of_classes else REGRESSION_METRICS
    rows, labels = labelled_rows(prediction, target)
    found = {str(MetricName(name, part)): metric(rows, labels) for name, metric in metrics.items()}
    of_masks = prediction.positions and likelihood.of_classes
    return found | ({str(MetricName("miou", part)): mean_iou(prediction, target)} if of_masks else {})


def _rescale(prediction: Prediction, scale: float) -> Prediction:
    """What a prediction of y / scale says of y; the shift of a standardisation cancels out of every metric."""
    variance = None if prediction.variance is None else prediction.variance.double() * scale**2
    noise = None if prediction.noise is None else prediction.noise * scale**2
    return replace(prediction, logits=prediction.logits.double() * scale, variance=variance, noise=noise)


def evaluate_ood(
    in_domain: Prediction, ood: Prediction, name: str, fitted: Mapping[str, FittedScore]
) -> dict[str, float]:
    """Every OOD metric of every score that these predictions have; `name` is that of the OOD set."""
    metrics: dict[str, float] = {}
    default = likelihood_of(in_domain).doubt
    for score, values in score_both(in_domain, ood, fitted).items():
        for metric, function in OOD_METRICS.items():
            value = function(*values)
            metrics[str(MetricName(metric, name, score))] = value
            if score == default:
                metrics[str(MetricName(metric, name))] = value
    if ood.probs is not None:
        metrics[str(MetricName("confidence", name))] = float(ood.confidence.mean())
    if ood.p_value is not None and in_domain.p_value is not None and (ood.smallest_p_value or 0.0) <= ALPHA:
        metrics[str(MetricName("false_alarms", "clean"))] = _rejected(in_domain)
        metrics[str(MetricName("rejected", name))] = _rejected(ood)
    return metrics


def score_both(
    in_domain: Prediction, ood: Prediction, fitted: Mapping[str, FittedScore]
) -> dict[str, tuple[Tensor, Tensor]]:
    """In-domain and OOD scores by name, of all scores that apply to both; of real targets, the variance alone."""
    likelihood, both = likelihood_of(in_domain), (in_domain, ood)
    if not likelihood.of_classes:
        return {likelihood.doubt: (in_domain.score(likelihood.doubt), ood.score(likelihood.doubt))}
    scores = {n: (s(in_domain), s(ood)) for n, s in SCORES.items() if all(map(s.applies, both))}
    return scores | {n: (s.score(in_domain), s.score(ood)) for n, s in fitted.items() if all(map(s.applies, both))}


def fit_scores(
    predict: Callable[[Any], Prediction], train: Iterable[Any], num_classes: int, *, output: nn.Linear | None = None
) -> dict[str, FittedScore]:
    """The scores of `afield.distance_scores`, fitted to hidden vectors of training data; none where there are none.

    output  the dense layer over the hidden vectors, if there is one: without it, some scores are left out
    """
    scores: dict[str, FittedScore] = {}
    for x, y in train:
        prediction = predict(x)
        if prediction.features is None or prediction.positions:  # they are of one hidden vector an input
            return {}
        if not scores:
            scores = make_all(prediction.features.shape[1], num_classes, output=output)
        for score in scores.values():
            score.update(prediction.features, y, prediction.logits)
    return scores


def output_layer(model: nn.Module) -> nn.Linear | None:
    """The dense layer over the hidden vectors of a model; None where its logits are made in another way."""
    layer = model.head.mean if isinstance(model, SNGP) else model[-1] if isinstance(model, nn.Sequential) else None
    return layer if isinstance(layer, nn.Linear) else None


def targets(data: Any) -> Tensor:
    """All targets of a data set, in order; from its `tensors` or `targets`, without reading inputs, if it has them."""
    if hasattr(data, "tensors"):
        return data.tensors[-1]
    return torch.as_tensor(data.targets if hasattr(data, "targets") else [y for _, y in data])


def _rejected(prediction: Prediction) -> float:
    """The part of the examples that p-values reject."""
    return 1 - float(prediction.accept(ALPHA).double().mean())


def _combined_nll(task: Task, predictions: Mapping[str, Prediction], ood_label: int) -> float:
    """The log loss of the test set and of all OOD sets, whose examples count as of one more class."""
    ood = [predictions[f"ood/{name}"] for name in task.ood]
    target = [targets(task.test), *(torch.full((len(p),), ood_label) for p in ood)]
    return METRICS["nll"](Prediction.cat([predictions["test"], *ood]), torch.cat(target))


def _distance_correlations(task: Task, predictions: Mapping[str, Prediction]) -> dict[str, float]:
    """How well the uncertainty of test and OOD inputs follows their distance to the training data, by two distances."""
    parts = {"test": task.test, **{f"ood/{name}": data for name, data in task.ood.items()}}
    score = likelihood_of(predictions["test"]).doubt
    uncertainty = torch.cat([predictions[part].score(score) for part in parts])
    x = torch.cat([data.tensors[0] for data in parts.values()])
    train, kinds = task.train.tensors[0], {"distance": nearest_distance, "mean_distance": mean_distance}
    return {
        str(MetricName("spearman", name)): distance_correlation(uncertainty, x, train, distance=distance)
        for name, distance in kinds.items()
    }
