"""Save and load: the same answers to the bit in a fresh process; anything else is told, nothing is unpickled."""

import hashlib
import inspect
import io
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import afield
from afield.bounds.spectral import bounds_of
from afield.errors import DamagedModel, NotFitted, StaleWarning
from afield.model import saving
from afield.model.files import hash_json
from afield.model.posterior import update
from afield.model.saving import FORMAT, INDEX, read_index


class Convolutional(nn.Module):
    """Convolutions, one of them used twice, a BatchNorm, and an input size that a bounded convolution learns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.Linear(4 * 9, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.again(self.again(x)))
        return self.out(torch.tanh(self.fc(x.flatten(1))))


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def images(n: int, number: int = 0) -> Tensor:
    return torch.randn(n, 1, 6, 6, generator=seed(number))


def labelled(n: int, number: int = 0) -> tuple[Tensor, Tensor]:
    return images(n, number), torch.arange(n) % 3


def trained(convert: Callable[..., afield.SNGP] = afield.sngp, **options: Any) -> afield.SNGP:
    """Converted, trained for a few steps so that every bound has moved, fitted, calibrated."""
    options = {"num_random_features": 16} | options
    model = convert(Convolutional(), **options)
    if any(p.requires_grad for p in model.parameters()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(4):
            x, y = labelled(30, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    afield.fit_posterior(model, [labelled(90, 5)])
    afield.calibrate(model, [labelled(90, 6)])
    return model


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def small(**options: Any) -> afield.SNGP:
    """The quickest model there is, fitted."""
    model = afield.sngp(mlp(), num_random_features=8, length_scale=1.0, **options)
    afield.fit_posterior(model, [torch.randn(20, 3)])
    return model


def identical(one: afield.SNGP, two: afield.SNGP, x: Tensor) -> None:
    a, b = one.predict(x).numpy(), two.predict(x).numpy()
    assert a.keys() == b.keys()
    assert all(a[name].tobytes() == b[name].tobytes() and a[name].dtype == b[name].dtype for name in a)


def bits(model: afield.SNGP) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    """The state to the last bit, NaN included."""
    return {
        name: (t.dtype, t.shape, t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, t in model.state_dict().items()
    }


# Round trips -----------------------------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], afield.SNGP]] = {
    "sngp": lambda: trained(bound={nn.Conv2d: 0.8, nn.BatchNorm2d: 1.5, "fc": 0.5}),
    "attach": lambda: trained(afield.attach),
    "per class": lambda: trained(covariance="per_class", likelihood="categorical", kernel="matern32", ridge=0.1),
    "projection": lambda: trained(projection=4, geometry="standardized", constant=True, momentum=0.9),
}
# What a user's own script would share with the one that saved: the class of the network.
SCRIPT = """
import sys
import torch
from torch import Tensor, nn
from safetensors.torch import load_file, save_file
import afield

NETWORK
torch.set_num_threads(1)
torch.manual_seed(99)
x = load_file(sys.argv[1])["x"]
for folder in sys.argv[2:]:
    answer = afield.load(folder, Convolutional()).predict(x)
    tensors = {name: torch.from_numpy(array) for name, array in answer.numpy().items()}
    save_file(tensors, folder + "/answer", {"smallest_p_value": repr(answer.smallest_p_value)})
