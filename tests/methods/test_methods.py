"""Methods: the contract, over the registry, on a small two moons."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression, Ridge
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import afield
from afield.backbones.resffn import ResFFN
from afield.bounds.spectral import bounds_of, operator_norm
from afield.experiment.config import Config
from afield.experiment.paper import METHOD_OF
from afield.experiment.training import batches, fit
from afield.gp.features import RandomFeatures
from afield.gp.head import GaussianProcessHead
from afield.methods import METHODS, ensemble, frozen, gradient_penalty, isomax_plus, mc_dropout, with_temperature
from afield.methods.dropout import SampledDropout
from afield.methods.frozen import fit_linear
from afield.methods.gradient_penalty import penalty
from afield.methods.isomax import Prototypes
from afield.methods.mixture import AS_THEY_ARE, rescale, scales_of, set_scales
from afield.prediction.average import average
from afield.prediction.metrics import METRICS
from afield.prediction.prediction import Prediction
from afield.settings import Settings
from afield.tasks import TASKS, Task


@pytest.fixture(scope="module")
def two_moons() -> Task:
    task = TASKS["two-moons"](0)
    cut = {part: TensorDataset(*(t[:300] for t in getattr(task, part).tensors)) for part in ("train", "val", "test")}
    settings = dataclasses.replace(task.settings, members=3, num_random_features=256)
    return dataclasses.replace(task, **cut, backbone=partial(ResFFN, 2, depth=2, width=32), settings=settings)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.state_dict().items()}


def assert_same(a: Prediction, b: Prediction, *, tolerance: float = 0.0, but: tuple[str, ...] = ()) -> None:
    ours, theirs = ({n: t for n, t in p._tensors().items() if n not in but} for p in (a, b))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.fixture(scope="module")
def digits() -> Task:
    task = TASKS["digits"](0)
    cut = {part: TensorDataset(*(t[:300] for t in getattr(task, part).tensors)) for part in ("train", "val", "test")}
    return dataclasses.replace(task, **cut, settings=dataclasses.replace(task.settings, num_random_features=256))


@pytest.fixture
def task_of(request: pytest.FixtureRequest) -> Callable[[str], Task]:
    """A small task for a method: images for those that transform images."""
    return lambda name: request.getfixturevalue("digits" if name.endswith("augmix") else "two_moons")


def each(*slow: str) -> list[Any]:
    """Every method; of each kind of cross or variant, one is tested every time and the others with the slow tests."""
    crosses = [f"{base}-{what}" for base in ("dnn", "dnn-sn", "dnn-gp") for what in ("dropout", "ensemble", "augmix")]
    crosses += ["dnn-gp-paper", *(n for n in METHODS if n.endswith("-temperature") and n != "dnn-temperature")]
    return [pytest.param(n, marks=pytest.mark.slow) if n in (*slow, *crosses) else n for n in METHODS]


@pytest.mark.parametrize("name", each("gp-hmc", "gp-variational"))  # test_gp_methods.py has theirs
def test_method_contract(name: str, task_of: Callable[[str], Task], tmp_path: Path):
    task, method, losses = task_of(name), METHODS[name], []
    epochs, learning_rate = (15, 1e-2) if name.endswith("gp-ensemble") else (60, 5e-3)
    if name.endswith("augmix"):
        epochs, learning_rate = 25, 3e-3
    model = fit(task, method, epochs=epochs, learning_rate=learning_rate, on_epoch=lambda _, loss: losses.append(loss))
    x, y = task.test.tensors
    before = tensors_of(model)
    prediction = method.predict(model, x)
    if method.loss is not None:
        assert len(losses) == epochs
        assert losses[-1] < losses[0] / 2
    assert prediction.logits.shape == prediction.probs.shape == (300, task.num_outputs)
    assert all(bool(t.isfinite().all()) for t in prediction._tensors().values())
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(300))
    assert float(prediction.probs.min()) >= 0
    modest = "sn" in name or name.endswith("augmix") or name.startswith("frozen")  # here the frozen part is random
    assert METRICS["accuracy"](prediction, y) > (0.85 if modest else 0.95)
    assert not model.training

    assert_same(method.predict(model, x), prediction)  # neither random nor changed by predicting
    after = tensors_of(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before)

    save_file(after, tmp_path / "model.safetensors")
    torch.manual_seed(1)
    settings = dataclasses.replace(task.settings, **method.settings)
    fresh = method.build(task.backbone, task.num_outputs, settings).eval()
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_same(method.predict(fresh, x), prediction)


@pytest.mark.parametrize("name", each("gp-hmc", "gp-variational"))
def test_seed_decides_the_model(name: str, task_of: Callable[[str], Task]):
    task = task_of(name)
    task = dataclasses.replace(task, train=TensorDataset(*(t[:60] for t in task.train.tensors)))
    x = task.test.tensors[0]
    first, again, other = (
        METHODS[name].predict(fit(task, METHODS[name], seed=seed, epochs=2), x).probs for seed in (0, 0, 1)
    )
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert torch.equal(first, other) == (name in ("gp-exact",))  # nothing random in it


def test_every_option_of_the_head_is_a_setting():
    options = {*inspect.signature(GaussianProcessHead).parameters, *inspect.signature(RandomFeatures).parameters}
    of_no_setting = {"in_features", "out_features", "features", "mean", "generator", "grow"}  # of the model or its kind
    of_no_setting |= {"noise"}  # run folders hold one number
    assert options - of_no_setting <= {field.name for field in dataclasses.fields(Settings)}
    given = Settings(covariance="per_class", rank=3, constant=True, fraction=0.7, projection=4, momentum=None)
    head = METHODS["sngp"].build(partial(ResFFN, 2), 2, given).head
    assert (head.precision.rank, head.constant.shape, head.random_features.fraction) == (3, (2,), 0.7)


def test_the_papers_form_is_what_the_paper_says(two_moons: Task):
    """Weights p*(1 - p*), one set of plain features, a length scale of 2, logits as they are."""
    model = fit(two_moons, METHODS["sngp-paper"], epochs=3)
    head, x = model.head, two_moons.train.tensors[0]
    assert head.variance_features is None
    assert (head.curvature, float(head.random_features.length_scale), float(head.logit_scale)) == ("likelihood", 2, 1)
    directions = F.normalize(head.random_features.weight[:32])
    assert float((directions @ directions.T - torch.eye(32)).abs().max()) > 0.1  # not orthogonal
    top = model(x).softmax(-1).amax(-1).double()
    phi = head.features(model.hidden(x)).double()
    exact = (phi * (top * (1 - top))[:, None]).T @ phi
    torch.testing.assert_close(head.precision.data[0], exact, rtol=1e-4, atol=1e-6)


def test_every_method_of_the_paper_is_there():
    assert set(METHOD_OF.values()) <= set(METHODS)


@pytest.mark.parametrize(("name", "bounded"), [("dnn", 0), ("dnn-sn", 3), ("dnn-gp", 0), ("sngp", 3)])
def test_spectral_methods_bound_every_hidden_layer_and_the_others_none(name: str, bounded: int, two_moons: Task):
    model = fit(two_moons, METHODS[name], epochs=2)
    layers = [m for m in model.modules() if bounds_of(m)]
    assert len(layers) == bounded
    assert all(operator_norm(layer) < 0.96 for layer in layers)


def test_gp_methods_know_what_is_far_and_the_dense_ones_do_not(two_moons: Task):
    far = two_moons.ood["far"].tensors[0]
    confidence = {
        name: float(
            METHODS[name].predict(fit(two_moons, METHODS[name], epochs=60, learning_rate=5e-3), far).confidence.mean()
        )
        for name in ("dnn", "sngp")
    }
    assert confidence["dnn"] > 0.95
    assert confidence["sngp"] < 0.75


# Ensembles


def test_ensemble_averages_what_its_members_predict(two_moons: Task):
    method, x = ensemble(METHODS["sngp"], 3), two_moons.test.tensors[0]
    model = fit(two_moons, method, epochs=3)
    scales = scales_of(model, "ensemble")
    prediction = method.predict(model, x)
    single = [rescale(METHODS["sngp"].predict(member, x), scales) for member in model]
    assert prediction.members.shape == (3, 300, 2)
    torch.testing.assert_close(prediction.members, torch.stack([p.probs for p in single]), rtol=0, atol=0)
    torch.testing.assert_close(prediction.probs, sum(p.probs for p in single) / 3)
    torch.testing.assert_close(prediction.logits, sum(p.logits for p in single) / 3)
    torch.testing.assert_close(prediction.variance, sum(p.variance for p in single) / 3)
    assert float(prediction.score("mutual_information").min()) > -1e-6
    assert not any(torch.equal(single[0].probs, p.probs) for p in single[1:])


def test_ensemble_p_values_are_twice_the_mean_and_hold_their_level(two_moons: Task):
    method = ensemble(METHODS["sngp"], 3)
    model = fit(two_moons, method, epochs=40, learning_rate=5e-3)
    x, far = two_moons.test.tensors[0], two_moons.ood["far"].tensors[0]
    single = [METHODS["sngp"].predict(member, x) for member in model]
    prediction = method.predict(model, x)
    torch.testing.assert_close(prediction.p_value, (2 * sum(p.p_value for p in single) / 3).clamp_max(1))
    assert prediction.smallest_p_value == 2 * single[0].smallest_p_value
    assert float(prediction.accept(0.1).double().mean()) > 0.85
    assert float(method.predict(model, far).accept(0.1).double().mean()) < 0.2


def test_ensemble_trains_each_member_as_if_alone(two_moons: Task):
    """A step of Adam on the sum of the losses is a step of Adam on each."""
    base, batch = METHODS["dnn"], [t[:64] for t in two_moons.train.tensors]
    backbone = partial(ResFFN, 2, depth=1, width=8, dropout=0.0)
    method = ensemble(base, 3)
    together = method.build(backbone, 2)
    alone = [base.build(backbone, 2) for _ in range(3)]
    for member, twin in zip(together, alone, strict=True):
        twin.load_state_dict(member.state_dict())
    for model, loss in ((together, method.loss), *((twin, base.loss) for twin in alone)):
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
    for member, twin in zip(together, alone, strict=True):
        for name, tensor in twin.state_dict().items():
            torch.testing.assert_close(member.state_dict()[name], tensor, rtol=0, atol=0)


def test_ensemble_of_one_is_its_member(two_moons: Task):
    method, x = ensemble(METHODS["sngp"], 1), two_moons.test.tensors[0]
    model = fit(two_moons, method, epochs=1)
    member = METHODS["sngp"].predict(model[0], x)
    assert_same(method.predict(model, x), member, tolerance=1e-5, but=("members", "features"))


def test_ensemble_refuses_shared_parameters_and_no_members():
    shared = ResFFN(2, depth=1, width=4)
    with pytest.raises(ValueError, match="must not share parameters"):
        ensemble(METHODS["dnn"], 2).build(lambda: shared, 2)
    with pytest.raises(ValueError, match="at least one member, got size=0"):
        ensemble(METHODS["dnn"], 0)


def test_averaging_needs_probabilities_or_a_variance():
    with pytest.raises(ValueError, match="needs their variance"):
        average([Prediction(torch.zeros(2, 1), likelihood="gaussian")])
    with pytest.raises(ValueError, match="got poisson predictions"):
        average([Prediction(torch.zeros(2, 1), torch.ones(2), likelihood="poisson")])


def test_average_of_gaussians_has_the_moments_of_their_mixture(generator: torch.Generator):
    mean, variance = torch.randn(3, 5, 1, generator=generator), torch.rand(3, 5, generator=generator)
    noise = [0.1, 0.2, 0.6]
    mixed = average(
        [Prediction(m, v, noise=n, likelihood="gaussian") for m, v, n in zip(mean, variance, noise, strict=True)]
    )
    second = (mean.square()[..., 0] + variance + torch.tensor(noise)[:, None]).mean(0)
    torch.testing.assert_close(mixed.mean[:, 0], mean.mean(0)[:, 0])
    torch.testing.assert_close(mixed.std[:, 0].square(), second - mean.mean(0)[:, 0].square())


# Dropout


@pytest.mark.parametrize("name", ["dnn", "dnn-sn", "dnn-gp", "sngp"])
def test_mc_dropout_at_rate_zero_is_the_base_method_calibrated(name: str, two_moons: Task):
    task = dataclasses.replace(two_moons, backbone=partial(ResFFN, 2, depth=2, width=16, dropout=0.0))
    method, x = mc_dropout(METHODS[name], 3), two_moons.test.tensors[0]
    calibrated = METHODS[name] if name in ("dnn-gp", "sngp") else with_temperature(METHODS[name])
    base = calibrated.predict(fit(task, calibrated, epochs=2), x)
    prediction = method.predict(fit(task, method, epochs=2), x)
    assert prediction.members.shape == (3, 300, 2)
    assert prediction.p_value is None
    assert_same(prediction, base, tolerance=1e-5, but=("members", "p_value"))


def test_mc_dropout_trains_the_base_method_and_samples_around_it(two_moons: Task):
    task = dataclasses.replace(two_moons, backbone=partial(ResFFN, 2, depth=2, width=16, dropout=0.2))
    method, x = mc_dropout(METHODS["dnn"], 400), two_moons.test.tensors[0]
    base, model = fit(task, METHODS["dnn"], epochs=2), fit(task, method, epochs=2)
    assert_same(METHODS["dnn"].predict(model, x), METHODS["dnn"].predict(base, x))
    # The first block is linear in its mask and the second nearly so: logits average to those without dropout.
    set_scales(model, "dropout", AS_THEY_ARE)
    prediction = method.predict(model, x)
    error = (prediction.logits - METHODS["dnn"].predict(base, x).logits).abs().mean()
    spread = prediction.members.std(0).mean()
    assert float(spread) > 0.01
    assert float(error) < float(spread)
    assert not torch.equal(mc_dropout(METHODS["dnn"], 3, seed=1).predict(model, x).probs, prediction.probs)
    assert torch.equal(prediction.features, METHODS["dnn"].predict(base, x).features)
    assert torch.equal(prediction.features, method.hidden(model, x).features)


@pytest.mark.parametrize("name", ["dnn", "sngp"])
def test_a_dropout_sample_says_the_same_of_an_input_in_any_batch(name: str, two_moons: Task):
    method, x = mc_dropout(METHODS[name], 3), two_moons.test.tensors[0]
    model = fit(two_moons, method, epochs=2)
    parts = Prediction.cat([method.predict(model, part) for part in x.split(128)])
    assert_same(parts, method.predict(model, x), tolerance=1e-5)


def test_threads_sample_without_disturbing_each_other(two_moons: Task):
    method, x = mc_dropout(METHODS["dnn"], 3), two_moons.test.tensors[0]
    model = fit(two_moons, method, epochs=1)
    sampled, plain = method.predict(model, x), METHODS["dnn"].predict(model, x)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(which.predict, model, x) for _ in range(10) for which in (method, METHODS["dnn"])]
        for i, future in enumerate(found):
            assert_same(future.result(), plain if i % 2 else sampled)


def test_mc_dropout_leaves_batch_norm_and_the_global_random_state_alone():
    class Backbone(nn.Sequential):
        out_features = 8

    method = mc_dropout(METHODS["dnn"], 3)
    model = method.build(lambda: Backbone(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)), 2)
    before, state = tensors_of(model), torch.get_rng_state()
    prediction = method.predict(model, torch.randn(16, 2, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert float(prediction.members.std(0).max()) > 0
    assert all(m.training for m in model.modules())


@pytest.mark.parametrize("shape", [(4, 6, 50), (4, 6, 5, 5)])
def test_filter_wise_dropout_drops_whole_filters(shape: tuple[int, ...]):
    class Backbone(nn.Sequential):
        out_features = math.prod(shape[1:])

    for filter_wise, layer in ((True, nn.Dropout(0.5)), (False, nn.Dropout2d(0.5)), (False, nn.Dropout(0.5))):
        model = mc_dropout(METHODS["dnn"], filter_wise=filter_wise).build(partial(Backbone, layer, nn.Flatten()), 2)
        dropout = next(m for m in model.modules() if isinstance(m, SampledDropout))
        seen: list[Tensor] = []
        dropout.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        mc_dropout(METHODS["dnn"], 5).predict(model.eval(), torch.ones(shape))
        assert torch.equal(seen.pop(), torch.ones(shape))  # hidden vectors are those without dropout
        seen.append(dropout.train()(torch.ones(shape)))
        whole = filter_wise or isinstance(layer, nn.Dropout2d)
        for output in seen:
            filters = output.flatten(2)
            assert set(filters.flatten().tolist()) == {0.0, 2.0}
            assert bool((filters == filters[..., :1]).all()) == whole


def test_dropout_layer_that_serves_twice_is_replaced_under_both_names():
    class Backbone(nn.Sequential):
        out_features = 4

    shared = nn.Dropout(0.5)
    model = mc_dropout(METHODS["dnn"]).build(lambda: Backbone(shared, nn.Linear(2, 4), shared), 2)
    assert not any(isinstance(m, nn.Dropout) for m in model.modules())


def test_mc_dropout_refuses_a_backbone_without_dropout_and_no_samples():
    class Backbone(nn.Linear): ...

    with pytest.raises(ValueError, match="expects a backbone with dropout layers"):
        mc_dropout(METHODS["dnn"]).build(partial(Backbone, 2, 4), 2)
    with pytest.raises(ValueError, match="at least one sample, got samples=0"):
        mc_dropout(METHODS["dnn"], 0)


def test_combinators_compose(two_moons: Task):
    method, x = ensemble(mc_dropout(gradient_penalty(METHODS["sngp"]), 2), 2), two_moons.test.tensors[0]
    prediction = method.predict(fit(two_moons, method, epochs=1), x)
    assert prediction.members.shape == (2, 300, 2)
    torch.testing.assert_close(prediction.members.mean(0), prediction.probs)


# Gradient penalty


def test_gradient_penalty_of_linear_maps_is_known(generator: torch.Generator):
    x, y = torch.randn(20, 3, generator=generator), torch.arange(20) % 2
    linear = nn.Linear(3, 2)
    for norms in ((1.0, 1.0), (1.0, 3.0), (0.0, 0.5)):
        with torch.no_grad():
            direction = torch.nn.functional.normalize(torch.randn(2, 3, generator=generator))
            linear.weight.copy_(direction * torch.tensor(norms)[:, None])
        value = penalty(linear, x, y)
        expected = sum((norm - 1) ** 2 for norm in norms) / 2
        assert float(value.detach()) == pytest.approx(expected, abs=1e-6)
        value.backward()
        assert bool(linear.weight.grad.isfinite().all())


def test_gradient_penalty_of_one_output_is_that_of_the_output():
    distance = nn.Sequential(nn.Flatten(), _Norm())  # has a gradient of norm 1 everywhere but at zero
    value = penalty(distance, torch.randn(10, 2, 3), torch.zeros(10, dtype=torch.long))
    assert float(value.detach()) < 1e-10


def test_gradient_penalty_keeps_the_slope_near_one(two_moons: Task):
    x, y = two_moons.test.tensors
    settings = {"epochs": 40, "learning_rate": 5e-3, "warmup": 0.0}
    free, penalised = (fit(two_moons, METHODS[name], **settings) for name in ("dnn-gp", "duq-gp"))
    assert float(penalty(penalised, x, y).detach()) < 0.25 * float(penalty(free, x, y).detach())


def test_sum_of_all_logits_has_no_gradient_to_penalise(two_moons: Task):
    """Why the penalty is on one logit."""
    model = fit(two_moons, METHODS["dnn-gp"], epochs=10, learning_rate=5e-3)
    x = two_moons.test.tensors[0].clone().requires_grad_()
    logits = model(x)
    (of_sum,) = torch.autograd.grad(logits.sum(), x, retain_graph=True)
    (of_one,) = torch.autograd.grad(logits[:, 0].sum(), x)
    assert float(of_sum.norm()) < 1e-5 * float(of_one.norm())


def test_gradient_penalty_of_weight_zero_is_the_base_loss(two_moons: Task):
    batch = [t[:64] for t in two_moons.train.tensors]
    model = METHODS["dnn-gp"].build(two_moons.backbone, 2).eval()
    torch.testing.assert_close(
        gradient_penalty(METHODS["dnn-gp"], 0.0).loss(model, batch), METHODS["dnn-gp"].loss(model, batch)
    )


def test_loss_and_gradient_penalty_share_one_forward_pass(two_moons: Task):
    x, y = (t[:64] for t in two_moons.train.tensors)
    model = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    method = METHODS["dnn-gp"]
    value = gradient_penalty(method, 0.1).loss(model, (x, y))
    assert len(seen) == 1
    assert int(model[1].num_batches_tracked) == 1
    torch.testing.assert_close(value, method.loss(model, (x, y)) + 0.1 * penalty(model, x, y))
    assert not model._forward_hooks


def test_gradient_penalty_refuses_tokens_and_negative_weights():
    with pytest.raises(ValueError, match=r"floating-point numbers, got torch\.int64"):
        penalty(nn.Identity(), torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        gradient_penalty(METHODS["dnn-gp"], -1.0)


class _Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.norm(dim=1, keepdim=True)


# IsoMax+


def test_isomax_distances_are_those_of_the_definition(generator: torch.Generator):
    head, h = Prototypes(5, 3), torch.randn(7, 5, generator=generator)
    with torch.no_grad():
        head.distance_scale.fill_(-2.0)
    distance = [[float((a / a.norm() - w / w.norm()).norm()) for w in head.weight.detach()] for a in h]
    torch.testing.assert_close(head(h), -2 * torch.tensor(distance))
    torch.testing.assert_close(head(100 * h), head(h))  # the radius is lost
    at_prototype = head(head.weight.detach())
    at_prototype.sum().backward()
    assert torch.equal(at_prototype.diagonal(), torch.zeros(3))
    assert bool(head.weight.grad.isfinite().all())


def test_isomax_smallest_distance_is_the_score_max_logit(two_moons: Task):
    x = two_moons.test.tensors[0]
    model = fit(two_moons, METHODS["isomax-plus"], epochs=2)
    prediction = METHODS["isomax-plus"].predict(model, x)
    torch.testing.assert_close(prediction.score("max_logit"), -model(x).detach().amax(1), rtol=0, atol=0)
    assert float(prediction.score("max_logit").min()) >= 0


def test_isomax_entropic_scale_is_in_the_loss_and_not_in_the_probabilities(two_moons: Task):
    x, y = two_moons.test.tensors
    model = isomax_plus().build(two_moons.backbone, 2).eval()
    logits = model(x).detach()
    torch.testing.assert_close(isomax_plus().predict(model, x).probs, logits.softmax(1))
    chosen = (10 * logits).log_softmax(1)[torch.arange(300), y]
    torch.testing.assert_close(isomax_plus().loss(model, (x, y)).detach(), -chosen.mean())


def test_isomax_refuses_a_single_output():
    with pytest.raises(ValueError, match="at least 2 classes, got 1"):
        isomax_plus().build(partial(ResFFN, 2, depth=1, width=4), 1)


# Frozen backbones


@pytest.mark.parametrize("real", [False, True])
def test_linear_layer_on_a_frozen_backbone_is_the_ridge_optimum(real: bool, generator: torch.Generator):
    h = torch.randn(200, 5, generator=generator)
    y = h @ torch.randn(5, 3, generator=generator) + torch.randn(200, 3, generator=generator)
    y = y if real else y.argmax(1)
    layer, ridge = nn.Linear(5, 3), 0.7
    fit_linear(layer, [(h[:50], y[:50]), (h[50:], y[50:])], ridge)
    theirs = Ridge(alpha=ridge) if real else LogisticRegression(C=1 / ridge, tol=1e-8, max_iter=1000)
    theirs.fit(h.numpy().astype(float), y.numpy())
    expected = torch.from_numpy(theirs.coef_ @ h.numpy().astype(float).T + theirs.intercept_[:, None]).T
    found = layer(h).detach().double()
    if not real:  # a softmax leaves the common level free
        expected, found = (z - z.mean(1, keepdim=True) for z in (expected, found))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


def test_frozen_methods_leave_the_backbone_alone_and_attach_keeps_the_classes(two_moons: Task):
    x = two_moons.test.tensors[0]
    torch.manual_seed(0)
    before = two_moons.backbone().state_dict()
    labels = {}
    for name in ("frozen-dnn", "frozen-attach", "frozen-gp"):
        model = fit(two_moons, METHODS[name], seed=0)
        after = (model[0] if name == "frozen-dnn" else model.net[0]).state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)
        labels[name] = METHODS[name].predict(model, x).labels
    assert torch.equal(labels["frozen-dnn"], labels["frozen-attach"])


@pytest.mark.parametrize(("name", "dense", "bounded"), [("attach", "dnn", False), ("attach-sn", "dnn-sn", True)])
def test_an_attached_network_is_the_dense_one_with_a_variance(name: str, dense: str, bounded: bool, two_moons: Task):
    x = two_moons.test.tensors[0]
    trained, model = (fit(two_moons, METHODS[method], seed=0, epochs=3) for method in (dense, name))
    expected, found = METHODS[dense].predict(trained, x), METHODS[name].predict(model, x)
    assert torch.equal(found.labels, expected.labels)
    assert bool((found.variance > 0).all())
    assert any("parametrizations" in key for key in model.state_dict()) == bounded
    taken = METHODS[name].build(two_moons.backbone, two_moons.num_outputs)
    taken.load_state_dict(METHODS[name].take_over(taken, trained.state_dict()))
    torch.testing.assert_close(taken.eval()(x), trained.eval()(x))


@pytest.mark.parametrize("name", ["frozen-dnn", "frozen-attach", "frozen-gp"])
def test_a_frozen_backbone_sees_every_input_once(name: str, two_moons: Task, monkeypatch: pytest.MonkeyPatch):
    seen: list[Tensor] = []

    def backbone() -> nn.Module:
        made = two_moons.backbone()
        made.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        return made

    task, method = dataclasses.replace(two_moons, backbone=backbone), METHODS[name]
    seen.clear()
    model = fit(task, method, seed=0)
    x = torch.cat([task.test.tensors[0], task.train.tensors[0], task.test.tensors[0].flip(0)])
    prediction = method.predict(model, x)
    inputs = torch.cat(seen)
    assert len(inputs) == len(inputs.unique(dim=0))
    parts = [task.train, task.test] if name == "frozen-dnn" else [task.train, task.val, task.test]
    assert len(inputs) == len(torch.cat([part.tensors[0] for part in parts]).unique(dim=0))
    whole = model.predict(x).logits if isinstance(model, afield.SNGP) else model.eval()(x)
    torch.testing.assert_close(prediction.logits, whole)
    monkeypatch.setattr(frozen, "_MOST_BYTES", 0)
    frozen._MEMORY.clear()
    torch.testing.assert_close(method.predict(model, x).logits, whole)
    assert not frozen._MEMORY[next(iter(frozen._MEMORY))]


def test_output_weights_are_solved_for_on_request() -> None:
    """Then a second solution is the first; the paper's form, and networks with a dense output, have none."""
    task = TASKS["two-moons"](0, "smoke")
    options = {"epochs": 1, "num_random_features": 32}
    solved, stepped = (fit(task, METHODS["sngp"], refit_head=refit, **options) for refit in (True, False))
    before = solved.head.weight.clone()
    assert afield.fit_head(solved, batches(task.train), progress=False).gradient < 1e-4
    torch.testing.assert_close(solved.head.weight, before, rtol=1e-2, atol=1e-2)
    assert not torch.allclose(stepped.head.weight, before, rtol=0.1, atol=0.1)
    for name, refit in (("sngp", True), ("sngp-augmix", True), ("sngp-paper", False), ("dnn", False)):
        assert Config.of("cifar10", name).settings.refit_head is refit
