"""What a promised risk costs: how much of the test data is still answered, and how much of that goes wrong.

A policy (`afield.policy`) is chosen on validation data and evaluated on test data. Methods that calibrate have chosen
two numbers by two thirds of the validation data, so for all methods alike only the other third is used here: it gave
p-values their reference, which these policies do not read. The promise is then exact.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from afield.decide.policies import Outcome, policy
from afield.errors import OutOfReach
from afield.experiment import run_folder
from afield.experiment.run_folder import Run
from afield.model.calibration import cut_in_two
from afield.prediction.prediction import Prediction
from afield.prediction.risk_coverage import risk_coverage
from afield.report.groups import Group
from afield.report.plots import FAINT, Picture, label_text, line_styles, make_panels, report_style, to_png
from afield.report.tables import Column, Table, make_table

RISKS = (0.05, 0.02, 0.01)
DELTA = 0.05
_MARKERS = ("o", "s", "^")


@dataclass(frozen=True)
class PolicyResults:
    """What policies chosen on `num_chosen` validation examples of a run do with its test data.

    doubt, right  of every test example (N,)
    outcomes      by risk; None: these examples cannot promise it, so that all is referred
    """

    doubt: Tensor
    right: Tensor
    num_chosen: int
    outcomes: Mapping[float, Outcome | None]


def evaluate_policies(run: Run) -> PolicyResults | None:
    """Choose and evaluate a policy for every risk of RISKS; None where classes, labels or predictions are missing."""
    if not (run.folder / run_folder.PREDICTIONS).is_file() or not all(f"{p}/y" in run for p in ("val", "test")):
        return None
    if not all(f"{part}/probs" in run for part in ("val", "test")):
        return None
    (val, y), (test, target) = (_read_part(run, part) for part in ("val", "test"))
    if len(val) < 2 or not len(test):
        return None
    rows = cut_in_two(len(val))[1]
    outcomes: dict[float, Outcome | None] = {}
    for risk in RISKS:
        try:
            outcomes[risk] = policy(val[rows], y[rows], risk=risk, delta=DELTA).outcome(test, target)
        except OutOfReach:
            outcomes[risk] = None
    return PolicyResults(test.score("max_probability"), test.labels == target, len(rows), outcomes)


def decision_table(groups: Sequence[Group], results: Mapping[str, Sequence[PolicyResults]]) -> Table | None:
    """Answered and wrong on the test data, for every risk that any run could promise."""
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name, several in results.items():
        for each in several:
            for risk, outcome in each.outcomes.items():
                values[name][f"answered/{risk:g}"].append(outcome.coverage if outcome else 0.0)
                if outcome and outcome.accepted:
                    values[name][f"wrong/{risk:g}"].append(outcome.risk)
    outcomes = [(r, o) for several in results.values() for d in several for r, o in d.outcomes.items() if o]
    columns = []
    for risk in RISKS:
        if any(r == risk for r, _ in outcomes):
            above = f"at most {100 * risk:g}% wrong"
            columns.append(Column(f"answered/{risk:g}", above, "answered, %", math.inf, 1, 100.0))
            columns.append(Column(f"wrong/{risk:g}", above, "wrong of these, %", None, 2, 100.0))
    if not columns:
        return None
    sizes = sorted({each.num_chosen for several in results.values() for each in several})
    over = sum(outcome.risk > risk for risk, outcome in outcomes)
    note = (
        f"Chosen on {' or '.join(map(str, sizes))} validation examples, the third that calibration chooses nothing by. "
        f"Each promise holds with confidence {1 - DELTA:g}. Answered 0: these few cannot promise it, and all is "
        f"referred. On the test data, itself a sample, the part that is wrong lies above the promise in {over} of "
        f"{len(outcomes)} cases."
    )
    counts = {group.name: len(group.runs) for group in groups}
    return make_table("decisions", "Answer or refer", values, columns, counts=counts, note=note)


def draw_decisions(
    task: str, groups: Sequence[Group], results: Mapping[str, Sequence[PolicyResults]]
) -> Picture | None:
    """Error rate against coverage on the test data, with the points that the policies chose; the first run of each."""
    if not all(results.values()):  # a curve without a mark would seem to have none to offer
        return None
    drawn = {name: several[0] for name, several in results.items()}
    if all(bool(each.right.all()) for each in drawn.values()):
        return None
    styles = line_styles(groups)
    with report_style():
        figure, (axis,) = make_panels(1, width=6.8, height=3.8)
        for name, each in drawn.items():
            curve = risk_coverage(each.doubt, each.right, errors_first=True)
            axis.plot(curve.coverage, 100 * curve.risk, label=label_text(name), **styles[name])
            for marker, (_, outcome) in zip(_MARKERS, each.outcomes.items(), strict=True):
                if outcome and outcome.accepted:
                    at = (outcome.coverage, 100 * outcome.risk)
                    axis.plot(*at, marker, color=styles[name]["color"], ms=6, mec="white", mew=0.8, zorder=4)
        top = axis.get_ylim()[1]
        for marker, risk in zip(_MARKERS, RISKS, strict=True):
            if 100 * risk < top:
                axis.axhline(100 * risk, color=FAINT, linewidth=0.8, linestyle=(0, (4, 2)), zorder=1)
            axis.plot([], [], marker, color=FAINT, ms=6, label=f"at most {100 * risk:g}%")
        axis.set(
            xlabel="coverage: part of the test data that is answered", ylabel="errors among them, %", xlim=(0, 1.01)
        )
        axis.set_ylim(bottom=0)
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        content = to_png(figure)
    points = [
        f"{name} answers {100 * outcome.coverage:.1f}% for at most {100 * risk:g}% wrong"
        for name, each in drawn.items()
        for risk, outcome in each.outcomes.items()
        if outcome
    ]
    return Picture(
        "risk",
        "Risk and coverage",
        "Error rate if only the most confident part of the test data is answered; lower is better. Marks: policies "
        f"chosen on validation data, each promising its error rate (broken lines) with confidence {1 - DELTA:g}.",
        f"Error rate against coverage on the test data of {task} for {', '.join(drawn)}. {'; '.join(points)}.",
        content,
    )


def _read_part(run: Run, part: str) -> tuple[Prediction, Tensor]:
    """Read probabilities, from which labels follow for stored ensembles too, and targets."""
    probs = run.array(f"{part}/probs")
    return Prediction(probs.log(), probs=probs), run.array(f"{part}/y").flatten().long()
