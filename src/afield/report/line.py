"""The picture of regression on a line (paper: figure 1d_exp), and how often intervals hold what they should."""

from collections.abc import Sequence

import torch
from torch import Tensor

from afield.prediction.prediction import Prediction, likelihood_of
from afield.report.groups import GroupPredictions
from afield.report.plots import (
    FAINT,
    INK,
    OOD_COLOUR,
    Picture,
    label_text,
    line_styles,
    make_panels,
    report_style,
    to_png,
)

_BLUE = "#0072b2"


def draw_line(task: str, groups: Sequence[GroupPredictions]) -> Picture | None:
    """Mean, two standard deviations, training points."""
    drawn = [each for each in groups if _linear(each)]
    if not drawn:
        return None
    targets = torch.cat([each.arrays["train/y"].flatten() for each in drawn])
    reach = float(targets.max() - targets.min())
    limits = float(targets.min()) - reach, float(targets.max()) + reach
    with report_style():
        figure, axes = make_panels(len(drawn), width=2.6, height=2.2, sharex=True, sharey=True)
        for axis, each in zip(axes, drawn, strict=True):
            assert each.grid is not None
            order = each.arrays["grid/x"].flatten().argsort()
            x, mean = each.arrays["grid/x"].flatten()[order], each.grid.mean.flatten()[order]
            for name in each.ood:
                if f"ood/{name}/x" in each.arrays:
                    points = each.arrays[f"ood/{name}/x"].flatten()
                    axis.plot(points, torch.full_like(points, limits[0]), "|", color=OOD_COLOUR, ms=5, alpha=0.35)
            if each.grid.variance is not None:
                half = 2 * each.grid.std.flatten()[order]
                axis.fill_between(x, mean - half, mean + half, color=_BLUE, alpha=0.22, linewidth=0)
            axis.plot(x, mean, color=_BLUE, linewidth=1.6)
            axis.plot(each.arrays["train/x"].flatten(), each.arrays["train/y"].flatten(), ".", color=INK, ms=2.5)
            axis.set_title(label_text(each.name))
            axis.set_ylim(limits)
        content = to_png(figure)
    return Picture(
        "line",
        "Predictions on a line",
        "Mean (line) and two standard deviations of the target (band, noise included) over the input; black dots are "
        "training points, red strokes at the bottom are OOD inputs. Bands that leave a panel are cut.",
        f"Mean and uncertainty band over the input for {task}, one panel each for "
        f"{', '.join(each.name for each in drawn)}.",
        content,
    )


def draw_interval_reliability(task: str, groups: Sequence[GroupPredictions]) -> Picture | None:
    """Part of the targets inside the central interval against its level."""
    drawn = [each for each in groups if likelihood_of(each.test).noisy and each.test.variance is not None]
    drawn = [each for each in drawn if "test/y" in each.arrays and bool((each.test.std > 0).all())]
    if not drawn:
        return None
    levels = torch.linspace(0, 1, 51, dtype=torch.float64)
    styles = line_styles([each.group for each in groups])
    with report_style():
        figure, (axis,) = make_panels(1, width=6.4, height=3.6)
        axis.plot([0, 1], [0, 1], color=FAINT, linewidth=1)
        for each in drawn:
            axis.plot(
                levels,
                interval_coverages(each.test, each.arrays["test/y"], levels),
                label=label_text(each.name),
                **styles[each.name],
            )
        axis.set(xlabel="level of the interval", ylabel="part of the targets inside", xlim=(0, 1), ylim=(0, 1))
        axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
        content = to_png(figure)
    return Picture(
        "intervals",
        "Do intervals hold what they promise?",
        "Part of the test targets that lie inside the central interval, against its level. On the grey line they "
        "agree; above it the intervals are too wide, below it too narrow.",
        f"Interval coverage against level on the test data of {task} for {', '.join(each.name for each in drawn)}.",
        content,
    )


def interval_coverages(prediction: Prediction, target: Tensor, levels: Tensor) -> Tensor:
    """Part of the targets inside the central interval of each level."""
    z = (target.reshape(prediction.mean.shape) - prediction.mean).double().abs() / prediction.std.double()
    reached = torch.erf(z.flatten() / 2**0.5)  # the level at which the interval reaches the target
    return (reached[:, None] <= levels).double().mean(0)


def _linear(each: GroupPredictions) -> bool:
    names = {"grid/x", "train/x", "train/y"}
    if each.grid is None or not likelihood_of(each.grid).noisy or not names <= set(each.arrays):
        return False
    return each.arrays["grid/x"].flatten(1).shape[1] == 1 and each.grid.logits.shape[1] == 1
