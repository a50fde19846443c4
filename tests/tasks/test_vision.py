"""Image tasks: files as published, what is cut from them, augmentation, and a short training from end to end."""

import gzip
import hashlib
import io
import os
import pickle
import shutil
import struct
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from afield.errors import DataDamaged, DataMissing
from afield.experiment.training import fit
from afield.methods import METHODS
from afield.tasks import cifar, fashion, imagenet
from afield.tasks.corruptions import CORRUPTIONS, SEVERITIES, CorruptedSets, corrupt
from afield.tasks.data import SOURCES
from afield.tasks.image_files import ImageFiles, locate_images, read_square
from afield.tasks.image_tensors import (
    crop_and_flip,
    first_per_class,
    noise,
    ood_from_environment,
    read_pictures,
    split_train_val,
    to_tensor,
)
from afield.tasks.imagenet import random_resized_crop
from afield.tasks.published_formats import read_cifar_batch, read_idx, read_svhn_mat
from afield.tasks.task import Recipe
from tests.conftest import data_file

CIFAR10, CIFAR100 = cifar.cifar("cifar10", 10), cifar.cifar("cifar100", 100)
CIFAR100_3K = cifar.cifar("cifar100-3k", 100)
RNG = np.random.default_rng(0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data folder, and an empty cache."""
    monkeypatch.setenv("AFIELD_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("AFIELD_OOD", raising=False)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("AFIELD_OOD", raising=False)
    return tmp_path


def npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def some(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


# Files as published


class Python2(pickle._Pickler):
    """Writes as Python 2 did in 2009: byte strings as str, and numpy under its old name."""

    dispatch: ClassVar[dict] = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value: bytes) -> None:
        self.write(b"T" + struct.pack("<i", len(value)) + value)
        self.memoize(value)

    def save_old_global(self, value: object, name: str | None = None) -> None:
        module = value.__module__.replace("numpy._core", "numpy.core")
        self.write(f"c{module}\n{value.__name__}\n".encode())
        self.memoize(value)

    dispatch[bytes] = save_bytes
    dispatch[type(lambda: 0)] = dispatch[type] = dispatch[type(len)] = save_old_global


def write_batch(path: Path, x: np.ndarray, y: list[int], labels: bytes = b"labels") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {b"data": x.transpose(0, 3, 1, 2).reshape(len(x), -1), labels: y, b"batch_label": b"a batch"}
    with path.open("wb") as file:
        Python2(file, protocol=2).dump(content)


def test_cifars_pickles_are_read(tmp_path: Path):
    x, y = some(5, 32, 32, 3), [3, 1, 4, 1, 5]
    write_batch(tmp_path / "batch", x, y)
    assert b"cnumpy.core.multiarray\n_reconstruct\n" in (tmp_path / "batch").read_bytes()
    images, labels = read_cifar_batch(tmp_path / "batch")
    np.testing.assert_array_equal(images, x)
    assert labels.tolist() == y
    with (tmp_path / "batch").open("rb") as file:  # as everybody else reads it
        theirs = pickle.load(file, encoding="bytes") if np.__version__ < "2" else None
    assert theirs is None or theirs[b"labels"] == y


class Attack:
    def __init__(self, function: Callable, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize(
    ("function", "argument"),
    [(os.system, "touch {}"), (eval, "open('{}', 'w')"), (exec, "open('{}', 'w')"), (getattr, "{}")],
)
def test_a_malicious_pickle_is_refused_and_not_run(function: Callable, argument: str, protocol: int, tmp_path: Path):
    proof, path = tmp_path / "proof", tmp_path / "data_batch_1"
    attack = Attack(function, argument.format(proof), *(["upper"] if function is getattr else []))
    path.write_bytes(pickle.dumps({b"data": attack, b"labels": [0]}, protocol=protocol))
    with pytest.raises(DataDamaged, match=r"asks for .*which was not run.*cs\.toronto\.edu"):
        read_cifar_batch(path)
    assert not proof.exists()
    if function is os.system:  # the attack is real: a plain unpickler falls for it
        pickle.loads(path.read_bytes())
        assert proof.exists()


@pytest.mark.parametrize(
    "content",
    [
        {b"labels": [0]},
        {b"data": np.zeros((2, 3072)), b"labels": [0, 1]},
        {b"data": np.zeros((2, 3000), np.uint8), b"labels": [0, 1]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]},
        {b"data": np.array([None, {}]), b"labels": [0, 1]},
        [1, 2],
    ],
)
def test_a_pickle_of_something_else_is_damaged(content: object, tmp_path: Path):
    (tmp_path / "batch").write_bytes(pickle.dumps(content, protocol=5))
    with pytest.raises(DataDamaged, match="batch"):
        read_cifar_batch(tmp_path / "batch")


def test_svhn_is_read_and_ten_is_zero(tmp_path: Path):
    x, y = some(4, 32, 32, 3), np.array([10, 1, 9, 10])
    scipy.io.savemat(tmp_path / "x.mat", {"X": x.transpose(1, 2, 3, 0), "y": y[:, None].astype(np.uint8)})
    images, digits = read_svhn_mat(tmp_path / "x.mat")
    np.testing.assert_array_equal(images, x)
    assert digits.tolist() == [0, 1, 9, 0]
    (tmp_path / "x.mat").write_bytes(b"no mat file, but long enough to look like one" * 10)
    with pytest.raises(DataDamaged, match="no SVHN file"):
        read_svhn_mat(tmp_path / "x.mat")


@pytest.mark.parametrize("packed", [False, True])
def test_idx_is_read(packed: bool, tmp_path: Path):
    x = some(3, 28, 28)
    body = b"\0\0\x08\x03" + struct.pack(">3i", *x.shape) + x.tobytes()
    path = tmp_path / ("x.gz" if packed else "x")
    path.write_bytes(gzip.compress(body) if packed else body)
    np.testing.assert_array_equal(read_idx(path), x)
    for wrong in (body[:-1], b"\0\0\x0d" + body[3:], b""):
        path.write_bytes(gzip.compress(wrong) if packed else wrong)
        with pytest.raises(DataDamaged, match="no idx file"):
            read_idx(path)


def test_no_more_of_an_idx_file_is_unpacked_than_it_declares(tmp_path: Path):
    path = tmp_path / "x.gz"
    for shape, body in (((2, 2), bytes(100)), ((2**31, 2**31), b""), ((1000, 1000), b"")):
        path.write_bytes(gzip.compress(b"\0\0\x08\x02" + struct.pack(">2I", *shape) + body))
        with pytest.raises(DataDamaged, match="no idx file"):
            read_idx(path)


# Tasks on published files


def published_cifar(folder: Path) -> None:
    """Both CIFARs and SVHN with few images, in the layout of their archives."""
    for i in range(1, 6):
        write_batch(folder / f"cifar-10-batches-py/data_batch_{i}", some(60, 32, 32, 3), [j % 10 for j in range(60)])
    write_batch(folder / "cifar-10-batches-py/test_batch", some(40, 32, 32, 3), [j % 10 for j in range(40)])
    for part, count in (("train", 1000), ("test", 200)):
        labels = [j % 100 for j in range(count)]
        write_batch(folder / "cifar-100-python" / part, some(count, 32, 32, 3), labels, b"fine_labels")
    (folder / "svhn").mkdir()
    mat = {"X": some(32, 32, 3, 30), "y": np.ones((30, 1))}
    scipy.io.savemat(folder / "svhn/test_32x32.mat", mat)


@pytest.mark.parametrize(("recipe", "sizes"), [(CIFAR10, (270, 30, 40)), (CIFAR100, (900, 100, 200))])
def test_published_files_make_a_task(recipe: Recipe, sizes: tuple[int, ...], folder: Path):
    published_cifar(folder)
    task = recipe(0, "paper")
    assert tuple(len(part) for part in (task.train, task.val, task.test)) == sizes
    assert {name: len(part) for name, part in task.ood.items()} == {
        "svhn": 30,
        **({"cifar100": 200} if task.name == "cifar10" else {"cifar10": 40}),
        "noise": 2500,
    }
    y = task.val.tensors[1]
    assert y.bincount().tolist() == [len(y) // task.num_outputs] * task.num_outputs
    assert task.train.tensors[0].dtype == torch.uint8


@pytest.mark.parametrize("packed", [True, False])
def test_textures_join_cifar10_from_their_published_tar_or_its_folder(packed: bool, folder: Path, monkeypatch):
    published_cifar(folder)
    pictures = folder / "dtd/images"
    for name in ("banded/banded_0002.jpg", "waffled/waffled_0004.jpg", "waffled/waffled_0005.jpg"):
        (pictures / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(some(40, 48, 3)).save(pictures / name)
    if packed:
        file = folder / "dtd-r1.0.1.tar.gz"
        with tarfile.open(file, "w:gz") as tar:
            tar.add(folder / "dtd", "dtd")
        shutil.rmtree(folder / "dtd")
        with pytest.raises(DataDamaged, match=r"dtd-r1\.0\.1\.tar\.gz is not the published file: its md5 is"):
            CIFAR10(0, "paper")
        md5 = hashlib.md5(file.read_bytes()).hexdigest()
        monkeypatch.setitem(SOURCES._entries, "dtd", SOURCES["dtd"]._replace(hash=f"md5:{md5}"))
    textures = CIFAR10(0, "paper").ood["dtd"].tensors[0]
    assert textures.shape == (3, 3, 32, 32)
    assert len(read_pictures(folder.parent / "cache/afield/dtd" if packed else pictures, 32, most=2)) == 2
    assert "dtd" not in CIFAR100(0, "paper").ood


def test_published_corruptions_are_read_at_the_right_rows(folder: Path):
    test, rows = some(20, 32, 32, 3), np.array([3, 7, 19])
    (folder / "CIFAR-10-C").mkdir()
    sets = some(5 * 20, 32, 32, 3)
    np.save(folder / "CIFAR-10-C/fog.npy", sets)
    shifted = CorruptedSets(test[rows], np.arange(3), published=folder / "CIFAR-10-C", rows=rows, total=20)
    for severity in SEVERITIES:
        x, y = shifted[f"corrupted/fog-{severity}"].tensors
        np.testing.assert_array_equal(x, sets[(severity - 1) * 20 + rows].transpose(0, 3, 1, 2))
        assert y.tolist() == [0, 1, 2]
    corrupted = shifted["corrupted/contrast-2"].tensors[0]  # not published here
    np.testing.assert_array_equal(corrupted, corrupt(test[rows], "contrast", 2).transpose(0, 3, 1, 2))
    np.save(folder / "CIFAR-10-C/fog.npy", sets[:-1])
    with pytest.raises(DataDamaged, match=r"fog\.npy should hold bytes of shape \(100, 32, 32, 3\)"):
        shifted["corrupted/fog-1"]


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (CIFAR10, r"None of cifar-10-batches-py, images/cifar10_train20k\.npz was found.*toronto.*AFIELD_DOWNLOAD=1"),
        (CIFAR100, r"cifar-100-python was not found.*toronto.*AFIELD_DOWNLOAD=1.*holds cifar-100-python"),
        (CIFAR100_3K, r"images/cifar100_ood_dev3k\.npz was not found"),
        (fashion.RECIPE, r"None of FashionMNIST/raw/train-images-idx3-ubyte, .*fashion_mnist_30k_10k\.npz was found"),
        (imagenet.RECIPE, r"folder imagenet/train was not found; looked in .*image-net\.org.*set AFIELD_DATA"),
    ],
)
def test_missing_data_says_what_to_get(recipe: Recipe, message: str, folder: Path):
    with pytest.raises(DataMissing, match=message):
        recipe(0, "smoke")


def test_fashion_reads_idx_files(folder: Path):
    for name, count in {"FashionMNIST/raw/train": 100, "FashionMNIST/raw/t10k": 30, "MNIST/raw/t10k": 20}.items():
        path = folder / f"{name}-images-idx3-ubyte.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            gzip.compress(b"\0\0\x08\x03" + struct.pack(">3i", count, 28, 28) + some(count, 28, 28).tobytes())
        )
        labels = bytes(j % 10 for j in range(count))
        path.with_name(path.name.replace("images-idx3", "labels-idx1")).write_bytes(
            gzip.compress(b"\0\0\x08\x01" + struct.pack(">i", count) + labels)
        )
    (folder / "images").mkdir()
    np.savez(folder / "images/notmnist_dev5k.npz", x=some(7, 28, 28))
    task = fashion.RECIPE(0, "paper")
    assert [len(part) for part in (task.train, task.val, task.test, *task.ood.values())] == [90, 10, 30, 20, 7, 2500]
    assert task.train.tensors[0].shape[1:] == (1, 28, 28)


# Tasks on the data folder


@pytest.mark.parametrize("preset", ["smoke", pytest.param("small", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", [CIFAR10, CIFAR100_3K, fashion.RECIPE], ids=["cifar10", "cifar100-3k", "fashion"])
def test_image_task_contract(recipe: Recipe, preset: str, own_cache: Path):
    data_file("images/cifar10_train20k.npz")
    task, again, other = recipe(0, preset), recipe(0, preset), recipe(1, preset)
    parts = (task.train, task.val, task.test)
    for part in parts:
        assert set(part.tensors[1].tolist()) == set(range(task.num_outputs))
        assert part.tensors[0].dtype == torch.uint8
    assert abs(len(task.val) / (len(task.train) + len(task.val)) - 0.1) < 0.03
    rows = [row.tobytes() for part in parts for row in part.tensors[0].numpy()]
    assert len(set(rows)) == len(rows)
    assert torch.equal(task.train.tensors[0], again.train.tensors[0])
    assert not torch.equal(task.train.tensors[0], other.train.tensors[0])
    assert torch.equal(task.test.tensors[0], other.test.tensors[0])
    for part in task.ood.values():
        assert part.tensors[0].shape[1:] == task.train.tensors[0].shape[1:]
    net = task.backbone().eval()
    assert net(task.test.tensors[0][:2]).shape == (2, net.out_features)


def test_the_small_presets_data_are_the_same_from_either_source(own_cache: Path):
    with np.load(data_file("images/cifar10_train20k.npz")) as file:
        assert (first_per_class(file["y"], 2000) == np.arange(20_000)).all()


def test_corrupted_sets_are_lazy_named_and_cached(own_cache: Path):
    data_file("images/cifar10_train20k.npz")
    task = CIFAR10(0, "smoke")
    assert list(task.shifted) == [f"corrupted/{name}-{s}" for name in CORRUPTIONS for s in SEVERITIES]
    assert not list(own_cache.rglob("*.npz"))
    x, y = task.shifted["corrupted/shot_noise-2"].tensors
    (file,) = own_cache.rglob("*.npz")
    assert file.name == "shot_noise-2.npz"
    before = file.stat().st_mtime_ns
    again = (
        CIFAR10(3, "smoke").shifted["corrupted/shot_noise-2"].tensors
    )  # the test set has nothing to do with the seed
    assert torch.equal(x, again[0])
    assert torch.equal(y, again[1])
    assert file.stat().st_mtime_ns == before
    file.write_bytes(b"half a fi")
    assert torch.equal(x, task.shifted["corrupted/shot_noise-2"].tensors[0])
    assert file.stat().st_size > len(x)
    clean = task.test.tensors[0].float()
    nearest = torch.cdist(x.float().flatten(1), clean.flatten(1)).amin(1) / 3072**0.5
    assert 5 < float(nearest.mean()) < 15  # noise of severity 2 away from its own clean image
    with pytest.raises(KeyError):
        task.shifted["fog-1"]


def test_a_cache_that_cannot_be_written_to_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    images = some(2, 32, 32, 3)
    corrupted = CorruptedSets(images, np.zeros(2))["corrupted/contrast-1"].tensors[0]
    np.testing.assert_array_equal(corrupted, corrupt(images, "contrast", 1).transpose(0, 3, 1, 2))


def test_published_corruptions_are_not_used_where_the_official_rows_are_unknown(own_cache: Path, monkeypatch):
    real = data_file("images/cifar100_ood_dev3k.npz").parent
    folder = own_cache / "data"
    (folder / "CIFAR-100-C").mkdir(parents=True)
    (folder / "CIFAR-10-C").mkdir()
    (folder / "images").symlink_to(real)
    monkeypatch.setenv("AFIELD_DATA", str(folder))
    assert CIFAR100_3K(0, "smoke").shifted.published is None
    shifted = CIFAR10(0, "smoke").shifted
    assert shifted.published == folder / "CIFAR-10-C"
    with np.load(real / "cifar10_test_dev5k.npz") as file:
        places = np.searchsorted(file["idx"], shifted.rows)
        np.testing.assert_array_equal(file["idx"][places], shifted.rows)
        np.testing.assert_array_equal(file["x"][places], shifted.images)


def test_settings_of_the_paper():
    for recipe, rate in ((CIFAR10, 0.08), (CIFAR100, 0.16)):
        settings = recipe.settings_for("paper")
        assert (settings.epochs, settings.batch_size, settings.learning_rate) == (250, 256, rate)
        assert (settings.optimizer, settings.schedule, settings.bound) == ("sgd", "steps", 6.0)


@pytest.mark.parametrize("method", ["sngp", pytest.param("sngp-augmix", marks=pytest.mark.slow)])
def test_short_training_from_end_to_end(method: str, own_cache: Path):
    data_file("images/cifar10_train20k.npz")
    task = CIFAR10(0, "smoke")
    few = {part: TensorDataset(*(t[:100] for t in getattr(task, part).tensors)) for part in ("train", "val")}
    task = replace(task, **few)
    model = fit(task, METHODS[method], epochs=1, num_random_features=64, learning_rate=0.02)
    predictions = [METHODS[method].predict(model, part.tensors[0][:20]) for part in (task.test, *task.ood.values())]
    assert all(bool(p.probs.isfinite().all()) for p in predictions)


# Augmentation and cutting


def test_crops_are_windows_of_the_padded_image_half_of_them_mirrored():
    x = torch.randint(1, 256, (1, 3, 8, 6), dtype=torch.uint8).expand(4000, 3, 8, 6)
    padded = torch.nn.functional.pad(x[:1], (2, 2, 2, 2))
    windows = {}
    for top in range(5):
        for left in range(5):
            window = padded[0, :, top : top + 8, left : left + 6]
            windows[window.contiguous().numpy().tobytes()] = (top, left, False)
            windows[window.flip(2).contiguous().numpy().tobytes()] = (top, left, True)
    cropped, y = crop_and_flip((x, "labels"), padding=2)
    assert y == "labels"
    assert cropped.dtype == torch.float32
    found = [windows[(row * 255).round().byte().numpy().tobytes()] for row in cropped]
    counts = np.zeros((5, 5, 2))
    for place in found:
        counts[place[0], place[1], int(place[2])] += 1
    assert np.abs(counts - 80).max() < 5 * np.sqrt(80)  # all 50 outcomes are equally likely


def test_crops_of_numbers_and_of_bytes_agree():
    x = torch.randint(256, (16, 1, 8, 8), dtype=torch.uint8)
    results = []
    for images in (x, x.float() / 255):
        torch.manual_seed(3)
        results.append(crop_and_flip((images, None))[0])
    torch.testing.assert_close(*results)


def test_random_resized_crops_are_parts_of_the_image():
    ramp = torch.linspace(0, 1, 64).expand(300, 3, 64, 64)  # brightness tells the column
    parts, _ = random_resized_crop((ramp, None))
    slope = (parts[:, 0, 32, -2] - parts[:, 0, 32, 1]) / (ramp[:, 0, 32, -2] - ramp[:, 0, 32, 1])
    assert bool(((slope.abs() > 0.49) & (slope.abs() < 1.01)).all())  # a quarter to all of the area
    assert 0.4 < float((slope > 0).float().mean()) < 0.6
    assert float(slope.abs().square().mean()) == pytest.approx(0.625, abs=0.05)
    assert 0 <= float(parts.min()) <= float(parts.max()) <= 1
    torch.testing.assert_close(random_resized_crop((ramp[:1], None), least=1.0)[0].sort().values, ramp[:1])


def test_validation_data_are_a_tenth_of_every_class():
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    images = np.arange(100, dtype=np.uint8)[:, None, None].repeat(2, 1)
    train, val = split_train_val(images, labels, seed=0)
    assert val.tensors[1].bincount().tolist() == [5, 3, 2]
    ids = torch.cat([part.tensors[0][:, 0, 0, 0] for part in (train, val)])
    assert ids.sort().values.tolist() == list(range(100))
    for part in (train, val):
        assert (labels[part.tensors[0][:, 0, 0, 0]] == part.tensors[1].numpy()).all()


def test_noise_is_grey_on_average_and_the_same_every_time():
    (x,) = noise(50, (3, 32, 32), seed=0).tensors
    assert abs(float(x.float().mean()) - 127) < 1
    assert 50 < float(x.float().std()) < 65
    assert torch.equal(x, noise(50, (3, 32, 32), seed=0).tensors[0])


def test_images_must_be_bytes():
    with pytest.raises(ValueError, match=r"expected as bytes .*got float64"):
        to_tensor(np.zeros((2, 8, 8)))


# Image files


def jpeg(color: int, size: tuple[int, int] = (90, 70)) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, (color, color, 255 - color)).save(stream, "JPEG", quality=95)
    return stream.getvalue()


def small_imagenet(folder: Path, *, tar: bool = False) -> None:
    for part, count in (("train", 5), ("val", 2)):
        for label, name in enumerate(("n01", "n02")):
            for i in range(count):
                path = folder / "imagenet" / part / name / f"{i}.JPEG"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(jpeg(60 + 120 * label + i))
        if tar:
            root = folder / "imagenet" / part
            with tarfile.open(root / "all.tar", "w") as archive:
                for name in ("n01", "n02"):
                    archive.add(root / name, arcname=f"some/where/{name}")
            for file in root.rglob("*.JPEG"):
                file.unlink()


@pytest.mark.parametrize("tar", [False, True])
def test_imagenet_from_folders_and_from_tars(tar: bool, folder: Path):
    small_imagenet(folder, tar=tar)
    (folder / "imagenet-c/fog/2/n01").mkdir(parents=True)
    (folder / "imagenet-c/fog/2/n02").mkdir(parents=True)
    for name in ("n01", "n02"):
        (folder / f"imagenet-c/fog/2/{name}/0.JPEG").write_bytes(jpeg(9))
    task = imagenet.RECIPE(0, "smoke")
    assert [len(part) for part in (task.train, task.val, task.test)] == [8, 2, 4]
    assert sorted(task.val.targets.tolist()) == [0, 1]
    for part in (task.train, task.val, task.test):
        for (x, y), target in zip(part, part.targets, strict=True):
            assert x.shape == (3, 64, 64)
            assert x.dtype == torch.uint8
            assert y == int(target)
            assert abs(float(x[0].float().mean()) - (60 + 120 * y)) < 8  # the label belongs to the image
    assert list(task.shifted) == ["corrupted/fog-2"]
    if not tar:
        model = fit(task, METHODS["dnn"], learning_rate=1e-3)
        (x, _), *_ = DataLoader(task.test, 4)
        assert METHODS["dnn"].predict(model, x).probs.shape == (4, 2)


def test_tars_of_images_are_read_where_they_are_regular_and_whole(tmp_path: Path):
    content = jpeg(60)
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        image = tarfile.TarInfo("n01/0.JPEG")
        image.size = len(content)
        tar.addfile(image, io.BytesIO(content))
        link = tarfile.TarInfo("n01/1.JPEG")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert [len(found) for found in locate_images(tmp_path).values()] == [1]
    body = (tmp_path / "x.tar").read_bytes()
    for wrong in (body[:600], gzip.compress(body), b"no tar" * 200):
        (tmp_path / "x.tar").write_bytes(wrong)
        with pytest.raises(DataDamaged, match=r"x\.tar is not a readable tar .*must not be compressed"):
            locate_images(tmp_path)


def test_the_middle_of_an_image_is_taken():
    image = np.zeros((70, 140, 3), np.uint8)
    image[:, 60:80] = 255
    cropped = read_square(Image.fromarray(image), 35)
    assert cropped.shape == (35, 35, 3)
    assert (cropped[:, 14:21].mean(), cropped[:, :10].max(), cropped[:, -10:].max()) == (255, 0, 0)
    wide = read_square(Image.fromarray(image), 64, enlarge=8 / 7)
    assert wide.shape == (64, 64, 3)


def test_a_damaged_image_is_named(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.jpg").write_bytes(jpeg(3)[:100])
    data = ImageFiles(locate_images(tmp_path)["a"], [0])
    with pytest.raises(DataDamaged, match=r"A picture in .*x\.jpg.* cannot be read"):
        data[0]


def test_folders_without_images_are_missing_data(folder: Path):
    (folder / "imagenet/train/n01").mkdir(parents=True)
    with pytest.raises(DataMissing, match=r"holds no pictures: expected class/name\.jpg"):
        imagenet.RECIPE(0, "smoke")


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r'pip install "afield\[vision\]"'):
        read_square(b"", 8)


# OOD sets of one's own


def test_ood_sets_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "textures/deep").mkdir(parents=True)
    (tmp_path / "textures/deep/a.jpg").write_bytes(jpeg(200))
    (tmp_path / "textures/b.jpg").write_bytes(jpeg(10, size=(20, 50)))
    same, other, grey = some(3, 32, 32, 3), some(4, 20, 24, 3), some(2, 28, 28)
    for name, x in (("same", same), ("other", other), ("grey", grey)):
        np.savez(tmp_path / f"{name}.npz", x=x)
    names = ["textures", "same.npz", "other.npz", "grey.npz"]
    monkeypatch.setenv("AFIELD_OOD", os.pathsep.join(str(tmp_path / name) for name in names))
    for channels, size in ((3, 32), (1, 28)):
        sets = ood_from_environment(channels, size)
        assert {name: tuple(data.tensors[0].shape) for name, data in sets.items()} == {
            "textures": (2, channels, size, size),
            "same": (3, channels, size, size),
            "other": (4, channels, size, size),
            "grey": (2, channels, size, size),
        }
    np.testing.assert_array_equal(ood_from_environment(3, 32)["same"].tensors[0], same.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(ood_from_environment(1, 28)["grey"].tensors[0][:, 0], grey)
    assert abs(float(ood_from_environment(3, 32)["textures"].tensors[0][1, 0].float().mean()) - 200) < 3


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: None, DataMissing, "neither a file nor a folder"),
        (lambda path: path.mkdir(), DataMissing, "a folder without pictures"),
        (lambda path: path.write_bytes(npz(y=np.zeros(3))), ValueError, "array x of bytes"),
    ],
)
def test_errors_of_ood_sets_from_the_environment(
    make: Callable, error: type, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make(tmp_path / "set")
    monkeypatch.setenv("AFIELD_OOD", str(tmp_path / "set"))
    with pytest.raises(error, match=message):
        ood_from_environment(3, 32)
