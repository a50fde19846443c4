"""A stack answers as its members do, one by one."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import afield
from afield.backbones.resffn import ResFFN
from afield.errors import NotFitted
from afield.methods.ensemble import combine
from afield.methods.stacked import stack


def ffn(**head: object) -> afield.SNGP:
    net = nn.Sequential(ResFFN(2, depth=3, width=16), nn.Linear(16, 3))
    return afield.sngp(net, num_random_features=32, **head)


def cnn() -> afield.SNGP:
    convolution = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return afield.sngp(nn.Sequential(convolution, nn.Linear(4, 3)), num_random_features=16)


def dense() -> afield.SNGP:
    return afield.attach(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3)), num_random_features=16)


CASES: dict[str, tuple[Callable[[], afield.SNGP], tuple[int, ...]]] = {
    "bounded": (ffn, (2,)),
    "per_class": (lambda: ffn(covariance="per_class"), (2,)),
    "gaussian": (lambda: ffn(likelihood="gaussian"), (2,)),
    "batch_norm": (cnn, (1, 8, 8)),
    "attached": (dense, (2,)),
}


def members(make: Callable[[], afield.SNGP], shape: tuple[int, ...], *, calibrated: bool = True) -> list[afield.SNGP]:
    made = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = make().double()
        x, y = torch.randn(60, *shape, dtype=torch.float64), torch.arange(60) % 3
        y = y if model.head.likelihood == "categorical" else torch.randn(60, 3, dtype=torch.float64)
        if any(p.requires_grad for p in model.parameters()):
            optimizer = torch.optim.Adam(model.parameters(), 1e-2)
            for _ in range(5):  # bounds and batch statistics move
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
            with torch.no_grad():
                model.head.weight.normal_()
        model.eval()
        afield.fit_posterior(model, [(x, y)])
        if calibrated:
            afield.calibrate(model, [(x[: 40 + seed], y[: 40 + seed])])
        made.append(model)
    return made


@pytest.mark.parametrize("name", CASES)
def test_a_stack_is_its_members(name: str):
    make, shape = CASES[name]
    models = members(make, shape)
    x = 2 * torch.randn(20, *shape, dtype=torch.float64)
    expected = combine([model.predict(x) for model in models])
    stacked = stack(models)
    assert len(stacked) == 3
    ours = stacked.predict(x)
    assert ours._tensors().keys() == expected._tensors().keys()
    for field, tensor in expected._tensors().items():
        torch.testing.assert_close(ours._tensors()[field], tensor, rtol=1e-9, atol=1e-11, msg=field)
    assert ours.smallest_p_value == expected.smallest_p_value


def test_members_are_left_alone_and_their_changes_are_not_seen():
    models = members(ffn, (2,), calibrated=False)
    before = [copy.deepcopy(model.state_dict()) for model in models]
    x = torch.randn(4, 2, dtype=torch.float64)
    stacked = stack(models)
    first = stacked.predict(x)
    assert first.p_value is None
    for model, state in zip(models, before, strict=True):
        now = model.state_dict()
        assert all(torch.equal(value, now[key]) for key, value in state.items() if "root" not in key)
    with torch.no_grad():
        models[0].head.weight.zero_()
    torch.testing.assert_close(stacked.predict(x).probs, first.probs, rtol=0, atol=0)


class Two(nn.Module):
    """A network of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(2, 4), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.first(a) - self.second(b)))


def test_inputs_are_given_as_to_a_member():
    torch.manual_seed(0)
    models = [afield.sngp(Two(), num_random_features=16).double().eval() for _ in range(2)]
    a, b = torch.randn(2, 30, 2, dtype=torch.float64)
    for model in models:
        afield.fit_posterior(model, [(a, b, torch.arange(30) % 3)])
    expected = combine([model.predict(a, b) for model in models]).variance
    stacked = stack(models)
    for given in (stacked.predict(a, b), stacked.predict(a, b=b), stacked.predict({"a": a, "b": b})):
        torch.testing.assert_close(given.variance, expected, rtol=1e-9, atol=1e-11)


def test_errors():
    models = members(ffn, (2,))
    with pytest.raises(ValueError, match="at least one model"):
        stack([])
    with pytest.raises(TypeError, match=r"made by afield\.sngp or afield\.attach, got Linear"):
        stack([nn.Linear(2, 3)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="member 1 differs from member 0"):
        stack([models[0], *members(dense, (2,))])
    with pytest.raises(NotFitted, match="Member 1 is not fitted"):
        stack([models[0], ffn().double()])
