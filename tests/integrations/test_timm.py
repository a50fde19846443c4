"""timm: each family converts, trains a step, fits, calibrates, predicts and is exported; what it learned is kept."""

import copy
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import afield
from afield.bounds.spectral import bounds_of

if importlib.util.find_spec("timm") is None or importlib.util.find_spec("torchvision") is None:
    pytest.skip("needs pip install --no-deps timm torchvision", allow_module_level=True)
_KEPT: list[torch.library.Library] = []  # a declaration lives as long as its library


def _import_timm() -> Any:
    """timm, also with a torchvision that was built for another torch.

    Such a torchvision cannot load its C++ operators, and stops where it describes two of them, for object detection.
    Once these names are declared it goes on; nothing here calls them.
    """
    try:
        return importlib.import_module("timm")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        return importlib.import_module("timm")


timm = _import_timm()
integration = importlib.import_module("afield.integrations.timm")
FAMILIES: dict[str, dict[str, Any]] = {
    "mobilenetv3_small_050": {},
    "efficientnet_lite0": {},
    "convnext_atto": {},
    "regnetx_002": {},
    "vit_tiny_patch16_224": {"img_size": 32},
    "resnet10t": {},
}
families = pytest.mark.parametrize("name", FAMILIES)
HEAD = {"num_random_features": 64, "generator": torch.Generator().manual_seed(0)}


def network(name: str, **options: Any) -> nn.Module:
    """A network with statistics and scales as if it had been trained."""
    net = timm.create_model(name, num_classes=3, **FAMILIES.get(name, {}) | options).eval()
    generator = torch.Generator().manual_seed(1)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
            nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)  # timm starts some at zero
    return net


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def kept(before: dict[str, Tensor], after: dict[str, Tensor], output: str) -> None:
    """Every tensor but the output layer's is there, bit for bit; a bounded weight is kept as its original."""
    for name, tensor in before.items():
        if name.startswith(f"{output}."):
            continue
        module, _, leaf = name.rpartition(".")
        found = after.get(name, after.get(f"{module}.parametrizations.{leaf}.original"))
        assert found is not None, name
        assert torch.equal(found, tensor), name


@families
def test_conversion_keeps_weights_and_statistics(name: str):
    net, x = network(name), images(4)
    before = copy.deepcopy(net.state_dict())
    model = integration.sngp(net, **HEAD)
    kept(before, model.net.state_dict(), model.output)
    kept(before, net.state_dict(), "")
    assert model.output == net.pretrained_cfg["classifier"]
    assert any(bounds_of(m) for m in model.net.modules())
    model.eval()
    with torch.no_grad():
        expected = net.forward_head(net.forward_features(x), pre_logits=True)
        assert torch.equal(integration.sngp(net, None, **HEAD).eval().hidden(x), expected)
        model.hidden(x)
    kept(before, model.net.state_dict(), model.output)  # a look at data in evaluation mode changes nothing


@families
def test_attach_keeps_the_predictions(name: str):
    net, x = network(name), images(4)
    model = integration.attach(net, **HEAD).eval()
    with torch.no_grad():
        assert torch.equal(model(x), net(x))
    kept(net.state_dict(), model.net.state_dict(), model.output)


def trained(name: str) -> afield.SNGP:
    """One gradient step from output weights off zero, then the posterior and the calibration."""
    model = integration.sngp(network(name), **HEAD).train()
    nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(2))
    x, y = images(24), torch.arange(24) % 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    F.cross_entropy(model(x), y).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    optimizer.step()
    assert not any(torch.equal(p, before[n]) for n, p in model.named_parameters() if n.endswith("original"))
    afield.fit_posterior(model, [(x, y)])
    afield.calibrate(model, [(images(60, seed=1), torch.arange(60) % 3)])
    return model.eval()


@families
def test_a_step_a_posterior_and_a_calibration(name: str):
    model = trained(name)
    assert model.head.num_observed == 24
    p = model.predict(images(8, seed=2))
    assert p.probs is not None
    assert p.variance is not None
    assert p.p_value is not None
    torch.testing.assert_close(p.probs.sum(1), torch.ones(8))
    assert (p.variance > 0).all()
    far = model.predict(1e4 * images(8, seed=2))
    assert far.variance is not None
    assert torch.isfinite(far.variance).all()


@pytest.mark.parametrize("name", ["test_resnet", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)])
def test_export_answers_like_the_model(name: str, tmp_path: Path):
    pytest.importorskip("onnxruntime", reason='needs pip install "afield[onnx]"')
    from afield.deploy.export import export

    model = trained(name)
    done = export(model, tmp_path / "model.onnx", images(3, seed=3), labels=["a", "b", "c"], alpha=0.1)
    assert done.difference <= 1e-4
    assert done.file.is_file()
    probs = model.predict(images(3, seed=3)).probs
    assert probs is not None
    assert probs.std() > 0.01  # there was something to get wrong


def test_normalisation_is_the_networks_own():
    net = network("resnet10t")
    config = net.pretrained_cfg
    model = integration.sngp(net, None, normalize=True, **HEAD).eval()
    bare = integration.sngp(net, None, **HEAD).eval()
    bytes_ = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        expected = bare.hidden((bytes_ / 255 - mean) / std)
        torch.testing.assert_close(model.hidden(bytes_), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.hidden(bytes_ / 255), expected, rtol=1e-4, atol=1e-5)
    assert model.output == f"net.{config['classifier']}"
    half = timm.create_model("vit_tiny_patch16_224")  # another pair of constants
    assert integration.normalization(half).mean.flatten().tolist() == list(half.pretrained_cfg["mean"])
    assert integration.normalization(half).std.flatten().tolist() != pytest.approx(list(config["std"]))


def test_names_and_numbers_of_classes():
    assert integration.sngp("test_resnet", **HEAD).head.out_features == 1000
    assert integration.sngp("test_resnet", num_classes=7, **HEAD).head.out_features == 7
    assert integration.sngp(network("test_resnet"), **HEAD).head.out_features == 3
    assert integration.sngp(network("test_resnet"), num_classes=7, **HEAD).head.out_features == 7


def test_what_cannot_be_converted_says_so():
    with pytest.raises(ValueError, match=r"has 2 output layers \(head, head_dist\)"):
        integration.sngp("deit_tiny_distilled_patch16_224")
    with pytest.raises(ValueError, match="The output layer 'fc' of DLA is a Conv2d, expected a Linear"):
        integration.sngp("dla46_c")
    with pytest.raises(ValueError, match=r"is a Identity, expected a Linear.*num_classes > 0"):
        integration.attach(timm.create_model("test_resnet", num_classes=0))
    with pytest.raises(TypeError, match=r"made by timm, got Linear: use afield\.sngp"):
        integration.sngp(nn.Linear(3, 2))


def test_without_timm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "afield.integrations.timm")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r'pip install "afield\[timm\]"'):
        importlib.import_module("afield.integrations.timm")