""".replace("NETWORK", inspect.getsource(Convolutional))


def test_a_calibrated_model_answers_identically_in_a_fresh_process(tmp_path):
    models = {name: make() for name, make in MODELS.items()}
    for name, model in models.items():
        afield.save(model, tmp_path / name)
    x = images(40, 11)
    save_file({"x": x}, tmp_path / "x")
    folders = [str(tmp_path / name) for name in models]
    environment = os.environ | {"PYTHONPATH": str(Path(afield.__file__).parents[1])}
    subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path / "x"), *folders], check=True, env=environment
    )
    for name, model in models.items():
        prediction, answer = model.predict(x), load_file(tmp_path / name / "answer")
        expected = prediction.numpy()
        assert answer.keys() == expected.keys() >= {"probs", "variance", "p_value"}, name
        assert all(answer[k].numpy().tobytes() == v.tobytes() for k, v in expected.items()), name
        with safe_open(tmp_path / name / "answer", "pt") as file:
            assert file.metadata()["smallest_p_value"] == repr(prediction.smallest_p_value)


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_state_comes_back_and_what_trains(name, tmp_path):
    model = MODELS[name]()
    back = afield.load(afield.save(model, tmp_path / "model"), Convolutional())
    assert bits(model) == bits(back)
    assert (back.kind, back.output) == (model.kind, model.output)
    assert [b.c for b in all_bounds(back)] == [b.c for b in all_bounds(model)]
    assert [p.requires_grad for p in back.parameters()] == [p.requires_grad for p in model.parameters()]
    assert not any(m.training for m in back.modules())
    identical(model, back, images(10, 3))


def test_neither_the_weights_nor_the_mode_of_the_given_network_matter_and_it_stays(tmp_path):
    model = trained()
    afield.save(model, tmp_path)
    net = Convolutional().double().train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    identical(model, afield.load(tmp_path, net), images(10))
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert net.training


def test_a_loaded_model_lives_on(tmp_path):
    """It trains, its bounds iterate, and updating it equals updating the original."""
    model = trained()
    back = afield.load(afield.save(model, tmp_path), Convolutional())
    for one in (model, back):
        update(one, [images(7, 20)])
    torch.testing.assert_close(model.predict(images(5)).variance, back.predict(images(5)).variance, rtol=0, atol=0)
    for one in (model.train(), back.train()):
        one.net.fc.parametrizations.weight.original.data.mul_(3)
        one(images(5))
    assert torch.equal(model.net.fc.weight, back.net.fc.weight)
    assert all(int(a.num_steps) == int(b.num_steps) for a, b in zip(all_bounds(model), all_bounds(back), strict=True))


def all_bounds(model: afield.SNGP) -> list[Any]:
    return [b for m in model.modules() for b in bounds_of(m).values()]


def audit(model: afield.SNGP) -> str:
    model.audit(text := io.StringIO())
    return text.getvalue()


def test_bounds_by_type_and_by_pattern_come_back(tmp_path):
    rules = {"fc": None, "ag*": 0.25, nn.Conv2d: 0.75, nn.BatchNorm2d: 1.5}
    model = trained(bound=rules)
    back = afield.load(afield.save(model, tmp_path), Convolutional())
    net = back.net
    assert [b.c for layer in (net.conv, net.again, net.norm) for b in bounds_of(layer).values()] == [0.75, 0.25, 1.5]
    assert not bounds_of(net.fc)
    assert audit(back) == audit(model)


class Attentive(nn.Module):
    """x (N, 3) as a sequence of three, through attention; its projections are bounded as one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, :, None].expand(-1, -1, 4)
        return self.out(self.attention(tokens, tokens, tokens, need_weights=False)[0].flatten(1))


@pytest.mark.parametrize("rules", [0.3, {"attention": 0.3}, {nn.MultiheadAttention: 0.3}], ids=repr)
def test_bounds_on_attention_come_back(rules, tmp_path):
    model = afield.sngp(Attentive(), rules, num_random_features=8, length_scale=1.0)
    afield.fit_posterior(model, [torch.randn(20, 3)])
    back = afield.load(afield.save(model, tmp_path), Attentive())
    assert [b.c for b in all_bounds(back)] == [b.c for b in all_bounds(model)] != []
    identical(model, back, torch.randn(5, 3))


def test_default_bounds_come_back_and_the_model_can_be_converted_again(tmp_path):
    def net() -> nn.Sequential:
        layers = nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)
        return nn.Sequential(*layers)

    model = afield.sngp(net(), num_random_features=8, length_scale=1.0)
    afield.fit_posterior(model, [torch.randn(20, 3)])
    back = afield.load(afield.save(model, tmp_path), net())
    assert [b.c for b in all_bounds(back)] == [b.c for b in all_bounds(model)] == [6.0, 0.95]
    identical(model, afield.sngp(back), torch.randn(5, 3))


class Special(nn.Linear):
    """A user's own layer type."""


def test_bounds_by_a_users_own_type_come_back(tmp_path):
    def net() -> nn.Sequential:
        return nn.Sequential(Special(3, 5), nn.Tanh(), nn.Linear(5, 3))

    model = afield.sngp(net(), {Special: 0.3}, num_random_features=8, length_scale=1.0)
    back = afield.load(afield.save(model, tmp_path), net())
    assert [b.c for b in all_bounds(back)] == [0.3]


def test_a_bound_that_was_changed_after_conversion_comes_back(tmp_path):
    model = trained()
    afield.bound(model.net.fc, 0.1)
    identical(model, afield.load(afield.save(model, tmp_path), Convolutional()), images(5))


