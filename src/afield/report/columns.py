"""Which tables a task has, from what its runs have measured: nothing here knows a task by name."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from afield.experiment import paper, run_folder
from afield.experiment.evaluation import ALPHA
from afield.experiment.metric_name import MetricName
from afield.experiment.run_folder import Run
from afield.gp.likelihoods import LIKELIHOODS
from afield.prediction.metrics import HIGHER_IS_BETTER
from afield.prediction.prediction import likelihood_of
from afield.report.groups import Group
from afield.report.tables import Column, Table, Values, find_in_paper, format_from_paper, make_table

REFERENCE = "gp-exact"
SPEARMAN = MetricName("spearman", "distance")
_LABELLED = ("accuracy", "miou", "ece", "rmse", "nll", "crps", "interval_coverage")
_GOALS = {"interval_coverage": 0.95, "false_alarms": ALPHA, "rejected": math.inf, "spearman": math.inf}
_GOALS |= {"input_false_alarms": ALPHA, "input_rejected": math.inf, "miou": math.inf, "input_auroc": math.inf}
_GOALS["confidence"] = -math.inf
_PERCENT = {
    "accuracy": 2,
    "input_false_alarms": 1,
    "input_rejected": 1,
    "false_alarms": 1,
    "rejected": 1,
}  # decimals of what is printed in percent
_WORDS = {"ece": "ECE", "nll": "NLL", "rmse": "RMSE", "crps": "CRPS", "auroc": "AUROC", "aupr": "AUPR", "knn": "kNN"}
_WORDS |= {"accuracy": "accuracy, %", "interval_coverage": "95% interval holds"}
_WORDS |= {"dempster_shafer": "Dempster-Shafer", "mahalanobis": "Mahalanobis", "aurc": "AURC"}
_WORDS |= {"relative_mahalanobis": "relative Mahalanobis", "confidence": "mean confidence"}
_WORDS |= {"unit_mahalanobis": "Mahalanobis, unit vectors", "gen": "GEN", "vim": "ViM", "fdbd": "fDBD", "she": "SHE"}
_WORDS |= {"unit_relative_mahalanobis": "relative Mahalanobis, unit vectors", "nnguide": "NNGuide"}
_WORDS |= {"react": "ReAct", "ash": "ASH", "scale": "SCALE"}
_WORDS |= {"brier": "Brier", "adaptive_ece": "adaptive ECE", "classwise_ece": "class-wise ECE"}
_WORDS |= {"aupr_in": "AUPR, in-domain positive", "fpr95": "FPR at 95%"}
_WORDS |= {"miou": "mean IoU", "input_auroc": "AUROC of inputs", "input_false_alarms": "false alarms of inputs, %"}
_WORDS |= {"input_rejected": "rejected inputs, %"}
_WORDS |= {"spearman": "Spearman", "rejected": "rejected, %", "false_alarms": "false alarms, %"}


def display_name(name: str) -> str:
    """A metric or score as it is written in headings."""
    return _WORDS.get(name, name.replace("_", " "))


def goal(metric: str) -> float | None:
    """The best value of a metric, infinite where more or less is always better; None where nothing is."""
    if metric in _GOALS:
        return _GOALS[metric]
    higher = HIGHER_IS_BETTER.get(metric)
    return None if higher is None else math.inf if higher else -math.inf


def column(name: MetricName, above: str = "", title: str = "") -> Column:
    """The column of a metric."""
    metric = name.metric
    best, factor = goal(metric), 100.0 if metric in _PERCENT else 1.0
    best = None if best is None else best * factor
    return Column(str(name), above or display_name(metric), title or name.qualifier, best, _PERCENT.get(metric), factor)


COST = (
    Column("train_seconds", "cost", "training, s", -math.inf, 1),
    Column("ms_per_example", "cost", "ms / example", -math.inf, 3),
    Column("parameters", "cost", "parameters", -math.inf, 0),
)


def metrics_of(groups: Sequence[Group]) -> list[MetricName]:
    """All metrics in the order in which they were written."""
    names = dict.fromkeys(name for group in groups for run in group.runs for name in run.metrics)
    return [MetricName.parse(name) for name in names]


def ood_sets(groups: Sequence[Group]) -> list[str]:
    """The names of the OOD sets that any run was evaluated on."""
    return list(dict.fromkeys(name.data for name in metrics_of(groups) if name.metric == "auroc"))


def paper_score_of(groups: Sequence[Group]) -> str:
    """The score of `auroc/OOD`, which names none. Runs on real targets are known by their RMSE."""
    real = any(name.metric == "rmse" for name in metrics_of(groups))
    return LIKELIHOODS["gaussian" if real else "categorical"].doubt


def main_table(task: str, groups: Sequence[Group]) -> Table:
    """The important metrics, the paper's numbers beside them, and what they cost."""
    names, oods = metrics_of(groups), ood_sets(groups)
    columns = [column(n) for metric in _LABELLED for n in names if n.metric == metric and n.data != "val"]
    columns += _auroc_columns(groups)
    columns += [column(MetricName("auroc", ood, "dempster_shafer"), "AUROC, Dempster-Shafer", ood) for ood in oods]
    printed = {c.name for table in paper.TABLES.values() if table.task == task for c in table.columns}
    aupr = {ood: MetricName("aupr", ood) for ood in oods}
    columns += [column(name, "AUPR", ood) for ood, name in aupr.items() if str(name) in printed]
    if SPEARMAN in names:
        columns += far_columns(groups)[len(oods) :]
    table = _table_of("main", "Results", task, groups, [*columns, *COST])
    notes = [_sources(task, groups, table.columns)] if table.has_paper else []
    return replace(table, note=" ".join([*notes, *missing_from_paper(task, groups)]))


