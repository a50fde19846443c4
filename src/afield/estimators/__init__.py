"""scikit-learn estimators for tables: `SNGPClassifier` and `SNGPRegressor`.

    SNGPClassifier().fit(X, y).predict_proba(X)                 SNGPRegressor().fit(X, y).predict(X, return_std=True)

`fit` standardises the columns, holds out part of the rows, trains a small ensemble of residual networks with a
Gaussian-process output by AdamW, goes back to where the held-out loss was least, fits the posterior to the other rows
and calibrates on the held-out ones. Boosted trees have a share in the mean where held-out rows ask for it (`trees`).
`model_` is the network, an `afield.SNGP` on raw rows and, for numbers, in standardised targets: all that an estimator
answers is made of its `Prediction`, with the trees in the mean.

Departures from the paper: the first, widening layer is not bounded. Bounded, it could not learn which columns matter;
that is the part of a Gaussian process's length scales. Residual branches are bounded on request: on tables the
networks are shallow, and a bound has cost accuracy and gained no distance (docs/scikit-learn.md).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

try:
    from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.utils._param_validation import StrOptions
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import validate_data  # noqa: F401 (the youngest of all that is needed: 1.6)
except ImportError as error:
    raise ImportError('afield.estimators needs scikit-learn 1.6 or later: pip install "afield[sklearn]"') from error

from afield.decide.conformal import prediction_intervals, prediction_sets
from afield.decide.policies import Policy
from afield.estimators.estimator import SNGPEstimator, parameters, with_groups
from afield.estimators.noise import of_targets
from afield.estimators.rows import Rows
from afield.estimators.scores import OF_CLASSES, OF_NUMBERS
from afield.estimators.tables import Floats, check_groups, check_table, check_weights, encode, learn_categories
from afield.prediction.prediction import Prediction


@parameters
class SNGPClassifier(ClassifierMixin, SNGPEstimator):
    """A classifier for tables that knows how far a row lies from its training data.

    class_weight  None, "balanced", or weights by class; multiplied with the sample weights

    `softmax(decision_function(X)) == predict_proba(X)`; with two classes the decision function is the log odds.

    >>> classifier = SNGPClassifier(random_state=0).fit(x.numpy(), y.numpy())
    >>> classifier.predict_proba(x[:2].numpy()).shape
    (2, 3)
    >>> classifier.accept(100 + x[:1].numpy(), alpha=0.05).tolist()
    [False]
    """

    ridge: float = 0.03
    class_weight: dict[Any, float] | str | None = None

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **SNGPEstimator._parameter_constraints,
        "detection_score": [StrOptions(OF_CLASSES), None],
        "class_weight": [dict, StrOptions({"balanced"}), None],
    }

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        groups: ArrayLike | None = None,
        X_val: ArrayLike | None = None,
        y_val: ArrayLike | None = None,
    ) -> Self:
        """Train, fit the posterior, calibrate.

        groups        (N,): rows of one group are held out together, or trained on together. p-values are then about
                      rows of groups that were not there
        X_val, y_val  rows to stop and to calibrate on, in the place of a part of X
        """
        fresh = not (self.warm_start and hasattr(self, "model_"))
        table, labels, weight, group = self._table(X, y, sample_weight, groups, fresh=fresh)
        classes = np.unique(labels)
        if len(classes) < 2:
            raise ValueError(
                f"SNGPClassifier needs rows of at least 2 classes with positive weights, got 1 class: {classes[0]!r}."
            )
        if not fresh and not np.array_equal(classes, self.classes_):
            raise ValueError(
                f"warm_start goes on with the classes {self.classes_.tolist()}, got {classes.tolist()}. "
                "Use warm_start=False."
            )
        self.classes_ = classes
        rows = with_groups(self._rows(table, labels, weight), group)
        held = self._validation_rows(X_val, y_val)
        return self._fit(rows, held, len(classes), "categorical", fresh=fresh)

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: Sequence[Any] | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Learn from a part of a stream. The first call trains the network; it needs all `classes` to come.

        Later calls keep the hidden layers: output weights and posterior learn the new rows without the old ones.
        """
        fresh = not hasattr(self, "model_")
        table, labels, weight, _ = self._table(X, y, sample_weight, None, fresh=fresh)
        if self.class_weight == "balanced":
            raise ValueError('class_weight="balanced" needs all rows at once: give partial_fit weights by class.')
        if fresh and classes is None:
            raise ValueError("The first call of partial_fit needs classes=, all classes that the stream may bring.")
        known = self.classes_ if not fresh else np.unique(np.asarray(classes))
        for given in (labels, known if classes is None else np.asarray(classes)):
            if len(strange := np.setdiff1d(given, known)):
                raise ValueError(f"The stream's classes are {known.tolist()}, got also {strange.tolist()}.")
        if len(known) < 2:
            raise ValueError(f"SNGPClassifier needs at least 2 classes, got 1 class: {known.tolist()}.")
        self.classes_ = known
        rows = self._rows(table, labels, weight)
        if not fresh:
            return self._partial_fit(rows)
        return self._fit(rows, None, len(known), "categorical", fresh=True, stream=True)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable class (N,)."""
        index = self._mean(X).argmax(1).numpy()  # the variance is shared, and cannot change it
        return self.classes_[index]

    def predict_proba(self, X: ArrayLike) -> Floats:
        """Probabilities (N, K) in the order of `classes_`, calibrated, nearer to uniform the further a row lies."""
        probs = self._predict(X).probs
        assert probs is not None
        return probs.numpy()

    def predict_set(self, X: ArrayLike, coverage: float = 0.9, **options: Any) -> NDArray[np.bool_]:
        """Which classes (N, K), in the order of `classes_`, are possible: the right one at a rate of `coverage`.

        From the rows that `fit` has held out; options are those of `afield.prediction_sets`.
        """
        prediction, target = self._known_answers()
        return prediction_sets(prediction, target, level=coverage, **options).sets(self._predict(X)).numpy()

    def answer(self, X: ArrayLike, policy: Policy) -> NDArray[Any]:
        """The class (N,) of least expected cost by a policy, which is the most probable one unless errors differ."""
        return self.classes_[policy.answer(self._predict(X)).numpy()]

    def decision_function(self, X: ArrayLike) -> Floats:
        """The logits that the probabilities are made of, (N, K); for two classes their difference (N,)."""
        logits = self._predict(X).adjusted_logits()
        return (logits if logits.shape[1] > 2 else logits[:, 1] - logits[:, 0]).numpy()

    def _target(self, y: ArrayLike) -> Tensor:
        labels = np.asarray(y)
        if len(strange := np.setdiff1d(labels, self.classes_)):
            raise ValueError(f"The classes are {self.classes_.tolist()}, got also {strange.tolist()}.")
        return torch.from_numpy(np.searchsorted(self.classes_, labels))

    def _table(
        self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None, groups: ArrayLike | None, *, fresh: bool
    ) -> tuple[Floats, NDArray[Any], Floats, NDArray[np.int64] | None]:
        """Inputs, labels, weights and groups of the rows whose weights are positive."""
        self._validate_params()
        if fresh:
            self._categories = learn_categories(X, self.categorical_features)
        table, labels = check_table(self, encode(X, self._categories), y=y, reset=fresh)
        check_classification_targets(labels)
        weight, group = check_weights(sample_weight, len(labels)), check_groups(groups, len(labels))
        some = weight > 0
        return table[some], labels[some], weight[some], None if group is None else group[some]

    def _rows(self, table: Floats, labels: NDArray[Any], weight: Floats) -> Rows:
        index = np.searchsorted(self.classes_, labels)
        if self.class_weight == "balanced":
            count = np.bincount(index, weights=weight, minlength=len(self.classes_))
            by_class = weight.sum() / (len(self.classes_) * count)
        else:
            by_class = compute_class_weight(self.class_weight, classes=self.classes_, y=labels)
        return Rows(torch.tensor(table), torch.tensor(index), torch.tensor(weight * by_class[index]))


@parameters
class SNGPRegressor(MultiOutputMixin, RegressorMixin, SNGPEstimator):
    """A regressor for tables, of one target or several, whose standard deviation grows away from its training data.

    >>> regressor = SNGPRegressor(random_state=0).fit(x.numpy(), x[:, 0].numpy())
    >>> mean, std = regressor.predict(x[:2].numpy(), return_std=True)
    >>> mean.shape, std.shape
    ((2,), (2,))


    noise  "input": of the targets, with a variance that varies with the input where held-out rows ask for it;
           "constant": everywhere alike
    """

    noise: str = "input"

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        **SNGPEstimator._parameter_constraints,
        "detection_score": [StrOptions(OF_NUMBERS), None],
        "noise": [StrOptions({"input", "constant"})],
    }

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        sample_weight: ArrayLike | None = None,
        *,
        groups: ArrayLike | None = None,
        X_val: ArrayLike | None = None,
        y_val: ArrayLike | None = None,
    ) -> Self:
        """Train, fit the posterior, calibrate; arguments are those of `SNGPClassifier.fit`."""
        fresh = not (self.warm_start and hasattr(self, "model_"))
        rows, outputs = self._table(X, y, sample_weight, groups, fresh=fresh)
        return self._fit(rows, self._validation_rows(X_val, y_val), outputs, "gaussian", fresh=fresh)

    def partial_fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Learn from a part of a stream. The first call trains the network.

        Later calls keep the hidden layers: output weights and posterior end where all rows at once would put them.
        """
        fresh = not hasattr(self, "model_")
        rows, outputs = self._table(X, y, sample_weight, None, fresh=fresh)
        if not fresh:
            return self._partial_fit(rows)
        return self._fit(rows, None, outputs, "gaussian", fresh=True, stream=True)

    def predict(self, X: ArrayLike, return_std: bool = False) -> Floats | tuple[Floats, Floats]:
        """The mean (N,) or (N, K), and with `return_std` the standard deviation of a new target, noise included."""
        if not return_std:
            return self._shaped(self._mean(X) * self._target_scale + self._target_shift)
        prediction = self._in_units(self._predict(X))
        return self._shaped(prediction.mean), self._shaped(prediction.std)

    def predict_interval(self, X: ArrayLike, coverage: float = 0.9) -> tuple[Floats, Floats]:
        """Lower and upper ends between which the target lies at a rate of `coverage`, whatever its distribution.

        From the errors of the rows that `fit` has held out, in standard deviations of a new target: where that is
        larger, the interval is wider. (Split conformal intervals.)
        """
        prediction, target = self._known_answers()
        ends = prediction_intervals(prediction, target, level=coverage).intervals(self._targets(self._predict(X)))
        low, high = (self._shaped(end * self._target_scale + self._target_shift) for end in ends)
        return low, high

    def predict_quantile(self, X: ArrayLike, q: float = 0.5) -> Floats:
        """The number (N,) or (N, K) below which a new target lies with probability q, by the predicted normal one."""
        if not 0 < q < 1:
            raise ValueError(f"q must lie strictly between 0 and 1, got {q}.")
        prediction = self._in_units(self._predict(X))
        z = float(torch.special.ndtri(torch.tensor(q, dtype=torch.float64)))
        return self._shaped(prediction.mean + z * prediction.std)

    def answer(self, X: ArrayLike, policy: Policy) -> Floats:
        """The mean, in the units of the target; `decide` says where it may be given."""
        return self._shaped(policy.answer(self._in_units(self._predict(X))))

    def _targets(self, prediction: Prediction) -> Prediction:
        """Of the targets, in standardised units: the variance has the noise."""
        return of_targets(self.model_, prediction, self._noise)

    def _in_units(self, prediction: Prediction) -> Prediction:
        standard = self._targets(prediction)
        assert standard.variance is not None
        return replace(
            standard,
            logits=standard.logits * self._target_scale + self._target_shift,
            variance=standard.variance * self._target_scale.square(),
        )

    def _variance_in_units(self, variance: Tensor) -> Tensor:
        scale = self._target_scale.square()
        return variance * scale if len(scale) == 1 or variance.dim() == 2 else variance[:, None] * scale

    def _shaped(self, values: Tensor) -> Floats:
        return (values[:, 0] if self._one_dimensional else values).numpy()

    def _target(self, y: ArrayLike) -> Tensor:
        return torch.tensor(np.asarray(y, dtype=np.float64).reshape(len(np.asarray(y)), -1))

    def _standardized(self, target: Tensor) -> Tensor:
        return (target - self._target_shift) / self._target_scale

    def _table(
        self, X: Any, y: ArrayLike, sample_weight: ArrayLike | None, groups: ArrayLike | None, *, fresh: bool
    ) -> tuple[Rows, int]:
        self._validate_params()
        if fresh:
            self._categories = learn_categories(X, self.categorical_features)
        table, given = check_table(
            self, encode(X, self._categories), y=y, reset=fresh, multi_output=True, y_numeric=True
        )
        weight, group = check_weights(sample_weight, len(given)), check_groups(groups, len(given))
        target = torch.tensor(np.asarray(given, dtype=np.float64).reshape(len(given), -1))
        rows = Rows(torch.tensor(table), target, torch.tensor(weight))
        rows = with_groups(rows, group)[torch.tensor(weight > 0)]
        if fresh:
            self._target_shift, scale = rows.moments(rows.y)
            self._target_scale = torch.where(scale > 0, scale, torch.ones_like(scale))
            self._one_dimensional = given.ndim == 1
        elif target.shape[1] != self._target_shift.shape[0]:
            raise ValueError(f"Expected {self._target_shift.shape[0]} target column(s), got {target.shape[1]}.")
        return replace(rows, y=self._standardized(rows.y)), target.shape[1]
