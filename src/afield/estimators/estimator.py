"""What both scikit-learn estimators share: parameters, fitting, streams, validation, pickling."""

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from afield.estimators.network import Training, network, predict, standardize, train_network
from afield.estimators.posterior import FEWEST_HELD_OUT, calibrate_on, finish
from afield.estimators.rows import Rows, split
from afield.estimators.saving import save_estimator
from afield.estimators.stream import forget, learn, learn_keeping_reference
from afield.gp.likelihoods import LIKELIHOODS
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction
from afield.settings import Settings

Floats = NDArray[np.float64]
parameters = dataclass(kw_only=True, eq=False, repr=False)  # scikit-learn has its own repr, and compares by identity
_FEWEST_TO_SPLIT = 96
_LEAST_HELD_OUT = 24
_MOST_HELD_OUT = 2000  # rows that a stream keeps to calibrate on


class Fitted(BaseEstimator):
    """What a fitted estimator has and answers; not a dataclass, so that these are no parameters."""

    model_: SNGP
    classes_: NDArray[Any]
    n_iter_: int
    loss_curve_: list[float]
    held_out_loss_curve_: list[float]
    _architecture: dict[str, Any]
    _held_out: Rows
    _num_seen: int
    _seed: int

    def ood_score(self, X: ArrayLike) -> Floats:
        """How far (N,) each row lies from the training data: higher is further."""
        return self._predict(X).score().numpy()

    def p_value(self, X: ArrayLike) -> Floats:
        """How in-domain (N,) each row is: fresh in-domain rows fall to alpha or below at a rate of at most alpha."""
        p_value = self._predict(X).p_value
        if p_value is None:
            raise ValueError(
                f"p_value compares with at least {FEWEST_HELD_OUT} held-out rows, and this {type(self).__name__} has "
                f"held out {len(self._held_out)}. Fit it on {_FEWEST_TO_SPLIT} rows or more, with a "
                "validation_fraction that is not None."
            )
        return p_value.numpy()

    def save(
        self, folder: str | os.PathLike[str], *, neighbours: int = 0, X: ArrayLike | None = None, y: Any = None
    ) -> Path:
        """Write the model with its classes and columns to a folder, without pickle: `afield serve FOLDER` serves it.

        neighbours  how many rows of the training data `X` (N, columns) and `y` (N,) are kept beside it, for the page
        """
        check_is_fitted(self, "model_")
        train: list[Any] | None = None
        if X is not None:
            rows = torch.tensor(self._validated(X, reset=False))
            target = np.searchsorted(self.classes_, y) if y is not None and hasattr(self, "classes_") else y
            train = [rows if target is None else (rows, torch.as_tensor(np.asarray(target)))]
        return save_estimator(self, folder, neighbours=neighbours, train=train)

    def _predict(self, X: ArrayLike) -> Prediction:
        check_is_fitted(self, "model_")
        return predict(self.model_, torch.tensor(self._validated(X, reset=False)))

    def _validated(self, X: ArrayLike, *, reset: bool, **checks: Any) -> Any:
        """X as a float64 array, and y where it is among the checks; errors name bad rows and columns of text."""
        checks |= {"dtype": np.float64, "ensure_all_finite": False, "ensure_min_samples": 2 if reset else 1}
        try:
            checked = validate_data(self, X, reset=reset, **checks)
        except ValueError as error:
            if "could not convert string" not in str(error):
                raise
            text = [repr(name) for name, kind in getattr(X, "dtypes", {}).items() if not _is_number(kind)]
            columns = f" in column(s) {', '.join(text)}" * bool(text)
            raise ValueError(
                f"Expected numbers, got text{columns}: {error}. Encode such columns first, for example with "
                "OneHotEncoder in a ColumnTransformer."
            ) from error
        finite = np.isfinite(checked[0] if "y" in checks else checked).all(axis=1)
        if not finite.all():
            rows = np.flatnonzero(~finite)
            raise ValueError(
                f"Input X contains NaN or infinity in {len(rows)} of {len(finite)} rows (first: "
                f"{', '.join(map(str, rows[:5]))}, counted from 0). Impute or drop them, for example with "
                "SimpleImputer in a Pipeline."
            )
        return checked

    def __getstate__(self) -> dict[str, Any]:
        """Bounded layers do not pickle: the model goes as its tensors, and is built again."""
        state = dict(super().__getstate__())
        if "model_" in state:
            state["model_"] = dict(self.model_.state_dict())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "model_" in state:
            with torch.random.fork_rng(devices=()):
                model = network(**state["_architecture"])
            model.load_state_dict(state["model_"])
            state = {**state, "model_": model.eval()}
        super().__setstate__(state)


