"""ONNX exports as engines: onnxruntime and NumPy, without torch."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from afield.serve.engine import DATATYPES, Arrays, Engine, TensorSpec, name_labels, narrow

_METADATA = "afield"
_RENAMED = {"probs": "probabilities"}
_ORDER = ("probabilities", "mean", "std", "variance", "score", "p_value", "accepted")


def open_onnx(file: Path) -> Engine:
    """The engine of a file that `afield export` wrote."""
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError('Serving ONNX files needs onnxruntime: pip install "afield[serve,onnx]".') from error
    content = file.read_bytes()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = options.inter_op_num_threads = 1  # the service has a thread for each core
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        about = json.loads(session.get_modelmeta().custom_metadata_map[_METADATA])
    except Exception as error:  # onnxruntime's exceptions have no common class of their own
        raise ValueError(f"{file} is not an ONNX file that afield export wrote: {error}") from error
    if about.get("num_inputs"):
        raise ValueError(
            f"{file} answers at positions of every input, such as pixels, and the service answers inputs: open the "
            "file with onnxruntime itself."
        )
    labels = tuple(map(str, about["labels"] or ()))
    known = [name for name in about["outputs"] if name != "logits"]
    columns = tuple(name for name in _ORDER if name in {_RENAMED.get(k, k) for k in known})
    of_classes = "probabilities" in columns

    def run(arrays: Arrays) -> Arrays:
        found = dict(zip(known, session.run(known, arrays), strict=True))
        answers = {_RENAMED.get(name, name): value for name, value in found.items()}
        classes = {"label": name_labels(answers["probabilities"].argmax(-1), labels)} if of_classes else {}
        return classes | {k: answers[k] if k == "accepted" else narrow(answers[k]) for k in columns}

    probs = next((o.shape for o in session.get_outputs() if o.name == "probs"), [0, 0])
    return Engine(
        inputs=tuple(_spec(entry) for entry in about["inputs"]),
        run=run,
        identity=hashlib.sha256(content).hexdigest(),
        platform="onnxruntime_onnx",
        labels=labels,
        num_classes=int(probs[1]) if of_classes else 0,
        columns=("label", *columns) if of_classes else columns,
        alpha=about["alpha"],
        reference=np.frombuffer(base64.b64decode(about.get("reference", "")), "<f8"),
        spans=np.array(about.get("reference_spans") or np.zeros((0, 2)), dtype=np.int64).reshape(-1, 2),
        joins=about["precision"] != "int8",  # there one scale is taken from the whole batch
    )


def _spec(entry: dict[str, Any]) -> TensorSpec:
    shape = tuple(size if isinstance(size, int) else -1 for size in entry["shape"])
    return TensorSpec(entry["name"], DATATYPES[entry["dtype"]], shape)
