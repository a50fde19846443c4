"""The training loop.

The seed decides weights, order of examples and dropout masks. With a checkpoint, a training that was killed goes on
after its last finished epoch and ends where it would have ended, bit for bit.

On several processes (`distributed`) the batch size is that of all together: settings mean the same, and weights are the
same up to rounding. But each rank draws its own dropout masks and augmentation, and BatchNorm sees only the rank's part
of a batch.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from afield.errors import Diverged
from afield.experiment import distributed
from afield.experiment.checkpoint import load_checkpoint, save_checkpoint
from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS
from afield.methods import Method
from afield.methods.method import Model, unchanged
from afield.model.batches import device_of
from afield.model.layers import decay_matrices
from afield.model.ranks import share_statistics
from afield.settings import Settings
from afield.tasks import Task

if TYPE_CHECKING:
    from lightning.fabric import Fabric

OnEpoch = Callable[[int, float], bool | None]
"""(number of the epoch, from 1, and its mean loss) -> True to stop there"""
_MOST_EXAMPLES, _MOST_NUMBERS = 1024, 2**24  # in a batch that is predicted


def fit(
    task: Task,
    method: Method,
    *,
    seed: int = 0,
    checkpoint: Path | None = None,
    on_epoch: OnEpoch = lambda epoch, loss: None,
    fabric: "Fabric | None" = None,
    **changes: Any,
) -> nn.Module:
    """Build, train and finish a model on a task.

    checkpoint  a file that is written after every epoch, and read at the start if it is there
    on_epoch    is called with every epoch's number, from 1, and mean loss
    fabric      a launched Fabric, on each of its processes; None: this process alone, on the CPU
    changes     to the task's `Settings`, such as epochs=10
    seed        of weights, batches and dropout masks

    returns  the model
    raises   ValueError if the method cannot be trained so; Diverged if the loss is no number any more

    >>> from afield.methods import METHODS
    >>> from afield.tasks import TASKS
    >>> moons = TASKS["two-moons"](0, "smoke")
    >>> model = fit(moons, METHODS["sngp"], epochs=1, num_random_features=64)
    >>> model.predict(torch.zeros(1, 2)).probs.shape
    torch.Size([1, 2])
    """
    settings = replace(task.settings, **{**method.settings, **changes})
    rank, world = distributed.rank_and_world(fabric)
    if world > 1 and method.loss is None:
        raise ValueError(
            "This method is fitted in one pass, not by gradient steps: it has no use for several processes."
        )
    if world > 1 and settings.momentum is not None:
        raise ValueError(
            "Moving averages of several processes do not add up: use momentum=None, the exact sum, or one process."
        )
    torch.manual_seed(seed)
    model = method.build(task.backbone, task.num_outputs, settings)
    with distributed.explain_failures(fabric):
        if method.loss is not None:
            freeze(model, settings.frozen)
            if world > 1:
                torch.manual_seed(_mix_seeds(_mix_seeds(seed, 0), rank))  # its own masks and augmentation
            shuffle, loss = torch.Generator(), method.loss
            train(
                model,
                training_batches(task, settings, shuffle),
                settings,
                loss=loss,
                transform=lambda batch: method.transform(task.augment(batch, settings)),
                shuffle=shuffle,
                seed=seed,
                checkpoint=checkpoint,
                on_epoch=on_epoch,
                fabric=fabric,
            )
        if fabric is not None:
            model = _gather_model(model, task, method, settings, fabric)
        if world > 1:
            torch.manual_seed(_mix_seeds(seed, settings.epochs))  # from here on, all ranks do the same
        device = None if fabric is None else fabric.device
        method.finish(model, batches(task.train, device=device), batches(task.val, device=device), settings)
    return model.eval()


def train(
    model: Model,
    loader: DataLoader[Any],
    settings: Settings,
    *,
    loss: Callable[[Model, Any], Tensor],
    shuffle: torch.Generator,
    seed: int,
    transform: Callable[[Any], Any] = unchanged,
    checkpoint: Path | None = None,
    on_epoch: OnEpoch = lambda epoch, loss: None,
    fabric: "Fabric | None" = None,
) -> None:
    """Train the model by gradient steps on shuffled batches, until all epochs are done or `on_epoch` says stop.

    loss       (model, batch) -> the mean loss of the batch
    shuffle    the generator that orders the loader's batches; it is seeded anew for every epoch
    transform  batch -> batch, before the loss
    """
    loss_of: nn.Module = distributed.LossModule(model, loss, fabric)
    backward: Any = Tensor.backward
    if fabric is not None:
        loss_of, backward = fabric.setup_module(loss_of), fabric.backward
    num_examples, fused = len(loader.dataset), not distributed.is_sharded(fabric)  # type: ignore[arg-type]
    optimizer = make_optimizer(model, settings, num_examples=num_examples, fused=fused)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(settings, settings.epochs * len(loader)))
    stepper: Any = optimizer if fabric is None else fabric.setup_optimizers(optimizer)
    parts = {"model": model, "optimizer": optimizer, "decay": decay}
    done = load_checkpoint(checkpoint, parts, fabric)
    device = device_of(model) or torch.device("cpu")
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bfloat16")
    model.train()
    for epoch in range(done, settings.epochs):
        shuffle.manual_seed(_mix_seeds(seed, epoch))
        total, count = 0.0, 0.0
        for batch, weight in _share_batches(loader, fabric):
            batch = transform(batch)
            batch = batch if fabric is None else fabric.to_device(batch)
            stepper.zero_grad()
            with autocast:
                value = loss_of(batch, weight)
            backward(value if weight == 1 else value * weight)
            stepper.step()
            decay.step()
            examples = len(batch[-1]) if weight else 0
            total, count = total + float(value.detach()) * examples, count + examples
        total, count = distributed.sum_over_ranks(fabric, total, count)
        if not math.isfinite(total):
            raise Diverged(
                f"The loss became {total} in epoch {epoch + 1}. Use a smaller learning rate than "
                f"{settings.learning_rate:g}, or some warm-up."
            )
        save_checkpoint(checkpoint, parts, epoch + 1, fabric)
        if on_epoch(epoch + 1, total / count):
            break


def freeze(model: nn.Module, names: Iterable[str]) -> None:
    """Take parameters out of training, by patterns that match their names, or the end of a name after a dot."""
    parameters = {f".{name}": p for name, p in model.named_parameters()}
    for pattern in names:
        chosen = [p for name, p in parameters.items() if fnmatchcase(name, f"*.{pattern}")]
        if not chosen:
            raise ValueError(f"frozen expects names of parameters, got {pattern!r}, and the model has none like that.")
        for parameter in chosen:
            parameter.requires_grad_(False)


def make_optimizer(
    model: nn.Module, settings: Settings, *, num_examples: int, fused: bool = True
) -> torch.optim.Optimizer:
    """The optimizer that the settings name.

    The output layer, which is the last child of the model, can have its own learning rate and weight decay. The output
    weights of a Gaussian process have the decay of their prior, unless the settings give another. Biases and other
    vectors have no decay.

    num_examples  in an epoch
    fused         update all parameters by one kernel, which is faster; sharded parameters have none
    """
    prior = prior_decay(model, num_examples) if settings.head_weight_decay is None else None
    given = settings.head_learning_rate, settings.head_weight_decay if prior is None else prior
    of_body = settings.learning_rate, settings.weight_decay
    of_head = tuple(body if own is None else own for own, body in zip(given, of_body, strict=True))
    head = set() if given == (None, None) else _output_parameters(model)
    parts = [[p for p in model.parameters() if (id(p) in head) == in_head] for in_head in (False, True)]
    last = decay_matrices(parts[1], *of_head)
    if prior is not None and settings.optimizer == "adamw":  # a prior is part of the loss, so of the gradient
        last = [{**group, "decoupled_weight_decay": False} for group in last]
    groups = [group for group in (*decay_matrices(parts[0], *of_body), *last) if group["params"]]
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=settings.learning_rate, momentum=0.9, nesterov=True, fused=fused or None)
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, lr=settings.learning_rate, fused=fused or None)


def prior_decay(model: nn.Module, num_examples: int) -> float | None:
    """ridge / N, the decay that the prior of a Gaussian process's output weights is; None where there is none to know.

    The prior N(0, I / ridge) adds ridge |B|^2 / (2 N) to a mean negative log-likelihood. Of real targets the loss is
    half the squared error, and the decay would be ridge noise / N, with a noise that is not known before the end.
    """
    heads = [m for m in model.modules() if isinstance(m, GaussianProcessHead) and m.mean is None]
    if not heads or LIKELIHOODS[heads[0].likelihood].noisy:
        return None
    return float(heads[0].ridge) / num_examples


_MILESTONES = {"steps": (0.2, (0.3, 0.6, 0.8)), "tenths": (0.1, (1 / 3, 2 / 3, 8 / 9))}


def schedule(settings: Settings, steps: int) -> Callable[[int], float]:
    """The factor of the learning rate at each step: it rises during the warm-up, then falls."""
    warmup = round(settings.warmup * steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        if settings.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        if settings.schedule == "linear":
            return 1 - progress
        ratio, milestones = _MILESTONES.get(settings.schedule, (1.0, ()))
        return ratio ** sum(step / steps >= milestone for milestone in milestones)

    return factor


def training_batches(task: Task, settings: Settings, shuffle: torch.Generator) -> DataLoader[Any]:
    """Batches in an order drawn from the generator, with every example once in an epoch."""
    if task.order is None:
        order = RandomSampler(task.train, generator=shuffle)
        return load_batches(task.train, BatchSampler(order, settings.batch_size, drop_last=False))
    return DataLoader(task.train, batch_size=None, sampler=_TaskOrder(task, settings.batch_size, shuffle))


def batches(
    data: Dataset[Any], size: int | None = None, *, rank: int = 0, world: int = 1, device: torch.device | None = None
) -> DataLoader[Any]:
    """Batches in order, with every example once; rank r of several has the batches r, r + world, ...

    size  examples in a batch; None: 1024, or fewer if they are large, such as photographs
    """
    size = size or min(_MOST_EXAMPLES, max(1, _MOST_NUMBERS // _input_size(data)))
    order: Iterable[list[int]] = BatchSampler(SequentialSampler(data), size, drop_last=False)  # type: ignore[arg-type]
    if world > 1:
        order = list(itertools.islice(order, rank, None, world))
    if device is None or device.type == "cpu":
        return load_batches(data, order)
    return load_batches(
        data, order, lambda batch: [part.to(device) if isinstance(part, Tensor) else part for part in batch]
    )


def _input_size(data: Dataset[Any]) -> int:
    """How many numbers the first input has."""
    x = data[0][0] if len(data) else None  # type: ignore[arg-type]
    return max(1, x.numel()) if isinstance(x, Tensor) else 1


def _share_batches(loader: DataLoader[Any], fabric: "Fabric | None") -> Iterable[tuple[Any, float]]:
    """Each batch with weight 1; on several processes this rank's examples, with the weight of their mean loss."""
    rank, world = distributed.rank_and_world(fabric)
    if world == 1:
        return ((batch, 1.0) for batch in loader)
    order = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return DataLoader(_WeightedData(loader.dataset), batch_size=None, sampler=ShareSampler(order, rank, world))


