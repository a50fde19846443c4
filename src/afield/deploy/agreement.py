"""Inputs on which two implementations of a model are compared, and how far apart their answers are.

Probes are made from an example batch: the example, one row, an odd number of rows, random inputs with its moments,
zeros, tiny, large and huge numbers, points far away in one direction, one NaN. Whole numbers (token ids, bytes) stay in
the example's range (bytes: 0 to 255): random, all lowest, all highest. What holds only 0 and 1 stays as it is: a mask
that masks all of a text has no right answer.

Far out, an answer need not be determined by its input: a phase of 1e7 has no digits left in float32, so its cosine, and
what is made of it, is rounding error. A row is *unsettled* if moving its numbers by a few units of the last digit
(2^-22) moves torch's own answer by a tenth of the tolerance. Two implementations cannot agree there; it is counted and
reported apart. The rows of the example are never excused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Batch = tuple[Tensor, ...]
Answers = Mapping[str, Tensor]
Run = Callable[[Batch], Answers]
DECISIVE = ("probs", "mean", "std")
_ROWS = 5  # of an extreme probe
_ODD = 17
_MOST = 64
_SHAKES = 3
_LAST_DIGITS = 2.0**-22


@dataclass(frozen=True)
class Agreement:
    """How far two implementations are apart.

    example      largest difference by output, on the example
    everywhere   the same on all probes, but for unsettled rows
    rows         compared, of which
    unsettled    have answers that float32 does not determine
    worst        the probe with the largest decisive difference
    same_choice  part of the example's rows with the same most probable class (regression: 1)
    """

    example: Mapping[str, float]
    everywhere: Mapping[str, float]
    rows: int
    unsettled: int
    worst: str
    same_choice: float

    @property
    def difference(self) -> float:
        """Of probabilities; of mean and std in units of the std."""
        return max(value for name, value in self.everywhere.items() if name in DECISIVE)


def compare(expected: Run, got: Run, batches: Mapping[str, Batch], *, tolerance: float, seed: int = 0) -> Agreement:
    """Ask both on all probes, as `probes` makes them."""
    on_example: dict[str, float] = {}
    everywhere: dict[str, float] = {}
    rows = unsettled = 0
    worst, largest, same = "", -1.0, 1.0
    for name, batch in batches.items():
        right, other = expected(batch), got(batch)
        apart = differences(right, other)
        keep = torch.ones(len(batch[0]), dtype=torch.bool)
        if name == "example":
            on_example = {output: float(d.max()) for output, d in apart.items()}
            if "probs" in right:
                same = float((right["probs"].argmax(-1) == other["probs"].argmax(-1)).double().mean())
        else:
            keep = _wobble(expected, batch, right, seed) <= tolerance / 10
        rows, unsettled = rows + len(keep), unsettled + int((~keep).sum())
        for output, d in apart.items():
            here = float(d[keep].max()) if bool(keep.any()) else 0.0
            everywhere[output] = max(everywhere.get(output, 0.0), here)
            if output in DECISIVE and here > largest:
                worst, largest = name, here
    return Agreement(on_example, everywhere, rows, unsettled, worst, same)


def differences(expected: Answers, got: Answers) -> dict[str, Tensor]:
    """The largest difference of each row (N,) by output: as it is for probs and p_value, in units of the expected std
    for mean and std, relative to 1 + |expected| otherwise. NaN agrees with NaN, and with nothing else."""
    found = {}
    for name, right in expected.items():
        a, b = right.double().flatten(1 if right.dim() > 1 else 0), got[name].double()
        b = b.reshape(a.shape)
        scale = torch.ones_like(a) if name in ("probs", "p_value", "accepted") else 1 + a.abs()
        if name in ("mean", "std"):
            scale = expected["std"].double().reshape(a.shape)
        apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, ((a - b).abs() / scale).nan_to_num(torch.inf))
        found[name] = apart if apart.dim() == 1 else apart.amax(1)
    return found


def probes(example: Batch, *, shorter: bool = False, seed: int = 0) -> dict[str, Batch]:
    """Batches like the example, usual and extreme, by name; `shorter`: also half as long, with nothing masked."""
    generator = torch.Generator().manual_seed(seed)

    def cycled(rows: int) -> Batch:
        return tuple(t[torch.arange(rows) % len(t)] for t in example)

    def each(number: Callable[[Tensor, Tensor], Tensor], whole: Callable[[Tensor, Tensor], Tensor]) -> Batch:
        """Of every tensor: `number` of it and a random one with its moments, `whole` of its lowest and highest."""
        return tuple(
            number(t, _normal_like(t, full, generator)) if t.is_floating_point() else _whole(t, full, whole, generator)
            for t, full in zip(cycled(_ROWS), example, strict=True)
        )

    def kept(low: Tensor, drawn: Tensor) -> Tensor:
        return drawn

    batches = {
        "example": tuple(t[:_MOST] for t in example),
        "one row": tuple(t[:1] for t in example),
        "odd number of rows": cycled(_ODD),
        "random": each(lambda t, drawn: drawn, kept),
        "zeros": each(lambda t, drawn: torch.zeros_like(t), lambda low, drawn: low),
        "tiny": each(lambda t, drawn: 1e-30 * drawn, kept),
        "large": each(lambda t, drawn: 1e2 * drawn, kept),
        "huge": each(lambda t, drawn: 1e6 * drawn, kept),
        "far": each(lambda t, drawn: t + 30 * (drawn - t)[:1], kept),
    }
    if any(t.is_floating_point() for t in example):
        batches["NaN"] = each(_with_nan, kept)
    else:
        batches["highest"] = each(lambda t, drawn: t, lambda low, drawn: torch.full_like(drawn, int(drawn.max())))
    if shorter:
        half = [t[:, : (t.shape[1] + 1) // 2] if t.dim() > 1 else t for t in cycled(_ROWS)]
        batches["shorter"] = tuple(
            torch.ones_like(t) if _mask(full) else t for t, full in zip(half, example, strict=True)
        )
    return batches


def _normal_like(t: Tensor, full: Tensor, generator: torch.Generator) -> Tensor:
    scale = full.std() if full.numel() > 1 else torch.ones(())
    return full.mean() + (scale if float(scale) > 0 else 1.0) * torch.randn(t.shape, generator=generator)


def _whole(t: Tensor, full: Tensor, choose: Callable[[Tensor, Tensor], Tensor], generator: torch.Generator) -> Tensor:
    low, high = (0, 255) if t.dtype == torch.uint8 else (int(full.min()), int(full.max()))
    if _mask(full):
        return t
    drawn = torch.randint(low, high + 1, t.shape, generator=generator)
    drawn.view(-1)[:2] = torch.tensor([high, low])[: drawn.numel()]
    return choose(torch.full(t.shape, low), drawn).to(t.dtype)


def _mask(t: Tensor) -> bool:
    return not t.is_floating_point() and t.dtype != torch.uint8 and bool(((t == 0) | (t == 1)).all())


def _with_nan(t: Tensor, drawn: Tensor) -> Tensor:
    t = t.clone()
    t[-1].view(-1)[-1] = torch.nan
    return t


def _wobble(run: Run, batch: Batch, answers: Answers, seed: int) -> Tensor:
    """How much (N,) the decisive answers move when the last digits of the inputs do."""
    most = torch.zeros(len(batch[0]), dtype=torch.float64)
    if not any(t.is_floating_point() for t in batch):
        return most
    generator = torch.Generator().manual_seed(seed)
    for _ in range(_SHAKES):
        shaken = tuple(
            t * (1 + _LAST_DIGITS * torch.randn(t.shape, generator=generator)) if t.is_floating_point() else t
            for t in batch
        )
        moved = differences(answers, run(shaken))
        most = torch.stack([most, *(d for name, d in moved.items() if name in DECISIVE)]).amax(0)
    return most
