"""`SNGP`: a network whose output layer is a Gaussian process. `afield.sngp` and `afield.attach` make one."""

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from afield.bounds.spectral import bounds_of, operator_norm
from afield.gp.capture import hidden_vectors
from afield.gp.head import GaussianProcessHead
from afield.model.batches import device_of, split_batch
from afield.model.evaluating import evaluating
from afield.model.input_errors import clearer_error
from afield.model.layers import layers_of, type_name
from afield.prediction.prediction import Prediction


@dataclass(frozen=True)
class AuditRow:
    """One layer of an `SNGP`: `norm` is nan where it has not been measured, `bound` None where there is none."""

    name: str
    type: str
    status: str
    norm: float
    bound: float | None
    binding: float


class SNGP(nn.Module):
    """A network whose output layer is a Gaussian process. Made by `sngp` and `attach`.

    Calling it is calling the network. `predict` gives the `Prediction`; `audit` tells what was bounded.
    """

    def __init__(self, net: nn.Module, output: str, *, kind: str, settings: dict[str, Any], reasons: dict[str, str]):
        super().__init__()
        self.net = net
        self.output, self.kind, self.settings = output, kind, settings
        self._reasons = reasons
        if not isinstance(self.head, GaussianProcessHead):
            raise TypeError(f"SNGP expects a GaussianProcessHead at {output!r}, got {type(self.head).__name__}.")

    @property
    def head(self) -> GaussianProcessHead:
        return self.net.get_submodule(self.output)  # type: ignore[return-value]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the network returns; its logits are the posterior mean."""
        return self.net(*args, **kwargs)

    def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        """The hidden vectors h (N, d) that reach the head."""
        try:
            h, returned = hidden_vectors(self.net, self.output, args, kwargs)
        except (RuntimeError, TypeError, IndexError) as error:
            if (clearer := clearer_error(self.net, args, kwargs)) is None:
                raise
            raise clearer from error
        logits, expected = getattr(returned, "logits", returned), h.shape[0] * self.head.out_features
        if isinstance(logits, Tensor) and logits.numel() != expected:
            raise RuntimeError(
                f"The output layer {self.output!r} makes {self.head.out_features} numbers an input, but the network "
                f"returned a tensor of shape {tuple(logits.shape)} for {h.shape[0]} inputs: it is not the last "
                "layer. Name the layer that makes the logits with output=..."
            )
        return h

    def predict(
        self,
        *args: Any,
        predictive: str = "mean_field",
        num_samples: int = 100,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Prediction:
        """One pass in evaluation mode, without gradients, leaving the model as it was."""
        if len(args) == 1 and isinstance(args[0], Mapping):
            args, kwargs, _ = split_batch({**args[0], **kwargs}, device_of(self))
        with evaluating(self):
            h = self.hidden(*args, **kwargs)
            return self.head.predict(h, predictive=predictive, num_samples=num_samples, generator=generator)

    def audit(self, file: TextIO | None = None) -> list[AuditRow]:
        """Print, for every layer, whether it is bounded or why not, its norm, its bound, how often that was binding."""
        rows = list(self._audit_rows())
        cells = [("layer", "type", "status", "norm", "bound", "binding")]
        for r in rows:
            norm = "" if math.isnan(r.norm) else f"{r.norm:.3f}"
            cells.append(
                (
                    r.name,
                    r.type,
                    r.status,
                    norm,
                    "" if r.bound is None else f"{r.bound:g}",
                    "" if math.isnan(r.binding) else f"{r.binding:.0%}",
                )
            )
        widths = [max(len(row[i]) for row in cells) for i in range(6)]
        for row in cells:
            left = "  ".join(c.ljust(w) for c, w in zip(row[:3], widths[:3], strict=True))
            right = "  ".join(c.rjust(w) for c, w in zip(row[3:], widths[3:], strict=True))
            print(f"{left}  {right}".rstrip(), file=file or sys.stdout)
        return rows

    def _audit_rows(self) -> Iterator[AuditRow]:
        for name, layer in layers_of(self.net):
            kind = type_name(layer)
            if layer is self.head:
                yield AuditRow(name or "(net)", kind, "output: Gaussian process", math.nan, None, math.nan)
                continue
            found = bounds_of(layer)
            if isinstance(layer, nn.MultiheadAttention):
                found |= {f"out_proj.{n}": b for n, b in bounds_of(layer.out_proj).items()}
            norm = math.nan
            with contextlib.suppress(TypeError, ValueError):  # no operator norm is defined, or not before an input
                norm = operator_norm(layer)
            if not found:
                yield AuditRow(
                    name or "(net)", kind, self._reasons.get(name, "not bounded: kept as it was"), norm, None, math.nan
                )
                continue
            status = "bounded" if not math.isnan(norm) else "bounded from its first input on"
            steps = sum(int(b.num_steps) for b in found.values())
            binding = sum(int(b.num_binding) for b in found.values()) / steps if steps else math.nan
            yield AuditRow(name or "(net)", kind, status, norm, next(iter(found.values())).c, binding)
