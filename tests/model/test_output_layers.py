"""Layers that make logits at positions, and what may stand behind them: nothing, another order, an interpolation."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afield
from afield.errors import WrongOutput


def pictures(count: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    return x, x.argmax(1)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 3, 3),
        nn.Conv2d(4, 3, 1, stride=2),
        nn.Conv2d(4, 3, 1, padding=1),
        nn.Conv2d(4, 4, 1, groups=2),
        nn.Conv2d(4, 3, 1, padding="same"),
    ],
)
def test_a_convolution_that_looks_around_is_no_output_layer(layer: nn.Module) -> None:
    with pytest.raises(ValueError, match="must be a Linear, or a convolution with a kernel of size 1"):
        afield.sngp(nn.Sequential(nn.Conv2d(3, 4, 3), layer))


def test_dense_outputs_have_fewer_features_and_remember_how_many() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1))
    assert afield.sngp(net).head.random_features.num_random_features == 128
    assert afield.attach(net).head.random_features.num_random_features == 32
    assert afield.attach(afield.attach(net), num_random_features=32).head.random_features.num_random_features == 32
    model = afield.sngp(net, num_random_features=64)
    assert model.settings["head"]["num_random_features"] == 64


class Interpolated(nn.Module):
    """Logits on a coarse grid, brought to the size of the image."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.body, self.classifier, self.first = nn.Conv2d(3, 4, 3, padding=1, stride=2), nn.Conv2d(4, 3, 1), first

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h, size = self.body(x), x.shape[2:]
        if self.first:
            return {"out": self.classifier(F.interpolate(h, size=size, mode="bilinear"))}
        return {"out": F.interpolate(self.classifier(h), size=size, mode="bilinear")}


def test_interpolation_belongs_before_the_output_layer() -> None:
    """Where it gives the same logits, as the error says; `output_last` puts it there."""
    torch.manual_seed(0)
    before, after = Interpolated(True), Interpolated(False)
    after.load_state_dict(before.state_dict())
    x, y = pictures()
    torch.testing.assert_close(before(x)["out"], after(x)["out"])
    for interpolated in (after, nn.Sequential(after.body, after.classifier, nn.Upsample(scale_factor=2))):
        with pytest.raises((WrongOutput, RuntimeError), match=r"convert afield\.output_last\(net, example\)"):
            afield.fit_posterior(afield.attach(interpolated), [(x, y)])
    model = afield.attach(afield.output_last(after, x[:2]))
    torch.testing.assert_close(model(x), after(x)["out"])
    afield.fit_posterior(model, [(x, y)])
    assert model.predict(x).positions == (5, 6)
    assert afield.sngp(afield.output_last(after, (x, y)))(x).shape == (40, 3, 5, 6)


@pytest.mark.parametrize(
    "last",
    [nn.Softmax(1), nn.Sequential(nn.Upsample(scale_factor=2), nn.ReLU()), nn.PixelShuffle(2), nn.Conv2d(8, 8, 1)],
)
def test_what_is_no_interpolation_is_not_moved(last: nn.Module) -> None:
    torch.manual_seed(0)
    with pytest.raises(WrongOutput, match=r"'1' cannot be put behind what follows it: .+ Only interpolation"):
        afield.output_last(
            nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 1), last), torch.randn(2, 3, 4, 4), output="1"
        )


class Rearranged(nn.Module):
    """Logits (N, 30, K) of a sequence of patches, or (N, K, 1, 1) of a pooled image, as their users want them."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.body, self.pooled = nn.Conv2d(3, 4, 1), pooled
        self.out = nn.Conv2d(4, 3, 1) if pooled else nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).tanh()
        if self.pooled:
            return self.out(F.adaptive_avg_pool2d(h, 1)).flatten(1)
        return self.out(h.flatten(2).mT).mT.unflatten(2, x.shape[2:])


@pytest.mark.parametrize("how", ["sngp", "attach"])
@pytest.mark.parametrize("pooled", [False, True])
def test_positions_are_those_of_what_the_network_returns(pooled: bool, how: str) -> None:
    torch.manual_seed(0)
    x, y = pictures()
    y = y[:, 0, 0] if pooled else y
    model = getattr(afield, how)(Rearranged(pooled), num_random_features=16)
    assert afield.fit_posterior(model, [(x, y)]) == y.numel()
    p = model.predict(x)
    assert p.positions == (() if pooled else (5, 6))
    torch.testing.assert_close(p.logits, model(x))


def test_weights_that_a_hook_computes_are_those_of_the_next_pass() -> None:
    torch.manual_seed(0)
    normed = nn.Sequential(nn.Conv2d(3, 4, 1), nn.utils.spectral_norm(nn.Conv2d(4, 3, 1))).eval()
    x = pictures()[0]
    torch.testing.assert_close(afield.attach(normed)(x), normed(x))
