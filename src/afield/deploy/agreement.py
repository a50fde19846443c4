"""Test inputs on which two implementations of a model are compared, and how far apart their answers are.

Test inputs are made from an example batch: the example, one row, an odd number of rows, random inputs with its moments,
zeros, tiny, large and huge numbers, points far away in one direction, one NaN. Whole numbers (token ids, bytes) stay in
the example's range (bytes: 0 to 255): random, all lowest, all highest. What holds only 0 and 1 stays as it is: a mask
that masks all of a text has no right answer.

Far out, an answer need not be determined by its input: a phase of 1e7 has no digits left in float32, so its cosine, and
all that follows from it, is rounding error. A row is *undetermined* if a change of its numbers by a few units of the
last digit (2^-22) changes torch's own answer by more than a tenth of the tolerance. Two implementations cannot agree
there; such rows are counted and left out of the comparison. The rows of the example are always compared.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Batch = tuple[Tensor, ...]
Answers = Mapping[str, Tensor]
Implementation = Callable[[Batch], Answers]
DECISIVE = ("probs", "mean", "std", "covariance")
_EXTREME_ROWS = 5
_ODD_ROWS = 17
_MAX_ROWS = 64
_PERTURBATIONS = 3
_LAST_DIGITS = 2.0**-22


@dataclass(frozen=True)
class Agreement:
    """How far two implementations are apart.

    example       largest difference by output, on the example
    everywhere    the same on all test inputs, without undetermined rows
    rows          number of rows, of which
    undetermined  have answers that float32 does not determine
    worst         name of the test input with the largest decisive difference
    same_choice   part of the example's rows with the same most probable class (regression: 1)
    """

    example: Mapping[str, float]
    everywhere: Mapping[str, float]
    rows: int
    undetermined: int
    worst: str
    same_choice: float

    @property
    def difference(self) -> float:
        """Of probabilities; of mean, std and covariance in units of the std."""
        return max(value for name, value in self.everywhere.items() if name in DECISIVE)


def compare(
    expected: Implementation, actual: Implementation, batches: Mapping[str, Batch], *, tolerance: float, seed: int = 0
) -> Agreement:
    """Run both on all batches, as `make_test_inputs` returns them."""
    on_example: dict[str, float] = {}
    everywhere: dict[str, float] = {}
    rows = undetermined = 0
    worst, worst_difference, same_choice = "", -1.0, 1.0
    for name, batch in batches.items():
        right, found = expected(batch), actual(batch)
        by_output = differences(right, found)
        determined = torch.ones(len(batch[0]), dtype=torch.bool)
        if name == "example":
            on_example = {output: float(difference.max()) for output, difference in by_output.items()}
            if "probs" in right:
                same_choice = float((right["probs"].argmax(1) == found["probs"].argmax(1)).double().mean())
        else:
            determined = _sensitivity(expected, batch, right, seed) <= tolerance / 10
        rows, undetermined = rows + len(determined), undetermined + int((~determined).sum())
        for output, difference in by_output.items():
            largest = float(difference[determined].max()) if bool(determined.any()) else 0.0
            everywhere[output] = max(everywhere.get(output, 0.0), largest)
            if output in DECISIVE and largest > worst_difference:
                worst, worst_difference = name, largest
    return Agreement(on_example, everywhere, rows, undetermined, worst, same_choice)


def differences(expected: Answers, actual: Answers) -> dict[str, Tensor]:
    """The largest difference of each row (N,) by output: as it is for probs and p_value, in units of the expected std
    for mean, std and covariance, relative to 1 + |expected| otherwise. NaN agrees with NaN, and with nothing else."""
    by_output = {}
    for name, right in expected.items():
        a, b = right.double().flatten(1 if right.dim() > 1 else 0), actual[name].double()
        b = b.reshape(a.shape)
        absolute = name == "probs" or name.endswith(("p_value", "accepted"))
        scale = torch.ones_like(a) if absolute else 1 + a.abs()
        if name in ("mean", "std"):
            scale = expected["std"].double().reshape(a.shape)
        if name == "covariance":
            std = expected["std"].double()
            scale = (std[..., :, None] * std[..., None, :]).reshape(a.shape)
        same = (a == b) | (a.isnan() & b.isnan())
        difference = torch.where(same, 0.0, ((a - b).abs() / scale).nan_to_num(torch.inf))
        by_output[name] = difference if difference.dim() == 1 else difference.amax(1)
    return by_output


def make_test_inputs(example: Batch, *, shorter: bool = False, seed: int = 0) -> dict[str, Batch]:
    """Batches like the example, usual and extreme, by name; `shorter`: also half as long, with nothing masked."""
    generator = torch.Generator().manual_seed(seed)

    def cycle(rows: int) -> Batch:
        return tuple(t[torch.arange(rows) % len(t)] for t in example)

    def change(floats: Callable[[Tensor, Tensor], Tensor], integers: Callable[[Tensor, Tensor], Tensor]) -> Batch:
        """A few rows with every tensor changed.

        floats    (tensor, random numbers with its moments) -> the new tensor
        integers  (the lowest number everywhere, random numbers in its range) -> the new tensor
        """
        return tuple(
            floats(t, _normal_like(t, full, generator))
            if t.is_floating_point()
            else _integers_like(t, full, integers, generator)
            for t, full in zip(cycle(_EXTREME_ROWS), example, strict=True)
        )

    def random(_: Tensor, drawn: Tensor) -> Tensor:
        return drawn

    batches = {
        "example": tuple(t[:_MAX_ROWS] for t in example),
        "one row": tuple(t[:1] for t in example),
        "odd number of rows": cycle(_ODD_ROWS),
        "random": change(random, random),
        "zeros": change(lambda t, drawn: torch.zeros_like(t), lambda low, drawn: low),
        "tiny": change(lambda t, drawn: 1e-30 * drawn, random),
        "large": change(lambda t, drawn: 1e2 * drawn, random),
        "huge": change(lambda t, drawn: 1e6 * drawn, random),
        "far": change(lambda t, drawn: t + 30 * (drawn - t)[:1], random),
    }
    if any(t.is_floating_point() for t in example):
        batches["NaN"] = change(_with_nan, random)
    else:
        batches["highest"] = change(lambda t, drawn: t, lambda low, drawn: torch.full_like(drawn, int(drawn.max())))
    if shorter:
        half = [t[:, : (t.shape[1] + 1) // 2] if t.dim() > 1 else t for t in cycle(_EXTREME_ROWS)]
        batches["shorter"] = tuple(
            torch.ones_like(t) if _is_mask(full) else t for t, full in zip(half, example, strict=True)
        )
    return batches


def _normal_like(t: Tensor, full: Tensor, generator: torch.Generator) -> Tensor:
    scale = full.std() if full.numel() > 1 else torch.ones(())
    return full.mean() + (scale if float(scale) > 0 else 1.0) * torch.randn(t.shape, generator=generator)


def _integers_like(
    t: Tensor, full: Tensor, choose: Callable[[Tensor, Tensor], Tensor], generator: torch.Generator
) -> Tensor:
    low, high = (0, 255) if t.dtype == torch.uint8 else (int(full.min()), int(full.max()))
    if _is_mask(full):
        return t
    drawn = torch.randint(low, high + 1, t.shape, generator=generator)
    drawn.view(-1)[:2] = torch.tensor([high, low])[: drawn.numel()]
    return choose(torch.full(t.shape, low), drawn).to(t.dtype)


def _is_mask(t: Tensor) -> bool:
    return not t.is_floating_point() and t.dtype != torch.uint8 and bool(((t == 0) | (t == 1)).all())


def _with_nan(t: Tensor, drawn: Tensor) -> Tensor:
    t = t.clone()
    t[-1].view(-1)[-1] = torch.nan
    return t


def _sensitivity(implementation: Implementation, batch: Batch, answers: Answers, seed: int) -> Tensor:
    """How much (N,) the decisive answers change when the last digits of the inputs do."""
    largest = torch.zeros(len(batch[0]), dtype=torch.float64)
    if not any(t.is_floating_point() for t in batch):
        return largest
    generator = torch.Generator().manual_seed(seed)
    for _ in range(_PERTURBATIONS):
        perturbed = tuple(
            t * (1 + _LAST_DIGITS * torch.randn(t.shape, generator=generator)) if t.is_floating_point() else t
            for t in batch
        )
        changes = differences(answers, implementation(perturbed))
        largest = torch.stack([largest, *(d for name, d in changes.items() if name in DECISIVE)]).amax(0)
    return largest
