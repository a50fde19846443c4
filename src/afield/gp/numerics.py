"""Digits that must not be lost: buffers that keep their dtype, and products that autocast leaves alone.

`.half()` and `.float()` change the dtype of a network. Sums over examples, quantiles and constants that took float64 to
make must not lose their digits to that, so they follow to another device, and to nothing else.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

_NOTHING = contextlib.nullcontext()


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Products keep their dtype. torch's own context costs as much as a small product, so it is entered if need be."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING


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
