"""The estimators against boosted trees and others, untuned, on tables that had no part in choosing our defaults.

    pip install --no-deps -r bench/requirements-tables.txt
    AFIELD_DATA=... AFIELD_R=... python -m bench.tables [model ...]
    python -m bench.tables --speed

Each line of results/tables.jsonl is one model on one split of one table; what is there is not run again. The models all
have their defaults, one thread and the same numbers (`table_data`); those that compare distances or take gradient steps
are given standardised columns. 22 tables of classes, 16 of numbers, 10 settings of detection, five splits each, a
quarter of the rows to test on, stratified for classes.

A regressor without a standard deviation is given one: that of its errors on 15% of the training rows, which it was
fitted without; its mean is that of a fit to all of them. GaussianProcessClassifier and -Regressor, whose time grows
with the cube of the rows, are left out where there are more than 600 to train on.

`--speed` measures instead how long HistGradientBoosting and ours take to fit 200,000 rows of 50 columns, in seconds of
one thread's processor time; five columns matter (`sklearn.datasets.make_friedman1`, its median for classes).
"""

import functools
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import norm, rankdata, spearmanr
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_friedman1
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit, train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, SVR

from afield.estimators import SNGPClassifier, SNGPRegressor
from bench.defaults import ROOT, fill, lines, markdown
from bench.outliers import DETECTORS, SETTINGS, detect
from bench.table_data import CLASSIFICATION, REGRESSION, table

RECORD, PAGE = ROOT / "results" / "tables.jsonl", ROOT / "docs" / "scikit-learn.md"
SPLITS, TEST, MOST_FOR_GP = 5, 0.25, 600
MANY = (200_000, 50)
MODELS = (
    *("SNGP", "HistGradientBoosting", "LightGBM", "XGBoost", "CatBoost", "RandomForest", "SVM", "MLP", "NGBoost"),
    "GP",
)


def peers(kind: str) -> dict[str, Any]:
    """Estimators by name; a package that is missing is left out, and said."""
    classes = kind == "classification"
    found: dict[str, Any] = {
        "SNGP": (SNGPClassifier if classes else SNGPRegressor)(random_state=0),
        "HistGradientBoosting": (HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor)(
            random_state=0
        ),
        "RandomForest": (RandomForestClassifier if classes else RandomForestRegressor)(random_state=0),
        "SVM": make_pipeline(StandardScaler(), CalibratedClassifierCV(SVC(), ensemble=False) if classes else SVR()),
        "MLP": make_pipeline(StandardScaler(), (MLPClassifier if classes else MLPRegressor)(random_state=0)),
        "GP": make_pipeline(StandardScaler(), GaussianProcessClassifier() if classes else _process()),
    }
    quiet = {
        "LightGBM": ("lightgbm", "LGBM", {"verbosity": -1, "n_jobs": 1, "random_state": 0}),
        "XGBoost": ("xgboost", "XGB", {"n_jobs": 1, "random_state": 0}),
        "CatBoost": (
            "catboost",
            "CatBoost",
            {"verbose": False, "thread_count": 1, "random_seed": 0, "allow_writing_files": False},
        ),
        "NGBoost": ("ngboost", "NGB", {"verbose": False, "random_state": 0}),
    }
    for name, (module, prefix, options) in quiet.items():
        try:
            kind_of = getattr(__import__(module), prefix + ("Classifier" if classes else "Regressor"))
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        found[name] = (kind_of, options)
    return found


def _process() -> GaussianProcessRegressor:
    return GaussianProcessRegressor(ConstantKernel() * RBF(3.0) + WhiteKernel(), normalize_y=True)


def _made(model: Any, classes: int) -> Any:
    if not isinstance(model, tuple):
        return clone(model)
    kind, options = model
    if kind.__name__ == "NGBClassifier" and classes > 2:
        from ngboost.distns import k_categorical

        options = options | {"Dist": k_categorical(classes)}
    return kind(**options)


