"""ImageNet on ResNet-50, decoded image by image: too large to be held in memory, or to ship.

Folders that are looked for, with images as `image_files` reads them (class/name.JPEG, or tars of such):

    imagenet/train, imagenet/val            required; the official validation set is the test set
    imagenet-c/TYPE/SEVERITY                published corruptions (https://zenodo.org/records/2235448), if there
    imagenet-o                              OOD, if there (https://github.com/hendrycks/natural-adv-examples)

Validation data is cut from the training data by the seed: a hundredth, a tenth in `small`. Test, validation and
posterior see the middle 224 x 224. Training sees random parts of that square, scaled up, where the authors' code takes
them from the whole image: so one data set serves training and the posterior pass. The paper does not give its
schedule; `paper` has that of the authors' code: 90 epochs, a rate of .1 for batches of 256 that falls to a tenth after
30, 60 and 80 epochs, 5 epochs of warm-up, and an l2 of 1e-4 without a factor of one half. `small` is 100 classes of 100
images at most.

The posterior is the exact sum. In the paper's form it is the paper's moving average: .999, with a ridge of .001 for the
average over examples of features without sqrt(2 / D). Ours averages sums over batches of features with it, so its ridge
is .001 M / (D / 2), M the images of a batch. Moving averages cannot be made on several processes. (The authors' code,
as published, has the exact sum and a ridge of 1 here.)
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from afield.backbones.normalize import as_numbers
from afield.backbones.resnet50 import BOUNDED, ResNet50
from afield.errors import DataMissing
from afield.settings import Settings
from afield.tasks.corruptions import set_name
from afield.tasks.data import folders, locate
from afield.tasks.image_files import ImageFiles, ImageLocation, locate_images
from afield.tasks.image_tensors import noise, ood_from_environment, split_rows
from afield.tasks.task import Outline, Recipe, Task, presets

LabelledLocations = list[tuple[ImageLocation, int]]
_EVERYTHING = 1_000_000
# Classes, images of each, the part of them that is held out for validation, pixels a side.
_SIZES = {"smoke": (4, 60, 0.1, 64), "small": (100, 100, 0.1, 224), "paper": (_EVERYTHING, _EVERYTHING, 0.01, 224)}
_PAPER = Settings(
    epochs=90,
    batch_size=256,
    learning_rate=0.1,
    optimizer="sgd",
    weight_decay=2e-4,
    schedule="tenths",
    warmup=5 / 90,
    bound=6.0,
    bounded=BOUNDED,
    dropout=0.1,
)


def imagenet(seed: int, preset: str) -> Task:
    max_classes, per_class, held_out, size = _SIZES[preset]
    train, test = (locate_images(_find_folder(f"imagenet/{part}")) for part in ("train", "val"))
    classes = {name: label for label, name in enumerate(list(train)[:max_classes])}
    images = _select(train, classes, per_class)
    train_rows, val_rows = split_rows(np.array([label for _, label in images]), seed, held_out)
    part: Any = partial(_to_dataset, size=size)  # decoded one by one, where other tasks have tensors
    ood: dict[str, Any] = {"noise": noise(100, (3, size, size), seed=0), **ood_from_environment(3, size)}
    if root := locate("imagenet-o"):
        outside = [location for locations in locate_images(root).values() for location in locations]
        ood["imagenet-o"] = ImageFiles(outside, [-1] * len(outside), size)
    return Task(
        "imagenet",
        part([images[row] for row in train_rows]),
        part([images[row] for row in val_rows]),
        part(_select(test, classes, per_class)),
        ood=ood,
        num_outputs=len(classes),
        backbone=ResNet50,
        shifted=_published_corruptions(classes, per_class, size),
        augment=lambda batch, _: random_resized_crop(batch),
    )


_SMALL = replace(_PAPER, epochs=20, batch_size=64)
_POSTERIOR_BATCH = 111  # images of 224 x 224 that the posterior sees at a time
_MOVING_AVERAGE = {"momentum": 0.999, "ridge": 1e-3 * _POSTERIOR_BATCH / 512, "head_weight_decay": 2e-4}
_IMAGE = torch.zeros(1, 3, 224, 224, dtype=torch.uint8)
_EVALUATED = 12_812 + 76 * 50_000 + 2000  # validation, test with 75 corrupted copies, ImageNet-O
RECIPE = Recipe(
    imagenet,
    presets(_SMALL, smoke=replace(_SMALL, epochs=1, batch_size=4), paper=_PAPER),
    {"*-paper": _MOVING_AVERAGE},
    {"paper": Outline(1_281_167 - 12_812, _EVALUATED, _IMAGE, ResNet50)},
)


def random_resized_crop(batch: Any, least: float = 0.25) -> tuple[Tensor, Tensor]:
    """Random squares with `least` to all of the area, scaled to the full size, half of them mirrored; in [0, 1]."""
    x, y = batch
    x = as_numbers(x)
    side = (least + (1 - least) * torch.rand(len(x))).sqrt()
    middle = (1 - side) * (2 * torch.rand(2, len(x)) - 1)
    flip = torch.where(torch.rand(len(x)) < 0.5, 1.0, -1.0)
    zero = torch.zeros_like(side)
    rows = [torch.stack(row, dim=1) for row in ((side * flip, zero, middle[0]), (zero, side, middle[1]))]
    grid = F.affine_grid(torch.stack(rows, dim=1).to(x), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False).clamp_(0, 1), y


def _select(images: Mapping[str, list[ImageLocation]], classes: Mapping[str, int], per_class: int) -> LabelledLocations:
    """The first images of each class, with their labels."""
    unknown = next((name for name in classes if name not in images), None)
    if unknown is not None:
        raise DataMissing(f"Class {unknown} of imagenet/train has no pictures in one of the other parts.")
    return [(location, label) for name, label in classes.items() for location in images[name][:per_class]]


def _to_dataset(images: LabelledLocations, size: int) -> ImageFiles:
    return ImageFiles([location for location, _ in images], [label for _, label in images], size)


def _published_corruptions(classes: Mapping[str, int], per_class: int, size: int) -> dict[str, Any]:
    root = locate("imagenet-c")
    paths = sorted(p for p in root.glob("*/[1-5]") if p.is_dir()) if root else []
    select = partial(_select, classes=classes, per_class=per_class)
    return {set_name(p.parent.name, p.name): _to_dataset(select(locate_images(p)), size) for p in paths}


def _find_folder(name: str) -> Path:
    path = locate(name)
    if path is None or not path.is_dir():
        places = ", ".join(map(str, folders()))
        raise DataMissing(
            f"The folder {name} was not found; looked in {places}. Get ImageNet from https://image-net.org, lay out "
            f"{name}/CLASS/*.JPEG, or tars with such members, and set AFIELD_DATA to the folder that holds imagenet/."
        )
    return path
