"""`afield completion`: what a shell needs to complete commands and flags."""

from dataclasses import dataclass
from typing import Literal

import tyro


@dataclass(frozen=True)
class Completion:
    """Print a script that makes the shell complete commands and flags; it is read once by each shell."""

    shell: tyro.conf.Positional[Literal["bash", "zsh", "tcsh"]]
    """Which shell."""

    def run(self) -> None:
        from afield.cli.main import COMMANDS

        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="afield", args=["--tyro-print-completion", self.shell])
