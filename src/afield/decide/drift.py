"""Drift: has the stream stopped looking like the reference? An alarm that may be looked at at any time.

    watch = Watch(reference_scores, alpha=0.01)          or watch_model(model): a calibrated model has its reference
    watch.update(prediction.score())                     any number of rows, for ever
    watch.alarm                                          None, or where it rang; watch.began: when it began

Every score gets a smoothed p-value among the reference *and all earlier scores of the stream* (`ranks`). If all of them
are exchangeable, these p-values are independent and uniform, exactly, however small the reference is. Bets against that
(`betting`) are a test martingale, and

    P(the alarm ever rings) <= alpha        if the stream is drawn like the reference; proof in docs/drift.md.

p-values of a fixed reference, as `Prediction` has them, would not do: with n reference rows they are off by 1 / sqrt(n)
together, and a long stream finds that out.

By class, rows are ranked among those of their own class (`num_classes`), one martingale for each. Half of alpha is then
for the whole stream, and the other half is shared by the classes.
"""

import collections
import copy
import heapq
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from afield.decide.betting import Bets
from afield.decide.ranks import Ranks

if TYPE_CHECKING:
    from afield.model.sngp_model import SNGP

_CURVE = 512  # points that are kept
_CHUNK = 1024  # random numbers at a time


@dataclass(frozen=True)
class Alarm:
    """row: of the stream, counted from 1; began: rows before the estimated change; group: a class, None: all rows."""

    row: int
    began: int
    group: int | None = None


@dataclass(frozen=True)
class Smallest:
    """One of the inputs with the smallest p-values: what was given as its input, and its row, counted from 1."""

    p_value: float
    row: int
    input: Any = None


