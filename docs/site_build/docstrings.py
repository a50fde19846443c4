"""Our docstrings as Markdown: columns of names and meanings become lists, examples become blocks of code.

name   what it is,
       which may go on in the next line
other  what that is
>>> afield.sngp(net)
"""

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"(?P<names>\*{0,2}[A-Za-z_][\w.]*(?:, \*{0,2}[A-Za-z_]\w*)*)(?P<gap> {2,})(?P<meaning>\S.*)")


class Columns(griffe.Extension):
    """Rewrites every docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """The docstring, paragraph by paragraph."""
    return "\n\n".join(_paragraph(each) for each in re.split(r"\n{2,}", text.strip("\n")))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if lines[0].startswith(">>> "):
        return "\n".join(["```pycon", *lines, "```"])
    first = next((k for k, line in enumerate(lines) if _ENTRY.fullmatch(line)), None)
    if first is None or any(line.startswith("    ") for line in lines[:first]):
        return text
    column = len(_ENTRY.fullmatch(lines[first])["names"]) + len(_ENTRY.fullmatch(lines[first])["gap"])  # type: ignore[index]
    items: list[str] = []
    for line in lines[first:]:
        entry = _ENTRY.fullmatch(line)
        if entry is not None:
            names = ", ".join(f"**`{name}`**" for name in entry["names"].split(", "))
            items.append(f"- {names}: {entry['meaning']}")
        elif line.startswith(" " * min(column, 4)):
            items[-1] += f" {line.strip()}"
        else:
            return text  # not a column of names
    return "\n".join([*lines[:first], *([""] if first else []), *items])
