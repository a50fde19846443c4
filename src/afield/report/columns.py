"""Which tables a task has, from what its runs have measured: nothing here knows a task by name."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from afield.experiment import paper, run_folder
from afield.experiment.evaluation import ALPHA
from afield.experiment.run_folder import Run
from afield.prediction.distance_scores import FITTED
from afield.prediction.metrics import HIGHER_IS_BETTER
from afield.prediction.scores import SCORES
from afield.report.groups import Group
from afield.report.tables import Column, Figures, Table, from_paper, in_paper, make

REFERENCE = "gp-exact"
_LABELLED = ("accuracy", "ece", "rmse", "nll", "crps", "interval_coverage")
_GOALS = {"interval_coverage": 0.95, "false_alarms": ALPHA, "rejected": math.inf, "spearman": math.inf}
_GOALS["confidence"] = -math.inf
_PERCENT = {"accuracy": 2, "false_alarms": 1, "rejected": 1}  # decimals of what is printed in percent
_WORDS = {"ece": "ECE", "nll": "NLL", "rmse": "RMSE", "crps": "CRPS", "auroc": "AUROC", "aupr": "AUPR", "knn": "kNN"}
_WORDS |= {"accuracy": "accuracy, %", "interval_coverage": "95% interval holds"}
_WORDS |= {"dempster_shafer": "Dempster-Shafer", "mahalanobis": "Mahalanobis", "aurc": "AURC"}
_WORDS |= {"relative_mahalanobis": "relative Mahalanobis", "confidence": "mean confidence"}
_WORDS |= {"brier": "Brier", "adaptive_ece": "adaptive ECE", "classwise_ece": "class-wise ECE"}
_WORDS |= {"aupr_in": "AUPR, in-domain positive", "fpr95": "FPR at 95%"}
_WORDS |= {"spearman": "Spearman", "rejected": "rejected, %", "false_alarms": "false alarms, %"}


def word(name: str) -> str:
    """A metric or score as it is written in headings."""
    return _WORDS.get(name, name.replace("_", " "))


def goal(metric: str) -> float | None:
    if metric in _GOALS:
        return _GOALS[metric]
    higher = HIGHER_IS_BETTER.get(metric)
    return None if higher is None else math.inf if higher else -math.inf


def column(name: str, above: str = "", title: str = "") -> Column:
    """The column of a metric `metric/data set/score`."""
    metric, _, part = name.partition("/")
    best, factor = goal(metric), 100.0 if metric in _PERCENT else 1.0
    best = None if best is None else best * factor
    return Column(name, above or word(metric), title or part, best, _PERCENT.get(metric), factor)


COST = (
    Column("train_seconds", "cost", "training, s", -math.inf, 1),
    Column("ms_per_example", "cost", "ms / example", -math.inf, 3),
    Column("parameters", "cost", "parameters", -math.inf, 0),
)


def metrics_of(groups: Sequence[Group]) -> list[str]:
    """All metrics in the order in which they were written."""
    return list(dict.fromkeys(name for group in groups for run in group.runs for name in run.metrics))


def split(name: str) -> tuple[str, str, str]:
    """(metric, OOD set, score) of a name; the score is empty where it is the usual one."""
    metric, _, rest = name.partition("/")
    ood, _, score = rest.rpartition("/")
    return (metric, ood, score) if ood and (score in SCORES or score in FITTED) else (metric, rest, "")


def ood_sets(groups: Sequence[Group]) -> list[str]:
    parts = [split(name) for name in metrics_of(groups)]
    return list(dict.fromkeys(ood for metric, ood, _ in parts if metric == "auroc"))


def usual_score(groups: Sequence[Group]) -> str:
    """The score of `auroc/OOD`: by the variance for real targets, else by max_probability."""
    return "variance" if any(name.startswith("rmse/") for name in metrics_of(groups)) else "max_probability"


def main_table(task: str, groups: Sequence[Group]) -> Table:
    """The important figures, the paper's beside them, and what they cost."""
    names, oods = metrics_of(groups), ood_sets(groups)
    columns = [column(n) for metric in _LABELLED for n in names if n.startswith(f"{metric}/") and n != f"{metric}/val"]
    columns += [column(f"auroc/{ood}", f"AUROC, {word(usual_score(groups))}", ood) for ood in oods]
    columns += [column(f"auroc/{ood}/dempster_shafer", "AUROC, Dempster-Shafer", ood) for ood in oods]
    printed = {c.name for table in paper.TABLES.values() if table.task == task for c in table.columns}
    columns += [column(f"aupr/{ood}", "AUPR", ood) for ood in oods if f"aupr/{ood}" in printed]
    if "spearman/distance" in names:
        columns += far_columns(groups)[len(oods) :]
    table = _of_groups("main", "Results", task, groups, [*columns, *COST])
    return replace(table, note=_sources(task, groups, table.columns)) if table.has_paper else table


