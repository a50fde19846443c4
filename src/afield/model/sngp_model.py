"""`SNGP`: a network whose output layer is a Gaussian process; `Heads`: one with several.

`afield.sngp` and `afield.attach` make them. Several heads share one body, and have a posterior each:

    model = afield.sngp(net, output=["color", "shape"])       or afield.attach
    afield.fit_posterior(model, train)                        batches (inputs, {"color": ..., "shape": ...})
    model.predict(x)["color"]                                 a `Prediction` of each

Each head is an `SNGP` of its own over the network that they share, `model["color"]`: what takes a model takes it, such
as `afield.posterior.update`, `afield.export.export` or `sample`. Training changes the body of all, so that all are then
fitted anew. A prediction runs the network once for each head.
"""

import contextlib
import copy
import dataclasses
import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TextIO, TypeVar

import torch
from torch import Tensor, nn

from afield.bounds.spectral import bounds_of, operator_norm
from afield.bounds.weight_cache import kept_weights
from afield.errors import Stale, StaleWarning, WrongOutput
from afield.gp.capture import hidden_vectors, layer_at
from afield.gp.head import GaussianProcessHead
from afield.model.batches import as_tensors, device_of, dtype_of, is_loader, split_batch
from afield.model.evaluating import evaluating
from afield.model.fingerprint import Fingerprint
from afield.model.input_errors import clearer_error, find_overflow, predict_unsure
from afield.model.layers import layers_of, type_name
from afield.outputs.draws import sample_functions
from afield.outputs.positions import ChannelsFirst, as_returned, mask_of, predict_positions
from afield.prediction.positions import unflatten
from afield.prediction.prediction import Prediction

