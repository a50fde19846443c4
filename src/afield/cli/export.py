"""`afield export`: a trained model as one file that answers without afield."""

import importlib
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from torch import nn

from afield.deploy.export import OLDEST_OPSET, TOLERANCE, Exported, export
from afield.experiment import one_run, run_folder
from afield.model.saving import INDEX, load, read_index
from afield.model.sngp_model import SNGP

SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2"}
_ROWS = 64


@dataclass(frozen=True)
class Export:
    """Write a trained model as one file, from raw input to probabilities, variance, score and p-value.

    It is compared with the model on usual and extreme inputs first, and written only if the two agree. An ONNX file
    runs in ONNX Runtime with neither afield nor torch installed.
    """

    model: tyro.conf.Positional[Path]
    """A run folder, such as runs/two-moons/sngp/0; or a folder written by afield.save, with --net and --example."""
    out: Path | None = None
    """File to write; MODEL/model.onnx or MODEL/model.pt2 if not given."""
    format: Literal["onnx", "torch-export"] = "onnx"
    """What to write."""
    net: str | None = None
    """Of a folder written by afield.save: the function that makes its network, as module:function."""
    example: Path | None = None
    """Of a folder written by afield.save: an npz file with a few typical inputs, an array for each argument."""
    labels: tuple[str, ...] = ()
    """Names of the classes, kept inside; if not given, the "labels" that afield.save was given as metadata."""
    alpha: float | None = None
    """Rate of false alarms behind the answer `accepted`; None: 0.01, or the smallest that the calibration can tell."""
    precision: Literal["fp16", "int8"] | None = None
    """Of the backbone; the difference it makes is reported."""
    tolerance: float | None = None
    """Largest difference of probabilities; None: 1e-4, and any with a reduced precision."""
    any_length: bool = False
    """Inputs may have any length as well (dimension 1), for texts."""
    opset: int = OLDEST_OPSET
    """Version of the ONNX operators."""

    def run(self) -> None:
        saved = (self.model / INDEX).is_file()
        model, example, labels = self._saved() if saved else self._trained()
        done = export(
            model,
            self.out or self.model / f"model{SUFFIXES[self.format]}",
            example,
            format=self.format,
            labels=self.labels or labels,
            alpha=self.alpha,
            precision=self.precision,
            tolerance=self.tolerance,
            any_length=self.any_length,
            opset=self.opset,
        )
        print(told(done, self.tolerance))

    def _trained(self) -> tuple[SNGP, Any, None]:
        if self.net is not None or self.example is not None:
            raise ValueError(f"--net and --example are for folders written by afield.save; {self.model} is not one.")
        run = run_folder.read(self.model)
        task, method, model = one_run.load(run)
        example = task.test.tensors[0][:_ROWS]
        if not isinstance(model, SNGP):
            raise ValueError(
                f"{self.model} holds a {run.method} model: export takes those with a Gaussian-process output, such as "
                "sngp and dnn-gp. Make a plain network into one with afield.attach."
            )
        alone, whole = model.predict(example), method.predict(model, example)
        if not torch.equal(alone.logits, whole.logits):
            raise ValueError(
                f"A prediction of {run.method} is an average over several passes, and an export holds one: export "
                f"the method that it is made from."
            )
        return model, example, None

    def _saved(self) -> tuple[SNGP, Any, Any]:
        if self.net is None or self.example is None:
            raise ValueError(
                f"{self.model} was written by afield.save: give --net module:function, which makes its network, and "
                "--example FILE.npz with a few typical inputs."
            )
        model = load(self.model, made(self.net))
        return model, _inputs(self.example), read_index(self.model)["metadata"].get("labels")


def made(name: str) -> nn.Module:
    """The network that module:function makes; modules of the current folder are found."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"--net expects module:function, such as mynets:resnet, got {name!r}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    make = getattr(importlib.import_module(module), function, None)
    if not callable(make):
        raise ValueError(f"The module {module} has no function {function}.")
    net = make()
    if not isinstance(net, nn.Module):
        raise ValueError(f"{name} must return a torch.nn.Module, got {type(net).__name__}.")
    return net


def told(done: Exported, tolerance: float | None = None) -> str:
    """What was written, how it compares, and how to run it."""
    meta, found = done.metadata, done.agreement
    what = "probabilities" if "probs" in meta["outputs"] else "mean and std, in units of the std,"
    on_example = max(value for name, value in found.example.items() if name in ("probs", "mean", "std"))
    reduced = meta["precision"] != "float32"
    limit = tolerance if tolerance is not None else None if reduced else TOLERANCE
    most = f"{found.difference:.1e}" if math.isfinite(found.difference) else f"a NaN ({found.worst})"
    lines = [
        f"Wrote {done.file} ({done.size / 1e6:.1f} MB, {meta['precision']}).",
        f"Compared with the model on {found.rows} rows, usual and extreme: {what} differ by at most "
        f"{most} ({'no limit' if limit is None else f'limit {limit:g}'}).",
    ]
    if reduced:
        lines.append(
            f"On typical rows: by at most {on_example:.1e}; same class in {found.same_choice:.1%} of them"
            + (f"; p-values by at most {found.example['p_value']:.1e}." if meta["calibrated"] else ".")
        )
    if found.unsettled:
        lines.append(
            f"Left out: {found.unsettled} rows so far away that the last digit of the input decides the model's answer."
        )
    if meta["calibrated"]:
        lines.append(
            f"Accepts an input if its {meta['score']} score is at most {meta['threshold']:.6g}; of in-domain inputs it "
            f"refuses {meta['alpha']:.2%} at most."
        )
    else:
        lines.append("The model is not calibrated: there are no p-values inside, and nothing is refused.")
    return "\n".join([*lines, "", *(f"    {line}" for line in snippet(done))])


def snippet(done: Exported) -> list[str]:
    """Three lines that run the file."""
    inputs, outputs = done.metadata["inputs"], ", ".join(done.metadata["outputs"])
    names = ["x"] if len(inputs) == 1 else [entry["name"] for entry in inputs]
    shapes = "; ".join(
        f"{name}: {entry['dtype']} ({', '.join(map(str, entry['shape']))})"
        for name, entry in zip(names, inputs, strict=True)
    )
    if done.metadata["format"] == "onnx":
        feed = ", ".join(f'"{entry["name"]}": {name}' for name, entry in zip(names, inputs, strict=True))
        return [
            "import onnxruntime",
            f'session = onnxruntime.InferenceSession("{done.file}")',
            f"{outputs} = session.run(None, {{{feed}}})  # {shapes}",
        ]
    return [
        "import torch",
        f'graph = torch.export.load("{done.file}").module()',
        f"answers = graph({', '.join(names)})  # {shapes} -> {outputs}, by name",
    ]


def _inputs(file: Path) -> Any:
    """One array as the only argument, several as keyword arguments."""
    with np.load(file, allow_pickle=False) as arrays:
        found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    if not found:
        raise ValueError(f"{file} holds no array: it should have one for each argument of the network.")
    return next(iter(found.values())) if len(found) == 1 else found
