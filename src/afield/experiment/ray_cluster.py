"""Tasks on the nodes of a Ray cluster, with the results and errors that local processes give.

    run_on_cluster(address, work, tasks)      work(item, folder, on_progress) writes files below the folder

- A task whose worker is lost (killed, out of memory, its node gone) is run again, `RETRIES` times at most. Work that
  keeps checkpoints in its folder continues from them.
- Nodes that see the driver's folder write there. This is tested, not assumed: the driver puts a file with a random name
  into the folder. A node that does not see it works in a folder of its own and sends the files back as bytes.
- A task has `cpus` cores to itself, and as many threads. AFIELD_DATA, the working folder and the command line are those
  of the driver, where the node has these folders. Every node needs the same version of afield.
- Ctrl-C stops the workers and waits for them.
"""

import contextlib
import logging
import os
import pickle
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from afield.errors import LostWorker
from afield.model.saving import write_file
from afield.version import __version__

RETRIES = 3
_FILE_TIMEOUT = 60.0  # seconds that a network file system may take to show a file of another machine
OnProgress = Callable[[Any], None]
Work = Callable[[Any, Path, OnProgress], Sequence[Path]]
"""(item, folder, on_progress) -> the files that it wrote below the folder; last the one without which none counts."""


def run_on_cluster(
    address: str,
    work: Work,
    tasks: Sequence[tuple[Any, Path]],
    *,
    cpus: int = 1,
    on_progress: OnProgress = lambda event: None,
    on_done: Callable[[Any], None] = lambda item: None,
) -> list[BaseException]:
    """Do the work for every (item, folder) on the cluster; return the errors.

    address      auto, local, host:port or ray://host:port, as in Ray; an open session of Ray is used as it is
    on_progress  is called on the driver with what tasks report
    on_done      is called with every item whose files are in its folder
    """
    if not tasks:
        return []
    errors: list[BaseException] = []
    with open_session(address) as ray, _mark_folders({folder for _, folder in tasks}) as mark:
        _check_cores(ray, cpus)
        setup, mailbox = NodeSetup(mark, cpus), _start_mailbox(ray)
        remote = ray.remote(_run_task).options(num_cpus=cpus, max_retries=RETRIES, scheduling_strategy="SPREAD")
        pending = {
            remote.remote(work, item, folder.resolve(), number, setup, mailbox): (item, folder)
            for number, (item, folder) in enumerate(tasks)
        }
        try:
            while pending:
                ready, _ = ray.wait(list(pending), timeout=0.2)
                _empty_mailbox(ray, mailbox, on_progress)
                for reference in ready:
                    item, folder = pending.pop(reference)
                    try:
                        _collect_files(folder, ray.get(reference))
                        on_done(item)
                    except Exception as error:
                        errors.append(_unwrap_error(ray, error))
        except BaseException:
            _cancel_tasks(ray, list(pending))
            raise
    return errors


@contextlib.contextmanager
def open_session(address: str) -> Iterator[Any]:
    """The open session of Ray; if there is none, one with the cluster at this address, closed at the end."""
    try:
        import ray
    except ImportError as error:
        raise ImportError('--cluster needs Ray: pip install "afield[ray]".') from error
    if ray.is_initialized():
        yield ray
        return
    _check_reachable(address)
    options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, **options)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConnectionError(
            f"No Ray cluster at {address!r}: {error} Start one with `ray start --head`, or leave --cluster out and use "
            "--jobs."
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Refuse an address where nothing listens: Ray would wait for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"A cluster's address is auto, local, host:port or ray://host:port, got {address!r}.")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise ConnectionError(
            f"No Ray cluster at {address!r}: {error}. `ray start --head` starts one and prints its address."
        ) from error


def _check_cores(ray: Any, cpus: int) -> None:
    """Refuse tasks that no node has room for: they would wait for ever."""
    most = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
    if not 1 <= cpus <= most:
        raise ValueError(f"A run takes between 1 core and all {most} of the cluster's largest node, got {cpus}.")


# On the driver


