"""The shared posterior: fitting and predicting against bare BLAS and LAPACK calls, peers, and N."""

import math
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import afield
from bench.speed.measure import Metrics, compared, measure, peak_memory, peer

EXAMPLES, HIDDEN, FEATURES, CLASSES, BATCH = 10_000, 640, 1024, 10, 1000


def head_alone(
    hidden: int = HIDDEN, classes: int = CLASSES, features: int = FEATURES, **options: object
) -> afield.SNGP:
    """A converted network whose hidden vectors are its inputs; one set of features, as bare calls and peers have."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Identity(), nn.Linear(hidden, classes))
    given = {"num_random_features": features, "length_scale": math.sqrt(hidden), "variance_features": "same"}
    model = afield.sngp(net, **{**given, **options}).eval()
    with torch.no_grad():
        model.head.weight.normal_()
    return model


def data(examples: int = EXAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(examples, HIDDEN, generator=generator), torch.arange(examples) % CLASSES


def loader(x: Tensor, y: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(x, y), BATCH)


def bare_features(model: afield.SNGP, x: Tensor) -> Tensor:
    features = model.head.random_features
    phase = torch.addmm(features.phase, x, features.weight.T, alpha=1 / float(features.length_scale))
    return phase.cos_().mul_(math.sqrt(2 / FEATURES))


def bare_fit(model: afield.SNGP, x: Tensor) -> Tensor:
    """Features, their products in float64, a factorisation and its inverse; nothing else."""
    gram = torch.eye(FEATURES, dtype=torch.float64)
    for part in x.split(BATCH):
        phi = bare_features(model, part).double()
        gram.addmm_(phi.T, phi)
    lower = torch.linalg.cholesky(gram)
    return torch.linalg.solve_triangular(lower, torch.eye(FEATURES, dtype=torch.float64), upper=False).float()


@measure("fit", "fit_posterior, 10k x 640 -> 1024 features, K = 10 / bare BLAS and LAPACK calls", 1.15)
def fit() -> Metrics:
    model, (x, y) = head_alone(), data()
    batches = [(part, target) for part, target in zip(x.split(BATCH), y.split(BATCH), strict=True)]
    with torch.no_grad():
        return compared(lambda: afield.fit_posterior(model, batches), lambda: bare_fit(model, x), pairs=15)


def laplace(structure: str) -> Metrics:
    """laplace-torch on the dense last layer of the same hidden vectors."""
    Laplace = peer("laplace").Laplace
    model, (x, y) = head_alone(), data()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Identity(), nn.Linear(HIDDEN, CLASSES))

    def theirs() -> None:
        posterior = Laplace(net, "classification", subset_of_weights="last_layer", hessian_structure=structure)
        posterior.fit(loader(x, y))

    return compared(lambda: afield.fit_posterior(model, loader(x, y)), theirs, pairs=5)


@measure("fit-laplace-kron", "fit_posterior / laplace-torch, last layer, KFAC", 1.0)
def fit_laplace_kron() -> Metrics:
    return laplace("kron")


@measure("fit-laplace-diag", "fit_posterior / laplace-torch, last layer, diagonal", 1.0)
def fit_laplace_diag() -> Metrics:
    return laplace("diag")


@measure("fit-svgp", "fit_posterior / one epoch of gpytorch's SVGP (512 inducing points)", 1.0)
def fit_svgp() -> Metrics:
    gpytorch = peer("gpytorch")
    model, (x, y) = head_alone(), data()

    class Svgp(gpytorch.models.ApproximateGP):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            many = torch.Size([CLASSES])
            distribution = gpytorch.variational.CholeskyVariationalDistribution(512, batch_shape=many)
            strategy = gpytorch.variational.IndependentMultitaskVariationalStrategy(
                gpytorch.variational.VariationalStrategy(self, x[:512].repeat(CLASSES, 1, 1), distribution),
                num_tasks=CLASSES,
            )
            super().__init__(strategy)
            self.mean_module = gpytorch.means.ZeroMean(batch_shape=many)
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(batch_shape=many))

        def forward(self, inputs: Tensor) -> object:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(inputs), self.covar_module(inputs))

    process = Svgp()
    likelihood = gpytorch.likelihoods.SoftmaxLikelihood(num_classes=CLASSES, mixing_weights=False)
    bound = gpytorch.mlls.VariationalELBO(likelihood, process, num_data=EXAMPLES)
    optimizer = torch.optim.Adam(process.parameters(), 1e-2)

    def epoch() -> None:
        for part, target in loader(x, y):
            optimizer.zero_grad()
            (-bound(process(part), target)).backward()
            optimizer.step()

    return compared(lambda: afield.fit_posterior(model, loader(x, y)), epoch, pairs=3)


@measure("predict", "predict 10k inputs, shared covariance / bare torch calls", 1.10)
def predict() -> Metrics:
    model, (x, y) = head_alone(), data()
    afield.fit_posterior(model, [(x, y)])
    head = model.head
    head.set_reference(model.predict(x[:1000]).score())
    weight, root, reference = head.weight.detach(), head.precision.root[0], head.reference

    @torch.no_grad()
    def bare() -> tuple[Tensor, ...]:
        phi = bare_features(model, x)
        logits, variance = phi @ weight.T, (phi @ root.T).square_().sum(-1)
        adjusted = logits / (1 + math.pi / 8 * variance[:, None]).sqrt_()
        probs = adjusted.softmax(-1)
        score = CLASSES / (CLASSES + (adjusted - adjusted.mean(-1, keepdim=True)).logsumexp(-1).exp())
        above = len(reference) - torch.searchsorted(reference, score.double())
        return logits, variance, probs, (1 + above) / (len(reference) + 1)

    return compared(lambda: model.predict(x), bare, pairs=15)


class Stream:
    """Batches that are made when they are asked for: memory does not grow with their number.

    They can be asked for twice: hidden vectors of more than a gigabyte are not kept between the two looks at them.
    """

    def __init__(self, examples: int) -> None:
        self.examples = examples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = data(4096)
        for start in range(0, self.examples, 4096):
            rows = min(4096, self.examples - start)
            yield x[:rows] + 1e-6 * start, y[:rows]


def seconds_and_memory(examples: int) -> tuple[float, float]:
    """In this process: seconds of fit_posterior, and the most memory that was ever in use, in megabytes."""
    model = head_alone()
    begin = time.perf_counter()
    assert afield.fit_posterior(model, Stream(examples)) == examples
    return time.perf_counter() - begin, peak_memory()


@measure("stream", "seconds an example, N = 10^6 / N = 10^5, streamed through fit_posterior", 1.10)
def linear_in_examples() -> Metrics:
    """Each in a process of its own, whose memory was never used for anything else; three times, in turn."""
    runs: dict[int, list[list[float]]] = {10_000: [], 100_000: [], 1_000_000: []}
    for _ in range(3):
        for examples, results in runs.items():
            call = f"from bench.speed.posterior import *; print(*seconds_and_memory({examples}))"
            out = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True).stdout
            results.append([float(word) for word in out.split()])
    medians = {
        examples: [median(column) for column in zip(*results, strict=True)] for examples, results in runs.items()
    }
    each = {examples: seconds / examples for examples, (seconds, _) in medians.items()}
    return {
        "ratio": each[1_000_000] / each[100_000],
        "ratio_to_10k": each[1_000_000] / each[10_000],
        "seconds": medians[1_000_000][0],
        "memory_mb_10k": medians[10_000][1],
        "memory_mb_100k": medians[100_000][1],
        "memory_mb_1m": medians[1_000_000][1],
    }


@measure("calibrate", "calibrate, 10,000 rows, 1,000 classes: seconds", 3.0, metric="seconds")
def calibrate() -> Metrics:
    torch.manual_seed(0)
    net = nn.Linear(64, 1000)
    with torch.no_grad():
        net.weight.mul_(6)
    model, x = afield.attach(net), torch.randn(10_000, 64)
    target = torch.multinomial((0.4 * net(x)).softmax(-1).detach(), 1).squeeze(1)  # the network is overconfident
    afield.fit_posterior(model, [torch.randn(2000, 64)])
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        afield.calibrate(model, [(x, target)])
        times.append(time.perf_counter() - begin)
    return {"seconds": median(times)}
