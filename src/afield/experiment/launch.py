"""Start the processes that train one model, and connect them by Lightning Fabric. Only this module imports Fabric.

ddp    every process has the whole model; gradients are averaged
fsdp   weights, gradients and optimizer states are sharded during training (PyTorch's FSDP2); every process then gets
       the whole trained model, and has to have room for it

torchrun, SLURM, LSF and MPI are recognised as Fabric recognises them. Without them, the processes of one node are
started here and not by Fabric's launcher, which kills the first process without a message when another one dies.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from afield.errors import Elsewhere
from afield.experiment.distributed import CAN_CONTINUE, TIMEOUT, explain_failures

if TYPE_CHECKING:
    from lightning.fabric import Fabric

_BLOCK_SIZE = 1_000_000  # parameters from which on FSDP gathers a block by itself
_LAUNCHERS = ("TorchElasticEnvironment", "SLURMEnvironment", "LSFEnvironment", "MPIEnvironment")


@dataclass(frozen=True)
class Processes:
    """How many processes train one model, on which devices, and how they share the work."""

    devices: int = 1
    num_nodes: int = 1
    strategy: Literal["ddp", "fsdp"] = "ddp"
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"

    @staticmethod
    def of(devices: int, num_nodes: int, *, strategy: Any, accelerator: Any) -> "Processes":
        """These numbers; if they say one process, those of torchrun, where it has started this one."""
        if devices < 1 or num_nodes < 1:
            raise ValueError(f"devices and num_nodes must be at least 1, got {devices} and {num_nodes}.")
        if devices == num_nodes == 1 and dist.is_torchelastic_launched():
            devices = int(os.environ["LOCAL_WORLD_SIZE"])
            num_nodes = int(os.environ["WORLD_SIZE"]) // devices
        return Processes(devices, num_nodes, strategy, accelerator)

    @property
    def count(self) -> int:
        return self.devices * self.num_nodes

    @property
    def need_fabric(self) -> bool:
        """Whether there is more than one process on the CPU."""
        return self.count > 1 or self.accelerator == "cuda"


def launch(processes: Processes, function: Callable[..., None], *args: Any) -> None:
    """Call function(fabric, *args) on every rank: in this process if a launcher has started it, else in new ones."""
    environments = _import_lightning().plugins.environments
    if "LOCAL_RANK" in os.environ or any(getattr(environments, name).detect() for name in _LAUNCHERS):
        _run_rank(None, processes, function, args)
        return
    if processes.num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"} <= os.environ.keys():
        raise ValueError(
            f"{processes.num_nodes} nodes have to find each other: start the same command on each by srun or torchrun, "
            "or set MASTER_ADDR, MASTER_PORT and NODE_RANK (from 0)."
        )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    port = os.environ.get("MASTER_PORT") or str(free_port())
    context = torch.multiprocessing.start_processes(
        _start_rank, (port, processes, function, args), nprocs=processes.devices, join=False
    )
    try:
        while not context.join(grace_period=5):
            pass
    except torch.multiprocessing.ProcessExitedException as error:
        if error.signal_name is None:  # it has printed the reason
            raise SystemExit(error.exit_code) from error
        raise ConnectionError(
            f"Process {error.error_index} of {processes.devices} died: {error.signal_name}. If nobody stopped it, the "
            f"machine may have run out of memory. {CAN_CONTINUE}"
        ) from error
    finally:
        for process in context.processes:
            process.terminate()


def connect(processes: Processes) -> "Fabric":
    """Connect this process to the others, whoever started them."""
    module = _import_lightning()
    kinds = module.strategies
    strategy: Any = kinds.DDPStrategy(timeout=TIMEOUT)
    if processes.strategy == "fsdp":
        strategy = kinds.ModelParallelStrategy(
            shard, data_parallel_size=processes.count, tensor_parallel_size=1, timeout=TIMEOUT
        )
    fabric = module.Fabric(
        accelerator=processes.accelerator,
        devices=processes.devices,
        num_nodes=processes.num_nodes,
        strategy=strategy if processes.count > 1 else "auto",
    )
    try:
        fabric.launch()
    except dist.DistError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConnectionError(f"The {processes.count} processes did not find each other at {where}: {error}") from error
    return fabric


def shard(module: nn.Module, mesh: Any, block_size: int = _BLOCK_SIZE) -> nn.Module:
    """Shard a module by FSDP, and every large element of a Sequential or a ModuleList in it by itself."""
    from torch.distributed.fsdp import fully_shard

    blocks = [b for m in module.modules() if isinstance(m, nn.Sequential | nn.ModuleList) for b in m]
    inner_first = [m for m in reversed(list(module.modules())) if any(m is b for b in blocks)]
    for block in inner_first:
        if not isinstance(block, nn.ModuleList) and sum(p.numel() for p in block.parameters()) >= block_size:
            fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(module, mesh=mesh["data_parallel"])
    return module


def _start_rank(index: int, port: str, processes: Processes, function: Callable[..., None], args: Any) -> None:
    """What a new process does."""
    os.environ |= {"LOCAL_RANK": str(index), "MASTER_PORT": port}
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes.devices))
    _run_rank(index, processes, function, args)


def _run_rank(index: int | None, processes: Processes, function: Callable[..., None], args: Any) -> None:
    """Connect, call the function and disconnect; `index` is None in a process that was not started here."""
    try:
        fabric = connect(processes)
        with explain_failures(fabric):
            function(fabric, *args)
    except Elsewhere as error:
        raise SystemExit(1) from error
    except (ValueError, OSError, ImportError) as error:
        if index is None:
            raise
        raise SystemExit(f"afield: {error}") from error
    disconnect()


def disconnect() -> None:
    """Leave the process group, if this process is in one, and give its threads time to free their tensors.

    DistributedDataParallel leaves gloo's threads running. A thread that frees its last tensor while Python shuts down
    aborts the process, after all work is done (pytorch/pytorch#179291).
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.1)


def _import_lightning() -> Any:
    try:
        import lightning.fabric
        import lightning.fabric.plugins.environments
        import lightning.fabric.strategies
    except ImportError as error:
        raise ImportError('Several processes or a GPU need lightning: pip install "afield[lightning]".') from error
    return lightning.fabric


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
