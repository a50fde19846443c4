"""One run: a `Config` decides it, and `run` makes its folder, once.

A finished run is read, never made again. A stopped run goes on after its last epoch. A run that another process is
making is refused. An ensemble is combined from the folders of its members: seed s of size M has the members
s M .. s M + M - 1, which are runs of their own and are trained where they are missing. It is calibrated as a whole on
their predictions of validation data.
"""

import contextlib
import dataclasses
import functools
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from afield.experiment import run_folder
from afield.experiment.config import Config
from afield.experiment.distributed import explain_failures, on_first_rank, rank_and_world
from afield.experiment.evaluation import evaluate, fit_scores, output_layer, targets
from afield.experiment.model_folder import restore_model
from afield.experiment.position_metrics import kept_pictures
from afield.experiment.run_folder import Results, Run, evenly_spaced_rows
from afield.experiment.task_parts import parts_of, predict_batches
from afield.experiment.training import OnEpoch, batches, fit
from afield.methods import METHODS
from afield.methods.ensemble import combine, mean_scale
from afield.methods.mixture import fit_scales, logit_scale_of
from afield.model.batches import device_of
from afield.prediction.prediction import Prediction
from afield.tasks import TASKS, Task
from afield.version import __version__

if TYPE_CHECKING:
    from lightning.fabric import Fabric

LOGIT_SCALE, SCALES = "logit_scale", "ensemble_scales"  # arrays of a single model's run, and of an ensemble's
_NUM_DRAWN = 500  # hidden vectors and OOD inputs of a part that are kept for pictures


def run(
    config: Config,
    out: Path = Path("runs"),
    *,
    fresh: bool = False,
    on_epoch: OnEpoch = lambda epoch, loss: None,
    fabric: "Fabric | None" = None,
) -> Run:
    """Train, predict, evaluate and write a run; or read it, if it is finished.

    fresh     start again from nothing
    on_epoch  is called with the number of every epoch, from 1, and its mean loss
    fabric    all its processes call this; the first alone locks the folder, writes to it and calls `on_epoch`
    out       folder of all runs

    returns  the `Run`: its folder, its config, its metrics
    raises   Busy if another process is writing the folder; Diverged if the training does

    >>> config = Config.of("two-moons", "sngp", preset="smoke", epochs=1)
    >>> 0 <= run(config).metrics["accuracy/clean"] <= 1
    True
    """
    folder = out / config.folder
    with contextlib.ExitStack() as lock, explain_failures(fabric):

        def begin() -> bool:
            lock.enter_context(run_folder.locked(folder))
            run_folder.tidy(folder)
            if fresh or _is_ensemble_of_another_size(folder, config):
                run_folder.clear(folder)
            claim_folder(folder, config)
            return run_folder.is_finished(folder)

        if on_first_rank(fabric, begin):
            return run_folder.read(folder)
        started = datetime.now(UTC)
        task = TASKS[config.task](config.data_seed, config.preset)
        if METHODS[config.method].members is None:
            model = _train_model(config, out, task, on_epoch=on_epoch, fabric=fabric)
            results = _evaluate_model(config, folder, task, model, fabric=fabric)
        else:
            results = _combine_members(config, out, task, on_epoch=on_epoch, fabric=fabric)

        def end() -> None:
            assert results is not None
            environment = describe_environment(started) | {"processes": rank_and_world(fabric)[1]}
            run_folder.write_results(folder, results, environment)

        on_first_rank(fabric, end)
    return run_folder.read(folder)


def claim_folder(folder: Path, config: Config) -> None:
    """Write the config of a run into its folder; refuse a folder that has another one."""
    file = folder / run_folder.CONFIG
    if not file.exists():
        run_folder.write_hashed(file, run_folder.to_toml(config.to_dict()))
        return
    run_folder.check_hash(file)
    present = Config.from_file(file).to_dict()
    changed = [f"{k} = {present[k]} there, {v} now" for k, v in config.to_dict().items() if present[k] != v]
    if changed:
        raise ValueError(
            f"{folder} holds a run with other settings ({'; '.join(changed)}). Use another --out, or --fresh to "
            "replace it."
        )


