"""attach on a real network: the CIFAR-10 ResNet-56 of the data folder, with default settings, against its targets.

One split, as in the documentation: 20k training images for the posterior, half of 5k test images for calibration and
half for the test. Run with `-s` to see the metrics.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from torch import Tensor

import afield
from afield.backbones.resnet_cifar import ResNetCIFAR
from tests.conftest import data_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # minutes on two idle cores, many more on busy ones
BATCH = 250
SECONDS = 120
OOD = {"svhn": "images/svhn_dev2500.npz", "cifar100": "images/cifar100_ood_dev3k.npz"}


def images(name: str) -> tuple[Tensor, Tensor]:
    with np.load(data_file(name)) as data:
        x = torch.from_numpy(data["x"]).permute(0, 3, 1, 2).contiguous()
        return x, torch.from_numpy(data["y"]).long()


def batches(x: Tensor, y: Tensor | None = None) -> list:
    """Batches of images in [0, 1] (from bytes) or of hidden vectors (as they are)."""

    def ready(part: Tensor) -> Tensor:
        return (part.float() / 255).contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part

    if y is None:
        return [ready(part) for part in x.split(BATCH)]
    return [(ready(part), target) for part, target in zip(x.split(BATCH), y.split(BATCH), strict=True)]


def ece(probs: Tensor, target: Tensor, bins: int = 15) -> float:
    confidence, label = probs.double().max(1)
    which = (confidence * bins).ceil().long().clamp(1, bins) - 1
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, confidence - (label == target).double())
    return float(gaps.abs().sum() / len(target))


def auroc(inside: Tensor, outside: Tensor) -> float:
    truth = np.r_[np.zeros(len(inside)), np.ones(len(outside))]
    return float(roc_auc_score(truth, torch.cat([inside, outside]).double().numpy()))


def inverse_temperature(logits: Tensor, target: Tensor) -> float:
    scales = torch.linspace(0.2, 2, 361).tolist()
    return min(scales, key=lambda scale: float(F.cross_entropy(scale * logits, target)))


def predict(model: afield.SNGP, x: Tensor) -> afield.Prediction:
    return afield.Prediction.cat([model.predict(part) for part in batches(x)])


@dataclass(frozen=True)
class Run:
    """The attached network, fitted and calibrated from images: what it says, and how long all of it took."""

    net: ResNetCIFAR
    train_hidden: Tensor
    train_target: Tensor
    test: afield.Prediction
    test_images: Tensor
    test_target: Tensor
    scaled: Tensor  # its probabilities after temperature scaling
    ood: dict[str, afield.Prediction]
    seconds: float
    busy: float  # the machine's load before

    def of_hidden(self, **options: object) -> afield.SNGP:
        """The same network from its hidden vectors on, attached anew and fitted: the same model in a second."""
        torch.manual_seed(0)
        model = afield.attach(self.net.linear, **options)
        afield.fit_posterior(model, batches(self.train_hidden, self.train_target))
        return model


@pytest.fixture(scope="module")
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run(two_threads: None) -> Run:
    net = ResNetCIFAR(56)
    net.load_state_dict(load_file(data_file("weights/cifar10_resnet56.safetensors")))
    net.eval().to(memory_format=torch.channels_last)
    x_train, y_train = images("images/cifar10_train20k.npz")
    x, y = images("images/cifar10_test_dev5k.npz")
    ood = {name: images(file)[0] for name, file in OOD.items()}
    first, second = torch.randperm(len(y), generator=torch.Generator().manual_seed(0)).split(2500)

    busy, started = os.getloadavg()[0], time.perf_counter()
    torch.manual_seed(0)
    model = afield.attach(net)
    hidden: list[Tensor] = []

    def keep(_: torch.nn.Module, args: tuple[Tensor]) -> None:
        if not hidden or not torch.equal(hidden[-1], args[0]):  # the first batch comes twice: its output is compared
            hidden.append(args[0])

    with model.head.register_forward_pre_hook(keep):
        assert afield.fit_posterior(model, batches(x_train, y_train)) == len(y_train)
    afield.calibrate(model, batches(x[first], y[first]))
    test = predict(model, x[second])
    far = {name: predict(model, part) for name, part in ood.items()}
    seconds = time.perf_counter() - started
    held_out = net.linear(predict(model, x[first]).features).detach()
    return Run(
        net=net,
        train_hidden=torch.cat(hidden),
        train_target=y_train,
        test=test,
        test_images=x[second],
        test_target=y[second],
        scaled=(net.linear(test.features).detach() * inverse_temperature(held_out, y[first])).softmax(1),
        ood=far,
        seconds=seconds,
        busy=busy,
    )


def test_calibration_matches_temperature_scaling_and_out_of_domain_images_stand_out(run):
    assert run.test.probs is not None
    metrics = {
        "ECE": ece(run.test.probs, run.test_target),
        "NLL": float(F.nll_loss(run.test.probs.log(), run.test_target)),
        **{name: auroc(run.test.score(), far.score()) for name, far in run.ood.items()},
    }
    print({name: round(value, 4) for name, value in metrics.items()}, f"{run.seconds:.0f} s, load {run.busy:.1f}")
    scaled = {"ECE": ece(run.scaled, run.test_target), "NLL": float(F.nll_loss(run.scaled.log(), run.test_target))}
    print({f"{name}, temperature": round(value, 4) for name, value in scaled.items()})
    assert metrics["ECE"] <= scaled["ECE"] + 0.003
    assert metrics["NLL"] <= scaled["NLL"] + 0.002
    assert metrics["svhn"] >= 0.970
    assert metrics["cifar100"] >= 0.875


def test_no_prediction_changes(run):
    with torch.no_grad():
        labels = torch.cat([run.net(part).argmax(1) for part in batches(run.test_images)])
    assert torch.equal(run.test.labels, labels)


def test_all_of_it_takes_less_than_two_minutes_on_two_cores(run):
    if run.seconds >= SECONDS and run.busy > 1.5:
        pytest.skip(f"needs two idle cores: took {run.seconds:.0f} s on a machine with load {run.busy:.1f}")
    assert run.seconds < SECONDS


def test_p_values_hold_on_fresh_images_and_reject_house_numbers(run):
    """Marginally over the draw of the reference, so that one draw may be off by its own noise."""
    alpha, n, m = 0.1, round(1 / run.test.smallest_p_value) - 1, len(run.test)
    noise = (alpha * (1 - alpha) * (1 / n + 1 / m)) ** 0.5
    assert float((~run.test.accept(alpha)).double().mean()) <= alpha + 3 * noise
    assert float((~run.ood["svhn"].accept(alpha)).double().mean()) > 0.8


def test_calibration_on_training_images_does_not_help(run):
    """The documented trap: on its own training data a network looks well calibrated at any confidence."""
    model = run.of_hidden()
    part = slice(0, 20_000, 8)
    afield.calibrate(model, batches(run.train_hidden[part], run.train_target[part]))
    prediction = predict(model, run.test.features)
    found = ece(prediction.probs, run.test_target)
    print(f"calibrated on training images: ECE {found:.4f}")
    assert found > 0.03


def test_the_curvature_of_a_network_that_fits_its_data_forgets_the_data(run):
    """p* (1 - p*) vanishes where the network is sure, so that training images weigh next to nothing."""
    found = {}
    for curvature in ("unit", "likelihood"):
        model = run.of_hidden(curvature=curvature)
        inside, outside = predict(model, run.test.features), predict(model, run.ood["svhn"].features)
        found[curvature] = auroc(inside.score("variance"), outside.score("variance"))
    print(f"AUROC of the variance on SVHN by curvature: {found}")
    assert found["unit"] > 0.9
    assert found["likelihood"] < 0.6
