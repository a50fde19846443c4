"""Output weights of a frozen backbone: the maximum of the posterior, by convex optimisation.

    min over B   sum_i w_i -log p(y_i | phi_i^T B + constant) + r/2 |B|^2

The paper's footnote on the final epoch: a posterior strictly conditioned on the hidden representation needs the output
weights that are optimal for it. The problem is convex, on one cached pass over the data:

    gaussian   closed form, with the noise variance at the fixed point RSS / (n - effective parameters)
    others     Newton with conjugate gradients, in coordinates C where r I + Phi^T W Phi is the identity and the penalty
               is diagonal, with entries s_j: were every example's curvature the mean m_k of its class, the Hessian
               would be the diagonal m_k (1 - s_j) + s_j. That preconditions, and few products are needed

w_i, the weights of the examples, are 1 unless they are given.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS, Likelihood
from afield.gp.precision import add_products
from afield.model.batches import Field, Inputs
from afield.model.evaluating import evaluating
from afield.model.hidden import Hidden, Sample, adapt, check_target
from afield.model.progress import track
from afield.model.sngp_model import SNGP, for_each_head
from afield.model.targets import warn_of_kind
from afield.outputs.noise import noise_variance
from afield.outputs.positions import IGNORED, OBSERVED

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
    """Features (N, D or D + 1 with the constant), targets, weights or None, and the penalty of each feature."""

    phi: Tensor
    target: Tensor
    weight: Tensor | None
    penalty: Tensor
    start: Tensor  # (D or D + 1, K)
    head: GaussianProcessHead
    progress: bool | None

    @property
    def likelihood(self) -> Likelihood:
        return LIKELIHOODS[self.head.likelihood]

    @property
    def count(self) -> float:
        """Examples: one of weight w is w of them."""
        return float(len(self.phi)) if self.weight is None else float(self.weight.sum())

    def weighted(self, values: Tensor) -> Tensor:
        """Values of the examples (N, ...), times their weights."""
        return values if self.weight is None else values * self.weight.to(values)[:, *[None] * (values.dim() - 1)]

    def gram(self) -> Tensor:
        """Phi^T W Phi, in float64."""
        total = torch.zeros_like(torch.diag(self.penalty))
        for start in range(0, len(self.phi), 8192):
            double = self.phi[start : start + 8192].double()
            weight = None if self.weight is None else self.weight[start : start + 8192, None]
            add_products(total, double if weight is None else double * weight, double)
        return total

    def nll(self, logits: Tensor) -> Tensor:
        """The sum over the examples of their weighted loss."""
        return self.weighted(self.likelihood.loss(logits, self.target)).sum()

    @functools.cached_property
    def gradient_at_zero(self) -> float:
        return max(float(self.loss_and_gradient(torch.zeros_like(self.start))[1].norm()), 1e-300)

    def forward(self, weights: Tensor) -> Tensor:
        return torch.cat([phi.double() @ weights for phi in self.phi.split(8192)])

    def loss_and_gradient(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The objective and its gradient, in float64."""
        logits = self.forward(weights).requires_grad_()
        with torch.enable_grad():
            nll = self.nll(logits) / float(self.head.noise)
        (slope,) = torch.autograd.grad(nll, logits)
        gradient = self.penalty[:, None] * weights
        for phi, part in zip(self.phi.split(8192), slope.split(8192), strict=True):
            gradient = gradient + phi.double().T @ part
        return nll.detach() + 0.5 * (self.penalty[:, None] * weights.square()).sum(), gradient


