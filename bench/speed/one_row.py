"""Where the time of one row goes: the steps of `SNGP.predict`, one after the other, each with a look at the clock.

A step is timed where it stands. By itself, in a loop, it would find its code and its data in the processor's caches,
from which the product with the posterior's factor drives them once a row.
"""

import time
from statistics import median

import torch
from torch import Tensor, nn

from afield.bounds.weight_cache import kept_weights
from afield.model.evaluating import evaluating
from afield.model.input_errors import find_overflow
from afield.model.sngp_model import SNGP
from bench.defaults import markdown
from bench.speed.measure import Metrics

STEPS = {
    "modes": "evaluation mode: is it on everywhere?",
    "kept": "bounded weights: as they were?",
    "fingerprint": "weights: those of the fit?",
    "network": "the network",
    "input": "is the input finite?",
    "state": "the head: as it was?",
    "products": "features, variance and joined score",
    "answer": "probabilities, p-value, `Prediction`",
}
"""Steps of a prediction."""
_ROWS, _FASTEST = 3000, 300  # that are looked at


def steps_of(net: nn.Module, model: SNGP, x: Tensor) -> Metrics:
    """Microseconds of each step, in the median of the fastest rows, and of the plain network in the same place."""
    rows = sorted((_steps(net, model, x) for _ in range(_ROWS)), key=lambda row: sum(row.values()))[:_FASTEST]
    return {f"us_{name}": median(row[name] for row in rows) / 1000 for name in rows[0]}


def _steps(net: nn.Module, model: SNGP, x: Tensor) -> dict[str, int]:
    clock, head = time.perf_counter_ns, model.head
    times = [clock()]
    with torch.no_grad():
        net(x)
    times.append(clock())
    modes, kept = evaluating(model), kept_weights(model.net)
    modes.__enter__()
    times.append(clock())
    kept.__enter__()
    times.append(clock())
    assert model.fingerprint is not None
    assert model.fingerprint.still_holds(model.net)
    times.append(clock())
    h = model.hidden(x)
    times.append(clock())
    h, _ = find_overflow(h, (x,))
    times.append(clock())
    row = head._one_row()
    times.append(clock())
    assert row._answer is not None
    assert row._of_classes is not None
    answer = row._answer(h)
    assert answer is not None
    times.append(clock())
    row._of_classes(h, *answer)
    kept.__exit__(None)
    modes.__exit__()
    times.append(clock())
    names = ("plain_network", *STEPS)
    return {name: b - a for name, a, b in zip(names, times, times[1:], strict=False)}


def table(record: dict[str, float]) -> str:
    """Markdown: the steps of the record of `predict-one-mlp`."""
    rows = [[what, f"{record[f'us_{name}']:.1f}"] for name, what in STEPS.items()]
    rows.append(["together", f"{sum(record[f'us_{name}'] for name in STEPS):.0f}"])
    rows.append(["the plain network in the place of all this", f"{record['us_plain_network']:.1f}"])
    return markdown([["step of one row", "microseconds"], *rows], left=1)
