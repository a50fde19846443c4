"""Metrics for Prometheus, by model and version."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from afield.serve.engine import Arrays

if TYPE_CHECKING:
    from afield.decide.drift import Watch
    from afield.decide.risk_evidence import RiskEvidence

_OF = ("model", "version")
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_P_VALUES = (0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)


class Metrics:
    """All that is counted, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter("afield_requests", "Requests", ("route", "status", *_OF), registry=r)
        self.seconds = Histogram("afield_seconds", "Time to answer", ("route", *_OF), buckets=_SECONDS, registry=r)
        self.rows = Counter("afield_rows", "Rows answered", _OF, registry=r)
        self.refused = Counter("afield_refused_rows", "Rows that were not accepted", _OF, registry=r)
        self.failures = Counter("afield_failures", "Requests that a model could not answer", _OF, registry=r)
        self.p_values = _PValues()
        r.register(self.p_values)
        self.queue = _Queue()
        r.register(self.queue)
        self.batch = Histogram(
            "afield_batch_rows", "Rows of a batch", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 1024), registry=r
        )
        self.evidence = Gauge("afield_drift_evidence", "Evidence of drift, log10", _OF, registry=r)
        self.line = Gauge("afield_drift_line", "Evidence at which the alarm rings, log10", _OF, registry=r)
        self.alarm = Gauge("afield_drift_alarm", "1 after the alarm has rung", _OF, registry=r)
        self.labelled = Gauge("afield_labelled_rows", "Accepted rows whose labels have come", _OF, registry=r)
        self.wrong = Gauge("afield_wrong_rows", "Those of them whose answer was wrong", _OF, registry=r)
        self.risk_alarm = Gauge("afield_risk_alarm", "1 after the risk was found to be too high", _OF, registry=r)
        self.loaded = Gauge("afield_model_loaded_seconds", "Unix time at which a version was loaded", _OF, registry=r)
        self._of_route = functools.cache(
            lambda route, status, *of: (self.requests.labels(route, status, *of), self.seconds.labels(route, *of))
        )

    def request(self, route: str, status: int, seconds: float, model: str = "", version: str = "") -> None:
        """Count a request; one that found no model has none."""
        counter, histogram = self._of_route(route, status, model, version)
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

    def risk(self, name: str, version: str, evidence: "RiskEvidence") -> None:
        self.labelled.labels(name, version).set(evidence.count)
        self.wrong.labels(name, version).set(evidence.errors)
        self.risk_alarm.labels(name, version).set(evidence.alarm)

    def forget(self, name: str, version: str) -> None:
        """Drop the gauges of a version that is gone; what was counted stays."""
        of_watch, of_labels = (self.evidence, self.line, self.alarm), (self.labelled, self.wrong, self.risk_alarm)
        for gauge in (*of_watch, *of_labels, self.loaded):
            with suppress(KeyError):  # a model without a limit of its risk has no evidence of it
                gauge.remove(name, version)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Queue(Collector):
    """Rows that wait, counted when somebody looks; `waiting` says how many there are by model and version."""

    waiting: Callable[[], Mapping[tuple[str, str], int]] = staticmethod(dict)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily("afield_queue_rows", "Rows that wait", labels=_OF)
        for of, rows in self.waiting().items():
            family.add_metric(of, rows)
        yield family


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
