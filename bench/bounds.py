"""What do the bounds cost? Seven plain networks, dense and as SNGP, trained by AdamW at a constant rate.

    python -m bench.bounds      runs what results/bounds.json lacks, then fills docs/defaults.md (needs $AFIELD_DATA)

Nothing is tuned and nothing scheduled: learning rate 1e-3, weight decay 0.01, batches of 64, few examples, few epochs,
three seeds. The seed draws the rows as well. All rows are of the sets' training parts; accuracy is on those that were
not trained on. AUROC: those rows against other data, by the default score, for dense networks by their probability.
"""

import functools
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afield
from afield.model.progress import track
from afield.model.saving import write_file
from afield.prediction.metrics import auroc
from bench.defaults import PAGE, ROOT, fill, markdown

RECORD = ROOT / "results" / "bounds.json"
SEEDS = range(3)
RATE, DECAY, BATCH = 1e-3, 0.01, 64
TWICE, SOLVED = "twice the length scale", "default, then fit_head"
VARIANTS = ("dense", "default", SOLVED, "0.95, one rate", TWICE, "default, one rate")
"""The bound, and whether one learning rate holds for all layers, or those of `afield.parameter_groups`; the default
with a length scale of the mean of two median distances instead of one; the default with its output weights solved for
once training is over.

Without convolutions the last is the one before it, and is not run."""

_HEAD = {TWICE: {"fraction": 2.0}}


class Data(NamedTuple):
    """x and y are cut into rows to train on and rows to hold out."""

    x: Tensor
    y: Tensor
    ood: Tensor


class Trial(NamedTuple):
    """A network on data: how many rows it trains on, for how many epochs."""

    data: Callable[[], Data]
    network: Callable[[], nn.Module]
    rows: int
    epochs: int
    convolutions: bool = True


def run(trial: Trial, variant: str, seed: int) -> dict[str, float]:
    """Train one network; its metrics on at most 3,000 rows that were held out."""
    x, y, ood = trial.data()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, calibration, test = order[: trial.rows], order[trial.rows :][:1000], order[trial.rows + 1000 :][:3000]
    torch.manual_seed(seed)
    net = trial.network()
    model: Any = net
    if variant != "dense":
        model = afield.sngp(net, 0.95) if variant.startswith("0.95") else afield.sngp(net, **_HEAD.get(variant, {}))
    groups: Any = model.parameters()
    if variant in ("default", SOLVED, TWICE):
        groups = afield.parameter_groups(model, lr=RATE, weight_decay=DECAY, num_examples=len(train))
    optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY)
    for _ in range(trial.epochs):
        for rows in train[torch.randperm(len(train))].split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    model.eval()
    if variant == "dense":
        with torch.no_grad():
            inside, outside = (torch.cat([net(part) for part in z.split(500)]).softmax(-1) for z in (x[test], ood))
        probs, scores = inside, (-inside.amax(-1), -outside.amax(-1))
    else:
        batches = [(x[rows], y[rows]) for rows in train.split(500)]
        if variant == SOLVED:
            afield.fit_head(model, batches, progress=False)
        afield.fit_posterior(model, batches)
        afield.calibrate(model, [(x[calibration], y[calibration])])
        inside, outside = (model.predict(list(z.split(500))) for z in (x[test], ood))
        probs, scores = inside.probs, (inside.score(), outside.score())
    return {"accuracy": float((probs.argmax(-1) == y[test]).float().mean()), "auroc": auroc(*scores)}


# Data -----------------------------------------------------------------------------------------------------------


def _arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(Path(os.environ["AFIELD_DATA"]) / name) as file:
        return {key: file[key] for key in file.files}


@functools.cache
def fashion() -> Data:
    data, ood = _arrays("images/fashion_mnist_30k_10k.npz"), _arrays("images/notmnist_dev5k.npz")["x"][:2000]
    x, other = ((torch.tensor(z)[:, None] / 255 - 0.286) / 0.353 for z in (data["xtr"], ood))
    return Data(x, torch.tensor(data["ytr"]).long(), other)


@functools.cache
def cifar() -> Data:
    data, ood = _arrays("images/cifar10_train20k.npz"), _arrays("images/cifar100_ood_dev3k.npz")["x"][:2000]
    x, other = ((torch.tensor(z).permute(0, 3, 1, 2) / 255 - 0.47) / 0.25 for z in (data["x"], ood))
    return Data(x.contiguous(), torch.tensor(data["y"]).long(), other.contiguous())


@functools.cache
def table(name: str) -> Data:
    """Columns are standardised; other data: every column shuffled by itself, which is far from most rows."""
    data = _arrays(f"tabular/mlbench_{name}.npz")
    x = torch.tensor(data["X"])
    x = (x - x.mean(0)) / x.std(0)
    draw = torch.Generator().manual_seed(0)
    other = torch.stack([column[torch.randperm(len(x), generator=draw)] for column in x.T], -1)[:2000]
    return Data(x, torch.tensor(data["y"]).long(), other)


