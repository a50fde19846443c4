"""The package as a whole: what it exports, what it imports, and in which direction."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import afield

ROOT = Path(afield.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# A room may import those before it, and its own modules: CONTRIBUTING has the list.
TOP = ("version", "registry", "errors", "settings")
ORDER = re.findall(r"^\| `(\w+)/` ", (ROOT.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
PUBLIC = {
    *("sngp", "attach", "SNGP", "GaussianProcessHead", "Prediction", "bound", "fold"),
    *("fit_head", "fit_posterior", "calibrate", "policy", "save", "load", "__version__"),
    *("SNGPClassifier", "SNGPRegressor", "parameter_groups", "output_last"),
}
files = pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def part_of(file: Path) -> str:
    """The name in ORDER that a file belongs to."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(file: Path) -> Iterator[str]:
    """The parts of afield that a file imports at its top level, by whatever spelling."""
    package = ["afield", *file.relative_to(ROOT).parts[:-1]]
    for node in parse(file).body:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first == "afield" and rest:
                yield rest[0]


def test_import_is_light() -> None:
    """It needs torch, numpy and safetensors only, and adds little to the time that torch takes."""
    code = """if True:
        import json, sys, time
        import numpy, torch
        before, start = set(sys.modules), time.process_time()
        import afield
        afield.sngp, afield.attach, afield.fit_posterior, afield.calibrate, afield.fit_head, afield.policy, afield.save
        seconds = time.process_time() - start
        print(json.dumps([seconds, sorted(set(sys.modules) - before), sorted(sys.modules)]))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    seconds, new, everything = json.loads(done.stdout)
    roots = {name.split(".")[0] for name in new} - set(sys.stdlib_module_names)
    assert roots <= {"afield", "torch", "numpy", "safetensors"}
    assert "afield.model.convert" in new
    heavy = {"torch._dynamo", "torch._inductor", "matplotlib", "sklearn", "rich", "tyro", "scipy", "pandas"}
    assert not heavy & set(everything)
    assert seconds < 0.3


def test_public_names_are_pinned() -> None:
    assert set(afield.__all__) == PUBLIC
    assert len(afield.__all__) == len(PUBLIC)
    assert all(getattr(afield, name) is not None for name in PUBLIC)


def test_public_objects_teach() -> None:
    for name in PUBLIC - {"__version__"}:
        assert (getattr(afield, name).__doc__ or "").strip(), name


def test_version_is_that_of_the_installed_package() -> None:
    from importlib.metadata import version

    assert afield.__version__ == version("afield")


def test_typed() -> None:
    assert (ROOT / "py.typed").is_file()


@files
def test_module_has_a_docstring(file: Path) -> None:
    assert (ast.get_docstring(parse(file)) or "").strip(), f"{file} has no docstring"


@files
def test_imports_go_downwards_only(file: Path) -> None:
    part = part_of(file)
    if part == "__init__":
        return
    assert part in (*TOP, *ORDER), f"{part} has no place in the rooms of CONTRIBUTING: give it one"
    allowed = TOP[: TOP.index(part)] if part in TOP else (*TOP, *ORDER[: ORDER.index(part) + 1])
    wrong = [name for name in imported(file) if name not in allowed]
    assert not wrong, f"{part} imports {', '.join(wrong)}, which stand after it or are unknown"


def test_depth_is_at_most_one_folder() -> None:
    assert all(len(file.relative_to(ROOT).parts) <= 2 for file in FILES)


def test_the_house_stays_small() -> None:
    assert {file.stem for file in FILES if file.parent == ROOT} == {"__init__", *TOP}
    assert max(len(file.read_text(encoding="utf-8").splitlines()) for file in FILES) <= 400
    rooms = {file.parent for file in FILES} - {ROOT}
    assert sorted(room.name for room in rooms) == sorted(ORDER)
    assert max(len(list(room.glob("*.py"))) for room in rooms) <= 20


def test_tests_mirror_the_rooms() -> None:
    tests = Path(__file__).parent
    assert {folder.name for folder in tests.iterdir() if (folder / "__init__.py").is_file()} == set(ORDER)


def test_no_module_has_the_name_of_a_public_function() -> None:
    """`import afield.policy` and the like can only mean a module."""
    functions = {name for name in PUBLIC if callable(getattr(afield, name))}
    assert not functions & {file.stem for file in FILES}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import afield.cli.main", ["cli"]),
        ("from afield import model, gp", ["model", "gp"]),
        ("from afield.tasks.toy import moons", ["tasks"]),
        ("from . import toy", ["tasks"]),
        ("from .toy import moons", ["tasks"]),
        ("from ..prediction import metrics", ["prediction"]),
        ("import torch\nfrom afieldlike import x\ndef f():\n    import afield.cli", []),
    ],
)
def test_the_parser_sees_every_spelling(text: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self, encoding=None: text)
    assert list(imported(ROOT / "tasks" / "other.py")) == expected