def load_batches(
    data: Dataset[Any], order: Iterable[list[int]], then: Callable[[Any], Any] | None = None
) -> DataLoader[Any]:
    """Batches of the examples with these indices; `then` changes each batch."""
    if isinstance(data, TensorDataset):  # whole batches: small networks would wait for single examples
        return DataLoader(data, batch_size=None, sampler=order, collate_fn=then)
    collate = None if then is None else lambda examples: then(default_collate(examples))
    return DataLoader(data, batch_sampler=order, collate_fn=collate)


class _TaskOrder(Sampler[list[int]]):
    """The batches of a task that has its own order, drawn anew in every epoch."""

    def __init__(self, task: Task, size: int, generator: torch.Generator) -> None:
        self.task, self.size, self.generator = task, size, generator

    def __iter__(self) -> Iterator[list[int]]:
        assert self.task.order is not None
        return (batch.tolist() for batch in self.task.order(self.size, self.generator))

    def __len__(self) -> int:
        return math.ceil(len(self.task.train) / self.size)


class ShareSampler(Sampler[tuple[list[int], float]]):
    """This rank's indices of every batch, and their weight; the first index with weight 0 if it has none."""

    def __init__(self, batches: Iterable[Any], rank: int, world: int) -> None:
        self.batches, self.rank, self.world = batches, rank, world

    def __iter__(self) -> Iterator[tuple[list[int], float]]:
        for batch in self.batches:
            own = batch[self.rank :: self.world]
            yield own or batch[:1], len(own) * self.world / len(batch)


