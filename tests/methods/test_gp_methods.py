"""Gaussian processes on raw inputs: against the formula, gpytorch, quadrature, and each other."""

import dataclasses
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from afield.errors import NotFitted
from afield.experiment.training import batches, fit
from afield.methods.gp_exact import as_regression, fit_kernel, gp_exact, standard_normal
from afield.methods.gp_hmc import SampledWeights, gp_hmc
from afield.methods.gp_random_features import gp_random_features
from afield.methods.gp_variational import gp_variational
from afield.methods.kernel import FittedKernel, KernelModel, import_gpytorch, pivots
from afield.methods.method import Method
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import quadrature, to_probs
from afield.settings import Settings
from afield.tasks import TASKS, Task

pytest.importorskip("pyro", reason='needs gpytorch and pyro: pip install "afield[gp]"')
GP = {
    "gp-exact": gp_exact(),
    "gp-variational": gp_variational(steps=120),
    "gp-random-features": gp_random_features(),
    "gp-hmc": gp_hmc(draws=60, warmup=60),
}
names = pytest.mark.parametrize("name", GP)


@pytest.fixture(scope="module")
def regression() -> Task:
    return TASKS["toy-regression"](0)


@pytest.fixture(scope="module")
def two_moons() -> Task:
    task = TASKS["two-moons"](0)
    cut = {part: TensorDataset(*(t[:150] for t in getattr(task, part).tensors)) for part in ("train", "val", "test")}
    return dataclasses.replace(task, **cut)


@pytest.fixture(scope="module")
def regressions(regression: Task) -> dict[str, nn.Module]:
    return {name: fit(regression, method) for name, method in GP.items()}


@pytest.fixture(scope="module")
def classifiers(two_moons: Task) -> dict[str, nn.Module]:
    return {name: fit(two_moons, method) for name, method in GP.items()}


def closed_form(task: Task, kernel: FittedKernel, x: Tensor) -> tuple[Tensor, Tensor]:
    """k_*^T (K + D)^-1 t and k_** - k_*^T (K + D)^-1 k_*, (N, K) each, with no coordinates in between."""
    train, y = (t.double() for t in task.train.tensors)
    gaussian = task.settings.likelihood == "gaussian"
    target, noise = as_regression(y if gaussian else y.long(), task.settings.likelihood)
    noise = torch.full_like(target, kernel.noise) if noise is None else noise
    cross, means, variances = kernel(x.double(), train), [], []
    for t, d in zip(target, noise, strict=True):
        solved = torch.linalg.solve(kernel(train, train) + torch.diag(d), torch.cat([t[:, None], cross.T], dim=1))
        means.append(cross @ solved[:, 0])
        variances.append(kernel.output_scale - (cross * solved[:, 1:].T).sum(1))
    return torch.stack(means, 1), torch.stack(variances, 1)


def rmse(a: Tensor, b: Tensor) -> float:
    return float((a - b).square().mean().sqrt())


def errors(prediction: Prediction, exact: Prediction) -> tuple[float, float]:
    """Of the mean and of the standard deviation."""
    spread = [p.variance.reshape(len(p)).sqrt() for p in (prediction, exact)]
    return rmse(prediction.logits, exact.logits), rmse(*spread)


# The kernel


