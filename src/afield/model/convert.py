"""Make anybody's network distance-aware: bound its hidden layers, put a Gaussian process where its last Linear was.

`sngp` and `attach` copy the network, find its output layer, and put a `GaussianProcessHead` in its place, so that
calling the model goes through the network's own `forward`, whatever that takes and returns.
"""

import copy
import fnmatch
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, overload

from torch import Tensor, nn

from afield.bounds.spectral import BOUNDABLE, bound, boundable
from afield.errors import WrongOutput
from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS, UNDECIDED
from afield.gp.variance_features import FOR_NUMBERS, FOR_VARIANCE, enough_features
from afield.model.batches import device_of, split_batch
from afield.model.evaluating import evaluating
from afield.model.layers import (
    CONVOLUTION,
    OUTPUT_LAYERS,
    OutputLayer,
    kind_of,
    layers_of,
    replace_layer,
    type_name,
    unwrapped,
)
from afield.model.output_check import check_example
from afield.model.sngp_model import SNGP, Heads, convert_each
from afield.outputs.positions import ChannelsFirst

Several = list[str] | tuple[str, ...]
BoundRules = float | Mapping[str | type[nn.Module], float | None] | None
DEFAULT_BOUNDS: Mapping[str | type[nn.Module], float | None] = MappingProxyType(
    {nn.Linear: 0.95, nn.MultiheadAttention: 0.95, nn.Conv1d: 6.0, nn.Conv2d: 6.0, nn.Conv3d: 6.0}
)
"""By type of layer; docs/defaults.md has the evidence. 6 is the paper's for convolutions."""
_PROBLEMS = {"multi_label_classification": "bernoulli", "regression": "gaussian"}  # of Hugging Face
_LOGITS = ("out", "logits")  # where torchvision and Hugging Face return them
_MOVED = 1e-3  # rounding, as a part of the largest logit
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@overload
def sngp(
    net: nn.Module,
    bound: BoundRules = ...,
    *,
    output: str | None = None,
    freeze: bool = False,
    example: Any = None,
    **head: Any,
) -> SNGP: ...


@overload
def sngp(
    net: nn.Module,
    bound: BoundRules = ...,
    *,
    output: Several,
    freeze: bool = False,
    example: Any = None,
    **head: Any,
) -> Heads: ...


def sngp(
    net: nn.Module,
    bound: BoundRules = DEFAULT_BOUNDS,
    *,
    output: str | Several | None = None,
    freeze: bool = False,
    example: Any = None,
    **head: Any,
) -> SNGP | Heads:
    """A copy of `net` with bounded hidden layers and a Gaussian-process output layer; `net` is not touched.

    bound    0.95 for Linear and attention projections and 6 for convolutions, unless given; a number for all of them;
             None for no bounds; or a mapping from layer types and name patterns to numbers or None, such as
             {nn.Conv2d: 3.0, "fc*": 0.95}. A name pattern goes before a type, an earlier entry before a later one,
             and a layer without an entry stays unbounded. {**DEFAULT_BOUNDS, "stem": None} changes the default.
             BatchNorm's scale is bounded only where the mapping says so.
    output   the name of the Linear that makes the logits; found by itself when it is the last one registered. A list of
             names makes `model.sngp_model.Heads`; an option may then be a mapping with a value for each
    freeze   train only the output weights, for `afield.fit_head` on a trained network
    example  a batch, as a loader gives it: the network runs on it once, and it is an error if it returns something
             else than the logits of its output layer. Without one `afield.fit_posterior` looks at its first batch
    head     options of `GaussianProcessHead`; `out_features` defaults to the old layer's. The variance of a classifier
             has features of its own, fitted to the trained hidden space; variance_features="same" is the paper's form

    A converted model comes back as a copy of itself.

    returns  the copy, an `SNGP`: train it as before, then `afield.fit_posterior` and `afield.calibrate`
    raises   ValueError if the network has no Linear, `output` names none, or `bound` names what is no hidden layer

    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    >>> model = afield.sngp(net)
    >>> model(torch.randn(5, 2)).shape
    torch.Size([5, 3])
    >>> [row.status for row in model.audit()][0]  # doctest: +ELLIPSIS
    layer...
    'bounded'
    """
    if output is not None and not isinstance(output, str):
        return convert_each(
            sngp, net, output, {"bound": None}, {"bound": bound, "freeze": freeze, "example": example, **head}
        )
    settings = {"bound": _bound_settings(bound), "output": output, "freeze": freeze, "head": _plain_options(head)}
    if isinstance(net, SNGP):
        default = {"bound": _bound_settings(DEFAULT_BOUNDS), "output": None, "freeze": False, "head": {}}
        return _checked(_again(net, "sngp", settings, default), example)
    net, output, old, kind = _copied(net, output)
    head = {**kind.options, **of_problem(net), **head}
    settings["head"] = _plain_options(head)
    out_features = head.pop("out_features", kind.outputs(old))
    new = GaussianProcessHead(kind.inputs(old), out_features, **{"variance_features": "auto", **head})
    reasons = bound_layers(net, bound, skip=output)
    if freeze:
        net.requires_grad_(False)
    net = replace_layer(net, output, kind.around(new.to(old.weight)))
    return _checked(SNGP(net, output, kind="sngp", settings=settings, reasons=reasons), example)


@overload
def attach(net: nn.Module, *, output: str | None = None, example: Any = None, **head: Any) -> SNGP: ...


@overload
def attach(net: nn.Module, *, output: Several, example: Any = None, **head: Any) -> Heads: ...


def attach(net: nn.Module, *, output: str | Several | None = None, example: Any = None, **head: Any) -> SNGP | Heads:
    """A copy of a trained `net` that keeps its predictions and gains a variance over its last hidden layer.

    The dense output layer stays the posterior mean, so the most probable class never changes. The variance is over the
    direction and the length of the hidden vector, for numbers over the standardised vector; its moments and length
    scale are taken from the training data by `afield.fit_posterior`. Nothing trains: every parameter is frozen.

    `output`, `example` and the options `head` are those of `sngp`. One output may be a logit or a number: unless
    `likelihood` tells, the targets that `afield.fit_posterior` sees do.

    returns  the copy, an `SNGP`: next are `afield.fit_posterior` and `afield.calibrate`
    raises   ValueError if the network has no Linear, `output` names none, or the covariance is not "shared"

    >>> attached = afield.attach(net)
    >>> bool((attached(x).argmax(1) == net(x).argmax(1)).all())
    True
    >>> afield.fit_posterior(attached, train_loader)
    200
    """
    if output is not None and not isinstance(output, str):
        return convert_each(attach, net, output, {}, {"example": example, **head})
    settings = {"output": output, "head": _plain_options(head)}
    if isinstance(net, SNGP):
        return _checked(_again(net, "attach", settings, {"output": None, "head": {}}), example)
    if head.get("covariance", "shared") != "shared":
        raise ValueError('attach keeps the most probable class, which needs covariance="shared".')
    net, output, old, kind = _copied(net, output)
    head = {**_enough(kind.inputs(old)), **kind.attached, **of_problem(net), **head}
    settings["head"] = _plain_options(head)
    undecided = "likelihood" not in head and kind.outputs(old) == 1
    of_classes = not undecided and LIKELIHOODS[head.get("likelihood", "categorical")].of_classes
    options = {**(FOR_VARIANCE if of_classes else FOR_NUMBERS), **head}
    if undecided:
        options["likelihood"] = "bernoulli"  # for now
    new = GaussianProcessHead(kind.inputs(old), kind.outputs(old), mean=kind.of_rows(old), **options)
    if undecided:
        new.likelihood = UNDECIDED
    net = replace_layer(net, output, kind.around(new.to(old.weight))).requires_grad_(False)
    return _checked(SNGP(net, output, kind="attach", settings=settings, reasons={}), example)


class OutputLast(nn.Module):
    """Runs a network without its output layer, and the layer on what comes out: logits (N, K, *P), and nothing else."""

    def __init__(self, body: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.body, self.output = body, output

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.output(_tensor(self.body(*args, **kwargs)))


def output_last(net: nn.Module, example: Any, *, output: str | None = None) -> OutputLast:
    """A copy of a network that interpolates its logits, with the output layer behind the interpolation.

    A convolution with a kernel of size 1 mixes channels, an interpolation mixes places with weights that sum to one, so
    the two may change places. Behind it, every pixel of the answer has a hidden vector, hence a variance, of its own;
    before it only those of the coarse grid have, and a variance is not interpolated like a mean.

    example  a batch, as a loader gives it: both networks run on it once, and must return the same logits
    output   the name of the convolution or Linear that makes the logits; the last one registered unless given

    Of what the network returns, the copy returns the logits alone: a tensor, or the field "out" or "logits". Hidden
    vectors take as much memory as the logits times d / K.

    raises   WrongOutput if the logits are not the same: something else than interpolation stands behind the layer

    >>> low = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.nn.ReLU())
    >>> fcn = torch.nn.Sequential(low, torch.nn.Conv2d(8, 2, 1), torch.nn.Upsample(scale_factor=2, mode="bilinear"))
    >>> model = afield.attach(afield.output_last(fcn, torch.randn(2, 3, 16, 16)))
    >>> model(torch.randn(2, 3, 16, 16)).shape
    torch.Size([2, 2, 16, 16])
    """
    body, name, layer, _ = _copied(net, output)
    last = OutputLast(replace_layer(body, name, nn.Identity()), layer)
    args, kwargs, _ = split_batch(example, device_of(net), net=net, wants_target=False)
    why = "the logits are not the same"
    try:
        with evaluating(net), evaluating(last):
            expected, found = _tensor(net(*args, **kwargs)), last(*args, **kwargs)
        error = float((expected - found).abs().max()) if expected.shape == found.shape else math.inf
        if error <= _MOVED * (1 + float(expected.abs().max())):
            return last
    except (RuntimeError, TypeError) as failure:
        why = str(failure)
    raise WrongOutput(
        f"The output layer {name!r} cannot be put behind what follows it: {why}. Only interpolation, cropping and "
        "reordering of places may follow it. Name the layer that makes the logits with output=..., or change forward."
    )


def _tensor(returned: Any) -> Tensor:
    if isinstance(returned, Tensor):
        return returned
    for name in _LOGITS:
        found = returned.get(name) if isinstance(returned, Mapping) else getattr(returned, name, None)
        if isinstance(found, Tensor):
            return found
    raise TypeError(f"the network returns {type(returned).__name__}, without a tensor under {' or '.join(_LOGITS)}")


def of_problem(net: nn.Module) -> dict[str, Any]:
    """The likelihood that a Hugging Face network's configuration names."""
    problem = getattr(getattr(net, "config", None), "problem_type", None)
    return {"likelihood": _PROBLEMS[problem]} if problem in _PROBLEMS else {}


def _checked(model: SNGP, example: Any) -> SNGP:
    if example is not None:
        check_example(model, example)
    return model


def _enough(width: int) -> dict[str, Any]:
    return {"num_random_features": enough_features(width)}


def _again(model: SNGP, kind: str, asked: dict[str, Any], default: dict[str, Any]) -> SNGP:
    """A copy of a converted model, unless something else is asked for than it was made with."""
    usual: dict[str, Any] = _enough(model.head.in_features) if kind == "attach" else {}
    if isinstance(model.net.get_submodule(model.output), ChannelsFirst):
        usual |= CONVOLUTION.attached if kind == "attach" else CONVOLUTION.options
    same = asked | {"head": {**usual, **asked["head"]}} == model.settings
    if model.kind != kind or not (asked == default or same):
        raise ValueError(
            f"This model was converted by afield.{model.kind} already; convert the original network again to change "
            f"it (made with {model.settings}, asked for {asked})."
        )
    return copy.deepcopy(model)


def _copied(net: nn.Module, output: str | None) -> tuple[nn.Module, str, Any, OutputLayer]:
    """A copy of the network as it is inside its containers, and its output layer: name, module and kind."""
    net = unwrapped(net)
    kinds: Any = tuple(OUTPUT_LAYERS)
    layers = {name: m for name, m in net.named_modules() if isinstance(m, kinds)}
    inside = {f"{name}.out_proj".lstrip(".") for name, m in net.named_modules() if isinstance(m, nn.MultiheadAttention)}
    body = getattr(net, "base_model", net)  # Hugging Face: a few networks register their classifier before the body
    if isinstance(body, nn.Module) and body is not net:
        within = set(map(id, body.modules()))
        inside |= {name for name, m in layers.items() if id(m) in within}
    if output is None:
        candidates = [name for name, m in layers.items() if name not in inside and kind_of(m) is not None]
        if not candidates:
            raise ValueError(
                f"{type(net).__name__} has no Linear layer to replace: the output must be a Linear, or a convolution "
                "with a kernel of size 1."
            )
        output = candidates[-1]
    elif (output := output.replace("_orig_mod.", "")) not in layers or kind_of(layers[output]) is None:
        raise ValueError(
            f"output={output!r} is not a Linear of this network, nor a convolution with a kernel of size 1. There are: "
            f"{', '.join(name for name, m in layers.items() if kind_of(m) is not None)}."
        )
    layer = net.get_submodule(output)
    kind = kind_of(layer)
    assert kind is not None
    return net, output, layer, kind


def bound_layers(net: nn.Module, rules: BoundRules, skip: str) -> dict[str, str]:
    """Bound the layers of `net`, in place, as `sngp` does with its copy.

    rules  what `sngp` takes as `bound`
    skip   the name of the output layer

    returns  for every layer that was not bounded, the reason
    raises   ValueError for a rule that matches no hidden layer

    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    >>> from afield.model.convert import DEFAULT_BOUNDS, bound_layers
    >>> bound_layers(net, DEFAULT_BOUNDS, skip="2")
    {}
    >>> round(float(afield.spectral.operator_norm(net[0])), 2) <= 0.95
    True
    """
    reasons: dict[str, str] = {}
    by_default = isinstance(rules, Mapping) and rules.items() >= DEFAULT_BOUNDS.items()
    unused = set(rules) if isinstance(rules, Mapping) else set()
    if by_default:  # a network need not have every type of layer
        unused -= set(DEFAULT_BOUNDS)
    for name, layer in layers_of(net):
        if name == skip:
            continue
        c, key = _bound_for(name, layer, rules)
        unused.discard(key)
        if not isinstance(layer, BOUNDABLE):
            reasons[name] = f"not bounded: no bound is defined for {type_name(layer)}"
        elif c is None:
            on_request = isinstance(layer, _BATCH_NORM) and (by_default or not isinstance(rules, Mapping | None))
            reasons[name] = (
                "not bounded: its scale is bounded on request" if on_request else "not bounded: by the rules"
            )
        elif not boundable(layer):
            reasons[name] = "not bounded: it has no scale or no running statistics"
        elif _computes_its_own_way(layer):
            reasons[name] = f"not bounded: {type_name(layer)} computes in its own way, its operator is not known"
        else:
            bound(layer, c)
    if unused:
        names = ", ".join(repr(k) if isinstance(k, str) else k.__name__ for k in unused)
        layers = ", ".join(name for name, _ in layers_of(net))
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


def _bound_settings(rules: BoundRules) -> Any:
    if not isinstance(rules, Mapping):
        return rules
    return [[key if isinstance(key, str) else {"type": key.__name__}, c] for key, c in rules.items()]


def _plain_options(head: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in head.items() if k != "generator"}
