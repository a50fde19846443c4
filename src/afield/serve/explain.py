"""Why is an input answered so? The kept training examples that are nearest to it, and for tables its odd features.

    nearest    by distance in the hidden space as the variance sees it, in length scales of its kernel
    features   x with feature j as in the nearest example:  how much lower is the score then? And where does the feature
               lie among the kept examples: below `low`, their 5% quantile, or above `high`, the one of 95%?

The examples are those of `afield.save(..., neighbours=100, train=loader)`. Rows that are made up to find out about
features are answered here, and counted nowhere.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from afield.model.evaluating import evaluating
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction
from afield.serve.engine import Arrays, BadInput, Explain

_NEAREST, _FEATURES, _MOST_FEATURES = 5, 5, 200
_PIXELS = 64  # of a side of a picture that is sent


def explainer(
    model: SNGP,
    kept: Mapping[str, Tensor],
    inputs_of: Callable[[Arrays], Any],
    *,
    labels: Sequence[str] = (),
    features: Sequence[str] = (),
    decode: Callable[[list[int]], str] | None = None,
) -> Explain:
    """A function that says of every row what is near it, and what is odd about it.

    kept       as `afield.model.saving.draw_examples` draws them
    inputs_of  arrays -> what the network takes
    decode     token ids -> text
    """

    @torch.no_grad()
    def explain(arrays: Arrays) -> list[dict[str, Any]]:
        x = inputs_of(arrays)
        try:
            with evaluating(model):
                hidden = model.hidden(**x) if isinstance(x, Mapping) else model.hidden(x)
        except (ValueError, RuntimeError, IndexError, TypeError, KeyError) as error:
            raise BadInput(f"The model does not take these rows: {' '.join(str(error).split())[:500]}") from error
        distances = model.head.features_of_variance.distances(hidden.float(), kept["hidden"])
        found = list[dict[str, Any]]()
        for row, distance in enumerate(distances):
            order = distance.argsort()[:_NEAREST].tolist()
            near = [_example(kept, k, labels, decode) | {"distance": float(distance[k])} for k in order]
            found.append({"nearest": near})
            if isinstance(x, Tensor) and x.dim() == 2 and "input" in kept and x.shape[1] <= _MOST_FEATURES:
                found[-1]["features"] = _features(model.predict, x[row], kept["input"], order[0], features)
        return found

    return explain


def _features(
    predict: Callable[[Tensor], Prediction], x: Tensor, examples: Tensor, nearest: int, names: Sequence[str]
) -> list[dict[str, Any]]:
    """The features (F,) that the score hangs on most, and those outside of the usual range, the first first."""
    changed = torch.where(torch.eye(len(x), dtype=torch.bool), examples[nearest].to(x), x)
    score = predict(torch.cat([x[None], changed])).score().double()
    drop = (score[0] - score[1:]).tolist()
    low, high = (torch.quantile(examples.double(), q, dim=0).tolist() for q in (0.05, 0.95))
    values = x.tolist()
    outside = [not low[j] <= values[j] <= high[j] for j in range(len(x))]
    order = sorted((j for j in range(len(x)) if drop[j] > 0 or outside[j]), key=lambda j: -drop[j])
    return [
        {
            "name": names[j] if names else str(j + 1),
            "value": values[j],
            "low": low[j],
            "high": high[j],
            "unusual": outside[j],
            "score_without": float(score[1 + j]),
        }
        for j in order[:_FEATURES]
    ]


def _example(
    kept: Mapping[str, Tensor], k: int, labels: Sequence[str], decode: Callable[[list[int]], str] | None
) -> dict[str, Any]:
    """What is shown of a kept example: its label, and its row, text or picture."""
    shown: dict[str, Any] = {}
    if "target" in kept:
        target = kept["target"][k]
        whole = not target.is_floating_point() and target.dim() == 0
        shown["label"] = labels[int(target)] if whole and 0 <= int(target) < len(labels) else target.tolist()
    if "input_ids" in kept and decode is not None:
        shown["input"] = decode([i for i in kept["input_ids"][k].tolist() if i >= 0])
    elif "input" in kept and kept["input"].dim() == 2:
        shown["input"] = ", ".join(f"{value:.4g}" for value in kept["input"][k, :24].tolist())
    elif "input" in kept and kept["input"].dim() == 4 and kept["input"].shape[1] in (1, 3):
        shown["picture"] = _picture(kept["input"][k])
    return shown


def _picture(image: Tensor) -> list[Any]:
    """Bytes (H, W, C) of an image (C, H, W), small; what is not between 0 and 1 is stretched to it."""
    pixels = image.float() / (255 if image.dtype == torch.uint8 else 1)
    step = -(-max(pixels.shape[1:]) // _PIXELS)
    pixels = F.avg_pool2d(pixels[None], step)[0] if step > 1 else pixels
    if pixels.min() < 0 or pixels.max() > 1:
        pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp_min(1e-12)
    return np.asarray((255 * pixels).byte().permute(1, 2, 0)).tolist()
