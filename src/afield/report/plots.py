"""Pictures (matplotlib, from the extra `cli`). Colours are safe for colour-blind readers: cividis and Okabe-Ito's.

In curves a colour is a base model and a line style is a way of combining models: see `groups`.
"""

import io
import struct
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from afield.prediction.prediction import Prediction
from afield.report.groups import Group

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError('Pictures need matplotlib: pip install "afield[cli]".') from error

CLASS_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#d55e00", "#0072b2", "#f0e442", "#999999")
OOD_COLOUR = "#d7191c"
INK, FAINT = "#222222", "#8a8f98"
PER_ROW = 5
_BASE_COLOURS = {
    "dnn": "#d55e00",
    "isomax-plus": "#cc79a7",
    "dnn-sn": "#e69f00",
    "duq-gp": "#56b4e9",
    "dnn-gp": "#009e73",
    "sngp": "#0072b2",
}
_OTHER_COLOURS = ("#000000", "#7f7f7f", "#b8860b", "#5d3a9b")
_LINES = {"single": "-", "augmix": (0, (8, 2)), "dropout": (0, (1, 1.2)), "ensemble": (0, (4, 1.5)), "gp": "-"}
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.edgecolor": "#9aa0a8",
    "axes.linewidth": 0.8,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "axes.titleweight": "bold",
    "text.color": INK,
    "axes.labelcolor": INK,
    "svg.fonttype": "none",
}
_DPI = 150


@dataclass(frozen=True)
class Picture:
    """A PNG with its title and caption; `alt` describes it to those who cannot see it."""

    name: str
    title: str
    caption: str
    alt: str
    png: bytes

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in CSS pixels: half the PNG's, so that it is sharp on dense screens."""
        width, height = struct.unpack(">II", self.png[16:24])
        return round(width * 96 / _DPI), round(height * 96 / _DPI)


def label_text(text: str) -> str:
    """A name as matplotlib shows it literally, where dollars would begin a formula, and no wider than a panel."""
    return textwrap.fill(text, 26, break_long_words=False, break_on_hyphens=False).replace("$", r"\$")


def report_style() -> Any:
    """The context in which all pictures of a report are drawn."""
    return mpl.rc_context(_STYLE)


def to_png(figure: Figure) -> bytes:
    """The figure as the content of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, facecolor="white")
    return buffer.getvalue()


def make_panels(
    count: int, *, width: float = 2.35, height: float = 2.4, extra: float = 0.0, **kwargs: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, about five a row and as even as can be; `extra` inches beside them."""
    rows = -(-count // PER_ROW)
    columns = -(-count // rows)
    figure = Figure(figsize=(width * columns + extra, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **kwargs).flat)
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def line_styles(groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """Colour and line style by name; what is not among the known bases takes the other colours in turn."""
    others = list(dict.fromkeys(g.place.base for g in groups if g.place.base not in _BASE_COLOURS))
    colours = _BASE_COLOURS | {base: _OTHER_COLOURS[i % len(_OTHER_COLOURS)] for i, base in enumerate(others)}
    styles: dict[str, dict[str, Any]] = {}
    for group in groups:
        where = group.place
        style: dict[str, Any] = {"color": colours[where.base], "linestyle": _LINES[where.family], "linewidth": 1.6}
        alike = [s for s in styles.values() if s["color"] == style["color"] and s["linestyle"] == style["linestyle"]]
        styles[group.name] = style | ({"alpha": max(0.3, 1 - 0.35 * len(alike))} if alike else {})
    return styles


def class_colours(classes: int) -> list[Any]:
    """Okabe and Ito's as far as they reach, else even steps of cividis."""
    if classes <= len(CLASS_COLOURS):
        return list(CLASS_COLOURS[:classes])
    return [mpl.colormaps["cividis"](k / (classes - 1)) for k in range(classes)]


def uncertainty(prediction: Prediction) -> Tensor:
    """u(x) = p (1 - p) / 0.25 with p the top probability (paper: figure 2d_exp)."""
    p = prediction.confidence
    return p * (1 - p) / 0.25


def find_lattice(x: Tensor) -> tuple[Tensor, int, int] | None:
    """(order, rows, columns) that make an image of the points of a lattice in the plane, or None if it is not one."""
    if x.dim() != 2 or x.shape[1] != 2:
        return None
    columns, rows = (int(x[:, i].unique().numel()) for i in (0, 1))
    if rows * columns != x.shape[0] or rows < 2 or columns < 2:
        return None
    by_column = x[:, 0].argsort(stable=True)
    return by_column[x[by_column, 1].argsort(stable=True)], rows, columns


def plot_surface(axis: Axes, grid: Tensor, values: Tensor, train: tuple[Tensor, Tensor], ood: Tensor | None) -> Any:
    """Draw values on a lattice, training points by class, and OOD points as crosses. Returns the image."""
    found = find_lattice(grid)
    if found is None:
        raise ValueError("A surface needs a lattice of points in the plane.")
    order, rows, columns = found
    (left, bottom), (right, top) = grid.amin(0).tolist(), grid.amax(0).tolist()
    image = axis.imshow(
        values[order].reshape(rows, columns).numpy(),
        origin="lower",
        extent=(left, right, bottom, top),
        vmin=0,
        vmax=1,
        cmap="cividis",
        aspect="auto",
        interpolation="bilinear",
    )
    x, y = train
    colours = class_colours(int(y.max()) + 1)
    for k, colour in enumerate(colours):
        points = x[y == k]
        axis.scatter(points[:, 0], points[:, 1], s=4, color=colour, edgecolors="black", linewidths=0.15)
    if ood is not None:
        axis.scatter(ood[:60, 0], ood[:60, 1], s=12, color=OOD_COLOUR, marker="x", linewidths=0.8)
    axis.set_xlim(left, right)
    axis.set_ylim(bottom, top)
    axis.set_xticks([])
    axis.set_yticks([])
    return image


def add_colour_bar(figure: Figure, image: Any, axes: Sequence[Axes]) -> None:
    """Add the scale of uncertainty surfaces beside their panels."""
    figure.colorbar(image, ax=list(axes), label="uncertainty  p (1 - p) / 0.25", aspect=40, pad=0.01)
