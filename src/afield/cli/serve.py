"""`afield serve`: models behind HTTP, with a page. This module imports no torch: ONNX files are served without."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True)
class Serve:
    """Serve models: Open Inference Protocol v2, MLflow's /invocations, metrics, and a page at /.

    The page shows recent answers, refusals, and whether the stream has drifted from the calibration data.
    """

    models: tyro.conf.Positional[tuple[str, ...]]
    """PATH or NAME=PATH: a folder of afield.save, of an estimator or of save_pretrained, a run folder, an ONNX export,
    or a folder of numbered versions of these."""
    net: tuple[str, ...] = ()
    """Of folders written by afield.save: the function that makes it, module:function or NAME=module:function."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all, with a token."""
    port: int = 8080
    """Port; 0: any that is free."""
    alpha: float | None = None
    """Rate of false alarms behind `accepted`; None: 0.01, or the smallest that the calibration can tell."""
    drift_alpha: float = 0.01
    """The probability that the alarm for drift ever rings without drift."""
    risk: float | None = None
    """With labels: the part of accepted answers that may be wrong; None: that of the policy saved with the model."""
    state: Path | None = None
    """Folder in which the watch for drift survives restarts; None: it ends with the process."""
    token_file: Path | None = None
    """File with the token that requests must carry; the variable AFIELD_TOKEN does the same."""
    threads: int = os.cpu_count() or 1
    """Batches that are answered at a time."""
    max_batch: int = 64
    """Rows that are answered together."""
    max_wait_ms: float = 2.0
    """Longest wait for other requests to join a batch."""
    max_queue: int = 4096
    """Rows that may wait; more get 503."""
    max_bytes: int = 8 * 2**20
    """Of a request's body."""
    max_rows: int = 1024
    """Of a request."""
    timeout: float = 30.0
    """Seconds for an answer."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """`warning` leaves out the line for each request."""

    def run(self) -> None:
        from afield.serve import server

        if not self.models:
            raise ValueError("afield serve expects at least one model: a folder, a run or an ONNX file.")
        sources = server.sources_of(list(self.models), list(self.net), alpha=self.alpha)
        if server.only_onnx(sources) and "torch" in sys.modules:  # begin again, without it
            os.execv(sys.executable, [sys.executable, "-m", __name__, *sys.argv[sys.argv.index("serve") + 1 :]])
        token = os.environ.get("AFIELD_TOKEN") if self.token_file is None else self.token_file.read_text().strip()
        if token == "":
            raise ValueError(f"The token is empty: {self.token_file or 'AFIELD_TOKEN'}.")
        options = server.Options(
            host=self.host,
            port=self.port,
            threads=self.threads,
            alpha=self.alpha,
            drift_alpha=self.drift_alpha,
            risk=self.risk,
            state=self.state,
            token=token,
            limits=server.Limits(self.max_bytes, self.max_rows, answer_seconds=self.timeout),
            max_batch=self.max_batch,
            max_wait_ms=self.max_wait_ms,
            max_queue=self.max_queue,
        )
        server.serve(sources, options, log_level=self.log_level)


if __name__ == "__main__":
    try:
        tyro.cli(Serve, prog="afield serve").run()
    except (ValueError, OSError, ImportError) as problem:
        raise SystemExit(f"afield: {problem}") from problem
