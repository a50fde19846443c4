"""The estimators against scikit-learn's own, untuned, on small tables, and their time on 20,000 rows.

    python -m bench.estimators    about 8 minutes on one core; writes results/tables.json, fills docs/scikit-learn.md

Classification: iris, wine, breast_cancer, digits, the same stratified folds for all. SVC and MLPClassifier run with and
without a StandardScaler before them. Regression: diabetes and the UCI sets of at most 2,000 rows, published splits;
GaussianProcessRegressor on standardised columns, with its default kernel and with a sum of a scaled RBF kernel and
white noise, whose parameters it tunes. Its time at 20,000 rows follows from 2,000 rows by the cubic law.

None of these sets had a part in choosing our defaults: docs/scikit-learn.md says which had.
"""

import json
import time
import warnings
from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.metrics import log_loss
from sklearn.model_selection import RepeatedStratifiedKFold, ShuffleSplit
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

from afield.estimators import SNGPClassifier, SNGPRegressor
from afield.model.saving import write_file
from afield.tasks.data import arrays
from afield.tasks.uci import SETS
from bench.defaults import ROOT, fill, markdown

RECORD, PAGE = ROOT / "results" / "tables.json", ROOT / "docs" / "scikit-learn.md"
CLASSIFICATION = {"iris": load_iris, "wine": load_wine, "breast_cancer": load_breast_cancer, "digits": load_digits}
REPEATS = {"digits": 1}  # of five folds; 2 elsewhere
CLASSIFIERS = {
    "SNGPClassifier": SNGPClassifier(random_state=0),
    "HistGradientBoosting": HistGradientBoostingClassifier(random_state=0),
    "SVC": SVC(),
    "SVC, scaled": make_pipeline(StandardScaler(), SVC()),
    "MLPClassifier": MLPClassifier(random_state=0),
    "MLPClassifier, scaled": make_pipeline(StandardScaler(), MLPClassifier(random_state=0)),
}
REGRESSION = ("diabetes", *(name for name, (_, rows) in SETS.items() if rows <= 2000))
NUM_SPLITS = 3


def tuned(columns: int) -> GaussianProcessRegressor:
    """Tuning starts from a length scale near the distances between standardised rows."""
    return GaussianProcessRegressor(ConstantKernel() * RBF(columns**0.5) + WhiteKernel(), normalize_y=True)


REGRESSORS: dict[str, Callable[[int], BaseEstimator]] = {
    "SNGPRegressor": lambda columns: SNGPRegressor(random_state=0),
    "GPR, default kernel": lambda columns: make_pipeline(StandardScaler(), GaussianProcessRegressor()),
    "GPR, tuned kernel": lambda columns: make_pipeline(StandardScaler(), tuned(columns)),
}
Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def classify(name: str) -> list[dict[str, Any]]:
    """Accuracy, log loss and seconds of every classifier on every fold."""
    x, y = CLASSIFICATION[name](return_X_y=True)
    records = []
    for fold, (train, test) in enumerate(
        RepeatedStratifiedKFold(n_splits=5, n_repeats=REPEATS.get(name, 2), random_state=0).split(x, y)
    ):
        for model, estimator in CLASSIFIERS.items():
            fitted, seconds = timed(estimator, x[train], y[train])
            record = {"set": name, "model": model, "fold": fold, "accuracy": fitted.score(x[test], y[test])}
            if hasattr(fitted, "predict_proba"):
                record["nll"] = log_loss(y[test], fitted.predict_proba(x[test]))
            records.append(record | {"seconds": seconds})
    return records


def splits(name: str) -> Iterator[Split]:
    if name == "diabetes":
        x, y = load_diabetes(return_X_y=True)
        for train, test in ShuffleSplit(NUM_SPLITS, test_size=0.1, random_state=0).split(x):
            yield x[train], y[train], x[test], y[test]
        return
    data = arrays(f"tabular/{SETS[name][0]}.npz")
    x, y = data["X"].astype(np.float64), data["y"].astype(np.float64).ravel()
    for mask in data["test_mask"][:NUM_SPLITS]:
        test = np.unpackbits(mask, count=len(y)).astype(bool)
        yield x[~test], y[~test], x[test], y[test]


