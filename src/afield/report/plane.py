"""Pictures of tasks in the plane, and the landscape of methods (paper: figure 2d_exp, section method_landscape)."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import matplotlib as mpl
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from afield.experiment.metric_name import MetricName
from afield.report.claims import mean_by_group
from afield.report.columns import ood_sets
from afield.report.groups import GroupPredictions, Place
from afield.report.plots import (
    FAINT,
    Picture,
    add_colour_bar,
    find_lattice,
    label_text,
    make_panels,
    plot_surface,
    report_style,
    to_png,
    uncertainty,
)

_COLUMNS = {"dnn": "dense (dnn)", "dnn-gp": "GP output (dnn-gp)", "sngp": "GP output, bounded (sngp)"}
_ROWS = {"ensemble": "ensemble", "dropout": "dropout", "single": "single model"}


def draw_surfaces(task: str, groups: Sequence[GroupPredictions]) -> Picture | None:
    """What each method is unsure about, over the plane."""
    drawn = [each for each in groups if _planar(each)]
    if not drawn:
        return None
    with report_style():
        figure, axes = make_panels(len(drawn), extra=0.6)
        for axis, each in zip(axes, drawn, strict=True):
            image = _draw(axis, each)
            axis.set_title(label_text(each.name))
        add_colour_bar(figure, image, axes)
        content = to_png(figure)
    return Picture(
        "surfaces",
        "Uncertainty surfaces",
        "Uncertainty p (1 - p) / 0.25 of the top probability p over the plane: dark is certain, bright is not. Dots "
        "are training points, coloured by class; red crosses are OOD points, which no method has seen.",
        f"Uncertainty over the plane for {task}, one panel each for {_names(drawn)}.",
        content,
    )


def draw_landscape(task: str, groups: Sequence[GroupPredictions]) -> Picture | None:
    """Distance awareness from left to right, more models from bottom to top."""
    found = {each.group.place: each for each in reversed(groups) if "augmix" not in each.group.method}
    cells = {(r, c): found.get(Place(r, c)) for r in _ROWS for c in _COLUMNS}
    there = [each for each in cells.values() if each is not None]
    if len(there) < 2:
        return None
    rows = [r for r in _ROWS if any(cells[r, c] for c in _COLUMNS)]
    planar = all(map(_planar, there))
    drawn = [each.group for each in there]
    aurocs = mean_by_group(drawn, [MetricName("auroc", ood) for ood in ood_sets(drawn)])
    with report_style():
        figure = Figure(
            figsize=(2.75 * len(_COLUMNS) + 1, (2.5 if planar else 1.25) * len(rows) + 0.7), layout="constrained"
        )
        axes = figure.subplots(len(rows), len(_COLUMNS), squeeze=False)
        for (r, c), each in cells.items():
            if r not in rows:
                continue
            axis = axes[rows.index(r), list(_COLUMNS).index(c)]
            if each is None:
                _absent(axis)
            elif planar:
                image = _draw(axis, each)
            else:
                _headline(axis, each, aurocs)
            if c == "dnn":
                axis.set_ylabel(_ROWS[r], fontweight="bold")
            if r == rows[-1]:
                axis.set_xlabel(_COLUMNS[c], fontweight="bold")
            if each is not None and planar:
                axis.set_title(label_text(each.name))
        figure.supxlabel("dense  →  distance-aware", fontsize=9, color=FAINT)
        figure.supylabel("one model  →  many", fontsize=9, color=FAINT)
        if planar:
            add_colour_bar(figure, image, list(axes.flat))
        content = to_png(figure)
    what = "the uncertainty surface" if planar else "AUROC, the mean over OOD sets, and calibration or fit"
    return Picture(
        "landscape",
        "Landscape of methods",
        "From left to right the single model becomes distance-aware, from bottom to top more models are combined. Each "
        f"cell shows {what}."
        + ("" if planar else " From dark to bright AUROC goes from the lowest to the highest shown."),
        f"A grid of methods for {task}: {_names(there)}; each cell shows {what}.",
        content,
    )


def _planar(each: GroupPredictions) -> bool:
    return (
        each.grid is not None
        and each.grid.probs is not None
        and {"grid/x", "train/x", "train/y"} <= set(each.arrays)
        and find_lattice(each.arrays["grid/x"]) is not None
    )


def _draw(axis: Axes, each: GroupPredictions) -> object:
    assert each.grid is not None
    train = each.arrays["train/x"], each.arrays["train/y"]
    return plot_surface(axis, each.arrays["grid/x"], uncertainty(each.grid), train, _ood_points(each))


def _ood_points(each: GroupPredictions) -> Tensor | None:
    points = [each.arrays[f"ood/{name}/x"] for name in each.ood if f"ood/{name}/x" in each.arrays]
    return torch.cat([p[: 60 // len(points)] for p in points]) if points else None


def _headline(axis: Axes, each: GroupPredictions, aurocs: Mapping[str, float]) -> None:
    """AUROC as a number and, among those shown, as a colour; the fit below it."""
    auroc = aurocs.get(each.name)
    low, high = min(aurocs.values(), default=0.0), max(aurocs.values(), default=0.0)
    shade = 0.5 if auroc is None or high - low < 5e-4 else (auroc - low) / (high - low)
    axis.set_facecolor(mpl.colormaps["cividis"](shade))
    lines = [] if auroc is None else [f"AUROC {auroc:.3f}"]
    for metric, word in (("ece", "ECE"), ("rmse", "RMSE"), ("nll", "NLL")):
        values = [v for v in each.group.values.get(str(MetricName(metric, "clean")), []) if math.isfinite(v)]
        if values:
            lines.append(f"{word} {fmean(values):.3f}")
    ink = "white" if shade < 0.6 else "black"
    axis.text(
        0.5,
        0.78,
        label_text(each.name),
        transform=axis.transAxes,
        ha="center",
        va="center",
        color=ink,
        fontweight="bold",
    )
    axis.text(0.5, 0.36, "\n".join(lines), transform=axis.transAxes, ha="center", va="center", color=ink)
    _bare(axis)


def _absent(axis: Axes) -> None:
    axis.set_facecolor("#f2f2f2")
    axis.text(0.5, 0.5, "not run", transform=axis.transAxes, ha="center", va="center", color=FAINT)
    _bare(axis)


def _bare(axis: Axes) -> None:
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)


def _names(groups: Sequence[GroupPredictions]) -> str:
    return ", ".join(each.name for each in groups)
