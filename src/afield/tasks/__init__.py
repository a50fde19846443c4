"""Tasks: data with in-domain, shifted and OOD parts. `TASKS[name](seed)` makes one."""

from collections.abc import Callable

from afield.registry import Registry
from afield.tasks import toy
from afield.tasks.task import Defaults, Task

TASKS: Registry[Callable[[int], Task]] = Registry("task")
TASKS["two-moons"] = toy.two_moons
TASKS["two-ovals"] = toy.two_ovals
TASKS["circles"] = toy.circles
TASKS["blobs"] = toy.blobs
TASKS["digits"] = toy.digits

__all__ = ["TASKS", "Defaults", "Task"]
