"""Calibration of labels one by one: a scale and an amplitude for each, besides those of all."""

import torch
from torch import Tensor

from afield.gp.calibration_objective import choose, class_objective
from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS
from afield.prediction.predictive import per_output


def calibrate_labels(head: GaussianProcessHead, hidden: Tensor, target: Tensor, weight: Tensor | None) -> None:
    """Choose for each label as `afield.calibrate` does for all of them together, from the same examples."""
    parts = [head.posterior(h) for h in hidden.split(4096)]
    mean = torch.cat([m for m, _ in parts]).double()
    variance = per_output(torch.cat([v for _, v in parts]).double() / head.amplitude**2, mean)
    likelihood, scales = LIKELIHOODS[head.likelihood], []
    for k in range(head.out_features):
        objective = class_objective(likelihood, mean[:, [k]], variance[:, k], target[:, k], weight)
        scale, amplitude, _ = choose(objective, largest=True)
        scales.append([scale / float(head.logit_scale), amplitude / float(head.amplitude)])
    head.set_label_scales(torch.tensor(scales, dtype=torch.float64))
