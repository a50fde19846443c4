"""Several heads on one body: each is what it would be alone, and all go through one file."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import afield
from afield.model.posterior import update
from afield.model.sngp_model import Heads

LIKELIHOODS = {"color": "categorical", "shape": "bernoulli", "size": "gaussian"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.color, self.shape, self.size = nn.Linear(16, 3), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x)
        return {"color": self.color(h), "shape": self.shape(h), "size": self.size(h)}


def data(n: int, number: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(n, 4, generator=generator)
    noisy = x + 0.3 * torch.randn(n, 4, generator=generator)
    return x, {"color": noisy[:, :3].argmax(1), "shape": (noisy[:, :2] > 0).float(), "size": noisy[:, 3:]}


def loss(out: dict[str, Tensor], y: dict[str, Tensor]) -> Tensor:
    shape = F.binary_cross_entropy_with_logits(out["shape"], y["shape"])
    return F.cross_entropy(out["color"], y["color"]) + shape + F.mse_loss(out["size"], y["size"])


def train(net: nn.Module, parameters: Any, steps: int) -> list[float]:
    optimizer, (x, y), losses = torch.optim.Adam(parameters, lr=0.02), data(300), []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(net(x), y)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


@functools.cache
def network() -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    train(net, net.parameters(), 80)
    return net


@functools.cache
def fitted(how: str) -> Heads:
    options: dict[str, Any] = {"output": list(LIKELIHOODS), "likelihood": LIKELIHOODS, "num_random_features": 32}
    model = afield.attach(network(), **options) if how == "attach" else afield.sngp(network(), **options)
    if how == "sngp":
        losses = train(model, afield.parameter_groups(model, lr=0.02), 40)
        assert losses[-1] < losses[0]
    assert afield.fit_posterior(model, [data(300)]) == dict.fromkeys(LIKELIHOODS, 300)
    afield.calibrate(model, [data(200, 1)])
    return model


both = pytest.mark.parametrize("how", ["sngp", "attach"])


@both
def test_a_prediction_of_each_head_by_name(how: str) -> None:
    p = fitted(how).predict(data(7, 2)[0])
    assert set(p) == set(LIKELIHOODS)
    assert {name: each.likelihood for name, each in p.items()} == LIKELIHOODS
    assert p["color"].probs is not None
    assert p["color"].probs.shape == (7, 3)
    assert p["shape"].labels.shape == (7, 2)
    assert p["size"].std.shape == (7, 1)
    assert all(each.accept(0.2).shape == (7,) for each in p.values())
    assert fitted(how).sample(data(7, 2)[0], num_samples=4)["shape"].shape == (4, 7, 2)


def test_an_attached_head_is_what_it_would_be_alone() -> None:
    x = data(20, 2)[0]

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = copy.deepcopy(network())

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)["size"]  # type: ignore[no-any-return]

    network()  # trained, once: that draws numbers
    torch.manual_seed(3)
    together = afield.attach(network(), output=["size"], likelihood="gaussian", num_random_features=32)
    torch.manual_seed(3)
    alone = afield.attach(One(), output="net.size", likelihood="gaussian", num_random_features=32)
    train_x, train_y = data(300)
    afield.fit_posterior(together, [(train_x, train_y)])
    afield.fit_posterior(alone, [(train_x, train_y["size"])])
    assert torch.equal(together.predict(x)["size"].std, alone.predict(x).std)


@both
def test_saved_and_loaded_all_heads_answer_to_the_bit(how: str, tmp_path: Path) -> None:
    model, x = fitted(how), data(9, 3)[0]
    loaded = afield.load(afield.save(model, tmp_path), Net())
    assert isinstance(loaded, Heads)
    for name, p in model.predict(x).items():
        q = loaded.predict(x)[name]
        assert all(torch.equal(p._tensors()[field], q._tensors()[field]) for field in p._tensors() | q._tensors())
    afield.save(loaded, tmp_path / "again")


def test_a_copy_shares_nothing_with_the_model_and_one_body_among_its_heads() -> None:
    model = fitted("attach")
    twin, x = copy.deepcopy(model), data(5, 4)[0]
    assert twin["color"].net is twin["size"].net is not model["color"].net
    update(twin["size"], [data(50, 5)[0]])
    assert not torch.equal(twin.predict(x)["size"].variance, model.predict(x)["size"].variance)  # type: ignore[arg-type]
    assert torch.equal(twin.predict(x)["color"].variance, model.predict(x)["color"].variance)  # type: ignore[arg-type]


@pytest.mark.slow
def test_each_head_is_exported_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from afield.deploy.export import export

    for name in LIKELIHOODS:
        assert export(fitted("attach")[name], tmp_path / f"{name}.onnx", data(20, 6)[0]).difference <= 1e-4


def test_what_is_missing_is_said() -> None:
    model, (x, y) = fitted("attach"), data(30)
    with pytest.raises(KeyError, match="'taste' is not a head of this model"):
        model["taste"]
    with pytest.raises(ValueError, match="The targets have no 'size'"):
        afield.calibrate(copy.deepcopy(model), [(x, {"color": y["color"], "shape": y["shape"]})])
    with pytest.raises(ValueError, match="several heads expects batches"):
        afield.calibrate(copy.deepcopy(model), [(x, y["color"])])
    with pytest.raises(ValueError, match="output expects names of different layers"):
        afield.attach(Net(), output=["color", "color"])


def _fit_on_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = in_double()
    if rank == 1:
        torch.save({name: part.head.precision.data for name, part in model.items()}, Path(folder, "sums.pt"))
    dist.destroy_process_group()


def in_double() -> Heads:
    x, y = data(61, 5)
    y = {name: t.double() if t.is_floating_point() else t for name, t in y.items()}
    loader = DataLoader(Several(x.double(), y), batch_size=7)
    model = afield.attach(network(), output=list(LIKELIHOODS), likelihood=LIKELIHOODS, num_random_features=32).double()
    afield.fit_posterior(model, loader, progress=False)
    return model


class Several(Dataset[Any]):
    """Examples with a target for each head."""

    def __init__(self, x: Tensor, y: dict[str, Tensor]) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, dict[str, Tensor]]:
        return self.x[i], {name: t[i] for name, t in self.y.items()}


def test_weights_and_a_shuffled_loader_are_refused_for_several_heads_as_for_one() -> None:
    loader = DataLoader(Several(*data(20)), shuffle=True)
    with pytest.raises(ValueError, match="this one has a RandomSampler"):
        afield.fit_posterior(copy.deepcopy(fitted("attach")), loader, weights=torch.ones(20))


@pytest.mark.slow
def test_two_processes_fit_all_heads_as_one_does(tmp_path: Path) -> None:
    network()  # trained before the fork
    mp.start_processes(_fit_on_a_rank, (str(tmp_path),), nprocs=2, start_method="fork")
    sums = torch.load(tmp_path / "sums.pt")
    assert sums.keys() == LIKELIHOODS.keys()
    for name, part in in_double().items():
        torch.testing.assert_close(sums[name], part.head.precision.data)
