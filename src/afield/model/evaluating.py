"""Evaluation mode that threads can share."""

import os
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from afield.gp.snapshot import Lock

_LOCK = Lock(rank=2)
_MODES: dict[int, list[Any]] = {}  # by the id of a module: readers, modes, and the module
_FLAT = "_flat_modules"  # where a module has its `_Flat`
_WITHOUT_MODE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CHILDREN_AND_MODE = itemgetter("_modules", "training")


class evaluating:
    """A context: evaluation mode without gradients; every submodule's own mode comes back afterwards.

    Threads share the module, hence its modes: the first to enter notes them, the last to leave brings them back. A
    module that is in evaluation mode already needs neither.

    gradients  follow what is computed nevertheless
    """

    __slots__ = ("_entry", "_gradients", "_module", "_with_gradients")

    def __init__(self, module: nn.Module, *, gradients: bool = False) -> None:
        self._module, self._gradients = module, gradients

    def __enter__(self) -> None:
        self._entry: list[Any] | None = None
        if _MODES or _trains(self._module) or _MODES:  # again: another thread may have entered while this one looked
            self._enter_together()
        self._with_gradients = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._gradients)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._with_gradients)
        if self._entry is not None:
            self._leave_together(self._entry)

    def _enter_together(self) -> None:
        module = self._module
        with _LOCK:
            self._entry = _MODES.setdefault(id(module), [0, [(m, m.training) for m in module.modules()], module])
            self._entry[0] += 1
            module.eval()

    def _leave_together(self, entry: list[Any]) -> None:
        with _LOCK:
            entry[0] -= 1
            if not entry[0]:
                _MODES.pop(id(self._module), None)
                for m, training in entry[1]:
                    m.training = training


class _Flat:
    """All modules of a module in evaluation mode, walked once.

    To look at them again costs a tenth of a walk: the loops run in C, and touch as few objects as they can, because all
    have left the processor's caches since the last pass. It holds the dictionaries of the modules.

    Of a layer of torch's own that is parametrised, only the parametrisations have a mode. What is around them is looked
    at for other children, and no closer.
    """

    __slots__ = ("_children_and_mode", "_found", "_leaves", "_parents", "_states")

    def __init__(self, modules: list[nn.Module]) -> None:
        closely = _looked_at_closely(modules)
        self._states = [m.__dict__ for m in closely]
        self._children_and_mode = [(m._modules, False) for m in closely]
        children = [m._modules for m in modules]
        self._parents, self._leaves = ([c for c in children if bool(c) is some] for some in (True, False))
        self._found = list(chain.from_iterable(map(dict.values, self._parents)))

    def is_all_of(self, module: nn.Module) -> bool:
        """Whether these are the modules of that one, as it is now, and none is in training mode."""
        return (
            self._states[0] is module.__dict__  # and not those of what it is a shallow copy of
            and list(map(_CHILDREN_AND_MODE, self._states)) == self._children_and_mode
            and not any(self._leaves)
            and list(chain.from_iterable(map(dict.values, self._parents))) == self._found
        )

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a module starts without."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _looked_at_closely(modules: list[nn.Module]) -> list[nn.Module]:
    """All but parametrised layers of torch that run alike in both modes, and what holds their parametrisations."""
    no_mode = set()
    for m in modules:
        if parametrize.is_parametrized(m) and type(m).__mro__[1] in _WITHOUT_MODE and "forward" not in m.__dict__:
            chains: Any = m.parametrizations
            no_mode |= {m, chains, *(chain for chain in chains.values())}
    return [m for m in modules if m not in no_mode]


def _trains(module: nn.Module) -> bool:
    """Whether any module in it is in training mode."""
    if torch.compiler.is_compiling():
        return any(m.training for m in module.modules())
    flat: _Flat | None = module.__dict__.get(_FLAT)
    if flat is not None and flat.is_all_of(module):
        return False
    modules = list(module.modules())
    if any(m.training for m in modules):
        return True
    if all("training" in m.__dict__ and isinstance(m.__dict__.get("_modules"), dict) for m in modules):
        module.__dict__[_FLAT] = _Flat(modules)  # torch's scripted modules have neither
    return False


def _after_fork() -> None:
    """In a child process: the threads that were reading are not there, and their modes come back now."""
    for _, modes, _ in list(_MODES.values()):
        for m, training in modes:
            m.training = training
    _MODES.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
