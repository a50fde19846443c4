"""How examples enter the posterior of a head, or leave it: features, curvature, weights and classes of a batch."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from afield.gp.precision import check_weights

if TYPE_CHECKING:
    from afield.gp.head import GaussianProcessHead


@torch.no_grad()
def accumulate(
    head: "GaussianProcessHead",
    h: Tensor,
    logits: Tensor | None,
    classes: Tensor | None,
    weights: Tensor | None,
    *,
    fast: bool = False,
    remove: bool = False,
) -> None:
    """Add examples to the sums of the head, or remove them; an error leaves the sums as they were."""
    head.checked(h)
    check_finite(h)
    for features in head.unadapted():
        features.adapt(h)
    psi = head.features_of_variance(h, limited=False)
    # Unit weights need no logits, and known classes neither: with many of them they would cost more than the rest.
    needed = head.curvature != "unit" or (classes is None and head.class_distance is not None)
    rows = h.shape[0] if needed or logits is not None else min(1, h.shape[0])
    if logits is None:
        logits = head.mean_of(h[:rows], None, psi[:rows])
    if logits.shape != (rows, head.out_features):
        raise ValueError(f"logits must have shape ({rows}, {head.out_features}), got {tuple(logits.shape)}.")
    w = None if head.curvature == "unit" else head.curvature_weights(logits)
    if weights is not None:
        weights = check_weights(weights, h.shape[0])
    counts, log_ratio = weights, head.log_noise_ratio(h)
    if log_ratio is not None:
        quiet = torch.exp(-log_ratio.double().mean(1))
        counts = quiet if weights is None else weights.to(quiet) * quiet
    if counts is not None:
        given = counts.to(psi)[:, None]
        w = given.expand(-1, head.precision.num_matrices) if w is None else w * given
    check_finite(psi, *([] if w is None else [w]))
    if remove:
        head.precision.downdate(psi, w)
    else:
        head.precision.update(psi, w, fast=fast)
    if head.class_distance is not None:
        outputs = _outputs_of(head, classes, logits)
        head.class_distance.update(h, outputs, weights, sign=-1.0 if remove else 1.0)
    head.forget_score()


def _outputs_of(head: "GaussianProcessHead", classes: Tensor | None, logits: Tensor) -> Tensor:
    """Which of all outputs, dropped ones included, the classes (N,) are; None: the most probable ones."""
    if classes is None:
        classes = logits.argmax(-1) if head.out_features > 1 else (logits[:, 0] > 0).long()
    if not head.dropped:
        return classes
    shown = [k for k in range(head.first_outputs + len(head.added)) if k not in head.dropped]
    return torch.tensor(shown, device=classes.device)[classes]


def check_finite(*tensors: Tensor, before: int = 0) -> None:
    """Name the rows that hold NaN or infinity; `before` examples of the loader came in earlier batches."""
    finite = torch.stack([torch.isfinite(t).all(dim=-1) for t in tensors]).all(0)
    if not bool(finite.all()):
        rows = (~finite).nonzero().flatten().tolist()
        where = f", which are examples {[before + row for row in rows[:5]]} of the loader" if before else ""
        raise ValueError(
            f"Hidden features must be finite, got NaN or infinity in {len(rows)} of {len(finite)} rows "
            f"(first: {rows[:5]}){where}. Nothing of this batch was added; look at the inputs or the backbone."
        )
