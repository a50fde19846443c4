"""fit_head: the one maximum of the posterior of the output weights, on a backbone that stays as it is."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import afield
from afield.errors import NotFitted
from afield.model import output_weights

few = settings(deadline=None, max_examples=30)
LIKELIHOODS = ("categorical", "bernoulli", "gaussian", "poisson")
NLL = {
    "categorical": lambda f, y: F.cross_entropy(f, y, reduction="sum"),
    "bernoulli": lambda f, y: F.binary_cross_entropy_with_logits(f[:, 0], y.double(), reduction="sum"),
    "gaussian": lambda f, y: 0.5 * (f - y).square().sum(),
    "poisson": lambda f, y: -torch.distributions.Poisson(f.exp()).log_prob(y).sum(),
}


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seed(number), dtype=torch.float64)


def make(likelihood: str = "categorical", **options: Any) -> afield.SNGP:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1 if likelihood == "bernoulli" else 3)
        )
    net[1].running_mean.normal_(generator=seed(3))
    options = {"num_random_features": 32, "length_scale": 1.0, "generator": seed()} | options
    return afield.sngp(net.double().eval(), bound=None, freeze=True, likelihood=likelihood, **options)


def problem(likelihood: str = "categorical", n: int = 150, number: int = 0) -> tuple[Tensor, Tensor]:
    x = normal(n, 3, number=number)
    f = 2 * torch.sin(x @ normal(3, 3, number=number + 1))
    y = {
        "categorical": lambda: torch.multinomial(F.softmax(f, -1), 1, generator=seed(number)).squeeze(1),
        "bernoulli": lambda: torch.bernoulli(torch.sigmoid(f[:, 0]), generator=seed(number)).long(),
        "gaussian": lambda: f + 0.3 * normal(n, 3, number=number + 2),
        "poisson": lambda: torch.poisson(f.exp(), generator=seed(number)),
    }[likelihood]()
    return x, y


def gradient(model: afield.SNGP, x: Tensor, y: Tensor) -> float:
    """The norm of the gradient of the negative log posterior in output weights and constant, by autograd in float64,
    relative to that at zero weights."""
    head = copy.deepcopy(model.head).double()
    h = model.hidden(x).detach().double()
    y = y.double() if head.likelihood in ("gaussian", "poisson") else y
    parameters = [p for p in (head.weight, head.constant) if p is not None]

    def norm() -> float:
        loss = NLL[head.likelihood](head(h), y) / head.noise + 0.5 * head.ridge * head.weight.square().sum()
        return float(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]).norm())

    here = norm()
    for parameter in parameters:
        nn.init.zeros_(parameter)
    return here / norm()


# The optimum -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_gradient_vanishes_at_the_solution(likelihood, constant):
    model, (x, y) = make(likelihood, constant=constant), problem(likelihood)
    assert gradient(model, x, y) == 1
    found = afield.fit_head(model, [(x, y)], tolerance=1e-8)
    assert gradient(model, x, y) < 2e-8
    assert found.gradient == pytest.approx(gradient(model, x, y), rel=1e-3, abs=1e-12)
    assert found.num_examples == 150


@few
@given(
    likelihood=st.sampled_from(LIKELIHOODS),
    constant=st.booleans(),
    ridge=st.floats(0.01, 30),
    n=st.integers(2, 120),
    scale=st.floats(0.2, 5),
    number=st.integers(0, 1000),
)
@example("bernoulli", True, 0.3887, 106, 3.176, 166)  # well conditioned nowhere but in whitened coordinates
def test_the_default_tolerance_is_met_on_every_problem(likelihood, constant, ridge, n, scale, number):
    model = make(likelihood, constant=constant, ridge=ridge, length_scale=scale)
    x, y = problem(likelihood, n, number)
    found = afield.fit_head(model, [(x, y)])
    assert gradient(model, x, y) <= 1.01e-4
    assert found.gradient <= 1.01e-4


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_reported_loss_is_the_objective_an_example(likelihood):
    model, (x, y) = make(likelihood), problem(likelihood)
    found = afield.fit_head(model, [(x, y)])
    nll = NLL[likelihood](model(x).detach(), y)
    if likelihood == "poisson":  # without the part that the weights cannot change
        nll = nll - torch.lgamma(y + 1).sum()
    penalty = 0.5 * model.head.weight.detach().square().sum()
    assert found.loss == pytest.approx(float(nll / model.head.noise + penalty) / 150, rel=1e-9)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_batches_and_start_do_not_matter(likelihood):
    x, y = problem(likelihood)
    one, two = make(likelihood), make(likelihood)
    nn.init.normal_(two.head.weight, generator=seed(5))
    afield.fit_head(one, [(x, y)], tolerance=1e-9)
    afield.fit_head(two, list(zip(x.split(11), y.split(11), strict=True)), tolerance=1e-9)
    torch.testing.assert_close(one(x), two(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_a_second_call_ends_at_once(likelihood):
    model, (x, y) = make(likelihood, constant=True), problem(likelihood)
    first = afield.fit_head(model, [(x, y)])
    before = model(x).detach()
    second = afield.fit_head(model, [(x, y)])
    assert second.iterations <= 2 <= first.iterations
    torch.testing.assert_close(model(x), before, rtol=0, atol=1e-2)


# Against other solvers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [0.1, 2.0])
def test_regression_is_ridge_regression_and_the_gaussian_process_mean(ridge):
    model, (x, y) = make("gaussian", ridge=ridge), problem("gaussian")
    afield.fit_head(model, [(x, y)])
    phi, noise = model.head.features(model.hidden(x)).detach(), float(model.head.noise)
    eye = torch.eye(32, dtype=torch.float64)
    weight = torch.linalg.solve(phi.T @ phi + ridge * noise * eye, phi.T @ y)
    torch.testing.assert_close(model.head.weight.T, weight, rtol=0, atol=1e-9)

    new = model.head.features(model.hidden(normal(20, 3, number=8))).detach()
    kernel = phi @ phi.T / ridge + noise * torch.eye(150, dtype=torch.float64)
    mean = new @ phi.T / ridge @ torch.linalg.solve(kernel, y)
    torch.testing.assert_close(model(normal(20, 3, number=8)), mean, rtol=0, atol=1e-9)


@pytest.mark.parametrize("ridge", [0.1, 2.0])
@pytest.mark.parametrize("constant", [False, True])
def test_the_noise_is_at_its_fixed_point(ridge, constant):
    """s^2 = RSS / (n - effective parameters); fitting the posterior afterwards finds the same."""
    model, (x, y) = make("gaussian", ridge=ridge, constant=constant), problem("gaussian")
    afield.fit_head(model, [(x, y)])
    noise = float(model.head.noise)
    phi = model.head.features(model.hidden(x)).detach()
    gram = phi.T @ phi
    used = torch.trace(torch.linalg.solve(gram + ridge * noise * torch.eye(32, dtype=torch.float64), gram))
    squares = (y - model(x).detach()).square().sum(0).log().mean().exp()  # over outputs, each of which has its own
    assert noise == pytest.approx(float(squares / (150 - used)), rel=1e-6)
    afield.fit_posterior(model, [(x, y)])
    assert float(model.head.noise) == pytest.approx(noise, rel=1e-6)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
@pytest.mark.parametrize("ridge", [0.05, 1.0])
def test_classification_is_scikit_learns_logistic_regression(likelihood, constant, ridge):
    model, (x, y) = make(likelihood, constant=constant, ridge=ridge), problem(likelihood)
    afield.fit_head(model, [(x, y)], tolerance=1e-8)
    phi = model.head.features(model.hidden(x)).detach().numpy()
    reference = LogisticRegression(C=1 / ridge, fit_intercept=constant, tol=1e-10, max_iter=10_000)
    expected = reference.fit(phi, y.numpy()).predict_proba(phi)
    afield.fit_posterior(model, [x])
    model.head.set_scalars(amplitude=1e-9)
    torch.testing.assert_close(model.predict(x).probs, torch.from_numpy(expected), rtol=0, atol=1e-5)


# Hard cases ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_features_that_are_nearly_copies_of_each_other(likelihood):
    """A long length scale and a small ridge: the condition number of the Gram matrix is beyond 1e9."""
    model, (x, y) = make(likelihood, length_scale=50.0, ridge=1e-6, constant=True), problem(likelihood)
    phi = model.head.features(model.hidden(x)).detach()
    values = torch.linalg.eigvalsh(phi.T @ phi + 1e-6 * torch.eye(32, dtype=torch.float64))
    assert float(values[-1] / values[0]) > 1e7
    found = afield.fit_head(model, [(x, y)])
    assert gradient(model, x, y) <= 1.01e-4
    assert math.isfinite(found.loss)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_separable_classes_with_a_small_ridge(likelihood):
    x = normal(100, 3)
    y = (x[:, 0] > 0).long()
    model = make(likelihood, ridge=1e-3)
    afield.fit_head(model, [(x, y)])
    assert gradient(model, x, y) <= 1.01e-4
    assert bool(torch.isfinite(model(x)).all())


@pytest.mark.parametrize("constant", [False, True])
def test_where_all_examples_bend_alike_the_preconditioner_is_exact(constant, monkeypatch):
    """At zero weights every p (1 - p) of a Bernoulli is 1/4: one product solves the first Newton step."""
    products, solved = [], output_weights._conjugate_gradients

    def counted(operator, *rest):
        products.append(0)

        def counting(x):
            products[-1] += 1
            return operator(x)

        return solved(counting, *rest)

    monkeypatch.setattr(output_weights, "_conjugate_gradients", counted)
    model = make("bernoulli", constant=constant, ridge=0.3)
    for parameter in (model.head.weight, model.head.constant):
        if parameter is not None:
            nn.init.zeros_(parameter)
    afield.fit_head(model, [problem("bernoulli")])
    assert products[0] == 1
    assert max(products) > 1


@settings(max_examples=30, deadline=None)
@given(number=st.integers(0, 10_000), size=st.integers(1, 12))
def test_conjugate_gradients_solve_with_any_preconditioner(number, size):
    root = normal(size, size, number=number)
    matrix, right = root @ root.T + torch.eye(size).double(), normal(size, 2, number=number + 1)
    diagonal = normal(size, 2, number=number + 2).exp()
    found = output_weights._conjugate_gradients(lambda x: matrix @ x, right, diagonal, 1e-10)
    torch.testing.assert_close(found, torch.linalg.solve(matrix, right), rtol=1e-6, atol=1e-8)


def test_large_counts_do_not_overflow():
    x = normal(100, 3)
    y = torch.poisson(torch.exp(8 + x), generator=seed())
    model = make("poisson", constant=True, ridge=0.1)
    afield.fit_head(model, [(x, y)])
    assert gradient(model, x, y) <= 1.01e-4
    assert float((model(x).exp().mean() / y.mean()).detach()) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_one_example_is_enough_and_a_class_may_be_absent(likelihood):
    x, y = problem(likelihood, 1)
    model = make(likelihood)
    afield.fit_head(model, [(x, y)])
    assert bool(torch.isfinite(model.head.weight).all())


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_single_precision_gives_the_same_model(likelihood, constant):
    x, y = problem(likelihood)
    exact, single = make(likelihood, constant=constant), make(likelihood, constant=constant).float()
    afield.fit_head(exact, [(x, y)])
    single_y = y.float() if y.is_floating_point() else y
    found = afield.fit_head(single, [(x.float(), single_y)])
    assert single.head.weight.dtype == torch.float32
    assert found.gradient < 1e-3
    torch.testing.assert_close(single(x.float()).double(), exact(x), rtol=0, atol=5e-3)


# The model around it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_the_backbone_its_modes_and_what_trains_stay(likelihood):
    model = make(likelihood, constant=True).train()
    model.net[1].eval()
    modes = [m.training for m in model.modules()]
    trains = {name: p.requires_grad for name, p in model.named_parameters()}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    afield.fit_head(model, [problem(likelihood)])
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v.nan_to_num(7), before[k].nan_to_num(7))}
    assert changed - {"net.3.noise"} == {"net.3.weight", "net.3.constant"}
    assert [m.training for m in model.modules()] == modes
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trains
    assert {name for name, trained in trains.items() if trained} == {"net.3.weight", "net.3.constant"}
    assert all(p.grad is None for p in model.parameters())


def test_the_length_scale_is_found_first_where_there_is_none():
    model, (x, y) = make(length_scale=None), problem()
    afield.fit_head(model, [(x, y)])
    assert model.head.random_features.adapted
    scale = float(model.head.random_features.length_scale)
    afield.fit_posterior(model, [x])
    assert float(model.head.random_features.length_scale) == scale
    assert gradient(model, x, y) <= 1.01e-4


def test_an_old_posterior_goes_because_it_belonged_to_other_weights():
    model, (x, y) = make(), problem()
    afield.fit_posterior(model, [x])
    afield.fit_head(model, [(x, y)])
    with pytest.raises(NotFitted, match="fit_posterior"):
        model.predict(x)


def test_a_trained_network_gets_a_head_that_predicts_as_well():
    """The three lines of the documentation."""
    x, y = problem(n=400)
    model = make(length_scale=None)
    afield.fit_head(model, [(x, y)])
    afield.fit_posterior(model, [(x, y)])
    p = model.predict(x)
    majority = float((y == y.mode().values).double().mean())
    assert float((p.labels == y).double().mean()) > majority + 0.1


# Errors ----------------------------------------------------------------------------------------------------------


def test_a_kept_output_layer_has_no_weights_to_fit():
    with pytest.raises(ValueError, match=r"afield\.attach"):
        afield.fit_head(afield.attach(nn.Linear(3, 3)), [problem()])


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ([], "empty"),
        ([normal(30, 3)], "without a target"),
        ([(normal(30, 3), torch.arange(30) % 3 + 1)], "numbered from 1"),
        ([(normal(30, 3) * math.nan, torch.arange(30) % 3)], "must be finite"),
        ([(normal(30, 3), torch.arange(20) % 3)], "30"),
    ],
)
@pytest.mark.parametrize("scale", [1.0, None])
def test_bad_data_is_refused_and_leaves_the_weights(loader, message, scale):
    model = make(length_scale=scale)
    with pytest.raises(ValueError, match=message):
        afield.fit_head(model, loader)
    assert not bool(model.head.weight.any())
    assert model.head.weight.requires_grad


def test_targets_of_another_width_are_refused():
    with pytest.raises(ValueError, match="3 outputs, the targets have 1 columns"):
        afield.fit_head(make("gaussian"), [(normal(30, 3), normal(30))])
