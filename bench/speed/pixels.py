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
from afield.model.calibration import AT_POSITIONS, sources_of
from afield.outputs.positions import BLOCK
from afield.prediction.p_values import with_p_values
from afield.prediction.predictive import mean_field
from bench.defaults import markdown
from bench.speed.measure import Metrics, compared, measure

CLASSES = 5
STEPS = {
    "features": "random features",
    "variance": "variance",
    "mean": "logits",
    "probabilities": "probabilities",
    "p_values": "entropy and p-values",
}


@measure("predict-unet", "predict every pixel, U-Net of width 32 attached, 8 images of 128 x 128 / dense", 1.10)
def predict_unet() -> Metrics:
    """As `afield.calibrate` leaves it by default: p-values rest on the entropy; `joined_ratio` is with joined=True."""
    torch.manual_seed(0)
    net = nn.Sequential(UNet(width=32), nn.Conv2d(32, CLASSES, 1)).eval()
    model, x = afield.attach(net), torch.rand(8, 3, 128, 128)
    head, h = model.head, torch.rand(3000, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        head.observe(h[:2000], classes=torch.arange(2000) % CLASSES)
        assert head.joined_score is not None
        head.joined_score.fit(sources_of(head, h[2000:]))
        head.set_score(AT_POSITIONS)
        head.set_reference(head.predict(h[2000:]).score(AT_POSITIONS), draws=10)
        head.set_input_reference(torch.rand(100))

        def dense() -> Tensor:
            return net(x).softmax(1)

        found = compared(lambda: model.predict(x), dense, pairs=7)
        found["joined_ratio"] = compared(lambda: model.predict(x, joined=True), dense, pairs=5)["ratio"]
        return found | profile(head, model.hidden(x).flatten(0, -2), dense)


def profile(head: GaussianProcessHead, rows: Tensor, network: Callable[[], Any]) -> Metrics:
    """CPU time of each step of the head over all pixels, in units of the network's: `of_...`."""
    head = head.snapshot()
    head.joined_score = None
    blocks = rows.split(BLOCK)
    psi = [head.variance_phi(h) for h in blocks]
    both = [head.posterior(h) for h in blocks]
    found = [head.predict(h) for h in blocks]
    steps: dict[str, Callable[[], Any]] = {
        "features": lambda: [head.variance_phi(h) for h in blocks],
        "variance": lambda: [head.precision.variance(p) for p in psi],
        "mean": lambda: [head.mean_of(h, None) for h in blocks],
        "probabilities": lambda: [mean_field(*one) for one in both],
        "p_values": lambda: [with_p_values(p, head.reference, head.reference_spans, 10) for p in found],
        "head": lambda: [head.predict(h) for h in blocks],
    }
    whole = _cpu_seconds(network)
    return {f"of_{name}": _cpu_seconds(step) / whole for name, step in steps.items()}


def table(record: dict[str, float]) -> str:
    """Markdown: where the time goes, of the record of `predict-unet`."""
    shares = {name.removeprefix("of_"): value for name, value in record.items() if name.startswith("of_")}
    whole = shares.pop("head")
    rows = [
        ["a prediction", f"{record['ratio']:.2f}"],
        ["the same with the joined score", f"{record['joined_ratio']:.2f}"],
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
