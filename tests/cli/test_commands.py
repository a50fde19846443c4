"""The command line, as a user meets it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import afield
from afield.cli.main import COMMANDS, main
from afield.cli.settings import meanings, page
from afield.cli.sweep import Trial, choose, combinations
from afield.experiment import run_folder
from afield.experiment.config import Config
from afield.experiment.suites import SUITES, Suite
from afield.settings import Settings
from afield.tasks import TASKS
from afield.version import __version__

ROOT = Path(__file__).parents[2]
TINY = ("--preset", "smoke", "--epochs", "1")
pytestmark = pytest.mark.usefixtures("small_toys")


def output_of(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


@pytest.mark.usefixtures("coarse_pictures")
def test_demo_prints_a_table_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["demo", "--out", str(tmp_path / "out"), "--epochs", "1", "--jobs", "1"])
    text = output_of(capsys)
    for name in ("dnn", "dnn-sn", "dnn-gp", "sngp", "AUROC", "NLL"):
        assert name in text
    page = tmp_path / "out" / "report" / "index.html"
    assert str(page) in text.replace("\n", "")
    assert "two-moons" in page.read_text(encoding="utf-8")


def test_version(capsys: pytest.CaptureFixture[str]):
    main(["--version"])
    assert output_of(capsys) == f"afield {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], [], *([name, "--help"] for name in COMMANDS)])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert (arguments[0] if arguments and arguments[0] in COMMANDS else "demo") in output_of(capsys)


def test_help_of_a_task_shows_its_own_settings(capsys: pytest.CaptureFixture[str]):
    for arguments, expected in (
        (["train", "toy-regression", "--help"], "(default: 200)"),
        (["train", "toy-regression", "--preset", "smoke", "--help"], "(default: 2)"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        text = output_of(capsys)
        assert expected in text
        assert "two-moons" in text
        assert "deep-ensemble" in text


def test_train_then_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["train", "two-moons", *TINY, "--num-random-features", "64", "--out", str(tmp_path)]
    arguments += ["--method", "sngp", "--ridge", "0.5"]
    main(arguments)
    text = output_of(capsys)
    assert "accuracy/clean" in text
    assert "parameters" in text
    folder = tmp_path / "two-moons" / "sngp" / "0"
    run = run_folder.read(folder)
    assert (run.config["ridge"], run.config["epochs"]) == (0.5, 1)
    main([*arguments[:-1], "0.5"])  # is there already
    assert f"{run.metrics['accuracy/clean']:.4f}" in output_of(capsys)

    np.savez(tmp_path / "mine.npz", x=np.full((20, 2), 50.0, dtype=np.float32))
    main(["evaluate", str(folder), "--ood", str(tmp_path / "mine.npz")])
    text = output_of(capsys)
    assert "auroc/mine" in text
    assert f"{run.metrics['nll/clean']:.4f}" in text
    assert "fpr95/far/entropy" not in text
    main(["evaluate", str(folder), "--all"])
    assert "fpr95/far/entropy" in output_of(capsys)


def test_config_file_starts_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    asked = Config.of("two-ovals", "dnn", preset="smoke", epochs=1, bound=None, seed=4)
    (tmp_path / "mine.toml").write_text(run_folder.to_toml(asked.to_dict()))
    main(["train", "--config", str(tmp_path / "mine.toml"), "--out", str(tmp_path / "a")])
    main(["train", f"--config={tmp_path / 'mine.toml'}", "--out", str(tmp_path / "b"), "--batch-size", "64"])
    assert Config.from_dict(run_folder.read(tmp_path / "a" / asked.folder).config) == asked
    changed = run_folder.read(tmp_path / "b" / asked.folder).config
    assert (changed["batch_size"], changed["seed"]) == (64, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--task", "two-mons"], "Unknown task 'two-mons'. Did you mean 'two-moons'"),
        (["demo", "--task", "digits"], "The demo draws tasks in the plane, such as two-moons, not digits"),
        (["train", "two-mons"], "Unknown task 'two-mons'"),
        (["train", "two-moons", "--method", "sgnp"], "Unknown method 'sgnp'"),
        (["train", "two-moons", "--preset", "huge"], "Unknown preset 'huge': expected one of smoke, small, paper"),
        (["evaluate", "nowhere"], "nowhere is not a finished run"),
        (["reproduce", "tyo"], "Unknown suite 'tyo'. Did you mean 'toy'"),
        (["reproduce", "toy", "--preset", "huge"], "Unknown preset 'huge'"),
        (["report", "nowhere"], "nowhere"),
        (["sweep", "two-moons", "--grid", "bond=1,2"], "grid expects NAME=VALUE,VALUE .* got 'bond=1,2'"),
        (["train", "two-moons", "--epochs", "-3"], "epochs must be at least 1, got -3"),
        (["train", "two-moons", "--epochs", "0"], "epochs must be at least 1, got 0"),
        (["train", "two-moons", "--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["train", "two-moons", "--learning-rate", "nan"], "learning_rate must be positive and finite, got nan"),
        (["train", "two-moons", "--warmup", "2"], "warmup must lie between 0 and 1, got 2"),
        (["train", "two-moons", "--weight-decay", "-1"], "weight_decay must not be negative, got -1"),
        (["demo", "--epochs", "-3"], "epochs must be at least 1, got -3"),
        (["sweep", "two-moons", "--grid", "epochs=-3"], "epochs must be at least 1, got -3"),
        (["sweep", "two-moons", "--grid", "epochs=1,many"], "epochs expects a whole number, got 'many'"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=f"^afield: .*{message}"):
        main(arguments)


NETWORKS = {
    "missing": None,
    "broken": "def make(:",
    "failing": "import torch\n1 / 0",
    "leaving": "import sys\nsys.exit(3)",
    "raising": "def make():\n    return {}['layer']",
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("command", ["score", "export"])
def test_a_network_that_cannot_be_made_is_one_clear_line(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    afield.save(afield.attach(torch.nn.Linear(2, 3), num_random_features=8), "model")
    np.save("x.npy", np.zeros((3, 2), np.float32))
    np.savez("x.npz", x=np.zeros((3, 2), np.float32))
    module = f"cli_{name}_{command}"
    if (text := NETWORKS[name]) is not None:
        Path(f"{module}.py").write_text(text)
    rest = ["x.npy", "--out", "out"] if command == "score" else ["--example", "x.npz"]
    said = rf"{module}:make raised KeyError" if name == "raising" else rf"the module {module} does not import \(\w+: "
    with pytest.raises(SystemExit, match=rf"^afield: net \(--net\) .*{said}"):
        main([command, "model", *rest, "--net", f"{module}:make"])


def test_a_model_that_was_never_fitted_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("cli_linear.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(2, 3)")
    afield.save(afield.attach(torch.nn.Linear(2, 3), num_random_features=8), "model")
    np.savez("x.npz", x=np.zeros((3, 2), np.float32))
    with pytest.raises(SystemExit, match=r"^afield: .*not fitted"):
        main(["export", "model", "--net", "cli_linear:make", "--example", "x.npz"])


@pytest.mark.parametrize("opset", ["-1", "0", "7", "17", pytest.param("99", marks=pytest.mark.slow)])
def test_an_opset_that_does_not_work_is_one_clear_line(opset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("cli_linear.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(2, 3)")
    model = afield.attach(torch.nn.Linear(2, 3), num_random_features=8)
    afield.fit_posterior(model, [torch.randn(20, 2)], progress=False)
    afield.save(model, "model")
    np.savez("x.npz", x=np.zeros((3, 2), np.float32))
    with pytest.raises(SystemExit, match=r"^afield: .*opset"):
        main(["export", "model", "--net", "cli_linear:make", "--example", "x.npz", "--opset", opset])
    assert not Path("model/model.onnx").exists()


def test_damaged_inputs_of_evaluate_and_export_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    main(["train", "two-moons", *TINY, "--method", "dnn", "--out", "runs"])
    folder = "runs/two-moons/dnn/0"
    for content in (b"", b"text", b"PK\x03\x04 half"):
        Path("x.npz").write_bytes(content)
        with pytest.raises(SystemExit, match=r"^afield: .*x\.npz is not a readable npz file"):
            main(["evaluate", folder, "--ood", "x.npz"])
    model = afield.attach(torch.nn.Linear(2, 3), num_random_features=8)
    afield.save(model, "model")
    Path("cli_linear.py").write_text("from torch import nn\ndef make():\n    return nn.Linear(2, 3)")
    with pytest.raises(SystemExit, match=r"^afield: .*x\.npz is not a readable npz file"):
        main(["export", "model", "--net", "cli_linear:make", "--example", "x.npz"])
    (Path(folder) / "metrics.json").write_text("{")
    for command in (["evaluate", folder], ["train", "two-moons", *TINY, "--method", "dnn", "--out", "runs"]):
        with pytest.raises(SystemExit, match=r"^afield: .*metrics\.json is damaged: .*--fresh"):
            main(command)
    main(["train", "two-moons", *TINY, "--method", "dnn", "--out", "runs", "--fresh"])
    (Path(folder) / "config.toml").write_text("task =")
    with pytest.raises(SystemExit, match=r"^afield: .*config\.toml is damaged.*--fresh"):
        main(["train", "--config", f"{folder}/config.toml", "--out", "elsewhere"])


def test_unwritable_folder_is_one_clear_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match=r"^afield: .*file"):
        main(["train", "two-moons", *TINY, "--out", str(tmp_path / "file")])


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(tmp_path: Path):
    command = [sys.executable, "-m", "afield.cli.main", "train", "two-moons", "--method", "dnn", "--out", str(tmp_path)]
    # A shell that starts the tests in the background has them ignore SIGINT, and their children too.
    notice = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, **notice)
    checkpoint = tmp_path / "two-moons" / "dnn" / "0" / "checkpoint.pt"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert checkpoint.exists()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.strip().splitlines()[-1].startswith("afield: stopped. The same command goes on")
    assert "Traceback" not in errors
    assert not run_folder.is_finished(checkpoint.parent)


@pytest.mark.usefixtures("coarse_pictures")
def test_reproduce_goes_on_and_writes_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    methods = {"toy-regression": ("dnn",), "two-ovals": ("dnn", "gp-random-features")}
    monkeypatch.setitem(SUITES, "little", Suite("Little", methods, {"smoke": 1}))
    arguments = ["reproduce", "little", "--preset", "smoke", "--methods", "dnn", "--jobs", "1", "--out", str(tmp_path)]
    main(arguments)
    assert "2 runs" in output_of(capsys)
    assert {r.task for r in run_folder.find(tmp_path)} == {"toy-regression", "two-ovals"}
    stamps = {r.folder: (r.folder / "metrics.json").stat().st_mtime_ns for r in run_folder.find(tmp_path)}
    main([*arguments, "--seeds", "2"])
    after = {r.folder: (r.folder / "metrics.json").stat().st_mtime_ns for r in run_folder.find(tmp_path)}
    assert len(after) == 4
    assert stamps.items() <= after.items()
    assert (tmp_path / "report" / "index.html").is_file()


# Sweeps


def test_choice_is_the_smallest_bound_that_keeps_the_accuracy_then_the_best_nll():
    trials = [
        Trial({"bound": bound}, amplitude, nll, accuracy, 400)
        for bound, accuracy in ((0.5, 0.80), (0.9, 0.945), (2.0, 0.95))
        for amplitude, nll in ((None, 0.3), (1.0, 0.2), (10.0, 0.4))
    ]
    assert choose(trials) == Trial({"bound": 0.9}, 1.0, 0.2, 0.945, 400)  # one standard error is 0.011
    assert choose([t for t in trials if t.changes != {"bound": 0.9}]).changes == {"bound": 2.0}


def test_other_settings_are_chosen_by_nll_before_the_bound():
    rates = {0.1: {0.9: (0.25, 0.94), 2.0: (0.19, 0.95)}, 0.2: {0.9: (0.24, 0.96), 2.0: (0.23, 0.96)}}
    trials = [
        Trial({"learning_rate": rate, "bound": bound}, None, nll, accuracy, 400)
        for rate, bounds in rates.items()
        for bound, (nll, accuracy) in bounds.items()
    ]
    assert choose(trials).changes == {"learning_rate": 0.1, "bound": 0.9}
    without = [Trial({"learning_rate": rate}, None, nll, None, 400) for rate, nll in ((0.1, -1.0), (0.2, -2.0))]
    assert choose(without).changes == {"learning_rate": 0.2}


def test_grid_has_all_combinations_in_the_settings_types():
    found = combinations(["learning-rate=1e-3,2e-3", "epochs=3", "bound=none,2"])
    assert len(found) == 4
    assert found[0] == {"learning_rate": 1e-3, "epochs": 3, "bound": None}
    assert isinstance(found[0]["epochs"], int)
    assert combinations([]) == [{}]
    assert combinations(["orthogonal=true,False", "projection=8,none"])[1] == {"orthogonal": True, "projection": None}
    assert combinations(["geometry=layer,none"]) == [{"geometry": "layer"}, {"geometry": None}]
    assert combinations(["frozen=,0.*"]) == [{"frozen": ()}, {"frozen": ("0.*",)}]


def test_sweep_goes_on_and_writes_a_config_for_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["sweep", "two-moons", *TINY, "--out", str(tmp_path), "--amplitudes", "1.0"]
    main([*arguments, "--grid", "bound=0.9"])
    assert "chosen" in output_of(capsys)
    (first,) = tmp_path.rglob("metrics.json")
    assert not [name for name in json.loads(first.read_text())["metrics"] if not name.endswith("/val")]  # no test data
    stamp = first.stat().st_mtime_ns
    main([*arguments, "--grid", "bound=0.9,2.0"])
    assert first.stat().st_mtime_ns == stamp
    (choice,) = tmp_path.rglob("choice.toml")
    main(["train", "--config", str(choice), "--out", str(tmp_path / "chosen")])
    (trained,) = run_folder.find(tmp_path / "chosen")
    assert trained.config["bound"] in (0.9, 2.0)
    assert "accuracy/clean" in trained.metrics
    record = json.loads(choice.with_name("choice.json").read_text())
    assert record["chosen"] in record["trials"]
    assert len(record["trials"]) == 4


@pytest.mark.parametrize(("task", "method"), [("two-moons", "dnn"), ("toy-regression", "sngp")])
def test_sweep_without_amplitudes_chooses_the_smallest_nll(task: str, method: str, tmp_path: Path):
    main(["sweep", task, *TINY, "--method", method, "--out", str(tmp_path), "--grid", "learning-rate=1e-9,1e-3"])
    (choice,) = tmp_path.rglob("choice.json")
    record = json.loads(choice.read_text())
    assert [t["amplitude"] for t in record["trials"]] == [None, None]
    assert record["chosen"] == min(record["trials"], key=lambda t: t["nll"])


def test_sweep_over_names_goes_on_as_well(tmp_path: Path):
    arguments = ["sweep", "two-moons", *TINY, "--method", "dnn", "--out", str(tmp_path), "--grid", "frozen=,0.*"]
    main(arguments)
    main(arguments)  # from the study on disk
    (choice,) = tmp_path.rglob("choice.json")
    assert [t["changes"] for t in json.loads(choice.read_text())["trials"]] == [{"frozen": []}, {"frozen": ["0.*"]}]
    assert {folder.name for folder in choice.parent.iterdir() if folder.is_dir()} == {"frozen-none", "frozen-0.*"}


def test_sweep_leaves_out_what_diverges(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["sweep", "two-moons", *TINY, "--method", "dnn", "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"^afield: All 2 trainings of the sweep diverged"):
        main([*arguments, "--grid", "learning-rate=1e30,1e31"])
    assert not list(tmp_path.rglob("choice.*"))
    main([*arguments, "--grid", "learning-rate=1e-3,1e30"])
    assert "diverged" in output_of(capsys)
    (choice,) = tmp_path.rglob("choice.json")
    record = json.loads(choice.read_text())
    assert record["chosen"]["changes"] == {"learning_rate": 1e-3}
    assert record["diverged"] == [{"learning_rate": 1e30}]


def test_sweep_takes_a_run_without_a_finite_nll_for_diverged(tmp_path: Path):
    arguments = ["sweep", "two-moons", *TINY, "--method", "dnn", "--out", str(tmp_path), "--grid"]
    main(arguments)
    (metrics,) = tmp_path.rglob("metrics.json")
    metrics.write_text(metrics.read_text().replace("nll/val", "other/val"))
    metrics.with_name(run_folder.HASHES).unlink()
    (study,) = tmp_path.rglob("study.db")
    study.unlink()
    with pytest.raises(SystemExit, match=r"^afield: All 1 trainings of the sweep diverged"):
        main(arguments)


# Settings


def test_settings_page_is_up_to_date(capsys: pytest.CaptureFixture[str]):
    main(["settings"])
    text = output_of(capsys)
    assert text == page() == (ROOT / "docs" / "settings.md").read_text(encoding="utf-8"), (
        "run: afield settings > docs/settings.md"
    )
    assert set(meanings()) == set(Settings.__dataclass_fields__)
    assert all(name in text for name in TASKS)
