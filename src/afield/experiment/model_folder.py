"""Folders that hold a trained model. One function opens both kinds: what `afield.save` wrote, and run folders.

    afield.load(folder, net)     the SNGP
    open_model(folder, net)      a model of any method, with its predict function, inputs, labels and identity

`afield.save` writes weights and settings, but no architecture. Such a folder needs `net`: the network, or the text
"module:function" that names a function which makes it. A run folder names its task and its method, which build the
network.
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from afield.errors import DamagedModel
from afield.experiment import run_folder
from afield.experiment.config import Config, list_folders
from afield.experiment.run_folder import Run
from afield.methods import METHODS
from afield.methods.mixture import unit_scales
from afield.model import saving
from afield.model.files import read_tensors
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction
from afield.tasks import TASKS, Task

_NUM_EXAMPLES = 64
_NUM_COMPARED = 8


@dataclass(frozen=True)
class OpenedModel:
    """A trained model, and what is known of it.

    folder    where it was read
    kind      the method of a run, such as "sngp-dropout"; "sngp" or "attach" for a folder of `afield.save`
    model     in evaluation mode
    predict   inputs -> `Prediction`, as the method predicts
    identity  SHA-256 of the weights
    dtype     of the inputs; for a folder of `afield.save`, of the weights
    shape     of one input; None: unknown
    example   a few typical inputs; None: unknown
    labels    names of the classes; empty: unknown
    task      of a run; None for a folder of `afield.save`
    """

    folder: Path
    kind: str
    model: nn.Module
    predict: Callable[[Any], Prediction]
    identity: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None = None
    example: Tensor | None = None
    labels: tuple[str, ...] = ()
    task: Task | None = None

    def as_sngp(self, user: str) -> SNGP:
        """The model as an `SNGP` whose own `predict` gives these predictions.

        user  what needs it, as it is named in the errors: a dense network has no Gaussian process, and an `SNGP` makes
              one pass where Monte Carlo dropout averages several
        """
        if not isinstance(self.model, SNGP):
            raise ValueError(
                f"{self.folder} holds a {self.kind} model: {user} takes those with a Gaussian-process output, such as "
                "sngp and dnn-gp. Make a plain network into one with afield.attach; "
                "afield.experiment.model_folder.open_model opens it as it is."
            )
        if self.example is not None:
            x = self.example[:_NUM_COMPARED]
            if not torch.allclose(self.model.predict(x).logits, self.predict(x).logits, rtol=1e-4, atol=1e-5):
                raise ValueError(
                    f"{self.folder}: a prediction of {self.kind} is an average over several passes, and {user} takes a "
                    "model of one pass. Use a run of the method that it is made from."
                )
        return self.model


def load(path: str | os.PathLike[str], net: nn.Module | str | None = None) -> SNGP:
    """The model of a folder that `afield.save` wrote, or of a run folder.

    net  for a folder of `afield.save`: the network, whose own weights do not matter, or "module:function", which names
         a function that makes it. A run folder needs none.
    """
    return open_model(path, net).as_sngp("afield.load")


def open_model(path: str | os.PathLike[str], net: nn.Module | str | None = None) -> OpenedModel:
    """The model of a folder that `afield.save` wrote, which needs `net` as in `load`, or of a run of any method."""
    folder = Path(path)
    if is_saved(folder):
        return _open_saved(folder, net)
    _check_run(folder)
    if net is not None:
        raise ValueError(f"net is for folders written by afield.save; {folder} is a run folder, which needs none.")
    return _open_run(run_folder.read(folder))


def is_saved(folder: Path) -> bool:
    """Whether the folder was written by `afield.save`."""
    return (folder / saving.INDEX).is_file()


def hash_weights(path: str | os.PathLike[str]) -> str:
    """The identity of a folder's model: SHA-256 of its weights. The model itself is not built."""
    folder = Path(path)
    if is_saved(folder):
        return str(saving.read_index(folder)["tensors"]["sha256"])
    _check_run(folder)
    return run_folder.check_hash(_weights_file(run_folder.read(folder)))


