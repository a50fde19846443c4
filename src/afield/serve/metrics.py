"""Metrics for Prometheus, by model and version."""

from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from afield.serve.engine import Arrays

if TYPE_CHECKING:
    from afield.decide.drift import Watch

_OF = ("model", "version")
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_P_VALUES = (0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


class Metrics:
    """All that is counted, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter("afield_requests", "Requests, by route and status", ("route", "status"), registry=r)
        self.seconds = Histogram("afield_seconds", "Time to answer", ("route",), buckets=_SECONDS, registry=r)
        self.rows = Counter("afield_rows", "Rows answered", _OF, registry=r)
        self.refused = Counter("afield_refused_rows", "Rows that were not accepted", _OF, registry=r)
        self.failures = Counter("afield_failures", "Requests that a model could not answer", _OF, registry=r)
        self.p_value = Histogram("afield_p_value", "Conformal p-values of rows", _OF, buckets=_P_VALUES, registry=r)
        self.queue = Gauge("afield_queue_rows", "Rows that wait", registry=r)
        self.batch = Histogram(
            "afield_batch_rows", "Rows of a batch", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 1024), registry=r
        )
        self.evidence = Gauge("afield_drift_evidence", "Evidence of drift, log10", _OF, registry=r)
        self.line = Gauge("afield_drift_line", "Evidence at which the alarm rings, log10", _OF, registry=r)
        self.alarm = Gauge("afield_drift_alarm", "1 after the alarm has rung", _OF, registry=r)
        self.loaded = Gauge("afield_model_loaded_seconds", "Unix time at which a version was loaded", _OF, registry=r)

    def answered(self, name: str, version: str, rows: int, answers: Arrays) -> None:
        self.rows.labels(name, version).inc(rows)
        if "p_value" not in answers:
            return
        histogram = self.p_value.labels(name, version)
        for value in answers["p_value"].tolist():
            histogram.observe(value)
        self.refused.labels(name, version).inc(int(np.count_nonzero(~answers["accepted"])))

    def drift(self, name: str, version: str, watch: "Watch") -> None:
        self.evidence.labels(name, version).set(watch.evidence)
        self.line.labels(name, version).set(watch.line)
        self.alarm.labels(name, version).set(watch.alarm is not None)

    def forget(self, name: str, version: str) -> None:
        """Drop the gauges of a version that is gone; what was counted stays."""
        for gauge in (self.evidence, self.line, self.alarm, self.loaded):
            if (name, version) in gauge._metrics:
                gauge.remove(name, version)

    def text(self) -> bytes:
        return generate_latest(self.registry)
