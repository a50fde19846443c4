"""Evaluation mode that threads can share."""

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from afield.gp.snapshot import Lock

_LOCK = Lock(rank=2)


_MODES: "weakref.WeakKeyDictionary[nn.Module, list[Any]]" = weakref.WeakKeyDictionary()  # [readers, modes]


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every submodule's own mode comes back afterwards.

    Threads share the module, hence its modes: the first to enter notes them, the last to leave brings them back. A
    module that is in evaluation mode already needs neither.
    """
    if module not in _MODES and not any(m.training for m in module.modules()):
        with torch.no_grad():
            yield
        return
    with _LOCK:
        entry = _MODES.setdefault(module, [0, [(m, m.training) for m in module.modules()]])
        entry[0] += 1
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        with _LOCK:
            entry[0] -= 1
            if not entry[0]:
                del _MODES[module]
                for m, training in entry[1]:
                    m.training = training


def _after_fork() -> None:
    """In a child process: the threads that were reading are not there, and their modes come back now."""
    for _, modes in list(_MODES.values()):
        for m, training in modes:
            m.training = training
    _MODES.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
