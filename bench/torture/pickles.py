"""Pickles that are no batch of CIFAR, or a mutated one, for the reader of CIFAR's files.

Right is `DataDamaged` with the name of the file or of what the pickle asked for, or plain arrays of the right form: the
format has no hash, so that a changed pixel cannot be noticed. Nothing may run.
"""

import io
import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import numpy as np

from afield.errors import DataDamaged
from afield.tasks.published_formats import read_cifar_batch
from bench.torture.fault import Inject, Kind, Refused, Wrong, refuse_or_fail
from bench.torture.mutations import mutate

OPCODES = [getattr(pickle, name) for name in dir(pickle) if name.isupper() and len(name) > 2]
OPCODES = [code for code in OPCODES if isinstance(code, bytes) and len(code) == 1]


@contextmanager
def opened(folder: Path) -> Iterator[Inject]:
    path, trap = folder / "data_batch_1", folder / "trap"
    numbers = np.random.default_rng(0)
    batch = {b"data": numbers.integers(0, 256, (3, 3072)).astype(np.uint8), b"labels": [1, 2, 3], b"batch_label": b"x"}
    whole = [pickle.dumps(batch, protocol) for protocol in range(5)]
    heads = [content.replace(batch[b"data"].tobytes(), b"") for content in whole]  # where the instructions are

    def inject(random: Random) -> None:
        content, done = _hostile(random, whole, heads, trap)
        path.write_bytes(content)
        try:
            images, labels = read_cifar_batch(path)
        except Exception as error:
            if isinstance(error, DataDamaged) and str(error):
                raise Refused(f"{done}: {error}") from error
            refuse_or_fail(error, done, [path.name])
        else:
            right = images.dtype == np.uint8 and images.shape == (len(labels), 32, 32, 3) and labels.dtype == np.int64
            if not right:
                raise Wrong(f"{done}: read as {images.dtype} {images.shape} and {labels.dtype} {labels.shape}")
        finally:
            if trap.exists():
                trap.unlink()
                raise Wrong(f"{done}: code of the pickle was run")

    yield inject


KIND = Kind("pickles", "hostile and mutated pickles for the reader of CIFAR", opened, share=0.06, limit=20)


def _hostile(random: Random, whole: list[bytes], heads: list[bytes], trap: Path) -> tuple[bytes, str]:
    how = random.choice(("mutated", "mutated head", "instructions", "random", "code", "object array", "deep"))
    if how == "mutated":
        return mutate(random.choice(whole), random)
    if how == "mutated head":
        content, done = random.choice(heads), ""
        for _ in range(random.randint(1, 5)):
            content, done = mutate(content, random)
        return content, f"head, {done}"
    if how == "instructions":
        content = random.choice(whole)
        at = random.randrange(min(300, len(content)))
        extra = b"".join(random.choice(OPCODES) + random.randbytes(random.choice((0, 0, 1, 4))) for _ in range(5))
        return content[:at] + extra + content[at:], f"instructions at {at}"
    if how == "code":
        name = random.choice(
            (b"os\nsystem", b"posix\nsystem", b"subprocess\ncall", b"builtins\nexec", b"builtins\neval")
        )
        word = f"touch {trap}" if b"sys" in name or b"call" in name else f"open({str(trap)!r}, 'w')"
        return b"c" + name + b"\n(S" + repr(word).encode() + b"\ntR.", f"code by {name!r}"
    if how == "object array":
        file = io.BytesIO()
        pickle.dump({b"data": np.zeros((2, 3072), "u1"), b"labels": [0, 1]}, file, protocol=2)
        kind = random.choice((b"O8", b"V1", b"f8", b"M8", b"U1", b"S1", b"c8", b"i9"))
        return file.getvalue().replace(b"u1", kind), f"array of {kind!r}"
    if how == "deep":
        times = random.choices((10, 10**3, 10**5, 10**6), (40, 20, 4, 1))[0]
        code = random.choice((b"(", b"]", b"\x85", b"N\x85", b"(l", b"}"))
        return b"\x80\x02N" + code * times + b".", f"{code!r} {times} times"
    huge = struct.pack("<I", random.randrange(2**31))
    return random.choice((random.randbytes(random.randint(0, 400)), b"\x80\x02B" + huge, b"\x80\x02X" + huge)), "random"
