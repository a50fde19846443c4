"""Several heads on one body: an output layer for each question, a posterior for each.

    model = afield.sngp(net, output=["color", "shape"])       or afield.attach
    afield.fit_posterior(model, train)                        batches (inputs, {"color": ..., "shape": ...})
    model.predict(x)["color"]                                 a `Prediction` of each

Each head is an `SNGP` of its own over the network that they share, `model["color"]`: what takes a model takes it, such
as `afield.posterior.update`, `afield.export.export` or `sample`. Training changes the body of all, so that all are then
fitted anew. A prediction runs the network once for each head.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor, nn

from afield.model.batches import is_loader
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction

P, R = ParamSpec("P"), TypeVar("R")


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
