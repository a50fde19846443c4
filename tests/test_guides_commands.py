"""The commands of the guides run, line by line, in a folder that has what the page takes as given.

They are the page's own lines. Only sizes are made small (`SMALLER`): a preset, ports, and tasks that need real data.
Lines that cannot run here are in `ELSEWHERE`, with what does run.
"""

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import afield
from afield.cli.main import main
from tests.pages import ROOT, Points, given
from tests.test_guides import shell_lines

pytestmark = pytest.mark.slow
SMALLER = (
    (r"cifar10", "two-moons"),
    (r"(train|sweep) two-moons", r"\1 two-moons --preset smoke"),
    (r"--preset small", "--preset smoke"),
    (r"--devices [48]", "--devices 2"),
    (r"--nproc-per-node 4", "--nproc-per-node 2"),
    (r"--cluster auto", "--cluster local"),
)
ELSEWHERE = {  # how a line begins: what runs in its place
    "afield demo --serve": "tests/cli/test_demo_stream.py",
    "pip install": ".ci/release installs the wheel into an empty environment",
    "srun": "a simulated SLURM job in tests/experiment/test_distributed.py",
    "NODE_RANK=0": "the nodes of tests/experiment/test_distributed.py",
}
NETS = """from torch import nn
def mlp():
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
def resnet():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2))
"""


def lines_of(page: str) -> list[str]:
    return [line for name, line in shell_lines() if name == page and not line.startswith(tuple(ELSEWHERE))]


def test_every_line_runs_here_or_is_said_to_run_elsewhere():
    named = {page for page, line in shell_lines() if not line.startswith(tuple(ELSEWHERE))}
    assert named == {*PREPARE, "docs/serving.md", "README.md"}
    served = {line.partition("#")[0].strip() for line in lines_of("docs/serving.md")}
    assert {line.partition("#")[0].strip() for line in lines_of("README.md")} <= served


def words_of(line: str) -> list[str]:
    """What is called for a line: this Python for `afield` and `python`."""
    for pattern, small in SMALLER:
        line = re.sub(pattern, small, line.partition("   ")[0].strip())
    words = shlex.split(line, comments=True)
    if words[0] == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    return (
        [sys.executable, "-m", "afield.cli.main", *words[1:]] if words[0] == "afield" else [sys.executable, *words[1:]]
    )


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), "."])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def train_two_moons() -> None:
    command = "-m afield.cli.main train two-moons --preset smoke --epochs 2 --num-random-features 64"
    subprocess.run([sys.executable, *command.split()], env=environment(), check=True, capture_output=True, timeout=300)


def save(net: nn.Module, x: torch.Tensor) -> None:
    """A model in model/, whose network a function of mynets makes."""
    model = afield.attach(net)
    y = torch.arange(len(x)) % 2
    afield.fit_posterior(model, [(x, y)])
    afield.calibrate(model, [(torch.randn_like(x), y)])
    afield.save(model, "model")
    Path("mynets.py").write_text(NETS)


def save_images() -> None:
    save(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2)), torch.randn(300, 3, 32, 32))


def for_experiments() -> None:
    np.savez("my.npz", x=np.full((20, 2), 50.0, dtype=np.float32))


def for_export() -> None:
    train_two_moons()
    save_images()
    np.savez("some.npz", input=np.zeros((4, 3, 32, 32), dtype=np.float32))


def for_scoring() -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    train_two_moons()
    np.save("points.npy", np.zeros((50, 2), dtype=np.float32))
    Path("customers").mkdir()
    rows = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    for part in ("north", "south"):
        columns = {"a": rows[:, 0], "b": rows[:, 1], "c": rows[:, 2]}
        pandas.DataFrame(columns).to_parquet(f"customers/{part}.parquet")
    pandas.DataFrame({"pixels": [row.tolist() for row in np.zeros((8, 3072))]}).to_parquet("images.parquet")


def before_a_score(line: str) -> None:
    """Each line of the page is of another model: the folders are made for it, and answers begin anew."""
    if "resnet" in line:
        save_images()
    elif "model/" in line:
        save(nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2)), torch.randn(300, 3))
    if "--cluster" in line:
        pytest.importorskip("ray")
    if "--id" in line:
        import pandas

        for file in Path("customers").iterdir():
            pandas.read_parquet(file).assign(customer=range(60)).to_parquet(file)
    elif Path("customers").is_dir():
        import pandas

        for file in Path("customers").iterdir():
            pandas.read_parquet(file)[["a", "b", "c"]].to_parquet(file)
    subprocess.run(["rm", "-rf", "scores"], check=True)