def read_labels(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The names of the classes that `afield.save` was given as metadata; empty where there are none."""
    folder = Path(path)
    return _labels_of(saving.read_index(folder)) if is_saved(folder) else ()


def _labels_of(index: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(map(str, index["metadata"].get("labels") or ()))


def make_network(name: str) -> nn.Module:
    """What the function named by "module:function" returns. Modules of the current folder are found."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"net (--net) expects module:function, such as mynets:resnet, got {name!r}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function, None)
    except (Exception, SystemExit) as error:  # the module is a user's own: anything can go wrong in it
        raise ValueError(
            f"net (--net) {name}: the module {module} does not import ({type(error).__name__}: {error}). Modules are "
            f"looked for in {os.getcwd()} and where Python is installed."
        ) from error
    if not callable(make):
        raise ValueError(f"The module {module} has no function {function}.")
    try:
        net = make()
    except Exception as error:
        raise ValueError(f"net (--net) {name} raised {type(error).__name__}: {error}") from error
    if not isinstance(net, nn.Module):
        raise ValueError(f"{name} must return a torch.nn.Module, got {type(net).__name__}.")
    return net


def restore_model(config: Config, task: Task, weights: Path) -> nn.Module:
    """The trained model of a config, from the file of its weights, in evaluation mode.

    The weights may be those of the method that it is trained as: its scales are then 1, or there is no posterior yet.
    """
    method = METHODS[config.method]
    model = method.build(task.backbone, task.num_outputs, config.settings)
    try:
        tensors = read_tensors(run_folder.read_file(weights))
        if method.take_over is not None and not tensors.keys() >= model.state_dict().keys():
            tensors = method.take_over(model, tensors)
        model.load_state_dict(unit_scales(model) | tensors)
    except DamagedModel:
        raise
    except (ValueError, RuntimeError) as error:
        raise run_folder.damaged(weights, str(error)) from error
    return model.eval()


def _open_saved(folder: Path, net: nn.Module | str | None) -> OpenedModel:
    if net is None:
        raise ValueError(
            f"{folder} was written by afield.save: give --net module:function, which makes its network (in Python: "
            "net, the network itself or that text)."
        )
    model, index = saving.load_with_index(folder, make_network(net) if isinstance(net, str) else net)
    return OpenedModel(
        folder=folder,
        kind=model.kind,
        model=model,
        predict=model.predict,
        identity=str(index["tensors"]["sha256"]),
        dtype=next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32),
        labels=_labels_of(index),
    )


def _open_run(finished: Run) -> OpenedModel:
    weights, config = _weights_file(finished), Config.from_dict(finished.config)
    task, method = TASKS[config.task](config.data_seed, config.preset), METHODS[config.method]
    model = restore_model(config, task, weights)
    example = default_collate([task.test[row][0] for row in range(min(_NUM_EXAMPLES, len(task.test)))])
    return OpenedModel(
        folder=finished.folder,
        kind=config.method,
        model=model,
        predict=lambda x: method.predict(model, x),
        identity=hash_weights(finished.folder),
        dtype=example.dtype,
        shape=tuple(example.shape[1:]),
        example=example,
        task=task,
    )


def _check_run(folder: Path) -> None:
    if not (folder / run_folder.CONFIG).is_file():
        raise DamagedModel(
            f"{folder} is not a saved model: it has no {saving.INDEX}. It is not a finished run either: it has no "
            f"{run_folder.CONFIG}."
        )


def _weights_file(finished: Run) -> Path:
    file = finished.folder / run_folder.MODEL
    if not file.is_file():
        members = Config.from_dict(finished.config).members
        if not members:
            raise DamagedModel(f"{finished.folder} is incomplete: it has no {file.name}. Delete it and run it again.")
        raise ValueError(
            f"{finished.folder} is an ensemble ({finished.method}) and has no model of its own: load its members, "
            f"{list_folders(members)}."
        )
    return file