@given(n=st.integers(2, 40), d=st.integers(1, 3), seed=st.integers(0, 1000), scale=st.floats(0.2, 5))
@settings(max_examples=30, deadline=None)
def test_pivots_know_the_function_at_all_inputs(n: int, d: int, seed: int, scale: float):
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = torch.cat([x, x[: n // 2]])  # copies add nothing
    kernel, model = FittedKernel(scale, 2.0), KernelModel(Settings(), {})
    model.place(pivots(x, kernel, 1e-8), kernel)
    phi, rest = model.features(x)
    assert len(model.anchors) <= n
    assert float(rest.max()) <= 2.1e-8
    torch.testing.assert_close(phi @ phi.T, kernel(x, x), rtol=0, atol=5e-8)


def log_evidence(task: Task, kernel: FittedKernel) -> float:
    x, y = (t.double() for t in task.train.tensors)
    normal = torch.distributions.MultivariateNormal(
        torch.zeros(len(x), dtype=torch.float64), kernel(x, x) + kernel.noise * torch.eye(len(x))
    )
    return float(normal.log_prob(y[:, 0]))


def test_kernel_is_at_the_maximum_of_the_marginal_likelihood(regression: Task):
    x, y = (t.double() for t in regression.train.tensors)
    kernel = fit_kernel(x, y, "gaussian")
    best = log_evidence(regression, kernel)
    for field, factor in itertools.product(("length_scale", "output_scale", "noise"), (0.95, 1.05)):
        moved = dataclasses.replace(kernel, **{field: factor * getattr(kernel, field)})
        assert log_evidence(regression, moved) < best
    assert kernel.noise == pytest.approx(0.01, rel=0.3)


def test_kernel_follows_the_units_of_inputs_and_targets(regression: Task):
    x, y = (t.double() for t in regression.train.tensors)
    kernel, scaled = fit_kernel(x, y, "gaussian"), fit_kernel(1000 * x, 0.01 * y, "gaussian")
    assert scaled.length_scale == pytest.approx(1000 * kernel.length_scale, rel=0.01)
    assert scaled.output_scale == pytest.approx(1e-4 * kernel.output_scale, rel=0.02)
    assert scaled.noise == pytest.approx(1e-4 * kernel.noise, rel=0.02)


def test_given_length_scale_stays(two_moons: Task):
    x, y = two_moons.train.tensors
    assert fit_kernel(x.double(), y, "categorical", 0.7).length_scale == pytest.approx(0.7, rel=1e-9)


# The exact process


@pytest.mark.parametrize("kind", ["regression", pytest.param("two_moons", marks=pytest.mark.slow)])
def test_exact_process_is_the_formula(kind: str, request: pytest.FixtureRequest):
    task: Task = request.getfixturevalue(kind)
    model = request.getfixturevalue("regressions" if kind == "regression" else "classifiers")["gp-exact"]
    x = task.grid[::20]
    mean, variance = closed_form(task, model.kernel, x)
    ours = model.posterior(x.double())
    torch.testing.assert_close(ours[0], mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours[1], variance, rtol=0, atol=1e-6)


def test_exact_process_is_the_formula_to_rounding_where_every_input_is_an_anchor(generator: torch.Generator):
    x, test = torch.randn(60, 8, generator=generator), torch.randn(20, 8, generator=generator)
    task = dataclasses.replace(TASKS["blobs"](0), train=TensorDataset(x, torch.arange(60) % 3), num_outputs=3)
    model = fit(task, gp_exact())
    assert len(model.anchors) == 60
    for ours, expected in zip(model.posterior(test.double()), closed_form(task, model.kernel, test), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)


def test_exact_process_is_gpytorchs(two_moons: Task, classifiers: dict[str, nn.Module]):
    gpytorch, model = import_gpytorch(), classifiers["gp-exact"]
    x, y = two_moons.train.tensors
    target, noise = as_regression(y, "categorical")

    class Reference(gpytorch.models.ExactGP):
        def forward(self, x: Tensor) -> object:
            return gpytorch.distributions.MultivariateNormal(gpytorch.means.ZeroMean()(x), kernel(x))

    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()).double()
    kernel.base_kernel.lengthscale, kernel.outputscale = model.kernel.length_scale, model.kernel.output_scale
    likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise)
    reference = Reference(x.double().expand(2, -1, -1), target, likelihood).eval()
    points = two_moons.grid[::37].double()
    with torch.no_grad():
        expected = reference(points.expand(2, -1, -1))
        ours = model.posterior(points)
    torch.testing.assert_close(ours[0].T, expected.mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours[1].T, expected.variance, rtol=0, atol=1e-5)


def test_average_over_fixed_draws_is_the_integral():
    generator = torch.Generator().manual_seed(0)
    mean = 3 * torch.randn(200, 2, generator=generator, dtype=torch.float64)
    variance = 6 * torch.rand(200, 2, generator=generator, dtype=torch.float64)
    drawn = to_probs(mean + variance.sqrt() * standard_normal(2)[:, None]).mean(0)
    exact = quadrature(mean[:, 1:] - mean[:, :1], variance.sum(1))
    torch.testing.assert_close(drawn, exact, rtol=0, atol=0.01)
    # Nothing known, nothing said: by symmetry, not by chance.
    torch.testing.assert_close(to_probs(2 * standard_normal(2)).mean(0), torch.full((2,), 0.5, dtype=torch.float64))
    five = to_probs(2 * standard_normal(5)).mean(0)
    torch.testing.assert_close(five, torch.full_like(five, 0.2), rtol=0, atol=0.02)


# All of them


@names
def test_regression_contract(name: str, regression: Task, regressions: dict[str, nn.Module], tmp_path: Path):
    method, model, (x, y) = GP[name], regressions[name], regression.test.tensors
    prediction = method.predict(model, x)
    assert prediction.likelihood == "gaussian"
    assert prediction.logits.dtype == prediction.variance.dtype == torch.float32
    assert rmse(prediction.mean, y) < 0.12  # the noise is 0.1
    low, high = prediction.interval(0.9)
    assert 0.82 < float(((y > low) & (y < high)).double().mean()) < 0.97
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    fresh = method.build(regression.backbone, 1, regression.settings).eval()
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    again = method.predict(fresh, x)
    assert again.noise == prediction.noise
    for part, tensor in prediction._tensors().items():
        assert torch.equal(tensor, again._tensors()[part])


@names
def test_far_away_all_return_to_the_prior(name: str, two_moons: Task, classifiers: dict, regressions: dict):
    direction = torch.linspace(0, 2 * math.pi, 101)[:-1]
    far = GP[name].predict(classifiers[name], 50 * torch.stack([direction.cos(), direction.sin()], dim=1))
    # Random features are periodic: their logits stay small, but not zero.
    assert float((far.probs - 0.5).abs().mean()) < (0.05 if name == "gp-random-features" else 1e-6)
    inside = GP[name].predict(classifiers[name], two_moons.test.tensors[0])
    assert float(inside.confidence.mean()) > 0.9
    assert float(far.score("variance").min()) > 2 * float(inside.score("variance").median())
    real = GP[name].predict(regressions[name], torch.linspace(50, 100, 100)[:, None])
    prior = regressions["gp-exact"].kernel.output_scale
    assert float(real.variance.mean()) == pytest.approx(prior, rel=0.02)
    assert float(real.mean.abs().mean()) < (0.2 if name == "gp-random-features" else 1e-9)


@names
def test_an_input_has_the_same_prediction_in_any_batch(name: str, classifiers: dict, two_moons: Task):
    x = two_moons.grid[:3000]
    whole = GP[name].predict(classifiers[name], x)
    for part in (slice(0, 7), slice(1500, 1501)):
        few = GP[name].predict(classifiers[name], x[part])
        for field in ("logits", "variance", "probs"):
            torch.testing.assert_close(getattr(few, field), getattr(whole[part], field), rtol=1e-4, atol=1e-4)


# Random features and inducing points, against the exact process


def test_random_features_tend_to_the_exact_process_as_their_number_to_the_power_of_minus_a_half(
    regression: Task, regressions: dict[str, nn.Module]
):
    method = GP["gp-random-features"]
    exact = GP["gp-exact"].predict(regressions["gp-exact"], regression.grid)
    found = {}
    for number in (64, 1024):
        models = [fit(regression, method, seed=seed, num_random_features=number) for seed in range(4)]
        each = torch.tensor([errors(method.predict(m, regression.grid), exact) for m in models])
        found[number] = each.square().mean(0).sqrt()
    rate = (found[64] / found[1024]).log() / math.log(16)
    assert bool(((rate > 0.3) & (rate < 0.8)).all()), rate
    assert float(found[1024][0]) < 0.1
    assert float(found[1024][1]) < 0.02


def test_inducing_points_that_suffice_give_the_exact_process(regression: Task, regressions: dict[str, nn.Module]):
    """The paper's stays away from the prior between the modes; this one does what the exact process does."""
    exact, sparse = (GP[n].predict(regressions[n], regression.grid) for n in ("gp-exact", "gp-variational"))
    mean, std = errors(sparse, exact)
    assert mean < 0.03
    assert std < 0.03
    few = gp_variational(num_inducing=5, steps=60)
    assert errors(few.predict(fit(regression, few), regression.grid), exact)[1] > 5 * std


# Hamiltonian Monte Carlo


def test_sampler_finds_the_gaussian_posterior(regression: Task, regressions: dict[str, nn.Module]):
    method, model = GP["gp-hmc"], regressions["gp-hmc"]
    exact, sampled = (GP[n].predict(regressions[n], regression.grid) for n in ("gp-exact", "gp-hmc"))
    std, draws = exact.variance.sqrt()[:, None], len(model.draws)
    assert float(((sampled.mean - exact.mean) / std).abs().max()) < 5 / math.sqrt(draws)
    # The standard error of a standard deviation is 1 / sqrt(2 draws) for independent ones.
    assert float((sampled.variance.sqrt() / std - 1).square().mean().sqrt()) < 3 / math.sqrt(2 * draws)
    assert method.predict(model, regression.grid).members is None


@pytest.mark.parametrize("classes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sampler_finds_the_posterior_that_quadrature_gives(classes: int):
    """Two places that know nothing of each other; at each, K independent logits and a few labels."""
    labels = {2: ([0, 0, 1, 1, 0], [1, 1, 1]), 3: ([0, 0, 1, 2, 1], [2, 2, 2])}[classes]
    x = torch.cat([torch.zeros(5, 1), torch.full((3, 1), 30.0)])
    method, train = gp_hmc(draws=150, warmup=50), batches(TensorDataset(x, torch.tensor([*labels[0], *labels[1]])))
    model = method.build(nn.Identity, classes)
    method.finish(model, train, train, Settings(length_scale=1.0))
    between = 0.8  # where the prior's correlation with the first place is exp(-0.32)
    prediction = method.predict(model, torch.tensor([[0.0], [30.0], [between]])).to(torch.float64)

    prior = math.sqrt(model.kernel.output_scale)
    nodes = torch.linspace(-6, 6, 41, dtype=torch.float64)
    values = prior * torch.cartesian_prod(*[nodes] * classes)  # (nodes^K, K): no trick with the common level here
    centred, log_prior = values - values.mean(1, keepdim=True), -0.5 * (values / prior).square().sum(1)
    posteriors = [(log_prior + values.log_softmax(1)[:, seen].sum(1)).softmax(0) for seen in labels]
    error = 4 / math.sqrt(min(float(model.effective_samples), len(model.draws)))  # of a mean, in standard deviations
    for i, weight in enumerate(posteriors):
        probs, mean = weight @ values.softmax(1), weight @ centred
        variance = weight @ (centred - mean).square()
        spread = (weight @ (values.softmax(1) - probs).square()).sqrt()
        assert bool(((prediction.probs[i] - probs).abs() < error * spread).all())
        assert bool(((prediction.logits[i] - mean).abs() < error * variance.sqrt()).all())
        assert bool(((prediction.variance[i] / variance).log().abs() < 2 * error).all())  # twice: tails, squares

    correlation = math.exp(-0.5 * between**2)
    noise = prior * math.sqrt(1 - correlation**2) * standard_normal(classes)
    kept = posteriors[0] > 1e-9
    expected = sum(posteriors[0][kept] @ (correlation * values[kept] + e).softmax(1) for e in noise) / len(noise)
    torch.testing.assert_close(prediction.probs[2], expected, rtol=0, atol=0.025)


def test_sampling_and_optimising_agree_about_two_moons(two_moons: Task, classifiers: dict[str, nn.Module]):
    """The same model by two roads: K functions and inducing points, K - 1 functions and draws."""
    sampled, sparse = (GP[n].predict(classifiers[n], two_moons.grid[::7]) for n in ("gp-hmc", "gp-variational"))
    assert rmse(sampled.probs, sparse.probs) < 0.02
    assert float((sampled.probs - sparse.probs).abs().max()) < 0.1
    assert sampled.members.shape == (120, *sampled.probs.shape)
    torch.testing.assert_close(sampled.members.mean(0), sampled.probs)
    assert float(sampled.score("mutual_information").min()) > -1e-6


def test_chains_agree(regressions: dict[str, nn.Module], classifiers: dict[str, nn.Module]):
    _check_chains(regressions["gp-hmc"])
    _check_chains(classifiers["gp-hmc"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two-moons", "two-ovals", "blobs"])
def test_chains_agree_on_whole_tasks(name: str):
    _check_chains(fit(TASKS[name](0), gp_hmc()))


def _check_chains(model: nn.Module) -> None:
    assert isinstance(model, SampledWeights)
    assert float(model.r_hat) < 1.1
    assert float(model.effective_samples) > 30
    assert float(model.divergences) == 0


# Errors


@names
def test_unfitted_models_and_other_likelihoods_are_refused(name: str):
    method: Method = GP[name]
    with pytest.raises(NotFitted, match=r"call the method's finish"):
        method.predict(method.build(nn.Identity, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="categorical or gaussian targets, got poisson"):
        method.build(nn.Identity, 1, Settings(likelihood="poisson"))


def test_bad_data_is_refused():
    method, y = gp_exact(), torch.tensor([0, 1, 1])
    x = torch.tensor([[0.0], [1.0], [2.0]])

    def finish(x: Tensor, y: Tensor, outputs: int = 2) -> nn.Module:
        model = method.build(nn.Identity, outputs)
        method.finish(model, batches(TensorDataset(x, y)), [])
        return model

    with pytest.raises(ValueError, match=r"floating-point numbers, got torch\.int64"):
        finish(x.long(), y)
    with pytest.raises(ValueError, match="NaN or infinity in 3 of 3 rows"):
        finish(x * torch.nan, y)
    with pytest.raises(ValueError, match="two training inputs that differ, got 3 copies"):
        finish(torch.zeros(3, 1), y)
    with pytest.raises(ValueError, match="targets for 3 outputs, got 2"):
        finish(x, y, outputs=3)
    with pytest.raises(ValueError, match="empty loader"):
        method.finish(method.build(nn.Identity, 2), [], [])
    model = finish(x, y)
    with pytest.raises(ValueError, match="Expected inputs of 1 numbers, got 2"):
        method.predict(model, torch.zeros(1, 2))
    with pytest.raises(RuntimeError, match="size mismatch for mean"):
        method.build(nn.Identity, 3).load_state_dict(model.state_dict())


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="at least one inducing point and step, got 0 and 200"):
        gp_variational(0)
    with pytest.raises(ValueError, match="at least 4 draws, 1 warm-up step and 1 chain, got 3, 100 and 2"):
        gp_hmc(draws=3)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, two_moons: Task):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gpytorch", None)
        with pytest.raises(ImportError, match=r"afield\[gp\]"):
            fit(two_moons, gp_exact())
    monkeypatch.setitem(sys.modules, "pyro", None)
    with pytest.raises(ImportError, match=r"afield\[gp\]"):
        fit(two_moons, gp_hmc())
