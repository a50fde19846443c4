"""How batches reach a model: what is input and what is target, on which device, in which mode, with what progress.

A batch is a tensor; a tuple or list whose last element is the target when there are at least two; or a mapping of
keyword arguments (Hugging Face) whose target is under "labels" or "label".
"""

import contextlib
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")
_TARGETS = ("labels", "label")
_PATIENCE = 2.0  # seconds before a progress bar appears


def split_batch(batch: Any, device: torch.device | None = None) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """(args, kwargs, target) of a batch, moved to `device`; target is None if the batch has none."""
    batch = _to(batch, device)
    if isinstance(batch, Mapping):
        target = next((batch[name] for name in _TARGETS if name in batch), None)
        return (), {k: v for k, v in batch.items() if k not in _TARGETS}, target
    if isinstance(batch, tuple | list):
        if not batch:
            raise ValueError("A batch must hold at least the input, got an empty tuple or list.")
        args, target = (tuple(batch[:-1]), batch[-1]) if len(batch) > 1 else (tuple(batch), None)
        if len(args) == 1 and isinstance(args[0], Mapping):
            return (), dict(args[0]), target
        return args, {}, target
    if isinstance(batch, Tensor):
        return (batch,), {}, None
    raise TypeError(f"A batch must be a tensor, a tuple or list (inputs..., target), or a mapping, got {type(batch)}.")


def device_of(module: nn.Module) -> torch.device | None:
    """The device of a module's first parameter or buffer."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        return tensor.device
    return None


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


def track(items: Iterable[T], what: str, *, total: int | None = None, show: bool | None = None) -> Iterator[T]:
    """Iterate with a progress bar once two seconds have passed, on a terminal that has `rich` installed."""
    if show is None:
        show = sys.stderr.isatty()
    if total is None:
        with contextlib.suppress(TypeError):
            total = len(items)  # type: ignore[arg-type]
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        show = False
    if not show:
        yield from items
        return
    started, progress, task = time.monotonic(), None, None
    try:
        for done, item in enumerate(items):
            if progress is None and time.monotonic() - started > _PATIENCE:
                columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
                progress = Progress(*columns, console=Console(stderr=True), transient=True)
                progress.start()
                task = progress.add_task(what, total=total)
            if progress is not None and task is not None:
                progress.update(task, completed=done)
            yield item
    finally:
        if progress is not None:
            progress.stop()


def _to(value: Any, device: torch.device | None) -> Any:
    if device is None:
        return value
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {k: _to(v, device) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_to(v, device) for v in value]
    return value
