"""Estimators as folders: safetensors and JSON, never a pickle. `afield serve` opens them.

    estimator.save("model/")        writes the model as `afield.save` does, and the rest of the estimator beside it
    SNGPClassifier.load("model/")   reads both

A pickle of an estimator holds the same tensors, compressed, without what follows from the others.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from afield.decide.policies import Policy
from afield.errors import DamagedModel
from afield.estimators.network import network, plain_network
from afield.estimators.noise import InputNoise
from afield.estimators.rows import Rows
from afield.estimators.trees import Trees
from afield.model.files import read_tensors, write_file
from afield.model.fingerprint import Fingerprint
from afield.model.saving import load, read_index, save
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction

if TYPE_CHECKING:
    from afield.estimators.fitted import Fitted

_NETWORK = ("categories", "out_features", "members", "depth", "width", "dropout")
_REST = "estimator.safetensors"
_FITTED = ("n_iter_", "loss_curve_", "held_out_loss_curve_", "n_features_in_", "_num_seen", "_seed", "_one_dimensional")
_TENSORS = ("_target_shift", "_target_scale")
Kind = TypeVar("Kind", bound="Fitted")


def save_estimator(
    estimator: "Fitted", folder: str | os.PathLike[str], policy: Policy | None = None, **neighbours: Any
) -> Path:
    """Write a fitted estimator; `neighbours` are options of `afield.save`."""
    metadata: dict[str, Any] = {"estimator": {name: estimator._architecture[name] for name in _NETWORK}}
    for name, values in (("labels", "classes_"), ("columns", "feature_names_in_")):
        if hasattr(estimator, values):
            metadata[name] = [str(value) for value in getattr(estimator, values)]
    if policy is not None:
        metadata["policy"] = asdict(policy)
    payload = save_tensors(_tensors(estimator))
    metadata["state"] = _plain_state(estimator) | {"rest": hashlib.sha256(payload).hexdigest()}
    path = save(estimator.model_, folder, metadata=metadata, **neighbours)
    write_file(path / _REST, payload)
    return path


def load_estimator(kind: "type[Kind]", folder: str | os.PathLike[str]) -> "Kind":
    """The fitted estimator of a folder."""
    index = read_index(folder)
    state = index["metadata"].get("state")
    if state is None or state["kind"] != kind.__name__:
        found = "no estimator" if state is None else f"a saved {state['kind']}"
        raise ValueError(f"{folder} holds {found}, not a saved {kind.__name__}.")
    path = Path(folder) / _REST
    payload = path.read_bytes() if path.is_file() else b""
    if state["rest"] != hashlib.sha256(payload).hexdigest():
        raise DamagedModel(f"{path} is damaged, or of another estimator than the rest. Save the estimator again.")
    tensors = read_tensors(payload)
    estimator = kind(**{**state["parameters"], **_from_pairs(state["class_weight"])})
    for name in _FITTED:
        if name in state:
            setattr(estimator, name, state[name])
    estimator._architecture = state["architecture"]
    estimator._categories = {int(column): values for column, values in state["categories"].items()}
    if state["classes"] is not None:
        estimator.classes_ = np.array(state["classes"]["values"], dtype=state["classes"]["dtype"])
    if "columns" in index["metadata"]:
        estimator.feature_names_in_ = np.array(index["metadata"]["columns"], dtype=object)
    for name in _TENSORS:
        if name in tensors:
            setattr(estimator, name, tensors[name])
    estimator._held_out = Rows(*(tensors[f"held_out.{name}"] for name in ("x", "y", "weight")))
    estimator._answers = None
    if "noise.weight" in tensors:
        estimator._noise = InputNoise(tensors["noise.weight"], tensors["noise.constant"])
    estimator._trees = Trees(**_below("trees.", tensors)) if "trees.value" in tensors else None
    if "answers.target" in tensors:
        parts = _below("answers.", tensors)
        target = parts.pop("target")
        estimator._answers = Prediction(**parts, **state["answers"]), target
    estimator.model_ = load(folder, load_network(estimator._architecture)).eval()
    return estimator


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def load_network(architecture: Mapping[str, Any]) -> nn.Module:
    """The network, untrained, that a saved estimator is loaded onto."""
    return plain_network(**{name: architecture[name] for name in _NETWORK})


def packed(model: SNGP) -> bytes:
    """The tensors of a model: half of a symmetric sum, float32 where no digit is lost, compressed."""
    tensors = {}
    for name, value in model.state_dict().items():
        if name.endswith(("precision.root", "class_distance.root")):
            value = value[:0]  # it follows from the sums
        elif name.endswith("precision.data") and len(value):
            value = value[0][tuple(torch.tril_indices(*value.shape[1:]))]
        known = ".chosen_score." not in name  # of which only the file knows the type
        if known and value.dtype == torch.float64 and bool((value.float().double() == value).all()):
            value = value.float()
        tensors[name] = value.contiguous()
    return zlib.compress(save_tensors(tensors), level=1)


def unpacked(content: bytes, architecture: Mapping[str, Any]) -> SNGP:
    """The model whose tensors were packed."""
    with torch.random.fork_rng(devices=()):
        model = network(**architecture)
    tensors = load_tensors(zlib.decompress(content))
    own = model.state_dict()
    for name, value in tensors.items():
        if name.endswith("precision.data") and len(value):
            size = own[name].shape[-1]
            whole = torch.zeros(size, size, dtype=torch.float64)
            whole[tuple(torch.tril_indices(size, size))] = value.double()
            tensors[name] = (whole + whole.tril(-1).T)[None]
        elif value.is_floating_point() and name in own:
            tensors[name] = value.to(own[name].dtype)
    model.load_state_dict(tensors)
    model.fingerprint = Fingerprint(model.net)
    return model.eval()


def _plain_state(estimator: "Fitted") -> dict[str, Any]:
    """All that is neither the model nor a tensor, as JSON."""
    parameters = estimator.get_params()
    class_weight = parameters.pop("class_weight", None)
    if not isinstance(parameters["random_state"], int | None):
        parameters["random_state"] = None  # a generator has moved on since
    state: dict[str, Any] = {"kind": type(estimator).__name__, "parameters": _plain(parameters)}
    state["class_weight"] = _pairs(class_weight) if hasattr(estimator, "class_weight") else []
    state |= {name: _plain(getattr(estimator, name)) for name in _FITTED if hasattr(estimator, name)}
    state["architecture"] = _plain(estimator._architecture)
    state["categories"] = _plain({str(column): values for column, values in estimator._categories.items()})
    classes = getattr(estimator, "classes_", None)
    state["classes"] = None if classes is None else {"values": classes.tolist(), "dtype": classes.dtype.str}
    if estimator._answers is not None:
        values = vars(estimator._answers[0])
        state["answers"] = {k: v for k, v in values.items() if v is not None and not isinstance(v, Tensor)}
    return state


def _tensors(estimator: "Fitted") -> dict[str, Tensor]:
    """What the model does not hold."""
    tensors = {name: getattr(estimator, name) for name in _TENSORS if hasattr(estimator, name)}
    held = estimator._held_out
    tensors |= {"held_out.x": held.x, "held_out.y": held.y, "held_out.weight": held.weight}
    if estimator._noise is not None:
        tensors |= {"noise.weight": estimator._noise.weight, "noise.constant": estimator._noise.constant}
    if estimator._trees is not None:
        tensors |= {f"trees.{name}": value for name, value in estimator._trees.tensors().items()}
    if estimator._answers is not None:
        prediction, target = estimator._answers
        tensors |= {f"answers.{name}": value for name, value in prediction._tensors().items()}
        tensors["answers.target"] = target
    return {name: value.detach().contiguous().clone() for name, value in tensors.items()}


def _pairs(class_weight: Any) -> list[Any]:
    """Keys of JSON are text, and classes may be numbers: a mapping as a list of pairs."""
    if isinstance(class_weight, Mapping):
        return [[_plain(k), float(v)] for k, v in class_weight.items()]
    return [class_weight]


def _from_pairs(pairs: list[Any]) -> dict[str, Any]:
    if not pairs:
        return {}
    return {"class_weight": pairs[0] if not isinstance(pairs[0], list) else dict(pairs)}


def _plain(value: Any) -> Any:
    """Numpy's numbers, arrays and texts as Python's."""
    return json.loads(json.dumps(value, default=lambda v: v.tolist()))
