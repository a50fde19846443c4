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

from afield.bounds import optimizer_steps
from afield.bounds.convolution import Convolution, ConvolutionSettings, lanczos
from afield.bounds.eager import eager
from afield.bounds.parametrized import refine_class
from afield.bounds.weight_cache import Place, followed

Layer = TypeVar("Layer", bound=nn.Module)
_BatchNorm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_Conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BOUNDABLE = (nn.Linear, *_Conv, nn.MultiheadAttention, *_BatchNorm)
_FIRST_STEPS = 24  # of Lanczos: a start within a percent of the norm; training then keeps iterating
_MEASURE_STEPS = 128


def bound(layer: Layer, c: float = 0.95) -> Layer:
    """Bound the operator norm of a layer's weights by c, in place; a layer bounded before gets the new c."""
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
        parametrization: _Bound
        if isinstance(layer, _Conv):
            parametrization = _ConvBound(layer, c)
            layer.register_forward_pre_hook(parametrization.see_input, with_kwargs=True)
        elif isinstance(layer, _BatchNorm):
            parametrization = _BatchNormBound(layer, c)
        else:
            parametrization = _MatrixBound(getattr(layer, name), c, blocks=3 if name == "in_proj_weight" else 1)
        # unsafe: the check would call the parametrisation, and so iterate, before anything is known of the input.
        parametrize.register_parametrization(layer, name, parametrization, unsafe=True)
        refine_class(layer, name)
    if isinstance(layer, nn.MultiheadAttention):
        bound(layer.out_proj, c)
    return layer


def boundable(layer: nn.Module) -> bool:
    """Whether the layer has a weight that `bound` can bound."""
    return bool(_weight_names(layer))


def bound_of(layer: nn.Module, name: str = "weight") -> "_Bound | None":
    """The bound on a layer's weight, or None."""
    if not parametrize.is_parametrized(layer, name):
        return None
    chain = cast(nn.ModuleDict, layer.parametrizations)[name]
    return next((p for p in cast(nn.ModuleList, chain) if isinstance(p, _Bound)), None)


def bounds_of(layer: nn.Module) -> dict[str, "_Bound"]:
    """All bounds of one layer by the name of the weight."""
    found = {name: bound_of(layer, name) for name in _weight_names(layer)}
    return {name: b for name, b in found.items() if b is not None}


