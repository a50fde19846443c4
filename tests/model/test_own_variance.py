"""A variance with features of its own: fitted to the trained hidden space, while the mean stays what training made."""

import copy

import pytest
import torch
from torch import Tensor, nn

import afield
from afield.model.posterior import downdate, merge, update

each = pytest.mark.parametrize(
    "options",
    [{}, {"covariance": "per_class"}, {"covariance": "per_class", "rank": 400}, {"curvature": "likelihood"}],
    ids=["shared", "per class", "low rank", "likelihood"],
)


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def data(n: int = 300, number: int = 0) -> tuple[Tensor, Tensor]:
    x = normal(n, 4, number=number)
    return x, (x[:, :3] + 0.3 * normal(n, 3, number=number + 100)).argmax(1)


def converted(**options: object) -> afield.SNGP:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3)).double()
    return afield.sngp(net, None, num_random_features=48, **options)


def trained(**options: object) -> afield.SNGP:
    model, (x, y) = converted(**options), data()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    for _ in range(40):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def fitted(**options: object) -> afield.SNGP:
    model = trained(**options)
    afield.fit_posterior(model, [data()])
    return model


def test_training_is_the_same_in_both_forms_and_so_is_the_mean():
    own, same = fitted(), fitted(variance_features="same")
    x, _ = data(number=1)
    assert torch.equal(own(x), same(x))
    assert own.head.variance_features is not None
    assert same.head.variance_features is None
    assert not torch.equal(own.predict(x).variance, same.predict(x).variance)


def test_the_length_scale_is_that_of_all_trained_hidden_vectors():
    model = trained()
    first = float(model.head.random_features.length_scale)
    afield.fit_posterior(model, [tuple(part[:150] for part in data()), tuple(part[150:] for part in data())])
    features = model.head.variance_features
    z = features.mapped(model.hidden(data()[0]).detach())
    z = (z - z.mean(0)) / z.std(0, correction=0)
    assert float(features.length_scale) == pytest.approx(0.5 * float(torch.pdist(z).median()), rel=1e-6)
    assert float(model.head.random_features.length_scale) == first


@each
def test_update_downdate_and_merge_are_a_fit_to_what_is_there(options):
    whole = fitted(**options)
    parts = [tuple(t[i] for t in data()) for i in (slice(0, 200), slice(200, 300))]
    first, second = copy.deepcopy(whole), copy.deepcopy(whole)
    afield.fit_posterior(first, [parts[0]], adapts=False)
    afield.fit_posterior(second, [parts[1]], adapts=False)
    small = copy.deepcopy(first)
    x, y = data(number=1)
    expected = {"whole": whole, "first": small}

    def check(model: afield.SNGP, name: str) -> None:
        for each_model in (model, expected[name]):
            afield.calibrate(each_model, [(x, y)])
        found, right = model.predict(x), expected[name].predict(x)
        torch.testing.assert_close(found.variance, right.variance, rtol=1e-7, atol=1e-10)
        torch.testing.assert_close(found.joined, right.joined, rtol=1e-5, atol=1e-5)

    merged, updated = copy.deepcopy(first), copy.deepcopy(first)
    assert merge(merged, second) == 300
    check(merged, "whole")
    assert update(updated, [parts[1]]) == 300
    check(updated, "whole")
    if "rank" not in options:
        assert downdate(updated, [parts[1]]) == 200
        check(updated, "first")


def test_fits_apart_do_not_merge_unless_they_keep_one_geometry():
    whole = fitted()
    other = copy.deepcopy(whole)
    afield.fit_posterior(other, [data(number=5)])
    with pytest.raises(ValueError, match=r"adapts=False"):
        merge(whole, other)


@each
def test_saved_and_loaded_to_the_bit(options, tmp_path):
    model, (x, y) = fitted(**options), data(number=1)
    afield.calibrate(model, [(x, y)])
    back = afield.load(afield.save(model, tmp_path), plain())
    for name, value in model.predict(x).numpy().items():
        assert (back.predict(x).numpy()[name] == value).all(), name
    assert back.head.score == "joined"


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3)).double()


