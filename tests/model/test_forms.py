"""Everything works in both forms: a variance with features of its own, and with those of the mean.

Each form with a shared covariance, one for each class, and one of low rank: the posterior as data come and go, classes,
processes, files, exports, compilation, stacks.
"""

import copy
import datetime
import itertools
import shutil
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import afield
from afield.deploy.export import export
from afield.deploy.onnx_file import open_session
from afield.gp.low_rank import LowRank
from afield.methods.ensemble import combine
from afield.methods.stacked import stack
from afield.model.class_changes import add_class, drop_class
from afield.model.posterior import downdate, merge, update

COVARIANCES: dict[str, dict[str, Any]] = {
    "shared": {},
    "per class": {"covariance": "per_class"},
    "low rank": {"covariance": "per_class", "rank": 400},  # no less than the examples: exact
}
FORMS = [(form, name) for form in ("own", "same") for name in COVARIANCES]
each_form = pytest.mark.parametrize(("form", "covariance"), FORMS)
CLASSES = 3


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def data(n: int = 300, number: int = 0) -> tuple[Tensor, Tensor]:
    x = normal(n, 4, number=number)
    return x, (x[:, :CLASSES] + 0.3 * normal(n, CLASSES, number=number + 100)).argmax(1)


def parts(*ends: int) -> list[tuple[Tensor, Tensor]]:
    x, y = data()
    return [(x[a:b], y[a:b]) for a, b in itertools.pairwise(ends)]


def plain(number: int = 0) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, CLASSES)).double()


