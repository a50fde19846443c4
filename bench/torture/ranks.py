"""Two processes fit one posterior; one of them dies, is slow, or has another model.

Right is an error on the other that says so, within a time limit; for the slow one, the posterior of one process.
"""

import datetime
import os
import pickle
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import afield
from bench.torture.fault import Inject, Kind, Lost, Refused, Wrong, is_message
from bench.torture.models import data, network

BATCHES = 6
PATIENCE = 20.0  # for the ranks to end; their own limit is half of it
TROUBLES = ("dies", "dies", "raises", "other weights", "other features", "slow", "nothing")
LOST_PEER = ("connection", "peer", "timed out", "timeout", "rank")  # one of which a message of gloo has


@contextmanager
def opened(folder: Path) -> Iterator[Inject]:
    alone = _model(0, "nothing")
    afield.fit_posterior(alone, [batch for rank in (0, 1) for batch in _part(rank)])

    def inject(random: Random) -> None:
        trouble, bad = random.choice(TROUBLES), random.randrange(2)
        at = random.randrange(BATCHES + 1)
        for file in folder.iterdir():
            file.unlink()
        children = [_start(rank, trouble if rank == bad else "nothing", at, folder) for rank in (0, 1)]
        _wait(children, f"rank {bad} {trouble} at batch {at}")
        done = f"rank {bad}: {trouble} at batch {at}"
        returned = {
            rank: pickle.loads(file.read_bytes()) for rank in (0, 1) if (file := folder / f"end-{rank}").exists()
        }
        _check_end(returned, trouble, bad, done, alone)

    yield inject


KIND = Kind("ranks", "two processes that fit one posterior, one of which dies or differs", opened, share=0.1, limit=60)


def _check_end(returned: dict[int, Any], trouble: str, bad: int, done: str, alone: afield.SNGP) -> None:
    other = returned.get(1 - bad)
    if other is None:
        raise Lost(f"{done}: the other rank ended without a word")
    error, own, precision = other
    if trouble in ("slow", "nothing"):
        if error is not None:
            raise Lost(f"{done}: the other rank ended with {error}")
        if not torch.allclose(precision, alone.head.precision.data, rtol=1e-9, atol=1e-9):
            raise Wrong(f"{done}: the posterior is not that of one process")
        return
    if error is None:
        raise Wrong(f"{done}: the other rank fitted a posterior without a word")
    if not (own or any(word in error.lower() for word in LOST_PEER)):
        raise Lost(f"{done}: the other rank's error does not say so: {error}")
    raise Refused(f"{done}: {error}")


def _part(rank: int) -> list[tuple[Tensor, Tensor]]:
    return [data(10 * rank + number, rows=12) for number in range(BATCHES)]


def _model(rank: int, trouble: str) -> afield.SNGP:
    torch.manual_seed(1 if trouble == "other features" else 0)
    model = afield.sngp(network(1 if trouble == "other weights" else 0), num_random_features=16, length_scale=1.0)
    return model.eval()


def _start(rank: int, trouble: str, at: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        _be_rank(rank, trouble, at, folder)
    except BaseException:
        os._exit(1)
    os._exit(0)


def _be_rank(rank: int, trouble: str, at: int, folder: Path) -> None:
    limit = datetime.timedelta(seconds=PATIENCE / 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
    model = _model(rank, trouble)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for number, batch in enumerate([*_part(rank), None]):
            if number == at and trouble == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if number == at and trouble == "raises":
                raise ValueError("this rank cannot read its data")
            if number == at and trouble == "slow":
                time.sleep(0.3)
            if batch is not None:
                yield batch

    error, own = None, True
    try:
        afield.fit_posterior(model, batches(), sharded=True)
    except Exception as problem:
        error, own = repr(problem), is_message(problem)
    temporary = folder / f"ending-{rank}"
    temporary.write_bytes(pickle.dumps((error, own, model.head.precision.data)))
    temporary.rename(folder / f"end-{rank}")
    if trouble == "nothing" and error is None:
        dist.barrier()
    os._exit(0)


def _wait(children: list[int], done: str) -> None:
    end, left = time.monotonic() + PATIENCE, set(children)
    while left and time.monotonic() < end:
        left -= {child for child in left if os.waitpid(child, os.WNOHANG)[0]}
        time.sleep(0.002)
    for child in left:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if left:
        raise Lost(f"{done}: {len(left)} ranks hung for {PATIENCE:g} s")
