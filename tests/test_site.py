"""What the site is made of; `make docs` builds it, with warnings as errors, and looks for dead links."""

import importlib.util
import re
import subprocess
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import afield

ROOT = Path(__file__).parents[1]


def part(name: str) -> ModuleType:
    """A module of docs/site_build, which is no package."""
    pytest.importorskip("mkdocs", reason='needs pip install "afield[docs]"')
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site_build" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        ("A line.", "A line."),
        ("a   what it is,\n    which goes on\nbc  other", "- **`a`**: what it is, which goes on\n- **`bc`**: other"),
        ("Before:\na  one\nb  two", "Before:\n\n- **`a`**: one\n- **`b`**: two"),
        ("p, q  two of them", "- **`p`**, **`q`**: two of them"),
        ("    x = y  z", "    x = y  z"),
        ("Text.\n\n>>> f(1)\n2", "Text.\n\n```pycon\n>>> f(1)\n2\n```"),
        ("One sentence\nand another  one.", "One sentence\nand another  one."),
    ],
)
def test_docstrings_become_markdown(docstring: str, markdown: str):
    assert part("docstrings").as_markdown(docstring) == markdown


def test_dead_links_are_found(tmp_path: Path):
    (tmp_path / "a.html").write_text('<a href="b.html#here"></a><a href="c.html"></a><img src="https://x.org/y.png">')
    (tmp_path / "b.html").write_text('<h1 id="there"></h1><a href="a.html"></a><a href="https://x.org"></a>')
    assert sorted(part("hooks").find_dead_links(tmp_path)) == [
        "a.html loads https://x.org/y.png",
        "a.html: b.html#here names no place of that page",
        "a.html: c.html",
    ]


def test_every_page_has_its_place():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = set(re.findall(r"(\S+\.md)$", nav, re.MULTILINE))
    written = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert named - written == {"CHANGELOG.md", "CONTRIBUTING.md", "reference/cli.md"}
    assert not written - named


def test_every_public_name_is_in_the_reference():
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    missing = [name for name in afield.__all__ if not re.search(rf"^::: [\w.]+\.{name}$", text, re.MULTILINE)]
    assert missing == ["__version__"]


def test_llms_txt_leads_somewhere():
    text = (ROOT / "llms.txt").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 15
    assert not [link for link in links if not (ROOT / link).exists()]
    names = set(re.findall(r"\bafield\.([a-z]\w*)", text))
    assert len(names) > 6
    assert not [name for name in names if not hasattr(afield, name)]


def test_the_version_has_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "afield.version.__version__"}
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [afield.__version__]


def test_the_release_is_a_script_that_bash_reads():
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "release")], check=True)