def _sources(task: str, groups: Sequence[Group], columns: Sequence[Column]) -> str:
    """Which tables of the paper hold the numbers beside ours, and what is to be known about them."""
    found = [find_in_paper(task, group.method, column.name) for group in groups for column in columns]
    tables = {table.title: table for table, _ in filter(None, found)}
    named = [f"{table.title} ({table.label})" for table in tables.values()]
    notes = dict.fromkeys(table.note for table in tables.values() if table.note)
    ours = "Ours may differ in network, data and training: see the settings of the runs."
    return " ".join([f"The paper's numbers are from {'; '.join(named)}.", ours, *notes])


def missing_from_paper(task: str, groups: Sequence[Group]) -> list[str]:
    """A sentence for each table of the paper on the task that has rows or OOD sets which these runs have not."""
    methods, oods, sentences = {group.method for group in groups}, ood_sets(groups), []
    for table in paper.TABLES.values():
        names = [MetricName.parse(column.name) for column in table.columns]
        if table.task != task or all(column.higher_is_better is None for column in table.columns):
            continue
        rows = [row.paper_name for row in table.rows if row.method not in methods]
        sets = dict.fromkeys(n.data for n in names if n.metric in ("auroc", "aupr") and n.data not in oods)
        if rows:
            sentences.append(f"Of {table.label}, {table.title}, no runs are here of {', '.join(rows)}.")
        where = f"Of {table.label}, {table.title},"
        sentences += [f"{where} nothing was measured on {name}: {_why_not(name)}." for name in sets]
    return sentences


def _why_not(ood: str) -> str:
    return "the images are not at hand (docs/experiments.md, Data)" if ood == "dtd" else "these runs have no such set"


def far_columns(groups: Sequence[Group]) -> list[Column]:
    """What low-dimensional tasks are about: AUROC, confidence and rank correlation far away."""
    confidence = [column(MetricName("confidence", ood), title=ood) for ood in ood_sets(groups)]
    return [*_auroc_columns(groups), *confidence, column(SPEARMAN, title="with distance")]


def _auroc_columns(groups: Sequence[Group]) -> list[Column]:
    above = f"AUROC, {display_name(paper_score_of(groups))}"
    return [column(MetricName("auroc", ood), above, ood) for ood in ood_sets(groups)]


