"""What finds foreign pixels: `python -m bench.pixel_sources [KIND METHOD ...]` writes results/pixel-sources.json.

A kind of object that `shapes-segmentation` knows is left out of training and shown afterwards, so that choices rest on
no OOD set that is reported. A small U-Net is trained on pictures of the others, as `dnn`, to which a variance is
attached, or as `sngp`; it is kept in runs/pixel-sources, so that scores can be changed. Of each source of the joined
score, and of what might take its place, the AUROC of foreign pixels (of the kind; of squares of noise) and of the
pictures that hold them, by the mean of their highest 2%, or by what `region` makes of them (`background`):

    class_distance_counted  with all pixels in its background, where ours has all classes alike
    joined_counted          the joined score with it
    region                  the score as it is built; region_W: with windows of other sizes
    no_classes, no_edges    a pixel listens to all around it, whatever their class; edges are as loud as all else
    plain                   without both: the mean of a window
    region_entropy ...      with the entropy, or the energy of the logits as they are, in place of its own u
    told                    a network of 64 units that is trained on foreign pixels of half the pictures, on logits and
                           all levels of the U-Net: what a detector could know; pixels only
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afield
from afield.backbones.unet import UNet
from afield.experiment.training import batches, fit
from afield.gp.class_distance import ClassDistance
from afield.gp.joined_score import SOURCES, JoinedScore
from afield.methods import METHODS
from afield.model.saving import write_file
from afield.model.sngp_model import SNGP
from afield.prediction import regions
from afield.prediction.metrics import OOD_METRICS
from afield.prediction.positions import input_score
from afield.prediction.prediction import Prediction
from afield.prediction.regions import input_mean, region_mean
from afield.tasks import shapes
from afield.tasks.task import Task
from bench.defaults import ROOT

RECORD = ROOT / "results" / "pixel-sources.json"
NETWORKS = ROOT / "runs" / "pixel-sources"
SIDE = 32
WINDOWS = (3, 5, 9)
OOD = ("kinds", "patches")
Values = dict[str, dict[str, Tensor]]  # by score, then by part


class Size(NamedTuple):
    """How many pictures there are, and how long training is."""

    pictures: int = 1000
    held_out: int = 300
    tested: int = 200
    epochs: int = 15


def task_without(kind: int, method: str, size: Size) -> tuple[Task, dict[str, tuple[Tensor, Tensor]]]:
    """A task of the other kinds, and foreign pictures with masks."""
    known, foreign = shapes.KNOWN, shapes.FOREIGN
    generator = torch.Generator().manual_seed(0)
    try:
        shapes.KNOWN, shapes.FOREIGN = (*known[:kind], *known[kind + 1 :]), (known[kind],)  # type: ignore[assignment]
        data = [shapes.draw_pictures(count, SIDE, generator)[:2] for count in size[:3]]
        ood = {name: shapes.draw_pictures(size.tested, SIDE, generator, foreign=name) for name in OOD}
    finally:
        shapes.KNOWN, shapes.FOREIGN = known, foreign
    parts = [torch.utils.data.TensorDataset(*part) for part in data]
    settings = dataclasses.replace(shapes.RECIPE.settings_for("small", method), epochs=size.epochs)
    task = Task(
        "shapes-without",
        parts[0],
        val=parts[1],
        test=parts[2],
        ood={},
        num_outputs=len(known),
        backbone=partial(UNet, width=8),
        settings=settings,
    )
    return task, {name: (x, mask) for name, (x, _, mask) in ood.items()}


class CountedClasses(ClassDistance):
    """Relative to all pixels, each of which counts as one: the published form."""

    def _moments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        there, means, within, _, _ = super()._moments()
        share = self.count[there] / self.count[there].sum()
        center = share @ means[there]
        spread = means[there] - center
        return there, means, within, center, within + (share[:, None] * spread).T @ spread


def scores_of(model: SNGP) -> Callable[[Tensor], dict[str, Tensor]]:
    """Hidden vectors (M, d) -> scores (M,) by name."""
    head = model.head.snapshot()
    head.forget_reference()  # of the snapshot: p-values rest on what rows do not know
    assert head.class_distance is not None
    counted = CountedClasses(head.class_distance.in_features, head.class_distance.num_classes)
    counted.load_state_dict(head.class_distance.state_dict())
    counted.factor()

    def scores(h: Tensor) -> dict[str, Tensor]:
        p = head.predict(h)
        sources = head.sources(*head.posterior(h), h)
        found = dict(zip(SOURCES, sources.unbind(1), strict=True))
        found |= {name: p.score(name) for name in ("max_probability", "entropy", "joined")}
        return found | {"class_distance_counted": counted(h)}

    return scores


def around(p: Prediction) -> dict[str, Tensor]:
    """Maps (N, H, W) of what listens to its neighbours."""
    assert p.probs is not None
    # Before it is squashed, dempster_shafer is the u of `prediction.regions`.
    own, probs, classes = torch.logit(p.score("dempster_shafer").double()).float(), p.probs, p.labels
    alike, anywhere = torch.full_like(probs, 1 / probs.shape[1]), torch.zeros_like(classes)
    found = {
        "region": region_mean(own, probs, classes),
        "region_entropy": region_mean(p.score("entropy"), probs, classes),
        "region_energy": region_mean(p.score("energy"), probs, classes),
        "no_classes": region_mean(own, alike, classes),
        "no_edges": region_mean(own, probs, anywhere),
        "plain": region_mean(own, alike, anywhere),
    }
    for window in WINDOWS:
        with patch.object(regions, "WINDOW", window):
            found[f"region_{window}"] = region_mean(own, probs, classes)
    return found


@torch.no_grad()
def values_of(model: SNGP, task: Task, ood: dict[str, tuple[Tensor, Tensor]]) -> tuple[Values, dict[str, Tensor]]:
    """Maps (N, H, W) of each score in the test set and the OOD sets, and the predicted classes."""
    scores, parts = scores_of(model), {"val": task.val.tensors[0], "test": task.test.tensors[0]}
    parts |= {name: x for name, (x, _) in ood.items()}
    rows = {name: torch.cat([model.hidden(b) for b in x.split(50)]).flatten(0, -2) for name, x in parts.items()}
    found: dict[str, dict[str, Tensor]] = {name: scores(h) for name, h in rows.items()}
    held = found.pop("val")
    first = torch.randperm(len(held["variance"]), generator=torch.Generator().manual_seed(0))[:20_000]

    def sources(of: dict[str, Tensor]) -> Tensor:
        return torch.stack([of["variance"], of["energy"], of["class_distance_counted"]], 1)

    joined = JoinedScore()
    joined.fit(sources(held)[first])
    values: Values = {}
    classes = {}
    for part, of in found.items():
        of["joined_counted"] = joined(sources(of))
        p = Prediction.cat([model.predict(x) for x in parts[part].split(50)])
        classes[part] = p.labels
        maps = {name: value.reshape(-1, SIDE, SIDE) for name, value in of.items()}
        for name, value in (maps | around(p)).items():
            values.setdefault(name, {})[part] = value
    return values, classes


def told(model: SNGP, ood: dict[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """The AUROC of foreign pixels for a network that has been told which are foreign in half of the pictures."""
    found, cut = {}, len(next(iter(ood.values()))[0]) // 2
    for name, (x, mask) in ood.items():
        h = levels_of(model, x)
        h = (h - h.mean((0, 1))) / h.std((0, 1)).clamp_min(1e-4)
        y = mask.flatten(1).float()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(h.shape[-1], 64), nn.ReLU(), nn.Linear(64, 1))
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3, weight_decay=1e-4)
        rows, target = h[:cut].flatten(0, 1), y[:cut].flatten()
        for _ in range(300):
            chosen = torch.randint(len(rows), (1000,))
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(net(rows[chosen])[:, 0], target[chosen]).backward()
            optimizer.step()
        with torch.no_grad():
            score, foreign = net(h[cut:].flatten(0, 1))[:, 0], y[cut:].flatten() > 0
        found[name] = OOD_METRICS["auroc"](score[~foreign], score[foreign])
    return found


@torch.no_grad()
def levels_of(model: SNGP, x: Tensor) -> Tensor:
    """Logits and what all blocks of the U-Net say (N, H W, c)."""
    unet = next(m for m in model.modules() if isinstance(m, UNet))
    seen: list[Tensor] = []
    hooks = [b.register_forward_hook(lambda _m, _i, out: seen.append(out)) for b in (*unet.down, *unet.up)]
    try:
        seen.append(model(x))
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([F.interpolate(t, size=(SIDE, SIDE), mode="bilinear") for t in seen], 1).flatten(2).movedim(1, -1)


def network(kind: int, method: str, task: Task) -> SNGP:
    """The trained model, fitted and calibrated."""
    file = NETWORKS / f"{shapes.KNOWN[kind].name}-{method}.pt"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(fit(task, METHODS[method], seed=0), file)
    model = torch.load(file, weights_only=False)
    assert isinstance(model, SNGP)
    afield.calibrate(model, batches(task.val), score="joined", progress=False)
    return model


def measure(kind: int, method: str) -> dict[str, Any]:
    """The AUROCs of a kind that is left out, by a method."""
    task, ood = task_without(kind, method, Size())
    model = network(kind, method, task)
    row: dict[str, Any] = {"told": {"pixels": told(model, ood)}}
    values, classes = values_of(model, task, ood)
    for score, maps in values.items():
        highest = {part: input_score(value) for part, value in maps.items()}
        background = {part: input_mean(value, classes[part], task.num_outputs) for part, value in maps.items()}
        auroc = OOD_METRICS["auroc"]
        row[score] = {
            "pixels": {n: auroc(maps[n][~mask], maps[n][mask]) for n, (_, mask) in ood.items()},
            "images": {n: auroc(highest["test"], highest[n]) for n in ood},
            "background": {n: auroc(background["test"], background[n]) for n in ood},
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pixel_sources", description=__doc__)
    parser.add_argument("what", nargs="*", help="pairs such as square attach; none given: all")
    given = parser.parse_args().what
    names = [kind.name for kind in shapes.KNOWN]
    pairs = list(zip(given[::2], given[1::2], strict=True)) or [(n, m) for n in names for m in ("attach", "sngp")]
    for kind, method in pairs:
        record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
        row = measure(names.index(kind), method)
        rounded = json.loads(json.dumps(row), parse_float=lambda text: float(f"{float(text):.4g}"))
        record.setdefault(method, {})[kind] = rounded
        settings = Size()._asdict() | {"afield": afield.__version__}
        record |= {"settings": settings | {"torch": torch.__version__, "command": "python -m bench.pixel_sources"}}
        write_file(RECORD, (json.dumps(record, indent=1) + "\n").encode())
        print(kind, method, {name: value["pixels"] for name, value in rounded.items()}, flush=True)


if __name__ == "__main__":
    main()
