"""A model card: one page on one model, from what its folder holds. It says nothing that is not there.

model_card(folder, net)        Markdown
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from afield.decide.policies import Policy
from afield.deploy.traced import chosen_alpha
from afield.experiment import run_folder
from afield.experiment.model_folder import OpenedModel, is_saved, open_model
from afield.gp.likelihoods import LIKELIHOODS
from afield.model.saving import read_index
from afield.model.sngp_model import SNGP
from afield.prediction.p_values import fewest_rows

_QUALITY = ("accuracy", "nll", "brier", "ece", "rmse")
_DETECTION = ("auroc", "fpr95")
_LIMITS = (
    "p-values and policies promise about inputs drawn like the held-out data. Under a shift the promise is void, and "
    "an alarm for drift says so: `afield serve`, `afield score --watch`.",
    "The model looks at its inputs alone. Labels that change their meaning are seen by nobody without new labels.",
    "An input can be accepted and answered wrongly: acceptance says that it looks usual, not that the answer is right.",
)


def model_card(folder: str | os.PathLike[str], net: nn.Module | str | None = None) -> str:
    """The card of a folder that `afield.save` wrote, with `net` as in `afield.load`, or of a run."""
    opened = open_model(folder, net)
    saved = is_saved(opened.folder)
    metadata = read_index(opened.folder)["metadata"] if saved else {}
    run = None if saved else run_folder.read(opened.folder)
    sections = {
        "Model": _model(opened),
        "Data": _data(opened),
        "Calibration": _calibration(opened),
        "Guarantees": _guarantees(opened, metadata),
        "Metrics on test data": _metrics(run.metrics) if run is not None else _told(metadata.get("metrics")),
        "Limits": [f"- {limit}" for limit in _LIMITS],
        "Versions": _versions(opened, run),
    }
    parts = [f"# Model card: {opened.folder.resolve().name if saved else f'{run.task}, {run.method}'}"]  # type: ignore[union-attr]
    parts += [f"## {title}\n\n" + "\n".join(lines) for title, lines in sections.items() if lines]
    return "\n\n".join(parts) + "\n"


def _model(opened: OpenedModel) -> list[str]:
    parameters = sum(p.numel() for p in opened.model.parameters())
    lines = [f"- kind: {opened.kind}", f"- weights: {parameters:,}", f"- SHA-256: `{opened.identity}`"]
    if isinstance(opened.model, SNGP):
        head = opened.model.head
        lines.append(f"- output: Gaussian process, {head.likelihood}, {head.out_features} outputs, "
                     f"{head.random_features.weight.shape[0]} random features")  # fmt: skip
    return [*lines, *([f"- classes: {', '.join(opened.labels)}"] if opened.labels else [])]


def _data(opened: OpenedModel) -> list[str]:
    lines = []
    if opened.task is not None:
        sizes = {"training": opened.task.train, "validation": opened.task.val, "test": opened.task.test}
        lines += [f"- {name}: {len(part):,} examples" for name, part in sizes.items()]
    if isinstance(opened.model, SNGP):
        lines.append(f"- the posterior was fitted to {opened.model.head.num_observed:,} examples")
        lines.append(f"- the reference of p-values has {len(opened.model.head.reference):,} scores")
    return lines


def _calibration(opened: OpenedModel) -> list[str]:
    if not isinstance(opened.model, SNGP) or not opened.model.head.calibrated:
        return ["Not calibrated: there are no p-values, and nothing is refused."]
    head = opened.model.head
    scaled = LIKELIHOODS[head.likelihood].calibrated == "logit_scale"
    by_class = "by predicted class" if len(head.reference_spans) else "of one reference"
    return [
        f"- p-values {by_class}; the smallest is {1 / (fewest_rows(head.reference, head.reference_spans) + 1):.3g}",
        f"- score: {head.score}",
        f"- amplitude of the variance: {float(head.amplitude):.4g}",
        *([f"- the logits are multiplied by {float(head.logit_scale):.4g}"] if scaled else []),
    ]


def _guarantees(opened: OpenedModel, metadata: Mapping[str, Any]) -> list[str]:
    lines = []
    if isinstance(opened.model, SNGP) and (alpha := chosen_alpha(opened.model, None)) is not None:
        lines.append(f"- At `alpha={alpha:.3g}` at most {alpha:.1%} of fresh in-domain inputs are refused, on average "
                     "over draws of the held-out data.")  # fmt: skip
    if "policy" in metadata:
        rule = Policy.from_dict(metadata["policy"])
        lines.append(f"- {rule.guarantee}")
        if rule.held_out is not None:
            lines.append(f"- On the {rule.held_out.count:,} examples that the policy was chosen on it answered "
                         f"{rule.held_out.coverage:.1%}.")  # fmt: skip
    return lines


def _metrics(metrics: Mapping[str, float]) -> list[str]:
    """Quality on the parts of the task, and detection of every OOD set by the default score of the run."""
    lines = ["| | figure | value |", "|---|---|---:|"]
    for name, value in metrics.items():
        metric, *rest = name.split("/")
        if metric in _QUALITY and len(rest) == 1 and rest[0] != "val":
            lines.append(f"| {rest[0]} | {metric} | {value:.4f} |")
        if metric in _DETECTION and len(rest) == 2 and rest[1] == "joined":
            lines.append(f"| {rest[0]} (OOD) | {metric}, joined score | {value:.4f} |")
    return lines if len(lines) > 2 else []


def _told(metrics: Any) -> list[str]:
    """What whoever saved the model has measured."""
    if not isinstance(metrics, Mapping) or not metrics:
        return []
    lines = [f"| {name} | {value:.4f} |" for name, value in metrics.items() if isinstance(value, int | float)]
    title = 'As told by `afield.save(..., metadata={"metrics": ...})`.'
    return [title, "", "| metric | value |", "|---|---:|", *lines]


def _versions(opened: OpenedModel, run: run_folder.Run | None) -> list[str]:
    about = dict(run.environment) if run is not None else read_index(opened.folder)
    names = ("afield", "torch", "numpy", "python", "machine", "command", "ended")
    return [f"- {name}: {about[name]}" for name in names if name in about]


def write_card(folder: Path, out: Path, net: str | None = None) -> Path:
    """Write the card of a model to a file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(model_card(folder, net), encoding="utf-8")
    return out
