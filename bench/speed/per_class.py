"""One precision per class, with the probabilities of a trained network: exact, low-rank, and a thousand classes.

The network: a softmax over 1024 random features of frozen MiniLM embeddings, for the first 100 intents of CLINC with
100 sentences each, trained by L-BFGS. Its ridge is chosen so that the probabilities are as sharp as those of the
fine-tuned network, where 6% of the pairs of example and class have a weight p (1 - p) above 1e-4 and hold 90% of all
weight, 1.1 a class.
"""

import functools
import subprocess
import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import afield
from afield.errors import DataMissing
from afield.methods.frozen import fit_linear
from afield.model.diagnose import variance_error
from afield.model.evaluating import evaluating
from afield.tasks.clinc import clinc
from bench.speed.measure import Metrics, Missing, compared, measure, peak_memory, peer
from bench.speed.posterior import BATCH, FEATURES, HIDDEN, data, head_alone

CLASSES, FEW, RANK, TRAINING_RIDGE, NEW = 100, 10, 128, 2e-3, 500
MANY, MANY_RANK = 1000, 256
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Trained:
    """The network's output layer, and hidden vectors: of its training data, and new ones, in and out of scope."""

    weight: Tensor
    constant: Tensor
    train: Batches
    new: Tensor

    def model(self, rank: int | None) -> afield.SNGP:
        model = _untrained(self.train, len(self.constant), rank)
        with torch.no_grad():
            model.head.weight.copy_(self.weight)
            model.head.constant.copy_(self.constant)  # type: ignore[union-attr]
        return model


def _untrained(train: Batches, classes: int, rank: int | None) -> afield.SNGP:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Identity(), nn.Linear(train[0][0].shape[1], classes))
    options = {"num_random_features": FEATURES, "variance_features": "same", "constant": True}
    model = afield.sngp(net, **options, covariance="per_class", rank=rank).eval()
    model.head.random_features.adapt(torch.cat([h for h, _ in train])[::4])
    return model


@functools.cache
def trained(classes: int = CLASSES) -> Trained:
    """On the first intents."""
    try:
        task = clinc(0, "small")
    except (DataMissing, ImportError) as error:
        raise Missing(str(error)) from error
    backbone = task.backbone()

    def hidden(ids: Tensor) -> Tensor:
        with evaluating(backbone):
            return torch.cat([backbone(part) for part in ids.split(100)])

    (ids, y), (new, intent) = task.train.tensors, task.test.tensors  # type: ignore[attr-defined]
    oos = task.ood["oos"].tensors[0]  # type: ignore[attr-defined]
    shown = y < classes
    h, y = hidden(ids[shown]), y[shown]
    train = list(zip(h.split(BATCH), y.split(BATCH), strict=True))
    order = torch.randperm(int((intent < classes).sum()), generator=torch.Generator().manual_seed(0))[:NEW]
    fresh = torch.cat([hidden(new[intent < classes][order]), hidden(oos[::2][:NEW])])
    return train_head(train, fresh, classes)


def train_head(train: Batches, new: Tensor, classes: int, ridge: float = TRAINING_RIDGE) -> Trained:
    head, layer = _untrained(train, classes, None).head, nn.Linear(FEATURES, classes)
    with torch.no_grad():
        features = [(head.features(h), y) for h, y in train]
    fit_linear(layer, features, ridge)
    return Trained(layer.weight.detach(), layer.bias.detach(), train, new)


@torch.no_grad()
def sharpness(net: Trained) -> Metrics:
    model = net.model(None)
    p = torch.cat([model(h).softmax(-1) for h, _ in net.train])
    weight = p * (1 - p)
    large = weight > 1e-4
    return {
        "pairs_above_1e-4": float(large.double().mean()),
        "weight_in_them": float(weight[large].sum() / weight.sum()),
        "weight_a_class": float(weight.sum() / p.shape[1]),
    }


def errors(low: afield.SNGP, exact: afield.SNGP, net: Trained) -> Metrics:
    """Of the variances of new inputs; both models are fitted."""
    approximate, true = (m.predict(net.new).variance for m in (low, exact))
    assert approximate is not None
    assert true is not None
    relative = (approximate - true).abs() / true
    assert float(relative.max()) <= 0.05, f"largest relative error {float(relative.max()):.3g}"
    bound = variance_error(low, net.train, progress=False)
    return {"max_error": float(relative.max()), "mean_error": float(relative.mean()), "bound": float(bound.max())}


