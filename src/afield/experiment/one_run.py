"""Experiments: a `Config` decides a run, `run` makes its folder, once.

A run that is finished is read, never made again; one that was stopped goes on after its last epoch; one that another
process is making is refused. An ensemble is assembled from its members' folders: seed s of size M has the members
s M .. s M + M - 1, which are runs of their own, trained where they are missing.
"""

import contextlib
import dataclasses
import json
import os
import platform
import sys
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from afield.experiment import run_folder
from afield.experiment.config import Config, folders_of
from afield.experiment.distributed import first, in_order, rank_of, watched
from afield.experiment.evaluation import evaluate, fit_scores, targets
from afield.experiment.run_folder import Run
from afield.experiment.training import batches, fit
from afield.methods import METHODS, Method
from afield.methods.method import Predict
from afield.model.batches import device_of
from afield.prediction.prediction import Prediction
from afield.tasks import TASKS, Task
from afield.version import __version__

if TYPE_CHECKING:
    from lightning.fabric import Fabric

_DRAWN = 500  # hidden vectors and OOD inputs of a part that are kept for pictures
OnEpoch = Callable[[int, int, float], None]
"""(epoch, of how many, loss)"""


def run(
    config: Config,
    out: Path = Path("runs"),
    *,
    fresh: bool = False,
    on_epoch: OnEpoch = lambda *_: None,
    fabric: "Fabric | None" = None,
) -> Run:
    """Train, predict, judge and write; or read, if that was done before. `fresh` starts again from nothing.

    With a `fabric`, all its processes call this; the first alone writes, holds the folder and calls `on_epoch`.
    """
    folder = out / config.folder
    method = METHODS[config.method]
    with contextlib.ExitStack() as held, watched(fabric):

        def begin() -> bool:
            held.enter_context(run_folder.locked(folder))
            if fresh or _resized(folder, config):
                run_folder.clear(folder)
            claim(folder, config)
            return run_folder.finished(folder)

        if first(fabric, begin):
            return run_folder.read(folder)
        begun = datetime.now(UTC)
        task = TASKS[config.task](config.data_seed, config.preset)
        make = _single if method.members is None else _assembled
        made = make(config, out, task, on_epoch, fabric)

        def end() -> None:
            assert made is not None
            predictions, extra, figures, cost = made
            run_folder.write(folder / run_folder.PREDICTIONS, run_folder.pack(predictions, _arrays(task) | extra))
            run_folder.write_json(
                folder / run_folder.ENVIRONMENT, environment(begun) | {"processes": rank_of(fabric)[1]}
            )
            run_folder.write_json(folder / run_folder.METRICS, {"metrics": figures, "cost": cost})
            (folder / run_folder.CHECKPOINT).unlink(missing_ok=True)

        first(fabric, end)
    return run_folder.read(folder)


def load(finished: Run) -> tuple[Task, Method, nn.Module]:
    """Task, method and trained model of a finished run of a single model."""
    config = Config.from_dict(finished.config)
    file = finished.folder / run_folder.MODEL
    if not file.is_file():
        raise ValueError(f"{finished.folder} has no model of its own: load its members, {folders_of(config.members)}.")
    task, method = TASKS[config.task](config.data_seed, config.preset), METHODS[config.method]
    return task, method, _restored(config, task, file)


def predict(method: Method, model: nn.Module, data: Dataset[Any] | Tensor) -> Prediction:
    """The prediction of a whole data set."""
    return Prediction.cat([prediction for prediction, _ in _predictions(method.predict, model, data, None)])


def parts_of(task: Task, *, blind: bool = False) -> dict[str, Dataset[Any] | Tensor]:
    """What is predicted, by name."""
    parts: dict[str, Dataset[Any] | Tensor] = {"val": task.val}
    if blind:
        return parts
    parts["test"] = task.test
    parts |= {f"shifted/{name}": data for name, data in task.shifted.items()}
    parts |= {f"ood/{name}": data for name, data in task.ood.items()}
    return parts if task.grid is None else parts | {"grid": task.grid}


