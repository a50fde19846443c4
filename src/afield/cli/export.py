"""`afield export`: a trained model as one file that answers without afield."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from afield.deploy.agreement import DECISIVE
from afield.deploy.export import OLDEST_OPSET, TOLERANCE, Exported, export
from afield.experiment.model_folder import is_saved, open_model
from afield.tasks.data import arrays

SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2"}


@dataclass(frozen=True)
class Export:
    """Write a trained model as one file, from raw input to probabilities, variance, score and p-value.

    It is compared with the model on usual and extreme inputs first, and written only if the two agree. An ONNX file
    runs in ONNX Runtime with neither afield nor torch installed.
    """

    model: tyro.conf.Positional[Path]
    """A run folder, such as runs/two-moons/sngp/0, or a folder written by afield.save, with --net and --example."""
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
        if is_saved(self.model):
            if self.net is None or self.example is None:
                raise ValueError(
                    f"{self.model} was written by afield.save: give --net module:function, which makes its network, "
                    "and --example FILE.npz with a few typical inputs."
                )
        elif self.net is not None or self.example is not None:
            raise ValueError(f"--net and --example are for folders written by afield.save; {self.model} is not one.")
        opened = open_model(self.model, self.net)
        exported = export(
            opened.as_sngp("export"),
            self.out or self.model / f"model{SUFFIXES[self.format]}",
            opened.example if self.example is None else _read_inputs(self.example),
            format=self.format,
            labels=self.labels or opened.labels or None,
            alpha=self.alpha,
            precision=self.precision,
            tolerance=self.tolerance,
            any_length=self.any_length,
            opset=self.opset,
        )
        print(summarize(exported, self.tolerance))


def summarize(exported: Exported, tolerance: float | None = None) -> str:
    """What was written, how it compares with the model, and how to run it."""
    meta, agreement = exported.metadata, exported.agreement
    what = "probabilities" if "probs" in meta["outputs"] else "mean and std, in units of the std,"
    on_example = max(value for name, value in agreement.example.items() if name in DECISIVE)
    reduced = meta["precision"] != "float32"
    limit = tolerance if tolerance is not None else None if reduced else TOLERANCE
    most = f"{agreement.difference:.1e}" if math.isfinite(agreement.difference) else f"a NaN ({agreement.worst})"
    lines = [
        f"Wrote {exported.file} ({exported.size / 1e6:.1f} MB, {meta['precision']}).",
        f"Compared with the model on {agreement.rows} rows, usual and extreme: {what} differ by at most "
        f"{most} ({'no limit' if limit is None else f'limit {limit:g}'}).",
    ]
    if reduced:
        lines.append(
            f"On typical rows: by at most {on_example:.1e}; same class in {agreement.same_choice:.1%} of them"
            + (f"; p-values by at most {agreement.example['p_value']:.1e}." if meta["calibrated"] else ".")
        )
    if agreement.undetermined:
        lines.append(
            f"Left out: {agreement.undetermined} rows so far away that the last digit of the input decides the model's "
            "answer."
        )
    if meta["calibrated"]:
        lines.append(
            f"Accepts an input if its {meta['score']} score is at most {meta['threshold']:.6g}; of in-domain inputs it "
            f"refuses {meta['alpha']:.2%} at most."
        )
    else:
        lines.append("The model is not calibrated: there are no p-values inside, and nothing is refused.")
    return "\n".join([*lines, "", *(f"    {line}" for line in snippet(exported))])


def snippet(exported: Exported) -> list[str]:
    """Three lines that run the file."""
    inputs, outputs = exported.metadata["inputs"], ", ".join(exported.metadata["outputs"])
    names = ["x"] if len(inputs) == 1 else [entry["name"] for entry in inputs]
    shapes = "; ".join(
        f"{name}: {entry['dtype']} ({', '.join(map(str, entry['shape']))})"
        for name, entry in zip(names, inputs, strict=True)
    )
    if exported.metadata["format"] == "onnx":
        feed = ", ".join(f'"{entry["name"]}": {name}' for name, entry in zip(names, inputs, strict=True))
        return [
            "import onnxruntime",
            f'session = onnxruntime.InferenceSession("{exported.file}")',
            f"{outputs} = session.run(None, {{{feed}}})  # {shapes}",
        ]
    return [
        "import torch",
        f'graph = torch.export.load("{exported.file}").module()',
        f"answers = graph({', '.join(names)})  # {shapes} -> {outputs}, by name",
    ]


def _read_inputs(file: Path) -> Any:
    """One array is the only argument of the network; several are keyword arguments."""
    inputs = {name: torch.from_numpy(array) for name, array in arrays(file).items()}
    if not inputs:
        raise ValueError(f"{file} holds no array: it should have one for each argument of the network.")
    return next(iter(inputs.values())) if len(inputs) == 1 else inputs
