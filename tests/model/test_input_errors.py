"""Errors as users meet them: each says what was expected, what came, and what to do."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import afield
from afield.decide.policies import policy
from afield.errors import NotFitted
from afield.model.class_changes import add_class
from afield.model.posterior import update

N = 60
y = torch.arange(N) % 3


def inputs(width: int = 4) -> Tensor:
    return torch.randn(N, width, generator=torch.Generator().manual_seed(0))


def with_nan() -> Tensor:
    x = inputs()
    x[37, 2], x[45] = math.nan, math.inf
    return x


def table() -> afield.SNGP:
    """Four columns, three classes; bounded, fitted, never calibrated."""
    torch.manual_seed(0)
    model = afield.sngp(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), num_random_features=16)
    afield.fit_posterior(model, [inputs()])
    return model


def kept() -> afield.SNGP:
    model = afield.attach(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), num_random_features=16)
    afield.fit_posterior(model, [inputs()])
    return model


def images() -> afield.SNGP:
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    model = afield.sngp(nn.Sequential(*layers), num_random_features=16)
    model.train()(torch.randn(4, 3, 8, 8))
    afield.fit_posterior(model, [torch.randn(20, 3, 8, 8)])
    return model


def tokens(embedding: type[nn.Module] = nn.EmbeddingBag) -> afield.SNGP:
    layers = [embedding(10, 8), *([nn.Flatten()] if embedding is nn.Embedding else [])]
    width = 8 * 4 if embedding is nn.Embedding else 8
    model = afield.sngp(nn.Sequential(*layers, nn.Linear(width, 3)), num_random_features=16)
    afield.fit_posterior(model, [torch.randint(10, (50, 4))])
    return model


def split(x: Tensor, target: Tensor = y) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(20), target.split(20), strict=True))


def frozen() -> afield.SNGP:
    return afield.sngp(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), None, freeze=True)


CANNOT = r"The network cannot take inputs of shape "
TRAINING = r"\. Give inputs as they were in training"
NAN = r"finite, got NaN or infinity in 1 of 20 rows \(first: \[17\]\), which are examples \[37\] of the loader\."

TABLE: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    # Wrong width, wrong shape, wrong dtype
    (
        "width",
        lambda: table().predict(inputs(3)),
        ValueError,
        rf"{CANNOT}\(60, 3\): its layer '0' \(Linear\) expects 4 features in the last dimension, got .*{TRAINING}",
    ),
    (
        "width, posterior",
        lambda: afield.fit_posterior(table(), [inputs(5)]),
        ValueError,
        r"expects 4 features .*\(60, 5\)",
    ),
    (
        "width, calibrate",
        lambda: afield.calibrate(table(), [(inputs(5), y)]),
        ValueError,
        r"expects 4 features .*\(60, 5\)",
    ),
    ("width, attach", lambda: kept().predict(inputs(3)), ValueError, r"'0' \(Linear\) expects 4 features"),
    ("width, by name", lambda: table().predict(input=inputs(3)), ValueError, r"'0' \(Linear\) expects 4 features"),
    (
        "channels",
        lambda: images().predict(torch.randn(5, 1, 8, 8)),
        ValueError,
        rf"{CANNOT}\(5, 1, 8, 8\): its layer '0' \(Conv2d\) expects 3 channels, \(batch, 3, height, width\), got ",
    ),
    (
        "a table for images",
        lambda: images().predict(inputs()),
        ValueError,
        r"\(batch, 3, height, width\), got \(60, 4\)",
    ),
    (
        "size of images",
        lambda: images().predict(torch.randn(5, 3, 9, 9)),
        ValueError,
        r"hidden features of shape \(batch, 144\), got \(5, 196\)",
    ),
    (
        "whole numbers for real ones",
        lambda: table().predict(torch.ones(5, 4).long()),
        ValueError,
        r"layer '0' \(Linear\) expects torch\.float32, got torch\.int64",
    ),
    (
        "no batch dimension",
        lambda: table().predict(inputs()[0]),
        ValueError,
        r"hidden features of shape \(batch, 8\), got \(8,\)\. .*Has the input a batch dimension\?",
    ),
    (
        "a tensor for a loader",
        lambda: afield.fit_posterior(table(), inputs()),
        ValueError,
        "Has the input a batch dimension",
    ),
    (
        "real numbers for tokens",
        lambda: tokens().predict(torch.rand(5, 4)),
        ValueError,
        r"layer '0' \(EmbeddingBag\) expects whole numbers, such as token ids, got torch\.float32",
    ),
    (
        "unknown tokens",
        lambda: tokens().predict(torch.full((5, 4), 10)),
        ValueError,
        "expects numbers from 0 to 9, got 10 to 10",
    ),
    (
        "unknown tokens, padded",
        lambda: tokens(nn.Embedding).predict(torch.full((5, 4), 77)),
        ValueError,
        r"\(Embedding\) expects numbers from 0 to 9, got 77 to 77",
    ),
    # Text and arrays where tensors are expected
    (
        "text",
        lambda: table().predict(["a", "b"]),
        TypeError,
        r"expects tensors of numbers, got text\. Encode it first, as a tok",
    ),
    ("one text", lambda: table().predict("a"), TypeError, "got text"),
    ("text, posterior", lambda: afield.fit_posterior(table(), [["a", "b"]]), TypeError, "got text"),
    ("text in an array", lambda: table().predict(np.array(["a"])), TypeError, "got text"),
    ("width of an array", lambda: table().predict(np.zeros((5, 3))), ValueError, r"expects 4 features .*\(5, 3\)"),
    ("a list", lambda: table().predict([[1.0, 2, 3, 4]]), TypeError, r"got a list of numbers\. Use torch\.tensor\(x\)"),
    (
        "a batch of text",
        lambda: afield.fit_posterior(table(), ["text"]),
        TypeError,
        "A batch must be a tensor.* got <class 'str'>",
    ),
    (
        "a batch and not its input",
        lambda: table().predict((inputs(), y)),
        TypeError,
        r"cannot take 2 tensors in one list\. .*predict\(\[\(x, y\)\]\)",
    ),
    # Targets
    (
        "labels from 1",
        lambda: afield.calibrate(table(), [(inputs(), y + 1)]),
        ValueError,
        r"3 classes \(0 to 2\), the targets run from 1 to 3\. .*are labels numbered from 1\?",
    ),
    (
        "negative labels",
        lambda: afield.calibrate(table(), [(inputs(), y - 1)]),
        ValueError,
        "the targets run from -1 to 1",
    ),
    ("labels, fit_head", lambda: afield.fit_head(frozen(), [(inputs(), y + 1)]), ValueError, "from 1 to 3"),
    ("labels, policy", lambda: policy(table().predict(inputs()), y + 1, risk=0.5), ValueError, "from 1 to 3"),
    (
        "label names",
        lambda: afield.calibrate(table(), [(inputs(), ["cat"] * N)]),
        ValueError,
        r"calibrate expects batches of \(inputs, target\) whose target is a tensor of numbers, got list of str\. Num",
    ),
    (
        "label names in an array",
        lambda: afield.calibrate(table(), [(inputs(), np.array(["cat"] * N))]),
        ValueError,
        "got ndarray. Number",
    ),
    ("no labels", lambda: afield.calibrate(table(), [inputs()]), ValueError, "got a batch without a target"),
    (
        "fractions for labels",
        lambda: afield.calibrate(table(), [(inputs(), y + (y == 1) / 2)]),
        ValueError,
        r"whole numbers of shape \(N,\), got torch\.float32 \(60,\) \(first: rows \[1, 4, 7, 10, 13\]\)",
    ),
    (
        "a label that is NaN",
        lambda: afield.calibrate(table(), [(inputs(), y.float().index_fill(0, torch.tensor([8]), math.nan))]),
        ValueError,
        r"first: rows \[8\]",
    ),
    # Rows that are not finite
    ("NaN, posterior", lambda: afield.fit_posterior(table(), with_nan().split(20)), ValueError, NAN),
    ("NaN, attach", lambda: afield.fit_posterior(kept(), with_nan().split(20)), ValueError, NAN),
    ("NaN, calibrate", lambda: afield.calibrate(table(), split(with_nan())), ValueError, NAN),
    ("NaN, fit_head", lambda: afield.fit_head(frozen(), split(with_nan())), ValueError, NAN),
    ("NaN, update", lambda: update(table(), with_nan().split(20)), ValueError, NAN),
    ("NaN, add_class", lambda: add_class(table(), with_nan().split(20)), ValueError, NAN),
    (
        "NaN in the first batch",
        lambda: afield.fit_posterior(table(), [with_nan()]),
        ValueError,
        r"in 2 of 60 rows \(first: \[37, 45\]\)\. Nothing",
    ),
    # Steps that were left out
    (
        "never fitted",
        lambda: frozen().predict(inputs()),
        NotFitted,
        r"not fitted.*Call afield\.fit_posterior\(model, train_loader\)",
    ),
    (
        "never calibrated",
        lambda: table().predict(inputs()).accept(),
        ValueError,
        r"accept needs p_value, .* lacks\. Call afield\.calibrate\(model, held_out_loader\) first",
    ),
]


@pytest.mark.parametrize(("call", "kind", "message"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_every_error_says_what_was_expected_what_came_and_what_to_do(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_rows_that_are_not_finite_are_named_for_real_targets():
    model = afield.sngp(nn.Sequential(nn.Linear(4, 2)), None, num_random_features=8, likelihood="gaussian")
    target = torch.zeros(N, 2)
    target[9, 1] = math.inf
    with pytest.raises(ValueError, match=r"gaussian targets must be finite, got others in rows \[9\]"):
        afield.fit_posterior(model, [(inputs(), target)])


def test_what_is_not_a_number_is_never_accepted():
    model = table()
    afield.calibrate(model, [(inputs(), y)])
    p = model.predict(with_nan())
    assert p.p_value is not None
    assert not bool(p.accept(0.1)[[37, 45]].any())
    assert bool(p.accept(0.1).any())


def test_an_uncalibrated_prediction_has_no_p_value():
    assert table().predict(inputs()).p_value is None


def test_errors_of_the_networks_own_pass_through():
    class Broken(nn.Module):
        def __init__(self, error: Exception) -> None:
            super().__init__()
            self.layer, self.output, self.error = nn.Linear(4, 4), nn.Linear(4, 3), error

        def forward(self, x: Tensor) -> Tensor:
            self.output(self.layer(x))
            raise self.error

    for error in (RuntimeError("out of memory"), TypeError("mine"), IndexError("list"), KeyError("k")):
        with pytest.raises(type(error)) as caught:
            afield.sngp(Broken(error), None).hidden(inputs())
        assert caught.value.args == error.args
        assert caught.value.__cause__ is None


def test_networks_may_take_text():
    class Tokenizing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.output = nn.EmbeddingBag(128, 8), nn.Linear(8, 3)

        def forward(self, texts: list[str]) -> Tensor:
            return self.output(self.embedding(torch.tensor([[ord(letter) for letter in text[:3]] for text in texts])))

    model = afield.sngp(Tokenizing(), None, num_random_features=16)
    afield.fit_posterior(model, [{"texts": ["one", "two", "six", "ten"]}])
    assert model.predict(["one", "two"]).probs.shape == (2, 3)


def test_looking_for_the_reason_leaves_no_trace():
    model = table()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ValueError, match="cannot take"):
        model.predict(inputs(3))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
    assert not any(module._forward_pre_hooks for module in model.modules())