CHANGED = "The network has changed since its posterior was fitted (trained, loaded, or moved to another precision)."
P = ParamSpec("P")
R = TypeVar("R")
RESIZED = (
    "Logits that are interpolated afterwards: convert afield.output_last(net, example), which interpolates before the "
    "output layer and returns the same."
)
REFIT = "Call afield.fit_posterior, then afield.calibrate."


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

    >>> p = model.predict(x[:4])
    >>> p.probs.shape, p.p_value.shape
    (torch.Size([4, 3]), torch.Size([4]))
    """

    def __init__(self, net: nn.Module, output: str, *, kind: str, settings: dict[str, Any], reasons: dict[str, str]):
        super().__init__()
        self.net = net
        self.output, self.kind, self.settings = output, kind, settings
        within = isinstance(net.get_submodule(output), ChannelsFirst)
        self.head_name = f"{output}.head".lstrip(".") if within else output
        self._reasons = reasons
        self.fingerprint: Fingerprint | None = None  # of the network that the posterior was fitted with
        if not isinstance(self.head, GaussianProcessHead):
            raise TypeError(f"SNGP expects a GaussianProcessHead at {output!r}, got {type(self.head).__name__}.")

    @property
    def head(self) -> GaussianProcessHead:
        return layer_at(self.net, self.head_name)  # type: ignore[return-value]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the network returns; its logits are the posterior mean."""
        return self.net(*args, **kwargs)

    def hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        """The hidden vectors h (N, d) that reach the head, or (N, *P, d) where the network answers at positions P."""
        if not all(isinstance(value, Tensor) for value in (*args, *kwargs.values())):  # arrays, perhaps
            place = device_of(self), dtype_of(self)
            args = tuple(value if isinstance(value, Tensor) else as_tensors(value, *place) for value in args)
            kwargs = {k: v if isinstance(v, Tensor) else as_tensors(v, *place) for k, v in kwargs.items()}
        try:
            h, returned = hidden_vectors(self.net, self.head_name, args, kwargs)
        except (RuntimeError, TypeError, IndexError) as error:
            if (clearer := clearer_error(self.net, args, kwargs)) is None:
                raise
            raise clearer from error
        except AttributeError as error:
            if error.obj is not self.head:
                raise
            raise WrongOutput(
                f"The network reads {error.name!r} of its output layer {self.output!r}, which is a Gaussian process "
                "now, instead of calling it: let forward call the layer, or name another one with output=..."
            ) from error
        logits = returned if isinstance(returned, Tensor) else getattr(returned, "logits", returned)
        expected = math.prod(h.shape[:-1]) * self.head.out_features
        if isinstance(logits, Tensor) and logits.numel() != expected:
            raise RuntimeError(
                f"The output layer {self.output!r} makes {self.head.out_features} numbers for each of "
                f"{tuple(h.shape[:-1])} inputs or positions, but the network returned a tensor of shape "
                f"{tuple(logits.shape)}: it is not the last layer. Name the layer that makes the logits with "
                f"output=... {RESIZED}"
            )
        return as_returned(h, returned, self.head.out_features)

    def predict(
        self,
        *args: Any,
        predictive: str | None = None,
        num_samples: int = 100,
        generator: torch.Generator | None = None,
        gradients: bool = False,
        joined: bool = False,
        **kwargs: Any,
    ) -> Prediction:
        """One pass in evaluation mode, without gradients, leaving the model as it was.

        Takes what the network takes; a mapping of it; arrays in place of tensors; or a loader, whose batches are
        joined in one prediction: `target` and `inputs` choose their fields as in `afield.fit_posterior`.

        gradients  follow the pass, so that score, variance and probabilities can be differentiated with respect to the
                   inputs that require it: x.requires_grad_(); p.score().sum().backward(); x.grad
        joined     at positions, such as pixels, make the joined score also where p-values rest on another, which is the
                   default there; elsewhere it is always made
        """
        if gradients and not any(isinstance(v, Tensor) and v.requires_grad for v in (*args, *kwargs.values())):
            raise ValueError(
                "gradients=True expects inputs of real numbers that require them, got none: x.requires_grad_() before "
                "predict. Whole numbers, such as token ids, have no gradient: give their embeddings."
            )
        options: dict[str, Any] = {"predictive": predictive, "num_samples": num_samples, "generator": generator}
        if len(args) == 1 and not isinstance(args[0], Tensor):
            if is_loader(args[0]):
                return self._predict_all(args[0], options | {"joined": joined}, **kwargs)
            if isinstance(args[0], Mapping):
                args, kwargs, _ = split_batch({**args[0], **kwargs}, device_of(self), net=self.net)
        with evaluating(self, gradients=gradients), kept_weights(self.net):
            fresh = self._seems_fresh()  # now: what it looks at is in the processor's caches, which the pass fills
            h, overflown = find_overflow(self.hidden(*args, **kwargs), args or tuple(kwargs.values()))
            if overflown is not None:
                prediction = predict_unsure(self.head, h, overflown, **options)
            elif h.dim() <= 2:
                prediction = self.head.predict(h, **options)
            else:
                prediction = predict_positions(self.head, h, mask_of(kwargs, h.shape[:-1]), joined=joined, **options)
        if fresh:
            return prediction
        warnings.warn(f"{CHANGED} The variance is of other weights, and p-values are off. {REFIT}", StaleWarning, 2)
        off: dict[str, Any] = dict.fromkeys(
            ("p_value", "smallest_p_value", "num_reference", "input_p_value", "num_inputs")
        )
        return dataclasses.replace(prediction, **off)

    def sample(
        self, *args: Any, num_samples: int = 1, generator: torch.Generator | None = None, **kwargs: Any
    ) -> Tensor:
        """Functions drawn from the posterior, at these inputs: (S, N, K), or (S, N, K, *P) at positions P.

        One draw is one function, whatever the input: a generator in the same state gives the same functions for other
        inputs, so that draws of a batch belong together. Logits of classes, numbers without their noise, log rates. For
        active learning and Bayesian optimisation, which look at several inputs at once.
        """
        self.check_fresh("sample from the posterior")
        if len(args) == 1 and isinstance(args[0], Mapping):
            args, kwargs, _ = split_batch({**args[0], **kwargs}, device_of(self), net=self.net)
        with evaluating(self), kept_weights(self.net):
            h = self.hidden(*args, **kwargs)
            values = sample_functions(self.head, h.flatten(0, -2), num_samples, generator)
        return values if h.dim() == 2 else unflatten(values, tuple(h.shape[:-1]), 1)

    def is_fresh(self) -> bool:
        """Whether the network is, by its content, the one that its posterior was fitted with."""
        return self.fingerprint is None or self.fingerprint.still_holds(self.net, thorough=True)

    def _seems_fresh(self) -> bool:
        """The same as far as versions, addresses and a few bytes tell."""
        return self.fingerprint is None or torch.compiler.is_compiling() or self.fingerprint.still_holds(self.net)

    def take_fingerprint(self) -> None:
        """From now on, the posterior belongs to the network as it is."""
        self.fingerprint = Fingerprint(self.net)

    def check_fresh(self, what: str) -> None:
        """An error if the network is not the one that its posterior was fitted with."""
        if not self.is_fresh():
            raise Stale(f"Cannot {what}: {CHANGED[0].lower()}{CHANGED[1:]} {REFIT}")

    def _predict_all(self, loader: Iterable[Any], options: dict[str, Any], **kwargs: Any) -> Prediction:
        """Of all batches of a loader; `kwargs` that choose no fields go to the network with each."""
        fields = {name: kwargs.pop(name, None) for name in ("target", "inputs")}
        parts, device = [], device_of(self)
        for batch in loader:
            args, named, _ = split_batch(batch, device, net=self.net, wants_target=False, **fields)
            parts.append(self.predict(*args, **{**named, **kwargs}, **options))
        if not parts:
            raise ValueError("predict got an empty loader: there is nothing to predict. Can it be read only once?")
        return Prediction.cat(parts)

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


