"""Peers on the same work: two public CIFAR-10 ResNet-56 that nobody touches, and what others make of them.

    pip install --no-deps -r bench/requirements-peers.txt
    AFIELD_DATA=... python -m bench.peers          makes results/peers.json, then fills docs/results.md

All get the hidden vectors of the same 20,000 training images. Every other test image is held out for calibration, the
rest is the test; OOD are SVHN and CIFAR-100; corrupted are 250 test images under 15 corruptions at 5 severities.
Seconds are of one thread, on hidden vectors: the network itself takes the same time for all.

laplace-torch's last-layer Laplace has its prior precision by marginal likelihood and the probit link. pytorch-ood's
scores have their defaults; they give no probabilities. Of pytorch-ood only the files of the scores are imported: its
package as a whole imports torchvision, which the scores do not need. A peer that is not installed is left out.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import sys
import time
import types
import warnings
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import afield
from afield.model.saving import write_file
from afield.prediction.metrics import METRICS, auroc
from afield.prediction.prediction import Prediction
from afield.tasks.corruptions import CorruptedSets
from bench.attach import SETS, batches, hidden_of, softmax, temperature
from bench.defaults import ROOT, fill, markdown
from bench.detector_sources import OF_B, cached, images, load, load_net

RECORD, PAGE = ROOT / "results" / "peers.json", ROOT / "docs" / "results.md"
OOD, CORRUPTED = ("svhn", "cifar100"), 250
NETS: dict[str, Callable[[], Any]] = {
    "resnet56": lambda: load_net("cifar10_resnet56"),
    "resnet56_b": lambda: load_net("cifar10_resnet56_b", **OF_B),
}
PUBLISHED = {
    "source": "Ortega, Rodriguez-Santana, Hernandez-Lobato, Fixed-Mean Gaussian Processes for Post-hoc Bayesian Deep "
    "Learning, arXiv:2412.04177 (2024), on the second ResNet-56, all training images, AUROC on SVHN by entropy",
    "rows": {
        "the network": {"auroc/svhn": 0.927, "nll": 0.252},
        "last-layer Laplace": {"auroc/svhn": 0.928, "nll": 0.204},
        "SNGP": {"auroc/svhn": 0.943, "nll": 0.222},
        "FMGP": {"auroc/svhn": 0.933, "nll": 0.183},
        "ELLA": {"auroc/svhn": 0.957, "nll": 0.191},
        "VaLLA": {"auroc/svhn": 0.958, "nll": 0.184},
        "MFVI": {"auroc/svhn": 0.964, "nll": 0.182},
    },
}
OPENOOD = {  # needs torchvision and its own images: not installed here
    "source": "OpenOOD v1.5's leaderboard (Zhang et al., arXiv:2306.09301), ResNet-18 on CIFAR-10; near is CIFAR-100 "
    "and Tiny ImageNet, far MNIST, SVHN, textures and Places365",
    "rows": {
        "maximum probability": {"near": 0.880, "far": 0.907},
        "energy": {"near": 0.876, "far": 0.912},
        "GEN": {"near": 0.882, "far": 0.914},
        "ViM": {"near": 0.887, "far": 0.935},
        "relative Mahalanobis": {"near": 0.898, "far": 0.922},
        "fDBD": {"near": 0.904, "far": 0.932},
        "kNN": {"near": 0.906, "far": 0.930},
    },
}
POST_HOC = {  # file, class and arguments (of the output layer) of pytorch-ood's scores
    "knn": ("knn", "KNN", lambda linear: (None,)),
    "vim": ("vim", "ViM", lambda linear: (None, 32, linear.weight.detach(), linear.bias.detach())),
    "mahalanobis": ("mahalanobis", "Mahalanobis", lambda linear: (None,)),
    "rmd": ("rmd", "RMD", lambda linear: (None,)),
    "nnguide": ("nnguide", "NNGuide", lambda linear: (nn.Identity(), linear)),
    "she": ("she", "SHE", lambda linear: (nn.Identity(), linear)),
}
OF_LOGITS = {"energy": ("energy", "EnergyBased"), "gen": ("gen", "GEN"), "maxlogit": ("maxlogit", "MaxLogit")}
COLUMNS = {"ece": "ECE", "nll": "NLL", "ece/corrupted": "ECE, corrupted", "nll/corrupted": "NLL, corrupted"}
COLUMNS |= {"auroc/svhn": "AUROC SVHN", "auroc/cifar100": "AUROC CIFAR-100"}
COLUMNS |= {"fit_seconds": "fitting, s", "predict_seconds": "2,500 predictions, s"}
Row = dict[str, float]


class Work:
    """What every peer gets: hidden vectors by set and labels."""

    def __init__(self, net: Any, file: Any) -> None:
        self.linear: nn.Linear = net.linear
        self.hidden = cached(file, lambda: {name: hidden_of(net, x) for name, x in images().items()})
        self.labels, self.targets = (load(SETS[name])[1].long() for name in ("train", "test"))
        shown = load(SETS["test"])[0][1::20][:CORRUPTED]
        self.corrupted_targets = self.targets[1::20][:CORRUPTED]
        sets = CorruptedSets(shown.numpy(), self.corrupted_targets.numpy())
        self.corrupted = cached(
            file,
            lambda: {name.replace("/", "-"): hidden_of(net, sets[name].tensors[0]) for name in sets},
            sets=("corrupted", CORRUPTED, list(sets)),
        )

    @property
    def train(self) -> list[tuple[Tensor, Tensor]]:
        return batches(self.hidden["train"], self.labels)

    @property
    def held_out(self) -> list[tuple[Tensor, Tensor]]:
        return batches(self.hidden["test"][::2], self.targets[::2])

    @property
    def test(self) -> Tensor:
        return self.hidden["test"][1::2]


def by_probabilities(
    work: Work, fit: Callable[[], Callable[[Tensor], Prediction]], score: str | None = "max_probability"
) -> Row:
    """The row of something that predicts; `score` None is its default one."""
    begin = time.perf_counter()
    predict = fit()
    between = time.perf_counter()
    test = predict(work.test)
    end = time.perf_counter()
    row = {name: METRICS[name](test, work.targets[1::2]) for name in ("accuracy", "ece", "nll")}
    shifted = [predict(h) for h in work.corrupted.values()]
    for name in ("ece", "nll"):
        row[f"{name}/corrupted"] = fmean(METRICS[name](p, work.corrupted_targets) for p in shifted)
    for name in OOD:
        row[f"auroc/{name}"] = auroc(test.score(score), predict(work.hidden[name]).score(score))
    return row | {"fit_seconds": between - begin, "predict_seconds": end - between}


def by_score(work: Work, fit: Callable[[], Callable[[Tensor], Tensor]]) -> Row:
    """The row of a score alone."""
    begin = time.perf_counter()
    score = fit()
    between = time.perf_counter()
    test = score(work.test)
    end = time.perf_counter()
    row = {f"auroc/{name}": auroc(test.double(), score(work.hidden[name]).double()) for name in OOD}
    return row | {"fit_seconds": between - begin, "predict_seconds": end - between}


def ours(work: Work) -> Callable[[Tensor], Prediction]:
    torch.manual_seed(0)
    model = afield.attach(work.linear)
    afield.fit_posterior(model, work.train, progress=False)
    afield.calibrate(model, work.held_out, progress=False)
    return model.predict


def scaled(work: Work, *, calibrated: bool) -> Callable[[Tensor], Prediction]:
    with torch.no_grad():
        scale = temperature(work.linear(work.hidden["test"][::2]), work.targets[::2]) if calibrated else 1.0
    return lambda h: softmax(work.linear, h, scale)


def last_layer_laplace(work: Work, structure: str) -> Callable[[Tensor], Prediction]:
    laplace = importlib.import_module("laplace")
    model = nn.Sequential(nn.Identity(), work.linear)
    found = laplace.Laplace(
        model, "classification", subset_of_weights="last_layer", hessian_structure=structure, last_layer_name="1"
    )
    data = torch.utils.data.TensorDataset(work.hidden["train"], work.labels)
    found.fit(torch.utils.data.DataLoader(data, batch_size=500))
    found.optimize_prior_precision(method="marglik")

    def predict(h: Tensor) -> Prediction:
        probs = torch.cat([found(part, link_approx="probit") for part in h.split(500)]).detach()
        return Prediction(probs.clamp_min(1e-12).log(), probs=probs)

    return predict


def post_hoc(work: Work, name: str) -> Callable[[Tensor], Tensor]:
    """A score of pytorch-ood, fitted to hidden vectors where it is to be."""
    module, kind = (POST_HOC[name][:2]) if name in POST_HOC else OF_LOGITS[name]
    make = getattr(importlib.import_module(f"pytorch_ood.detector.{module}"), kind)
    if name in OF_LOGITS:
        detector = make(None)
        return lambda h: detector.predict_logits(work.linear(h)).detach()
    detector = make(*POST_HOC[name][2](work.linear))
    detector.fit_features(work.hidden["train"], work.labels)
    return lambda h: detector.predict_features(h).detach()


def without_package(name: str = "pytorch_ood") -> bool:
    """Make the files of a package importable without running its own imports; False where it is not installed."""
    if name in sys.modules:
        return True
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return False
    root = spec.submodule_search_locations[0]
    for full, path in ((name, root), (f"{name}.detector", f"{root}/detector")):
        package = types.ModuleType(full)
        package.__path__ = [path]
        sys.modules[full] = package
    return True


def compare(work: Work) -> dict[str, Row]:
    """All rows on one network."""
    rows = {
        "the network": by_probabilities(work, lambda: scaled(work, calibrated=False)),
        "temperature scaling": by_probabilities(work, lambda: scaled(work, calibrated=True)),
    }
    if importlib.util.find_spec("laplace"):
        for structure in ("kron", "full"):
            rows[f"laplace-torch, last layer, {structure}"] = by_probabilities(
                work, lambda structure=structure: last_layer_laplace(work, structure)
            )
    if without_package():
        rows |= {f"pytorch-ood: {n}": by_score(work, lambda n=n: post_hoc(work, n)) for n in (*OF_LOGITS, *POST_HOC)}
    rows["`afield.attach`, maximum probability"] = by_probabilities(work, lambda: ours(work))
    rows["`afield.attach`, joined score"] = by_probabilities(work, lambda: ours(work), None)
    return {name: {key: round(value, 4) for key, value in row.items()} for name, row in rows.items()}


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the record as it is."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return {f"peers {name}": _table(rows) for name, rows in record["networks"].items()}


def _table(rows: Mapping[str, Row]) -> str:
    lines = [["", *COLUMNS.values()]]
    for name, row in rows.items():
        lines.append([name, *[f"{row[key]:.3f}" if key in row else "" for key in COLUMNS]])
    return markdown(lines, left=1)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the peers
    networks = {name: compare(Work(*make())) for name, make in NETS.items()}
    versions = {"afield": afield.__version__, "torch": torch.__version__}
    for name in ("laplace-torch", "pytorch-ood"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    record = {"command": "python -m bench.peers", "versions": versions, "networks": networks}
    record |= {"published": PUBLISHED, "openood": OPENOOD}
    write_file(RECORD, (json.dumps(record, indent=1) + "\n").encode())
    for name, text in tables().items():
        fill(PAGE, name, text)


if __name__ == "__main__":
    main()
