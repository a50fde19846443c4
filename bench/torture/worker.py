"""Inject the faults of one kind in this process; as a program, one line of JSON before and after each.

The program is started by `supervise`, which notices when it dies or hangs.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from bench.torture.fault import Result, outcome_of
from bench.torture.kinds import KINDS

MEMORY = Path("/dev/shm")


def inject_here(name: str, seed: int, *, seconds: float, first: int = 0, most: int = 10**9) -> Iterator[int | Result]:
    """The number of each fault before it, and its result after it."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="torture-", dir=place, ignore_cleanup_errors=True) as folder,
        KINDS[name].open(Path(folder)) as inject,
    ):
        end = time.monotonic() + seconds
        for number in itertools.islice(itertools.count(first), most):
            yield number
            yield outcome_of(inject, Random(f"{name} {number} {seed}"))
            if time.monotonic() >= end:
                return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--most", type=int, default=10**9)
    given = parser.parse_args()
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print is no line of ours
    import torch

    torch.set_num_threads(1)
    steps = inject_here(given.kind, given.seed, seconds=given.seconds, first=given.first, most=given.most)
    for step in steps:
        content = {"begin": step} if isinstance(step, int) else {"outcome": step.outcome, "text": step.text[:2000]}
        lines.write(json.dumps(content) + "\n")
    lines.write(json.dumps({"done": True}) + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
