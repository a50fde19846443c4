"""Thousands of requests that are wrong in some way, or in none, to a running service: none may be answered by a 5xx.

    python -m bench.fuzz_service [--requests 10000] [--seed 0]      a service on the loopback interface, in this process

Requests are right ones that are then spoiled: a value anywhere in the JSON is replaced, removed, repeated or nested;
bytes are flipped, cut or repeated; methods, paths and headers are exchanged; bodies are sent in pieces, half, or with a
wrong length. After every hundred requests a right one must get the right answer. 503 counts as a failure too: one
client cannot fill the queue.
"""

import argparse
import copy
import http.client
import json
import random
import socket
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import afield
from afield.model.hidden import draw_examples
from afield.serve.engine import TEXT, Arrays, TensorSpec
from afield.serve.explain import explainer
from afield.serve.models import Source
from afield.serve.open_torch import open_sngp
from tests.serve.conftest import fitted, running

METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "X")
PATHS = (
    *("/", "/v2", "/v2/", "/v2/health/live", "/v2/health/ready", "/v2/models", "/v2/models/m", "/v2/models/m/ready"),
    *("/v2/models/m/infer", "/v2/models/m/versions/x/infer", "/v2/models//infer", "/v2/models/%00/infer", "/metrics"),
    *(
        "/v2/models/m/labels",
        "/v2/models/m/explain",
        "/v2/models/texts/infer",
        "/v2/models/m/monitor",
        "/invocations",
        "/page/main.js",
        "/page/../app.py",
        "//",
        "/ping",
    ),
    *("/v2/models/" + "m" * 5000, "/v2/models/%ff%fe", "/?a=%", "/page/%2e%2e%2fapp.py"),
)
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**64,
        -(2**63),
        1e308,
        -1e308,
        1e-320,
        0.5,
        "",
        "a",
        "NaN",
        "é\u0000😀",
    ),
    *([], {}, [[]], [[[]]], [None], [{}], ["a"], [[1, 2], [3]], {"": {}}, [1] * 300, [[1, 2]] * 60, "x" * 3000),
    *("FP32", "FP64", "INT64", "BYTES", "BOOL", "UINT8", "FP16", "input", "text", [1, 2], [-1, 2], [-1, -1], [0, 2]),
)
HEADERS = (
    *({}, {"content-type": "text/csv"}, {"content-type": "application/json; charset=x"}, {"content-encoding": "gzip"}),
    *({"x-request-id": "a" * 3000}, {"x-request-id": "\u00e9"}, {"authorization": "Bearer x"}, {"accept": "nothing"}),
    *({"expect": "100-continue"}, {"connection": "close"}, {"range": "bytes=0-1"}, {"host": ""}),
)


@dataclass
class Found:
    """How often each status came, and the requests that were answered by a 5xx, or not at all where they must be."""

    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def fuzz(port: int, requests: int, seed: int = 0) -> Found:
    """Send the requests; what came back."""
    rng, found = random.Random(seed), Found()
    for i in range(requests):
        method, path, headers, body = make_request(rng)
        send = _send_raw if rng.random() < 0.1 else _send
        try:
            status = send(port, method, path, headers, body, rng)
        except (OSError, http.client.HTTPException):  # closed: allowed for what is no HTTP
            status = 0
        found.statuses[status] += 1
        if status >= 500:
            found.failures.append(f"{status} {method} {path[:80]} {headers} {body[:300]!r}")
        if i % 100 == 0 and not _still_right(port):
            found.failures.append(f"after request {i}: a right request got no right answer")
    return found


def make_request(rng: random.Random) -> tuple[str, str, dict[str, str], bytes]:
    """A request that is right but for some damage."""
    path, content = right_request(rng)
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        content = spoil(content, rng)
    body = json.dumps(content).encode()
    if rng.random() < 0.2:
        body = spoil_bytes(body, rng)
    method = "POST" if rng.random() < 0.9 else rng.choice(METHODS)
    return method, path if rng.random() < 0.85 else rng.choice(PATHS), dict(rng.choice(HEADERS)), body


