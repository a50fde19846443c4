"""Checkpoints: the state of a training after its last finished epoch, written whole and read only as it was written.

A checkpoint is a file of torch, which is a zip file, with its SHA-256 as the comment at its end. Those from before
there was a hash are read as well; the sums of the zip format are checked then.
"""

import hashlib
import os
import zipfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch

from afield.errors import DamagedRun
from afield.experiment import distributed
from afield.model.files import write_file

if TYPE_CHECKING:
    from lightning.fabric import Fabric

_NO_COMMENT, _EMPTY_END, _HASH_SIZE = b"\0\0", 22, 64  # the end of a zip file without a comment; a hash as text


def save_checkpoint(checkpoint: Path | None, parts: dict[str, Any], epoch: int, fabric: "Fabric | None") -> None:
    """Write the state after an epoch, on the first process."""
    if checkpoint is None:
        return
    state = distributed.collect_state(parts, fabric)
    if distributed.rank_and_world(fabric)[0] == 0:
        write_file(checkpoint, lambda file: _write_checkpoint(file, {**state, "epoch": epoch}))


def load_checkpoint(checkpoint: Path | None, parts: dict[str, Any], fabric: "Fabric | None") -> int:
    """Restore the state after the last finished epoch; the number of that epoch, or 0 without a checkpoint."""
    state = None
    if checkpoint is not None and checkpoint.exists():
        state = read_checkpoint(checkpoint)
    epoch = 0 if state is None else state["epoch"]
    if len(set(distributed.gather(fabric, epoch))) > 1:
        raise ValueError(f"The processes do not all see {checkpoint}: the folder of runs has to be one that all share.")
    if state is not None:
        try:
            distributed.restore_state(parts, state, fabric)
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise _damaged_checkpoint(checkpoint, error) from error
    return epoch


def _write_checkpoint(file: IO[bytes], state: dict[str, Any]) -> None:
    """What torch writes, a zip file, with its hash as the comment that may stand at the end of one."""
    torch.save(state, file)
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
    file.seek(-len(_NO_COMMENT), os.SEEK_END)
    file.write(len(digest).to_bytes(2, "little") + digest.encode())


def _check_checkpoint(file: IO[bytes]) -> None:
    """ValueError if the hash does not match. torch itself notices hardly any damage."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _HASH_SIZE - len(_NO_COMMENT)))
    length, digest = file.read(len(_NO_COMMENT)), file.read()
    file.seek(max(0, size - _EMPTY_END))
    end = file.read()
    if end.startswith(b"PK\x05\x06") and end.endswith(_NO_COMMENT):  # from before there was a hash
        with zipfile.ZipFile(file) as archive:
            if (part := archive.testzip()) is not None:
                raise ValueError(f"{part} is not what was written")
        return
    found, left = hashlib.sha256(), size - _HASH_SIZE - len(_NO_COMMENT)
    file.seek(0)
    while left > 0 and (block := file.read(min(left, 2**20))):
        found.update(block)
        left -= len(block)
    found.update(_NO_COMMENT)
    if length != _HASH_SIZE.to_bytes(2, "little") or found.hexdigest().encode() != digest:
        raise ValueError("its hash does not match")


def read_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """The state in a checkpoint, if it is what was written."""
    try:
        with checkpoint.open("rb") as file:
            _check_checkpoint(file)
        state = torch.load(checkpoint, weights_only=True, map_location="cpu")
        if type(state["epoch"]) is not int or state["epoch"] < 1:
            raise ValueError(f"epoch = {state['epoch']}")
    except PermissionError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise _damaged_checkpoint(checkpoint, error) from error
    return state


def _damaged_checkpoint(checkpoint: Path | None, error: Exception) -> DamagedRun:
    return DamagedRun(
        f"{checkpoint} is damaged, or of another model ({type(error).__name__}: {error}). Begin again with --fresh."
    )
