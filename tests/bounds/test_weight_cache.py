"""Bounded weights are kept in evaluation, and every change of what they are made of is noticed."""

import copy
import threading
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from afield.bounds.spectral import _Bound, bound, bound_of, fold
from afield.bounds.weight_cache import kept_weights

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 4), (3, 6)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, padding=1), (3, 2, 7)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, stride=2, padding=1), (3, 2, 5, 4)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), (3, 1, 3, 4, 3)),
    "batchnorm": (lambda: nn.BatchNorm2d(2), (3, 2, 5, 4)),
}
kinds = pytest.mark.parametrize("kind", LAYERS)


def make(kind: str, c: float = 0.3) -> tuple[nn.Module, Tensor]:
    """A bounded layer in evaluation mode whose weight is kept, and an input."""
    torch.manual_seed(0)
    build, shape = LAYERS[kind]
    layer, x = bound(build(), c).eval(), torch.randn(shape)
    with torch.no_grad():
        layer(x)
        layer(x)
    return layer, x


def original(layer: nn.Module) -> nn.Parameter:
    return layer.parametrizations["weight"].original


def made(run: Callable[[], object]) -> int:
    """How often a bounded weight is made while this runs."""
    with mock.patch.object(_Bound, "forward", autospec=True, side_effect=_Bound.forward) as forward:
        run()
    return forward.call_count


@torch.no_grad()
def check(layer: nn.Module, x: Tensor) -> None:
    """The layer computes what it would without a cache, and then keeps its weight."""
    chain = layer.parametrizations["weight"]
    exact = chain[0].forward(chain.original)
    out = layer(x)
    assert torch.equal(layer.weight, exact)
    assert torch.equal(out, fold(layer)(x))
    assert made(lambda: layer(x)) == 0


@kinds
def test_weight_is_made_once_and_is_the_same_bit_for_bit(kind: str) -> None:
    layer, x = make(kind)
    with torch.no_grad():
        assert made(lambda: [layer(x) for _ in range(5)]) == 0
    check(layer, x)


def scale(layer: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        original(layer).mul_(-2)


def write_data(layer: nn.Module, x: Tensor) -> None:
    """As averages of weights are swapped in: no version counts up."""
    original(layer).data.copy_(torch.randn_like(original(layer)))


def replace_data(layer: nn.Module, x: Tensor) -> None:
    original(layer).data = torch.randn_like(original(layer))


def replace_parameter(layer: nn.Module, x: Tensor) -> None:
    layer.parametrizations["weight"].original = nn.Parameter(torch.randn_like(original(layer)))


def assign_weight(layer: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        torch.nn.init.normal_(original(layer))


def load(layer: nn.Module, x: Tensor) -> None:
    other = copy.deepcopy(layer)
    scale(other, x)
    layer.load_state_dict(other.state_dict())


def load_by_assignment(layer: nn.Module, x: Tensor) -> None:
    other = copy.deepcopy(layer)
    scale(other, x)
    layer.load_state_dict(other.state_dict(), assign=True)


def another_bound(layer: nn.Module, x: Tensor) -> None:
    bound(layer, 0.1)


def train_a_step(optimizer: Callable[..., torch.optim.Optimizer]) -> Callable[[nn.Module, Tensor], None]:
    """A step whose forward and backward pass were in evaluation mode: only the optimizer writes."""

    def train(layer: nn.Module, x: Tensor) -> None:
        steps = optimizer(layer.parameters(), 0.5)
        layer(x).square().sum().backward()
        steps.step()

    return train


def train_and_evaluate(layer: nn.Module, x: Tensor) -> None:
    layer.train()
    scale(layer, x)
    layer(2 * x + 1)
    layer.eval()


CHANGES: dict[str, Callable[[nn.Module, Tensor], None]] = {
    "in place": scale,
    "data.copy_": write_data,
    "data =": replace_data,
    "new parameter": replace_parameter,
    "init": assign_weight,
    "load_state_dict": load,
    "load_state_dict by assignment": load_by_assignment,
    "bound": another_bound,
    "sgd": train_a_step(torch.optim.SGD),
    "sgd fused": train_a_step(lambda p, lr: torch.optim.SGD(p, lr, fused=True)),
    "adam fused": train_a_step(lambda p, lr: torch.optim.Adam(p, lr, fused=True)),
    "train and evaluate": train_and_evaluate,
}


@kinds
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_the_weight_is_noticed(kind: str, change: str) -> None:
    layer, x = make(kind)
    with torch.no_grad():
        before = layer.weight
    CHANGES[change](layer, x)
    check(layer, x)
    with torch.no_grad():
        assert not torch.equal(layer.weight, before)


@kinds
@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.float64])
def test_another_precision_is_noticed(kind: str, to: torch.dtype) -> None:
    layer, x = make(kind)
    layer.to(to)
    with torch.no_grad():
        assert layer.weight.dtype == to
    check(layer, x.to(to))


