"""What the Gaussian processes on raw inputs share: one kernel, and finitely many coordinates for the function.

    k(x, x') = s exp(-|x - x'|^2 / (2 l^2))        l: length scale, s: output scale (a variance); zero prior mean

Length scale, output scale and noise maximise the marginal likelihood of gpytorch's exact Gaussian process, once for
all four methods: what differs between their pictures is then the inference, not the kernel. Classes take the marginal
likelihood of their Dirichlet regression (`as_regression`), with one kernel for all. That of the softmax itself would
not do: where classes can be separated it grows with the output scale over orders of magnitude, and is flat beyond
(Laplace approximation, two moons, l = 0.5: -28 at s = 10, -18 at 100, -16 at 1000, -17 at 10,000).

With anchors z_1 ... z_M, L L^T = k(Z, Z) and phi(x) = L^-1 k(Z, x), the prior is, exactly and for any anchors,

    f(x) = phi(x)^T w + e(x),       w ~ N(0, I),       Var e(x) = k(x, x) - |phi(x)|^2

Inducing points are such anchors. So are pivots of a Cholesky decomposition of the training inputs' kernel matrix: a few
hundred make e vanish there, and everything about the data is then said in w.
"""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from afield.errors import NotFitted
from afield.gp.features import KERNELS
from afield.gp.likelihoods import LIKELIHOODS
from afield.methods.method import check_likelihood
from afield.model.evaluating import evaluating
from afield.prediction.prediction import Prediction
from afield.settings import Settings

_BATCH = 1024


@dataclass(frozen=True)
class FittedKernel:
    """k(x, x') = output_scale exp(-|x - x'|^2 / (2 length_scale^2)); `noise` is a variance, 0 for classes."""

    length_scale: float
    output_scale: float
    noise: float = 0.0

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return self.output_scale * KERNELS["rbf"].exact(a / self.length_scale, b / self.length_scale)


def gather(train: Iterable[Any], likelihood: str) -> tuple[Tensor, Tensor]:
    """All inputs (N, d), flattened, and targets: classes (N,) or numbers (N, K); in float64."""
    parts = [(x.flatten(1), y) for x, y in train]
    if not parts:
        raise ValueError("A Gaussian process expects training examples, got an empty loader.")
    x, y = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    if not x.is_floating_point():
        raise ValueError(f"A Gaussian process on raw inputs expects floating-point numbers, got {x.dtype}.")
    if not bool(x.isfinite().all()):
        rows = int((~x.isfinite().all(1)).sum())
        raise ValueError(f"Training inputs must be finite, got NaN or infinity in {rows} of {len(x)} rows.")
    return x.double(), y if LIKELIHOODS[likelihood].of_classes else y.reshape(len(y), -1).double()


def pivots(x: Tensor, kernel: FittedKernel, tolerance: float) -> Tensor:
    """Rows of x (N, d) at whose function values all others are known, up to a part `tolerance` of the prior variance.

    Cholesky decomposition with pivoting: the next anchor is where the variance given the anchors is largest.
    """
    chosen: list[int] = []
    rows = x.new_zeros(len(x), len(x))
    left = x.new_full((len(x),), kernel.output_scale)
    while float(left.amax()) > tolerance * kernel.output_scale:
        i, m = int(left.argmax()), len(chosen)
        rows[m] = (kernel(x[i : i + 1], x)[0] - rows[:m, i] @ rows[:m]) / left[i].sqrt()
        left = (left - rows[m].square()).clamp_min(0)
        left[i] = 0
        chosen.append(i)
    return x[chosen]


class KernelModel(nn.Module):
    """phi at anchors, as buffers whose sizes come with the data; subclasses add what is known of w.

    shapes  of the subclass's own buffers, None where the size is not known before fitting
    """

    anchors: Tensor  # (M, d)
    whitening: Tensor  # (M, M) = L^-1
    length_scale: Tensor
    output_scale: Tensor
    noise: Tensor

    def __init__(self, settings: Settings, shapes: Mapping[str, tuple[int | None, ...]]) -> None:
        super().__init__()
        self.likelihood = check_likelihood(settings)
        scalars = dict.fromkeys(("length_scale", "output_scale", "noise"), ())
        self._shapes = {"anchors": (None, None), "whitening": (None, None), **scalars, **shapes}
        for name, shape in self._shapes.items():
            self.register_buffer(name, torch.zeros([size or 0 for size in shape], dtype=torch.float64))

    @property
    def kernel(self) -> FittedKernel:
        return FittedKernel(float(self.length_scale), float(self.output_scale), float(self.noise))

    def place(self, anchors: Tensor, kernel: FittedKernel, jitter: float = 0.0) -> None:
        """Take the anchors (M, d) and the kernel; w is of the function at the anchors plus noise of this variance."""
        for name in ("length_scale", "output_scale", "noise"):
            getattr(self, name).fill_(getattr(kernel, name))
        identity = torch.eye(len(anchors)).to(anchors)
        lower = torch.linalg.cholesky(kernel(anchors, anchors) + jitter * identity)
        self.anchors = anchors.clone()
        self.whitening = torch.linalg.solve_triangular(lower, identity, upper=False).contiguous()

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """phi (N, M) and the variance (N,) that it leaves, k(x, x) - |phi|^2."""
        if not len(self.anchors):
            raise NotFitted("This Gaussian process is not fitted: call the method's finish(model, train, val) first.")
        if x.shape[1:] != self.anchors.shape[1:]:
            raise ValueError(f"Expected inputs of {self.anchors.shape[1]} numbers, got {x.shape[1]}.")
        kernel = self.kernel
        phi = kernel(x, self.anchors) @ self.whitening.T
        return phi, (kernel.output_scale - phi.square().sum(1)).clamp_min(0)

    def predict(self, x: Tensor) -> Prediction:
        """For inputs (N, d) in float64, few enough for one matrix."""
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, shape in self._shapes.items():
            saved = state_dict.get(prefix + name)
            if saved is None or saved.dim() != len(shape):
                continue
            if all(size in (None, given) for size, given in zip(shape, saved.shape, strict=True)):
                setattr(self, name, getattr(self, name).new_zeros(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *args)


def predict(model: KernelModel, x: Tensor) -> Prediction:
    """In batches, computed in float64, returned in the dtype of x."""
    with evaluating(model):
        parts = x.flatten(1).to(model.anchors).split(_BATCH)
        return Prediction.cat([model.predict(part).to(x.dtype) for part in parts])


def import_gpytorch() -> Any:
    """gpytorch, without the deprecation of torch.jit.script that its import sets off."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
            import gpytorch
    except ImportError as error:
        raise ImportError('The Gaussian processes on raw inputs need gpytorch: pip install "afield[gp]".') from error
    return gpytorch