def far_table(task: str, groups: Sequence[Group]) -> Table | None:
    """How each method behaves far from the data; None unless the task's inputs can be drawn."""
    if SPEARMAN not in metrics_of(groups):
        return None
    return _table_of("far", "Far from the data", task, groups, far_columns(groups))


def score_tables(task: str, groups: Sequence[Group]) -> list[Table]:
    """AUROC by every score, a table for each OOD set that more than one score was tried on."""
    tables, kinds = [], {"auroc": ("scores", "OOD scores"), "input_auroc": ("input-scores", "OOD scores of inputs")}
    for ood, (metric, (slug, title)) in itertools.product(ood_sets(groups), kinds.items()):
        found = [name for name in metrics_of(groups) if (name.metric, name.data) == (metric, ood) and name.score]
        if len(found) > 1:
            columns = [column(name, f"AUROC, test against {ood}", display_name(name.score)) for name in found]
            tables.append(_table_of(f"{slug}-{ood}", f"{title}: {ood}", task, groups, columns))
    return tables


def p_value_table(task: str, groups: Sequence[Group]) -> Table | None:
    """What rejecting at 5% does, for methods that have p-values."""
    columns = [column(MetricName("false_alarms", "clean"), "rejected, %", "test (false alarms)")]
    columns += [column(MetricName("rejected", ood), "rejected, %", ood) for ood in ood_sets(groups)]
    of_inputs = [
        MetricName("input_false_alarms", "clean"),
        *(MetricName("input_rejected", o) for o in ood_sets(groups)),
    ]
    measured = [name for name in of_inputs if name in metrics_of(groups)]
    columns += [column(name, "rejected inputs, %", name.qualifier) for name in measured]
    table = _table_of("p-values", f"Rejected at p ≤ {ALPHA:g}", task, groups, columns)
    return table if table.rows else None


def all_metrics(task: str, groups: Sequence[Group]) -> Table:
    """Everything that was measured."""
    return _table_of("all", "Every metric", task, groups, [*map(column, metrics_of(groups)), *COST])


def against_exact(task: str, groups: Sequence[Group]) -> Table | None:
    """RMSE of mean and standard deviation over the grid against the exact Gaussian process on the same data."""
    exact = {r.config.get("data_seed", 0): r for g in groups if g.method == REFERENCE for r in g.runs}
    if not exact:
        return None
    values: dict[str, Values] = {}
    for group in groups:
        if group.method != REFERENCE:
            pairs = [(r, exact[s]) for r in group.runs if (s := r.config.get("data_seed", 0)) in exact]
            errors = [error for run, reference in pairs if (error := _grid_errors(run, reference)) is not None]
            values[group.name] = {"mean": [mean for mean, _ in errors], "std": [std for _, std in errors]}
    columns = [Column(n, f"RMSE over the grid against {REFERENCE}", n, -math.inf) for n in ("mean", "std")]
    table = make_table("against-exact", f"Against {REFERENCE}", values, columns)
    return table if table.rows else None


def _grid_errors(run: Run, reference: Run) -> tuple[float, float] | None:
    """RMSE of mean and standard deviation over a common grid; None where there is none."""
    if not all((each.folder / run_folder.PREDICTIONS).is_file() for each in (run, reference)):
        return None
    a, b = run_folder.read(run.folder), run_folder.read(reference.folder)
    if "grid" not in a.parts or "grid" not in b.parts or not torch.equal(a.array("grid/x"), b.array("grid/x")):
        return None
    p, q = a.prediction("grid"), b.prediction("grid")
    if not all(likelihood_of(each).noisy and each.variance is not None for each in (p, q)):
        return None
    mean, std = ((x.double() - y.double()).square().mean().sqrt() for x, y in ((p.mean, q.mean), (p.std, q.std)))
    return float(mean), float(std)


def _table_of(name: str, title: str, task: str, groups: Sequence[Group], columns: Sequence[Column]) -> Table:
    methods = {group.name: group.method for group in groups}
    return make_table(
        name,
        title,
        {group.name: group.values for group in groups},
        columns,
        counts={group.name: len(group.runs) for group in groups},
        printed=lambda row, column: format_from_paper(task, methods[row], column),
    )
