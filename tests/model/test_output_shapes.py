"""Every shape of output passes one battery: convert, train a step, fit, calibrate, predict, valid p-values, save and
load to the bit, an export equal to torch, two processes equal to one. A new shape is one entry of `SHAPES`."""

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import afield
from afield.prediction.prediction import Prediction

CLASSES, FEATURES, POSITIONS = 3, 6, 8


@dataclass(frozen=True)
class Shape:
    """A kind of network by what it returns.

    net        makes it, untrained
    input      the shape of one input
    truth      inputs -> what the network should return, but for noise
    target     (truth, generator) -> targets
    loss       (returned, target) -> loss, as a user would write it
    options    of `afield.sngp` and `afield.attach`
    positions  where the network answers at several of each input
    """

    net: Callable[[], nn.Module]
    input: tuple[int, ...]
    truth: Callable[[Tensor], Tensor]
    target: Callable[[Tensor, torch.Generator], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    options: Mapping[str, Any] = field(default_factory=dict)
    positions: tuple[int, ...] = ()

    def data(self, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        # Inputs differ as wholes, by their size: their positions depend on each other.
        size = 0.5 + torch.rand(count, *[1] * len(self.input), generator=generator)
        x = size * torch.randn(count, *self.input, generator=generator)
        return x, self.target(self.truth(x), generator)


def convolutions(kind: type[nn.Module], outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(kind(CLASSES, FEATURES, 1), nn.Tanh(), kind(FEATURES, outputs, 1))


def linears(outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(CLASSES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, outputs))


def classes(dim: int) -> Callable[[Tensor, torch.Generator], Tensor]:
    def target(truth: Tensor, generator: torch.Generator) -> Tensor:
        noise = 0.5 * torch.randn(truth.shape, generator=generator)
        return (truth + noise).argmax(dim)

    return target


def ignoring(target: Callable[[Tensor, torch.Generator], Tensor]) -> Callable[[Tensor, torch.Generator], Tensor]:
    """A tenth of the positions have no label."""

    def some(truth: Tensor, generator: torch.Generator) -> Tensor:
        found = target(truth, generator)
        return found.masked_fill(torch.rand(found.shape, generator=generator) < 0.1, -100)

    return some


def numbers(truth: Tensor, generator: torch.Generator) -> Tensor:
    return truth + 0.3 * torch.randn(truth.shape, generator=generator)


def binary(truth: Tensor, generator: torch.Generator) -> Tensor:
    return (numbers(truth, generator)[:, 0] > 0).float()


def over_last(returned: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(returned.flatten(0, -2), target.flatten())


def first_channel(x: Tensor) -> Tensor:
    return x[:, :1]


SHAPES = {
    "one answer": Shape(linears, (CLASSES,), lambda x: x, classes(1)),
    "conv1d": Shape(functools.partial(convolutions, nn.Conv1d), (CLASSES, 9), lambda x: x, classes(1), positions=(9,)),
    "conv2d": Shape(
        functools.partial(convolutions, nn.Conv2d), (CLASSES, 3, 4), lambda x: x, ignoring(classes(1)), positions=(3, 4)
    ),
    "conv3d": Shape(
        functools.partial(convolutions, nn.Conv3d),
        (CLASSES, 2, 3, 2),
        lambda x: x,
        classes(1),
        positions=(2, 3, 2),
    ),
    "tokens": Shape(linears, (9, CLASSES), lambda x: x, ignoring(classes(-1)), over_last, positions=(9,)),
    "grid": Shape(linears, (3, 4, CLASSES), lambda x: x, classes(-1), over_last, positions=(3, 4)),
    "mask": Shape(
        functools.partial(convolutions, nn.Conv2d, 1),
        (CLASSES, 3, 4),
        first_channel,
        binary,
        lambda f, y: F.binary_cross_entropy_with_logits(f[:, 0], y),
        {"likelihood": "bernoulli"},
        positions=(3, 4),
    ),
    "depth": Shape(
        functools.partial(convolutions, nn.Conv2d, 1),
        (CLASSES, 3, 4),
        first_channel,
        numbers,
        F.mse_loss,
        {"likelihood": "gaussian"},
        positions=(3, 4),
    ),
    "depths": Shape(
        functools.partial(convolutions, nn.Conv1d),
        (CLASSES, 9),
        lambda x: x,
        numbers,
        F.mse_loss,
        {"likelihood": "gaussian"},
        positions=(9,),
    ),
    "numbers": Shape(linears, (CLASSES,), lambda x: x, numbers, F.mse_loss, {"likelihood": "gaussian"}),
    "correlated numbers": Shape(
        linears, (CLASSES,), lambda x: x, numbers, F.mse_loss, {"likelihood": "gaussian", "noise": "full"}
    ),
    "labels": Shape(
        linears,
        (CLASSES,),
        lambda x: x,
        lambda f, g: (numbers(f, g) > 0).float(),
        F.binary_cross_entropy_with_logits,
        {"likelihood": "bernoulli"},
    ),
    "labels of pixels": Shape(
        functools.partial(convolutions, nn.Conv2d),
        (CLASSES, 3, 4),
        lambda x: x,
        lambda f, g: (numbers(f, g) > 0).float(),
        F.binary_cross_entropy_with_logits,
        {"likelihood": "bernoulli"},
        positions=(3, 4),
    ),
    "varying noise": Shape(
        linears, (CLASSES,), lambda x: x, numbers, F.mse_loss, {"likelihood": "gaussian", "noise": "input"}
    ),
}
shapes = pytest.mark.parametrize("name", SHAPES)
PER_INPUT = [name for name, shape in SHAPES.items() if shape.positions]


def batches(*data: Tensor, size: int = 25) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*data), batch_size=size)


def train(net: nn.Module, shape: Shape, parameters: Any, steps: int) -> list[float]:
    x, y = shape.data(60)
    optimizer, losses = torch.optim.Adam(parameters, lr=0.02), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = shape.loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@functools.cache
def network(name: str) -> nn.Module:
    """Trained a little, so that calibration is not of a guess."""
    torch.manual_seed(0)
    net = SHAPES[name].net()
    train(net, SHAPES[name], net.parameters(), 60)
    return net


@functools.cache
def fitted(name: str, how: str) -> afield.SNGP:
    """Converted, trained if it is to be trained, fitted; nobody may change it."""
    shape, options = SHAPES[name], dict(SHAPES[name].options)
    options |= {"num_random_features": 32}
    model = getattr(afield, how)(network(name), **options)
    if how == "sngp":
        train(model, shape, afield.parameter_groups(model, lr=0.02), 15)
    afield.fit_posterior(model, batches(*shape.data(60)), num_positions=POSITIONS)
    return model


def calibrated(name: str, how: str, seed: int = 1, count: int = 60) -> afield.SNGP:
    """With a given amplitude and scale, which are not what is tested here, and take the time."""
    model, options = fitted(name, how), {"amplitude": 1.0}
    if fitted(name, how).predict(SHAPES[name].data(1)[0]).probs is not None:
        options |= {"logit_scale": 1.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", afield.errors.NoBetterThanGuessing)  # a network of fifteen steps may be
        afield.calibrate(model, batches(*SHAPES[name].data(count, seed)), num_positions=POSITIONS, **options)
    return model


def answers(prediction: Prediction) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in prediction.numpy().items()} | {"score": prediction.score()}


@shapes
def test_a_converted_network_trains_and_returns_what_the_network_returned(name: str) -> None:
    shape = SHAPES[name]
    model, x = afield.sngp(network(name), num_random_features=32, **shape.options), shape.data(5)[0]
    assert model(x).shape == network(name)(x).shape
    losses = train(model, shape, afield.parameter_groups(model, lr=0.05), 4)
    assert losses[-1] < losses[0]


@shapes
def test_an_attached_network_keeps_its_answers(name: str) -> None:
    shape, x = SHAPES[name], SHAPES[name].data(5)[0]
    torch.testing.assert_close(afield.attach(network(name), **shape.options)(x), network(name)(x))


@shapes
@pytest.mark.parametrize("how", ["sngp", "attach"])
def test_a_prediction_has_the_dimensions_of_its_positions_behind_the_batch(name: str, how: str) -> None:
    shape, model = SHAPES[name], calibrated(name, how)
    x, n = shape.data(7, seed=2)[0], 7
    p = model.predict(x)
    outputs = model.head.out_features
    assert len(p) == n
    assert p.positions == shape.positions
    assert p.logits.shape == (n, outputs, *shape.positions)
    assert p.variance is not None
    assert p.variance.shape in ((n, *shape.positions), (n, outputs, *shape.positions))
    for found in (p.score(), p.p_value, p.accept(0.2), p.score("variance")):
        assert found is not None
        assert found.shape == (n, *shape.positions)
    if p.has_labels:
        assert p.probs is not None
        assert p.labels.shape == p.confidence.shape == p.probs.shape == p.logits.shape
    elif p.probs is not None:
        torch.testing.assert_close(p.probs.sum(1), torch.ones(n, *shape.positions))
        assert p.labels.shape == p.confidence.shape == p.score("entropy").shape == (n, *shape.positions)
    else:
        assert p.mean.shape == p.std.shape == p.interval()[0].shape == (n, outputs, *shape.positions)
    assert p.accept_inputs(0.2).shape == (n,)
    rows = p.rows()
    assert len(rows) == n * torch.Size(shape.positions).numel()
    assert torch.equal(rows.score(), p.score().flatten())
    one = model.predict(x[2:3])
    torch.testing.assert_close(one.variance, p[2].variance)
    torch.testing.assert_close(Prediction.cat([p[:3], p[3:]]).score(), p.score())


@shapes
def test_p_values_are_valid_over_repeated_splits(name: str) -> None:
    """On average over draws of held-out data, at most alpha of fresh inputs, and of their positions, are refused."""
    alpha, repeats, refused, whole = 0.25, 16, [], []
    for repeat in range(repeats):
        model = calibrated(name, "attach", seed=10 + repeat, count=40)
        p = model.predict(SHAPES[name].data(60, seed=500 + repeat)[0])
        refused.append(1 - p.accept(alpha).float().mean())
        whole.append(1 - p.accept_inputs(alpha).float().mean())
    for found in (refused, whole):
        rate = torch.stack(found)
        error = float(rate.std()) / repeats**0.5
        assert float(rate.mean()) <= alpha + 3 * error
    assert float(torch.stack(whole).mean()) >= alpha - 1 / 14 - 3 * error  # and they are not idle


@shapes
@pytest.mark.parametrize("how", ["sngp", "attach"])
def test_saved_and_loaded_it_answers_to_the_bit(name: str, how: str, tmp_path: Path) -> None:
    model, x = calibrated(name, how), SHAPES[name].data(5, seed=3)[0]
    loaded = afield.load(afield.save(model, tmp_path), SHAPES[name].net())
    ours, theirs = answers(model.predict(x)), answers(loaded.predict(x))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[field], theirs[field]) for field in ours)


