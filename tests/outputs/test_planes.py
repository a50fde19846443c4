"""The posterior at every position by channel is that of rows; what is not folded goes the way of rows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import afield
from afield.outputs import planes, positions
from afield.prediction.prediction import Prediction

SIDE = 33  # 1,089 positions


def pictures(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(seed))
    return x, x.argmax(1)


def model(how: str, **options: Any) -> afield.SNGP:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 3, 1))
    made: afield.SNGP = getattr(afield, how)(net, generator=torch.Generator().manual_seed(0), **options)
    optimizer = torch.optim.Adam(made.parameters(), lr=0.02)
    x, y = pictures(4)
    for _ in range(30 if how == "sngp" else 0):
        optimizer.zero_grad()
        nn.functional.cross_entropy(made(x), y).backward()
        optimizer.step()
    afield.fit_posterior(made, [pictures(8)])
    return made


def both(made: afield.SNGP, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> tuple[Prediction, Prediction]:
    """By planes, and by rows."""
    ours = made.predict(x)
    monkeypatch.setattr(planes, "FEWEST", 10**9)
    return ours, made.predict(x)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "raw": {"geometry": "raw"},
    "standardized": {"geometry": "standardized"},
    "direction": {"geometry": "direction"},
    "matern": {"kernel": "matern52"},
    "length scale": {"length_scale": 0.7},
}


@pytest.mark.parametrize("how", ["attach", "sngp"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_answers_are_those_of_rows(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(how, **OPTIONS[name])
    afield.calibrate(made, [pictures(40, 1)], num_positions=4, logit_scale=1.0, amplitude=2.0)
    calls, by_planes = [], positions._by_planes

    def watched(*args: Any, **options: Any) -> Prediction | None:
        calls.append(by_planes(*args, **options))
        return calls[-1]

    monkeypatch.setattr(positions, "_by_planes", watched)
    ours, theirs = both(made, pictures(3, 2)[0], monkeypatch)
    assert calls[0] is not None
    assert calls[1] is None
    for field in ("logits", "variance", "probs", "features", "fitted", "input_score"):
        one, other = getattr(ours, field), getattr(theirs, field)
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)
    assert float((ours.p_value - theirs.p_value).abs().max()) <= 2 * ours.smallest_p_value


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "per class": ("sngp", {"covariance": "per_class"}),
    "low rank": ("sngp", {"covariance": "per_class", "rank": 8}),
    "layer": ("attach", {"geometry": "layer"}),
    "arccos": ("attach", {"kernel": "arccos"}),
    "projection": ("attach", {"projection": 4}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_folded_goes_the_way_of_rows(name: str) -> None:
    how, options = REFUSED[name]
    made = model(how, **options)
    h = made.hidden(pictures(1)[0])
    with torch.no_grad():
        assert planes.Plane.of(made.head.snapshot(), h) is None
    assert made.predict(pictures(2)[0]).positions == (SIDE, SIDE)


def test_vectors_without_a_length_and_inputs_that_are_followed_go_the_way_of_rows() -> None:
    made = model("attach")
    with torch.no_grad():
        plane = planes.Plane.of(made.head.snapshot(), made.hidden(pictures(1)[0]))
        assert plane is not None
        h = torch.randn(6, SIDE**2)
        assert plane.posterior(h) is not None
        for value in (0.0, 1e20, torch.nan):
            h[:, 7] = value
            assert plane.posterior(h) is None
    x = pictures(1)[0].requires_grad_()
    made.predict(x, gradients=True).variance.sum().backward()
    assert float(x.grad.abs().sum()) > 0


def test_draws_are_made_once():
    """A generator ends where it ends when positions are rows: nothing is drawn and thrown away."""
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1))
    x = torch.randn(2, 3, 40, 40)
    model = afield.attach(net)
    afield.fit_posterior(model, [(x, torch.randint(3, (2, 40, 40)))])
    used, rows = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    model.predict(x, predictive="monte_carlo", num_samples=5, generator=used)
    model.head.predict(model.hidden(x).flatten(0, -2), predictive="monte_carlo", num_samples=5, generator=rows)
    assert torch.equal(used.get_state(), rows.get_state())
