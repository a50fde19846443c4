"""A progress bar for loops that may take long."""

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
_PATIENCE = 2.0  # seconds before a progress bar appears


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
