"""Registries: named values whose unknown names answer with the nearest known ones."""

import difflib
from collections.abc import Iterator, MutableMapping
from typing import TypeVar

T = TypeVar("T")


class UnknownName(KeyError, ValueError):
    """A name that a registry does not hold; the message lists near misses and all known names."""

    def __str__(self) -> str:
        return str(self.args[0])


class Registry(MutableMapping[str, T]):
    """A dictionary of one kind of thing. A taken name is refused, an unknown one is answered with help.

    >>> SHAPES = Registry[int]("shape", square=4)
    >>> SHAPES["sqare"]
    Traceback (most recent call last):
    afield.registry.UnknownName: Unknown shape 'sqare'. Did you mean 'square'? Known: square.
    """

    def __init__(self, kind: str, /, **entries: T) -> None:
        self.kind = kind
        self._entries: dict[str, T] = dict(entries)

    def check(self, name: str) -> str:
        """The name itself, if it is known; an error that lists the known ones otherwise."""
        if name in self._entries:
            return name
        close = difflib.get_close_matches(str(name), self._entries, n=2)
        hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise UnknownName(f"Unknown {self.kind} {name!r}.{hint} Known: {', '.join(self._entries)}.")

    def __getitem__(self, name: str) -> T:
        return self._entries[self.check(name)]

    def __setitem__(self, name: str, value: T) -> None:
        if name in self._entries:
            raise ValueError(f"A {self.kind} named {name!r} is registered already; delete it first to replace it.")
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        del self._entries[self.check(name)]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}: {', '.join(self)})"
