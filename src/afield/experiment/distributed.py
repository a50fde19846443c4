"""What several processes that train one model have to share: steps, states, results. `launch` starts them.

Every rank goes through the same batches and takes every world-th example of each. If it has n_r of n examples,

    gradient of the mean loss of all n  =  mean over ranks of  (n_r world / n) gradient of the mean loss of its n_r

so the step is that of one process, also if the world size does not divide n. A rank without an example takes the first
one with weight 0, because every rank has to take part in collective operations. A `fabric` of None means this process
alone. Lightning is not imported here.
"""

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from afield.errors import Elsewhere, LostRank
from afield.gp.features import RandomFeatures
from afield.model.ranks import is_of_backend, share_statistics

if TYPE_CHECKING:
    from lightning.fabric import Fabric

T = TypeVar("T")
TIMEOUT = timedelta(minutes=30)  # for a rank that hangs; one that died is noticed at once
CAN_CONTINUE = "Finished epochs are kept: the same command goes on after the last of them."


def rank_and_world(fabric: "Fabric | None") -> tuple[int, int]:
    """The number of this process, and how many there are."""
    return (0, 1) if fabric is None else (fabric.global_rank, fabric.world_size)


def is_sharded(fabric: "Fabric | None") -> bool:
    """Whether each rank holds only a part of the weights."""
    if fabric is None:
        return False
    name = type(fabric.strategy).__name__
    if name not in ("DDPStrategy", "SingleDeviceStrategy", "ModelParallelStrategy"):
        raise ValueError(
            f"Training expects a Fabric with DDPStrategy, a single device, or afield.experiment.launch.connect's FSDP "
            f"(ModelParallelStrategy), got {name}."
        )
    return name == "ModelParallelStrategy"


class LossModule(nn.Module):
    """The loss of a batch as the forward pass of a module. Fabric wraps it, and so sees all that a method computes.

    A length scale that is taken from the first batch is taken from the whole batch of all ranks, in the order of one
    process.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor], fabric: "Fabric | None") -> None:
        super().__init__()
        self.model, self.loss, self.fabric = model, loss, fabric
        self.shares_statistics = is_sharded(fabric)  # DDP does so itself
        self.weight = 1.0
        for module in model.modules():
            if isinstance(module, RandomFeatures) and not module.adapted and rank_and_world(fabric)[1] > 1:
                module.register_forward_pre_hook(self._adapt_to_whole_batch)

    def forward(self, batch: Any, weight: float) -> Tensor:
        self.weight = weight
        if self.shares_statistics and self.training:
            share_statistics(self.model)
        return self.loss(self.model, batch)

    def _adapt_to_whole_batch(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(module, RandomFeatures)
        if module.adapted or not module.training:
            return
        h = args[0].detach()
        parts = gather(self.fabric, h.cpu() if self.weight else h[:0].cpu())
        rows = torch.cat([torch.arange(len(part)) * len(parts) + rank for rank, part in enumerate(parts)])
        module.adapt(torch.cat(parts)[rows.argsort()].to(h.device))


def collect_state(parts: dict[str, Any], fabric: "Fabric | None") -> dict[str, Any]:
    """What training continues from: whole states of model, optimizer and the rest, and the random state of every rank.

    All ranks have to call this. What does not depend on the strategy is the same as on one process.
    """
    if fabric is None:
        return {name: part.state_dict() for name, part in parts.items()} | {"random": torch.get_rng_state()}
    random = {"random": gather(fabric, _random_state(fabric))}
    if not is_sharded(fabric):
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


def restore_state(parts: dict[str, Any], state: dict[str, Any], fabric: "Fabric | None") -> None:
    """Undo `collect_state`. With another number of processes, dropout masks are drawn anew."""
    if state.get("sharded", False) != is_sharded(fabric):
        how = "with" if state.get("sharded") else "without"
        raise ValueError(
            f"The checkpoint was written {how} --strategy fsdp: go on {how} it, or begin again by --fresh."
        )
    for name, part in parts.items():
        if not (is_sharded(fabric) and name in ("model", "optimizer")):
            part.load_state_dict(state[name])
    if is_sharded(fabric):
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
    rank, world = rank_and_world(fabric)
    if len(random) == world:
        torch.set_rng_state(random[rank]["cpu"])
        if fabric is not None and "cuda" in random[rank]:
            torch.cuda.set_rng_state(random[rank]["cuda"], fabric.device)


def _random_state(fabric: "Fabric") -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if fabric.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(fabric.device)
    return state


def sum_over_ranks(fabric: "Fabric | None", *values: float) -> tuple[float, ...]:
    """The sum of each value over all ranks."""
    if fabric is None or fabric.world_size == 1:
        return values
    total = torch.tensor(values, dtype=torch.float64, device=fabric.device)
    dist.all_reduce(total)
    return tuple(total.tolist())


def gather(fabric: "Fabric | None", value: T) -> list[T]:
    """The values of all ranks, on every rank."""
    _, world = rank_and_world(fabric)
    if world == 1:
        return [value]
    values: list[Any] = [None] * world
    dist.all_gather_object(values, value)
    return values


def gather_in_order(fabric: "Fabric | None", results: Iterator[T], count: int) -> Iterator[T]:
    """All `count` results, on the first rank only. Rank r makes the results r, r + world, ..."""
    rank, world = rank_and_world(fabric)
    if world == 1:
        yield from results
        return
    for _ in range(0, count, world):
        round_of_all: list[Any] | None = [None] * world if rank == 0 else None
        dist.gather_object(next(results, None), round_of_all)
        yield from (result for result in round_of_all or () if result is not None)


def on_first_rank(fabric: "Fabric | None", function: Callable[[], T]) -> T:
    """Call the function on the first rank only; all ranks get what it returns, or an error if it raises one."""
    rank, world = rank_and_world(fabric)
    if world == 1:
        return function()
    result_and_message: list[Any] = [None, None]
    own_error: Exception | None = None
    if rank == 0:
        try:
            result_and_message[0] = function()
        except Exception as error:
            own_error, result_and_message[1] = error, str(error)
    dist.broadcast_object_list(result_and_message, src=0)
    result, message = result_and_message
    if own_error is not None:
        raise own_error
    if message is not None:
        raise Elsewhere(message)
    return result


@contextlib.contextmanager
def explain_failures(fabric: "Fabric | None") -> Iterator[None]:
    """Clearer errors for collective operations that fail because another process is gone, and for limits of FSDP."""
    try:
        yield
    except (RuntimeError, LostRank) as error:
        if is_sharded(fabric) and "not allocated" in str(error):
            raise ValueError(
                "FSDP gives weights back after every pass, so a loss that takes gradients of its own, such as a "
                "gradient penalty, finds none: use --strategy ddp."
            ) from error
        if rank_and_world(fabric)[1] == 1 or not (isinstance(error, LostRank) or is_of_backend(error)):
            raise
        raise ConnectionError(
            "Lost another process of this training: it was killed, ran out of memory, failed with an error of its own, "
            f"or kept the others waiting for {TIMEOUT}. {CAN_CONTINUE}"
        ) from error
