"""A trained network that nobody touches: CIFAR-10 ResNet-56, `afield.attach`, against what people do today.

    AFIELD_DATA=... python -m bench.attach        writes results/attach-cifar10.json

20,000 training images fit the posterior, 2,500 held-out test images calibrate, 2,500 others test; SVHN and CIFAR-100
are OOD. The first split is `torch.randperm(5000, generator=manual_seed(0))`; figures over ten splits say how much of a
difference is luck. Baselines, on the same features: the network's own softmax, and temperature scaling.
"""

import json
import os
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import afield
from afield.backbones import ResNetCIFAR
from afield.calibrate import Objective, _minimize
from afield.metrics import METRICS, auroc
from afield.predictive import Prediction

RECORD = Path(__file__).parents[1] / "results" / "attach-cifar10.json"
SETS = {
    "train": "cifar10_train20k",
    "test": "cifar10_test_dev5k",
    "svhn": "svhn_dev2500",
    "cifar100": "cifar100_ood_dev3k",
}


def main(splits: int = 10) -> None:
    folder = Path(os.environ["AFIELD_DATA"])
    net = ResNetCIFAR(56)
    net.load_state_dict(load_file(folder / "weights" / "cifar10_resnet56.safetensors"))
    net.eval().to(memory_format=torch.channels_last)
    images, labels = {}, {}
    for name, file in SETS.items():
        with np.load(folder / "images" / f"{file}.npz") as data:
            images[name] = torch.from_numpy(data["x"]).permute(0, 3, 1, 2).float() / 255
            labels[name] = torch.from_numpy(data["y"]).long()
    torch.manual_seed(0)
    started = time.perf_counter()
    model = afield.attach(net)
    afield.fit_posterior(model, batches(images["train"], labels["train"]))
    fitted = time.perf_counter()
    records = []
    hidden = {
        name: torch.cat([model.hidden(x).detach() for x in images[name].split(500)]) for name in SETS if name != "train"
    }
    logits = {name: net.linear(h).detach() for name, h in hidden.items()}
    for split in range(splits):
        order = torch.randperm(5000, generator=torch.Generator().manual_seed(split))
        held, test = order[:2500], order[2500:]
        y = labels["test"]
        begin = time.perf_counter()
        on_hidden = head_only(model)
        afield.calibrate(on_hidden, batches(hidden["test"][held], y[held]))
        ours = {name: on_hidden.predict(h) for name, h in hidden.items()}
        seconds = time.perf_counter() - begin
        s = temperature(logits["test"][held], y[held])
        rows = {"attach": figures(ours, test, y, None)}
        for name, scale in (("softmax", 1.0), ("temperature", s)):
            dense = {k: Prediction(scale * z, probs=torch.softmax(scale * z, 1)) for k, z in logits.items()}
            rows[name] = figures(dense, test, y, "max_probability")
        same = bool((ours["test"].labels == logits["test"].argmax(1)).all())
        records.append({"split": split, "calibrate_seconds": round(seconds, 2), "same_argmax": same} | rows)
    record = {
        "command": "python -m bench.attach",
        "versions": {"afield": afield.__version__, "torch": torch.__version__},
        "fit_posterior_seconds": round(fitted - started, 1),
        "splits": records,
        "mean": summary(records, mean),
        "spread": summary(records, stdev),
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: record[k] for k in ("fit_posterior_seconds", "mean")} | {"first": records[0]}, indent=1))


def batches(x: Tensor, y: Tensor, size: int = 500) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def head_only(model: afield.SNGP) -> afield.SNGP:
    """The same head on hidden vectors: the network runs once, not once a split."""
    copy = afield.attach(nn.Linear(64, 10))
    copy.head.load_state_dict(model.head.state_dict())
    return copy


def temperature(logits: Tensor, y: Tensor) -> float:
    def loss(s: float, _: float) -> Tensor:
        return nn.functional.cross_entropy(s * logits.double(), y, reduction="none")

    return _minimize(Objective(loss, np.zeros(1), 1.0), 0.0)


def figures(p: dict[str, Prediction], test: Tensor, y: Tensor, score: str | None) -> dict[str, float]:
    inside = p["test"][test]
    out = {name: METRICS[name](inside, y[test]) for name in ("accuracy", "ece", "nll")}
    for name in ("svhn", "cifar100"):
        out[f"auroc/{name}"] = auroc(inside.score(score), p[name].score(score))
        if p[name].p_value is not None:
            out[f"accepted/{name}"] = float(p[name].accept(0.05).double().mean())
    if inside.p_value is not None:
        out["false_alarms_at_0.05"] = float((~inside.accept(0.05)).double().mean())
    return {name: round(value, 4) for name, value in out.items()}


def summary(records: list[dict[str, Any]], fn: Any) -> dict[str, dict[str, float]]:
    return {
        method: {k: round(fn(r[method][k] for r in records), 4) for k in records[0][method]}
        for method in ("softmax", "temperature", "attach")
    }


if __name__ == "__main__":
    main()
