"""`POST .../infer` as bare ASGI: nearly all requests go here, and a router and its layers take half of the time.

read the body -> parse -> batcher -> answer        one timer, one task, two messages to the server
"""

import asyncio
import re
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from afield.serve import protocol
from afield.serve.batching import Busy
from afield.serve.engine import Arrays, BadInput
from afield.serve.models import Version

if TYPE_CHECKING:
    from afield.serve.app import Service

ROUTE = "/v2/models/{model}/infer"
_MOST_BODIES = 32  # of the largest size, that may be read at a time
PATH = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/infer")


async def infer(service: "Service", scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request of the protocol; errors are raised."""
    found = PATH.fullmatch(scope["path"])
    assert found is not None
    scope["afield.route"] = ROUTE
    if scope["method"] != "POST":
        raise HTTPException(405, "Method Not Allowed", {"allow": "POST"})
    version = service.find(*found.groups())
    note(scope, version)
    body = await read_body(service, dict(scope["headers"]), receive)
    asked = protocol.parse_infer(body, version.engine, service.limits.max_rows)
    answers = await run(service, scope, version, asked)
    content = protocol.dump(protocol.response(version.model, version.name, asked, answers))
    await send_json(send, 200, content)


def note(scope: Scope, version: Version) -> None:
    """Say in the log, the metrics and the span of a request which version it is for."""
    scope["afield"] |= {"model": version.model, "version": version.name}


async def read_body(service: "Service", headers: dict[bytes, bytes], receive: Receive) -> bytes:
    """The whole body of a request, if it is small and comes in time."""
    limits = service.limits
    too_large = HTTPException(413, f"The body has more than {limits.max_bytes} bytes.")
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared) > limits.max_bytes:
        raise too_large
    parts, more, size = list[bytes](), True, 0
    service.reading += 1
    try:
        async with asyncio.timeout(limits.read_seconds):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                parts.append(message.get("body", b""))
                size, more = size + len(parts[-1]), message.get("more_body", False)
                service.held += len(parts[-1])
                if size > limits.max_bytes:
                    raise too_large
                if service.held > _MOST_BODIES * limits.max_bytes:
                    raise Busy("Many large bodies are being read: try again.")
    except TimeoutError as error:
        raise HTTPException(408, f"The body took more than {limits.read_seconds:g} s.") from error
    finally:
        service.reading -= 1
        service.held -= size
    return b"".join(parts)


async def run(service: "Service", scope: Scope, version: Version, asked: protocol.Request) -> Arrays:
    """The answers to what was asked; the monitor of the version counts them."""
    about: dict[str, Any] = scope["afield"]
    about["rows"] = asked.rows
    try:
        async with asyncio.timeout(service.limits.answer_seconds):
            answers = await service.batcher.run(version.engine, asked.arrays, asked.rows)
    except BadInput:
        service.metrics.failures.labels(version.model, version.name).inc()
        raise
    version.monitor.add(asked.id or about["request"], asked.arrays, answers)
    return answers


async def send_json(send: Send, status: int, content: bytes) -> None:
    """An answer in JSON."""
    length = str(len(content)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", length)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
