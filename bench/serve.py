"""The service under load, on the loopback interface of one machine: against the bare model in a loop, and over time.

    python -m bench.serve [--requests 4000] [--long 100000]        writes results/serve.json; --long 0 keeps its memory
    python -m bench.serve --memory                                 memory alone, the rest of the record stays

bare        one thread calls the model on one row after the other, as a program without a service would: rows a second
service     `afield serve` in a process of its own, 32 clients in another one, each with one connection and one row a
            request: rows a second, and the latency of a request
share       service / bare, the median over interleaved rounds; clients, service and model share the same cores
cpu share   the same by processor time, of the bare call and of the service's process: what other programs do to the
            machine, and what the clients cost, does not count
floor       `bench/serve_echo.py`: the same server and sockets, and an application that sends one answer to everybody
mlserver    MLServer (AFIELD_MLSERVER=FOLDER/bin/mlserver, a virtual environment of its own with onnxruntime) with the
            same ONNX file, batching as the service does: its batches of 64 rows, 2 ms
memory      of the service's process after each tenth of many requests; its folder of state is written too
"""

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

RECORD = Path(__file__).parents[1] / "results" / "serve.json"
CLIENTS, ROUNDS = 32, 3


def request(tensor: np.ndarray, name: str = "input") -> bytes:
    """A request with one tensor."""
    body = {
        "inputs": [{"name": name, "shape": list(tensor.shape), "datatype": "FP32", "data": tensor.ravel().tolist()}]
    }
    content = json.dumps(body).encode()
    return f"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


async def _client(port: int, payloads: list[bytes], counter: list[int], seconds: list[float], wrong: list[int]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while counter[0] > 0:
        counter[0] -= 1
        start = time.perf_counter()
        writer.write(payloads[counter[0] % len(payloads)])
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])  # type: ignore[index]
        await reader.readexactly(length)
        seconds.append(time.perf_counter() - start)
        wrong[0] += not head.startswith(b"HTTP/1.1 200")
    writer.close()


def load(port: int, payloads: list[bytes], count: int) -> dict[str, float]:
    """Rows a second and latencies of `count` requests by 32 clients; one row each."""

    async def run() -> tuple[float, list[float], int]:
        counter, seconds, wrong = [count], list[float](), [0]
        start = time.perf_counter()
        await asyncio.gather(*(_client(port, payloads, counter, seconds, wrong) for _ in range(CLIENTS)))
        return time.perf_counter() - start, seconds, wrong[0]

    took, seconds, wrong = asyncio.run(run())
    p50, p99 = np.quantile(seconds, (0.5, 0.99))
    if wrong:
        raise RuntimeError(f"{wrong} of {count} requests failed")
    return {"rows_per_second": count / took, "p50_ms": 1000 * p50, "p99_ms": 1000 * p99}


def load_elsewhere(*arguments: Any) -> dict[str, float]:
    """In another process, as clients are."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(load, arguments)


def cpu_seconds(pid: int) -> float:
    """The processor time of a process and of those that it has started."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    fields = [Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split() for one in pids]
    return sum(int(of[11]) + int(of[12]) for of in fields) / os.sysconf("SC_CLK_TCK")


