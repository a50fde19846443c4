"""Every answer belongs to one fitted state: fingerprints, refits that start afresh, changes that fail, many threads."""

import copy
import functools
import os
import threading
import time
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afield
from afield.errors import Stale, StaleWarning
from afield.model import fingerprint
from afield.model.fingerprint import digest
from afield.model.posterior import downdate, merge, update

N = 200


def data(number: int = 0, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    y = torch.arange(N) % 3
    return shift + torch.randn(N, 4, generator=generator) + 2 * F.one_hot(y, 4), y


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def train(net: nn.Module, steps: int = 30) -> None:
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    x, y = data()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def fitted(make: str = "sngp") -> afield.SNGP:
    return copy.deepcopy(_fitted(make))


@functools.cache
def _fitted(make: str) -> afield.SNGP:
    net = network()
    if make == "attach":
        train(net)
    model = getattr(afield, make)(net, num_random_features=64)
    if make == "sngp":
        train(model)
    afield.fit_posterior(model, [data(0)])
    afield.calibrate(model, [data(1)])
    return model.eval()


# Fingerprints


def change_by_training(model: afield.SNGP) -> None:
    model.requires_grad_(True)
    train(model, 1)


def change_by_loading(model: afield.SNGP) -> None:
    model.load_state_dict({k: v + 0.1 if k == "net.0.bias" else v for k, v in model.state_dict().items()})


def change_in_place(model: afield.SNGP) -> None:
    with torch.no_grad():
        next(model.net.parameters()).mul_(1.01)


def change_the_object(model: afield.SNGP) -> None:
    layer = model.net[0]
    assert isinstance(layer, nn.Linear)
    layer.bias = nn.Parameter(layer.bias.detach() + 0.1)


def change_by_a_fused_step(model: afield.SNGP) -> None:
    """Fused optimizers count up no versions."""
    model.requires_grad_(True)
    x, y = data(0)
    F.cross_entropy(model(x), y).backward()
    torch.optim.SGD(model.parameters(), lr=0.1, fused=True).step()


def change_to_an_average(model: afield.SNGP) -> None:
    """As averages of weights are swapped in: writes through `.data` count up no versions either."""
    for p in model.parameters():
        p.data.copy_(0.99 * p.data + 0.001)


def change_through_numpy(model: afield.SNGP) -> None:
    model.net[0].bias.detach().numpy()[...] += 0.1


def change_a_module(model: afield.SNGP) -> None:
    model.net[0] = nn.Linear(*reversed(model.net[0].weight.shape))


CHANGES = [
    *(change_by_a_fused_step, change_to_an_average, change_through_numpy, change_a_module),
    *(change_by_training, change_by_loading, change_in_place, change_the_object, lambda m: m.half().float()),
]


@pytest.mark.parametrize("make", ["sngp", "attach"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_network_is_noticed(make: str, change, tmp_path) -> None:
    model = fitted(make)
    x, _ = data(2)
    assert model.predict(x).p_value is not None
    change(model)
    with pytest.warns(StaleWarning, match=r"has changed since its posterior was fitted.*Call afield\.fit_posterior"):
        prediction = model.predict(x)
    assert prediction.p_value is None
    with pytest.raises(ValueError, match=r"afield\.calibrate"):
        prediction.accept(0.05)
    for act in (
        lambda: update(model, [data(3)]),
        lambda: downdate(model, [data(0)]),
        lambda: merge(model, fitted(make)),
        lambda: afield.calibrate(model, [data(1)]),
        lambda: afield.export.export(model, tmp_path / "model.onnx", x),
    ):
        with pytest.raises(Stale, match=r"Cannot .*has changed since its posterior was fitted"):
            act()
    afield.fit_posterior(model, [data(0)])
    afield.calibrate(model, [data(1)])
    assert model.predict(x).p_value is not None


def test_an_edit_behind_the_versions_back_is_noticed_where_it_counts() -> None:
    model = fitted()
    next(model.net.parameters()).data.mul_(1.01)  # no version counts this
    with pytest.raises(Stale):
        update(model, [data(3)])


def test_what_changes_nothing_is_no_change() -> None:
    model = fitted()
    x, _ = data(2)
    before = model.predict(x)
    model.load_state_dict(model.state_dict())  # new versions, same content
    model.train().eval()
    model.to(torch.float32)
    after = model.predict(x)
    assert torch.equal(before.p_value, after.p_value)
    other = copy.deepcopy(model)
    assert torch.equal(other.predict(x).p_value, after.p_value)
    update(other, [data(3)])


def test_a_prediction_hashes_the_network_only_where_it_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, _), digests = fitted(), data(2), []
    model.predict(x)
    monkeypatch.setattr(fingerprint, "digest", lambda *a, **k: digests.append(1) or digest(*a, **k))
    model.head.set_scalars(amplitude=2.0)  # the posterior's own tensors are no part of the network
    model.head.set_reference(torch.rand(50))
    for _ in range(2):
        model.predict(x)
    assert not digests
    with torch.no_grad():
        next(model.net.parameters()).mul_(1)
    for _ in range(2):
        model.predict(x)
    assert len(digests) == 1


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.Linear(4, 4)], ids=lambda layer: type(layer).__name__)
def test_a_tensor_that_comes_or_goes_is_a_change(layer: nn.Module) -> None:
    net = nn.Sequential(copy.deepcopy(layer).eval(), nn.Linear(4, 3))
    seen = fingerprint.Fingerprint(net)
    assert seen.still_holds(net)
    bias, net[0].bias = net[0].bias, None
    assert not seen.still_holds(net)
    net[0].bias = bias
    assert seen.still_holds(net)
    net[0].register_parameter("more", nn.Parameter(torch.ones(1)))
    assert not seen.still_holds(net)


