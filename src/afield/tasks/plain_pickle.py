"""Read a pickle without running it: dictionaries, lists, numbers, byte strings and arrays of integers.

A pickle is a program for a stack machine, whose instructions can call any function. Python's own unpickler can be
forbidden the functions, but numpy's part of it still makes arrays of objects out of raw bytes, and a crash of the
process out of those. `load` has a machine of its own. It knows the few instructions that make plain data, and notes an
array's dtype, shape and bytes, which are compared before the array is made.
"""

import io
import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from afield.errors import DataDamaged

_RECONSTRUCT = {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}
_NAMES = _RECONSTRUCT | {("numpy", "ndarray"), ("numpy", "dtype")}
_DTYPES = ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "b1")
_MOST_DIMENSIONS = 32


@dataclass(frozen=True)
class _Name:
    module: str
    name: str


@dataclass
class _Dtype:
    kind: str
    order: str = "|"


@dataclass
class _Array:
    """What a pickle says of an array."""

    shape: tuple[int, ...] = ()
    dtype: _Dtype = field(default_factory=lambda: _Dtype("u1"))
    by_columns: bool = False
    content: bytes = b""

    def make(self) -> np.ndarray:
        if self.dtype.kind not in _DTYPES or self.dtype.order not in "<>|=":
            raise ValueError(f"an array of {self.dtype.kind!r}, expected integers")
        if len(self.shape) > _MOST_DIMENSIONS or not all(type(n) is int and n >= 0 for n in self.shape):
            raise ValueError("an array without a proper shape")
        dtype = np.dtype(self.dtype.order + self.dtype.kind)
        if math.prod(self.shape) * dtype.itemsize != len(self.content):
            raise ValueError(f"an array {self.shape} of {dtype} in {len(self.content)} bytes")
        return np.frombuffer(self.content, dtype).reshape(self.shape, order="F" if self.by_columns else "C").copy()


def load(content: bytes) -> dict[bytes, Any]:
    """The dictionary in a pickle: its values by byte string. ValueError if there is anything else in it."""
    result = _Machine().run(content)
    if not isinstance(result, dict):
        raise ValueError(f"it holds a {type(result).__name__}, expected a dictionary")
    return {key: value.make() if isinstance(value, _Array) else value for key, value in result.items()}


class _Machine:
    """A stack, a memory and the marks on the stack, as `pickletools` describes them."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memory: dict[int, Any] = {}

    def run(self, content: bytes) -> Any:
        for instruction, argument, _ in pickletools.genops(io.BytesIO(content)):
            name = instruction.name
            if name == "STOP":
                return self.stack.pop()
            if name in _PUSHED:
                self.stack.append(_PUSHED[name](argument))
            elif name in _DONE:
                _DONE[name](self, argument)
            elif name not in ("PROTO", "FRAME"):
                raise ValueError(f"it has the instruction {name}, which plain data does not need")
        raise ValueError("it has no end")

    def pop_to_mark(self) -> list[Any]:
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def pop(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("it takes more from the stack than there is")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def push_name(self, module: Any, name: Any) -> None:
        if isinstance(module, bytes) and isinstance(name, bytes):
            module, name = module.decode("latin-1"), name.decode("latin-1")
        if not isinstance(module, str) or not isinstance(name, str) or (module, name) not in _NAMES:
            raise DataDamaged(
                f"This pickle asks for {str(module)[:80]}.{str(name)[:80]}, which was not run: a batch of CIFAR holds "
                "arrays only. Get the file from https://www.cs.toronto.edu/~kriz/cifar.html."
            )
        self.stack.append(_Name(module, name))

    def call(self) -> None:
        function, arguments = self.pop(2)
        if not isinstance(function, _Name) or not isinstance(arguments, tuple) or not arguments:
            raise ValueError("it calls what is no function")
        if (function.module, function.name) in _RECONSTRUCT:
            self.stack.append(_Array())
        elif function.name == "dtype" and isinstance(arguments[0], bytes | str):
            self.stack.append(_Dtype(_text(arguments[0])))
        else:
            raise ValueError(f"it calls {function.name} otherwise than an array does")

    def build(self) -> None:
        target, state = self.pop(2)
        if isinstance(target, _Dtype) and isinstance(state, tuple) and len(state) >= 2:
            target.order = _text(state[1])
        elif isinstance(target, _Array) and isinstance(state, tuple) and len(state) == 5:
            _, shape, dtype, by_columns, content = state
            if not (isinstance(shape, tuple) and isinstance(dtype, _Dtype) and isinstance(content, bytes)):
                raise ValueError("an array of something else than bytes")
            target.shape, target.dtype, target.by_columns, target.content = shape, dtype, bool(by_columns), content
        else:
            raise ValueError("it builds something else than an array")
        self.stack.append(target)

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise ValueError("it sets items of what is no dictionary")
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, bytes | str):  # the hash of a tuple in a tuple in a tuple ... ends the process
                raise ValueError("a dictionary by something else than text")
            target[key.encode() if isinstance(key, str) else key] = value

    def extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError("it appends to what is no list")
        self.stack[-1].extend(values)


def _text(value: Any) -> str:
    if not isinstance(value, bytes | str):
        raise ValueError("it names a dtype otherwise than by text")
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _as_bytes(text: str) -> bytes:
    return text.encode("latin-1")


# What pushes a value made of its argument. Text of Python 2 is bytes.
_PUSHED: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), _as_bytes),
    **dict.fromkeys(("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), bytes),
    **dict.fromkeys(("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), str),
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"), lambda value: value),
    **dict.fromkeys(("FLOAT", "BINFLOAT"), float),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
}


def _make_dict(machine: _Machine, _: Any) -> None:
    values = machine.pop_to_mark()
    machine.stack.append({})
    machine.set_items(values)


def _put(machine: _Machine, place: Any) -> None:
    machine.memory[int(place)] = machine.stack[-1]


def _push_global(machine: _Machine, argument: str) -> None:
    module, _, name = argument.partition(" ")
    machine.push_name(module, name)


_DONE: dict[str, Callable[[_Machine, Any], Any]] = {
    "MARK": lambda m, _: m.marks.append(len(m.stack)),
    "POP": lambda m, _: m.pop(1),
    "POP_MARK": lambda m, _: m.pop_to_mark(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    "DICT": _make_dict,
    "LIST": lambda m, _: m.stack.append(m.pop_to_mark()),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.pop_to_mark())),
    "TUPLE1": lambda m, _: m.stack.append(tuple(m.pop(1))),
    "TUPLE2": lambda m, _: m.stack.append(tuple(m.pop(2))),
    "TUPLE3": lambda m, _: m.stack.append(tuple(m.pop(3))),
    "SETITEM": lambda m, _: m.set_items(m.pop(2)),
    "SETITEMS": lambda m, _: m.set_items(m.pop_to_mark()),
    "APPEND": lambda m, _: m.extend(m.pop(1)),
    "APPENDS": lambda m, _: m.extend(m.pop_to_mark()),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _put),
    "MEMOIZE": lambda m, _: _put(m, len(m.memory)),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, place: m.stack.append(m.memory[int(place)])),
    "GLOBAL": _push_global,
    "INST": _push_global,
    "STACK_GLOBAL": lambda m, _: m.push_name(*m.pop(2)),
    "REDUCE": lambda m, _: m.call(),
    "BUILD": lambda m, _: m.build(),
}
