"""Risk against coverage: the trade between answering often and answering well."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RiskCoverage:
    """The error rate (`risk`) among the fraction (`coverage`) of examples with the lowest scores."""

    coverage: Tensor
    risk: Tensor

    @property
    def area(self) -> float:
        """The area under the curve: lower is better."""
        return float(self.risk.mean())

    def coverage_at(self, risk: float) -> float:
        """The largest coverage whose empirical risk is at most `risk`."""
        good = self.coverage[self.risk <= risk]
        return float(good.max()) if good.numel() else 0.0


def risk_coverage(score: Tensor, correct: Tensor, *, errors_first: bool = False) -> RiskCoverage:
    """The curve of scores (N,) and correctness (N,).

    errors_first  among equal scores, count errors first: the curve then does not depend on the order of the examples
    """
    if score.shape != correct.shape or score.dim() != 1:
        raise ValueError(f"risk_coverage expects two vectors of one length, got {score.shape} and {correct.shape}.")
    wrong = ~correct.bool()
    if errors_first:
        order = (~wrong).long().argsort(stable=True)
        score, wrong = score[order], wrong[order]
    wrong = wrong[score.argsort(stable=True)].double()
    accepted = torch.arange(1, wrong.numel() + 1, dtype=torch.float64, device=wrong.device)
    return RiskCoverage(accepted / wrong.numel(), wrong.cumsum(0) / accepted)
