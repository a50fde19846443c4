"""Small networks: ten members as one stack, and ONNX Runtime against torch, one example at a time."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import afield
from afield.backbones.resffn import ResFFN
from afield.deploy.export import export
from afield.methods.ensemble import combine
from afield.methods.stacked import stack
from bench.speed.measure import Metrics, compared, measure, peer
from bench.speed.networks import fitted


def small(seed: int) -> afield.SNGP:
    torch.manual_seed(seed)
    return fitted(afield.sngp(nn.Sequential(ResFFN(2, depth=12, width=128), nn.Linear(128, 2))))


@measure("stack", "10 members of ResFFN-12-128 as one stack, batch 64 / one by one", 0.8)
def stacked() -> Metrics:
    members, x = [small(seed) for seed in range(10)], torch.randn(64, 2)
    together = stack(members)
    ours, theirs = together.predict(x), combine([member.predict(x) for member in members])
    assert ours.probs is not None
    assert theirs.probs is not None
    difference = float((ours.probs - theirs.probs).abs().max())
    assert difference < 1e-5
    timed = compared(lambda: together.predict(x), lambda: [m.predict(x) for m in members], pairs=15, calls=5)
    return timed | {"difference": difference}


@measure("onnx", "ONNX Runtime / torch eager, ResFFN-12-128, one example", 1.0)
def onnx() -> Metrics:
    runtime = peer("onnxruntime")
    model, x = small(0), torch.randn(1, 2)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        export(model, file, torch.randn(8, 2))
        session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
        inputs = {session.get_inputs()[0].name: x.numpy().astype(np.float32)}
        return compared(lambda: session.run(None, inputs), lambda: model.predict(x), pairs=15, calls=20)
