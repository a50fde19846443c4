"""All scores on the same hidden vectors: how well each tells near and far OOD data from test data.

    AFIELD_DATA=... python -m bench.detectors      a few minutes; writes results/detectors.json, fills docs/results.md

Two public CIFAR-10 ResNet-56 that nobody touches. Fitted scores see 20,000 training images; every other test image is
in-domain data, and the rest is held out for `afield.calibrate`. CIFAR-100 is near; SVHN, MNIST and Gaussian noise are
far. `variance` and `joined` are those of `afield.attach`, and `dempster_shafer` reads its variance; the other scores
see the network's own logits. Every score has its published or default options: none was chosen on OOD data here, but
the two networks are those on which the defaults of afield were chosen (docs/defaults.md). Hidden vectors are kept in
the temporary folder, so a second call takes seconds.

A new task is one line in `SOURCES`: a function that returns a `Source`.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import afield
from afield.backbones import ResNetCIFAR
from afield.model.saving import write_file
from afield.prediction.distance_scores import make_all
from afield.prediction.metrics import auroc
from afield.prediction.prediction import Prediction
from afield.prediction.scores import SCORES
from afield.tasks.image_tensors import noise
from bench.attach import SETS, hidden_of
from bench.defaults import ROOT, fill, markdown

RECORD, PAGE = ROOT / "results" / "detectors.json", ROOT / "docs" / "results.md"
NEAR, FAR = ("cifar100",), ("svhn", "mnist", "noise")
NEEDS_OOD_DATA: frozenset[str] = frozenset()  # scores whose options were chosen on OOD data; published ones are not
TITLES = {"resnet56": "ResNet-56", "resnet56_b": "second ResNet-56"}
OF_B = {"projection": True, "mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}


@dataclass(frozen=True)
class Source:
    """What scores get to see of one task.

    train, labels  predictions with hidden vectors of training data, and their classes: for fitted scores
    test           in-domain predictions
    near, far      OOD predictions by the name of their set
    output         the dense layer over the hidden vectors, or None
    """

    train: Prediction
    labels: Tensor
    test: Prediction
    near: Mapping[str, Prediction]
    far: Mapping[str, Prediction]
    output: nn.Linear | None


def load_net(weights: str, **options: Any) -> tuple[ResNetCIFAR, Path]:
    """A CIFAR-10 ResNet-56 of the data folder, and the file of its weights."""
    file = Path(os.environ["AFIELD_DATA"]) / "weights" / f"{weights}.safetensors"
    net = ResNetCIFAR(56, **options)
    net.load_state_dict({name.replace("fc.", "linear."): tensor for name, tensor in load_file(file).items()})
    net.eval().to(memory_format=torch.channels_last)
    return net, file


def cifar10(weights: str, **options: Any) -> Source:
    """A CIFAR-10 ResNet-56 of the data folder."""
    net, file = load_net(weights, **options)
    hidden = cached(file, lambda: {name: hidden_of(net, x) for name, x in images().items()})
    labels, test = (load(SETS[name])[1].long() for name in ("train", "test"))
    torch.manual_seed(0)
    model = afield.attach(net.linear)
    afield.fit_posterior(model, list(zip(hidden["train"].split(500), labels.split(500), strict=True)))
    afield.calibrate(model, [(hidden["test"][::2], test[::2])])
    prediction = {name: _dense(net.linear, h, model.predict(h)) for name, h in hidden.items()}
    near, far = ({name: prediction[name] for name in names} for names in (NEAR, FAR))
    return Source(prediction["train"], labels, prediction["test"][1::2], near, far, net.linear)


SOURCES: dict[str, Callable[[], Source]] = {
    "resnet56": lambda: cifar10("cifar10_resnet56"),
    "resnet56_b": lambda: cifar10("cifar10_resnet56_b", **OF_B),
}


def main() -> None:
    tasks = {name: compare(make()) for name, make in SOURCES.items()}
    versions = {"afield": afield.__version__, "torch": torch.__version__}
    record = {"command": "python -m bench.detectors", "versions": versions, "tasks": tasks}
    write_file(RECORD, (json.dumps(record, indent=1) + "\n").encode())
    for name, text in tables().items():
        fill(PAGE, name, text)


def compare(source: Source) -> dict[str, dict[str, Any]]:
    """By score: AUROC on every OOD set, near and far on average, and the seconds of fitting and of all scores."""
    train, rows = source.train, {}
    num_features, num_classes = train.features.shape[1], train.logits.shape[1]
    functions: dict[str, Any] = {name: (lambda: None, s, s.applies) for name, s in SCORES.items()}
    for name, score in make_all(num_features, num_classes, output=source.output).items():
        fit = lambda score=score: score.update(train.features, source.labels, train.logits)  # noqa: E731
        functions[name] = (fit, score.score, score.applies)
    for name, (fit, score, applies) in functions.items():
        begin = time.perf_counter()
        fit()
        between = time.perf_counter()
        sets = {"test": source.test, **source.near, **source.far}
        if not all(map(applies, sets.values())):
            continue
        values = {of: score(prediction) for of, prediction in sets.items()}
        row = {f"auroc/{of}": round(auroc(values["test"], v), 4) for of, v in values.items() if of != "test"}
        means = {kind: fmean(row[f"auroc/{of}"] for of in getattr(source, kind)) for kind in ("near", "far")}
        seconds = {"fit_seconds": between - begin, "score_seconds": time.perf_counter() - between}
        row |= {key: round(value, 4) for key, value in (means | seconds).items()}
        rows[name] = row | {"needs_ood_data": name in NEEDS_OOD_DATA}
    return rows


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the record as it is."""
    tasks = json.loads(RECORD.read_text(encoding="utf-8"))["tasks"]
    kinds = [(task, kind) for task in tasks for kind in ("near", "far")]
    rows = [["score", "needs OOD data for tuning", *[f"{TITLES[task]}, {kind}" for task, kind in kinds]]]
    for name in dict.fromkeys(name for of_task in tasks.values() for name in of_task):
        cells = [tasks[task].get(name) for task in tasks]
        tuned = any(cell["needs_ood_data"] for cell in cells if cell)
        values = [f"{tasks[task][name][kind]:.3f}" if name in tasks[task] else "" for task, kind in kinds]
        rows.append([f"`{name}`", "yes" if tuned else "no", *values])
    return {"detectors": markdown(rows, left=2)}


