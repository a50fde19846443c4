"""The routes: Open Inference Protocol v2, MLflow's /invocations, metrics, and what the page asks for.

Every error is {"error": "..."}: 400 for bad input, 401 without the token, 404 for what is not there, 408 for a client
that is too slow, 413 for a body that is too large, 503 with Retry-After where the queue is full or time is up.
"""

import asyncio
import contextlib
import hmac
import itertools
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from afield.serve import infer, protocol, tracing
from afield.serve.batching import Batcher, Busy
from afield.serve.engine import MOST_EXPLAINED, BadInput
from afield.serve.invocations import parse_invocation, records
from afield.serve.logs import LOGGER, log
from afield.serve.metrics import Metrics
from afield.serve.models import Models, Version
from afield.version import __version__

PAGE = Path(__file__).with_name("page")
_OPEN = re.compile(r"/(v2/health/(live|ready)|ping|page/[\w.]+)?")  # what is shown without the token
KNOWN = (HTTPException, BadInput, Busy, TimeoutError, ClientDisconnect)  # errors with an answer of their own
_ID = re.compile(r"[\w.:@/+=-]{1,128}")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'"


@dataclass(frozen=True)
class Limits:
    """What a request may cost: bytes of its body, rows, seconds to arrive and to be answered."""

    max_bytes: int = 8 * 2**20
    max_rows: int = 1024
    read_seconds: float = 10.0
    answer_seconds: float = 30.0


class Service:
    """The application of some models.

    token  what a request must carry as `Authorization: Bearer TOKEN`; None: nothing
    """

    def __init__(
        self,
        models: Models,
        metrics: Metrics,
        *,
        threads: int = 1,
        limits: Limits | None = None,
        token: str | None = None,
        **batching: Any,
    ) -> None:
        self.models, self.metrics, self.limits, self.token = models, metrics, limits or Limits(), token
        self.reading = self.held = 0  # requests whose body is on its way; bytes of these bodies
        self.ready = True
        self.batcher = Batcher(threads, expected=lambda: self.reading, on_batch=metrics.batch.observe, **batching)
        metrics.queue.waiting = self._waiting

    def app(self) -> ASGIApp:
        model, of = "/v2/models/{model}", {"GET": ["GET"], "POST": ["POST"]}
        routes = [
            Route("/", self.index),
            Route("/page/{file}", self.static),
            Route("/metrics", self.show_metrics),
            Route("/ping", self.live),
            Route("/v2", self.server),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.is_ready),
            Route("/v2/models", self.list_models),
            Route("/invocations", self.invocations, methods=of["POST"]),
        ]
        for base in (model, f"{model}/versions/{{version}}"):
            routes += [
                Route(base, self.metadata),
                Route(f"{base}/ready", self.model_ready),
                Route(f"{base}/explain", self.explain, methods=of["POST"]),
                Route(f"{base}/labels", self.labels, methods=of["POST"]),
                Route(f"{base}/monitor", self.monitor),
            ]
        handlers: Any = {Exception: _server_error} | dict.fromkeys(KNOWN, lambda request, error: _known_error(error))
        return _Frame(Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan), self)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.models.watch_files()
        yield
        self.ready = False
        await asyncio.to_thread(self.batcher.close)
        await asyncio.to_thread(self.models.close)

    # The protocol

    async def server(self, request: Request) -> Response:
        return _json({"name": "afield", "version": __version__, "extensions": []})

    async def live(self, request: Request) -> Response:
        return _json({"live": True})

    async def is_ready(self, request: Request) -> Response:
        return _json({"ready": self.ready}, 200 if self.ready else 503)

    async def list_models(self, request: Request) -> Response:
        current = self.models.current
        return _json({"models": [_describe(list(of.values())[-1], list(of)) for of in current.values()]})

    async def metadata(self, request: Request) -> Response:
        versions = self.models.current.get(request.path_params["model"], {})
        return _json(_describe(self._version(request), list(versions)))

    async def model_ready(self, request: Request) -> Response:
        version = self._version(request)
        return _json({"name": version.model, "ready": True})

    async def invocations(self, request: Request) -> Response:
        version = self.models.default
        if version is None:
            raise HTTPException(404, "There is no model here.")
        infer.note(request.scope, version)
        body = await self._body(request)
        arrays = parse_invocation(body, request.headers.get("content-type", ""), version.engine)
        asked = protocol.check_request(arrays, version.engine, self.limits.max_rows)
        answers = await infer.run(self, request.scope, version, asked)
        return _json({"predictions": records(answers)})

    async def explain(self, request: Request) -> Response:
        version = self._version(request)
        if (explain := version.engine.explain) is None:
            raise HTTPException(
                404, "This model has no training examples: afield.save(..., neighbours=100, train=...)."
            )
        asked = protocol.parse_infer(await self._body(request), version.engine, MOST_EXPLAINED)
        async with asyncio.timeout(self.limits.answer_seconds):
            return _json({"rows": await asyncio.to_thread(explain, asked.arrays)})

    async def labels(self, request: Request) -> Response:
        version = self._version(request)
        content = protocol.parse_json(await self._body(request))
        if not (isinstance(content, dict) and isinstance(content.get("labels"), list)):
            raise BadInput('Expected {"id": ID, "labels": [...]}.')
        id, labels = str(content.get("id")), content["labels"]
        return _json(await asyncio.to_thread(version.monitor.add_labels, id, labels))  # it may write to a file

    # The page and what it asks for

    async def index(self, request: Request) -> Response:
        return _file("index.html")

    async def static(self, request: Request) -> Response:
        return _file(request.path_params["file"])

    async def monitor(self, request: Request) -> Response:
        version = self._version(request)
        return _json(await asyncio.to_thread(version.monitor.summary))

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # Steps of a request

    def find(self, model: str, version: str | None = None) -> Version:
        """The version of a model that is served now."""
        found = self.models.find(model, version)
        if found is None:
            there = ", ".join(self.models.current.get(model, {}) or self.models.current)
            what = f"version {version!r} of {model!r}" if model in self.models.current else f"model {model!r}"
            raise HTTPException(404, f"There is no {what} here, only {there}.")
        return found

    def _version(self, request: Request) -> Version:
        found = self.find(request.path_params["model"], request.path_params.get("version"))
        infer.note(request.scope, found)
        return found

    def _waiting(self) -> dict[tuple[str, str], int]:
        """Rows in the queue by model and version, of all that is served now."""
        rows, served = self.batcher.waiting(), self.models.current
        return {(name, v.name): rows[id(v.engine)] for name, of in served.items() for v in of.values()}

    async def _body(self, request: Request) -> bytes:
        return await infer.read_body(self, dict(request.scope["headers"]), request.receive)


