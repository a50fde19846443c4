"""A model goes to MLflow and comes back: as it was, and as a pyfunc."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import afield

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow warns of its own parts
mlflow = pytest.importorskip("mlflow")
pandas = pytest.importorskip("pandas")

NET = "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))\n"


@pytest.fixture(scope="module")
def model() -> afield.SNGP:
    torch.manual_seed(0)
    made = afield.sngp(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3)), num_random_features=32)
    y = torch.arange(300) % 3
    afield.fit_posterior(made, [(torch.randn(300, 2), y)])
    afield.calibrate(made, [(torch.randn(300, 2), y)])
    return made.eval()


def test_a_saved_model_is_loaded_in_another_process_without_the_module_of_its_network(
    model: afield.SNGP, tmp_path: Path
):
    from afield.integrations.mlflow import load_model, save_model

    code = tmp_path / "nets_for_mlflow.py"
    code.write_text(NET)
    labels = ["a", "b", "c"]
    options = {"net": "nets_for_mlflow:make", "code_paths": [str(code)], "metadata": {"labels": labels}}
    save_model(model, tmp_path / "m", **options)
    code.unlink()
    x = torch.randn(5, 2)
    p = model.predict(x)
    assert torch.equal(load_model(str(tmp_path / "m")).predict(x).probs, p.probs)
    script = (
        "import sys, mlflow, pandas, numpy\n"
        f"m = mlflow.pyfunc.load_model({str(tmp_path / 'm')!r})\n"
        f"x = numpy.array({x.tolist()!r}, dtype='float32')\n"
        "frame = m.predict(pandas.DataFrame(x, columns=['u', 'v']))\n"
        f"frame.to_json({str(tmp_path / 'frame.json')!r})\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=300)
    frame = pandas.read_json(tmp_path / "frame.json")
    assert frame["label"].tolist() == [labels[k] for k in p.labels]
    assert np.allclose(frame["p_value"], p.p_value, atol=1e-6)
    assert frame["accepted"].tolist() == p.accept(0.01).tolist()
    with pytest.raises(ValueError, match="is not empty"):
        save_model(model, tmp_path / "m", **options)
    with pytest.raises(ValueError, match="module:function"):
        save_model(model, tmp_path / "other", net="nothing")
    with pytest.raises(TypeError, match=r"made by afield\.sngp"):
        save_model(nn.Linear(2, 2), tmp_path / "other", net="a:b")  # type: ignore[arg-type]


def test_a_logged_model_comes_back_from_its_run(model: afield.SNGP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from afield.integrations.mlflow import load_model, log_model

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "nets_of_mlflow.py").write_text(NET)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run():
        info = log_model(model, "clouds", net="nets_of_mlflow:make")
    x = torch.randn(4, 2)
    assert torch.equal(load_model(info.model_uri).predict(x).variance, model.predict(x).variance)
    found = mlflow.pyfunc.load_model(info.model_uri).predict(x.numpy(), params=None)
    assert found["score"].tolist() == pytest.approx(model.predict(x).score().tolist())