@contextlib.contextmanager
def _mark_folders(folders: Iterable[Path]) -> Iterator[str]:
    """Put a file into each of these folders, and delete it at the end; its name."""
    name = f".afield-{uuid.uuid4().hex}"
    files = [folder / name for folder in folders]
    try:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        yield name
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def _start_mailbox(ray: Any) -> Any:
    """An actor of Ray that keeps what tasks report until the driver takes it."""

    class Mailbox:  # in a function, and with events as bytes, so that its process need not import afield
        def __init__(self) -> None:
            self.events: list[bytes] = []

        def put(self, *events: bytes) -> None:
            self.events += events

        def take(self) -> list[bytes]:
            taken, self.events = self.events, []
            return taken

    return ray.remote(Mailbox).options(num_cpus=0, max_restarts=-1).remote()


def _empty_mailbox(ray: Any, mailbox: Any, on_progress: OnProgress) -> None:
    events: list[bytes] = []
    with contextlib.suppress(ray.exceptions.RayError):  # its node is lost, and it is being started on another one
        events = ray.get(mailbox.take.remote(), timeout=30)
    for event in events:
        on_progress(pickle.loads(event))


def _collect_files(folder: Path, files: dict[Path, bytes | None]) -> None:
    """Write the files that were sent; wait for those that the node has written itself."""
    deadline = time.monotonic() + _FILE_TIMEOUT
    for name, content in files.items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_file(folder / name, content)
        while not (folder / name).exists():
            if time.monotonic() > deadline:
                raise FileNotFoundError(f"A node of the cluster has written {folder / name}, but it is not there.")
            time.sleep(0.2)


def _cancel_tasks(ray: Any, pending: list[Any]) -> None:
    for reference in pending:
        ray.cancel(reference, force=True)
    if pending:
        ray.wait(pending, num_returns=len(pending), timeout=30)


def _unwrap_error(ray: Any, error: Exception) -> BaseException:
    """The error of the task itself; Ray's error, which has the traceback from the node, is its cause."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, Exception):
        cause = error.cause
    elif isinstance(error, ray.exceptions.RayError) and not isinstance(error, ray.exceptions.RayTaskError):
        cause = LostWorker(
            f"A task's workers died {RETRIES + 1} times (killed, or out of memory). What was finished is kept, and the "
            "same command goes on; more --cpus-per-run leave fewer runs on a node, which need less memory."
        )
    else:
        return error
    cause.__cause__ = error
    return cause


# On a node


@dataclass(frozen=True)
class NodeSetup:
    """What a node takes over from the driver before it runs a task."""

    mark: str
    cpus: int
    version: str = __version__
    command: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv))
    data: str | None = field(default_factory=lambda: _absolute(os.environ.get("AFIELD_DATA")))
    home: str = field(default_factory=os.getcwd)

    def apply(self) -> None:
        if self.version != __version__:
            raise ValueError(
                f"The node {socket.gethostname()} has afield {__version__}, this machine {self.version}: install the "
                "same version everywhere."
            )
        torch.set_num_threads(self.cpus)
        sys.argv = list(self.command)  # environment.json has the command
        if self.data is not None and os.path.isdir(self.data):
            os.environ["AFIELD_DATA"] = self.data
        if os.path.isdir(self.home):
            os.chdir(self.home)


def _absolute(folder: str | None) -> str | None:
    return None if folder is None else os.path.abspath(folder)


def _run_task(
    work: Work, item: Any, folder: Path, number: int, setup: NodeSetup, mailbox: Any
) -> dict[Path, bytes | None]:
    """Do the work for one item on a node; its files, with their content if the driver cannot see them."""
    import ray

    setup.apply()
    shared = (folder / setup.mark).exists()
    scratch = Path(tempfile.gettempdir(), setup.mark, str(number))
    base = folder if shared else scratch
    base.mkdir(parents=True, exist_ok=True)
    written = work(item, base, lambda event: mailbox.put.remote(pickle.dumps(event)))
    files = {file.relative_to(base): None if shared else file.read_bytes() for file in written}
    if not shared:
        shutil.rmtree(scratch)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(mailbox.put.remote(), timeout=30)  # calls arrive in order: now the mailbox has all events
    return files
