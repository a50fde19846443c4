"""Hidden vectors on their way through a network: taken where the output layer stands, whatever is around it.

A network may take anything and return anything, so hidden vectors are not computed apart: the network runs as it is,
and its output layer hands over what reaches it, with zeros in place of logits.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

_CAPTURED: ContextVar[tuple[nn.Module, list[Tensor]] | None] = ContextVar("captured hidden vectors", default=None)


class Tap(nn.Module):
    """Stands where an output layer was, and only hands over what reaches it."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features

    def forward(self, h: Tensor) -> Tensor:
        zeros = handed_over(self, h, self.out_features)
        if zeros is None:
            raise RuntimeError("A Tap has no logits: run the network by `hidden_vectors`.")
        return zeros


def hidden_vectors(net: nn.Module, output: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Any]:
    """The hidden vectors that reach the layer `output` in one pass, and what the network returned."""
    captured: list[Tensor] = []
    layer = layer_at(net, output)
    if torch.compiler.is_dynamo_compiling():  # dynamo follows no ContextVar; nor do threads share a trace
        layer.captured = captured  # type: ignore[assignment]
        returned = net(*args, **kwargs)
        layer.captured = None  # type: ignore[assignment]
    else:
        token = _CAPTURED.set((layer, captured))
        try:
            returned = net(*args, **kwargs)
        finally:
            _CAPTURED.reset(token)
    if len(captured) != 1:
        raise RuntimeError(
            f"The output layer {output!r} ran {len(captured)} times in one forward pass, expected once. "
            "Name the layer that makes the logits with output=..."
        )
    return captured[0], returned


def handed_over(layer: nn.Module, h: Tensor, out_features: int) -> Tensor | None:
    """Zeros (..., K) in place of logits if the hidden vectors h (..., d) are wanted; None otherwise."""
    dynamo = torch.compiler.is_dynamo_compiling()
    if dynamo:
        captured = getattr(layer, "captured", None)
    else:
        wanted = _CAPTURED.get()  # of one head, where there are several
        captured = wanted[1] if wanted is not None and wanted[0] is layer else None
    if captured is None:
        return None
    captured.append(h)
    return h.new_zeros(*h.shape[:-1], out_features)


def layer_at(net: nn.Module, name: str) -> nn.Module:
    """`get_submodule`, in a fraction of its time."""
    found = net
    for part in name.split(".") if name else ():
        inner = found._modules.get(part)
        if inner is None:  # torch has the message
            return net.get_submodule(name)
        found = inner
    return found
