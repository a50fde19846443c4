"""What both scikit-learn estimators share: parameters, fitting, streams."""

import copy
import warnings
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils._param_validation import Interval, StrOptions

from afield.estimators.fitted import FEWEST_TO_SPLIT, Fitted
from afield.estimators.network import adapt, columns_of, network, predict_mean
from afield.estimators.noise import fit_noise
from afield.estimators.posterior import (
    FEWEST_HELD_OUT,
    LEAST_NOISE,
    answers_of,
    calibrate_on,
    finish,
    raise_noise,
    settle_noise,
)
from afield.estimators.rows import Rows, split
from afield.estimators.stream import forget, learn, learn_keeping_reference
from afield.estimators.tables import check_table, encode
from afield.estimators.training import History, Training, train_network
from afield.estimators.trees import MOST_ROUNDS, Trees, fit_trees, refit
from afield.gp.likelihoods import LIKELIHOODS
from afield.model.sngp_model import SNGP
from afield.settings import Settings

parameters = dataclass(kw_only=True, eq=False, repr=False)  # scikit-learn has its own repr, and compares by identity
_LEAST_HELD_OUT, _MOST_HELD_OUT = 24, 4000  # clusters of rows
_MOST_OF_A_STREAM = 2000  # rows that a stream keeps to calibrate on
_FEWEST_TO_TRY = 12  # clusters of rows
_WIDE, _NARROW = 64, 16
_AT_ONCE = 5  # epochs
_MANY = 20_000  # rows


def _positive(*others: Any, closed: str = "neither", right: float | None = None) -> list[Any]:
    return [Interval(Real, 0, right, closed=closed), *others]


def _whole(*others: Any) -> list[Any]:
    return [Interval(Integral, 1, None, closed="left"), *others]


