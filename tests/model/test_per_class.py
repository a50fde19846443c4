"""p-values by predicted class, for whole models: what a minority is promised, and that nothing on the way loses it."""

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import afield
from afield.deploy.export import Exported, export
from afield.deploy.onnx_file import open_session
from afield.estimators.rows import Rows
from afield.estimators.stream import learn_keeping_reference
from afield.methods.ensemble import combine
from afield.methods.stacked import stack
from afield.model.posterior import update
from afield.prediction.p_values import class_p_value, conformal_p_value, predicted_class

ALPHA = 0.05


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def imbalanced(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """99:1, and the minority lies where the training data is thin."""
    y = (torch.rand(n, generator=torch.Generator().manual_seed(seed)) < 0.01).long()
    return normal(n, 2, seed=seed + 1) * (1 + y[:, None]) + 4 * y[:, None], y


def fitted(*, seed: int = 0, **options: object) -> afield.SNGP:
    """A network that splits the plane well, with a posterior of 2,000 imbalanced examples."""
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
        net.bias.copy_(torch.tensor([5.5, -5.5]))
    generator = torch.Generator().manual_seed(seed)
    model = afield.attach(net, num_random_features=64, generator=generator, **options)
    afield.fit_posterior(model, [imbalanced(2000, 10)])
    return model


@pytest.fixture(scope="module")
def model() -> afield.SNGP:
    model = fitted()
    afield.calibrate(model, [imbalanced(36_000, 20)], per_class=True)
    return model


def refused(model: afield.SNGP, x: Tensor) -> list[float]:
    p = model.predict(x)
    return [float((~p.accept(ALPHA))[p.labels == k].double().mean()) for k in (0, 1)]


def test_a_minority_of_one_in_a_hundred_is_refused_no_more_than_promised(model: afield.SNGP):
    x, _ = imbalanced(60_000, 30)
    n = model.predict(x).num_reference
    assert isinstance(n, Tensor)
    assert min(n.tolist()) >= 99
    assert max(refused(model, x)) <= 2 * ALPHA
    together = copy.deepcopy(model)
    afield.calibrate(together, [imbalanced(36_000, 20)])
    assert refused(together, x)[1] > 0.5


def test_what_calibrate_keeps_is_compared_with_its_own_class(model: afield.SNGP):
    x, _ = imbalanced(500, 40)
    p, head = model.predict(x), model.head
    for k, (first, end) in enumerate(head.reference_spans.tolist()):
        mine = p.labels == k
        right, smallest = conformal_p_value(p.score()[mine], head.reference[first:end])
        assert torch.equal(p.p_value[mine], right)
        assert set(p.num_reference[mine].tolist()) == {end - first}
        assert p.smallest_p_value >= smallest
    found = afield.calibrate(copy.deepcopy(model), [imbalanced(900, 50)], per_class=True)
    assert found.num_reference == 450
    assert found.smallest_p_value == 1 / (found.smallest_reference + 1)
    assert 99 <= found.smallest_reference <= 450


def test_numbers_are_refused():
    regression = afield.attach(nn.Linear(2, 1), likelihood="gaussian", num_random_features=16)
    x = normal(60, 2)
    afield.fit_posterior(regression, [(x, x[:, :1])])
    with pytest.raises(ValueError, match=r"per_class=True needs classes to predict, got a gaussian head: leave it out"):
        afield.calibrate(regression, [(x, x[:, :1])], per_class=True)


def test_two_classes_of_one_logit():
    net = nn.Linear(2, 1)
    net.weight.data.fill_(4.0)
    model = afield.attach(net, likelihood="bernoulli", num_random_features=32)
    x = normal(1500, 2)
    y = (x.sum(1) > 0).long()
    afield.fit_posterior(model, [(x[:500], y[:500])])
    afield.calibrate(model, [(x[500:], y[500:])], per_class=True)
    p = model.predict(x[:50])
    assert torch.equal(predicted_class(p), p.labels)
    right, _ = class_p_value(p.score(), p.labels, model.head.reference, model.head.reference_spans)
    assert torch.equal(p.p_value, right)


def test_save_and_load_keep_the_classes(model: afield.SNGP, tmp_path: Path):
    afield.save(model, tmp_path)
    again = afield.load(tmp_path, nn.Linear(2, 2))
    x, _ = imbalanced(200, 60)
    expected, found = model.predict(x), again.predict(x)
    assert torch.equal(found.p_value, expected.p_value)
    assert torch.equal(found.num_reference, expected.num_reference)
    assert found.smallest_p_value == expected.smallest_p_value


def test_a_new_calibration_or_posterior_forgets_the_classes(model: afield.SNGP):
    changed = copy.deepcopy(model)
    update(changed, [imbalanced(50, 70)])
    p = changed.predict(normal(3, 2))
    assert (p.p_value, p.num_reference, len(changed.head.reference_spans)) == (None, None, 0)
    afield.calibrate(changed, [imbalanced(300, 80)])
    assert changed.predict(normal(3, 2)).num_reference == 150
    changed.load_state_dict(model.state_dict())
    x = normal(9, 2)
    assert torch.equal(changed.predict(x).p_value, model.predict(x).p_value)


def test_a_stream_keeps_its_reference_by_class():
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    model = afield.sngp(net, num_random_features=32)
    x, y = imbalanced(900, 90)
    x = x.double()
    model(x)
    afield.fit_posterior(model, [(x, y)])
    afield.calibrate(model, [(x, y)], per_class=True)
    spans = model.head.reference_spans
    learn_keeping_reference(model, Rows(x[:20], y[:20], torch.ones(20).double()))
    assert torch.equal(model.head.reference_spans, spans)
    assert isinstance(model.predict(x[:5]).num_reference, Tensor)


def test_ensembles_double_the_mean_and_have_no_single_reference(model: afield.SNGP):
    other = fitted(seed=1)
    afield.calibrate(other, [imbalanced(900, 100)], per_class=True)
    x, _ = imbalanced(100, 110)
    single = [m.predict(x) for m in (model, other)]
    both = combine(single)
    torch.testing.assert_close(both.p_value, (single[0].p_value + single[1].p_value).clamp_max(1))
    assert both.smallest_p_value == 2 * max(p.smallest_p_value for p in single)
    assert torch.equal(stack([model, other]).predict(x).p_value, both.p_value)
    assert both.accept(0.05).any()
    with pytest.raises(ValueError, match="delta needs p-values of one reference"):
        both.accept(0.05, delta=0.1)
    alone = combine(single[:1])
    assert torch.equal(alone.accept(0.05, delta=0.1), single[0].accept(0.05, delta=0.1))


@pytest.mark.parametrize("format", ["torch-export", pytest.param("onnx", marks=pytest.mark.slow)])
def test_exports_have_the_same_p_values(format: str, model: afield.SNGP, tmp_path: Path):
    x, _ = imbalanced(64, 120)
    done = export(model, tmp_path / "model", x, alpha=ALPHA, format=format)
    if format == "onnx":
        found = open_session(done.file.read_bytes(), ["h"])((x,))
    else:
        found = torch.export.load(done.file).module()(x)
    check_export(model, done, x, found)


@pytest.mark.slow
def test_exports_with_a_covariance_for_each_class_do_too(tmp_path: Path):
    model = afield.sngp(nn.Linear(2, 2), num_random_features=64, covariance="per_class")
    nn.init.normal_(model.head.weight)
    x, y = imbalanced(3000, 130)
    model(x)
    afield.fit_posterior(model, [(x, y)])
    afield.calibrate(model, [(x, y)], per_class=True)
    done = export(model, tmp_path / "model.pt2", x[:64], alpha=ALPHA, format="torch-export")
    check_export(model, done, x, torch.export.load(done.file).module()(x))


def check_export(model: afield.SNGP, done: Exported, x: Tensor, found: Mapping[str, Tensor]) -> None:
    head, p = model.head, model.predict(x)
    assert len(set(p.labels.tolist())) == 2
    exact, _ = class_p_value(found["score"], p.labels, head.reference, head.reference_spans)
    assert torch.equal(found["p_value"], exact)
    assert torch.equal(found["accepted"], exact > ALPHA)
    thresholds = torch.tensor(done.metadata["threshold"], dtype=torch.float64)[p.labels]
    assert torch.equal(found["accepted"], found["score"].double() <= thresholds)
    assert done.metadata["num_reference"] == (head.reference_spans[:, 1] - head.reference_spans[:, 0]).tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_prediction_is_the_eager_one(model: afield.SNGP):
    compiled = torch.compile(model.predict, backend="inductor" if shutil.which("g++") else "aot_eager")
    x, _ = imbalanced(200, 140)
    expected, found = model.predict(x), compiled(x)
    assert torch.equal(found.num_reference, expected.num_reference)
    steps = 1 / (expected.num_reference + 1)  # rounding may move a score past one of the reference
    assert bool(((found.p_value - expected.p_value).abs() <= 1.5 * steps).all())
    torch._dynamo.reset()
