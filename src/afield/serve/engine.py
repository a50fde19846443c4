"""What is served: a function from arrays to answers, and what is known of it. NumPy alone; no torch, no HTTP.

Answers are columns by name, a row for each input row:

    label           name of the class, or its number        mean, std   of real targets, in place of these two
    probabilities   (N, C)
    variance, score, p_value, accepted                      accepted: p_value > alpha
    decision        "answer" or "refer", by the policy that was saved with the model
    answer          the class that the policy answers with, where errors have different costs
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
NUMPY_TYPES = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
DATATYPES = {np.dtype(kind).name: name for name, kind in NUMPY_TYPES.items()}
TEXT = "BYTES"
Explain = Callable[[Arrays], list[dict[str, Any]]]
MOST_EXPLAINED = 10  # rows of a request


class BadInput(ValueError):
    """A request that the model, or the protocol, does not take."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, datatype of the protocol, and shape; -1 is a free dimension, the first one is that of rows."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


@dataclass(frozen=True)
class Engine:
    """A model that answers.

    run         inputs by name -> answers by name; any thread may call it
    identity    a hash of the model: the name of its version
    reference   the scores that it was calibrated with; none: it was not
    spans       where each class lies in the reference, (K, 2), for p-values by class
    features    names of the columns of a table, where they are known
    categories  the known values of columns of categories, by the number of the column
    joins       whether requests may be answered in one batch
    num_classes of the answers; 0: real targets
    explain     inputs -> for each row the training examples near it, and its odd features; None: none were kept
    """

    inputs: tuple[TensorSpec, ...]
    run: Callable[[Arrays], Arrays]
    identity: str
    platform: str
    labels: tuple[str, ...] = ()
    num_classes: int = 0
    columns: tuple[str, ...] = ()
    alpha: float | None = None
    reference: np.ndarray = field(default_factory=lambda: np.zeros(0))
    spans: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.int64))
    policy: Mapping[str, Any] | None = None
    features: tuple[str, ...] = ()
    categories: Mapping[int, tuple[Any, ...]] = field(default_factory=dict)
    joins: bool = True
    explain: Explain | None = None

    @property
    def outputs(self) -> list[TensorSpec]:
        """What `run` answers, for the metadata."""
        wide = {"probabilities": (-1, self.num_classes), "mean": (-1, -1), "std": (-1, -1)}
        kinds = {"accepted": "BOOL", "decision": TEXT, "label": TEXT if self.labels else "INT64"}
        kinds["answer"] = kinds["label"]
        return [TensorSpec(name, kinds.get(name, "FP32"), wide.get(name, (-1,))) for name in self.columns]


def name_labels(indices: np.ndarray, labels: Sequence[str]) -> np.ndarray:
    """The names of classes, or their numbers where they have no names."""
    return np.array(labels, dtype=object)[indices] if labels else indices.astype(np.int64)


def narrow(values: np.ndarray) -> np.ndarray:
    """float32: more digits are noise, and make long JSON."""
    return np.ascontiguousarray(values, dtype=np.float32)


def check_arrays(arrays: Arrays, inputs: Sequence[TensorSpec]) -> int:
    """The number of rows, if the arrays are what the inputs ask for."""
    rows = {len(array) for array in arrays.values()}
    if len(rows) != 1:
        raise BadInput(f"All inputs must have the same number of rows, got {sorted(rows)}.")
    for spec in inputs:
        shape = arrays[spec.name].shape
        if len(shape) != len(spec.shape) or any(b not in (-1, a) for a, b in zip(shape, spec.shape, strict=True)):
            raise BadInput(f"The input {spec.name!r} must have shape {list(spec.shape)}, got {list(shape)}.")
        if arrays[spec.name].dtype.kind == "f":
            _check_finite(spec.name, arrays[spec.name])
    return rows.pop()


def _check_finite(name: str, array: np.ndarray) -> None:
    finite = np.isfinite(array)
    if not finite.all():
        bad = ~finite.all(axis=tuple(range(1, array.ndim)))
        first = ", ".join(map(str, np.flatnonzero(bad)[:5]))
        raise BadInput(f"The input {name!r} must be finite numbers, got others in {bad.sum()} rows (first: {first}).")
