"""Data files: where they are looked for, what a missing, damaged or forged one says, and downloads with a hash."""

import hashlib
import io
import logging
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afield.errors import DataDamaged, DataMissing
from afield.tasks import data
from afield.tasks.data import SOURCES, Source, arrays, fetch, find
from tests.conftest import data_file

NAME = "test/greeting.txt"
BODY = b"hello\n"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The named folder and the cache, both empty."""
    named, cache = tmp_path / "named", tmp_path / "cache"
    monkeypatch.setenv("AFIELD_DATA", str(named))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.delenv("AFIELD_DOWNLOAD", raising=False)
    return named, cache / "afield"


def put(folder: Path, name: str, body: bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return path


def sha256(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


class Quiet(SimpleHTTPRequestHandler):
    requests = 0

    def do_GET(self) -> None:
        type(self).requests += 1
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, places: tuple[Path, Path]) -> Iterator[str]:
    """A web server on this machine that has the greeting; the name is registered with the right hash."""
    pytest.importorskip("pooch")
    logging.getLogger("pooch").setLevel(logging.ERROR)
    put(tmp_path / "www", "greeting.txt", BODY)
    Quiet.requests = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "www"))) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{httpd.server_address[1]}/"
        SOURCES[NAME] = Source(url + "greeting.txt", sha256(BODY))
        try:
            yield url
        finally:
            del SOURCES[NAME]
            httpd.shutdown()
            thread.join()


def test_named_folder_goes_before_the_cache(places: tuple[Path, Path]):
    in_cache = put(places[1], "a/x.txt", b"cache")
    assert find("a/x.txt") == in_cache
    named = put(places[0], "a/x.txt", b"named")
    assert find("a/x.txt") == named


def test_without_a_named_folder_only_the_cache_counts(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AFIELD_DATA")
    assert data.folders() == [places[1]]


@pytest.mark.parametrize(
    ("platform", "tail"),
    [("linux", ".cache/afield"), ("darwin", "Library/Caches/afield"), ("win32", "AppData/Local/afield/Cache")],
)
def test_cache_is_where_the_platform_has_it(platform: str, tail: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert data.cache() == tmp_path / tail


@pytest.mark.parametrize(
    ("name", "source"),
    [
        (
            "clinc/data_full.json",
            r"Get it from https://raw\.githubusercontent\.com/.*data_full\.json.*AFIELD_DOWNLOAD=1",
        ),
        ("tabular/uci2_airfoil.npz", "made from https://github.com/treforevans/uci_datasets"),
        ("images/cifar100_x.npz", "made from https://www.cs.toronto.edu"),
        ("images/cifar10c_x.npz", "made from https://github.com/hendrycks/robustness"),
        ("nobody/knows.npz", "No source of it is known"),
    ],
)
def test_missing_says_where_it_looked_what_to_get_and_how_to_point(name: str, source: str, places: tuple[Path, Path]):
    with pytest.raises(DataMissing, match=source) as caught:
        find(name)
    for part in (name, str(places[0]), str(places[1]), f"set AFIELD_DATA to the folder that holds {name}"):
        assert part in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


def test_every_source_is_pinned():
    for source in SOURCES.values():
        assert source.url.startswith(("https://", "http://"))  # the hash makes up for the missing s
        assert "/master/" not in source.url
        algorithm, digest = source.hash.split(":")
        assert len(bytes.fromhex(digest)) == hashlib.new(algorithm).digest_size


@pytest.mark.parametrize("name", [name for name in SOURCES if name.startswith("clinc/")])
def test_hashes_are_those_of_the_files(name: str):
    assert sha256(data_file(name).read_bytes()) == SOURCES[name].hash


def test_arrays_round_trip(places: tuple[Path, Path]):
    (places[0] / "a").mkdir(parents=True)
    np.savez_compressed(places[0] / "a/x.npz", x=np.arange(6).reshape(2, 3), name=np.array(["é"]))
    found = arrays("a/x.npz")
    assert found.keys() == {"x", "name"}
    np.testing.assert_array_equal(found["x"], np.arange(6).reshape(2, 3))
    assert found["name"].tolist() == ["é"]


def test_arrays_never_unpickles(places: tuple[Path, Path]):
    places[0].mkdir()
    np.savez(places[0] / "x.npz", x=np.array([{}], dtype=object))
    with pytest.raises(DataDamaged, match=r"x\.npz is not a readable npz file of plain arrays .*pickle"):
        arrays("x.npz")


@pytest.mark.parametrize("body", [b"", b"not a zip", b"\x93NUMPY\x01\x00"])
def test_what_is_no_npz_file_is_damaged(body: bytes, places: tuple[Path, Path]):
    put(places[0], "x.npz", body)
    with pytest.raises(DataDamaged, match="Delete it and get it again"):
        arrays("x.npz")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1), cut=st.booleans())
def test_a_damaged_file_never_passes_for_another(seed: int, cut: bool, places: tuple[Path, Path]):
    rng = np.random.default_rng(seed)
    x = np.arange(50)
    places[0].mkdir(exist_ok=True)
    np.savez_compressed(places[0] / "x.npz", x=x)
    body = bytearray((places[0] / "x.npz").read_bytes())
    at = int(rng.integers(len(body)))
    if cut:
        body = body[:at]
    else:
        body[at] ^= 1 << int(rng.integers(8))
    put(places[0], "x.npz", bytes(body))
    try:
        found = arrays("x.npz")
    except DataDamaged:
        return
    assert not cut
    for value in found.values():  # the flipped bit was in a date or in a name
        np.testing.assert_array_equal(value, x)


def test_no_silent_downloads(server: str):
    with pytest.raises(DataMissing, match="greeting"):
        find(NAME)
    assert Quiet.requests == 0


def test_fetch_downloads_once(server: str, places: tuple[Path, Path]):
    path = fetch(NAME)
    assert path == places[1] / NAME
    assert path.read_bytes() == BODY
    assert fetch(NAME) == find(NAME) == path
    assert Quiet.requests == 1


def test_find_downloads_when_asked(server: str, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AFIELD_DOWNLOAD", "1")
    assert find(NAME).read_bytes() == BODY


def test_fetch_replaces_a_damaged_copy(server: str, places: tuple[Path, Path]):
    put(places[1], NAME, b"half a down")
    assert fetch(NAME).read_bytes() == BODY


def test_a_wrong_hash_is_refused_and_nothing_is_kept(server: str, places: tuple[Path, Path]):
    url = SOURCES.pop(NAME).url
    SOURCES[NAME] = Source(url, "sha256:" + "0" * 64)
    with pytest.raises(DataDamaged, match=r"did not give test/greeting\.txt as it was expected"):
        fetch(NAME)
    assert not [p for p in places[1].rglob("*") if p.is_file()]


def test_a_failed_download_says_so(server: str):
    url = SOURCES.pop(NAME).url
    SOURCES[NAME] = Source(url + "-not-there", "sha256:" + "0" * 64)
    with pytest.raises(DataMissing, match="The download failed: 404"):
        fetch(NAME)


def test_what_is_on_disk_goes_before_a_download(
    server: str, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AFIELD_DOWNLOAD", "1")
    part = put(places[0], "part.npz", b"a part")
    assert find(NAME, "part.npz") == part
    assert Quiet.requests == 0
    part.unlink()
    assert find("nobody/knows", NAME, "part.npz").read_bytes() == BODY


def test_several_names_are_all_told(places: tuple[Path, Path]):
    with pytest.raises(
        DataMissing, match=r"None of svhn/test_32x32\.mat, images/svhn_dev2500\.npz was found"
    ) as caught:
        find("svhn/test_32x32.mat", "images/svhn_dev2500.npz")
    assert "Get svhn/test_32x32.mat from http://ufldl.stanford.edu" in str(caught.value)


# Tars


@pytest.fixture
def archive(server: str, tmp_path: Path) -> Iterator[str]:
    """The name of a folder that is served as a tar, with the right hash."""
    put(tmp_path / "packed", "many/a.txt", b"a")
    put(tmp_path / "packed", "many/below/b.txt", b"b")
    file = tmp_path / "www" / "many.tar.gz"
    with tarfile.open(file, "w:gz") as tar:
        tar.add(tmp_path / "packed" / "many", "many")
    for name in ("test/many", "test/few"):
        SOURCES[name] = Source(server + "many.tar.gz?download=1", sha256(file.read_bytes()))
    yield "test/many"
    for name in ("test/many", "test/few"):
        del SOURCES[name]


def test_a_tar_is_unpacked_once(archive: str, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(DataMissing):
        find(archive)
    monkeypatch.setenv("AFIELD_DOWNLOAD", "1")
    folder = find(archive)
    assert folder == places[1] / archive == fetch(archive)
    assert {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.txt")} == {
        "a.txt": b"a",
        "below/b.txt": b"b",
    }
    assert Quiet.requests == 1
    assert list(folder.parent.iterdir()) == [folder]


def test_a_tar_without_its_folder_leaves_nothing(archive: str, places: tuple[Path, Path]):
    with pytest.raises(DataDamaged, match=r"many\.tar\.gz\?download=1 holds no folder few"):
        fetch("test/few")
    assert not list((places[1] / "test").iterdir())


def test_a_tar_with_another_hash_is_not_unpacked(archive: str, places: tuple[Path, Path]):
    url = SOURCES.pop(archive).url
    SOURCES[archive] = Source(url, "md5:" + "0" * 32)
    with pytest.raises(DataDamaged, match="did not give test/many as it was expected"):
        fetch(archive)
    assert not list((places[1] / "test").iterdir())


def member(name: str, kind: bytes = tarfile.REGTYPE, **more: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in more.items():
        setattr(info, key, value)
    return info


@pytest.mark.parametrize(
    ("info", "message"),
    [
        (member("many/link", tarfile.SYMTYPE, linkname="a.txt"), "'many/link', which is neither a regular file nor"),
        (member("many/hard", tarfile.LNKTYPE, linkname="many/a.txt"), "'many/hard', which is neither"),
        (member("many/pipe", tarfile.FIFOTYPE), "'many/pipe', which is neither"),
        (member("many/device", tarfile.CHRTYPE), "'many/device', which is neither"),
        (member("/etc/absolute"), "'/etc/absolute', a path outside its folder"),
        (member("many/../../up"), r"'many/\.\./\.\./up', a path outside its folder"),
        (member("C:\\windows"), "'C:.*', a path outside its folder"),
    ],
)
def test_tars_hold_regular_files_and_folders_alone(info: tarfile.TarInfo, message: str, tmp_path: Path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(member("many/a.txt"))
        tar.addfile(info)
    with pytest.raises(DataDamaged, match=f"somewhere was not unpacked: it holds {message}"):
        data.unpack(tmp_path / "x.tar", tmp_path / "out", "somewhere")
    assert not (tmp_path / "up").exists()


def test_tars_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as tar:
        for i in range(5):
            tar.addfile(member(f"many/{i}", size=1000), io.BytesIO(bytes(1000)))
    for name, limit in (("_MOST_MEMBERS", 4), ("_MOST_BYTES", 4500)):
        with monkeypatch.context() as patch:
            patch.setattr(data, name, limit)
            with pytest.raises(DataDamaged, match=r"somewhere was not unpacked: it holds more than .* members, or"):
                data.unpack(tmp_path / "x.tar.gz", tmp_path / name, "somewhere")
        assert sum(f.is_file() for f in (tmp_path / name).rglob("*")) == 4
    data.unpack(tmp_path / "x.tar.gz", tmp_path / "whole", "somewhere")


def test_a_declared_size_is_not_believed(tmp_path: Path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(member("many/huge", size=2**50))
    with pytest.raises(DataDamaged, match="64 GiB"):
        data.unpack(tmp_path / "x.tar", tmp_path / "out", "somewhere")


@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
def test_a_damaged_tar_says_so(damage: str, tmp_path: Path):
    file = tmp_path / "x.tar.gz"
    with tarfile.open(file, "w:gz") as tar:
        tar.addfile(member("many/a", size=100_000), io.BytesIO(np.random.default_rng(0).bytes(100_000)))
    file.write_bytes({"cut": file.read_bytes()[:40_000], "empty": b"", "text": b"hello" * 200}[damage])
    with pytest.raises(DataDamaged, match="somewhere is not a readable tar"):
        data.unpack(file, tmp_path / "out", "somewhere")


def npz_with_header(shape: tuple[int, ...], data: bytes) -> bytes:
    array, content = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(array, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("x.npy", array.getvalue() + data)
    return content.getvalue()


@pytest.mark.parametrize("shape", [(2**40,), (2**31, 2**31), (3,), (1,)])
def test_an_npz_file_that_declares_other_sizes_is_refused_before_anything_is_made(
    shape: tuple[int, ...], places: tuple[Path, Path]
):
    put(places[0], "x.npz", npz_with_header(shape, bytes(16)))
    with pytest.raises(DataDamaged, match=r"x declares float64 \(.*\) in 16 bytes"):
        arrays("x.npz")
    put(places[0], "x.npz", npz_with_header((2,), bytes(16)))
    assert arrays("x.npz")["x"].tolist() == [0, 0]


def test_two_at_once_unpack_one_folder(archive: str, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch):
    download = data.download

    def meanwhile(name: str, target: Path) -> Path:
        monkeypatch.setattr(data, "download", download)
        fetch(name)  # another process, from start to end
        return download(name, target)

    monkeypatch.setattr(data, "download", meanwhile)
    assert (fetch(archive) / "a.txt").read_bytes() == b"a"
    assert list((places[1] / "test").iterdir()) == [places[1] / archive]


def test_fetch_knows_only_files_with_an_address(places: tuple[Path, Path]):
    with pytest.raises(DataMissing, match="No source of it is known"):
        fetch("nobody/knows.npz")


def test_fetch_without_pooch_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ImportError, match=r'pip install "afield\[data\]"'):
        fetch("clinc/data_full.json")
