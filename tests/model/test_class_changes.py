"""Classes that grow: the regression behind a new class, what stays as it was, and how good it is on digits."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import afield
from afield.errors import NotFitted
from afield.model.class_changes import add_class, drop_class

CONVERTED = ("sngp", "attach")
converted = pytest.mark.parametrize("kind", CONVERTED)


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def blobs(n: int, k: int, number: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Examples of classes 0 to k - 1, around corners of a cube in five dimensions."""
    y = torch.arange(n) % k
    centres = 3 * torch.randn(8, 5, generator=seed(99), dtype=dtype)
    return centres[y] + torch.randn(n, 5, generator=seed(number), dtype=dtype), y


def make(kind: str = "sngp", k: int = 4, dtype: torch.dtype = torch.float64, **options: Any) -> afield.SNGP:
    """A model of the first k blobs, fitted."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, k)).to(dtype)
    if kind == "sngp":
        model = afield.sngp(net, None, num_random_features=64, generator=seed(), **options)
    else:
        model = afield.attach(net, num_random_features=64, generator=seed(), **options)
    x, y = blobs(200, k, dtype=dtype)
    parameters = model.parameters() if kind == "sngp" else net.parameters()
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy((model if kind == "sngp" else net)(x), y).backward()
        optimizer.step()
    if kind == "attach":
        model = afield.attach(net, num_random_features=64, generator=seed(), **options)
    afield.fit_posterior(model, [x])
    return model


def fresh(n: int, label: int, number: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    x, y = blobs(8 * n, 8, number, dtype)
    return x[y == label]


def state(model: afield.SNGP) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name].nan_to_num(7), b[name].nan_to_num(7)) for name in a)


# The regression --------------------------------------------------------------------------------------------------


@converted
def test_the_new_logit_is_the_dual_regression_on_old_and_new_data(kind):
    """Kernel ridge regression of 0 on the old and 1 on the new examples, which sees all of them, gives the same."""
    model, new, x = make(kind), fresh(12, 4), blobs(200, 4)[0]
    grown, test = add_class(model, [new]), fresh(30, 4, number=6)
    with torch.no_grad():
        phi = {n: model.head.variance_phi(model.hidden(d)) for n, d in (("old", x), ("new", new), ("test", test))}
        seen = torch.cat([phi["old"], phi["new"]])
        y = torch.cat([torch.zeros(len(x)), torch.ones(len(new))]).double()
        ridge = float(model.head.ridge)
        gram = seen @ seen.T
        dual = torch.linalg.solve(gram + ridge * torch.eye(len(seen), dtype=torch.float64), y)
        g = phi["test"] @ seen.T @ dual
        logits = grown(test)
        above = logits[:, -1] - logits[:, :-1].mean(1)
        scale = above / g
        torch.testing.assert_close(scale, scale.mean().expand_as(scale), rtol=1e-7, atol=0)
        # The scale, from the definition of every part of it.
        left_out = []
        for i in range(len(new)):
            rest = torch.arange(len(seen)) != len(x) + i
            part = torch.linalg.solve(
                gram[rest][:, rest] + ridge * torch.eye(len(seen) - 1, dtype=torch.float64), y[rest]
            )
            left_out.append(seen[~rest] @ seen[rest].T @ part)
        intruder = (gram[: len(x)] @ dual).square().mean().sqrt()
        old = model(new)
        beat = torch.logsumexp(old - old.mean(1, keepdim=True), 1).mean()
        win, lose = scale.mean() * torch.stack(left_out).mean() - beat, beat - scale.mean() * intruder
        assert float(win) == pytest.approx(float(lose), rel=1e-6)


@converted
@given(shift=st.floats(-50, 50))
@settings(deadline=None, max_examples=5)
def test_the_common_level_of_the_old_logits_does_not_matter(kind, shift):
    model, new, x = make(kind, constant=True) if kind == "sngp" else make(kind), fresh(10, 4), fresh(5, 2)
    moved = copy.deepcopy(model)
    with torch.no_grad():
        (moved.head.constant if kind == "sngp" else moved.head.mean.bias).add_(shift)
    moved.fingerprint = None  # the change is meant
    before, after = add_class(model, [new]), add_class(moved, [new])
    torch.testing.assert_close(after(x).detach() - shift, before(x).detach(), rtol=1e-9, atol=1e-7)


def test_the_variance_learns_the_new_class():
    model, new = make(), fresh(20, 4)
    grown, test = add_class(model, [new]), fresh(20, 4, number=6)
    updated = copy.deepcopy(model)
    afield.posterior.update(updated, [new])
    torch.testing.assert_close(grown.predict(test).variance, updated.predict(test).variance)
    assert bool((grown.predict(test).variance < model.predict(test).variance).all())
    assert grown.head.num_observed == 220


# What stays ------------------------------------------------------------------------------------------------------


@converted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_other_logits_are_the_same_bit_for_bit(kind, dtype, rows):
    model = make(kind, k=3, dtype=dtype)
    x = blobs(rows, 8, 3, dtype)[0]
    once = add_class(model, fresh(10, 3, dtype=dtype).split(4))
    twice = add_class(once, [fresh(10, 4, dtype=dtype)])
    assert twice(x).shape == (rows, 5)
    assert torch.equal(once(x)[:, :3], model(x))
    assert torch.equal(twice(x)[:, :4], once(x))
    assert torch.equal(twice.predict(x).logits[:, :4], once.predict(x).logits)
    less = drop_class(twice, 1)
    assert torch.equal(less(x), twice(x)[:, [0, 2, 3, 4]])
    assert torch.equal(drop_class(less, 2)(x), twice(x)[:, [0, 2, 4]])  # an added one, behind a gap


@converted
def test_the_model_itself_is_not_touched(kind):
    model, new = make(kind), fresh(10, 4)
    model.train()
    before, settings_before = state(model), copy.deepcopy(model.settings)
    grown = add_class(model, [new])
    drop_class(grown, 0)
    assert same(state(model), before)
    assert model.settings == settings_before
    assert model.training
    assert grown.training


@converted
def test_dropping_the_added_class_restores_the_old_answers(kind):
    model, new, x = make(kind), fresh(10, 4), blobs(50, 8, 3)[0]
    back = drop_class(add_class(model, [new]), 4, [new])
    assert torch.equal(back(x), model(x))
    before, after = model.predict(x), back.predict(x)
    assert torch.equal(after.logits, before.logits)
    torch.testing.assert_close(after.variance, before.variance, rtol=1e-9, atol=0)
    torch.testing.assert_close(after.probs, before.probs, rtol=1e-9, atol=0)
    assert state(back).keys() == state(model).keys()
    assert back.head.num_observed == model.head.num_observed
    familiar = drop_class(add_class(model, [new]), 4)
    assert bool((familiar.predict(new).variance < back.predict(new).variance).all())


def test_only_models_that_train_have_a_trainable_new_class():
    assert [p.requires_grad for p in add_class(make("sngp"), [fresh(9, 4)]).head.added] == [True]
    assert not any(p.requires_grad for p in add_class(make("attach"), [fresh(9, 4)]).parameters())


@converted
def test_a_grown_and_a_shrunk_model_survive_the_disk(kind, tmp_path):
    model, x = make(kind), blobs(20, 8, 3)[0]
    net = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4))
    grown = drop_class(add_class(add_class(model, [fresh(9, 4)]), [fresh(9, 5)]), 1)
    for each in (grown, drop_class(grown, 3), drop_class(model, 0)):
        afield.save(each, tmp_path / "m")
        again = afield.load(tmp_path / "m", net)
        assert torch.equal(again.predict(x).probs, each.predict(x).probs)
        assert again.head.out_features == each.head.out_features


@converted
def test_p_values_are_off_until_calibrated_anew(kind):
    model = make(kind)
    afield.calibrate(model, [blobs(120, 4, 7)])
    assert model.predict(fresh(3, 0)).p_value is not None
    for changed in (add_class(model, [fresh(20, 4)]), drop_class(model, 3)):
        assert changed.predict(fresh(3, 0)).p_value is None
        afield.calibrate(changed, [blobs(150, changed.head.out_features, 7)])
        assert changed.predict(fresh(3, 0)).p_value is not None
    assert float(changed.head.logit_scale) > 0


# How good it is --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> dict[str, Tensor]:
    """8 x 8 images of scikit-learn, 1200 to train on."""
    bunch = pytest.importorskip("sklearn.datasets", reason="needs scikit-learn's digits").load_digits()
    order = torch.randperm(len(bunch.target), generator=seed())
    x, y = torch.from_numpy(bunch.data).float()[order] / 16, torch.from_numpy(bunch.target).long()[order]
    return {"x": x[:1200], "y": y[:1200], "test": x[1200:], "labels": y[1200:]}


@pytest.fixture(scope="module", params=CONVERTED)
def without_eight_and_nine(request: pytest.FixtureRequest, digits: dict[str, Tensor]) -> afield.SNGP:
    torch.manual_seed(0)
    known = digits["y"] < 8
    x, y = digits["x"][known], digits["y"][known]
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8))
    options = {"num_random_features": 512, "generator": seed()}
    model: Any = afield.sngp(net, **options) if request.param == "sngp" else net
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(15):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    model = model if request.param == "sngp" else afield.attach(net, **options)
    afield.fit_posterior(model, [x])
    return model


def recalls(model: afield.SNGP, digits: dict[str, Tensor], classes: int) -> Tensor:
    """Accuracy on test digits below `classes`, class by class."""
    labels = model.predict(digits["test"]).labels
    return torch.stack([(labels == k)[digits["labels"] == k].float().mean() for k in range(classes)])


@pytest.mark.parametrize(("count", "least", "lost"), [(100, 0.85, 0.04), (20, 0.75, 0.04), (5, 0.6, 0.06)])
def test_two_new_digits_are_learned_and_the_old_ones_kept(without_eight_and_nine, digits, count, least, lost):
    model, (x, y) = without_eight_and_nine, (digits["x"], digits["y"])
    before = float(recalls(model, digits, 8).mean())
    assert before > 0.95
    nine = add_class(add_class(model, [(x[y == 8][:count], y[y == 8][:count])]), [x[y == 9][:count]])
    after = recalls(nine, digits, 10)
    assert float(after[:8].mean()) > before - lost
    assert float(after[8:].mean()) > least
    assert float(after.mean()) > 0.9


# What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"covariance": "per_class"}, "add_class expects a head with covariance='shared', got 'per_class'"),
        ({"curvature": "likelihood"}, "curvature='unit', got 'likelihood'"),
        ({"momentum": 0.9}, r"exact posterior \(momentum=None\), got a moving average"),
        ({"likelihood": "gaussian"}, "likelihood='categorical', got 'gaussian'"),
    ],
)
def test_heads_without_what_it_takes_are_refused(options, message):
    model = afield.sngp(nn.Sequential(nn.Linear(5, 3)), None, num_random_features=8, length_scale=1.0, **options)
    model.head.observe(torch.randn(10, 5))
    with pytest.raises(ValueError, match=message):
        add_class(model, [torch.randn(5, 5)])


def test_bad_examples_are_refused():
    model = make()
    with pytest.raises(ValueError, match="at least 2 examples of the new class, got 1"):
        add_class(model, [fresh(1, 4)])
    with pytest.raises(ValueError, match="at least 2 examples of the new class, got 0"):
        add_class(model, [])
    with pytest.raises(ValueError, match=r"the new class alone, whose number is 4, got targets \[2, 5\]"):
        add_class(model, [(fresh(3, 4), torch.tensor([4, 5, 2]))])
    with pytest.raises(NotFitted, match="before add_class"):
        add_class(afield.sngp(nn.Sequential(nn.Linear(5, 3))), [fresh(3, 4)])
    options: dict[str, Any] = {"num_random_features": 8, "kernel": "arccos", "length_scale": 1.0}
    dead = afield.sngp(nn.Sequential(nn.Linear(5, 3)), None, variance_features="same", **options)
    dead.head.random_features.phase.fill_(-math.inf)  # the rectifier of every feature is off
    dead.head.observe(torch.randn(10, 5))
    with pytest.raises(ValueError, match="features of the new examples are all zero"):
        add_class(dead, [torch.randn(5, 5)])


def test_classes_that_are_not_there_or_not_to_spare_are_refused():
    for index in (-1, 4):
        with pytest.raises(ValueError, match=rf"4 classes \(0 to 3\), got {index}"):
            drop_class(make(), index)
    two = drop_class(drop_class(make(), 0), 0)
    with pytest.raises(ValueError, match="at least 2 classes"):
        drop_class(two, 0)
    regression = afield.sngp(nn.Sequential(nn.Linear(5, 3)), None, num_random_features=8, likelihood="gaussian")
    with pytest.raises(ValueError, match="drop_class expects a head with likelihood='categorical'"):
        drop_class(regression, 0)


def test_fit_head_refuses_a_head_whose_classes_changed():
    grown = add_class(make(), [fresh(10, 4)])
    with pytest.raises(ValueError, match="fit_head solves for all outputs of a head whose classes never changed"):
        afield.fit_head(grown, [])
