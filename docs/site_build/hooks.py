"""What mkdocs is to do besides: pages from beside README, the help of every command, links out of docs/."""

import contextlib
import html
import io
import posixpath
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
COMMANDS = "reference/cli.md"
FROM_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md")
SHIM = "https://unpkg.com/iframe-worker/shim"  # what the theme would load
_LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Pages that lie beside README, and the help of every command."""
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


def on_post_page(output: str, *, page: Any, config: MkDocsConfig) -> str:
    """Nothing is asked for elsewhere: no number of stars at GitHub, and a script of the search comes with the site."""
    output = output.replace(' data-md-component="source"', "")
    return output.replace(SHIM, posixpath.relpath("site_build/iframe-worker.js", posixpath.dirname(page.url) or "."))


def on_post_build(*, config: MkDocsConfig) -> None:
    """No link of the finished site is dead, and no page loads anything from elsewhere."""
    complaints = find_dead_links(Path(config.site_dir))
    if complaints:
        raise PluginError("\n".join(["The site has dead links, or loads from elsewhere:", *complaints[:20]]))


def find_dead_links(site: Path) -> list[str]:
    """What is wrong with the links of the pages below a folder."""
    pages = {page: page.read_text(encoding="utf-8") for page in sorted(site.rglob("*.html")) if page.name != "404.html"}
    names = {page: set(re.findall(r'\b(?:id|name)="([^"]+)"', text)) for page, text in pages.items()}
    found = []
    for page, text in pages.items():
        loaded = re.findall(r'<(?:script|img|iframe)\b[^>]*\bsrc="(https?:[^"]+)"', text)
        loaded += re.findall(r'<link\b[^>]*rel="(?:stylesheet|preconnect)"[^>]*href="(https?:[^"]+)"', text)
        found += [f"{page.name} loads {address}" for address in loaded]
        for link in set(re.findall(r'<(?:a|img|script|link)\b[^>]*\b(?:href|src)="([^"]+)"', text)):
            address, _, anchor = html.unescape(link).partition("#")
            if re.match(r"[a-z]+:", address):
                continue
            target = (page.parent / unquote(address)).resolve() if address else page
            if not target.exists():
                found.append(f"{page.name}: {link}")
            elif anchor and target in names and unquote(anchor) not in names[target] and not anchor.startswith("__"):
                found.append(f"{page.name}: {link} names no place of that page")
    return found
