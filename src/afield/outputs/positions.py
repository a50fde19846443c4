"""Every position is a row: networks whose output layer runs at each pixel or token of an input.

    hidden vectors (N, *P, d)  ->  rows (N P, d)  ->  head  ->  answers (N P, K)  ->  logits (N, K, *P)

The head sees rows. A Linear has its features in the last dimension already; a 1x1 convolution has them in the second,
and `ChannelsFirst` turns them. Predictions go through the head in blocks, so that features of all pixels are never in
memory at once.

An image has more positions than a fit needs, so `draw` takes a few of each. Which ones is decided by a hash of the
input itself: neither its place in the loader, nor its batch, nor the number of processes changes them, and `downdate`
removes the very positions that were added.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from afield.gp.head import GaussianProcessHead
from afield.outputs.planes import Plane
from afield.prediction.p_values import conformal_p_value
from afield.prediction.positions import from_rows, input_score
from afield.prediction.prediction import Prediction
from afield.prediction.scores import SCORES

BLOCK = 8192  # rows that the head predicts at a time
OBSERVED, CALIBRATED = 256, 64  # positions of an input that are used unless another number is given; docs/outputs.md
IGNORED = -100
JOINED, REGION, ENTROPY = "joined", "region", "entropy"
_MASK = "attention_mask"


class ChannelsFirst(nn.Module):
    """A head in the place of a 1x1 convolution: x (N, d, *P) -> logits (N, K, *P)."""

    def __init__(self, head: GaussianProcessHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.movedim(1, -1)).movedim(-1, 1)


def as_returned(h: Tensor, returned: Any, outputs: int) -> Tensor:
    """Hidden vectors (N, *P, d) at the positions Q of what the network made of their logits: (N, K, *Q), (N, *Q, K).

    Patches that were a sequence are a plane again; one position in all is none.
    """
    logits = returned if isinstance(returned, Tensor) else getattr(returned, "logits", None)
    given, shape = tuple(h.shape[1:-1]), tuple(logits.shape) if isinstance(logits, Tensor) else ()
    found = {shape[2:]} if shape[1:2] == (outputs,) else set()
    found |= {shape[1:-1]} if shape[-1:] == (outputs,) and len(shape) > 1 else set()
    found = {at for at in found if math.prod(at) == math.prod(given)}
    if not given or given in found or len(found) != 1 or shape[0] != h.shape[0]:
        return h
    return h.reshape(h.shape[0], *found.pop(), h.shape[-1])  # not len: of an export it is a constant


def predict_positions(
    head: GaussianProcessHead, h: Tensor, mask: Tensor | None = None, *, joined: bool = False, **options: Any
) -> Prediction:
    """The prediction for hidden vectors (N, *P, d): logits (N, K, *P), and where calibrated, what is said of inputs.

    mask     (N, *P): the positions that are no padding, or None
    joined   make the joined score although p-values rest on another
    options  of `GaussianProcessHead.predict`
    """
    head, shape = head.snapshot(), tuple(h.shape[:-1])
    if head.score != JOINED and not joined:
        head.joined_score = None  # of the snapshot: it would take as long as the features
    known = (head.reference, int(head.reference_draws), head.input_reference) if head.calibrated else None
    head.forget_reference()  # of the snapshot: a score may look at neighbours, so p-values come last
    prediction = _by_planes(head, h, **options)
    if prediction is None:
        flat = h.flatten(0, -2)
        parts = [replace(head.predict(rows, **options), features=None) for rows in flat.split(BLOCK)]
        prediction = from_rows(replace(Prediction.cat(parts), features=flat), shape[0], shape[1:])
    prediction = replace(prediction, mask=mask)
    return prediction if known is None else _with_p_values(prediction, head, *known)


def _by_planes(
    head: GaussianProcessHead, h: Tensor, predictive: str | None = None, **options: Any
) -> Prediction | None:
    """The prediction without a look at rows, where it can be made so: from no draws, which would be made twice."""
    if (predictive or head.predictive) != "mean_field" or (plane := Plane.of(head, h)) is None:
        return None
    parts = []
    for image in h.movedim(-1, 1).flatten(2):
        if (found := plane.posterior(image)) is None:
            return None
        parts.append(head.prediction(found[0].T, found[1], predictive="mean_field", **options))

    def shaped(values: list[Tensor]) -> Tensor:
        return torch.stack(values).unflatten(-1, h.shape[1:-1])

    return replace(
        parts[0],
        logits=shaped([part.logits.T for part in parts]),
        probs=shaped([part.probs.T for part in parts if part.probs is not None]),
        variance=shaped([part.variance for part in parts if part.variance is not None]),
        features=h.movedim(-1, 1),
    )


def position_scores(prediction: Prediction, head: GaussianProcessHead) -> Tensor:
    """The scores (N, *P) on which p-values of the head rest, or will rest once it is calibrated."""
    return prediction.score(head.score) if prediction.fitted is None else prediction.fitted


def _with_p_values(
    prediction: Prediction, head: GaussianProcessHead, reference: Tensor, draws: int, of_inputs: Tensor
) -> Prediction:
    scores = position_scores(prediction, head)
    p_value, smallest = conformal_p_value(scores, reference, draws)
    found: dict[str, Any] = {"p_value": p_value, "smallest_p_value": smallest, "default_score": head.score}
    if looks_around(head.score):
        found["fitted"] = scores
    if len(of_inputs):
        total = input_scores(scores, prediction, head.score)
        found |= {"input_score": total, "input_p_value": conformal_p_value(total, of_inputs)[0]}
        found["num_inputs"] = len(of_inputs)
    return replace(prediction, **found)


def input_scores(scores: Tensor, prediction: Prediction, name: str) -> Tensor:
    """The scores (N,) of inputs as a whole, of those (N, *P) of their positions, by the score of this name."""
    return SCORES[name].of_input(scores, prediction) if name in SCORES else input_score(scores, prediction.mask)


def default_score(dims: int) -> str:
    """On what p-values of classes rest by default, at positions of so many dimensions; docs/outputs.md has the reason.

    A plane and a space have regions. What stands in a row may be tokens, next to which nothing follows.
    """
    return REGION if dims > 1 else ENTROPY


def looks_around(score: str) -> bool:
    """Whether a score of this name reads all positions of an input together."""
    return score in SCORES and SCORES[score].whole


def mask_of(kwargs: Mapping[str, Any], shape: Iterable[int]) -> Tensor | None:
    """Which positions (N, *P) are no padding, where the inputs tell: Hugging Face's attention mask."""
    mask = kwargs.get(_MASK)
    return mask.bool() if isinstance(mask, Tensor) and mask.shape == tuple(shape) else None


