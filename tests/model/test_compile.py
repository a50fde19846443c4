"""torch.compile, with its default backend where there is a C++ compiler, for a whole converted network."""

import copy
import shutil
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afield
from afield.bounds.residual import Residual

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),  # torch's own
]
BACKEND = "inductor" if shutil.which("g++") else "aot_eager"


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def network(kind: str) -> tuple[afield.SNGP, Tensor, Tensor]:
    torch.manual_seed(0)
    if kind == "dense":
        net = nn.Sequential(nn.Linear(5, 16), Residual(nn.Sequential(nn.Linear(16, 16), nn.ReLU())), nn.Linear(16, 3))
        x = torch.randn(60, 5)
    else:
        convolution = nn.Conv2d(1, 6, 3, padding=1, stride=2)
        net = nn.Sequential(convolution, nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3))
        x = torch.randn(60, 1, 8, 8)
    model = afield.sngp(net.double(), 0.9, num_random_features=300)
    model(x.double())  # takes the length scale
    return model, x.double(), torch.arange(60) % 3


def train(model: nn.Module, forward: nn.Module, x: Tensor, y: Tensor) -> None:
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["dense", "convolutions"])
def test_compiled_training_and_prediction_are_the_eager_ones(kind: str):
    model, x, y = network(kind)
    twin = copy.deepcopy(model)
    train(model, torch.compile(model, backend=BACKEND), x, y)
    train(twin, twin, x, y)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-6, atol=1e-8, equal_nan=True)

    afield.fit_posterior(model, [(x[:30], y[:30])])
    afield.calibrate(model, [(x[30:], y[30:])])
    compiled = torch.compile(model.predict, backend=BACKEND)
    for inputs in (x + 0.1, 100 * x[:7]):  # of reference inputs, a rounding could move the p-value by a step
        expected, found = model.predict(inputs), compiled(inputs)
        assert expected.p_value is not None
        for name, value in expected.numpy().items():
            torch.testing.assert_close(found.numpy()[name], value, rtol=1e-6, atol=1e-9)
