"""Predictions at every pixel, against the same U-Net with its 1x1 convolution and a softmax."""

import torch
from torch import nn

import afield
from afield.backbones.unet import UNet
from afield.model.calibration import sources_of
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
        return compared(lambda: model.predict(x), lambda: net(x).softmax(1), pairs=7)
