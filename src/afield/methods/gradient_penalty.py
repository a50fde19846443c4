"""Two-sided gradient penalty: the output must move with the input, neither faster nor slower (DUQ's regulariser).

    loss + weight * 1/N sum_i (|grad_x f_y(x_i)| - 1)^2          f_y: the logit of the example's own class

With a Gaussian-process head this is the paper's DUQ-GP: DUQ (van Amersfoort et al. 2020) with our head in the place of
its RBF layer. The norm is not squared: so does DUQ's code, where its paper squares it.

DUQ takes the gradient of the sum of all outputs. Under a softmax that sum is the one direction that the cross-entropy
leaves alone: with output weights that start at zero it stays zero (for two classes up to rounding), its gradient with
it, and the penalty would have nothing but rounding errors to hold on to. So we take one logit. This one also has to
classify, hence a smaller weight than DUQ's: on two moons 0.1 keeps the accuracy, 0.5 can cost a per cent.

The price is a backward pass through the gradient: about twice the training time of a plain network, four times that of
one with batch norm, whose second derivative torch puts together from many small operations. Loss and penalty share one
forward pass.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from afield.methods.method import Method, Model


def gradient_penalty(method: Method[Model], weight: float = 0.1) -> Method[Model]:
    """The method with the penalty added to its loss; its inputs must be floating-point tensors."""
    if not weight >= 0:
        raise ValueError(f"The weight of the gradient penalty must not be negative, got {weight}.")

    base = method.loss
    if base is None:
        raise ValueError("The gradient penalty expects a method that is trained by gradient steps.")

    def loss(model: Model, batch: Any) -> Tensor:
        x, y = _movable(batch[0]), batch[1]
        outputs: list[Tensor] = []
        hook = model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        try:
            value = base(model, (x, y))
        finally:
            hook.remove()
        return value + weight * _penalty(outputs[-1], x, y)

    return dataclasses.replace(method, loss=loss, trained_as=None)


def penalty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean of (|grad_x f_y(x)| - 1)^2 over examples x (N, ...) with classes y (N,); f itself if it is the only."""
    with torch.enable_grad():
        x = _movable(x)
        return _penalty(model(x), x, y)


def _movable(x: Tensor) -> Tensor:
    """The same inputs as the variables of a derivative."""
    if not x.is_floating_point():
        raise ValueError(f"The gradient penalty needs inputs that can move, floating-point numbers, got {x.dtype}.")
    return x.detach().requires_grad_()


def _penalty(logits: Tensor, x: Tensor, y: Tensor) -> Tensor:
    own = logits.gather(1, y[:, None]) if logits.shape[1] > 1 else logits
    (gradient,) = torch.autograd.grad(own.sum(), x, create_graph=True)
    return (torch.linalg.vector_norm(gradient.flatten(1), dim=1) - 1).square().mean()
