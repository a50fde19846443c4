"""Output weights of a frozen backbone: the maximum of the posterior, by convex optimisation.

    min over B   sum_i -log p(y_i | phi_i^T B + constant) + r/2 |B|^2

The paper's footnote on the final epoch: a posterior strictly conditioned on the hidden representation needs the output
weights that are optimal for it. The problem is convex, on one cached pass over the data:

    gaussian   closed form, with the noise variance at the fixed point RSS / (n - effective parameters)
    others     Newton with conjugate gradients, in coordinates C where r I + Phi^T Phi is the identity and the penalty
               is diagonal, with entries s_j: were every example's curvature the mean m_k of its class, the Hessian
               would be the diagonal m_k (1 - s_j) + s_j. That preconditions, and few products are needed
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from afield.gp.head import GaussianProcessHead
from afield.gp.precision import CURVATURES, add_products
from afield.model.evaluating import evaluating
from afield.model.hidden import Hidden, adapt, check_target
from afield.model.posterior import noise_variance
from afield.model.progress import track
from afield.model.sngp_model import SNGP
from afield.registry import Registry

_MOST_ITERATIONS = 200


@dataclass(frozen=True)
class HeadFit:
    """How `fit_head` ended; `gradient` is the norm of the gradient relative to that at zero weights."""

    loss: float
    gradient: float
    iterations: int
    num_examples: int


@dataclass(frozen=True)
class _Problem:
    """Features (N, D or D + 1 with the constant), targets, and the penalty of each feature."""

    phi: Tensor
    target: Tensor
    penalty: Tensor
    start: Tensor  # (D or D + 1, K)
    head: GaussianProcessHead
    progress: bool | None

    def gram(self) -> Tensor:
        """Phi^T Phi, in float64."""
        total = torch.zeros_like(torch.diag(self.penalty))
        for phi in self.phi.split(8192):
            double = phi.double()
            add_products(total, double, double)
        return total

    @functools.cached_property
    def gradient_at_zero(self) -> float:
        return max(float(self.loss_and_gradient(torch.zeros_like(self.start))[1].norm()), 1e-300)

    def forward(self, weights: Tensor) -> Tensor:
        return torch.cat([phi.double() @ weights for phi in self.phi.split(8192)])

    def loss_and_gradient(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The objective and its gradient, in float64."""
        logits = self.forward(weights).requires_grad_()
        with torch.enable_grad():
            nll = NLLS[self.head.likelihood](logits, self.target) / float(self.head.noise)
        (slope,) = torch.autograd.grad(nll, logits)
        gradient = self.penalty[:, None] * weights
        for phi, part in zip(self.phi.split(8192), slope.split(8192), strict=True):
            gradient = gradient + phi.double().T @ part
        return nll.detach() + 0.5 * (self.penalty[:, None] * weights.square()).sum(), gradient


def fit_head(model: SNGP, loader: Iterable[Any], *, tolerance: float = 1e-4, progress: bool | None = None) -> HeadFit:
    """Solve for the output weights on top of the network as it is: no gradient steps through it, minutes at most.

    Use it on `afield.sngp(net, bound=None, freeze=True)` for a trained `net`, then `afield.fit_posterior`. The weights
    start where they are, so that a second call ends at once.

    loader     batches (inputs, target)
    tolerance  the norm of the gradient, relative to that at zero weights, at which to stop
    """
    head = model.head
    if head.mean is not None:
        raise ValueError("This model keeps its trained output layer (afield.attach): there are no weights to fit.")
    if head.added or head.dropped:
        raise ValueError(
            "fit_head solves for all outputs of a head whose classes never changed (afield.class_changes): convert the "
            "network again, with out_features=..."
        )
    with evaluating(model):
        examples = Hidden(model, loader, progress=progress)
        if not head.random_features.adapted:
            adapt(model, examples)
        phis, targets = [], []
        for h, target in examples:
            if target is None:
                raise examples.without_target("fit_head")
            phis.append(head.features(h))
            targets.append(target)
        if not phis:
            raise ValueError("fit_head got an empty loader: there is nothing to fit.")
        problem = _problem(head, torch.cat(phis), check_target(torch.cat(targets), head), progress)
        weights, iterations = SOLVERS[head.likelihood](problem, tolerance)
        loss, gradient = problem.loss_and_gradient(weights)
        if head.constant is not None:
            head.constant.copy_(weights[-1])
            weights = weights[:-1]
        assert isinstance(head.weight, Tensor)
        head.weight.copy_(weights.T)
        head.reset_posterior()  # it belonged to other weights
        count, scale = problem.phi.shape[0], problem.gradient_at_zero
    return HeadFit(float(loss) / count, float(gradient.norm()) / scale, iterations, count)


def _problem(head: GaussianProcessHead, phi: Tensor, target: Tensor, progress: bool | None) -> _Problem:
    penalty = torch.full((phi.shape[1],), float(head.ridge), dtype=torch.float64, device=phi.device)
    start = head.weight.detach().double().T
    if head.constant is not None:
        phi = torch.cat([phi, torch.ones_like(phi[:, :1])], dim=1)
        penalty = torch.cat([penalty, penalty.new_zeros(1)])
        start = torch.cat([start, head.constant.detach().double()[None]])
    return _Problem(phi, target, penalty, start, head, progress)


