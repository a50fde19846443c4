"""sngp and attach: anybody's network becomes distance-aware, and nothing of the user's is lost on the way."""

import copy
import io
import math
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import afield
from afield.bounds.residual import Residual
from afield.bounds.spectral import bound_of, fold, operator_norm
from afield.errors import NotFitted
from afield.gp.head import GaussianProcessHead
from afield.model.convert import DEFAULT_BOUNDS
from afield.model.evaluating import evaluating
from afield.model.sngp_model import SNGP, AuditRow

few = settings(deadline=None, max_examples=15)
SMALL = {"num_random_features": 32}


def mlp(outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, outputs))


class Images(nn.Module):
    """A small convolutional classifier with statistics and dropout, trained a little, in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
        self.hidden = nn.Linear(4, 6)
        self.fc = nn.Linear(6, 3)
        for _ in range(3):
            self(torch.randn(8, 1, 5, 5))
        self.eval()

    def penultimate(self, x: Tensor) -> Tensor:
        return torch.relu(self.hidden(self.body(x).mean((2, 3))))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.penultimate(x))


def images(n: int = 12) -> Tensor:
    return torch.randn(n, 1, 5, 5)


def fitted(model: SNGP, x: Tensor) -> SNGP:
    afield.fit_posterior(model, [x])
    return model


def state(module: nn.Module) -> dict[str, bytes]:
    return {name: t.detach().numpy().tobytes() for name, t in module.state_dict().items()}


def modes(module: nn.Module) -> dict[str, bool]:
    return {name: m.training for name, m in module.named_modules()}


def audit(model: SNGP) -> dict[str, AuditRow]:
    rows = model.audit(io.StringIO())
    assert len({row.name for row in rows}) == len(rows)
    return {row.name: row for row in rows}


def bounds(net: nn.Module, rules: object) -> dict[str, float]:
    """Which layers are bounded, and by what."""
    rows = audit(afield.sngp(net, rules, **SMALL))
    return {name: row.bound for name, row in rows.items() if row.bound is not None}


def equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.detach().numpy().tobytes() == b.detach().numpy().tobytes()


# What is the user's stays the user's.


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
def test_original_network_is_not_touched(convert: Callable[..., SNGP]) -> None:
    net = Images()
    net.hidden.train()
    before, names, kinds = state(net), modes(net), [type(m) for m in net.modules()]
    identities = [id(p) for p in net.parameters()]
    options = {"bound": 0.1} if convert is afield.sngp else {}
    model = convert(net, **options, **SMALL)
    fitted(model.train(), images())
    if convert is afield.sngp:
        model(images()).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert state(net) == before
    assert modes(net) == names
    assert [type(m) for m in net.modules()] == kinds
    assert [id(p) for p in net.parameters()] == identities
    assert all(p.requires_grad and p.grad is None for p in net.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks or m._backward_hooks for m in net.modules())
    assert not {p.data_ptr() for p in net.parameters()} & {p.data_ptr() for p in model.parameters()}


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
def test_pretrained_weights_and_statistics_survive_bit_for_bit(convert: Callable[..., SNGP]) -> None:
    net = Images()
    mine, theirs = state(net), state(convert(net, **SMALL))
    for name, value in mine.items():
        if name.startswith("fc."):
            continue
        parent, _, leaf = name.rpartition(".")
        bounded = f"net.{parent}.parametrizations.{leaf}.original"
        assert theirs.get(bounded, theirs.get(f"net.{name}")) == value, name
    assert float(net.body[1].running_var.std()) > 0


def test_below_the_bound_hidden_vectors_are_those_of_the_network() -> None:
    net, x = Images(), images()
    model = afield.sngp(net, 100.0, **SMALL)
    assert equal(model.hidden(x), net.penultimate(x))
    assert not equal(afield.sngp(net, 0.01, **SMALL).hidden(x), net.penultimate(x))


def test_mode_and_precision_come_from_the_network() -> None:
    net = mlp().double().eval()
    model = afield.sngp(net, **SMALL)
    assert not model.net.training
    assert model.head.weight.dtype == model.head.random_features.weight.dtype == torch.float64
    assert model(torch.randn(5, 3, dtype=torch.float64)).dtype == torch.float64


# The bound's rules.


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.block1 = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Linear(4, 4))
        self.block2 = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Linear(4, 4))
        self.attention = nn.MultiheadAttention(4, 2)
        self.fc = nn.Linear(4, 3)


BY_TYPE = {"stem": 6.0, "block1.0": 6.0, "block1.1": 0.95, "block2.0": 6.0, "block2.1": 0.95, "attention": 0.95}
ALL = ["stem", "block1.0", "block1.1", "block2.0", "block2.1", "attention"]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (0.9, dict.fromkeys(ALL, 0.9)),
        (3, dict.fromkeys(ALL, 3)),
        (None, {}),
        ({}, {}),
        ({nn.Conv2d: 6.0}, {"stem": 6.0, "block1.0": 6.0, "block2.0": 6.0}),
        (
            {nn.Conv2d: 6.0, nn.Linear: 0.9},
            {"stem": 6.0, "block1.0": 6.0, "block2.0": 6.0, "block1.1": 0.9, "block2.1": 0.9},
        ),
        ({"block1.*": 0.5}, {"block1.0": 0.5, "block1.1": 0.5}),
        ({"*.1": 0.5, "stem": 2.0}, {"block1.1": 0.5, "block2.1": 0.5, "stem": 2.0}),
        ({nn.Conv2d: 6.0, "stem": None}, {"block1.0": 6.0, "block2.0": 6.0}),
        ({nn.Conv2d: 6.0, "block?.0": 1.0}, {"stem": 6.0, "block1.0": 1.0, "block2.0": 1.0}),
        ({"block1.0": 1.0, "block*": 2.0}, {"block1.0": 1.0, "block1.1": 2.0, "block2.0": 2.0, "block2.1": 2.0}),
        ({nn.Linear: 1.0, nn.Module: 2.0}, dict.fromkeys(["norm", *ALL], 2.0) | {"block1.1": 1.0, "block2.1": 1.0}),
        ({nn.BatchNorm2d: 2.0}, {"norm": 2.0}),
        ({nn.MultiheadAttention: 0.7}, {"attention": 0.7}),
        (DEFAULT_BOUNDS, BY_TYPE),
        ({**DEFAULT_BOUNDS, "stem": None, "block1.1": 2.0}, {**BY_TYPE, "stem": None, "block1.1": 2.0}),
    ],
    ids=str,
)
def test_rules(rules: object, expected: dict[str, float]) -> None:
    assert bounds(Several(), rules) == {name: c for name, c in expected.items() if c is not None}


def test_the_default_bound_goes_by_type_of_layer() -> None:
    assert {name: row.bound for name, row in audit(afield.sngp(Several(), **SMALL)).items() if row.bound} == BY_TYPE
    assert audit(afield.sngp(Several(), **SMALL))["norm"].status == "not bounded: its scale is bounded on request"


def test_the_default_does_not_ask_for_every_type_of_layer() -> None:
    assert bounds(mlp(), DEFAULT_BOUNDS) == bounds(mlp(), dict(DEFAULT_BOUNDS)) == bounds(mlp(), 0.95)
    with pytest.raises(ValueError, match=r"match no hidden layer: 'stem'\. The layers are"):
        afield.sngp(mlp(), {**DEFAULT_BOUNDS, "stem": None})
    with pytest.raises(ValueError, match=r"match no hidden layer: Conv2d\. The layers are"):
        afield.sngp(mlp(), {nn.Linear: 0.95, nn.Conv2d: 6.0})


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ({"blok*": 1.0}, "'blok\\*'"),
        ({nn.Conv1d: 1.0}, "Conv1d"),
        ({"fc": 1.0}, "'fc'"),
        ({nn.Conv2d: 1.0, "x": None}, "'x'"),
    ],
    ids=["typo", "absent type", "the output layer", "one of two"],
)
def test_rule_without_a_layer(rules: object, names: str) -> None:
    with pytest.raises(ValueError, match=rf"match no hidden layer: {names}\. The layers are: .*stem, .*block1\.0"):
        afield.sngp(Several(), rules)


@pytest.mark.parametrize("wrong", ["0.95", [0.95], {nn.Linear: "0.95"}])
def test_bound_that_is_no_number(wrong: object) -> None:
    """Not "unbounded, because it has no scale"."""
    with pytest.raises((TypeError, ValueError)):
        afield.sngp(Several(), wrong, **SMALL)


@pytest.mark.parametrize("wrong", [0, -1.0, {"stem": -2.0}])
def test_bound_that_is_not_positive(wrong: object) -> None:
    with pytest.raises(ValueError, match="The bound c must be positive, got"):
        afield.sngp(Several(), wrong, **SMALL)


# The audit.


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Zoo(nn.Module):
    """One of everything: what can be bounded, and what cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(5, 8))
        self.embed = nn.Embedding(10, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.normed = nn.BatchNorm1d(8)
        self.whitened = nn.BatchNorm1d(8, affine=False)
        self.unnormed = nn.BatchNorm1d(8, track_running_stats=False)
        self.up = nn.ConvTranspose1d(8, 8, 2)
        self.act = nn.ReLU()
        self.scale = Scale()
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
        self.twice = self.layers[0]
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) + self.position
        h = self.attention(h, h, h)[0].transpose(1, 2)
        h = self.act(self.unnormed(self.whitened(self.normed(self.conv(h)))))
        h = self.scale(self.up(h)).mean(-1)
        return self.fc(self.norm(self.twice(self.layers[0](h))))


