"""Bounded layers, and models that have them, pickle and copy: the copy predicts, trains and folds as the original."""

import copy
import io
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import afield
from afield.bounds.spectral import bound, bound_of, bounds_of, fold


def by_pickle(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def by_torch(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


ways = pytest.mark.parametrize("way", [by_pickle, by_torch, copy.deepcopy])
Way = Callable[[nn.Module], nn.Module]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3 * 5 * 4, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    )


def data(n: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, 5, 4, generator=generator)
    return x, (x.mean((1, 2, 3)) * 20).long().clamp(0, 2)


def trained(bounds: object) -> afield.SNGP:
    model, (x, y) = afield.sngp(net(), bounds, num_random_features=32), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        step(model, optimizer)
    afield.fit_posterior(model, [(x, y)])
    afield.calibrate(model, [(x, y)])
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, y = data()
    model.train()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def same(a: afield.SNGP, b: afield.SNGP) -> None:
    x, _ = data(16)
    p, q = a.predict(x), b.predict(x)
    assert torch.equal(p.probs, q.probs)
    assert torch.equal(p.variance, q.variance)
    assert torch.equal(p.p_value, q.p_value)


RULES = {"bounded": 0.5, "unbounded": None, "batchnorm": {nn.Conv2d: 0.5, nn.BatchNorm2d: 0.5, nn.Linear: 0.5}}


@ways
@pytest.mark.parametrize("rules", RULES)
def test_a_model_comes_back_and_lives(rules: str, way: Way) -> None:
    model = trained(RULES[rules])
    model.predict(data(4)[0])  # weights are kept
    twin = way(model)
    same(model, twin)
    same(model, afield.fold(twin))
    assert twin.state_dict().keys() == model.state_dict().keys()
    assert [bounds_of(m).keys() for m in model.modules()] == [bounds_of(m).keys() for m in twin.modules()]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, fused=True) for m in (model, twin)]
    for _ in range(3):
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            step(one, optimizer)
    for (name, one), other in zip(twin.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@ways
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Linear(4, 4),
        lambda: nn.Conv1d(4, 4, 3),
        lambda: nn.Conv3d(1, 2, 2),
        lambda: nn.BatchNorm1d(4),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
    ],
)
def test_every_kind_of_layer_comes_back(build: Callable[[], nn.Module], way: Way) -> None:
    layer = bound(build(), 0.25)
    twin = way(layer)
    for name, one in bounds_of(layer).items():
        other = bound_of(twin, name)
        assert other is not None
        assert other is not one
        assert other.c == one.c
        assert torch.equal(getattr(twin.eval(), name), getattr(layer.eval(), name))
    assert isinstance(twin, type(layer).__mro__[1])
    assert type(fold(twin)) is type(build())
    assert twin.state_dict().keys() == layer.state_dict().keys()


@ways
def test_a_copy_of_a_copy_with_another_parametrisation(way: Way) -> None:
    layer = bound(nn.Linear(4, 4), 0.25)
    torch.nn.utils.parametrize.register_parametrization(layer, "bias", nn.Tanh())
    twin = way(way(layer)).eval()
    x = torch.randn(2, 4)
    assert torch.equal(twin(x), layer.eval()(x))


def test_a_pickled_convolution_follows_its_input() -> None:
    layer = by_pickle(bound(nn.Conv2d(1, 1, 3), 0.1))
    layer(torch.randn(1, 1, 5, 4))
    assert bound_of(layer).input_size == (5, 4)
    assert bound_of(by_pickle(layer)).input_size == (5, 4)


def test_a_batchnorm_bound_belongs_to_the_copy() -> None:
    layer = bound(nn.BatchNorm1d(3), 0.5)
    twin = by_pickle(layer)
    assert bound_of(twin)._layer[0] is twin


def predict_and_train(model: afield.SNGP, x: Tensor, results: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    p = model.predict(x)
    model.train()
    for _ in range(2):  # fused steps are counted in the new process too
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    steps = [int(b) for name, b in model.state_dict().items() if name.endswith("num_steps")]
    results.put((p.probs.numpy(), p.variance.numpy(), steps))


def test_a_spawned_process_predicts_and_trains() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3))
    model, x = afield.sngp(net, 0.5, num_random_features=16), torch.randn(32, 1, 5, 4)
    afield.fit_posterior(model, [(x, torch.arange(32) % 3)])
    here = model.predict(x)
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    child = spawn.Process(target=predict_and_train, args=(model, x, results))
    child.start()
    probs, variance, steps = results.get(timeout=240)
    child.join()
    assert child.exitcode == 0
    assert (probs == here.probs.numpy()).all()
    assert (variance == here.variance.numpy()).all()
    assert steps == [2, 2]
