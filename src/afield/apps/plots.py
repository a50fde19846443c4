"""Pictures (matplotlib, from the extra `cli`). Colours are safe for colour-blind readers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from afield.predictive import Prediction

try:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
except ImportError as error:
    raise ImportError('Pictures need matplotlib: pip install "afield[cli]".') from error

CLASS_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#d55e00")
OOD_COLOUR = "#d7191c"


def uncertainty_surfaces(
    predictors: Mapping[str, Callable[[Tensor], Prediction]],
    train: tuple[Tensor, Tensor],
    ood: Tensor,
    path: Path,
    *,
    resolution: int = 120,
) -> Path:
    """One panel a method: u(x) = p (1 - p) / 0.25 over the plane, p the top probability (paper: figure 2d_exp).

    Dark is certain, bright is not. The panels share one scale; crosses are points of `ood`.
    """
    x, y = train
    low, high = torch.cat([x, ood]).amin(0), torch.cat([x, ood]).amax(0)
    axes_points = [torch.linspace(float(a), float(b), resolution) for a, b in zip(low, high, strict=True)]
    grid = torch.stack(torch.meshgrid(*axes_points, indexing="xy"), dim=-1).flatten(0, 1)
    figure, axes = plt.subplots(
        1, len(predictors), figsize=(3.1 * len(predictors) + 0.8, 3.5), sharey=True, layout="constrained"
    )
    extent = (float(low[0]), float(high[0]), float(low[1]), float(high[1]))
    image: Any = None
    for axis, (name, predict) in zip(np.atleast_1d(axes), predictors.items(), strict=True):
        p = predict(grid).confidence
        surface = (p * (1 - p) / 0.25).reshape(resolution, resolution).numpy()
        image = axis.imshow(
            surface,
            origin="lower",
            extent=extent,
            vmin=0,
            vmax=1,
            cmap="cividis",
            aspect="auto",
            interpolation="bilinear",
        )
        for k in range(int(y.max()) + 1):
            points = x[y == k]
            colour = CLASS_COLOURS[k % len(CLASS_COLOURS)]
            axis.scatter(points[:, 0], points[:, 1], s=5, color=colour, edgecolors="black", linewidths=0.15)
        axis.scatter(ood[:60, 0], ood[:60, 1], s=14, color=OOD_COLOUR, marker="x", linewidths=0.8)
        axis.set_title(name)
        axis.set_xticks([])
        axis.set_yticks([])
    figure.colorbar(image, ax=np.atleast_1d(axes).tolist(), label=r"uncertainty  $p\,(1-p)\,/\,0.25$", pad=0.01)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
