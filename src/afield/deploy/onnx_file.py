"""ONNX files: torch's exporter, ONNX Runtime's quantiser, and a session that takes and returns tensors."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from afield.deploy.traced import HIDDEN
from afield.errors import ExportError

METADATA = "afield"  # key of the metadata in the file
OLDEST_OPSET = 18  # below it torch's exporter falls back to 18, and says so in its log alone
_MAX_BYTES = 2**31 - 1  # of a protobuf message
_QUANTIZED_OPERATORS = ("MatMul", "Gemm")
_PREFIX = "output "  # of the names that torch gives the outputs


def convert(
    program: torch.export.ExportedProgram,
    inputs: Sequence[str],
    outputs: Sequence[str],
    opset: int,
    metadata: Mapping[str, Any],
    quantize: bool,
) -> bytes:
    """The content of an ONNX file."""
    _require("onnx", "onnxscript", "onnxruntime")
    try:
        converted = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            input_names=list(inputs),
            output_names=[_PREFIX + name for name in outputs],
            verbose=False,
            external_data=False,
        )
    except torch.onnx.OnnxExporterError as error:
        raise ExportError(
            f'ONNX has no operator for a part of this network; format="torch-export" may do. torch says: '
            f"{error.__cause__ or error}"
        ) from error
    assert converted is not None
    proto = converted.model_proto
    actual = next(entry.version for entry in proto.opset_import if not entry.domain)
    if actual != opset:
        raise ExportError(f"torch made ONNX opset {actual} where {opset} was asked for: use opset={actual}.")
    _name_outputs(proto.graph, outputs)
    if quantize:
        proto = _quantize(proto)
    proto.metadata_props.add(key=METADATA, value=json.dumps(metadata))
    if proto.ByteSize() > _MAX_BYTES:
        raise ExportError(
            f"An ONNX file holds at most 2 GB, this model has {proto.ByteSize() / 1e9:.1f} GB. "
            'Use precision="fp16", or format="torch-export".'
        )
    return proto.SerializeToString()


def _name_outputs(graph: Any, outputs: Sequence[str]) -> None:
    """Give the outputs their names. torch calls a value after its operator: a mean inside steps aside for `mean`."""
    names = {name: f"{name}_inside" for name in outputs} | {_PREFIX + name: name for name in outputs}
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)


def _quantize(proto: Any) -> Any:
    """Put the matrix products that lead to the output `hidden` in int8, and drop that output."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    from_hidden, head = {HIDDEN}, []
    for node in proto.graph.node:  # in topological order
        if from_hidden & set(node.input):
            from_hidden |= set(node.output)
            head.append(node.name)
    products = [n for n in proto.graph.node if n.op_type in _QUANTIZED_OPERATORS and n.name not in head]
    if not products:
        raise ExportError(
            "int8 quantises the matrix products of the backbone, and this one has none (convolutions stay as they "
            'are): use precision="fp16".'
        )
    (output,) = [o for o in proto.graph.output if o.name == HIDDEN]
    proto.graph.output.remove(output)
    del proto.graph.value_info[:]  # of weights too, which the quantiser transposes and then finds of another shape
    proto.metadata_props.add(key="onnx.quant.pre_process", value="onnxruntime.quant")  # or it asks for this in the log
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "int8.onnx")
        quantize_dynamic(
            proto,
            file,
            op_types_to_quantize=list(_QUANTIZED_OPERATORS),
            nodes_to_exclude=[*head, *(f"{name}_MatMul" for name in head)],  # which it renames every Gemm to, first
            per_channel=True,
            reduce_range=True,  # 7 bits: on processors without VNNI, 8 overflow, and the answer would depend on it
            weight_type=QuantType.QInt8,
        )
        proto = onnx.load(file)
    del proto.metadata_props[:]
    return proto


def open_session(content: bytes, names: Sequence[str]) -> Callable[[tuple[Tensor, ...]], dict[str, Tensor]]:
    """A function that runs the file in ONNX Runtime: input tensors, in the order of their names -> outputs by name."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no common class of their own
        raise ExportError(
            f"ONNX Runtime {onnxruntime.__version__} cannot load this graph; opset={OLDEST_OPSET} is the one that most "
            f"versions know. It says: {error}"
        ) from error
    outputs = [output.name for output in session.get_outputs()]

    def run(batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        arrays = {name: t.numpy() for name, t in zip(names, batch, strict=True)}
        values = session.run(outputs, arrays)
        return {name: torch.from_numpy(np.asarray(a)) for name, a in zip(outputs, values, strict=True)}

    return run


def _require(*packages: str) -> None:
    for name in packages:
        try:
            __import__(name)
        except ImportError as error:
            raise ImportError(f'ONNX export needs {name}: pip install "afield[onnx]".') from error
