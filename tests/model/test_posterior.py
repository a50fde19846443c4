"""The posterior pass: every example once, whatever the loader, the batches, the order and the number of processes."""

import copy
import datetime
import os
import re
import signal
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset, TensorDataset

import afield
from afield.errors import LostRank, NotFitted, OtherTargets
from afield.experiment.launch import disconnect
from afield.model import hidden
from afield.model.posterior import downdate, merge, update

few = settings(deadline=None, max_examples=15)
LIKELIHOODS = ("categorical", "bernoulli", "gaussian", "poisson")


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seed(number), dtype=torch.float64)


def network(outputs: int = 3) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def make(likelihood: str = "categorical", **options: Any) -> afield.SNGP:
    """A float64 model with output weights off zero, so that the likelihood's curvature differs between examples."""
    default = {"num_random_features": 24, "length_scale": 1.5, "generator": seed(), "ridge": 0.1}
    options = default | {"variance_features": "same"} | options
    model = afield.sngp(network(1 if likelihood == "bernoulli" else 3), likelihood=likelihood, **options)
    nn.init.normal_(model.head.weight, generator=seed(1))
    return model


def attached(**options: Any) -> afield.SNGP:
    default = {"num_random_features": 24, "generator": seed(), "ridge": 0.1, "geometry": "standardized"}
    return afield.attach(network(), **default | options)


def variance(model: afield.SNGP) -> Tensor:
    found = model.predict(normal(20, 3, number=9)).variance
    assert found is not None
    return found


def same(one: afield.SNGP, two: afield.SNGP, tolerance: float = 1e-10) -> None:
    """The same data term, count, scalars and variance."""
    assert one.head.num_observed == two.head.num_observed
    for name in ("noise", "ridge"):
        torch.testing.assert_close(getattr(one.head, name), getattr(two.head, name), rtol=tolerance, atol=0)
    torch.testing.assert_close(one.head.precision.data, two.head.precision.data, rtol=0, atol=tolerance)
    torch.testing.assert_close(variance(one), variance(two), rtol=tolerance, atol=0)


def fitted(model: afield.SNGP, loader: Any, **options: Any) -> afield.SNGP:
    model = copy.deepcopy(model)
    afield.fit_posterior(model, loader, **options)
    return model


# One sum, however it is cut --------------------------------------------------------------------------------------


@few
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    number=st.integers(0, 1000),
    name=st.sampled_from(LIKELIHOODS),
)
def test_neither_the_batches_nor_the_order_matter(sizes, number, name):
    x = normal(sum(sizes), 3)
    model = make(name, curvature="likelihood")
    shuffled = x[torch.randperm(len(x), generator=seed(number))]
    same(fitted(model, [x]), fitted(model, list(shuffled.split(sizes))))


@few
@given(sizes=st.lists(st.integers(1, 30), min_size=2, max_size=8), number=st.integers(0, 1000))
def test_nor_do_they_for_the_standardisation_and_the_length_scale(sizes, number):
    x = normal(sum(sizes), 3)
    shuffled = x[torch.randperm(len(x), generator=seed(number))]
    same(fitted(attached(), [x]), fitted(attached(), list(shuffled.split(sizes))), 1e-8)


class Dictionaries(Dataset[dict[str, Tensor]]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input": self.x[i], "labels": torch.tensor(0)}


LOADERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "bare tensors": lambda x, y: list(x.split(16)),
    "one-tuples": lambda x, y: [(part,) for part in x.split(16)],
    "pairs": lambda x, y: list(zip(x.split(16), y.split(16), strict=True)),
    "lists": lambda x, y: [[a, b] for a, b in zip(x.split(16), y.split(16), strict=True)],
    "dictionaries": lambda x, y: [{"input": a, "labels": b} for a, b in zip(x.split(16), y.split(16), strict=True)],
    "dictionary and target": lambda x, y: [({"input": a}, b) for a, b in zip(x.split(16), y.split(16), strict=True)],
    "names as targets": lambda x, y: [(part, [f"{i}.png" for i in range(len(part))]) for part in x.split(16)],
    "generator": lambda x, y: (part for part in x.split(16)),
    "DataLoader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=16),
    "shuffled DataLoader": lambda x, y: DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True),
    "DataLoader without targets": lambda x, y: DataLoader(TensorDataset(x), batch_size=16),
    "DataLoader of dictionaries": lambda x, y: DataLoader(Dictionaries(x), batch_size=16),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("build", [make, attached])
