"""Save and load: safetensors for the tensors, JSON for the rest. Nothing is ever unpickled.

A model is a folder with `afield.json` and the tensor file that it names. The tensor file has its hash in its name and
is written first; replacing `afield.json` is the one step that makes the new model the current one. A crash at any
point leaves the old model or the new one, never a mixture.

`afield.json` holds the hash of the tensor file and its own, so that a change of any bit is noticed. Savers of one
folder take turns. A loader that finds the model replaced under its hands starts again.
"""

import contextlib
import hashlib
import inspect
import json
import math
import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from afield.bounds.spectral import bounds_of
from afield.errors import DamagedModel, StaleWarning
from afield.gp.chosen_score import ChosenScore
from afield.gp.features import RandomFeatures
from afield.gp.head_state import ADDED_LATER
from afield.gp.noise import NoiseShape
from afield.model import convert
from afield.model.class_changes import change_outputs
from afield.model.files import hash_json, is_temporary, read_tensors, sweep, sweep_temporary, tensor_shapes, write_file
from afield.model.fingerprint import from_digest
from afield.model.hidden import draw_examples
from afield.model.layers import layers_of
from afield.model.sngp_model import CHANGED, REFIT, SNGP, Heads, join, parts_of
from afield.version import __version__

FORMAT = 3
INDEX = "afield.json"
_OWN = re.compile(r"\.(model-|neighbours-|afield\.json\.)")  # temporary names of the files below
_TENSOR_FILE = re.compile(r"(model|neighbours)-[0-9a-f]{16}\.safetensors")
_TRIES = 200  # of a loader whose model is replaced while it reads


def save(
    model: SNGP | Heads,
    path: str | os.PathLike[str],
    *,
    metadata: dict[str, Any] | None = None,
    neighbours: int = 0,
    train: Iterable[Any] | None = None,
) -> Path:
    """Write the model to a folder, replacing the model that is there, atomically.

    metadata    anything that JSON can hold, such as class names; `read_index(path)["metadata"]` gives it back
    neighbours  how many examples of `train`, drawn at random, are kept beside the model as they are: `afield serve`
                shows those that are nearest to an input. `read_neighbours(path)` gives them back
    train       batches as for `afield.fit_posterior`

    returns  the folder
    raises   TypeError if it is no `SNGP`, or JSON cannot hold the metadata

    >>> folder = afield.save(model, "model", metadata={"labels": ["a", "b", "c"]})
    >>> sorted(file.suffix for file in folder.iterdir() if file.suffix)
    ['.json', '.safetensors']
    """
    if not isinstance(model, SNGP | Heads):
        raise TypeError(
            f"afield.save expects a model made by afield.sngp or afield.attach, got {type(model).__name__}."
        )
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    parts = parts_of(model)
    first = parts[0]
    if not all(part.is_fresh() for part in parts):
        warnings.warn(f"afield.save: {CHANGED} Its variance is of other weights. {REFIT}", StaleWarning, stacklevel=2)
    with contextlib.ExitStack() as held:
        for part in parts:
            held.enter_context(part.head.hold())
        # Tied tensors are written once for each name: safetensors refuses shared storage.
        tensors = {name: t.detach().cpu().contiguous().clone() for name, t in model.state_dict().items()}
    if neighbours and train is None:
        raise ValueError(
            "neighbours are examples of the training data: afield.save(..., neighbours=100, train=loader)."
        )
    about, payload = _named("model", save_tensors(tensors))
    files, kept = {about["file"]: payload}, None
    if neighbours and train is not None:
        kept, examples = _named("neighbours", save_tensors(draw_examples(first, train, neighbours)))
        files[kept["file"]] = examples
    index = {
        "format": FORMAT,
        "afield": __version__,
        "torch": torch.__version__,
        "kind": first.kind,
        "settings": first.settings
        | ({"bound": _bounds(first)} if first.kind == "sngp" else {})
        | (
            {"heads": {name: part.settings["head"] for name, part in model.items()}} if isinstance(model, Heads) else {}
        ),
        "in_features": first.head.in_features,
        "out_features": first.head.out_features,
        "tensors": about,
        "neighbours": kept,
        "fitted_with": None if first.fingerprint is None else first.fingerprint.digest,
        "metadata": metadata or {},
    }
    index = json.loads(json.dumps(index, allow_nan=False))
    text = json.dumps(index | {"sha256": hash_json(index)}, indent=2) + "\n"
    with _one_saver_at_a_time(folder) as alone:
        _publish(folder, files, text, alone=alone)
    return folder


