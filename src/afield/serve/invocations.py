"""`POST /invocations`, as MLflow's scoring servers have it.

    {"inputs": [[...], ...]}   {"inputs": {"name": [...]}}   {"instances": [...]}   {"inputs": ["a text", ...]}
    {"dataframe_split": {"columns": [...], "data": [[...], ...]}}   {"dataframe_records": [{"column": ...}, ...]}
    text/csv: a line of names, then rows

The answer is {"predictions": [{"label": ..., "p_value": ..., ...}, ...]}, an object for each row. Columns of a table
are taken by name where the model knows their names, and else in the order in which they come. A category is a
value; one that was not there in training counts as unknown.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from afield.serve.engine import Arrays, BadInput, Engine
from afield.serve.protocol import cast, parse_json

FORMATS = ("inputs", "instances", "dataframe_split", "dataframe_records")
UNKNOWN = -1  # the code of a category that was not there in training


def parse_invocation(body: bytes, content_type: str, engine: Engine) -> Arrays:
    """The arrays of a request."""
    if content_type.partition(";")[0].strip() == "text/csv":
        return _one_input(_parse_csv(body, engine), engine)
    content = parse_json(body)
    found = [name for name in FORMATS if isinstance(content, dict) and name in content]
    if len(found) != 1:
        raise BadInput(f"Expected an object with one of {', '.join(FORMATS)}, got {', '.join(found) or 'none'}.")
    value = content[found[0]]
    if found[0] == "dataframe_split":
        return _one_input(_parse_split(value, engine.features), engine)
    if found[0] == "dataframe_records":
        return _one_input(_parse_records(value, engine.features), engine)
    if isinstance(value, dict):
        return _by_name(value, engine)
    if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
        names = list(value[0])
        return _by_name({name: [row.get(name) for row in value] for name in names}, engine)
    return _one_input(value, engine)


def records(answers: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """The answers row by row."""
    columns = {name: array.tolist() for name, array in answers.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _one_input(rows: Any, engine: Engine) -> Arrays:
    if len(engine.inputs) != 1:
        names = ", ".join(spec.name for spec in engine.inputs)
        raise BadInput(f"This model has several inputs: give an object with {names}.")
    spec = engine.inputs[0]
    if not isinstance(rows, list):
        raise BadInput("Expected a list of rows.")
    array = cast(_with_codes(rows, engine.categories), spec)
    width = int(np.prod(spec.shape[1:])) if -1 not in spec.shape[1:] else -1
    if array.ndim == 2 and len(spec.shape) > 2 and array.shape[1] == width:  # a table row for each image
        array = array.reshape(len(array), *spec.shape[1:])
    return {spec.name: array}


def _by_name(value: Mapping[str, Any], engine: Engine) -> Arrays:
    specs = {spec.name: spec for spec in engine.inputs}
    if set(value) != set(specs):
        raise BadInput(f"Expected the inputs {', '.join(specs)}, got {', '.join(map(str, value)) or 'none'}.")
    if engine.categories and isinstance(rows := next(iter(value.values())), list):  # an estimator has one input
        value = dict.fromkeys(value, _with_codes(rows, engine.categories))
    return {name: cast(value[name], spec) for name, spec in specs.items()}


def _parse_split(value: Any, features: Sequence[str]) -> list[Any]:
    if not (isinstance(value, dict) and isinstance(value.get("data"), list)):
        raise BadInput("dataframe_split must be an object with columns and data, a list of rows.")
    columns, rows = value.get("columns"), value["data"]
    if columns is None:
        return _unwrap(rows)
    if not isinstance(columns, list) or not all(isinstance(row, list) and len(row) == len(columns) for row in rows):
        raise BadInput("Every row of dataframe_split must have a value for each of its columns.")
    order = _order(list(map(str, columns)), features)
    return _unwrap([[row[i] for i in order] for row in rows])


def _parse_records(value: Any, features: Sequence[str]) -> list[Any]:
    if not (isinstance(value, list) and value and all(isinstance(row, dict) for row in value)):
        raise BadInput("dataframe_records must be a list of objects.")
    names = list(value[0])
    if any(row.keys() != value[0].keys() for row in value):
        raise BadInput(f"All records must have the columns {', '.join(names)}.")
    order = _order(names, features)
    return _unwrap([[row[names[i]] for i in order] for row in value])


def _order(names: Sequence[str], features: Sequence[str]) -> list[int]:
    """Where the model's columns are among these; all in their order where it does not know names."""
    if not features:
        return list(range(len(names)))
    missing = [name for name in features if name not in names]
    if missing:
        raise BadInput(f"The column {', '.join(missing[:5])} is missing: expected {', '.join(features)}.")
    return [names.index(name) for name in features]


def _unwrap(rows: list[Any]) -> list[Any]:
    """One column of texts, or of lists, is the input itself."""
    single = all(isinstance(row, list) and len(row) == 1 and isinstance(row[0], str | list) for row in rows)
    return [row[0] for row in rows] if rows and single else rows


def _parse_csv(body: bytes, engine: Engine) -> list[Any]:
    try:
        lines = [line for line in csv.reader(io.StringIO(body.decode())) if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"The body must be CSV in UTF-8: {error}.") from error
    if len(lines) < 2 or any(len(line) != len(lines[0]) for line in lines):
        raise BadInput("CSV must have a line of names and then rows with as many cells.")
    order, text = _order(lines[0], engine.features), engine.categories.keys()
    try:
        return [[(line[i] or None) if k in text else float(line[i]) for k, i in enumerate(order)] for line in lines[1:]]
    except ValueError:
        return _unwrap([[line[i] for i in order] for line in lines[1:]])


def _with_codes(rows: list[Any], categories: Mapping[int, Sequence[Any]]) -> list[Any]:
    """Rows with codes, the places among the known values, in columns of categories."""
    if not categories:
        return rows
    coded = [list(row) if isinstance(row, list) else [row] for row in rows]
    for row in coded:
        for column, known in categories.items():
            if column < len(row):  # else it has another width, and is refused for that
                row[column] = _code(row[column], known)
    return coded


def _code(value: Any, known: Sequence[Any]) -> int:
    """CSV has texts alone: there a number may be written in any way."""
    for code, one in enumerate(known):
        if value == one or (isinstance(value, str) and not isinstance(one, str) and _number(value) == one):
            return code
    return UNKNOWN


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
