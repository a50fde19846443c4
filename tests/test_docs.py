"""README and docs: links lead somewhere, names exist, code runs, and measured numbers are those of their records.

Numbers. A section that names a record (`results/NAME`, `bench/results/NAME`) is checked number by number. A comment
above a table or a paragraph says where in the record its numbers are, in their order:

    <!-- results/clinc-small clinc/*/: accuracy/clean | {auroc,aupr}/oos -->

Behind the record comes what all its paths begin with. `|` separates the columns of a table, `,` the numbers of a cell,
`{a,b}` stands for both, and `*` for the label of the row. One line serves all rows of a table, or there is one for
each. A number is right if the record's value has the same digits when it is printed with as many. Numbers without a
decimal point are checked in such tables only; settings are written as code, which is not looked at.

Tables between marks, `<!-- speed -->` ... `<!-- end of speed -->`, are made again from the records by the scripts in
bench/ that fill them, and compared as text.
"""

import ast
import functools
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("results/**/*.md")])
WRITTEN = [page for page in PAGES if ROOT / "results" not in page.parents]
MEASURED = [page for page in WRITTEN if page.name not in ("CHANGELOG.md", "CONTRIBUTING.md")]
FILLERS = (  # modules of bench/
    *("ablations", "attach", "bounds", "choices", "claims", "defaults", "detectors", "drift", "laplace_hmc"),
    *("left_out", "peers", "refit", "scale", "speed.__main__", "suite_tables", "tables", "texts"),
)
EXTRAS = (  # what the extras of pyproject.toml bring
    *("sklearn", "scipy", "matplotlib", "tyro", "rich", "jinja2", "filelock", "gpytorch", "pyro", "optuna", "pooch"),
    *("tqdm", "PIL", "transformers", "accelerate", "lightning", "timm", "onnx", "onnxruntime", "pyarrow", "ray"),
    *("pandas", "starlette", "uvicorn", "httptools", "orjson", "prometheus_client"),
)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


pages = pytest.mark.parametrize("page", PAGES, ids=name_of)
written = pytest.mark.parametrize("page", WRITTEN, ids=name_of)
measured = pytest.mark.parametrize("page", MEASURED, ids=name_of)


# Links, files, names, code -------------------------------------------------------------------------------------


@pages
def test_links_lead_somewhere(page: Path):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [link.partition("#")[0] for link in links if not link.startswith(("http", "#"))]
    assert not [link for link in local if not (page.parent / link).exists()]


@written
def test_files_that_are_named_are_there(page: Path):
    text = page.read_text(encoding="utf-8")
    named = re.findall(r"`((?:src|tests|bench|examples|docs|results|\.ci|\.github)/[\w./-]+\.\w+)`", text)
    assert not [name for name in named if not (ROOT / name).exists()]