def test_every_kind_of_loader_gives_the_same_posterior(kind, build):
    x, y = normal(50, 3), torch.zeros(50, dtype=torch.long)
    same(fitted(build(), [x]), fitted(build(), LOADERS[kind](x, y)))


@pytest.mark.parametrize("build", [make, attached])
def test_fitting_twice_is_fitting_once_and_forgets_what_was_there(build):
    x = normal(60, 3)
    once = fitted(build(), [x])
    same(once, fitted(once, [x]))
    model = make()
    same(fitted(model, [x]), fitted(fitted(model, [5 * normal(40, 3, number=3)]), [x]))


def test_the_number_of_examples_comes_back():
    model = make()
    assert afield.fit_posterior(model, [normal(30, 3), normal(7, 3)]) == 37 == model.head.num_observed


def test_the_data_term_is_the_weighted_sum_over_all_examples():
    x, model = normal(45, 3), make("categorical", curvature="likelihood")
    afield.fit_posterior(model, x.split(10))
    h = model.hidden(x)
    p = F.softmax(model(x), dim=-1).amax(-1)
    phi = model.head.features(h)
    torch.testing.assert_close(model.head.precision.data[0], (phi * (p * (1 - p))[:, None]).T @ phi, rtol=0, atol=1e-12)


def test_training_leaves_the_posterior_empty():
    """Accumulation inside forward would count every example once for each epoch, with weights long gone."""
    model, x, y = make(), normal(32, 3), torch.arange(32) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert model.head.num_observed == 0
    with pytest.raises(NotFitted, match="fit_posterior"):
        model.predict(x)
    assert afield.fit_posterior(model, [x]) == 32
    model.train()
    model(x)
    model.eval()
    model(x)
    assert model.head.num_observed == 32


@few
@given(number=st.integers(0, 1000), ridge=st.floats(0.5, 2))
def test_fast_products_are_close_and_not_exact(number, ridge):
    x = normal(500, 3, number=number).float()
    model = make(ridge=ridge).float()
    exact, fast = (fitted(model, x.split(64), fast=fast) for fast in (False, True))
    at = normal(20, 3, number=9).float()
    torch.testing.assert_close(fast.predict(at).variance, exact.predict(at).variance, rtol=2e-3, atol=0)
    assert not torch.equal(fast.head.precision.data, exact.head.precision.data)


# What a loader may do wrong --------------------------------------------------------------------------------------


def test_drop_last_is_told():
    loader = DataLoader(TensorDataset(normal(50, 3)), batch_size=16, drop_last=True)
    with pytest.warns(UserWarning, match=r"saw 48 examples, the data set has 50.*drop_last=False"):
        assert afield.fit_posterior(make(), loader) == 48


def test_a_padding_sampler_is_told():
    data = TensorDataset(normal(51, 3))
    sampler = torch.utils.data.RandomSampler(data, num_samples=60, replacement=True)
    with pytest.warns(UserWarning, match="saw 60 examples, the data set has 51"):
        afield.fit_posterior(make(), DataLoader(data, batch_size=16, sampler=sampler))


@pytest.mark.parametrize("build", [make, attached])
def test_an_empty_loader_is_refused_and_leaves_no_posterior(build):
    model = build()
    with pytest.raises(ValueError, match="empty"):
        afield.fit_posterior(model, [])
    with pytest.raises(NotFitted):
        model.predict(normal(2, 3))


def test_an_exhausted_generator_is_refused():
    stream: Iterator[Tensor] = iter(normal(40, 3).split(8))
    assert afield.fit_posterior(make(), stream) == 40
    with pytest.raises(ValueError, match="empty"):
        afield.fit_posterior(make(), stream)


