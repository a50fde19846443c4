"""The network's own output is compared with the logits of the head: whatever is accepted keeps the network's class."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afield
from afield.errors import WrongOutput

SMALL: dict[str, Any] = {"num_random_features": 32}
CONVERT = [afield.sngp, afield.attach]


class Body(nn.Module):
    """A hidden layer, an output layer `fc`, and something after it."""

    def __init__(self, after: Callable[[Tensor], Any], outputs: int = 4) -> None:
        super().__init__()
        self.hidden, self.fc, self.after = nn.Linear(3, 8), nn.Linear(8, outputs), after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.fc(torch.relu(self.hidden(x))))


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Plain:
    """Neither a tuple, nor a mapping, nor a dataclass."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def batch(n: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, generator=generator), torch.arange(n) % 4


ALLOWED: dict[str, Callable[[Tensor], Any]] = {
    "logits": lambda f: f,
    "softmax": lambda f: f.softmax(-1),
    "log_softmax": lambda f: F.log_softmax(f, dim=-1),
    "sigmoid": torch.sigmoid,
    "reshaped": lambda f: f.reshape(-1, 2, 2),
    "unsqueezed": lambda f: f[:, None],
    "tuple": lambda f: (f.sum(), f),
    "mapping": lambda f: {"loss": f.sum(), "logits": f},
    "dataclass": lambda f: Output(f),
    "object": lambda f: Plain(f),
    "object of other names": lambda f: SimpleNamespace(out=f),
    "nested": lambda f: ({"answers": [f.softmax(-1)]}, None),
    "half": lambda f: f.half(),
    "bfloat16 probabilities": lambda f: f.bfloat16().softmax(-1),
    "double": lambda f: f.double(),
}
CHANGED: dict[str, Callable[[Tensor], Any]] = {
    "bias": lambda f: f + torch.tensor([0.0, 3.0, 0.0, 0.0]),
    "bias in place": lambda f: f.add_(torch.tensor([0.0, 3.0, 0.0, 0.0])),
    "bias and softmax": lambda f: (f + torch.tensor([0.0, 3.0, 0.0, 0.0])).softmax(-1),
    "mask": lambda f: f.masked_fill(torch.tensor([True, False, False, False]), -1e9),
    "temperature": lambda f: f / 2.5,
    "other order": lambda f: f.flip(-1),
    "half with a bias": lambda f: f.half() + torch.tensor([0.0, 0.5, 0.0, 0.0]).half(),
    "nothing that can be compared": lambda f: "text",
}
AFTER = r"does not return the logits of its output layer 'fc' as they are: something after it changes them.*"


@pytest.mark.parametrize("convert", CONVERT)
@pytest.mark.parametrize("name", ALLOWED)
def test_logits_in_any_form_are_accepted(name: str, convert: Callable[..., afield.SNGP]) -> None:
    x, y = batch()
    model = convert(Body(ALLOWED[name]), example=x, **SMALL)
    afield.fit_posterior(model, [(x, y)])
    assert model.predict(x).probs is not None


@pytest.mark.parametrize("convert", CONVERT)
@pytest.mark.parametrize("name", CHANGED)
def test_logits_that_are_changed_afterwards_are_refused(name: str, convert: Callable[..., afield.SNGP]) -> None:
    x, y = batch()
    message = AFTER + r"with output=\.\.\. \(Linear layers: 'hidden', 'fc'\)"
    with pytest.raises(WrongOutput, match=message):
        convert(Body(CHANGED[name]), example=(x, y), **SMALL)
    model = convert(Body(CHANGED[name]), **SMALL)
    with pytest.raises(WrongOutput, match=message):
        afield.fit_posterior(model, [(x, y)])
    with pytest.raises(afield.errors.NotFitted):
        model.predict(x)


def test_a_bias_after_the_output_layer_would_have_changed_the_class_of_most_rows() -> None:
    x, y = batch(400)
    torch.manual_seed(0)
    net = Body(lambda f: f + torch.tensor([0.0, 0.0, 0.0, 3.0]))
    own, taken = net(x).argmax(-1), net.fc(torch.relu(net.hidden(x))).argmax(-1)
    assert float((own != taken).double().mean()) > 0.5
    with pytest.raises(WrongOutput, match=AFTER):
        afield.fit_posterior(afield.attach(net, **SMALL), [(x, y)])


