"""The command line: `afield COMMAND --help`. Each command is a dataclass; its fields are the flags."""

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

try:
    import tyro

    from afield.cli import train
    from afield.cli.card import Card
    from afield.cli.completion import Completion
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


GROUPS: Mapping[str, Mapping[str, Callable[..., Command]]] = {
    "See it work": {"demo": Demo},
    "Train and compare": {
        "train": train.Train,
        "evaluate": train.Evaluate,
        "sweep": Sweep,
        "reproduce": Reproduce,
        "report": Report,
    },
    "Use a trained model": {"score": Score, "serve": Serve, "export": Export, "card": Card},
    "Look up": {"settings": ShowSettings, "completion": Completion},
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
EXAMPLES = {
    "demo": "afield demo --task two-ovals",
    "train": "afield train two-moons --method sngp --seed 1 --epochs 50",
    "evaluate": "afield evaluate runs/two-moons/sngp/1 --ood my.npz",
    "sweep": "afield sweep two-moons --grid bound=0.5,0.95,2",
    "reproduce": "afield reproduce toy --preset smoke",
    "report": "afield report runs --out report",
    "score": "afield score runs/two-moons/sngp/1 points.csv --out scores --fdr 0.1",
    "serve": "afield serve runs/two-moons/sngp/1 --port 8080",
    "export": "afield export runs/two-moons/sngp/1 --out model.onnx --alpha 0.05",
    "card": "afield card runs/two-moons/sngp/1",
    "settings": "afield settings > settings.md",
    "completion": 'eval "$(afield completion bash)"     in ~/.bashrc',
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
    if arguments in ([], ["-h"], ["--help"]):
        print(summary())
        return
    try:
        parse(arguments).run()
    except (ValueError, OSError, ImportError, NotFitted) as error:
        raise SystemExit(f"afield: {error}") from error
    except KeyboardInterrupt as stop:
        raise SystemExit("afield: stopped. The same command goes on after the last finished epoch.") from stop


def summary() -> str:
    """What `afield --help` shows: the commands, by what people want."""
    lines = [
        "usage: afield COMMAND [--flags]",
        "",
        "`afield COMMAND --help` shows the flags of a command and an example.",
    ]
    for title, commands in GROUPS.items():
        lines += ["", title]
        for name, command in commands.items():
            (first, *_) = re.split(r"(?<=[.;])\s|\n\n", (command.__doc__ or "").strip())
            lines.append(f"  {name:12}{' '.join(first.split()).rstrip('.;')}")
    return "\n".join([*lines, "", "Begin with: afield demo"])


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
        description="\n\n".join([(command.__doc__ or "").strip(), *lists, f"Example: {EXAMPLES[name]}"]),
        args=rest,
        **({} if default is None else {"default": default}),
    )


if __name__ == "__main__":
    main()