@parameters
class SNGPEstimator(Fitted):
    """The parameters and steps that both share; docs/scikit-learn.md describes the parameters."""

    depth: int = 2
    width: int = 128
    dropout: float = 0.1
    bound: float | None = 0.95
    num_random_features: int = 1024
    length_scale: float | None = None
    ridge: float = 1.0
    learning_rate: float = 3e-3
    head_learning_rate: float = 2e-2
    weight_decay: float = 1e-4
    batch_size: int | None = None
    max_iter: int = 60
    early_stopping: bool = True
    validation_fraction: float | None = 0.15
    n_iter_no_change: int = 15
    tol: float = 1e-4
    warm_start: bool = False
    random_state: int | np.random.RandomState | None = None
    verbose: bool = False

    def _fit(self, rows: Rows, outputs: int, likelihood: str, *, fresh: bool) -> Self:
        """`rows` have standardised targets and positive weights."""
        self._check_parameters()
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        numbers = LIKELIHOODS[likelihood].noisy
        groups = torch.zeros(len(rows)) if numbers else rows.y
        index, rest = split(groups, self._num_held_out(len(rows)), torch.Generator().manual_seed(self._seed))
        trained, held = rows[index].merged(), rows[rest]
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self._seed)
            if fresh:
                names = ("depth", "width", "dropout", "bound", "num_random_features", "length_scale", "ridge")
                architecture = {name: getattr(self, name) for name in names}
                architecture |= {"in_features": rows.x.shape[1], "out_features": outputs, "likelihood": likelihood}
                model = network(**architecture)
                standardize(model, trained)
            else:
                architecture, model = self._architecture, copy.deepcopy(self.model_)
            history = train_network(model, trained, held, self._training(len(trained)))
        finish(model, trained)
        if len(held) >= FEWEST_HELD_OUT:
            noise = float(model.head.noise)
            calibrate_on(model, held, stopped=self.early_stopping, seed=self._seed)
            if numbers or self.early_stopping:
                learn_keeping_reference(model, held, noise=noise)
        # Numbers can be unlearnt and serve again; what a classifier has learnt is no longer held out.
        kept = held if numbers or not self.early_stopping else held[:0]
        self._architecture, self._held_out, self._num_seen, self.model_ = architecture, kept, len(rows), model
        self.loss_curve_, self.held_out_loss_curve_, self.n_iter_ = history.loss, history.held_out, len(history.loss)
        return self

    def _partial_fit(self, rows: Rows) -> Self:
        """Rows of a stream: hidden layers stay, output weights and posterior learn, calibration runs again."""
        draws = np.random.default_rng([self._seed, self._num_seen]).random(len(rows))
        hold = torch.from_numpy(draws < (self.validation_fraction or 0.0))
        model, old = self.model_, self._held_out
        numbers = LIKELIHOODS[model.head.likelihood].noisy
        if numbers and len(old) >= FEWEST_HELD_OUT:
            forget(model, old)
        pool = old + rows[hold]
        self._held_out = held = pool[-_MOST_HELD_OUT:]
        if len(new := rows[~hold] + pool[:-_MOST_HELD_OUT]):
            learn(model, new)
        if len(held) >= FEWEST_HELD_OUT:
            noise = float(model.head.noise)
            calibrate_on(model, held, stopped=self.early_stopping, seed=self._seed)
            if numbers:
                learn_keeping_reference(model, held, noise=noise)
        self._num_seen += len(rows)
        return self

    def _num_held_out(self, rows: int) -> int:
        if self.validation_fraction is None or rows < _FEWEST_TO_SPLIT:
            return 0
        return max(_LEAST_HELD_OUT, round(self.validation_fraction * rows))

    def _training(self, rows: int) -> Training:
        settings = Settings(
            optimizer="adamw",
            epochs=self.max_iter,
            batch_size=self.batch_size or min(256, max(32, rows // 40)),
            learning_rate=self.learning_rate,
            head_learning_rate=self.head_learning_rate,
            weight_decay=self.weight_decay,
            head_weight_decay=self.weight_decay,
        )
        return Training(
            settings,
            self._seed,
            patience=self.n_iter_no_change if self.early_stopping else None,
            tol=self.tol,
            report=print if self.verbose else lambda line: None,
        )

    def _check_parameters(self) -> None:
        for name in ("depth", "width", "max_iter", "n_iter_no_change", "batch_size"):
            value = getattr(self, name)
            if (value is None and name != "batch_size") or (value is not None and value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
        if self.validation_fraction is not None and not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must lie strictly between 0 and 1, or be None, got {self.validation_fraction!r}."
            )


def check_weights(sample_weight: ArrayLike | None, rows: int) -> Floats:
    """Sample weights (N,) in float64, or an error."""
    if sample_weight is None:
        return np.ones(rows)
    weight = check_array(sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight")
    if weight.shape != (rows,):
        raise ValueError(f"sample_weight must have shape ({rows},), one for each row, got {weight.shape}.")
    if (weight < 0).any():
        raise ValueError("sample_weight must not be negative.")
    if not weight.any():
        raise ValueError("sample_weight is zero for every row: there is nothing to learn from.")
    return weight


def _is_number(kind: Any) -> bool:
    return np.issubdtype(kind, np.number) if isinstance(kind, np.dtype) else False
