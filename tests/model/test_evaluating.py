"""Evaluation mode: whatever is changed about the modules of a network between two passes, it is noticed."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from afield.model.evaluating import evaluating


class Mode(nn.Module):
    """Returns what it is given, and notes its mode."""

    seen: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.training
        return x


def network() -> nn.Sequential:
    net = nn.Sequential(nn.Sequential(Mode(), Mode()), Mode()).eval()
    with evaluating(net):
        net(torch.zeros(1))
    return net


def replace_in_the_dictionary(net: nn.Sequential) -> None:
    net[0]._modules["1"] = Mode()


def replace_the_dictionary(net: nn.Sequential) -> None:
    net[0]._modules = {"0": Mode()}


def remove_and_add(net: nn.Sequential) -> None:
    del net[0][0]
    net[0].append(Mode())


CHANGES = {
    "train": lambda net: net.train(),
    "train one": lambda net: net[0][1].train(),
    "flag": lambda net: setattr(net[1], "training", True),
    "append": lambda net: net[0].append(Mode()),
    "below a leaf": lambda net: net[1].add_module("child", Mode()),
    "set": lambda net: net.__setitem__(1, Mode()),
    "dictionary": replace_in_the_dictionary,
    "another dictionary": replace_the_dictionary,
    "remove and add": remove_and_add,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_trains_is_noticed_and_trains_again_afterwards(change: str) -> None:
    net = network()
    CHANGES[change](net)
    modes = {m: m.training for m in net.modules()}
    assert any(modes.values())
    for _ in range(2):
        with evaluating(net):
            net(torch.zeros(1))
            assert not any(m.training for m in net.modules())
        assert {m: m.training for m in net.modules()} == modes
    assert not any(m.seen for m in net.modules() if isinstance(m, Mode))


def test_copies_look_at_their_own_modules() -> None:
    net = network()
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), copy.copy(net)):
        twin._modules = {"0": Mode()}  # which trains
        with evaluating(twin):
            twin(torch.zeros(1))
        assert twin[0].seen is False
        assert not any(m.training for m in net.modules())


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_scripted_modules_are_walked() -> None:
    net = nn.Sequential(torch.jit.script(nn.Dropout(0.5)), nn.Dropout(0.5))
    x = torch.ones(1000)
    for _ in range(2):
        with evaluating(net):
            assert torch.equal(net(x), x)
        assert net.training
        assert net[0].training
