"""The Open Inference Protocol v2 over REST: requests to arrays, answers to responses.

    {"id": "a", "inputs": [{"name": "input", "shape": [2, 3], "datatype": "FP32", "data": [...]}],
     "outputs": [{"name": "label"}]}

Data is nested or flat, in row-major order; -1 in a shape stands for the dimension that the data decides. Every error of
a request is a `BadInput` with the protocol's message.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from afield.serve.engine import NUMPY_TYPES, TEXT, Arrays, BadInput, Engine, TensorSpec, check_arrays

_KINDS = {"b": "BOOL", "i": "INT64", "f": "FP32", "O": TEXT}
MOST_ID = 256  # characters
MOST_DIMENSIONS = 32


@dataclass(frozen=True)
class Request:
    """A request: its arrays by name, how many rows they have, its id and the outputs that it asks for (none: all)."""

    arrays: Arrays
    rows: int
    id: str | None = None
    outputs: tuple[str, ...] = ()


def parse_json(body: bytes) -> Any:
    """The JSON of a body."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"The body must be JSON: {error}.") from error


def parse_infer(body: bytes, engine: Engine, max_rows: int) -> Request:
    """An inference request."""
    content = _expect(parse_json(body), dict, "The request")
    given = _expect(content.get("inputs"), list, "inputs")
    arrays: Arrays = {}
    specs = {spec.name: spec for spec in engine.inputs}
    for entry in given:
        tensor = _expect(entry, dict, "An input")
        name = _expect(tensor.get("name"), str, "The name of an input")
        if name not in specs or name in arrays:
            raise BadInput(f"Expected the inputs {', '.join(specs)}, each once, got {name!r}.")
        arrays[name] = _tensor(tensor, specs[name])
    missing = [name for name in specs if name not in arrays]
    if missing:
        raise BadInput(f"The input {', '.join(missing)} is missing: expected {', '.join(specs)}.")
    return check_request(arrays, engine, max_rows, _id(content), _outputs(content, engine))


def check_request(
    arrays: Arrays, engine: Engine, max_rows: int, id: str | None = None, outputs: tuple[str, ...] = ()
) -> Request:
    """A request of these arrays, if the engine takes them."""
    rows = check_arrays(arrays, engine.inputs)
    if not 1 <= rows <= max_rows:
        raise BadInput(f"A request has from 1 to {max_rows} rows, got {rows}.")
    return Request(arrays, rows, id, outputs)


