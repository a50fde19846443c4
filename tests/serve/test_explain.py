"""What is kept beside a model, and what the service says of an input with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import afield
from afield.model.saving import draw_examples, read_neighbours
from afield.serve.explain import explainer
from afield.serve.models import Source
from afield.serve.open_torch import open_sngp
from afield.serve.server import sources_of
from tests.serve.conftest import fitted, running

LABELS = ("red", "green", "blue")


@pytest.fixture(scope="module")
def model() -> afield.SNGP:
    return fitted()


def batches(count: int = 60, size: int = 7) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(5))
    return list(zip(x.split(size), (torch.arange(count) % 3).split(size), strict=True))


def test_examples_are_drawn_without_regard_to_order_and_size_of_batches(model: afield.SNGP):
    """Every example has the same chance."""
    x = torch.arange(40.0)[:, None].expand(-1, 2)
    drawn = [draw_examples(model, x.split(7), 10, seed=seed)["input"][:, 0] for seed in range(200)]
    assert all(len(set(values.tolist())) == 10 for values in drawn)
    counts = torch.cat(drawn).long().bincount(minlength=40)
    assert counts.min() > 20  # 50 on average
    assert counts.max() < 90
    assert torch.equal(draw_examples(model, [x], 10)["input"], draw_examples(model, x.split(3), 10)["input"])


def test_neighbours_are_saved_replaced_and_taken_away(model: afield.SNGP, tmp_path: Path):
    with pytest.raises(ValueError, match="neighbours are examples of the training data"):
        afield.save(model, tmp_path, neighbours=5)
    with pytest.raises(ValueError, match="train is empty"):
        afield.save(model, tmp_path, neighbours=5, train=[])
    afield.save(model, tmp_path, neighbours=5, train=batches())
    kept = read_neighbours(tmp_path)
    assert {name: len(t) for name, t in kept.items()} == {"hidden": 5, "input": 5, "target": 5}
    assert torch.allclose(kept["hidden"], model.hidden(kept["input"]))
    afield.save(model, tmp_path, neighbours=6, train=batches())
    assert len(list(tmp_path.glob("neighbours-*"))) == 1
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))
    assert torch.equal(afield.load(tmp_path, net).predict(kept["input"]).logits, model.predict(kept["input"]).logits)
    next(tmp_path.glob("neighbours-*")).write_bytes(b"damaged")
    with pytest.raises(afield.errors.DamagedModel):
        read_neighbours(tmp_path)
    afield.save(model, tmp_path)
    assert read_neighbours(tmp_path) == {}
    assert list(tmp_path.glob("neighbours-*")) == []


def test_token_ids_of_several_lengths_are_kept():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            weight = attention_mask[..., None].float()
            return self.out((self.embed(input_ids) * weight).sum(1) / weight.sum(1))

    model = afield.attach(Net(), num_random_features=8)
    ids = [torch.tensor([[1, 2, 0]]), torch.tensor([[3, 4, 5, 6]])]
    masks = [torch.tensor([[1, 1, 0]]), torch.ones(1, 4, dtype=torch.long)]
    names = ("input_ids", "attention_mask")
    loader = [dict(zip(names, pair, strict=True)) for pair in zip(ids, masks, strict=True)]
    kept = draw_examples(model, loader, 2)
    assert sorted(kept["input_ids"].tolist()) == [[1, 2, -1, -1], [3, 4, 5, 6]]


def ask(model: afield.SNGP, rows: list[list[float]], **options: Any) -> list[dict[str, Any]]:
    kept = draw_examples(model, batches(), 60)
    explain = explainer(model, kept, lambda a: torch.tensor(a["input"]), labels=LABELS, **options)
    return explain({"input": rows})  # type: ignore[dict-item]


def test_a_training_example_is_nearest_to_itself(model: afield.SNGP):
    x, y = batches()[0]
    for row, target, why in zip(x.tolist(), y.tolist(), ask(model, x.tolist()), strict=True):
        first = why["nearest"][0]
        assert first["distance"] == pytest.approx(0, abs=0.02)
        assert first["label"] == LABELS[target]
        assert first["input"] == ", ".join(f"{value:.4g}" for value in row)
        assert [e["distance"] for e in why["nearest"]] == sorted(e["distance"] for e in why["nearest"])


def test_the_odd_feature_is_named(model: afield.SNGP):
    (why,) = ask(model, [[0.1, 40.0]], features=["a", "b"])
    first = why["features"][0]
    assert (first["name"], first["value"], first["unusual"]) == ("b", 40.0, True)
    assert first["low"] < first["high"] < 40
    usual = model.predict(torch.tensor([[0.1, 40.0]])).score()
    assert first["score_without"] < usual


def test_the_service_explains(model: afield.SNGP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "explained_nets.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))\n"
    )
    folder = afield.save(model, tmp_path / "m", metadata={"labels": LABELS}, neighbours=20, train=batches())
    engine = open_sngp(model)
    sources = [*sources_of([str(folder)], ["explained_nets:make"]), Source("plain", lambda path: engine)]
    body = {"inputs": [{"name": "input", "shape": [2, 2], "datatype": "FP32", "data": [0.1, 0.2, 9.0, 0.0]}]}
    with running(sources) as client:
        assert client("GET", "/v2/models/m")[1]["parameters"]["explains"]
        status, answer, _ = client("POST", "/v2/models/m/explain", body)
        assert status == 200, answer
        assert [len(row["nearest"]) for row in answer["rows"]] == [5, 5]
        assert answer["rows"][1]["features"][0]["name"] == "1"
        assert client.service.models.find("m").monitor.watch.rows == 0  # type: ignore[union-attr]
        body["inputs"][0] |= {"shape": [11, 2], "data": [0.0] * 22}
        assert client("POST", "/v2/models/m/explain", body)[0] == 400
        status, answer, _ = client("POST", "/v2/models/plain/explain", body)
        assert (status, "neighbours=100" in answer["error"]) == (404, True)


def test_pictures_are_small_and_in_bytes():
    net = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    model = afield.attach(net, num_random_features=8)
    images = 3 * torch.randn(12, 3, 100, 140)
    afield.fit_posterior(model, [(images, torch.arange(12) % 2)])
    explain = explainer(model, draw_examples(model, [(images, torch.arange(12) % 2)], 6), lambda a: images[:1])
    (why,) = explain({})
    picture = torch.tensor(why["nearest"][0]["picture"])
    assert picture.shape == (33, 46, 3)
    assert (picture.min(), picture.max()) == (0, 255)
    assert "features" not in why
