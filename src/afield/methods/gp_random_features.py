"""Random-feature Gaussian process on the raw inputs: `gp-random-features`, the paper's RFGP. The backbone is not used.

Our output layer on x itself, with the kernel of `gp-exact`: length scale l, ridge 1 / s for the output scale s, so
that phi^T phi / r tends to the kernel, and for real targets its noise variance s_n,

    B = (Phi^T Phi / s_n + r I)^-1 Phi^T y / s_n,        v(x) = phi^T (Phi^T Phi / s_n + r I)^-1 phi

which tends to the exact process at rate D^-1/2. `afield.fit_head` would estimate the noise anew.
Classes have the softmax's own output weights (`afield.fit_head`), the Laplace posterior and calibration, as `dnn-gp`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from afield.errors import NotFitted
from afield.gp.likelihoods import LIKELIHOODS
from afield.methods.gp_exact import fit_kernel
from afield.methods.kernel import FittedKernel, gather
from afield.methods.method import BackboneFactory, Method, check_likelihood
from afield.model.calibration import calibrate
from afield.model.convert import sngp
from afield.model.evaluating import evaluating
from afield.model.output_weights import fit_head
from afield.model.posterior import fit_posterior
from afield.model.sngp_model import SNGP
from afield.prediction.prediction import Prediction
from afield.settings import Settings

_BATCH = 4096


class RandomFeatureModel(nn.Module):
    """An output layer without a network; there is none before the data, or a saved model, tells its input size."""

    gp: SNGP | None

    def __init__(self, num_outputs: int, settings: Settings) -> None:
        super().__init__()
        self.num_outputs, self.likelihood = num_outputs, check_likelihood(settings)
        self._options: dict[str, Any] = {
            "likelihood": settings.likelihood,
            "num_random_features": settings.num_random_features,
            "covariance": settings.covariance,
            "curvature": settings.curvature,
            "amplitude": settings.amplitude or 1.0,
        }
        self.register_module("gp", None)

    def start(self, in_features: int, **kernel: Any) -> SNGP:
        """Draw the random features."""
        net = nn.Sequential(nn.Flatten(), nn.Linear(in_features, self.num_outputs))
        self.gp = sngp(net, None, **self._options, **kernel).train(self.training)
        return self.gp

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(f"{prefix}gp.net.1.random_features.weight")
        if saved is not None:
            self.start(saved.shape[1])
        super()._load_from_state_dict(state_dict, prefix, *args)


def gp_random_features() -> Method[RandomFeatureModel]:
    """The settings' number of random features, drawn from torch's global state."""

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> RandomFeatureModel:
        return RandomFeatureModel(num_outputs, settings)

    return Method(build, _predict, None, _finish)


def _finish(
    model: RandomFeatureModel, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /
) -> None:
    x, y = gather(train, model.likelihood)
    kernel = fit_kernel(x, y, model.likelihood, settings.length_scale)
    gp = model.start(x.shape[1], length_scale=kernel.length_scale, ridge=1 / kernel.output_scale)
    if LIKELIHOODS[model.likelihood].noisy:
        with evaluating(gp):
            _regress(gp, x, y, kernel)
            gp.head.set_reference(_predict(model, gather(val, model.likelihood)[0].to(gp.head.weight.dtype)).score())
    else:
        fit_head(gp, train, progress=False)
        fit_posterior(gp, train, progress=False)
        calibrate(gp, val, amplitude=settings.amplitude, progress=False)


def _regress(gp: SNGP, x: Tensor, y: Tensor, kernel: FittedKernel) -> None:
    head = gp.head
    head.set_scalars(noise=kernel.noise)
    right = torch.zeros(head.weight.shape[1], y.shape[1], dtype=torch.float64)
    for part, target in zip(x.to(head.weight.dtype).split(_BATCH), y.split(_BATCH), strict=True):
        head.observe(part)
        right += head.features(part).double().T @ target
    ridge = kernel.noise * float(head.ridge)
    head.weight.copy_(torch.linalg.solve(head.precision.data[0] + ridge * torch.eye(len(right)), right).T)
    head.precision.factor(float(head.ridge), kernel.noise)


def _predict(model: RandomFeatureModel, x: Tensor) -> Prediction:
    if model.gp is None:
        raise NotFitted("This Gaussian process is not fitted: call the method's finish(model, train, val) first.")
    return Prediction.cat([model.gp.predict(part) for part in x.split(_BATCH)])
