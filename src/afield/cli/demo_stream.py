"""`afield demo --serve`: a model behind HTTP, and a stream of requests whose data drifts until the alarm rings."""

import json
import os
import sys
import threading
import time
import urllib.request
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from afield.tasks import Task

USUAL, DRIFTING = 200, 400  # rows
_BATCH = 4


def serve_demo(folder: Path, task: Task, *, port: int, show: bool, console: Console) -> None:
    """Serve the model of a run, and play the stream, until Ctrl-C."""
    from afield.serve import server

    def begin(url: str) -> None:
        console.print(f"The page: [bold]{url}[/bold]   (Ctrl-C ends it)")
        if show and (sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
            webbrowser.open(url)
        threading.Thread(target=play, args=(url, task.name, task), kwargs={"console": console}, daemon=True).start()

    sources = server.sources_of([f"{task.name}={folder}"])
    server.serve(sources, server.Options(port=port), log_level="error", on_listening=begin)


def play(url: str, model: str, task: Task, *, console: Console, pause: float = 0.25) -> dict[str, Any] | None:
    """Ask about test rows, then about rows that move away; the alarm, or None if none rang."""
    console.print(f"{USUAL} rows of the test data; then the data begins to move ...", highlight=False)
    for rows in stream(task):
        _ask(f"{url}v2/models/{model}/infer", rows)
        time.sleep(pause)
        alarm = _monitor(url, model)["drift"]["alarm"]
        if alarm is not None:
            console.print(
                f"[bold]The alarm rang[/bold] at row {alarm['row']}: the data has moved since about row "
                f"{alarm['began'] + 1} (in truth since row {USUAL + 1}).",
                highlight=False,
            )
            return alarm
    console.print("The stream is over, and the alarm did not ring.")
    return None


def stream(task: Task, seed: int = 0) -> Iterator[Tensor]:
    """Test rows in random order, first as they are, then moved by a little more with every batch."""
    generator = torch.Generator().manual_seed(seed)
    x = task.test.tensors[0]
    spread = x.flatten(1).std(0).mean()
    for first in range(0, USUAL + DRIFTING, _BATCH):
        rows = x[torch.randint(len(x), (_BATCH,), generator=generator)]
        yield rows + 2 * spread * max(0, first - USUAL) / DRIFTING


def _ask(url: str, rows: Tensor) -> None:
    tensor = {"name": "input", "shape": list(rows.shape), "datatype": "FP32", "data": rows.flatten().tolist()}
    with urllib.request.urlopen(url, json.dumps({"inputs": [tensor]}).encode(), timeout=30) as answer:
        answer.read()


def _monitor(url: str, model: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}v2/models/{model}/monitor", timeout=30) as answer:
        return json.load(answer)
