"""Batch scoring: what is written is what the model says, row for row, from every kind of file."""

import dataclasses
import io
import json
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import afield
from afield.cli.main import main
from afield.deploy import read_files, score_files
from afield.deploy.score_files import Request, Scorer, Source, answers, score_file
from afield.prediction.prediction import Prediction

pa = pytest.importorskip("pyarrow")
import pyarrow.csv  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

NET = """
import torch
from torch import nn
def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
"""


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def model(x: np.ndarray) -> afield.SNGP:
    torch.manual_seed(0)
    model = afield.sngp(net(), num_random_features=64)
    data = [(torch.from_numpy(x), torch.arange(300) % 3)]
    afield.fit_posterior(model, data, progress=False)
    afield.calibrate(model, data, progress=False)
    return model.eval()


@pytest.fixture
def saved(model: afield.SNGP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The first words of the command."""
    afield.save(model, tmp_path / "model", metadata={"labels": ["cat", "dog", "cow"]})
    (tmp_path / "scored_nets.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return ["score", "model", "in", "--net", "scored_nets:make", "--out", "out"]


def write(kind: str, file: Path, x: np.ndarray, **more: Any) -> str:
    """The name of the file, whose suffix is its kind."""
    file.parent.mkdir(parents=True, exist_ok=True)
    name = file.with_suffix(f".{kind.split()[0]}")
    columns = {f"f{i}": x[:, i] for i in range(x.shape[1])} | more
    if kind == "npy":
        np.save(name, x)
    elif kind == "npz":
        np.savez_compressed(name, x=x, y=np.zeros(3))
    elif kind == "csv":
        pyarrow.csv.write_csv(pa.table(columns), name)
    elif kind == "parquet":
        pq.write_table(pa.table(columns), name, row_group_size=70)
    else:
        inner = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), x.shape[1])
        lists = {
            "parquet fixed": inner,
            "parquet lists": pa.array(list(x)),
            "parquet nested": pa.array([[row] for row in x]),
        }
        pq.write_table(pa.table({"v": lists[kind]} | more), name)
    return str(name)


KINDS = ["npy", "npz", "csv", "parquet", "parquet fixed", "parquet lists", "parquet nested"]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_models_own(kind: str, saved: list[str], model: afield.SNGP, x: np.ndarray, capsys):
    file = Path(write(kind, Path("in/a"), x))
    main([*saved, "--batch-size", "64", "--alpha", "0.05"])
    assert "300 rows of 1 files scored in out/" in capsys.readouterr().out
    table, p = pq.read_table("out"), model.predict(torch.from_numpy(x))
    assert table.column_names == [
        *("file", "row", "label", "probability", "score", "variance", "p_value", "accepted"),
    ]
    assert table["file"].unique().to_pylist() == [file.name]
    assert table["row"].to_pylist() == list(range(300))
    assert table["label"].to_pylist() == [["cat", "dog", "cow"][k] for k in p.labels]
    near = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(table["probability"].to_numpy(), p.confidence, **near)
    np.testing.assert_allclose(table["variance"].to_numpy(), p.variance, **near)
    np.testing.assert_allclose(table["score"].to_numpy(), p.score(), **near)
    np.testing.assert_allclose(table["p_value"].to_numpy(), p.p_value, atol=1.01 / 301)  # x is its own reference
    accepted = table["p_value"].to_numpy() > 0.05
    assert accepted.any()
    assert (table["accepted"].to_numpy() == accepted).all()


@settings(deadline=None, max_examples=40)
@given(count=st.integers(0, 30), width=st.integers(1, 3), batch=st.integers(1, 40), kind=st.sampled_from(KINDS[:-1]))
def test_every_row_is_read_once_and_in_order(tmp_path_factory, count: int, width: int, batch: int, kind: str):
    x = np.arange(count * width, dtype=np.float64).reshape(count, width) / 7
    file = Path(write(kind, tmp_path_factory.mktemp("rows") / "a", x))
    batches = [values for values, _ in read_files.read(file, batch_size=batch)]
    assert all(len(values) <= batch for values in batches)
    if count:
        np.testing.assert_array_equal(np.concatenate(batches), x)
    assert read_files.count(file) in (count, None)


@pytest.mark.parametrize(
    ("kind", "count", "limit"),
    [
        *(("npy", 200_000, 8e6), ("npz", 200_000, 8e6), ("parquet", 200_000, 8e6)),  # 26 MB
        pytest.param("csv", 500_000, 50e6, marks=pytest.mark.slow),  # 124 MB; pyarrow reads 32 blocks of 1 MB ahead
    ],
)
def test_memory_does_not_grow_with_the_file(kind: str, count: int, limit: float, tmp_path: Path):
    x = np.random.default_rng(0).integers(0, 9, size=(count, 16)) / 7
    if kind == "parquet":
        pq.write_table(pa.table({f"f{i}": x[:, i] for i in range(16)}), tmp_path / "a.parquet", row_group_size=10_000)
    else:
        write(kind, tmp_path / "a", x)
    assert kind in ("npz", "parquet") or (tmp_path / f"a.{kind}").stat().st_size > 2 * limit  # those are compressed
    before, most, seen = pa.total_allocated_bytes(), 0, 0
    tracemalloc.start()
    for values, _ in read_files.read(tmp_path / f"a.{kind}", batch_size=1000):
        seen += len(values)
        most = max(most, pa.total_allocated_bytes() - before)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen == count
    assert most + peak < limit


def test_answers_do_not_depend_on_the_batch_size(model: afield.SNGP, x: np.ndarray, tmp_path: Path):
    source = Source(Path(write("npy", tmp_path / "a", x)), "a.npy")
    for size in (1, 7, 300):
        score_file(source, tmp_path / str(size), Scorer(model.predict), Request("m"), batch_size=size)
    one, seven, whole = (pq.read_table(tmp_path / str(size)) for size in (1, 7, 300))
    for other in (one, seven):
        # A -log p magnifies last digits where held-out inputs lie close together.
        np.testing.assert_allclose(other["score"].to_numpy(), whole["score"].to_numpy(), rtol=5e-3)
    assert seven.schema.equals(whole.schema, check_metadata=True)


# Going on


def test_a_stopped_command_makes_only_what_is_missing(saved: list[str], x: np.ndarray, capsys):
    write("npy", Path("in/a"), x[:100])
    write("npy", Path("in/deep/b"), np.where(np.arange(100)[:, None] == 17, np.nan, x[:100]))
    write("npy", Path("in/c"), x[:50])
    with pytest.raises(SystemExit, match=r"deep/b\.npy: a value is missing, NaN or infinite in row 17 .*1 of 3 files"):
        main([*saved, "--batch-size", "10"])
    parts = [Path("out") / name for name in ("a.npy.parquet", "c.npy.parquet")]
    assert [f for f in sorted(Path("out").rglob("*")) if f.is_file() and f.name != ".lock"] == parts
    stamps = [part.stat().st_mtime_ns for part in parts]
    write("npy", Path("in/deep/b"), x[:100])
    main(saved)
    assert "250 rows of 3 files (2 were done before)" in capsys.readouterr().out
    assert [part.stat().st_mtime_ns for part in parts] == stamps
    write("npy", Path("in/c"), x[:60])  # another content: scored again
    main(saved)
    assert pq.read_table("out").num_rows == 260
    assert parts[0].stat().st_mtime_ns == stamps[0]
    main([*saved, "--fresh"])
    assert parts[0].stat().st_mtime_ns > stamps[0]


def test_answers_of_two_models_are_not_mixed(saved: list[str], model: afield.SNGP, x: np.ndarray):
    write("npy", Path("in/a"), x)
    main([*saved, "--alpha", "0.05"])
    with pytest.raises(SystemExit, match=r"asked for otherwise \(alpha = 0\.05 there, 0\.1 now\).*--fresh"):
        main([*saved, "--alpha", "0.1"])
    other = dataclasses.replace(Request("m"), model="another")
    with pytest.raises(ValueError, match=r"model = .* there, another now"):
        score_files.todo(score_files.sources(Path("in"), Path("out")), Path("out"), other)


def test_one_bad_file_never_stops_the_others(saved: list[str], x: np.ndarray):
    for name in ("a", "z"):
        write("npy", Path(f"in/{name}"), x)
    np.save("in/b.npy", np.array(5.0))  # no rows at all: this ended the command before it began
    pq.write_table(pa.table({"v": [{"a": 1.0}]}), "in/c.parquet")
    np.save("in/d.npy", np.array([{}], dtype=object), allow_pickle=True)
    Path("in/e.npy").symlink_to("nowhere.npy")
    Path("in/f.csv").write_bytes(b"a,b\n1,2\n\xff\xfe,\x00\n")
    Path("in/g.npy").mkdir()
    with zipfile.ZipFile("in/h.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (2**40, 4)})
    Path("in/i.npy").write_bytes(header.getvalue())
    with zipfile.ZipFile("in/j.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
    Path("in/k.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    Path("in/l.csv").write_bytes(b"")
    with pytest.raises(SystemExit, match=r"^afield: .*\(10 of 12 files failed; the others are done\.\)$"):
        main(saved)
    parts = {f.name for f in Path("out").iterdir() if f.suffix == ".parquet"}
    assert parts == {"a.npy.parquet", "z.npy.parquet"}


def test_label_names_are_part_of_what_is_remembered(saved: list[str], model: afield.SNGP, x: np.ndarray):
    write("npy", Path("in/a"), x)
    main(saved)
    afield.save(model, "model", metadata={"labels": ["dog", "cat", "cow"]})  # the same weights
    with pytest.raises(
        SystemExit, match=r"asked for otherwise \(labels = \['cat', 'dog', 'cow'\] there, \['dog', 'cat'"
    ):
        main(saved)
    main([*saved, "--fresh"])
    assert set(pq.read_table("out")["label"].to_pylist()) <= {"dog", "cat", "cow"}


def test_parts_from_before_labels_were_remembered_are_made_again(saved: list[str], x: np.ndarray):
    write("npy", Path("in/a"), x)
    main(saved)
    part = Path("out/a.npy.parquet")
    table, old = pq.read_table(part), score_files.read_stamp(part)
    del old["request"]["labels"], old["request"]["found"]
    pq.write_table(table.replace_schema_metadata({"afield": json.dumps(old)}), part)
    main(saved)
    assert score_files.read_stamp(part)["request"]["labels"] == ["cat", "dog", "cow"]


def test_tables_with_other_columns_are_errors_and_their_order_does_not_matter(
    saved: list[str], model: afield.SNGP, x: np.ndarray
):
    write("parquet", Path("in/a"), x)
    columns = {f"f{i}": x[:, i] for i in range(4)}
    pyarrow.csv.write_csv(pa.table(dict(reversed(columns.items()))), "in/b.csv")
    pq.write_table(pa.table({f"g{i}": x[:, i] for i in range(4)}), "in/c.parquet")
    pq.write_table(pa.table(columns | {"more": x[:, 0]}), "in/d.parquet")
    with pytest.raises(
        SystemExit,
        match=r"c\.parquet has the columns g0, g1, g2, g3, other files have f0, f1, f2, f3\. .*--columns.*2 of 4 files",
    ):
        main(saved)
    expected = model.predict(torch.from_numpy(x)).score()
    for name in ("a.parquet", "b.csv.parquet"):
        np.testing.assert_allclose(pq.read_table(f"out/{name}")["score"].to_numpy(), expected, rtol=1e-5)
    assert score_files.read_stamp(Path("out/a.parquet"))["request"]["found"] == ["f0", "f1", "f2", "f3"]
    for file in Path("in").iterdir():
        file.unlink()
    pq.write_table(pa.table({f"g{i}": x[:, i] for i in range(4)}), "in/a.parquet")
    with pytest.raises(SystemExit, match=r"asked for otherwise \(found = \['f0', .* there, \['g0'"):
        main(saved)


def test_an_interrupted_file_leaves_nothing(model: afield.SNGP, x: np.ndarray, tmp_path: Path):
    source = Source(Path(write("npy", tmp_path / "a", x)), "a.npy")

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_file(source, tmp_path / "out", Scorer(model.predict), Request("m"), batch_size=10, on_rows=stop)
    assert list((tmp_path / "out").iterdir()) == []


def test_answers_below_the_input_folder_are_no_input(saved: list[str], x: np.ndarray):
    write("parquet", Path("in/a"), x)
    write("npy", Path("in/_temporary/b"), x)
    for _ in range(2):
        main([*saved[:-1], "in/out"])
    assert pq.read_table("in/out").num_rows == 300
    assert [source.name for source in score_files.sources(Path("in"), Path("elsewhere"))] == [
        "a.parquet",
        "out/a.parquet",
    ]


# What the rows are


def test_columns_are_chosen_ordered_and_copied(saved: list[str], model: afield.SNGP, x: np.ndarray):
    names = pa.array([f"customer {i}" for i in range(300)])
    write("parquet", Path("in/a"), x[:, ::-1], name=names, target=np.zeros(300))
    main([*saved, "--columns", "f3", "f2", "f1", "f0", "--id", "name"])
    table = pq.read_table("out")
    assert table["id"].to_pylist() == names.to_pylist()
    np.testing.assert_allclose(table["score"].to_numpy(), model.predict(torch.from_numpy(x)).score(), rtol=1e-5)


def test_missing_values_may_be_refused(saved: list[str], model: afield.SNGP, x: np.ndarray):
    holes = {
        f"f{i}": pa.array([None if (i, j) == (2, 5) else float(v) for j, v in enumerate(x[:, i])]) for i in range(4)
    }
    Path("in").mkdir()
    pq.write_table(pa.table(holes), "in/a.parquet")
    with pytest.raises(
        SystemExit, match=r"a\.parquet: a value is missing, NaN or infinite in row 5 \(the first is row 0"
    ):
        main(saved)
    main([*saved, "--missing", "refuse"])
    table = pq.read_table("out")
    assert [i for i, v in enumerate(table["score"].to_pylist()) if v is None] == [5]
    assert table["label"][5].as_py() is None
    assert table["accepted"][5].as_py() is False
    others = [i for i in range(300) if i != 5]
    expected = model.predict(torch.from_numpy(x)).score()[others]
    np.testing.assert_allclose(table["score"].take(others).to_numpy(), expected, rtol=1e-5)


def test_real_targets_have_mean_and_std(tmp_path: Path, x: np.ndarray):
    logits, variance = torch.randn(300, 2), torch.rand(300)
    whole = Prediction(logits, variance=variance, noise=0.5, likelihood="gaussian")
    source = Source(Path(write("npy", tmp_path / "a", x)), "a.npy")
    score_file(source, tmp_path / "out", Scorer(lambda _: whole), Request("m"), batch_size=300)
    table = pq.read_table(tmp_path / "out")
    assert table.column_names == ["file", "row", "mean", "std", "score", "variance"]
    np.testing.assert_array_equal(np.array(table["mean"].to_pylist(), np.float32), logits)
    np.testing.assert_array_equal(np.array(table["std"].to_pylist(), np.float32), whole.std)
    assert set(answers(Prediction(logits, likelihood="gaussian"))) == {"mean"}


def test_whole_numbers_stay_whole(tmp_path: Path):
    seen: list[torch.Tensor] = []

    def predict(ids: torch.Tensor) -> Prediction:
        seen.append(ids)
        return Prediction(ids.float(), probs=ids.float().softmax(1))

    tokens = np.array([[101, 7, 2**31], [5, 0, 1]])
    source = Source(Path(write("parquet lists", tmp_path / "a", tokens)), "a.parquet")
    score_file(source, tmp_path / "out", Scorer(predict, torch.int64), Request("m"))
    assert torch.equal(seen[0], torch.from_numpy(tokens))


def test_never_calibrated_models_have_no_p_values(saved: list[str], x: np.ndarray, capsys):
    bare = afield.sngp(net(), num_random_features=16)
    afield.fit_posterior(bare, [(torch.from_numpy(x), torch.arange(300) % 3)], progress=False)
    afield.save(bare, "model")
    write("npy", Path("in/a"), x)
    main(saved)
    assert "not calibrated: there are no columns p_value and accepted" in capsys.readouterr().out
    assert pq.read_table("out").column_names == ["file", "row", "label", "probability", "score", "variance"]
    with pytest.raises(SystemExit, match=r"alpha = 0\.01 needs p-values, and this model was never calibrated"):
        main([*saved, "--alpha", "0.01", "--fresh"])


# Errors


@pytest.mark.parametrize(
    ("kind", "more", "flags", "message"),
    [
        ("parquet", {}, ["--columns", "f0", "g"], r"a\.parquet has no column 'g'\. It has: f0, f1, f2, f3"),
        ("csv", {}, ["--id", "name"], r"a\.csv has no column 'name'"),
        ("csv", {}, ["--columns", "f0", "f1", "f2", "f2"], r"a\.csv: the column 'f2' is there, or asked for, twice"),
        ("csv", {}, ["--columns", "f0", "f1", "--id", "f1"], r"a\.csv: the column 'f1' is the --id and cannot be"),
        ("npy", {}, ["--shape", "-2", "-2"], "--shape must be positive numbers, got -2 -2"),
        (
            "parquet",
            {"t": ["a"] * 5},
            [],
            r"column 't' of a\.parquet holds string, not numbers\. Choose with --columns",
        ),
        ("parquet", {}, ["--columns", "f0", "f1"], r"a\.parquet: the model does not take its rows\..*expects"),
        ("npy", {}, ["--shape", "3", "2"], r"a\.npy has rows of shape \(4,\), the model expects \(3, 2\)"),
        ("npy", {}, ["--columns", "f0"], r"a\.npy is an array and has no columns"),
        ("npy", {}, ["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        ("npy", {}, ["--alpha", "0.001"], r"alpha = 0\.001 is finer than the held-out data can tell"),
    ],
)
def test_messages(kind: str, more: dict, flags: list[str], message: str, saved: list[str], x: np.ndarray):
    write(kind, Path("in/a"), x[:5], **more)
    with pytest.raises(SystemExit, match=message):
        main([*saved, *flags])
    assert list(Path("out").rglob("*.parquet")) == []


def test_more_messages(saved: list[str], x: np.ndarray):
    Path("in").mkdir()
    with pytest.raises(SystemExit, match=r"a folder of files \.npy, \.npz, \.parquet, \.csv, found none at in"):
        main(saved)
    pq.write_table(pa.table({"v": [[1.0, 2.0], [3.0]]}), "in/a.parquet")
    with pytest.raises(SystemExit, match=r"Row 1 of a\.parquet: its list in the column 'v' is missing, or of another"):
        main(saved)
    Path("in/a.parquet").unlink()
    np.savez("in/a.npz", one=x, two=x)
    with pytest.raises(SystemExit, match=r"a\.npz should hold an array named x, or a single one, it has: one, two"):
        main(saved)
    np.savez("in/a.npz", np.asfortranarray(x))
    with pytest.raises(SystemExit, match=r"a\.npz must hold numbers \(rows, \.\.\.\) in C order"):
        main(saved)
    with pytest.raises(SystemExit, match=r"was written by afield\.save: give --net"):
        main([*saved[:3], "--out", "out"])
    with pytest.raises(ValueError, match="3 classes, but 2 labels"):
        answers(Prediction(torch.zeros(1, 3), probs=torch.full((1, 3), 1 / 3)), labels=["a", "b"])
    Path("in/b.parquet").touch()
    Path("in/b.npy.parquet").touch()
    Path("in/b.npy").touch()
    with pytest.raises(SystemExit, match=r"answers to b\.npy and b\.npy\.parquet would have the same name"):
        main(saved)


@pytest.mark.parametrize("kind", ["npy", "npz", "parquet"])
@pytest.mark.parametrize("size", [0, 100])
def test_cut_files_are_named(kind: str, size: int, saved: list[str], x: np.ndarray):
    file = Path(write(kind, Path("in/a"), x))
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(SystemExit, match=rf"a\.{kind}"):
        main(saved)


def test_csv_may_begin_with_whole_numbers(tmp_path: Path):
    lines = ["a,b", *["1,"] * 600_000, "2.5,3"]  # over a megabyte
    (tmp_path / "a.csv").write_text("\n".join(lines))
    *_, (last, _) = read_files.read(tmp_path / "a.csv", batch_size=100_000)
    np.testing.assert_array_equal(last[-2:], [[1, np.nan], [2.5, 3]])


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r'pip install "afield\[parquet\]"'):
        read_files.arrow()