class _WeightedData(Dataset[tuple[Any, float]]):
    """(indices, weight) -> (batch, weight)."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __getitem__(self, key: tuple[list[int], float]) -> tuple[Any, float]:
        indices, weight = key
        if isinstance(self.data, TensorDataset):
            return self.data[indices], weight
        return default_collate([self.data[i] for i in indices]), weight


def _output_parameters(model: nn.Module) -> set[int]:
    """The ids of the last child's parameters; for an ensemble, of every member's."""
    if isinstance(model, nn.ModuleList):
        return set().union(*map(_output_parameters, model))
    net = getattr(model, "net", model)
    return {id(p) for p in list(net.children())[-1].parameters()}


def _mix_seeds(seed: int, epoch: int) -> int:
    """One seed from two numbers. Runs with neighbouring seeds must not share the order of an epoch."""
    return int(torch.randint(2**62, (epoch + 1,), generator=torch.Generator().manual_seed(seed))[-1])


def _gather_model(model: nn.Module, task: Task, method: Method, settings: Settings, fabric: "Fabric") -> nn.Module:
    """The whole trained model on every rank, with the batch statistics of the first."""
    if method.loss is not None and distributed.is_sharded(fabric):
        state = distributed.collect_state({"model": model}, fabric)["model"]
        model = method.build(task.backbone, task.num_outputs, settings)
        model.load_state_dict(state)
    model.to(fabric.device)
    if fabric.world_size > 1:
        share_statistics(model)
    return model
