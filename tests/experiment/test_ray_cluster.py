"""Runs and scoring on a real Ray cluster of two workers on this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from afield.cli.main import main
from afield.deploy.read_files import arrow
from afield.experiment import ray_cluster, run_folder
from afield.experiment.config import Config
from afield.experiment.launch import free_port
from afield.experiment.many_runs import run_all, run_on_node
from afield.experiment.one_run import run
from afield.experiment.run_folder import read_log

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow  # a cluster takes its time to start


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of the cluster. The session stays open, so that not every test starts one."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def config(seed: int = 0, **changes: object) -> Config:
    return Config.of("two-moons", "dnn", preset="smoke", seed=seed, **changes)


def same(one: run_folder.Run, other: run_folder.Run) -> bool:
    """Bit for bit: weights, predictions and metrics."""
    weights = [(r.folder / run_folder.MODEL).read_bytes() for r in (one, other)]
    predictions = [one.prediction("test").probs, other.prediction("test").probs]
    return weights[0] == weights[1] and torch.equal(*predictions) and one.metrics == other.metrics


def test_a_cluster_makes_what_this_process_makes(address: str, tmp_path: Path):
    configs, events, done = [config(0), config(1)], [], []
    far = run_all(configs, tmp_path / "far", cluster=address, on_progress=events.append, on_run=done.append)
    near = run_all(configs, tmp_path / "near")
    assert all(same(one, other) for one, other in zip(far, near, strict=True))
    assert sorted((c.seed, epoch, epochs) for c, epoch, epochs, _ in events) == [
        (0, 1, 2),
        (0, 2, 2),
        (1, 1, 2),
        (1, 2, 2),
    ]
    assert sorted(r.seed for r in done) == [0, 1]
    assert [(r.environment["command"], r.environment["threads"]) for r in far] == [
        (r.environment["command"], 1) for r in near
    ]
    assert {file.name for file in (tmp_path / "far").iterdir()} == {"two-moons"}  # the marker file is gone
    stamps = [(r.folder / run_folder.METRICS).stat().st_mtime_ns for r in far]
    run_all(configs, tmp_path / "far", cluster=address)
    assert [(r.folder / run_folder.METRICS).stat().st_mtime_ns for r in far] == stamps


def test_scoring_on_a_cluster_is_streaming(address: str, tmp_path: Path):
    finished = run(Config.of("two-moons", "sngp", preset="smoke"), tmp_path / "runs")
    x = np.random.default_rng(0).normal(size=(700, 2)).astype(np.float32)
    (tmp_path / "in" / "more").mkdir(parents=True)
    np.save(tmp_path / "in" / "a.npy", x[:300])
    np.save(tmp_path / "in" / "more" / "b.npy", x[300:])
    command = ["score", str(finished.folder), str(tmp_path / "in"), "--batch-size", "128"]
    main([*command, "--out", str(tmp_path / "near")])
    main([*command, "--out", str(tmp_path / "far"), "--cluster", address])
    _, parquet = arrow()
    near, far = (parquet.read_table(tmp_path / name) for name in ("near", "far"))
    assert far.num_rows == 700
    assert far.equals(near)
    np.save(tmp_path / "in" / "a.npy", x[:, :1])
    with pytest.raises(SystemExit, match=r"a\.npy has rows of shape \(1,\), the model expects \(2,\)"):
        main([*command, "--out", str(tmp_path / "far"), "--cluster", address])


def unshared(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a node without the driver's file system sees: no mark."""
    monkeypatch.setattr(Path, "touch", lambda self: None)


