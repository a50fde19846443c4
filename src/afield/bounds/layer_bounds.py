"""What bounds the weight of one layer: W -> W min(1, c / sigma(W)), with sigma by power iteration on its operator.

`afield.bounds.spectral` puts them on layers; the vectors of the iteration are buffers, so that they are saved.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from afield.bounds import optimizer_steps
from afield.bounds.convolution import Convolution, ConvolutionSettings, lanczos
from afield.bounds.eager import eager
from afield.bounds.weight_cache import Place, followed

_FIRST_STEPS = 24  # of Lanczos: a start within a percent of the norm; training then keeps iterating


class Bound(nn.Module):
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
        """The numbers that the bounded weight depends on in evaluation mode, beside c."""
        return ()

    @property
    def binding(self) -> float:
        """The fraction of training steps at which the bound was binding; nan before the first."""
        return float(self.num_binding) / int(self.num_steps) if int(self.num_steps) else math.nan

    def extra_repr(self) -> str:
        return f"c={self.c:g}"


class MatrixBound(Bound):
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


class ConvBound(Bound):
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


class BatchNormBound(Bound):
    """BatchNorm's scale, by the gain it has in evaluation mode."""

    gain: Tensor

    def __init__(self, layer: nn.Module, c: float) -> None:
        super().__init__(c)
        self._layer = [layer]  # in a list, so that it does not become a submodule of its own child
        # Training reads the gain of the last change of the weight: the running variance moves with every pass.
        self.register_buffer("gain", batch_norm_gains(layer, None).clone())

    def step(self, weight: Tensor) -> Tensor:
        self.gain.copy_(batch_norm_gains(self._layer[0], None))
        return (weight * self.gain).abs().amax()

    def sigma(self, weight: Tensor) -> Tensor:
        if not self.training:
            return (weight * batch_norm_gains(self._layer[0], None)).abs().amax()
        return (weight * self.gain.clone()).abs().amax()

    def made_of(self) -> list[Place]:
        return [(self._layer[0]._buffers, "running_var")]

    def constants(self) -> tuple[float, ...]:
        norm = cast(nn.BatchNorm2d, self._layer[0])
        moved = [] if norm.running_var is None else norm.running_var.tolist()  # without counting up its version
        return norm.eps, *moved


def _unit(x: Tensor, otherwise: Tensor, dim: int | None = None) -> Tensor:
    """x at norm 1, or the old vector where x vanishes: a zero weight must not end the iteration for good."""
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True) if dim is not None else x.norm()
    return torch.where(norm > 0, x / norm.clamp_min(1e-30), otherwise)


def batch_norm_gains(layer: nn.Module, weight: Tensor | None = None) -> Tensor:
    """The gain of every channel in evaluation mode; without its scale unless `weight` is given."""
    norm = cast(nn.BatchNorm2d, layer)
    if norm.running_var is None:
        raise ValueError("A BatchNorm without running statistics has no fixed operator: use track_running_stats=True.")
    gain = torch.rsqrt(norm.running_var.detach() + norm.eps)
    return gain if weight is None else weight * gain
