"""The service over real sockets: answers are those of the model, every bad request gets an error, and it lives."""

import contextlib
import dataclasses
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import afield
from afield.serve.app import Limits
from afield.serve.engine import BadInput, Engine, TensorSpec
from afield.serve.models import Source
from afield.serve.open_torch import open_sngp
from afield.serve.server import Protocol, sources_of
from tests.serve.conftest import Client, columns, fitted, running

LABELS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def model() -> afield.SNGP:
    return fitted()


@pytest.fixture(scope="module")
def client(model: afield.SNGP) -> Iterator[Client]:
    rule = afield.policy(false_alarms=0.05)
    engine = open_sngp(model, labels=LABELS, policy=rule)
    with running([Source("m", lambda path: engine)], limits=Limits(max_bytes=20_000, max_rows=50)) as client:
        yield client


# Answers ---------------------------------------------------------------------------------------------------------


def test_answers_are_those_of_the_model(client: Client, model: afield.SNGP):
    x = torch.tensor([[0.1, 0.2], [-1.0, 0.5], [40.0, -70.0]])
    status, answer = client.infer(x, id="mine")
    assert status == 200
    assert (answer["model_name"], answer["id"]) == ("m", "mine")
    found, p = columns(answer), model.predict(x)
    assert found["label"] == [LABELS[k] for k in p.labels.tolist()]
    assert torch.allclose(torch.tensor(found["probabilities"]), p.probs, atol=1e-6)
    for name, expected in (("variance", p.variance), ("score", p.score()), ("p_value", p.p_value)):
        assert torch.allclose(torch.tensor(found[name]), expected, rtol=1e-4), name
    assert found["accepted"] == p.accept(0.01).tolist()
    assert found["decision"][2] == "refer"
    assert {o["name"]: o["datatype"] for o in answer["outputs"]} == {
        o["name"]: o["datatype"] for o in client("GET", "/v2/models/m")[1]["outputs"]
    }


@pytest.mark.parametrize(
    ("shape", "datatype", "data"),
    [
        ([2, 2], "FP32", [[1, 2], [3, 4]]),
        ([2, 2], "FP64", [1.0, 2.0, 3.0, 4.0]),
        ([-1, 2], "INT64", [1, 2, 3, 4]),
        ([2, -1], "FP32", [[1, 2], [3, 4]]),
    ],
)
def test_data_comes_in_many_forms(client: Client, shape: list[int], datatype: str, data: Any):
    body = {"inputs": [{"name": "input", "shape": shape, "datatype": datatype, "data": data}]}
    body["outputs"] = [{"name": "score"}]
    status, answer, _ = client("POST", "/v2/models/m/infer", body)
    assert status == 200, answer
    assert columns(answer)["score"] == pytest.approx(columns(client.infer([[1.0, 2.0], [3.0, 4.0]])[1])["score"])
    assert [o["name"] for o in answer["outputs"]] == ["score"]


def test_the_protocol_describes_itself(client: Client):
    assert client("GET", "/v2")[1]["name"] == "afield"
    assert client("GET", "/v2/health/live")[0] == client("GET", "/v2/health/ready")[0] == 200
    assert client("GET", "/ping")[0] == 200
    about = client("GET", "/v2/models/m")[1]
    assert about["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 2]}]
    version = about["parameters"]["version"]
    assert client("GET", f"/v2/models/m/versions/{version}/ready")[1] == {"name": "m", "ready": True}
    assert [entry["name"] for entry in client("GET", "/v2/models")[1]["models"]] == ["m"]
    assert "refused as foreign" in about["parameters"]["policy"]["guarantee"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"inputs": [[1, 2], [3, 4]]}, ""),
        ({"inputs": {"input": [[1, 2], [3, 4]]}}, ""),
        ({"instances": [[1, 2], [3, 4]]}, ""),
        ({"instances": [{"input": [1, 2]}, {"input": [3, 4]}]}, ""),
        ({"dataframe_split": {"columns": ["a", "b"], "data": [[1, 2], [3, 4]]}}, ""),
        ({"dataframe_records": [{"a": 1, "b": 2}, {"a": 3, "b": 4}]}, ""),
        (b"a,b\n1,2\n3,4\n", "text/csv"),
    ],
)
def test_invocations_take_what_mlflow_takes(client: Client, body: Any, kind: str):
    status, answer, _ = client("POST", "/invocations", body, **{"content-type": kind or "application/json"})
    assert status == 200, answer
    expected = columns(client.infer([[1.0, 2.0], [3.0, 4.0]])[1])
    assert [row["label"] for row in answer["predictions"]] == expected["label"]
    assert [row["p_value"] for row in answer["predictions"]] == pytest.approx(expected["p_value"])


