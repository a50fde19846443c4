"""Several labels of an input, each of which applies or not, whatever the others: K classifiers of two classes in one.

A prediction of labels has logits (N, K) and probabilities (N, K) that they apply. `label(p, k)` is the prediction of
one of them as that of one logit, with classes 0 and 1: metrics, policies, sets and scores of classes are those of it.
Scores of an input are means over its labels; the variance is of all of them.

Two p-values: that of the input rests on its score, and says whether it belongs here. That of a label compares its doubt

    u_k = min(p_k, 1 - p_k)

with those of held-out inputs for the same label: at most alpha of in-domain inputs have a smaller one, label by label.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from afield.prediction.prediction import Prediction


def label(prediction: "Prediction", k: int) -> "Prediction":
    """Of label k, as of two classes; its p-value is that of the label.

    k  number of the label, from 0

    returns  a `Prediction` with classes 0, it does not apply, and 1
    raises   ValueError if the outputs are not several labels; IndexError if there is no label k

    >>> p = afield.Prediction(torch.zeros(2, 3), probs=torch.full((2, 3), 0.8), likelihood="bernoulli")
    >>> afield.labels.label(p, 0).probs[0]
    tensor([0.2000, 0.8000])
    """
    check_has_labels(prediction, "label")
    if not -prediction.logits.shape[1] <= k < prediction.logits.shape[1]:
        raise IndexError(f"label {k} out of range for {prediction.logits.shape[1]} labels")
    logits, probs, members, variance = prediction.logits, prediction.probs, prediction.members, prediction.variance
    assert probs is not None
    return dataclasses.replace(
        prediction,
        logits=logits[:, [k]],
        variance=variance if variance is None or variance.dim() == 1 else variance[:, k],
        probs=torch.stack([1 - probs[:, k], probs[:, k]], 1),
        members=None if members is None else torch.stack([1 - members[..., k], members[..., k]], -1),
        p_value=None if prediction.label_p_value is None else prediction.label_p_value[:, k],
        label_p_value=None,
        fitted=None,
        default_score=None if prediction.label_p_value is None else "max_probability",
    )


def each_label(prediction: "Prediction") -> list["Prediction"]:
    """`label` of all.

    returns  a list with a `Prediction` for each label
    raises   ValueError if the outputs are not several labels

    >>> p = afield.Prediction(torch.zeros(2, 3), probs=torch.full((2, 3), 0.8), likelihood="bernoulli")
    >>> len(afield.labels.each_label(p))
    3
    """
    check_has_labels(prediction, "each_label")
    return [label(prediction, k) for k in range(prediction.logits.shape[1])]


def mean_over_labels(prediction: "Prediction", function: Callable[["Prediction"], Tensor]) -> Tensor:
    """A score (N,) of two classes, averaged over the labels."""
    return torch.stack([function(each) for each in each_label(prediction)], -1).mean(-1)


def doubts(prediction: "Prediction") -> Tensor:
    """u (N, K), by the logits: probabilities near 0 and 1 have no digits left."""
    return torch.sigmoid(-prediction.adjusted_logits().abs())


def label_p_values(prediction: "Prediction", reference: Tensor) -> Tensor:
    """(N, K), by the sorted doubts (n, K) of held-out examples."""
    own = doubts(prediction).detach().to(reference)
    below = torch.searchsorted(reference.T.contiguous(), own.T.contiguous()).T
    return ((1 + len(reference) - below) / (len(reference) + 1)).to(prediction.logits.dtype)


def label_metrics(
    prediction: "Prediction", target: Tensor, names: tuple[str, ...] = ("auroc", "nll", "ece")
) -> Mapping[str, Mapping[str, float]]:
    """Metrics of each label, under "0", "1" and so on, and their "mean".

    target  (N, K) zeros and ones
    names   of the metrics:

    auroc  of the label's probability, where it applies against where it does not; nan where all targets are alike
    else   a name of `afield.metrics.METRICS`

    returns  a mapping of mappings: label, metric, number
    raises   ValueError if the shapes differ

    >>> logits = torch.tensor([[2.0, 1.0], [-2.0, -1.0]])
    >>> p = afield.Prediction(logits, probs=logits.sigmoid(), likelihood="bernoulli")
    >>> afield.labels.label_metrics(p, torch.tensor([[1, 1], [0, 0]]), ("auroc",))["mean"]
    {'auroc': 1.0}
    """
    from afield.prediction.metrics import METRICS, auroc  # metrics read predictions

    found: dict[str, dict[str, float]] = {}
    if target.shape != prediction.logits.shape:
        raise ValueError(f"Expected labels of shape {tuple(prediction.logits.shape)}, got {tuple(target.shape)}.")
    for k, each in enumerate(each_label(prediction)):
        y, logits = target[:, k].to(each.logits.device).long(), each.adjusted_logits()[:, 0]
        both = 0 < int(y.sum()) < len(y)
        found[str(k)] = {
            name: (auroc(logits[y == 0], logits[y == 1]) if both else float("nan"))
            if name == "auroc"
            else METRICS[name](each, y)
            for name in names
        }
    whole = torch.tensor([[own[name] for name in names] for own in found.values()], dtype=torch.float64)
    return found | {"mean": dict(zip(names, whole.nanmean(0).tolist(), strict=True))}


def check_has_labels(prediction: "Prediction", what: str) -> None:
    """An error unless the outputs are several labels."""
    if not prediction.has_labels or prediction.positions:
        raise ValueError(
            f'{what} takes predictions of several labels (likelihood="bernoulli", more than one output), '
            f"got a {prediction.likelihood} prediction with logits {tuple(prediction.logits.shape)}."
        )
