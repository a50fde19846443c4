"""`afield demo --serve`: the stream drifts, and the alarm rings after it began to."""

from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("uvicorn")
from afield.cli.demo_stream import USUAL, play, stream
from afield.experiment.config import Config
from afield.experiment.many_runs import run_all
from afield.serve.server import sources_of
from afield.tasks import TASKS
from tests.serve.conftest import running


def test_the_stream_is_usual_at_first():
    task = TASKS["two-moons"](0)
    batches = list(stream(task))
    known = {tuple(row) for row in task.test.tensors[0].tolist()}
    assert all(tuple(row) in known for batch in batches[: USUAL // 4 + 1] for row in batch.tolist())
    assert not any(tuple(row) in known for row in batches[-1].tolist())


@pytest.mark.slow
def test_the_alarm_rings_after_the_stream_has_begun_to_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (trained,) = run_all([Config.of("two-moons", "sngp", epochs=5)], tmp_path, jobs=1)
    task = TASKS["two-moons"](0)
    with running(sources_of([f"moons={trained.folder}"])) as client:
        alarm = play(f"http://127.0.0.1:{client.port}/", "moons", task, console=Console(), pause=0)
    assert alarm is not None
    assert alarm["row"] > USUAL
    assert "The alarm rang at row" in capsys.readouterr().out