# Bad input -------------------------------------------------------------------------------------------------------


def tensor(**changes: Any) -> dict[str, Any]:
    entry = {"name": "input", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]} | changes
    return {"inputs": [{k: v for k, v in entry.items() if v is not None}]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "must be JSON"),
        (b"\xff\xfe", "must be JSON"),
        (b"[" * 5000, "must be JSON"),
        (b'{"inputs": [{"name": "input", "shape": [1, 2], "datatype": "FP32", "data": [NaN, 1]}]}', "must be JSON"),
        ([], "must be an object"),
        ({}, "inputs must be a list"),
        ({"inputs": [1]}, "must be an object"),
        ({"inputs": []}, "is missing"),
        (tensor(name=None), "name of an input must be a text"),
        (tensor(name="other"), "Expected the inputs input"),
        ({"inputs": tensor()["inputs"] * 2}, "each once"),
        (tensor(datatype="FP8"), "datatype of 'input' must be one of"),
        (tensor(datatype="BYTES", data=["a", "b"]), "takes FP32, got BYTES"),
        (tensor(shape=[3, 2]), "2 elements"),
        (tensor(shape=[-1, -1]), "at most one of them -1"),
        (tensor(shape=["a"]), "whole numbers"),
        (tensor(shape=[0, 2], data=[]), "from 1 to 50 rows"),
        (tensor(shape=[51, 2], data=[1] * 102), "from 1 to 50 rows"),
        (tensor(shape=[2], data=[1, 2]), r"must have shape \[-1, 2\]"),
        (tensor(shape=[1, 3], data=[1, 2, 3]), r"must have shape \[-1, 2\], got \[1, 3\]"),
        (tensor(data=[[1, 2], [3]]), "lists of equal lengths"),
        (tensor(shape=[3, 2], data=[[1, 2, 3], [4, 5, 6]]), r"nested as \[2, 3\]"),
        (tensor(data=["1", "2"]), "must be FP32"),
        (tensor(data=[None, 1]), "must be FP32"),
        (tensor(data=[True, False]), "must be FP32"),
        (tensor(data=[1e300, 1]), "must be finite"),
        (tensor(datatype="INT8", data=[1, 1000]), "range of INT8"),
        (tensor() | {"id": 5}, "id must be a text"),
        (tensor() | {"outputs": [{"name": "nothing"}]}, "not 'nothing'"),
        (tensor() | {"outputs": 3}, "outputs must be a list"),
    ],
)
def test_bad_requests_get_the_error_of_the_protocol(client: Client, body: Any, message: str):
    status, answer, _ = client("POST", "/v2/models/m/infer", body)
    assert status == 400
    assert set(answer) == {"error"}
    assert re.search(message, answer["error"]), answer


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "one of inputs, instances"),
        ({"inputs": [[1, 2]], "instances": [[1, 2]]}, "got inputs, instances"),
        ({"inputs": 3}, "a list of rows"),
        ({"inputs": {"other": [[1, 2]]}}, "Expected the inputs input"),
        ({"dataframe_split": []}, "columns and data"),
        ({"dataframe_split": {"columns": ["a"], "data": [[1, 2]]}}, "each of its columns"),
        ({"dataframe_records": [{"a": 1}, {"b": 2}]}, "must have the columns a"),
        ({"dataframe_records": []}, "a list of objects"),
    ],
)
def test_bad_invocations_get_an_error(client: Client, body: Any, message: str):
    status, answer, _ = client("POST", "/invocations", body)
    assert status == 400
    assert message in answer["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v2/models/other", 404),
        ("POST", "/v2/models/other/infer", 404),
        ("POST", "/v2/models/m/versions/9/infer", 404),
        ("PUT", "/v2", 405),
        ("GET", "/v2/models/m/infer", 405),
        ("GET", "/page/..%2fapp.py", 404),
        ("GET", "/page/app.py", 404),
    ],
)
def test_what_is_not_there_is_an_error_too(client: Client, method: str, path: str, status: int):
    found, answer, _ = client(method, path)
    assert (found, set(answer)) == (status, {"error"})


