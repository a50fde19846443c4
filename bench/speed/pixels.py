"""Predictions at every pixel, against the same U-Net with a 1x1 convolution and a softmax; and where the time goes."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import afield
from afield.backbones.unet import UNet
from afield.gp.head import GaussianProcessHead
from afield.model.calibration import sources_of
from afield.outputs.planes import Plane
from afield.outputs.positions import REGION, predict_positions
from afield.prediction.p_values import conformal_p_value
from afield.prediction.predictive import mean_field
from afield.prediction.scores import SCORES
from bench.defaults import markdown
from bench.speed.measure import Metrics, compared, measure

CLASSES = 5
STEPS = {
    "posterior": "random features, variance, logits",
    "probabilities": "probabilities",
    "score": "score of regions",
    "p_values": "p-values, scores of images",
}


@measure("predict-unet", "predict every pixel, U-Net of width 32 attached, 8 images of 128 x 128 / dense", 1.10)
def predict_unet() -> Metrics:
    """As `afield.calibrate` leaves it by default: p-values rest on `region`; `joined_ratio` is with joined=True."""
    torch.manual_seed(0)
    net = nn.Sequential(UNet(width=32), nn.Conv2d(32, CLASSES, 1)).eval()
    model, x = afield.attach(net), torch.rand(8, 3, 128, 128)
    head, h = model.head, torch.rand(3000, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        head.observe(h[:2000], classes=torch.arange(2000) % CLASSES)
        assert head.joined_score is not None
        head.joined_score.fit(sources_of(head, h[2000:]))
        head.set_score(REGION)
        head.set_reference(model.predict(x).score(REGION).flatten()[:9600], draws=64)
        head.set_input_reference(torch.rand(150))

        def dense() -> Tensor:
            return net(x).softmax(1)

        found = compared(lambda: model.predict(x), dense, pairs=7)
        found["joined_ratio"] = compared(lambda: model.predict(x, joined=True), dense, pairs=5)["ratio"]
        found["cpu_ratio"] = median(
            _cpu_seconds(lambda: model.predict(x), 3) / _cpu_seconds(dense, 3) for _ in range(5)
        )
        return found | profile(head, model.hidden(x), dense)


def profile(head: GaussianProcessHead, h: Tensor, network: Callable[[], Any]) -> Metrics:
    """CPU time of each step of the head over all pixels, in units of the network's: `of_...`."""
    found, head = predict_positions(head, h), head.snapshot()
    head.joined_score = None
    plane, score = Plane.of(head, h), SCORES[REGION]
    assert plane is not None
    images = list(h.movedim(-1, 1).flatten(2))
    both, values = [plane.posterior(image) for image in images], score(found)
    steps: dict[str, Callable[[], Any]] = {
        "posterior": lambda: [plane.posterior(image) for image in images],
        "probabilities": lambda: [mean_field(one[0].T, one[1]) for one in both if one is not None],
        "score": lambda: score(found),
        "p_values": lambda: (conformal_p_value(values, head.reference, 64), score.of_input(values, found)),
        "head": lambda: predict_positions(head, h),
    }
    whole = _cpu_seconds(network)
    return {f"of_{name}": _cpu_seconds(step) / whole for name, step in steps.items()}


def table(record: dict[str, float]) -> str:
    """Markdown: where the time goes, of the record of `predict-unet`."""
    shares = {name.removeprefix("of_"): value for name, value in record.items() if name.startswith("of_")}
    whole = shares.pop("head")
    rows = [
        ["a prediction", f"{record['ratio']:.2f}"],
        ["CPU time of a prediction", f"{record['cpu_ratio']:.2f}"],
        ["a prediction with the joined score", f"{record['joined_ratio']:.2f}"],
    ]
    rows += [[f"CPU time: {STEPS[name]}", f"{value:.3f}"] for name, value in shares.items()]
    rows.append(["CPU time: the whole head", f"{whole:.3f}"])
    return markdown([["in units of the plain network and its softmax", ""], *rows], left=1)


def _cpu_seconds(step: Callable[[], Any], times: int = 5) -> float:
    step()
    found = []
    for _ in range(times):
        begin = time.process_time()
        step()
        found.append(time.process_time() - begin)
    return median(found)