def _named(kind: str, payload: bytes) -> tuple[dict[str, Any], bytes]:
    digest = hashlib.sha256(payload).hexdigest()
    return {"file": f"{kind}-{digest[:16]}.safetensors", "bytes": len(payload), "sha256": digest}, payload


def load(path: str | os.PathLike[str], net: nn.Module) -> Any:
    """The model saved in a folder, on the architecture of `net`, whose own weights do not matter."""
    return load_with_index(path, net)[0]


def load_with_index(path: str | os.PathLike[str], net: nn.Module) -> tuple[Any, dict[str, Any]]:
    """The model, and the index that it was saved with."""
    folder = Path(path)
    index, payload = _read_whole(folder)
    try:
        tensors = read_tensors(payload)
        _check_sizes(index, tensor_shapes(payload))
    except ValueError as error:
        raise DamagedModel(f"{folder / index['tensors']['file']} is damaged: {error}. Save the model again.") from error
    model = _rebuild(index, net)
    for head in (part.head for part in parts_of(model)):
        for known in (head.chosen_score, head.noise_shape):
            _take_buffers(model, known, tensors)
    expected, problems = model.state_dict(), []
    tensors = {name: t for name, t in expected.items() if name.endswith(ADDED_LATER)} | tensors
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors:
            problems.append(f"{name}: in the network, not in the file")
        elif name not in expected:
            problems.append(f"{name}: in the file, not in the network")
    try:
        if problems:
            raise RuntimeError("\n".join(problems[:10]))
        _take_dtypes(model, tensors)
        model.load_state_dict(tensors)
        _check_loaded(model, tensors)
    except RuntimeError as error:
        raise DamagedModel(f"{folder} was saved from another network than {type(net).__name__}:\n{error}") from error
    if index.get("fitted_with"):
        for part in parts_of(model):
            part.fingerprint = from_digest(index["fitted_with"])
    return model.eval(), index


