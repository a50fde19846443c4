"""Laplace against Hamiltonian Monte Carlo on the same random features of the same trained network.

    python -m bench.laplace_hmc        makes results/laplace-hmc.json, then fills docs/ablations.md

The features are those of a trained `sngp-paper` (length scale from the data, so that it trains everywhere), and the
output weights have their prior alone to tell: no amplitude, no logit scale, no calibration. The mode is common to all.
Sampled by the No-U-Turn sampler (`methods.gp_hmc`), the posterior of the weights is exact up to sampling error;
beside it are the Laplace posteriors of the paper, p*(1 - p*) shared by all classes, of the weights per class, and of
unit weights, each read by mean field and by Monte Carlo. Distances are between probabilities: the mean over examples of
half the sum of absolute differences, on test data and on OOD data.
"""

import json
import math
import time
from typing import Any

import torch
from torch import Tensor

import afield
from afield.experiment.training import batches, fit
from afield.gp.precision import curvature_weights
from afield.methods import METHODS
from afield.methods.gp_hmc import centred_directions, sample_weights
from afield.model.saving import write_file
from afield.prediction.predictive import mean_field, monte_carlo
from afield.tasks import TASKS, Task
from bench.defaults import ROOT, fill, markdown

RECORD, PAGE = ROOT / "results" / "laplace-hmc.json", ROOT / "docs" / "ablations.md"
TASK_NAMES, FEATURES, SAMPLES = ("two-moons", "digits"), 256, 1000
POSTERIORS = {  # (covariance, curvature)
    "p*(1 - p*), shared": ("shared", "likelihood"),
    "p(1 - p), per class": ("per_class", "likelihood"),
    "unit weights": ("shared", "unit"),
}


def compare(name: str) -> dict[str, Any]:
    """Distances of each Laplace posterior's probabilities from the sampled ones, on one task."""
    task: Task = TASKS[name](0)
    options = {"num_random_features": FEATURES, "length_scale": None, "warmup": 0.1}
    model = fit(task, METHODS["sngp-paper"], seed=0, **options)
    phi, y = features(model, task.train), task.train.tensors[1]
    sets = {"test": task.test, **task.ood}
    of_set = {part: features(model, data) for part, data in sets.items()}
    directions, begin = centred_directions(task.num_outputs), time.perf_counter()
    torch.manual_seed(0)
    mode, draws, divergences = sample_weights(phi, y, directions, "categorical", draws=500)
    seconds = time.perf_counter() - begin
    logits = {part: f @ mode @ directions for part, f in of_set.items()}
    exact = {part: sampled(f, draws.flatten(0, 1), directions) for part, f in of_set.items()}
    rows: dict[str, Any] = {"the mode alone": _against(exact, {part: z.softmax(-1) for part, z in logits.items()})}
    for label, (covariance, curvature) in POSTERIORS.items():
        begin = time.perf_counter()
        roots = laplace(phi, phi @ mode @ directions, covariance, curvature)
        spent = time.perf_counter() - begin
        variance = {part: _variance(roots, f) for part, f in of_set.items()}
        field = {part: mean_field(logits[part], v) for part, v in variance.items()}
        generator = torch.Generator().manual_seed(0)
        drawn = {part: monte_carlo(logits[part], v, SAMPLES, generator).mean(0) for part, v in variance.items()}
        rows[f"{label}; mean field"] = _against(exact, field) | {"seconds": spent}
        rows[f"{label}; Monte Carlo"] = _against(exact, drawn) | {"seconds": spent}
    # The larger half of the draws against the smaller one: how far two exact answers are apart.
    halves = [{p: sampled(f, d, directions) for p, f in of_set.items()} for d in draws]
    rows["two chains of the sampler"] = _against(*halves) | {"seconds": seconds}
    confidence = {part: float(p.amax(-1).mean()) for part, p in exact.items()}
    return {"rows": rows, "divergences": divergences, "confidence": confidence, "features": FEATURES}


def features(model: Any, data: Any) -> Tensor:
    """phi (N, D) in float64."""
    with torch.no_grad():
        return torch.cat([model.head.features(model.hidden(batch[0])) for batch in batches(data)]).double()


def sampled(phi: Tensor, draws: Tensor, directions: Tensor) -> Tensor:
    """The probabilities (N, K) on average over the draws (S, D, J)."""
    return torch.stack([(phi @ w @ directions).softmax(-1) for w in draws]).mean(0)


def laplace(phi: Tensor, logits: Tensor, covariance: str, curvature: str) -> list[Tensor]:
    """L^-1 for each precision I + sum_i w_i phi_i phi_i^T."""
    weights = curvature_weights(logits, likelihood="categorical", covariance=covariance, curvature=curvature)
    identity = torch.eye(phi.shape[1]).to(phi)
    lowers = [torch.linalg.cholesky(identity + (phi * w[:, None]).T @ phi) for w in weights.T]
    return [torch.linalg.solve_triangular(lower, identity, upper=False) for lower in lowers]


def _variance(roots: list[Tensor], phi: Tensor) -> Tensor:
    values = torch.stack([(phi @ root.T).square().sum(-1) for root in roots], dim=-1)
    return values[:, 0] if len(roots) == 1 else values


def _against(exact: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    distance = {part: float((exact[part] - other[part]).abs().sum(-1).mean() / 2) for part in exact}
    far = [value for part, value in distance.items() if part != "test"]
    confidence = [float(other[part].amax(-1).mean()) for part in exact if part != "test"]
    return {
        "test": round(distance["test"], 5),
        "ood": round(math.fsum(far) / len(far), 5),
        "confidence_ood": round(math.fsum(confidence) / len(confidence), 5),
    }


def tables() -> dict[str, str]:
    """The text between the marks of each name, from the record as it is."""
    tasks = json.loads(RECORD.read_text(encoding="utf-8"))["tasks"] if RECORD.exists() else {}
    columns = {"test": "test", "ood": "OOD", "confidence_ood": "confidence, OOD"}
    rows = [["", *[f"{task}: {head}" for task in tasks for head in columns.values()]]]
    for label in dict.fromkeys(label for task in tasks.values() for label in task["rows"]):
        cells = [f"{task['rows'][label][column]:.3f}" for task in tasks.values() for column in columns]
        rows.append([label.replace("*", "\\*"), *cells])
    return {"ablation hmc": markdown(rows, left=1)}


def main() -> None:
    torch.set_num_threads(1)
    record = {
        "command": "python -m bench.laplace_hmc",
        "versions": {"afield": afield.__version__, "torch": torch.__version__},
        "tasks": {name: compare(name) for name in TASK_NAMES},
    }
    write_file(RECORD, (json.dumps(record, indent=1) + "\n").encode())
    for name, text in tables().items():
        fill(PAGE, name, text)


if __name__ == "__main__":
    main()