def describe_environment(started: datetime) -> dict[str, Any]:
    """Where and how a run was made, now that it ends."""
    return {
        "afield": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "begun": started.isoformat(timespec="seconds"),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _train_model(config: Config, out: Path, task: Task, *, on_epoch: OnEpoch, fabric: "Fabric | None") -> nn.Module:
    """The trained model: from its file, if there is one, else by training."""
    folder = out / config.folder
    weights, leads = folder / run_folder.MODEL, rank_and_world(fabric)[0] == 0
    on_first_rank(fabric, lambda: _reuse_same_training(config, out, task))
    if on_first_rank(fabric, weights.is_file):
        model = restore_model(config, task, weights)
        return model if fabric is None else model.to(fabric.device)
    last = time.perf_counter()

    def log(line: dict[str, Any]) -> None:
        nonlocal last
        now = time.perf_counter()
        run_folder.append_log(folder, line | {"seconds": now - last})
        last = now

    def log_epoch(epoch: int, loss: float) -> None:
        if leads:
            log({"epoch": epoch, "loss": loss})
            on_epoch(epoch, loss)

    model = fit(
        task,
        METHODS[config.method],
        seed=config.seed,
        checkpoint=folder / run_folder.CHECKPOINT,
        on_epoch=log_epoch,
        fabric=fabric,
        **dataclasses.asdict(config.settings),
    )
    if leads:
        log({"finish": True})
    content = _pack_model(model)
    on_first_rank(fabric, lambda: run_folder.write_hashed(weights, content))
    return model


def _pack_model(model: nn.Module) -> bytes:
    return save({name: t.detach().cpu().contiguous().clone() for name, t in model.state_dict().items()})


def _reuse_same_training(config: Config, out: Path, task: Task) -> None:
    """Take the trained model of a finished run that trains the same weights; what it lacks is its calibration."""
    same, folder = config.same_training, out / config.folder
    if same is None or (folder / run_folder.MODEL).exists() or not run_folder.is_finished(out / same.folder):
        return
    source = run_folder.read(out / same.folder)
    if Config.from_dict(source.config) != same:
        return
    model, method = restore_model(config, task, source.folder / run_folder.MODEL), METHODS[config.method]
    if method.take_over is not None:
        method.finish(model, batches(task.train), batches(task.val), config.settings)
    elif method.calibrate is not None:
        method.calibrate(model, batches(task.val), config.settings)
    run_folder.write(folder / run_folder.LOG, (source.folder / run_folder.LOG).read_bytes())
    # The model last: with it, training is over.
    run_folder.write_hashed(folder / run_folder.MODEL, _pack_model(model))


def _evaluate_model(
    config: Config, folder: Path, task: Task, model: nn.Module, *, fabric: "Fabric | None"
) -> Results | None:
    """Predictions and metrics of a trained model on all parts of its task; None but on the first process."""
    method, device = METHODS[config.method], device_of(model)
    predict = functools.partial(method.predict, model)
    predict_hidden = functools.partial(method.hidden or method.predict, model)
    predictions: dict[str, Prediction] = {}
    for part, data in parts_of(task, blind=config.blind).items():
        start = time.perf_counter()
        pieces = [prediction for prediction, _ in predict_batches(predict, data, device=device, fabric=fabric)]
        if pieces:
            predictions[part] = Prediction.cat(pieces)
        if pieces and part in ("val", "test"):
            seconds_per_example = (time.perf_counter() - start) / len(predictions[part])
    fitted: dict[str, Any] = {}
    if not config.blind and on_first_rank(fabric, lambda: predictions["test"].probs is not None):
        train = predict_batches(predict_hidden, task.train, device=device, fabric=fabric)
        fitted = fit_scores(lambda prediction: prediction, train, task.num_outputs, output=output_layer(model))
        if fabric is not None:
            deque(train, maxlen=0)  # the other processes have nothing to fit, but must predict to the end
    if not predictions:
        return None
    cost = {
        "train_seconds": sum(line["seconds"] for line in run_folder.read_log(folder)),
        "ms_per_example": 1e3 * seconds_per_example,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    metrics, scale = evaluate(task, predictions, fitted), torch.tensor(logit_scale_of(model), dtype=torch.float64)
    if predictions["val"].positions:
        kept = {} if config.blind else kept_pictures(task, predictions)
        return Results({}, kept | {LOGIT_SCALE: scale}, metrics, cost)
    return Results(predictions, _arrays_of(task) | _drawn_features(predictions) | {LOGIT_SCALE: scale}, metrics, cost)


def _combine_members(
    config: Config, out: Path, task: Task, *, on_epoch: OnEpoch, fabric: "Fabric | None"
) -> Results | None:
    """Predictions and metrics of an ensemble, from the runs of its members; None but on the first process."""
    if getattr(task.backbone(), "dimensions", 0):
        raise ValueError(
            f"{config.method} combines what its members have kept of every input, and runs on {config.task}, which "
            "answers at every position, keep a few pictures alone: use a method of one model."
        )
    runs = [run(member, out, on_epoch=on_epoch, fabric=fabric) for member in config.members]
    if rank_and_world(fabric)[0] != 0:
        return None
    scales = fit_scales(
        [member.prediction("val") for member in runs],
        targets(task.val),
        logit_scale=mean_scale(float(m.array(LOGIT_SCALE)) if LOGIT_SCALE in m else 1.0 for m in runs),
        fixed_amplitude=config.settings.amplitude is not None,
    )
    predictions = {
        part: combine([member.prediction(part) for member in runs], scales)
        for part in parts_of(task, blind=config.blind)
    }
    cost = {name: sum(member.cost[name] for member in runs) for name in runs[0].cost}
    arrays = _arrays_of(task) | {SCALES: torch.tensor(scales, dtype=torch.float64)}
    return Results(predictions, arrays, evaluate(task, predictions), cost)


def _is_ensemble_of_another_size(folder: Path, config: Config) -> bool:
    """Whether only the number of members differs from what the folder holds: to combine members again costs nothing."""
    if METHODS[config.method].members is None or not (folder / run_folder.CONFIG).exists():
        return False
    present = Config.from_file(folder / run_folder.CONFIG)
    resized = replace(present, settings=replace(present.settings, members=config.settings.members))
    return present != config and resized == config


def _arrays_of(task: Task) -> dict[str, Tensor]:
    """Targets; also inputs, for tasks whose predictions can be drawn."""
    arrays = {f"{name}/y": targets(data) for name, data in (("val", task.val), ("test", task.test))}
    if task.grid is not None:
        arrays |= {"grid/x": task.grid, "train/x": task.train.tensors[0], "train/y": task.train.tensors[-1]}
        arrays |= {
            f"ood/{name}/x": data.tensors[0][evenly_spaced_rows(len(data), _NUM_DRAWN)]
            for name, data in task.ood.items()
        }
    return arrays


def _drawn_features(predictions: Mapping[str, Prediction]) -> dict[str, Tensor]:
    """Hidden vectors of a few hundred test and OOD inputs, and the numbers of the test rows."""
    features = {
        f"{part}/features": p.features[evenly_spaced_rows(len(p), _NUM_DRAWN)].half()
        for part, p in predictions.items()
        if p.features is not None and part.startswith(("test", "ood/"))
    }
    if "test" in predictions:
        features["test/rows"] = evenly_spaced_rows(len(predictions["test"]), _NUM_DRAWN)
    return features
