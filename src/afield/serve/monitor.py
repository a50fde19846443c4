"""What a person wants to know of a version that serves: drift, recent answers, refusals, accuracy. Counted in a thread.

A `Monitor` belongs to one version of a model. Answers are handed to it after they are sent, in the order in which they
were made, and its own thread counts them, so that nobody waits for it. Where there is a folder of state, the watch for
drift goes on after a restart, whatever ended the process.
"""

import collections
import contextlib
import logging
import queue
import threading
import time
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
        self._queue: queue.SimpleQueue[tuple[str, Arrays, Arrays] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"afield-monitor-{name}", daemon=True)
        self._thread.start()

    def add(self, id: str, arrays: Arrays, answers: Arrays) -> None:
        """Count the answers to a request, soon."""
        self._queue.put((id, arrays, answers))

    def close(self) -> None:
        """Count what is left, and let the folder of state go."""
        self._queue.put(None)
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
            bins = np.minimum((answers["confidence"] * _BINS).astype(int), _BINS - 1)
            for k, confidence, ok in zip(bins[kept], answers["confidence"][kept], right[kept], strict=True):
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
        while (item := self._queue.get()) is not None:
            items = [item]
            with contextlib.suppress(queue.Empty):
                while len(items) < 64:
                    if (more := self._queue.get_nowait()) is None:
                        self._queue.put(None)
                        break
                    items.append(more)
            try:
                self._count(items)
            except Exception:
                logging.getLogger("afield.serve").exception("The monitor of %s failed", self.name)

    def _count(self, items: list[tuple[str, Arrays, Arrays]]) -> None:
        now = time.time()
        with self._lock:
            scores = np.concatenate([answers["score"] for _, _, answers in items]).astype(np.float64)
            shown = [text for _, arrays, answers in items for text in _show(arrays, len(answers["score"]))]
            watch = self.watch if self._file is None else self._file
            classes = None
            if self.watch.num_classes is not None:
                classes = np.concatenate([answers["probabilities"].argmax(-1) for _, _, answers in items])
            watch.update(scores, classes, shown)
            start = 0
            for id, _, answers in items:
                rows = len(answers["score"])
                self._remember(id, answers, shown[start : start + rows], now)
                start += rows
        self.metrics.drift(self.name, self.version, self.watch)
        if self.watch.alarm is not None and not self._alarmed:
            self._alarmed = True
            fields = {"model": self.name, "version": self.version, **asdict(self.watch.alarm)}
            logging.getLogger("afield.serve").warning("drift", extra={"fields": fields})

    def _remember(self, id: str, answers: Arrays, shown: list[str], now: float) -> None:
        columns = {name: a.tolist() for name, a in answers.items() if name not in ("probabilities",) and a.ndim == 1}
        if "probabilities" in answers:
            confidence = answers["probabilities"].max(-1)
            columns["probability"] = confidence.tolist()
            self._answers[id] = {"confidence": confidence} | {
                k: answers[k] for k in ("label", "accepted") if k in answers
            }
            while len(self._answers) > LABELLED:
                self._answers.popitem(last=False)
            self.expected.update(confidence[answers["accepted"]] if "accepted" in answers else confidence)
        for i, text in enumerate(shown):
            row = {name: values[i] for name, values in columns.items()} | {"id": id, "time": now, "input": text}
            (self.recent if row.get("accepted", True) else self.refused).append(row)


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


def _show(arrays: Arrays, rows: int) -> list[str]:
    """A short text for every row."""
    array = next(iter(arrays.values()))
    if array.dtype == object:
        return [str(text)[: 10 * _MOST_SHOWN] for text in array.tolist()]
    flat = array.reshape(rows, -1)
    if flat.shape[1] > _MOST_SHOWN:
        return [f"{' x '.join(map(str, array.shape[1:]))}, mean {mean:.3g}" for mean in flat.mean(1).tolist()]
    return [", ".join(f"{value:.4g}" for value in row) for row in flat.tolist()]
