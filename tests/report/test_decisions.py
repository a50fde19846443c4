"""The report on decisions: policies chosen on the right third of the validation data, evaluated on the test data."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("matplotlib", reason="reports need the extra cli")
pytest.importorskip("jinja2", reason="reports need the extra cli")

import afield
from afield.decide.policies import policy
from afield.experiment import run_folder
from afield.model.calibration import cut_in_two
from afield.prediction.prediction import Prediction
from afield.report.decisions import DELTA, RISKS, decision_table, draw_decisions, evaluate_policies
from afield.report.groups import Group
from afield.report.page import report


def drawn(n: int, number: int, sure: float) -> tuple[Prediction, Tensor]:
    """Labels drawn from the probabilities; the surer, the fewer errors."""
    generator = torch.Generator().manual_seed(number)
    logits = torch.randn(n, 4, generator=generator) * sure
    probs = logits.softmax(1)
    return Prediction(logits, probs=probs), torch.multinomial(probs, 1, generator=generator).squeeze(1)


def write(root: Path, method: str, seed: int, sure: float, *, n: int = 3000, val: bool = True) -> run_folder.Run:
    """A run folder, fabricated."""
    folder = root / "t" / method / str(seed)
    folder.mkdir(parents=True)
    parts = {"test": drawn(2000, seed, sure)} | ({"val": drawn(n, 100 + seed, sure)} if val else {})
    predictions = {name: prediction for name, (prediction, _) in parts.items()}
    run_folder.write(folder / run_folder.CONFIG, run_folder.to_toml({"task": "t", "method": method, "seed": seed}))
    run_folder.write(
        folder / run_folder.PREDICTIONS,
        run_folder.pack(predictions, {f"{name}/y": y for name, (_, y) in parts.items()}),
    )
    run_folder.write_json(folder / run_folder.ENVIRONMENT, {})
    cost = {"train_seconds": 1.0, "ms_per_example": 0.5, "parameters": 1000}
    run_folder.write_json(folder / run_folder.METRICS, {"metrics": {"accuracy/clean": 0.9}, "cost": cost})
    return run_folder.read(folder)


def test_it_chooses_on_what_calibration_did_not_choose_by():
    """The scores of these rows are among the references of a calibrated model, or all of them."""
    torch.manual_seed(0)
    model = afield.sngp(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), num_random_features=16)
    x, y = torch.randn(91, 3), torch.arange(91) % 2
    afield.fit_posterior(model, [torch.randn(50, 3)])
    fit, rest = cut_in_two(91)
    afield.calibrate(model, [(x, y)])
    distance = (model.predict(x[rest]).score().double()[:, None] - model.head.reference).abs().amin(1)
    assert float(distance.max()) < 1e-6
    found = afield.calibrate(model, [(x, y)], score="dempster_shafer")
    assert (len(fit), len(rest)) == (found.num_fitted, found.num_reference)
    torch.testing.assert_close(model.predict(x[rest]).score().double().sort().values, model.head.reference)
    assert sorted([*fit.tolist(), *rest.tolist()]) == list(range(91))


def test_outcomes_are_those_of_the_policy(tmp_path):
    found = evaluate_policies(write(tmp_path, "dnn", 0, 6.0))
    (val, y), (test, target) = drawn(3000, 100, 6.0), drawn(2000, 0, 6.0)
    rows = cut_in_two(3000)[1]
    assert found.num_chosen == 1000
    for risk in RISKS[:2]:
        assert found.outcomes[risk] == policy(val[rows], y[rows], risk=risk, delta=DELTA).outcome(test, target)
    assert 0 < found.outcomes[0.05].coverage < 1
    assert int((~found.right).sum()) == int((test.labels != target).sum())


def test_the_table_averages_over_runs_and_counts_broken_promises(tmp_path):
    made = [write(tmp_path, "dnn", seed, 6.0) for seed in range(3)]
    group = Group("dnn", tuple(made))
    several = {"dnn": [evaluate_policies(run) for run in made]}
    table = decision_table([group], several)
    outcomes = [each.outcomes[0.05] for each in several["dnn"]]
    cell = table.rows[0].cells["answered/0.05"]
    assert cell.mean == pytest.approx(100 * sum(o.coverage for o in outcomes) / 3)
    assert table.rows[0].cells["wrong/0.05"].mean == pytest.approx(100 * sum(o.risk for o in outcomes) / 3)
    over = sum(o.risk > r for each in several["dnn"] for r, o in each.outcomes.items() if o)
    count = sum(o is not None for each in several["dnn"] for o in each.outcomes.values())
    assert f"above the promise in {over} of {count} cases" in table.note
    assert "Chosen on 1000 validation examples" in table.note


def test_what_cannot_be_promised_is_referred(tmp_path):
    """A hundred validation examples: 5% may be within reach, 1% is not."""
    good, bad = write(tmp_path, "sngp", 0, 1000.0, n=300), write(tmp_path, "dnn", 0, 0.5, n=300)
    several = {"sngp": [evaluate_policies(good)], "dnn": [evaluate_policies(bad)]}
    assert several["sngp"][0].outcomes[0.01] is None
    table = decision_table([Group(name, (run,)) for name, run in (("sngp", good), ("dnn", bad))], several)
    assert [column.name for column in table.columns] == ["answered/0.05", "wrong/0.05"]
    assert table.rows[1].cells["answered/0.05"].mean == 0
    assert "wrong/0.05" not in table.rows[1].cells
    assert decision_table([Group("dnn", (bad,))], {"dnn": several["dnn"]}) is None


def test_runs_without_labelled_validation_data_have_no_decisions(tmp_path):
    without = write(tmp_path, "dnn", 0, 6.0, val=False)
    with_val = write(tmp_path, "sngp", 0, 6.0)
    assert evaluate_policies(without) is None
    groups = [Group("dnn", (without,)), Group("sngp", (with_val,))]
    assert draw_decisions("t", groups, {"dnn": [], "sngp": [evaluate_policies(with_val)]}) is None
    (without.folder / run_folder.PREDICTIONS).unlink()
    assert evaluate_policies(run_folder.read(without.folder)) is None


def test_a_task_without_errors_has_no_curve(tmp_path):
    run = write(tmp_path, "dnn", 0, 1e5)
    assert draw_decisions("t", [Group("dnn", (run,))], {"dnn": [evaluate_policies(run)]}) is None


def test_the_page_has_the_table_and_the_marked_curve(tmp_path):
    for method, sure in (("dnn", 6.0), ("sngp", 9.0)):
        write(tmp_path, method, 0, sure)
    page = report(tmp_path)
    text = page.read_text(encoding="utf-8")
    assert 'id="t-decisions"' in text
    assert 'href="#t-decisions"' in text
    assert text.count('id="t-risk"') == 1
    found = evaluate_policies(run_folder.read(tmp_path / "t" / "sngp" / "0")).outcomes[0.05]
    assert f"sngp answers {100 * found.coverage:.1f}% for at most 5% wrong" in text
    rows = json.loads((page.parent / "report.json").read_text())["tasks"]["t"]["tables"]["decisions"]["rows"]
    assert rows["sngp"]["answered/0.05"]["mean"] == pytest.approx(100 * found.coverage)
    assert "Answer or refer" in (page.parent / "report.md").read_text(encoding="utf-8")
    assert (page.parent / "t-risk.png").read_bytes().startswith(b"\x89PNG")
