"""Shared fixtures. Real data is found through AFIELD_DATA; without it, tests that need it skip and say so."""

import os
from pathlib import Path

import pytest
import torch

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
if "AFIELD_DATA" not in os.environ and SHARED_DATA.is_dir():
    os.environ["AFIELD_DATA"] = str(SHARED_DATA)

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
