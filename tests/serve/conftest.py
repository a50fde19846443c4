"""A service on a free port of the loopback interface, in a thread; and a client of the standard library."""

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import afield

pytest.importorskip("uvicorn")
pytest.importorskip("orjson")
from afield.serve.app import Service
from afield.serve.models import Source
from afield.serve.server import Options, bind, make_server, make_service


@dataclass
class Client:
    """Requests to a running service."""

    port: int
    service: Service
    server: Any = None
    headers: dict[str, str] = field(default_factory=dict)

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Status, the JSON of the answer (else its text) and its headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)  # machines are busy
        with contextlib.closing(connection):
            content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            connection.request(method, path, content, self.headers | headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            found = {name.lower(): value for name, value in answer.getheaders()}
            as_json = found.get("content-type", "").startswith("application/json")
            return answer.status, json.loads(text) if as_json else text, found

    def infer(self, rows: Any, model: str = "m", **more: Any) -> tuple[int, Any]:
        array = torch.as_tensor(rows)
        tensor = {"name": "input", "shape": list(array.shape), "datatype": "FP32", "data": array.tolist()}
        return self("POST", f"/v2/models/{model}/infer", {"inputs": [tensor], **more})[:2]


@contextlib.contextmanager
def running(sources: list[Source], **options: Any) -> Iterator[Client]:
    settings = Options(port=0, threads=2, **options)
    listening = bind(settings)
    service = make_service(sources, settings)
    server = make_server(service)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        while not server.started and thread.is_alive():
            threading.Event().wait(0.005)
        yield Client(listening.getsockname()[1], service, server)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def columns(answer: Any) -> dict[str, Any]:
    """The outputs of the protocol by name, as nested lists."""
    return {o["name"]: torch.tensor(o["data"]).reshape(o["shape"]).tolist() if o["datatype"] != "BYTES" else o["data"]
            for o in answer["outputs"]}  # fmt: skip


def fitted(seed: int = 0, classes: int = 3) -> afield.SNGP:
    """A fitted and calibrated model on two columns."""
    torch.manual_seed(seed)
    model = afield.sngp(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, classes)), num_random_features=64)
    x = torch.randn(600, 2)
    afield.fit_posterior(model, [(x, torch.arange(600) % classes)])
    afield.calibrate(model, [(torch.randn(600, 2), torch.arange(600) % classes)])
    return model.eval()
