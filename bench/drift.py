"""How soon is a real shift noticed? The watch of `afield.drift` against KS and MMD tests, at one rate of false alarms.

    AFIELD_DATA=... python -m bench.drift      results/drift.json and the table of docs/drift.md

Each stream has 1,500 rows. It begins with in-domain data and changes somewhere between rows 400 and 600: from then on
all rows are shifted, or one in five. Reference (500 rows) and stream are drawn anew from held-out data for each of 40
streams, without replacement; 120 streams have no shift. Every method may raise a false alarm in at most 5% of the
streams.

watch, watch by class   `Watch(reference, alpha=0.05)`: one row at a time, and for streams of any length
ks score                two samples of Kolmogorov and Smirnov, the score of the reference against that of a batch
ks hidden, mmd hidden   on the 32 principal components of hidden vectors: KS for each, times 32; the permutation test of
                        MMD. Their documentation reduces dimensions first, too

KS and MMD are those of alibi-detect's `KSDrift` and `MMDDrift`: asymptotic KS with Bonferroni's correction;
the unbiased MMD^2 with a Gaussian kernel of median width. alibi-detect 0.13 wants NumPy 1, so they are written
here; `tests/decide/test_bench_drift.py` compares both with its own. Their tests are for one batch; that the stream of
1,500 rows has 5% in all, each batch is tested at 5% times its part of the stream (Bonferroni again), for which its
length must be known.

cifar10     the public ResNet-56 with `afield.attach`, from test images to corrupted ones (three kinds)
clinc       MiniLM, frozen, 100 intents; from these to the other 50
genomics    a small network trained here for a minute or two; from ten genera to new strains of them
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.stats import ks_2samp, kstwo
from torch import Tensor, nn

import afield
from afield.backbones.genomics_cnn import GenomicsCNN
from afield.backbones.transformer import TransformerEncoder
from afield.decide.drift import Watch
from afield.methods.frozen import fit_linear
from afield.model.saving import write_file
from afield.tasks import TASKS
from afield.tasks.corruptions import corrupt
from bench.attach import hidden_of
from bench.defaults import ROOT, fill, markdown
from bench.detector_sources import load, load_net

RECORD, PAGE = ROOT / "results" / "drift.json", ROOT / "docs" / "drift.md"
ALPHA, REFERENCE, HORIZON, CHANGE = 0.05, 500, 1500, (400, 600)
STREAMS, UNSHIFTED, SHARES, BATCHES = 40, 120, (1.0, 0.2), (50, 200)
REDUCED = 32
CORRUPTIONS = {"gaussian_noise": 1, "defocus_blur": 3, "fog": 3}


@dataclass(frozen=True)
class Rows:
    """What detectors see: score (N,), principal components of the hidden vector (N, d), predicted class (N,)."""

    score: np.ndarray
    hidden: np.ndarray
    label: np.ndarray

    def __getitem__(self, index: Any) -> "Rows":
        return Rows(self.score[index], self.hidden[index], self.label[index])


@dataclass(frozen=True)
class Source:
    """In-domain rows that the model was neither fitted to nor calibrated with, and shifted ones by the kind of shift.

    paired   the shifted rows are the in-domain ones, changed: a stream takes each in one form only
    """

    usual: Rows
    shifted: Mapping[str, Rows]
    num_classes: int
    paired: bool = False


Detector = Callable[[Rows, Rows, int], int | None]
"""Reference, stream, number of classes -> the row at which the alarm rings, counted from 1, or None."""


# Detectors


def watch(reference: Rows, stream: Rows, num_classes: int) -> int | None:
    found = Watch(reference.score, alpha=ALPHA)
    return _first_alarm(found, lambda part: found.update(part.score), stream)


def watch_by_class(reference: Rows, stream: Rows, num_classes: int) -> int | None:
    own = {k: reference.score[reference.label == k] for k in range(num_classes)}
    found = Watch(reference.score, alpha=ALPHA, num_classes=num_classes, by_class=own)
    return _first_alarm(found, lambda part: found.update(part.score, part.label), stream)


def _first_alarm(found: Watch, update: Callable[[Rows], Any], stream: Rows) -> int | None:
    for first in range(0, len(stream.score), 50):  # the alarm is of the row, however many come at a time
        update(stream[first : first + 50])
        if found.alarm is not None:
            return found.alarm.row
    return None


def ks_score(reference: Rows, stream: Rows, num_classes: int, *, batch: int) -> int | None:
    return _by_batch(lambda part: ks(reference.score[:, None], part.score[:, None]), stream, batch)


def ks_hidden(reference: Rows, stream: Rows, num_classes: int, *, batch: int) -> int | None:
    return _by_batch(lambda part: ks(reference.hidden, part.hidden), stream, batch)


def mmd_hidden(reference: Rows, stream: Rows, num_classes: int, *, batch: int) -> int | None:
    test = Mmd(reference.hidden, batch, level=ALPHA * batch / HORIZON)
    return _by_batch(lambda part: test.p_value(part.hidden), stream, batch)


def _by_batch(p_value: Callable[[Rows], float], stream: Rows, batch: int) -> int | None:
    for end in range(batch, len(stream.score) + 1, batch):
        if p_value(stream[end - batch : end]) <= ALPHA * batch / HORIZON:
            return end
    return None


def ks(x: np.ndarray, y: np.ndarray) -> float:
    """The smallest asymptotic p-value of the columns of (N, d) and (M, d), times d."""
    both = np.concatenate([x, y])
    order = both.argsort(0, kind="stable")
    step = np.where(order < len(x), 1 / len(x), -1 / len(y)).cumsum(0)
    ordered = np.take_along_axis(both, order, 0)
    step[:-1][ordered[:-1] == ordered[1:]] = 0  # ties count when all of them have come
    en = round(len(x) * len(y) / len(both))
    return float(min(1.0, kstwo.sf(np.abs(step).max(0).max(), en) * x.shape[1]))


class Mmd:
    """The permutation test of the unbiased MMD^2 between a reference (N, d) and batches (M, d), Gaussian kernel."""

    def __init__(self, reference: np.ndarray, batch: int, *, level: float) -> None:
        self.x = torch.from_numpy(reference).float()
        squared = torch.cdist(self.x, self.x).square()
        self.width = squared.median()
        self.k_xx = torch.exp(-squared / self.width)
        permutations = math.ceil(1 / level)  # enough for a p-value that small
        size = len(reference) + batch
        self.chosen = torch.zeros(permutations + 1, size)
        self.chosen[0, len(reference) :] = 1
        generator = torch.Generator().manual_seed(0)
        for row in self.chosen[1:]:
            row[torch.randperm(size, generator=generator)[:batch]] = 1

    def p_value(self, batch: np.ndarray) -> float:
        y = torch.from_numpy(batch).float()
        k_xy, k_yy = (torch.exp(-torch.cdist(a, y).square() / self.width) for a in (self.x, y))
        kernel = torch.cat([torch.cat([self.k_xx, k_xy], 1), torch.cat([k_xy.T, k_yy], 1)])
        kernel.fill_diagonal_(0)
        few = self._statistics(kernel, self.chosen[: len(self.chosen) // 10])
        if int((few >= few[0]).sum()) > 1:  # the p-value is above the level already
            return int((few >= few[0]).sum()) / len(few)
        found = self._statistics(kernel, self.chosen)
        return int((found >= found[0]).sum()) / len(found)

    def _statistics(self, kernel: Tensor, chosen: Tensor) -> Tensor:
        """MMD^2 for rows that say which examples are the batch."""
        n, m = len(self.x), len(kernel) - len(self.x)
        yy = ((chosen @ kernel) * chosen).sum(1)
        xy = chosen @ kernel.sum(1) - yy
        xx = kernel.sum() - 2 * xy - yy
        return xx / (n * (n - 1)) + yy / (m * (m - 1)) - 2 * xy / (n * m)


DETECTORS: dict[str, Detector] = {"watch": watch, "watch by class": watch_by_class}
for _size in BATCHES:
    DETECTORS |= {
        f"ks score, batches of {_size}": partial(ks_score, batch=_size),
        f"ks hidden, batches of {_size}": partial(ks_hidden, batch=_size),
        f"mmd hidden, batches of {_size}": partial(mmd_hidden, batch=_size),
    }


# Sources


def rows_maker(
    linear: nn.Linear, train: tuple[Tensor, Tensor], held_out: tuple[Tensor, Tensor]
) -> Callable[[Tensor], Rows]:
    """Hidden vectors -> rows, by a model attached to the output layer of a trained network."""
    torch.manual_seed(0)
    model = afield.attach(linear)
    afield.fit_posterior(model, list(zip(*(part.split(500) for part in train), strict=True)), progress=False)
    afield.calibrate(model, [held_out], progress=False)
    center = train[0].mean(0)
    directions = torch.pca_lowrank(train[0] - center, REDUCED, center=False)[2]

    def rows_of(hidden: Tensor) -> Rows:
        p = model.predict(hidden)
        return Rows(p.score().double().numpy(), ((hidden - center) @ directions).numpy(), p.labels.numpy())

    return rows_of


def cifar10() -> Source:
    net, _ = load_net("cifar10_resnet56")
    (train, labels), (test, of_test) = (load(name) for name in ("cifar10_train20k", "cifar10_test_dev5k"))
    some = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:5000]
    train, labels = train[some], labels[some]
    held_out, rest = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:4000].split((1000, 3000))

    def hidden(images: Tensor) -> Tensor:
        return hidden_of(net, images.permute(0, 3, 1, 2))

    assert net.linear is not None
    rows_of = rows_maker(net.linear, (hidden(train), labels.long()), (hidden(test[held_out]), of_test[held_out].long()))
    images = test[rest].numpy()
    shifted = {
        f"{name.replace('_', ' ')}, severity {severity}": hidden(torch.from_numpy(corrupt(images, name, severity)))
        for name, severity in CORRUPTIONS.items()
    }
    return Source(rows_of(hidden(test[rest])), {name: rows_of(h) for name, h in shifted.items()}, 10, paired=True)


def clinc() -> Source:
    task = TASKS["clinc"](0)
    encoder = task.backbone().eval()
    assert isinstance(encoder, TransformerEncoder)
    known = torch.randperm(150, generator=torch.Generator().manual_seed(0))[:100].sort().values
    number = torch.full((150,), -1)
    number[known] = torch.arange(100)
    parts = {}
    for name in ("train", "val", "test"):
        ids, y = getattr(task, name).tensors
        with torch.no_grad():
            h = torch.cat([encoder(part) for part in ids.split(500)])
        parts[name] = h, number[y]
    of_known = {name: (h[y >= 0], y[y >= 0]) for name, (h, y) in parts.items()}
    linear = nn.Linear(encoder.out_features, 100)
    fit_linear(linear, [of_known["train"]], 0.1)
    rows_of = rows_maker(linear, of_known["train"], of_known["val"])
    others = torch.cat([h[y < 0] for name, (h, y) in parts.items() if name != "train"])
    return Source(rows_of(of_known["test"][0]), {"other intents": rows_of(others)}, 100)


def genomics(epochs: int = 2) -> Source:
    task = TASKS["genomics"](0)
    torch.manual_seed(0)
    net = nn.Sequential(GenomicsCNN(filters=128, dense=128), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    x, y = task.train.tensors
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(128):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[chosen]), y[chosen]).backward()
            optimizer.step()
    body, linear = net.eval()
    assert isinstance(linear, nn.Linear)

    @torch.no_grad()
    def hidden(name: str) -> Tensor:
        part = getattr(task, name) if hasattr(task, name) else task.shifted[name]
        return torch.cat([body(reads) for reads in part.tensors[0].split(500)])

    rows_of = rows_maker(linear, (hidden("train"), y), (hidden("val"), task.val.tensors[1]))
    return Source(rows_of(hidden("test")), {"new strains": rows_of(hidden("new-strains"))}, 10)


SOURCES: dict[str, Callable[[], Source]] = {"clinc": clinc, "cifar10": cifar10, "genomics": genomics}


# Streams


def stream(source: Source, shift: str | None, share: float, seed: int) -> tuple[Rows, Rows, int]:
    """Reference, stream, and the number of rows before the change."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(source.usual.score))[: REFERENCE + HORIZON]
    change = int(rng.integers(*CHANGE))
    reference, usual = source.usual[order[:REFERENCE]], source.usual[order[REFERENCE:]]
    if shift is None:
        return reference, usual, HORIZON
    pool = source.shifted[shift]
    others = pool[order[REFERENCE:]] if source.paired else pool[rng.permutation(len(pool.score))[:HORIZON]]
    moved = (np.arange(HORIZON) >= change) & (rng.random(HORIZON) < share)
    mixed = {
        name: np.where(moved if array.ndim == 1 else moved[:, None], getattr(others, name), array)
        for name, array in vars(usual).items()
    }
    return reference, Rows(**mixed), change


