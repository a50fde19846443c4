"""Run the tutorials and write their pages, with outputs and pictures: python -m bench.tutorials [NAME ...]

A tutorial is a notebook as a script (jupytext's percent format) in docs/tutorials: `# %% [markdown]` begins a cell of
text, `# %%` one of code, `# %% tags=["remove-cell"]` one that runs and is not shown. Jupyter opens it as a notebook
where jupytext is installed. The page NAME.md beside it has the cells in order, what each printed, the value of its last
expression, and the figures it left open as NAME-1.png and so on. `tests/test_tutorials.py` runs every script, and
compares its cells with those of the page.
"""

import ast
import contextlib
import io
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"
TUTORIALS = tuple(sorted(file.stem for file in FOLDER.glob("*.py")))
_STYLE = {"figure.dpi": 110, "axes.spines.top": False, "axes.spines.right": False, "savefig.bbox": "tight"}


class Cell(NamedTuple):
    kind: str  # text, code, hidden
    source: str


class Output(NamedTuple):
    text: str
    pictures: list[tuple[str, bytes]]  # title, PNG


def read_cells(name: str) -> list[Cell]:
    """The cells of a script."""
    return list(_cells((FOLDER / f"{name}.py").read_text(encoding="utf-8")))


def _cells(script: str) -> Iterator[Cell]:
    _, *parts = re.split(r"^# %%", script, flags=re.MULTILINE)
    for part in parts:
        head, _, body = part.partition("\n")
        if "[markdown]" in head:
            yield Cell("text", re.sub(r"^# ?", "", body, flags=re.MULTILINE).strip())
        else:
            yield Cell("hidden" if "remove-cell" in head else "code", body.strip())


def run(name: str) -> Iterator[tuple[Cell, Output]]:
    """Run the cells of a tutorial in order, in one namespace."""
    mpl.use("agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with mpl.rc_context(_STYLE):
        for cell in read_cells(name):
            yield cell, Output("", []) if cell.kind == "text" else _run_cell(cell.source, namespace, name)


def _run_cell(source: str, namespace: dict[str, Any], name: str) -> Output:
    from matplotlib import pyplot as plt

    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(compile(ast.Module(body, []), name, "exec"), namespace)
        value = None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), namespace)
        if value is not None and not plt.get_fignums():  # what drawing returns is no answer
            print(value)
    pictures = []
    for number in plt.get_fignums():
        figure, file = plt.figure(number), io.BytesIO()
        title = figure.get_suptitle() or next((axes.get_title() for axes in figure.axes if axes.get_title()), "")
        figure.savefig(file, format="png", metadata={"Software": None})
        pictures.append((title, file.getvalue()))
    plt.close("all")
    return Output(said.getvalue().rstrip(), pictures)


def write_page(name: str) -> Path:
    """Run a tutorial; write its page and its pictures."""
    started, count, parts = time.process_time(), 0, []
    for old in FOLDER.glob(f"{name}-*.png"):
        old.unlink()
    for cell, output in run(name):
        if cell.kind == "hidden":
            continue
        parts.append(cell.source if cell.kind == "text" else f"```python\n{cell.source}\n```")
        if output.text:
            parts.append(f"```text\n{output.text}\n```")
        for title, png in output.pictures:
            count += 1
            (FOLDER / f"{name}-{count}.png").write_bytes(png)
            parts.append(f"![{title}]({name}-{count}.png)")
    about = (
        f"*This page is what [{name}.py]({name}.py) printed and drew. Open it with jupytext, or run it as it stands.*"
    )
    title, *rest = parts
    page = FOLDER / f"{name}.md"
    page.write_text("\n\n".join([title, about, *rest]) + "\n", encoding="utf-8")
    print(f"{page}: {time.process_time() - started:.0f} s of processor time")
    return page


def code_of_page(name: str) -> list[str]:
    """The code cells that a page shows."""
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    return [block.strip() for block in re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]


if __name__ == "__main__":
    for each in sys.argv[1:] or TUTORIALS:
        write_page(each)
