"""A trained network that nobody touches: CIFAR-10 ResNet-56, ours against what people do today with the same features.

    AFIELD_DATA=... python -m bench.attach        about 10 minutes on two cores; writes results/attach-cifar10.json,
                                                  fills docs/results.md

20,000 training images fit the posterior, 2,500 held-out test images calibrate, 2,500 others test; SVHN, CIFAR-100 and
Gaussian noise are OOD. The first split is `torch.randperm(5000, generator=manual_seed(0))`; ten splits say how much of
a difference is luck. 1,000 test images of the first split are evaluated under 15 corruptions x 5 severities.

softmax, temperature        the network's own probabilities, and with one temperature from the held-out images
energy                      of the temperature-scaled logits
mahalanobis, relative_mahalanobis, knn      `afield.distance_scores`, fitted to the training images: no probabilities
attach, fit_head            ours: the dense layer kept, or a Gaussian process in its place
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

import afield
from afield.backbones import ResNetCIFAR
from afield.model.progress import track
from afield.model.saving import write_file
from afield.prediction.distance_scores import FITTED
from afield.prediction.metrics import METRICS, auroc
from afield.prediction.prediction import Prediction
from afield.tasks.corruptions import CorruptedSets
from afield.tasks.image_tensors import noise
from bench.defaults import ROOT, fill, markdown

RECORD, PAGE = ROOT / "results" / "attach-cifar10.json", ROOT / "docs" / "results.md"
SETS = {
    "train": "cifar10_train20k",
    "test": "cifar10_test_dev5k",
    "svhn": "svhn_dev2500",
    "cifar100": "cifar100_ood_dev3k",
}
OOD = ("svhn", "cifar100", "noise")
OURS = ("attach", "fit_head")
ROWS = {
    "softmax": "the network itself",
    "temperature": "temperature scaling",
    "energy": "energy",
    "mahalanobis": "Mahalanobis",
    "relative_mahalanobis": "relative Mahalanobis",
    "knn": "k nearest neighbours",
    "fit_head": "`afield.fit_head`, a Gaussian process in its place",
    "attach": "`afield.attach`",
}
COLUMNS = {"accuracy": "accuracy", "ece": "ECE", "nll": "NLL"}
COLUMNS |= {"auroc/svhn": "AUROC SVHN", "auroc/cifar100": "AUROC CIFAR-100"}
CORRUPTED = 1000
Rows = dict[str, dict[str, float]]


def main(splits: int = 10) -> None:
    folder = Path(os.environ["AFIELD_DATA"])
    net = ResNetCIFAR(56)
    net.load_state_dict(load_file(folder / "weights" / "cifar10_resnet56.safetensors"))
    net.eval().to(memory_format=torch.channels_last)
    bytes_of, labels = {}, {}
    for name, file in SETS.items():
        with np.load(folder / "images" / f"{file}.npz") as data:
            bytes_of[name], labels[name] = data["x"], torch.from_numpy(data["y"]).long()
    started = time.perf_counter()
    hidden = {name: hidden_of(net, torch.from_numpy(x).permute(0, 3, 1, 2)) for name, x in bytes_of.items()}
    hidden["noise"] = hidden_of(net, noise(2500, (3, 32, 32), seed=0).tensors[0])
    first = torch.randperm(5000, generator=torch.Generator().manual_seed(0))[2500 : 2500 + CORRUPTED].numpy()
    corrupted = CorruptedSets(bytes_of["test"][first], labels["test"][first].numpy())
    shifted = {name: hidden_of(net, corrupted[name].tensors[0]) for name in track(corrupted, "corrupted sets")}
    seen = time.perf_counter()
    models, seconds = fitted(net.linear, batches(hidden["train"], labels["train"]))
    scores = {name: FITTED[name](64, 10) for name in ROWS if name in FITTED}
    for score in scores.values():
        score.update(hidden["train"], labels["train"])
    records, y = [], labels["test"]
    for split in range(splits):
        order = torch.randperm(5000, generator=torch.Generator().manual_seed(split))
        held, test = order[:2500], order[2500:]
        predicts = predictors(models, net.linear, hidden["test"][held], y[held])
        rows: Rows = {name: on_classes(predict(hidden["test"][test]), y[test]) for name, predict in predicts.items()}
        for name, predict in predicts.items():
            rows[name] |= on_ood(predict, hidden, test, None if name in OURS else "max_probability")
            if split == 0:
                under = [on_classes(predict(h), y[first]) for h in shifted.values()]
                rows[name] |= {
                    f"{metric}/corrupted": round(fmean(each[metric] for each in under), 4) for metric in under[0]
                }
        rows["energy"] = on_ood(predicts["temperature"], hidden, test, "energy")
        rows |= {name: on_ood(as_features, hidden, test, score.score) for name, score in scores.items()}
        same = bool((predicts["attach"](hidden["test"]).labels == net.linear(hidden["test"]).argmax(1)).all())
        records.append({"split": split, "same_argmax": same} | rows)
    record = {
        "command": "python -m bench.attach",
        "versions": {"afield": afield.__version__, "torch": torch.__version__},
        "seconds": {"hidden vectors, all sets": round(seen - started, 1)} | seconds,
        "mean": summary(records, mean),
        "spread": summary(records, stdev),
        "splits": records,
    }
    write_file(RECORD, (json.dumps(record, indent=1) + "\n").encode())
    print(json.dumps({k: record[k] for k in ("seconds", "mean")} | {"first": records[0]}, indent=1))
    for name, text in tables().items():
        fill(PAGE, name, text)


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the record as it is."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    rows = [["", *COLUMNS.values()]]
    for row, label in ROWS.items():
        of, spread = record["mean"][row], record["spread"][row]
        rows.append([label, *[f"{of[key]:.3f} ± {spread[key]:.3f}" if key in of else "" for key in COLUMNS]])
    return {"attach": markdown(rows, left=1)}


def hidden_of(net: nn.Module, images: Tensor) -> Tensor:
    """The 64 hidden units (N, 64) of images in bytes."""
    model = afield.attach(net)
    with torch.no_grad():
        parts = [(x.float() / 255).contiguous(memory_format=torch.channels_last) for x in images.split(500)]
        return torch.cat([model.hidden(x) for x in parts])


def fitted(linear: nn.Linear, train: list[tuple[Tensor, Tensor]]) -> tuple[dict[str, afield.SNGP], dict[str, float]]:
    """Our models on hidden vectors, with their posteriors, and the seconds that they took."""
    torch.manual_seed(0)
    begin = time.perf_counter()
    models = {"attach": afield.attach(linear)}
    afield.fit_posterior(models["attach"], train)
    between = time.perf_counter()
    models["fit_head"] = afield.sngp(linear, None, freeze=True, geometry="standardized")
    afield.fit_head(models["fit_head"], train)
    afield.fit_posterior(models["fit_head"], train)
    end = time.perf_counter()
    return models, {"attach, on hidden vectors": round(between - begin, 1), "fit_head": round(end - between, 1)}


def predictors(
    models: Mapping[str, afield.SNGP], linear: nn.Linear, held: Tensor, y: Tensor
) -> dict[str, Callable[[Tensor], Prediction]]:
    """Hidden vectors -> predictions, by row of the table, calibrated on the held-out images."""
    for model in models.values():
        afield.calibrate(model, batches(held, y))
    with torch.no_grad():
        scales = {"softmax": 1.0, "temperature": temperature(linear(held), y)}
    dense = {name: (lambda h, s=s: softmax(linear, h, s)) for name, s in scales.items()}
    return dense | {name: model.predict for name, model in models.items()}


@torch.no_grad()
def softmax(linear: nn.Linear, h: Tensor, scale: float) -> Prediction:
    logits = scale * linear(h)
    return Prediction(logits, probs=logits.softmax(1))


def temperature(logits: Tensor, y: Tensor) -> float:
    """The factor of the logits, 1 / temperature, that has the least log loss."""

    def loss(log_scale: float) -> float:
        return float(nn.functional.cross_entropy(math.exp(log_scale) * logits.double(), y))

    reach = math.log(1000)
    return math.exp(minimize_scalar(loss, bounds=(-reach, reach), method="bounded", options={"xatol": 1e-6}).x)


def as_features(h: Tensor) -> Prediction:
    return Prediction(h, probs=h, features=h)


def on_classes(prediction: Prediction, y: Tensor) -> dict[str, float]:
    out = {name: METRICS[name](prediction, y) for name in ("accuracy", "ece", "nll")}
    if prediction.p_value is not None:
        out["false_alarms_at_0.05"] = float((~prediction.accept(0.05)).double().mean())
    return {name: round(value, 4) for name, value in out.items()}


def on_ood(
    predict: Callable[[Tensor], Prediction],
    hidden: Mapping[str, Tensor],
    test: Tensor,
    score: str | Callable[[Prediction], Tensor] | None,
) -> dict[str, float]:
    rate = score if callable(score) else lambda p: p.score(score)
    inside, out = predict(hidden["test"][test]), {}
    for name in OOD:
        outside = predict(hidden[name])
        out[f"auroc/{name}"] = round(auroc(rate(inside), rate(outside)), 4)
        if outside.p_value is not None:
            out[f"accepted/{name}"] = round(float(outside.accept(0.05).double().mean()), 4)
    return out


def batches(x: Tensor, y: Tensor, size: int = 500) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def summary(records: list[dict[str, Any]], fn: Any) -> Rows:
    """Over the splits; corrupted images belong to the first alone."""
    names = [name for name, row in records[0].items() if isinstance(row, dict)]
    return {
        name: {k: round(fn(r[name][k] for r in records), 4) for k in records[0][name] if not k.endswith("/corrupted")}
        for name in names
    }


if __name__ == "__main__":
    main()
