"""Methods: the contract, over the registry, on a small two moons."""

import dataclasses
from functools import partial

import pytest
import torch
from torch.utils.data import TensorDataset

from afield.backbones.resffn import ResFFN
from afield.engine import fit
from afield.methods import METHODS
from afield.metrics import METRICS
from afield.spectral import bounds_of, operator_norm
from afield.tasks import TASKS, Task


@pytest.fixture(scope="module")
def two_moons() -> Task:
    task = TASKS["two-moons"](0)
    cut = {part: TensorDataset(*(t[:300] for t in getattr(task, part).tensors)) for part in ("train", "val", "test")}
    return dataclasses.replace(task, **cut, backbone=partial(ResFFN, 2, depth=2, width=32))


@pytest.mark.parametrize("name", METHODS)
def test_method_contract(name: str, two_moons: Task):
    method, losses = METHODS[name], []
    model = fit(two_moons, method, epochs=60, learning_rate=5e-3, on_epoch=lambda _, loss: losses.append(loss))
    x, y = two_moons.test.tensors
    prediction = method.predict(model, x)
    assert len(losses) == 60
    assert losses[-1] < losses[0] / 2
    assert prediction.logits.shape == prediction.probs.shape == (300, 2)
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(300))
    assert METRICS["accuracy"](prediction, y) > 0.9
    assert not model.training


@pytest.mark.parametrize("name", METHODS)
def test_seed_decides_the_model(name: str, two_moons: Task):
    x = two_moons.test.tensors[0]
    first, again, other = (
        METHODS[name].predict(fit(two_moons, METHODS[name], seed=seed, epochs=2), x).probs for seed in (0, 0, 1)
    )
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(("name", "bounded"), [("dnn", 0), ("dnn-sn", 3), ("dnn-gp", 0), ("sngp", 3)])
def test_spectral_methods_bound_every_hidden_layer_and_the_others_none(name: str, bounded: int, two_moons: Task):
    model = fit(two_moons, METHODS[name], epochs=2)
    layers = [m for m in model.modules() if bounds_of(m)]
    assert len(layers) == bounded
    assert all(operator_norm(layer) < 0.96 for layer in layers)


def test_gp_methods_know_what_is_far_and_the_dense_ones_do_not(two_moons: Task):
    far = two_moons.ood["far"].tensors[0]
    confidence = {
        name: float(
            METHODS[name].predict(fit(two_moons, METHODS[name], epochs=60, learning_rate=5e-3), far).confidence.mean()
        )
        for name in ("dnn", "sngp")
    }
    assert confidence["dnn"] > 0.95
    assert confidence["sngp"] < 0.75
