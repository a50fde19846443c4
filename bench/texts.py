"""Sentences that are in no other table: what finds foreign ones, and how many random features that takes.

    AFIELD_DATA=... python -m bench.texts [TASK ...]    every task that results/texts.json lacks, or these again;
                                                        fills docs/defaults.md and docs/results.md

Each task is a dense layer (multinomial regression) on the mean token of a MiniLM that stays as it is, 384 numbers, with
`afield.attach`. The last intents or groups of the alphabet are left out of training, and are near OOD data; sentences
of another set are far. The number of random features of a variance over wide hidden vectors was chosen here.
"""

import gzip
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afield
from afield.backbones.transformer import TransformerEncoder, tokenize
from afield.model.saving import write_file
from afield.prediction.distance_scores import make_all
from afield.prediction.metrics import auroc
from afield.prediction.prediction import Prediction
from afield.prediction.scores import SCORES
from bench.defaults import ROOT, fill, markdown
from bench.detector_sources import cached

RECORD = ROOT / "results" / "texts.json"
PAGES = {"features of texts": ROOT / "docs" / "defaults.md", "detectors of texts": ROOT / "docs" / "results.md"}
COUNTS = (512, 1024, 1536, 2048, 3072)
DEFAULT = 1536
BY_COUNT = ("variance", "joined")
SEEDS = 2
MOST, LENGTH = 6000, 64  # sentences of a part, tokens of a sentence
RIDGE = 1e-4


@dataclass(frozen=True)
class Texts:
    """A set of the data folder: its parts, how many of its classes are left out, and the sets that are far from it.

    held  the part that calibrates; None: a sixth of the training part
    """

    file: str
    left_out: int
    far: tuple[str, ...]
    held: str | None = None


TASKS = {
    "TREC": Texts("trec6", 1, ("snips",)),
    "SNIPS": Texts("snips", 2, ("trec6",), "valid"),
    "ATIS": Texts("atis", 8, ("snips",), "valid"),
    "SST-2": Texts("sst2", 0, ("trec6", "newsgroups20_8k4k"), "dev"),
    "HWU64": Texts("hwu64", 14, ("trec6",), "valid"),
    "Banking77": Texts("banking77_oos", 0, ("ood-oos_test",), "valid"),
    "20 Newsgroups": Texts("newsgroups20_8k4k", 5, ("sst2",)),
}
Part = tuple[Tensor, list[str]]


def main(names: Iterable[str] = ()) -> None:
    tasks = json.loads(RECORD.read_text(encoding="utf-8"))["tasks"] if RECORD.exists() else {}
    for name in names or [name for name in TASKS if name not in tasks]:
        tasks[name] = compare(TASKS[name])
        record = {"command": "python -m bench.texts", "versions": {"afield": afield.__version__}}
        record |= {"seeds": SEEDS, "tasks": {known: tasks[known] for known in TASKS if known in tasks}}
        write_file(RECORD, (json.dumps(record, indent=1) + "\n").encode())
        print(name, json.dumps(tasks[name]["joined"]), flush=True)
    for name, text in tables().items():
        fill(PAGES[name], name, text)


def compare(texts: Texts) -> dict[str, dict[str, float]]:
    """AUROC of every score against near and far sentences, and of those of BY_COUNT by the number of features."""
    train, held, test, ood = split(texts)
    net = regression(*train)
    found: dict[str, dict[str, list[float]]] = {}

    def note(name: str, score: Callable[[Prediction], Tensor], predictions: Mapping[str, Prediction]) -> None:
        inside = score(predictions["test"])
        for kind in ood:
            found.setdefault(name, {}).setdefault(kind, []).append(auroc(inside, score(predictions[kind])))

    for count in COUNTS:
        for seed in range(SEEDS):
            torch.manual_seed(seed)
            model = afield.attach(net, num_random_features=count)
            afield.fit_posterior(model, [train])
            afield.calibrate(model, [held])
            predictions = {name: model.predict(h) for name, h in {"test": test, **ood}.items()}
            for name in BY_COUNT:
                note(f"{name}, {count}", SCORES[name], predictions)
            if count == DEFAULT:
                for name, score in SCORES.items():
                    if all(map(score.applies, predictions.values())):
                        note(name, score, predictions)
    with torch.no_grad():
        dense = {n: Prediction(net(h), probs=net(h).softmax(1), features=h) for n, h in {"test": test, **ood}.items()}
        for name, fitted in make_all(net.in_features, net.out_features, output=net).items():
            fitted.update(*train, net(train[0]))
            if all(map(fitted.applies, dense.values())):
                note(name, fitted.score, dense)
    return {name: {kind: round(fmean(v), 4) for kind, v in row.items()} for name, row in found.items()}


