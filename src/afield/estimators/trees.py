"""Boosted trees beside the network: the mean of the Gaussian process is (1 - w) g(x) + w t(x), its variance stays.

g is the network's mean and t that of gradient-boosted trees (scikit-learn's); both are logits for classes. Trees see
steps, and which columns matter; networks see smooth functions. w lies between 0 and 1 and is chosen on held-out rows,
as the number of rounds is. The variance is that of g: far from the training rows it takes the logits of the trees back
to uniform as it does those of the network. Scores and p-values look at the network alone.

A tree is kept as a complete one: node i has the children 2 i + 1 and 2 i + 2, the leaves come last. So it needs no
pickle.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from sklearn.base import clone
from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor
from torch import Tensor

from afield.estimators.network import columns_of
from afield.estimators.rows import Rows
from afield.estimators.tables import Floats
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction

MOST_ROUNDS = 300
_OF_CLASSES = GradientBoostingClassifier(learning_rate=0.05, max_depth=5, max_features="sqrt")
_OF_NUMBERS = GradientBoostingRegressor(learning_rate=0.1, max_depth=6, max_features=0.7)
_PART, _MOST_ROWS = 0.6, 3000  # of the rows, that a tree sees
_LEAST_LEAF = 3.0  # rows, by weight
_MOST_TREES = 3000
_CHUNK = 1 << 21  # rows times trees at a time
_WEIGHTS = torch.linspace(0, 1, 21, dtype=torch.float64)
_LEAST_ERROR = 1e-20
_TOWARDS_ONE = 10.0  # rows
_TOWARDS_HALF = 4.0  # times (w - 1/2)^2, in units of log loss: a few dozen held-out rows say little about w


@dataclass(frozen=True)
class Trees:
    """T trees of I inner nodes and I + 1 leaves, and their share in the mean.

    feature    (T, I)      the column that a node compares
    threshold  (T, I)      above it, in float32, a row goes right; infinite where a branch has ended
    value      (T, I + 1)  of the leaves, learning rate included
    output     (T,)        which of K outputs a tree adds to
    start      (K,)        the outputs without any tree
    weight     (K,)        w
    rounds     (R,)        of boosting, one number for classes, else one for each output
    spread     (K,)        of numbers: their variance, relative to what it is without trees
    """

    feature: Tensor
    threshold: Tensor
    value: Tensor
    output: Tensor
    start: Tensor
    weight: Tensor
    rounds: Tensor
    spread: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        """t (N, K) of standardised columns z (N, d)."""
        return torch.cat([self._of(part) for part in z.split(max(1, _CHUNK // max(1, len(self.value))))])

    def blend(self, mean: Tensor, z: Tensor, scale: float = 1.0) -> Tensor:
        """The mean (N, K) with the trees in it; `scale` is that of its logits."""
        return (1 - self.weight) * mean + self.weight * scale * self(z)

    def into(self, prediction: Prediction, z: Tensor, scale: float = 1.0) -> Prediction:
        """A network's prediction with the trees in its mean, and for numbers with their variance."""
        network = prediction.logits
        mean = self.blend(network, z, scale)
        if prediction.probs is not None:
            prediction = replace(prediction, logits=mean)
            return replace(prediction, probs=prediction.adjusted_logits().softmax(1))
        variance, noise = prediction.variance, prediction.noise
        assert variance is not None
        variance = variance if variance.dim() == 2 else variance[:, None]
        dispute = (network - mean).square() * torch.where(self.weight > 0, (1 - self.weight) / self.weight, 0.0)
        variance = self.spread * (variance + dispute)
        noise = None if noise is None else self.spread * noise * torch.ones_like(mean)
        return replace(prediction, logits=mean, variance=variance, noise=noise)

    def spread_by(self, prediction: Prediction, y: Tensor, weight: Tensor) -> "Trees":
        """With the spread that suits the errors of such predictions; a few rows leave it near 1."""
        assert prediction.variance is not None
        square = weight @ ((y - prediction.logits).square() / prediction.variance.reshape(len(y), -1))
        return replace(self, spread=(_TOWARDS_ONE + square) / (_TOWARDS_ONE + weight.sum()))

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _of(self, z: Tensor) -> Tensor:
        count, inner = self.feature.shape
        values, tree, node = z.float().double(), torch.arange(count), torch.zeros(len(z), count, dtype=torch.int64)
        while bool((node < inner).all()):  # all leaves have the same depth
            at = tree * inner + node
            right = values.gather(1, self.feature.flatten()[at]) > self.threshold.flatten()[at]
            node = 2 * node + 1 + right
        found = self.value.flatten()[tree * (inner + 1) + node - inner]
        return self.start.repeat(len(z), 1).index_add(1, self.output, found)


def with_trees(model: SNGP, prediction: Prediction, x: Tensor, trees: Trees | None) -> Prediction:
    """The network's prediction for rows x (N, d) with the trees in it, if there are any."""
    if trees is None:
        return prediction
    return trees.into(prediction, columns_of(model)(x), float(model.head.logit_scale))