REASONS = {
    "(net)": ("Zoo", "not bounded: no bound is defined for Zoo"),
    "embed": ("Embedding", "not bounded: no bound is defined for Embedding"),
    "attention": ("MultiheadAttention", "bounded"),
    "conv": ("Conv1d", "bounded from its first input on"),
    "normed": ("BatchNorm1d", "not bounded: its scale is bounded on request"),
    "unnormed": ("BatchNorm1d", "not bounded: its scale is bounded on request"),
    "up": ("ConvTranspose1d", "not bounded: no bound is defined for ConvTranspose1d"),
    "scale": ("Scale", "not bounded: no bound is defined for Scale"),
    "layers.0": ("Linear", "bounded"),
    "norm": ("LayerNorm", "not bounded: no bound is defined for LayerNorm"),
    "fc": ("GaussianProcessHead", "output: Gaussian process"),
}


def test_audit_names_every_layer_once_with_its_reason() -> None:
    found = {name: (row.type, row.status) for name, row in audit(afield.sngp(Zoo(), 0.9, **SMALL)).items()}
    kind, status = found.pop("whitened")
    assert kind == "BatchNorm1d"
    assert status.startswith("not bounded: ")
    assert found == REASONS


def test_audit_covers_every_parameter() -> None:
    """The owner of each parameter of the network has a line; a projection goes with its attention layer."""
    owners = {name.rpartition(".")[0].removesuffix(".out_proj") or "(net)" for name, _ in Zoo().named_parameters()}
    assert owners <= set(audit(afield.sngp(Zoo(), 0.9, **SMALL)))


