"""Scores of a `Prediction`: how far an input lies from the training data. Higher is further.

max_probability       1 - max_k p_k
max_logit             -max_k m_k
entropy               -sum_k p_k log p_k
energy                -log sum_k exp(m_k)
dempster_shafer       K / (K + sum_k exp(z_k)),   z the mean-field logits, centred
variance              v, averaged over the classes where there is one per class
joined                what the variance, the logits and the classes know together (`gp.joined_score`): the default of a
                      calibrated classifier
mutual_information    entropy of the mean of the members - mean entropy of the members
gen                   sum over the M largest p_k of p_k^g (1 - p_k)^g,   M = min(K, 100), g = .1: the generalised
                      entropy of Liu, Lochman and Zach, CVPR 2023, "GEN"
region                -log sum_k exp(z_k), averaged over the region around a position (`regions`): the default of a
                      calibrated classifier of pixels
min_distance          min_k d_k, of a model whose logits are minus its distances d to prototypes (IsoMax+)

Each is a pure function of a `Prediction` that returns a tensor (N,); its line in `SCORES` says which fields it needs,
and it raises ValueError if the prediction lacks one. Scores that are fitted to training features first are in
`afield.distance_scores`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from afield.prediction.labels import mean_over_labels
from afield.prediction.positions import at_positions, input_score
from afield.prediction.prediction import Prediction
from afield.prediction.regions import input_mean, region_mean
from afield.registry import Registry


@dataclass(frozen=True)
class Score:
    """A function of predictions, and what it needs of them. Call it like the function.

    needs     names of fields of `Prediction` that must not be None
    by_label  of several labels: the mean over them, each taken as two classes
    suitable  whether the values of a prediction have a meaning for this score
    whole     it looks at all positions of an input together
    of_input  the score (N,) of inputs, of the scores (N, *P) of their positions and the prediction
    """

    function: Callable[[Prediction], Tensor]
    needs: tuple[str, ...] = ()
    suitable: Callable[[Prediction], bool] = lambda prediction: True
    by_label: bool = True
    whole: bool = False
    of_input: Callable[[Tensor, Prediction], Tensor] = lambda scores, prediction: input_score(scores, prediction.mask)

    def __call__(self, prediction: Prediction) -> Tensor:
        if self.whole:
            return self.function(prediction)
        return at_positions(prediction, self._of_rows)

    def _of_rows(self, prediction: Prediction) -> Tensor:
        if prediction.has_labels and self.by_label:
            return mean_over_labels(prediction, self.function)
        return self.function(prediction)

    def applies(self, prediction: Prediction) -> bool:
        """Whether the prediction has what this score needs. Calling the score is an error where it has not."""
        return all(getattr(prediction, field) is not None for field in self.needs) and self.suitable(prediction)


def max_probability(prediction: Prediction) -> Tensor:
    """One minus the largest probability.

    >>> torch.allclose(afield.scores.max_probability(p), 1 - p.confidence, atol=1e-6)
    True
    """
    probs = _need(prediction, "probs")
    # The sum of the others: 1 - max would have no digits left where the model is sure.
    return probs.scatter(-1, probs.argmax(-1, keepdim=True), 0.0).sum(-1)


def max_logit(prediction: Prediction) -> Tensor:
    """Minus the largest logit.

    >>> torch.equal(afield.scores.max_logit(p), -p.logits.amax(-1))
    True
    """
    return -symmetric(prediction.logits).amax(-1)


def entropy(prediction: Prediction) -> Tensor:
    """The entropy of the class probabilities.

    >>> bool((afield.scores.entropy(p) >= 0).all())
    True
    """
    return _entropy(_need(prediction, "probs"))


def gen(prediction: Prediction, *, power: float = 0.1, largest: int = 100) -> Tensor:
    """The generalised entropy of the largest class probabilities.

    >>> afield.scores.gen(p).shape == p.labels.shape
    True
    """
    probs = _need(prediction, "probs")
    p = probs.topk(min(largest, probs.shape[-1])).values
    # Of the largest, the sum of all others, as in max_probability: the small power makes much of the last digits.
    rest = torch.cat([max_probability(prediction)[..., None], 1 - p[..., 1:]], dim=-1)
    return (p * rest).pow(power).sum(-1)


def energy(prediction: Prediction) -> Tensor:
    """Minus the log of the sum of the exponentials of the logits.

    >>> torch.allclose(afield.scores.energy(p), -p.logits.logsumexp(-1))
    True
    """
    return -torch.logsumexp(symmetric(prediction.logits), dim=-1)


def dempster_shafer(prediction: Prediction) -> Tensor:
    """The Dempster-Shafer uncertainty of the mean-field logits; without a variance, of the logits themselves.

    >>> afield.scores.dempster_shafer(p).amax() <= 1
    tensor(True)
    """
    logits = symmetric(prediction.adjusted_logits())
    return torch.sigmoid(math.log(logits.shape[-1]) - _evidence(logits))


def variance(prediction: Prediction) -> Tensor:
    """The posterior variance, averaged over the outputs where each has its own.

    >>> torch.equal(afield.scores.variance(p), p.variance)
    True
    """
    v = _need(prediction, "variance")
    return v if v.dim() == 1 else v.mean(-1)


def joined(prediction: Prediction) -> Tensor:
    """The joined score, which a calibrated model computes with its prediction.

    >>> torch.equal(afield.scores.joined(p), p.score())
    True
    """
    asked = " At positions it is made by predict(..., joined=True)." if prediction.p_value is not None else ""
    return _need(prediction, "joined", asked)


def mutual_information(prediction: Prediction) -> Tensor:
    """The mutual information of the class and the member that predicts it.

    >>> both = afield.Prediction(torch.zeros(1, 2), members=torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    >>> afield.scores.mutual_information(both)  # two sure members that disagree: log 2
    tensor([0.6931])
    """
    members = _need(prediction, "members")
    return _entropy(members.mean(0)) - _entropy(members).mean(0)


def _has_regions(prediction: Prediction) -> bool:
    """One class at every position."""
    return bool(prediction.positions) and not prediction.has_labels


def region(prediction: Prediction) -> Tensor:
    """The energy of the region around each position.

    >>> probs = torch.rand(2, 3, 8, 8).softmax(1)
    >>> afield.scores.region(afield.Prediction(probs.log(), probs=probs)).shape
    torch.Size([2, 8, 8])
    """
    if not _has_regions(prediction):
        labels = " and several labels" if prediction.has_labels else ""
        raise ValueError(
            "The score region needs positions that have one class each, such as the pixels of an image, got a "
            f"prediction with positions {prediction.positions}{labels}. "
            "Rows, as prediction.rows() makes them, know no neighbours: take the score before."
        )
    probs = _need(prediction, "probs")
    values = -_evidence(symmetric(prediction.adjusted_logits().movedim(1, -1)))
    return region_mean(values, probs, prediction.labels, prediction.mask)


def _of_regions(scores: Tensor, prediction: Prediction) -> Tensor:
    return input_mean(scores, prediction.labels, _need(prediction, "probs").shape[1], prediction.mask)


def _has_no_positive_logits(prediction: Prediction) -> bool:
    """Logits that are minus distances cannot be positive."""
    return not bool((prediction.logits > 0).any())


def min_distance(prediction: Prediction) -> Tensor:
    """The distance to the nearest prototype.

    >>> afield.scores.min_distance(afield.Prediction(torch.tensor([[-3.0, -1.0]])))
    tensor([1.])
    """
    if not _has_no_positive_logits(prediction):
        raise ValueError("min_distance needs logits that are minus distances, as isomax-plus has, got positive ones.")
    return max_logit(prediction)


SCORES: Registry[Score] = Registry(
    "score",
    max_probability=Score(max_probability, needs=("probs",)),
    max_logit=Score(max_logit),
    entropy=Score(entropy, needs=("probs",)),
    gen=Score(gen, needs=("probs",)),
    energy=Score(energy),
    dempster_shafer=Score(dempster_shafer),
    variance=Score(variance, needs=("variance",), by_label=False),
    joined=Score(joined, needs=("joined",), by_label=False),
    region=Score(region, needs=("probs",), suitable=_has_regions, whole=True, of_input=_of_regions),
    mutual_information=Score(mutual_information, needs=("members",)),
    min_distance=Score(min_distance, suitable=_has_no_positive_logits),
)


def symmetric(logits: Tensor) -> Tensor:
    """One logit z as the two logits (-z / 2, z / 2), so that scores treat both classes alike.

    >>> afield.scores.symmetric(torch.tensor([[3.0]]))
    tensor([[-1.5000,  1.5000]])
    """
    return logits if logits.shape[-1] > 1 else torch.cat([-logits / 2, logits / 2], dim=-1)


def _entropy(probs: Tensor) -> Tensor:
    # The slope of p log p at zero is infinite, and times the slope of p, which is zero, no number.
    return torch.special.entr(torch.where(probs == 0, 1.0, probs)).sum(-1)


def _evidence(logits: Tensor) -> Tensor:
    """log sum_k exp(z_k - mean z): softmax leaves the common level of the logits free, and a network may have any."""
    return torch.logsumexp(logits - logits.mean(-1, keepdim=True), dim=-1)


def _need(prediction: Prediction, field: str, advice: str = "") -> Tensor:
    value = getattr(prediction, field)
    if value is None:
        raise ValueError(f"This score needs {field}, which the prediction lacks. Use another score or method.{advice}")
    return value
