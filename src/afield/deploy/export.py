"""Export: a fitted model as one file that answers without afield, and, as ONNX, without torch.

The file holds one graph from raw inputs to the answers of `traced`, for any number of rows, spectral bounds
written out, and a JSON text with labels, threshold and versions. It is made in memory, read back, and compared with the
model on the test inputs of `agreement`. It is put in place, in one step, if probabilities differ by at most 1e-4 (mean
and std of a regression: in units of the std) and p-values are exactly those of the graph's own scores.

precision="fp16" keeps the backbone in half precision, "int8" its matrix products (ONNX Runtime's dynamic quantisation,
one scale for each output unit). The head stays in float32: its cosine turns rounding into phase, and rounding of the
triangular factor is an error of the variance itself. The difference of such a file is reported, and bounded if
`tolerance` is given.
"""

import base64
import contextlib
import copy
import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from afield.deploy import onnx_file
from afield.deploy.agreement import Agreement, compare, make_test_inputs
from afield.deploy.onnx_file import METADATA, OLDEST_OPSET
from afield.deploy.traced import HIDDEN, Graph, Inputs, chosen_alpha, expected, implied_p_value, threshold
from afield.errors import ExportError, NotFitted
from afield.gp.likelihoods import LIKELIHOODS
from afield.model.batches import Field
from afield.model.batches import Inputs as Fields
from afield.model.saving import write_file
from afield.model.sngp_model import SNGP
from afield.prediction.p_values import conformal_p_value
from afield.version import __version__

FORMATS = ("onnx", "torch-export")
PRECISIONS = ("fp16", "int8")
TOLERANCE = 1e-4
SCORE_TOLERANCE = 0.05  # relative to 1 + |score|: a -log p magnifies last digits where held-out inputs are crowded
_EXTRA = f"{METADATA}.json"


@dataclass(frozen=True)
class Exported:
    """What was written, and how it compares with the model."""

    file: Path
    size: int
    agreement: Agreement
    metadata: Mapping[str, Any]

    @property
    def difference(self) -> float:
        return self.agreement.difference


def export(
    model: SNGP,
    file: str | os.PathLike[str],
    example: Any,
    *,
    target: Field | None = None,
    inputs: Fields = None,
    format: str = "onnx",
    labels: Sequence[str] | None = None,
    alpha: float | None = None,
    precision: str | None = None,
    tolerance: float | None = None,
    any_length: bool = False,
    opset: int = OLDEST_OPSET,
) -> Exported:
    """Write the model to a file that answers by itself, after comparing the two.

    example     a batch as `fit_posterior` takes it, of a few typical rows: it gives names, types and shapes of the
                inputs, and the rows on which the export has to be right
    target      index or key of the example's target, as in `fit_posterior`; it is left out
    inputs      index or key of the input, or a list of them, where the example has more fields than that
    format      "onnx", or "torch-export" (`torch.export.load`)
    labels      names of the classes, kept inside
    alpha       rate of false alarms behind the answer `accepted`; None: 0.01, or the smallest that the calibration can
                tell; an uncalibrated model is exported without p_value and accepted
    precision   None, "fp16" or "int8"
    tolerance   the largest difference; None: 1e-4, and any with a reduced precision
    any_length  dimension 1 of the inputs may vary as well, for texts
    opset       version of the ONNX operators
    """
    _check_arguments(model, format, labels, precision, opset)
    given = Inputs.of(model.net, example, target=target, inputs=inputs)
    alpha = chosen_alpha(model, alpha)
    reference = model if model.head.random_features.weight.dtype == torch.float32 else copy.deepcopy(model).float()
    expected(reference, given, given.tensors, alpha)  # its errors about a wrong example are clearer than a tracer's
    graph = Graph(model, given, alpha=alpha, half=precision == "fp16", hidden=precision == "int8")
    with torch.no_grad(), _quiet():
        program = _trace(graph, any_length)
        kind = {"format": format} | ({"opset": opset} if format == "onnx" else {})
        metadata = kind | _metadata(model, graph, labels, precision, any_length)
        if format == "onnx":
            content = onnx_file.convert(program, given.names, graph.outputs, opset, metadata, precision == "int8")
            run = onnx_file.open_session(content, given.names)
        else:
            content = _serialize(program, metadata)
            run = _deserialize(content)
        limit = TOLERANCE if tolerance is None else tolerance
        agreement = compare(
            lambda batch: expected(reference, given, batch, alpha),
            lambda batch: _check_p_values(run(batch), model, alpha),
            make_test_inputs(given.tensors, shorter=any_length),
            tolerance=limit,
        )
    if agreement.difference > limit and (precision is None or tolerance is not None):
        raise ExportError(
            f"The export differs from the model by {agreement.difference:.2g} (test input: {agreement.worst}), "
            f"more than {limit:g}; nothing was written. Differences by output: "
            f"{_format_differences(agreement.everywhere)}."
        )
    if precision is None and agreement.example["score"] > SCORE_TOLERANCE:
        raise ExportError(
            f"The scores of the export differ from the model's by {agreement.example['score']:.2g} on the example, "
            f"more than {SCORE_TOLERANCE:g}, and p-values with them; nothing was written."
        )
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    write_file(Path(file), content)
    return Exported(Path(file), len(content), agreement, metadata)