def test_audit_prints_what_it_returns(capsys: pytest.CaptureFixture[str]) -> None:
    rows = afield.sngp(Zoo(), 0.9, **SMALL).audit()
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split() == ["layer", "type", "status", "norm", "bound", "binding"]
    for row, line in zip(rows, lines, strict=True):
        assert row.name
        assert line.split()[:2] == [row.name, row.type]
        assert row.status in line
        assert ("0.9" in line) == (row.bound is not None)


def test_audit_says_why_asked_for_bounds_were_not_possible() -> None:
    rows = audit(afield.sngp(Zoo(), {nn.Module: 0.9}, **SMALL))
    assert rows["normed"].bound == 0.9
    assert rows["whitened"].bound is None
    assert rows["unnormed"].status == "not bounded: it has no scale or no running statistics"
    rows = audit(afield.sngp(Zoo(), {"conv": None}, **SMALL))
    assert rows["conv"].status == rows["layers.0"].status == "not bounded: by the rules"
    assert rows["up"].status == "not bounded: no bound is defined for ConvTranspose1d"


def test_audit_of_an_attached_model_says_why_nothing_is_bounded() -> None:
    rows = audit(afield.attach(Zoo(), **SMALL))
    assert set(rows) >= set(REASONS)
    assert all(row.bound is None for row in rows.values())
    assert all(row.status.startswith("not bounded: ") for name, row in rows.items() if name != "fc")


def test_audit_measures() -> None:
    model = afield.sngp(Zoo(), 0.3, **SMALL)
    model.eval()(torch.randint(10, (4, 5)))
    rows, plain = audit(model), fold(model).net
    for name in ("attention", "layers.0"):
        assert rows[name].norm == pytest.approx(operator_norm(plain.get_submodule(name)), rel=1e-6)
        assert rows[name].norm == pytest.approx(0.3, rel=1e-4)
    assert rows["conv"].status == "bounded"
    assert rows["conv"].norm == pytest.approx(operator_norm(plain.conv, (5,)), rel=1e-6)
    assert rows["normed"].norm == pytest.approx(1.0, rel=1e-3)
    assert all(math.isnan(rows[name].norm) for name in ("fc", "embed", "up", "scale", "norm", "(net)"))