def _gaussian(problem: _Problem, tolerance: float) -> tuple[Tensor, int]:
    head, phi, y = problem.head, problem.phi, problem.target
    gram, penalty = problem.gram(), torch.diag(problem.penalty)
    right = sum(p.double().T @ t for p, t in zip(phi.split(8192), y.split(8192), strict=True))
    weights = problem.start
    for iterations in range(1, 101):  # noqa: B007 (reported)
        noise = float(head.noise)
        weights = torch.linalg.solve(gram + noise * penalty, right)
        squares = float((y - problem.forward(weights)).square().sum())
        head.set_scalars(
            noise=noise_variance(head, gram[: head.weight.shape[1], : head.weight.shape[1]], squares, y.numel())
        )
        if abs(float(head.noise) / noise - 1) < 1e-9:
            break
    weights = torch.linalg.solve(gram + float(head.noise) * penalty, right)
    return weights, iterations


def _newton(problem: _Problem, tolerance: float) -> tuple[Tensor, int]:
    """Newton with conjugate gradients in the coordinates of the module's docstring, products in the model's dtype."""
    dtype, likelihood = problem.phi.dtype, problem.head.likelihood
    gram = problem.gram() + torch.diag(problem.penalty)
    gram.diagonal().add_(1e-9 * float(gram.diagonal().amax()))  # a constant that copies a feature
    lower = torch.linalg.cholesky(gram)
    inverse = torch.linalg.solve_triangular(lower, torch.eye(len(lower)).to(lower), upper=False)
    values, turn = torch.linalg.eigh((inverse * problem.penalty) @ inverse.T)
    lower, inverse = lower @ turn, turn.T @ inverse
    white = torch.cat([(phi.double() @ inverse.T).to(dtype) for phi in problem.phi.split(8192)])
    shrinkage = values.clamp(0, 1).to(dtype)[:, None]

    def evaluate(c: Tensor) -> tuple[float, Tensor, Tensor]:
        logits = (white @ c).requires_grad_()
        with torch.enable_grad():
            nll = NLLS[likelihood](logits.double(), problem.target)
        (slope,) = torch.autograd.grad(nll, logits)
        pull = shrinkage * c
        return float(nll) + 0.5 * float((c * pull).double().sum()), white.T @ slope + pull, logits.detach()

    c = (lower.T @ problem.start).to(dtype)
    scale = problem.gradient_at_zero
    loss, gradient, logits = evaluate(c)
    iterations = 0
    for _ in track(range(_MOST_ITERATIONS), "output weights", show=problem.progress):
        size = float((lower @ gradient.double()).norm())  # in the weights themselves, as reported
        if size <= tolerance * scale:
            break
        bend = HESSIANS[likelihood](logits)
        guess = CURVATURES[likelihood](logits).mean(0) * (1 - shrinkage) + shrinkage

        def hessian(d: Tensor, bend: Callable[[Tensor], Tensor] = bend) -> Tensor:
            return white.T @ bend(white @ d) + shrinkage * d

        step = _conjugate_gradients(hessian, gradient, guess.clamp_min(1e-6), min(0.1, (size / scale) ** 0.5))
        slope, length = float((step * gradient).double().sum()), 1.0
        while length > 1e-6:  # Armijo: far from the optimum a full Newton step may overshoot
            trial = evaluate(c - length * step)
            if trial[0] <= loss - 1e-4 * length * slope:
                break
            length /= 2
        else:
            break  # this precision has no more to give
        c, (loss, gradient, logits) = c - length * step, trial
        iterations += 1
    return inverse.T @ c.double(), iterations


def _conjugate_gradients(
    operator: Callable[[Tensor], Tensor], right: Tensor, diagonal: Tensor, tolerance: float
) -> Tensor:
    """operator(x) = right up to a relative residual, preconditioned by a diagonal guess of the operator."""
    solution, residual = torch.zeros_like(right), right.clone()
    direction = residual / diagonal
    square = float((residual * direction).double().sum())
    enough = tolerance * float(right.double().norm())
    for _ in range(_MOST_ITERATIONS):
        if float(residual.double().norm()) <= enough:
            break
        product = operator(direction)
        length = square / float((direction * product).double().sum())
        solution += length * direction
        residual -= length * product
        guessed = residual / diagonal
        before, square = square, float((residual * guessed).double().sum())
        direction = guessed + (square / before) * direction
    return solution


NLLS: Registry[Callable[[Tensor, Tensor], Tensor]] = Registry(
    "likelihood",
    categorical=lambda f, y: F.cross_entropy(f, y, reduction="sum"),
    bernoulli=lambda f, y: F.binary_cross_entropy_with_logits(f.squeeze(1), y.to(f), reduction="sum"),
    gaussian=lambda f, y: 0.5 * (f - y).square().sum(),
    poisson=lambda f, y: (f.exp() - y * f).sum(),
)


def _softmax_hessian(logits: Tensor) -> Callable[[Tensor], Tensor]:
    p = F.softmax(logits, dim=-1)
    return lambda u: p * u - p * (p * u).sum(-1, keepdim=True)


def _diagonal_hessian(likelihood: str) -> Callable[[Tensor], Callable[[Tensor], Tensor]]:
    def hessian(logits: Tensor) -> Callable[[Tensor], Tensor]:
        weights = CURVATURES[likelihood](logits)
        return lambda u: weights * u

    return hessian


HESSIANS: Registry[Callable[[Tensor], Callable[[Tensor], Tensor]]] = Registry(
    "likelihood",
    categorical=_softmax_hessian,
    bernoulli=_diagonal_hessian("bernoulli"),
    poisson=_diagonal_hessian("poisson"),
)
SOLVERS: Registry[Callable[[_Problem, float], tuple[Tensor, int]]] = Registry(
    "likelihood", categorical=_newton, bernoulli=_newton, gaussian=_gaussian, poisson=_newton
)
