"""Metrics for Prometheus, by model and version."""

import functools
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

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
        self.p_values = _PValues()
        r.register(self.p_values)
        self.queue = Gauge("afield_queue_rows", "Rows that wait", registry=r)
        self.batch = Histogram(
            "afield_batch_rows", "Rows of a batch", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 1024), registry=r
        )
        self.evidence = Gauge("afield_drift_evidence", "Evidence of drift, log10", _OF, registry=r)
        self.line = Gauge("afield_drift_line", "Evidence at which the alarm rings, log10", _OF, registry=r)
        self.alarm = Gauge("afield_drift_alarm", "1 after the alarm has rung", _OF, registry=r)
        self.loaded = Gauge("afield_model_loaded_seconds", "Unix time at which a version was loaded", _OF, registry=r)
        self._of_route = functools.cache(lambda r, s: (self.requests.labels(r, s), self.seconds.labels(r)))

    def request(self, route: str, status: int, seconds: float) -> None:
        counter, histogram = self._of_route(route, status)
        counter.inc()
        histogram.observe(seconds)

    def answered(self, name: str, version: str, answers: Arrays) -> None:
        """Count the rows of one or many answers."""
        self.rows.labels(name, version).inc(len(answers["score"]))
        if "p_value" in answers:
            self.p_values.add(name, version, answers["p_value"])
            self.refused.labels(name, version).inc(int(np.count_nonzero(~answers["accepted"])))

    def drift(self, name: str, version: str, watch: "Watch") -> None:
        self.evidence.labels(name, version).set(watch.evidence)
        self.line.labels(name, version).set(watch.line)
        self.alarm.labels(name, version).set(watch.alarm is not None)

    def forget(self, name: str, version: str) -> None:
        """Drop the gauges of a version that is gone; what was counted stays."""
        for gauge in (self.evidence, self.line, self.alarm, self.loaded):
            with suppress(KeyError):  # a model without a watch has no evidence
                gauge.remove(name, version)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _PValues(Collector):
    """A histogram that is given many values at once."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], np.ndarray] = {}
        self._sums: dict[tuple[str, str], float] = {}

    def add(self, name: str, version: str, values: np.ndarray) -> None:
        """By one thread for each version."""
        of, size = (name, version), len(_P_VALUES)
        counts = np.bincount(np.searchsorted(np.array(_P_VALUES, np.float32), values), minlength=size)[:size]
        self._sums[of] = self._sums.get(of, 0.0) + float(values.sum(dtype=np.float64))
        self._counts[of] = self._counts.get(of, 0) + counts

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily("afield_p_value", "Conformal p-values of rows", labels=_OF)
        for of, counts in list(self._counts.items()):
            within = np.cumsum(counts).tolist()
            buckets = [*zip(map(str, _P_VALUES), map(float, within), strict=True), ("+Inf", float(within[-1]))]
            family.add_metric(of, buckets, self._sums[of])
        yield family
