"""How batches reach a model: inputs, target, device, mode, progress."""

import collections
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import afield
from afield.model import hidden, progress
from afield.model.batches import device_of, is_loader, split_batch
from afield.model.evaluating import evaluating
from afield.model.progress import track

X, Y, Z = torch.randn(3, 2), torch.tensor([0, 1, 0]), torch.randn(3, 5)
Pair = collections.namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("given", "args", "kwargs", "target"),
    [
        (X, (X,), {}, None),
        ((X,), (X,), {}, None),
        ((X, Y), (X,), {}, Y),
        ([X, Y], (X,), {}, Y),
        (Pair(X, Y), (X,), {}, Y),
        ((X, Z, Y), (X, Z), {}, Y),
        ({"a": X, "labels": Y}, (), {"a": X}, Y),
        ({"a": X, "label": Y}, (), {"a": X}, Y),
        ({"a": X, "label": Z, "labels": Y}, (), {"a": X}, Y),
        (collections.UserDict(a=X, labels=Y), (), {"a": X}, Y),  # what Hugging Face's tokenizers return
        ({"a": X, "b": Z}, (), {"a": X, "b": Z}, None),
        (({"a": X, "b": Z}, Y), (), {"a": X, "b": Z}, Y),
        (({"a": X},), (), {"a": X}, None),
    ],
    ids=[
        *("tensor", "one", "tuple", "list", "namedtuple", "two inputs", "labels", "label", "both", "user mapping"),
        *("no target", "mapping and target", "mapping alone"),
    ],
)
def test_split(given: Any, args: tuple, kwargs: dict, target: torch.Tensor | None) -> None:
    for device in (None, torch.device("cpu")):
        found = split_batch(given, device)
        assert isinstance(found[0], tuple)
        assert [id(a) for a in found[0]] == [id(a) for a in args]
        assert {k: id(v) for k, v in found[1].items()} == {k: id(v) for k, v in kwargs.items()}
        assert found[2] is target


def test_split_moves_tensors_wherever_they_are() -> None:
    given = {"a": X, "nested": [Z, {"deep": X}], "name": "text", "labels": Y}
    _, kwargs, target = split_batch(given, torch.device("meta"))
    moved = [kwargs["a"], kwargs["nested"][0], kwargs["nested"][1]["deep"], target]
    assert all(t.device.type == "meta" for t in moved)
    assert kwargs["name"] == "text"
    assert given["a"] is X
    assert given["nested"][1]["deep"] is X


@pytest.mark.parametrize("empty", [(), []])
def test_empty_batch(empty: Any) -> None:
    with pytest.raises(ValueError, match="A batch must hold at least the input, got an empty"):
        split_batch(empty)


@pytest.mark.parametrize("wrong", ["text", 3.0, None])
def test_not_a_batch(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"A batch must be a tensor, a tuple or list .* or a mapping, got"):
        split_batch(wrong)


# Which field is which --------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """One input, and a mask if there is one; `forward` of subclasses asks for more."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(2, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.fc(torch.tanh(self.body(x if mask is None else x * mask[:, None])))


class TwoInputs(Masked):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, mask)