def test_a_folded_model_comes_back_without_bounds(tmp_path):
    model = afield.fold(trained())
    back = afield.load(afield.save(model, tmp_path), Convolutional())
    assert not all_bounds(back)
    identical(model, back, images(5))


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
def test_double_precision_survives(convert, tmp_path):
    model = convert(mlp().double(), num_random_features=8)
    afield.fit_posterior(model, [torch.randn(30, 3, dtype=torch.float64)])
    back = afield.load(afield.save(model, tmp_path), mlp())
    assert {p.dtype for p in back.parameters()} == {torch.float64}
    identical(model, back, torch.randn(5, 3, dtype=torch.float64))


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, "mixed"])
def test_every_dtype_survives_bit_for_bit(convert, dtype, tmp_path):
    model = convert(mlp(), num_random_features=8, length_scale=1.0)
    afield.fit_posterior(model, [torch.randn(30, 3)])
    model.predict(torch.randn(2, 3))
    if dtype == "mixed":
        model.net[0].to(torch.bfloat16)
        model.head.random_features.to(torch.float64)
    else:
        model.to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StaleWarning)  # a posterior of other digits, which is not the point here
        afield.save(model, tmp_path)
    back = afield.load(tmp_path, mlp().double())
    assert bits(back) == bits(model)
    assert [p.dtype for p in back.parameters()] == [p.dtype for p in model.parameters()]
    if dtype != "mixed":
        x = torch.randn(5, 3).to(dtype)
        assert torch.equal(back(x), model(x))