def right_request(rng: random.Random) -> tuple[str, Any]:
    """A path, and a body that it takes."""
    rows = [[rng.uniform(-3, 3) for _ in range(2)] for _ in range(rng.choice((1, 2, 5)))]
    tensor = {"name": "input", "shape": [len(rows), 2], "datatype": "FP32", "data": rows}
    texts = {"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": ["a b", "c"]}
    model = "/v2/models/m"
    return rng.choice(
        (
            *2 * ((f"{model}/infer", {"id": rng.choice("abc"), "inputs": [tensor]}),),
            (f"{model}/explain", {"inputs": [tensor]}),
            (f"{model}/labels", {"id": rng.choice("abc"), "labels": [rng.randrange(3) for _ in rows]}),
            ("/v2/models/texts/infer", {"inputs": [texts]}),
            ("/invocations", {"inputs": rows}),
            ("/invocations", {"instances": [{"input": row} for row in rows]}),
            ("/invocations", {"dataframe_split": {"columns": ["a", "b"], "data": rows}}),
            ("/invocations", {"dataframe_records": [dict(zip("ab", row, strict=True)) for row in rows]}),
        )
    )


def spoil(content: Any, rng: random.Random) -> Any:
    """Change one place anywhere in a JSON value."""
    content = copy.deepcopy(content)
    places = list(_places(content))
    if not places or rng.random() < 0.03:
        return copy.deepcopy(rng.choice(ODD))
    container, key = rng.choice(places)
    act = rng.random()
    if act < 0.6:
        container[key] = copy.deepcopy(rng.choice(ODD))
    elif act < 0.75:
        del container[key]
    elif act < 0.9 and isinstance(container, list):
        container.insert(key, copy.deepcopy(container[key]))
    else:
        container[key] = [container[key]]
    return content


def _places(value: Any) -> Any:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def spoil_bytes(body: bytes, rng: random.Random) -> bytes:
    cut = rng.randrange(len(body) + 1)
    return rng.choice(
        (
            body[:cut],
            body[:cut] + bytes(rng.randrange(256) for _ in range(8)) + body[cut:],
            body[:cut] + body,
            body.replace(b"[", b"[" * 40),
            body.replace(b",", b",,", 1),
            body.replace(b"1", b"1e999"),
            b"[" * rng.randrange(2000),
            bytes(rng.randrange(256) for _ in range(rng.randrange(300))),
            b"",
        )
    )


def _send(port: int, method: str, path: str, headers: dict[str, str], body: bytes, rng: random.Random) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def _send_raw(port: int, method: str, path: str, headers: dict[str, str], body: bytes, rng: random.Random) -> int:
    """With a wrong length, a wrong version, in pieces, or half; the client then hangs up."""
    length = rng.choice((len(body), len(body) + 10, max(0, len(body) - 5), -1, "x", 10**20))
    version = rng.choice(("HTTP/1.1", "HTTP/1.0", "HTTP/9", ""))
    head = f"{method} {path} {version}\r\nHost: a\r\nContent-Length: {length}\r\n"
    raw = (head + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n").encode("utf-8", "replace") + body
    raw = raw[: rng.choice((len(raw), len(raw) // 2, 3))]
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        for start in range(0, len(raw), max(1, len(raw) // 3)):
            client.sendall(raw[start : start + max(1, len(raw) // 3)])
        client.shutdown(socket.SHUT_WR)
        answer = client.recv(100)
    return int(answer.split()[1]) if answer.startswith(b"HTTP/") else 0


def _still_right(port: int) -> bool:
    tensor = {"name": "input", "shape": [1, 2], "datatype": "FP32", "data": [0.1, 0.2]}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("POST", "/v2/models/m/infer", json.dumps({"id": "z", "inputs": [tensor]}))
        answer = json.loads(connection.getresponse().read())
        return answer.get("id") == "z" and len(answer["outputs"]) >= 4
    finally:
        connection.close()


def served() -> list[Source]:
    """A model that explains and decides, and one of texts; what they answer with is as in a service of a user."""
    rows, rule = fitted(), afield.policy(false_alarms=0.05)
    examples = [(torch.randn(40, 2, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3)]
    explain = explainer(rows, draw_examples(rows, examples, 20), lambda arrays: torch.from_numpy(arrays["input"]))
    engine = replace(open_sngp(rows, policy=rule), explain=explain)

    def of_texts(arrays: Arrays) -> Arrays:
        counts = [[len(text) / 10 - 1, text.count(" ")] for text in arrays["text"].tolist()]
        return engine.run({"input": np.array(counts, dtype=np.float32)})

    texts = replace(engine, inputs=(TensorSpec("text", TEXT, (-1,)),), run=of_texts, identity="texts", explain=None)
    return [Source("m", lambda path: engine), Source("texts", lambda path: texts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as state, running(served(), state=Path(state), risk=0.1) as client:
        found = fuzz(client.port, options.requests, options.seed)
    print(dict(found.statuses), *found.failures[:20], sep="\n")
    raise SystemExit(bool(found.failures))


if __name__ == "__main__":
    main()