def split(texts: Texts) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor, dict[str, Tensor]]:
    """Hidden vectors and classes to train and to calibrate on, hidden vectors to test, and of each OOD set."""
    parts = embedded(texts.file)
    classes = sorted(set(parts["train"][1]))
    known = {label: i for i, label in enumerate(classes[: len(classes) - texts.left_out])}
    train, held = _of(parts["train"], known), None if texts.held is None else _of(parts[texts.held], known)
    if held is None:
        order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(0)).chunk(6)
        held, rest = (train[0][order[0]], train[1][order[0]]), torch.cat(order[1:])
        train = train[0][rest], train[1][rest]
    h, labels = parts["test"]
    inside = torch.tensor([label in known for label in labels])
    ood = {"near": h[~inside]} if texts.left_out else {}
    if "id-oos_test" in parts:  # left out by the authors of the set
        ood = {"near": parts["id-oos_test"][0]}
    far = [parts[name][0] if name in parts else embedded(name)["test"][0] for name in texts.far]
    return train, held, h[inside], ood | {"far": torch.cat(far)}


def _of(part: Part, known: Mapping[str, int]) -> tuple[Tensor, Tensor]:
    rows = torch.tensor([i for i, label in enumerate(part[1]) if label in known])
    return part[0][rows], torch.tensor([known[label] for label in part[1] if label in known])


def embedded(file: str) -> dict[str, Part]:
    """The parts of a set as means of tokens (N, 384), made once, with their labels."""
    path = Path(os.environ["AFIELD_DATA"]) / "text" / f"{file}.json.gz"
    with gzip.open(path, "rt", encoding="utf-8") as content:
        parts = {name: rows[:: math.ceil(len(rows) / MOST)] for name, rows in json.load(content).items()}
    texts = {name: [text for text, _ in rows] for name, rows in parts.items()}
    vectors = cached(path, lambda: {name: encode(each) for name, each in texts.items()}, sets=(MOST, LENGTH))
    return {name: (vectors[name], [label for _, label in rows]) for name, rows in parts.items()}


@torch.no_grad()
def encode(texts: list[str]) -> Tensor:
    ids, pad = tokenize(texts, length=LENGTH)
    encoder = TransformerEncoder(pad=pad).eval()
    order, found = (ids != pad).sum(1).argsort(), torch.zeros(len(ids), encoder.out_features)
    for rows in order.split(64):
        some = encoder.trim(ids[rows])
        mask = some != pad
        tokens = encoder.body(input_ids=some, attention_mask=mask.long()).last_hidden_state
        found[rows] = (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return found


def regression(h: Tensor, y: Tensor) -> nn.Linear:
    """Multinomial regression with a small ridge."""
    layer = nn.Linear(h.shape[1], int(y.max()) + 1)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(layer(h), y) + RIDGE / 2 * layer.weight.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return layer


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the record as it is."""
    tasks: dict[str, dict[str, dict[str, float]]] = json.loads(RECORD.read_text(encoding="utf-8"))["tasks"]
    columns = [(task, kind) for task, rows in tasks.items() for kind in ("near", "far") if kind in rows["joined"]]
    by_count = [["random features", *[f"{name}, {kind}" for name in BY_COUNT for kind in ("near", "far")]]]
    for count in COUNTS:
        cells = [
            fmean(tasks[task][f"{name}, {count}"][kind] for task, kind in columns if kind == wanted)
            for name in BY_COUNT
            for wanted in ("near", "far")
        ]
        by_count.append([str(count), *[f"{cell:.3f}" for cell in cells]])
    rows = [["score", *[f"{task}, {kind}" for task, kind in columns], "mean"]]
    for name in dict.fromkeys(name for task in tasks.values() for name in task if ", " not in name):
        if all(name in tasks[task] for task, _ in columns):
            cells = [tasks[task][name][kind] for task, kind in columns]
            rows.append([f"`{name}`", *[f"{cell:.3f}" for cell in (*cells, fmean(cells))]])
    return {"features of texts": markdown(by_count, left=1), "detectors of texts": markdown(rows, left=1)}


if __name__ == "__main__":
    main(sys.argv[1:])