def test_a_generator_that_is_too_large_to_keep_is_refused_rather_than_half_read(monkeypatch):
    monkeypatch.setattr(hidden, "_CACHE_BYTES", 0)
    with pytest.raises(ValueError, match=r"empty|twice|once"):
        afield.fit_posterior(attached(), iter(normal(40, 3).split(8)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_hidden_vectors_are_named_and_not_added(bad):
    x = normal(40, 3)
    x[[21, 25]] = bad
    model = make(bound=None)
    model.net[1] = nn.Identity()  # tanh would hide an infinity
    with pytest.raises(ValueError, match=r"2 of 20 rows \(first: \[1, 5\]\).*Nothing of this batch was added"):
        afield.fit_posterior(model, x.split(20))


def test_bad_hidden_vectors_are_named_where_the_length_scale_is_still_to_be_found():
    x = normal(40, 3)
    x[[21, 25]] = float("nan")
    with pytest.raises(ValueError, match=r"2 of 20 rows \(first: \[1, 5\]\)"):
        afield.fit_posterior(attached(), x.split(20))


def test_a_pass_that_fails_leaves_no_half_fitted_posterior():
    x = normal(40, 3)
    x[21] = float("nan")
    model = make()
    with pytest.raises(ValueError, match="finite"):
        afield.fit_posterior(model, x.split(20))
    with pytest.raises(NotFitted):
        model.predict(normal(2, 3))


def test_a_batch_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="A batch must be a tensor"):
        afield.fit_posterior(make(), [3.0])
    with pytest.raises(ValueError, match="empty tuple or list"):
        afield.fit_posterior(make(), [()])


# The model as it was ---------------------------------------------------------------------------------------------


def noisy() -> afield.SNGP:
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    net[1].running_mean.normal_(generator=seed(4))
    return afield.sngp(net, num_random_features=24, length_scale=1.5, generator=seed(), variance_features="same")


def test_the_pass_runs_in_evaluation_mode_and_touches_nothing_but_the_posterior():
    model = noisy().train()
    model.net[1].eval()  # a user's frozen BatchNorm
    modes = [m.training for m in model.modules()]
    before = {k: v.clone() for k, v in model.state_dict().items() if not re.search("precision|class_distance", k)}
    x = normal(40, 3)
    same(fitted(copy.deepcopy(model).eval(), [x]), fitted(model, x.split(7)))
    afield.fit_posterior(model, [x])
    assert [m.training for m in model.modules()] == modes
    after = model.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in before.items())
    assert all(p.grad is None for p in model.parameters())


def test_modes_come_back_after_an_error():
    model = noisy().train()
    with pytest.raises(ValueError, match="empty"):
        afield.fit_posterior(model, [])
    assert all(m.training for m in model.modules())


# Standardisation and length scale from all the data --------------------------------------------------------------


def standardised(h: Tensor) -> tuple[Tensor, Tensor]:
    return h.mean(0), 1 / h.std(0, correction=0)