class Tied(nn.Module):
    """One matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.b(torch.tanh(self.a(x))))


def test_tied_weights_stay_tied_in_half_precision(tmp_path):
    model = afield.sngp(Tied(), None, num_random_features=8, length_scale=1.0).to(torch.bfloat16)
    back = afield.load(afield.save(model, tmp_path), Tied())
    assert back.net.a.weight is back.net.b.weight
    assert bits(back) == bits(model)


@pytest.mark.parametrize("likelihood", ["gaussian", "poisson", "bernoulli"])
def test_other_likelihoods_come_back(likelihood, tmp_path):
    def net() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    model = afield.sngp(net(), likelihood=likelihood, num_random_features=8)
    x, y = torch.randn(40, 3), torch.arange(40) % 2 + 0.0
    afield.fit_head(model, [(x, y)])
    afield.fit_posterior(model, [(x, y)])
    back = afield.load(afield.save(model, tmp_path), net())
    assert float(back.head.noise) == float(model.head.noise)
    identical(model, back, x)


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
def test_an_unfitted_model_comes_back_unfitted(convert, tmp_path):
    model = convert(Convolutional(), num_random_features=8)
    back = afield.load(afield.save(model, tmp_path), Convolutional())
    assert not back.head.random_features.adapted
    with pytest.raises(NotFitted):
        back.predict(images(2))
    afield.fit_posterior(back, [labelled(30)])
    afield.fit_posterior(model, [labelled(30)])
    identical(model, back, images(5, 1))


def test_a_network_that_is_one_linear_layer(tmp_path):
    model = afield.attach(nn.Linear(3, 2), num_random_features=8)
    afield.fit_posterior(model, [torch.randn(20, 3)])
    identical(model, afield.load(afield.save(model, tmp_path), nn.Linear(3, 2)), torch.randn(5, 3))


# The folder ------------------------------------------------------------------------------------------------------


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_model_is_one_json_file_and_one_safetensors_file(tmp_path):
    folder = afield.save(small(), tmp_path / "a" / "model")
    index = read_index(folder)
    assert files(folder) == [INDEX, index["tensors"]["file"]]
    assert index["format"] == FORMAT
    with safe_open(folder / index["tensors"]["file"], "pt") as file:
        assert set(file.keys()) == set(small().state_dict())
    json.loads((folder / INDEX).read_text())


def test_nothing_is_ever_unpickled():
    source = inspect.getsource(saving)
    assert not re.search(
        r"import\s+(c?pickle|dill|joblib|marshal|shelve)|torch\.load\b|torch\.save\b|np\.load\b", source
    )


def test_loading_a_pickle_in_place_of_the_tensors_is_refused(tmp_path):
    afield.save(small(), tmp_path)
    index = read_index(tmp_path)
    torch.save(small().state_dict(), tmp_path / index["tensors"]["file"])
    with pytest.raises(DamagedModel, match="hash"):
        afield.load(tmp_path, mlp())


def test_metadata_comes_back(tmp_path):
    metadata = {"classes": ["cat", "dog"], "note": "ünïcode", "n": 3}
    afield.save(small(), tmp_path, metadata=metadata)
    assert read_index(tmp_path)["metadata"] == metadata
    afield.save(small(), tmp_path)
    assert read_index(tmp_path)["metadata"] == {}


@pytest.mark.parametrize("metadata", [{"x": float("nan")}, {"x": torch.zeros(2)}])
def test_metadata_that_json_cannot_hold_is_refused_and_the_old_model_stays(metadata, tmp_path):
    afield.save(small(), tmp_path)
    before = files(tmp_path)
    with pytest.raises((ValueError, TypeError)):
        afield.save(small(), tmp_path, metadata=metadata)
    assert files(tmp_path) == before


def test_saving_again_replaces_and_leaves_nothing_behind(tmp_path):
    first, second = small(), small()
    afield.save(first, tmp_path)
    old = files(tmp_path)
    afield.save(second, tmp_path)
    assert len(files(tmp_path)) == 2
    assert files(tmp_path) != old
    identical(second, afield.load(tmp_path, mlp()), torch.randn(5, 3))
    afield.save(second, tmp_path)
    identical(second, afield.load(tmp_path, mlp()), torch.randn(5, 3))


def test_other_files_of_the_folder_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "weights.safetensors").write_bytes(b"mine too")
    afield.save(small(), tmp_path)
    afield.save(small(), tmp_path)
    assert {"notes.txt", "weights.safetensors"} <= set(files(tmp_path))


class Crash(Exception):
    pass


@pytest.mark.parametrize("name", [INDEX, "safetensors"])
def test_a_crash_while_saving_leaves_the_old_model(name, tmp_path, monkeypatch):
    old = small()
    afield.save(old, tmp_path)
    replace = os.replace

    def crashing(source: Any, target: Any) -> None:
        if str(target).endswith(name):
            raise Crash
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crashing)
        with pytest.raises(Crash):
            afield.save(small(), tmp_path)
    identical(old, afield.load(tmp_path, mlp()), torch.randn(5, 3))
    assert not [f for f in files(tmp_path) if f.startswith(".")]
    new = small()
    afield.save(new, tmp_path)
    identical(new, afield.load(tmp_path, mlp()), torch.randn(5, 3))
    assert len(files(tmp_path)) == 2


def test_a_full_disk_leaves_the_old_model_and_no_temporary_files(tmp_path, monkeypatch):
    old = small()
    afield.save(old, tmp_path)
    before = files(tmp_path)

    def full(_: int) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            afield.save(small(), tmp_path)
    assert files(tmp_path) == before
    identical(old, afield.load(tmp_path, mlp()), torch.randn(5, 3))


# Many at once ----------------------------------------------------------------------------------------------------


def keep_saving(folder: Path, seed: int, seconds: float) -> None:
    torch.manual_seed(seed)
    model = afield.sngp(mlp(), num_random_features=8, length_scale=1.0)
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end or count < 5:
        with torch.no_grad():
            model.net[0].bias.fill_(count)
        saving.save(model, folder, metadata={"saver": seed, "count": count})
        count += 1


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("seconds", [0.5, pytest.param(60, marks=pytest.mark.slow)])
def test_two_savers_and_two_loaders_always_meet_a_whole_model(seconds, tmp_path):
    folder = tmp_path / "model"
    afield.save(small(), folder, metadata={"saver": 0, "count": None})
    forks = multiprocessing.get_context("fork")
    savers = [forks.Process(target=keep_saving, args=(folder, n, seconds)) for n in (1, 2)]
    for saver in savers:
        saver.start()
    seen: set[tuple[int, Any]] = set()
    errors: list[BaseException] = []

    def look() -> None:
        try:
            while any(saver.is_alive() for saver in savers):
                model, index = saving.load_with_index(folder, mlp())
                told = index["metadata"]
                if told["count"] is not None:  # tensors and index are of one saver, and of one save
                    assert set(model.net[0].bias.tolist()) == {float(told["count"])}
                seen.add((told["saver"], told["count"]))
        except BaseException as error:
            errors.append(error)

    loaders = [threading.Thread(target=look) for _ in range(2)]
    for loader in loaders:
        loader.start()
    for loader in loaders:
        loader.join()
    assert [saver.exitcode for saver in savers] == [0, 0]
    assert not errors
    assert {saver for saver, _ in seen} >= {1, 2}
    assert len(files(folder)) == 2


def test_a_saver_waits_for_another_and_keeps_its_tensors(tmp_path, monkeypatch):
    """The second saver comes between the tensors and the index of the first."""
    one, two, write = small(), small(), saving.write_file
    afield.save(small(), tmp_path)
    second = threading.Thread(target=afield.save, args=(two, tmp_path))

    def slow(path: Path, content: bytes) -> None:
        if path.name == INDEX and threading.current_thread() is threading.main_thread():
            second.start()
            time.sleep(0.2)
        write(path, content)

    monkeypatch.setattr(saving, "write_file", slow)
    afield.save(one, tmp_path)
    second.join()
    identical(two, afield.load(tmp_path, mlp()), torch.randn(5, 3))
    assert len(files(tmp_path)) == 2


def test_a_loader_starts_again_when_the_model_is_replaced_under_its_hands(tmp_path, monkeypatch):
    one, two = small(), small()
    afield.save(one, tmp_path)
    read = saving._read_tensor_file

    def replaced(folder: Path, index: Any) -> bytes:
        monkeypatch.setattr(saving, "_read_tensor_file", read)
        afield.save(two, tmp_path)
        return read(folder, index)

    monkeypatch.setattr(saving, "_read_tensor_file", replaced)
    identical(two, afield.load(tmp_path, mlp()), torch.randn(5, 3))


def test_what_killed_savers_left_is_swept_and_what_may_have_a_writer_stays(tmp_path):
    """Savers hold a lock, so that the temporary file of another one, however young, has lost its writer."""
    afield.save(small(), tmp_path)
    names = {
        "old temporary": f".{INDEX}.0123456789abcdef.tmp",
        "old tensors": "model-0123456789abcdef.safetensors",
        "young temporary": ".model-0000000000000000.safetensors.fedcba9876543210.tmp",
        "young, of others": ".drift.json.fedcba9876543210.tmp",
        "young tensors": "model-fedcba9876543210.safetensors",
        "not ours": "model-final.safetensors",
    }
    for kind, name in names.items():
        (tmp_path / name).write_bytes(b"x")
        if not kind.startswith("young"):
            os.utime(tmp_path / name, (1e9, 1e9))
    afield.save(small(), tmp_path)
    assert {kind for kind, name in names.items() if (tmp_path / name).exists()} == {
        *("young, of others", "young tensors", "not ours")
    }


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o022, 0o644), (0o002, 0o664)])
def test_the_umask_decides_who_may_read(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        afield.save(small(), tmp_path)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {mode}


# Damage ----------------------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the index as somebody would who makes the hash anew."""
    index = json.loads((folder / INDEX).read_text())
    change(index)
    index["sha256"] = hash_json({name: value for name, value in index.items() if name != "sha256"})
    (folder / INDEX).write_text(json.dumps(index))