def test_files_come_home_where_folders_are_not_shared(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(item: str, out: Path, on_progress: Callable[[Any], None]) -> list[Path]:
        (out / "deep").mkdir()
        (out / "deep" / "a").write_text(item)
        (out / "b").write_bytes(b"\0\xff")
        on_progress(out)
        return [out / "deep" / "a", out / "b"]

    unshared(monkeypatch)
    events: list[Path] = []
    tasks = [("one", tmp_path / "one"), ("two", tmp_path / "two")]
    assert ray_cluster.run_on_cluster(address, make, tasks, on_progress=events.append) == []
    for item, folder in tasks:
        assert (folder / "deep" / "a").read_text() == item
        assert (folder / "b").read_bytes() == b"\0\xff"
        assert {f.name for f in folder.iterdir()} == {"deep", "b"}
    assert len(set(events)) == 2
    assert not any(out.exists() or tmp_path in out.parents for out in events)


SHARED = [pytest.param(True, id="shared"), pytest.param(False, id="not shared", marks=pytest.mark.slow)]


@pytest.mark.parametrize("shared", SHARED)
def test_a_killed_workers_run_goes_on(address: str, shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    killed, asked = tmp_path / "killed", config(epochs=4)
    if not shared:
        unshared(monkeypatch)

    def fatal(asked: Config, out: Path, on_progress: Callable[[Any], None]) -> list[Path]:
        def kill_once(event: Any) -> None:
            if event.epoch == 2 and not killed.exists():
                killed.write_text("once")
                os.kill(os.getpid(), signal.SIGKILL)
            on_progress(event.epoch)

        on_progress(out)
        return run_on_node(asked, out, kill_once)

    events: list[Any] = []
    errors = ray_cluster.run_on_cluster(address, fatal, [(asked, tmp_path / "far")], on_progress=events.append)
    assert errors == []
    assert killed.exists()
    (there,) = {event for event in events if isinstance(event, Path)}
    assert (there == tmp_path / "far") == shared
    assert shared or not there.exists()
    assert events[-2:] == [3, 4]  # from the checkpoint
    assert [line["epoch"] for line in read_log(tmp_path / "far" / asked.folder) if "epoch" in line] == [1, 2, 3, 4]
    assert same(run_folder.read(tmp_path / "far" / asked.folder), run(asked, tmp_path / "near"))


def test_a_task_finds_the_drivers_data_folder_threads_and_command(address: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("AFIELD_DATA", os.path.relpath(tmp_path))
    (tmp_path / "home").mkdir()

    def look(item: int, out: Path, on_progress: Callable[[Any], None]) -> list[Path]:
        on_progress((os.environ["AFIELD_DATA"], torch.get_num_threads(), sys.argv, os.getcwd()))
        return []

    monkeypatch.setattr(sys, "argv", ["afield", "sweep", "two-moons"])
    events: list[Any] = []
    home = os.getcwd()
    assert ray_cluster.run_on_cluster(address, look, [(0, tmp_path)], cpus=2, on_progress=events.append) == []
    assert events == [(str(tmp_path), 2, sys.argv, home)]


def test_errors_are_those_of_local_processes(address: str, tmp_path: Path):
    good, bad = config(1), config(likelihood="poisson")
    with pytest.raises(ValueError, match="Methods expect categorical or gaussian targets, got poisson") as caught:
        run_all([bad, good], tmp_path, cluster=address)
    assert "run_on_node" in str(caught.value.__cause__)  # the traceback from the node
    assert run_folder.is_finished(tmp_path / good.folder)
    (tmp_path / config(2).folder).mkdir()
    (tmp_path / config(2).folder / run_folder.CONFIG).write_text(run_folder.to_toml(config(2, ridge=2.0).to_dict()))
    with pytest.raises(ValueError, match=r"other settings \(ridge = 2\.0 there, 1\.0 now\)"):
        run_all([config(2)], tmp_path, cluster=address)
    with pytest.raises(ValueError, match="between 1 core and all 2 of the cluster's largest node, got 3"):
        run_all([config(2)], tmp_path, cluster=address, cpus=3, fresh=True)


def test_an_interrupt_ends_the_workers(address: str, tmp_path: Path):
    def stop(event: Any) -> None:
        raise KeyboardInterrupt

    configs = [config(seed, epochs=5000) for seed in (0, 1)]
    with pytest.raises(KeyboardInterrupt):
        run_all(configs, tmp_path, cluster=address, on_progress=stop)
    _wait(lambda: all(_free(tmp_path / c.folder) for c in configs))
    assert not any(run_folder.is_finished(tmp_path / c.folder) for c in configs)
    assert {file.name for file in tmp_path.iterdir()} == {"two-moons"}


@pytest.mark.slow
def test_a_worker_that_always_dies_is_given_up(address: str, tmp_path: Path):
    def fatal(item: int, out: Path, on_progress: Callable[[Any], None]) -> list[Path]:
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    (error,) = ray_cluster.run_on_cluster(address, fatal, [(0, tmp_path)])
    assert isinstance(error, ray_cluster.LostWorker)
    assert "workers died 4 times (killed, or out of memory)" in str(error)


@pytest.mark.slow
def test_commands_take_a_cluster(address: str, tmp_path: Path):
    grid = ["--preset", "smoke", "--epochs", "1", "--grid", "bound=0.5,2", "--amplitudes", "1.0"]
    for name, more in (("near", ["--jobs", "2"]), ("far", ["--cluster", address])):
        main(["sweep", "two-moons", *grid, "--out", str(tmp_path / name), *more])
    choices = [(tmp_path / name / "two-moons-sngp-smoke-0" / "choice.toml").read_text() for name in ("near", "far")]
    assert choices[0] == choices[1]
    arguments = ["reproduce", "toy", "--preset", "smoke", "--methods", "dnn", "--out", str(tmp_path / "toy")]
    main([*arguments, "--cluster", address])
    assert len(run_folder.find(tmp_path / "toy")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["auto", "host:port"])
def test_ctrl_c_at_the_shell(where: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A driver of its own."""
    monkeypatch.setenv("RAY_ADDRESS", address)  # which auto looks for
    words = ["sweep", "two-moons", "--epochs", "5000", "--grid", "bound=0.5,2", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "afield.cli.main", *words, "--cluster", "auto" if where == "auto" else address]
    notice = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # which a shell may have had ignored
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **notice)
    try:
        _wait(lambda: len(list(tmp_path.rglob("checkpoint.pt"))) == 2, 400)
        driver.send_signal(signal.SIGINT)
        _, errors = driver.communicate(timeout=100)
    finally:
        driver.kill()
    assert errors.splitlines()[-1] == "afield: stopped. The same command goes on after the last finished epoch."
    assert driver.returncode == 1
    _wait(lambda: all(_free(file.parent) for file in tmp_path.rglob("checkpoint.pt")))


def test_a_ray_client_makes_what_local_processes_make(address: str, tmp_path: Path):
    """ray://host:port, through a client server of the cluster; the driver is a process of its own."""
    port = free_port()
    served = ["--address", address, "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen([sys.executable, "-m", "ray.util.client.server", *served], stderr=subprocess.DEVNULL)
    words = ["sweep", "two-moons", "--preset", "smoke", "--epochs", "1", "--grid", "bound=0.5,2", "--amplitudes", "1.0"]
    try:
        _wait(lambda: _listens(port), 60)
        for name, more in (("near", []), ("far", ["--cluster", f"ray://127.0.0.1:{port}"])):
            command = [sys.executable, "-m", "afield.cli.main", *words, "--out", str(tmp_path / name), *more]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
    finally:
        server.terminate()
        server.wait()
    choices = [(tmp_path / name / "two-moons-sngp-smoke-0" / "choice.toml").read_text() for name in ("near", "far")]
    assert choices[0] == choices[1]


def _listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


# Without a cluster


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("somewhere", "address is auto, local, host:port or ray://host:port, got 'somewhere'"),
        ("127.0.0.1:9", r"No Ray cluster at '127\.0\.0\.1:9': .*refused.*`ray start --head` starts one"),
        ("ray://127.0.0.1:9", r"No Ray cluster at 'ray://127\.0\.0\.1:9': .*refused"),
    ],
)
def test_no_cluster_is_said_at_once(where: str, message: str, closed: None, tmp_path: Path):
    begin = time.monotonic()
    with pytest.raises(SystemExit, match=message):
        main(["sweep", "two-moons", "--preset", "smoke", "--cluster", where, "--out", str(tmp_path)])
    assert time.monotonic() - begin < 5


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "afield\[ray\]"'):
        run_all([config()], tmp_path, cluster="auto")


def test_nodes_need_the_same_version(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"has afield .*, this machine 0\.0\.0: install the same version"):
        ray_cluster.NodeSetup("mark", 1, version="0.0.0").apply()


def _free(folder: Path) -> bool:
    try:
        with run_folder.locked(folder):
            return True
    except run_folder.Busy:
        return False


def _wait(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
