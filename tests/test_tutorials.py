"""Every tutorial runs as it stands, within two minutes of processor time, and its page shows the code that runs."""

import time

import pytest

from bench import tutorials

PROMISED = {"resnet", "intents", "tables", "threshold", "drift", "segmentation", "regression", "audit"}
SECONDS = 120


def test_the_promised_tutorials_are_there():
    assert set(tutorials.TUTORIALS) == PROMISED
    named = (tutorials.FOLDER / "index.md").read_text(encoding="utf-8")
    assert all(f"({name}.md)" in named for name in PROMISED)


@pytest.mark.parametrize("name", tutorials.TUTORIALS)
def test_the_page_shows_the_code_of_the_script(name: str):
    """`python -m bench.tutorials NAME` writes the page again."""
    cells = tutorials.read_cells(name)
    page = (tutorials.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert tutorials.code_of_page(name) == [cell.source for cell in cells if cell.kind == "code"]
    assert all(cell.source in page for cell in cells if cell.kind == "text")
    assert sum(cell.kind == "hidden" for cell in cells) == 1, "one cell checks that the tutorial makes its point"
    assert "assert " in cells[-1].source


@pytest.mark.slow
@pytest.mark.parametrize("name", tutorials.TUTORIALS)
def test_the_tutorial_runs(name: str, tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    started = time.process_time()
    for cell, output in tutorials.run(name):
        assert cell.kind != "text" or not output.text
    assert time.process_time() - started < SECONDS
