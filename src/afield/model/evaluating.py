"""Evaluation mode that threads can share."""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_LOCK = threading.Lock()


_MODES: "weakref.WeakKeyDictionary[nn.Module, list[Any]]" = weakref.WeakKeyDictionary()  # [readers, modes]


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every submodule's own mode comes back afterwards.

    Threads share the module, hence its modes: the first to enter notes them, the last to leave brings them back.
    """
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