def draw(valid: Tensor, keys: Sequence[int], count: int | None, *, exactly: bool = False) -> tuple[Tensor, Tensor]:
    """Positions of each input, where valid (N, *P), in an order that its key decides.

    Returns their numbers (M,) among all rows (N P,), and the numbers (M,) of the inputs that they belong to.

    count    how many of each; None: all
    exactly  that many of every input that has any, by turns if it has fewer: groups of one size
    """
    flat = valid.flatten(1).cpu()
    chosen = [_draw_one(row.nonzero().flatten(), key, count, exactly) for row, key in zip(flat, keys, strict=True)]
    index = torch.cat([i * flat.shape[1] + rows for i, rows in enumerate(chosen)])
    owner = torch.repeat_interleave(torch.arange(len(flat)), torch.tensor([len(rows) for rows in chosen]))
    return index.to(valid.device), owner.to(valid.device)


def _draw_one(rows: Tensor, key: int, count: int | None, exactly: bool) -> Tensor:
    if count is None or not len(rows) or (len(rows) <= count and not exactly):
        return rows
    order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(key))]
    return order[torch.arange(count) % len(order)] if exactly else order[:count]


def sample_rows(
    predictions: Sequence[Prediction], x: Any, target: Tensor, count: int = CALIBRATED
) -> tuple[list[Prediction], Tensor]:
    """Predictions of inputs x and their targets (N, *P) as rows of a few positions; as they are without positions."""
    if not predictions[0].positions:
        return list(predictions), target
    args, kwargs = ((), x) if isinstance(x, Mapping) else ((x,), {})
    index, _ = draw(target != IGNORED, keys_of(args, kwargs, len(target), 0), count)
    return [prediction.rows()[index] for prediction in predictions], target.flatten()[index]


def keys_of(args: Iterable[Any], kwargs: Mapping[str, Any], inputs: int, before: int) -> list[int]:
    """A number for each input of a batch, made of its content; of its place, `before` it others, where it has none."""
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.shape[:1] == (inputs,)]
    if not tensors:
        return list(range(before, before + inputs))
    plain = [t.detach().cpu().contiguous().reshape(inputs, -1).view(torch.uint8).numpy() for t in tensors]
    return [_hash(t[i].data for t in plain) for i in range(inputs)]


def _hash(parts: Iterator[Any]) -> int:
    total = hashlib.blake2b(digest_size=7)
    for part in parts:
        total.update(part)
    return int.from_bytes(total.digest(), "big")


def rows_of_target(target: Tensor, shape: tuple[int, ...], outputs: int) -> Tensor:
    """Targets as rows: classes (N, *P) -> (N P,), numbers (N, K, *P) or (N, *P, K) -> (N P, K)."""
    if target.shape == shape:
        return target.flatten()
    if target.shape == (shape[0], outputs, *shape[1:]):
        return target.movedim(1, -1).flatten(0, -2)
    if target.shape == (*shape, outputs):
        return target.flatten(0, -2)
    raise ValueError(
        f"The network answers at positions {shape[1:]} of each of {shape[0]} inputs, and expects targets of shape "
        f"{shape} for classes or {(shape[0], outputs, *shape[1:])} for numbers, got {tuple(target.shape)}. If there is "
        "one target an input, the network should pool its positions before the output layer; if labels are of another "
        "resolution, one of the two has to be resized."
    )