def test_merge_takes_copies_of_one_model_only() -> None:
    model = fitted()
    other = copy.deepcopy(model)
    with pytest.raises(ValueError, match="with itself"):
        merge(model, model)
    with pytest.raises(ValueError, match=f"posteriors of the same examples: .* over {N} examples are equal"):
        merge(model, other)
    afield.fit_posterior(other, [data(1)], adapts=False)
    assert merge(model, other) == 2 * N
    with torch.no_grad():
        next(other.net.parameters()).mul_(1.01)
    afield.fit_posterior(other, [data(0)], adapts=False)
    with pytest.raises(ValueError, match="different weights"):
        merge(model, other)
    curved = afield.sngp(network(), num_random_features=64, curvature="likelihood")
    curved.load_state_dict(model.state_dict())
    afield.fit_posterior(curved, [data(0)])
    with pytest.raises(ValueError, match="curvature"):
        merge(model, curved)


# Refitting


def test_a_refit_of_an_attached_model_starts_afresh() -> None:
    """Standardisation and length scale come from the new data: as if it had been attached now."""
    model = fitted("attach")
    afield.fit_posterior(model, [data(7, shift=5.0)])
    net = network()
    train(net)
    fresh = afield.attach(net, num_random_features=64)
    fresh.head.random_features.load_state_dict(model.head.random_features.state_dict())
    fresh.head.random_features.forget_data()
    afield.fit_posterior(fresh, [data(7, shift=5.0)])
    for name in ("shift", "gain", "length_scale", "radius"):
        mine, theirs = (getattr(m.head.random_features, name) for m in (model, fresh))
        torch.testing.assert_close(mine, theirs)
    before = fitted("attach").head.random_features.shift
    assert not torch.allclose(model.head.random_features.shift, before)


def interrupted() -> Iterator[tuple[Tensor, Tensor]]:
    yield data(3)
    raise KeyboardInterrupt


def nans() -> list[tuple[Tensor, Tensor]]:
    x, y = data(3)
    return [(x, y), (x * torch.nan, y)]


@pytest.mark.parametrize("make", ["sngp", "attach"])
@pytest.mark.parametrize("broken", [list, nans, interrupted])
@pytest.mark.parametrize("act", [afield.fit_posterior, update, downdate, afield.calibrate])
def test_what_fails_leaves_the_old_state(make: str, broken, act) -> None:
    model = fitted(make)
    x, _ = data(2)
    before, state = model.predict(x), copy.deepcopy(model.state_dict())
    if broken is list and act in (update, downdate):
        assert act(model, broken()) == N  # of nothing: no change, and no failure
    else:
        with pytest.raises((ValueError, KeyboardInterrupt)):
            act(model, broken())
    after = model.predict(x)
    assert torch.equal(before.variance, after.variance)
    assert torch.equal(before.p_value, after.p_value)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