@pytest.mark.parametrize(
    "cap", [lambda f: f.clamp(-5, 5), lambda f: 30 * torch.tanh(f / 30)], ids=["clamp", "soft cap"]
)
def test_a_cap_that_changes_large_logits_only_is_refused(cap: Callable[[Tensor], Any]) -> None:
    net = Body(cap)
    with torch.no_grad():
        net.fc.weight *= 100
    assert not torch.equal(net(batch()[0]), _uncapped(net)(batch()[0]))
    with pytest.raises(WrongOutput, match=AFTER):
        afield.fit_posterior(afield.attach(net, **SMALL), [batch()])


def _uncapped(net: Body) -> Body:
    plain = Body(lambda f: f)
    plain.load_state_dict(net.state_dict())
    return plain


def test_fit_head_looks_as_well() -> None:
    model = afield.sngp(Body(CHANGED["bias"]), None, freeze=True, **SMALL)
    with pytest.raises(WrongOutput, match=AFTER):
        afield.fit_head(model, [batch()])


class Two(nn.Module):
    """Two output layers, the first of them the one that counts."""

    def __init__(self, after: Callable[[Tensor], Tensor] = lambda f: f) -> None:
        super().__init__()
        self.hidden, self.coarse, self.fine, self.after = nn.Linear(3, 8), nn.Linear(8, 4), nn.Linear(8, 4), after

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.hidden(x))
        return self.after(self.coarse(h)), self.after(self.fine(h))


@pytest.mark.parametrize("convert", CONVERT)
@pytest.mark.parametrize("after", [lambda f: f, lambda f: f.softmax(-1)], ids=["logits", "probabilities"])
def test_two_output_layers_have_to_be_told_apart(convert: Callable[..., afield.SNGP], after: Any) -> None:
    x, y = batch()
    message = r"several Linear layers, 'coarse', 'fine', .*output='coarse' or output='fine'"
    with pytest.raises(WrongOutput, match=message):
        convert(Two(after), example=x, **SMALL)
    with pytest.raises(WrongOutput, match=message):
        afield.fit_posterior(convert(Two(after), **SMALL), [(x, y)])
    for name in ("coarse", "fine"):
        model = convert(Two(after), output=name, example=x, **SMALL)
        assert afield.fit_posterior(model, [(x, y)]) == len(x)


class Rival(nn.Module):
    """Its last Linear layer is returned as it is; what could be the logits as well is no output of a layer."""

    def __init__(self, change: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.hidden, self.main, self.last, self.change = nn.Linear(3, 8), nn.Linear(8, 4), nn.Linear(8, 4), change

    def forward(self, x: Tensor) -> Any:
        h = torch.relu(self.hidden(x))
        return self.change(self.main(h), self.last(h))


@pytest.mark.parametrize("convert", CONVERT)
@pytest.mark.parametrize(
    "change",
    [
        lambda main, last: (main + torch.tensor([0.0, 3.0, 0.0, 0.0]), last),
        lambda main, last: {"logits": F.layer_norm(main, (4,)), "auxiliary": last},
        lambda main, last: {"logits": last + torch.tensor([0.0, 3.0, 0.0, 0.0]), "raw": last},
    ],
    ids=["two heads, one with a bias", "two heads, one with a norm", "logits before and after a bias"],
)
def test_a_second_tensor_of_the_logits_shape_has_to_be_told_apart(change: Any, convert: Any) -> None:
    x, y = batch()
    message = r"logits of 'last' and another tensor of their shape \(40, 4\), .*output='last', or .*'main', 'last'"
    with pytest.raises(WrongOutput, match=message):
        convert(Rival(change), example=x, **SMALL)
    with pytest.raises(WrongOutput, match=message):
        afield.fit_posterior(convert(Rival(change), **SMALL), [(x, y)])
    assert afield.fit_posterior(convert(Rival(change), output="last", **SMALL), [(x, y)]) == len(x)


@pytest.mark.parametrize("convert", CONVERT)
def test_a_network_that_reads_its_output_layer_is_told_to_call_it(convert: Callable[..., afield.SNGP]) -> None:
    class Functional(Body):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.relu(self.hidden(x)), self.fc.weight, self.fc.bias)

    with pytest.raises(WrongOutput, match=r"reads '(weight|bias)' of its output layer 'fc', .*let forward call the"):
        convert(Functional(lambda f: f), example=batch()[0], **SMALL)


