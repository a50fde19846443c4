"""Folders of `afield.save` and run folders are opened by one function, and say what they cannot give."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import afield
from afield.errors import DamagedModel, StaleWarning
from afield.experiment import run_folder
from afield.experiment.config import Config
from afield.experiment.model_folder import hash_weights, is_saved, load, make_network, open_model
from afield.experiment.one_run import run
from afield.experiment.run_folder import Run
from afield.methods import METHODS
from afield.methods.ensemble import ensemble
from afield.model.saving import INDEX, read_index

NETWORKS = """
from torch import nn
def make():
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))
number = 3
wrong = dict
"""
pytestmark = pytest.mark.usefixtures("small_toys")
X = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture(params=["sngp", "attach"])
def model(request: pytest.FixtureRequest) -> afield.SNGP:
    torch.manual_seed(0)
    convert = {"sngp": afield.sngp, "attach": afield.attach}[request.param]
    model = convert(net(), num_random_features=16)
    data = [(X, torch.arange(40) % 3)]
    afield.fit_posterior(model, data, progress=False)
    afield.calibrate(model, data, progress=False)
    return model.eval()


@pytest.fixture
def saved(model: afield.SNGP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "opened_networks.py").write_text(NETWORKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "opened_networks", raising=False)
    return afield.save(model, tmp_path / "model", metadata={"labels": ["cat", "dog", 3]})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def make_run(out: Path, method: str = "sngp", task: str = "two-moons", **changes: object) -> Run:
    return run(Config.of(task, method, preset="smoke", epochs=1, num_random_features=32, **changes), out)


# What `afield.save` wrote


@pytest.mark.parametrize("given", ["a network", "a name"])
def test_a_saved_model_is_opened_with_its_network(given: str, saved: Path, model: afield.SNGP):
    opened = open_model(saved, net() if given == "a network" else "opened_networks:make")
    assert is_saved(saved)
    assert (opened.folder, opened.kind, opened.task) == (saved, model.kind, None)
    assert (opened.dtype, opened.shape, opened.example) == (torch.float32, None, None)
    assert opened.labels == ("cat", "dog", "3")
    assert torch.equal(opened.predict(X).probs, model.predict(X).probs)
    assert opened.as_sngp("this test") is opened.model
    assert not opened.model.training


def test_a_model_in_double_precision_takes_such_inputs(tmp_path: Path):
    model = afield.sngp(net(), num_random_features=16).double()
    afield.fit_posterior(model, [(X.double(), torch.arange(40) % 3)], progress=False)
    opened = open_model(afield.save(model, tmp_path / "model"), net())
    assert (opened.dtype, opened.labels) == (torch.float64, ())


def test_load_gives_the_saved_model_as_it_always_did(saved: Path, model: afield.SNGP):
    assert afield.load is load
    for path in (saved, str(saved)):
        for given in (net(), "opened_networks:make"):
            loaded = afield.load(path, given)
            assert isinstance(loaded, afield.SNGP)
            for name, tensor in model.state_dict().items():
                assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_saved_model_asks_for_its_network(saved: Path):
    with pytest.raises(ValueError, match=r"written by afield\.save: give --net module:function.*in Python: net"):
        afield.load(saved)


def test_a_saved_model_that_is_damaged_says_so(saved: Path):
    with pytest.raises(DamagedModel, match=r"saved from another network|does not fit"):
        afield.load(saved, nn.Sequential(nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 3)))
    (saved / read_index(saved)["tensors"]["file"]).write_bytes(b"cut")
    with pytest.raises(DamagedModel, match="hash"):
        afield.load(saved, net())
    (saved / INDEX).write_text("{")
    with pytest.raises(DamagedModel, match="is damaged, or not written by afield"):
        afield.load(saved, net())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("make", r"expects module:function, such as mynets:resnet, got 'make'"),
        ("opened_networks:", "expects module:function"),
        ("opened_networks:number", "module opened_networks has no function number"),
        ("opened_networks:absent", "module opened_networks has no function absent"),
        ("opened_networks:wrong", r"opened_networks:wrong must return a torch\.nn\.Module, got dict"),
    ],
)
def test_names_of_networks_are_checked(name: str, message: str, saved: Path):
    with pytest.raises(ValueError, match=message):
        make_network(name)
    with pytest.raises(ValueError, match=message):
        afield.load(saved, name)


# Run folders


@pytest.mark.parametrize("method", ["sngp", "dnn-gp", "frozen-attach", "frozen-gp"])
def test_load_gives_the_model_of_a_run(method: str, runs: Path):
    finished = make_run(runs, method)
    model = afield.load(finished.folder)
    written = finished.prediction("test")
    prediction = model.predict(open_model(finished.folder).task.test.tensors[0])
    torch.testing.assert_close(prediction.probs, written.probs)
    torch.testing.assert_close(prediction.variance, written.variance)
    assert prediction.smallest_p_value == written.smallest_p_value


@pytest.mark.parametrize("method", ["sngp", "dnn", "mc-dropout"])
def test_a_run_of_any_method_is_opened(method: str, runs: Path):
    finished = make_run(runs, method)
    opened = open_model(str(finished.folder))
    assert (opened.folder, opened.kind, opened.labels) == (finished.folder, method, ())
    assert (opened.dtype, opened.shape) == (torch.float32, (2,))
    assert torch.equal(opened.example, opened.task.test.tensors[0][:64])
    expected = finished.prediction("test")
    torch.testing.assert_close(opened.predict(opened.task.test.tensors[0]).probs, expected.probs)


def test_real_targets(runs: Path):
    finished = make_run(runs, task="toy-regression")
    opened = open_model(finished.folder)
    assert opened.shape == (1,)
    torch.testing.assert_close(opened.predict(opened.task.grid).std, finished.prediction("grid").std)


def test_a_run_of_a_dense_method_is_no_sngp(runs: Path):
    finished = make_run(runs, "dnn")
    with pytest.raises(
        ValueError,
        match=r"holds a dnn model: afield\.load takes those with a Gaussian-process.*afield\.attach.*open_model",
    ):
        afield.load(finished.folder)


def test_a_run_that_averages_several_passes_is_no_sngp(runs: Path):
    finished = make_run(runs, "sngp-dropout", dropout=0.3)
    with pytest.raises(
        ValueError, match=r"prediction of sngp-dropout is an average over several passes, and afield\.load"
    ):
        afield.load(finished.folder)


def test_an_ensemble_names_its_members(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(METHODS, "pair", ensemble(METHODS["dnn"], 2))
    finished = make_run(runs, "pair")
    message = (
        r"is an ensemble \(pair\) and has no model of its own: load its members, two-moons/dnn/0, two-moons/dnn/1\."
    )
    for function in (afield.load, open_model, hash_weights):
        with pytest.raises(ValueError, match=message):
            function(finished.folder)


def test_a_run_without_its_weights_is_damaged(tmp_path: Path):
    finished = make_run(tmp_path, "dnn")
    (finished.folder / run_folder.MODEL).unlink()
    with pytest.raises(DamagedModel, match=r"is incomplete: it has no model\.safetensors\. Delete it and run it again"):
        open_model(finished.folder)


def test_a_run_needs_no_network_and_has_to_be_finished(tmp_path: Path):
    finished = make_run(tmp_path, "dnn")
    with pytest.raises(ValueError, match=r"net is for folders written by afield\.save; .* is a run folder"):
        afield.load(finished.folder, net())
    (finished.folder / run_folder.METRICS).unlink()
    with pytest.raises(ValueError, match=r"is not a finished run: it has no metrics\.json"):
        afield.load(finished.folder)


def test_a_folder_that_is_neither(tmp_path: Path):
    for folder in (tmp_path, tmp_path / "absent"):
        for function in (afield.load, open_model, hash_weights):
            with pytest.raises(DamagedModel, match=r"is not a saved model: it has no afield\.json.*not a finished run"):
                function(folder)


def test_a_model_saved_inside_a_run_folder_comes_first(model: afield.SNGP, tmp_path: Path):
    folder = make_run(tmp_path, "dnn").folder
    afield.save(model, folder)
    assert open_model(folder, net()).task is None


# Identity


def test_the_identity_is_the_hash_of_the_weights(saved: Path, model: afield.SNGP, runs: Path):
    opened = open_model(saved, net())
    assert opened.identity == hash_weights(saved) == read_index(saved)["tensors"]["sha256"]
    with torch.no_grad():
        model.net[0].bias += 1
    with pytest.warns(StaleWarning, match="has changed since its posterior was fitted"):
        afield.save(model, saved)
    assert hash_weights(saved) != opened.identity
    folder = make_run(runs).folder
    assert open_model(folder).identity == hash_weights(folder)
    assert hash_weights(folder) == hashlib.sha256((folder / run_folder.MODEL).read_bytes()).hexdigest()


def test_opening_needs_torch_numpy_and_safetensors_only():
    code = """if True:
        import json, sys
        import afield
        light = set(sys.modules)
        afield.load
        print(json.dumps([sorted(light), sorted(sys.modules)]))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    light, everything = json.loads(done.stdout)
    assert "torch" not in light
    assert "afield.experiment.model_folder" in everything
    extras = {"lightning", "sklearn", "scipy", "ray", "rich", "tyro", "optuna", "torchmetrics", "gpytorch", "pyro"}
    extras |= {"transformers", "pandas", "pyarrow", "onnx", "matplotlib", "filelock"}
    assert not extras & {name.split(".")[0] for name in everything}