def test_audit_counts_how_often_a_bound_was_binding() -> None:
    net = mlp()
    with torch.no_grad():
        net[0].weight.mul_(100)
        net[2].weight.mul_(0.01)
    model = afield.sngp(net, 0.5, **SMALL)
    assert math.isnan(audit(model)["0"].binding)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for step in range(4):
        if step == 2:
            with torch.no_grad():
                model.net[2].parametrizations.weight.original.mul_(1000)
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    assert audit(model)["0"].binding == 1.0
    assert audit(model)["2"].binding == 0.5
    text = io.StringIO()
    model.audit(text)
    assert "100%" in text.getvalue()
    assert "50%" in text.getvalue()


def test_binding_of_attention_counts_all_its_projections() -> None:
    net = Zoo()
    with torch.no_grad():
        net.attention.in_proj_weight.mul_(0.01)
        net.attention.out_proj.weight.mul_(100)
    model = afield.sngp(net, 0.9, **SMALL).train()
    model(torch.randint(10, (4, 5)))
    assert audit(model)["attention"].binding > 0


def test_audit_changes_nothing() -> None:
    model = afield.sngp(mlp(), 0.1, **SMALL).train()
    before, names = state(model), modes(model)
    audit(model)
    assert state(model) == before
    assert modes(model) == names


# The output layer.


class Nested(nn.Module):
    """The output is not the last Linear registered."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.ModuleDict({"logits": nn.Linear(8, 3)})
        self.body = nn.Linear(3, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head["logits"](torch.tanh(self.body(x)))


def test_last_linear_is_found() -> None:
    model = afield.sngp(mlp(5), **SMALL)
    assert model.output == "4"
    assert isinstance(model.net[4], GaussianProcessHead)
    assert (model.head.in_features, model.head.out_features) == (8, 5)


def test_output_can_be_named() -> None:
    model = afield.sngp(Nested(), output="head.logits", **SMALL)
    assert model.head is model.net.head["logits"]
    assert bound_of(model.net.body) is not None
    assert model(torch.randn(5, 3)).shape == (5, 3)


def test_attention_is_never_the_output() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 3)
            self.attention = nn.MultiheadAttention(8, 2)

    assert afield.sngp(Last(), **SMALL).output == "fc"
    with pytest.raises(ValueError, match="MultiheadAttention has no Linear layer to replace: the output must be a L"):
        afield.sngp(nn.MultiheadAttention(8, 2))


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
@pytest.mark.parametrize("name", ["3", "nonsense", "head"])
def test_output_with_a_wrong_name(convert: Callable[..., SNGP], name: str) -> None:
    with pytest.raises(
        ValueError, match=f"output='{name}' is not a Linear of this network, nor a convolution .* There are: 0, 2, 4"
    ):
        convert(mlp(), output=name)


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
def test_network_without_a_linear(convert: Callable[..., SNGP]) -> None:
    with pytest.raises(ValueError, match="Sequential has no Linear layer to replace"):
        convert(nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten()))


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
def test_network_that_is_a_linear(convert: Callable[..., SNGP]) -> None:
    x = torch.randn(20, 5)
    model = fitted(convert(nn.Linear(5, 3), **SMALL), x)
    assert model.head is model.net
    assert equal(model.hidden(x), x)
    assert model.predict(x).probs.shape == (20, 3)
    assert list(audit(model)) == ["(net)"]


def test_output_under_two_names_is_replaced_under_both() -> None:
    class Alias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.fc = nn.Linear(3, 8), nn.Linear(8, 4)
            self.classifier = self.fc

        def forward(self, x: Tensor) -> Tensor:
            return self.classifier(self.body(x))

    model, x = afield.sngp(Alias(), **SMALL), torch.randn(5, 3)
    assert torch.equal(model(x), torch.zeros(5, 4))  # a new head, at its prior mean
    assert model.hidden(x).shape == (5, 8)


class Times(nn.Module):
    """Runs its output layer a number of times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.body, self.fc = times, nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        return torch.stack([h.new_zeros(len(x), 4), *(self.fc(h) for _ in range(self.times))]).sum(0)


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
@pytest.mark.parametrize("times", [0, 2])
def test_output_layer_must_run_once(convert: Callable[..., SNGP], times: int) -> None:
    model, x = convert(Times(times), **SMALL), torch.randn(5, 3)
    model(x)
    for ask in (model.hidden, model.predict, lambda x: afield.fit_posterior(model, [x])):
        with pytest.raises(RuntimeError, match=f"'fc' ran {times} times in one forward pass, expected once. Name the"):
            ask(x)
    fitted(convert(Times(1), **SMALL), x).predict(x)


def test_number_of_outputs_can_change() -> None:
    assert afield.sngp(mlp(4), out_features=7, **SMALL)(torch.randn(2, 3)).shape == (2, 7)