def test_standardisation_uses_the_moments_of_all_the_data_even_sorted_by_class():
    x = torch.cat([0.1 * normal(300, 3) + 4 * k for k in range(3)])
    model = fitted(attached(), x.split(50))
    shift, gain = standardised(model.hidden(x))
    torch.testing.assert_close(model.head.random_features.shift, shift, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(model.head.random_features.gain, gain, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("n", [900, 12_000])
def test_the_length_scale_is_that_of_all_the_data_even_sorted_by_class(n):
    """Classes of different spread: whoever looks at the first classes more than at the last gets another median."""
    classes = [(0.2 + k) * normal(n // 6, 3, number=k) for k in range(6)]
    x = torch.cat(classes)
    h = (x - x.mean(0)) / x.std(0, correction=0)
    median = float(torch.pdist(h[torch.randperm(n, generator=seed())[:2000]]).median())
    net = nn.Linear(3, 3).double()
    scales = []
    for rows in (x, x.flip(0), x[torch.randperm(n, generator=seed(1))]):
        model = afield.attach(net, num_random_features=8, generator=seed())
        afield.fit_posterior(model, rows.split(100))
        scales.append(float(model.head.random_features.length_scale) / median)
    assert max(scales) / min(scales) < 1.05


@pytest.mark.parametrize("name", ["gaussian", "categorical"])
def test_a_second_look_from_memory_equals_recomputation(monkeypatch, name):
    x, y = normal(60, 3), normal(60, 3, number=1) if name == "gaussian" else torch.arange(60) % 3
    loader = list(zip(x.split(7), y.split(7), strict=True))
    cached = fitted(make(name, length_scale=None), loader)
    calls = []
    monkeypatch.setattr(hidden, "_CACHE_BYTES", 0)
    model = make(name, length_scale=None)
    model.net.register_forward_pre_hook(lambda *_: calls.append(1))
    afield.fit_posterior(model, loader)
    assert len(calls) == 2 * len(loader) + 1  # and one to see what the network returns
    same(cached, model)


@pytest.mark.parametrize(("length_scale", "limit"), [(1.5, 2**30), (None, 400)])
def test_memory_does_not_grow_with_the_examples(monkeypatch, length_scale, limit):
    """One pass keeps no hidden vectors; two passes keep them up to a limit, and beyond it none."""
    monkeypatch.setattr(hidden, "_CACHE_BYTES", limit)
    model = make(length_scale=length_scale)
    seen: list[weakref.ref[Tensor]] = []
    kept: list[int] = []
    model.net[1].register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))

    class Stream:
        def __iter__(self) -> Iterator[Tensor]:
            for number in range(30):
                kept.append(sum(ref() is not None for ref in seen))
                yield normal(8, 3, number=number)

    afield.fit_posterior(model, Stream())
    assert len(kept) == (30 if length_scale else 60)
    update(model, Stream())
    assert max(kept) <= 1


# After deployment ------------------------------------------------------------------------------------------------


@few
@given(old=st.integers(5, 60), new=st.integers(1, 60), name=st.sampled_from(LIKELIHOODS))
def test_update_is_a_refit_on_both_and_downdate_a_refit_on_the_rest(old, new, name):
    x = normal(old + new, 3)
    model = fitted(make(name, curvature="likelihood"), [x[:old]])
    assert update(model, x[old:].split(9)) == old + new
    same(model, fitted(model, [x]))
    assert downdate(model, x[:new].split(4)) == old
    same(model, fitted(model, [x[new:]]))


@few
@given(cut=st.integers(1, 59), name=st.sampled_from(LIKELIHOODS))
def test_merged_copies_are_one_model_that_saw_both_parts(cut, name):
    x, model = normal(60, 3), make(name, curvature="likelihood")
    merged = fitted(model, [x[:cut]])
    assert merge(merged, fitted(model, [x[cut:]])) == 60
    same(merged, fitted(model, [x]))


def test_posteriors_over_different_features_do_not_merge():
    with pytest.raises(ValueError, match="copies of one fitted model"):
        merge(fitted(make(), [normal(9, 3)]), fitted(make(generator=seed(5)), [normal(9, 3)]))


def test_update_moves_the_variance_where_the_new_examples_are():
    model = fitted(make(), [normal(50, 3)])
    there = normal(20, 3, number=9) + 4
    before = model.predict(there).variance
    logits = model(there)
    update(model, [there])
    assert bool((model.predict(there).variance < before).all())
    assert torch.equal(model(there), logits)


@pytest.mark.parametrize("change", [update, downdate])
def test_an_unfitted_posterior_cannot_be_revised(change):
    with pytest.raises(NotFitted, match="fit_posterior"):
        change(make(), [normal(5, 3)])


def test_more_than_was_observed_cannot_be_removed():
    with pytest.raises(ValueError, match="Cannot remove 9 examples from a precision of 5"):
        downdate(fitted(make(), [normal(5, 3)]), [normal(9, 3)])


# Noise -----------------------------------------------------------------------------------------------------------


def regression(n: int, noise: float, number: int = 0) -> tuple[Tensor, Tensor]:
    """Targets that are a draw of the model itself, plus noise."""
    x = normal(n, 3, number=number)
    return x, make("gaussian")(x).detach() + noise**0.5 * normal(n, 3, number=number + 1)


def test_noise_is_corrected_for_the_directions_that_the_weights_have_fitted():
    """60 examples and 24 features: the mean square of the residuals alone is far too small."""
    found, plain = [], []
    for number in range(0, 60, 2):
        x, y = regression(60, 0.09, number)
        model = make("gaussian", ridge=0.01, bound=None)
        afield.fit_head(model, [(x, y)])
        afield.fit_posterior(model, [(x, y)])
        found.append(float(model.head.noise))
        plain.append(float((model(x).detach() - y).square().mean()))
    mean, error = torch.tensor(found).mean(), torch.tensor(found).std() / len(found) ** 0.5
    assert abs(mean - 0.09) < 4 * error
    assert error < 0.004
    assert sum(plain) / len(plain) < 0.065


def test_noise_of_a_kept_mean_is_the_mean_square_of_its_residuals():
    x, y = regression(60, 0.09)
    model = attached(likelihood="gaussian")
    afield.fit_posterior(model, list(zip(x.split(8), y.split(8), strict=True)))
    squares = (model(x) - y).square().mean(0)
    torch.testing.assert_close(model.head.noise, squares.log().mean().exp(), rtol=1e-10, atol=0)
    torch.testing.assert_close(model.predict(x).noise[0], squares, rtol=1e-10, atol=0)


def test_without_targets_the_noise_stays():
    model = make("gaussian")
    model.head.set_scalars(noise=0.3)
    afield.fit_posterior(model, [normal(30, 3)])
    assert float(model.head.noise) == 0.3


def test_targets_of_another_width_are_refused():
    """(N,) targets against (N, 3) outputs would broadcast into a wrong noise."""
    with pytest.raises(ValueError, match=r"3 outputs|columns"):
        afield.fit_posterior(make("gaussian"), [(normal(30, 3), normal(30))])


# Two processes ---------------------------------------------------------------------------------------------------

N = 1003


class Stream(IterableDataset[Tensor]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.x)


def whole() -> TensorDataset:
    return TensorDataset(normal(N, 3), normal(N, 3, number=1))


def parts(cut: int) -> list[list[Tensor]]:
    """Each rank's own batches: the first `cut` examples on rank 0, the others on rank 1."""
    x = normal(N, 3)
    return [list(part.split(64)) if len(part) else [] for part in (x[:cut], x[cut:])]


# Name -> (model, loader of a rank, sharded); each must give the posterior of one process over `whole()`.
SCENARIOS: dict[str, tuple[Callable[[], afield.SNGP], Callable[[int], Any], bool | None]] = {
    "plain": (make, lambda rank: DataLoader(whole(), batch_size=64), None),
    "shuffled": (make, lambda rank: DataLoader(whole(), batch_size=64, shuffle=True), None),
    "drop_last": (make, lambda rank: DataLoader(whole(), batch_size=64, drop_last=True), None),
    "sampler": (make, lambda rank: DataLoader(whole(), batch_size=64, sampler=DistributedSampler(whole())), None),
    "uneven parts": (make, lambda rank: parts(700)[rank], True),
    "empty rank": (make, lambda rank: parts(N)[rank], True),
    "stream": (make, lambda rank: DataLoader(Stream(normal(N, 3)[rank::2]), batch_size=64), True),
    "part loader": (
        make,
        lambda rank: DataLoader(Subset(whole(), range(rank, N, 2)), batch_size=64),
        True,
    ),
    "likelihood": (lambda: make(curvature="likelihood"), lambda rank: DataLoader(whole(), batch_size=64), None),
    "gaussian": (lambda: make("gaussian"), lambda rank: DataLoader(whole(), batch_size=64), None),
    "attach": (attached, lambda rank: DataLoader(whole(), batch_size=64, shuffle=True), None),
    "attach, empty rank": (attached, lambda rank: parts(N)[rank], True),
}
REFUSED: dict[str, Callable[[], Any]] = {
    "list": lambda: list(normal(N, 3).split(64)),
    "stream": lambda: DataLoader(Stream(normal(N, 3)), batch_size=64),
}


def worker(rank: int, folder: str) -> None:
    """Every scenario on one rank, with what came out in a file of its own; warnings are errors here too."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.simplefilter("ignore", OtherTargets)  # real targets, whatever the likelihood
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    for name, (build, loader, sharded) in SCENARIOS.items():
        model, error = build(), ""
        try:
            returned = afield.fit_posterior(model, loader(rank), sharded=sharded)
        except Exception as problem:
            returned, error = -1, repr(problem)
        tensors = dict(model.head.state_dict()) | {"returned": torch.tensor(returned)}
        save_file(
            {k: v.contiguous().clone() for k, v in tensors.items()},
            f"{folder}/{name}-{rank}",
            metadata={"error": error},
        )
    for refused in REFUSED.values():
        with pytest.raises(ValueError, match="sharded=True"):
            afield.fit_posterior(make(), refused())
    with pytest.raises(ValueError, match="empty"):
        afield.fit_posterior(make(), [], sharded=True)
    replicated(rank)
    Path(folder, f"done-{rank}").touch()
    lose_the_other(rank, Path(folder))
    disconnect()


def lose_the_other(rank: int, folder: Path) -> None:
    """Rank 1 is killed in the middle of a pass; what rank 0 is told, and whether its posterior is still there."""
    model = make()
    fit = partial(afield.fit_posterior, model, sharded=True)
    fit(parts(700)[rank])
    before = model.predict(normal(5, 3)).variance

    def mortal() -> Iterator[Tensor]:
        yield parts(700)[rank][0]
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(LostRank) as lost:
        fit(mortal())
    assert torch.equal(model.predict(normal(5, 3)).variance, before)
    (folder / "lost").write_text(str(lost.value))


def replicated(rank: int) -> None:
    """A replica of DistributedDataParallel, whose buffers are broadcast from rank 0 at every step."""
    replica = nn.parallel.DistributedDataParallel(make("gaussian"))
    for _ in range(3):
        replica(normal(8, 3, number=rank)).sum().backward()
    assert replica.module.head.num_observed == 0
    assert afield.fit_posterior(replica.module, DataLoader(whole(), batch_size=64)) == N


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    with warnings.catch_warnings():  # forked: what this process has imported they have, too
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        two = mp.start_processes(worker, (str(folder),), nprocs=2, start_method="fork", join=False)
    with pytest.raises(mp.ProcessExitedException) as died:
        two.join(grace_period=60)
    assert (died.value.error_index, died.value.signal_name) == (1, "SIGKILL")
    assert two.processes[0].exitcode == 0
    return folder


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_give_the_posterior_of_one(two_processes, name):
    build, _, _ = SCENARIOS[name]
    loader = DataLoader(whole(), batch_size=100) if name == "gaussian" else [normal(N, 3)]
    one = fitted(build(), loader)
    for rank in range(2):
        with safe_open(two_processes / f"{name}-{rank}", "pt") as file:
            assert file.metadata()["error"] == ""
        tensors = load_file(two_processes / f"{name}-{rank}")
        assert int(tensors.pop("returned")) == N
        model = build()
        model.head.load_state_dict(tensors)
        same(one, model)


def test_both_ranks_ran_to_the_end_refusing_what_cannot_be_sharded(two_processes):
    assert all((two_processes / f"done-{rank}").is_file() for rank in range(2))


def test_a_rank_that_dies_is_named_to_the_others(two_processes):
    text = (two_processes / "lost").read_text()
    assert text.startswith("Rank 0 lost another process while the posterior was fitted: it was killed, ran out of")
    assert "This model is as it was before the call. Look for the first error among the other ranks" in text


def test_a_list_is_welcome_on_one_process():
    assert afield.fit_posterior(make(), REFUSED["list"]()) == N
    assert afield.fit_posterior(make(), REFUSED["stream"]()) == N