def test_another_memory_format_is_noticed() -> None:
    layer, x = make("conv2d")
    layer.to(memory_format=torch.channels_last)
    check(layer, x)


def test_a_transposed_weight_is_noticed() -> None:
    layer = bound(nn.Linear(4, 4), 0.3).eval()
    with torch.no_grad():
        layer(torch.randn(1, 4))
        original(layer).data = original(layer).data.t()
    check(layer, torch.randn(2, 4))


@pytest.mark.parametrize("name", ["u", "v"])
@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_other_vectors_are_noticed(kind: str, name: str) -> None:
    layer, x = make(kind)
    getattr(bound_of(layer), name).mul_(2)
    check(layer, x)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.running_var.mul_(9),
        lambda layer: layer.running_var.data.mul_(9),
        lambda layer: setattr(layer, "eps", 10.0),
        lambda layer: nn.functional.batch_norm(
            torch.randn(9, 2, 5, 4), layer.running_mean, layer.running_var, training=True
        ),
    ],
)
def test_other_statistics_are_noticed(change: Callable[[nn.Module], object]) -> None:
    layer, x = make("batchnorm")
    change(layer)
    check(layer, x)


def test_a_state_without_an_input_size_is_noticed() -> None:
    """The convolution must look at its next input again, or it would compute with the weight as it is."""
    layer, x = make("conv2d")
    layer.load_state_dict(bound(LAYERS["conv2d"][0](), 0.3).state_dict())
    with torch.no_grad():
        layer(x)
    assert bound_of(layer).input_size == (5, 4)
    check(layer, x)


@kinds
def test_writing_into_what_was_read_does_not_change_the_layer(kind: str) -> None:
    layer, x = make(kind)
    with torch.no_grad():
        out = layer(x)
        layer.weight.zero_()
        assert torch.equal(layer(x), out)


@kinds
def test_with_gradients_nothing_is_kept(kind: str) -> None:
    layer, x = make(kind)
    assert made(lambda: layer(x)) == 1
    assert layer.weight.requires_grad
    layer(x).sum().backward()
    assert original(layer).grad is not None
    check(layer, x)


@kinds
def test_in_training_nothing_is_kept(kind: str) -> None:
    layer, x = make(kind)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        for _ in range(2):
            for one in (layer, twin):
                scale(one.train(), x)
                one(x)
            assert made(lambda: layer.weight) == 1
        assert int(bound_of(layer).num_steps) == 2
        assert all(value is None for name, value in vars(layer).items() if name.startswith("_kept"))
    check(layer.eval(), x)


@kinds
def test_copies_share_nothing(kind: str) -> None:
    layer, x = make(kind)
    twin = copy.deepcopy(layer)
    write_data(twin, x)
    check(twin, x)
    check(layer, x)
    with torch.no_grad():
        assert not torch.equal(layer.weight, twin.weight)
        assert layer.weight.data_ptr() != twin.weight.data_ptr()


@kinds
def test_functional_call_uses_its_own_weights(kind: str) -> None:
    layer, x = make(kind)
    other = copy.deepcopy(layer)
    write_data(other, x)
    with torch.no_grad():
        out, theirs = layer(x), other(x)
        weights = {"parametrizations.weight.original": original(other).detach()}
        assert torch.equal(torch.func.functional_call(layer, weights, (x,)), theirs)
        assert torch.equal(layer(x), out)
        stacked = torch.stack([original(layer), original(other)])
        both = torch.vmap(
            lambda w: torch.func.functional_call(layer, {"parametrizations.weight.original": w}, (x,))
        )(stacked)  # fmt: skip
        torch.testing.assert_close(both, torch.stack([out, theirs]))
        assert torch.equal(layer(x), out)