@functools.cache
def genomics() -> Data:
    data, ood = _arrays("genomics/bacteria10_id.npz"), _arrays("genomics/bacteria_ood_dev8.npz")["x"][::4]
    return Data(torch.tensor(data["x_train"]).long(), torch.tensor(data["y_train"]).long(), torch.tensor(ood).long())


@functools.cache
def clinc() -> Data:
    """Fifty intents; twenty words a sentence, 0 behind the last; words of these sentences have numbers, others 1."""
    data = json.loads((Path(os.environ["AFIELD_DATA"]) / "clinc" / "data_full.json").read_text(encoding="utf-8"))
    labels = sorted({label for _, label in data["train"]})[:50]
    known = [(text.split(), labels.index(label)) for text, label in data["train"] if label in labels]
    words = {word: i for i, word in enumerate(sorted({word for text, _ in known for word in text}), 2)}

    def encode(text: list[str]) -> list[int]:
        return ([words.get(word, 1) for word in text] + 20 * [0])[:20]

    other = torch.tensor([encode(text.split()) for text, _ in data["oos_val"]])
    return Data(torch.tensor([encode(text) for text, _ in known]), torch.tensor([label for _, label in known]), other)


# Networks -------------------------------------------------------------------------------------------------------


def mlp(inputs: int, outputs: int) -> nn.Module:
    layers = itertools.chain.from_iterable((nn.Linear(n, 128), nn.ReLU()) for n in (inputs, 128, 128))
    return nn.Sequential(*layers, nn.Linear(128, outputs))


def cnn(channels: int, size: int) -> nn.Module:
    size = ((size - 2) // 2 - 2) // 2
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(32 * size * size, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()),
            *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = nn.Identity() if stride == 1 else shortcut

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.branch(x) + self.shortcut(x))


def resnet(channels: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


class Letters(nn.Module):
    """Reads as one channel a letter."""

    def forward(self, x: Tensor) -> Tensor:
        return F.one_hot(x, 4).float().transpose(1, 2)


def sequence_cnn() -> nn.Module:
    return nn.Sequential(
        *(Letters(), nn.Conv1d(4, 32, 11), nn.ReLU(), nn.MaxPool1d(4), nn.Conv1d(32, 64, 7), nn.ReLU()),
        *(nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


class Transformer(nn.Module):
    """Two layers of attention over words, then their mean."""

    def __init__(self, words: int, outputs: int, width: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width, padding_idx=0), nn.Parameter(0.02 * torch.randn(20, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.layers, self.output = (
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
            nn.Linear(width, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        used = x != 0
        h = self.layers(self.words(x) + self.places, src_key_padding_mask=~used)
        return self.output((h * used[..., None]).sum(1) / used.sum(1, keepdim=True))


TRIALS = {
    "Letter, MLP": Trial(functools.partial(table, "LetterRecognition"), lambda: mlp(16, 26), 5000, 12, False),
    "Satellite, MLP": Trial(functools.partial(table, "Satellite"), lambda: mlp(36, 6), 3000, 12, False),
    "Fashion-MNIST, CNN": Trial(fashion, lambda: cnn(1, 28), 4000, 6),
    "Fashion-MNIST, ResNet": Trial(fashion, lambda: resnet(1), 4000, 6),
    "CIFAR-10, ResNet": Trial(cifar, lambda: resnet(3), 4000, 6),
    "bacteria, 1-d CNN": Trial(genomics, sequence_cnn, 6000, 8),
    "CLINC, transformer": Trial(clinc, lambda: Transformer(3500, 50), 3000, 10, False),
}


def tables() -> dict[str, str]:
    """The text between the marks, from the record as it is."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = [["data, network", *(f"{v}{metric}" for metric in ("", ": AUROC") for v in VARIANTS)]]
    for name in TRIALS:
        runs = [(record[name].get(v, {}).values(), metric) for metric in ("accuracy", "auroc") for v in VARIANTS]
        rows.append([name, *(f"{mean(run[metric] for run in of):.3f}" if of else "" for of, metric in runs)])
    return {"bounds": markdown(rows, left=1)}


def main() -> None:
    torch.set_num_threads(1)
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    wanted = [
        w for w in itertools.product(VARIANTS, TRIALS, SEEDS) if w[0] != VARIANTS[-1] or TRIALS[w[1]].convolutions
    ]
    missing = [(v, n, s) for v, n, s in wanted if str(s) not in record.get(n, {}).get(v, {})]
    for variant, name, seed in track(missing, "runs"):
        found = run(TRIALS[name], variant, seed)
        found = {metric: round(value, 5) for metric, value in found.items()}
        record.setdefault(name, {}).setdefault(variant, {})[str(seed)] = found
        write_file(RECORD, (json.dumps(record, indent=1) + "\n").encode())
        print(name, variant, seed, found, flush=True)
    for name, text in tables().items():
        fill(PAGE, name, text)


if __name__ == "__main__":
    main()
