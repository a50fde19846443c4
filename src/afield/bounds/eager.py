"""`eager`: run a function as plain Python also from inside a compiled graph."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

P = ParamSpec("P")
R = TypeVar("R")


def eager(fn: Callable[P, R]) -> Callable[P, R]:
    """Like `torch.compiler.disable`, which imports the compiler (1.3 s) whether or not anything is compiled."""
    disabled = _disable_dynamo(fn)

    @functools.wraps(fn)
    def choose(*args: P.args, **kwargs: P.kwargs) -> R:
        return (disabled if torch.compiler.is_compiling() else fn)(*args, **kwargs)

    return choose
