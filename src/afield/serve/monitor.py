"""What a person wants to know of a version that serves: drift, recent answers, refusals, accuracy. Counted in a thread.

A `Monitor` belongs to one version of a model. Answers are handed to it after they are sent, in the order in which they
were made, and its own thread counts them, so that nobody waits for it. Where there is a folder of state, the watch for
drift and what labels have told go on after a restart, whatever ended the process.
"""

import bisect
import collections
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from afield.decide.drift import Watch, own_references, unique_rows
from afield.decide.drift_file import WatchFile
from afield.serve.accuracy import Accuracy
from afield.serve.engine import Arrays, Engine
from afield.serve.logs import LOGGER
from afield.serve.metrics import Metrics

RECENT, REFUSED = 100, 50  # answers that are kept: the last ones, and refused ones
_MOST_SHOWN = 24  # numbers, and ten times as many characters, of an input
_AT_ONCE, _PAUSE = 256, 0.05  # requests that are counted together; seconds in which they gather
_Item = tuple[str, Arrays, Arrays]  # id, inputs and answers of a request


class Monitor:
    """Counts the answers of one version.

    alpha  the probability that the alarm for drift ever rings without drift
    risk   with labels: the part of accepted answers that may be wrong; None: that of the policy, or no test
    state  a folder for the watch and the labels; None: they end with the process
    """

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        name: str,
        version: str,
        *,
        alpha: float = 0.01,
        risk: float | None = None,
        state: Path | None = None,
    ) -> None:
        self.engine, self.metrics, self.name, self.version = engine, metrics, name, version
        watch = _new_watch(engine, alpha)
        self._file = None if state is None else WatchFile(state, watch, identity=f"{engine.identity} {alpha}")
        self.watch = watch if self._file is None else self._file.watch
        try:
            labels = engine.labels or range(engine.num_classes)
            risk = risk or (engine.policy or {}).get("risk")
            self.accuracy = Accuracy(labels, risk=risk, folder=state, identity=engine.identity)
        except BaseException:
            if self._file is not None:
                self._file.close()
            raise
        self.recent: collections.deque[dict[str, Any]] = collections.deque(maxlen=RECENT)
        self.refused: collections.deque[dict[str, Any]] = collections.deque(maxlen=REFUSED)
        self._lock = threading.Lock()
        self._alarmed = self.watch.alarm is not None
        self._risk_alarmed = self.accuracy.risk is not None and self.accuracy.risk.alarm
        self._answered: collections.deque[_Item] = collections.deque()
        self._more, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"afield-monitor-{name}", daemon=True)
        self._thread.start()
        metrics.drift(name, version, self.watch)  # as it was left, before the first request
        if self.accuracy.risk is not None:
            metrics.risk(name, version, self.accuracy.risk)

    def add(self, id: str, arrays: Arrays, answers: Arrays) -> None:
        """Count the answers to a request, soon."""
        self._answered.append((id, arrays, answers))
        if not self._more.is_set():
            self._more.set()

    def close(self) -> None:
        """Count what is left, and let the folder of state go."""
        self._closing.set()
        self._more.set()
        self._thread.join()
        self.accuracy.close()
        if self._file is not None:
            self._file.close()

    def add_labels(self, id: str, labels: list[Any]) -> dict[str, Any]:
        """Compare the answers to a request with the right ones, once."""
        with self._lock:
            counted = self.accuracy.add_labels(id, labels)
            risk = self.accuracy.risk
            if risk is not None:
                self.metrics.risk(self.name, self.version, risk)
                if risk.alarm and not self._risk_alarmed:
                    self._risk_alarmed = True
                    self._warn("risk", limit=risk.risk, answers=risk.count, errors=risk.errors, at_least=risk.lower)
        return counted

    def summary(self) -> dict[str, Any]:
        """Everything for the page, as JSON."""
        with self._lock:
            return {
                "model": self.name,
                "version": self.version,
                "drift": self.watch.summary(),
                "recent": list(reversed(self.recent)),
                "refused": list(reversed(self.refused)),
                **self.accuracy.summary(drifted=self.watch.alarm is not None),
            }

    def _work(self) -> None:
        while not self._closing.is_set() or self._answered:
            self._more.wait()
            self._more.clear()
            while self._answered:
                items = [self._answered.popleft() for _ in range(min(len(self._answered), _AT_ONCE))]
                try:
                    self._count(items)
                except Exception:
                    LOGGER.exception("The monitor of %s failed", self.name)
            self._closing.wait(_PAUSE)

    def _count(self, items: list[_Item]) -> None:
        answers = {name: np.concatenate([one[name] for _, _, one in items]) for name in items[0][2]}
        shown = _Shown(items)
        classes = None if self.watch.num_classes is None else answers["probabilities"].argmax(-1)
        with self._lock:
            watch = self.watch if self._file is None else self._file
            watch.update(answers["score"].astype(np.float64), classes, shown)
            if "probabilities" in answers:
                self.accuracy.answered([id for id, _, _ in items], shown.firsts, answers)
            self._remember(answers, shown)
        self.metrics.answered(self.name, self.version, answers)
        self.metrics.drift(self.name, self.version, self.watch)
        if self.watch.alarm is not None and not self._alarmed:
            self._alarmed = True
            self._warn("drift", **asdict(self.watch.alarm))

    def _warn(self, event: str, **about: Any) -> None:
        fields = {"model": self.name, "version": self.version, **about}
        LOGGER.warning(event, extra={"fields": fields})

    def _remember(self, answers: Arrays, shown: "_Shown") -> None:
        """Keep the last answers for the page."""
        accepted = answers.get("accepted", np.ones(len(shown), dtype=bool))
        if "probabilities" in answers:
            answers = answers | {"probability": answers["probabilities"].max(-1)}
        rows, now = {name: a for name, a in answers.items() if a.ndim == 1}, time.time()
        for kept, chosen in ((self.recent, accepted), (self.refused, ~accepted)):
            for i in np.flatnonzero(chosen)[-(kept.maxlen or 0) :].tolist():
                kept.append({k: a[i : i + 1].tolist()[0] for k, a in rows.items()}
                            | {"id": shown.id(i), "time": now, "input": shown[i]})  # fmt: skip


class _Shown(Sequence[str]):
    """A short text for each row of some requests, made when it is asked for."""

    def __init__(self, items: list[_Item]) -> None:
        self.items = items
        self.firsts = [0, *itertools.accumulate(len(answers["score"]) for _, _, answers in items)]

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, row: Any) -> Any:
        k = bisect.bisect_right(self.firsts, row) - 1
        return _show(next(iter(self.items[k][1].values()))[row - self.firsts[k]])

    def id(self, row: int) -> str:
        return self.items[bisect.bisect_right(self.firsts, row) - 1][0]


def _new_watch(engine: Engine, alpha: float) -> Watch:
    """Of the stream; where p-values go by class, of every class too."""
    reference = engine.reference.astype(np.float32).astype(np.float64)  # rounded like the scores that are answered
    by_class = own_references(reference, engine.spans)
    num_classes = engine.num_classes if len(engine.spans) else None
    return Watch(
        unique_rows(reference, engine.spans),
        alpha=alpha,
        num_classes=num_classes,
        by_class=by_class if num_classes else None,
    )


def _show(row: Any) -> str:
    if isinstance(row, str):
        return row[: 10 * _MOST_SHOWN]
    if row.size > _MOST_SHOWN:
        return f"{' x '.join(map(str, row.shape))}, mean {row.mean():.3g}"
    return ", ".join(f"{value:.4g}" for value in row.ravel().tolist())
