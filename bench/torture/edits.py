"""Fields of a saved model's index, changed by hand to values that could be right.

Right is a message, or the same model (where only the layout of the file has changed).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import afield
from afield.model.saving import INDEX, read_index
from bench.torture.fault import Inject, Kind, Wrong, refuse_or_fail
from bench.torture.models import fitted, identity, network

WORDS = (
    *("sngp", "attach", "categorical", "bernoulli", "gaussian", "poisson", "shared", "per_class", "unit", "auto"),
    *("likelihood", "rbf", "matern32", "0", "2", "net.2", "standardize", "a", "0.1.0", "2.0.0"),
)


@contextmanager
def opened(folder: Path) -> Iterator[Inject]:
    texts, right = {}, {}
    for make in ("sngp", "attach"):
        place = afield.save(fitted(make), folder / make, metadata={"labels": ["a", "b", "c"], "threshold": 0.5})
        texts[place] = (place / INDEX).read_text(encoding="utf-8")
        right[place] = _read(place)

    def inject(random: Random) -> None:
        place = random.choice(list(texts))
        index = json.loads(texts[place])
        done = "; ".join(_edit(index, random) for _ in range(random.choice((1, 1, 1, 2))))
        text = json.dumps(index, indent=random.choice((None, 2, 4)), sort_keys=random.random() < 0.3)
        (place / INDEX).write_text(text, encoding="utf-8")
        try:
            answer = _read(place)
        except Exception as error:
            refuse_or_fail(error, f"{place.name}: {done}", [INDEX, str(place)])
        else:
            if answer != right[place]:
                raise Wrong(f"{place.name}: {done}: loaded without a word, and differs")
        finally:
            (place / INDEX).write_text(texts[place], encoding="utf-8")

    yield inject


KIND = Kind("edits", "fields of `afield.json` changed to other plausible values", opened, share=0.08)


def _read(folder: Path) -> Any:
    return identity(afield.load(folder, network(5))), read_index(folder)


def _edit(index: dict[str, Any], random: Random) -> str:
    """Change one field in place: another value, gone, another name, or one more."""
    holders = list(_holders(index))
    holder = random.choice(holders)
    key = random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
    before = holder[key]
    how = random.choices(("value", "gone", "name", "more", "layout"), (12, 1, 1, 1, 1))[0]
    if how == "gone":
        del holder[key]
    elif how == "name" and isinstance(holder, dict):
        holder[random.choice(("output", "bound", "freeze", f"{key}s"))] = holder.pop(key)
    elif how == "more" and isinstance(holder, dict):
        holder[random.choice(("ridge", "bound", "classes", "rank", "momentum"))] = random.choice((0.5, 2, None, "a"))
    elif how != "layout":
        holder[key] = _other(before, random)
    return f"{how} of {key!r}, {str(before)[:40]!r}"


def _holders(value: Any) -> Iterator[Any]:
    """All objects and lists that hold something."""
    if isinstance(value, dict | list) and value:
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _holders(each)


def _other(value: Any, random: Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return random.choice((value + 1, value - 1, 2 * value, 0, -value, 10**9, float(value) + 0.5))
    if isinstance(value, float):
        return random.choice((value + 4, value * 1.01, value / 2, -value, 0.0, 1e30, int(value) + 1))
    if isinstance(value, str):
        digits = value[:-1] + random.choice("0123456789abcdef")
        return random.choice((random.choice(WORDS), digits, "../" + value, value.upper(), ""))
    return random.choice((None, 0, 1, "a", [], {}, 0.95, {"0": 4.95}))
