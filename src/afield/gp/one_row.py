"""The prediction of one row on the CPU, prepared for one state of a head, in NumPy.

    phi(h) = sqrt(2 / D) a(V (z(h) - m) + b),        V = W diag(1 / s) / l

What is computed is defined by `GaussianProcessHead`, with its features, class distance, joined score and p-values; this
is the same for one row, to rounding. On a small network most of the time of these definitions is not in their products,
but in some hundred small steps: they standardise, divide and look for overflow in every call, and a step costs torch
three times what it costs NumPy. Here the constants are multiplied out beforehand. `m` and `s` are the moments of the
coordinates z, where the geometry has them.

Products are dot products row by row (`np.vecdot`), or of small matrices, neither of which ever waits for another
thread. Vectors that are so long or so short that they need a closer look are left to the definition; so are batches,
whose products take the time.

An `OneRow` belongs to one state and does not change: whoever holds it reads one state, whatever goes on. `is_of` tells
whether a head is in that state.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from afield.gp.class_distance import ClassDistance
from afield.gp.features import KERNELS, RandomFeatures
from afield.gp.geometry import GEOMETRIES
from afield.gp.head_state import PARTS
from afield.gp.joined_score import JoinedScore
from afield.gp.likelihoods import LIKELIHOODS
from afield.gp.precision import Accumulator, Precision
from afield.prediction.p_values import fewest_rows
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import MEAN_FIELD_FACTOR

if TYPE_CHECKING:
    from afield.gp.head import GaussianProcessHead

_SHORTEST, _LONGEST = 1e-12, 1e12  # hidden vectors: neither squares nor products overflow
_LARGEST = 1e15  # entry of V
_FACTS = ("score", "likelihood", "out_features", "dropped", "added", "mean")  # of a head, beside tensors and modules
_VERSION, _ADAPTED = attrgetter("_version"), attrgetter("adapted")
_SMALL, _SMALL_SUM = 8192, 1920  # a small matrix: its entries, and the bytes of an entry times (rows + columns)
_FEWEST_ROWS = 8  # of a small matrix, for which BLAS pays
_ROWS = 128  # of a block of the triangle, which is read as fast as memory gives it: fewer rows, fewer zeros
Array = np.ndarray[Any, Any]


class OneRow:
    """`GaussianProcessHead.predict` of a hidden vector (1, d), for a head and its `snapshot`."""

    def __init__(self, head: "GaussianProcessHead", snapshot: "GaussianProcessHead") -> None:
        self.head = snapshot
        parts = [part for name in PARTS if (part := head._modules[name]) is not None]
        self._facts = list(map(head.__dict__.get, _FACTS))
        self._owners: list[dict[str, Any]] = [
            head._buffers,
            head._parameters,
            head._modules,
            *(part._buffers for part in parts),
        ]
        self._members: list[Any] = list(chain.from_iterable(map(dict.values, self._owners)))
        self._features = [part for part in parts if isinstance(part, RandomFeatures)]
        self._adapted = list(map(_ADAPTED, self._features))
        sums = {id(part._buffers[name]) for part in parts if isinstance(part, Accumulator) for name in part.SUMS}
        # What is added to the sums drops the factor, which a prediction reads in their place.
        self._tensors = [t for t in self._members if isinstance(t, Tensor) and id(t) not in sums]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        # Parameters are read where they are. Tensors of inference mode have no version.
        self._copied = [t for t in self._tensors if not isinstance(t, nn.Parameter) and not t.is_inference()]
        self._versions = list(map(_VERSION, self._copied))
        self._answer = _Answer(snapshot) if _can_be_prepared(snapshot) else None
        usual = LIKELIHOODS[head.likelihood].num_classes(head.out_features) > 1 and head.out_features > 1
        self._of_classes = _Classes(snapshot) if usual and (head.score == "joined" or not head.calibrated) else None

    def is_of(self, head: "GaussianProcessHead") -> bool:
        """Whether the head is in the state that this was made of. The loops run in C."""
        own = head.__dict__
        return (
            own["_buffers"] is self._owners[0]  # and not those of what it is a copy of
            and sum(map(len, self._owners)) == len(self._members)
            and all(map(is_, chain.from_iterable(map(dict.values, self._owners)), self._members))
            and list(map(own.get, _FACTS)) == self._facts
            and list(map(_ADAPTED, self._features)) == self._adapted
            and list(map(_VERSION, self._copied)) == self._versions
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
        )

    def predict(
        self, h: Tensor, predictive: str, num_samples: int, generator: torch.Generator | None
    ) -> Prediction | None:
        """The prediction; None where it takes the definition."""
        answer = None if self._answer is None else self._answer(h)
        if answer is None:
            return None
        if self._of_classes is not None and predictive == "mean_field":
            return self._of_classes(h, *answer)
        mean, variance, _, joined = answer
        joined_score = None if joined is None else h.new_tensor([joined])
        options = (h, predictive, num_samples, generator)
        return self.head.prediction(torch.from_numpy(mean[None]), h.new_tensor([variance]), joined_score, *options)

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of a head starts without."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _can_be_prepared(head: "GaussianProcessHead") -> bool:
    """Whether there is one fitted precision, no score but the joined one, and no tensor on another device or in half
    precision."""
    precision, distance = head.precision, head.class_distance
    if not isinstance(precision, Precision) or precision.num_matrices > 1 or not precision.factored:
        return False
    if head.unadapted() or head.added or head.dropped or not hasattr(np, "vecdot"):  # which NumPy 1 has not
        return False
    if head.chosen_score.fitted or int(head.reference_draws) > 1:
        return False
    tensors = [precision.root, *(f.weight for f in (head.random_features, head.features_of_variance))]
    tensors += [] if head.mean is not None else [head.weight]
    tensors += [distance.root] if distance is not None and distance.factored else []
    if any(_largest_entry(features) > _LARGEST for features in (head.random_features, head.features_of_variance)):
        return False
    kinds = {(tensor.device.type, tensor.dtype) for tensor in tensors}
    return len(kinds) == 1 and kinds <= {("cpu", torch.float32), ("cpu", torch.float64)}


def _largest_entry(features: RandomFeatures) -> float:
    """No entry of V is larger."""
    entries = [features.weight, *(t for t in (features.gain, features.projector) if t is not None and t.numel())]
    return math.prod(float(t.abs().amax()) for t in entries) * features.in_features / float(features.length_scale)


def _array(tensor: Tensor) -> Array:
    """The same memory."""
    return tensor.detach().numpy()


class _Answer:
    """Mean (K,), variance, how far the logits lie below the largest, joined score; None unless the length of the hidden
    vector is an ordinary one."""

    def __init__(self, head: "GaussianProcessHead") -> None:
        self._kept = head.mean
        self._phi = self._psi = _Features(head.features_of_variance)
        if head.variance_features is not None:
            self._phi = _Features(head.random_features)
        root = _array(head.precision.root[0])
        ends = [min(start + _ROWS, len(root)) for start in range(0, len(root), _ROWS)]
        self._triangle = [(end, root[start:end, :end].copy()) for start, end in zip([0, *ends], ends, strict=False)]
        self._weight: Any = None if self._kept is not None else _array(head.weight)
        self._constant = None if head.constant is None else _array(head.constant)
        distance, score = head.class_distance, head.joined_score
        self._joined: _Joined | None = None
        if distance is not None and score is not None and score.fitted:
            self._joined = _Joined(distance, score)
        self._dtype, self._shape = head.precision.root.dtype, (1, head.in_features)
        self._amplitude = _array(head.amplitude)
        self._most = torch.finfo(self._dtype).max

    def __call__(self, h: Tensor) -> tuple[Array, float, Array, float | None] | None:
        if h.dtype != self._dtype or h.shape != self._shape:
            return None
        x = (h.detach() if h.requires_grad else h).numpy()[0]
        with np.errstate(over="ignore"):
            length = math.sqrt(x.dot(x))
            if not _SHORTEST < length < _LONGEST:
                return None
            u = x / length
            psi, size = self._psi(x, u, length)
            if self._kept is not None:
                mean = _array(self._kept(h))[0]
            else:
                mean = self._mean(*((psi, size) if self._phi is self._psi else self._phi(x, u, length)))
            squares = 0.0
            for end, block in self._triangle:
                part = np.vecdot(block, psi[:end])
                squares += float(part.dot(part))
            spread = squares * size**2
            variance = spread * float(self._amplitude) ** 2
            if not (variance < self._most and math.isfinite(mean.dot(mean))):
                return None
            largest, below = _below_largest(mean)
            joined = None if self._joined is None else self._joined(u, largest, below, spread)
            return mean, variance, below, joined

    def _mean(self, phi: Array, size: float) -> Array:
        mean = np.vecdot(self._weight, phi)
        mean *= size
        return mean if self._constant is None else mean + self._constant


class _Features:
    """`RandomFeatures` of a row, as an array and a factor: of the row, its direction u, and its length."""

    def __init__(self, features: RandomFeatures) -> None:
        space, kernel = GEOMETRIES[features.geometry], KERNELS[features.kernel]
        matrix = features.weight.double() / features.length_scale
        if features.projector is not None:
            matrix = matrix @ features.projector.double().T
        if space.standardized:
            matrix = matrix * features.gain.double()
        self._map, self._activation = space.of_row, kernel.of_row
        self._shift = _array(features.shift) if space.standardized else None
        self._product, self._phase = _product(_array(matrix.to(features.weight.dtype))), _array(features.phase)
        self._scale, self._radius = math.sqrt(2 / features.num_random_features), float(features.radius)
        self._large = torch.finfo(features.weight.dtype).max ** 0.75

    def __call__(self, x: Array, u: Array, length: float) -> tuple[Array, float]:
        z = self._map(x, u, length)
        if self._shift is not None:
            z = z - self._shift
        phase = self._product(z).reshape(-1)
        phase += self._phase
        growth = min(max(1.0, length / self._radius) ** 2, self._large)
        return self._activation(phase), self._scale * growth


def _product(matrix: Array) -> Callable[[Array], Array]:
    """x -> matrix x, in any shape, by one thread and without a lock that a fork could leave held.

    BLAS multiplies a small matrix so; there it takes half the time of a dot product for each row.
    """
    width, size = matrix.shape[1], matrix.itemsize
    most = min(_SMALL // max(width, 1), _SMALL_SUM // size - width)
    rows = next((rows for rows in range(most, _FEWEST_ROWS - 1, -1) if len(matrix) % rows == 0), None)
    if rows is None:
        return partial(np.vecdot, matrix)
    return partial(np.matmul, matrix.reshape(-1, rows, width))


class _Joined:
    """`JoinedScore` of the sources of a row: of its direction u, its logits, and its variance at amplitude 1."""

    def __init__(self, distance: ClassDistance, score: JoinedScore) -> None:
        self._shift, root, self._centers, self._offsets = map(
            _array, (distance.shift, distance.root, distance.centers, distance.offsets)
        )
        self._product, self._width, self._most = _product(root), distance.in_features, float(np.finfo(root.dtype).max)
        heights = F.pad((score.slopes * score.widths)[:, :-1].cumsum(1), (1, 0))  # of t at its knots
        tables = (score.knots, heights, score.slopes, score.widths)
        self._terms: list[tuple[list[float], ...]] = list(zip(*(table.tolist() for table in tables), strict=True))

    def __call__(self, u: Array, largest: float, below: Array, spread: float) -> float:
        both = self._product(u - self._shift).reshape(-1)
        a, b = both[: self._width], both[self._width :]
        near = np.vecdot(self._centers, a)
        near += self._offsets
        distance = float(a.dot(a)) + float(near[near.argmin()]) - float(b.dot(b))  # Python's floats overflow in silence
        energy = -largest - math.log(np.exp(below).sum())
        total = 0.0
        for x, (knots, heights, slopes, widths) in zip((spread, energy, distance), self._terms, strict=True):
            i = bisect_left(knots, x) - 1
            if i >= 0:
                total += heights[i] + slopes[i] * min(x - knots[i], widths[i])
        return total if total <= self._most else math.inf


class _Classes:
    """`GaussianProcessHead.prediction` of an answer: mean-field probabilities, and p-values of the joined score."""

    def __init__(self, head: "GaussianProcessHead") -> None:
        self._scale, self._calibrated = _array(head.logit_scale), head.calibrated
        self._reference, self._spans = memoryview(_array(head.reference)), head.reference_spans.tolist()  # type: ignore[arg-type]
        self._known: dict[str, Any] = {"likelihood": head.likelihood}
        if self._calibrated:
            smallest = 1 / (fewest_rows(head.reference, head.reference_spans) + 1)
            self._known |= {"default_score": head.score, "smallest_p_value": smallest}

    def __call__(self, h: Tensor, mean: Array, variance: float, below: Array, joined: float | None) -> Prediction:
        scale = float(self._scale)
        logits = mean * scale
        probs = below * (scale / math.sqrt(1 + MEAN_FIELD_FACTOR * variance))
        np.exp(probs, out=probs)
        probs /= probs.sum()
        numbers, row = np.array([variance, joined or 0.0, 0.0], mean.dtype), torch.from_numpy
        p_value = count = None
        if self._calibrated and joined is not None:
            numbers[2], count = self._p_value(numbers.item(1), logits)
            p_value = row(numbers[2:])
        return Prediction(
            row(logits[None]),
            row(numbers[:1]),
            row(probs[None]),
            features=h,
            p_value=p_value,
            joined=None if joined is None else row(numbers[1:2]),
            num_reference=torch.tensor([count]) if self._spans else count,
            **self._known,
        )

    def _p_value(self, joined: float, logits: Array) -> tuple[float, int]:
        """And the number of rows that it comes from."""
        first, end = self._spans[logits.argmax()] if self._spans else (0, len(self._reference))
        count = end - first
        return (1 + end - bisect_left(self._reference, joined, first, end)) / (1 + count), count


def _below_largest(mean: Array) -> tuple[float, Array]:
    """The largest logit, and the logits less that; one logit stands for two (`scores.symmetric`)."""
    if len(mean) == 1:
        mean = mean * np.array([-0.5, 0.5], mean.dtype)
    largest = mean[mean.argmax()]
    return float(largest), mean - largest
