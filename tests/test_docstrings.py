"""Public functions teach: arguments, what comes back, what is raised, and an example, which runs here."""

import copy
import doctest
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import afield

FUNCTIONS = (  # beside afield.__all__: what docs/index.md names
    *("posterior.update", "posterior.downdate", "posterior.merge", "spectral.operator_norm"),
    *("class_changes.add_class", "class_changes.drop_class", "stacked.stack", "export.export"),
    *("diagnose.certified", "diagnose.measured", "diagnose.distance_correlation"),
    *("conformal.prediction_sets", "conformal.prediction_intervals", "selection.flag", "drift.watch_model"),
)
SLOW = ("export.export",)
NEVER = ("fold", "diagnose.certified")  # raises anything of its own
PUBLIC = sorted({*afield.__all__, *FUNCTIONS} - {"__version__"})


def find(name: str) -> Any:
    value: Any = afield
    for part in name.split("."):
        value = getattr(value, part)
    return value


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


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in PUBLIC])
def test_examples_run(name: str, fitted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    found = find(name)
    torch.manual_seed(0)
    given = {"afield": afield, "torch": torch, "copy": copy, **copy.deepcopy(fitted)}
    home = importlib.import_module(found.__module__)
    cases = [
        case
        for case in doctest.DocTestFinder(recurse=True).find(found, name, module=home, globs={**vars(home), **given})
        if case.examples
    ]
    assert cases, f"the docstring of {name} has no example"
    report: list[str] = []
    for case in cases:
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        runner.run(case, out=report.append)
        assert not runner.failures, "".join(report)


@pytest.mark.parametrize("name", [name for name in PUBLIC if inspect.isfunction(find(name))])
def test_arguments_returns_and_raises_are_said(name: str):
    function = find(name)
    text = inspect.getdoc(function) or ""
    before = text.partition(">>>")[0]
    arguments = list(inspect.signature(function).parameters)[1:]  # what it is about goes without saying
    silent = [each for each in arguments if each not in ("progress", "seed") and each not in before]
    assert not silent, f"{name} says nothing of {', '.join(silent)}"
    assert "return" in before, f"{name} does not say what it returns"
    assert "raises  " in before or name in NEVER, f"{name} does not say what it raises"