def _check_arguments(model: SNGP, format: str, labels: Sequence[str] | None, precision: str | None, opset: int) -> None:
    if not isinstance(model, SNGP):
        raise TypeError(f"export expects a model made by afield.sngp or afield.attach, got {type(model).__name__}.")
    if not model.head.precision.fitted:
        raise NotFitted("The posterior is not fitted: call afield.fit_posterior(model, train_loader) before export.")
    model.check_fresh("export")
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}.")
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision must be None or one of {', '.join(PRECISIONS)}, got {precision!r}.")
    if precision == "int8" and format != "onnx":
        raise ValueError('precision="int8" is made by ONNX Runtime: use format="onnx", or precision="fp16".')
    if format == "onnx" and opset < OLDEST_OPSET:
        raise ValueError(f"ONNX opset {opset} is too old: the smallest that works is {OLDEST_OPSET}.")
    likelihood, outputs = LIKELIHOODS[model.head.likelihood], model.head.out_features
    classes = outputs if likelihood.has_labels(outputs) else likelihood.num_classes(outputs)
    if labels is not None and len(labels) != classes:
        raise ValueError(f"labels must name the {classes} classes of the model, got {len(labels)} names.")


def _trace(graph: Graph, any_length: bool) -> torch.export.ExportedProgram:
    """The graph with a free number of rows; two at least, because torch takes one row for a constant."""
    rows, length = torch.export.Dim("batch"), torch.export.Dim.DYNAMIC  # a length has the network's own limit
    tensors = tuple(t[torch.arange(max(3, min(len(t), 8))) % len(t)] for t in graph.inputs.tensors)
    shapes = tuple({0: rows, **({1: length} if any_length and t.dim() > 1 else {})} for t in tensors)
    try:
        program = torch.export.export(graph, tensors, dynamic_shapes={"tensors": shapes}, strict=False)
    except Exception as error:  # torch raises a dozen kinds, RuntimeError and AssertionError among them
        what = "rows and any length" if any_length else "rows"
        message = " ".join(line.strip() for line in str(error).splitlines()[:4])
        raise ExportError(
            f"torch.export cannot follow this network for any number of {what}. Its forward must not branch on values, "
            f"nor split or loop over the batch. torch says: {type(error).__name__}: {message}"
        ) from error
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # paths and source lines of this machine are nobody's business
    return program


def _serialize(program: torch.export.ExportedProgram, metadata: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={_EXTRA: json.dumps(metadata)})
    return buffer.getvalue()


def _deserialize(content: bytes) -> Callable[[tuple[Tensor, ...]], dict[str, Tensor]]:
    module = torch.export.load(io.BytesIO(content)).module()
    return lambda batch: module(*batch)


def _check_p_values(answers: dict[str, Tensor], model: SNGP, alpha: float | None) -> dict[str, Tensor]:
    """The answers, if p-values and acceptance are exactly what their score implies."""
    if alpha is not None:
        p_value = implied_p_value(model, answers)
        if not torch.equal(p_value, answers["p_value"]) or not torch.equal(p_value > alpha, answers["accepted"]):
            raise ExportError("The export's p-values are not those of its own scores; nothing was written.")
        if "input_p_value" in answers:
            of_inputs, _ = conformal_p_value(answers["input_score"], model.head.input_reference.cpu())
            if not torch.equal(of_inputs, answers["input_p_value"]):
                raise ExportError(
                    "The export's p-values of inputs are not those of its own scores; nothing was written."
                )
    return answers


def _metadata(
    model: SNGP, graph: Graph, labels: Sequence[str] | None, precision: str | None, any_length: bool
) -> dict[str, Any]:
    head, inputs, alpha = model.head, graph.inputs, graph.alpha
    shapes = [["batch", *t.shape[1:]] for t in inputs.tensors]
    return {
        "afield": __version__,
        "torch": torch.__version__,
        "kind": model.kind,
        "likelihood": head.likelihood,
        "covariance": head.covariance,
        "inputs": [
            {
                "name": name,
                "dtype": str(t.dtype).removeprefix("torch."),
                "shape": [*shape[:1], "length", *shape[2:]] if any_length and t.dim() > 1 else shape,
            }
            for name, t, shape in zip(inputs.names, inputs.tensors, shapes, strict=True)
        ],
        "outputs": [name for name in graph.outputs if name != HIDDEN],
        "labels": None if labels is None else [str(label) for label in labels],
        "score": head.score if head.calibrated else LIKELIHOODS[head.likelihood].score,
        "calibrated": alpha is not None,
        "alpha": alpha,
        "threshold": None if alpha is None else threshold(model, alpha),
        "reference": "" if alpha is None else base64.b64encode(head.reference.cpu().numpy().tobytes()).decode(),
        "reference_spans": graph.spans.tolist(),
        "reference_draws": graph.draws,
        "num_inputs": graph.num_inputs,
        "num_reference": (graph.spans[:, 1] - graph.spans[:, 0]).tolist() or graph.num_reference,
        "precision": precision or "float32",
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's exporter, which logs what it does and warns of its own deprecated calls."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _format_differences(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2g}" for name, value in values.items())