class Watch:
    """A watch over a stream of scores.

    reference    scores of in-domain rows that the model was not fitted to, higher is further
    alpha        the probability that the alarm ever rings without drift
    num_classes  watch every class by itself too; None: the stream as a whole
    by_class     reference scores by class, as far as they are known; a class without any starts from its own past
    keep         how many of the smallest p-values are kept with their inputs
    seed         of the numbers that break ties; None: drawn anew, which the promise needs
    """

    def __init__(
        self,
        reference: Any = (),
        *,
        alpha: float = 0.01,
        num_classes: int | None = None,
        by_class: Mapping[int, Any] | None = None,
        keep: int = 20,
        seed: int | None = None,
    ) -> None:
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must lie strictly between 0 and 1, got {alpha}.")
        if num_classes is not None and num_classes < 1:
            raise ValueError(f"num_classes must be at least 1, or None, got {num_classes}.")
        unknown = [k for k in by_class or {} if not 0 <= k < (num_classes or 0)]
        if unknown:
            raise ValueError(f"by_class must have classes below num_classes = {num_classes}, got {unknown}.")
        self.alpha, self.num_classes, self.keep = alpha, num_classes, keep
        self.seed = secrets.randbits(63) if seed is None else seed
        self.rows, self.alarm = 0, None
        self.num_reference = len(as_scores(reference))
        self._ranks: dict[int | None, Ranks] = {None: Ranks(as_scores(reference), seed=(self.seed, 0))}
        self._bets: dict[int | None, Bets] = {None: Bets()}
        for k, scores in (by_class or {}).items():
            self._ranks[k] = self._class_ranks(k, as_scores(scores))
        self._smallest: list[tuple[float, int, Any]] = []  # a heap, the largest p-value first
        self._curve: list[tuple[int, float]] = [(0, 0.0)]
        self._stride = 1
        self._random: list[tuple[int, np.ndarray]] = []

    alarm: Alarm | None

    def update(self, scores: Any, classes: Any = None, inputs: Sequence[Any] | None = None) -> np.ndarray:
        """The smoothed p-values (N,) of the next rows, which are counted.

        classes  (N,) the predicted classes, where classes are watched
        inputs   (N,) what JSON can hold, to be kept beside the smallest p-values
        """
        values = as_scores(scores)
        labels = self._check_classes(classes, len(values))
        if inputs is not None and len(inputs) != len(values):
            raise ValueError(f"Expected an input for each of {len(values)} scores, got {len(inputs)}.")
        first, ranks = self.rows, self._ranks[None]
        u = self._uniform(first, len(values))
        p_values = np.array([ranks.p_value(s, v) for s, v in zip(values.tolist(), u[:, 0].tolist(), strict=True)])
        self.rows += len(values)
        numbers = np.arange(first, self.rows) + 1
        evidence = self._bet(None, p_values, numbers)
        for label in sorted(set(labels.tolist())):
            chosen = labels == label
            of_class = self._ranks.setdefault(label, self._class_ranks(label))
            pairs = zip(values[chosen].tolist(), u[chosen, 1].tolist(), strict=True)
            self._bet(label, np.array([of_class.p_value(s, v) for s, v in pairs]), numbers[chosen])
        self._remember(p_values, evidence, first, inputs)
        return p_values

    def _bet(self, group: int | None, p_values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Bet on p-values of a group; the earliest alarm counts, and of the whole before that of a class."""
        bets = self._bets.setdefault(group, Bets())
        then = copy.copy(bets)  # its arrays are replaced, never written into
        evidence = bets.bet(p_values, numbers)
        over = np.flatnonzero(evidence >= self.threshold(group))
        if len(over) and (self.alarm is None or numbers[over[0]] < self.alarm.row):
            then.bet(p_values[: over[0] + 1], numbers[: over[0] + 1])  # as it was when the alarm rang
            self.alarm = Alarm(int(numbers[over[0]]), then.began, group)
        return evidence

    def _uniform(self, first: int, count: int) -> np.ndarray:
        """Two uniform numbers (N, 2) for every row: a function of seed and row, so that a stream can be replayed."""
        chunks = range(first // _CHUNK, (first + count - 1) // _CHUNK + 1)
        if [number for number, _ in self._random] != list(chunks):
            self._random = [(k, 1 - np.random.default_rng([self.seed, 1, k]).random((_CHUNK, 2))) for k in chunks]
        drawn = np.concatenate([numbers for _, numbers in self._random] or [np.zeros((0, 2))])
        start = first - _CHUNK * (first // _CHUNK)
        return drawn[start : start + count]  # in (0, 1]

    def _remember(self, p_values: np.ndarray, evidence: np.ndarray, first: int, inputs: Sequence[Any] | None) -> None:
        for i, p in enumerate(p_values.tolist()):
            if len(self._smallest) < self.keep or p < -self._smallest[0][0]:
                heapq.heappush(self._smallest, (-p, first + i + 1, None if inputs is None else inputs[i]))
                if len(self._smallest) > self.keep:
                    heapq.heappop(self._smallest)
            if (first + i + 1) % self._stride == 0:
                self._curve.append((first + i + 1, float(evidence[i]) / math.log(10)))
                if len(self._curve) > _CURVE:
                    self._curve, self._stride = self._curve[::2], 2 * self._stride

    def threshold(self, group: int | None = None) -> float:
        """The logarithm of the evidence at which the alarm rings: for the whole stream, or for a class."""
        if self.num_classes is None:
            return -math.log(self.alpha)
        return -math.log(self.alpha / 2 if group is None else self.alpha / (2 * self.num_classes))

    @property
    def evidence(self) -> float:
        """How many times the stake was won by betting against "no drift", as log10; the alarm rings at `line`."""
        return self._bets[None].log_evidence / math.log(10)

    @property
    def line(self) -> float:
        """The evidence at which the alarm rings, as log10."""
        return self.threshold() / math.log(10)

    @property
    def began(self) -> int:
        """Rows before the estimated change, as it looks now; it means something once the alarm has rung."""
        return self._bets[None].began

    @property
    def smallest(self) -> list[Smallest]:
        """The inputs with the smallest p-values, the smallest first."""
        return sorted((Smallest(-p, row, shown) for p, row, shown in self._smallest), key=lambda s: (s.p_value, s.row))

    @property
    def curve(self) -> list[tuple[int, float]]:
        """(row, evidence as log10) at up to 512 rows of the stream, evenly spaced."""
        now = (self.rows, self.evidence)
        return self._curve if self._curve[-1] == now else [*self._curve, now]

    def class_evidence(self) -> dict[int, float]:
        """The evidence of every class that was seen, as log10 of what the alarm of this class needs: it rings at 0."""
        return {k: (b.log_evidence - self.threshold(k)) / math.log(10) for k, b in self._bets.items() if k is not None}

    def summary(self) -> dict[str, Any]:
        """What there is to say, as JSON."""
        return {
            "rows": self.rows,
            "reference": self.num_reference,
            "alpha": self.alpha,
            "evidence": self.evidence,
            "line": self.line,
            "curve": self.curve,
            "alarm": None if self.alarm is None else asdict(self.alarm),
            "classes": self.class_evidence(),
            "smallest": [asdict(entry) for entry in self.smallest],
        }

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """All there is, as plain JSON and arrays, for `restore`."""
        names = {str(k): k for k in self._ranks}
        about = {
            "alpha": self.alpha,
            "num_classes": self.num_classes,
            "keep": self.keep,
            "seed": self.seed,
            "rows": self.rows,
            "num_reference": self.num_reference,
            "stride": self._stride,
            "curve": self._curve,
            "alarm": None if self.alarm is None else asdict(self.alarm),
            "smallest": sorted(self._smallest, key=lambda entry: entry[:2]),
            "bets": {str(k): b.state() for k, b in self._bets.items()},
            "halvings": {name: self._ranks[k].halvings for name, k in names.items()},
        }
        return about, {name: self._ranks[k].scores() for name, k in names.items()}

    @staticmethod
    def restore(about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> "Watch":
        """The watch of a `state`, to the bit."""
        watch = Watch(**{name: about[name] for name in ("alpha", "num_classes", "keep", "seed")})
        watch.rows, watch.num_reference, watch._stride = about["rows"], about["num_reference"], about["stride"]
        watch.alarm = None if about["alarm"] is None else Alarm(**about["alarm"])
        watch._curve = [(int(row), float(value)) for row, value in about["curve"]]
        watch._smallest = [(entry[0], entry[1], entry[2]) for entry in about["smallest"]]
        heapq.heapify(watch._smallest)
        watch._bets = {_group(name): Bets.restore(state) for name, state in about["bets"].items()}
        for name, halvings in about["halvings"].items():
            k = _group(name)
            ranks = watch._class_ranks(k, arrays[name]) if k is not None else Ranks(arrays[name], seed=(watch.seed, 0))
            ranks.halvings = halvings
            watch._ranks[k] = ranks
        return watch

    def _class_ranks(self, label: int, scores: Any = ()) -> Ranks:
        return Ranks(scores, seed=(self.seed, 2, label), most=2**13)

    def _check_classes(self, classes: Any, count: int) -> np.ndarray:
        """Classes (N,); none where they are not watched."""
        if self.num_classes is None:
            return np.zeros(0, dtype=np.int64)
        if classes is None:
            raise ValueError("This watch looks at every class by itself: update expects classes, (N,) whole numbers.")
        labels = np.asarray(classes)
        if labels.shape != (count,) or labels.dtype.kind not in "iu":
            raise ValueError(f"Expected classes as {count} whole numbers, got {labels.dtype} {labels.shape}.")
        if count and not 0 <= labels.min() <= labels.max() < self.num_classes:
            raise ValueError(
                f"Expected classes from 0 to {self.num_classes - 1}, got {labels.min()} to {labels.max()}."
            )
        return labels


def watch_model(model: "SNGP", *, alpha: float = 0.01, per_class: bool | None = None, keep: int = 20) -> Watch:
    """A watch with the reference of a calibrated model.

    per_class  watch every predicted class by itself too; None: if p-values go by class
    """
    head = model.head
    if not head.calibrated:
        raise ValueError("A watch needs the reference of a calibrated model: call afield.calibrate(model, held_out).")
    if len(head.input_reference):
        raise ValueError(
            "A watch takes scores that are exchangeable, and those of positions are not: watch inputs as a whole, "
            "Watch(model.head.input_reference.cpu().numpy()) with p.input_score."
        )
    reference, spans = head.reference.cpu().numpy(), head.reference_spans.cpu().numpy()
    own = own_references(reference, spans)
    classes = max(head.out_features, 2) if (len(spans) > 0 if per_class is None else per_class) else None
    return Watch(unique_rows(reference, spans), alpha=alpha, num_classes=classes, by_class=own if classes else None,
                 keep=keep)  # fmt: skip


def own_references(reference: np.ndarray, spans: np.ndarray) -> dict[int, np.ndarray]:
    """The reference of every class that shares no row with another; `spans` (K, 2) as p-values by class have them."""
    parts = {k: reference[first:end] for k, (first, end) in enumerate(spans.tolist())}
    used = collections.Counter(value for part in parts.values() for value in set(part.tolist()))
    return {k: part for k, part in parts.items() if len(part) and all(used[value] == 1 for value in part.tolist())}


def unique_rows(reference: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """The reference as one sample: rows that several groups of classes hold count once."""
    if not len(spans):
        return reference
    most: collections.Counter[float] = collections.Counter()
    for first, end in {tuple(span) for span in spans.tolist()}:
        most |= collections.Counter(reference[first:end].tolist())
    return np.array(list(most.elements()))


def as_scores(scores: Any) -> np.ndarray:
    """Scores (N,) in float64, from tensors too."""
    values = np.asarray(scores.detach().cpu() if hasattr(scores, "detach") else scores, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"A watch expects scores of shape (N,), got {values.shape}.")
    return values


def _group(name: str) -> int | None:
    return None if name == "None" else int(name)
