"""How many random features a pixel needs: `python -m bench.pixel_features` writes results/pixel-features.json.

Networks and foreign objects are those of `bench.pixel_sources`, none of which is in a table of results: a kind of
object is left out of training and shown afterwards. To the same trained `dnn` a variance is attached with each number
of features, three draws of each; `sngp` is trained anew with each. Log loss of test pixels, and the AUROC of foreign
ones (`kinds`, `patches`) by the entropy, on which p-values of pixels rest, and by the variance and the joined score.
"""

import argparse
import json
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

import torch

import afield
from afield.backbones.unet import UNet
from afield.experiment.training import batches, fit
from afield.methods import METHODS
from afield.model.saving import write_file
from afield.model.sngp_model import SNGP
from afield.prediction.metrics import METRICS, auroc
from afield.tasks import shapes
from afield.tasks.task import Task
from bench.defaults import ROOT
from bench.pixel_sources import Size, task_without

RECORD = ROOT / "results" / "pixel-features.json"
NUMBERS, DRAWS = (32, 64, 128, 256), 3
SIZE = Size(400, 150, 80, 12)
SCORES = ("entropy", "variance", "joined")
RUNS = list(product((("attach", 8), ("attach", 32), ("sngp", 8)), ("square", "cross")))
Foreign = dict[str, tuple[torch.Tensor, torch.Tensor]]


def measure(kind: str, width: int, method: str) -> dict[str, dict[str, float]]:
    """Metrics by number of features."""
    task, ood = task_without([k.name for k in shapes.KNOWN].index(kind), "dnn" if method == "attach" else method, SIZE)
    task = replace(task, backbone=partial(UNet, width=width))
    if method != "attach":
        models = {n: fit(task, METHODS[method], seed=0, num_random_features=n) for n in NUMBERS}
        return {str(n): evaluate(model, task, ood) for n, model in models.items() if isinstance(model, SNGP)}
    net, found = fit(task, METHODS["dnn"], seed=0), {}
    for number in NUMBERS:
        drawn = []
        for seed in range(DRAWS):
            model = afield.attach(net, num_random_features=number, generator=torch.Generator().manual_seed(seed))
            afield.fit_posterior(model, batches(task.train), progress=False)
            afield.calibrate(model, batches(task.val), score="joined", progress=False)
            drawn.append(evaluate(model, task, ood))
        found[str(number)] = {name: mean(one[name] for one in drawn) for name in drawn[0]}
    return found


def evaluate(model: SNGP, task: Task, ood: Foreign) -> dict[str, float]:
    x, y = task.test.tensors
    inside = model.predict(x).rows()
    found = {"nll": METRICS["nll"](inside, y.flatten())}
    for name, (pictures, mask) in ood.items():
        p = model.predict(pictures, joined=True)
        for score in SCORES:
            values = p.score(score)
            found[f"{score}/{name}"] = auroc(values[~mask], values[mask])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pixel_features", description=__doc__)
    parser.parse_args()
    for (method, width), kind in RUNS:
        record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
        name = f"{method}-{width}"
        if kind in record.get(name, {}):
            continue
        row = json.loads(json.dumps(measure(kind, width, method)), parse_float=lambda text: float(f"{float(text):.4g}"))
        record.setdefault(name, {})[kind] = row
        record["settings"] = {"draws": DRAWS, "command": "python -m bench.pixel_features"}
        write_file(RECORD, (json.dumps(record, indent=1) + "\n").encode())
        print(name, kind, row, flush=True)


if __name__ == "__main__":
    main()
