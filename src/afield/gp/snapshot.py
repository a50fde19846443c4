"""Many readers, one writer: a module whose tensors are replaced and never written into.

A reader takes a `frozen_copy`, which goes on as it is whatever becomes of the original. Locks survive copying, pickling
and forking: a child process finds them free, and a fork waits for changes that are under way.
"""

import os
import threading
import weakref
from typing import Any, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)
_LOCKS: "weakref.WeakSet[Lock]" = weakref.WeakSet()


class Lock:
    """A re-entrant lock; a copy of it is another lock.

    rank  who holds a lock may take those of a higher rank: a fork, which takes all, does so in this order
    """

    def __init__(self, rank: int = 0) -> None:
        self._lock, self.rank = threading.RLock(), rank
        _LOCKS.add(self)

    def __enter__(self) -> "Lock":
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Lock":
        return Lock(self.rank)

    def __reduce__(self) -> tuple[type["Lock"], tuple[int]]:
        return Lock, (self.rank,)

    def renew(self) -> None:
        """In a child process: the threads that held it are not there."""
        self._lock = threading.RLock()


def frozen_copy(module: Module, *children: str) -> Module:
    """The module with dictionaries of its own, and so these children of it; tensors and all else are shared."""
    copy = module.__class__.__new__(module.__class__)
    copy.__dict__.update(module.__dict__)
    copy.__dict__["_buffers"] = dict(module._buffers)
    modules = dict(module._modules)
    for name in children:
        child = modules[name]
        modules[name] = None if child is None else frozen_copy(child)
    copy.__dict__["_modules"] = modules
    return copy


def adopt(module: nn.Module, changed: nn.Module, *children: str) -> None:
    """Take over the buffers, and so those of these children, of a frozen copy that was changed."""
    module.__dict__["_buffers"] = dict(changed._buffers)
    for name in children:
        own, other = module._modules[name], changed._modules[name]
        if own is not None and other is not None:
            adopt(own, other)


_HELD: list[Lock] = []


def _before_fork() -> None:
    _HELD.extend(sorted(_LOCKS, key=lambda lock: lock.rank))
    for lock in _HELD:
        lock._lock.acquire()


def _after_fork_in_parent() -> None:
    while _HELD:
        _HELD.pop()._lock.release()


def _after_fork_in_child() -> None:
    _HELD.clear()
    for lock in _LOCKS:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