@parameters
class SNGPEstimator(Fitted):
    """The parameters and steps that both share; docs/scikit-learn.md describes the parameters."""

    n_members: int | None = None
    depth: int = 2
    width: int | None = None
    dropout: float = 0.25
    bound: float | None = None
    num_random_features: int | None = None
    length_scale: float | None = None
    ridge: float = 1.0
    learning_rate: float = 3e-3
    head_learning_rate: float = 1e-2
    weight_decay: float = 1e-4
    batch_size: int | None = None
    max_iter: int | None = None
    early_stopping: bool = True
    validation_fraction: float | None = 0.15
    n_iter_no_change: int = 15
    tol: float = 1e-4
    trees: int | None = None
    detection_score: str | None = None
    categorical_features: ArrayLike | str | None = "from_dtype"
    warm_start: bool = False
    random_state: int | np.random.RandomState | None = None
    verbose: bool = False

    _parameter_constraints: ClassVar[dict[str, Any]] = {
        "n_members": _whole(None),
        "depth": _whole(),
        "width": _whole(None),
        "dropout": _positive(closed="left", right=1),
        "bound": _positive(None),
        "num_random_features": _whole(None),
        "length_scale": _positive(None),
        "ridge": [Interval(Real, 1e-12, 1e12, closed="both")],
        "learning_rate": _positive(),
        "head_learning_rate": _positive(),
        "weight_decay": _positive(closed="left"),
        "batch_size": _whole(None),
        "max_iter": _whole(None),
        "early_stopping": ["boolean"],
        "validation_fraction": _positive(None, right=1),
        "n_iter_no_change": _whole(),
        "tol": _positive(closed="left"),
        "trees": [Interval(Integral, 0, None, closed="left"), None],
        "categorical_features": [StrOptions({"from_dtype"}), "array-like", None],
        "warm_start": ["boolean"],
        "random_state": ["random_state"],
        "verbose": ["verbose"],
    }

    def _fit(
        self, rows: Rows, held: Rows | None, outputs: int, likelihood: str, *, fresh: bool, stream: bool = False
    ) -> Self:
        """`rows` and `held`, if rows to validate on are given, have standardised targets and positive weights.

        stream  of which trees, that cannot learn further rows, have no part
        """
        self._seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        numbers = LIKELIHOODS[likelihood].noisy
        if held is None:
            clusters = rows.clusters()
            count = self._num_held_out(len(rows), int(clusters.max()) + 1)
            strata = torch.zeros(len(rows)) if numbers else rows.y
            index, rest = split(strata, clusters, count, torch.Generator().manual_seed(self._seed))
            trained, held = rows[index].merged(), rows[rest]
        else:
            trained = rows.merged()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self._seed)
            if fresh:
                model, architecture, history = self._train(
                    self._new_architecture(rows, outputs, likelihood), trained, held
                )
            else:
                architecture, model = self._architecture, copy.deepcopy(self.model_)
                history = train_network(model, trained, held, self._training(len(trained)))
        self._warn_if_falling(history)
        finish(model, trained, self.detection_score)
        if numbers:
            self._settle_noise(model, architecture, trained, held)
        self._architecture, self._num_seen, self.model_ = architecture, len(rows), model
        learns = numbers or self.early_stopping
        self._trees = None if stream else self._grow(trained, held)
        self._calibrate(held, learns=learns, rows=trained)
        if self._trees is not None and learns:
            every = (trained + held).merged()
            self._trees = refit(self._trees, columns_of(model)(every.x), every, self._seed)
        # Numbers can be unlearnt and serve again; what a classifier has learnt is no longer held out.
        again = numbers and len(held) >= FEWEST_HELD_OUT
        self._held_out = held if again or not learns else held[:0]
        self.loss_curve_, self.held_out_loss_curve_, self.n_iter_ = history.loss, history.held_out, len(history.loss)
        return self

    def _grow(self, rows: Rows, held: Rows) -> Trees | None:
        """Boosted trees beside the network, where held-out rows ask for them."""
        rounds = (MOST_ROUNDS if len(rows) + len(held) <= _MANY else 0) if self.trees is None else self.trees
        if not rounds or not self.early_stopping or len(held) < FEWEST_HELD_OUT:
            return None
        columns, mean = columns_of(self.model_), predict_mean(self.model_, held.x)
        return fit_trees(columns(rows.x), rows, columns(held.x), held, mean, rounds, self._seed)

    def _train(self, architecture: dict[str, Any], rows: Rows, held: Rows) -> tuple[SNGP, dict[str, Any], History]:
        """Train a new network; where a classifier is at its best at once, see whether a narrow one is better."""
        found = [self._train_one(architecture, rows, held)]
        loss = found[0][2].held_out
        narrow = self.width is None and self.early_stopping
        if narrow and LIKELIHOODS[architecture["likelihood"]].of_classes and loss and int(np.argmin(loss)) < _AT_ONCE:
            found.append(self._train_one(architecture | {"width": _NARROW}, rows, held))
        return min(found, key=lambda one: min(one[2].watched))

    def _train_one(self, architecture: dict[str, Any], rows: Rows, held: Rows) -> tuple[SNGP, dict[str, Any], History]:
        torch.manual_seed(self._seed)  # of each alike
        model = network(**architecture)
        adapt(model, rows)
        return model, architecture, train_network(model, rows, held, self._training(len(rows)))

    def _settle_noise(self, model: SNGP, architecture: dict[str, Any], rows: Rows, held: Rows) -> None:
        """Find the noise of numbers on held-out rows; where none are, on those of a trial that is then thrown away."""
        if len(held) >= FEWEST_HELD_OUT:
            return settle_noise(model, rows, held)
        clusters = rows.clusters()
        count = int(clusters.max()) + 1
        if count < _FEWEST_TO_TRY:
            return None
        index, rest = split(torch.zeros(len(rows)), clusters, count // 3, torch.Generator().manual_seed(self._seed))
        part, others = rows[index], rows[rest]
        with torch.random.fork_rng(devices=()):
            trial, _, _ = self._train_one(architecture, part, others[:0])
        finish(trial, part)
        settle_noise(trial, part, others)
        return raise_noise(model, rows, float(trial.head.noise))

    def _calibrate(self, held: Rows, *, learns: bool, rows: Rows | None = None) -> None:
        """Calibrate on held-out rows, keep what a guarantee needs of them, and learn them if they shall be learnt.

        rows  training rows, from which the noise of numbers is found anew
        """
        model = self.model_
        self._answers = None
        if len(held) < FEWEST_HELD_OUT:
            if len(held) and learns:
                learn(model, held)
            return
        numbers = LIKELIHOODS[model.head.likelihood].noisy
        noise = float(model.head.noise)
        calibrate_on(model, held, stopped=self.early_stopping, seed=self._seed, trees=self._trees)
        alone = held.merged().alone()
        if not numbers:
            self._answers = answers_of(model, alone, trees=self._trees)
        if learns:
            learn_keeping_reference(model, held, noise=noise)
        if numbers:
            if rows is not None:
                varies = getattr(self, "noise", "constant") == "input" and float(model.head.noise) > LEAST_NOISE
                self._noise = fit_noise(model, rows, held.merged(), self._seed) if varies else None
            if self._trees is not None:
                told = answers_of(model, held.merged(), self._noise, self._trees)
                self._trees = self._trees if told is None else self._trees.spread_by(*told, held.merged().weight)
            self._answers = answers_of(model, alone, self._noise, self._trees)

    def _partial_fit(self, rows: Rows) -> Self:
        """Rows of a stream: hidden layers stay, output weights and posterior learn, calibration runs again."""
        self._trees = None  # which cannot learn them
        draws = np.random.default_rng([self._seed, self._num_seen]).random(len(rows))
        hold = torch.from_numpy(draws < (self.validation_fraction or 0.0))
        model, old = self.model_, self._held_out
        numbers = LIKELIHOODS[model.head.likelihood].noisy
        if numbers and len(old) >= FEWEST_HELD_OUT:
            forget(model, old)
        pool = old + rows[hold]
        self._held_out = held = pool[-_MOST_OF_A_STREAM:]
        if len(new := rows[~hold] + pool[:-_MOST_OF_A_STREAM]):
            learn(model, new)
        self._calibrate(held, learns=numbers)
        self._num_seen += len(rows)
        return self

    def _validation_rows(self, X_val: Any, y_val: Any) -> Rows | None:
        """What the user gives to validate on, as rows with standardised targets."""
        if (X_val is None) != (y_val is None):
            raise ValueError("fit expects X_val and y_val together, or neither.")
        if X_val is None:
            return None
        table, target = check_table(self, encode(X_val, self._categories), reset=False), self._target(y_val)
        if len(table) != len(target):
            raise ValueError(f"X_val has {len(table)} rows, y_val has {len(target)}.")
        return Rows(torch.tensor(table), self._standardized(target), torch.ones(len(table), dtype=torch.float64))

    def _new_architecture(self, rows: Rows, outputs: int, likelihood: str) -> dict[str, Any]:
        categories = [len(self._categories.get(j, ())) for j in range(rows.x.shape[1])]
        names = ("depth", "dropout", "bound", "length_scale", "ridge")
        architecture: dict[str, Any] = {name: getattr(self, name) for name in names} | {"width": self.width or _WIDE}
        members = self.n_members or (4 if len(rows) <= _MANY else 1)
        features = self.num_random_features
        if features is None:  # a power of two, of about twice the rows
            most = 512 if LIKELIHOODS[likelihood].noisy else 1024
            if len(rows) > _MANY:  # whose sums, in float64, would take as long as the training
                most //= 2
            features = members * max(1, min(most, max(128, 2 ** round(np.log2(2 * len(rows))))) // members)
        architecture |= {"members": members, "num_random_features": features}
        return architecture | {"categories": categories, "out_features": outputs, "likelihood": likelihood}

    def _num_held_out(self, rows: int, clusters: int) -> int:
        """How many clusters."""
        if self.validation_fraction is None or rows < FEWEST_TO_SPLIT or clusters < 2:
            return 0
        count = round(self.validation_fraction * clusters)
        if clusters < FEWEST_TO_SPLIT:  # a few large groups
            return max(1, count) if clusters < rows // 2 else 0
        return min(_MOST_HELD_OUT, max(_LEAST_HELD_OUT, count))

    def _training(self, rows: int) -> Training:
        settings = Settings(
            optimizer="adamw",
            # Few enough that about a million rows pass in all.
            epochs=self.max_iter or max(5, min(60, 1_000_000 // rows)),
            batch_size=self.batch_size or min(1024, max(32, rows // 40 if rows < 10_000 else max(256, rows // 150))),
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

    def _warn_if_falling(self, history: History) -> None:
        """Where max_iter has ended the training before `n_iter_no_change` epochs without a gain did."""
        epochs, best = len(history.watched), int(np.argmin(history.watched))
        if self.early_stopping and epochs == self.max_iter and best > epochs - 1 - self.n_iter_no_change:
            warnings.warn(
                f"Training reached max_iter={epochs} epochs, and its loss was least after {best + 1}: it may not have "
                "converged. Use a larger max_iter.",
                ConvergenceWarning,
                stacklevel=4,
            )


def with_groups(rows: Rows, groups: Any) -> Rows:
    """The rows, with the number of each row's group where there are groups."""
    return rows if groups is None else replace(rows, group=torch.from_numpy(groups))
