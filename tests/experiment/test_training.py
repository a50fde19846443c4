"""The training loop: schedules, optimisers, checkpoints."""

import copy
import dataclasses
import math
import os
import random
import stat
from functools import partial
from pathlib import Path
from typing import IO

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import afield
from afield.backbones.resffn import ResFFN
from afield.errors import DamagedRun
from afield.experiment.checkpoint import read_checkpoint
from afield.experiment.training import batches, fit, make_optimizer, schedule
from afield.methods import METHODS
from afield.methods.method import Method
from afield.settings import Settings
from afield.tasks import TASKS, Task


@pytest.fixture(scope="module")
def moons() -> Task:
    task = TASKS["two-moons"](0)
    cut = {part: TensorDataset(*(t[:200] for t in getattr(task, part).tensors)) for part in ("train", "val", "test")}
    return dataclasses.replace(task, **cut, backbone=partial(ResFFN, 2, depth=2, width=16, dropout=0.1))


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", ["dnn", "sngp", "duq-gp", "mc-dropout"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_killed_training_goes_on_and_ends_where_it_would_have_ended(
    name: str, optimizer: str, moons: Task, tmp_path: Path
):
    method, file = METHODS[name], tmp_path / "checkpoint.pt"
    whole = fit(moons, method, epochs=5, optimizer=optimizer)

    def stop(epoch: int, loss: float) -> None:
        if epoch == 3:
            raise Stop

    with pytest.raises(Stop):
        fit(moons, method, epochs=5, optimizer=optimizer, checkpoint=file, on_epoch=stop)
    torch.manual_seed(123)  # another process has another random state
    torch.rand(10)
    epochs: list[int] = []
    resumed = fit(
        moons, method, epochs=5, optimizer=optimizer, checkpoint=file, on_epoch=lambda epoch, _: epochs.append(epoch)
    )
    assert epochs == [4, 5]
    ours, theirs = resumed.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_checkpoint_is_never_half_written(moons: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "checkpoint.pt"
    fit(moons, METHODS["dnn"], epochs=1, checkpoint=file)
    before = file.read_bytes()

    def dies(state: object, opened: IO[bytes]) -> None:
        opened.write(b"half")
        raise Stop

    monkeypatch.setattr(torch, "save", dies)
    with pytest.raises(Stop):
        fit(moons, METHODS["dnn"], epochs=2, checkpoint=file)
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_checkpoint_is_flushed_to_disk_before_it_has_its_name(
    moons: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    order: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flushed(handle: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        fsync(handle)

    def renamed(source: Path, target: Path) -> None:
        order.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", renamed)
    fit(moons, METHODS["dnn"], epochs=1, checkpoint=tmp_path / "checkpoint.pt")
    assert order == ["file", "rename", "folder"]


@pytest.mark.parametrize("number", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_never_gone_on_from(number: int, moons: Task, tmp_path: Path):
    file = tmp_path / "checkpoint.pt"
    fit(moons, METHODS["dnn"], epochs=1, checkpoint=file)
    content, generator = file.read_bytes(), random.Random(0)
    for _ in range(number):
        place = generator.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        file.write_bytes(damaged)
        with pytest.raises(DamagedRun, match=r"checkpoint\.pt is damaged.*Begin again with --fresh"):
            read_checkpoint(file)
    for wrong in (b"", content[:500], b"text", content[:-30]):
        file.write_bytes(wrong)
        with pytest.raises(DamagedRun, match=r"checkpoint\.pt is damaged.*Begin again with --fresh"):
            fit(moons, METHODS["dnn"], epochs=2, checkpoint=file)
    file.write_bytes(content)
    assert torch.load(file, weights_only=True)["epoch"] == read_checkpoint(file)["epoch"] == 1
    torch.save({"epoch": 1, "model": {}}, file)  # without a hash, as they were written before
    with pytest.raises(DamagedRun, match=r"checkpoint\.pt is damaged, or of another model"):
        fit(moons, METHODS["dnn"], epochs=2, checkpoint=file)


def test_seeds_do_not_share_the_order_of_examples(moons: Task):
    orders: list[list[float]] = []

    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        orders[-1].extend(batch[0][:, 0].tolist())
        return model(batch[0]).square().mean()

    method = dataclasses.replace(METHODS["dnn"], loss=loss)
    for seed in (0, 0, 1):
        orders.append([])
        fit(moons, method, seed=seed, epochs=3)
    assert orders[0] == orders[1] != orders[2]
    epochs = [orders[0][i : i + 200] for i in (0, 200, 400)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert all(sorted(e) == sorted(epochs[0]) for e in epochs)
    assert [orders[2][i : i + 200] for i in (0, 200, 400)] not in [epochs]
    assert not any(a == b for a in epochs for b in (orders[2][i : i + 200] for i in (0, 200, 400)))


def test_transforms_are_for_training_only(moons: Task):
    seen: list[str] = []

    def note(what: str, batch: object, settings: object = None) -> object:
        seen.append(what)
        return batch

    task = dataclasses.replace(moons, augment=partial(note, "task"))
    method = dataclasses.replace(METHODS["sngp"], transform=partial(note, "method"))
    fit(task, method, epochs=2, batch_size=100)
    assert seen == ["task", "method"] * 4  # two batches in each of two epochs, none for posterior and calibration


def test_methods_without_a_loss_are_finished_only(moons: Task):
    calls: list[int] = []
    method = Method(
        lambda backbone, outputs, settings=Settings(), /: nn.Linear(2, 2),
        METHODS["dnn"].predict,
        loss=None,
        finish=lambda model, train, val, settings=Settings(), /: calls.append(sum(len(y) for _, y in train)),
    )
    fit(moons, method, epochs=3, on_epoch=lambda *_: calls.append(-1))
    assert calls == [200]


def test_diverged_training_says_what_to_do(moons: Task):
    method = dataclasses.replace(METHODS["dnn"], loss=lambda model, batch: model(batch[0]).sum() * math.nan)
    with pytest.raises(ValueError, match=r"The loss became nan in epoch 1\. Use a smaller learning rate than 10"):
        fit(moons, method, epochs=2, learning_rate=10.0)


@pytest.mark.parametrize(
    ("name", "warmup", "expected"),
    [
        ("constant", 0.0, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", 0.0, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ("linear", 0.2, [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ("steps", 0.0, [1, 1, 1, 0.2, 0.2, 0.2, 0.04, 0.04, 0.008, 0.008]),
        ("tenths", 0.2, [0.5, 1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.001]),
        ("cosine", 0.0, [(1 + math.cos(math.pi * i / 10)) / 2 for i in range(10)]),
    ],
)
def test_schedule(name: str, warmup: float, expected: list[float]):
    factor = schedule(Settings(schedule=name, warmup=warmup), 10)
    assert [factor(step) for step in range(10)] == pytest.approx(expected)


def test_output_layer_has_its_own_rate_and_vectors_no_decay(moons: Task):
    settings = Settings(head_learning_rate=0.5, learning_rate=0.1, weight_decay=0.01, optimizer="sgd")
    for name, shapes in (("dnn", {(2, 16), (2,)}), ("sngp", {(2, 1024)})):
        model = METHODS[name].build(moons.backbone, 2, settings)
        groups = make_optimizer(model, settings, num_examples=1000).param_groups
        at_head = {tuple(p.shape) for g in groups if g["lr"] == 0.5 for p in g["params"]}
        assert at_head == shapes
        assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
        assert all((g["weight_decay"] > 0) == all(p.dim() > 1 for p in g["params"]) for g in groups)


@pytest.mark.parametrize("rate", [None, 0.5])
def test_output_layer_has_its_own_decay(rate: float | None, moons: Task):
    settings = Settings(head_learning_rate=rate, learning_rate=0.1, weight_decay=0.01, head_weight_decay=0.0)
    model = METHODS["sngp"].build(moons.backbone, 2, settings)
    groups = make_optimizer(model, settings, num_examples=1000).param_groups
    (head,) = [g for g in groups if tuple(g["params"][0].shape) == (2, 1024)]
    assert (head["lr"], head["weight_decay"], len(head["params"])) == (rate or 0.1, 0.0, 1)
    assert all(g["weight_decay"] == 0.01 for g in groups if g is not head and g["params"][0].dim() > 1)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_output_weights_of_a_gaussian_process_have_the_decay_of_their_prior(optimizer: str, moons: Task):
    """One step with a gradient of zero from the data is one on the prior alone: (ridge / N) B."""
    settings = Settings(optimizer=optimizer, weight_decay=0.01, ridge=2.0, num_random_features=8)
    model = METHODS["sngp"].build(moons.backbone, 2, settings)
    groups = make_optimizer(model, settings, num_examples=1000).param_groups
    (head,) = [g for g in groups if g["params"][0] is model.head.weight]
    assert head["weight_decay"] == 2.0 / 1000
    assert not head.get("decoupled_weight_decay", False)  # it goes through the gradient, with adamw too
    assert {g["weight_decay"] for g in groups if g is not head} == {0.0, 0.01}


def test_the_map_of_the_output_weights_is_what_training_ends_at():
    """On fixed features, gradient steps end where the log posterior has its maximum."""
    torch.manual_seed(0)
    h, y = torch.randn(200, 3), torch.randint(2, (200,))
    net = nn.Sequential(nn.Identity(), nn.Linear(3, 2))
    model = afield.sngp(net, None, num_random_features=8, length_scale=2.0, ridge=5.0, variance_features="same")
    exact = copy.deepcopy(model)
    afield.fit_head(exact, [(h, y)], progress=False)
    settings = Settings(optimizer="sgd", learning_rate=2.0, weight_decay=1.0, schedule="constant")
    optimizer = make_optimizer(model, settings, num_examples=200)
    for _ in range(300):
        optimizer.zero_grad()
        F.cross_entropy(model(h), y).backward()
        optimizer.step()
    torch.testing.assert_close(model.head.weight, exact.head.weight, atol=1e-3, rtol=0.0)


def test_real_targets_leave_the_decay_to_the_settings(moons: Task):
    """The prior's would depend on a noise that is not known yet."""
    settings = Settings(likelihood="gaussian", weight_decay=0.01, num_random_features=8)
    model = METHODS["sngp"].build(moons.backbone, 1, settings)
    groups = make_optimizer(model, settings, num_examples=1000).param_groups
    assert {g["weight_decay"] for g in groups} == {0.0, 0.01}


@pytest.mark.parametrize("name", ["dnn", "sngp"])
def test_frozen_parameters_stay_and_all_others_learn(name: str, moons: Task):
    torch.manual_seed(0)
    before = METHODS[name].build(moons.backbone, 2, moons.settings).state_dict()
    model = fit(moons, METHODS[name], epochs=1, frozen=("1.branch.*", "bias"))
    for parameter, now in model.named_parameters():
        assert torch.equal(now, before[parameter]) == (".1.branch." in parameter or parameter.endswith(".bias"))


def test_frozen_names_that_are_not_there_are_refused(moons: Task):
    with pytest.raises(ValueError, match=r"frozen expects names of parameters, got 'embeddings\.\*'"):
        fit(moons, METHODS["dnn"], epochs=1, frozen=("embeddings.*",))


def test_batches_are_in_order_and_complete(moons: Task):
    x = torch.cat([x for x, _ in batches(moons.train, 64)])
    assert torch.equal(x, moons.train.tensors[0])


def test_large_examples_come_in_smaller_batches():
    photographs = TensorDataset(torch.zeros(1, 3, 224, 224).expand(500, -1, -1, -1))
    sizes = [len(x) for (x,) in batches(photographs)]
    assert sum(sizes) == 500
    assert max(sizes) * 3 * 224**2 <= 2**24
    assert [len(x) for (x,) in batches(TensorDataset(torch.zeros(1500, 3, 32, 32)))] == [1024, 476]
    assert list(batches(TensorDataset(torch.zeros(0, 2)))) == []
