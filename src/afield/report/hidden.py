"""Hidden vectors in the plane by t-SNE (paper: figure sngp_overview): do OOD inputs collapse onto the classes?"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from afield.experiment.run_folder import evenly_spaced_rows
from afield.report.groups import GroupPredictions
from afield.report.plots import OOD_COLOUR, Picture, class_colours, label_text, make_panels, report_style, to_png

_MOST = 250  # of the test data, and of all OOD sets together
_LEAST = 10


def draw_hidden(task: str, groups: Sequence[GroupPredictions]) -> Picture | None:
    """One map for each method that has kept hidden vectors; methods share no map, so places cannot be compared."""
    drawn = [(each, vectors) for each in groups if (vectors := _vectors(each)) is not None]
    if not drawn:
        return None
    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError('t-SNE needs scikit-learn: pip install "afield[cli]".') from error
    with report_style():
        figure, axes = make_panels(len(drawn))
        for axis, (each, (h, count)) in zip(axes, drawn, strict=True):
            perplexity = min(30.0, (len(h) - 1) / 3)
            with threadpool_limits(1):  # on a busy machine its threads wait for each other, twenty times as long
                place = TSNE(perplexity=perplexity, init="pca", random_state=0, max_iter=500).fit_transform(h)
            x, z = place.T
            rows = each.arrays["test/rows"]
            y = each.arrays["test/y"].flatten()[rows[evenly_spaced_rows(len(rows), _MOST)]].numpy()
            if each.test.probs is not None:
                colours = class_colours(int(each.arrays["test/y"].max()) + 1)
                axis.scatter(x[:count], z[:count], s=7, c=[colours[k] for k in y], linewidths=0)
            else:
                axis.scatter(x[:count], z[:count], s=7, c=y, cmap="cividis", linewidths=0)
            axis.scatter(x[count:], z[count:], s=9, color=OOD_COLOUR, marker="x", linewidths=0.6, alpha=0.7)
            axis.set_title(label_text(each.name))
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_visible(True)
        content = to_png(figure)
    return Picture(
        "hidden",
        "Hidden vectors",
        "t-SNE of the last hidden vectors: dots are test data, coloured by class or target, red crosses are OOD. Where "
        "crosses lie among the dots, the network has forgotten that they are far away. Each panel is a map of its own.",
        f"t-SNE maps of hidden vectors for {task}, one panel each for {', '.join(each.name for each, _ in drawn)}.",
        content,
    )


def _vectors(each: GroupPredictions) -> tuple[np.ndarray, int] | None:
    """Hidden vectors (N, d) of test data first, then of OOD sets, and how many are test data."""
    if not {"test/features", "test/rows", "test/y"} <= each.arrays.keys():
        return None
    inside = _subsample(each.arrays["test/features"], _MOST)
    outside = [each.arrays[f"ood/{name}/features"] for name in each.ood if f"ood/{name}/features" in each.arrays]
    h = np.concatenate([inside, *(_subsample(part, _MOST // len(outside)) for part in outside)])
    if len(inside) < _LEAST or h.shape[1] < 2 or not np.isfinite(h).all() or not h.std(0).max() > 1e-6:
        return None
    return h, len(inside)


def _subsample(vectors: Tensor, most: int) -> np.ndarray:
    """At most `most` of the vectors (N, d), evenly over all."""
    return vectors[evenly_spaced_rows(len(vectors), most)].float().flatten(1).numpy()
