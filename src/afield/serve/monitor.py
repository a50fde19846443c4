"""What a person wants to know of a version that serves: drift, recent answers, refusals, accuracy. Counted in a thread.

A `Monitor` belongs to one version of a model. Answers are handed to it after they are sent, in the order in which they
were made, and its own thread counts them, so that nobody waits for it. Where there is a folder of state, the watch for
drift goes on after a restart, whatever ended the process.
"""

import bisect
import collections
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from afield.decide.drift import Watch, own_references, unique_rows
from afield.decide.drift_file import WatchFile
from afield.decide.risk_evidence import ExpectedAccuracy, RiskEvidence
from afield.serve.engine import Arrays, BadInput, Engine
from afield.serve.metrics import Metrics

RECENT, REFUSED, LABELLED = 100, 50, 20_000  # answers that are kept: the last ones, refused ones, those to be labelled
_MOST_SHOWN = 24  # numbers, and ten times as many characters, of an input
_BINS = 10
_AT_ONCE, _PAUSE = 256, 0.05  # requests that are counted together; seconds in which they gather
_Item = tuple[str, Arrays, Arrays]  # id, inputs and answers of a request


class Monitor:
    """Counts the answers of one version.

    alpha  the probability that the alarm for drift ever rings without drift
    risk   with labels: the part of accepted answers that may be wrong; None: that of the policy, or no test
    state  a folder for the watch; None: it ends with the process
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
        risk = risk or (engine.policy or {}).get("risk")
        self.risk = None if risk is None else RiskEvidence(risk)
        self.expected = ExpectedAccuracy()
        self.recent: collections.deque[dict[str, Any]] = collections.deque(maxlen=RECENT)
        self.refused: collections.deque[dict[str, Any]] = collections.deque(maxlen=REFUSED)
        self.reliability = np.zeros((_BINS, 3))  # answers, confidence, right
        self._answers: collections.OrderedDict[str, Arrays] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._alarmed = self.watch.alarm is not None
        self._answered: collections.deque[_Item] = collections.deque()
        self._more, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"afield-monitor-{name}", daemon=True)
        self._thread.start()

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
        if self._file is not None:
            self._file.close()

    def add_labels(self, id: str, labels: list[Any]) -> dict[str, Any]:
        """Compare the answers to a request with the right ones, once."""
        with self._lock:
            answers = self._answers.get(id)
            if answers is None:
                raise BadInput(f"No answers with the id {id!r} are kept here, or they have labels already.")
            given = answers["label"].tolist()
            if len(labels) != len(given):
                raise BadInput(f"The request {id!r} had {len(given)} rows, got {len(labels)} labels.")
            strange = [label for label in labels if label not in (self.engine.labels or range(self.engine.num_classes))]
            if strange:
                raise BadInput(f"The label {strange[0]!r} is none of this model's classes.")
            del self._answers[id]
            right = np.array([a == b for a, b in zip(given, labels, strict=True)])
            kept = answers.get("accepted", np.ones(len(right), dtype=bool))
            bins = np.minimum((answers["probability"] * _BINS).astype(int), _BINS - 1)
            for k, confidence, ok in zip(bins[kept], answers["probability"][kept], right[kept], strict=True):
                self.reliability[k] += 1, confidence, ok
            if self.risk is not None:
                self.risk.update(~right[kept])
            return {"rows": len(labels), "right": int(right.sum()), "accepted": int(kept.sum())}

    def summary(self) -> dict[str, Any]:
        """Everything for the page, as JSON."""
        with self._lock:
            estimate = self.expected.estimate(drifted=self.watch.alarm is not None)
            risk = self.risk and {
                "limit": self.risk.risk,
                "answers": self.risk.count,
                "errors": self.risk.errors,
                "alarm": self.risk.alarm,
                "at_least": self.risk.lower,
            }
            return {
                "model": self.name,
                "version": self.version,
                "drift": self.watch.summary(),
                "recent": list(reversed(self.recent)),
                "refused": list(reversed(self.refused)),
                "expected_accuracy": None if estimate is None else asdict(estimate),
                "risk": risk,
                "reliability": self.reliability.tolist(),
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
                    logging.getLogger("afield.serve").exception("The monitor of %s failed", self.name)
            self._closing.wait(_PAUSE)

    def _count(self, items: list[_Item]) -> None:
        answers = {name: np.concatenate([one[name] for _, _, one in items]) for name in items[0][2]}
        shown = _Shown(items)
        classes = None if self.watch.num_classes is None else answers["probabilities"].argmax(-1)
        with self._lock:
            watch = self.watch if self._file is None else self._file
            watch.update(answers["score"].astype(np.float64), classes, shown)
            self._remember(items, answers, shown)
        self.metrics.answered(self.name, self.version, answers)
        self.metrics.drift(self.name, self.version, self.watch)
        if self.watch.alarm is not None and not self._alarmed:
            self._alarmed = True
            fields = {"model": self.name, "version": self.version, **asdict(self.watch.alarm)}
            logging.getLogger("afield.serve").warning("drift", extra={"fields": fields})

    def _remember(self, items: list[_Item], answers: Arrays, shown: "_Shown") -> None:
        """Keep the last answers for the page, and what labels will be compared with."""
        accepted = answers.get("accepted", np.ones(len(shown), dtype=bool))
        if "probabilities" in answers:
            answers = answers | {"probability": answers["probabilities"].max(-1)}
            self.expected.update(answers["probability"][accepted])
            columns = {k: answers[k] for k in ("label", "probability", "accepted") if k in answers}
            for (id, _, _), first, end in zip(items, shown.firsts, shown.firsts[1:], strict=False):
                self._answers[id] = {name: array[first:end] for name, array in columns.items()}
            while len(self._answers) > LABELLED:
                self._answers.popitem(last=False)
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