class Heads(nn.Module):
    """A network with several Gaussian-process output layers, by name. Calling it is calling the network."""

    def __init__(self, net: nn.Module, parts: Mapping[str, SNGP]) -> None:
        super().__init__()
        self.net = net
        self._parts = dict(parts)  # a dict: their network is this one's, and has its tensors once

    def __getitem__(self, name: str) -> SNGP:
        if name not in self._parts:
            raise KeyError(f"{name!r} is not a head of this model. There are: {', '.join(self._parts)}.")
        return self._parts[name]

    def items(self) -> Iterable[tuple[str, SNGP]]:
        return self._parts.items()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the network returns; its logits are the posterior means."""
        return self.net(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> dict[str, Prediction]:
        """The `Prediction` of each head, by name; arguments are those of `SNGP.predict`."""
        if len(args) == 1 and is_loader(args[0]) and not isinstance(args[0], Tensor | Sequence):
            args = (list(args[0]),)  # it may be read only once
        return {name: part.predict(*args, **kwargs) for name, part in self.items()}

    def sample(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Functions drawn from the posterior of each head; arguments are those of `SNGP.sample`."""
        return {name: part.sample(*args, **kwargs) for name, part in self.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Heads":
        copies = {name: copy.deepcopy(part, memo) for name, part in self.items()}  # by the memo of one network
        return Heads(next(iter(copies.values())).net, copies)


def convert_each(
    convert: Callable[..., SNGP],
    net: nn.Module,
    output: Sequence[str],
    later: Mapping[str, Any],
    options: dict[str, Any],
) -> Heads:
    """Convert one output layer after the other.

    later    options that take the place of others after the first: the body is bounded once
    options  a mapping from all the names has one for each head
    """
    names = list(output)
    if len(set(names)) != len(names) or not names:
        raise ValueError(f"output expects names of different layers, got {names}.")
    made: list[SNGP] = []
    for name in names:
        own = {key: value[name] if _by_name(value, names) else value for key, value in options.items()}
        made.append(convert(net, output=name, **own))
        net, options = made[-1].net, options | dict(later)
    return join(dict(zip(names, made, strict=True)))


def join(made: Mapping[str, SNGP]) -> Heads:
    """Of models each of which was converted from the network of the one before: the last has all heads."""
    parts, first = list(made.values()), next(iter(made.values()))
    net = parts[-1].net
    return Heads(
        net,
        {
            name: SNGP(net, part.output, kind=part.kind, settings=part.settings, reasons=first._reasons)
            for name, part in made.items()
        },
    )


def parts_of(model: "SNGP | Heads") -> list[SNGP]:
    """The model of each head."""
    return [part for _, part in model.items()] if isinstance(model, Heads) else [model]


def _by_name(value: Any, names: list[str]) -> bool:
    return isinstance(value, Mapping) and set(value) == set(names)


def for_each_head(
    function: Callable[Concatenate[SNGP, Iterable[Any], P], R],
) -> Callable[Concatenate[Any, Iterable[Any], P], Any]:
    """Let a function of a model and a loader take `Heads`: targets are then mappings by head; so is what it returns."""

    @functools.wraps(function)
    def of_each(model: Any, loader: Iterable[Any], *args: P.args, **kwargs: P.kwargs) -> Any:
        if not isinstance(model, Heads):
            return function(model, loader, *args, **kwargs)
        batches = list(loader) if isinstance(loader, Iterator) else loader
        return {name: function(part, _Part(batches, name), *args, **kwargs) for name, part in model.items()}

    return of_each


class _Part:
    """The batches of a loader with the target of one head; it can be read as often as the loader."""

    def __init__(self, loader: Iterable[Any], name: str) -> None:
        self.loader, self.name = loader, name

    def over(self, loader: Iterable[Any]) -> "_Part":
        return _Part(loader, self.name)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if isinstance(batch, tuple | list) and batch and isinstance(batch[-1], Mapping):
                target = batch[-1]
                if self.name not in target:
                    raise ValueError(
                        f"The targets have no {self.name!r}, which is a head: there are {', '.join(target)}."
                    )
                yield (*batch[:-1], target[self.name])
            elif isinstance(batch, tuple | list) and len(batch) > 1:
                raise ValueError(
                    f"A model with several heads expects batches (inputs, targets by name), such as {{{self.name!r}: "
                    f"tensor}}, got a target of type {type(batch[-1]).__name__}."
                )
            else:
                yield batch
