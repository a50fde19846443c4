"""Spans: one for each request, with its route and its parent; none where nobody asks for them."""

import importlib

import pytest

from afield.serve import tracing
from afield.serve.models import Source
from afield.serve.open_torch import open_sngp
from tests.serve.conftest import fitted, running


def test_without_anyone_who_wants_spans_there_are_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert tracing.find_tracer() is None


def test_every_request_is_a_span(monkeypatch: pytest.MonkeyPatch):
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    memory = importlib.import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    monkeypatch.setattr(tracing, "find_tracer", lambda: provider.get_tracer("test"))
    engine = open_sngp(fitted())
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with running([Source("m", lambda path: engine)]) as client:
        client.headers = {"traceparent": parent}
        client.infer([[0.0, 0.0], [1.0, 1.0]])
        client("GET", "/v2/models/other")
    infer, other = memory.get_finished_spans()
    assert infer.name == "POST /v2/models/{model}/infer"
    assert f"{infer.context.trace_id:032x}" == parent.split("-")[1]
    assert (infer.attributes["afield.rows"], infer.attributes["http.response.status_code"]) == (2, 200)
    assert infer.start_time < infer.end_time
    assert other.attributes["http.response.status_code"] == 404
