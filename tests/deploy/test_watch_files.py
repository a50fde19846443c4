"""`afield score --watch`: all files are one stream, each file counts once, and the alarm is told."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import afield
from afield.cli.main import main
from afield.decide.drift import Watch, watch_model
from afield.decide.drift_file import load_watch
from afield.deploy import watch_files

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402


@pytest.fixture
def score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    torch.manual_seed(0)
    model = afield.attach(nn.Linear(2, 3), num_random_features=64)
    x = torch.randn(600, 2)
    afield.fit_posterior(model, [(x, model(x).argmax(1))])
    afield.calibrate(model, [(torch.randn(600, 2), torch.arange(600) % 3)])
    afield.save(model, tmp_path / "model")
    (tmp_path / "watched_nets.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(2, 3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("in").mkdir()
    write("a", 0.0, 1)
    return ["score", "model", "in", "--net", "watched_nets:make", "--out", "out"]


def write(name: str, shift: float, seed: int) -> None:
    np.save(Path("in", name), shift + np.random.default_rng(seed).normal(size=(200, 2)).astype(np.float32))


def scores(name: str) -> np.ndarray:
    return pq.read_table(f"out/{name}.npy.parquet")["score"].to_numpy()


def test_files_are_one_stream_and_count_once(score: list[str], capsys):
    main([*score, "--watch", "0.01"])
    assert "No drift is seen in 200 rows" in capsys.readouterr().out
    write("b", 4.0, 2)
    for _ in range(2):
        main([*score, "--watch", "0.01"])
        said = capsys.readouterr().out
        assert "Drift: the alarm rang at row 2" in said
        assert "b.npy row" in said
    watch, about = load_watch(Path("out", watch_files.STATE))
    assert about["counted"] == ["a.npy.parquet", "b.npy.parquet"]
    expected = watch_model(afield.load("model", nn.Linear(2, 3)))
    again = Watch(np.sort(expected._ranks[None].scores()), seed=watch.seed)
    again.update(np.concatenate([scores("a"), scores("b")]))
    assert (again.alarm, again.evidence) == (watch.alarm, watch.evidence)


def test_what_cannot_be_watched_is_told(score: list[str]):
    with pytest.raises(SystemExit, match="--watch must lie strictly between 0 and 1"):
        main([*score, "--watch", "1"])
    main([*score, "--watch", "0.01"])
    with pytest.raises(SystemExit, match=r"at another rate \(0\.01\)"):
        main([*score, "--watch", "0.05"])