def test_head_options_are_the_heads() -> None:
    model = afield.sngp(mlp(), kernel="matern52", ridge=0.5, num_random_features=16, length_scale=2.0)
    assert model.head.random_features.kernel == "matern52"
    assert float(model.head.ridge) == 0.5
    with pytest.raises(TypeError, match="num_features"):
        afield.sngp(mlp(), num_features=16)


def test_one_logit_needs_a_likelihood() -> None:
    with pytest.raises(ValueError, match='use likelihood="bernoulli" for one logit, "gaussian" for one number'):
        afield.sngp(mlp(1))


def test_sngp_is_made_of_a_network_with_a_head() -> None:
    with pytest.raises(TypeError, match="SNGP expects a GaussianProcessHead at '4', got Linear"):
        SNGP(mlp(), "4", kind="sngp", settings={}, reasons={})


# Networks of all shapes.


class LogProbabilities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.net(x), dim=-1)


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
def test_network_that_goes_on_after_its_logits(convert: Callable[..., SNGP]) -> None:
    net, x = LogProbabilities(), torch.randn(30, 3)
    model = convert(net, **SMALL)
    if convert is afield.sngp:
        nn.init.normal_(model.head.weight)
    fitted(model, x).eval()
    torch.testing.assert_close(model(x).exp().sum(-1), torch.ones(30))  # its own forward still does
    prediction = model.predict(x)
    if convert is afield.attach:
        assert equal(prediction.logits, net.net(x))
        assert torch.equal(prediction.labels, net(x).argmax(-1))
    else:
        torch.testing.assert_close(model.predict(x).logits.log_softmax(-1), model(x))


