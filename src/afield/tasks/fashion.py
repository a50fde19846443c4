"""Fashion-MNIST, clothes, against MNIST, digits, and notMNIST, letters: 28 x 28 in grey. Not in the paper.

Files that are looked for, the published ones first (https://github.com/zalandoresearch/fashion-mnist):

    FashionMNIST/raw/*-ubyte[.gz]               else images/fashion_mnist_30k_10k.npz
    MNIST/raw/t10k-images-idx3-ubyte[.gz]       else images/mnist_test10k.npz
    notMNIST/t10k-images-idx3-ubyte[.gz]        else images/notmnist_dev5k.npz

Validation data is a tenth of the training data, cut by the seed. `small` is the first 30,000 training images and a
Wide ResNet-10-1 with stride 2 in its stem (a minute or so on one core), `paper` is everything and a Wide ResNet-16-4.
"""

from dataclasses import replace
from functools import partial

import numpy as np
from torch.utils.data import TensorDataset

from afield.backbones.wide_resnet import WideResNet
from afield.settings import Settings
from afield.tasks.data import arrays, find
from afield.tasks.image_tensors import (
    LabelledImages,
    crop_and_flip,
    first_per_class,
    noise,
    ood_from_environment,
    split_train_val,
    to_dataset,
    to_tensor,
)
from afield.tasks.published_formats import read_idx
from afield.tasks.task import REFIT, Recipe, Task, presets

MEAN, STD = (0.2860,), (0.3530,)
_SIZES = {"smoke": (100, 20, 100), "small": (3000, 1000, 5000), "paper": (6000, 1000, 10_000)}  # a class, a class, OOD
_NETS = {
    "smoke": partial(WideResNet, 10, 1, stride=2),
    "small": partial(WideResNet, 10, 1, stride=2),
    "paper": partial(WideResNet, 16, 4),
}
_SMALL = Settings(
    epochs=8,
    batch_size=128,
    learning_rate=0.4,
    optimizer="sgd",
    weight_decay=5e-4,
    warmup=0.2,
    bound=1.0,
    dropout=0.1,
)
_FILE = "images/fashion_mnist_30k_10k.npz"


def fashion(seed: int, preset: str) -> Task:
    train_size, test_size, ood_size = _SIZES[preset]
    (x, y), (x_test, y_test) = (_read_part(name) for name in ("train", "t10k"))
    chosen, tested = first_per_class(y, train_size), first_per_class(y_test, test_size)
    train, val = split_train_val(x[chosen], y[chosen], seed)
    ood = {name: TensorDataset(to_tensor(_read_ood(name)[:ood_size])) for name in ("mnist", "notmnist")}
    return Task(
        "fashion",
        train,
        val,
        to_dataset(x_test[tested], y_test[tested]),
        ood={**ood, "noise": noise(min(ood_size, 2500), (1, 28, 28), seed=0), **ood_from_environment(1, 28)},
        num_outputs=10,
        backbone=partial(_NETS[preset], mean=MEAN, std=STD),
        augment=lambda batch, _: crop_and_flip(batch, padding=2),
    )


RECIPE = Recipe(
    fashion,
    presets(_SMALL, paper=replace(_SMALL, epochs=60, bound=6.0)),
    {"*gp*": {"head_learning_rate": 4.0}, **REFIT},
)


def _read_part(name: str) -> LabelledImages:
    images, labels = (
        find(*_packed_or_not(f"FashionMNIST/raw/{name}-{kind}"), _FILE) for kind in ("images-idx3", "labels-idx1")
    )
    if images.suffix != ".npz" and labels.suffix != ".npz":
        return read_idx(images), read_idx(labels).astype(np.int64)
    content, suffix = arrays(_FILE), "tr" if name == "train" else "te"
    return content[f"x{suffix}"], content[f"y{suffix}"].astype(np.int64)


def _read_ood(name: str) -> np.ndarray:
    folder, subset = {"mnist": ("MNIST/raw", "mnist_test10k"), "notmnist": ("notMNIST", "notmnist_dev5k")}[name]
    path = find(*_packed_or_not(f"{folder}/t10k-images-idx3"), f"images/{subset}.npz")
    return arrays(path)["x"] if path.suffix == ".npz" else read_idx(path)


def _packed_or_not(name: str) -> tuple[str, str]:
    """The names of an idx file and of its gzip."""
    return f"{name}-ubyte", f"{name}-ubyte.gz"
