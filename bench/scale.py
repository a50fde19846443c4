"""What the posterior costs at any size: formulas, checked here at the sizes that fit, then taken to 10^9 examples.

    python -m bench.scale         about two minutes on two idle cores; writes results/scale.json, fills docs/scale.md

pass      N/W (2 d D / r32 + D e + C D (D + B) / r64)      seconds, each worker
          + N/W (2 D K / r32 + C D w) where the weights are not all 1
reduce    8 C D^2 bytes of sums, once; a ring sends and receives 2 (W - 1)/W of that
memory    8 C D^2 (sums) + 4 C D^2 (factor) + 4 d D (random features) bytes
factor    C (1/3 + 1) D^3 / rf      seconds, on each worker

d hidden width, D random features, K classes, C matrices (1 shared, K one per class), B = 256 the rows of a block (half
of a symmetric product is enough, in blocks). Measured first, at D = 1024: r32 and r64, the machine's rates of matrix
products, rf, of a Cholesky factor and its inverse, and the seconds e of a cosine and w of a weight times a feature.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import afield
from afield.gp.precision import BLOCK
from afield.model.saving import write_file
from bench.defaults import ROOT, fill, markdown
from bench.speed.posterior import head_alone

RECORD, PAGE = ROOT / "results" / "scale.json", ROOT / "docs" / "scale.md"
SIZES = ((640, 512, 10, "shared"), (640, 1024, 10, "shared"), (2048, 2048, 1000, "shared"), (640, 512, 10, "per_class"))
ROWS, BATCH = 8192, 2048
HUGE: dict[str, Any] = {"examples": 10**9, "classes": 10**4, "workers": 10**3, "hidden": 2048, "features": 1024}


def seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return median(times)


@dataclass(frozen=True)
class Rates:
    """Of this machine: operations a second of products and of a factorisation, seconds of a cosine and of a weight."""

    r32: float
    r64: float
    rf: float
    cosine: float
    weight: float


def rates(size: int = 1024) -> Rates:
    single, double = (torch.randn(BATCH, size, dtype=dtype) for dtype in (torch.float32, torch.float64))
    w, gram, identity = double[:, :1], double.T @ double, torch.eye(size, dtype=torch.float64)

    def factor() -> Tensor:
        return torch.linalg.solve_triangular(torch.linalg.cholesky(gram), identity, upper=False).float()

    return Rates(
        2 * BATCH * size**2 / seconds(lambda: single.T @ single),
        2 * BATCH * size**2 / seconds(lambda: double.T @ double),
        4 / 3 * size**3 / seconds(factor),
        seconds(lambda: (single.cos() * 0.1).double()) / single.numel(),
        seconds(lambda: double * w) / double.numel(),
    )


def formulas(hidden: int, features: int, classes: int, covariance: str, r: Rates) -> dict[str, float]:
    """Seconds an example, of the factorisation; bytes of the sums and in memory."""
    matrices = classes if covariance == "per_class" else 1
    example = 2 * hidden * features / r.r32 + features * r.cosine
    example += matrices * features * (features + min(BLOCK, features)) / r.r64
    if covariance == "per_class":
        example += 2 * features * classes / r.r32 + matrices * features * r.weight
    return {
        "example_seconds": example,
        "factor_seconds": matrices * 4 / 3 * features**3 / r.rf,
        "reduced_bytes": 8 * matrices * features**2,
        "memory_bytes": 12 * matrices * features**2 + 4 * hidden * features,
    }


def measured(hidden: int, features: int, classes: int, covariance: str) -> dict[str, float]:
    model = head_alone(hidden, classes, features, covariance=covariance)
    x = torch.randn(ROWS, hidden)
    head = model.head

    def one_pass() -> None:
        head.reset_posterior()
        for part in x.split(BATCH):
            head.observe(part)

    def factor() -> None:
        head.precision.stale()
        head.factor()

    measured_seconds = {"example_seconds": seconds(one_pass, 3) / ROWS, "factor_seconds": seconds(factor, 3)}
    memory = sum(t.nbytes for t in (head.precision.data, head.precision.root, head.random_features.weight))
    return measured_seconds | {"reduced_bytes": reduced(hidden, features, classes, covariance), "memory_bytes": memory}


def reduced(*size: Any) -> float:
    """Bytes that fit_posterior hands to all_reduce on each of two processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_count, (folder, size), nprocs=2)
        counts = [int(Path(folder, str(rank)).read_text()) for rank in range(2)]
    assert counts[0] == counts[1]
    return float(counts[0])


def _count(rank: int, folder: str, size: tuple[Any, ...]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    total, all_reduce = 0, dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal total
        total += tensor.nbytes
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counting
    torch.manual_seed(rank)
    hidden, features, classes, covariance = size
    model = head_alone(hidden, classes, features, covariance=covariance)
    afield.fit_posterior(model, [torch.randn(64, hidden)], sharded=True)
    Path(folder, str(rank)).write_text(str(total))
    dist.destroy_process_group()


def main() -> None:
    found = rates()
    rows = [
        {"size": size, "formula": formulas(*size, found), "measured": measured(*size)}  # type: ignore[call-arg]
        for size in SIZES
    ]
    record = {"command": "python -m bench.scale", "threads": torch.get_num_threads(), "rates": asdict(found)}
    write_file(RECORD, (json.dumps(record | {"sizes": rows}, indent=1) + "\n").encode())
    for name, text in tables().items():
        fill(PAGE, name, text)


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the record as it is."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return {"checked": checked(record["sizes"]), "huge": huge(Rates(**record["rates"]))}


def checked(rows: list[dict[str, Any]]) -> str:
    head = ["d", "D", "K", "covariance", "µs an example", "formula", "factorisation, s", "formula", "reduced, MB"]
    head += ["formula", "memory, MB", "formula"]
    table = [head]
    for row in rows:
        cells = [str(word) for word in row["size"]]
        for name, unit in (
            ("example_seconds", 1e-6),
            ("factor_seconds", 1.0),
            ("reduced_bytes", 1e6),
            ("memory_bytes", 1e6),
        ):
            cells += [f"{row[source][name] / unit:.3g}" for source in ("measured", "formula")]
        table.append(cells)
    return markdown(table, left=4)


def huge(found: Rates) -> str:
    """10^9 examples on workers as fast as this machine."""
    table = [["", "shared", "one per class"]]
    both = [
        formulas(HUGE["hidden"], HUGE["features"], HUGE["classes"], covariance, found)
        for covariance in ("shared", "per_class")
    ]
    per_worker = HUGE["examples"] / HUGE["workers"]
    for name, quantity in (
        ("pass, hours a worker", lambda f: f["example_seconds"] * per_worker / 3600),
        ("reduced, GB", lambda f: f["reduced_bytes"] / 1e9),
        ("memory, GB a worker", lambda f: f["memory_bytes"] / 1e9),
        ("factorisation, hours", lambda f: f["factor_seconds"] / 3600),
    ):
        table.append([name, *(f"{quantity(f):.3g}" for f in both)])
    return markdown(table, left=1)


if __name__ == "__main__":
    main()
