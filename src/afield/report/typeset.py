"""Tables in Markdown and in LaTeX (booktabs). The paper's numbers have a row of their own below ours."""

import re

from afield.report.tables import Cell, Column, Row, Table

NONE = "\u2013"
_LATEX = {
    "\\": r"\textbackslash{}",
    **{c: rf"\{c}" for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "→": r"$\to$",
    "±": r"$\pm$",
    "≤": r"$\leq$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    NONE: "--",
}


def escape_markdown(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", text).replace("\n", " ")


def escape_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def markdown(table: Table) -> str:
    """A pipe table; both headings are joined, as Markdown has one row of them."""
    heads = [table.head, "runs", *(_heading(column) for column in table.columns)]
    lines = [_pipes([escape_markdown(head) for head in heads]), _pipes(["---", *["---:"] * (len(heads) - 1)])]
    for row in table.rows:
        cells = [row.cells.get(column.name) for column in table.columns]
        lines.append(_pipes([escape_markdown(row.name), str(row.count), *map(_markdown_cell, cells)]))
        if printed := _paper_texts(row, table):
            lines.append(_pipes(["*in the paper*", "", *(f"*{text}*" if text else "" for text in printed)]))
    note = f"\n{escape_markdown(table.note)}\n" if table.note else ""
    return f"### {escape_markdown(table.title)}\n\n" + "\n".join(lines) + "\n" + note


def latex(table: Table, label: str, task: str) -> str:
    """A table environment for a task; it needs the packages booktabs and graphicx, which shrinks what is too wide."""
    above, rules, at = ["", ""], [], 3
    for text, span in table.headings:
        above.append(rf"\multicolumn{{{span}}}{{c}}{{{escape_latex(text)}}}")
        rules.append(rf"\cmidrule(lr){{{at}-{at + span - 1}}}")
        at += span
    below = [table.head, "runs", *(" ".join([c.title, c.arrow]).strip() for c in table.columns)]
    body = []
    for row in table.rows:
        cells = [row.cells.get(column.name) for column in table.columns]
        body.append(_ampersands([escape_latex(row.name), str(row.count), *map(_latex_cell, cells)]))
        if printed := _paper_texts(row, table):
            body.append(_ampersands([r"\quad\textit{paper}", "", *(rf"\textit{{{escape_latex(t)}}}" for t in printed)]))
    lines = [
        r"\begin{table}[ht]",
        r"\centering",
        rf"\caption{{{escape_latex(' '.join([f'{task}: {table.title}.', table.note]).strip())}}}",
        rf"\label{{tab:{re.sub('[^a-z0-9-]+', '-', label.lower())}}}",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{lr{'r' * len(table.columns)}}}",
        r"\toprule",
        _ampersands(above),
        " ".join(rules),
        _ampersands([escape_latex(text) for text in below]),
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _heading(column: Column) -> str:
    return f"{column.label} {column.arrow}".strip()


def _markdown_cell(cell: Cell | None) -> str:
    if cell is None:
        return NONE
    text = " ".join([cell.text, cell.std_text]).strip()
    return f"**{text}**" if cell.best else text


def _latex_cell(cell: Cell | None) -> str:
    if cell is None:
        return "--"
    value = escape_latex(cell.text)
    std = f" {escape_latex(cell.std_text)}" if cell.std is not None else ""
    return (rf"\textbf{{{value}}}" if cell.best else value) + std


def _paper_texts(row: Row, table: Table) -> list[str]:
    """The paper's cells of a row, empty where it has none; an empty list if it has none at all."""
    texts = [row.cells[c.name].paper if c.name in row.cells else "" for c in table.columns]
    return texts if any(texts) else []


def _pipes(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ampersands(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"
