"""Many runs: in this process, in several processes, or on a Ray cluster (`ray_cluster`), with the same results.

Members come before the ensembles that are made of them, each once. Finished runs are only read, so the same call after
Ctrl-C, a crash or a kill goes on where the last one stopped.
"""

import contextlib
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
from typing import Any, NamedTuple

import torch

from afield.experiment import one_run, ray_cluster, run_folder
from afield.experiment.config import Config
from afield.experiment.one_run import run
from afield.experiment.run_folder import Run


class EpochDone(NamedTuple):
    """A run has finished an epoch."""

    config: Config
    epoch: int
    epochs: int
    loss: float


OnProgress = Callable[[EpochDone], None]
OnRun = Callable[[Run], None]
OutFolder = Path | Callable[[Config], Path]
"""The folder of all runs, or a function that gives it for each run."""


def out_folder(out: OutFolder, config: Config) -> Path:
    """The folder of all runs for one of them."""
    return out if isinstance(out, Path) else out(config)


def split_ensembles(configs: Iterable[Config]) -> tuple[list[Config], list[Config]]:
    """(single models, ensembles), each once; the members of every ensemble are among the single models."""
    singles: dict[Config, None] = {}
    ensembles: dict[Config, None] = {}
    for config in configs:
        if config.members:
            ensembles[config] = None
        for single in config.members or [config]:
            singles[single] = None
    return list(singles), list(ensembles)


def unfinished(configs: Iterable[Config], out: OutFolder, *, fresh: bool = False) -> list[Config]:
    """The runs that have to be made; all of them if they start `fresh`."""
    return [c for c in configs if fresh or not run_folder.is_finished(out_folder(out, c) / c.folder)]