def splits(y: np.ndarray, classes: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    kind = StratifiedShuffleSplit if classes else ShuffleSplit
    return list(kind(SPLITS, test_size=TEST, random_state=0).split(y[:, None], y))


def classify(model: Any, x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> dict[str, float]:
    fitted = _made(model, len(np.unique(y))).fit(x, y)
    probs = np.clip(np.asarray(fitted.predict_proba(x_test), dtype=np.float64), 1e-12, None)
    probs /= probs.sum(1, keepdims=True)
    scores = {"nll": log_loss(y_test, probs), "accuracy": float((probs.argmax(1) == y_test).mean())}
    auc = roc_auc_score(y_test, probs[:, 1] if probs.shape[1] == 2 else probs, multi_class="ovr")
    if isinstance(fitted, SNGPClassifier):
        scores["smallest_p_value"] = float(fitted._predict(x_test[:1]).smallest_p_value or 1.0)
        if scores["smallest_p_value"] <= 0.05:
            scores["false_alarms"] = float((fitted.p_value(x_test) <= 0.05).mean())
    return scores | {"auc": float(auc)}


def regress(model: Any, x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> dict[str, float]:
    """RMSE, log loss and CRPS in the target's own units; Spearman of standard deviation and absolute error."""
    fitted, last = _made(model, 0), None
    scores: dict[str, float] = {}
    if isinstance(fitted, SNGPRegressor):
        mean, std = fitted.fit(x, y).predict(x_test, return_std=True)
        last = std
        low, high = fitted.predict_interval(x_test, coverage=0.9)
        scores["coverage"] = float(((low <= y_test) & (y_test <= high)).mean())
        scores["width"] = float((high - low).mean() / y.std())
    elif hasattr(fitted, "pred_dist"):
        found = fitted.fit(x, y).pred_dist(x_test)
        mean, std = found.loc, found.scale
        last = std
    elif isinstance(fitted[-1] if hasattr(fitted, "steps") else None, GaussianProcessRegressor):
        mean, std = fitted.fit(x, y).predict(x_test, return_std=True)
        last = std
    else:
        rest, held = train_test_split(np.arange(len(y)), test_size=0.15, random_state=0)
        errors = y[held] - fitted.fit(x[rest], y[rest]).predict(x[held])
        mean, std = _made(model, 0).fit(x, y).predict(x_test), np.full(len(y_test), np.sqrt(np.mean(errors**2)))
    std = np.maximum(std, 1e-6 * y.std())
    z, error = (y_test - mean) / std, np.abs(y_test - mean)
    crps = std * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / np.sqrt(np.pi))
    if last is not None:
        scores["spearman"] = float(np.nan_to_num(spearmanr(last, error).statistic))
    nll = np.mean(0.5 * z**2 + np.log(std) + 0.5 * np.log(2 * np.pi))
    return scores | {"nll": float(nll), "rmse": float(np.sqrt(np.mean(error**2))), "crps": float(crps.mean())}


def work(only: Sequence[str]) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, float]]]]:
    """What there is to do, split by split: the key of a record, and what makes its numbers."""
    kinds = (("classification", CLASSIFICATION, classify), ("regression", REGRESSION, regress))
    estimators = {kind: peers(kind) for kind, _, _ in kinds}
    for split in range(SPLITS):
        for kind, names, run in kinds:
            for name, (model, estimator) in itertools.product(names, estimators[kind].items()):
                x, y = table(name)
                train, test = splits(y, kind == "classification")[split]
                if (only and model not in only) or (model == "GP" and len(train) > MOST_FOR_GP):
                    continue
                parts = (x[train], y[train], x[test], y[test])
                key = {"kind": kind, "table": name, "model": model, "split": split, "rows": len(train)}
                yield key, lambda run=run, estimator=estimator, parts=parts: run(estimator, *parts)
        for name, detector in itertools.product(SETTINGS, DETECTORS):
            if not only or detector in only:
                key = {"kind": "detection", "table": name, "model": detector, "split": split}
                yield key, lambda detector=detector, name=name, split=split: detect(detector, name, split)


def speed() -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, float]]]]:
    """Fits of many rows, in the form of `work`."""
    for kind, model in itertools.product(("regression", "classification"), ("HistGradientBoosting", "SNGP")):
        estimator = peers(kind)[model]
        key = {"kind": f"speed of {kind}", "table": "many rows", "model": model, "split": 0, "rows": MANY[0]}
        yield key, functools.partial(_timed, kind, estimator)