# Many at once


def run_threads(workers: list, seconds: float) -> list[BaseException]:
    errors: list[BaseException] = []
    stop = time.monotonic() + seconds

    def loop(work) -> None:
        try:
            work()
            while time.monotonic() < stop:
                work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(work,)) for work in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("make", ["sngp", "attach"])
@pytest.mark.parametrize("seconds", [0.8, pytest.param(60, marks=pytest.mark.slow)])
def test_threads_that_predict_see_one_state_while_others_change_it(make: str, seconds: float) -> None:
    """States: refitted and calibrated on one of two data sets, with or without an update. No answer is of two.

    One row has a computation of its own, which differs from that of a batch by rounding.
    """
    model = fitted(make)
    x, _ = data(9)
    rows = {8: x[:8], 1: x[8:9]}
    lock, states = threading.Lock(), {size: set() for size in rows}

    def answer(size: int) -> tuple:
        p = model.predict(rows[size])
        return tuple(None if t is None else tuple(t.flatten().tolist()) for t in (p.variance, p.probs, p.p_value))

    def remember() -> None:
        for size, known in states.items():
            known.add(answer(size))

    def refit(number: int) -> None:
        with lock, warnings.catch_warnings():  # writers remember the states that they make
            warnings.simplefilter("ignore")
            afield.fit_posterior(model, [data(number)])
            remember()
            afield.calibrate(model, [data(1)])
            remember()
            update(model, [data(number + 1)])
            remember()
            downdate(model, [data(number + 1)])
            remember()

    seen: dict[int, list[tuple]] = {size: [] for size in rows}
    remember()

    def predict(size: int) -> None:
        found = answer(size)
        if len(seen[size]) < 20_000:
            seen[size].append(found)

    readers = [lambda: predict(8)] * 3 + [lambda: predict(1)] * 3
    errors = run_threads([*readers, lambda: refit(3), lambda: refit(5)], seconds)
    assert not errors
    for size, found in seen.items():  # calibration changes the amplitude: variance, probabilities, p-values go together
        assert found
        assert set(found) <= states[size]
    assert len(states[8]) > 4
    refit(3)
    fresh = copy.deepcopy(model)
    afield.fit_posterior(fresh, [data(3)])
    torch.testing.assert_close(model.head.precision.data, fresh.head.precision.data, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("forks", [10, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_fork_while_threads_predict_does_not_hang(forks: int) -> None:
    model = fitted().train()
    x, _ = data(9)
    stop = threading.Event()

    def predict() -> None:
        while not stop.is_set():
            model.predict(x[:2])
            model.predict(x[:1])

    threads = [threading.Thread(target=predict) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(forks):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if not child:
                try:
                    model.predict(x[:2])
                    model.predict(x[:1])
                    os._exit(0 if model.training else 3)
                except BaseException:
                    os._exit(1)
            end = time.monotonic() + 20
            while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < end:
                time.sleep(0.001)
            if done[0] == 0:
                os.kill(child, 9)
                os.waitpid(child, 0)
            assert done[0] == child, "the child hangs"
            assert os.waitstatus_to_exitcode(done[1]) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert model.training


# Copies that act alike


def test_a_folded_model_is_fitted_too_and_a_stale_one_stays_stale() -> None:
    model = fitted()
    x, _ = data(2)
    assert torch.equal(afield.fold(model).predict(x).p_value, model.predict(x).p_value)
    change_in_place(model)
    with pytest.warns(StaleWarning):
        afield.fold(model).predict(x)


def test_a_saved_model_knows_what_it_was_fitted_with(tmp_path) -> None:
    model = fitted()
    x, _ = data(2)
    back = afield.load(afield.save(model, tmp_path / "model"), network())
    assert torch.equal(back.predict(x).p_value, model.predict(x).p_value)
    change_in_place(back)
    with pytest.warns(StaleWarning):
        assert back.predict(x).p_value is None
    with pytest.warns(StaleWarning, match=r"afield\.save: .*Call afield\.fit_posterior"):
        afield.save(back, tmp_path / "stale")
    with pytest.warns(StaleWarning):
        assert afield.load(tmp_path / "stale", network()).predict(x).p_value is None
