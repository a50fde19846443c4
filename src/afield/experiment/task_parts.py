"""The parts of a task that a run predicts: val, test, shifted/NAME, ood/NAME, grid."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from afield.experiment.distributed import gather_in_order, rank_and_world
from afield.experiment.training import batches
from afield.prediction.prediction import Prediction
from afield.tasks import Task

if TYPE_CHECKING:
    from lightning.fabric import Fabric

Data = Dataset[Any] | Tensor
"""Examples with or without targets, or inputs alone."""


def parts_of(task: Task, *, blind: bool = False) -> dict[str, Data]:
    """What is predicted, by name; `blind`: validation data only."""
    parts: dict[str, Data] = {"val": task.val}
    if blind:
        return parts
    parts["test"] = task.test
    parts |= {f"shifted/{name}": data for name, data in task.shifted.items()}
    parts |= {f"ood/{name}": data for name, data in task.ood.items()}
    return parts if task.grid is None else parts | {"grid": task.grid}


def predict_part(predict: Callable[[Any], Prediction], data: Data) -> Prediction:
    """The prediction of all inputs of a part, by a model on the CPU."""
    return Prediction.cat([prediction for prediction, _ in predict_batches(predict, data)])


def predict_batches(
    predict: Callable[[Any], Prediction],
    data: Data,
    *,
    device: torch.device | None = None,
    fabric: "Fabric | None" = None,
) -> Iterator[tuple[Prediction, Tensor]]:
    """The predictions of a part batch by batch, each with its targets (with its inputs, where there are no targets).

    device  of the model; the predictions are on the CPU
    fabric  its processes take turns at the batches; the first process alone gets all predictions, in order
    """
    rank, world = rank_and_world(fabric)
    loader = batches(TensorDataset(data) if isinstance(data, Tensor) else data, rank=rank, world=world)

    def predict_own() -> Iterator[tuple[Prediction, Tensor]]:
        for batch in loader:
            x = batch[0].to(device) if isinstance(batch[0], Tensor) else batch[0]
            yield dataclasses.replace(predict(x), members=None).to("cpu"), batch[-1]

    return gather_in_order(fabric, predict_own(), len(batches(loader.dataset)))
