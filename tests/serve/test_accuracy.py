"""Labels that come later: what they say is counted once, survives kill -9, and takes bounded room."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("orjson")
from afield.serve import accuracy
from afield.serve.accuracy import STATE, Accuracy
from afield.serve.engine import BadInput

LABELS = ("cat", "dog")


def answers(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet([1, 1], rows).astype(np.float32)
    label = np.array(LABELS, dtype=object)[probs.argmax(1)]
    return {"label": label, "probabilities": probs, "accepted": rng.random(rows) > 0.3}


def tell(of: Accuracy, requests: int) -> None:
    """Requests of three rows in pairs, as a monitor counts them; labels for every third request."""
    for i in range(0, requests, 2):
        of.answered([f"r{i}", f"r{i + 1}"], [0, 3, 6], answers(6, seed=i))
        for k in (i, i + 1):
            if k % 3 == 0:
                of.add_labels(f"r{k}", ["cat", "dog", "cat"])


def same(a: Accuracy, b: Accuracy) -> bool:
    """But for the last digits of a sum: requests are replayed one by one."""
    one, other = a.summary(drifted=False), b.summary(drifted=False)
    close = np.allclose(one.pop("reliability"), other.pop("reliability"), rtol=1e-9, atol=0)
    expected = [summary.pop("expected_accuracy") for summary in (one, other)]
    return close and expected[0] == pytest.approx(expected[1]) and one == other and a._waiting == b._waiting


def test_labels_survive_kill_9(tmp_path: Path):
    """All that a call returned from is there, through snapshots and a torn end; what waits can still be labelled."""
    script = f"""if True:
        import os, signal
        from pathlib import Path
        from afield.serve import accuracy
        from tests.serve.test_accuracy import LABELS, tell
        accuracy.SNAPSHOT = 7
        tell(accuracy.Accuracy(LABELS, risk=0.2, folder=Path({str(tmp_path)!r}), identity="m"), 20)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    expected = Accuracy(LABELS, risk=0.2)
    tell(expected, 20)
    with next(tmp_path.glob("labels-*.log")).open("ab") as journal:
        journal.write(b"\0" * 11)  # a record that was cut short, or never written
    for _ in range(2):  # after a kill, and after an orderly end
        again = Accuracy(LABELS, risk=0.2, folder=tmp_path, identity="m")
        assert same(again, expected)
        assert again.risk is not None
        assert again.risk.count == expected.risk.count > 0  # type: ignore[union-attr]
        again.close()
    again = Accuracy(LABELS, risk=0.2, folder=tmp_path, identity="m")
    assert again.add_labels("r1", ["cat", "cat", "cat"])["rows"] == 3
    with pytest.raises(BadInput, match="or they have labels already"):
        again.add_labels("r0", ["cat", "dog", "cat"])  # it had, in the process that was killed


def test_the_risk_of_all_labels_is_tested_whatever_the_limit_was(tmp_path: Path):
    """Evidence is a function of the counts; an alarm that rang at a limit stays for this limit."""
    first = Accuracy(LABELS, folder=tmp_path)
    for i in range(60):
        first.answered([f"r{i}"], [0, 1], {"label": np.array(["cat"], dtype=object), "probabilities": np.eye(2)[:1]})
        first.add_labels(f"r{i}", ["dog" if i % 2 else "cat"])
    first.close()
    for risk, rings in ((0.05, True), (0.9, False), (0.05, True)):
        again = Accuracy(LABELS, risk=risk, folder=tmp_path)
        assert again.risk is not None
        assert (again.risk.count, again.risk.errors, again.risk.alarm) == (60, 30, rings)
        again.close()


@pytest.mark.parametrize(("name", "value"), [("WAITING", 10), ("WAITING_BYTES", 700)])
def test_what_waits_for_labels_takes_bounded_room(name: str, value: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(accuracy, name, value)
    of = Accuracy(LABELS)
    for i in range(100):
        of.answered([f"r{i}"], [0, 1], answers(1, seed=i))
    assert 5 <= len(of._waiting) <= 10
    assert of._bytes == sum(map(len, of._waiting.values()))
    assert of.add_labels("r99", ["cat"])["rows"] == 1
    with pytest.raises(BadInput, match="No answers with the id 'r0'"):
        of.add_labels("r0", ["cat"])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_what_waits_for_labels_leaves_no_holes_in_memory():
    """A hundred bytes each, not the kilobytes that JSON is written into."""
    script = """if True:
        from pathlib import Path
        from tests.serve.test_accuracy import LABELS, answers
        from afield.serve.accuracy import WAITING, Accuracy
        pages = lambda: int(Path("/proc/self/statm").read_text().split()[1])
        of, answer, before = Accuracy(LABELS), answers(1), pages()
        for i in range(WAITING):
            of.answered([f"{i:016x}"], [0, 1], answer)
        print((pages() - before) * 4096 / WAITING)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=True, text=True)
    assert 100 < float(done.stdout) < 1000


@pytest.mark.parametrize("strange", ["bird", 0, 1.0, None, ["cat"], {}])
def test_a_label_that_is_no_class_is_refused(strange: Any):
    of = Accuracy(LABELS)
    of.answered(["r"], [0, 1], answers(1))
    with pytest.raises(BadInput, match="none of this model's classes"):
        of.add_labels("r", [strange])


def test_the_state_of_another_model_is_not_taken_over_and_damage_is_told(tmp_path: Path):
    first = Accuracy(LABELS, folder=tmp_path, identity="a")
    tell(first, 4)
    first.close()
    other = Accuracy(LABELS, folder=tmp_path, identity="b")
    assert other.reliability.sum() == 0
    other.close()
    (tmp_path / STATE).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="no state of a service, or damaged"):
        Accuracy(LABELS, folder=tmp_path, identity="b")