class Service:
    """A server as a user starts it: `afield serve`, or another command that says its address."""

    def __init__(self, arguments: list[str], folder: Path, *, command: tuple[str, ...] = ()) -> None:
        log = folder / "serve.log"
        own = (sys.executable, "-m", "afield.cli.main", "serve", *arguments, "--port", "0")
        with log.open("wb") as file:
            self.process = subprocess.Popen(command or own, stdout=file, stderr=file)
        while not (found := re.search(r"http://127\.0\.0\.1:(\d{4,5})\D", log.read_text())):
            if self.process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.05)
        self.port = int(found[1])

    def input_name(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v2/models/m", timeout=30) as answer:
            return str(json.load(answer)["inputs"][0]["name"])

    def megabytes(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def bare(run: Any, rows: list[np.ndarray], count: int) -> dict[str, float]:
    """Rows a second, and processor time of a row, of a loop over single rows."""
    for row in rows[:10]:
        run(row)
    start, cpu = time.perf_counter(), time.process_time()
    for i in range(count):
        run(rows[i % len(rows)])
    cpu = time.process_time() - cpu
    return {"rows_per_second": count / (time.perf_counter() - start), "cpu_us": 1e6 * cpu / count}


def under_load(service: Service, payloads: list[bytes], count: int) -> dict[str, float]:
    """As `load`, and the processor time of the service for a request."""
    before = cpu_seconds(service.process.pid)
    found = load_elsewhere(service.port, payloads, count)
    return found | {"cpu_us": 1e6 * (cpu_seconds(service.process.pid) - before) / count}


def compare(name: str, run: Any, service: Service, rows: list[np.ndarray], count: int) -> dict[str, Any]:
    payloads = [request(row, service.input_name()) for row in rows]
    load_elsewhere(service.port, payloads, min(count, 300))  # warm
    rounds = [(bare(run, rows, count // 4), under_load(service, payloads, count)) for _ in range(ROUNDS)]
    found = {
        "bare_rows_per_second": median(b["rows_per_second"] for b, _ in rounds),
        "share": median(s["rows_per_second"] / b["rows_per_second"] for b, s in rounds),
        "bare_cpu_us": median(b["cpu_us"] for b, _ in rounds),
        "cpu_share": median(b["cpu_us"] / s["cpu_us"] for b, s in rounds),
        **{key: median(s[key] for _, s in rounds) for key in rounds[0][1]},
    }
    print(name, json.dumps(found), flush=True)
    return found


def others(file: str, rows: list[np.ndarray], count: int, folder: Path) -> dict[str, dict[str, float]]:
    """The floor, and MLServer with the same ONNX file, under the same load."""
    payloads, found = [request(row) for row in rows], {}
    commands = {"floor": (sys.executable, "-m", "bench.serve_echo")}
    if mlserver := os.environ.get("AFIELD_MLSERVER"):
        commands["mlserver"] = (str(Path(mlserver).with_name("python")), "bench/serve_mlserver.py", file)
    for name, command in commands.items():
        service = Service([], folder, command=command)
        try:
            load_elsewhere(service.port, payloads, min(count, 300))
            runs = [under_load(service, payloads, count) for _ in range(ROUNDS)]
        finally:
            service.stop()
        found[name] = {key: median(run[key] for run in runs) for key in runs[0]}
        print(name, json.dumps(found[name]), flush=True)
    return found


def models(folder: Path) -> dict[str, tuple[list[str], Any, list[np.ndarray]]]:
    """For each model: what `afield serve` is given, the bare call, and rows."""
    import onnxruntime
    import torch

    import afield
    from afield.cli.main import main as command
    from afield.experiment.config import Config
    from afield.experiment.many_runs import run_all
    from afield.experiment.model_folder import open_model

    torch.set_num_threads(1)
    (trained,) = run_all([Config.of("two-moons", "sngp", epochs=5)], folder, jobs=1)
    moons = open_model(trained.folder)
    file = folder / "m.onnx"
    command(["export", str(trained.folder), "--out", str(file)])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    points = [row[None] for row in np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)]

    torch.manual_seed(0)
    images = torch.randn(128, 3, 32, 32)
    model = afield.attach(resnet56())
    afield.fit_posterior(model, [(images, torch.arange(128) % 10)])
    afield.calibrate(model, [(torch.randn(300, 3, 32, 32), torch.arange(300) % 10)])
    model.eval()
    afield.save(model, folder / "resnet", metadata={"input_shape": [3, 32, 32]})
    pictures = [image[None].numpy() for image in images[:32]]

    def torch_call(predict: Any) -> Any:
        return lambda row: predict(torch.from_numpy(row))

    return {
        "two-moons, ONNX": ([f"m={file}"], lambda row: session.run(None, {"input": row}), points),
        "two-moons, torch": ([f"m={trained.folder}"], torch_call(moons.predict), points),
        "ResNet-56 on images, torch": (
            [f"m={folder / 'resnet'}", "--net", "bench.serve:resnet56"],
            torch_call(model.predict),
            pictures,
        ),
    }


def resnet56() -> Any:
    """The public network of results/attach-cifar10.json."""
    from safetensors.torch import load_file

    from afield.backbones.resnet_cifar import ResNetCIFAR

    net = ResNetCIFAR(56)
    net.load_state_dict(load_file(Path(os.environ["AFIELD_DATA"]) / "weights" / "cifar10_resnet56.safetensors"))
    return net.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--long", type=int, default=100_000)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    from afield.model.saving import write_file

    before: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    record = before if options.memory else {"command": "python -m bench.serve", "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        served = models(folder)
        if not options.memory:
            record |= measure_load(served, options.requests, folder)
        record["memory"] = measure_memory(served, options.long, folder) if options.long else before["memory"]
    write_file(RECORD, (json.dumps(record, indent=1) + "\n").encode())


def measure_load(served: dict[str, Any], requests: int, folder: Path) -> dict[str, Any]:
    """Every model against its loop; beside the ONNX file the floor and MLServer."""
    record: dict[str, Any] = {"clients": CLIENTS, "requests": requests, "load": [load_of_others()], "models": {}}
    for name, (arguments, run, rows) in served.items():
        count = requests if "ResNet" not in name else requests // 4
        service = Service([*arguments, "--log-level", "warning"], folder)
        try:
            record["models"][name] = compare(name, run, service, rows, count)
            if "ONNX" in name:
                record["others"] = others(str(folder / "m.onnx"), rows, count, folder)
        finally:
            service.stop()
        record["load"].append(load_of_others())
    return record


def load_of_others() -> float:
    """Programs that want to run, the mean of a minute: before the measurement those of others, later ours too."""
    return round(os.getloadavg()[0], 1)


def measure_memory(served: dict[str, Any], count: int, folder: Path) -> dict[str, Any]:
    """Memory of a service of the ONNX file after each tenth of the requests."""
    arguments, _, rows = next(of for name, of in served.items() if "ONNX" in name)
    service = Service([*arguments, "--log-level", "warning", "--state", str(folder / "state")], folder)
    try:
        payloads = [request(row, service.input_name()) for row in rows]
        parts = [
            load_elsewhere(service.port, payloads, count // 10) | {"megabytes": service.megabytes()} for _ in range(10)
        ]
    finally:
        service.stop()
    megabytes = [round(part["megabytes"], 1) for part in parts]
    found = {"requests": count, "megabytes": megabytes, "after_a_tenth": megabytes[0], "after_all": megabytes[-1]}
    print(json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    main()
