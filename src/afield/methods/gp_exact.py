"""Exact Gaussian process on the raw inputs: `gp-exact`. The backbone is not used.

With phi and w of `methods.kernel`, targets t and noise variances D = diag(d),

    w | t ~ N(H^-1 Phi^T D^-1 t, H^-1),     H = I + Phi^T D^-1 Phi,     v(x) = k(x, x) - |phi|^2 + phi^T H^-1 phi

which is k_*^T (K + D)^-1 t and k(x, x) - k_*^T (K + D)^-1 k_* in coordinates: anchors are added until the variance
that they leave at the training inputs is below 1e-12 of the prior's, which costs 1e-6 of the prior's standard deviation
at most. A grid of N points then takes N M^2 and not N n^2 operations (two moons: M = 208, n = 1000), and the saved
model is as small. gpytorch fits the kernel; tests compare with its predictions.

Classes are Dirichlet regression (Milios et al. 2018, gpytorch's DirichletClassificationLikelihood): one latent function
a class, each an exact Gaussian process under its own noise. Their softmax is averaged over 128 fixed draws of the
latent values, the same for every input. Mean field is not for this: with a variance for each class,
softmax(m_k / sqrt(1 + pi/8 v_k)) changes with the common level of the m_k, which the softmax itself cannot see.

The paper's two-dimensional pictures have a Gaussian process by Hamiltonian Monte Carlo: that is `gp-hmc`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from afield.gp.features import median_distance
from afield.gp.likelihoods import LIKELIHOODS
from afield.methods.kernel import FittedKernel, KernelModel, gather, import_gpytorch, pivots, predict
from afield.methods.method import BackboneFactory, Method
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import to_probs
from afield.settings import Settings

_TOLERANCE = 1e-12
_DRAWS = 128
_MOST_EXAMPLES = 500  # in the marginal likelihood: each of its 15 evaluations takes n^3 operations a class


class GaussianWeights(KernelModel):
    """w ~ N(mean, R^T R), one for each output; R is shared by all where `root` holds one."""

    mean: Tensor  # (M, K)
    root: Tensor  # (K or 1, M, M)

    def __init__(self, num_outputs: int, settings: Settings) -> None:
        super().__init__(settings, {"mean": (None, num_outputs), "root": (None, None, None)})
        self.num_outputs = num_outputs

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (N, K) and variance (N, K or 1) of the latent functions."""
        phi, rest = self.features(x)
        variance = torch.stack([(phi @ root.T).square().sum(1) for root in self.root], dim=1)
        return phi @ self.mean, rest[:, None] + variance

    def predict(self, x: Tensor) -> Prediction:
        mean, variance = self.posterior(x)
        if LIKELIHOODS[self.likelihood].noisy:
            return Prediction(mean, variance[:, 0], noise=float(self.noise), likelihood=self.likelihood)
        members = to_probs(mean + variance.sqrt() * standard_normal(self.num_outputs).to(mean)[:, None])
        return Prediction(mean, variance, members.mean(0), members)


def gp_exact() -> Method[GaussianWeights]:
    """The exact posterior; nothing in it is random."""

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> GaussianWeights:
        return GaussianWeights(num_outputs, settings)

    return Method(build, predict, None, _finish)


def as_regression(y: Tensor, likelihood: str) -> tuple[Tensor, Tensor | None]:
    """Targets (K, N), and the noise variance of each where it is known.

    Classes (N,) become the log-normal targets of gpytorch's DirichletClassificationLikelihood (Milios et al. 2018),
    centred: a softmax does not see their common level, and zero is then the prior. The level is one for all classes,
    so that far from the data all are equally probable, however often each occurs.
    """
    if LIKELIHOODS[likelihood].noisy:
        return y.T, None
    dirichlet = import_gpytorch().likelihoods.DirichletClassificationLikelihood(y, dtype=torch.float64)
    target = dirichlet.transformed_targets
    return target - target.mean(), dirichlet.noise


def fit_kernel(x: Tensor, y: Tensor, likelihood: str, length_scale: float | None = None) -> FittedKernel:
    """The kernel of greatest marginal likelihood on at most 500 of the examples; a given length scale stays."""
    gpytorch = import_gpytorch()
    some = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:_MOST_EXAMPLES]
    x, (target, noise) = x[some], as_regression(y[some], likelihood)
    start = length_scale or 0.3 * median_distance(x)
    if not start > 0:
        raise ValueError(f"A length scale needs two training inputs that differ, got {len(x)} copies of one.")
    x, unit = x / start, target.square().mean().sqrt().clamp_min(1e-12)  # gpytorch's own scales are around 1

    class ExactGP(gpytorch.models.ExactGP):  # type: ignore[name-defined]
        def __init__(self) -> None:
            known = None if noise is None else gpytorch.likelihoods.FixedNoiseGaussianLikelihood(noise / unit**2)
            super().__init__(x, target / unit, known or gpytorch.likelihoods.GaussianLikelihood())
            self.mean = gpytorch.means.ZeroMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    gp = ExactGP().double().train()
    gp.kernel.base_kernel.lengthscale, gp.kernel.outputscale = 1.0, 1.0
    gp.kernel.base_kernel.requires_grad_(length_scale is None)
    if noise is None:
        gp.likelihood.noise = 0.1
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(gp.likelihood, gp)
    parameters = [p for p in gp.parameters() if p.requires_grad]
    optimizer = torch.optim.LBFGS(parameters, max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -evidence(gp(x), target / unit).sum()
        loss.backward()
        return loss

    # Beyond this size gpytorch would estimate determinants with random vectors.
    with torch.enable_grad(), gpytorch.settings.max_cholesky_size(_MOST_EXAMPLES):
        optimizer.step(closure)
    scale = float(unit) ** 2
    return FittedKernel(
        start if length_scale else start * gp.kernel.base_kernel.lengthscale.item(),
        gp.kernel.outputscale.item() * scale,
        gp.likelihood.noise.item() * scale if noise is None else 0.0,
    )


def standard_normal(dimension: int) -> Tensor:
    """Draws (S, dimension) that fill the space evenly, with their mirror images; always the same."""
    sobol = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=0)
    draws = torch.special.ndtri(sobol.draw(_DRAWS // 2, dtype=torch.float64).clamp(1e-6, 1 - 1e-6))
    return torch.cat([draws, -draws])


@torch.no_grad()
def _finish(
    model: GaussianWeights, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /
) -> None:
    x, y = gather(train, model.likelihood)
    kernel = fit_kernel(x, y, model.likelihood, settings.length_scale)
    target, noise = as_regression(y, model.likelihood)
    if len(target) != model.num_outputs:
        raise ValueError(f"Expected training targets for {model.num_outputs} outputs, got {len(target)}.")
    model.place(pivots(x, kernel, _TOLERANCE), kernel)
    phi, _ = model.features(x)
    identity = torch.eye(phi.shape[1]).to(phi)
    noises = noise if noise is not None else torch.full_like(target[:1], kernel.noise)
    roots, means = [], []
    for d in noises:
        lower = torch.linalg.cholesky(identity + (phi / d[:, None]).T @ phi)
        roots.append(torch.linalg.solve_triangular(lower, identity, upper=False).contiguous())
    for k, t in enumerate(target):
        d, root = noises[k % len(noises)], roots[k % len(noises)]
        means.append(root.T @ (root @ (phi.T @ (t / d))))
    model.mean, model.root = torch.stack(means, dim=1), torch.stack(roots)