def regress(name: str) -> list[dict[str, Any]]:
    """Log loss and root mean squared error in the target's own units, and seconds."""
    records = []
    for number, (x, y, x_test, y_test) in enumerate(splits(name)):
        for model, estimator in REGRESSORS.items():
            fitted, seconds = timed(estimator(x.shape[1]), x, y)
            m, s = fitted.predict(x_test, return_std=True)
            s = np.maximum(s, 1e-6 * y.std())
            nll = np.mean(0.5 * ((y_test - m) / s) ** 2 + np.log(s) + 0.5 * np.log(2 * np.pi))
            rmse = np.sqrt(np.mean((y_test - m) ** 2))
            metrics = {"nll": float(nll), "rmse": float(rmse), "seconds": seconds}
            records.append({"set": name, "model": model, "split": number, "rows": len(y)} | metrics)
    return records


def speed() -> dict[str, float]:
    """Seconds to fit 20,000 rows of kin40k; for GaussianProcessRegressor, from smaller fits by the cubic law."""
    data = arrays(f"tabular/{SETS['uci-kin40k'][0]}.npz")
    x, y = data["X"][:20_000].astype(np.float64), data["y"][:20_000].astype(np.float64).ravel()
    _, ours = timed(SNGPRegressor(random_state=0), x, y)
    once = {rows: timed(GaussianProcessRegressor(), x[:rows], y[:rows])[1] for rows in (2000, 4000)}
    evaluations = _evaluations(x[:500], y[:500])
    regressor = tuned(x.shape[1]).set_params(optimizer=None).fit(x[:2000], y[:2000])
    start = time.process_time()
    regressor.log_marginal_likelihood(regressor.kernel_.theta, eval_gradient=True)
    one = time.process_time() - start
    return {
        "SNGPRegressor, 20000 rows": ours,
        "GPR, default kernel, 2000 rows": once[2000],
        "GPR, default kernel, 4000 rows": once[4000],
        "GPR, default kernel, 20000 rows (x 125 from 4000)": once[4000] * 125,
        "GPR, tuned kernel, one evaluation, 2000 rows": one,
        "GPR, tuned kernel, evaluations at 500 rows": evaluations,
        "GPR, tuned kernel, 20000 rows (evaluations x 1000 from 2000)": one * evaluations * 1000,
    }


def _evaluations(x: np.ndarray, y: np.ndarray) -> int:
    """How often tuning evaluates the marginal likelihood."""
    count = 0

    class Counting(GaussianProcessRegressor):
        def log_marginal_likelihood(self, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return super().log_marginal_likelihood(*args, **kwargs)

    timed(Counting(tuned(x.shape[1]).kernel, normalize_y=True), x, y)
    return count


def timed(estimator: BaseEstimator, x: np.ndarray, y: np.ndarray) -> tuple[Any, float]:
    """The fitted estimator and the processor time of one core."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # defaults are what is compared
        start = time.process_time()
        fitted = clone(estimator).fit(x, y)
        return fitted, time.process_time() - start


def table(records: list[dict[str, Any]], models: list[str], cell: Callable[[list[dict[str, Any]]], str]) -> str:
    of = {
        (name, m): [r for r in records if (r["set"], r["model"]) == (name, m)] for name in sets(records) for m in models
    }
    return markdown([["", *models], *[[name, *[cell(of[name, m]) for m in models]] for name in sets(records)]], left=1)


def sets(records: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(r["set"] for r in records))


def metric(name: str, digits: int) -> Callable[[list[dict[str, Any]]], str]:
    return lambda of: f"{mean(r[name] for r in of):.{digits}f}" if name in of[0] else ""


def main() -> None:
    torch.set_num_threads(1)
    start = time.process_time()
    record: dict[str, Any] = {"speed": speed()}
    record["classification"] = [r for name in CLASSIFICATION for r in classify(name)]
    record["regression"] = [r for name in REGRESSION for r in regress(name)]
    record["seconds"] = time.process_time() - start
    write_file(RECORD, (json.dumps(record, indent=1) + "\n").encode())
    for name, text in tables().items():
        fill(PAGE, name, text)


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the record as it is."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    classes, numbers = record["classification"], record["regression"]
    with_probabilities = [name for name in CLASSIFIERS if "SVC" not in name]
    return {
        "accuracy": table(classes, list(CLASSIFIERS), metric("accuracy", 3)),
        "log loss": table(classes, with_probabilities, metric("nll", 3)),
        "regression": table(numbers, list(REGRESSORS), metric("nll", 3)),
        "seconds": markdown([["", "seconds"], *[[k, f"{v:,.1f}"] for k, v in record["speed"].items()]], left=1),
    }


if __name__ == "__main__":
    main()