def test_large_bodies_are_refused_before_they_are_read(client: Client):
    assert client("POST", "/v2/models/m/infer", b" " * 30_000)[0] == 413
    with socket.create_connection(("127.0.0.1", client.port), timeout=10) as raw:  # without a declared length
        raw.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        raw.sendall(b"7000\r\n" + b" " * 0x7000 + b"\r\n")
        assert b"413" in raw.recv(1000)


def test_slow_clients_and_half_requests_are_let_go(model: afield.SNGP, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Protocol, "patience", 0.5)
    engine = open_sngp(model)
    with running([Source("m", lambda path: engine)], limits=Limits(read_seconds=0.1)) as client:
        slow, half, silent, second = (
            socket.create_connection(("127.0.0.1", client.port), timeout=10) for _ in range(4)
        )
        slow.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        half.sendall(b"POST /v2/models/m/in")
        second.sendall(b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):  # head and body may come one after the other
            answer += second.recv(1000)
        assert b"200 OK" in answer
        second.sendall(b"POST /v2/models/m/in")
        assert b"408" in slow.recv(1000)
        assert half.recv(1000) == silent.recv(1000) == second.recv(1000) == b""
        for raw in (slow, half, silent, second):
            raw.close()
        assert client.infer([[0.0, 0.0]])[0] == 200


def test_who_does_not_read_the_answer_is_let_go(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Protocol, "patience", 0.2)
    wide = dataclasses.replace(slow_engine(0), run=lambda arrays: {"score": np.zeros(1), "wide": np.zeros((1, 2**21))})
    with running([Source("m", lambda path: wide)]) as client:
        body = json.dumps(tensor()).encode()
        with socket.create_connection(("127.0.0.1", client.port), timeout=10) as deaf:
            deaf.sendall(
                b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
            )
            wait_for(lambda: client.server.server_state.connections)
            wait_for(lambda: not client.server.server_state.connections)
        assert client("GET", "/ping")[0] == 200


