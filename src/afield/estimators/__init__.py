"""scikit-learn estimators for tables: `SNGPClassifier` and `SNGPRegressor`.

    SNGPClassifier().fit(X, y).predict_proba(X)                 SNGPRegressor().fit(X, y).predict(X, return_std=True)

`fit` standardises the columns, holds out part of the rows, trains a residual network with a Gaussian-process output
by AdamW, goes back to where the held-out loss was least, fits the posterior to the other rows and calibrates on the
held-out ones. The result is `model_`, an `afield.SNGP` on raw rows: all that an estimator answers is in its
`Prediction`.

Departure from the paper: the first, widening layer is not bounded. Bounded, it could not learn which columns matter;
that is the part of a Gaussian process's length scales. Residual branches are bounded.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

try:
    from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.utils.class_weight import compute_class_weight
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import validate_data  # noqa: F401 (the youngest of all that is needed: 1.6)
except ImportError as error:
    raise ImportError('afield.estimators needs scikit-learn 1.6 or later: pip install "afield[sklearn]"') from error

from afield.estimators.estimator import Floats, SNGPEstimator, check_weights, parameters
from afield.estimators.rows import Rows


@parameters
class SNGPClassifier(ClassifierMixin, SNGPEstimator):
    """A classifier for tables that knows how far a row lies from its training data.

    class_weight  None, "balanced", or weights by class; multiplied with the sample weights

    `softmax(decision_function(X)) == predict_proba(X)`; with two classes the decision function is the log odds.

    >>> classifier = SNGPClassifier(max_iter=2, random_state=0).fit(x.numpy(), y.numpy())
    >>> classifier.predict_proba(x[:2].numpy()).shape
    (2, 3)
    >>> bool(classifier.p_value(100 + x[:1].numpy())[0] < 0.05)
    True
    """

    ridge: float = 0.03
    class_weight: dict[Any, float] | str | None = None

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train, fit the posterior, calibrate."""
        fresh = not (self.warm_start and hasattr(self, "model_"))
        table, labels, weight = self._table(X, y, sample_weight, fresh=fresh)
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
        return self._fit(self._rows(table, labels, weight), len(classes), "categorical", fresh=fresh)

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
        table, labels, weight = self._table(X, y, sample_weight, fresh=fresh)
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
        return self._fit(rows, len(known), "categorical", fresh=True) if fresh else self._partial_fit(rows)

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The most probable class (N,)."""
        labels = self._predict(X).labels.numpy()
        return self.classes_[labels]

    def predict_proba(self, X: ArrayLike) -> Floats:
        """Probabilities (N, K) in the order of `classes_`, calibrated, nearer to uniform the further a row lies."""
        probs = self._predict(X).probs
        assert probs is not None
        return probs.numpy()

    def decision_function(self, X: ArrayLike) -> Floats:
        """The logits that the probabilities are made of, (N, K); for two classes their difference (N,)."""
        logits = self._predict(X).adjusted_logits()
        return (logits if logits.shape[1] > 2 else logits[:, 1] - logits[:, 0]).numpy()

    def _table(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, *, fresh: bool
    ) -> tuple[Floats, NDArray[Any], Floats]:
        """Inputs, labels and weights of the rows whose weights are positive."""
        table, labels = self._validated(X, y=y, reset=fresh)
        check_classification_targets(labels)
        weight = check_weights(sample_weight, len(labels))
        return table[weight > 0], labels[weight > 0], weight[weight > 0]

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

    >>> regressor = SNGPRegressor(max_iter=2, random_state=0).fit(x.numpy(), x[:, 0].numpy())
    >>> mean, std = regressor.predict(x[:2].numpy(), return_std=True)
    >>> mean.shape, std.shape
    ((2,), (2,))
    """

    num_random_features: int = 512

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Train, fit the posterior, calibrate."""
        fresh = not (self.warm_start and hasattr(self, "model_"))
        return self._fit(*self._table(X, y, sample_weight, fresh=fresh), "gaussian", fresh=fresh)

    def partial_fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Learn from a part of a stream. The first call trains the network.

        Later calls keep the hidden layers: output weights and posterior end where all rows at once would put them.
        """
        fresh = not hasattr(self, "model_")
        rows, outputs = self._table(X, y, sample_weight, fresh=fresh)
        return self._fit(rows, outputs, "gaussian", fresh=True) if fresh else self._partial_fit(rows)

    def predict(self, X: ArrayLike, return_std: bool = False) -> Floats | tuple[Floats, Floats]:
        """The mean (N,) or (N, K), and with `return_std` the standard deviation of a new target, noise included."""
        prediction = self._predict(X)
        mean = prediction.mean * self._target_scale + self._target_shift
        std = prediction.std * self._target_scale
        if self._one_dimensional:
            mean, std = mean[:, 0], std[:, 0]
        return (mean.numpy(), std.numpy()) if return_std else mean.numpy()

    def _table(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None, *, fresh: bool) -> tuple[Rows, int]:
        table, numbers = self._validated(X, y=y, reset=fresh, multi_output=True, y_numeric=True)
        weight = check_weights(sample_weight, len(numbers))
        target = torch.tensor(np.asarray(numbers, dtype=np.float64).reshape(len(numbers), -1))
        rows = Rows(torch.tensor(table), target, torch.tensor(weight))[torch.tensor(weight > 0)]
        if fresh:
            self._target_shift, self._target_scale = rows.moments(rows.y)
            self._one_dimensional = numbers.ndim == 1
        elif target.shape[1] != self._target_shift.shape[0]:
            raise ValueError(f"Expected {self._target_shift.shape[0]} target column(s), got {target.shape[1]}.")
        return replace(rows, y=(rows.y - self._target_shift) / self._target_scale), target.shape[1]