class Anything(Masked):
    def forward(self, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(*inputs)


X40 = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
Y40, INDEX = torch.arange(40) % 3, torch.arange(40)
GUESS = r"A batch has 3 fields.*which is the target would be a guess.*inputs=0, target=1.*inputs=\[0, 1\], target=2"
CALLS = [
    afield.fit_posterior,
    afield.calibrate,
    afield.posterior.update,
    afield.posterior.downdate,
    lambda model, loader, **fields: afield.fit_head(afield.sngp(Masked(), None, freeze=True), loader, **fields),
]
IDS = ["fit_posterior", "calibrate", "update", "downdate", "fit_head"]


def fitted_model(net: nn.Module, loader: Any, **fields: Any) -> afield.SNGP:
    model = afield.attach(net, num_random_features=16, generator=torch.Generator().manual_seed(0))
    afield.fit_posterior(model, loader, **fields)
    return model


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_a_guess_that_could_be_wrong_is_an_error(call: Any) -> None:
    """A batch (x, y, index) for forward(x, mask=None): y was taken for the mask."""
    model = fitted_model(Masked(), [(X40, Y40)])
    with pytest.raises(ValueError, match=GUESS):
        call(model, [(X40, Y40, INDEX)])
    with pytest.raises(ValueError, match=GUESS):
        call(model, [(X40, Y40, INDEX)], target=1)  # x and the index remain
    with pytest.raises(ValueError, match=GUESS):
        call(model, [(X40, Y40, INDEX)], inputs=0)  # y or the index
    call(model, [(X40, Y40, INDEX)], inputs=0, target=1)


@pytest.mark.parametrize(
    ("loader", "fields"),
    [
        ([(X40, Y40, INDEX)], {"inputs": 0, "target": 1}),
        ([(INDEX, Y40, X40)], {"inputs": -1, "target": -2}),
        ([(INDEX, Y40, X40)], {"inputs": [2], "target": 1}),
        ([{"x": X40, "y": Y40, "id": INDEX}], {"inputs": "x", "target": "y"}),
        ([{"image": X40, "class": Y40, "id": INDEX}], {"inputs": ["image"], "target": "class"}),
        ([{"x": X40, "labels": Y40}], {}),
        ([collections.namedtuple("Row", "id x y")(INDEX, X40, Y40)], {"inputs": "x", "target": "y"}),
        ([(X40.numpy().astype(np.float64), Y40.numpy())], {}),
        ([[X40.numpy(), Y40.numpy()]], {}),
        (DataLoader(TensorDataset(X40, Y40, INDEX), batch_size=16), {"inputs": 0, "target": 1}),
    ],
    ids=[
        *("tuple", "from the end", "list", "keys", "keys that are no arguments", "labels", "namedtuple"),
        *("double arrays", "list of arrays", "loader"),
    ],
)
def test_fields_are_chosen(loader: Any, fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = Masked()
    expected, model = fitted_model(net, [(X40, Y40)]), fitted_model(net, loader, **fields)
    torch.testing.assert_close(model.predict(X40).variance, expected.predict(X40).variance)
    loss = afield.calibrate(expected, [(X40, Y40)]).loss
    assert afield.calibrate(model, loader, **fields).loss == pytest.approx(loss, rel=1e-4)
    torch.testing.assert_close(model.predict(loader, **fields).probs, expected.predict(X40).probs)


def test_a_forward_that_needs_as_many_inputs_tells_by_itself() -> None:
    mask = torch.ones(40)
    model = fitted_model(TwoInputs(), [(X40, mask, Y40)])
    afield.calibrate(model, [(X40, mask, Y40)])
    for batch in ((X40, mask), (X40, mask, Y40)):  # without a target too
        assert torch.equal(model.predict([batch]).probs, model.predict(X40, mask).probs)
    with pytest.raises(ValueError, match="A batch has 4 fields, and the network's forward needs 2 of them"):
        afield.calibrate(model, [(X40, mask, INDEX, Y40)])
    afield.calibrate(model, [(X40, mask, INDEX, Y40)], inputs=[0, 1], target=3)


def test_a_forward_that_takes_anything_does_not_tell() -> None:
    model = fitted_model(Anything(), [(X40, Y40)])
    with pytest.raises(ValueError, match=r"A batch has 3 fields: which are"):
        afield.calibrate(model, [(X40, torch.ones(40), Y40)])
    afield.calibrate(model, [(X40, torch.ones(40), Y40)], inputs=[0, 1], target=2)


@pytest.mark.parametrize(
    ("batch", "fields", "message"),
    [
        ((X, Y), {"target": 2}, "The batch has no field 2: it has 2 fields, 0 to 1"),
        ((X, Y), {"inputs": "x"}, "The batch has no field 'x': it has 2 fields, 0 to 1"),
        (Pair(X, Y), {"inputs": "z"}, "no field 'z': it has 2 fields, 0 to 1, or 'x', 'y'"),
        ({"x": X, "labels": Y}, {"target": "y"}, "The batch has no field 'y': its fields are 'x', 'labels'"),
        ({"x": X, "y": Y}, {}, r"fields 'x', 'y' of the batch are not what .* forward takes: \(x.*inputs='x', target="),
        (X, {"inputs": 0}, "choose fields of a batch, got a batch that is one tensor"),
    ],
)
def test_fields_that_are_not_there(batch: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_batch(batch, net=Masked(), **fields)


# Arrays and loaders ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_arrays_are_taken_where_tensors_are(dtype: torch.dtype) -> None:
    model = fitted_model(Masked().to(dtype), [(X40.to(dtype), Y40)])
    expected = model.predict(X40.to(dtype)).probs
    array = X40.numpy()
    reversed_twice = np.ascontiguousarray(array[::-1])[::-1]
    read_only = array.copy()
    read_only.flags.writeable = False
    for given in (array, array.astype(">f8"), reversed_twice, read_only):
        assert torch.equal(model.predict(given).probs, expected)
        assert torch.equal(model.predict(x=given).probs, expected)
        assert torch.equal(model.predict({"x": given}).probs, expected)
        assert torch.equal(model.hidden(given), model.hidden(X40.to(dtype)))


def test_whole_numbers_in_arrays_stay_whole() -> None:
    net = nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 3))
    ids = torch.arange(80).reshape(40, 2) % 10
    model = fitted_model(net, [(ids.numpy(), Y40.numpy())])
    assert torch.equal(model.predict(ids.numpy()).probs, model.predict(ids).probs)


def test_predict_takes_a_loader() -> None:
    model = fitted_model(Masked(), [(X40, Y40)])
    afield.calibrate(model, [(X40, Y40)])
    expected = model.predict(X40)
    pairs = TensorDataset(X40, Y40)
    loaders: list[Any] = [
        DataLoader(pairs, batch_size=7),
        DataLoader(TensorDataset(X40), batch_size=7),
        [(X40[:10], Y40[:10]), (X40[10:], Y40[10:])],
        list(X40.split(9)),
        (part for part in X40.split(9)),
        [{"x": X40, "labels": Y40}],
        [X40.numpy()],
    ]
    for loader in loaders:
        found = model.predict(loader)
        assert len(found) == 40
        for name, value in expected.numpy().items():
            rank = 1.01 * expected.smallest_p_value  # which the last digits of a score may cost
            np.testing.assert_allclose(found.numpy()[name], value, rtol=1e-4, atol=rank if name == "p_value" else 1e-4)
    with pytest.raises(ValueError, match="predict got an empty loader"):
        model.predict(iter([]))
    with pytest.raises(ValueError, match=GUESS):
        model.predict([(X40, Y40, INDEX)])
    assert len(model.predict([(X40, Y40, INDEX)], inputs=0)) == 40  # needs no target


@pytest.mark.parametrize(
    "value", [X, (X, Y), {"x": X}, "text", ["a", "b"], [1.0, 2.0], [[1.0]], [], X.numpy(), 3, None]
)
def test_inputs_are_no_loaders(value: Any) -> None:
    assert not is_loader(value)


def test_a_batch_that_moves_itself_is_no_loader() -> None:
    class Graph(list):
        def to(self, device: Any) -> "Graph":
            return self

    assert not is_loader(Graph([X]))


def test_a_generator_that_would_have_to_be_read_twice_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = afield.attach(Masked(), num_random_features=16)
    assert afield.fit_posterior(model, iter([(X40, Y40)])) == 40  # few enough to keep
    monkeypatch.setattr(hidden, "_CACHE_BYTES", 100)
    with pytest.raises(ValueError, match=r"needed twice, .* iterator that can be read only once.*DataLoader"):
        afield.fit_posterior(model, iter([(X40, Y40)]))
    afield.calibrate(model, iter([(X40, Y40)]))  # one pass does
    afield.posterior.update(model, iter([(X40, Y40)]))


def test_device_of_a_module() -> None:
    assert device_of(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    assert device_of(nn.BatchNorm1d(2, affine=False)) == torch.device("cpu")  # buffers only
    assert device_of(nn.ReLU()) is None


def mixed() -> nn.Module:
    """A module whose parts are in different modes."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.Dropout(), nn.ReLU()))
    net[1].eval()
    net[2][0].eval()
    return net


def modes(module: nn.Module) -> list[bool]:
    return [m.training for m in module.modules()]


def test_evaluating_gives_every_part_its_own_mode_back() -> None:
    net = mixed()
    before = modes(net)
    with evaluating(net):
        assert not any(modes(net))
        assert not torch.is_grad_enabled()
    assert modes(net) == before
    assert torch.is_grad_enabled()


def test_evaluating_ends_well_when_its_body_does_not() -> None:
    net = mixed()
    before = modes(net)
    with pytest.raises(ZeroDivisionError), evaluating(net):
        raise ZeroDivisionError
    assert modes(net) == before
    assert torch.is_grad_enabled()


def test_evaluating_within_evaluating() -> None:
    net = mixed()
    before = modes(net)
    with evaluating(net):
        with evaluating(net):
            pass
        assert not any(modes(net))
    assert modes(net) == before


def test_evaluating_in_two_threads_at_once() -> None:
    """The first to enter knows the modes, and the last to leave brings them back: nobody runs in training mode."""
    net = mixed()
    before = modes(net)
    entered, left, during = threading.Event(), threading.Event(), []

    def second() -> None:
        with evaluating(net):
            entered.set()
            left.wait(10)
            during.extend(modes(net))

    thread = threading.Thread(target=second)
    with evaluating(net):
        thread.start()
        entered.wait(10)
    left.set()
    thread.join()
    assert not any(during)
    assert modes(net) == before


def test_track_yields_everything_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(range(5), "numbers")) == list(range(5))
    assert list(track(iter(range(5)), "numbers", show=True)) == list(range(5))
    assert list(track([], "nothing", show=True)) == []
    out, err = capsys.readouterr()
    assert out == err == ""  # not a terminal, or over before anybody waited


def test_track_shows_progress_to_those_who_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(progress, "_PATIENCE", -1.0)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(track(range(3), "hidden features", show=True)) == [0, 1, 2]
    out, err = capsys.readouterr()
    assert out == ""
    assert "hidden features" in err
    assert "/3" in err
    assert list(track(range(3), "hidden features", show=False)) == [0, 1, 2]
    assert capsys.readouterr().err == ""


def test_track_is_lazy_and_stops_with_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", -1.0)
    seen = []

    def source() -> Iterator[int]:
        for i in range(100):
            seen.append(i)
            yield i

    for show in (False, True):
        seen.clear()
        items = track(source(), "items", show=show)
        assert next(items) == 0
        items.close()
        assert seen == [0]


def test_track_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    assert list(track(range(3), "items", show=True)) == [0, 1, 2]