def measure(source: Source, shift: str | None, share: float, count: int) -> dict[str, dict[str, float]]:
    """By detector: the part of streams with a false alarm; the part that is found, and the median delay."""
    found = {}
    for name, detector in DETECTORS.items():
        begin, alarms = time.process_time(), []
        for seed in range(count):
            reference, rows, change = stream(source, shift, share, seed)
            alarms.append((detector(reference, rows, source.num_classes), change))
        early = sum(row is not None and row <= change for row, change in alarms)
        delays = [row - change if row is not None else np.inf for row, change in alarms if row is None or row > change]
        result = {"streams": count, "false_alarms": early / count}
        if shift is not None:
            delay = median(delays)
            result |= {"found": float(np.isfinite(delays).mean()), "delay": delay if np.isfinite(delay) else None}
        found[name] = result | {"cpu_ms_per_stream": round(1000 * (time.process_time() - begin) / count, 1)}
        print(shift, share, name, json.dumps(found[name]), flush=True)
    return found


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the record as it is."""
    tasks = json.loads(RECORD.read_text(encoding="utf-8"))["tasks"]
    columns = [(task, key) for task, of in tasks.items() for key in of if key != "none"]
    shifts = [["shift", "rows shifted", *(name.replace(", batches of", ",") for name in DETECTORS)]]
    for task, key in columns:
        cells = []
        for name in DETECTORS:
            cell = tasks[task][key][name]
            cells.append(f"{cell['delay']:.0f}" if cell["delay"] is not None else f"({100 * cell['found']:.0f}%)")
        kind, share = key.rsplit(" @ ", 1)
        shifts.append([f"{task}: {kind}", "all" if share == "1.0" else "one in five", *cells])
    for task, of in tasks.items():
        rates = [f"{100 * of['none'][name]['false_alarms']:.1f}%" for name in DETECTORS]
        shifts.append([f"{task}: false alarms", "none", *rates])
    return {"drift": markdown(shifts, left=2)}


def check() -> None:
    """KS is scipy's; MMD finds what must be found."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 3)).round(1), rng.normal(0.3, size=(50, 3)).round(1)
    expected = min(1.0, 3 * min(ks_2samp(x[:, k], y[:, k], method="asymp").pvalue for k in range(3)))
    if not np.isclose(ks(x, y), expected):
        raise AssertionError(f"ks is {ks(x, y)}, scipy says {expected}")
    level = ALPHA * BATCHES[0] / HORIZON
    if not Mmd(x, 50, level=level).p_value(y + 5) <= level < 0.2 < Mmd(x, 50, level=level).p_value(x[:50]):
        raise AssertionError("MMD does not see a large shift, or sees one where there is none")


def main() -> None:
    torch.set_num_threads(1)
    check()
    tasks: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))["tasks"] if RECORD.is_file() else {}
    for name, make in SOURCES.items():
        if name in tasks:  # a run that was ended goes on; to measure anew, delete the record
            continue
        source = make()
        found = {"none": measure(source, None, 1.0, UNSHIFTED)}
        for shift in source.shifted:
            for share in SHARES:
                found[f"{shift} @ {share}"] = measure(source, shift, share, STREAMS)
        tasks[name] = found
        versions = {"afield": afield.__version__, "torch": torch.__version__}
        record = {"command": "python -m bench.drift", "versions": versions, "alpha": ALPHA, "tasks": tasks}
        write_file(RECORD, (json.dumps(record, indent=1) + "\n").encode())
    for name, text in tables().items():
        fill(PAGE, name, text)


if __name__ == "__main__":
    main()