def operator_norm(layer: nn.Module, input_shape: tuple[int, ...] | None = None) -> float:
    """The norm of the layer's operator as it acts now: exact for Linear and BatchNorm, by Lanczos for convolutions.

    `input_shape`: the spatial size of a convolution's input, e.g. (32, 32); a bounded layer that has seen an input
    knows it. For MultiheadAttention, the largest of its projections.
    """
    if isinstance(layer, nn.Linear):
        return float(torch.linalg.matrix_norm(_still(layer).double(), 2))
    if isinstance(layer, nn.MultiheadAttention):
        matrices = [m for n in _weight_names(layer) for m in _still(layer, n).split(layer.embed_dim)]
        return max(float(torch.linalg.matrix_norm(m.double(), 2)) for m in [*matrices, _still(layer.out_proj)])
    if isinstance(layer, _BatchNorm):
        return float(_batch_norm_gains(layer, _still(layer) if layer.affine else None).abs().amax())
    if isinstance(layer, _Conv):
        known = bound_of(layer)
        if input_shape is None and isinstance(known, _ConvBound):
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
    """
    plain = copy.deepcopy(model)
    # A model that knows the weights it was fitted with is fitted with the folded ones: they act alike.
    fitted: list[Any] = [m for m in plain.modules() if getattr(m, "fingerprint", None) is not None]
    fitted = [m for m in fitted if m.is_fresh()]
    for module in plain.modules():
        hooks = module._forward_pre_hooks
        for key in [k for k, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), _ConvBound)]:
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


class _Bound(nn.Module):
    """W -> W min(1, c / sigma). Subclasses say what sigma is."""

    num_steps: Tensor
    num_binding: Tensor

    def __init__(self, c: float) -> None:
        super().__init__()
        self.c = c
        self._seen: tuple[int, int] | None = None  # the weight's version at the last iteration
        self._below: float | None = None  # the c that the norm was clearly below at that iteration
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("num_binding", torch.zeros((), dtype=torch.int64))

    def step(self, weight: Tensor) -> Tensor | None:
        """One power iteration; the norm that it found, None while the operator is unknown."""
        raise NotImplementedError

    def sigma(self, weight: Tensor) -> Tensor | None:
        """The norm (broadcastable over the weight), differentiable in the weight; None while it is unknown."""
        raise NotImplementedError

    def forward(self, weight: Tensor) -> Tensor:
        iterate = self.training and self._changed(weight)
        with torch.autocast(weight.device.type, enabled=False):
            if iterate:
                with torch.no_grad():
                    self._compare(weight, self.step(weight))
            if self.training and not torch.compiler.is_compiling() and self._below == self.c:
                if iterate:
                    self.num_steps += 1
                return weight
            sigma = self.sigma(weight)
            if sigma is None:
                return weight
            if iterate:
                with torch.no_grad():
                    self.num_steps += 1
                    self.num_binding += (sigma > self.c).any()
            # Away from zero: the gradient of c / sigma at a zero weight would be 0 * inf. The absolute value: vectors
            # that are out of date (weights changed in evaluation mode) may give a negative estimate.
            return weight * torch.clamp(self.c / sigma.abs().clamp_min(1e-12), max=1.0)

    def _compare(self, weight: Tensor, norm: Tensor | None) -> None:
        """Note whether the bound is clearly not binding: sigma then has no gradient, and need not be computed again.

        Where a look at the number waits for no device and breaks no graph.
        """
        if torch.compiler.is_compiling():
            return
        self._below = None
        if norm is not None and weight.is_cpu and not followed() and bool((norm < 0.99 * self.c).all()):
            self._below = self.c

    def _changed(self, weight: Tensor) -> bool:
        """Whether the weight moved since the last iteration.

        A second forward pass on the same weights (gradient checkpointing, accumulation, two views of a batch)
        must see the same layer. A compiled graph has no versions: there, every pass in training mode iterates.
        """
        if torch.compiler.is_compiling():
            return True
        version = (weight._version, optimizer_steps.count)  # fused optimisers do not count up the version
        changed = version != self._seen
        self._seen = version
        return changed

    def made_of(self) -> list[Place]:
        """Where the tensors are that sigma depends on in evaluation mode, beside the weight."""
        return [(self._buffers, "u"), (self._buffers, "v")]

    def constants(self) -> tuple[float, ...]:
        """The numbers that the bounded weight depends on."""
        return (self.c,)

    @property
    def binding(self) -> float:
        """The fraction of training steps at which the bound was binding; nan before the first."""
        return float(self.num_binding) / int(self.num_steps) if int(self.num_steps) else math.nan

    def extra_repr(self) -> str:
        return f"c={self.c:g}"


class _MatrixBound(_Bound):
    """A matrix, or several stacked ones (packed projections), each bounded by itself."""

    u: Tensor
    v: Tensor

    def __init__(self, weight: Tensor, c: float, *, blocks: int = 1) -> None:
        super().__init__(c)
        self.blocks = blocks
        left, _, right = torch.linalg.svd(self._stacked(weight.detach()).double(), full_matrices=False)
        self.register_buffer("u", left[:, :, 0].to(weight.dtype).contiguous())
        self.register_buffer("v", right[:, 0].to(weight.dtype).contiguous())

    def step(self, weight: Tensor) -> Tensor:
        w = self._stacked(weight.detach())
        u = _unit((w @ self.v[:, :, None]).squeeze(-1), self.u, dim=-1)
        v = (u[:, None] @ w).squeeze(1)
        self.u.copy_(u)
        self.v.copy_(_unit(v, self.v, dim=-1))
        return torch.linalg.vector_norm(v, dim=-1)

    def sigma(self, weight: Tensor) -> Tensor:
        # Fresh tensors for autograd: the buffers move on while a graph still holds the vectors.
        u, v = self.u.clone(), self.v.clone()
        sigma = (u[:, None] @ self._stacked(weight) @ v[:, :, None]).flatten()
        return sigma if self.blocks == 1 else sigma.repeat_interleave(weight.shape[0] // self.blocks)[:, None]

    def _stacked(self, weight: Tensor) -> Tensor:
        return weight.unflatten(0, (self.blocks, -1))


class _ConvBound(_Bound):
    """A convolution on inputs of one spatial size; vectors are an input and an output of the operator."""

    u: Tensor
    v: Tensor

    def __init__(self, layer: nn.Module, c: float) -> None:
        super().__init__(c)
        self.settings = ConvolutionSettings(layer)
        weight = cast(Tensor, layer.weight).detach()
        self.register_buffer("u", weight.new_zeros(0))
        self.register_buffer("v", weight.new_zeros(0))

    @property
    def input_size(self) -> tuple[int, ...] | None:
        return tuple(self.v.shape[2:]) if self.v.numel() else None

    def see_input(self, layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        """Learn the input size from the first input, and follow it in training mode."""
        size = tuple((args[0] if args else kwargs["input"]).shape[-self.settings.dims :])
        if self.input_size is None or (self.training and size != self.input_size):
            chain = cast(nn.ModuleDict, layer.parametrizations)["weight"]
            self.start(cast(Tensor, chain.original), size)

    @eager
    @torch.no_grad()
    def start(self, weight: Tensor, size: tuple[int, ...]) -> None:
        with torch.autocast(weight.device.type, enabled=False):
            operator = Convolution(self.settings, weight.detach(), size)
            _, u, v = lanczos(operator.apply, operator.adjoint, operator.start(), _FIRST_STEPS)
        # In place, by set_: whoever holds the buffer (DistributedDataParallel does) goes on holding it.
        self.u.set_(u.contiguous())  # type: ignore[call-overload]
        self.v.set_(v.contiguous())  # type: ignore[call-overload]
        self._below = None

    def step(self, weight: Tensor) -> Tensor | None:
        if self.input_size is None:
            return None
        operator = Convolution(self.settings, weight.detach(), self.input_size)
        u = _unit(operator.apply(self.v), self.u)
        v = operator.adjoint(u)
        self.v.copy_(_unit(v, self.v))
        self.u.copy_(u)
        return v.norm()

    def sigma(self, weight: Tensor) -> Tensor | None:
        if self.input_size is None:
            return None
        operator = Convolution(self.settings, weight, self.input_size)
        return (self.u.clone() * operator.apply(self.v.clone())).sum()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("u", "v"):  # empty until an input was seen
            saved = state_dict.get(prefix + name)
            if saved is not None:
                getattr(self, name).set_(getattr(self, name).new_zeros(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)


class _BatchNormBound(_Bound):
    """BatchNorm's scale, by the gain it has in evaluation mode."""

    gain: Tensor

    def __init__(self, layer: nn.Module, c: float) -> None:
        super().__init__(c)
        self._layer = [layer]  # in a list, so that it does not become a submodule of its own child
        # Training reads the gain of the last change of the weight: the running variance moves with every pass.
        self.register_buffer("gain", _batch_norm_gains(layer, None).clone())

    def step(self, weight: Tensor) -> Tensor:
        self.gain.copy_(_batch_norm_gains(self._layer[0], None))
        return (weight * self.gain).abs().amax()

    def sigma(self, weight: Tensor) -> Tensor:
        if not self.training:
            return (weight * _batch_norm_gains(self._layer[0], None)).abs().amax()
        return (weight * self.gain.clone()).abs().amax()

    def made_of(self) -> list[Place]:
        return [(self._layer[0]._buffers, "running_var")]

    def constants(self) -> tuple[float, ...]:
        norm = cast(nn.BatchNorm2d, self._layer[0])
        moved = [] if norm.running_var is None else norm.running_var.tolist()  # without counting up its version
        return self.c, norm.eps, *moved


def _unit(x: Tensor, otherwise: Tensor, dim: int | None = None) -> Tensor:
    """x at norm 1, or the old vector where x vanishes: a zero weight must not end the iteration for good."""
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True) if dim is not None else x.norm()
    return torch.where(norm > 0, x / norm.clamp_min(1e-30), otherwise)


def _batch_norm_gains(layer: nn.Module, weight: Tensor | None = None) -> Tensor:
    norm = cast(nn.BatchNorm2d, layer)
    if norm.running_var is None:
        raise ValueError("A BatchNorm without running statistics has no fixed operator: use track_running_stats=True.")
    gain = torch.rsqrt(norm.running_var.detach() + norm.eps)
    return gain if weight is None else weight * gain


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