def response(name: str, version: str, request: Request, answers: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The response of the protocol, for `dump`."""
    chosen = {k: answers[k] for k in request.outputs if k in answers} if request.outputs else answers
    outputs = [_output(k, a) for k, a in chosen.items()]
    body: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": outputs}
    return body if request.id is None else body | {"id": request.id}


def dump(value: Any) -> bytes:
    """JSON; NaN and infinity are null."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def cast(values: Any, spec: TensorSpec) -> np.ndarray:
    """A nested list, of numbers or texts, as an array of an input's datatype."""
    if spec.datatype == TEXT:
        return _texts(values, spec.name)
    try:
        array = np.array(values)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:  # ragged, or too deep
        raise BadInput(f"The data of {spec.name!r} must be numbers in lists of equal lengths.") from error
    wanted = np.dtype(NUMPY_TYPES[spec.datatype])
    kinds = {"f": "iuf", "i": "iu", "u": "iu", "b": "b"}[wanted.kind]
    if array.size and array.dtype.kind not in kinds:
        raise BadInput(
            f"The data of {spec.name!r} must be {spec.datatype}: {'numbers' if wanted.kind == 'f' else wanted.name}."
        )
    if wanted.kind in "iu" and array.size:
        limits = np.iinfo(wanted.name)
        if array.min() < limits.min or array.max() > limits.max:
            raise BadInput(f"The data of {spec.name!r} must lie in the range of {spec.datatype}.")
    with np.errstate(over="ignore"):  # what is too large is infinite, and refused as such
        return array.astype(wanted)


def _tensor(tensor: Mapping[str, Any], spec: TensorSpec) -> np.ndarray:
    datatype = tensor.get("datatype")
    if datatype not in (*NUMPY_TYPES, TEXT):
        raise BadInput(f"The datatype of {spec.name!r} must be one of {', '.join((*NUMPY_TYPES, TEXT))}.")
    if (datatype == TEXT) != (spec.datatype == TEXT):
        raise BadInput(f"The input {spec.name!r} takes {spec.datatype}, got {datatype}.")
    shape = _expect(tensor.get("shape"), list, f"The shape of {spec.name!r}")
    whole = all(type(size) is int and -1 <= size < 2**31 for size in shape)
    if not whole or not 0 < len(shape) <= MOST_DIMENSIONS or shape.count(-1) > 1:
        raise BadInput(f"The shape of {spec.name!r} must be whole numbers, at most one of them -1.")
    data = _expect(tensor.get("data"), list, f"The data of {spec.name!r}")
    array = cast(data, spec if datatype == spec.datatype else replace(spec, datatype=str(datatype)))
    known = math.prod(size for size in shape if size != -1)
    if (array.size != known) if -1 not in shape else (not known or array.size % known):
        raise BadInput(f"The shape of {spec.name!r} is {shape}, and its data has {array.size} elements.")
    shaped = array.reshape(shape)
    if spec.datatype == TEXT:  # many clients send a column of texts
        return shaped.reshape(-1) if shaped.ndim == 2 and shaped.shape[1] == 1 else shaped
    if array.ndim > 1 and array.shape != shaped.shape:
        raise BadInput(f"The shape of {spec.name!r} is {shape}, and its data is nested as {list(array.shape)}.")
    return _to_spec(shaped, spec)


def _to_spec(array: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """From the datatype of the request to that of the model: wider or narrower, but no fractions as whole numbers."""
    wanted = np.dtype(NUMPY_TYPES[spec.datatype])
    if wanted.kind in "iub" and array.dtype.kind not in ("iu" if wanted.kind in "iu" else "b"):
        raise BadInput(f"The input {spec.name!r} takes {spec.datatype}, got fractions.")
    if array.dtype == wanted:
        return array
    with np.errstate(over="ignore"):
        return array.astype(wanted)


def _texts(values: Any, name: str) -> np.ndarray:
    flat = values if isinstance(values, list) else [values]
    while len(flat) and all(isinstance(v, list) for v in flat):
        flat = [v for inner in flat for v in inner]
    if not all(isinstance(v, str) for v in flat):
        raise BadInput(f"The data of {name!r} must be texts.")
    array = np.empty(len(flat), dtype=object)
    array[:] = flat
    return array


def _output(name: str, array: np.ndarray) -> dict[str, Any]:
    data = array if array.ndim == 1 else array.reshape(-1)
    kind = _KINDS[data.dtype.kind]
    return {"name": name, "shape": array.shape, "datatype": kind, "data": data.tolist() if kind == TEXT else data}


def _id(content: Mapping[str, Any]) -> str | None:
    id = content.get("id")
    if id is not None and not (isinstance(id, str) and len(id) <= MOST_ID):
        raise BadInput(f"id must be a text of at most {MOST_ID} characters.")
    return id


def _outputs(content: Mapping[str, Any], engine: Engine) -> tuple[str, ...]:
    entries: Sequence[Any] = _expect(content.get("outputs", []) or [], list, "outputs")
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in entries]
    unknown = [name for name in names if name not in engine.columns]
    if unknown:
        raise BadInput(f"This model has the outputs {', '.join(engine.columns)}, not {unknown[0]!r}.")
    return tuple(map(str, names))


def _expect(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        names = {"dict": "an object", "list": "a list", "str": "a text"}
        raise BadInput(f"{what} must be {names[kind.__name__]}, got {type(value).__name__}.")
    return value
