"""Make anybody's network distance-aware: bound its hidden layers, put a Gaussian process where its last Linear was.

`sngp` and `attach` copy the network, find its output layer, and put a `GaussianProcessHead` in its place, so that
calling the model goes through the network's own `forward`, whatever that takes and returns.
"""

import contextlib
import copy
import fnmatch
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from afield.batch import device_of, evaluating, split_batch
from afield.explain import explain
from afield.head import GaussianProcessHead
from afield.predictive import Prediction
from afield.spectral import BOUNDABLE, bound, boundable, bounds_of, operator_norm

BoundRules = float | Mapping[str | type[nn.Module], float | None] | None
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


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
        with self.head.capture() as seen:
            try:
                out = self.net(*args, **kwargs)
            except (RuntimeError, TypeError, IndexError) as error:
                if (clearer := explain(self.net, args, kwargs)) is None:
                    raise
                raise clearer from error
        if len(seen) != 1:
            raise RuntimeError(
                f"The output layer {self.output!r} ran {len(seen)} times in one forward pass, expected once. "
                "Name the layer that makes the logits with output=..."
            )
        logits, expected = getattr(out, "logits", out), seen[0].shape[0] * self.head.out_features
        if isinstance(logits, Tensor) and logits.numel() != expected:
            raise RuntimeError(
                f"The output layer {self.output!r} makes {self.head.out_features} numbers an input, but the network "
                f"returned a tensor of shape {tuple(logits.shape)} for {seen[0].shape[0]} inputs: it is not the last "
                "layer. Name the layer that makes the logits with output=..."
            )
        return seen[0]

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
        for name, layer in _layers(self.net):
            kind = _plain_type(layer)
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


def sngp(
    net: nn.Module, bound: BoundRules = 0.95, *, output: str | None = None, freeze: bool = False, **head: Any
) -> SNGP:
    """A copy of `net` with bounded hidden layers and a Gaussian-process output layer; `net` is not touched.

    bound    a number for every Linear, convolution and attention projection; None for no bounds; or a mapping from
             layer types and name patterns to numbers or None, such as {nn.Conv2d: 6.0, "fc*": 0.95}. A name pattern
             goes before a type, an earlier entry before a later one, and a layer without an entry stays unbounded.
             BatchNorm's scale is bounded only where the mapping says so.
    output   the name of the Linear that makes the logits; found by itself when it is the last one registered
    freeze   train only the output weights, for `afield.fit_head` on a trained network
    head     options of `GaussianProcessHead`; `out_features` defaults to the old layer's

    A converted model comes back as a copy of itself.
    """
    settings = {"bound": _bound_settings(bound), "output": output, "freeze": freeze, "head": _plain_options(head)}
    if isinstance(net, SNGP):
        return _again(net, "sngp", settings, {"bound": 0.95, "output": None, "freeze": False, "head": {}})
    net, output, old = _copied(net, output)
    out_features = head.pop("out_features", old.out_features)
    new = GaussianProcessHead(old.in_features, out_features, **head)
    reasons = bound_layers(net, bound, skip=output)
    if freeze:
        net.requires_grad_(False)
    net = _replaced(net, output, new.to(old.weight))
    return SNGP(net, output, kind="sngp", settings=settings, reasons=reasons)


def attach(net: nn.Module, *, output: str | None = None, **head: Any) -> SNGP:
    """A copy of a trained `net` that keeps its predictions and gains a variance over its last hidden layer.

    The dense output layer stays the posterior mean, so the most probable class never changes. Hidden units are
    standardised and the length scale taken from the training data, both by `afield.fit_posterior`. Nothing trains:
    every parameter is frozen.
    """
    settings = {"output": output, "head": _plain_options(head)}
    if isinstance(net, SNGP):
        return _again(net, "attach", settings, {"output": None, "head": {}})
    if head.get("covariance", "shared") != "shared":
        raise ValueError('attach keeps the most probable class, which needs covariance="shared".')
    net, output, old = _copied(net, output)
    options = {"normalize_input": "standardize", **head}
    if "likelihood" not in options and old.out_features == 1:
        options["likelihood"] = "bernoulli"
    new = GaussianProcessHead(old.in_features, old.out_features, mean=old, **options)
    net = _replaced(net, output, new.to(old.weight)).requires_grad_(False)
    return SNGP(net, output, kind="attach", settings=settings, reasons={})


def _again(model: SNGP, kind: str, asked: dict[str, Any], default: dict[str, Any]) -> SNGP:
    """A copy of a converted model, unless something else is asked for than it was made with."""
    if model.kind != kind or asked not in (default, model.settings):
        raise ValueError(
            f"This model was converted by afield.{model.kind} already; convert the original network again to change "
            f"it (made with {model.settings}, asked for {asked})."
        )
    return copy.deepcopy(model)