@cache
def _fitted(form: str, covariance: str, number: int) -> afield.SNGP:
    options = {"generator": torch.Generator().manual_seed(number)} | COVARIANCES[covariance]
    model = afield.sngp(plain(number), None, num_random_features=96, variance_features=form, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    x, y = data()
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    afield.fit_posterior(model, [data()])
    return model


def fitted(form: str, covariance: str, number: int = 0) -> afield.SNGP:
    """A trained model of this form, to do with as one likes."""
    return copy.deepcopy(_fitted(form, covariance, number))


def calibrated(form: str, covariance: str, number: int = 0) -> afield.SNGP:
    model = fitted(form, covariance, number)
    afield.calibrate(model, [data(number=1)])
    return model


def check_same(found: afield.SNGP, right: afield.SNGP) -> None:
    """Calibrated on the same rows, both have the same variance and the same score."""
    for model in (found, right):
        afield.calibrate(model, [data(number=1)])
    x, _ = data(50, number=2)
    torch.testing.assert_close(found.predict(x).variance, right.predict(x).variance, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(found.predict(x).joined, right.predict(x).joined, rtol=1e-5, atol=1e-5)


def refit(model: afield.SNGP, batches: list[tuple[Tensor, Tensor]]) -> afield.SNGP:
    """A copy whose posterior has these examples, in the geometry of the first fit."""
    model = copy.deepcopy(model)
    afield.fit_posterior(model, batches, adapts=False)
    return model


@each_form
def test_the_form_is_what_was_asked_for(form: str, covariance: str) -> None:
    head = fitted(form, covariance).head
    assert (head.variance_features is None) == (form == "same")
    assert (head.covariance, isinstance(head.precision, LowRank)) == (
        "shared" if covariance == "shared" else "per_class",
        covariance == "low rank",
    )
    exact = fitted(form, "per class" if covariance == "low rank" else covariance)
    torch.testing.assert_close(head.posterior(normal(20, 12).relu())[1], exact.head.posterior(normal(20, 12).relu())[1])


@each_form
def test_examples_come_and_go(form: str, covariance: str) -> None:
    whole = fitted(form, covariance)
    a, b = parts(0, 200, 300)
    first, second = refit(whole, [a]), refit(whole, [b])
    merged, updated = copy.deepcopy(first), copy.deepcopy(first)
    assert merge(merged, second) == 300
    check_same(merged, whole)
    assert update(updated, [b]) == 300
    check_same(updated, whole)
    if covariance == "low rank":
        with pytest.raises(ValueError, match="rank"):
            downdate(updated, [b])
    else:
        assert downdate(updated, [b]) == 200
        check_same(updated, first)


@each_form
def test_classes_come_and_go(form: str, covariance: str) -> None:
    model = fitted(form, covariance)
    new, again = (4 + normal(60, 4, number=number) for number in (7, 8))
    if covariance != "shared":
        with pytest.raises(ValueError, match=r"add_class expects a head with covariance='shared', got 'per_class'"):
            add_class(model, [new])
        return
    grown = add_class(model, [new])
    x, y = data(number=1)
    held = torch.cat([x, 4 + normal(60, 4, number=9)]), torch.cat([y, torch.full((60,), CLASSES)])
    afield.calibrate(grown, [held])
    afield.calibrate(model, [(x, y)])
    p = grown.predict(again)
    assert p.probs.shape == (60, CLASSES + 1)
    assert float((p.probs.argmax(1) == CLASSES).double().mean()) > 0.7
    assert float(p.p_value.median()) > float(model.predict(again).p_value.median())
    shrunk = drop_class(grown, CLASSES, [(new, torch.full((60,), CLASSES))])
    torch.testing.assert_close(shrunk(x), model(x))
    assert shrunk.predict(x).probs.shape == (300, CLASSES)


@each_form
def test_saved_and_loaded_to_the_bit(form: str, covariance: str, tmp_path: Path) -> None:
    model, (x, _) = calibrated(form, covariance), data(50, number=2)
    back = afield.load(afield.save(model, tmp_path), plain(1)).predict(x).numpy()
    for name, value in model.predict(x).numpy().items():
        assert (back[name] == value).all(), name


@each_form
def test_a_stack_predicts_what_its_members_do(form: str, covariance: str) -> None:
    members = [calibrated(form, covariance, number) for number in (0, 1)]
    x, _ = data(50, number=2)
    found, right = stack(members).predict(x).numpy(), combine([m.predict(x) for m in members]).numpy()
    assert set(found) == set(right)
    for name, value in right.items():
        torch.testing.assert_close(torch.from_numpy(found[name]), torch.from_numpy(value), rtol=1e-6, atol=1e-9)


@each_form
def test_far_away_along_every_ray_the_variance_is_its_prior(form: str, covariance: str) -> None:
    model = calibrated(form, covariance)
    head = model.head
    for rays in (normal(40, 4, number=3), data()[0][:40]):  # any direction, and those of the training data themselves
        with torch.no_grad():
            near, far = model.hidden(rays), model.hidden(1e6 * rays)
            far = far[far.any(1)]  # what the network makes nothing of, nobody sees
            prior = head.amplitude.square() / head.ridge * head.variance_phi(far).square().sum(1, keepdim=True)
            inside, outside = (head.posterior(h)[1].reshape(len(h), -1) for h in (near, far))
        ratio = (outside / prior).sqrt()
        assert float(ratio.max()) <= 1 + 1e-9
        assert float(ratio.min()) > 0.6
        assert float(ratio.mean()) > 0.75
        assert float(outside.min()) > float(inside.median())


# Two processes ----------------------------------------------------------------------------------------------------


def _one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    for form, covariance in FORMS:
        model = fitted(form, covariance)
        assert afield.fit_posterior(model, [parts(0, 200, 300)[rank]], sharded=True) == 300
        torch.save(model.head.state_dict(), f"{folder}/{form} {covariance} {rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for form, covariance in FORMS:
        fitted(form, covariance)  # once, before the processes part
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        mp.start_processes(_one_rank, (str(folder),), nprocs=2, start_method="fork")
    return folder


@each_form
def test_two_processes_fit_the_posterior_of_one(form: str, covariance: str, two_processes: Path) -> None:
    for rank in range(2):
        model = fitted(form, covariance)
        model.head.load_state_dict(torch.load(two_processes / f"{form} {covariance} {rank}"))
        check_same(model, fitted(form, covariance))


# Out of the house -------------------------------------------------------------------------------------------------


def inputs(model: afield.SNGP) -> Tensor:
    """Rows that the network makes something of: others are one vector to it, and their scores are equal."""
    x, _ = data(50, number=2)
    return x[model.hidden(x).any(1)]


def check_tensors(found: dict[str, Tensor], model: afield.SNGP, x: Tensor, tolerance: float) -> None:
    """What a rounding does to a score may be a step of the p-value."""
    p = model.predict(x)
    for name, value in {"probs": p.probs, "variance": p.variance, "score": p.score()}.items():
        torch.testing.assert_close(found[name].to(value), value, rtol=tolerance, atol=tolerance)
    step = 1.5 / (model.head.reference.numel() + 1)
    torch.testing.assert_close(found["p_value"].to(p.p_value), p.p_value, rtol=0, atol=step)


@pytest.mark.slow
@each_form
@pytest.mark.parametrize("format", ["torch-export", "onnx"])
def test_exported(form: str, covariance: str, format: str, tmp_path: Path) -> None:
    model = calibrated(form, covariance)
    x = inputs(model)
    done = export(model, tmp_path / ("model.onnx" if format == "onnx" else "model.pt2"), x, format=format)
    if format == "onnx":
        found = open_session(done.file.read_bytes(), ["input"])((x.float(),))
    else:
        found = torch.export.load(done.file).module()(x.float())
    check_tensors(found, model, x, 1e-3)  # files are in single precision


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@each_form
def test_compiled(form: str, covariance: str) -> None:
    model = calibrated(form, covariance)
    x = inputs(model)
    found = torch.compile(model.predict, backend="inductor" if shutil.which("g++") else "aot_eager")(x)
    fields = {"probs": found.probs, "variance": found.variance, "score": found.score(), "p_value": found.p_value}
    check_tensors(fields, model, x, 1e-6)
    torch._dynamo.reset()