def read_neighbours(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The training examples that were saved beside a model, as `draw_examples` drew them; none: empty."""
    folder = Path(path)
    index = read_index(folder)
    about = index.get("neighbours")
    return {} if about is None else read_tensors(_read_tensor_file(folder, {"tensors": about}))


def _take_buffers(model: nn.Module, part: ChosenScore | NoiseShape | None, tensors: dict[str, Tensor]) -> None:
    """Which constants a chosen score or the shape of the noise has, only the file knows."""
    if part is not None:
        prefix = next(name for name, module in model.named_modules() if module is part) + "."
        part.take({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})


def read_index(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON part of a saved model."""
    file = Path(path) / INDEX
    if not file.is_file():
        raise DamagedModel(f"{path} is not a saved model: it has no {INDEX}.")
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
        version = index["format"]
        if version == FORMAT:
            content = {name: value for name, value in index.items() if name != "sha256"}
            if index.get("sha256") != hash_json(content):
                raise ValueError("its content is not what was written: the hash inside does not match")
        files, settings = (
            [index["tensors"]["file"], (index.get("neighbours") or index["tensors"])["file"]],
            index["settings"],
        )
        if not all(isinstance(file_name, str) for file_name in files):
            raise ValueError(f"tensor files {files}")
        index["tensors"]["sha256"], settings["output"], settings["head"].items(), index["metadata"].items()
        if index["kind"] not in ("sngp", "attach"):
            raise ValueError(f"unknown kind {index['kind']!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedModel(f"{file} is damaged, or not written by afield: {error!r} Save the model again.") from error
    if version in range(1, FORMAT):
        raise DamagedModel(
            f"{file} has format {version}, written by afield {index.get('afield')} before the variance had features of "
            "its own: convert the network, fit and save it again."
        )
    if version != FORMAT:
        raise DamagedModel(
            f"{file} has format {version}, written by afield {index.get('afield')}; this afield ({__version__}) reads "
            f"format {FORMAT}. Upgrade afield."
        )
    for name in files:
        if Path(name).name != name:
            raise DamagedModel(f"{file} names a tensor file outside its folder: {name!r}.")
    return index


# Saving


@contextlib.contextmanager
def _one_saver_at_a_time(folder: Path) -> Iterator[bool]:
    """Wait for the other savers of the folder. The lock is on the folder itself, and ends with its process.

    Gives whether there is none. Where there are no such locks, savers rely on sweeping only what is old.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield False
        return
    handle, alone = os.open(folder, os.O_RDONLY), False
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
            alone = True
        yield alone
    finally:
        with contextlib.suppress(OSError):  # or a forked child would go on holding it
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _publish(folder: Path, files: Mapping[str, bytes], text: str, *, alone: bool) -> None:
    """Write tensors and index; delete the tensors that they replace, and what killed savers have left.

    alone  whether nobody else is saving: what others have not finished has then lost its writer
    """
    before = _current_files(folder)
    try:
        for file, payload in files.items():
            write_file(folder / file, payload)
        write_file(folder / INDEX, text.encode())
    except BaseException:
        for file in files.keys() - _current_files(folder):
            (folder / file).unlink(missing_ok=True)
        raise
    current = files.keys() | _current_files(folder)
    for file in before - current:
        (folder / file).unlink(missing_ok=True)
    now = (folder / INDEX).stat().st_mtime
    sweep_temporary(folder, now)
    if alone:
        sweep(folder, now, lambda name: is_temporary(name) and _OWN.match(name) is not None, age=-math.inf)
    sweep(folder, now, lambda name: _TENSOR_FILE.fullmatch(name) is not None, current)


def _current_files(folder: Path) -> set[str]:
    """The tensor files of the model that is there, if there is one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        names = [index["tensors"]["file"], *([index["neighbours"]["file"]] if index.get("neighbours") else [])]
        return {name for name in names if _TENSOR_FILE.fullmatch(name)}
    return set()


def _bounds(model: SNGP) -> dict[str, float]:
    """What is bounded now, by name: rules may name a user's own types, and bounds change and fold away."""
    return {name: next(iter(b.values())).c for name, layer in layers_of(model.net) if (b := bounds_of(layer))}


# Loading


def _read_whole(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Index and tensor file of one saver."""
    for _ in range(_TRIES):
        seen = _index_version(folder)
        index = read_index(folder)
        try:
            return index, _read_tensor_file(folder, index)
        except DamagedModel:
            if _index_version(folder) == seen:
                raise
        time.sleep(0.001)
    raise DamagedModel(f"{folder} was replaced {_TRIES} times while it was read. Save the model less often.")


def _index_version(folder: Path) -> tuple[int, int] | None:
    """Another one after every save."""
    with contextlib.suppress(OSError):
        status = (folder / INDEX).stat()
        return status.st_ino, status.st_mtime_ns
    return None


def _read_tensor_file(folder: Path, index: Mapping[str, Any]) -> bytes:
    file, expected = folder / index["tensors"]["file"], index["tensors"]
    damaged = DamagedModel(f"{file} is damaged or truncated: its hash does not match {INDEX}. Save the model again.")
    try:
        with file.open("rb") as content:
            if os.fstat(content.fileno()).st_size != expected.get("bytes", os.fstat(content.fileno()).st_size):
                raise damaged
            payload = content.read()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise DamagedModel(f"{folder} is incomplete: {file.name} is missing. Save the model again.") from error
    if hashlib.sha256(payload).hexdigest() != expected["sha256"]:
        raise damaged
    return payload


def _check_sizes(index: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse settings that would build a larger head than the file holds, before it is built."""
    head, classes = index["settings"]["head"], index["settings"].get("classes") or {}
    default = inspect.signature(RandomFeatures).parameters["num_random_features"].default
    suffix = "random_features.weight"
    prefix = next((name.removesuffix(suffix) for name in shapes if name.endswith(f".{suffix}")), "")
    first = shapes.get(f"{prefix}weight", (head.get("out_features"),))  # a kept output layer is the network's own
    declared = {
        "num_random_features": (head.get("num_random_features", default), shapes.get(prefix + suffix, (0,))[0]),
        "out_features": (head.get("out_features", first[0]), first[0]),
        "classes.added": (classes.get("added", 0), sum(name.startswith(f"{prefix}added.") for name in shapes)),
    }
    for name, (said, held) in declared.items():
        if said != held:
            raise ValueError(f"{INDEX} says {name} = {said}, the tensors say {held}")


def _rebuild(index: dict[str, Any], net: nn.Module) -> SNGP | Heads:
    settings = index["settings"]
    try:
        if heads := settings.get("heads"):
            return _rebuild_heads(index, heads, net)
        if index["kind"] == "attach":
            model = convert.attach(net, output=settings["output"], **settings["head"])
        else:
            rules = settings["bound"] or None
            model = convert.sngp(net, rules, output=settings["output"], freeze=settings["freeze"], **settings["head"])
        if classes := settings.get("classes"):
            zeros = torch.zeros_like(model.head.features_of_variance.phase)
            added = [nn.Parameter(zeros.clone()) for _ in range(classes["added"])]
            change_outputs(model, added, classes["dropped"])
        return model
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, OverflowError) as error:
        raise DamagedModel(f"The saved model does not fit {type(net).__name__}: {error}") from error


def _rebuild_heads(index: dict[str, Any], heads: dict[str, dict[str, Any]], net: nn.Module) -> Heads:
    made: dict[str, SNGP] = {}
    for name, head in heads.items():
        settings = index["settings"] | {"output": name, "head": head} | ({"bound": None} if made else {})
        one = {key: value for key, value in settings.items() if key != "heads"}
        part = _rebuild({"kind": index["kind"], "settings": one}, net)
        assert isinstance(part, SNGP)
        made[name], net = part, part.net
    return join(made)


def _take_dtypes(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give every parameter and buffer the dtype that it was saved with."""
    kinds = {tensors[name].dtype for name, p in model.named_parameters() if p.is_floating_point()}
    if len(kinds) == 1:
        model.to(kinds.pop())  # with buffers that are not saved
    for name, saved in tensors.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        parameter, buffer = module._parameters.get(leaf), module._buffers.get(leaf)
        own = parameter if parameter is not None else buffer
        if own is None or own.dtype == saved.dtype:
            continue
        if not (own.is_floating_point() and saved.is_floating_point()):
            raise RuntimeError(f"{name}: {own.dtype} in the network, {saved.dtype} in the file")
        if parameter is not None:
            parameter.data = parameter.data.to(saved.dtype)
        else:
            module._buffers[leaf] = own.to(saved.dtype)


def _check_loaded(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """What was read is what the model now holds, bit for bit."""
    for name, own in model.state_dict().items():
        saved = tensors[name]
        same = own.dtype == saved.dtype and own.shape == saved.shape
        if not same or not torch.equal(_bits(own.cpu()), _bits(saved)):
            raise RuntimeError(f"{name}: the network holds {own.dtype} {tuple(own.shape)} otherwise than the file")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