def run_all(
    configs: Sequence[Config],
    out: OutFolder,
    *,
    jobs: int = 1,
    cluster: str | None = None,
    cpus: int = 1,
    fresh: bool = False,
    ignore: tuple[type[Exception], ...] = (),
    on_progress: OnProgress = lambda event: None,
    on_run: OnRun = lambda run: None,
) -> list[Run]:
    """Make every run that is not finished; read the others.

    jobs         processes that single models are trained in; 1: this process
    cluster      the address of a Ray cluster (auto, local, host:port, ray://host:port) that trains them instead, as
                 many at a time as it has room for
    cpus         cores, and threads, of a run on the cluster
    ignore       errors that are not raised: runs that end in them, and ensembles of these, are not among the results
    on_progress  is called after every epoch
    on_run       is called with every run that was made

    A run that fails does not stop the others. The first error is raised when they are finished.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}.")
    singles, ensembles = split_ensembles(configs)
    wanted = unfinished(singles, out, fresh=fresh)
    jobs = min(jobs, len(wanted))  # so that one run alone has all threads
    if cluster is not None:
        errors = _run_on_cluster(wanted, out, cluster, cpus=cpus, fresh=fresh, on_progress=on_progress, on_run=on_run)
    elif jobs > 1:
        errors = _run_in_processes(wanted, out, jobs, fresh=fresh, on_progress=on_progress, on_run=on_run)
    else:
        errors = _run_locally(wanted, out, fresh=fresh, on_progress=on_progress, on_run=on_run)
    _raise_first([error for error in errors if not isinstance(error, ignore)])
    failed = set(unfinished(singles, out))
    finished = {c: run(c, out_folder(out, c)) for c in singles if c not in failed}  # also compares their settings
    for config in ensembles:
        if failed.intersection(config.members):
            continue
        finished[config] = run(config, out_folder(out, config), fresh=fresh)
        on_run(finished[config])
    return [finished[config] for config in configs if config in finished]


def _run_locally(
    configs: Sequence[Config], out: OutFolder, *, fresh: bool, on_progress: OnProgress, on_run: OnRun
) -> list[BaseException]:
    """Make the runs one after the other in this process; return the errors."""
    errors: list[BaseException] = []
    for config in configs:
        try:
            on_run(run(config, out_folder(out, config), fresh=fresh, on_epoch=_report_epochs(config, on_progress)))
        except Exception as error:
            errors.append(error)
    return errors


def _run_in_processes(
    configs: Sequence[Config], out: OutFolder, jobs: int, *, fresh: bool, on_progress: OnProgress, on_run: OnRun
) -> list[BaseException]:
    """Make the runs in new processes, `jobs` at a time; return the errors."""
    errors: list[BaseException] = []
    with _receive_progress(on_progress) as channel, _start_pool(jobs, channel) as pool:
        futures: list[Future[Run]] = [pool.submit(_run_in_worker, c, out_folder(out, c), fresh) for c in configs]
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


def _run_on_cluster(
    configs: Sequence[Config],
    out: OutFolder,
    cluster: str,
    *,
    cpus: int,
    fresh: bool,
    on_progress: OnProgress,
    on_run: OnRun,
) -> list[BaseException]:
    """Make the runs on a cluster; return the errors."""
    errors: list[BaseException] = []
    tasks: list[tuple[Config, Path]] = []
    for config in configs:
        try:
            _prepare_folder(out_folder(out, config) / config.folder, config, fresh=fresh)
            tasks.append((config, out_folder(out, config)))
        except Exception as error:
            errors.append(error)

    def read_run(config: Config) -> None:
        on_run(run_folder.read(out_folder(out, config) / config.folder))

    return errors + ray_cluster.run_on_cluster(
        cluster, run_on_node, tasks, cpus=cpus, on_progress=on_progress, on_done=read_run
    )


def run_on_node(config: Config, out: Path, on_progress: OnProgress) -> list[Path]:
    """Make a run on a node of the cluster; its files, last the one that says that it is finished."""
    folder = run(config, out, on_epoch=_report_epochs(config, on_progress)).folder
    files = [file for file in sorted(folder.iterdir()) if not file.name.startswith(".")]
    return sorted(files, key=lambda file: file.name == run_folder.METRICS)


def _prepare_folder(folder: Path, config: Config, *, fresh: bool) -> None:
    """Claim the folder of a run before a node trains it. It is emptied here, so that a rerun continues."""
    with run_folder.locked(folder):
        if fresh:
            run_folder.clear(folder)
        one_run.claim_folder(folder, config)


def _report_epochs(config: Config, on_progress: OnProgress) -> Callable[[int, float], None]:
    """What `run` calls after every epoch."""
    return lambda epoch, loss: on_progress(EpochDone(config, epoch, config.settings.epochs, loss))


def _raise_first(errors: Sequence[BaseException]) -> None:
    """Raise the first error, if there is one; of several it says how many."""
    if not errors:
        return
    first = errors[0]
    if isinstance(first, BrokenProcessPool):
        raise ChildProcessError(
            "A worker process died (killed, or out of memory). What was finished is kept, and the same command goes "
            "on; fewer --jobs need less memory."
        ) from first
    if len(errors) > 1:
        raise ValueError(f"{len(errors)} runs failed, the first with: {first}") from first
    raise first


@contextmanager
def _start_pool(jobs: int, channel: Any) -> Iterator[ProcessPoolExecutor]:
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _prepare_worker, (threads, channel, os.getpid())) as pool:
        yield pool


@contextmanager
def _receive_progress(on_progress: OnProgress) -> Iterator[Any]:
    """A queue for other processes; a thread calls `on_progress` with what they put there."""
    channel, stop = multiprocessing.get_context("spawn").Queue(), threading.Event()

    def receive() -> None:
        while not stop.is_set() or not channel.empty():
            with contextlib.suppress(queue.Empty):
                on_progress(channel.get(timeout=0.1))

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    try:
        yield channel
    finally:
        stop.set()
        thread.join(timeout=5)
        channel.close()


# In a worker process

_CHANNEL: Any = None


def _prepare_worker(threads: int, channel: Any, parent: int) -> None:
    global _CHANNEL
    _CHANNEL = channel
    torch.set_num_threads(threads)
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    """End this process when its parent has ended: an orphan would keep the folders of its runs locked."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _run_in_worker(config: Config, out: Path, fresh: bool) -> Run:
    return run(config, out, fresh=fresh, on_epoch=_report_epochs(config, _CHANNEL.put))