@kinds
def test_inference_mode_keeps_a_plain_tensor(kind: str) -> None:
    layer, x = make(kind)
    scale(layer, x)
    with torch.inference_mode():
        layer(x)
        assert made(lambda: layer(x)) == 0
    with torch.no_grad():
        assert not layer.weight.is_inference()
    check(layer, x)
    layer(x).sum().backward()


def test_inference_tensors_have_no_version_and_are_not_kept() -> None:
    with torch.inference_mode():
        layer, x = make("conv2d")
        assert torch.equal(layer(x), layer(x))


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_trace_follows_the_parameters() -> None:
    layer, x = make("linear", 100.0)
    with torch.no_grad():
        traced = torch.jit.trace(layer, x)
        scale(layer, x)
        assert torch.equal(traced(x), layer(x))


@pytest.mark.slow
def test_a_compiled_layer_follows_the_parameters() -> None:
    layer, x = make("conv2d")
    compiled = torch.compile(layer, backend="aot_eager")
    try:
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(compiled(x), layer(x))
                scale(layer, x)
    finally:
        torch._dynamo.reset()


def test_hooks_still_run() -> None:
    layer, x = make("conv2d")
    seen: list[str] = []
    layer.register_forward_pre_hook(lambda *_: seen.append("before"))
    layer.register_forward_hook(lambda *_: seen.append("after"))
    with torch.no_grad():
        layer(x)
    with torch.no_grad(), torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append("all")):
        fold(layer)(x)
        make("conv2d")[0](x)
    assert seen[:2] == ["before", "after"]
    assert "all" in seen[2:]


def test_a_second_parametrisation_is_not_kept() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = 2.0

        def forward(self, weight: Tensor) -> Tensor:
            return self.by * weight

    layer, x = make("linear")
    second = Scale()
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", second)
    with torch.no_grad():
        out = layer(x)
        second.by = 3.0
        assert not torch.equal(layer(x), out)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("number", [1, 5])  # of layers: few compare for themselves, many together
def test_a_second_parametrisation_is_noticed_when_the_weight_is_kept_already(number: int) -> None:
    net = nn.Sequential(*(bound(nn.Linear(4, 4), 0.3) for _ in range(number))).eval()
    x = torch.randn(2, 4)
    for _ in range(3):
        with torch.no_grad(), kept_weights(net):
            before = net(x)
    with torch.no_grad():
        parametrize.register_parametrization(net[0], "weight", Twice().eval())
    with torch.no_grad(), kept_weights(net):
        after = net(x)
        chain = net[0].parametrizations["weight"]
        assert torch.equal(net[0].weight, 2 * chain[0](chain.original))
    assert not torch.equal(after, before)


def test_attention_keeps_its_projections() -> None:
    layer, x = bound(nn.MultiheadAttention(4, 2, batch_first=True), 0.3).eval(), torch.randn(2, 3, 4)
    with torch.no_grad():
        out = layer(x, x, x)[0]
        assert made(lambda: layer(x, x, x)) == 0
        layer.parametrizations["in_proj_weight"].original.data.mul_(-1)
        assert torch.equal(layer(x, x, x)[0], fold(layer)(x, x, x)[0])
        assert not torch.equal(layer(x, x, x)[0], out)


def test_threads_read_one_weight_or_the_other() -> None:
    """Some predict while one swaps weights: once it has ended, nobody reads an old one."""
    layer, x = make("conv2d")
    other = copy.deepcopy(layer)
    write_data(other, x)
    swaps, errors = 200, []
    first, second = original(layer).detach().clone(), original(other).detach().clone()

    def read() -> None:
        try:
            with torch.no_grad():
                while not done.is_set():
                    layer(x)
        except BaseException as error:
            errors.append(error)

    done = threading.Event()
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    with torch.no_grad():
        for swap in range(swaps):
            original(layer).data.copy_(second if swap % 2 else first)
            assert torch.equal(layer(x), fold(layer)(x))
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
    check(layer, x)