def nothing() -> None:
    """The commands begin from an empty folder."""


PREPARE: dict[str, Callable[[], None]] = {
    "docs/distributed.md": nothing,
    "docs/experiments.md": for_experiments,
    "docs/export.md": for_export,
    "docs/reliability.md": nothing,
    "docs/scoring.md": for_scoring,
}
RESULTS = {  # what must be there when all lines of a page have run
    "docs/distributed.md": ["runs/two-moons/sngp/0/metrics.json"],
    "docs/experiments.md": ["runs/two-moons/sngp/1/metrics.json", "runs/report/index.html"],
    "docs/export.md": ["runs/two-moons/sngp/0/model.onnx", "model/model.onnx"],
    "docs/reliability.md": [],
    "docs/scoring.md": ["scores/north.parquet", "scores/.drift.npz"],
}


@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # of the exporter and of Ray
@pytest.mark.usefixtures("coarse_pictures")
@pytest.mark.parametrize("page", PREPARE)
def test_commands_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mynets", raising=False)
    PREPARE[page]()
    for line in lines_of(page):
        if page == "docs/scoring.md":
            before_a_score(line)
        if page == "docs/distributed.md":
            pytest.importorskip("lightning.fabric")
            subprocess.run(["rm", "-rf", "runs"], check=True)
        if line.startswith("afield") and page != "docs/distributed.md":
            main(words_of(line)[3:])  # in this process: nothing is imported again
            continue
        done = subprocess.run(
            words_of(line), env=environment(), capture_output=True, text=True, timeout=900, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    assert not [name for name in RESULTS[page] if not Path(name).exists()]


def save_texts(folder: str) -> None:
    """A text classifier, as save_pretrained leaves it."""
    transformers = pytest.importorskip("transformers")
    from afield.integrations import huggingface as hf
    from tests.texts import tokenizer_of

    tokenizer = tokenizer_of(["where", "is", "my", "card"])
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_labels=2, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = hf.attach(transformers.BertForSequenceClassification(config).eval())
    ids = torch.randint(5, 9, (200, 4))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(200) % 2}
    afield.fit_posterior(model, [batch])
    afield.calibrate(model, [batch])
    hf.save_pretrained(model, folder, tokenizer)


def save_digits(file: str) -> None:
    pytest.importorskip("onnx")
    from afield.deploy.export import export

    names = given(Points())
    export(names["model"], file, next(iter(names["loader"])))


def free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        return int(free.getsockname()[1])


def ask(port: int, path: str, body: str | None = None) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET" if body is None else "POST", path, body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def wait_until_ready(process: "subprocess.Popen[str]", port: int) -> None:
    for _ in range(3000):
        assert process.poll() is None, process.stderr and process.stderr.read()
        with contextlib.suppress(OSError):
            if ask(port, "/v2/health/ready")[0] == 200:
                return
        time.sleep(0.1)
    raise AssertionError("The service is not ready after five minutes.")


@contextlib.contextmanager
def served(line: str, port: int):
    """A line's service, until it is told to stop; it must end well."""
    command = [*words_of(line), "--port", str(port)]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until_ready(process, port)
            yield
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
            assert process.returncode == 0
        finally:
            process.kill()


@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # of transformers and the exporter
def test_the_commands_that_serve_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for package in ("uvicorn", "onnxruntime"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    train_two_moons()
    save_images()
    save_texts("folder")
    save_digits("digits.onnx")
    *serving, curl = lines_of("docs/serving.md")
    _, address, _, body = shlex.split(curl)
    models = {"a run folder": ["0"], "a folder of afield.save": ["model"], "several": ["intents", "digits"]}
    for line, (kind, names) in zip(serving, models.items(), strict=True):
        port = free_port()
        with served(line, port):
            if kind == "a run folder":
                status, text = ask(port, address.removeprefix("localhost:8080"), body)
                assert status == 200, text
                assert {output["name"] for output in json.loads(text)["outputs"]} >= {"label", "p_value", "accepted"}
            for name in names:
                assert ask(port, f"/v2/models/{name}/ready")[0] == 200, kind
