"""Spans of requests for OpenTelemetry, where it is installed and told where to send them.

A provider that the process already has is used (`opentelemetry-instrument afield serve ...`). Otherwise the variable
OTEL_EXPORTER_OTLP_ENDPOINT makes one that sends to it. Without either there are no spans, and they cost nothing.
"""

import os
import time
from typing import Any

SpanMaker = Any  # opentelemetry.trace.Tracer


def find_tracer() -> SpanMaker | None:
    """What makes spans, or None."""
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
    except ImportError:
        return None
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        if "OTEL_EXPORTER_OTLP_ENDPOINT" not in os.environ:
            return None
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ImportError(
                f"{error}. OTEL_EXPORTER_OTLP_ENDPOINT asks for spans: "
                "pip install opentelemetry-exporter-otlp-proto-http"
            ) from error
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        trace.set_tracer_provider(provider)
    return trace.get_tracer("afield.serve")


def record(tracer: SpanMaker, scope: Any, *, route: str, status: int, seconds: float) -> None:
    """A span of a request that has been answered; its parent is that of the `traceparent` header."""
    from opentelemetry import propagate, trace

    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    about = scope["afield"]
    attributes = {f"afield.{name}": value for name, value in about.items()} | {
        "http.request.method": scope["method"],
        "http.route": route,
        "http.response.status_code": status,
        "url.path": scope["path"],
    }
    span = tracer.start_span(
        f"{scope['method']} {route}",
        context=propagate.extract(headers),
        kind=trace.SpanKind.SERVER,
        attributes=attributes,
        start_time=time.time_ns() - int(1e9 * seconds),
    )
    if status >= 500:
        span.set_status(trace.StatusCode.ERROR)
    span.end()
