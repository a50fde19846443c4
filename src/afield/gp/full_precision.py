"""A context without autocast."""

import contextlib
from typing import Any

import torch

_NOTHING = contextlib.nullcontext()


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Products keep their dtype. torch's own context costs as much as a small product, so it is entered if need be."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING
