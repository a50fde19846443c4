"""Make anybody's network distance-aware: bound its hidden layers, put a Gaussian process where its last Linear was.

`sngp` and `attach` copy the network, find its output layer, and put a `GaussianProcessHead` in its place, so that
calling the model goes through the network's own `forward`, whatever that takes and returns.
"""

import copy
import fnmatch
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from afield.bounds.spectral import BOUNDABLE, bound, boundable
from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS, UNDECIDED
from afield.gp.variance_features import FOR_NUMBERS, FOR_VARIANCE
from afield.model.layers import layers_of, replace_layer, type_name
from afield.model.output_check import check_example
from afield.model.sngp_model import SNGP

BoundRules = float | Mapping[str | type[nn.Module], float | None] | None
DEFAULT_BOUNDS: Mapping[str | type[nn.Module], float | None] = MappingProxyType(
    {nn.Linear: 0.95, nn.MultiheadAttention: 0.95, nn.Conv1d: 6.0, nn.Conv2d: 6.0, nn.Conv3d: 6.0}
)
"""By type of layer; docs/defaults.md has the evidence. 6 is the paper's for convolutions."""
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def sngp(
    net: nn.Module,
    bound: BoundRules = DEFAULT_BOUNDS,
    *,
    output: str | None = None,
    freeze: bool = False,
    example: Any = None,
    **head: Any,
) -> SNGP:
    """A copy of `net` with bounded hidden layers and a Gaussian-process output layer; `net` is not touched.

    bound    0.95 for Linear and attention projections and 6 for convolutions, unless given; a number for all of them;
             None for no bounds; or a mapping from layer types and name patterns to numbers or None, such as
             {nn.Conv2d: 3.0, "fc*": 0.95}. A name pattern goes before a type, an earlier entry before a later one,
             and a layer without an entry stays unbounded. {**DEFAULT_BOUNDS, "stem": None} changes the default.
             BatchNorm's scale is bounded only where the mapping says so.
    output   the name of the Linear that makes the logits; found by itself when it is the last one registered
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
    settings = {"bound": _bound_settings(bound), "output": output, "freeze": freeze, "head": _plain_options(head)}
    if isinstance(net, SNGP):
        default = {"bound": _bound_settings(DEFAULT_BOUNDS), "output": None, "freeze": False, "head": {}}
        return _checked(_again(net, "sngp", settings, default), example)
    net, output, old = _copied(net, output)
    out_features = head.pop("out_features", old.out_features)
    new = GaussianProcessHead(old.in_features, out_features, **{"variance_features": "auto", **head})
    reasons = bound_layers(net, bound, skip=output)
    if freeze:
        net.requires_grad_(False)
    net = replace_layer(net, output, new.to(old.weight))
    return _checked(SNGP(net, output, kind="sngp", settings=settings, reasons=reasons), example)


def attach(net: nn.Module, *, output: str | None = None, example: Any = None, **head: Any) -> SNGP:
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
    settings = {"output": output, "head": _plain_options(head)}
    if isinstance(net, SNGP):
        return _checked(_again(net, "attach", settings, {"output": None, "head": {}}), example)
    if head.get("covariance", "shared") != "shared":
        raise ValueError('attach keeps the most probable class, which needs covariance="shared".')
    net, output, old = _copied(net, output)
    undecided = "likelihood" not in head and old.out_features == 1
    of_classes = not undecided and LIKELIHOODS[head.get("likelihood", "categorical")].of_classes
    options = {**(FOR_VARIANCE if of_classes else FOR_NUMBERS), **head}
    if undecided:
        options["likelihood"] = "bernoulli"  # for now
    new = GaussianProcessHead(old.in_features, old.out_features, mean=old, **options)
    if undecided:
        new.likelihood = UNDECIDED
    net = replace_layer(net, output, new.to(old.weight)).requires_grad_(False)
    return _checked(SNGP(net, output, kind="attach", settings=settings, reasons={}), example)


def _checked(model: SNGP, example: Any) -> SNGP:
    if example is not None:
        check_example(model, example)
    return model


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


def bound_layers(net: nn.Module, rules: BoundRules, skip: str) -> dict[str, str]:
    """Bound what the rules say; for every other layer, the reason why not."""
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