def _sources(task: str, groups: Sequence[Group], columns: Sequence[Column]) -> str:
    """Which tables of the paper hold the figures beside ours, and what is to be known about them."""
    found = [in_paper(task, group.method, column.name) for group in groups for column in columns]
    tables = {table.title: table for table, _ in filter(None, found)}
    named = [f"{table.title} ({table.label})" for table in tables.values()]
    notes = dict.fromkeys(table.note for table in tables.values() if table.note)
    ours = "Ours may differ in network, data and training: see the settings of the runs."
    return " ".join([f"The paper's figures are from {'; '.join(named)}.", ours, *notes])


def far_columns(groups: Sequence[Group]) -> list[Column]:
    """What low-dimensional tasks are about: AUROC, confidence and rank correlation far away."""
    oods = ood_sets(groups)
    columns = [column(f"auroc/{ood}", f"AUROC, {word(usual_score(groups))}", ood) for ood in oods]
    columns += [column(f"confidence/{ood}", title=ood) for ood in oods]
    return [*columns, column("spearman/distance", title="with distance")]


def far_table(task: str, groups: Sequence[Group]) -> Table | None:
    """How each method behaves far from the data; None unless the task's inputs can be drawn."""
    if "spearman/distance" not in metrics_of(groups):
        return None
    return _of_groups("far", "Far from the data", task, groups, far_columns(groups))


def score_tables(task: str, groups: Sequence[Group]) -> list[Table]:
    """AUROC by every score, a table for each OOD set that more than one score was tried on."""
    tables = []
    for ood in ood_sets(groups):
        parts = [(n, *split(n)) for n in metrics_of(groups)]
        found = [(n, score) for n, metric, of, score in parts if metric == "auroc" and of == ood and score]
        if len(found) > 1:
            columns = [column(n, f"AUROC, test against {ood}", word(score)) for n, score in found]
            tables.append(_of_groups(f"scores-{ood}", f"OOD scores: {ood}", task, groups, columns))
    return tables


def p_value_table(task: str, groups: Sequence[Group]) -> Table | None:
    """What rejecting at 5% does, for methods that have p-values."""
    oods = ood_sets(groups)
    columns = [column("false_alarms/clean", "rejected, %", "test (false alarms)")]
    columns += [column(f"rejected/{ood}", "rejected, %", ood) for ood in oods]
    table = _of_groups("p-values", f"Rejected at p ≤ {ALPHA:g}", task, groups, columns)
    return table if table.rows else None


def all_metrics(task: str, groups: Sequence[Group]) -> Table:
    """Everything that was measured."""
    names = [*metrics_of(groups), *(c.name for c in COST)]
    columns = [next((c for c in COST if c.name == n), column(n)) for n in names]
    return _of_groups("all", "Every metric", task, groups, columns)


def against_exact(task: str, groups: Sequence[Group]) -> Table | None:
    """RMSE of mean and standard deviation over the grid against the exact Gaussian process on the same data."""
    exact = {r.config.get("data_seed", 0): r for g in groups if g.method == REFERENCE for r in g.runs}
    if not exact:
        return None
    figures: dict[str, Figures] = {}
    for group in groups:
        if group.method != REFERENCE:
            pairs = [(r, exact[s]) for r in group.runs if (s := r.config.get("data_seed", 0)) in exact]
            gaps = [gap for run, reference in pairs if (gap := _gap(run, reference)) is not None]
            figures[group.name] = {"mean": [mean for mean, _ in gaps], "std": [std for _, std in gaps]}
    columns = [Column(n, f"RMSE over the grid against {REFERENCE}", n, -math.inf) for n in ("mean", "std")]
    table = make("against-exact", f"Against {REFERENCE}", figures, columns)
    return table if table.rows else None


def _gap(run: Run, reference: Run) -> tuple[float, float] | None:
    if not all((each.folder / run_folder.PREDICTIONS).is_file() for each in (run, reference)):
        return None
    a, b = run_folder.read(run.folder), run_folder.read(reference.folder)
    if "grid" not in a.parts or "grid" not in b.parts or not torch.equal(a.array("grid/x"), b.array("grid/x")):
        return None
    p, q = a.prediction("grid"), b.prediction("grid")
    if p.likelihood != "gaussian" or q.likelihood != "gaussian" or p.variance is None or q.variance is None:
        return None
    gaps = [(x.double() - y.double()).square().mean().sqrt() for x, y in ((p.mean, q.mean), (p.std, q.std))]
    return float(gaps[0]), float(gaps[1])


def _of_groups(name: str, title: str, task: str, groups: Sequence[Group], columns: Sequence[Column]) -> Table:
    methods = {group.name: group.method for group in groups}
    return make(
        name,
        title,
        {group.name: group.figures for group in groups},
        columns,
        counts={group.name: len(group.runs) for group in groups},
        printed=lambda row, column: from_paper(task, methods[row], column),
    )
