"""How batches reach a model: inputs, target, device, mode, progress."""

import collections
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from afield.model import progress
from afield.model.batches import device_of, split_batch
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