def images() -> dict[str, Tensor]:
    """Images (N, 3, 32, 32) in bytes by set; digits stand on black, the same in all channels."""
    images = {name: load(file)[0].permute(0, 3, 1, 2) for name, file in SETS.items()}
    digits = nn.functional.pad(load("mnist_test10k")[0][:2500], (2, 2, 2, 2))
    return images | {"mnist": digits[:, None].expand(-1, 3, -1, -1), "noise": noise(2500, (3, 32, 32), 0).tensors[0]}


def load(name: str) -> tuple[Tensor, Tensor]:
    with np.load(Path(os.environ["AFIELD_DATA"]) / "images" / f"{name}.npz") as data:
        return torch.from_numpy(data["x"]), torch.from_numpy(data["y"])


def cached(weights: Path, make: Callable[[], dict[str, Tensor]], *, sets: Any = (SETS, NEAR, FAR)) -> dict[str, Tensor]:
    """Hidden vectors by set, made once for these weights and these sets."""
    key = hashlib.blake2b(weights.read_bytes() + repr(sets).encode(), digest_size=8).hexdigest()
    file = Path(tempfile.gettempdir()) / "afield-detectors" / f"{weights.stem}-{key}.safetensors"
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        save_file({name: h.contiguous() for name, h in make().items()}, file)
    return load_file(file)


@torch.no_grad()
def _dense(linear: nn.Linear, h: Tensor, attached: Prediction) -> Prediction:
    """The network's own prediction, with the variance and the joined score of the attached model."""
    logits = linear(h)
    return Prediction(logits, attached.variance, logits.softmax(1), features=h, joined=attached.joined)


if __name__ == "__main__":
    main()
