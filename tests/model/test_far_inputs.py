"""Inputs scaled by 1e-20 to 1e20: far away a model is unsure, and never has NaN for a probability."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import afield

OUTPUTS = {"categorical": 3, "bernoulli": 1, "gaussian": 1, "poisson": 1}


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
@pytest.mark.parametrize("likelihood", OUTPUTS)
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.float32),
        ({}, torch.float64),
        ({"kernel": "matern32"}, torch.float32),
        ({"kernel": "arccos"}, torch.float32),
        ({"geometry": "layer"}, torch.float32),
        ({"geometry": "unit"}, torch.float32),
    ],
    ids=["rbf", "rbf64", "matern", "arccos", "layer", "unit"],
)
def test_no_scale_of_the_inputs_gives_nan(options: dict[str, Any], likelihood: str, convert: Any, dtype: torch.dtype):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, OUTPUTS[likelihood])).to(dtype)
    model = convert(net, likelihood=likelihood, num_random_features=32, **options)
    if convert is afield.sngp:
        nn.init.normal_(model.head.weight)
    x = torch.randn(60, 4, dtype=dtype)
    y = (x[:, 0] > 0).to(dtype)
    afield.fit_posterior(model, [(x, y)])
    afield.calibrate(model, [(x, y)])
    exponents = torch.tensor([-20, -10, 0, 5, 10, 15, 18, 19, 20], dtype=dtype).repeat_interleave(len(x))
    given = x.repeat(9, 1) * 10.0 ** exponents[:, None]
    for predictive in ("mean_field", "monte_carlo", *(["quadrature"] if likelihood == "bernoulli" else [])):
        p = model.predict(given, predictive=predictive)

        def check(bad: torch.Tensor, name: str, predictive: str = predictive) -> None:
            assert not bool(bad.any()), (predictive, name, exponents[bad.reshape(len(x) * 9, -1).any(1)].unique())

        for name, value in p.numpy().items():
            if name not in ("logits", "variance"):
                by_row = np.moveaxis(value, 1, 0) if name == "members" else value
                check(torch.from_numpy(np.isnan(by_row)), name)
        check(p.score().isnan(), "score")
        if likelihood in ("gaussian", "poisson"):
            check(p.std.isnan(), "std")
        elif predictive != "monte_carlo" and "geometry" not in options:  # that loses the radius
            check((p.confidence >= 0.8) & (exponents > 10), "confidence")


@pytest.mark.parametrize("convert", [afield.sngp, afield.attach])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_not_made_one(convert: Any, bad: float) -> None:
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 3)), num_random_features=32)
    x = torch.randn(60, 4)
    afield.fit_posterior(model, [x])
    x[3, 1] = bad
    assert bool(model.predict(x).probs[3].isnan().all())
    assert not bool(model.predict(x).probs[:3].isnan().any())


@pytest.mark.parametrize("likelihood", OUTPUTS)
def test_where_numbers_overflow_within_the_network_the_answer_is_unsure(likelihood: str) -> None:
    """A layer norm squares its input: of finite inputs it makes NaN."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, OUTPUTS[likelihood]))
    model = afield.attach(net, likelihood=likelihood, num_random_features=32)
    x = torch.randn(60, 4)
    y = (x[:, 0] > 0).float()
    afield.fit_posterior(model, [(x, y)])
    afield.calibrate(model, [(x, y)])
    given = torch.cat([x, 1e22 * x[:5], torch.full((1, 4), math.nan)])
    assert bool(net(given)[60:65].isnan().all())
    for predictive in ("mean_field", "monte_carlo"):
        p = model.predict(given, predictive=predictive)
        far, bad = p[60:65], p[65]
        assert bool((far.variance == math.inf).all())
        assert bool((far.p_value == p.smallest_p_value).all())
        assert not bool(far.score().isnan().any())
        assert bool(bad.variance.isnan().all())
        if far.probs is not None:
            assert torch.allclose(far.probs, torch.full_like(far.probs, 1 / far.probs.shape[1]), atol=0.25)
            assert bool(bad.probs.isnan().all())
        usual = model.predict(x)
        assert torch.allclose(p[:60].variance, usual.variance)
        one = model.predict(given[60:61], predictive=predictive)
        assert bool(one.p_value == p.smallest_p_value)
