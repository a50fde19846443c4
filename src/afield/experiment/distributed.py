"""Several processes that train as one: shares of a batch, states, gathering. `launch` starts them.

Every rank walks the same batches and takes every world-th example of each. With n_r of the n examples of a batch,

    gradient of the mean loss of all n  =  mean over ranks of  (n_r world / n) gradient of the mean loss of its n_r

so the step is that of one process, also when the world size does not divide n. A rank that gets no example takes the
first one with weight 0: collectives have to match. A `fabric` of None means this process alone; lightning is not
imported here.
"""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from afield.errors import Elsewhere
from afield.gp.features import RandomFeatures
from afield.model.ranks import share_statistics

if TYPE_CHECKING:
    from lightning.fabric import Fabric

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # of a rank that hangs; one that died is noticed at once
KEPT = "Finished epochs are kept: the same command goes on after the last of them."


def rank_of(fabric: "Fabric | None") -> tuple[int, int]:
    """(rank, number of ranks)."""
    return (0, 1) if fabric is None else (fabric.global_rank, fabric.world_size)


def sharded(fabric: "Fabric | None") -> bool:
    """Whether a rank holds only its part of the weights."""
    if fabric is None:
        return False
    name = type(fabric.strategy).__name__
    if name not in ("DDPStrategy", "SingleDeviceStrategy", "ModelParallelStrategy"):
        raise ValueError(
            f"Training expects a Fabric with DDPStrategy, a single device, or afield.experiment.launch.connect's FSDP "
            f"(ModelParallelStrategy), got {name}."
        )
    return name == "ModelParallelStrategy"


class Step(nn.Module):
    """The loss of a batch as a forward pass: what Fabric wraps sees every use that a method makes of its model.

    A length scale that comes from the first batch comes from that of all ranks together, in the order of one process.
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], fabric: "Fabric | None") -> None:
        super().__init__()
        self.model, self.loss, self.fabric = model, loss, fabric
        self.shares_statistics = sharded(fabric)  # DDP does so itself
        self.weight = 1.0
        for module in model.modules():
            if isinstance(module, RandomFeatures) and not module.adapted and rank_of(fabric)[1] > 1:
                module.register_forward_pre_hook(self._adapt)

    def forward(self, batch: Any, weight: float) -> Tensor:
        self.weight = weight
        if self.shares_statistics and self.training:
            share_statistics(self.model)
        return self.loss(self.model, batch)

    def _adapt(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(module, RandomFeatures)
        if module.adapted or not module.training:
            return
        h = args[0].detach()
        everyone = gathered(self.fabric, h.cpu() if self.weight else h[:0].cpu())
        rows = torch.cat([torch.arange(len(part)) * len(everyone) + rank for rank, part in enumerate(everyone)])
        module.adapt(torch.cat(everyone)[rows.argsort()].to(h.device))


def state_of(parts: dict[str, Any], fabric: "Fabric | None") -> dict[str, Any]:
    """What a training goes on from: whole states of model, optimizer and the rest, and the random state of every rank.

    All ranks have to ask. What does not depend on the strategy is written as one process writes it.
    """
    if fabric is None:
        return {name: part.state_dict() for name, part in parts.items()} | {"random": torch.get_rng_state()}
    random = {"random": gathered(fabric, _random_state(fabric))}
    if not sharded(fabric):
        return {name: part.state_dict() for name, part in parts.items()} | random
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    whole = StateDictOptions(full_state_dict=True)
    state = {name: part.state_dict() for name, part in parts.items() if name not in ("model", "optimizer")}
    state["model"] = get_model_state_dict(parts["model"], options=whole)
    if "optimizer" in parts:
        state["optimizer"] = get_optimizer_state_dict(parts["model"], parts["optimizer"], options=whole)
    return state | random | {"sharded": True}


def restore(parts: dict[str, Any], state: dict[str, Any], fabric: "Fabric | None") -> None:
    """Bring everything to what `state_of` noted. With another number of processes, masks are drawn anew."""
    if state.get("sharded", False) != sharded(fabric):
        how = "with" if state.get("sharded") else "without"
        raise ValueError(
            f"The checkpoint was written {how} --strategy fsdp: go on {how} it, or begin again by --fresh."
        )
    for name, part in parts.items():
        if not (sharded(fabric) and name in ("model", "optimizer")):
            part.load_state_dict(state[name])
    if sharded(fabric):
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        whole, model = StateDictOptions(full_state_dict=True), parts["model"]
        set_model_state_dict(model, state["model"], options=whole)
        set_optimizer_state_dict(model, parts["optimizer"], state["optimizer"], options=whole)
    random = state["random"]
    if isinstance(random, Tensor):
        random = [{"cpu": random}]
    rank, world = rank_of(fabric)
    if len(random) == world:
        torch.set_rng_state(random[rank]["cpu"])
        if fabric is not None and "cuda" in random[rank]:
            torch.cuda.set_rng_state(random[rank]["cuda"], fabric.device)


def _random_state(fabric: "Fabric") -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if fabric.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(fabric.device)
    return state


def summed(fabric: "Fabric | None", *values: float) -> tuple[float, ...]:
    """Sums over all ranks."""
    if fabric is None or fabric.world_size == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=fabric.device)
    dist.all_reduce(total)
    return tuple(total.tolist())


def gathered(fabric: "Fabric | None", value: T) -> list[T]:
    """Everyone's value, on every rank."""
    _, world = rank_of(fabric)
    if world == 1:
        return [value]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, value)
    return everyone


def in_order(fabric: "Fabric | None", results: Iterator[T], count: int) -> Iterator[T]:
    """All `count` results, on the first rank alone: rank r makes r, r + world, ... and hands them over in rounds."""
    rank, world = rank_of(fabric)
    if world == 1:
        yield from results
        return
    for _ in range(0, count, world):
        everyone: list[Any] | None = [None] * world if rank == 0 else None
        dist.gather_object(next(results, None), everyone)
        yield from (result for result in everyone or () if result is not None)


def first(fabric: "Fabric | None", function: Callable[[], T]) -> T:
    """What the function returns on the first rank, which alone runs it; its error is an error on all."""
    rank, world = rank_of(fabric)
    if world == 1:
        return function()
    answer: list[Any] = [None, None]
    problem: Exception | None = None
    if rank == 0:
        try:
            answer[0] = function()
        except Exception as error:
            problem, answer[1] = error, str(error)
    dist.broadcast_object_list(answer, src=0)
    if problem is not None:
        raise problem
    if answer[1] is not None:
        raise Elsewhere(answer[1])
    return answer[0]


@contextlib.contextmanager
def watched(fabric: "Fabric | None") -> Iterator[None]:
    """A collective that fails because another process is gone says so; so does what FSDP cannot do."""
    try:
        yield
    except RuntimeError as error:
        if sharded(fabric) and "not allocated" in str(error):
            raise ValueError(
                "FSDP gives weights back after every pass, so a loss that takes gradients of its own, such as a "
                "gradient penalty, finds none: use --strategy ddp."
            ) from error
        if rank_of(fabric)[1] == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise ConnectionError(
            "Lost another process of this training: it was killed, ran out of memory, failed with an error of its own, "
            f"or kept the others waiting for {TIMEOUT}. {KEPT}"
        ) from error
