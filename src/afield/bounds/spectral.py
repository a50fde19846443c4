"""Spectral bounds: hidden layers that cannot stretch distances by more than c.

    W_bar = W min(1, c / sigma(W))                                   paper: eq. (spec_norm)

sigma is the norm of the layer's *true operator*: the matrix for Linear, the convolution itself (stride, padding,
dilation, groups, input size) for Conv1d/2d/3d, each of the packed projections of MultiheadAttention, and
max |scale| / sqrt(running variance + eps) for BatchNorm. The reshaped kernel of a convolution tells little: a 3x3
box blur has norm 1, its reshaped kernel 1/3. Below the bound the weight is untouched, bit for bit.

sigma follows the weight by power iteration, one step for each change of the weight in training mode and none in
evaluation; it starts converged (Lanczos). A convolution learns its input size from the first input it sees.
"""

import copy
import math
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from afield.bounds.convolution import Convolution, lanczos
from afield.bounds.layer_bounds import BatchNormBound, Bound, ConvBound, MatrixBound, batch_norm_gains
from afield.bounds.parametrized import refine_class

Layer = TypeVar("Layer", bound=nn.Module)
_BatchNorm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_Conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BOUNDABLE = (nn.Linear, *_Conv, nn.MultiheadAttention, *_BatchNorm)
_MEASURE_STEPS = 128


def bound(layer: Layer, c: float = 0.95) -> Layer:
    """Bound the operator norm of a layer's weights by c, in place; a layer bounded before gets the new c.

    returns  the layer
    raises   TypeError if no bound is defined for it; ValueError if c is not positive

    >>> layer = afield.bound(torch.nn.Linear(8, 8), 0.5)
    >>> afield.spectral.operator_norm(layer.eval()) < 0.6
    True
    """
    if not c > 0:
        raise ValueError(f"The bound c must be positive, got {c}.")
    names = _weight_names(layer)
    if not names:
        kinds = ", ".join(kind.__name__ for kind in BOUNDABLE)
        raise TypeError(f"bound expects one of {kinds} with a weight, got {type(layer).__name__}.")
    for name in names:
        if (existing := bound_of(layer, name)) is not None:
            existing.c = c
            continue
        parametrization: Bound
        if isinstance(layer, _Conv):
            parametrization = ConvBound(layer, c)
            layer.register_forward_pre_hook(parametrization.see_input, with_kwargs=True)
        elif isinstance(layer, _BatchNorm):
            parametrization = BatchNormBound(layer, c)
        else:
            parametrization = MatrixBound(getattr(layer, name), c, blocks=3 if name == "in_proj_weight" else 1)
        # unsafe: the check would call the parametrisation, and so iterate, before anything is known of the input.
        parametrize.register_parametrization(layer, name, parametrization, unsafe=True)
        refine_class(layer, name)
    if isinstance(layer, nn.MultiheadAttention):
        bound(layer.out_proj, c)
    return layer


def boundable(layer: nn.Module) -> bool:
    """Whether the layer has a weight that `bound` can bound."""
    return bool(_weight_names(layer))


def bound_of(layer: nn.Module, name: str = "weight") -> "Bound | None":
    """The bound on a layer's weight, or None."""
    if not parametrize.is_parametrized(layer, name):
        return None
    chain = cast(nn.ModuleDict, layer.parametrizations)[name]
    return next((p for p in cast(nn.ModuleList, chain) if isinstance(p, Bound)), None)


def bounds_of(layer: nn.Module) -> dict[str, "Bound"]:
    """All bounds of one layer by the name of the weight."""
    found = {name: bound_of(layer, name) for name in _weight_names(layer)}
    return {name: b for name, b in found.items() if b is not None}


def operator_norm(layer: nn.Module, input_shape: tuple[int, ...] | None = None) -> float:
    """The norm of the layer's operator as it acts now: exact for Linear and BatchNorm, by Lanczos for convolutions.

    `input_shape`: the spatial size of a convolution's input, e.g. (32, 32); a bounded layer that has seen an input
    knows it. For MultiheadAttention, the largest of its projections.

    returns  the norm
    raises   TypeError if none is defined for the layer; ValueError if a convolution needs `input_shape`

    >>> afield.spectral.operator_norm(torch.nn.Conv2d(3, 8, 3), (32, 32)) > 0
    True
    """
    if isinstance(layer, nn.Linear):
        return float(torch.linalg.matrix_norm(_still(layer).double(), 2))
    if isinstance(layer, nn.MultiheadAttention):
        matrices = [m for n in _weight_names(layer) for m in _still(layer, n).split(layer.embed_dim)]
        return max(float(torch.linalg.matrix_norm(m.double(), 2)) for m in [*matrices, _still(layer.out_proj)])
    if isinstance(layer, _BatchNorm):
        return float(batch_norm_gains(layer, _still(layer) if layer.affine else None).abs().amax())
    if isinstance(layer, _Conv):
        known = bound_of(layer)
        if input_shape is None and isinstance(known, ConvBound):
            input_shape = known.input_size
        if input_shape is None:
            raise ValueError(
                f"The norm of a convolution depends on its input: give input_shape, the spatial size, "
                f"e.g. {(32,) * len(layer.kernel_size)}."
            )
        operator = Convolution(layer, _still(layer).double(), tuple(input_shape[-len(layer.kernel_size) :]))
        return float(lanczos(operator.apply, operator.adjoint, operator.start(), _MEASURE_STEPS)[0])
    raise TypeError(f"operator_norm knows Linear, Conv1d/2d/3d, MultiheadAttention, BatchNorm; got {type(layer)}.")