def code_of(page: Path) -> list[str]:
    """All code of a page: blocks, and spans in the text."""
    text = re.sub(r"^:::.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [*re.findall(r"```\w*\n(.*?)```", text, re.DOTALL), *re.findall(r"`([^`\n]+)`", text)]


def names_in(code: str) -> tuple[set[str], set[str]]:
    """Dotted names of afield, to be read after `import afield` alone, and statements that import from it."""
    code = re.sub(r"[ \t]*#.*", lambda comment: comment[0] if "afield." in comment[0] else "", code)
    imports = re.findall(r"(from afield[\w.]* import [\w, ]+|import afield(?:\.\w+)+)", code)
    modules = [f"import {name}" for name in re.findall(r"-m (afield[\w.]*)", code)]
    rest = re.sub(r"from afield[\w.]* import [\w, ]+|(?:import|-m) afield[\w.]*", "", code)
    dotted = re.findall(r"(?<![\w./-])afield(?:\.[A-Za-z_]\w*)+", rest)
    return {name for name in dotted if not name.endswith(".json")}, {each.strip() for each in [*imports, *modules]}


def test_every_name_of_the_pages_is_there():
    """Each name in a process that has done nothing but `import afield`; imports of modules as they stand."""
    names, imports = set(), set()
    for code in itertools.chain.from_iterable(map(code_of, WRITTEN)):
        found = names_in(code)
        names |= found[0]
        imports |= found[1]
    assert {"afield.sngp", "afield.posterior.update"} <= names
    assert "from afield.integrations import huggingface as hf" in imports
    missing = in_a_fork(lambda say: walk_names(names, imports, say))
    assert not missing, f"README, CONTRIBUTING, CHANGELOG and docs name what is not there:\n{missing}"


Say = Callable[[str], object]


def in_a_fork(act: Callable[[Say], None]) -> str:
    """Act in a copy of this process, which has the packages that ours has; what it says."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            act(lambda text: os.write(write, f"{text}\n".encode()))
        except BaseException as error:
            os.write(write, f"{error!r}\n".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read()
    os.wait()
    return said


def walk_names(names: set[str], imports: set[str], say: Say) -> None:
    """Say which of them fail, after `import afield` as if for the first time."""
    warnings.simplefilter("ignore")
    for module in [name for name in sys.modules if name.partition(".")[0] == "afield"]:
        del sys.modules[module]
    afield = importlib.import_module("afield")
    tree: dict[str, Any] = {}
    for name in names:
        functools.reduce(lambda branch, part: branch.setdefault(part, {}), name.split(".")[1:], tree)

    def check(what: str, act: Callable[[], object]) -> None:
        try:
            act()
        except ModuleNotFoundError as error:
            if str(error.name).startswith("afield"):
                say(f"{what} {error}")
        except Exception as error:
            if "pip install" not in str(error):
                say(f"{what} {error!r}")

    def apart(what: str, act: Callable[[], object]) -> None:
        """What one name loads must not help the next."""
        if os.fork() == 0:
            check(what, act)
            os._exit(0)
        os.wait()

    def walk(where: Any, branch: dict[str, Any], path: str) -> None:
        for part, below in branch.items():
            (apart if hasattr(where, "__path__") else check)(
                f"{path}.{part}", lambda part=part, below=below: walk(getattr(where, part), below, f"{path}.{part}")
            )

    walk(afield, tree, "afield")
    for line in imports:
        apart(line, lambda line=line: exec(line, {}))


def test_names_that_are_not_there_are_found():
    names = {"afield.sngp", "afield.sgnp", "afield.posterior.update", "afield.posterior.updat", "afield.SNGP.predct"}
    found = in_a_fork(lambda say: walk_names(names, {"import afield.nothing", "from afield.gp import haed"}, say))
    told = sorted(line.split()[0] for line in found.splitlines())
    assert told == ["afield.SNGP.predct", "afield.posterior.updat", "afield.sgnp", "from", "import"]


@pytest.mark.parametrize(
    ("code", "names", "imports"),
    [
        ("model = afield.sngp(net)  # like afield.attach", {"afield.sngp", "afield.attach"}, set()),
        ("from afield.gp.head import A, B  # both", set(), {"from afield.gp.head import A, B"}),
        ("torchrun -m afield.cli.main train", set(), {"import afield.cli.main"}),
        ("`afield.json`, src/afield.py", set(), set()),
    ],
)
def test_names_are_found_in_code(code: str, names: set[str], imports: set[str]):
    assert names_in(code) == (names, imports)


@written
def test_python_of_the_pages_is_python(page: Path):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        ast.parse(block)


def test_the_first_code_of_the_readme_runs_with_the_core_alone():
    """As a stranger pastes it, with none of the packages that the extras bring."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    before = f"import sys\nsys.modules.update(dict.fromkeys({EXTRAS}))\n"
    after = "assert p.accept(0.05).tolist() == [True, False]"
    script = f"{before}{block[1]}{after}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "tensor(" in done.stdout


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 650


# Numbers ---------------------------------------------------------------------------------------------------------

RECORD = re.compile(r"(?:bench/)?results/\w[\w./-]*")
COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
UNSEEN = re.compile(r"^```.*?^```|<!--.*?-->|`[^`\n]*`|\]\([^)\s]*\)", re.DOTALL | re.MULTILINE)
MARKED = re.compile(r"<!-- (?P<name>[\w ]+) -->\n(?P<text>.*?)<!-- end of (?P=name) -->", re.DOTALL)
DECIMAL = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:,\d{3})*)?\.\d+%?(?![\w.]*\w)")
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)%?(?![\w.]*\w)")


class Number(NamedTuple):
    """A number of a page: where it stands, and in which record, under which path, it should be."""

    start: int
    text: str
    record: str | None = None
    path: str = ""

    @property
    def right(self) -> bool:
        values = read_record(self.record) if self.record else {}
        return self.path in values and self.text in printed(values[self.path], self.text)

    def complaint(self, page: str) -> str:
        line = page.count("\n", 0, self.start) + 1
        if self.record is None:
            return f"line {line}: {self.text} is in no record. Name its place in a comment above, or write it as code."
        values = read_record(self.record)
        said = values.get(self.path, "nothing")
        found = [path for path, value in values.items() if self.text in printed(value, self.text)]
        return f"line {line}: {self.text}, but {self.record} has {said} at {self.path}. {self.text} is at {found[:5]}."