def test_many_large_bodies_at_a_time_are_too_many(model: afield.SNGP, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("afield.serve.infer._MOST_BODIES", 2)
    engine = open_sngp(model)
    with running([Source("m", lambda path: engine)], limits=Limits(max_bytes=1000)) as client:
        waiting = [socket.create_connection(("127.0.0.1", client.port), timeout=10) for _ in range(3)]
        for number, raw in enumerate(waiting, 1):
            raw.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n" + b" " * 900)
            wait_for(lambda number=number: client.service.held == 900 * min(number, 2))
        assert b"503" in waiting[-1].recv(1000)
        for raw in waiting:
            raw.close()
        wait_for(lambda: client.service.held == 0)
        assert client.infer([[0.0, 0.0]])[0] == 200


def test_garbage_on_the_socket_harms_nobody(client: Client):
    endless = b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100_000
    for garbage in (b"\0\1\2\3\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 100_000, endless):
        address = ("127.0.0.1", client.port)
        with socket.create_connection(address, timeout=10) as raw, contextlib.suppress(ConnectionError):
            raw.sendall(garbage)
            raw.shutdown(socket.SHUT_WR)
            head, _, body = raw.recv(1000).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400")
            assert set(json.loads(body)) == {"error"}
    assert client.infer([[0.0, 0.0]])[0] == 200


# The page --------------------------------------------------------------------------------------------------------


def test_the_page_asks_nobody_else(client: Client):
    """All that it loads comes from this service, and scripts from elsewhere are forbidden."""
    status, page, headers = client("GET", "/")
    assert (status, headers["content-type"].partition(";")[0]) == (200, "text/html")
    assert "script-src 'self'" in headers["content-security-policy"]
    loaded = re.findall(r'(?:src|href)="(/page/[^"]+)"', page)
    texts = {name: client("GET", name) for name in loaded}
    for name in re.findall(r'from "\./([^"]+)"', texts["/page/main.js"][1]):
        texts[name] = client("GET", f"/page/{name}")
    assert len(texts) == 6
    assert all(found[0] == 200 for found in texts.values())
    addresses = re.findall(r"https?://[^\s\"']+", page + "".join(found[1] for found in texts.values()))
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}  # a name, not an address


# Load, time and token --------------------------------------------------------------------------------------------


def slow_engine(seconds: float, identity: str = "slow") -> Engine:
    def run(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        time.sleep(seconds)
        return {"score": arrays["input"].sum(1)}

    return Engine((TensorSpec("input", "FP32", (-1, 2)),), run, identity, "test", columns=("score",))


def test_a_full_queue_says_when_to_come_again():
    gate = threading.Event()

    def run(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        gate.wait(20)
        return {"score": arrays["input"].sum(1)}

    engine = dataclasses.replace(slow_engine(0), run=run)
    with running([Source("m", lambda path: engine)], max_queue=4, max_batch=1) as client:
        found: list[tuple[int, Any, dict[str, str]]] = []
        body = tensor()
        callers = [
            threading.Thread(target=lambda: found.append(client("POST", "/v2/models/m/infer", body))) for _ in range(12)
        ]
        for caller in callers:
            caller.start()
        wait_for(lambda: len(found) >= 6, 20)  # two threads hold one each, and four wait
        gate.set()
        for caller in callers:
            caller.join()
        statuses = sorted(status for status, _, _ in found)
        assert set(statuses) == {200, 503}
        assert all(headers["retry-after"] == "1" for status, _, headers in found if status == 503)
        assert "rows are waiting" in next(answer for status, answer, _ in found if status == 503)["error"]


def test_an_answer_that_takes_too_long_is_given_up():
    with running([Source("m", lambda path: slow_engine(0.3))], limits=Limits(answer_seconds=0.05)) as client:
        status, answer = client.infer([[1.0, 2.0]])
        assert (status, answer) == (503, {"error": "The answer took too long."})


def test_what_was_taken_is_answered_before_the_end():
    with running([Source("m", lambda path: slow_engine(0.2))]) as client:
        found: list[int] = []
        caller = threading.Thread(target=lambda: found.append(client.infer([[1.0, 2.0]])[0]))
        caller.start()
        while not client.service.batcher.rows and not client.service.metrics.batch._sum.get():
            time.sleep(0.005)
        client.server.should_exit = True
        caller.join()
        assert found == [200]


def test_what_is_on_its_way_at_the_end_is_answered():
    with running([Source("m", lambda path: slow_engine(0))]) as client, contextlib.closing(socket.socket()) as raw:
        raw.settimeout(10)
        raw.connect(("127.0.0.1", client.port))
        wait_for(lambda: client.server.server_state.connections)
        client.server.should_exit = True
        wait_for(lambda: not client.server.servers[0].is_serving())
        raw.sendall(b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200 OK" in raw.recv(1000)


def test_a_token_is_asked_for(model: afield.SNGP):
    engine = open_sngp(model)
    with running([Source("m", lambda path: engine)], token="secret") as client:
        assert client("GET", "/v2/health/live")[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            status, answer, _ = client("GET", "/v2/models", **headers)
            assert (status, set(answer)) == (401, {"error"})
            assert client("GET", "/metrics", **headers)[0] == 401
        client.headers = {"Authorization": "Bearer secret"}
        assert client.infer([[0.0, 0.0]])[0] == 200


# Metrics, logs, monitor ------------------------------------------------------------------------------------------


def test_metrics_count(client: Client):
    client.infer([[0.0, 0.0], [90.0, 90.0]])
    client("POST", "/v2/models/m/infer", {})
    client("POST", "/invocations", {"inputs": [[1, 2]]})
    client("GET", "/v2/models/none")
    version = client("GET", "/v2/models/m")[1]["parameters"]["version"]
    wait_for(lambda: client.service.models.find("m").monitor.watch.rows >= 3)  # type: ignore[union-attr]
    text, of = client("GET", "/metrics")[1], f'model="m",version="{version}"'
    for name in ("rows_total", "refused_rows_total", "p_value_sum", "queue_rows", "drift_evidence", "drift_line",
                 "drift_alarm", "model_loaded_seconds"):  # fmt: skip
        assert f"afield_{name}{{{of}}}" in text
    for name in ("afield_requests_total", "afield_seconds_bucket", "afield_batch_rows_sum"):
        assert name in text
    for route, status in (("/v2/models/{model}/infer", 200), ("/v2/models/{model}/infer", 400), ("/invocations", 200)):
        assert f'afield_requests_total{{model="m",route="{route}",status="{status}",version="{version}"}}' in text
    assert 'afield_requests_total{model="",route="/v2/models/{model}",status="404",version=""}' in text


def test_what_a_model_cannot_answer_and_what_waits_is_counted_for_its_version():
    gate = threading.Event()

    def run(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        gate.wait(20)
        raise BadInput("never")

    engine = dataclasses.replace(slow_engine(0, "stuck"), run=run)
    quick = slow_engine(0, "quick")
    with running([Source("a", lambda path: engine), Source("b", lambda path: quick)], max_batch=1) as client:
        callers = [threading.Thread(target=client.infer, args=([[1.0, 2.0]], "a")) for _ in range(5)]
        for caller in callers:
            caller.start()
        metric = 'afield_queue_rows{model="a",version="stuck"} 3.0'  # two threads hold one each
        wait_for(lambda: metric in client("GET", "/metrics")[1])
        assert 'afield_queue_rows{model="b",version="quick"} 0.0' in client("GET", "/metrics")[1]
        gate.set()
        for caller in callers:
            caller.join()
        text = client("GET", "/metrics")[1]
        assert 'afield_failures_total{model="a",version="stuck"} 5.0' in text
        assert 'afield_queue_rows{model="a",version="stuck"} 0.0' in text


def test_requests_have_ids_and_log_lines(client: Client, caplog: pytest.LogCaptureFixture):
    from afield.serve.logs import JsonLines

    with caplog.at_level("INFO", logger="afield.serve"):
        assert client("GET", "/v2", **{"x-request-id": "abc-1"})[2]["x-request-id"] == "abc-1"
        assert len(client("GET", "/v2", **{"x-request-id": "no good"})[2]["x-request-id"]) == 16
        client("GET", "/v2")
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    line = next(line for line in lines if line["request"] == "abc-1")
    assert (line["event"], line["request"], line["status"], line["path"]) == ("request", "abc-1", 200, "/v2")


def test_a_shifted_stream_rings_and_labels_are_counted(model: afield.SNGP, tmp_path: Path):
    engine = open_sngp(model, labels=LABELS)
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(1))
    with running([Source("m", lambda path: engine)], state=tmp_path, risk=0.1) as client:
        for i in range(3):
            client.infer(x, id=f"usual {i}")
        version = client.service.models.find("m")
        assert version is not None
        wait_for(lambda: version.monitor.watch.rows == 120)
        assert client("GET", "/v2/models/m/monitor")[1]["drift"]["alarm"] is None
        right = columns(client.infer(x, id="labelled")[1])["label"]
        wait_for(lambda: version.monitor.watch.rows == 160)
        told = {"id": "labelled", "labels": right}
        status, counted, _ = client("POST", "/v2/models/m/labels", told)
        assert (status, counted["right"]) == (200, 40)
        assert client("POST", "/v2/models/m/labels", told)[0] == 400  # once
        assert client("POST", "/v2/models/m/labels", {"id": "usual 0", "labels": ["red"]})[0] == 400
        assert client("POST", "/v2/models/m/labels", {"id": "usual 0", "labels": ["pink"] * 40})[0] == 400
        assert client("POST", "/v2/models/m/labels", {"labels": 3})[0] == 400
        client.infer(x + 8, id="shifted")
        wait_for(lambda: version.monitor.watch.rows == 200)
        found = client("GET", "/v2/models/m/monitor")[1]
        assert found["drift"]["alarm"]["row"] > 160
        assert "drifted" in found["expected_accuracy"]["void"]
        assert found["refused"]
        assert found["risk"]["errors"] == 0
        assert sum(row[0] for row in found["reliability"]) == counted["accepted"]
        assert 'afield_drift_alarm{model="m"' in client("GET", "/metrics")[1]
    with running([Source("m", lambda path: engine)], state=tmp_path, risk=0.1) as client:  # all of it goes on
        again = client("GET", "/v2/models/m/monitor")[1]
        assert again["drift"]["rows"] == 200
        assert all(again[name] == found[name] for name in ("risk", "reliability", "expected_accuracy"))
        text = client("GET", "/metrics")[1]  # before the first request
        assert re.search(r'afield_drift_alarm\{model="m",version="[^"]+"\} 1', text)
        assert re.search(rf"afield_labelled_rows\{{[^}}]+\}} {counted['accepted']}", text)
        told = {"id": "usual 1", "labels": columns(client.infer(x, id="usual 1")[1])["label"]}
        wait_for(lambda: client("POST", "/v2/models/m/labels", told)[0] == 200)


def wait_for(condition: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


# Versions and reload ---------------------------------------------------------------------------------------------

NET = "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))\n"


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "served_nets.py").write_text(NET)
    monkeypatch.syspath_prepend(tmp_path)
    return "served_nets:make"


def test_a_folder_is_reloaded_and_every_answer_belongs_to_one_version(model: afield.SNGP, tmp_path: Path, nets: str):
    other, x = fitted(seed=1), [[0.3, -0.4]]
    rule = afield.policy(false_alarms=0.05)
    metadata = {"labels": LABELS, "policy": dataclasses.asdict(rule)}
    folder = afield.save(model, tmp_path / "m", metadata=metadata)
    expected = [m.predict(torch.tensor(x)).score().item() for m in (model, other)]
    with running(sources_of([str(folder)], [nets])) as client:
        seen: dict[str, set[float]] = {}
        wrong: list[Any] = []

        def ask() -> int:
            status, answer = client.infer(x)
            if status != 200:
                wrong.append(answer)
                return 0
            seen.setdefault(answer["model_version"], set()).add(round(columns(answer)["score"][0], 4))
            return len(seen)

        ask()
        assert client("GET", "/v2/models/m")[1]["parameters"]["policy"]["guarantee"] == rule.guarantee
        (folder / "afield.json").write_text("{")  # damaged: the old one stays
        client.service.models._load(client.service.models.sources[0])
        ask()
        assert len(seen) == 1
        ended = threading.Event()
        askers = [threading.Thread(target=lambda: [ask() for _ in iter(ended.is_set, True)]) for _ in range(4)]
        for asker in askers:  # under load
            asker.start()
        afield.save(other, folder)
        wait_for(lambda: len(seen) == 2)
        time.sleep(0.1)
        ended.set()
        for asker in askers:
            asker.join()
        assert wrong == []
        assert [len(values) for values in seen.values()] == [1, 1]
        assert [values.pop() for values in seen.values()] == pytest.approx(expected, abs=1e-3)


def test_the_same_weights_saved_with_another_policy_are_another_version(model: afield.SNGP, tmp_path: Path, nets: str):
    def put(alpha: float) -> Path:
        rule = dataclasses.asdict(afield.policy(false_alarms=alpha))
        return afield.save(model, tmp_path / "m", metadata={"labels": LABELS, "policy": rule})

    def ask() -> tuple[str, str]:
        about = client("GET", "/v2/models/m")[1]["parameters"]
        return about["version"], about["policy"]["guarantee"]

    folder = put(0.05)
    with running(sources_of([str(folder)], [nets])) as client:
        first = ask()
        put(0.2)
        client.service.models._load(client.service.models.sources[0])
        assert ask()[0] != first[0]
        assert "At most 0.2" in ask()[1]


def test_a_folder_with_an_onnx_file_is_reloaded(tmp_path: Path):
    (tmp_path / "m" / "1").mkdir(parents=True)
    file = tmp_path / "m" / "1" / "model.onnx"
    file.write_bytes(b"a")
    source = Source("m", lambda path: slow_engine(0, (path / "model.onnx").read_text()), tmp_path / "m")
    with running([source]) as client:
        assert client("GET", "/v2/models/m")[1]["parameters"]["identity"] == "a"
        file.write_bytes(b"b")
        client.service.models._load(source)
        assert client("GET", "/v2/models/m")[1]["parameters"]["identity"] == "b"


def test_what_is_written_while_it_is_read_is_read_again(tmp_path: Path):
    file = tmp_path / "afield.json"
    file.write_text("1")

    def read(path: Path) -> Engine:
        found = file.read_text()
        if found == "1":
            file.write_text("later")
        return slow_engine(0, found)

    with running([Source("m", read, tmp_path)]) as client:
        assert client("GET", "/v2/models/m")[1]["parameters"]["identity"] == "later"


def test_numbered_folders_are_versions(model: afield.SNGP, tmp_path: Path, nets: str):
    other = fitted(seed=1)
    for number, each in (("2", model), ("10", other)):
        afield.save(each, tmp_path / "m" / number)
    with running(sources_of([f"name={tmp_path / 'm'}"], [f"name={nets}"])) as client:
        assert client("GET", "/v2/models/name")[1]["versions"] == ["2", "10"]
        assert client("GET", "/v2/models")[1]["models"][0]["versions"] == ["2", "10"]
        assert client.infer([[0.0, 0.0]], "name")[1]["model_version"] == "10"
        status, answer = client.infer([[0.0, 0.0]], "name/versions/2")
        assert (status, answer["model_version"]) == (200, "2")


def test_what_cannot_be_served_is_told(tmp_path: Path):
    with pytest.raises(ValueError, match="There is no model at"):
        sources_of([str(tmp_path / "nothing")])
    with pytest.raises(ValueError, match="which is not served"):
        sources_of([str(tmp_path)], ["other=a:b"])
    (tmp_path / "bad.onnx").write_bytes(b"no")
    with pytest.raises(ValueError, match="not an ONNX file that afield export wrote"):
        sources_of([str(tmp_path / "bad.onnx")])[0].open(tmp_path / "bad.onnx")


def test_a_network_that_refuses_its_rows_says_why(tmp_path: Path):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(10, 4), nn.Linear(4, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.embed(ids.long()).mean(1))

    model = afield.attach(Odd(), num_random_features=16)
    ids = torch.randint(0, 10, (300, 5))
    afield.fit_posterior(model, [(ids, torch.arange(300) % 2)])
    engine = open_sngp(model, shape=(5,))
    assert "accepted" not in engine.columns  # it is not calibrated
    with running([Source("m", lambda path: engine)]) as client:
        entry = {"name": "ids", "shape": [1, 5], "datatype": "INT64", "data": [1, 2, 3, 4, 99]}
        status, answer, _ = client("POST", "/v2/models/m/infer", {"inputs": [entry]})
        assert status == 400
        assert "does not take these rows" in answer["error"]
