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
from afield.outputs.positions import BLOCK
from afield.prediction.predictive import mean_field
from bench.speed.measure import Metrics, compared, measure

CLASSES = 5


@measure("predict-unet", "predict every pixel, U-Net of width 32 attached, 8 images of 128 x 128 / dense", 1.10)
def predict_unet() -> Metrics:
    torch.manual_seed(0)
    net = nn.Sequential(UNet(width=32), nn.Conv2d(32, CLASSES, 1)).eval()
    model, x = afield.attach(net), torch.rand(8, 3, 128, 128)
    head, h = model.head, torch.rand(3000, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        head.observe(h[:2000], classes=torch.arange(2000) % CLASSES)
        assert head.joined_score is not None
        head.joined_score.fit(sources_of(head, h[2000:]))
        head.set_score("joined")
        head.set_reference(head.predict(h[2000:]).score(), draws=10)
        head.set_input_reference(torch.rand(100))
        found = compared(lambda: model.predict(x), lambda: net(x).softmax(1), pairs=7)
        return found | profile(head, model.hidden(x).flatten(0, -2), lambda: net(x).softmax(1))


def profile(head: GaussianProcessHead, rows: Tensor, network: Callable[[], Any]) -> Metrics:
    """CPU time of each step of the head over all pixels, in units of the network's: `of_...`."""
    head = head.snapshot()
    assert head.class_distance is not None
    assert head.joined_score is not None
    blocks = rows.split(BLOCK)
    psi = [head.variance_phi(h) for h in blocks]
    both = [head.posterior(h) for h in blocks]
    sources = [head.sources(*one, h) for one, h in zip(both, blocks, strict=True)]
    steps: dict[str, Callable[[], Any]] = {
        "features": lambda: [head.variance_phi(h) for h in blocks],
        "variance": lambda: [head.precision.variance(p) for p in psi],
        "class_distance": lambda: [head.class_distance(h) for h in blocks],  # type: ignore[misc]
        "joined": lambda: [head.joined_score(s) for s in sources],  # type: ignore[misc]
        "probabilities": lambda: [mean_field(*one) for one in both],
        "head": lambda: [head.predict(h) for h in blocks],
    }
    whole = _cpu_seconds(network)
    return {f"of_{name}": _cpu_seconds(step) / whole for name, step in steps.items()}


def _cpu_seconds(step: Callable[[], Any], times: int = 5) -> float:
    step()
    found = []
    for _ in range(times):
        begin = time.process_time()
        step()
        found.append(time.process_time() - begin)
    return median(found)