def printed(value: float, like: str) -> set[str]:
    """A value as it may be printed with the digits of another; records have percentages as 82.5 or as 0.825."""
    digits = len(like.rstrip("%").partition(".")[2])
    percent = "%" * like.endswith("%")
    sign = "+" if like.startswith("+") else ""
    comma = "," if "," in like else ""
    other = 100 * value if percent else value / 100 if value > 1 else value
    return {f"{v:{sign}{comma}.{digits}f}{percent}" for v in (value, other)}


@functools.cache
def read_record(name: str) -> dict[str, float]:
    """The numbers of a record by path. A report's are TASK/METHOD/METRIC, and the same with /spread and /paper."""
    place = ROOT / name
    if not place.is_dir():
        return dict(flatten(json.loads(place.read_text(encoding="utf-8"))))
    values = {}
    for task, of_task in json.loads((place / "report.json").read_text(encoding="utf-8"))["tasks"].items():
        for table in of_task["tables"].values():
            for method, row in table["rows"].items():
                for metric, cell in row.items():
                    path = f"{task}/{method}/{metric}"
                    values[path] = cell["mean"]
                    if cell.get("spread") is not None:
                        values[f"{path}/spread"] = cell["spread"]
                    if cell.get("paper"):
                        values[f"{path}/paper"] = float(cell["paper"].split()[0])
    return values


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flatten(each, f"{path}/{key}" if path else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


Places = list[list[tuple[str, str]]]  # columns of (record, path)


def places_of(comment: str) -> list[Places]:
    """Of every line of a comment."""
    lines = []
    for line in comment.strip().splitlines():
        head, _, columns = line.partition(": ")
        record, _, prefix = head.partition(" ")
        cells = [[path for each in split(column) for path in expanded(each.strip())] for column in columns.split("|")]
        lines.append([[(record, prefix + path) for path in cell] for cell in cells])
    return lines


def split(cell: str) -> list[str]:
    """At the commas outside of braces."""
    return re.split(r",(?![^{]*\})", cell)


def expanded(path: str) -> list[str]:
    """{a,b}/{c,d} -> a/c, a/d, b/c, b/d."""
    parts = [part.strip("{}").split(",") if part.startswith("{") else [part] for part in re.split(r"(\{[^}]*\})", path)]
    return ["".join(each) for each in itertools.product(*parts)]


def numbers_of(text: str) -> Iterator[Number]:
    """The numbers of a page's sections that name records, outside of the marked tables."""
    blank = functools.partial(re.sub, r"[^\n]", " ")
    text = MARKED.sub(lambda match: blank(match[0]), text)
    seen = UNSEEN.sub(lambda match: blank(match[0]), text)
    headings = [match.start() for match in re.finditer(r"^#+ ", seen, re.MULTILINE)]
    for begin, end in itertools.pairwise([0, *headings, len(text)]):
        if not RECORD.search(text, begin, end):
            continue
        places: list[Places] = []
        for block in re.finditer(r"[^\n]+(?:\n[^\n]+)*", text[begin:end]):
            start, stop = begin + block.start(), begin + block.end()
            comment = COMMENT.fullmatch(block[0])
            if comment is not None and RECORD.match(comment[1].strip()):
                places = places_of(comment[1])
                continue
            numbers = in_table if block[0].startswith("|") and places else in_text
            yield from numbers(seen[start:stop], start, places)
            places = []


def in_text(block: str, start: int, places: list[Places]) -> Iterator[Number]:
    found = list(DECIMAL.finditer(block))
    paths = [path for columns in places for cell in columns for path in cell]
    assert len(paths) <= len(found), f"{len(paths)} places for {len(found)} numbers: {block.strip()[:100]}"
    for number, place in itertools.zip_longest(found, paths, fillvalue=(None, "")):
        yield Number(start + number.start(), number[0], *place)


def in_table(block: str, start: int, places: list[Places]) -> Iterator[Number]:
    rows = list(re.finditer(r"[^\n]+", block))[2:]
    assert len(places) in (1, len(rows)), f"{len(places)} lines of places for {len(rows)} rows"
    for row, columns in zip(rows, places * (len(rows) if len(places) == 1 else 1), strict=True):
        cells = list(re.finditer(r"[^|]+", row[0]))
        label = cells[0][0].strip(" *`")
        for cell, paths in zip(cells[-len(columns) :], columns, strict=True):
            found = list(NUMBER.finditer(cell[0]))
            paths = [(record, path.replace("*", label)) for record, path in paths]
            if not found and not any(path in read_record(record) for record, path in paths):
                continue
            assert len(found) == len(paths), f"{len(paths)} places for {len(found)} numbers in {label!r}: {cell[0]}"
            for number, place in zip(found, paths, strict=True):
                yield Number(start + row.start() + cell.start() + number.start(), number[0], *place)


def complaints(text: str) -> list[str]:
    return [number.complaint(text) for number in numbers_of(text) if not number.right]


@measured
def test_numbers_are_those_of_their_records(page: Path):
    wrong = complaints(page.read_text(encoding="utf-8"))
    assert not wrong, "\n".join([name_of(page), *wrong])


@measured
def test_a_wrong_digit_is_noticed(page: Path):
    """Every number of the page with another last digit, up or down: as many complaints as numbers."""
    text = page.read_text(encoding="utf-8")
    numbers = list(numbers_of(text))
    for step in (1, 9):
        wrong = text
        for number in numbers:
            last = number.start + len(number.text.rstrip("%")) - 1
            wrong = f"{wrong[:last]}{(int(text[last]) + step) % 10}{wrong[last + 1 :]}"
        assert sum(not number.right for number in numbers_of(wrong)) == len(numbers)


def test_many_numbers_are_checked():
    count = {page.name: len(list(numbers_of(page.read_text(encoding="utf-8")))) for page in MEASURED}
    assert count["README.md"] >= 40
    assert count["results.md"] >= 600
    assert count["defaults.md"] > 0
    assert count["speed.md"] > 0


PAGE = """## Section

About `results/throughput.json`.
{}
"""


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("\n<!-- results/throughput.json tasks/: clinc/share -->\n\nA share of 0.628.", None),
        ("\n<!-- results/throughput.json tasks/: clinc/share -->\n\nA share of 62.8%.", None),
        (
            "\n<!-- results/throughput.json tasks/: clinc/share -->\n\nA share of 0.627.",
            "has 0.6277 at tasks/clinc/share",
        ),
        (
            "\n<!-- results/throughput.json tasks/: fashion/share -->\n\nA share of 0.628.",
            "is at ['tasks/clinc/share']",
        ),
        ("\n<!-- results/throughput.json: nowhere -->\n\nA share of 0.628.", "has nothing at nowhere"),
        ("A share of 0.628.", "line 3: 0.628 is in no record"),
        ("A setting of `0.628`, 3 threads, version 1.2.3.", None),
        ("\n| a | b |\n|---|---|\n| clinc | 0.628 |", "0.628 is in no record"),
        ("\n<!-- results/throughput.json tasks/: */share -->\n\n| a | b |\n|---|---|\n| clinc | 0.628 |", None),
        ("\n<!-- results/throughput.json tasks/: */share -->\n\n| a | b |\n|---|---|\n| clinc | 0.629 |", "0.6277"),
    ],
)
def test_the_check_of_numbers(text: str, complaint: str | None):
    found = complaints(PAGE.format(text).replace(".\nA", ". A"))
    assert (not found) if complaint is None else (len(found) == 1 and complaint in found[0]), found


def test_places_are_read():
    assert places_of("results/a b/: {x,y}/z | *, w") == [
        [[("results/a", "b/x/z"), ("results/a", "b/y/z")], [("results/a", "b/*"), ("results/a", "b/w")]]
    ]


@pytest.mark.parametrize("module", FILLERS)
def test_filled_tables_are_those_of_their_records(module: str):
    """`python -m bench.MODULE` would leave the page as it is."""
    filler = importlib.import_module(f"bench.{module}")
    for name, text in filler.tables().items():
        page = filler.PAGES[name] if hasattr(filler, "PAGES") else filler.PAGE
        found = [match["text"] for match in MARKED.finditer(page.read_text(encoding="utf-8")) if match["name"] == name]
        assert found == [f"\n{text}\n\n"], f"{name} of {name_of(page)} is not what bench/{module} makes of its record"


def test_every_marked_table_has_a_script_that_fills_it():
    filled = set[str]().union(*(importlib.import_module(f"bench.{module}").tables() for module in FILLERS))
    marked = {match["name"] for page in WRITTEN for match in MARKED.finditer(page.read_text(encoding="utf-8"))}
    assert marked == filled
