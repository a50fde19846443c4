"""From paths to a running service: open models, bind, answer; when told to stop, answer what was taken, then stop."""

import asyncio
import functools
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

try:
    import uvicorn
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    from afield.serve.app import Limits, Service
    from afield.serve.metrics import Metrics
    from afield.serve.models import Models, Source
except ImportError as error:
    raise ImportError(f'{error}. The service needs an extra: pip install "afield[serve]".') from error

from afield.serve import logs, protocol
from afield.serve.engine import Engine
from afield.serve.open_onnx import open_onnx

GRACE = 30  # seconds in which requests that were taken are answered


@dataclass(frozen=True)
class Options:
    """How to serve. The fields are the flags of `afield serve`."""

    host: str = "127.0.0.1"
    port: int = 8080
    threads: int = os.cpu_count() or 1
    alpha: float | None = None
    drift_alpha: float = 0.01
    risk: float | None = None
    state: Path | None = None
    token: str | None = None
    limits: Limits = field(default_factory=Limits)
    max_batch: int = 64
    max_wait_ms: float = 2.0
    max_queue: int = 4096


def sources_of(models: list[str], nets: list[str] | None = None, *, alpha: float | None = None) -> list[Source]:
    """From NAME=PATH or PATH, and module:function or NAME=module:function for folders of `afield.save`."""
    named_nets = {entry.rpartition("=")[0]: entry.rpartition("=")[2] for entry in nets or []}
    sources = []
    for entry in models:
        name, _, path = entry.rpartition("=")
        place = Path(path)
        if not place.exists():
            raise ValueError(f"There is no model at {place}.")
        name = name or place.resolve().name.removesuffix(".onnx")
        net = named_nets.get(name, named_nets.get(""))
        sources.append(Source(name, functools.partial(open_path, net=net, alpha=alpha), place))
    unknown = set(named_nets) - {""} - {source.name for source in sources}
    if unknown:
        raise ValueError(f"--net names the model {', '.join(unknown)}, which is not served.")
    return sources


def open_path(path: Path, net: str | None = None, *, alpha: float | None = None) -> Engine:
    """The engine of an ONNX file, or of a folder; a folder that holds nothing but model.onnx counts as the file."""
    if is_onnx(path):
        return open_onnx(path if path.suffix == ".onnx" else path / "model.onnx")
    from afield.serve.open_torch import open_folder  # here: ONNX files are served without torch

    return open_folder(path, net, alpha=alpha)


def is_onnx(path: Path) -> bool:
    """Whether this is an ONNX file, or a folder with nothing else to open."""
    other = any((path / name).exists() for name in ("afield.json", "config.json"))
    return path.suffix == ".onnx" or ((path / "model.onnx").is_file() and not other)


def only_onnx(sources: list[Source]) -> bool:
    """Whether all of these are ONNX files, so that torch is not needed."""
    return all(is_onnx(path) for source in sources for path in source.versions().values())


def make_service(sources: list[Source], options: Options) -> Service:
    """The service of some models."""
    metrics = Metrics()
    monitored = {"alpha": options.drift_alpha, "risk": options.risk}
    models = Models(sources, metrics, options.state, monitored)
    if "torch" in sys.modules:
        from afield.serve.open_torch import use_threads

        use_threads(max(1, (os.cpu_count() or 1) // options.threads))
    return Service(
        models,
        metrics,
        threads=options.threads,
        limits=options.limits,
        token=options.token,
        max_batch=options.max_batch,
        max_wait=options.max_wait_ms / 1000,
        max_queue=options.max_queue,
    )


class Protocol(HttpToolsProtocol):
    """A client that is silent, sends half of a request or endless headers, or does not read, is let go after a while.

    patience   seconds for a whole request to come, and for an answer that is too long for the socket to be read
    most_head  bytes of a request line and its headers
    linger     seconds in which, when the service ends, what is on its way through an open connection is still taken
    """

    patience = 15.0
    most_head = 64 * 2**10
    linger = 0.2

    _head: int | None = None  # bytes of the headers so far; None behind them

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._unread: asyncio.TimerHandle | None = None
        self._begin()

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += len(data)
        super().data_received(data)
        if self._head is not None and self._head > self.most_head and not self.transport.is_closing():
            self.send_400_response(f"The headers have more than {self.most_head} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._impatient.cancel()
        self._begin()

    def on_headers_complete(self) -> None:
        self._head = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._impatient.cancel()
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.patience, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        self._impatient.cancel()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        self.loop.call_later(self.linger, super().shutdown)

    def send_400_response(self, msg: str) -> None:
        """As the protocol has it, for what is no HTTP."""
        content = protocol.dump({"error": msg})
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + content)
        self.transport.close()

    def _begin(self) -> None:
        """Wait for a request."""
        self._head = 0
        self._impatient = self.loop.call_later(self.patience, self._give_up)

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
        else:  # an answer is due, and the limits of the application hold
            self._impatient = self.loop.call_later(self.patience, self._give_up)


def make_server(service: Service) -> uvicorn.Server:
    """The server; `serve(sockets=...)` runs it."""
    config = uvicorn.Config(
        service.app(),
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE,
        backlog=2048,
    )
    return uvicorn.Server(config)


def bind(options: Options) -> socket.socket:
    """The listening socket; port 0 takes any that is free."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((options.host, options.port))
    except OSError as error:
        listening.close()
        raise ValueError(f"Cannot listen on {options.host}:{options.port}: {error.strerror}.") from error
    return listening


def serve(
    sources: list[Source],
    options: Options,
    *,
    log_level: str = "info",
    on_listening: Callable[[str], None] = lambda url: logs.say("listening", url=url, pid=os.getpid()),
) -> None:
    """Serve until SIGTERM or Ctrl-C; `on_listening` is called with the address when requests may come."""
    logs.configure(log_level)
    listening = bind(options)
    service = make_service(sources, options)
    if options.host not in ("127.0.0.1", "::1", "localhost") and options.token is None:
        logs.LOGGER.warning("no token", extra={"fields": {"host": options.host, "advice": "--token-file"}})
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    listening.listen(2048)  # requests wait in the socket until the loop runs
    on_listening(url)
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn handles them, and raises them again when all is done
        signal.signal(number, lambda *_: None)
    make_server(service).run(sockets=[listening])  # on uvloop, if it is installed
    logs.log("stopped")
