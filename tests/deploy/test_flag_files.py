"""`afield score --fdr`: the flags of many files are those of one batch, in flat memory, and go on after a stop."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import afield
from afield.cli.main import main
from afield.decide.selection import flag
from afield.deploy import flag_files
from afield.deploy.score_files import ONE_REFERENCE, Request, Scorer, Source, score_file
from afield.methods.ensemble import combine
from afield.prediction.prediction import Prediction

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

NET = """
from torch import nn
def make():
    return nn.Linear(2, 3)
"""


@pytest.fixture(scope="module")
def model() -> afield.SNGP:
    torch.manual_seed(0)
    model = afield.attach(nn.Linear(2, 3), num_random_features=64)
    x = torch.randn(1500, 2)
    afield.fit_posterior(model, [(x, model(x).argmax(1))])
    afield.calibrate(model, [(torch.randn(1500, 2), torch.arange(1500) % 3)])
    return model


@pytest.fixture
def saved(model: afield.SNGP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first words of the command; there are two files, a part of whose rows is far away."""
    afield.save(model, tmp_path / "model")
    (tmp_path / "flagged_nets.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, seed, rows in (("a", 1, 300), ("sub/b", 2, 500)):
        write(Path("in") / name, rows, seed)
    return ["score", "model", "in", "--net", "flagged_nets:make", "--out", "out"]


def write(file: Path, rows: int, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(rows, 2)).astype(np.float32)
    x[: rows // 10] += 30
    file.parent.mkdir(parents=True, exist_ok=True)
    np.save(file.with_suffix(".npy"), x)


def everything() -> "pa.Table":
    return pa.concat_tables([pq.read_table(path) for path in sorted(Path("out").rglob("*.parquet"))])


def check(fdr: float) -> np.ndarray:
    """The flags, if they are those of one batch in memory."""
    table = everything()
    flags = table["flagged"].to_numpy()
    assert np.array_equal(flags, flag(torch.from_numpy(table["p_value"].to_numpy().copy()), fdr=fdr).numpy())
    return flags


def changes() -> dict[str, int]:
    return {path.as_posix(): path.stat().st_mtime_ns for path in Path("out").rglob("*.parquet")}


def test_flags_of_all_files_are_those_of_one_batch(saved: list[str], capsys):
    main([*saved, "--fdr", "0.1"])
    flags = check(0.1)
    assert f"{flags.sum()} rows are flagged" in capsys.readouterr().out
    assert 70 <= flags.sum() <= 120  # a tenth of 800 rows is far away
    columns = everything().column_names
    assert columns[-3:] == ["p_value", "accepted", "flagged"]
    assert not list(Path("out").rglob(".*unfinished"))


def test_the_same_command_does_nothing_and_another_level_scores_nothing(saved: list[str], monkeypatch):
    main([*saved, "--fdr", "0.1"])
    first = changes()
    main([*saved, "--fdr", "0.1"])
    assert changes() == first
    monkeypatch.setattr("afield.deploy.score_files.score_file", None)  # nothing is predicted again
    main([*saved, "--fdr", "0.3"])
    check(0.3)
    main(saved)
    assert "flagged" not in everything().column_names
    main([*saved, "--fdr", "0.1"])
    check(0.1)


def test_a_stop_between_two_files_is_made_good(saved: list[str]):
    rewrite, calls = flag_files._write, []

    def stop(part: Path, selection: flag_files.Selection | None) -> None:
        calls.append(part)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rewrite(part, selection)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flag_files, "_write", stop)
        with pytest.raises(SystemExit, match="The same command goes on"):
            main([*saved, "--fdr", "0.1"])
    names = [pq.read_schema(path).names for path in sorted(Path("out").rglob("*.parquet"))]
    assert ["flagged" in each for each in names] == [True, False]
    first = changes()["out/a.npy.parquet"]
    main([*saved, "--fdr", "0.1"])
    check(0.1)
    assert changes()["out/a.npy.parquet"] == first


def test_a_new_file_joins_the_batch(saved: list[str]):
    main([*saved, "--fdr", "0.2"])
    before = everything()["p_value"].to_numpy().copy()
    write(Path("in/c"), 4000, 3)
    main([*saved, "--fdr", "0.2"])
    assert len(check(0.2)) == 4800
    assert len(before) == 800


def test_rows_without_an_answer_are_neither_counted_nor_flagged(saved: list[str]):
    x = np.load("in/a.npy")
    x[5] = np.nan
    np.save("in/a.npy", x)
    main([*saved, "--fdr", "0.1", "--missing", "refuse"])
    table = pq.read_table("out/a.npy.parquet")
    assert table["flagged"][5].as_py() is None
    assert table["flagged"].null_count == 1
    full = everything().filter(pa.array(everything()["p_value"].is_valid().to_pylist()))
    right = flag(torch.from_numpy(full["p_value"].to_numpy().copy()), fdr=0.1).numpy()
    assert np.array_equal(full["flagged"].to_numpy(), right)


def test_nothing_flagged_says_what_it_would_take(saved: list[str], capsys):
    usual = np.array([[0.7, 0.7]], dtype=np.float32)
    np.save("in/a.npy", usual.repeat(300, axis=0))
    np.save("in/sub/b.npy", usual.repeat(500, axis=0))
    main([*saved, "--fdr", "0.1"])
    assert "No row is flagged: the smallest p-value" in capsys.readouterr().out
    assert not check(0.1).any()


def test_an_uncalibrated_model_is_refused_before_the_scoring(saved: list[str], model: afield.SNGP):
    model = afield.attach(nn.Linear(2, 3), num_random_features=16)
    afield.fit_posterior(model, [torch.randn(50, 2)])
    afield.save(model, "model")
    with pytest.raises(SystemExit, match="fdr needs p-values, and this model was never calibrated"):
        main([*saved, "--fdr", "0.1"])
    assert not list(Path("out").rglob("*.parquet"))
    main(saved)
    with pytest.raises(SystemExit, match="fdr needs p-values"):
        main([*saved, "--fdr", "0.1"])


def test_fdr_is_a_rate(saved: list[str]):
    with pytest.raises(SystemExit, match="--fdr must lie strictly between 0 and 1, got 1"):
        main([*saved, "--fdr", "1"])


def part_of(predict: Callable[[torch.Tensor], Prediction], x: np.ndarray, folder: Path) -> Path:
    np.save(folder / "x.npy", x)
    part = score_file(Source(folder / "x.npy", "x.npy"), folder / "out", Scorer(predict), Request("model"))
    assert part is not None
    return part


def test_p_values_of_an_ensemble_may_depend_on_each_other_in_any_way(model: afield.SNGP, tmp_path: Path):
    x = np.random.default_rng(4).normal(size=(200, 2)).astype(np.float32)
    x[:60] += 30

    def both(x: torch.Tensor) -> Prediction:
        return combine([model.predict(x), model.predict(x)])

    for predict, single in ((model.predict, True), (both, False)):
        part = part_of(predict, x, tmp_path)
        assert json.loads(pq.read_schema(part).metadata[ONE_REFERENCE]) is single
        found = flag_files.flag_files([part], 0.2)
        assert found.any_dependence is not single
        p = predict(torch.from_numpy(x)).p_value
        assert p is not None
        right = flag(p, fdr=0.2, any_dependence=not single)
        assert (found.rows, found.flagged) == (200, int(right.sum()))
        assert np.array_equal(pq.read_table(part)["flagged"].to_numpy(), right.numpy())


def test_memory_does_not_grow_with_the_file(tmp_path: Path):
    rng, rows = np.random.default_rng(5), 1_000_000
    table = {"row": np.arange(rows), "p_value": (rng.integers(1, 1001, rows) / 1000).astype(np.float32)}
    part = tmp_path / "part.parquet"
    pq.write_table(pa.table(table), part, row_group_size=65536)
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    found = flag_files.flag_files([part], 0.1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.rows == rows
    assert peak < 6e6  # of 12 MB
    assert pa.total_allocated_bytes() - before < 1e6
    assert pq.read_metadata(part).num_rows == rows
