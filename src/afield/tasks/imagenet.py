"""ImageNet on ResNet-50, decoded picture by picture: too large to be held in memory, or to ship.

Folders that are looked for, with pictures as `image_files` reads them (class/name.JPEG, or tars of such):

    imagenet/train, imagenet/val            required; the official validation set is the test set
    imagenet-c/TYPE/SEVERITY                published corruptions (https://zenodo.org/records/2235448), if there
    imagenet-o                              OOD, if there (https://github.com/hendrycks/natural-adv-examples)

Validation data is cut from the training data by the seed: a hundredth, a tenth in `small`. Test, validation and
posterior see the middle 224 x 224. Training sees random parts of that square, scaled up, where the authors' code takes
them from the whole picture: so one data set serves training and the posterior pass. The paper does not give its
schedule; `paper` has 90 epochs with the usual rate, decay and warm-up. `small` is 100 classes of 100 pictures at most.
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
from afield.tasks.data import folders, locate
from afield.tasks.image_files import Pictures, Source, listed
from afield.tasks.image_tensors import named_ood, noise, rows_of_parts
from afield.tasks.task import Recipe, Task, presets

_EVERYTHING = 1_000_000
# Classes, pictures of each, the part of them that is held out for validation, pixels a side.
_SIZES = {"smoke": (4, 60, 0.1, 64), "small": (100, 100, 0.1, 224), "paper": (_EVERYTHING, _EVERYTHING, 0.01, 224)}
_PAPER = Settings(
    epochs=90,
    batch_size=256,
    learning_rate=0.1,
    optimizer="sgd",
    weight_decay=1e-4,
    schedule="steps",
    warmup=5 / 90,
    bound=6.0,
    bounded=BOUNDED,
    dropout=0.1,
)


def imagenet(seed: int, preset: str) -> Task:
    max_classes, per_class, held_out, size = _SIZES[preset]
    train, test = (listed(_root(f"imagenet/{part}")) for part in ("train", "val"))
    classes = {name: label for label, name in enumerate(list(train)[:max_classes])}
    pictures = _labelled(train, classes, per_class)
    train_rows, val_rows = rows_of_parts(np.array([label for _, label in pictures]), seed, held_out)
    part: Any = partial(_pictures, size=size)  # decoded one by one, where other tasks have tensors
    ood: dict[str, Any] = {"noise": noise(100, (3, size, size), seed=0), **named_ood(3, size)}
    if root := locate("imagenet-o"):
        outside = [source for sources in listed(root).values() for source in sources]
        ood["imagenet-o"] = Pictures(outside, [-1] * len(outside), size)
    return Task(
        "imagenet",
        part([pictures[row] for row in train_rows]),
        part([pictures[row] for row in val_rows]),
        part(_labelled(test, classes, per_class)),
        ood=ood,
        num_outputs=len(classes),
        backbone=ResNet50,
        shifted=_published(classes, per_class, size),
        augment=lambda batch, _: random_parts(batch),
    )


_SMALL = replace(_PAPER, epochs=20, batch_size=64)
RECIPE = Recipe(imagenet, presets(_SMALL, smoke=replace(_SMALL, epochs=1, batch_size=4), paper=_PAPER))


def random_parts(batch: Any, least: float = 0.25) -> tuple[Tensor, Tensor]:
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


Labelled = list[tuple[Source, int]]


def _labelled(sources: Mapping[str, list[Source]], classes: Mapping[str, int], per_class: int) -> Labelled:
    unknown = next((name for name in classes if name not in sources), None)
    if unknown is not None:
        raise DataMissing(f"Class {unknown} of imagenet/train has no pictures in one of the other parts.")
    return [(source, label) for name, label in classes.items() for source in sources[name][:per_class]]


def _pictures(pictures: Labelled, size: int) -> Pictures:
    return Pictures([source for source, _ in pictures], [label for _, label in pictures], size)


def _published(classes: Mapping[str, int], per_class: int, size: int) -> dict[str, Any]:
    root = locate("imagenet-c")
    sets = sorted(p for p in root.glob("*/[1-5]") if p.is_dir()) if root else []
    read = partial(_labelled, classes=classes, per_class=per_class)
    return {f"corrupted/{p.parent.name}-{p.name}": _pictures(read(listed(p)), size) for p in sets}


def _root(name: str) -> Path:
    path = locate(name)
    if path is None or not path.is_dir():
        places = ", ".join(map(str, folders()))
        raise DataMissing(
            f"The folder {name} was not found; looked in {places}. Get ImageNet from https://image-net.org, lay out "
            f"{name}/CLASS/*.JPEG, or tars with such members, and set AFIELD_DATA to the folder that holds imagenet/."
        )
    return path
