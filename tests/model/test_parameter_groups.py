"""`afield.parameter_groups`: every parameter once, output weights at a rate and decay of their own."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afield
from afield.model.layers import HEAD_RATE


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)
    )


def converted(**options: Any) -> afield.SNGP:
    return afield.sngp(network(), **{"num_random_features": 16, "ridge": 0.5, **options})


def settings_of(groups: list[dict[str, Any]], model: nn.Module) -> dict[str, tuple[float, float]]:
    """Learning rate and decay by the name of the parameter; each must be in one group alone."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = [(names[id(p)], (g["lr"], g["weight_decay"])) for g in groups for p in g["params"]]
    assert len(found) == len(dict(found))
    return dict(found)


@pytest.mark.parametrize("head_lr", [None, 0.3])
@pytest.mark.parametrize("num_examples", [None, 50])
def test_every_parameter_has_its_rate_and_decay(head_lr: float | None, num_examples: int | None) -> None:
    model = converted(constant=True)
    groups = afield.parameter_groups(model, lr=0.1, weight_decay=0.02, head_lr=head_lr, num_examples=num_examples)
    found = settings_of(groups, model)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    rate = HEAD_RATE * 0.1 if head_lr is None else head_lr
    assert found.pop("net.5.weight") == (rate, 0.0 if num_examples is None else 0.5 / 50)
    assert found.pop("net.5.constant") == (rate, 0.0)  # it is outside the prior
    matrices = {name for name, p in model.named_parameters() if p.dim() > 1}
    assert found == {name: (0.1, 0.02 if name in matrices else 0.0) for name in found}
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        kind(groups)  # all that an optimizer asks for is in them


def test_frozen_parameters_are_in_no_group() -> None:
    model = converted(bound=None, freeze=True)
    found = settings_of(afield.parameter_groups(model, lr=0.1, weight_decay=1.0), model)
    assert found == {"net.5.weight": (1.0, 0.0)}


def test_each_of_several_models_has_the_decay_of_its_own_prior() -> None:
    models = nn.ModuleList([converted(ridge=1.0), converted(ridge=4.0)])
    found = settings_of(afield.parameter_groups(models, lr=0.1, num_examples=8), models)
    assert [found[f"{i}.net.5.weight"][1] for i in (0, 1)] == [1 / 8, 4 / 8]
    assert found.keys() == {name for name, _ in models.named_parameters()}


def test_a_kept_output_layer_has_no_prior() -> None:
    model = afield.attach(network(), num_random_features=16)
    with pytest.raises(ValueError, match=r"nothing to train: afield\.attach freezes every parameter"):
        afield.parameter_groups(model, lr=0.1)
    model.requires_grad_(True)
    found = settings_of(afield.parameter_groups(model, lr=0.1, weight_decay=0.02, num_examples=8), model)
    assert found["net.5.mean.weight"] == (0.1, 0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be zero or more, and finite, got -1.0"),
        ({"lr": math.nan}, "lr must be zero or more, and finite, got nan"),
        ({"lr": 0.1, "head_lr": math.inf}, "head_lr must be zero or more, and finite, got inf"),
        ({"lr": 0.1, "weight_decay": -0.1}, "weight_decay must be zero or more, and finite, got -0.1"),
        ({"lr": 0.1, "num_examples": 0}, "num_examples must be the number of training examples, at least 1, got 0"),
    ],
)
def test_wrong_numbers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        afield.parameter_groups(converted(), **options)


def test_a_network_without_a_gaussian_process_is_refused() -> None:
    with pytest.raises(TypeError, match=r"expects a model that afield\.sngp made, got Sequential"):
        afield.parameter_groups(network(), lr=0.1)


# The prior's decay.


def solved(num_examples: int = 40) -> tuple[afield.SNGP, Tensor, Tensor]:
    """A frozen network whose output weights are the maximum of the posterior."""
    torch.manual_seed(0)
    x, y = torch.randn(num_examples, 5).double(), torch.arange(num_examples) % 3
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model = afield.sngp(net, None, freeze=True, num_random_features=16, ridge=2.0)
    afield.fit_head(model, [(x, y)])
    return model, x, y


def moved_by(kind: Any, **options: Any) -> float:
    """How far one step at the maximum of the posterior moves the output weights, in units of the learning rate."""
    model, x, y = solved()
    optimizer = kind(afield.parameter_groups(model, lr=1e-3, **options))
    before = copy.deepcopy(model.head.weight.data)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return float((model.head.weight.data - before).norm()) / 1e-2


def test_gradient_steps_with_the_decay_of_the_prior_rest_at_the_maximum_of_the_posterior() -> None:
    assert moved_by(torch.optim.SGD, num_examples=40) < 1e-5
    assert moved_by(torch.optim.SGD, num_examples=80) > 1e-3
    assert moved_by(torch.optim.SGD) > 1e-3


def test_decoupled_decay_does_not() -> None:
    assert moved_by(torch.optim.AdamW, num_examples=40) > 1e-3


def test_no_gradient_of_an_output_weight_exceeds_that_of_its_feature() -> None:
    """So that decoupled decay is at most sqrt(2 / D) of the prior's."""
    model, x, y = solved()
    for row, label in zip(x, y, strict=True):
        model.zero_grad()
        F.cross_entropy(model(row[None]), (label[None] + 1) % 3).backward()
        assert float(model.head.weight.grad.abs().max()) <= math.sqrt(2 / 16)