def test_a_network_that_returns_its_hidden_vectors_too_has_one_output() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.fc = nn.Linear(3, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.hidden(x)
            return self.fc(h), h

    x, y = batch()
    assert afield.fit_posterior(afield.attach(Both(), example=x, **SMALL), [(x, y)]) == len(x)


def test_the_layer_that_makes_the_logits_is_named_where_another_one_was_taken() -> None:
    class Backwards(nn.Module):
        """Its output layer is registered first, and both layers are as wide."""

        def __init__(self) -> None:
            super().__init__()
            self.out, self.body = nn.Linear(4, 4), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.relu(self.body(x)))

    x, y = batch()
    with pytest.raises(WrongOutput, match=r"of its output layer 'body' as they are: it returns those of 'out'\. Name"):
        afield.fit_posterior(afield.attach(Backwards(), **SMALL), [(x, y)])
    afield.fit_posterior(afield.attach(Backwards(), output="out", **SMALL), [(x, y)])


def test_numbers_are_returned_as_they_are_and_rates_may_be_returned_for_their_logarithms() -> None:
    x, _ = batch()
    for likelihood, after in (("gaussian", lambda f: f.squeeze(-1)), ("poisson", torch.exp), ("poisson", lambda f: f)):
        afield.attach(Body(after, 1), likelihood=likelihood, example=x, **SMALL)
    with pytest.raises(WrongOutput, match=AFTER):
        afield.attach(Body(torch.sigmoid, 1), likelihood="gaussian", example=x, **SMALL)
    for after in (torch.sigmoid, F.logsigmoid, lambda f: f.squeeze(-1)):
        afield.attach(Body(after, 1), likelihood="bernoulli", example=x, **SMALL)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_precision_is_compared(dtype: torch.dtype) -> None:
    x, _ = batch()
    for after, accepted in ((ALLOWED["softmax"], True), (ALLOWED["logits"], True), (CHANGED["temperature"], False)):
        net = Body(after).to(dtype)
        if accepted:
            afield.attach(net, example=x.to(dtype), **SMALL)
        else:
            with pytest.raises(WrongOutput, match=AFTER):
                afield.attach(net, example=x.to(dtype), **SMALL)


def test_autocast() -> None:
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        afield.fit_posterior(afield.attach(Body(ALLOWED["log_softmax"]), **SMALL), [(x, y)])
        with pytest.raises(WrongOutput, match=AFTER):
            afield.fit_posterior(afield.attach(Body(CHANGED["bias"]), **SMALL), [(x, y)])


def test_one_pass_over_the_first_batch_in_evaluation_mode_leaves_no_trace() -> None:
    x, y = batch()
    model = afield.sngp(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.9), nn.Linear(8, 4)), length_scale=1.0, **SMALL)
    model.train()
    passes: list[tuple[int, bool]] = []
    model.net.register_forward_pre_hook(lambda net, args: passes.append((len(args[0]), net.training)))
    afield.fit_posterior(model, [(x[:16], y[:16]), (x[16:], y[16:])])
    assert passes == [(16, False), (16, False), (24, False)]
    assert all(not layer._forward_hooks for layer in model.modules())
    assert model.training


def test_other_threads_get_their_own_answers_meanwhile() -> None:
    """The random logits of the check are for its own pass alone."""
    x, _ = batch()
    inside, go_on, answers = threading.Event(), threading.Event(), []

    class Slow(Body):
        def forward(self, x: Tensor) -> Tensor:
            if threading.current_thread() is not main:
                return super().forward(x)
            inside.set()
            go_on.wait(10)
            return super().forward(x)

    main = threading.current_thread()
    model = afield.attach(Slow(lambda f: f), **SMALL).eval()
    go_on.set()
    expected = model(x)
    go_on.clear()

    def ask() -> None:
        inside.wait(10)
        answers.append(model(x))
        go_on.set()

    thread = threading.Thread(target=ask)
    thread.start()
    afield.model.output_check.check_output(model, (x,), {})
    thread.join()
    assert torch.equal(answers[0], expected)
