"""deploy/: the files parse, and name only flags, metrics and paths that exist."""

import configparser
import json
import re
import shlex
from pathlib import Path

import pytest

from afield.cli.main import parse
from afield.cli.serve import Serve
from afield.serve.metrics import Metrics

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def known_metrics() -> set[str]:
    names = {family.name for family in Metrics().registry.collect()}
    return names | {f"{name}{end}" for name in names for end in ("_total", "_bucket", "_sum", "_count")}


def test_alerts_and_dashboard_ask_for_metrics_that_exist():
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    board = json.loads((DEPLOY / "grafana" / "afield.json").read_text())
    asked = [rule["expr"] for rule in rules] + [t["expr"] for p in board["panels"] for t in p["targets"]]
    assert len(asked) > 10
    assert all(expr.count("(") == expr.count(")") for expr in asked)
    names = {name for expr in asked for name in re.findall(r"\bafield_\w+", expr)}
    assert names <= known_metrics()


def serve_flags(arguments: list[str]) -> Serve:
    command = parse(["serve", *arguments])
    assert isinstance(command, Serve)
    return command


def test_commands_have_flags_that_exist():
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.optionxform = str  # type: ignore[assignment]
    unit.read(DEPLOY / "afield.service")
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert program.endswith("afield")
    assert serve_flags(arguments[1:]).state == Path("/var/lib/afield")
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    entry = json.loads(re.findall(r"ENTRYPOINT (\[.*\])", dockerfile)[0])
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["afield"]
    assert serve_flags([*entry[2:], *compose["command"]]).host == "0.0.0.0"
    assert (DEPLOY / compose["build"]["context"] / compose["build"]["dockerfile"]).is_file()
    copied = [name for line in re.findall(r"^COPY (.*)", dockerfile, re.M) for name in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
