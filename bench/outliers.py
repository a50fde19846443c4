"""Detection of rows that are unlike the training rows: ten settings on tables, and the detectors.

Classes: some are left out of training, and their rows are what is to be found. Numbers: the rows whose first principal
component is among the largest tenth are left out. A quarter of the other rows is the test. All but the two estimators
are given columns standardised by the training rows.
"""

from collections.abc import Callable

import numpy as np
from sklearn.covariance import EmpiricalCovariance
from sklearn.decomposition import PCA
from sklearn.ensemble import HistGradientBoostingClassifier, IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.neighbors import LocalOutlierFactor, NearestNeighbors
from sklearn.preprocessing import StandardScaler

from afield.estimators import SNGPClassifier, SNGPRegressor
from bench.table_data import table

# Of classes: those that are left out. None: a regression table.
SETTINGS: dict[str, tuple[int, ...] | None] = {
    "wine": (1,),
    "glass": (3, 4, 5),
    "digits": (8, 9),
    "vowel": (8, 9, 10),
    "shuttle": (0,),
    "dna": (2,),
    "fishing": (1,),
    "concrete": None,
    "boston": None,
    "airfoil": None,
}
Score = Callable[[np.ndarray, np.ndarray, np.ndarray, bool], np.ndarray]


def sngp(x: np.ndarray, y: np.ndarray, new: np.ndarray, classes: bool) -> np.ndarray:
    return (SNGPClassifier if classes else SNGPRegressor)(random_state=0).fit(x, y).ood_score(new)


def forest(x: np.ndarray, y: np.ndarray, new: np.ndarray, classes: bool) -> np.ndarray:
    return -IsolationForest(random_state=0).fit(x).score_samples(new)


def local_outlier_factor(x: np.ndarray, y: np.ndarray, new: np.ndarray, classes: bool) -> np.ndarray:
    return -LocalOutlierFactor(novelty=True).fit(x).score_samples(new)


def neighbors(x: np.ndarray, y: np.ndarray, new: np.ndarray, classes: bool) -> np.ndarray:
    """The distance to the fifth nearest training row."""
    return NearestNeighbors(n_neighbors=5).fit(x).kneighbors(new)[0][:, -1]


def ecod(x: np.ndarray, y: np.ndarray, new: np.ndarray, classes: bool) -> np.ndarray:
    """Li et al. (2022): the larger of the sums, over the columns, of -log of the left, the right or the skewed tail."""
    ordered = np.sort(x, axis=0)
    n = len(x)
    left, right = np.empty_like(new), np.empty_like(new)
    for j in range(x.shape[1]):
        left[:, j] = -np.log((np.searchsorted(ordered[:, j], new[:, j], side="right") + 1) / (n + 1))
        right[:, j] = -np.log((n - np.searchsorted(ordered[:, j], new[:, j], side="left") + 1) / (n + 1))
    skewed = np.where(((x - x.mean(0)) ** 3).mean(0) < 0, left, right)
    return np.maximum.reduce([left.sum(1), right.sum(1), skewed.sum(1)])


def mahalanobis(x: np.ndarray, y: np.ndarray, new: np.ndarray, classes: bool) -> np.ndarray:
    return EmpiricalCovariance().fit(x).mahalanobis(new)


def boosted_trees(x: np.ndarray, y: np.ndarray, new: np.ndarray, classes: bool) -> np.ndarray:
    return 1 - HistGradientBoostingClassifier(random_state=0).fit(x, y).predict_proba(new).max(1)


DETECTORS: dict[str, Score] = {
    "SNGP": sngp,
    "IsolationForest": forest,
    "LOF": local_outlier_factor,
    "kNN": neighbors,
    "ECOD": ecod,
    "Mahalanobis": mahalanobis,
    "1 - max of HistGradientBoosting": boosted_trees,
}


def setting(
    name: str, out: tuple[int, ...] | None, split: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training rows and targets, fresh rows of the same kind, and rows of another kind."""
    x, y = table(name)
    if out is None:
        first = PCA(1).fit(StandardScaler().fit_transform(x)).transform(StandardScaler().fit_transform(x))[:, 0]
        foreign = first > np.quantile(first, 0.9)
    else:
        foreign = np.isin(y, out)
    train, test = train_test_split(np.flatnonzero(~foreign), test_size=0.25, random_state=split)
    return x[train], y[train], x[test], x[foreign]


def detect(detector: str, name: str, split: int) -> dict[str, float]:
    """The area under the ROC curve; what needs classes has none where there are numbers."""
    classes = SETTINGS[name] is not None
    if not classes and "HistGradientBoosting" in detector:
        return {}
    x, y, fresh, foreign = setting(name, SETTINGS[name], split)
    new = np.concatenate([fresh, foreign])
    if detector != "SNGP":
        scaler = StandardScaler().fit(x)
        x, new = scaler.transform(x), scaler.transform(new)
    score = DETECTORS[detector](x, y, new, classes)
    return {"auroc": float(roc_auc_score(np.arange(len(new)) >= len(fresh), score))}