@for_each_head
def fit_head(
    model: SNGP,
    loader: Iterable[Any],
    *,
    target: Field | None = None,
    inputs: Inputs = None,
    weights: Tensor | None = None,
    tolerance: float = 1e-4,
    num_positions: int | None = OBSERVED,
    ignore_index: int = IGNORED,
    progress: bool | None = None,
) -> HeadFit:
    """Solve for the output weights on top of the network as it is: no gradient steps through it, minutes at most.

    Use it after a training with `afield.sngp`, whose last step is not the optimum, or on a trained `net` with
    `afield.sngp(net, bound=None, freeze=True)`; then `afield.fit_posterior`. The weights start where they are, so that
    a second call ends at once. The features (N, D) stay in memory. Under torch.distributed give every rank the whole
    loader: each solves for itself.

    loader     batches (inputs, target)
    target     index or key of the target in a batch, and
    inputs     of the input or a list of them, where a batch has more fields than those two
    weights    (N,) of the examples, in the order of the loader: one of weight w counts as w examples; None: one each
    tolerance  the norm of the gradient, relative to that at zero weights, at which to stop
    num_positions, ignore_index  as in `afield.fit_posterior`

    returns  a `HeadFit`: how it ended
    raises   ValueError if the loader is empty, has no targets, or the model keeps its trained output layer

    >>> frozen = afield.sngp(net, bound=None, freeze=True)
    >>> fit = afield.fit_head(frozen, train_loader)
    >>> fit.gradient < 1e-4
    True
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
        twice = not head.random_features.adapted
        fields: dict[str, Any] = {"target": target, "inputs": inputs}
        sample = Sample(num_positions, ignore_index)
        examples = Hidden(
            model, loader, weights=weights, keep=twice, fitting=True, progress=progress, sample=sample, **fields
        )
        if twice:
            adapt(head.random_features, examples)
        phis, targets, of_examples = [], [], []
        for h, y, weight in examples:
            if y is None:
                raise examples.without_target("fit_head")
            phis.append(head.features(h))
            targets.append(y)
            of_examples.append(weight)
        if not phis:
            raise ValueError("fit_head got an empty loader: there is nothing to fit.")
        y = check_target(torch.cat(targets), head)
        given = None if examples.weights is None else torch.cat([w for w in of_examples if w is not None])
        problem = _problem(head, torch.cat(phis), y, given, progress)
        solution, iterations = (_closed_form if problem.likelihood.noisy else _newton)(problem, tolerance)
        loss, gradient = problem.loss_and_gradient(solution)
        if head.constant is not None:
            head.constant.copy_(solution[-1])
            solution = solution[:-1]
        assert isinstance(head.weight, Tensor)
        head.weight.copy_(solution.T)
        head.reset_posterior()  # it belonged to other weights
        relative = float(gradient.norm()) / problem.gradient_at_zero
    warn_of_kind(examples.odd_targets)
    return HeadFit(float(loss) / problem.count, relative, iterations, len(problem.phi))


def _problem(
    head: GaussianProcessHead, phi: Tensor, target: Tensor, weight: Tensor | None, progress: bool | None
) -> _Problem:
    penalty = torch.full((phi.shape[1],), float(head.ridge), dtype=torch.float64, device=phi.device)
    start = head.weight.detach().double().T
    if head.constant is not None:
        phi = torch.cat([phi, torch.ones_like(phi[:, :1])], dim=1)
        penalty = torch.cat([penalty, penalty.new_zeros(1)])
        start = torch.cat([start, head.constant.detach().double()[None]])
    return _Problem(phi, target, None if weight is None else weight.to(phi.device), penalty, start, head, progress)


def _closed_form(problem: _Problem, tolerance: float) -> tuple[Tensor, int]:
    """A quadratic loss, with the noise variance at its fixed point."""
    head, phi, y = problem.head, problem.phi, problem.target
    gram, penalty = problem.gram(), torch.diag(problem.penalty)
    right = sum(p.double().T @ t for p, t in zip(phi.split(8192), problem.weighted(y).split(8192), strict=True))
    weights = problem.start
    for iterations in range(1, 101):  # noqa: B007 (reported)
        noise = float(head.noise)
        weights = torch.linalg.solve(gram + noise * penalty, right)
        squares = _typical(problem.weighted((y - problem.forward(weights)).square()).sum(0))
        count, features = problem.count * y.shape[1], head.weight.shape[1]
        head.set_scalars(noise=noise_variance(head, gram[:features, :features], squares, count))
        if abs(float(head.noise) / noise - 1) < 1e-9:
            break
    weights = torch.linalg.solve(gram + float(head.noise) * penalty, right)
    return weights, iterations


def _typical(squares: Tensor) -> float:
    """The sum (K,) over the outputs in units in which all have one noise, as the prior has them (`gp.noise`)."""
    least = 1e-24 * float(squares.max()) + 1e-300
    return len(squares) * float(squares.clamp_min(least).log().mean().exp())


def _newton(problem: _Problem, tolerance: float) -> tuple[Tensor, int]:
    """Newton with conjugate gradients in the coordinates of the module's docstring, products in the model's dtype."""
    dtype, likelihood = problem.phi.dtype, problem.likelihood
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
            nll = problem.nll(logits.double())
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
        bend = likelihood.hessian(logits)
        mean_curvature = problem.weighted(likelihood.curvature(logits)).mean(0) * (len(logits) / problem.count)
        guess = mean_curvature * (1 - shrinkage) + shrinkage

        def hessian(d: Tensor, bend: Callable[[Tensor], Tensor] = bend) -> Tensor:
            return white.T @ problem.weighted(bend(white @ d)) + shrinkage * d

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
