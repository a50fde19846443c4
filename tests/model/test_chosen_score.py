"""Fitted scores of the field, chosen by name in `afield.calibrate`: p-values rest on them wherever the model goes."""

import copy
import pickle
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import afield
from afield.prediction.distance_scores import FITTED
from afield.prediction.prediction import Prediction
from afield.prediction.scores import symmetric

CLASSES = 3


@cache
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(240) % CLASSES
    return 5 * torch.eye(CLASSES)[y] + torch.randn(240, CLASSES, generator=generator), y


@cache
def network() -> nn.Sequential:
    torch.manual_seed(0)
    (x, y), net = data(), nn.Sequential(nn.Linear(CLASSES, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x[:120]), y[:120]).backward()
        optimizer.step()
    return net


@cache
def _fitted() -> afield.SNGP:
    model = afield.attach(network(), num_random_features=32)
    afield.fit_posterior(model, train())
    return model


def train() -> list[tuple[Tensor, Tensor]]:
    x, y = data()
    return [(x[:60], y[:60]), (x[60:120], y[60:120])]


def held_out() -> list[tuple[Tensor, Tensor]]:
    x, y = data()
    return [(x[120:], y[120:])]


def chosen(name: str) -> afield.SNGP:
    model = copy.deepcopy(_fitted())
    afield.calibrate(model, held_out(), score=name, train=train())
    return model


@pytest.mark.parametrize("name", FITTED)
def test_it_is_the_score_of_the_name_fitted_to_the_training_data(name: str):
    model, x = chosen(name), data()[0]
    score = FITTED[name](16, CLASSES, output=network()[2])
    for inputs, target in train():
        h = model.hidden(inputs).detach()
        score.update(h, target, symmetric(network()[2](h)))
    h = model.hidden(x).detach()
    expected = score.score(Prediction(network()[2](h), features=h))
    p = model.predict(x)
    assert p.default_score == name
    torch.testing.assert_close(p.score(), expected)
    assert torch.equal(p.score(name), p.score())
    above = (model.head.reference[None, :] >= p.score().double()[:, None]).sum(1)
    torch.testing.assert_close(p.p_value, (1 + above).float() / (model.head.reference.numel() + 1))


@pytest.mark.parametrize("name", FITTED)
def test_it_goes_into_files_and_copies(name: str, tmp_path: Path):
    model, x = chosen(name), data()[0]
    afield.save(model, tmp_path / "model")
    for other in (afield.load(tmp_path / "model", network()), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.predict(x).score(), model.predict(x).score())
        assert torch.equal(other.predict(x).p_value, model.predict(x).p_value)


def test_another_calibration_forgets_it_and_a_new_fit_switches_it_off():
    model, x = chosen("knn"), data()[0]
    afield.calibrate(model, held_out(), score="mahalanobis", train=train())
    assert set(model.head.chosen_score.state_dict()) == {"center", "root", "means"}
    afield.calibrate(model, held_out())
    assert model.predict(x).default_score == "joined"
    assert not model.head.chosen_score.fitted
    model = chosen("knn")
    afield.fit_posterior(model, train())
    assert model.predict(x).p_value is None
    assert not model.head.chosen_score.fitted


def test_a_change_of_classes_forgets_it():
    model, x = chosen("she"), data()[0]
    model = afield.class_changes.drop_class(model, 0)
    assert not model.head.chosen_score.fitted
    p = model.predict(x)
    assert p.p_value is None
    assert p.score().isfinite().all()


def test_it_serves_regression_where_it_needs_no_classes():
    x = data()[0]
    torch.manual_seed(0)
    model = afield.sngp(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)), likelihood="gaussian")
    rows = [(x[:120], x[:120].sum(1, keepdim=True))]
    afield.fit_posterior(model, rows)
    afield.calibrate(model, [(x[120:], x[120:].sum(1, keepdim=True))], score="knn", train=rows)
    p = model.predict(torch.tensor([[5.0, 0.0, 0.0], [-50.0, -80.0, 90.0]]))
    assert p.default_score == "knn"
    assert p.score()[1] > p.score()[0]
    with pytest.raises(ValueError, match=r"The score mahalanobis needs classes.*use score='knn'"):
        afield.calibrate(model, [(x[120:], x[120:].sum(1, keepdim=True))], score="mahalanobis", train=rows)


@pytest.mark.parametrize("options", [{"score": "knn"}, {"train": []}, {"score": "energy", "train": []}])
def test_training_data_goes_with_fitted_scores_alone(options: dict[str, object]):
    with pytest.raises(ValueError, match="train= goes with a score that is fitted to training data"):
        afield.calibrate(copy.deepcopy(_fitted()), held_out(), **options)


def test_a_head_without_a_dense_layer_says_which_scores_need_one():
    model = afield.sngp(network(), num_random_features=32)
    afield.fit_posterior(model, train())
    with pytest.raises(ValueError, match="needs the dense layer over the features"):
        afield.calibrate(model, held_out(), score="vim", train=train())
    assert model.predict(data()[0]).p_value is None


@pytest.mark.slow
@pytest.mark.parametrize("name", FITTED)
def test_it_is_exported(name: str, tmp_path: Path):
    model = chosen(name)
    exported = afield.export.export(model, tmp_path / "model.onnx", data()[0][:4])
    assert exported.metadata["score"] == name
