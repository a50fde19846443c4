"""What a measure is, and how two things are timed against each other."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from afield.registry import Registry

Work = Callable[[], Any]
Metrics = dict[str, float]


class Missing(Exception):
    """A peer is not installed."""


@dataclass(frozen=True)
class Measure:
    """`run` returns metrics by name; `metric` is the one that is compared with the target."""

    what: str
    run: Callable[[], Metrics]
    target: float
    metric: str = "ratio"
    at_least: bool = False

    def met(self, metrics: Metrics) -> bool:
        """Whether the target is met."""
        value = metrics[self.metric]
        return value >= self.target if self.at_least else value <= self.target

    @property
    def wanted(self) -> str:
        """The target in words."""
        return f"{'>=' if self.at_least else '<='} {self.target:g}"


MEASURES: Registry[Measure] = Registry("measure")


def measure(name: str, what: str, target: float, **options: Any) -> Callable[[Callable[[], Metrics]], Any]:
    """Register a function as a measure."""

    def register(run: Callable[[], Metrics]) -> Callable[[], Metrics]:
        MEASURES[name] = Measure(what, run, target, **options)
        return run

    return register


def compared(ours: Work, theirs: Work, *, pairs: int = 9, calls: int = 1) -> Metrics:
    """Seconds of each, and the ratio ours / theirs, medians over pairs; `calls` calls make one timing."""
    for work in (ours, theirs):
        work()
    times: list[tuple[float, float]] = []
    for pair in range(pairs):
        both = {}
        for work in (ours, theirs) if pair % 2 else (theirs, ours):
            begin = time.perf_counter()
            for _ in range(calls):
                work()
            both[work] = (time.perf_counter() - begin) / calls
        times.append((both[ours], both[theirs]))
    return {
        "ratio": median(a / b for a, b in times),
        "seconds": median(a for a, _ in times),
        "other_seconds": median(b for _, b in times),
    }


def peer(module: str) -> Any:
    """The peer's module, or `Missing`."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Missing(f"needs {module}: pip install --no-deps -r bench/requirements-peers.txt ({error})") from error


def peak_memory() -> float:
    """The most memory that this process ever had, in MB. Not ru_maxrss: a child starts with its parent's."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024