class Transformer(nn.Module):
    """Takes keywords, returns a mapping, computes its own loss: as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.classifier = nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        h = self.embed(input_ids)
        h = self.attention(h, h, h, key_padding_mask=attention_mask == 0)[0].mean(1)
        logits = self.classifier(h)
        return {"logits": logits} if labels is None else {"logits": logits, "loss": F.cross_entropy(logits, labels)}


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
def test_network_of_keywords_and_mappings(convert: Callable[..., SNGP]) -> None:
    inputs = {"input_ids": torch.randint(10, (20, 5)), "attention_mask": torch.ones(20, 5).long()}
    batch = {**inputs, "labels": torch.randint(3, (20,))}
    net = Transformer().eval()
    model = convert(net, **SMALL).train()
    assert set(model(**batch)) == {"logits", "loss"}
    assert afield.fit_posterior(model, [batch]) == 20
    predictions = [model.predict(**inputs), model.predict(inputs), model.predict(batch)]
    predictions.append(model.predict({"input_ids": inputs["input_ids"]}, attention_mask=inputs["attention_mask"]))
    assert all(equal(p.probs, predictions[0].probs) for p in predictions)
    if convert is afield.attach:
        torch.testing.assert_close(predictions[0].logits, net(**inputs)["logits"])


def test_several_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bilinear, self.fc = nn.Bilinear(3, 3, 8), nn.Linear(8, 4)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.fc(self.bilinear(a, b))

    a, b = torch.randn(2, 9, 3)
    model = afield.sngp(Two(), **SMALL)
    assert afield.fit_posterior(model, [(a, b, torch.zeros(9))]) == 9
    assert equal(model.predict(a, b).probs, model.predict(a, b=b).probs)


def test_other_parametrisations_are_respected() -> None:
    net = mlp()
    nn.utils.parametrizations.weight_norm(net[0])
    model, x = afield.sngp(net, 0.2, **SMALL), torch.randn(5, 3)
    model(x).sum().backward()
    assert operator_norm(model.net[0]) == pytest.approx(0.2, rel=1e-4)
    assert equal(fold(model.eval())(x), model(x))
    assert nn.utils.parametrize.is_parametrized(net[0])


# Converting again.


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
def test_conversion_is_idempotent(convert: Callable[..., SNGP]) -> None:
    model = convert(mlp())
    again = convert(model)
    assert again is not model
    assert state(again) == state(model)
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]
    assert not {t.data_ptr() for t in again.parameters()} & {t.data_ptr() for t in model.parameters()}


def test_the_same_conversion_twice_is_the_same_conversion() -> None:
    options = {"bound": 0.5, "output": "4", "freeze": True, **SMALL}
    model = afield.sngp(mlp(), **options)
    assert state(afield.sngp(model, **options)) == state(model)


@pytest.mark.parametrize(
    "options",
    [{"output": "2"}, {"num_random_features": 64}, {"bound": 0.95}, {"bound": None}, {"freeze": True}],
    ids=str,
)
def test_another_conversion_of_a_converted_model_is_refused(options: dict[str, object]) -> None:
    model = afield.sngp(mlp(), **SMALL)
    with pytest.raises(ValueError, match=r"converted by afield\.sngp already; convert the original network again"):
        afield.sngp(model, **options)


def test_one_kind_of_model_does_not_become_the_other() -> None:
    with pytest.raises(ValueError, match=r"converted by afield\.sngp already"):
        afield.attach(afield.sngp(mlp(), **SMALL))
    with pytest.raises(ValueError, match=r"converted by afield\.attach already"):
        afield.sngp(afield.attach(mlp(), **SMALL))


def test_fold_of_a_model() -> None:
    x = images()
    model = fitted(afield.sngp(Images(), {nn.Conv2d: 0.1, nn.BatchNorm2d: 0.1, nn.Linear: 0.1}, **SMALL), x)
    plain = pickle.loads(pickle.dumps(fold(model)))
    assert isinstance(plain, SNGP)
    assert equal(plain(x), model(x))
    for name, tensor in model.predict(x).numpy().items():
        assert tensor.tobytes() == plain.predict(x).numpy()[name].tobytes()
    assert not any("parametrizations" in name for name in plain.state_dict())
    assert all(row.bound is None for row in audit(plain).values())
    model.train()(x).sum().backward()


def test_deepcopy_of_a_model_is_independent() -> None:
    x = torch.randn(20, 3)
    model = fitted(afield.sngp(mlp(), 0.1, **SMALL), x)
    twin, before = copy.deepcopy(model), model.predict(x)
    twin.head.set_scalars(amplitude=7.0)
    fitted(twin, 3 * x)
    assert equal(model.predict(x).variance, before.variance)


def test_freeze_trains_only_the_output_weights() -> None:
    net = Images()
    model = afield.sngp(net, None, freeze=True, **SMALL)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["net.fc.weight"]
    assert all(p.requires_grad for p in net.parameters())


def test_attach_trains_nothing() -> None:
    assert not any(p.requires_grad for p in afield.attach(Images(), **SMALL).parameters())


# attach: the network's own answers.


def test_attached_network_answers_bit_for_bit() -> None:
    net, x = Images(), images()
    model = afield.attach(net, **SMALL)
    assert equal(model(x), net(x))
    fitted(model, images(30))
    model.head.set_scalars(amplitude=5.0, logit_scale=0.3)
    assert equal(model(x), net(x))


@few
@given(st.integers(0, 10**6), st.floats(-3, 3), st.floats(-3, 3), st.integers(2, 12))
def test_attached_network_never_changes_its_mind(seed: int, scale: float, amplitude: float, classes: int) -> None:
    torch.manual_seed(seed)
    net = mlp(classes).double().eval()
    model = fitted(afield.attach(net, **SMALL), torch.randn(50, 3, dtype=torch.float64))
    model.head.set_scalars(logit_scale=10**scale, amplitude=10**amplitude)
    x = 10 * torch.randn(200, 3, dtype=torch.float64)  # near and far
    prediction, choice = model.predict(x), net(x).argmax(-1)
    assert torch.equal(prediction.labels, choice)
    assert torch.equal(prediction.logits.argmax(-1), choice)


@few
@given(st.integers(0, 10**6), st.floats(-4, 4), st.floats(-4, 4))
def test_in_single_precision_its_choice_is_never_beaten(seed: int, scale: float, amplitude: float) -> None:
    """Far enough away all classes are equally probable to the last digit: a tie, and nothing worse."""
    torch.manual_seed(seed)
    net = mlp(10).eval()
    model = fitted(afield.attach(net, **SMALL), torch.randn(50, 3))
    model.head.set_scalars(logit_scale=10**scale, amplitude=10**amplitude)
    x = 10 * torch.randn(200, 3)
    probs = model.predict(x).probs
    chosen = probs.gather(1, net(x).argmax(-1, keepdim=True)).squeeze(1)
    assert float((probs.amax(-1) - chosen).max()) <= 1e-6 * float(chosen.max())


def test_calibrated_attached_network_never_changes_its_mind() -> None:
    torch.manual_seed(1)
    net = mlp(3).eval()
    x = torch.randn(400, 3)
    y = torch.distributions.Categorical(logits=5 * net(x)).sample()
    model = fitted(afield.attach(net, **SMALL), x[:200])
    afield.calibrate(model, [(x[200:], y[200:])])
    assert float(model.head.logit_scale) != 1.0
    new = 5 * torch.randn(500, 3)
    assert torch.equal(model.predict(new).labels, net(new).argmax(-1))


def test_attach_refuses_what_could_change_its_mind() -> None:
    with pytest.raises(ValueError, match='attach keeps the most probable class, which needs covariance="shared"'):
        afield.attach(mlp(), covariance="per_class")


def test_attach_far_away_is_less_sure() -> None:
    net = mlp().eval()
    model = fitted(afield.attach(net, ridge=0.01, **SMALL), torch.randn(300, 3))
    near, far = model.predict(torch.randn(100, 3)), model.predict(torch.randn(100, 3) + 20)
    assert float(near.variance.mean()) < 0.5 * float(far.variance.mean())


# predict.


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
def test_prediction_before_fitting_is_refused(convert: Callable[..., SNGP]) -> None:
    model = convert(mlp(), **SMALL)
    with pytest.raises(NotFitted, match=r"Call afield\.fit_posterior\(model, train_loader\)"):
        model.predict(torch.randn(5, 3))
    model.train()(torch.randn(5, 3))  # training alone does not fit it
    with pytest.raises(NotFitted):
        model.predict(torch.randn(5, 3))


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
def test_predict_leaves_the_model_as_it_was(convert: Callable[..., SNGP]) -> None:
    model = fitted(convert(Images(), **SMALL), images()).train()
    model.net.body[1].eval()  # frozen statistics, in the midst of training
    before, names, x = state(model), modes(model), images()
    first = model.predict(x)
    assert state(model) == before
    assert modes(model) == names
    assert not first.probs.requires_grad
    assert torch.is_grad_enabled()
    assert equal(model.predict(x).probs, first.probs)
    assert equal(copy.deepcopy(model).eval().predict(x).probs, first.probs)  # training mode makes no difference
    with pytest.raises(RuntimeError, match="channels"):
        model.predict(torch.randn(2, 7, 5, 5))
    assert modes(model) == names  # also after an error


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
def test_predict_from_many_threads(convert: Callable[..., SNGP]) -> None:
    model = fitted(convert(Images(), **SMALL), images()).eval()
    inputs = [images(n) for n in range(1, 25)]
    alone = [model.predict(x).probs for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda x: model.predict(x).probs, inputs))
    assert all(equal(a, b) for a, b in zip(alone, together, strict=True))


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(float(x[0, 0]))
        return x


def test_predict_from_many_threads_in_the_midst_of_training() -> None:
    """Each leaves the modes alone while another is still at work."""
    net = nn.Sequential(Slow(), nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    x = torch.randn(20, 3)
    x[0, 0] = 0
    model = fitted(afield.sngp(net, **SMALL), x).train()
    before, names, inputs = state(model), modes(model), [x.clone() for _ in range(4)]
    for wait, waiting in enumerate(inputs):
        waiting[0, 0] = 0.02 * (1 + wait)
    alone = [model.predict(x).probs for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda x: model.predict(x).probs, inputs))
    assert modes(model) == names
    assert state(model) == before
    assert all(equal(a, b) for a, b in zip(alone, together, strict=True))


def test_one_logit() -> None:
    net, x = mlp(1).eval(), torch.randn(40, 3)
    attached = fitted(afield.attach(net, likelihood="bernoulli", **SMALL), x)
    prediction = attached.predict(x)
    assert prediction.probs.shape == (40, 2)
    assert torch.equal(prediction.labels, (net(x) > 0).long().squeeze(1))
    converted = afield.sngp(net, likelihood="bernoulli", **SMALL)
    nn.init.normal_(converted.head.weight)
    fitted(converted, x)
    assert torch.equal(converted.predict(x).labels, (converted(x) > 0).long().squeeze(1))
    assert converted.predict(x, predictive="quadrature").probs.shape == (40, 2)


@pytest.mark.parametrize("outputs", [1, 2])
def test_regression(outputs: int) -> None:
    net, x = mlp(outputs).eval(), torch.randn(40, 3)
    y = net(x).detach() + 0.1 * torch.randn(40, outputs)
    model = afield.attach(net, likelihood="gaussian", **SMALL)
    afield.fit_posterior(model, [(x, y)])
    prediction = model.predict(x)
    assert equal(prediction.mean, net(x))
    assert prediction.probs is None
    assert prediction.noise == pytest.approx(0.01, rel=0.5)
    converted = afield.sngp(net, likelihood="gaussian", **SMALL)
    afield.fit_posterior(converted, [(x, y)])
    assert converted.predict(x).std.shape == (40, outputs)


def test_monte_carlo_is_seeded() -> None:
    x = torch.randn(10, 3)
    model = fitted(afield.sngp(mlp(), **SMALL), x)
    draws = [
        model.predict(x, predictive="monte_carlo", num_samples=5, generator=torch.Generator().manual_seed(s)).members
        for s in (0, 0, 1)
    ]
    assert draws[0].shape == (5, 10, 4)
    assert equal(draws[0], draws[1])
    assert not equal(draws[0], draws[2])


# Distances.


def residual_net(depth: int, conv: bool) -> nn.Sequential:
    if conv:
        blocks = [Residual(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU())) for _ in range(depth)]
        net = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(2 * 4 * 3, 3))
    else:
        net = nn.Sequential(
            *(Residual(nn.Sequential(nn.Linear(5, 5), nn.ReLU())) for _ in range(depth)), nn.Linear(5, 3)
        )
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(5)  # so that the bound has something to do
    return net.double()


def stretches(model: SNGP, shape: tuple[int, ...]) -> tuple[float, float]:
    """The smallest and largest ratio of distances, between pairs of points and in every direction at one point."""
    x = torch.randn(200, *shape, dtype=torch.float64)
    with evaluating(model):
        ratios = torch.pdist(model.hidden(x)) / torch.pdist(x.flatten(1))
    model.eval()
    jacobian = torch.autograd.functional.jacobian(lambda x: model.hidden(x[None]), x[0]).reshape(-1, math.prod(shape))
    ratios = torch.cat([ratios, torch.linalg.svdvals(jacobian)])
    return float(ratios.min()), float(ratios.max())


@pytest.mark.parametrize("conv", [False, True], ids=["dense", "convolution"])
@pytest.mark.parametrize(("a", "depth"), [(0.3, 2), (0.6, 4), (0.9, 6)])
def test_bounded_residual_network_is_bi_lipschitz(a: float, depth: int, conv: bool) -> None:
    """Each block maps distances by factors in [1 - a, 1 + a], so L blocks by factors in [(1 - a)^L, (1 + a)^L]."""
    shape = (2, 4, 3) if conv else (5,)
    net = residual_net(depth, conv)
    model = afield.sngp(net, a, **SMALL)
    smallest, largest = stretches(model, shape)
    slack = 1.01 if conv else 1 + 1e-9  # a convolution starts within a percent of its norm
    assert (1 - slack * a) ** depth <= smallest
    assert largest <= (1 + slack * a) ** depth
    unbounded = stretches(afield.sngp(net, None, **SMALL), shape)
    assert unbounded[0] < (1 - a) ** depth or unbounded[1] > (1 + a) ** depth


def test_attached_network_is_unsure_far_away_although_its_dense_mean_grows_without_end(generator):
    x = torch.randn(400, 2, generator=generator)
    y = (x[:, 0] + 0.3 * torch.randn(400, generator=generator) > 0).long()
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-4.0, 0.0], [4.0, 0.0]]))
    model = afield.attach(net, num_random_features=128, generator=generator)
    afield.fit_posterior(model, [(x[:200], y[:200])])
    afield.calibrate(model, [(x[200:], y[200:])])
    confidence, p_value, variance = [], [], []
    for radius in (30.0, 100.0, 1000.0, 1e5):
        prediction = model.predict(radius * torch.tensor([[1.0, 0.0]]))
        confidence.append(float(prediction.confidence))
        p_value.append(float(prediction.p_value))
        variance.append(float(prediction.variance))
    assert sorted(confidence, reverse=True) == confidence
    assert sorted(variance) == variance
    assert confidence[-1] < 0.51
    assert p_value[-1] == pytest.approx(prediction.smallest_p_value)


# Networks that are not built in the order in which they run


class HeadFirst(nn.Module):
    """Registers its output layer before its hidden one."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.body = nn.Linear(8, 3), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x).relu())


def test_a_layer_that_does_not_make_the_logits_is_refused_when_it_shows():
    with pytest.raises(RuntimeError, match=r"'body' makes 8 numbers for each of \(5,\) .*\(5, 3\).*output=\.\.\."):
        afield.sngp(HeadFirst()).hidden(torch.randn(5, 4))
    assert afield.sngp(HeadFirst(), output="out").hidden(torch.randn(5, 4)).shape == (5, 8)


def test_the_body_of_a_hugging_face_network_holds_no_output_layer():
    class Classifier(HeadFirst):
        @property
        def base_model(self) -> nn.Module:
            return self.body

    assert afield.sngp(Classifier()).output == "out"


def test_a_layer_with_a_forward_of_its_own_is_not_said_to_be_bounded():
    class Doubled(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    net = nn.Sequential(Doubled(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    statuses = {row.name: row.status for row in afield.sngp(net).audit(io.StringIO())}
    assert statuses["0"] == "not bounded: Doubled computes in its own way, its operator is not known"
    assert statuses["1"].startswith("bounded")
