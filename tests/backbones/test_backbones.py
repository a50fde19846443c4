"""Image backbones: against the same networks written out by hand, their size, and what the methods need of them."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from afield.backbones.normalize import IMAGENET_MEAN, IMAGENET_STD, Normalize
from afield.backbones.resnet50 import BOUNDED, ResNet50
from afield.backbones.resnet_cifar import ResNetCIFAR
from afield.backbones.wide_resnet import WideResNet
from afield.bounds.residual import Residual
from afield.bounds.spectral import bound, bounds_of
from afield.methods import METHODS
from afield.methods.dropout import SampledDropout
from afield.model.convert import bound_layers
from afield.model.diagnose import certified, measured
from afield.settings import Settings
from tests.conftest import data_file


def warm(net: nn.Module, x: Tensor) -> nn.Module:
    """Evaluation mode with running statistics that are no longer zeros and ones."""
    net.train()
    with torch.no_grad():
        net(x)
    return net.eval()


def norm(x: Tensor, layer: nn.BatchNorm2d) -> Tensor:
    return F.batch_norm(x, layer.running_mean, layer.running_var, layer.weight, layer.bias)


@pytest.mark.parametrize("stem", [1, 2])
def test_wide_resnet_is_the_network_written_out(stem: int):
    net = warm(WideResNet(16, 2, stride=stem).double(), torch.rand(8, 3, 16, 16).double())
    convs = iter([m for m in net.modules() if isinstance(m, nn.Conv2d)])
    norms = iter([m for m in net.modules() if isinstance(m, nn.BatchNorm2d)])
    x = torch.rand(4, 3, 16, 16).double()
    mean, std = (torch.tensor(v).double()[:, None, None] for v in ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)))
    y = F.conv2d((x - mean) / std, next(convs).weight, padding=1, stride=stem)
    for stage, channels in enumerate((32, 64, 128)):
        for block in range(2):
            stride = 2 if stage and not block else 1
            first, second = next(convs), next(convs)
            z = F.conv2d(F.relu(norm(y, next(norms))), first.weight, stride=stride, padding=1)
            z = F.conv2d(F.relu(norm(z, next(norms))), second.weight, padding=1)
            assert z.shape[1] == channels
            y = z + (y if block else F.conv2d(y, next(convs).weight, stride=stride))
    y = F.relu(norm(y, next(norms))).mean((2, 3))
    torch.testing.assert_close(net(x), y, rtol=1e-6, atol=1e-6)  # the mean and std are stored in single precision
    assert next(convs, None) is next(norms, None) is None


@pytest.mark.parametrize(("depth", "width", "count"), [(28, 10, 36_479_194), (16, 4, 2_748_890), (40, 2, 2_243_546)])
def test_wide_resnets_have_their_published_size(depth: int, width: int, count: int):
    with torch.device("meta"):
        net = WideResNet(depth, width)
    assert net.out_features == 64 * width
    assert sum(p.numel() for p in net.parameters()) + (net.out_features + 1) * 10 == count


def test_resnet50_is_the_network_written_out():
    net = warm(ResNet50(7).double(), torch.rand(4, 3, 64, 64).double())
    w, x = net.state_dict(), torch.rand(2, 3, 64, 64).double()

    def conv(x: Tensor, name: str, bn: str, stride: int = 1) -> Tensor:
        kernel = w[f"{name}.weight"]
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[2] // 2)
        return F.batch_norm(x, *(w[f"{bn}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")))

    mean, std = (torch.tensor(v).double()[:, None, None] for v in (IMAGENET_MEAN, IMAGENET_STD))
    y = F.max_pool2d(F.relu(conv((x - mean) / std, "conv1", "bn1", 2)), 3, 2, 1)
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        for block in range(blocks):
            name, stride = f"layer{stage}.{block}", 2 if stage > 1 and not block else 1
            z = F.relu(conv(y, f"{name}.conv1", f"{name}.bn1"))
            z = F.relu(conv(z, f"{name}.conv2", f"{name}.bn2", stride))
            z = conv(z, f"{name}.conv3", f"{name}.bn3")
            y = F.relu(z + (y if block else conv(y, f"{name}.downsample.0", f"{name}.downsample.1", stride)))
    y = F.linear(y.mean((2, 3)), w["fc.weight"], w["fc.bias"])
    torch.testing.assert_close(net(x), y, rtol=1e-6, atol=1e-6)


def test_resnet50_has_the_names_and_the_size_of_public_checkpoints():
    with torch.device("meta"):
        net = ResNet50(1000)
    assert sum(p.numel() for p in net.parameters()) == 25_557_032
    names = list(net.state_dict())
    assert len(names) == 320
    norm = "(weight|bias|running_mean|running_var|num_batches_tracked)"
    block = rf"(conv[1-3]\.weight|bn[1-3]\.{norm}|downsample\.0\.weight|downsample\.1\.{norm})"
    known = rf"conv1\.weight|bn1\.{norm}|fc\.(weight|bias)|layer[1-4]\.[0-5]\.{block}"
    assert all(re.fullmatch(known, name) for name in names)


@pytest.mark.parametrize("projection", [False, True])
def test_resnet_cifar_is_the_network_written_out(projection: bool):
    """With shortcuts of zeros, or of convolutions as in the second public ResNet-56."""
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    net = warm(ResNetCIFAR(8, 5, projection=projection, mean=mean, std=std).double(), torch.rand(8, 3, 16, 16).double())
    w, x = net.state_dict(), torch.rand(2, 3, 16, 16).double()

    def conv(x: Tensor, name: str, bn: str, stride: int = 1) -> Tensor:
        kernel = w[f"{name}.weight"]
        x = F.conv2d(x, kernel, stride=stride, padding=kernel.shape[2] // 2)
        return F.batch_norm(x, *(w[f"{bn}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")))

    center, width = (torch.tensor(v).double()[:, None, None] for v in (mean, std))
    y = F.relu(conv((x - center) / width, "conv1", "bn1"))
    for stage in (1, 2, 3):
        name, stride = f"layer{stage}.0", 1 + (stage > 1)
        z = F.relu(conv(y, f"{name}.conv1", f"{name}.bn1", stride))
        z = conv(z, f"{name}.conv2", f"{name}.bn2")
        if stage > 1 and projection:
            y = conv(y, f"{name}.downsample.0", f"{name}.downsample.1", 2)
        elif stage > 1:
            zeros = torch.zeros_like(z[:, : y.shape[1] // 2])
            y = torch.cat([zeros, y[:, :, ::2, ::2], zeros], dim=1)
        y = F.relu(z + y)
    y = F.linear(y.mean((2, 3)), w["linear.weight"], w["linear.bias"])
    torch.testing.assert_close(net(x), y, rtol=1e-6, atol=1e-6)


def test_resnet_cifar_has_the_names_of_the_second_public_checkpoint():
    file = load_file(data_file("weights/cifar10_resnet56_b.safetensors"))
    with torch.device("meta"):
        net = ResNetCIFAR(56, projection=True)
    shapes = {name: t.shape for name, t in net.state_dict().items() if "num_batches" not in name}
    assert {n.replace("fc.", "linear."): t.shape for n, t in file.items() if "num_batches" not in n} == shapes


def test_hidden_vectors_without_classes():
    net = ResNet50().eval()
    assert net.out_features == 2048
    assert net(torch.rand(1, 3, 64, 64)).shape == (1, 2048)


@pytest.mark.parametrize("make", [partial(WideResNet, 10, 1), ResNet50])
def test_bytes_and_numbers_are_the_same_images(make):
    net, x = make().eval(), torch.randint(256, (2, 3, 40, 40), dtype=torch.uint8)
    torch.testing.assert_close(net(x), net(x.float() / 255))
    torch.testing.assert_close(net.double()(x), net.double()(x.double() / 255))


@pytest.mark.parametrize("size", [8, 28, 33])
def test_grey_images_of_other_sizes(size: int):
    net = WideResNet(10, 1, mean=[0.3], std=[0.4]).eval()
    assert net(torch.rand(2, 1, size, size)).shape == (2, 64)


@pytest.mark.parametrize("channels", [1, 3])
def test_convolutions_of_images_put_the_channels_last(channels: int):
    """A single channel has strides that can be read either way."""
    net = WideResNet(10, 1, mean=[0.5] * channels, std=[0.25] * channels)
    seen: list[Tensor] = []
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.BatchNorm2d):
            layer.register_forward_hook(lambda layer, args, output: seen.append(output))
    net(torch.rand(2, channels, 8, 8))
    assert len(seen) > 10
    assert all(h.is_contiguous(memory_format=torch.channels_last) for h in seen)
    assert not any(h.is_contiguous() for h in seen if h.shape[2] > 1)


def test_normalize_keeps_no_state_and_refuses_what_is_no_image():
    layer = Normalize([0.5], [0.25])
    assert not layer.state_dict()
    torch.testing.assert_close(layer(torch.full((1, 1, 2, 2), 1.0)), torch.full((1, 1, 2, 2), 2.0))
    for shape in ((4, 3, 8, 8), (4, 64)):
        with pytest.raises(ValueError, match=r"Expected images \(N, 1, H, W\), got shape"):
            layer(torch.rand(shape))


def test_convolutions_start_at_he_scale():
    net = WideResNet(16, 4)
    for conv in (m for m in net.modules() if isinstance(m, nn.Conv2d)):
        expected = (2 / conv.weight[0].numel()) ** 0.5
        assert abs(float(conv.weight.detach().std()) / expected - 1) < 5 / conv.weight.numel() ** 0.5


@pytest.mark.parametrize(("depth", "message"), [(20, "6n \\+ 4"), (4, "6n \\+ 4")])
def test_impossible_depths(depth: int, message: str):
    with pytest.raises(ValueError, match=message):
        WideResNet(depth)
    with pytest.raises(ValueError, match="width of at least 1"):
        WideResNet(16, 0)


# What the methods need


def test_sngp_bounds_every_convolution_with_stem_and_shortcuts():
    model = METHODS["sngp"].build(partial(WideResNet, 16, 2), 10, Settings(bound=6.0))
    convs = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convs) == 1 + 12 + 3
    assert all(bounds_of(conv) for conv in convs)
    assert not any(bounds_of(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d))


def test_papers_resnet50_is_bounded_but_for_its_stem():
    net = ResNet50(10)
    bound_layers(net, dict.fromkeys(BOUNDED, 6.0), skip="fc")
    bounded = {name for name, m in net.named_modules() if bounds_of(m)}
    assert bounded == {name for name, m in net.named_modules() if isinstance(m, nn.Conv2d)} - {"conv1"}
    assert len(bounded) == 52


def test_residual_blocks_are_certified():
    net = WideResNet(16, 1)
    for layer in [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d)]:
        bound(layer, 0.3 if isinstance(layer, nn.Conv2d) else 1.0)
    x = torch.rand(40, 3, 12, 12)
    for _ in range(20):
        warm(net, x)
    blocks = [m for m in net if isinstance(m, Residual)]
    assert len(blocks) == 4  # width 1: the stem's 16 channels go on in the first stage
    hidden = net[1](net[0](x)).detach()
    promised, seen = certified(blocks[0]), measured(blocks[0], hidden)
    assert promised.lower > 0.8
    assert promised.lower <= seen.lower <= seen.upper <= promised.upper


@pytest.mark.parametrize(("make", "blocks"), [(partial(WideResNet, 10, 1), 3), (ResNet50, 16)])
def test_mc_dropout_finds_a_layer_in_every_block(make, blocks: int):
    model = METHODS["mc-dropout"].build(partial(make, dropout=0.3), 5).eval()
    assert sum(isinstance(m, SampledDropout) for m in model.modules()) == blocks
    members = METHODS["mc-dropout"].predict(model, torch.rand(2, 3, 32, 32)).members
    assert float(members.std(0).max()) > 1e-4
    assert sum(isinstance(m, nn.Dropout) for m in make().modules()) == blocks  # also at rate zero, for others to use
