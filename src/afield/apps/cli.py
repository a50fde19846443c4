"""The command line: `afield COMMAND --help`. Each command is a dataclass; its fields are the flags."""

import sys
from collections.abc import Callable

try:
    import tyro

    from afield.apps.demo import Demo
except ImportError as error:
    raise SystemExit(f'{error}\nThe command line needs an extra: pip install "afield[cli]"') from error

from afield.version import __version__

COMMANDS: dict[str, Callable[..., Demo]] = {"demo": Demo}


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        print(f"afield {__version__}")
        return
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog="afield", description=__doc__, args=arguments or ["--help"]
    )
    try:
        command.run()
    except (ValueError, OSError) as error:
        raise SystemExit(f"afield: {error}") from error


if __name__ == "__main__":
    main()
