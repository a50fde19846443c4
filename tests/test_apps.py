"""The command line, as a user meets it."""

import struct
from pathlib import Path

import pytest

from afield.apps.cli import main
from afield.version import __version__


def test_demo_prints_a_table_and_writes_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["demo", "--out", str(tmp_path / "out"), "--epochs", "2"])
    said = capsys.readouterr().out
    for name in ("dnn", "dnn-sn", "dnn-gp", "sngp", "AUROC", "NLL"):
        assert name in said
    picture = tmp_path / "out" / "two-moons.png"
    assert str(picture) in said.replace("\n", "")
    header = picture.read_bytes()[:24]
    width, height = struct.unpack(">II", header[16:24])
    assert header.startswith(b"\x89PNG")
    assert width > 3 * height > 0
    assert list(picture.parent.iterdir()) == [picture]


def test_version(capsys: pytest.CaptureFixture[str]):
    main(["--version"])
    assert capsys.readouterr().out == f"afield {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], []])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("task", "message"),
    [("two-mons", "Unknown task 'two-mons'. Did you mean 'two-moons'"), ("digits", "digits has 64 dimensions")],
)
def test_bad_task_is_one_clear_line(task: str, message: str, tmp_path: Path):
    with pytest.raises(SystemExit, match=message):
        main(["demo", "--task", task, "--out", str(tmp_path)])


def test_unwritable_folder_is_one_clear_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"afield: .*file"):
        main(["demo", "--epochs", "1", "--out", str(tmp_path / "file")])
