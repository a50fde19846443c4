"""Reliability, scores, ROC and risk against coverage, on the test data and the OOD sets."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from afield.prediction.metrics import NUM_BINS, auroc
from afield.prediction.prediction import likelihood_of
from afield.prediction.risk_coverage import risk_coverage
from afield.prediction.scores import SCORES
from afield.report.columns import display_name
from afield.report.groups import GroupPredictions
from afield.report.plots import (
    CLASS_COLOURS,
    FAINT,
    INK,
    PER_ROW,
    Picture,
    label_text,
    line_styles,
    make_panels,
    report_style,
    to_png,
)

_BLUE, _ORANGE = "#0072b2", "#e69f00"
_LABEL = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}


def draw_reliability(task: str, groups: Sequence[GroupPredictions]) -> Picture | None:
    """Accuracy against confidence in bins, with the number of examples in each below."""
    drawn = [each for each in groups if each.test.probs is not None and "test/y" in each.arrays]
    if not drawn:
        return None
    rows = -(-len(drawn) // PER_ROW)
    columns = -(-len(drawn) // rows)
    edges = np.linspace(0, 1, NUM_BINS + 1)
    middle, width = (edges[:-1] + edges[1:]) / 2, 1 / NUM_BINS
    with report_style():
        figure = Figure(figsize=(2.35 * columns + 0.3, 3.1 * rows), layout="constrained")
        grid = figure.add_gridspec(2 * rows, columns, height_ratios=[3, 1] * rows)
        for i, each in enumerate(drawn):
            row, column = divmod(i, columns)
            count, accuracy, mean = reliability_bins(*_confidence(each))
            there = (count > 0).numpy()
            above = figure.add_subplot(grid[2 * row, column])
            below = figure.add_subplot(grid[2 * row + 1, column], sharex=above)
            above.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=(0, (4, 2)), zorder=3)
            above.bar(middle[there], accuracy.numpy()[there], width * 0.92, color=_BLUE)
            above.plot(mean.numpy()[there], accuracy.numpy()[there], ".", color=INK, ms=4)
            ece = float((count * (accuracy - mean).abs()).sum() / count.sum())
            above.text(0.05, 0.93, f"ECE {ece:.3f}", transform=above.transAxes, va="top", fontsize=8, bbox=_LABEL)
            above.set(title=label_text(each.name), xlim=(0, 1), ylim=(0, 1))
            above.tick_params(labelbottom=False)
            below.bar(middle[there], count.numpy()[there], width * 0.92, color=FAINT)
            below.set_yscale("log")
            below.set_ylim(0.7, float(count.max()) * 2)
            below.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
            if row == rows - 1:
                below.set_xlabel("confidence")
            if column == 0:
                above.set_ylabel("accuracy")
                below.set_ylabel("examples")
            else:
                above.tick_params(labelleft=False)
        content = to_png(figure)
    return Picture(
        "reliability",
        "Reliability",
        f"Accuracy among test examples whose confidence falls in each of {NUM_BINS} bins (bars; dots stand at the "
        "bin's mean confidence), and how many these are (grey, logarithmic). On the broken line the two are equal.",
        f"Reliability diagrams on the test data of {task}, one panel each for {', '.join(e.name for e in drawn)}.",
        content,
    )


def reliability_bins(confidence: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Number, accuracy and mean confidence of the examples in each bin of `afield.metrics.ece`."""
    bins = (confidence * NUM_BINS).ceil().long().clamp(1, NUM_BINS) - 1
    count = torch.bincount(bins, minlength=NUM_BINS).double()
    sums = [torch.bincount(bins, weights.double(), NUM_BINS) for weights in (right, confidence)]
    return count, sums[0] / count.clamp_min(1), sums[1] / count.clamp_min(1)


def draw_histograms(task: str, groups: Sequence[GroupPredictions]) -> Picture | None:
    """In-domain and OOD scores beside each other."""
    drawn = [each for each in groups if each.ood and _scores(each) is not None]
    if not drawn:
        return None
    oods = list(dict.fromkeys(name for each in drawn for name in each.ood))
    colours = dict(zip(oods, (_CYCLE * len(oods))[: len(oods)], strict=True))
    name = _score_name(drawn[0])
    with report_style():
        figure, axes = make_panels(len(drawn), height=1.9)
        for axis, each in zip(axes, drawn, strict=True):
            scores = _scores(each)
            assert scores is not None
            inside, outside = scores
            floor = 1e-12
            sides = {"test": inside, **outside}
            logs = {n: s.double().clamp_min(floor).log10().numpy() for n, s in sides.items()}
            low, high = min(v.min() for v in logs.values()), max(v.max() for v in logs.values())
            room = 0.5 if high - low < 0.01 else 0.0  # a constant score gets a decade to stand in
            edges = np.linspace(low - room, high + room, 41).tolist()
            for n, values in logs.items():
                weights = np.full(len(values), 1 / np.histogram(values, edges)[0].max())
                if n == "test":
                    axis.hist(values, edges, weights=weights, color=_BLUE, alpha=0.45, label="test")
                else:
                    axis.hist(
                        values,
                        edges,
                        weights=weights,
                        histtype="step",
                        color=colours[n],
                        linewidth=1.4,
                        label=label_text(n),
                    )
            axis.set_title(label_text(each.name))
            axis.set_yticks([])
            axis.locator_params(axis="x", nbins=5)
            axis.spines["left"].set_visible(False)
        figure.supxlabel(f"log10 of {display_name(name)}", fontsize=9)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
        content = to_png(figure)
    return Picture(
        "scores",
        "Scores, in-domain and OOD",
        f"Distribution of the score {display_name(name)} (further right is further from the training data) on the "
        "test data (filled) and on each OOD set (outlined), each drawn to the same height. Every panel has its own "
        "scale.",
        f"Histograms of the {display_name(name)} score for {task}, test data against {', '.join(oods)}.",
        content,
    )


