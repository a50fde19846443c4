"""What mkdocs is to do besides: pages from beside README, the help of every command, links out of docs/."""

import contextlib
import io
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
COMMANDS = "reference/cli.md"
FROM_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md")
_LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages that lie beside README."""
    for name in FROM_ROOT:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, COMMANDS, content=commands_page()))
    return files


def commands_page() -> str:
    """The help of every command."""
    from afield.cli.main import GROUPS, main, summary

    parts = ["# Command line", f"```text\n{summary()}\n```"]
    for title, commands in GROUPS.items():
        parts.append(f"## {title}")
        for name in commands:
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
                main([name, "--help"])
            parts.append(f"### afield {name}\n\n```text\n{said.getvalue().rstrip()}\n```")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Without the comments that say where numbers come from; links to files of the repository lead to the repository.

    The pages are also read on the repository's own site, so that their links are relative to their place in docs/.
    """
    name = page.file.src_uri
    here = posixpath.dirname("" if name in FROM_ROOT else f"docs/{name}")

    def lead(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, match[2]))
        inside = target.removeprefix("docs/") if target.startswith("docs/") else target
        if (target.startswith("docs/") or target in FROM_ROOT) and files.get_file_from_path(inside) is not None:
            start = posixpath.dirname(name)
            return f"{match[1]}{posixpath.relpath(inside, start or '.')}{match[3]}"
        if (ROOT / target).exists():
            return f"{match[1]}{config.repo_url}/blob/main/{target}{match[3]}"
        return match[0]  # mkdocs complains

    parts = re.split(r"(^```.*?^```$)", _COMMENT.sub("", markdown), flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(lead, part) for part in parts)
