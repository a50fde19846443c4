"""CIFAR-10 and CIFAR-100: clean, under 15 corruptions at 5 severities, and against SVHN, each other and noise.

Files that are looked for, the published ones first (https://www.cs.toronto.edu/~kriz/cifar.html,
http://ufldl.stanford.edu/housenumbers, https://zenodo.org/records/2535967 and 3555552 for the corrupted sets):

    cifar-10-batches-py/, cifar-100-python/     else images/cifar10_*.npz, images/cifar100_ood_dev3k.npz (OOD only)
    svhn/test_32x32.mat                         else images/svhn_dev2500.npz
    CIFAR-10-C/, CIFAR-100-C/                   else made by `corruptions`
    dtd/images/, or dtd-r1.0.1.tar.gz           textures, OOD for CIFAR-10 if there (robots.ox.ac.uk/~vgg/data/dtd)

Validation data is a tenth of the training data, cut by the seed; the paper trains on all of it. `paper` is everything
on Wide ResNet-28-10 with the schedule of the authors' code; `small` is the first 20,000 training and 5,000 test images,
a Wide ResNet-10-2 with stride 2 in its stem for 30 epochs (four minutes on one core, eight on an older one) and
corruptions of 500 test images; `smoke` is next to nothing.

Learning rates of `paper` are those of the paper's text, .04 and .08, for batches of 128, times batch size / 128 as in
the authors' code. The code's own differ by version: .05 to .08 for CIFAR-10, .04 or .08 for CIFAR-100. It has layer
norm and a projection to 128 dimensions before the random features; ours has neither, and the output layer its own rate.

`cifar100-3k` is CIFAR-100 on 30 images a class, all that are at hand without its own files: 24 to train and validate, 6
for the test, cut by us because the official split of these images is lost. No figure of it compares with the paper's.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from afield.backbones.normalize import CIFAR10_MEAN, CIFAR10_STD
from afield.backbones.wide_resnet import WideResNet
from afield.settings import Settings
from afield.tasks.corruptions import CorruptedSets
from afield.tasks.data import arrays, find, locate, locate_published
from afield.tasks.image_tensors import (
    LabelledImages,
    crop_and_flip,
    first_per_class,
    noise,
    ood_from_environment,
    read_pictures,
    split_train_val,
    to_dataset,
    to_tensor,
)
from afield.tasks.published_formats import read_cifar_batch, read_svhn_mat
from afield.tasks.task import REFIT, Outline, Recipe, Task, presets

_CIFAR100_MEAN, _CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
_FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
_CIFAR100_SUBSET = "images/cifar100_ood_dev3k.npz"
_TEXTURES = "dtd"
_EVERYTHING = 1_000_000
_EVALUATED = (
    5000 + 76 * 10_000 + 26_032 + 10_000 + 2500
)  # validation, test with 75 corrupted copies, SVHN, the other, noise
# Images in training with validation, in the test, in each corrupted set and in each OOD set.
_SIZES = {"smoke": (1000, 200, 100, 100), "small": (20_000, 5000, 500, 2500), "paper": (_EVERYTHING,) * 4}
_NETS = {
    "smoke": partial(WideResNet, 10, 1),
    "small": partial(WideResNet, 10, 2, stride=2),
    "paper": partial(WideResNet, 28, 10),
}


def cifar(name: str, classes: int) -> Recipe:
    """The task `name`: cifar10, cifar100 or cifar100-3k; the other set is OOD."""
    small = Settings(
        epochs=30,
        batch_size=64,
        learning_rate=0.1,
        optimizer="sgd",
        weight_decay=5e-4,
        warmup=0.2,
        bound=1.0,
        dropout=0.1,
    )
    paper = Settings(
        epochs=250,
        batch_size=256,
        learning_rate=(0.04 if classes == 10 else 0.08) * 256 / 128,
        optimizer="sgd",
        weight_decay=6e-4,  # the code's l2 of 3e-4 has no factor of one half
        schedule="steps",
        warmup=1 / 250,
        bound=6.0,
        dropout=0.1,
    )
    if name == "cifar100-3k":
        small = replace(small, epochs=100)
    return Recipe(
        partial(_load, name, classes),
        presets(small, paper=paper),
        # Features have length 1, hidden vectors about 5: gradients differ by 25.
        {"*gp*": {"head_learning_rate": 3.0}, **REFIT},
        {"paper": Outline(45_000, _EVALUATED, torch.zeros(1, 3, 32, 32, dtype=torch.uint8), _NETS["paper"])},
    )


def _load(name: str, classes: int, seed: int, preset: str) -> Task:
    train_size, test_size, corrupted_size, ood_size = _SIZES[preset]
    train, test = load_training(name), load_test(name)
    chosen, tested, shifted = (
        first_per_class(labels, -(-size // classes))
        for labels, size in ((train[1], train_size), (test[1], test_size), (test[1], corrupted_size))
    )
    other = "cifar100" if name == "cifar10" else "cifar10"
    ood = {label: TensorDataset(to_tensor(_evenly_spaced(load_ood(label), ood_size))) for label in ("svhn", other)}
    if name == "cifar10" and (textures := locate_published(_TEXTURES)) is not None:
        ood[_TEXTURES] = TensorDataset(to_tensor(read_pictures(textures / "images", 32, most=ood_size)))
    fitted, held_out = split_train_val(train[0][chosen], train[1][chosen], seed)
    rows = official_rows(name)
    corrupted = {"cifar10": "CIFAR-10-C", "cifar100": "CIFAR-100-C"}.get(name)
    published = None if corrupted is None or rows is None else locate(corrupted)
    mean, std = (CIFAR10_MEAN, CIFAR10_STD) if name == "cifar10" else (_CIFAR100_MEAN, _CIFAR100_STD)
    return Task(
        name,
        fitted,
        held_out,
        to_dataset(test[0][tested], test[1][tested]),
        ood={**ood, "noise": noise(min(ood_size, 2500), (3, 32, 32), seed=0), **ood_from_environment(3, 32)},
        num_outputs=classes,
        backbone=partial(_NETS[preset], mean=mean, std=std),
        shifted=CorruptedSets(
            test[0][shifted], test[1][shifted], published=published, rows=None if rows is None else rows[shifted]
        ),
        augment=lambda batch, _: crop_and_flip(batch),
    )


def load_training(name: str) -> LabelledImages:
    """All training images (N, 32, 32, 3) that are at hand, and labels."""
    if name == "cifar10":
        return _read(find(_FOLDERS[name], "images/cifar10_train20k.npz"), _join_batches)
    return _read_cifar100(name, "train")


def load_test(name: str) -> LabelledImages:
    """All test images that are at hand, and labels."""
    if name == "cifar10":
        return _read(
            find(_FOLDERS[name], "images/cifar10_test_dev5k.npz"), lambda root: read_cifar_batch(root / "test_batch")
        )
    return _read_cifar100(name, "test")


def load_ood(name: str) -> np.ndarray:
    """Images of a set that is not trained on: all that are at hand."""
    if name == "svhn":
        names = (f"{folder}test_32x32.mat" for folder in ("svhn/", "SVHN/", ""))
        return _read(find(*names, "images/svhn_dev2500.npz"), read_svhn_mat)[0]
    if name == "cifar100":
        return _read(find(_FOLDERS[name], _CIFAR100_SUBSET), lambda root: _read_fine_labels(root / "test"))[0]
    return load_test(name)[0]


def official_rows(name: str) -> np.ndarray | None:
    """The rows of the images of `load_test` in the official test set, None where they are not known."""
    if name in _FOLDERS and locate(_FOLDERS[name]) is not None:
        return np.arange(10_000)
    return arrays("images/cifar10_test_dev5k.npz")["idx"] if name == "cifar10" else None


def _read(path: Path, read_published: Callable[[Path], LabelledImages]) -> LabelledImages:
    """A published set, or our npz subset of it."""
    if path.suffix != ".npz":
        return read_published(path)
    content = arrays(path)
    return content["x"], content["y"].astype(np.int64)


def _read_cifar100(name: str, part: str) -> LabelledImages:
    """A part, train or test, of the published set, or of the images at hand if that is what the task is called."""
    if name == "cifar100":
        return _read_fine_labels(find(_FOLDERS[name]) / part)
    return _cut(_read(find(_CIFAR100_SUBSET), _read_fine_labels), test=part == "test")


def _join_batches(root: Path) -> LabelledImages:
    batches = [read_cifar_batch(root / f"data_batch_{i}") for i in range(1, 6)]
    return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])


def _read_fine_labels(path: Path) -> LabelledImages:
    return read_cifar_batch(path, "fine_labels")


def _cut(subset: LabelledImages, *, test: bool) -> LabelledImages:
    """Of 30 images a class of CIFAR-100, the first 24 are for training and the rest for the test."""
    x, y = subset
    rows = first_per_class(y, 24)
    rows = np.setdiff1d(np.arange(len(y)), rows) if test else rows
    return x[rows], y[rows]


def _evenly_spaced(x: np.ndarray, size: int) -> np.ndarray:
    """At most `size` images, evenly spaced over the set."""
    return x[np.linspace(0, len(x) - 1, min(size, len(x))).astype(int)]
