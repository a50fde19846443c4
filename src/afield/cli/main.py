"""The command line: `afield COMMAND --help`. Each command is a dataclass; its fields are the flags."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

try:
    import tyro

    from afield.cli import train
    from afield.cli.card import Card
    from afield.cli.demo import Demo
    from afield.cli.export import Export
    from afield.cli.report import Report
    from afield.cli.reproduce import Reproduce
    from afield.cli.score import Score
    from afield.cli.serve import Serve
    from afield.cli.settings import ShowSettings
    from afield.cli.sweep import Sweep
except ImportError as error:
    raise SystemExit(f'{error}\nThe command line needs an extra: pip install "afield[cli]"') from error

from afield.errors import NotFitted
from afield.experiment.suites import SUITES
from afield.methods import METHODS
from afield.tasks import TASKS
from afield.version import __version__


class Command(Protocol):
    def run(self) -> None: ...


COMMANDS: dict[str, Callable[..., Command]] = {
    "demo": Demo,
    "train": train.Train,
    "evaluate": train.Evaluate,
    "sweep": Sweep,
    "reproduce": Reproduce,
    "report": Report,
    "card": Card,
    "export": Export,
    "score": Score,
    "serve": Serve,
    "settings": ShowSettings,
}
# The defaults of a command's flags, where they depend on other arguments.
DEFAULTS: Mapping[str, Callable[[list[str]], Any]] = {"train": train.defaults}
NAMES = {"train": ("tasks", "methods"), "sweep": ("tasks", "methods"), "reproduce": ("suites", "methods")}
REGISTRIES: Mapping[str, Mapping[str, Any]] = {"tasks": TASKS, "methods": METHODS, "suites": SUITES}


def main(arguments: list[str] | None = None) -> None:
    """Run a command; its errors are one line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        print(f"afield {__version__}")
        return
    try:
        parse(arguments or ["--help"]).run()
    except (ValueError, OSError, ImportError, NotFitted) as error:
        raise SystemExit(f"afield: {error}") from error
    except KeyboardInterrupt as stop:
        raise SystemExit("afield: stopped. The same command goes on after the last finished epoch.") from stop


def parse(arguments: list[str]) -> Command:
    """The command that the arguments name, with its flags."""
    name, *rest = arguments
    if name not in COMMANDS:
        return tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="afield", description=__doc__, args=arguments)
    command = COMMANDS[name]
    lists = [f"{what.capitalize()}: {', '.join(REGISTRIES[what])}." for what in NAMES.get(name, ())]
    default = DEFAULTS[name](rest) if name in DEFAULTS else None
    return tyro.cli(
        command,
        prog=f"afield {name}",
        description="\n\n".join([(command.__doc__ or "").strip(), *lists]),
        args=rest,
        **({} if default is None else {"default": default}),
    )


if __name__ == "__main__":
    main()
