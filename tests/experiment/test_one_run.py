"""Runs and their folders: what they hold, how they resume, what they refuse."""

import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from afield.backbones.resnet50 import ResNet50
from afield.errors import DamagedRun
from afield.experiment import one_run, run_folder
from afield.experiment.config import Config
from afield.experiment.evaluation import evaluate, fit_scores, output_layer, score_both
from afield.experiment.many_runs import run_all, split_ensembles
from afield.experiment.model_folder import open_model, restore_model
from afield.experiment.one_run import run
from afield.experiment.plan import RATE, count_work, plan
from afield.experiment.run_folder import read_log
from afield.experiment.suites import SUITES
from afield.experiment.task_parts import predict_part
from afield.experiment.training import batches
from afield.methods import METHODS
from afield.methods.ensemble import ensemble
from afield.methods.mixture import AS_THEY_ARE, Scales, add_scales, rescale, scales_of
from afield.prediction.distance_scores import FITTED
from afield.prediction.metrics import METRICS, auroc
from afield.prediction.prediction import Prediction
from afield.tasks import TASKS, Task

HASHED = {"config.toml", "metrics.json", "predictions.npz", "model.safetensors", "environment.json"}
pytestmark = pytest.mark.usefixtures("small_toys")
FILES = HASHED | {"log.jsonl", "hashes.json"}


