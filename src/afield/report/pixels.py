"""Pictures of tasks that have an answer at every pixel: image, truth, prediction, variance, p-value, side by side."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from afield.experiment import run_folder
from afield.experiment.position_metrics import PICTURES
from afield.report.groups import Group
from afield.report.plots import CLASS_COLOURS, OOD_COLOUR, Picture, label_text, report_style, to_png

_COLUMNS = {
    "x": "image",
    "y": "truth",
    "label": "prediction",
    "doubt": "1 - max probability",
    "variance": "variance",
    "score": "score",
    "p_value": "p-value",
}
_CLASSES = ListedColormap(["#222222", *CLASS_COLOURS])
_FOREIGN = ListedColormap(["#222222", OOD_COLOUR])
_P_VALUES = (0.01, 0.05, 0.2, 1.0)
_SMALLEST = 0.003  # p-value that has a colour of its own
_PARTS = 2  # images of each part
Panels = dict[str, dict[str, Tensor]]


def draw_pixels(task: str, groups: Sequence[Group]) -> Picture | None:
    """A few images of the test set and of each OOD set, as the last method that has p-values sees them."""
    found = [(group, panels) for group in groups if (panels := _panels(group)) and "p_value" in panels["test"]]
    if not found:
        return None
    group, panels = found[-1]
    rows = [(part, index) for part in panels for index in range(min(_PARTS, len(panels[part]["x"])))]
    names = {name: title for name, title in _COLUMNS.items() if name in panels["test"]}
    scaled = names.keys() & {"doubt", "variance", "score"}
    scales = {name: _range([values[name] for values in panels.values()]) for name in scaled}
    with report_style():
        figure = Figure(figsize=(1.45 * len(names) + 0.6, 1.4 * len(rows) + 0.5), layout="constrained")
        axes = figure.subplots(len(rows), len(names), squeeze=False)
        for axis, title in zip(axes[0], names.values(), strict=True):
            axis.set_title(title)
        for line, (part, index) in zip(axes, rows, strict=True):
            values = {name: tensor[index] for name, tensor in panels[part].items()}
            for axis, name in zip(line, names, strict=True):
                _draw(axis, name, values, scales, foreign=part != "test")
            if part != "test":
                for axis in line[:1].tolist() + line[2:].tolist():  # where something foreign is
                    axis.contour(values["y"].numpy() != 0, levels=[0.5], colors=OOD_COLOUR, linewidths=0.8)
            line[0].set_ylabel(label_text(part.replace("ood/", "OOD: ")))
        of_p = list(names).index("p_value")
        bar = figure.colorbar(axes[-1, of_p].images[0], ax=axes[:, of_p], location="bottom", aspect=10, pad=0.01)
        bar.set_ticks(np.log10(_P_VALUES).tolist(), labels=[f"{p:g}" for p in _P_VALUES])
        content = to_png(figure)
    return Picture(
        "pixels",
        f"Pixels, by {group.name}",
        "From left to right the image, the true classes (of OOD images the foreign object alone, in red), the "
        "predicted ones, the doubt about them, the variance, the score on which p-values rest, and the p-values: "
        "bright is unsure, far and, for p-values, refused. A red line is around foreign objects.",
        f"Images of {task} with predictions, variance and p-values of {group.name} at every pixel.",
        content,
    )


def _panels(group: Group) -> Panels:
    """Arrays of the kept images of a group's first run by part; none where it has kept none."""
    run = group.runs[0]
    if not (run.folder / run_folder.PREDICTIONS).is_file():
        return {}
    panels: Panels = {}
    for name in run.arrays:
        if name.startswith(f"{PICTURES}/"):
            part, _, field = name.removeprefix(f"{PICTURES}/").rpartition("/")
            panels.setdefault(part, {})[field] = run.array(name).float()
    return panels


def _range(values: Sequence[Tensor | None]) -> tuple[float, float]:
    flat = np.concatenate([v.flatten().numpy() for v in values if v is not None])
    low, high = np.quantile(flat, [0.01, 0.99])
    return float(low), float(high)


def _draw(
    axis: Axes, name: str, values: dict[str, Tensor], scales: dict[str, tuple[float, float]], *, foreign: bool
) -> None:
    if name == "x":
        axis.imshow((values["x"].permute(1, 2, 0) / 2 + 0.5).clamp(0, 1).numpy())
    elif name == "y" and foreign:
        axis.imshow(values["y"].numpy() != 0, cmap=_FOREIGN, vmin=0, vmax=1)
    elif name in ("label", "y"):
        axis.imshow(values[name].numpy(), cmap=_CLASSES, vmin=0, vmax=len(CLASS_COLOURS))
    elif name == "p_value":
        axis.imshow(
            values["p_value"].clamp_min(1e-3).log10().numpy(), cmap="cividis_r", vmin=math.log10(_SMALLEST), vmax=0
        )
    else:
        low, high = scales[name]
        axis.imshow(values[name].numpy(), cmap="cividis", vmin=low, vmax=high)
    axis.set_xticks([])
    axis.set_yticks([])