def environment(begun: datetime) -> dict[str, Any]:
    """Where and how a run was made."""
    return {
        "afield": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "begun": begun.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }


Made = tuple[dict[str, Prediction], dict[str, Tensor], dict[str, float], dict[str, float]]
"""Predictions, further arrays, metrics, cost."""


def _predictions(
    predict: Predict, model: nn.Module, data: Dataset[Any] | Tensor, fabric: "Fabric | None"
) -> Iterator[tuple[Prediction, Tensor]]:
    """Predictions batch by batch, each with the last of its batch (targets, if it has any), in order.

    Several processes take turns at the batches, which are those of one, and the first alone gets the predictions.
    """
    device, (rank, world) = device_of(model), rank_of(fabric)
    loader = batches(TensorDataset(data) if isinstance(data, Tensor) else data, rank=rank, world=world)

    def own() -> Iterator[tuple[Prediction, Tensor]]:
        for batch in loader:
            x = batch[0].to(device) if isinstance(batch[0], Tensor) else batch[0]
            prediction = predict(model, x)
            yield dataclasses.replace(prediction, members=None).to("cpu"), batch[-1]

    return in_order(fabric, own(), len(batches(loader.dataset)))


def _single(config: Config, out: Path, task: Task, on_epoch: OnEpoch, fabric: "Fabric | None") -> Made | None:
    """None but on the first process."""
    folder, method = out / config.folder, METHODS[config.method]
    first(fabric, lambda: _take_over(config, out))
    model = _trained(config, folder, task, method, on_epoch, fabric)
    predictions: dict[str, Prediction] = {}
    for name, data in parts_of(task, blind=config.blind).items():
        begin = time.perf_counter()
        pieces = [prediction for prediction, _ in _predictions(method.predict, model, data, fabric)]
        if pieces:
            predictions[name] = Prediction.cat(pieces)
        if pieces and name in ("val", "test"):
            per_example = (time.perf_counter() - begin) / len(predictions[name])
    fitted: dict[str, Any] = {}
    if not config.blind and first(fabric, lambda: predictions["test"].probs is not None):
        seen = _predictions(method.hidden or method.predict, model, task.train, fabric)
        fitted = fit_scores(lambda prediction: prediction, seen, task.num_outputs)
        if fabric is not None:
            deque(seen, maxlen=0)  # where there is nothing to fit: the other processes go on to the end
    if not predictions:
        return None
    figures = evaluate(task, predictions, fitted)
    features = {
        f"{name}/features": p.features[run_folder.spread(len(p), _DRAWN)].half()
        for name, p in predictions.items()
        if p.features is not None and name.startswith(("test", "ood/"))
    }
    if "test" in predictions:
        features["test/rows"] = run_folder.spread(len(predictions["test"]), _DRAWN)
    seconds = sum(line["seconds"] for line in read_log(folder))
    parameters = sum(p.numel() for p in model.parameters())
    cost = {"train_seconds": seconds, "ms_per_example": 1e3 * per_example, "parameters": parameters}
    return predictions, features, figures, cost


def _take_over(config: Config, out: Path) -> None:
    """Copy the trained model of the twin, where its run is finished."""
    twin, folder = config.twin, out / config.folder
    if twin is None or (folder / run_folder.MODEL).exists() or not run_folder.finished(out / twin.folder):
        return
    source = run_folder.read(out / twin.folder)
    if Config.from_dict(source.config) == twin:
        for name in (run_folder.LOG, run_folder.MODEL):  # the model last: it says that training is over
            run_folder.write(folder / name, (source.folder / name).read_bytes())


