"""Selection from a batch: the inputs that are far afield, with few false alarms among them.

    flag(p_values, fdr=0.1)        True (N,) for the inputs that are flagged

The hypothesis that each p-value tests is "this input is in-domain, drawn like the reference"; a flag rejects it. With
N p-values, Benjamini and Hochberg (1995) flag all of p <= t, for the largest t among them that has

    N t <= fdr #{p <= t}:

N t is about how many in-domain inputs p <= t would catch. The part of in-domain inputs among the flagged, 0 where
nothing is flagged, is then at most fdr on average over draws of the reference and of the batch: conformal p-values of
one reference are dependent, but for independent inputs positively so (PRDS), which is enough (Bates, Candes, Lei,
Romano and Sesia 2023). So are those by class, where each class has a reference of its own. For others, such as those of
ensembles (twice a mean), `any_dependence` divides fdr by 1 + 1/2 + ... + 1/N (Benjamini and Yekutieli 2001), which
needs no assumption.

A batch of N needs fine p-values: with n reference rows none is below 1 / (n + 1), so that either N / (fdr (n + 1))
inputs are flagged at least, or none.
"""

import math

import numpy as np
from torch import Tensor


def flag(p_values: Tensor, *, fdr: float = 0.1, any_dependence: bool = False) -> Tensor:
    """True (N,) for the inputs that are flagged as far afield; of these, at most a part fdr is in-domain on average.

    any_dependence  the promise holds however the p-values depend on each other, for fewer flags

    returns  the flags
    raises   ValueError if p-values or fdr are out of range

    >>> p_values = model.predict(torch.cat([x[:50], 40 + x[50:100]])).p_value
    >>> int(afield.selection.flag(p_values, fdr=0.1)[50:].sum())
    50
    """
    if p_values.dim() != 1:
        raise ValueError(f"Expected p-values of shape (batch,), got {tuple(p_values.shape)}.")
    counts, values = Counts(), p_values.detach().cpu()
    counts.add((values.float() if values.itemsize < 4 else values).numpy())
    return p_values <= counts.threshold(fdr, any_dependence=any_dependence)


class Counts:
    """How often each p-value occurred: all that a selection needs, however long the stream.

    p-values are multiples of 1 / (reference rows + 1), so that there are no more of them than reference rows.
    """

    def __init__(self) -> None:
        self.values, self.counts = np.zeros(0), np.zeros(0, dtype=np.int64)
        self._rounding = 0.0

    @property
    def total(self) -> int:
        """N, how many p-values there were."""
        return int(self.counts.sum())

    def add(self, p_values: np.ndarray) -> None:
        """Count some more p-values (N,)."""
        if not bool(((p_values > 0) & (p_values <= 1)).all()):
            raise ValueError("p-values must lie above 0 and be at most 1, got others among them.")
        values = np.concatenate([self.values, p_values.astype(np.float64)])
        counts = np.concatenate([self.counts, np.ones(len(p_values), dtype=np.int64)])
        self.values, which = np.unique(values, return_inverse=True)
        self.counts = np.bincount(which, counts, minlength=len(self.values)).astype(np.int64)
        self._rounding = max(self._rounding, float(np.finfo(p_values.dtype).eps))

    def threshold(self, fdr: float, *, any_dependence: bool = False) -> float:
        """The largest p-value that is flagged; 0 where none is."""
        if not 0 < fdr < 1:
            raise ValueError(f"fdr must lie strictly between 0 and 1, got {fdr}.")
        total, level = self.total, fdr
        if any_dependence and total:
            level /= _harmonic(total)
        # A p-value that was rounded up in its last digit would miss the equality that it has.
        few_enough = self.values * total <= level * self.counts.cumsum() * (1 + self._rounding)
        return float(self.values[few_enough].max(initial=0.0))

    def count_to(self, threshold: float) -> int:
        """How many p-values are at most this."""
        return int(self.counts[self.values <= threshold].sum())


def _harmonic(n: int) -> float:
    """1 + 1/2 + ... + 1/n, to about 1e-12 for large n."""
    if n < 1000:
        return sum(1 / i for i in range(1, n + 1))
    return math.log(n) + 0.5772156649015329 + 1 / (2 * n) - 1 / (12 * n**2)
