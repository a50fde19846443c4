"""Blocks of Python in the guides that need a package, a process or a folder of their own: each in a test of its own.

They stand under `<!-- run apart: REASON -->` (or `not run`). Where the package is absent, the test skips and says so:
`pip install --no-deps -r bench/requirements-peers.txt` brings the peers and leaves torch as it is.
"""

import ast
import contextlib
import importlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.pages import GUIDES, Block, blocks, given, given_three_clouds

HUGGING_FACE = 'Hugging Face: `pip install "afield[huggingface]"`'
MLFLOW = 'MLflow: `pip install "afield[mlflow]"`'
NETS = "from torch import nn\ndef resnet():\n    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))\n"


class Apart(NamedTuple):
    """What a block needs, takes as given, and must have done."""

    needs: tuple[str, ...]
    given: Callable[[], dict[str, Any]]
    check: Callable[[dict[str, Any]], None]


def are_probabilities(names: dict[str, Any]) -> None:
    """They find the cloud that each point is from."""
    probs = torch.as_tensor(names["probs"])
    assert probs.shape == (100, 3)
    assert torch.allclose(probs.sum(1), torch.ones(100), atol=1e-5)
    assert (probs.argmax(1) == names["y_new"]).float().mean() > 0.9


def of_outliers() -> dict[str, Any]:
    names = given_three_clouds()
    return names | {"x": torch.cat([names["x"][:50], names["x"][50:] - 60])}


def find_outliers(names: dict[str, Any]) -> None:
    scores = torch.as_tensor(names["scores"])
    assert scores.shape == (100,)
    assert scores[:50].max() < scores[50:].min()


def of_mapie() -> dict[str, Any]:
    """scikit-learn's estimators take arrays."""
    from sklearn.linear_model import LogisticRegression

    names = given_three_clouds()
    arrays = {name: names[name].numpy() for name in ("x_held_out", "y_held_out", "x")}
    x, y = next(iter(names["train_loader"]))
    return names | arrays | {"classifier": LogisticRegression().fit(x.numpy(), y.numpy())}


def cover(names: dict[str, Any]) -> None:
    sets = torch.as_tensor(names["sets"]).reshape(100, 3)
    assert 0.8 <= sets[torch.arange(100), names["y_new"]].float().mean() <= 1
    assert sets.float().mean() < 0.6


def of_keras() -> dict[str, Any]:
    tf = importlib.import_module("tensorflow")
    names = given_three_clouds()
    return names | {"tf": tf, "hidden": tf.convert_to_tensor(names["x"].numpy())}


def are_logits(names: dict[str, Any]) -> None:
    assert tuple(names["logits"].shape) == (100, 3)


