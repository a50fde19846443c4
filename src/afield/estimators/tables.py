"""Tables as people have them, checked and as numbers: frames, sparse matrices, categories, weights.

A column of categories becomes codes: the place of its value among those seen in training, -1 for a value that was not.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import issparse
from sklearn.base import BaseEstimator
from sklearn.utils import check_array
from sklearn.utils.validation import validate_data

Floats = NDArray[np.float64]
Categories = dict[int, list[Any]]
"""The values of each column of categories, by the column's number."""
UNKNOWN = -1
_ADVICE = (
    'Encode such columns first: as categories with X.astype({"column": "category"}), which are understood as they are, '
    "or with OneHotEncoder in a ColumnTransformer."
)


def learn_categories(X: Any, wanted: ArrayLike | str | None) -> Categories:
    """The categories of the columns that are `wanted`: "from_dtype", None, or names, numbers or a mask of columns."""
    return {j: _values(_column(X, j)) for j in _chosen(X, wanted)}


def encode(X: Any, categories: Categories) -> Any:
    """X with codes in the place of categories."""
    if not categories:
        return X
    frame = hasattr(X, "iloc")
    coded = X.copy() if frame else np.array(X, dtype=object)
    for j, values in categories.items():
        code = {value: number for number, value in enumerate(values)}
        column = _column(X, j) if j < np.shape(X)[1] else []
        codes = np.array([code.get(value, UNKNOWN) for value in column], dtype=np.float64)
        if frame:
            coded[X.columns[j]] = codes
        else:
            coded[:, j] = codes
    return coded


def check_table(estimator: BaseEstimator, X: Any, *, reset: bool, **checks: Any) -> Any:
    """X as a float64 array (N, d), and y where it is among the checks; errors name bad rows and columns."""
    checks |= {"dtype": np.float64, "ensure_all_finite": False, "ensure_min_samples": 2 if reset else 1}
    _refuse_dates(X)
    try:
        checked = validate_data(estimator, X, reset=reset, accept_sparse="csr", **checks)
    except ValueError as error:
        if "could not convert string" not in str(error):
            raise
        text = [repr(name) for name, kind in _kinds(X) if not _is_number(kind)]
        columns = f" in column(s) {', '.join(text)}" * bool(text)
        raise ValueError(f"Expected numbers, got text{columns}: {error}. {_ADVICE}") from error
    table = checked[0] if "y" in checks else checked
    table = table.toarray() if issparse(table) else table
    finite = np.isfinite(table).all(axis=1)
    if not finite.all():
        rows = np.flatnonzero(~finite)
        raise ValueError(
            f"Input X contains NaN or infinity in {len(rows)} of {len(finite)} rows (first: "
            f"{', '.join(map(str, rows[:5]))}, counted from 0). Impute or drop them, for example with "
            "SimpleImputer in a Pipeline."
        )
    return (table, checked[1]) if "y" in checks else table


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


def check_groups(groups: ArrayLike | None, rows: int) -> NDArray[np.int64] | None:
    """The number (N,) of each row's group."""
    if groups is None:
        return None
    labels = np.asarray(groups)
    if labels.shape != (rows,):
        raise ValueError(f"groups must have shape ({rows},), one for each row, got {labels.shape}.")
    return np.unique(labels, return_inverse=True)[1]


def _chosen(X: Any, wanted: ArrayLike | str | None) -> list[int]:
    if wanted is None:
        return []
    if isinstance(wanted, str):  # from_dtype
        return [j for j, (_, kind) in enumerate(_kinds(X)) if str(kind) == "category"]
    columns, count = np.asarray(wanted), np.shape(X)[1]
    if columns.dtype == bool:
        if columns.shape != (count,):
            raise ValueError(f"A mask in categorical_features must have shape ({count},), got {columns.shape}.")
        return np.flatnonzero(columns).tolist()
    if columns.dtype.kind in "iu":
        if (columns < 0).any() or (columns >= count).any():
            raise ValueError(f"categorical_features must be columns from 0 to {count - 1}, got {columns.tolist()}.")
        return columns.tolist()
    names = [name for name, _ in _kinds(X)]
    if missing := [str(name) for name in columns if name not in names]:
        raise ValueError(f"categorical_features names columns that X does not have: {', '.join(missing)}.")
    return [names.index(name) for name in columns]


def _values(column: Sequence[Any]) -> list[Any]:
    """The distinct values, in an order that does not depend on that of the rows."""
    return sorted(set(column), key=lambda value: (value is None, str(type(value)), value if value is not None else 0))


def _column(X: Any, j: int) -> list[Any]:
    """The values of a column; None where there is none."""
    column = X.iloc[:, j].tolist() if hasattr(X, "iloc") else np.asarray(X, dtype=object)[:, j].tolist()
    return [None if value is None or value != value else value for value in column]  # NaN is not itself


def _kinds(X: Any) -> list[tuple[Any, Any]]:
    """Name and type of each column of a frame of pandas."""
    return list(X.dtypes.items()) if hasattr(X, "iloc") and hasattr(X, "dtypes") and np.ndim(X) == 2 else []


def _refuse_dates(X: Any) -> None:
    dates = [repr(name) for name, kind in _kinds(X) if getattr(kind, "kind", "") in "mM"]
    if dates or getattr(getattr(X, "dtype", None), "kind", "") in ("m", "M"):
        where = f" in column(s) {', '.join(dates)}" * bool(dates)
        raise ValueError(
            f"Expected numbers, got dates or times{where}. Make numbers of them that mean something for your data, "
            "such as days since a date, the hour, or the month as a category."
        )


def _is_number(kind: Any) -> bool:
    return np.issubdtype(kind, np.number) if isinstance(kind, np.dtype) else False
