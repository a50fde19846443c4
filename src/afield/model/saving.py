"""Save and load: safetensors for the tensors, JSON for the rest. Nothing is ever unpickled.

A model is a folder with `afield.json` and the tensor file that it names. The tensor file has its hash in its name and
is written first; replacing `afield.json` is the one step that makes the new model the current one. A crash at any
point leaves the old model or the new one, never a mixture.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn

from afield.bounds.spectral import bounds_of
from afield.errors import DamagedModel
from afield.gp.head import SCALARS
from afield.model import convert
from afield.model.class_changes import change_outputs
from afield.model.layers import layers_of
from afield.model.sngp_model import SNGP
from afield.version import __version__

FORMAT = 1
INDEX = "afield.json"


def save(model: SNGP, path: str | os.PathLike[str], *, metadata: dict[str, Any] | None = None) -> Path:
    """Write the model to a folder, replacing the model that is there, atomically.

    `metadata`: anything that JSON can hold, such as class names; `read_index(path)["metadata"]` gives it back.
    """
    if not isinstance(model, SNGP):
        raise TypeError(
            f"afield.save expects a model made by afield.sngp or afield.attach, got {type(model).__name__}."
        )
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    # Tied tensors are written once for each name: safetensors refuses shared storage.
    tensors = {name: t.detach().cpu().contiguous().clone() for name, t in model.state_dict().items()}
    payload = save_tensors(tensors)
    digest = hashlib.sha256(payload).hexdigest()
    index = {
        "format": FORMAT,
        "afield": __version__,
        "torch": torch.__version__,
        "kind": model.kind,
        "settings": model.settings | ({"bound": _bounds(model)} if model.kind == "sngp" else {}),
        "in_features": model.head.in_features,
        "out_features": model.head.out_features,
        "tensors": {"file": f"model-{digest[:16]}.safetensors", "sha256": digest},
        "metadata": metadata or {},
    }
    text = json.dumps(index, indent=2, allow_nan=False) + "\n"
    write_file(folder / f"model-{digest[:16]}.safetensors", payload)
    write_file(folder / INDEX, text.encode())
    for old in folder.glob("model-*.safetensors"):
        if digest[:16] not in old.name:
            old.unlink()
    return folder


def load(path: str | os.PathLike[str], net: nn.Module) -> SNGP:
    """The model saved in a folder, on the architecture of `net`, whose own weights do not matter."""
    folder = Path(path)
    index = read_index(folder)
    file = folder / index["tensors"]["file"]
    if not file.is_file():
        raise DamagedModel(f"{folder} is incomplete: {file.name} is missing. Save the model again.")
    payload = file.read_bytes()
    if hashlib.sha256(payload).hexdigest() != index["tensors"]["sha256"]:
        raise DamagedModel(f"{file} is damaged or truncated: its hash does not match {INDEX}. Save the model again.")
    try:
        tensors = load_tensors(payload)
    except SafetensorError as error:
        raise DamagedModel(f"{file} is not a safetensors file: {error}") from error
    model = _rebuild(index, net)
    expected, problems = model.state_dict(), []
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors:
            problems.append(f"{name}: in the network, not in the file")
        elif name not in expected:
            problems.append(f"{name}: in the file, not in the network")
    try:
        if problems:
            raise RuntimeError("\n".join(problems[:10]))
        floating = {t.dtype for n, t in tensors.items() if t.is_floating_point() and not _always_double(n)}
        if len(floating) == 1:
            model.to(floating.pop())
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise DamagedModel(f"{folder} was saved from another network than {type(net).__name__}:\n{error}") from error
    return model.eval()


def read_index(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON part of a saved model."""
    file = Path(path) / INDEX
    if not file.is_file():
        raise DamagedModel(f"{path} is not a saved model: it has no {INDEX}.")
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
        version = index["format"]
        file_name, settings = str(index["tensors"]["file"]), index["settings"]
        index["tensors"]["sha256"], settings["output"], settings["head"].items()
        if index["kind"] not in ("sngp", "attach"):
            raise ValueError(f"unknown kind {index['kind']!r}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedModel(f"{file} is damaged, or not written by afield: {error!r}") from error
    if version != FORMAT:
        raise DamagedModel(
            f"{file} has format {version}, written by afield {index.get('afield')}; this afield ({__version__}) reads "
            f"format {FORMAT}. Upgrade afield."
        )
    if Path(file_name).name != index["tensors"]["file"]:
        raise DamagedModel(f"{file} names a tensor file outside its folder: {index['tensors']['file']!r}.")
    return index


def _rebuild(index: dict[str, Any], net: nn.Module) -> SNGP:
    settings = index["settings"]
    try:
        if index["kind"] == "attach":
            model = convert.attach(net, output=settings["output"], **settings["head"])
        else:
            rules = settings["bound"] or None
            model = convert.sngp(net, rules, output=settings["output"], freeze=settings["freeze"], **settings["head"])
        if classes := settings.get("classes"):
            zeros = torch.zeros_like(model.head.random_features.phase)
            added = [nn.Parameter(zeros.clone()) for _ in range(classes["added"])]
            change_outputs(model, added, classes["dropped"])
        return model
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedModel(f"The saved model does not fit {type(net).__name__}: {error}") from error


def _bounds(model: SNGP) -> dict[str, float]:
    """What is bounded now, by name: rules may name a user's own types, and bounds change and fold away."""
    return {name: next(iter(b.values())).c for name, layer in layers_of(model.net) if (b := bounds_of(layer))}


def _always_double(name: str) -> bool:
    return name.endswith(("precision.data", "precision.mass", "reference", "length_scale", "radius", *SCALARS))


def write_file(path: Path, data: bytes) -> None:
    """Write to a temporary name, flush to disk, rename."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