def _copied(net: nn.Module, output: str | None) -> tuple[nn.Module, str, nn.Linear]:
    linears = {name: m for name, m in net.named_modules() if isinstance(m, nn.Linear)}
    inside = {f"{name}.out_proj".lstrip(".") for name, m in net.named_modules() if isinstance(m, nn.MultiheadAttention)}
    body = getattr(net, "base_model", net)  # Hugging Face: a few networks register their classifier before the body
    if isinstance(body, nn.Module) and body is not net:
        within = set(map(id, body.modules()))
        inside |= {name for name, m in linears.items() if id(m) in within}
    if output is None:
        candidates = [name for name in linears if name not in inside]
        if not candidates:
            raise ValueError(f"{type(net).__name__} has no Linear layer to replace: the output must be a Linear.")
        output = candidates[-1]
    elif output not in linears:
        raise ValueError(f"output={output!r} is not a Linear of this network. Its Linear layers: {', '.join(linears)}.")
    net = copy.deepcopy(net)
    layer = net.get_submodule(output)
    assert isinstance(layer, nn.Linear)
    return net, output, layer


def _replaced(net: nn.Module, name: str, new: nn.Module) -> nn.Module:
    if not name:
        return new
    old = net.get_submodule(name)
    for parent in list(net.modules()):  # under every name that it has
        for child, module in list(parent._modules.items()):
            if module is old:
                setattr(parent, child, new)
    return net


def bound_layers(net: nn.Module, rules: BoundRules, skip: str) -> dict[str, str]:
    """Bound what the rules say; for every other layer, the reason why not."""
    reasons: dict[str, str] = {}
    unused = set(rules) if isinstance(rules, Mapping) else set()
    for name, layer in _layers(net):
        if name == skip:
            continue
        c, key = _bound_for(name, layer, rules)
        unused.discard(key)
        if not isinstance(layer, BOUNDABLE):
            reasons[name] = f"not bounded: no bound is defined for {_plain_type(layer)}"
        elif c is None:
            on_request = isinstance(layer, _BATCH_NORM) and not isinstance(rules, Mapping) and rules is not None
            reasons[name] = (
                "not bounded: its scale is bounded on request" if on_request else "not bounded: by the rules"
            )
        elif not boundable(layer):
            reasons[name] = "not bounded: it has no scale or no running statistics"
        elif _computes_its_own_way(layer):
            reasons[name] = f"not bounded: {_plain_type(layer)} computes in its own way, its operator is not known"
        else:
            bound(layer, c)
    if unused:
        names = ", ".join(repr(k) if isinstance(k, str) else k.__name__ for k in unused)
        layers = ", ".join(name for name, _ in _layers(net))
        raise ValueError(f"bound has entries that match no hidden layer: {names}. The layers are: {layers}.")
    return reasons


def _computes_its_own_way(layer: nn.Module) -> bool:
    """A subclass that pads or standardises in a forward of its own: the bound would be on another operator."""
    known = next(kind for kind in type(layer).__mro__ if kind in BOUNDABLE)
    return not isinstance(layer, _BATCH_NORM) and type(layer).forward is not known.forward


def _bound_for(name: str, layer: nn.Module, rules: BoundRules) -> tuple[float | None, str | type | None]:
    if not isinstance(rules, Mapping):
        return (None if isinstance(layer, _BATCH_NORM) else rules), None
    for key, c in rules.items():
        if isinstance(key, str) and fnmatch.fnmatchcase(name, key):
            return c, key
    for key, c in rules.items():
        if isinstance(key, type) and isinstance(layer, key):
            return c, key
    return None, None


def _layers(net: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module that holds parameters of its own; what a GP head or an attention layer owns goes with it."""
    covered: list[str] = []
    for name, module in net.named_modules():
        if any(name.startswith(prefix) for prefix in covered) or ".parametrizations" in f".{name}":
            continue
        if isinstance(module, GaussianProcessHead | nn.MultiheadAttention):
            covered.append(f"{name}." if name else "")
            yield name, module
        elif (
            isinstance(module, BOUNDABLE)  # also without parameters: a BatchNorm without a scale still has a gain
            or next(module.parameters(recurse=False), None) is not None
            or "parametrizations" in module._modules
        ):
            yield name, module


def _plain_type(layer: nn.Module) -> str:
    return type(layer).__name__.removeprefix("Parametrized")


def _bound_settings(rules: BoundRules) -> Any:
    if not isinstance(rules, Mapping):
        return rules
    return [[key if isinstance(key, str) else {"type": key.__name__}, c] for key, c in rules.items()]


def _plain_options(head: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in head.items() if k != "generator"}