@functools.cache
def both(classes: int = CLASSES) -> tuple[afield.SNGP, afield.SNGP, Trained, Metrics]:
    """Low-rank and exact, fitted; the network; and how far apart they are."""
    net = trained(classes)
    low, exact = net.model(RANK), net.model(None)
    for model in (low, exact):
        afield.fit_posterior(model, net.train, progress=False)
    return low, exact, net, errors(low, exact, net) | sharpness(net)


@measure("per-class-fit", "per-class fit_posterior, K = 100, N = 10k, rank 128 / exact", 0.333)
def per_class_fit() -> Metrics:
    low, exact, net, found = both()
    works = [functools.partial(afield.fit_posterior, m, net.train, progress=False) for m in (low, exact)]
    return compared(works[0], works[1], pairs=3) | found


@measure("per-class-predict", "per-class predict 10k inputs, K = 100, rank 128 / exact", 0.333)
def per_class_predict() -> Metrics:
    low, exact, net, found = both()
    x = torch.cat([h for h, _ in net.train])
    return compared(lambda: low.predict(x), lambda: exact.predict(x), pairs=3) | found


@measure("predict-laplace", "per-class predict, K = 10: laplace-torch KFAC, last layer / rank 128", 50, at_least=True)
def predict_laplace() -> Metrics:
    """On the same random features, with the same output weights."""
    Laplace = peer("laplace").Laplace
    low, exact, net, found = both(FEW)
    layer = nn.Linear(FEATURES, FEW)
    layer.load_state_dict({"weight": net.weight, "bias": net.constant})
    posterior = Laplace(
        nn.Sequential(low.head.random_features, layer),
        "classification",
        subset_of_weights="last_layer",
        hessian_structure="kron",
    )
    posterior.fit(DataLoader(ConcatDataset([TensorDataset(*batch) for batch in net.train]), BATCH))
    x = torch.cat([h for h, _ in net.train])
    ours = {
        m: compared(lambda m=m: m.predict(x), lambda: posterior(x, link_approx="probit"), pairs=3) for m in (low, exact)
    }
    return ours[low] | {"ratio": 1 / ours[low]["ratio"], "exact_ratio": 1 / ours[exact]["ratio"]} | found


@measure("per-class-exact", "exact per-class fit and predict, K = 100, N = 10k / bare loops over the classes", 1.10)
def per_class_exact() -> Metrics:
    net = trained()
    model = net.model(None)
    x = torch.cat([h for h, _ in net.train])

    def ours() -> Tensor | None:
        afield.fit_posterior(model, net.train, progress=False)
        return model.predict(x).variance

    def bare() -> Tensor:
        return bare_predict(model, x, bare_fit(model, x))

    metrics = compared(ours, bare, pairs=3)
    found, wanted = model.predict(x[:100]).variance, bare_predict(model, x[:100], model.head.precision.root)
    torch.testing.assert_close(found, wanted)
    return metrics


@torch.no_grad()
def bare_fit(model: afield.SNGP, x: Tensor) -> Tensor:
    """The products, factorisations and inverses of every class; nothing else."""
    identity = torch.eye(FEATURES, dtype=torch.float64)
    data_terms = identity.repeat(CLASSES, 1, 1)
    for h in x.split(BATCH):
        p = model.head(h).softmax(-1).double()
        phi = model.head.features(h).double()
        for k in range(CLASSES):
            data_terms[k].addmm_((phi * (p[:, k] * (1 - p[:, k]))[:, None]).T, phi)
    root = torch.empty(CLASSES, FEATURES, FEATURES)
    for k in range(CLASSES):
        root[k] = torch.linalg.solve_triangular(torch.linalg.cholesky(data_terms[k]), identity, upper=False)
    return root


@torch.no_grad()
def bare_predict(model: afield.SNGP, x: Tensor, root: Tensor) -> Tensor:
    phi = model.head.features(x)
    return torch.stack([(phi @ one.T).square_().sum(-1) for one in root], dim=-1)


def memory() -> float:
    """In this process: the most memory that was ever in use, in MB; a thousand classes are fitted and predicted."""
    model, (x, y) = head_alone(HIDDEN, MANY, covariance="per_class", rank=MANY_RANK), data()
    batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
    assert afield.fit_posterior(model, batches, progress=False) == len(x)
    variance = model.predict(x[:BATCH]).variance
    assert variance is not None
    assert variance.shape == (BATCH, MANY)
    assert bool((variance > 0).all())
    return peak_memory()


@measure("per-class-1000", "per-class fit and predict, K = 1000, rank 256: most memory, MB", 4096, metric="memory_mb")
def per_class_1000() -> Metrics:
    call = "from bench.speed.per_class import memory; print(memory())"
    out = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True).stdout
    return {"memory_mb": float(out)}
