"""Modules whose buffers keep their digits, and whose saved buffers say how many rows there are.

`.half()` and `.float()` change the dtype of a network. Sums over examples, quantiles and constants that took float64 to
make must not lose their digits to that, so they follow to another device, and to nothing else.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Self

from torch import Tensor, nn


class ExactBuffers(nn.Module):
    """A module of which some buffers never change their dtype."""

    @property
    def exact(self) -> Iterable[str]:
        """Their names."""
        return ()

    def make_room(
        self, saved: Mapping[str, Tensor], prefix: str, names: Iterable[str], rows: Collection[int] | None = None
    ) -> None:
        """Give these buffers as many rows as the saved ones have: none where they are not there.

        rows  the numbers that are right; None: any. Others are left to torch, which refuses them
        """
        for name in names:
            value, own = saved.get(prefix + name), getattr(self, name)
            if value is None or value.dim() != own.dim() or value.shape[1:] != own.shape[1:]:
                continue
            if rows is None or len(value) in rows:
                setattr(self, name, own.new_zeros(value.shape))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: value for name in self.exact if (value := self._buffers[name]) is not None}
        super()._apply(fn, recurse)
        for name, value in before.items():
            setattr(self, name, value.to(getattr(self, name).device))
        return self