def _trained(
    config: Config, folder: Path, task: Task, method: Method, on_epoch: OnEpoch, fabric: "Fabric | None"
) -> nn.Module:
    """The trained model: from its file if a run was stopped after training, else by training."""
    settings, file = config.settings, folder / run_folder.MODEL
    if first(fabric, file.is_file):
        model = _restored(config, task, file)
        return model if fabric is None else model.to(fabric.device)
    leads = rank_of(fabric)[0] == 0
    with (folder / run_folder.LOG).open("a", encoding="utf-8") if leads else contextlib.nullcontext() as log:
        last = time.perf_counter()

        def heard(epoch: int, loss: float) -> None:
            nonlocal last
            now = time.perf_counter()
            _log(log, {"epoch": epoch, "loss": loss, "seconds": now - last})
            last = now
            on_epoch(epoch, settings.epochs, loss)

        changes = dataclasses.asdict(settings) | {"on_epoch": heard if leads else lambda *_: None, "fabric": fabric}
        model = fit(task, method, seed=config.seed, checkpoint=folder / run_folder.CHECKPOINT, **changes)
        if leads:
            _log(log, {"finish": True, "seconds": time.perf_counter() - last})
    state = {name: t.detach().cpu().contiguous().clone() for name, t in model.state_dict().items()}
    first(fabric, lambda: run_folder.write(file, save(state)))
    return model


def _restored(config: Config, task: Task, file: Path) -> nn.Module:
    """The trained model from its file."""
    model = METHODS[config.method].build(task.backbone, task.num_outputs, config.settings)
    model.load_state_dict(load_file(file))
    return model.eval()


def _assembled(config: Config, out: Path, task: Task, on_epoch: OnEpoch, fabric: "Fabric | None") -> Made | None:
    """None but on the first process."""
    members = METHODS[config.method].members
    assert members is not None
    made = [run(member, out, on_epoch=on_epoch, fabric=fabric) for member in config.members]
    if rank_of(fabric)[0] != 0:
        return None
    predictions = {
        part: members.combine([member.prediction(part) for member in made])
        for part in parts_of(task, blind=config.blind)
    }
    cost = {name: sum(member.cost[name] for member in made) for name in made[0].cost}
    return predictions, {}, evaluate(task, predictions), cost


def _resized(folder: Path, config: Config) -> bool:
    """Whether the folder holds the same ensemble of another size: it costs nothing to assemble it again."""
    if METHODS[config.method].members is None or not (folder / run_folder.CONFIG).exists():
        return False
    there = _read_config(folder)
    return (
        there != config and replace(there, settings=replace(there.settings, members=config.settings.members)) == config
    )


def _read_config(folder: Path) -> Config:
    return Config.from_dict(tomllib.loads((folder / run_folder.CONFIG).read_text(encoding="utf-8")))


def claim(folder: Path, config: Config) -> None:
    """Write down what this folder is for, or see that it is for the same."""
    file = folder / run_folder.CONFIG
    if not file.exists():
        run_folder.write(file, run_folder.to_toml(config.to_dict()))
        return
    there = _read_config(folder).to_dict()
    changed = [f"{k} = {there[k]} there, {v} now" for k, v in config.to_dict().items() if there[k] != v]
    if changed:
        raise ValueError(
            f"{folder} holds a run with other settings ({'; '.join(changed)}). Use another --out, or --fresh to "
            "replace it."
        )


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of log.jsonl; a last line cut short by a kill is left out."""
    lines = []
    for line in (folder / run_folder.LOG).read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def _log(file: Any, line: dict[str, Any]) -> None:
    file.write(json.dumps(line) + "\n")
    file.flush()


def _arrays(task: Task) -> dict[str, Tensor]:
    """Targets, and for tasks that can be drawn also inputs."""
    arrays = {f"{name}/y": targets(data) for name, data in (("val", task.val), ("test", task.test))}
    if task.grid is not None:
        arrays |= {"grid/x": task.grid, "train/x": task.train.tensors[0], "train/y": task.train.tensors[-1]}
        arrays |= {
            f"ood/{name}/x": data.tensors[0][run_folder.spread(len(data), _DRAWN)] for name, data in task.ood.items()
        }
    return arrays
