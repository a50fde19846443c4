"""Gaussian process on the raw inputs by Hamiltonian Monte Carlo: `gp-hmc`, the paper's gold standard in the plane.

The backbone is not used. With phi and w of `methods.kernel`, anchors such that the function values at the training
inputs are Phi w (up to 1e-6 of the prior variance), a softmax has K - 1 functions and not K: it does not see the common
level of its logits, so the levels integrate out, and with C (K - 1, K) an orthonormal basis of what is left,

    f = phi(x)^T w C + e C,     p(w | y) ~ exp(sum_i log softmax(phi_i^T w C)_{y_i} - |w|^2 / 2)

The No-U-Turn sampler (pyro) moves in u, w = w* + L^-T u, where w* is the mode and L L^T = I + Phi^T W Phi, W the
curvature of the likelihood at the mode averaged over the K - 1 directions. The target is the same; in u it is nearly
N(0, I), and neither a mass matrix nor a long warm-up has to be learned. Chains start at draws from N(0, I).

At x, each draw has a mean phi^T w C and the variance of e, which mean field integrates: a difference of two logits has
the variance 2 Var e. `members` are the draws' probabilities; `variance` is that of the K centred logits.

The kernel is that of `gp-exact`, fixed; the paper does not say how its kernel was found. For real targets, where the
posterior is Gaussian and known, the same sampler runs as a check of itself.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from afield.gp.likelihoods import LIKELIHOODS
from afield.methods.gp_exact import fit_kernel
from afield.methods.kernel import KernelModel, gather, pivots, predict
from afield.methods.method import BackboneFactory, Method
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import mean_field
from afield.settings import Settings

_TOLERANCE = 1e-6


class SampledWeights(KernelModel):
    """Draws of w, and how well the chains that made them agree.

    r_hat              the largest over the function values at the training inputs; 1 where all chains say the same
    effective_samples  the smallest over them
    divergences        trajectories that the integrator lost
    """

    draws: Tensor  # (S, M, J)
    r_hat: Tensor
    effective_samples: Tensor
    divergences: Tensor

    def __init__(self, num_outputs: int, settings: Settings) -> None:
        functions = num_outputs - LIKELIHOODS[settings.likelihood].of_classes
        found = dict.fromkeys(("r_hat", "effective_samples", "divergences"), ())
        super().__init__(settings, {"draws": (None, None, functions), **found})
        self.num_outputs = num_outputs

    @property
    def directions(self) -> Tensor:
        """C: the identity for real targets, an orthonormal basis of the vectors that sum to zero for logits."""
        if LIKELIHOODS[self.likelihood].noisy:
            return torch.eye(self.num_outputs).to(self.anchors)
        return centred_directions(self.num_outputs).to(self.anchors)

    def predict(self, x: Tensor) -> Prediction:
        phi, rest = self.features(x)
        directions = self.directions
        means = torch.einsum("nm,smj->snj", phi, self.draws) @ directions
        variance = means.var(0, correction=0) + rest[:, None] * directions.square().sum(0)
        if LIKELIHOODS[self.likelihood].noisy:
            return Prediction(means.mean(0), variance, noise=float(self.noise), likelihood=self.likelihood)
        members = mean_field(means, 2 * rest)
        return Prediction(means.mean(0), variance, members.mean(0), members)


def gp_hmc(draws: int = 100, warmup: int = 100, chains: int = 2) -> Method[SampledWeights]:
    """`draws` of each of the chains, after `warmup` steps that choose the step size."""
    if draws < 4 or warmup < 1 or chains < 1:
        raise ValueError(f"Expected at least 4 draws, 1 warm-up step and 1 chain, got {draws}, {warmup} and {chains}.")

    def build(backbone: BackboneFactory, num_outputs: int, settings: Settings = Settings(), /) -> SampledWeights:
        return SampledWeights(num_outputs, settings)

    def finish(
        model: SampledWeights, train: Iterable[Any], val: Iterable[Any], settings: Settings = Settings(), /
    ) -> None:
        x, y = gather(train, model.likelihood)
        kernel = fit_kernel(x, y, model.likelihood, settings.length_scale)
        model.place(pivots(x, kernel, _TOLERANCE), kernel)
        phi, sizes = model.features(x)[0], {"draws": draws, "warmup": warmup, "chains": chains}
        _, found, divergences = sample_weights(phi, y, model.directions, model.likelihood, kernel.noise, **sizes)
        model.draws = found.flatten(0, 1)
        _diagnose(model, phi @ found, divergences)

    return Method(build, predict, None, finish)


def sample_weights(
    phi: Tensor,
    y: Tensor,
    directions: Tensor,
    likelihood: str,
    noise: float = 0.0,
    *,
    draws: int = 100,
    warmup: int = 100,
    chains: int = 2,
) -> tuple[Tensor, Tensor, int]:
    """The mode (M, J) of w given features phi (N, M), draws of it (chains, draws, M, J), and divergences.

    directions  C (J, K): the logits are phi w C
    """

    def loss(values: Tensor) -> Tensor:
        return LIKELIHOODS[likelihood].loss(values @ directions, y).sum() / (noise or 1.0)

    steepest = 1 / noise if noise else 0.5  # the largest curvature of a softmax
    mode = _minimize(loss, phi, len(directions), _factor(phi, torch.full_like(phi[:, 0], steepest)))
    curvature = _curvature(phi @ mode @ directions, likelihood, noise)
    return mode, *_sample(loss, phi, mode, _factor(phi, curvature), draws, warmup, chains)


def centred_directions(num_outputs: int) -> Tensor:
    """An orthonormal basis (K - 1, K) of the logits that sum to zero, in float64."""
    identity = torch.eye(num_outputs, dtype=torch.float64)
    return torch.linalg.qr(torch.cat([torch.ones_like(identity[:, :1]), identity[:, :-1]], dim=1))[0][:, 1:].T


def _factor(phi: Tensor, curvature: Tensor) -> Tensor:
    """L^-T with L L^T = I + Phi^T diag(curvature) Phi."""
    identity = torch.eye(phi.shape[1]).to(phi)
    lower = torch.linalg.cholesky(identity + (phi * curvature[:, None]).T @ phi)
    return torch.linalg.solve_triangular(lower, identity, upper=False).T


def _curvature(logits: Tensor, likelihood: str, noise: float) -> Tensor:
    """(N,): the mean of the K - 1 non-zero eigenvalues of diag(p) - p p^T, or 1 / noise."""
    if LIKELIHOODS[likelihood].noisy:
        return torch.full_like(logits[:, 0], 1 / noise)
    return (1 - logits.softmax(1).square().sum(1)) / (logits.shape[1] - 1)


def _minimize(loss: Callable[[Tensor], Tensor], phi: Tensor, functions: int, back: Tensor) -> Tensor:
    """The mode (M, J) of w, a convex problem, in the coordinates u, w = back u."""
    u = phi.new_zeros(phi.shape[1], functions, requires_grad=True)
    optimizer = torch.optim.LBFGS([u], max_iter=200, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        w = back @ u
        total = loss(phi @ w) + 0.5 * w.square().sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimizer.step(closure)
    return back @ u.detach()


def _sample(
    loss: Callable[[Tensor], Tensor], phi: Tensor, mode: Tensor, back: Tensor, draws: int, warmup: int, chains: int
) -> tuple[Tensor, int]:
    """Draws of w (chains, draws, M, J), and the number of divergences."""
    mcmc = _import_pyro().infer.mcmc
    values, slope = phi @ mode, phi @ back

    def potential(state: dict[str, Tensor]) -> Tensor:
        u = state["u"]
        return loss(values + slope @ u) + 0.5 * (mode + back @ u).square().sum()

    found, divergences = [], 0
    with torch.enable_grad():
        for _ in range(chains):
            sampler = mcmc.NUTS(potential_fn=potential, adapt_mass_matrix=False)
            start = {"u": torch.randn_like(mode)}
            run = mcmc.MCMC(sampler, draws, warmup_steps=warmup, initial_params=start, disable_progbar=True)
            run.run()
            found.append(mode + back @ run.get_samples()["u"])
            divergences += len(run.diagnostics()["divergences"]["chain 0"])
    return torch.stack(found), divergences


def _diagnose(model: SampledWeights, values: Tensor, divergences: int) -> None:
    """Of values (chains, draws, N, J)."""
    stats = _import_pyro().ops.stats
    size = stats.effective_sample_size(values, 0, 1)
    model.r_hat = stats.split_gelman_rubin(values, 0, 1).amax()
    # Draws that alternate make pyro's estimate negative: they are worth more than independent ones.
    model.effective_samples = torch.where(size > 0, size, torch.inf).amin()
    model.divergences = torch.tensor(divergences).to(values)


def _import_pyro() -> Any:
    try:
        import pyro
        import pyro.infer.mcmc
        import pyro.ops.stats
    except ImportError as error:
        raise ImportError('Hamiltonian Monte Carlo needs pyro: pip install "afield[gp]".') from error
    return pyro
