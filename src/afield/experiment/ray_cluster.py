"""Work spread over a Ray cluster, with the answers and errors that local processes give.

    spread(address, work, tasks)        work(item, folder, tell) makes files below the folder and returns their paths

- A worker that is lost (killed, out of memory, its node gone) has its task rerun, `RETRIES` times at most. Work that
  keeps checkpoints in its folder goes on from them.
- Nodes that see the driver's folder write there. That is found out, not assumed: the driver puts a file with a random
  name into the folder, and a node that does not see it works in a folder of its own and sends the files back as bytes.
- A task has `cpus` cores to itself, and as many threads; AFIELD_DATA, the working folder and the command line are the
  driver's, where the node has these folders. Every node needs the same version of afield.
- Nothing is left behind: Ctrl-C ends the workers and waits for them.
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
_PATIENCE = 60.0  # seconds that a network file system may take to show a file of another machine
Tell = Callable[[Any], None]
Work = Callable[[Any, Path, Tell], Sequence[Path]]
"""(item, folder, tell) -> the files that it made below the folder, the one that makes them count last."""


def spread(
    address: str,
    work: Work,
    tasks: Sequence[tuple[Any, Path]],
    *,
    cpus: int = 1,
    on_event: Tell = lambda event: None,
    on_done: Callable[[Any], None] = lambda item: None,
) -> list[BaseException]:
    """Do the work for every (item, folder) on the cluster; what went wrong.

    address   as Ray has it: auto, local, host:port, ray://host:port. A session of Ray that is open is used as it is
    on_event  hears what tasks tell
    on_done   hears of every item whose files are in its folder
    """
    if not tasks:
        return []
    errors: list[BaseException] = []
    with connected(address) as ray, _marked({folder for _, folder in tasks}) as mark:
        _check_cores(ray, cpus)
        place, mailbox = _Place(mark, cpus), _mailbox(ray)
        remote = ray.remote(_task).options(num_cpus=cpus, max_retries=RETRIES, scheduling_strategy="SPREAD")
        pending = {
            remote.remote(work, item, folder.resolve(), number, place, mailbox): (item, folder)
            for number, (item, folder) in enumerate(tasks)
        }
        try:
            while pending:
                ready, _ = ray.wait(list(pending), timeout=0.2)
                _deliver(ray, mailbox, on_event)
                for reference in ready:
                    item, folder = pending.pop(reference)
                    try:
                        _bring_home(folder, ray.get(reference))
                        on_done(item)
                    except Exception as error:
                        errors.append(_explained(ray, error))
        except BaseException:
            _stop(ray, list(pending))
            raise
    return errors


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """A session of Ray: the one that is open, or one with the cluster at this address, which ends with the context."""
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
    """Ray waits minutes for an address where nothing listens."""
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
    """A task that no node has room for would wait for ever."""
    most = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
    if not 1 <= cpus <= most:
        raise ValueError(f"A run takes between 1 core and all {most} of the cluster's largest node, got {cpus}.")


# On the driver


@contextlib.contextmanager
def _marked(folders: Iterable[Path]) -> Iterator[str]:
    """The name of a file that is in each of these folders meanwhile."""
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


def _mailbox(ray: Any) -> Any:
    class Mailbox:  # inside a function, and events as bytes: its process then need not import afield
        def __init__(self) -> None:
            self.events: list[bytes] = []

        def put(self, *events: bytes) -> None:
            self.events += events

        def take(self) -> list[bytes]:
            taken, self.events = self.events, []
            return taken

    return ray.remote(Mailbox).options(num_cpus=0, max_restarts=-1).remote()


def _deliver(ray: Any, mailbox: Any, on_event: Tell) -> None:
    events: list[bytes] = []
    with contextlib.suppress(ray.exceptions.RayError):  # the node of the mailbox is lost: it is starting elsewhere
        events = ray.get(mailbox.take.remote(), timeout=30)
    for event in events:
        on_event(pickle.loads(event))


def _bring_home(folder: Path, made: dict[Path, bytes | None]) -> None:
    """Write files that were sent; wait for those that the node wrote itself."""
    deadline = time.monotonic() + _PATIENCE
    for name, content in made.items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_file(folder / name, content)
        while not (folder / name).exists():
            if time.monotonic() > deadline:
                raise FileNotFoundError(f"A node of the cluster has written {folder / name}, but it is not there.")
            time.sleep(0.2)


def _stop(ray: Any, pending: list[Any]) -> None:
    for reference in pending:
        ray.cancel(reference, force=True)
    if pending:
        ray.wait(pending, num_returns=len(pending), timeout=30)


def _explained(ray: Any, error: Exception) -> BaseException:
    """What the task raised, in place of Ray's wrapping; that is its cause, with the traceback from the node."""
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
class _Place:
    """Where and how a task works; made on the driver, entered on a node."""

    mark: str
    cpus: int
    version: str = __version__
    command: tuple[str, ...] = field(default_factory=lambda: tuple(sys.argv))
    data: str | None = field(default_factory=lambda: _resolved(os.environ.get("AFIELD_DATA")))
    home: str = field(default_factory=os.getcwd)

    def enter(self) -> None:
        if self.version != __version__:
            raise ValueError(
                f"The node {socket.gethostname()} has afield {__version__}, this machine {self.version}: install the "
                "same version everywhere."
            )
        torch.set_num_threads(self.cpus)
        sys.argv = list(self.command)  # environment.json tells the command
        if self.data is not None and os.path.isdir(self.data):
            os.environ["AFIELD_DATA"] = self.data
        if os.path.isdir(self.home):
            os.chdir(self.home)


def _resolved(folder: str | None) -> str | None:
    return None if folder is None else os.path.abspath(folder)


def _task(work: Work, item: Any, folder: Path, number: int, place: _Place, mailbox: Any) -> dict[Path, bytes | None]:
    """On a node: the files that were made, with their content where the driver cannot see them."""
    import ray

    place.enter()
    shared = (folder / place.mark).exists()
    scratch = Path(tempfile.gettempdir(), place.mark, str(number))
    base = folder if shared else scratch
    base.mkdir(parents=True, exist_ok=True)
    files = work(item, base, lambda event: mailbox.put.remote(pickle.dumps(event)))
    made = {file.relative_to(base): None if shared else file.read_bytes() for file in files}
    if not shared:
        shutil.rmtree(scratch)
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(mailbox.put.remote(), timeout=30)  # calls arrive in order: now the driver can have all events
    return made
