"""The reader of CIFAR's pickles: plain arrays or an error, whatever the file says. Never a crash."""

import io
import pickle
import pickletools
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from afield.errors import DataDamaged
from afield.tasks import plain_pickle
from afield.tasks.published_formats import read_cifar_batch
from tests.tasks.test_vision import Python2

OPCODES = [ord(op.code) for op in pickletools.opcodes]


def batch(n: int = 2, protocol: int = 2, **more: Any) -> bytes:
    content = {b"data": np.arange(n * 3072).astype(np.uint8).reshape(n, -1), b"labels": list(range(n)), **more}
    file = io.BytesIO()
    Python2(file, protocol=protocol).dump(content)
    return file.getvalue()


PLAIN = batch()


def test_plain_data_is_read_as_python_reads_it():
    values = {b"a": [1, -5, 2**40, 1.5, None, True], b"b": (1, (2, ()), [b"x", "é"]), b"c": {b"d": {}}}
    for protocol in range(6):
        file = io.BytesIO()
        Python2(file, protocol=protocol).dump(values)
        assert plain_pickle.load(file.getvalue()) == values


@pytest.mark.parametrize("dtype", ["u1", "<i4", ">i4", "<i8", "u2"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_integers_are_read(dtype: str, order: Any):
    array = np.arange(6, dtype=dtype).reshape(2, 3).copy(order)
    file = io.BytesIO()
    Python2(file, protocol=2).dump({b"x": array})
    found = plain_pickle.load(file.getvalue())[b"x"]
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


# Two rows of 384 addresses; the flag (K 1, the last of the dtype's state) says that they are to be counted.
OBJECTS = PLAIN.replace(b"\x02\x00\x00\x00u1", b"\x02\x00\x00\x00O8").replace(b"K\x02M\x00\x0c", b"K\x02M\x80\x01")
OBJECTS = OBJECTS.replace(b"\xff\xff\xff\xffK\x00t", b"\xff\xff\xff\xffK\x01t")


def test_an_array_of_objects_over_bytes_does_not_end_the_process(tmp_path: Path):
    """Each eight bytes would be the address of an object: whoever used one would end the process."""
    assert OBJECTS != PLAIN
    (tmp_path / "batch").write_bytes(OBJECTS)
    script = (
        "import sys; from pathlib import Path; from afield.errors import DataDamaged\n"
        "from afield.tasks.published_formats import read_cifar_batch\n"
        "try: read_cifar_batch(Path(sys.argv[1]))\n"
        "except DataDamaged as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "batch"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "an array of 'O8', expected integers" in done.stdout


HOSTILE = {
    "memory far away": b"\x80\x02}r\xff\xff\xff\xff.",
    "string that is not there": b"\x80\x02}T\xff\xff\xff\x7f.",
    "bytes that are not there": b"\x80\x04}\x8e" + struct.pack("<Q", 2**62) + b".",
    "deep tuple as a key": b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"Ns.",
    "long digits": b"\x80\x02}I" + b"9" * 100_000 + b"\n.",
    "nothing": b"",
    "no end": PLAIN[:-1],
    "empty stack": b"\x80\x02.",
    "no mark": b"\x80\x02}u.",
    "reduce of a number": b"\x80\x02K\x01)R.",
    "build of a number": b"\x80\x02K\x01}b.",
    "new object": b"\x80\x02cnumpy\nndarray\n)\x81.",
    "object": b"(cnumpy\nndarray\no.",
    "persistent": b"Px\n.",
    "extension": b"\x80\x02\x82\x01.",
    "array itself": b"\x80\x02cnumpy\nndarray\n(K\x05tR.",
    "huge array": PLAIN.replace(b"K\x02M\x00\x0c", b"K\x02J\xff\xff\xff\x7f"),
    "negative array": PLAIN.replace(b"K\x02M\x00\x0c", b"K\x02J\xff\xff\xff\xff"),
    "list": b"\x80\x02].",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_damaged(name: str, tmp_path: Path):
    (tmp_path / "batch").write_bytes(HOSTILE[name])
    with pytest.raises(DataDamaged, match=r"is no batch of CIFAR|asks for"):
        read_cifar_batch(tmp_path / "batch")


def test_labels_that_are_no_integers_are_damaged(tmp_path: Path):
    for labels in ([0, [1]], [0, 2**70], [0, True], b"01", None):
        (tmp_path / "batch").write_bytes(pickle.dumps({b"data": 0}, protocol=2) if labels is None else batch_of(labels))
        with pytest.raises(DataDamaged, match="batch"):
            read_cifar_batch(tmp_path / "batch")


def batch_of(labels: Any) -> bytes:
    file = io.BytesIO()
    Python2(file, protocol=2).dump({b"data": np.zeros((2, 3072), np.uint8), b"labels": labels})
    return file.getvalue()


def mutate(content: bytes, changes: list[tuple[str, float, int]]) -> bytes:
    result = bytearray(content)
    for kind, where, value in changes:
        # Most of the file is pixels: half of the changes fall on the instructions around them.
        at = int(where * len(result)) if where < 0.5 else int((where - 0.5) * 400) * (1 if value % 2 else -1)
        at = max(-len(result), min(len(result) - 1, at))
        if kind == "replace":
            result[at] = value
        elif kind == "flip":
            result[at] ^= 1 << value % 8
        elif kind == "insert":
            result.insert(at, value)
        elif kind == "cut":
            del result[at : at + 1 + value]
        else:
            result[at:at] = result[at // 2 : at // 2 + value]
        if not result:
            break
    return bytes(result)


def never_crashes(changes: list[tuple[str, float, int]], file: Path) -> None:
    file.write_bytes(mutate(PLAIN, changes))
    try:
        images, labels = read_cifar_batch(file)
    except DataDamaged:
        return
    assert images.dtype == np.uint8
    assert images.shape[1:] == (32, 32, 3)
    assert labels.dtype == np.int64
    assert labels.shape == images.shape[:1]


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["replace", "flip", "insert", "cut", "copy"]),
        st.floats(0, 0.999),
        st.one_of(st.sampled_from(OPCODES), st.integers(0, 255)),
    ),
    min_size=1,
    max_size=6,
)
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=400, deadline=None, suppress_health_check=QUIET)
@given(changes=CHANGES)
def test_mutated_pickles_are_arrays_or_damaged(changes: list[tuple[str, float, int]], tmp_path: Path):
    never_crashes(changes, tmp_path / "batch")


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=QUIET)
@given(changes=CHANGES)
def test_ten_thousand_mutated_pickles_are_arrays_or_damaged(changes: list[tuple[str, float, int]], tmp_path: Path):
    never_crashes(changes, tmp_path / "batch")
