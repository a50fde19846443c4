"""Run a kind's worker, and start it again behind a fault that it did not survive."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from bench.torture.fault import Outcome, Result
from bench.torture.kinds import KINDS

ROOT = Path(__file__).parents[2]
START = 120.0  # seconds that a worker may take before its first fault
# Some virtual machines announce AMX and have none: products in bfloat16 would end the process.
ENVIRONMENT = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "OMP_NUM_THREADS": "1"}


def inject(name: str, seed: int, *, seconds: float, first: int = 0, most: int = 10**9) -> Iterator[tuple[int, Result]]:
    """Numbers and results of faults, until the time is over."""
    end, number = time.monotonic() + seconds, first
    while number == first or (time.monotonic() < end and number < first + most):
        left = max(0.0, end - time.monotonic())
        for done, result in _one_worker(name, seed, left, number, first + most - number):
            yield done, result
        if result.outcome != Outcome.LOST or not result.text.startswith("the process"):
            return
        number = done + 1


def _one_worker(name: str, seed: int, seconds: float, first: int, most: int) -> Iterator[tuple[int, Result]]:
    command = [sys.executable, "-m", "bench.torture.worker", name, f"--seed={seed}", f"--seconds={seconds}"]
    command += [f"--first={first}", f"--most={most}"]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=subprocess.PIPE, stderr=errors, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        lines: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        number, begun = first, False
        try:
            while True:
                line = lines.get(timeout=KINDS[name].limit if begun else START)
                if line is None:
                    code = process.wait()
                    yield number, Result(Outcome.LOST, f"the process ended with status {code}. {_tail(errors)}")
                    return
                if "done" in line:
                    return
                if "begin" in line:
                    number, begun = line["begin"], True
                else:
                    yield number, Result(Outcome(line["outcome"]), line["text"])
                    begun = False
        except queue.Empty:
            limit = KINDS[name].limit if begun else START
            yield number, Result(Outcome.LOST, f"the process hung for {limit:g} s. {_tail(errors)}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(stream: IO[str], lines: "queue.Queue[Any]") -> None:
    for line in stream:
        lines.put(json.loads(line))
    lines.put(None)


def _tail(errors: IO[str]) -> str:
    errors.seek(0)
    return errors.read()[-1500:]