def tensor_file(folder: Path) -> Path:
    return next(folder.glob("model-*.safetensors"))


def swap_tensors(folder: Path, payload: bytes) -> None:
    """Other bytes, with a hash that matches them."""
    tensor_file(folder).write_bytes(payload)
    rewrite(
        folder, lambda index: index["tensors"].update(sha256=hashlib.sha256(payload).hexdigest(), bytes=len(payload))
    )


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no index": (lambda f: (f / INDEX).unlink(), "is not a saved model: it has no afield.json"),
    "empty index": (lambda f: (f / INDEX).write_text(""), "damaged, or not written by afield"),
    "truncated index": (lambda f: truncated(f / INDEX), "damaged, or not written by afield"),
    "binary index": (lambda f: (f / INDEX).write_bytes(b"\xff\xfe\x00"), "damaged, or not written by afield"),
    "foreign index": (lambda f: (f / INDEX).write_text('{"model_type": "bert"}'), "damaged, or not written by afield"),
    "list index": (lambda f: (f / INDEX).write_text("[1, 2]"), "damaged, or not written by afield"),
    "number as a file": (lambda f: rewrite(f, lambda i: i["tensors"].update(file=5)), "damaged|outside"),
    "no settings": (lambda f: rewrite(f, lambda i: i.update(settings=None)), "damaged|not written by afield"),
    "unknown kind": (lambda f: rewrite(f, lambda i: i.update(kind="bert")), "damaged|bert"),
    "unknown head option": (
        lambda f: rewrite(f, lambda i: i["settings"]["head"].update(temperature=3)),
        "temperature|damaged",
    ),
    "unknown bound type": (
        lambda f: rewrite(f, lambda i: i["settings"].update(bound=[[{"type": "Bogus"}, 1.0]])),
        "Bogus|damaged|another network|does not fit",
    ),
    "newer format": (lambda f: rewrite(f, lambda i: i.update(format=FORMAT + 1)), "format 4.*Upgrade afield"),
    "no tensors": (lambda f: tensor_file(f).unlink(), r"incomplete: model-.*missing"),
    "truncated tensors": (lambda f: truncated(tensor_file(f)), "damaged or truncated"),
    "flipped bit": (lambda f: flipped(tensor_file(f)), "damaged or truncated"),
    "empty tensors": (lambda f: tensor_file(f).write_bytes(b""), "damaged or truncated"),
    "foreign tensors": (lambda f: swap_tensors(f, b"PK\x03\x04 a zip file, or a pickle"), "not a safetensors file"),
    "parent folder": (
        lambda f: rewrite(f, lambda i: i["tensors"].update(file="../" + i["tensors"]["file"])),
        "outside its folder",
    ),
    "absolute path": (
        lambda f: rewrite(f, lambda i: i["tensors"].update(file=str(tensor_file(f).resolve()))),
        "outside its folder",
    ),
    "dots": (lambda f: rewrite(f, lambda i: i["tensors"].update(file="..")), "outside its folder|incomplete"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_told(damage, tmp_path):
    folder = afield.save(small(), tmp_path / "model")
    afield.load(folder, mlp())
    cause, message = DAMAGE[damage]
    cause(folder)
    with pytest.raises(DamagedModel, match=f"(?s){message}"):
        afield.load(folder, mlp())


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places of all fields of a JSON value."""
    if not isinstance(value, dict | list) or not value:
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [place for key, child in items for place in leaves(child, (*path, key))]


def test_every_edit_of_any_field_of_the_index_is_refused(tmp_path):
    folder = afield.save(small(bound=0.95, ridge=2.0), tmp_path, metadata={"labels": ["a", "b"], "n": 1})
    text = (folder / INDEX).read_text()
    places = leaves(json.loads(text))
    assert ("settings", "bound", "0") in places
    for place in places:
        index = json.loads(text)
        parent = index
        for key in place[:-1]:
            parent = parent[key]
        old = parent[place[-1]]
        for new in (4.95, "other", None):
            if new == old:
                continue
            parent[place[-1]] = new
            (folder / INDEX).write_text(json.dumps(index))
            with pytest.raises(DamagedModel, match=r"damaged|format .* Upgrade|incomplete"):
                afield.load(folder, mlp())
        del parent[place[-1]]
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(DamagedModel, match="damaged"):
            afield.load(folder, mlp())
    (folder / INDEX).write_text(json.dumps(json.loads(text) | {"more": 1}))
    with pytest.raises(DamagedModel, match="the hash inside does not match"):
        afield.load(folder, mlp())
    (folder / INDEX).write_text(json.dumps(json.loads(text), sort_keys=True))  # the same content, laid out otherwise
    afield.load(folder, mlp())


def test_an_index_of_an_earlier_format_is_told(tmp_path):
    model = small()
    folder = afield.save(model, tmp_path)
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | {"format": 2}))
    with pytest.raises(DamagedModel, match=r"has format 2, .* fit and save it again"):
        afield.load(folder, mlp())


def flip_bits(file: Path, number: int, accepted: Callable[[], bool]) -> int:
    """How many of these flips of one bit each were accepted as something else; the file is restored."""
    content, generator, wrong = file.read_bytes(), random.Random(number), 0
    for _ in range(number):
        place = generator.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        file.write_bytes(damaged)
        wrong += accepted()
    file.write_bytes(content)
    return wrong


@pytest.mark.parametrize("number", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_no_flipped_bit_is_ever_silently_wrong(number, tmp_path):
    model, net = small(), mlp()
    folder = afield.save(model, tmp_path, metadata={"labels": ["a", "b", "c"]})
    index, state = read_index(folder), bits(model)

    def accepted_as_another() -> bool:
        try:
            back, found = saving.load_with_index(folder, net)
        except DamagedModel:
            return False
        return bits(back) != state or found != index

    for file in (folder / INDEX, tensor_file(folder)):
        assert flip_bits(file, number, accepted_as_another) == 0


def header(payload: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(payload[:8], "little")
    return json.loads(payload[8 : 8 + size]), payload[8 + size :]


def with_header(head: dict[str, Any], data: bytes) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


HUGE = 2**40
HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "shape": lambda h: h["net.0.bias"].update(shape=[HUGE, HUGE]),
    "shape and place": lambda h: h["net.0.bias"].update(shape=[HUGE], data_offsets=[0, 4 * HUGE]),
    "negative": lambda h: h["net.0.bias"].update(shape=[-5]),
    "dtype": lambda h: h["net.0.bias"].update(dtype="F1024"),
    "text": lambda h: h["net.0.bias"].update(shape="5"),
    "overlap": lambda h: h["net.0.bias"].update(data_offsets=[0, 20]),
    "many dimensions": lambda h: h["net.0.bias"].update(shape=[1] * 1000 + [5]),
    "no entry": lambda h: h.update({"net.0.bias": None}),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_a_hostile_header_is_refused_before_a_tensor_is_made(change, tmp_path, monkeypatch):
    folder = afield.save(small(bound=None), tmp_path)
    head, data = header(tensor_file(folder).read_bytes())
    HOSTILE[change](head)
    swap_tensors(folder, with_header(head, data))
    monkeypatch.setattr("safetensors.torch.load", None)
    with pytest.raises(DamagedModel, match="it is not a safetensors file"):
        afield.load(folder, mlp())


@pytest.mark.parametrize("payload", [b"", b"\x00" * 8, b"\xff" * 8 + b"{}", b"\x02" + b"\x00" * 7 + b"[]"])
def test_a_header_that_is_none_is_refused(payload, tmp_path):
    folder = afield.save(small(), tmp_path)
    swap_tensors(folder, payload)
    with pytest.raises(DamagedModel, match="it is not a safetensors file"):
        afield.load(folder, mlp())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s["head"].update(num_random_features=HUGE),
            "num_random_features = 1099511627776, the tensors say 8",
        ),
        (lambda s: s["head"].update(out_features=HUGE), "out_features = 1099511627776, the tensors say 3"),
        (lambda s: s.update(classes={"added": HUGE, "dropped": []}), r"classes\.added = 1099511627776, .* say 0"),
    ],
)
def test_settings_never_build_more_than_the_tensors_hold(change, message, tmp_path):
    folder = afield.save(small(), tmp_path)
    rewrite(folder, lambda index: change(index["settings"]))
    with pytest.raises(DamagedModel, match=message):
        afield.load(folder, mlp())


def test_a_missing_folder_is_told(tmp_path):
    with pytest.raises(DamagedModel, match="nowhere is not a saved model"):
        afield.load(tmp_path / "nowhere", mlp())
    with pytest.raises(ValueError):  # for whoever catches the builtin
        afield.load(tmp_path / "nowhere", mlp())


OTHERS: dict[str, tuple[nn.Module, str]] = {
    "wider": (nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)), "another network than Sequential"),
    "more classes": (nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)), "another network than Sequential"),
    "another layer": (
        nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 3)),
        "net.1.weight: in the network, not in the file",
    ),
    "a layer less": (
        nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Linear(5, 3)),
        r"in the file, not in the network|does not fit",
    ),
    "no linear layer": (nn.Sequential(nn.Tanh()), r"not a Linear|no Linear"),
    "another name": (
        nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 3))),
        r"not a Linear|another",
    ),
}


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
@pytest.mark.parametrize("other", OTHERS)
def test_another_architecture_is_told(other, convert, tmp_path):
    model = convert(mlp(), num_random_features=8, output="2")
    afield.fit_posterior(model, [torch.randn(20, 3)])
    afield.save(model, tmp_path)
    net, message = OTHERS[other]
    with pytest.raises(DamagedModel, match=message):
        afield.load(tmp_path, net)


def test_only_converted_models_are_saved(tmp_path):
    with pytest.raises(TypeError, match=r"made by afield\.sngp or afield\.attach, got Sequential"):
        afield.save(mlp(), tmp_path / "model")
    assert not (tmp_path / "model").exists()
