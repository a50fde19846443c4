"""How right the answers of a version are: by labels that come later, and without any.

    accuracy.answered(ids, firsts, answers)     the answers to some requests, which labels may come for
    accuracy.add_labels(id, labels)             the right ones

With a folder of state, all of it outlives the process as the watch for drift does: what a call has returned from, the
next process knows, whatever ended this one (`decide.journal`). A record is JSON: answers to a request, or its labels.

    {"id": "a", "label": ["cat"], "probability": [0.9], "accepted": [true]}
    {"id": "a", "right": [true]}

and the answers that wait for labels are kept as such records in memory too, where they need little room.
"""

import collections
import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from afield.decide.journal import Journal, read_journal
from afield.decide.risk_evidence import ExpectedAccuracy, RiskEvidence
from afield.model.files import write_file
from afield.serve.engine import Arrays, BadInput

STATE, FORMAT = "labels.json", 1
WAITING, WAITING_BYTES = 20_000, 16 * 2**20  # requests whose answers wait for labels, and the room that they may take
SNAPSHOT = 20_000  # records
_BINS = 10
_COLUMNS = ("label", "probability", "accepted")


class Accuracy:
    """What labels say of the answers, and what can be said without them.

    labels    of the classes
    risk      the part of accepted answers that may be wrong; None: no test of it
    folder    where it goes on after a restart; None: it ends with the process. One process at a time: `WatchFile`
    identity  what it is of: the state of another one is replaced
    """

    def __init__(
        self, labels: Sequence[Any], *, risk: float | None = None, folder: Path | None = None, identity: str = ""
    ) -> None:
        self.labels, self.folder, self.identity = frozenset(labels), folder, identity
        self.risk = None if risk is None else RiskEvidence(risk)
        self.expected = ExpectedAccuracy()
        self.reliability = np.zeros((_BINS, 3))  # answers, confidence, right
        self._waiting: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        self._bytes = self._records = self._last_snapshot = 0
        self._journal: Journal | None = None
        if folder is not None:
            self._read(folder)
            self._journal = Journal(folder, "labels")
            self._snapshot()

    def answered(self, ids: Sequence[str], firsts: Sequence[int], answers: Arrays) -> None:
        """Count the answers to requests; request k has the rows from firsts[k] to firsts[k + 1]."""
        accepted = answers.get("accepted", np.ones(firsts[-1], dtype=bool))
        columns = {"label": answers["label"], "probability": answers["probabilities"].max(-1), "accepted": accepted}
        lists = {name: columns[name].tolist() for name in _COLUMNS}
        self.expected.update(columns["probability"][accepted])
        records = []
        for id, first, end in zip(ids, firsts, firsts[1:], strict=False):
            records.append(orjson.dumps({"id": id} | {name: lists[name][first:end] for name in _COLUMNS}))
            self._wait(id, records[-1])
        self._write(records)

    def add_labels(self, id: str, labels: Sequence[Any]) -> dict[str, int]:
        """Compare the answers to a request with the right ones, once."""
        if (record := self._waiting.get(id)) is None:
            raise BadInput(f"No answers with the id {id!r} are kept here, or they have labels already.")
        given = orjson.loads(record)["label"]
        if len(labels) != len(given):
            raise BadInput(f"The request {id!r} had {len(given)} rows, got {len(labels)} labels.")
        strange = [label for label in labels if not isinstance(label, str | int) or label not in self.labels]
        if strange:
            raise BadInput(f"The label {strange[0]!r} is none of this model's classes.")
        right = [a == b for a, b in zip(given, labels, strict=True)]
        self._write([orjson.dumps({"id": id, "right": right})])  # what cannot be kept is not counted
        return self._compare(id, right)

    def summary(self, *, drifted: bool) -> dict[str, Any]:
        """What there is to say, as JSON."""
        estimate = self.expected.estimate(drifted=drifted)
        risk = self.risk and {
            "limit": self.risk.risk,
            "answers": self.risk.count,
            "errors": self.risk.errors,
            "alarm": self.risk.alarm,
            "at_least": self.risk.lower,
        }
        return {
            "expected_accuracy": None if estimate is None else asdict(estimate),
            "risk": risk,
            "reliability": self.reliability.tolist(),
        }

    def close(self) -> None:
        """Write a last snapshot."""
        if self._journal is not None:
            with contextlib.suppress(OSError):  # the journal has it all
                self._snapshot()
            self._journal.close()

    def _wait(self, id: str, record: bytes) -> None:
        self._bytes += len(record) - len(self._waiting.pop(id, b""))
        self._waiting[id] = bytes(memoryview(record))  # a copy: orjson leaves holes of kilobytes behind what it made
        while len(self._waiting) > WAITING or self._bytes > WAITING_BYTES:
            self._bytes -= len(self._waiting.popitem(last=False)[1])

    def _compare(self, id: str, right: Sequence[bool]) -> dict[str, int]:
        record = self._waiting.pop(id)
        self._bytes -= len(record)
        answers, ok = orjson.loads(record), np.array(right, dtype=bool)
        kept, confidence = np.array(answers["accepted"], dtype=bool), np.array(answers["probability"], dtype=np.float64)
        bins = np.minimum((np.nan_to_num(confidence) * _BINS).astype(int), _BINS - 1)
        np.add.at(self.reliability, bins[kept], np.stack([kept, confidence, ok], axis=1)[kept])
        if self.risk is not None:
            self.risk.update(~ok[kept])
        return {"rows": len(ok), "right": int(ok.sum()), "accepted": int(kept.sum())}

    # Files

    def _write(self, records: list[bytes]) -> None:
        if self._journal is not None:
            self._journal.append(records)
            self._records += len(records)
            if self._records - self._last_snapshot >= SNAPSHOT:
                self._snapshot()

    def _snapshot(self) -> None:
        """Replace snapshot and journal: a line of what was counted, then a line for each request that waits."""
        assert self._journal is not None
        assert self.folder is not None
        file = self.folder / STATE
        about = {"format": FORMAT, "identity": self.identity, "records": self._records}
        counted = {
            "reliability": self.reliability.tolist(),
            "expected": [self.expected.count, self.expected.total],
            "risk": None if self.risk is None else [self.risk.risk, self.risk.alpha, self.risk.alarm],
        }

        def write(name: str) -> None:
            head = orjson.dumps(about | counted | {"journal": name})
            write_file(file, b"\n".join([head, *self._waiting.values()]))

        self._journal.begin(self._records, write)
        self._last_snapshot = self._records

    def _read(self, folder: Path) -> None:
        """Go on with what the last process left, if it is of the same model."""
        file = folder / STATE
        if not file.is_file():
            return
        try:
            first, *waiting = file.read_bytes().split(b"\n")
            about = orjson.loads(first)
            if about["format"] != FORMAT:
                raise ValueError(f"it has format {about['format']}, expected {FORMAT}")
            if about["identity"] != self.identity:
                return
            for record in waiting:
                self._wait(orjson.loads(record)["id"], record)
            self._restore(about)
            for record in read_journal(folder / Path(str(about["journal"])).name):
                self._replay(record)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"{file} is no state of a service, or damaged: {error}. Delete it to begin anew."
            ) from error

    def _restore(self, about: dict[str, Any]) -> None:
        self.reliability = np.array(about["reliability"], dtype=np.float64).reshape(_BINS, 3)
        self.expected.count, self.expected.total = int(about["expected"][0]), float(about["expected"][1])
        self._records = self._last_snapshot = int(about["records"])
        if self.risk is not None:
            count, right = self.reliability[:, [0, 2]].sum(0).round().astype(int).tolist()
            same = about["risk"] is not None and about["risk"][:2] == [self.risk.risk, self.risk.alpha]
            self.risk.resume(count, count - right, alarm=same and about["risk"][2])

    def _replay(self, record: bytes) -> None:
        content = orjson.loads(record)
        if "right" in content and content["id"] in self._waiting:
            self._compare(content["id"], content["right"])
        elif "label" in content:
            accepted = np.array(content["accepted"], dtype=bool)
            self.expected.update(np.array(content["probability"], dtype=np.float64)[accepted])
            self._wait(content["id"], record)
        self._records += 1
