"""Estimators of scikit-learn as engines: what they answer is what `predict`, `p_value` and `ood_score` answer.

Targets are in their own units, and their noise may vary; a category or a constant that was not there in training makes
a row strange. All of this is the estimator's, and its model alone knows nothing of it. Columns of categories come as
their values in `/invocations`, and as codes, the places of the values, in a numeric tensor.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from afield.decide.policies import Policy
from afield.estimators import SNGPClassifier, SNGPRegressor
from afield.estimators.fitted import Fitted
from afield.model.saving import read_index
from afield.serve.engine import Arrays, Engine, narrow
from afield.serve.open_torch import answers_of, decisions_of, open_sngp, with_decisions

KINDS = {kind.__name__: kind for kind in (SNGPClassifier, SNGPRegressor)}


def load_any(folder: Path) -> Fitted:
    """The estimator of a folder, of whichever class."""
    kind = read_index(folder)["metadata"].get("state", {}).get("kind")
    if kind not in KINDS:
        raise ValueError(f"{folder} holds the estimator {kind}, expected one of {', '.join(KINDS)}.")
    return KINDS[kind].load(folder)


def open_estimator(estimator: Fitted, *, alpha: float | None = None, policy: Policy | None = None) -> Engine:
    """The engine of a fitted `SNGPClassifier` or `SNGPRegressor`."""
    labels = tuple(map(str, getattr(estimator, "classes_", ())))
    plain = open_sngp(estimator.model_, labels=labels, shape=(int(estimator.n_features_in_),), alpha=alpha)
    engine, name = plain if policy is None else with_decisions(plain, policy), plain.inputs[0].name

    def run(arrays: Arrays) -> Arrays:
        units, variance, score = estimator._answer_rows(np.asarray(arrays[name], dtype=np.float64))
        found = answers_of(units, plain.alpha, labels)
        found |= {"variance": narrow(variance.numpy()), "score": narrow(score)}
        found |= {} if policy is None else decisions_of(policy, units, labels)
        return {column: found[column] for column in engine.columns}

    return replace(
        engine,
        run=run,
        features=tuple(map(str, getattr(estimator, "feature_names_in_", ()))),
        categories={column: tuple(values) for column, values in estimator._categories.items()},
    )
