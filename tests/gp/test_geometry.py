"""Geometries of the hidden space: what they are blind to, and that nothing far away looks near."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import afield
from afield.gp.features import RandomFeatures
from afield.gp.geometry import GEOMETRIES

few = settings(deadline=None, max_examples=20)


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_coordinates_have_the_width_that_is_promised(name):
    space = GEOMETRIES[name]
    assert space.map(normal(7, 5)).shape == (7, 5 + space.extra)
    torch.testing.assert_close(torch.cat([space.map(h) for h in normal(7, 5).split(3)]), space.map(normal(7, 5)))


@few
@given(factor=st.floats(1e-12, 1e12))
def test_directions_do_not_see_the_length_and_the_last_coordinate_sees_nothing_else(factor):
    h = normal(20, 6)
    for name in ("unit", "direction"):
        torch.testing.assert_close(GEOMETRIES[name].map(factor * h), GEOMETRIES[name].map(h))
    before, after = (GEOMETRIES["direction_length"].map(x) for x in (h, factor * h))
    torch.testing.assert_close(after[:, :-1], before[:, :-1])
    torch.testing.assert_close(after[:, -1] - before[:, -1], torch.full((20,), math.log(factor)).double())
    torch.testing.assert_close(before[:, -1], h.norm(dim=1).log())


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_of_any_size_have_coordinates(name, dtype):
    for exponent in (-37, -20, 0, 20, 37):
        found = GEOMETRIES[name].map(normal(5, 4).to(dtype) * 10.0**exponent)
        assert bool(torch.isfinite(found).all()), exponent
    zero = GEOMETRIES[name].map(torch.zeros(2, 4, dtype=dtype))
    assert bool(torch.isfinite(zero).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("odd", [0.0, 1e-25, 1e25, math.inf, math.nan])
def test_many_rows_have_the_coordinates_that_each_has_by_itself(dtype, odd):
    """Squares are taken at once where that loses nothing; one odd row, and none are."""
    h = torch.cat([normal(1500, 6).relu(), torch.full((1, 6), odd)]).to(dtype)
    for name in ("unit", "direction_length"):
        space = GEOMETRIES[name]
        for rows in (h, h[:-1]):
            parts = torch.cat([space.map(part) for part in rows.split(500)])
            torch.testing.assert_close(space.map(rows), parts, equal_nan=True)


def trained(kind: str, **options: object) -> tuple[afield.SNGP, Tensor]:
    """A network whose hidden vectors have a length that says nothing, with its posterior."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    model = afield.attach(net, **options) if kind == "attach" else afield.sngp(net, None, **options)
    x = normal(300, 3)
    afield.fit_posterior(model, [(x, (x[:, 0] > 0).long())])
    return model, x


@pytest.mark.parametrize("kind", ["attach", "sngp"])
@torch.no_grad()
def test_along_every_ray_the_variance_tends_to_its_prior(kind):
    model, x = trained(kind, num_random_features=512, ridge=0.1)
    head = model.head
    for rays in (normal(40, 3, number=1), x[:40]):  # directions at random, and those of the training data themselves
        near, far = ((model.hidden(t * rays), t) for t in (1.0, 1e6))
        psi = head.variance_phi(far[0])
        prior = head.amplitude.square() / head.ridge * psi.square().sum(1)
        inside, outside = head.predict(near[0]).variance, head.predict(far[0]).variance
        assert float((outside / prior).min()) > 0.5
        assert float(outside.min()) > float(inside.max())
        assert float((outside / prior).median()) > 5 * float((inside * head.ridge).median())


def test_a_dense_mean_that_grows_without_end_is_unsure_along_every_ray():
    model, x = trained("attach", num_random_features=256)
    y = model(x).argmax(1)
    afield.calibrate(model, [(x, y)])
    for direction in (normal(30, 3, number=3), x[:30]):
        probs = model.predict(1e9 * direction).probs
        torch.testing.assert_close(probs, torch.full_like(probs, 1 / 3), rtol=0, atol=0.02)


@torch.no_grad()
def test_vectors_of_zeros_do_not_hide_the_length_of_the_others():
    """The logarithm of no length is a huge number: one dead row in a hundred made all lengths alike."""
    torch.manual_seed(0)
    head = afield.attach(nn.Linear(8, 3).double(), num_random_features=512, ridge=0.1)
    h = normal(400, 8)
    h[::100] = 0
    afield.fit_posterior(head, [(h, torch.arange(400) % 3)])
    features = head.head.features_of_variance
    lengths = h[h.any(1)].norm(dim=1).log()
    assert float(features.gain[-1]) == pytest.approx(1 / float(lengths.std(correction=0)))
    assert float(features.shift[-1]) == pytest.approx(float(lengths.mean()))
    far, prior = 1e6 * h[1:60], 1 / 0.1 * head.head.variance_phi(1e6 * h[1:60]).square().sum(1)
    assert float((head.predict(far).variance / prior).min()) > 0.5
    dead = head.predict(torch.zeros(1, 8).double()).variance  # the network has seen such vectors, and knows them
    assert float(dead) < float(head.predict(h[1:60]).variance.median())
    alone = RandomFeatures(8, geometry="direction_length", num_random_features=16).double()
    alone.adapt(h)
    torch.testing.assert_close(alone.gain, features.gain)
    nothing = RandomFeatures(8, geometry="direction_length", num_random_features=16)
    nothing.adapt(torch.zeros(5, 8))  # a network that is dead everywhere
    assert bool(torch.isfinite(nothing(torch.eye(8))).all())
