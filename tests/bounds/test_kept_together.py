"""The kept weights of a network are compared at once: every change of one of them is still noticed."""

import copy
import pickle
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from afield.bounds.spectral import bound, fold
from afield.bounds.weight_cache import KeptWeight, kept_weights
from tests.bounds.test_weight_cache import CHANGES, made

NUMBER = 2  # of the layer that is changed


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [bound(nn.Linear(4, 4), 0.3) for _ in range(3)]
    return nn.Sequential(
        *layers, nn.Unflatten(1, (1, 2, 2)), *[bound(nn.Conv2d(1, 1, 1), 0.3) for _ in range(3)]
    ).eval()


@torch.no_grad()
def run(net: nn.Module, x: Tensor) -> Tensor:
    with kept_weights(net):
        return net(x)


def compared(net: nn.Module, x: Tensor) -> int:
    """How many layers compare for themselves in one pass."""
    with mock.patch.object(KeptWeight, "stands", autospec=True, side_effect=KeptWeight.stands) as stands:
        run(net, x)
    return stands.call_count


def started() -> tuple[nn.Sequential, Tensor]:
    net, x = network(), torch.randn(3, 4)
    run(net, x)
    return net, x


def test_layers_do_not_compare_for_themselves() -> None:
    net, x = started()
    assert compared(net, x) == 0
    assert made(lambda: run(net, x)) == 0
    assert torch.equal(run(net, x), fold(net)(x))
    with torch.no_grad():  # outside of the context they do
        with mock.patch.object(KeptWeight, "stands", autospec=True, side_effect=KeptWeight.stands) as stands:
            net(x)
        assert stands.call_count == 6


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_one_layer_is_noticed(change: str) -> None:
    net, x = started()
    before = run(net, x)
    layer = net[NUMBER]
    CHANGES[change](layer, torch.randn(3, 4))
    after = run(net, x)
    assert torch.equal(after, fold(net)(x))
    assert not torch.equal(after, before)
    run(net, x)
    assert compared(net, x) == 0  # together again
    assert torch.equal(run(net, x), after)


@pytest.mark.parametrize("change", [lambda n: n.half().float(), lambda n: n.double(), lambda n: n.bfloat16()])
def test_another_precision_is_noticed(change) -> None:
    net, x = started()
    change(net)
    x = x.to(next(net.parameters()).dtype)
    assert torch.equal(run(net, x), fold(net)(x))
    run(net, x)
    assert torch.equal(run(net, x), fold(net)(x))


def test_another_layer_is_noticed() -> None:
    net, x = started()
    net[NUMBER] = bound(nn.Linear(4, 4), 0.1).eval()
    assert torch.equal(run(net, x), fold(net)(x))


def test_after_a_pass_with_gradients_layers_are_compared_together_again() -> None:
    net, x = started()
    out = net(x)  # which drops what was kept
    assert torch.equal(run(net, x), out)
    run(net, x)
    assert made(lambda: run(net, x)) == 0
    assert compared(net, x) == 0


def test_writing_into_what_was_read_does_not_change_the_network() -> None:
    net, x = started()
    out = run(net, x)
    with torch.no_grad():
        net[NUMBER].weight.zero_()
    assert torch.equal(run(net, x), out)


def test_gradients_flow_where_a_network_asks_for_them() -> None:
    class WithGradient(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return self.net(x)

    net, x = started()
    outer = WithGradient(net)
    run(net, x)
    with torch.no_grad(), kept_weights(net):
        assert outer(x).requires_grad


def test_functional_call_inside_a_pass_uses_its_own_weights() -> None:
    net, x = started()
    other = torch.randn(4, 4)
    name = f"{NUMBER}.parametrizations.weight.original"
    with torch.no_grad():
        expected = torch.func.functional_call(net, {name: other}, (x,))
        with kept_weights(net):
            assert torch.equal(torch.func.functional_call(net, {name: other}, (x,)), expected)
    assert not torch.equal(run(net, x), expected)


def test_copies_share_nothing() -> None:
    net, x = started()
    run(net, x)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        with torch.no_grad():
            twin[NUMBER].parametrizations["weight"].original.data.mul_(-1)
        assert torch.equal(run(twin, x), fold(twin)(x))
        assert torch.equal(run(net, x), fold(net)(x))


CONV = 4  # of the layers, a convolution


def own_forward(layer: nn.Module) -> None:
    """As libraries do that move a layer to another device, or to fewer bits, for its pass."""
    then = layer.forward
    layer.forward = lambda x: 3 * then(x)


def hook_before(layer: nn.Module) -> None:
    layer.register_forward_pre_hook(lambda _, args: (args[0] + 1,))


def hook_after(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda _, args, out: 3 * out)


def bias_of(layer: nn.Module) -> None:
    class Shifted(nn.Module):
        def forward(self, bias: Tensor) -> Tensor:
            return bias + 1

    parametrize.register_parametrization(layer, "bias", Shifted().eval())


def pad(layer: nn.Module) -> None:
    layer.padding, layer.padding_mode, layer._reversed_padding_repeated_twice = (1, 1), "circular", [1, 1, 1, 1]


@pytest.mark.parametrize("change", [own_forward, hook_before, hook_after, bias_of, pad])
def test_what_else_a_convolution_does_is_noticed(change: Callable[[nn.Module], None]) -> None:
    net, x = started()
    before = run(net, x)
    change(net[CONV])
    with torch.no_grad():
        expected = net(x)  # outside of the context
    assert expected.shape != before.shape or not torch.equal(expected, before)
    for _ in range(3):
        assert torch.equal(run(net, x), expected)


@pytest.mark.parametrize("register", [nn.Module.register_forward_pre_hook, nn.Module.register_forward_hook])
def test_a_hook_runs_until_it_is_removed(register: Callable[..., RemovableHandle]) -> None:
    net, x = started()
    before, seen = run(net, x), []
    handle = register(net[CONV], lambda *_: seen.append(1))
    for count in range(1, 4):
        assert torch.equal(run(net, x), before)
        assert len(seen) == count
    assert compared(net, x) == 0  # with the hook, too
    handle.remove()
    for _ in range(2):
        assert torch.equal(run(net, x), before)
    assert compared(net, x) == 0
    assert len(seen) == 4


def test_a_layer_with_another_convolution_keeps_it() -> None:
    class Doubled(nn.Conv2d):
        def _conv_forward(self, *args: object) -> Tensor:
            return 2 * super()._conv_forward(*args)

    net, x = started()
    net[CONV] = bound(Doubled(1, 1, 1), 0.3).eval()
    for _ in range(4):
        out = run(net, x)
        assert torch.equal(out, fold(net)(x))
