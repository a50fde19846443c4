"""Numbers from 1e-30 to 1e30, NaN, infinity, constant features, missing classes, half precision.

Right are finite probabilities that sum to one for every finite row, uniform where the variance overflows, and `accept`
that refuses the other rows; or a message.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import afield
from afield.prediction.prediction import Prediction
from bench.torture.fault import Inject, Kind, Wrong, refuse_or_fail
from bench.torture.models import data, network

DTYPES = (*(torch.float32,) * 6, torch.float64, torch.float16, torch.bfloat16)
BAD = (math.nan, math.inf, -math.inf)


@contextmanager
def opened(folder: Path) -> Iterator[Inject]:
    def inject(random: Random) -> None:
        done: list[str] = []
        try:
            _walk(random, done)
        except Wrong as error:
            raise Wrong(f"{'; '.join(done)}: {error}") from error
        except Exception as error:
            refuse_or_fail(error, "; ".join(done))

    yield inject


KIND = Kind("numbers", "extreme numbers in inputs, settings and dtypes", opened, share=0.1, limit=60)


def _walk(random: Random, done: list[str]) -> None:
    """Build, fit, calibrate and predict, with one to three things out of the ordinary."""
    torch.manual_seed(random.randrange(2**31))
    troubles = random.sample(
        ("inputs", "training", "setting", "constant", "class", "dtype", "rows"), random.randint(1, 3)
    )
    options: dict[str, Any] = {"num_random_features": 16}
    dtype = torch.float32
    if "setting" in troubles:
        name = random.choice(("ridge", "length_scale", "amplitude"))
        options[name] = random.choice((10 ** random.uniform(-30, 30),) * 5 + (0.0, -1.0, *BAD))
        done.append(f"{name}={options[name]:g}")
    if "dtype" in troubles:
        dtype = random.choice(DTYPES)
        done.append(str(dtype))
    make = random.choice((afield.sngp, afield.attach))
    (x, y), (held, labels), (new, _) = data(random.randrange(10**6)), data(1), data(2)
    if "training" in troubles:
        x, held = _scaled((x, held), random, done, "training inputs")
    if "constant" in troubles:
        x, held = (torch.ones_like(part) * random.choice((0.0, 1.0, 1e6)) for part in (x, held))
        done.append("constant features")
    if "class" in troubles:
        y = y.clamp_max(random.choice((0, 1)))
        done.append("a class missing")
    if "inputs" in troubles:
        (new,) = _scaled((new,), random, done, "inputs")
    if "rows" in troubles:
        new = new.clone()
        new[random.randrange(len(new)), random.randrange(4)] = random.choice(BAD)
        new[random.randrange(len(new))] = random.choice(BAD)
        done.append("rows with NaN or infinity")
    done.append(make.__name__)
    net = network(random.randrange(100)).to(dtype)
    model = make(net, **options)
    with torch.no_grad():  # or an untrained head would answer zero to everything
        if make is afield.sngp:
            model.head.weight.normal_()
    x, held, new = (part.to(dtype) for part in (x, held, new))
    for step in (0, 1):
        if step:
            done.append("calibrated")
            afield.calibrate(model, [(held, labels)])
        else:
            afield.fit_posterior(model, [(x, y)])
        _check(model.predict(new), new.isfinite().all(-1))


def _scaled(parts: tuple[Tensor, ...], random: Random, done: list[str], what: str) -> list[Tensor]:
    scale = 10 ** random.uniform(-30, 30)
    done.append(f"{what} times {scale:.3g}")
    return [part * scale for part in parts]


def _check(p: Prediction, finite: Tensor) -> None:
    assert p.probs is not None
    probs, variance = p.probs.double(), p.variance
    tolerance = 0.02 if p.probs.dtype in (torch.float16, torch.bfloat16) else 1e-4
    if not probs[finite].isfinite().all():
        raise Wrong(f"{int((~probs[finite].isfinite().all(-1)).sum())} finite rows have probabilities that are not")
    if ((probs[finite].sum(-1) - 1).abs() > tolerance).any():
        raise Wrong(f"probabilities sum to {probs[finite].sum(-1).tolist()[:3]}")
    if variance is not None:
        rows, chance = variance[finite], 1 / probs.shape[1]
        if not (rows >= 0).all():
            raise Wrong(f"a variance of finite rows is NaN or negative: {rows.tolist()[:3]}")
        if not (probs[finite][rows.isinf()] - chance).abs().le(1e-3).all():
            raise Wrong("a row of infinite variance has a class that it prefers")
    if p.p_value is not None and bool(p.accept(0.1)[~finite].any()):
        raise Wrong("a row that is not finite was accepted")
