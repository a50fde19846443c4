"""Shared fixtures. Real data is found through AFIELD_DATA; without it, tests that need it skip and say so."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
if "AFIELD_DATA" not in os.environ and SHARED_DATA.is_dir():
    os.environ["AFIELD_DATA"] = str(SHARED_DATA)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start
torch.set_num_threads(1)  # small matrices: threads only get in each other's way under xdist


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def data_file(name: str) -> Path:
    """A file of the data folder, or a skip that says what is missing."""
    folder = os.environ.get("AFIELD_DATA")
    path = Path(folder or "", name)
    if folder is None or not path.is_file():
        pytest.skip(f"needs {name}: set AFIELD_DATA to a folder that holds it")
    return path


@pytest.fixture(scope="module")
def coarse_pictures() -> Iterator[None]:
    """Reports with maps of fewer hidden vectors and with fewer pixels: four times as fast to draw."""
    from afield.report import hidden, plots

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hidden, "_MOST", 40)
        patch.setattr(plots, "_DPI", 48)
        yield


@pytest.fixture(scope="module")
def small_toys() -> Iterator[None]:
    """Toy tasks with a smaller network and lattice: a run in this process costs a third."""
    from afield.tasks import toy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "_GRID", 20)
        patch.setattr(toy, "ResFFN", partial(toy.ResFFN, depth=2, width=32))
        yield


@pytest.fixture
def whole_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Toy tasks as other processes see them."""
    from afield.backbones.resffn import ResFFN
    from afield.tasks import toy

    monkeypatch.setattr(toy, "_GRID", 100)
    monkeypatch.setattr(toy, "ResFFN", ResFFN)
