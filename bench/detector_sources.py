"""What `bench.detectors` compares scores on: hidden vectors of networks on in-domain and OOD data.

resnet56, resnet56_b    public CIFAR-10 networks that nobody touches, with `afield.attach`; every other test image is
                        held out for calibration
runs                    `sngp`, on CLINC `frozen-attach`, as `afield reproduce` trains them: a finished run below
                        `runs` is read, a missing one is made
tables                  `afield.SNGPClassifier` on the rows of all but the last classes, which are OOD

A new task is one line in `SOURCES`. Hidden vectors of the two public networks are kept in the temporary folder.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import afield
from afield.backbones import ResNetCIFAR
from afield.experiment.config import Config
from afield.experiment.model_folder import open_model
from afield.experiment.one_run import run
from afield.experiment.task_parts import predict_batches
from afield.model.calibration import cut_in_two
from afield.prediction.prediction import Prediction
from afield.tasks.data import arrays
from afield.tasks.image_tensors import noise
from bench.attach import SETS, hidden_of

NEAR, FAR = ("cifar100",), ("svhn", "mnist", "noise")
OF_B = {"projection": True, "mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.2010)}
RUNS = Path("runs")
_HELD_OUT = {"letter": 6, "satellite": 2, "vehicle": 1, "shuttle": 4, "digits": 2}  # classes, the last ones
_MOST_ROWS = 6000  # of a table


@dataclass(frozen=True)
class Source:
    """What scores get to see of one task.

    model          fitted and calibrated, whose joined score is compared
    train, labels  predictions with hidden vectors of training data, and their classes: for fitted scores
    held           held-out predictions, which calibrate; `test` in-domain ones
    near, far      OOD predictions by the name of their set
    output         the dense layer over the hidden vectors, or None
    """

    model: afield.SNGP
    train: Prediction
    labels: Tensor
    held: Prediction
    test: Prediction
    near: Mapping[str, Prediction]
    far: Mapping[str, Prediction]
    output: nn.Linear | None = None


def public(weights: str, seed: int, **options: Any) -> Source:
    """A CIFAR-10 ResNet-56 of the data folder."""
    net, file = load_net(weights, **options)
    hidden = cached(file, lambda: {name: hidden_of(net, x) for name, x in images().items()})
    labels, test = (load(SETS[name])[1].long() for name in ("train", "test"))
    torch.manual_seed(seed)
    model = afield.attach(net.linear)
    afield.fit_posterior(model, list(zip(hidden["train"].split(500), labels.split(500), strict=True)))
    afield.calibrate(model, [(hidden["test"][::2], test[::2])])
    seen = {name: _dense(net.linear, h, model.predict(h)) for name, h in hidden.items()}
    near, far = ({name: seen[name] for name in names} for names in (NEAR, FAR))
    return Source(model, seen["train"], labels, seen["test"][::2], seen["test"][1::2], near, far, net.linear)


def trained(task: str, method: str, near: tuple[str, ...], seed: int) -> Source:
    """A run of a suite; what is not near is far."""
    made = run(Config.of(task, method, seed=seed), RUNS / f"{task}-small")
    opened = open_model(made.folder)
    model, data = opened.as_sngp("bench.detectors"), opened.task
    assert data is not None

    def predict(part: Any) -> tuple[Prediction, Tensor]:
        pieces = list(predict_batches(opened.predict, part))
        return Prediction.cat([p for p, _ in pieces]), torch.cat([torch.as_tensor(y) for _, y in pieces])

    train, labels = predict(data.train)
    ood = {name: predict(part)[0] for name, part in data.ood.items()}
    layer = model.head.mean if isinstance(model.head.mean, nn.Linear) else None
    sets = {n: p for n, p in ood.items() if n in near}, {n: p for n, p in ood.items() if n not in near}
    return Source(model, train, labels, predict(data.val)[0], predict(data.test)[0], *sets, layer)


def table(name: str, seed: int) -> Source:
    """An estimator on a table; a fifth of the rows calibrates for the comparison, and a fifth is the test."""
    x, y = _table(name)
    order = np.random.default_rng(seed).permutation(len(y))[:_MOST_ROWS]
    x, y = x[order], y[order]
    known = y < y.max() + 1 - _HELD_OUT[name]
    inside, labels = x[known], y[known]
    fold = np.arange(len(labels)) % 5
    estimator = afield.SNGPClassifier(random_state=seed).fit(inside[fold > 1], labels[fold > 1])
    model = estimator.model_
    # A class without a row in these three fifths would have no number.
    index = np.searchsorted(estimator.classes_, labels[fold > 1])

    def predict(rows: np.ndarray) -> Prediction:
        return model.predict(torch.as_tensor(rows, dtype=torch.float32))

    parts = (predict(inside[fold > 1]), torch.from_numpy(index), predict(inside[fold == 0]), predict(inside[fold == 1]))
    return Source(model, *parts, {"held-out classes": predict(x[~known])}, {})


SOURCES: dict[str, tuple[str, int, Callable[[int], Source]]] = {  # title, seeds, function of the seed
    "resnet56": ("ResNet-56", 1, partial(public, "cifar10_resnet56")),
    "resnet56_b": ("second ResNet-56", 1, partial(public, "cifar10_resnet56_b", **OF_B)),
    "cifar10": ("CIFAR-10", 3, partial(trained, "cifar10", "sngp", ("cifar100",))),
    "fashion": ("Fashion-MNIST", 3, partial(trained, "fashion", "sngp", ())),
    "genomics": ("bacteria", 3, partial(trained, "genomics", "sngp", ("genera",))),
    "clinc": ("CLINC, frozen", 1, partial(trained, "clinc", "frozen-attach", ("oos",))),
    "digits": ("digits", 3, partial(trained, "digits", "sngp", ("held-out",))),
    **{f"table-{name}": (name, 3, partial(table, name)) for name in _HELD_OUT},
}


def load_net(weights: str, **options: Any) -> tuple[ResNetCIFAR, Path]:
    """A CIFAR-10 ResNet-56 of the data folder, and the file of its weights."""
    file = Path(os.environ["AFIELD_DATA"]) / "weights" / f"{weights}.safetensors"
    net = ResNetCIFAR(56, **options)
    net.load_state_dict({name.replace("fc.", "linear."): tensor for name, tensor in load_file(file).items()})
    net.eval().to(memory_format=torch.channels_last)
    return net, file


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


def halves(held: Prediction) -> Tensor:
    """The rows of held-out data that fix the joined score."""
    return cut_in_two(len(held), 1 / 2)[0]


@torch.no_grad()
def _dense(linear: nn.Linear, h: Tensor, attached: Prediction) -> Prediction:
    """The network's own prediction, with the variance and the joined score of the attached model."""
    logits = linear(h)
    return Prediction(logits, attached.variance, logits.softmax(1), features=h, joined=attached.joined)


def _table(name: str) -> tuple[np.ndarray, np.ndarray]:
    if name == "digits":
        from sklearn.datasets import load_digits

        return load_digits(return_X_y=True)
    data = arrays(f"tabular/mlbench_{'LetterRecognition' if name == 'letter' else name.title()}.npz")
    return data["X"], data["y"].astype(int)
