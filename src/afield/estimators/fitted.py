"""What a fitted estimator has, and what both kinds answer: distance, acceptance, policies, files."""

import math
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from afield.decide.policies import Policy, policy
from afield.estimators.network import columns_of, predict, predict_mean
from afield.estimators.noise import InputNoise
from afield.estimators.posterior import FEWEST_HELD_OUT
from afield.estimators.rows import Rows
from afield.estimators.saving import load_estimator, packed, save_estimator, unpacked
from afield.estimators.tables import UNKNOWN, Categories, Floats, check_table, encode
from afield.estimators.trees import Trees, with_trees
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction

FEWEST_TO_SPLIT = 96  # clusters of rows
_FINEST = 0.01  # alpha that people compare p-values with


class Fitted(BaseEstimator):
    """What a fitted estimator has and answers; not a dataclass, so that these are no parameters."""

    model_: SNGP
    classes_: NDArray[Any]
    n_iter_: int
    loss_curve_: list[float]
    held_out_loss_curve_: list[float]
    _architecture: dict[str, Any]
    _categories: Categories
    _held_out: Rows
    _noise: InputNoise | None = None
    _trees: Trees | None = None
    _answers: tuple[Prediction, Tensor] | None  # of held-out rows, as if they had not been learnt, and their targets
    _num_seen: int
    _seed: int

    def ood_score(self, X: ArrayLike) -> Floats:
        """How far (N,) each row lies from the training data: higher is further."""
        table = self._checked(X)
        return self._score(table, predict(self.model_, torch.tensor(table)))

    def score_samples(self, X: ArrayLike) -> Floats:
        """How much (N,) each row is like the training data: higher is nearer, as in scikit-learn's detectors."""
        return -self.ood_score(X)

    def p_value(self, X: ArrayLike) -> Floats:
        """How in-domain (N,) each row is: fresh in-domain rows fall to alpha or below at a rate of at most alpha.

        Warns where no p-value can be 0.01 or less; `accept` knows what it can promise.
        """
        prediction = self._calibrated(X)
        assert prediction.p_value is not None
        smallest = prediction.smallest_p_value or 0.0
        if smallest > _FINEST:
            warnings.warn(
                f"The smallest p-value is {smallest:.3g}, because there are {math.ceil(1 / smallest) - 1} held-out "
                "rows: comparing with less refuses nothing. Use accept(X, alpha=0.05), which says so, or fit on more "
                "rows.",
                stacklevel=2,
            )
        return prediction.p_value.numpy()

    def accept(self, X: ArrayLike, alpha: float = 0.05) -> NDArray[np.bool_]:
        """True (N,) where a row passes as in-domain; in-domain rows fail at a rate of at most alpha.

        Raises an error where the held-out rows are too few for this alpha.
        """
        return self._calibrated(X).accept(alpha).numpy()

    def policy(self, X: ArrayLike, y: ArrayLike | None = None, **goal: Any) -> Policy:
        """When to answer and when to refer, from rows that `fit` has not seen: see `afield.policy` for the goals.

        y  in its own labels or units; a `tolerance` is in the units of the target

        `decide` applies it.
        """
        prediction = self._in_units(self._predict(X))
        return policy(prediction, None if y is None else self._target(y), **goal)

    def decide(self, X: ArrayLike, policy: Policy) -> NDArray[np.bool_]:
        """True (N,) where the policy lets the estimator answer, False where it refers."""
        return policy.decide(self._in_units(self._predict(X))).numpy()

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        neighbours: int = 0,
        X: ArrayLike | None = None,
        y: ArrayLike | None = None,
        policy: Policy | None = None,
    ) -> Path:
        """Write the estimator to a folder, without pickle: `load` reads it, and `afield serve FOLDER` serves it.

        neighbours  how many rows of the training data `X` (N, columns) and `y` (N,) are kept beside it, for the page
        policy      of `policy`, by which the service then decides
        """
        check_is_fitted(self, "model_")
        train: list[Any] | None = None
        if X is not None:
            rows = torch.tensor(self._checked(X))
            train = [rows if y is None else (rows, self._target(y))]
        return save_estimator(self, folder, policy, neighbours=neighbours, train=train)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """The fitted estimator that `save` wrote."""
        return load_estimator(cls, folder)

    def _in_units(self, prediction: Prediction) -> Prediction:
        """The prediction in the units of the target."""
        return prediction

    def _variance_in_units(self, variance: Tensor) -> Tensor:
        """The variance of the function in the units of the target."""
        return variance

    def _target(self, y: ArrayLike) -> Tensor:
        """Targets as a prediction knows them: classes by their number, numbers (N, K)."""
        raise NotImplementedError

    def _standardized(self, target: Tensor) -> Tensor:
        """Targets as the model knows them."""
        return target

    def _checked(self, X: ArrayLike) -> Floats:
        check_is_fitted(self, "model_")
        return check_table(self, encode(X, self._categories), reset=False)

    def _predict(self, X: ArrayLike) -> Prediction:
        """All that the model knows about rows; a change in what never changed is refused at every level."""
        table = self._checked(X)
        return self._with_trees(table, self._refused(table, predict(self.model_, torch.tensor(table))))

    def _answer_rows(self, table: Floats) -> tuple[Prediction, Tensor, Floats]:
        """What the service answers to rows (N, d) of finite numbers, with codes in the place of categories.

        returns  the prediction in the units of the target, the variance of the function alone, and the score (N,)
        """
        prediction = predict(self.model_, torch.tensor(table))
        units = self._in_units(self._with_trees(table, self._refused(table, prediction)))
        assert prediction.variance is not None
        return units, self._variance_in_units(prediction.variance), self._score(table, prediction)

    def _with_trees(self, table: Floats, prediction: Prediction) -> Prediction:
        """The network's prediction with the trees in it."""
        return with_trees(self.model_, prediction, torch.tensor(table), self._trees)

    def _score(self, table: Floats, prediction: Prediction) -> Floats:
        # Without held-out rows a prediction does not know which score was asked for.
        name = None if self.get_params()["detection_score"] is None else self.model_.head.score
        score = prediction.score(name).numpy()
        # What never changed in training tells nothing about how far it is now: beyond all that was seen.
        strange = self._changes(table)
        reference = self.model_.head.reference
        beyond = np.maximum(score, float(reference.max()) if len(reference) else 0.0)
        return np.where(strange > 0, beyond + strange, score)

    def _refused(self, table: Floats, prediction: Prediction) -> Prediction:
        """The prediction with the smallest p-value for rows with a change in what never changed."""
        strange = torch.from_numpy(self._changes(table) > 0)
        p_value, smallest = prediction.p_value, prediction.smallest_p_value
        if p_value is None or smallest is None or not strange.any():
            return prediction
        return replace(prediction, p_value=torch.where(strange, smallest, p_value))

    def _mean(self, X: ArrayLike) -> Tensor:
        """The posterior mean (N, K) alone."""
        rows = torch.tensor(self._checked(X))
        mean = predict_mean(self.model_, rows)
        return mean if self._trees is None else self._trees.blend(mean, columns_of(self.model_)(rows))

    def _calibrated(self, X: ArrayLike) -> Prediction:
        prediction = self._predict(X)
        if prediction.p_value is None:
            raise ValueError(
                f"p-values compare with at least {FEWEST_HELD_OUT} held-out rows that differ, of groups that differ, "
                f"and this {type(self).__name__} has too few. Fit it on {FEWEST_TO_SPLIT} such rows or more, with a "
                "validation_fraction that is not None, or give X_val and y_val."
            )
        return prediction

    def _known_answers(self) -> tuple[Prediction, Tensor]:
        """Of held-out rows."""
        check_is_fitted(self, "model_")
        if self._answers is None:
            raise ValueError(
                f"A guarantee needs held-out rows, and this {type(self).__name__} has none. Fit it on "
                f"{FEWEST_TO_SPLIT} rows or more that differ, with a validation_fraction that is not None, or give "
                "X_val and y_val."
            )
        return self._answers

    def _changes(self, table: Floats) -> Floats:
        """In how many columns (N,) a row has what training cannot know: a category that was not there, or another
        value where there was one."""
        columns = columns_of(self.model_)
        constant = columns.constant().numpy()
        shift = columns.shift.numpy()
        moved = np.abs(table - shift) > 1e-9 * np.abs(shift)
        coded = np.array(columns.categories) > 0
        return ((moved & constant) | ((table == UNKNOWN) & coded)).sum(1).astype(np.float64)

    def __getstate__(self) -> dict[str, Any]:
        """Bounded layers do not pickle: the model goes as its tensors, and is built again."""
        state = dict(super().__getstate__())
        if "model_" in state:
            state["model_"] = packed(self.model_)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "model_" in state:
            state = {**state, "model_": unpacked(state["model_"], state["_architecture"])}
        super().__setstate__(state)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags
