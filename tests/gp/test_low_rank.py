"""A low-rank posterior: exact while nothing is left out, and what is left out is bounded."""

import copy
import datetime
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import afield
from afield.deploy.export import export
from afield.deploy.traced import Graph, Inputs
from afield.errors import NotFitted, StaleWarning
from afield.gp.head import GaussianProcessHead
from afield.gp.low_rank import LowRank
from afield.gp.precision import Precision
from afield.methods.stacked import stack
from afield.model.diagnose import variance_error
from afield.model.posterior import downdate, merge, update

few = settings(deadline=None, max_examples=20)
seeds = st.integers(0, 10**6)
N, D, K, RANK = 60, 12, 4, 7


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seed(number), dtype=torch.float64)


def weights_of(n: int, classes: int = K, number: int = 0, sharp: float = 3.0) -> Tensor:
    """p (1 - p) of a network that is sure of most examples."""
    p = (sharp * normal(n, classes, number=number)).softmax(-1)
    return p * (1 - p)


def made(phi: Tensor, weights: Tensor, rank: int = RANK) -> LowRank:
    precision = LowRank(phi.shape[1], weights.shape[1], rank).to(phi.dtype)
    precision.update(phi, weights)
    return precision


def variance(precision: LowRank | Precision, at: Tensor, ridge: float = 0.5, noise: float = 1.0) -> Tensor:
    precision.factor(ridge, noise)
    return precision.variance(at)


def dense(phi: Tensor, weights: Tensor, rank: int, ridge: float, noise: float = 1.0) -> Tensor:
    """Hhat (K, D, D), written out from the definition."""
    shared = (phi * weights.sum(1, keepdim=True)).T @ phi
    result = []
    for w in weights.T:
        top = w.topk(min(rank, len(w))).indices
        kept = torch.zeros_like(w)
        kept[top] = w[top]
        share = (w - kept).sum() / weights.sum()
        data = share * shared + (phi * kept[:, None]).T @ phi
        result.append(ridge * torch.eye(phi.shape[1], dtype=phi.dtype) + data / noise)
    return torch.stack(result)


def same(one: LowRank, two: LowRank, tolerance: float = 1e-12) -> None:
    """The same sums, and the same examples kept, in any order."""
    assert int(one.count) == int(two.count)
    torch.testing.assert_close(one.data, two.data, rtol=0, atol=tolerance)
    torch.testing.assert_close(one.mass, two.mass, rtol=tolerance, atol=0)
    for k in range(one.num_matrices):
        orders = [p.kept_weights[k].argsort(descending=True) for p in (one, two)]
        for name in ("kept_weights", "kept"):
            a, b = (getattr(p, name)[k][order] for p, order in zip((one, two), orders, strict=True))
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def network(number: int = 0, classes: int = K) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, classes)).double()


def model_of(rank: int | None = RANK, classes: int = K, number: int = 0, **options: Any) -> afield.SNGP:
    default = {"num_random_features": 24, "length_scale": 1.5, "ridge": 0.1, "generator": seed(number)}
    options = default | {"variance_features": "same"} | options
    model = afield.sngp(network(number, classes), covariance="per_class", rank=rank, **options)
    nn.init.normal_(model.head.weight, std=3.0, generator=seed(1))
    return model.eval()


def fitted(rank: int | None = RANK, n: int = N, **options: Any) -> afield.SNGP:
    model = model_of(rank, **options)
    afield.fit_posterior(model, normal(n, 3).split(16))
    return model


# What is approximated --------------------------------------------------------------------------------------------


@few
@given(number=seeds, n=st.integers(1, 40), rank=st.integers(1, 30), ridge=st.floats(1e-2, 10), noise=st.floats(0.5, 2))
def test_the_variance_is_that_of_the_definition(number, n, rank, ridge, noise):
    phi, weights, at = normal(n, D, number=number), weights_of(n, number=number), normal(9, D, number=number + 1)
    inverse = torch.linalg.inv(dense(phi, weights, rank, ridge, noise))
    found = variance(made(phi, weights, rank), at, ridge, noise)
    torch.testing.assert_close(found, torch.einsum("nd,kde,ne->nk", at, inverse, at), rtol=1e-9, atol=0)


@few
@given(number=seeds, n=st.integers(1, 30), more=st.integers(0, 20), ridge=st.floats(1e-3, 10))
def test_with_no_more_examples_than_the_rank_it_is_the_exact_posterior(number, n, more, ridge):
    """Ranks above the number of features too."""
    phi, weights, at = normal(n, D, number=number), weights_of(n, number=number), normal(9, D, number=number + 1)
    exact = Precision(D, K).double()
    exact.update(phi, weights)
    torch.testing.assert_close(
        variance(made(phi, weights, n + more), at, ridge), variance(exact, at, ridge), rtol=1e-8, atol=0
    )


def test_a_larger_rank_is_nearer_to_the_exact_posterior():
    at = normal(50, 3, number=9)
    exact = fitted(None, 200).predict(at).variance
    errors = [float((fitted(rank, 200).predict(at).variance / exact - 1).abs().max()) for rank in (1, 20, 100, 200)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-9
    assert errors[0] > 0.02


def test_weights_that_the_kept_examples_lack_are_not_lost():
    """Dropping them would leave the variance too large; the shared matrix puts their weight back, on average."""
    phi, weights, at = normal(400, D), weights_of(400, sharp=1.0), normal(40, D, number=3)
    exact = Precision(D, K).double()
    exact.update(phi, weights)
    approximate = variance(made(phi, weights), at)
    dropped = copy.deepcopy(made(phi, weights))
    dropped.mass.copy_(dropped.kept_weights.sum(1))
    truth = variance(exact, at)
    assert float((approximate / truth - 1).abs().max()) < 0.5 < float((variance(dropped, at) / truth - 1).min())


# One pass, however it is cut ---------------------------------------------------------------------------------------


@few
@given(number=seeds, sizes=st.lists(st.integers(0, 25), min_size=1, max_size=6), rank=st.integers(1, 20))
def test_neither_the_order_nor_the_batches_matter(number, sizes, rank):
    n = sum(sizes) + 1
    phi, weights = normal(n, D, number=number), weights_of(n, number=number)
    order = torch.randperm(n, generator=seed(number))
    streamed = LowRank(D, K, rank).double()
    for rows in order.split([*sizes, 1]):
        streamed.update(phi[rows], weights[rows])
    same(streamed, made(phi, weights, rank))


@few
@given(number=seeds, cut=st.integers(0, N), rank=st.integers(1, 20))
def test_a_merge_has_seen_both(number, cut, rank):
    phi, weights = normal(N, D, number=number), weights_of(N, number=number)
    one, two = (made(phi[part], weights[part], rank) for part in (slice(cut), slice(cut, None)))
    one.merge(two)
    same(one, made(phi, weights, rank))


def test_merging_what_is_empty_changes_nothing_and_fills_what_is_empty():
    full = made(normal(N, D), weights_of(N))
    one, empty = copy.deepcopy(full), LowRank(D, K, RANK).double()
    one.merge(empty)
    same(one, full)
    empty.merge(full)
    same(empty, full)


def test_memory_does_not_grow_with_the_examples():
    precision = made(normal(N, D), weights_of(N))
    before = sum(t.nbytes for t in precision.buffers())
    for number in range(20):
        precision.update(normal(N, D, number=number), weights_of(N, number=number))
    assert sum(t.nbytes for t in precision.buffers()) == before
    assert int(precision.count) == 21 * N


def test_weights_of_none_are_ones_and_fast_products_are_those_of_float32():
    phi = normal(5, D)
    same(made(phi, torch.ones(5, 2).double()), _updated(LowRank(D, 2, RANK).double(), phi, None))
    single = normal(300, D).float()
    slow, fast = (_updated(LowRank(D, 2, RANK), single, None, fast=fast) for fast in (False, True))
    torch.testing.assert_close(slow.data, fast.data, rtol=1e-5, atol=1e-4)
    assert not torch.equal(slow.data, fast.data)


def _updated(precision: LowRank, phi: Tensor, weights: Tensor | None, **options: bool) -> LowRank:
    precision.update(phi, weights, **options)
    return precision


def test_update_and_merge_of_models_are_a_refit_on_both():
    x, whole = normal(N, 3), fitted()
    first, second = model_of(), model_of()
    afield.fit_posterior(first, [x[:20]])
    merged = copy.deepcopy(first)
    assert update(first, x[20:].split(9)) == N
    same(first.head.precision, whole.head.precision)
    afield.fit_posterior(second, [x[20:]])
    assert merge(merged, second) == N
    same(merged.head.precision, whole.head.precision)
    torch.testing.assert_close(merged.predict(x).variance, whole.predict(x).variance, rtol=1e-9, atol=0)


def _rank_of_a_group(rank: int, store: str, results: str, n: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=120)
    )
    model = model_of()
    parts = [normal(n, 3)[:0], normal(n, 3)] if n == 5 else [normal(n, 3)[0::2], normal(n, 3)[1::2]]
    afield.fit_posterior(model, [part for part in parts[rank].split(8) if len(part)], sharded=True)
    torch.save(model.state_dict(), f"{results}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("n", [61, 5])
def test_two_processes_are_one(n: int, tmp_path: Path) -> None:
    """With 5 examples one of the ranks has none."""
    mp.spawn(_rank_of_a_group, args=(str(tmp_path / "store"), str(tmp_path), n), nprocs=2)
    alone = fitted(n=n)
    for rank in range(2):
        found = model_of()
        found.load_state_dict(torch.load(tmp_path / f"{rank}.pt"))
        same(found.head.precision, alone.head.precision, 1e-10)
        x = normal(20, 3, number=4)
        torch.testing.assert_close(found.predict(x).variance, alone.predict(x).variance, rtol=1e-10, atol=0)


# Float32 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ridge", [1.0, 1e-1, 1e-2, 2e-3, 1e-5, 1e-8])
def test_float32_has_three_digits_however_small_the_variance_is_against_its_first_term(ridge):
    """40 examples in a heap: next to it the difference is 1e-1 to 1e-9 of what it is taken from."""
    phi = (0.05 * normal(40, D) + 1) / math.sqrt(D)
    weights, at = torch.full((40, 2), 0.25).double(), torch.cat([phi[:9], normal(9, D, number=1)])
    exact, single = made(phi.float().double(), weights, 40), made(phi.float(), weights.float(), 40)
    found = variance(single, at.float(), ridge)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), variance(exact, at.float().double(), ridge), rtol=1e-3, atol=0)
    assert single.root.dtype == (torch.float32 if ridge > 1e-3 else torch.float64)


@few
@given(number=seeds, ridge=st.floats(1e-6, 10), heavy=st.floats(1, 1e6))
def test_the_variance_is_positive_and_at_most_that_of_the_prior(number, ridge, heavy):
    phi, weights = normal(30, D, number=number).float(), heavy * weights_of(30, number=number).float()
    found = variance(made(phi, weights, 10), phi, ridge)
    assert bool((found > 0).all())
    assert bool((found <= phi.square().sum(1, keepdim=True) / ridge * 1.001).all())


def test_a_factor_in_float64_survives_conversions_and_a_saved_state():
    phi, weights = normal(30, D).float(), 100 * weights_of(30).float()
    precision = made(phi, weights, 30)
    before = variance(precision, phi, 1e-5)
    assert precision.root.dtype == torch.float64
    assert torch.equal(precision.float().variance(phi), before)
    other = LowRank(D, K, 30)
    other.load_state_dict(precision.state_dict())
    assert torch.equal(other.variance(phi), before)


# State -------------------------------------------------------------------------------------------------------------


def test_nothing_before_a_fit_and_nothing_after_a_reset():
    model, x = model_of(), normal(5, 3)
    with pytest.raises(NotFitted, match="fit_posterior"):
        model.predict(x)
    with pytest.raises(NotFitted, match="call factor"):
        LowRank(D, K, RANK).variance(normal(2, D))
    afield.fit_posterior(model, [normal(N, 3)])
    model.head.reset_posterior()
    assert model.head.num_observed == 0
    assert not float(model.head.precision.mass.sum())
    with pytest.raises(NotFitted, match="fit_posterior"):
        model.predict(x)
    afield.fit_posterior(model, normal(N, 3).split(16))
    same(model.head.precision, fitted().head.precision)


def test_a_new_ridge_is_a_new_factor():
    model, x = fitted(), normal(5, 3)
    before = model.predict(x).variance
    model.head.set_scalars(ridge=5.0)
    torch.testing.assert_close(model.predict(x).variance, fitted(ridge=5.0).predict(x).variance, rtol=1e-10, atol=0)
    assert bool((model.predict(x).variance < before).all())


@pytest.mark.parametrize("factored", [True, False])
def test_a_saved_model_is_the_model(factored: bool, tmp_path: Path) -> None:
    model, x = fitted().float(), normal(5, 3).float()
    wanted = model.predict(x).variance
    if not factored:
        model.head.precision.stale()
    afield.save(model, tmp_path)
    loaded = afield.load(tmp_path, network(9).float())
    same(loaded.head.precision, model.head.precision, 0)
    assert torch.equal(loaded.predict(x).variance, wanted)
    unfitted = model_of()
    model_of().load_state_dict(unfitted.state_dict())


def test_copies_and_dtypes():
    model, x = fitted(), normal(5, 3)
    wanted = model.predict(x).variance
    assert torch.equal(copy.deepcopy(model).predict(x).variance, wanted)
    single = copy.deepcopy(model).float()
    assert single.head.precision.data.dtype == single.head.precision.mass.dtype == torch.float64
    assert single.head.precision.kept.dtype == torch.float32
    torch.testing.assert_close(single.predict(x.float()).variance.double(), wanted, rtol=1e-4, atol=0)
    kept = single.head.precision.kept.clone()
    assert torch.equal(single.half().head.precision.kept, kept)
    back = single.double()
    assert back.head.precision.kept.dtype == torch.float64
    with pytest.warns(StaleWarning):  # half precision has changed the weights
        again = back.predict(x).variance
    torch.testing.assert_close(again, wanted, rtol=2e-3, atol=0)


def test_the_variance_has_gradients():
    model, x = fitted(), normal(3, 3).requires_grad_()
    h = model.hidden(x)
    assert torch.autograd.gradcheck(lambda z: model.head.posterior(z)[1], (h.detach().requires_grad_(),))


def test_nan_gives_nan():
    bad = normal(2, D)
    bad[0, 3] = math.nan
    precision = made(normal(N, D), weights_of(N))
    found = variance(precision, bad)
    assert bool(found[0].isnan().all())
    assert bool(found[1].isfinite().all())


def test_a_graph_and_a_stack_answer_as_the_model_does():
    model, x = fitted(number=2), normal(6, 3)
    single = copy.deepcopy(model).float()
    graph = Graph(single, Inputs.of(single.net, (x.float(),)))
    assert not graph.head.precision.fitted
    program = torch.export.export(
        graph, (x.float(),), dynamic_shapes={"tensors": ({0: torch.export.Dim.AUTO},)}, strict=False
    )
    for rows in (x.float(), normal(11, 3).float()):
        found = program.module()(rows)["variance"]
        torch.testing.assert_close(found, single.predict(rows).variance, rtol=1e-5, atol=0)
    members = [model, fitted(number=3)]
    both = stack(members).predict(x)
    for one, probs in zip(members, both.members, strict=True):
        torch.testing.assert_close(probs, one.predict(x).probs, rtol=1e-10, atol=0)
    assert model.head.precision.fitted


@pytest.mark.slow
@pytest.mark.parametrize("heavy", [False, True])
def test_an_onnx_file_answers_as_the_model_does(heavy: bool, tmp_path: Path) -> None:
    """`export` compares the two; a factor that is kept in float64 is exported as such."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="ONNX files need the extra afield[onnx]")
    model = fitted(N, ridge=1e-6 if heavy else 0.1).float()
    model.head.factor()
    assert model.head.precision.root.dtype == (torch.float64 if heavy else torch.float32)
    done = export(model, tmp_path / "model.onnx", normal(5, 3).float())
    assert done.agreement.everywhere["variance"] < 1e-4 * float(model.predict(normal(5, 3).float()).variance.max())


# What is refused ---------------------------------------------------------------------------------------------------


def test_nothing_can_be_removed():
    with pytest.raises(ValueError, match=r"Cannot remove examples from a low-rank posterior \(rank=7\).*rank=None"):
        downdate(fitted(), [normal(5, 3)])
    with pytest.raises(ValueError, match="Cannot remove"):
        made(normal(N, D), weights_of(N)).update(normal(1, D), -weights_of(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"covariance": "shared"}, 'covariance="per_class"'),
        ({"likelihood": "bernoulli", "out_features": 1}, "several outputs"),
        ({"likelihood": "gaussian"}, 'covariance="shared" with rank=None'),
        ({"curvature": "unit"}, 'covariance="shared" with rank=None'),
        ({"momentum": 0.9}, "moving average.*rank=None"),
        ({"rank": 0}, "positive number of examples"),
    ],
)
def test_what_a_low_rank_is_not_for(options, message):
    options = {"out_features": 3, "covariance": "per_class", "rank": 8} | options
    with pytest.raises(ValueError, match=message):
        GaussianProcessHead(4, **options)


def test_other_shapes_and_kinds_are_told():
    precision, exact = made(normal(N, D), weights_of(N)), Precision(D, K).double()
    with pytest.raises(ValueError, match=r"weights must have shape \(5, 4\), got \(5, 3\)"):
        precision.update(normal(5, D), weights_of(5, 3))
    with pytest.raises(ValueError, match=r"\(4, 12, 7\) and \(4, 12, 8\)"):
        precision.merge(LowRank(D, K, 8))
    with pytest.raises(ValueError, match="with an exact one"):
        precision.merge(exact)
    with pytest.raises(ValueError, match="with a low-rank one"):
        exact.merge(precision)


# The bound -----------------------------------------------------------------------------------------------------------


def norms(model: afield.SNGP, x: Tensor) -> Tensor:
    """|M_k|, written out."""
    head = model.head
    phi, p = head.features(model.hidden(x)).detach(), model(x).softmax(-1).detach()
    weights, ridge = p * (1 - p), float(head.ridge)
    result = []
    for k, approximate in enumerate(dense(phi, weights, head.precision.rank, ridge)):
        exact = (phi * weights[:, k, None]).T @ phi + ridge * torch.eye(phi.shape[1], dtype=phi.dtype)
        lower = torch.linalg.cholesky(approximate)
        m = torch.linalg.solve_triangular(lower, exact - approximate, upper=False)
        m = torch.linalg.solve_triangular(lower, m.T, upper=False)
        result.append(torch.linalg.eigvalsh((m + m.T) / 2).abs().max())
    return torch.stack(result)


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("ridge", [1.0, 0.01])
def test_the_bound_holds_and_is_close(number, ridge):
    """At 0.999 none of these 24 may fail; a bound of half its value would."""
    x = normal(150, 3)
    model, exact = (fitted(rank, 150, number=number, ridge=ridge) for rank in (RANK, None))
    bound, true = variance_error(model, list(x.split(40)), seed=number), norms(model, x)
    assert bound.shape == (K,)
    assert bool((bound >= true).all())
    assert bool((bound <= 3 * true).all())
    at = 3 * normal(2000, 3, number=8)
    truth = exact.predict(at).variance
    errors = ((model.predict(at).variance - truth).abs() / truth).amax(0)
    assert bool((errors <= true * (1 + 1e-9)).all())
    assert bool((errors > 0).all())


def test_more_steps_and_less_probability_make_a_smaller_bound():
    x, model = [normal(150, 3)], fitted(n=150)
    assert bool((variance_error(model, x, steps=40) < variance_error(model, x, steps=3)).all())
    assert bool((variance_error(model, x, probability=0.5) < variance_error(model, x)).all())
    torch.testing.assert_close(variance_error(model, x, steps=150), norms(model, x[0]), rtol=0.05, atol=0)


def test_without_anything_left_out_the_bound_is_rounding():
    assert float(variance_error(fitted(rank=N), [normal(N, 3)]).max()) < 1e-12


def test_the_bound_leaves_the_model_as_it_was():
    model = fitted()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    variance_error(model, [normal(N, 3)])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_what_the_bound_cannot_be_asked():
    x = [normal(N, 3)]
    with pytest.raises(ValueError, match="exact one"):
        variance_error(fitted(None), x)
    with pytest.raises(NotFitted, match="fit_posterior"):
        variance_error(model_of(), x)
    with pytest.raises(ValueError, match=r"expects the 60 examples of the posterior, got 50"):
        variance_error(fitted(), [x[0][:50]])
    with pytest.raises(ValueError, match="probability"):
        variance_error(fitted(), x, probability=1.0)