def config(method: str = "sngp", task: str = "two-moons", **changes: object) -> Config:
    return Config.of(task, method, **{"preset": "smoke", "num_random_features": 64, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small_toys: None) -> run_folder.Run:
    return run(config(), tmp_path_factory.mktemp("runs"))


def test_run_folder_holds_what_the_design_says(finished: run_folder.Run):
    assert {f.name for f in finished.folder.iterdir()} - {".lock"} == FILES
    assert finished.folder.parts[-3:] == ("two-moons", "sngp", "0")
    assert finished.parts == ["val", "test", "ood/far", "grid"]
    assert {"torch", "python", "machine", "command", "begun", "ended"} <= finished.environment.keys()
    assert finished.cost["parameters"] == sum(p.numel() for p in open_model(finished.folder).model.parameters())
    assert finished.cost["train_seconds"] > 0 < finished.cost["ms_per_example"]
    assert [line.get("epoch") for line in read_log(finished.folder)] == [1, 2, None]


def test_metrics_are_those_of_the_predictions(finished: run_folder.Run):
    task = TASKS["two-moons"](0)
    test, far = finished.prediction("test"), finished.prediction("ood/far")
    assert finished.metrics["nll/clean"] == pytest.approx(METRICS["nll"](test, task.test.tensors[1]), abs=1e-6)
    assert finished.metrics["auroc/far"] == finished.metrics["auroc/far/max_probability"]
    for score in ("max_probability", "dempster_shafer", "variance"):
        assert finished.metrics[f"auroc/far/{score}"] == pytest.approx(
            auroc(test.score(score), far.score(score)), abs=1e-6
        )
    assert finished.metrics["confidence/far"] == pytest.approx(float(far.confidence.mean()), abs=1e-6)
    assert "auroc/far/relative_mahalanobis" in finished.metrics
    assert "auroc/far/mutual_information" not in finished.metrics
    assert -1 <= finished.metrics["spearman/distance"] <= 1


def test_loaded_model_predicts_what_was_written(finished: run_folder.Run):
    opened = open_model(finished.folder)
    again, written = predict_part(opened.predict, opened.task.test), finished.prediction("test")
    for name in ("logits", "variance", "probs", "p_value"):
        torch.testing.assert_close(getattr(again, name), getattr(written, name), rtol=0, atol=0)
    assert (again.smallest_p_value, again.likelihood) == (written.smallest_p_value, written.likelihood)


def test_hidden_vectors_are_kept_of_rows_over_the_whole_test_set(finished: run_folder.Run):
    opened = open_model(finished.folder)
    rows = finished.array("test/rows")
    hidden = predict_part(opened.predict, opened.task.test).features
    assert hidden is not None
    assert int(rows[-1]) == len(opened.task.test) - 1
    torch.testing.assert_close(finished.array("test/features").float(), hidden[rows], rtol=2e-3, atol=2e-3)


@given(count=st.integers(1, 10_000), most=st.integers(2, 600))
def test_rows_are_evenly_spaced(count: int, most: int):
    rows = run_folder.evenly_spaced_rows(count, most)
    assert len(rows) == min(count, most)
    assert (int(rows[0]), int(rows[-1])) == (0, count - 1)
    gaps = set(rows.diff().tolist())
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_config_survives_its_file(finished: run_folder.Run):
    assert Config.from_dict(finished.config) == config()
    odd = config(bound=None, length_scale=0.3, bounded=("a*", 'b"'), amplitude=2.0, head_learning_rate=None, seed=3)
    assert Config.from_dict(tomllib.loads(run_folder.to_toml(odd.to_dict()))) == odd


def test_finished_run_is_read_not_made_again(finished: run_folder.Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(one_run, "fit", None)
    out = finished.folder.parents[2]
    before = (finished.folder / "metrics.json").stat().st_mtime_ns
    assert run(config(), out).metrics == finished.metrics
    assert (finished.folder / "metrics.json").stat().st_mtime_ns == before


def test_other_settings_in_the_same_folder_are_refused(finished: run_folder.Run):
    with pytest.raises(ValueError, match=r"other settings \(ridge = 1\.0 there, 2\.0 now\).*--fresh"):
        run(config(ridge=2.0), finished.folder.parents[2])


def test_fresh_replaces(tmp_path: Path):
    run(config("dnn"), tmp_path)
    (tmp_path / "two-moons" / "dnn" / "0" / "left-over").mkdir()
    again = run(config("dnn", learning_rate=0.01), tmp_path, fresh=True)
    assert again.config["learning_rate"] == 0.01
    assert {f.name for f in again.folder.iterdir()} - {".lock"} == FILES


def test_a_run_stopped_anywhere_ends_as_if_it_had_not_been(finished: run_folder.Run, tmp_path: Path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config(), tmp_path, on_epoch=stop)
    folder = tmp_path / "two-moons" / "sngp" / "0"
    assert (folder / "checkpoint.pt").is_file()
    assert not run_folder.is_finished(folder)
    with pytest.raises(ValueError, match=r"is not a finished run: it has no metrics\.json"):
        run_folder.read(folder)
    with monkeypatch.context() as patch:
        patch.setattr(one_run, "evaluate", stop)
        with pytest.raises(KeyboardInterrupt):
            run(config(), tmp_path)
    assert (folder / "model.safetensors").is_file()
    monkeypatch.setattr(one_run, "fit", None)  # not needed any more
    assert run(config(), tmp_path).metrics == pytest.approx(finished.metrics, nan_ok=False)
    assert not (folder / "checkpoint.pt").exists()


SCRIPT = """
import sys, time, torch
torch.set_num_threads(1)
from pathlib import Path
from afield.experiment.config import Config
from afield.experiment.one_run import run
def wait_after_two(epoch, loss):
    print(epoch, flush=True)
    if epoch >= 2: time.sleep(60)
config = Config.of("two-moons", "dnn", preset="smoke", epochs=4, num_random_features=64)
run(config, Path(sys.argv[1]), on_epoch=wait_after_two)
"""


@pytest.mark.usefixtures("whole_toys")
def test_kill_9_loses_at_most_one_epoch_and_the_lock_dies_with_its_process(tmp_path: Path):
    other = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert [other.stdout.readline() for _ in range(2)] == ["1\n", "2\n"]
    asked = config("dnn", epochs=4)
    with pytest.raises(run_folder.Busy, match=r"is being written by another process\. Wait for it, stop it, or choose"):
        run(asked, tmp_path)
    other.send_signal(signal.SIGKILL)
    other.wait(timeout=30)
    other.stdout.close()
    epochs: list[int] = []
    resumed = run(asked, tmp_path, on_epoch=lambda epoch, *_: epochs.append(epoch))
    assert epochs == [3, 4]
    whole = run(asked, tmp_path / "whole")
    assert resumed.metrics == whole.metrics


def test_damaged_folder_says_so(tmp_path: Path):
    finished = run(config("dnn"), tmp_path)
    (finished.folder / "metrics.json").write_text("{")
    with pytest.raises(DamagedRun, match=r"metrics\.json is damaged: .*with --fresh, or delete"):
        run_folder.read(finished.folder)
    with pytest.raises(ValueError, match="There is no folder"):
        run_folder.find(tmp_path / "nothing")


def contents(folder: Path) -> object:
    """Everything that a run folder says, as it is used."""
    finished = run_folder.read(folder)
    arrays = {name: finished._read(name).tobytes() for name in finished._names}
    state = {name: t.numpy().tobytes() for name, t in open_weights(finished).items()}
    return finished.config, finished.metrics, finished.cost, finished.environment, arrays, state


def open_weights(finished: run_folder.Run) -> dict[str, torch.Tensor]:
    """As `open_model`, without reading the task's data every time."""
    task = TASK.setdefault("two-moons", TASKS["two-moons"](0, "smoke"))
    asked = Config.from_dict(finished.config)
    return restore_model(asked, task, finished.folder / run_folder.MODEL).state_dict()


TASK: dict[str, Task] = {}


@pytest.mark.parametrize("number", [10, pytest.param(1700, marks=pytest.mark.slow)])
def test_no_flipped_bit_of_a_run_folder_is_ever_silently_wrong(number: int, finished: run_folder.Run, tmp_path: Path):
    folder = tmp_path / "two-moons" / "sngp" / "0"
    shutil.copytree(finished.folder, folder)
    expected, generator = contents(folder), random.Random(number)
    assert set(run_folder.read_hashes(folder)) == HASHED
    for name in sorted(HASHED | {"hashes.json"}):
        file = folder / name
        content = file.read_bytes()
        for _ in range(number):
            place = generator.randrange(8 * len(content))
            flipped = bytearray(content)
            flipped[place // 8] ^= 1 << place % 8
            file.write_bytes(flipped)
            with pytest.raises(DamagedRun, match=rf"({name}|hashes\.json) is damaged: .*--fresh"):
                contents(folder)
        file.write_bytes(content)
    assert contents(folder) == expected


@pytest.mark.parametrize("name", sorted(HASHED | {"hashes.json"}))
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[1]", b"{}"])
def test_a_damaged_file_is_named_also_where_there_are_no_hashes(
    name: str, content: bytes, finished: run_folder.Run, tmp_path: Path
):
    for hashed in (True, False):
        folder = tmp_path / str(hashed) / "two-moons" / "sngp" / "0"
        shutil.copytree(finished.folder, folder)
        if not hashed:
            (folder / "hashes.json").unlink()
            contents(folder)  # a run from before there were hashes still opens
        (folder / name).write_bytes(content)
        if (name, content, hashed) in {("environment.json", b"{}", False), ("hashes.json", b"{}", False)}:
            continue
        with pytest.raises(DamagedRun, match=rf"{name} is damaged: .*--fresh"):
            contents(folder)


@pytest.mark.parametrize("name", ["config.toml", "checkpoint.pt", "model.safetensors"])
def test_a_damaged_file_of_a_stopped_run_is_named_and_fresh_is_the_way_out(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(one_run, "evaluate", stop)
        with pytest.raises(KeyboardInterrupt):
            run(config("dnn"), tmp_path, on_epoch=stop if name == "checkpoint.pt" else lambda *_: None)
    file = tmp_path / "two-moons" / "dnn" / "0" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(DamagedRun, match=rf"{name} is damaged.*--fresh"):
        run(config("dnn"), tmp_path)
    assert run_folder.is_finished(run(config("dnn"), tmp_path, fresh=True).folder)


def test_a_hostile_config_is_no_traceback(tmp_path: Path):
    for text, message in (
        ("task =", "Invalid value"),
        ('taks = "two-moons"', "task"),
        ('task = "two-moons"\nepochs = "many"', "epochs expects a whole number, got 'many'"),
        ('task = "two-moons"\nepochs = 1.5', "epochs expects a whole number, got 1.5"),
        ('task = "two-moons"\nridge = nan', "ridge must be positive and finite, got nan"),
        ('task = "two-moons"\noptimizer = "sdg"', "optimizer expects one of adam, adamw, sgd, got 'sdg'"),
        ('task = "two-moons"\nfrozen = [1]', "frozen expects a list of names"),
        ("task = 5", "5"),
    ):
        (tmp_path / "config.toml").write_text(text)
        with pytest.raises(ValueError, match=r"config\.toml is damaged, or no config of a run: .*--fresh") as caught:
            Config.from_file(tmp_path / "config.toml")
        assert message in str(caught.value)


def test_temporary_files_of_killed_runs_are_swept(tmp_path: Path):
    folder = tmp_path / config("dnn").folder
    folder.mkdir(parents=True)
    old, young = (folder / f".checkpoint.pt.{digit * 16}.tmp" for digit in "01")
    for file in (old, young):
        file.write_bytes(b"half")
    os.utime(old, (1e9, 1e9))
    run(config("dnn"), tmp_path)
    assert not old.exists()
    assert young.exists()


def test_unknown_names_are_answered_with_help():
    with pytest.raises(ValueError, match=r"Unknown method 'sgnp'\. Did you mean 'sngp'"):
        Config.of("two-moons", "sgnp")
    with pytest.raises(ValueError, match="Unknown task"):
        Config.of("three-moons")
    with pytest.raises(ValueError, match="Unknown settings: nesterov"):
        Config.of("two-moons", nesterov=3)


def test_log_cut_short_by_a_kill_is_read(tmp_path: Path):
    (tmp_path / "log.jsonl").write_text('{"epoch": 1, "seconds": 2}\n{"epoch": 2, "sec')
    assert read_log(tmp_path) == [{"epoch": 1, "seconds": 2}]


def test_regression_run_has_no_classes(tmp_path: Path):
    finished = run(config("sngp", "toy-regression"), tmp_path)
    assert "rmse/clean" in finished.metrics
    assert "accuracy/clean" not in finished.metrics
    assert finished.metrics["auroc/between"] == finished.metrics["auroc/between/variance"]
    grid = finished.prediction("grid")
    assert grid.likelihood == "gaussian"
    assert grid.std.shape == (1201, 1)


# Ensembles


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(METHODS, "pair", ensemble(METHODS["sngp"], 2))
    return "pair"


def test_ensemble_is_assembled_from_its_members_folders(pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = config(pair, seed=1)
    assert [(m.method, m.seed) for m in asked.members] == [("sngp", 2), ("sngp", 3)]
    for member in asked.members:
        run(member, tmp_path)
    monkeypatch.setattr(one_run, "fit", None)  # never trained again
    finished = run(asked, tmp_path)
    members = [open_model(tmp_path / m.folder) for m in asked.members]
    x = members[0].task.test.tensors[0]
    scales = Scales(*finished.array("ensemble_scales").tolist())
    expected = torch.stack([rescale(member.predict(x), scales).probs for member in members]).mean(0)
    torch.testing.assert_close(finished.prediction("test").probs, expected)
    together = torch.nn.ModuleList([member.model for member in members])
    METHODS[pair].calibrate(add_scales(together, "ensemble"), batches(members[0].task.val))
    assert scales_of(together, "ensemble") == pytest.approx(scales, rel=1e-5)  # as if they had been trained together
    assert scales != AS_THEY_ARE
    assert "auroc/far/mutual_information" in finished.metrics
    assert finished.cost["parameters"] == 2 * run_folder.read(tmp_path / asked.members[0].folder).cost["parameters"]
    with pytest.raises(ValueError, match="has no model of its own: load its members, two-moons/sngp/2, two-moons"):
        open_model(finished.folder)


@pytest.mark.slow
def test_ensemble_of_another_size_is_assembled_again(tmp_path: Path):
    asked = config("sngp-ensemble", "toy-regression", members=2)
    run(asked, tmp_path)
    stamp = (tmp_path / asked.members[0].folder / "metrics.json").stat().st_mtime_ns
    larger = config("sngp-ensemble", "toy-regression", members=3)
    assert larger.members[:2] == asked.members
    cost = run(larger, tmp_path).cost
    assert (tmp_path / asked.members[0].folder / "metrics.json").stat().st_mtime_ns == stamp
    assert cost["parameters"] == 3 * run_folder.read(tmp_path / asked.members[0].folder).cost["parameters"]
    with pytest.raises(ValueError, match="holds a run with other settings"):
        run(config("sngp-ensemble", "toy-regression", members=3, ridge=0.5), tmp_path)


def test_weights_of_the_same_training_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = config("sngp-dropout", "toy-regression", seed=1)
    own = run(asked, tmp_path / "own")
    run(config("sngp", "toy-regression", seed=1), tmp_path / "copied")
    assert config("sngp-dropout", dropout=0.3).same_training is None  # sngp has no such dropout in training
    assert config("sngp").same_training is None
    monkeypatch.setattr(one_run, "fit", None)  # not trained again
    copied = run(asked, tmp_path / "copied")
    assert copied.metrics == own.metrics
    assert copied.cost["train_seconds"] > 0
    state = open_model(copied.folder).model.state_dict()
    for name, tensor in open_model(own.folder).model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_a_temperature_takes_the_weights_of_the_plain_network_and_is_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = config("dnn-temperature", dropout=0.3)  # of which the plain network knows nothing
    own = run(asked, tmp_path / "own")
    plain = run(config("dnn", dropout=0.3), tmp_path / "copied")
    monkeypatch.setattr(one_run, "fit", None)  # not trained again
    copied = run(asked, tmp_path / "copied")
    assert copied.metrics == own.metrics
    assert copied.metrics["accuracy/clean"] == plain.metrics["accuracy/clean"]
    assert copied.metrics["nll/val"] < plain.metrics["nll/val"]
    scale = float(copied.array("logit_scale"))
    assert scale == scales_of(open_model(copied.folder).model, "temperature").logit_scale != 1
    torch.testing.assert_close(copied.prediction("test").logits, scale * plain.prediction("test").logits)


def test_dropout_of_the_settings_replaces_the_backbones_own():
    task = TASKS["two-moons"](0, "smoke")
    model = METHODS["mc-dropout"].build(task.backbone, 2, dataclasses.replace(task.settings, dropout=0.25))
    assert {m.p for m in model.modules() if hasattr(m, "filter_wise")} == {0.25}


def test_members_are_split_from_ensembles_and_each_comes_once(pair: str):
    singles, ensembles = split_ensembles([config(pair), config(seed=1), config(pair), config("dnn")])
    assert [(c.method, c.seed) for c in singles] == [("sngp", 0), ("sngp", 1), ("dnn", 0)]
    assert ensembles == [config(pair)]


# Many runs


@pytest.mark.slow
@pytest.mark.usefixtures("whole_toys")
def test_two_processes_make_what_one_makes(tmp_path: Path):
    configs, events = [config("dnn", seed=s) for s in (0, 1)], []
    done = run_all(configs, tmp_path, jobs=2, on_progress=events.append)
    assert [r.seed for r in done] == [0, 1]
    assert sorted((c.seed, epoch) for c, epoch, _, _ in events) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    alone = run(configs[0], tmp_path / "alone")
    for name, value in alone.metrics.items():
        assert done[0].metrics[name] == pytest.approx(value, abs=1e-5), name  # threads may add in another order
    again: list[object] = []
    run_all(configs, tmp_path, jobs=2, on_progress=again.append)
    assert again == []


def test_a_run_alone_has_all_threads(tmp_path: Path):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        (alone,) = run_all([config("dnn")], tmp_path, jobs=8)
    finally:
        torch.set_num_threads(before)
    assert alone.environment["threads"] == 3


def test_one_failing_run_does_not_stop_the_others(tmp_path: Path):
    good, bad = config("dnn", seed=1), config("dnn", likelihood="poisson")
    with pytest.raises(ValueError, match="Methods expect categorical or gaussian targets, got poisson"):
        run_all([bad, good], tmp_path, jobs=1)
    assert run_folder.is_finished(tmp_path / good.folder)


MANY = """
import sys, torch
from pathlib import Path
from afield.experiment.config import Config
from afield.experiment.many_runs import run_all
if __name__ == "__main__":
    configs = [Config.of("two-moons", "dnn", seed=seed, preset="smoke", epochs=300) for seed in (0, 1)]
    run_all(configs, Path(sys.argv[1]), jobs=2)
"""


@pytest.mark.slow
def test_workers_die_with_a_killed_parent_and_leave_their_folders(tmp_path: Path):
    (tmp_path / "many.py").write_text(MANY)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "many.py"), str(tmp_path)], start_new_session=True)
    folders = [tmp_path / "two-moons" / "dnn" / str(seed) for seed in (0, 1)]
    _wait(lambda: all((folder / "checkpoint.pt").exists() for folder in folders))
    parent.send_signal(signal.SIGKILL)
    parent.wait(timeout=30)

    def free() -> bool:
        try:
            for folder in folders:
                with run_folder.locked(folder):
                    pass
        except run_folder.Busy:
            return False
        return True

    _wait(free)
    assert not any(map(run_folder.is_finished, folders))
    _wait(lambda: not _any_alive(parent.pid))


def _any_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _wait(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_run_all_refuses_no_processes(tmp_path: Path):
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        run_all([], tmp_path, jobs=0)


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("preset", ["smoke", "small", "paper"])
def test_suites_name_runs_that_exist(name: str, preset: str):
    suite = SUITES[name]
    configs = suite.configs(preset)
    assert len(set(configs)) == len(configs)
    assert {c.preset for c in configs} == {preset}
    assert {(c.task, c.method) for c in configs} == {(t, m) for t, methods in suite.methods.items() for m in methods}
    for config in configs:
        if suite.pooled and config.members:
            assert set(config.members) <= set(configs)  # trained for its own row, and for the ensemble alone never
            assert len(config.members) == suite.seeds[preset]
    only = suite.configs(preset, methods=["dnn"], seeds=2)
    assert {c.method for c in only} == {"dnn"}
    assert len(only) == 2 * len(suite.methods)
    assert {c.settings.precision for c in only} == {"float32"}
    lower = suite.configs(preset, precision="bfloat16")
    assert {c.settings.precision for c in lower} == {"bfloat16"}
    assert [(c.task, c.method, c.seed) for c in lower] == [(c.task, c.method, c.seed) for c in configs]
    with pytest.raises(ValueError, match="at least one seed"):
        suite.configs(preset, seeds=0)


# Plans


def test_a_plan_counts_the_work_of_resnet50_on_imagenet():
    """4.1 billion multiplications an image, as published for this form of the network, and 23.5 million weights."""
    suite = SUITES["imagenet"]
    rows = {row.method: row for row in plan(suite.configs("paper"))}
    assert set(rows) == {method for methods in suite.methods.values() for method in methods}
    sngp, images = rows["sngp"], 1_268_355
    assert (sngp.trainings, sngp.epochs, sngp.examples, sngp.steps) == (10, 90, images, 90 * math.ceil(images / 256))
    work = count_work(ResNet50(), torch.zeros(1, 3, 224, 224))
    assert work.operations == pytest.approx(2 * 4.09e9, rel=0.01)
    assert work.parameters == 23_508_032
    hours = 10 * 3 * work.operations * images * 90 / RATE / 3600
    assert hours < sngp.gpu_hours < 1.02 * hours
    assert 20 < sngp.memory < 40  # GB, for batches of 256
    for method in ("dnn-temperature", "deep-ensemble", "sngp-ensemble"):
        assert rows[method].trainings == rows[method].gpu_hours == 0


@pytest.mark.slow
def test_a_plan_needs_no_weights_of_bert(monkeypatch: pytest.MonkeyPatch):
    """85 million weights multiply each of 32 tokens."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    row, frozen = plan([Config.of("clinc", method, preset="paper") for method in ("sngp", "frozen-gp")])
    assert (row.examples, row.steps, frozen.steps) == (15_000, 40 * math.ceil(15_000 / 256), 0)
    for each, seen in ((row, 3 * 15_000 * 40 + 15_000 + 8500), (frozen, 15_000 + 8500)):
        assert each.gpu_hours == pytest.approx(2 * 85e6 * 32 * seen / RATE / 3600, rel=0.05)


def test_a_plan_takes_what_it_does_not_know_from_the_data():
    (row,) = plan([Config.of("two-moons", "dnn", preset="smoke", batch_size=300)])
    assert (row.trainings, row.examples, row.steps) == (1, 1000, 2 * 4)
    assert 0 < row.gpu_hours < 1e-3


# Evaluation


def test_shifted_sets_of_one_name_are_averaged(generator: torch.Generator):
    task = TASKS["two-moons"](0)
    shifted = {"corrupted/fog-1": task.test, "corrupted/fog-2": task.val, "new": task.val}
    task = dataclasses.replace(task, shifted=shifted, ood={}, grid=None)

    def guess(data: torch.utils.data.TensorDataset) -> Prediction:
        logits = torch.randn(len(data), 2, generator=generator)
        return Prediction(logits, probs=logits.softmax(1))

    predictions = {"val": guess(task.val), "test": guess(task.test)}
    predictions |= {f"shifted/{name}": guess(data) for name, data in shifted.items()}
    metrics = evaluate(task, predictions)
    each = [METRICS["nll"](predictions[f"shifted/{n}"], shifted[n].tensors[1]) for n in shifted]
    assert metrics["nll/corrupted"] == pytest.approx((each[0] + each[1]) / 2)
    assert metrics["nll/new"] == pytest.approx(each[2])


def test_a_task_with_an_output_for_ood_examples_counts_them_in_the_combined_nll(generator: torch.Generator):
    task = TASKS["two-moons"](0)
    task = dataclasses.replace(task, num_outputs=3, ood_label=2, grid=None)
    sizes = {"val": len(task.val), "test": len(task.test), "ood/far": len(task.ood["far"])}
    logits = {part: torch.randn(size, 3, generator=generator) for part, size in sizes.items()}
    metrics = evaluate(task, {part: Prediction(z, probs=z.softmax(1)) for part, z in logits.items()})
    loss_of_ood = -logits["ood/far"].log_softmax(1)[:, 2].mean()
    share = sizes["test"] / (sizes["test"] + sizes["ood/far"])
    assert metrics["nll/combined"] == pytest.approx(share * metrics["nll/clean"] + (1 - share) * float(loss_of_ood))


def test_scores_that_lack_their_fields_are_left_out(generator: torch.Generator):
    logits = torch.randn(20, 3, generator=generator)
    found = score_both(Prediction(logits, probs=logits.softmax(1)), Prediction(logits, probs=logits.softmax(1)), {})
    assert set(found) == {"max_probability", "max_logit", "entropy", "gen", "energy", "dempster_shafer"}


def test_fitted_scores_need_hidden_vectors():
    x, y = torch.randn(10, 2), torch.arange(10) % 2
    with_features = fit_scores(lambda x: Prediction(x, features=x), [(x, y)], 2)
    of_features = {"mahalanobis", "relative_mahalanobis", "unit_mahalanobis", "unit_relative_mahalanobis", "knn"}
    assert set(with_features) == {*of_features, "nnguide", "she"}
    assert set(fit_scores(lambda x: Prediction(x, features=x), [(x, y)], 2, output=torch.nn.Linear(2, 2))) == set(
        FITTED
    )
    assert fit_scores(lambda x: Prediction(x), [(x, y)], 2) == {}


@pytest.mark.parametrize(
    ("method", "dense"),
    [("dnn", True), ("mc-dropout", True), ("frozen-attach", True), ("sngp", False), ("isomax-plus", False)],
)
def test_the_output_layer_is_the_dense_layer_over_the_hidden_vectors(method: str, dense: bool):
    task, way = TASKS["two-moons"](0), METHODS[method]
    model = way.build(task.backbone, task.num_outputs)
    layer = output_layer(model)
    assert (layer is not None) == dense
    if layer is not None and way.loss is not None:  # else there is nothing to predict with before it is fitted
        prediction = (way.hidden or way.predict)(model, task.test.tensors[0])
        assert torch.equal(layer(prediction.features), prediction.logits)


def test_predictions_file_needs_no_pickle(finished: run_folder.Run):
    with np.load(finished.folder / "predictions.npz", allow_pickle=False) as arrays:
        assert all(arrays[name].dtype != object for name in arrays.files)
    assert json.loads((finished.folder / "metrics.json").read_text())["metrics"] == finished.metrics


@pytest.mark.parametrize("task", TASKS)
def test_the_members_of_an_ensemble_are_runs_of_the_single_model(task: str):
    """With the settings that the single model has by itself: else its folder would be refused."""
    for name, method in METHODS.items():
        if method.members is None:
            continue
        ensemble = Config.of(task, name, seed=1)
        for member in ensemble.members:
            assert member == Config.of(task, member.method, seed=member.seed), f"{name} on {task}"