@pytest.mark.slow
@shapes
@pytest.mark.parametrize("how", ["sngp", "attach"])
def test_an_export_answers_as_torch_does(name: str, how: str, tmp_path: Path) -> None:
    """`export` compares the two itself, and writes nothing if they differ; here is a batch that it has not seen."""
    ort = pytest.importorskip("onnxruntime")
    from afield.deploy.export import export

    model, x = calibrated(name, how), SHAPES[name].data(11, seed=4)[0]
    exported = export(model, tmp_path / "model.onnx", SHAPES[name].data(6)[0])
    session, p = ort.InferenceSession(str(exported.file)), model.predict(x)
    names = [output.name for output in session.get_outputs()]
    found = dict(zip(names, session.run(None, {session.get_inputs()[0].name: x.numpy()}), strict=True))
    assert {"input_score", "input_p_value", "input_accepted"} <= set(names) or not p.positions
    expected = {n: t for n, t in answers(p).items() if n in found} | {"accepted": p.accept(exported.metadata["alpha"])}
    for field_name, values in expected.items():
        torch.testing.assert_close(torch.from_numpy(found[field_name]), values, rtol=1e-3, atol=1e-4)


def _fit_on_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name in SHAPES:
        model = afield.attach(network(name), num_random_features=32, **SHAPES[name].options).double()
        x, y = SHAPES[name].data(31)
        x, y = x.double(), y.double() if y.is_floating_point() else y
        afield.fit_posterior(model, batches(x, y, size=7), num_positions=POSITIONS, progress=False)
        if rank == 1:
            torch.save(model.head.precision.data, Path(folder, f"{name}.pt"))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_fit_as_one(tmp_path: Path) -> None:
    for name in SHAPES:
        network(name)  # trained before the fork
    mp.start_processes(_fit_on_a_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    for name, shape in SHAPES.items():
        model = afield.attach(network(name), num_random_features=32, **shape.options).double()
        x, y = shape.data(31)
        x, y = x.double(), y.double() if y.is_floating_point() else y
        afield.fit_posterior(model, batches(x, y), num_positions=POSITIONS)
        torch.testing.assert_close(torch.load(tmp_path / f"{name}.pt"), model.head.precision.data)