class _Frame:
    """Around every request: its id, the token, the log line and the metrics."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service, self.tracer = app, service, tracing.find_tracer()
        self.ids = map(f"{secrets.token_hex(4)}{{:08x}}".format, itertools.count())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, started = dict(scope["headers"]), time.perf_counter()
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        about = scope["afield"] = {"request": given if _ID.fullmatch(given) else next(self.ids)}
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", about["request"].encode())]
            await send(message)

        try:
            await self._choose(scope, headers)(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            route = str(scope.get("afield.route") or getattr(scope.get("route"), "path", "other"))
            self.service.metrics.request(route, status, seconds, about.get("model", ""), about.get("version", ""))
            if self.tracer is not None:
                tracing.record(self.tracer, scope, route=route, status=status, seconds=seconds)
            log("request", **about, method=scope["method"], path=scope["path"][:200], status=status,
                ms=round(1000 * seconds, 2))  # fmt: skip

    def _choose(self, scope: Scope, headers: dict[bytes, bytes]) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
        if not self._allowed(scope, headers):
            return _error(401, "This service asks for Authorization: Bearer TOKEN.", {"www-authenticate": "Bearer"})
        return self._infer if infer.PATH.fullmatch(scope["path"]) else self.app

    async def _infer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await infer.infer(self.service, scope, receive, send)
        except KNOWN as error:
            await _known_error(error)(scope, receive, send)
        except Exception as error:
            await _server_error(Request(scope), error)(scope, receive, send)

    def _allowed(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        token = self.service.token
        if token is None or _OPEN.fullmatch(scope["path"]):
            return True
        return hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + token.encode())


def _describe(version: Version, versions: list[str]) -> dict[str, Any]:
    engine = version.engine
    return {
        "name": version.model,
        "versions": versions,
        "platform": engine.platform,
        "inputs": [spec.describe() for spec in engine.inputs],
        "outputs": [spec.describe() for spec in engine.outputs],
        "parameters": {
            "version": version.name,
            "identity": engine.identity,
            "labels": list(engine.labels),
            "alpha": engine.alpha,
            "num_reference": len(engine.reference),
            "features": list(engine.features),
            "categories": {str(column): list(values) for column, values in engine.categories.items()},
            "policy": engine.policy,
            "explains": engine.explain is not None,
        },
    }


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(protocol.dump(value), status, headers, media_type="application/json")


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return _json({"error": message}, status, headers)


def _known_error(error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _error(error.status_code, error.detail, dict(error.headers or {}))
    if isinstance(error, Busy):
        return _error(503, str(error), {"retry-after": "1"})
    if isinstance(error, TimeoutError):
        return _error(503, "The answer took too long.", {"retry-after": "1"})
    return _error(400, str(error) or "The client went away.")


def _server_error(request: Request, error: Exception) -> Response:
    LOGGER.error("error", exc_info=error, extra={"fields": request.scope["afield"]})
    return _error(500, "Something is wrong with this service; its log says what.")


def _file(name: str) -> Response:
    file = PAGE / name
    if file.parent != PAGE or file.suffix not in _TYPES or not file.is_file():
        raise HTTPException(404, "There is no such file.")
    headers = {"content-security-policy": _POLICY, "cache-control": "no-cache", "x-content-type-options": "nosniff"}
    return FileResponse(file, media_type=_TYPES[file.suffix], headers=headers)