def test_other_options_for_the_variance_alone():
    options = {"num_random_features": 24, "geometry": "standardized", "length_scale": 3.0}
    model = fitted(variance_features=options)
    assert model.head.variance_features.num_random_features == 24
    assert float(model.head.variance_features.length_scale) == 3.0
    assert model.head.random_features.num_random_features == 48
    with pytest.raises(ValueError, match="variance_features must be one of auto, own, same, or a mapping"):
        converted(variance_features="other")


def test_regression_has_the_variance_of_the_process_that_is_its_mean():
    net = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 1)).double()
    assert afield.sngp(net, None, likelihood="gaussian").head.variance_features is None
    assert afield.sngp(net, None, likelihood="gaussian", variance_features="own").head.variance_features is not None


def test_targets_that_are_no_classes_do_no_harm():
    """Where targets do not show the class of an example, the most probable one stands in for it."""
    model, (x, _) = trained(), data()
    afield.fit_posterior(model, [x])
    without = copy.deepcopy(model)
    afield.fit_posterior(model, [(x, model(x).argmax(1))])
    for name, value in model.head.class_distance.state_dict().items():
        torch.testing.assert_close(value, without.head.class_distance.state_dict()[name])


def test_a_new_class_has_its_own_place_among_the_classes():
    model, (x, y) = fitted(), data(number=1)
    new = 6 + normal(40, 4, number=7)
    grown = afield.class_changes.add_class(model, [new])
    assert grown.head.class_distance.count.tolist() == [*model.head.class_distance.count.tolist(), 40.0]
    both, labels = torch.cat([x, new]), torch.cat([y, torch.full((40,), 3)])
    afield.calibrate(grown, [(both, labels)])
    afield.calibrate(model, [(x, y)])
    fresh = 6 + normal(40, 4, number=8)
    assert float(model.predict(fresh).p_value.median()) < 0.05
    assert float(grown.predict(fresh).p_value.median()) > 0.1
    shrunk = afield.class_changes.drop_class(grown, 3, [(new, torch.full((40,), 3))])
    torch.testing.assert_close(shrunk.head.class_distance.count, model.head.class_distance.count)
    torch.testing.assert_close(shrunk.head.class_distance.first, model.head.class_distance.first)


def test_a_kept_mean_of_numbers_has_the_standardised_vector():
    net = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 1)).double()
    for options, expected in (({"likelihood": "gaussian"}, "standardized"), ({}, "standardized")):
        assert afield.attach(net, **options).head.random_features.geometry == expected
    assert afield.attach(net, likelihood="bernoulli").head.random_features.geometry == "direction_length"
    assert afield.attach(plain()).head.random_features.geometry == "direction_length"


@pytest.mark.parametrize(("width", "count"), [(1, 512), (64, 512), (200, 800), (384, 1536), (640, 2048)])
def test_wide_hidden_vectors_have_more_random_features(width, count):
    net = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 3))
    assert afield.sngp(net, None).head.features_of_variance.num_random_features == count
    assert afield.sngp(net, None).head.random_features.num_random_features == 1024
    assert afield.attach(net).head.features_of_variance.num_random_features == count
    again = afield.attach(afield.attach(net, ridge=2.0), ridge=2.0)
    assert again.head.features_of_variance.num_random_features == count
    per_class = afield.sngp(net, None, covariance="per_class")
    assert per_class.head.features_of_variance.num_random_features == min(1024, count)
    given = afield.sngp(net, None, num_random_features=40)
    assert given.head.features_of_variance.num_random_features == 40


def test_a_saved_model_has_as_many_features_as_it_had(tmp_path):
    x = torch.randn(60, 2)
    net = nn.Sequential(nn.Linear(2, 200), nn.ReLU(), nn.Linear(200, 3))
    for number, model in enumerate((afield.attach(net), afield.sngp(net, None))):
        afield.fit_posterior(model, [(x, torch.arange(60) % 3)])
        afield.save(model, tmp_path / str(number))
        loaded = afield.load(tmp_path / str(number), net)
        assert torch.equal(loaded.predict(x).variance, model.predict(x).variance)
