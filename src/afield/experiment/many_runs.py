"""Many runs, on the processes of one machine or on a Ray cluster (`ray_cluster`), with the same results.

Members come before the ensembles that are made of them, each once. Runs that are finished cost nothing, so the same
call after Ctrl-C, a crash or a kill goes on where the last one stopped.
"""

import contextlib
import functools
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from afield.experiment import one_run, ray_cluster, run_folder
from afield.experiment.config import Config
from afield.experiment.one_run import run
from afield.experiment.run_folder import Run

Event = tuple[Config, int, int, float]
"""A run's config, its epoch, of how many, and the loss."""
OnEvent = Callable[[Event], None]
OnRun = Callable[[Run], None]
Where = Path | Callable[[Config], Path]
"""The folder of all runs, or which one a run belongs to."""


def place(out: Where, config: Config) -> Path:
    """The folder of all runs that a run belongs to."""
    return out if isinstance(out, Path) else out(config)


def plan(configs: Iterable[Config]) -> tuple[list[Config], list[Config]]:
    """(single models, ensembles), each once; the members of every ensemble are among the single models."""
    singles: dict[Config, None] = {}
    ensembles: dict[Config, None] = {}
    for config in configs:
        if config.members:
            ensembles[config] = None
        for single in config.members or [config]:
            singles[single] = None
    return list(singles), list(ensembles)


def missing(configs: Iterable[Config], out: Where, fresh: bool) -> list[Config]:
    """The runs that are to be made."""
    return [c for c in configs if fresh or not run_folder.finished(place(out, c) / c.folder)]


def run_all(
    configs: Sequence[Config],
    out: Where,
    *,
    jobs: int = 1,
    address: str | None = None,
    cpus: int = 1,
    fresh: bool = False,
    excused: tuple[type[Exception], ...] = (),
    on_event: OnEvent = lambda event: None,
    on_run: OnRun = lambda run: None,
) -> list[Run]:
    """Make every run, single models on `jobs` processes, or in this one if that is 1.

    address   of a Ray cluster (auto, local, host:port, ray://host:port) that makes the single models instead, as many
              at a time as it has room for
    cpus      cores, and threads, of a run on the cluster
    excused   errors that are left alone: runs that end in them, and ensembles of these, are not among the results
    on_event  hears of epochs
    on_run    hears of every finished run

    A run that fails does not stop the others; the first error is raised when they are done.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}.")
    singles, ensembles = plan(configs)
    wanted = missing(singles, out, fresh)
    if address is not None:
        errors = _afar(wanted, out, address, cpus, fresh, on_event, on_run)
    else:
        jobs = min(jobs, len(wanted))  # so that one run alone has all threads
        errors = (_here if jobs <= 1 else _spread)(wanted, out, jobs, fresh, on_event, on_run)
    if errors := [error for error in errors if not isinstance(error, excused)]:
        told = _explained(errors[0], len(errors))
        raise told from (errors[0].__cause__ if told is errors[0] else errors[0])
    failed = set(missing(singles, out, fresh=False))
    finished = {c: run(c, place(out, c)) for c in singles if c not in failed}  # checks that what was there is the same
    for config in ensembles:
        if failed.intersection(config.members):
            continue
        finished[config] = run(config, place(out, config), fresh=fresh)
        on_run(finished[config])
    return [finished[config] for config in configs if config in finished]


def _here(
    configs: Sequence[Config], out: Where, jobs: int, fresh: bool, on_event: OnEvent, on_run: OnRun
) -> list[BaseException]:
    """One after the other in this process; what went wrong."""
    errors: list[BaseException] = []
    for config in configs:
        heard = functools.partial(_forward, on_event, config)
        try:
            on_run(run(config, place(out, config), fresh=fresh, on_epoch=heard))
        except Exception as error:
            errors.append(error)
    return errors


def _spread(
    configs: Sequence[Config], out: Where, jobs: int, fresh: bool, on_event: OnEvent, on_run: OnRun
) -> list[BaseException]:
    """On as many processes as there are jobs; what went wrong."""
    errors: list[BaseException] = []
    with _listening(on_event) as channel, _pool(jobs, channel) as pool:
        futures: list[Future[Run]] = [pool.submit(_work, c, place(out, c), fresh) for c in configs]
        try:
            for future in as_completed(futures):
                if error := future.exception():
                    errors.append(error)
                else:
                    on_run(future.result())
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return errors


def _afar(
    configs: Sequence[Config], out: Where, address: str, cpus: int, fresh: bool, on_event: OnEvent, on_run: OnRun
) -> list[BaseException]:
    """On a cluster; what went wrong."""
    errors: list[BaseException] = []
    claimed: list[Config] = []
    for config in configs:
        try:
            _claim(place(out, config) / config.folder, config, fresh)
            claimed.append(config)
        except ValueError as error:
            errors.append(error)

    def done(config: Config) -> None:
        on_run(run_folder.read(place(out, config) / config.folder))

    tasks = [(config, place(out, config)) for config in claimed]
    return errors + ray_cluster.spread(address, make_afar, tasks, cpus=cpus, on_event=on_event, on_done=done)


def make_afar(config: Config, out: Path, tell: OnEvent) -> list[Path]:
    """On a node of the cluster: make the run; its files, the one that says that it is finished last."""
    folder = run(config, out, on_epoch=functools.partial(_forward, tell, config)).folder
    files = [file for file in sorted(folder.iterdir()) if not file.name.startswith(".")]
    return sorted(files, key=lambda file: file.name == run_folder.METRICS)


def _claim(folder: Path, config: Config, fresh: bool) -> None:
    """Here, before anything is trained far away. A run that starts again does so once, not when its worker is lost."""
    with run_folder.locked(folder):
        if fresh:
            run_folder.clear(folder)
        one_run.claim(folder, config)


def _explained(error: BaseException, count: int) -> BaseException:
    if isinstance(error, BrokenProcessPool):
        return ChildProcessError(
            "A worker process died (killed, or out of memory). What was finished is kept, and the same command goes "
            "on; fewer --jobs need less memory."
        )
    return error if count == 1 else ValueError(f"{count} runs failed, the first with: {error}")


@contextmanager
def _pool(jobs: int, channel: Any) -> Iterator[ProcessPoolExecutor]:
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _prepare, (threads, channel, os.getpid())) as pool:
        yield pool


@contextmanager
def _listening(on_event: OnEvent) -> Iterator[Any]:
    """A queue whose events are handed to `on_event` by a thread."""
    channel, stop = multiprocessing.get_context("spawn").Queue(), threading.Event()

    def listen() -> None:
        while not stop.is_set() or not channel.empty():
            with contextlib.suppress(queue.Empty):
                on_event(channel.get(timeout=0.1))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    try:
        yield channel
    finally:
        stop.set()
        thread.join(timeout=5)
        channel.close()


_CHANNEL: Any = None


def _prepare(threads: int, channel: Any, parent: int) -> None:
    """In a new worker process."""
    global _CHANNEL
    _CHANNEL = channel
    torch.set_num_threads(threads)
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: int) -> None:
    """Die with the process that wants the runs: an orphan would go on holding the locks of its folders."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _work(config: Config, out: Path, fresh: bool) -> Run:
    return run(config, out, fresh=fresh, on_epoch=functools.partial(_forward, _CHANNEL.put, config))


def _forward(on_event: OnEvent, config: Config, epoch: int, epochs: int, loss: float) -> None:
    on_event((config, epoch, epochs, loss))
