"""One fault: what may come of it, and how that is decided.

survived  the answer is the right one, or that of the undamaged model
refused   an error of afield's own, with a message (and the name of the file, where a file was damaged)
lost      a crash, a hang, a foreign traceback, lost data
wrong     another answer, without a word
"""

import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import Random

import afield

_PACKAGE = str(Path(afield.__file__).parent)


class Outcome(StrEnum):
    SURVIVED = "survived"
    REFUSED = "refused"
    LOST = "lost"
    WRONG = "wrong"


@dataclass(frozen=True)
class Result:
    """What came of a fault; `text` tells what was done and how it ended."""

    outcome: Outcome
    text: str = ""


class Wrong(Exception):
    """A wrong answer was given without a word."""


class Lost(Exception):
    """A crash, a hang, or data that is gone."""


class Refused(Exception):
    """A message that was seen elsewhere, such as in another process."""


Inject = Callable[[Random], None]
"""Does one fault. Returns if the answer was right; raises `Wrong`, `Lost`, or the error that was met."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    what   in the words of the table
    open   a folder to work in -> the function that injects, until the context ends
    share  of the time
    limit  seconds that a fault may take; more is a hang
    """

    name: str
    what: str
    open: Callable[[Path], AbstractContextManager[Inject]]
    share: float
    limit: float = 30.0


def outcome_of(inject: Inject, random: Random) -> Result:
    """Inject one fault and say what came of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inject(random)
    except Wrong as error:
        return Result(Outcome.WRONG, _text(error))
    except Lost as error:
        return Result(Outcome.LOST, _text(error))
    except Refused as error:
        return Result(Outcome.REFUSED, _text(error))
    except Exception as error:
        return Result(Outcome.REFUSED if is_message(error) else Outcome.LOST, _text(error))
    return Result(Outcome.SURVIVED)


def is_message(error: BaseException, names: Iterable[str] = ()) -> bool:
    """Whether afield itself raised this, as an error for its user, and named one of `names` if there are any."""
    frames = traceback.extract_tb(error.__traceback__)
    own = bool(frames) and frames[-1].filename.startswith(_PACKAGE)
    kind = isinstance(error, ValueError | TypeError) or type(error).__module__ == "afield.errors"
    names = tuple(names)
    return own and kind and bool(str(error)) and (not names or any(name in str(error) for name in names))


def refuse_or_fail(error: Exception, done: str, names: Iterable[str] = ()) -> None:
    """Raise what an error amounts to: `Refused` for a message, else `Lost`. `done` is what was injected."""
    if is_message(error, names):
        raise Refused(f"{done}: {type(error).__name__}: {error}") from error
    why = "a message that names no file" if is_message(error) else "a foreign error"
    raise Lost(f"{done}: {why}, {type(error).__name__}: {error} [{_place(error)}]") from error


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    return ", ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in (own[-1:] + frames[-1:]))


def _text(error: BaseException) -> str:
    if isinstance(error, Wrong | Lost | Refused):
        return str(error)
    return f"{type(error).__name__}: {error} [{_place(error)}]"