def of_texts() -> dict[str, Any]:
    """A tiny network and its tokenizer in a folder, and sentences whose class is one of their words."""
    transformers = importlib.import_module("transformers")
    from tests.texts import tokenizer_of

    first, last = ["where is my", "what about the", "help with my"], ("card", "rent", "loan")
    tokenizer = tokenizer_of([*" ".join(first).split(), *last, "?"])
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, num_labels=3, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained("tiny")
    tokenizer.save_pretrained("tiny")
    rows = [
        {name: torch.tensor(value) for name, value in tokenizer(f"{first[k % 3]} {last[k // 3 % 3]} ?").items()}
        | {"labels": torch.tensor(k // 3 % 3)}
        for k in range(540)
    ]
    args = transformers.TrainingArguments(
        "out", num_train_epochs=2, learning_rate=0.01, per_device_train_batch_size=30, eval_strategy="epoch",
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    return {"name": "tiny", "tokenizer": tokenizer, "args": args, "train": rows[:270], "held_out": rows[270:]}


def answers_as_the_page_says(names: dict[str, Any]) -> None:
    (block,) = [block for block in blocks("docs/integrations.md", "python") if block.heading == HUGGING_FACE]
    said = ast.literal_eval(block.code.rpartition("# ")[2])
    (answer,) = names["classify"](["where is my card?"], alpha=0.01)
    assert answer.keys() == said[0].keys()
    assert {k: type(v) for k, v in answer.items()} == {k: type(v) for k, v in said[0].items()}


def of_timm() -> dict[str, Any]:
    """Of the pretrained weights only the download is left out."""
    timm = importlib.import_module("timm")
    make = timm.create_model
    timm.create_model = lambda name, pretrained, **options: make(name, pretrained=False, **options)
    return {"trained": make("resnet10t", num_classes=3).eval()}


def converts_images(names: dict[str, Any]) -> None:
    assert names["model"](torch.zeros(2, 3, 64, 64, dtype=torch.uint8)).shape == (2, 3)


def of_mlflow() -> dict[str, Any]:
    """A module of networks in the folder, and a store beside it."""
    mlflow = importlib.import_module("mlflow")
    Path("mynets.py").write_text(NETS)
    sys.path.insert(0, str(Path.cwd()))
    mlflow.set_tracking_uri(Path("store").absolute().as_uri())
    names = given(importlib.import_module("mynets").resnet())
    return names | {"x": names["x"].numpy()}


def rows_as_the_page_says(names: dict[str, Any]) -> None:
    assert {*names["rows"].columns} == {"label", "probability", "variance", "p_value", "accepted", "score"}
    assert len(names["rows"]) == 100


APART = {
    ("docs/coming-from.md", "laplace-torch"): Apart(("laplace",), given_three_clouds, are_probabilities),
    ("docs/coming-from.md", "torch-uncertainty"): Apart(("torch_uncertainty",), given_three_clouds, are_probabilities),
    ("docs/coming-from.md", "pytorch-ood"): Apart(("pytorch_ood",), of_outliers, find_outliers),
    ("docs/coming-from.md", "MAPIE"): Apart(("mapie",), of_mapie, cover),
    ("docs/coming-from.md", "uncertainty-baselines and edward2"): Apart(
        ("tensorflow", "edward2"), of_keras, are_logits
    ),
    ("docs/integrations.md", HUGGING_FACE): Apart(("transformers", "accelerate"), of_texts, answers_as_the_page_says),
    ("docs/integrations.md", "timm"): Apart(("torchvision", "timm"), of_timm, converts_images),
    ("docs/integrations.md", MLFLOW): Apart(("mlflow", "pandas"), of_mlflow, rows_as_the_page_says),
}
BARE = {"torch_uncertainty": ("layers", "utils"), "pytorch_ood": ()}  # import torchvision when they are imported
IN_PROCESSES = {("docs/distributed.md", ""), ("docs/serving.md", "What it watches")}
FOUND = [block for page in GUIDES for block in blocks(page, "python") if block.apart]


def of_block(page: str, heading: str) -> Block:
    (found,) = [block for block in FOUND if (block.page, block.heading) == (page, heading)]
    return found


def test_every_block_that_is_set_apart_is_run_here():
    places = [(block.page, block.heading) for block in FOUND]
    assert len(places) == len({*places})
    assert {*places} == {*APART} | IN_PROCESSES


def import_peer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package, or a skip; without torchvision, one in BARE by its own files, without what its __init__ imports."""
    if name in BARE and importlib.util.find_spec("torchvision") is None and (spec := importlib.util.find_spec(name)):
        root = Path((spec.submodule_search_locations or [""])[0])
        for part in ("", *BARE[name]):
            package = types.ModuleType(f"{name}.{part}".rstrip("."))
            package.__path__ = [str(root / part)]
            monkeypatch.setitem(sys.modules, package.__name__, package)
    else:
        pytest.importorskip(name, exc_type=ImportError)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other packages
@pytest.mark.parametrize(("page", "heading"), APART)
def test_a_block_runs(page: str, heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    apart = APART[page, heading]
    for package in apart.needs:
        import_peer(package, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    if "timm" in apart.needs:
        timm = importlib.import_module("timm")
        monkeypatch.setattr(timm, "create_model", timm.create_model)  # as it is, afterwards
    names = apart.given()
    exec(compile(of_block(page, heading).code, f"{page}, {heading}", "exec"), names)
    apart.check(names)


def write_script(folder: Path, *parts: str) -> Path:
    script = folder / "script.py"
    script.write_text("\n".join(parts), encoding="utf-8")
    return script


@pytest.mark.slow
def test_the_block_of_several_processes_runs(tmp_path: Path):
    pytest.importorskip("lightning.fabric")
    before = (
        "from pathlib import Path\n"
        "from lightning.fabric import Fabric\n"
        "from afield.experiment.config import Config\n"
        "from afield.methods import METHODS\n"
        "from afield.tasks import TASKS\n"
        'task, method = TASKS["two-moons"](0, "smoke"), METHODS["sngp"]\n'
        'config = Config.of("two-moons", "sngp", preset="smoke", epochs=1)\n'
    )
    script = write_script(
        tmp_path, before, of_block("docs/distributed.md", "").code, 'Path(f"rank {fabric.global_rank}").touch()'
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert {file.name for file in tmp_path.glob("rank *")} == {"rank 0", "rank 1"}
    written = json.loads((tmp_path / "runs" / "two-moons" / "sngp" / "0" / "metrics.json").read_text())
    assert written["metrics"]["accuracy/clean"] > 0.5


@pytest.mark.slow
def test_the_block_that_serves_runs(tmp_path: Path):
    pytest.importorskip("uvicorn")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    before = (
        "import torch, afield\n"
        "net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 2))\n"
        "model = afield.attach(net)\n"
        "data = [(torch.randn(200, 3, 32, 32), torch.arange(200) % 2)]\n"
        "afield.fit_posterior(model, data)\n"
        "afield.calibrate(model, [(torch.randn(200, 3, 32, 32), torch.arange(200) % 2)])\n"
    )
    code, replaced = re.subn(r"port=8080", f"port={port}", of_block("docs/serving.md", "What it watches").code)
    assert replaced == 1
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen([sys.executable, str(write_script(tmp_path, before, code))], env=environment) as process:
        try:
            answer = ask(process, port)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert {output["name"] for output in answer["outputs"]} >= {"label", "p_value", "accepted"}


def ask(process: "subprocess.Popen[bytes]", port: int) -> Any:
    """The answer to one image of zeros, once the service is ready."""
    shape = [1, 3, 32, 32]
    tensor = {"name": "input", "shape": shape, "datatype": "FP32", "data": nn.init.zeros_(torch.empty(3072)).tolist()}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v2/models/pets/infer", json.dumps({"inputs": [tensor]}).encode()
    )
    for _ in range(300):
        assert process.poll() is None
        try:
            with urllib.request.urlopen(request, timeout=20) as found:
                return json.load(found)
        except OSError:
            time.sleep(0.2)
    raise AssertionError("The service is not ready after a minute.")