def certified_norm(layer: nn.Module) -> float:
    """An upper bound on the operator norm that holds for every input size; math.inf where none is known.

    A zero-padded or circular convolution is no larger than sup over frequencies of |W_hat|. On a grid of N points a
    side, a trigonometric polynomial of degree n exceeds its largest sample by a factor of at most 1 / cos(pi n / N)
    (Ehlich and Zeller 1964), so a fine grid bounds the supremum. Striding only drops outputs.

    returns  the bound

    >>> layer = torch.nn.Conv2d(3, 8, 3)
    >>> afield.spectral.certified_norm(layer) >= afield.spectral.operator_norm(layer, (16, 16))
    True
    """
    if isinstance(layer, (nn.Linear, *_BatchNorm)):
        return operator_norm(layer) * (1 + 1e-12)
    if not isinstance(layer, _Conv) or layer.padding_mode not in ("zeros", "circular"):
        return math.inf
    weight = _still(layer).double()
    dims = tuple(range(2, weight.dim()))
    sizes = [max(16, 12 * (k // 2)) if k > 1 else 1 for k in layer.kernel_size]
    slack = math.prod(1 / math.cos(math.pi * (k // 2) / n) for k, n in zip(layer.kernel_size, sizes, strict=True))
    symbol = torch.fft.fftn(weight, s=sizes, dim=dims).movedim(dims, tuple(range(len(dims)))).flatten(0, len(dims) - 1)
    groups = symbol.unflatten(1, (layer.groups, -1)).flatten(0, 1)
    if layer.padding_mode == "circular":  # what is padded beyond the kernel's reach comes out more than once
        pads = layer._reversed_padding_repeated_twice
        reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        for covered, before, after in zip(reversed(reach), pads[::2], pads[1::2], strict=True):
            extra = before + after - covered
            slack *= math.sqrt(1 + math.ceil(extra / max(before, after))) if extra > 0 else 1.0
    return float(torch.linalg.matrix_norm(groups, 2).amax()) * slack


def fold(model: Layer) -> Layer:
    """A plain copy of the model with the bounded weights written out: it pickles, exports and trains unbounded.

    The original lives on. `torch.nn.utils.parametrize.remove_parametrizations` on a copy would break it, because a
    copy shares the class that was injected into the original; here the copy gets its own class back first.

    returns  the copy, in which no layer is bounded any more

    >>> plain = afield.fold(model)
    >>> torch.equal(plain(x), model(x))
    True
    """
    plain = copy.deepcopy(model)
    # A model that knows the weights it was fitted with is fitted with the folded ones: they act alike.
    fitted: list[Any] = [m for m in plain.modules() if getattr(m, "fingerprint", None) is not None]
    fitted = [m for m in fitted if m.is_fresh()]
    for module in plain.modules():
        hooks = module._forward_pre_hooks
        for key in [k for k, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), ConvBound)]:
            del hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        if not parametrize.is_parametrized(module):
            continue
        chains = cast(nn.ModuleDict, module.parametrizations)
        trained = {name: any(p.requires_grad for p in chain.parameters()) for name, chain in chains.items()}
        values = {name: _still(module, name).clone() for name in trained}
        module.__class__ = type(module).__mro__[1]
        del module._modules["parametrizations"]
        for name, value in values.items():
            module.register_parameter(name, nn.Parameter(value, requires_grad=trained[name]))
    for m in fitted:
        m.take_fingerprint()
    return plain


@torch.no_grad()
def _still(layer: nn.Module, name: str = "weight") -> Tensor:
    """A weight as evaluation sees it: reading it iterates nothing."""
    modes = [(m, m.training) for m in layer.modules()]
    layer.eval()
    try:
        return cast(Tensor, getattr(layer, name)).detach()
    finally:
        for m, training in modes:
            m.training = training


def _weight_names(layer: nn.Module) -> tuple[str, ...]:
    if isinstance(layer, nn.MultiheadAttention):
        packed = layer._qkv_same_embed_dim
        return ("in_proj_weight",) if packed else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    if isinstance(layer, (nn.Linear, *_Conv)):
        return ("weight",)
    return ("weight",) if isinstance(layer, _BatchNorm) and layer.affine and layer.track_running_stats else ()
