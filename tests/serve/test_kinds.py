"""What is served besides folders of `afield.save`: ONNX exports without torch, Hugging Face models by their texts."""

import dataclasses
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

import afield
from tests.serve.conftest import columns, fitted, running
from tests.serve.test_service import wait_for

pytestmark = pytest.mark.slow


def start(arguments: list[str], log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A service as a user starts it, and its address."""
    command = [sys.executable, "-m", "afield.cli.main", "serve", *arguments, "--port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file)
    while process.poll() is None:
        if found := re.search(r'"url": "([^"]+)"', log.read_text()):
            return process, found[1]
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def post(url: str, body: Any) -> Any:
    for _ in range(100):
        try:
            with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=20) as answer:
                return json.load(answer)
        except urllib.error.URLError:
            time.sleep(0.1)
    raise AssertionError("no answer")


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


@pytest.mark.parametrize("path", ["clouds.onnx", "clouds/1/model.onnx"])
def test_an_onnx_export_is_served_without_torch(path: str, tmp_path: Path):
    pytest.importorskip("onnxscript")
    model, x = fitted(), torch.randn(8, 2)
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    done = afield.export.export(model, file, x, labels=["a", "b", "c"])
    process, url = start([str(tmp_path / path.partition("/")[0])], tmp_path / "log")
    try:
        body = {"inputs": [{"name": "input", "shape": [8, 2], "datatype": "FP32", "data": x.tolist()}]}
        found, p = columns(post(f"{url}v2/models/clouds/infer", body)), model.predict(x)
        assert torch.allclose(torch.tensor(found["probabilities"]), p.probs, atol=1e-4)
        assert found["accepted"] == p.accept(done.metadata["alpha"]).tolist()
        assert found["label"] == [["a", "b", "c"][k] for k in p.labels]
        if Path("/proc/self/maps").exists():
            assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        about = get(f"{url}v2/models/clouds")
        assert about["parameters"]["num_reference"] == model.head.reference.numel()
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def has_counted(url: str, rows: int) -> bool:
    return bool(get(f"{url}v2/models/m/monitor")["drift"]["rows"] >= rows)


def test_kill_9_leaves_a_watch_and_labels_that_go_on(tmp_path: Path):
    pytest.importorskip("onnxscript")
    afield.export.export(fitted(), tmp_path / "m.onnx", torch.randn(8, 2))
    tensor = {"name": "input", "shape": [8, 2], "datatype": "FP32", "data": torch.randn(8, 2).tolist()}
    found = []
    for run in range(2):
        options = ["--risk", ".3", "--state", str(tmp_path / "state")]
        process, url = start([str(tmp_path / "m.onnx"), *options], tmp_path / "log")
        try:
            answer = post(f"{url}v2/models/m/infer", {"id": f"run {run}", "inputs": [tensor]})
            wait_for(functools.partial(has_counted, url, 8 * (run + 1)))
            if run == 0:
                told = {"id": "run 0", "labels": columns(answer)["label"]}
                counted = post(f"{url}v2/models/m/labels", told)
            found.append(get(f"{url}v2/models/m/monitor"))
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait(30)
    assert [summary["drift"]["rows"] for summary in found] == [8, 16]
    assert counted["accepted"] > 0
    assert [summary["risk"]["answers"] for summary in found] == [counted["accepted"]] * 2
    assert found[0]["reliability"] == found[1]["reliability"]
    assert found[1]["expected_accuracy"]["count"] == 2 * counted["accepted"]


@pytest.mark.parametrize("task", ["two-moons", "toy-regression"])
def test_a_dense_run_is_described_as_it_answers(task: str, tmp_path: Path):
    from afield.experiment.config import Config
    from afield.experiment.many_runs import run_all
    from afield.serve.server import sources_of

    (run,) = run_all([Config.of(task, "dnn", epochs=1)], tmp_path, jobs=1)
    with running(sources_of([f"m={run.folder}"])) as client:
        (listed,) = client("GET", "/v2/models")[1]["models"]
        about = client("GET", "/v2/models/m")[1]
        assert listed == about
        answer = client.infer(torch.zeros(2, about["inputs"][0]["shape"][1]), id="x")[1]
        assert [o["name"] for o in answer["outputs"]] == [o["name"] for o in about["outputs"]]
        if "label" in columns(answer):
            version = client.service.models.find("m")
            wait_for(lambda: version.monitor.recent)
            told = {"id": "x", "labels": columns(answer)["label"]}
            assert client("POST", "/v2/models/m/labels", told)[1]["right"] == 2


def test_texts_are_answered_as_the_classifier_answers_them(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    from afield.integrations.huggingface import TextClassifier, attach, save_pretrained
    from afield.serve.server import sources_of

    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *["where", "is", "my", "card", "pay", "the", "bill", "play", "a", "song"],
    ]
    tokenizer = transformers.BertTokenizerFast(vocab={word: i for i, word in enumerate(words)})
    config = transformers.BertConfig(vocab_size=len(words), hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=32, num_labels=2, id2label={0: "ask", 1: "act"})  # fmt: skip
    model = attach(transformers.BertForSequenceClassification(config).eval(), num_random_features=32)
    ids = torch.randint(5, len(words), (300, 6))
    afield.fit_posterior(model, [{"input_ids": ids, "labels": torch.arange(300) % 2}])
    afield.calibrate(model, [{"input_ids": ids, "labels": torch.arange(300) % 2}])
    rule = afield.policy(false_alarms=0.05)
    save_pretrained(model, tmp_path / "texts", tokenizer, metadata={"policy": dataclasses.asdict(rule)})
    texts = ["where is my card", "play a song", "pay"]
    expected = TextClassifier.from_pretrained(tmp_path / "texts")(texts, alpha=0.05)
    with running(sources_of([str(tmp_path / "texts")])) as client:
        entry = {"name": "text", "shape": [3], "datatype": "BYTES", "data": texts}
        status, answer, _ = client("POST", "/v2/models/texts/infer", {"inputs": [entry]})
        assert status == 200, answer
        found = columns(answer)
        assert found["label"] == [row["label"] for row in expected]
        assert found["p_value"] == pytest.approx([row["p_value"] for row in expected], abs=1e-5)
        assert [decision == "answer" for decision in found["decision"]] == [row["accepted"] for row in expected]
        entry["shape"] = [3, 1]  # as MLServer's clients send texts
        assert columns(client("POST", "/v2/models/texts/infer", {"inputs": [entry]})[1])["label"] == found["label"]
        plain = client("POST", "/invocations", {"inputs": texts})[1]["predictions"]
        assert [row["label"] for row in plain] == found["label"]
        assert client("POST", "/invocations", {"inputs": [1, 2]})[0] == 400