def draw_roc(task: str, groups: Sequence[GroupPredictions]) -> Picture | None:
    """Part of the OOD examples that is found against the part of the test data flagged by mistake."""
    drawn = [each for each in groups if each.ood and _scores(each) is not None]
    oods = list(dict.fromkeys(name for each in drawn for name in each.ood))
    if not oods:
        return None
    styles = line_styles([each.group for each in groups])
    with report_style():
        figure, axes = make_panels(len(oods), width=3.3 if len(oods) < 4 else 2.6, height=3.3)
        for axis, ood in zip(axes, oods, strict=True):
            axis.plot([0, 1], [0, 1], color=FAINT, linewidth=1)
            for each in drawn:
                scores = _scores(each)
                if scores is not None and ood in scores[1]:
                    axis.plot(*roc_curve(scores[0], scores[1][ood]), label=label_text(each.name), **styles[each.name])
            axis.set(
                title=label_text(ood),
                xlabel="test data flagged",
                ylabel="OOD data flagged",
                xlim=(-0.01, 1),
                ylim=(0, 1.01),
            )
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center")
        content = to_png(figure)
    score = display_name(_score_name(drawn[0]))
    areas = [f"{e.name} {auroc(s[0], s[1][o]):.3f} ({o})" for e in drawn if (s := _scores(e)) for o in s[1]]
    return Picture(
        "roc",
        "ROC",
        f"OOD examples flagged against test examples flagged by mistake, as the threshold on {score} falls. Up and to "
        "the left is better; the grey line is chance.",
        f"ROC curves for {task} by {score}. Areas: {', '.join(areas)}.",
        content,
    )


def roc_curve(inside: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """(flagged inside, flagged outside) for all thresholds from the highest score down."""
    thresholds = torch.cat([inside, outside]).unique().flip(0)
    sides = [side.sort().values for side in (inside, outside)]
    flagged = [1 - torch.searchsorted(side, thresholds).double() / len(side) for side in sides]
    zero = torch.zeros(1, dtype=torch.float64)
    return torch.cat([zero, flagged[0]]), torch.cat([zero, flagged[1]])


def draw_risk(task: str, groups: Sequence[GroupPredictions]) -> Picture | None:
    """Error rate among the most confident examples."""
    drawn = [each for each in groups if each.test.probs is not None and "test/y" in each.arrays]
    drawn = [each for each in drawn if len(each.test)]
    if not drawn or all(bool(_confidence(each)[1].all()) for each in drawn):
        return None
    styles = line_styles([each.group for each in groups])
    with report_style():
        figure, (axis,) = make_panels(1, width=6.4, height=3.4)
        for each in drawn:
            doubt, right = each.test.score("max_probability"), _confidence(each)[1]
            curve = risk_coverage(doubt, right, errors_first=True)
            axis.plot(curve.coverage, 100 * curve.risk, label=label_text(each.name), **styles[each.name])
        axis.set(xlabel="coverage: part of the test data that is answered", ylabel="errors among them, %", xlim=(0, 1))
        axis.set_ylim(bottom=0)
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        content = to_png(figure)
    return Picture(
        "risk",
        "Risk and coverage",
        "Error rate if only the most confident part of the test data is answered. Lower is better; at coverage 1 it is "
        "the error rate on all of it.",
        f"Error rate against coverage on the test data of {task} for {', '.join(each.name for each in drawn)}.",
        content,
    )


_CYCLE = [colour for colour in (_ORANGE, *CLASS_COLOURS[2:6], *CLASS_COLOURS[7:]) if colour != _BLUE]


def _confidence(each: GroupPredictions) -> tuple[Tensor, Tensor]:
    """Top probability, and 1.0 where its class is right; by probs, as stored ensembles have lost their members."""
    assert each.test.probs is not None
    top = each.test.probs.double().max(-1)
    return top.values, (top.indices == each.arrays["test/y"].flatten()).double()


def _score_name(each: GroupPredictions) -> str:
    return likelihood_of(each.test).score


def _scores(each: GroupPredictions) -> tuple[Tensor, dict[str, Tensor]] | None:
    """The default score of test data and of each OOD set, or None where it does not apply to the predictions."""
    score = SCORES[_score_name(each)]
    if not all(map(score.applies, (each.test, *each.ood.values()))):
        return None
    return score(each.test), {name: score(prediction) for name, prediction in each.ood.items()}