def fit_trees(z: Tensor, rows: Rows, z_held: Tensor, held: Rows, mean: Tensor, rounds: int, seed: int) -> Trees | None:
    """Trees of the rows, with as many rounds and as large a share in the mean as suit the held-out rows.

    z, z_held  standardised columns of both
    mean       of the network (N, K), of the held-out rows

    returns  None where held-out rows want no trees
    """
    weight, grown = len(held) * held.weight / held.weight.sum(), []
    for k, (y, y_held) in enumerate(zip(_targets(rows), _targets(held), strict=True)):
        own = mean if _of_classes(y) else mean[:, k, None]
        most = max(1, min(rounds, _MOST_TREES // own.shape[1]))
        model = _boosted(z, y, rows.weight, most, seed)
        stages = [_outputs(stage, y) for stage in _stages(model, z_held)]
        best = int(torch.stack([_loss(stage, y_held, weight) for stage in stages]).argmin())
        losses = torch.stack([_loss((1 - w) * own + w * stages[best], y_held, weight) for w in _WEIGHTS])
        share = _WEIGHTS[(losses + _TOWARDS_HALF * (_WEIGHTS - 0.5).square()).argmin()]
        grown.append(_complete(model, z, y, best + 1, share))
    trees = _side_by_side(grown)
    return trees if bool((trees.weight > 0).any()) else None


def refit(trees: Trees, z: Tensor, rows: Rows, seed: int) -> Trees:
    """The same rounds, shares and spreads, of more rows."""
    grown = []
    for k, y in enumerate(_targets(rows)):
        rounds = int(trees.rounds[k])
        grown.append(_complete(_boosted(z, y, rows.weight, rounds, seed), z, y, rounds, trees.weight[k]))
    return replace(_side_by_side(grown), spread=trees.spread)


def _of_classes(y: Tensor) -> bool:
    return not y.is_floating_point()


def _targets(rows: Rows) -> tuple[Tensor, ...]:
    return (rows.y,) if _of_classes(rows.y) else rows.y.unbind(1)


def _boosted(z: Tensor, y: Tensor, weight: Tensor, rounds: int, seed: int) -> Any:
    model = clone(_OF_CLASSES if _of_classes(y) else _OF_NUMBERS)
    part = 1.0 if float(weight.sum()) > 2 * len(z) else _PART  # few rows with large weights: none may be missing
    model.set_params(n_estimators=rounds, random_state=seed, subsample=min(part, _MOST_ROWS / len(z)))
    model.set_params(min_weight_fraction_leaf=min(0.5, _LEAST_LEAF / (part * float(weight.sum()))))
    return model.fit(z.numpy(), y.numpy(), (weight / weight.mean()).numpy())


def _stages(model: Any, z: Tensor) -> Iterator[Tensor]:
    """The outputs after each round."""
    staged = getattr(model, "staged_decision_function", model.staged_predict)
    return (torch.from_numpy(stage.copy()) for stage in staged(z.numpy()))


def _outputs(stage: Tensor, y: Tensor) -> Tensor:
    """(N, K): two classes have one output in scikit-learn, for the second."""
    f = stage.reshape(len(stage), -1)
    return torch.cat([torch.zeros_like(f), f], dim=1) if _of_classes(y) and f.shape[1] == 1 else f


def _loss(f: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """-log p(y | f), summed over the rows; a number's with the noise that suits it best."""
    if _of_classes(y):
        return weight @ F.cross_entropy(f, y, reduction="none")
    return 0.5 * weight.sum() * (weight @ (f[:, 0] - y).square() / weight.sum()).clamp_min(_LEAST_ERROR).log()


def _complete(model: Any, z: Tensor, y: Tensor, rounds: int, share: Tensor) -> Trees:
    """The first rounds of a boosted model, each tree with all the branches it could have."""
    some = model.estimators_[:rounds]
    inner = 2**model.max_depth - 1
    feature, threshold = np.zeros((some.size, inner), dtype=np.int64), np.full((some.size, inner), np.inf)
    value = np.zeros((some.size, inner + 1))
    for tree, one in enumerate(some.flat):
        _place(one.tree_, 0, 0, feature[tree], threshold[tree], value[tree])
    outputs = len(model.classes_) if _of_classes(y) else 1
    trees = Trees(
        feature=torch.from_numpy(feature),
        threshold=torch.from_numpy(threshold),
        value=torch.from_numpy(model.learning_rate * value),
        output=torch.arange(some.size) % some.shape[1] + outputs - some.shape[1],
        start=torch.zeros(outputs, dtype=torch.float64),
        weight=share.expand(outputs),
        rounds=torch.tensor([rounds]),
        spread=torch.ones(outputs, dtype=torch.float64),
    )
    last = next(itertools.islice(_stages(model, z[:1]), rounds - 1, None))
    return replace(trees, start=(_outputs(last, y) - trees(z[:1]))[0])


def _side_by_side(grown: Sequence[Trees]) -> Trees:
    """Of each target, as those of all."""
    joined = {name: torch.cat([one.tensors()[name] for one in grown]) for name in grown[0].tensors()}
    first = np.cumsum([0, *(len(one.start) for one in grown)])
    output = torch.cat([one.output + int(k) for one, k in zip(grown, first, strict=False)])
    return Trees(**joined | {"output": output})


def _place(tree: Any, node: int, place: int, feature: NDArray[np.int64], threshold: Floats, value: Floats) -> None:
    """Write a node of scikit-learn's tree, and all below it, to its place in the complete one."""
    left, inner = tree.children_left[node], len(feature)
    if place >= inner:
        value[place - inner] = tree.value[node, 0, 0]
    elif left < 0:  # a leaf: everything below is on its left
        _place(tree, node, 2 * place + 1, feature, threshold, value)
    else:
        feature[place], threshold[place] = tree.feature[node], tree.threshold[node]
        _place(tree, left, 2 * place + 1, feature, threshold, value)
        _place(tree, tree.children_right[node], 2 * place + 2, feature, threshold, value)
