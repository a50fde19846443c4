"""README, docs and records: what they point to is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("results/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [link.partition("#")[0] for link in links if not link.startswith(("http", "#"))]
    assert not [link for link in local if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_records_that_are_named_are_there(page: Path):
    named = re.findall(r"`((?:results|bench/results)/[\w./-]+\.\w+)`", page.read_text(encoding="utf-8"))
    assert not [name for name in named if not (ROOT / name).exists()]