def _timed(kind: str, estimator: Any) -> dict[str, float]:
    x, y = make_friedman1(MANY[0] + 10_000, MANY[1], noise=1.0, random_state=0)
    train, test = slice(MANY[0]), slice(MANY[0], None)
    start = time.process_time()
    if kind == "classification":
        y = (y > np.median(y)).astype(int)
        fitted = estimator.fit(x[train], y[train])
        seconds = time.process_time() - start
        return {"fit": seconds, "nll": log_loss(y[test], fitted.predict_proba(x[test]))}
    fitted = estimator.fit(x[train], y[train])
    seconds = time.process_time() - start
    return {"fit": seconds, "rmse": float(np.sqrt(np.mean((fitted.predict(x[test]) - y[test]) ** 2)))}


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    fields = ("kind", "table", "model", "split")
    done = {tuple(r[f] for f in fields) for r in lines(RECORD)}
    with RECORD.open("a") as file:
        for key, run in speed() if "--speed" in arguments else work(arguments):
            if tuple(key[f] for f in fields) in done:
                continue
            start = time.process_time()
            record = key | run() | {"seconds": round(time.process_time() - start, 3)}
            file.write(json.dumps({k: round(v, 6) if isinstance(v, float) else v for k, v in record.items()}) + "\n")
            file.flush()
            print(record)
    for name, text in tables().items():
        fill(PAGE, name, text)


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the record as it is: of what all models have done."""
    return {
        "ranks": _ranks(),
        "coverage of tables": _coverage(),
        "outliers": _outliers(),
        "speed of tables": _speed(),
    }


def _complete(kind: str, models: Collection[str]) -> dict[tuple[str, int], dict[str, Any]]:
    """(table, split) -> model -> record, where all models have one."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for record in lines(RECORD):
        if record["kind"] == kind:
            found.setdefault((record["table"], record["split"]), {})[record["model"]] = record
    return {key: of for key, of in found.items() if set(models) <= set(of)}


def _on_all_tables(kind: str) -> list[str]:
    """The models that have run on every table of a kind, on a split at least: the record grows line by line."""
    tables = CLASSIFICATION if kind == "classification" else REGRESSION
    seen = {(record["model"], record["table"]) for record in lines(RECORD) if record["kind"] == kind}
    return [model for model in MODELS if all((model, table) in seen for table in tables)]


def _ranks() -> str:
    """Mean ranks; 1 is best."""
    columns = (("classification", "nll", 1), ("classification", "accuracy", -1), ("regression", "rmse", 1),
               ("regression", "nll", 1), ("regression", "crps", 1))  # fmt: skip
    head, cells = ["mean rank"], {name: [name] for name in MODELS}
    for kind, metric, sign in columns:
        whole = _on_all_tables(kind)
        complete, models = _complete(kind, whole), [*whole, "GP"]
        ranks: dict[str, list[float]] = {}
        for of in complete.values():
            names = [m for m in MODELS if m in of and m in models]
            for name, rank in zip(names, rankdata([sign * of[m][metric] for m in names]), strict=True):
                ranks.setdefault(name, []).append(float(rank))
        head.append(f"{metric}, {len({table for table, _ in complete})} tables of {kind}")
        for name in MODELS:
            cells[name].append(f"{np.mean(ranks[name]):.2f}" if name in ranks else "")
    return markdown([head, *cells.values()], left=1)


def _coverage() -> str:
    """Of the regressor's own intervals at 90%, and of its standard deviation, table by table."""
    rows = [["", "coverage of 90%", "Spearman of std and error", "the same, NGBoost"]]
    complete = _complete("regression", ["SNGP", "NGBoost"])
    for table_name in REGRESSION:
        of = [models for (name, _), models in complete.items() if name == table_name]
        if of:
            ours, theirs = ([models[m] for models in of] for m in ("SNGP", "NGBoost"))
            values = [[r["coverage"] for r in ours], *([r["spearman"] for r in part] for part in (ours, theirs))]
            rows.append([table_name, *(f"{np.mean(value):.3f}" for value in values)])
    return markdown(rows, left=1)


def _outliers() -> str:
    rows, means = [["", *DETECTORS]], []
    complete = _complete("detection", DETECTORS)
    for name in SETTINGS:
        of = [models for (table_name, _), models in complete.items() if table_name == name]
        if of:
            row = [np.mean([models[d].get("auroc", np.nan) for models in of]) for d in DETECTORS]
            means.append(row)
            rows.append([name, *("" if np.isnan(value) else f"{value:.3f}" for value in row)])
    if means:
        rows.append(["mean", *(f"{value:.3f}" for value in np.nanmean(np.array(means), axis=0))])
    return markdown(rows, left=1)


def _speed() -> str:
    """Seconds to fit many rows, and what they bought."""
    rows = [["", "HistGradientBoosting", "SNGP", "times", "HistGradientBoosting", "SNGP"]]
    for kind, metric in (("classification", "nll"), ("regression", "rmse")):
        found = {r["model"]: r for r in lines(RECORD) if r["kind"] == f"speed of {kind}"}
        if {"HistGradientBoosting", "SNGP"} <= set(found):
            theirs, ours = found["HistGradientBoosting"], found["SNGP"]
            seconds = (f"{theirs['fit']:.1f} s", f"{ours['fit']:.1f} s", f"{ours['fit'] / theirs['fit']:.1f}")
            rows.append([kind, *seconds, *(f"{metric} {of[metric]:.3f}" for of in (theirs, ours))])
    return markdown(rows, left=1)


if __name__ == "__main__":
    main(sys.argv[1:])
