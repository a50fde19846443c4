"""Draw the pictures of docs/how-it-works.md with afield's own functions: python -m bench.pictures"""

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt

import afield
from afield.prediction.p_values import conformal_p_value
from afield.prediction.predictive import mean_field

DOCS = Path(__file__).parents[1] / "docs"


def variance() -> plt.Figure:
    """A Gaussian-process output over one hidden number: its band opens where there are no examples."""
    generator = torch.Generator().manual_seed(0)
    h = torch.cat([torch.rand(40, 1, generator=generator) - 2, 1.2 + torch.rand(40, 1, generator=generator)])
    target = torch.sin(2 * h) + 0.1 * torch.randn(h.shape, generator=generator)
    options = {"length_scale": 0.7, "ridge": 0.1, "constant": False, "generator": generator}
    line = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(1, 1))
    net = afield.sngp(line, bound=None, freeze=True, likelihood="gaussian", **options)
    afield.fit_head(net, [(h, target)])
    afield.fit_posterior(net, [(h, target)])
    axis = torch.linspace(-4, 4.5, 300).unsqueeze(1)
    p = net.predict(axis)
    mean, std, x = p.mean.flatten(), p.std.flatten(), axis.flatten()
    figure, axes = plt.subplots(figsize=(7, 3))
    axes.fill_between(x, mean - 2 * std, mean + 2 * std, alpha=0.2)
    axes.plot(x, mean)
    axes.plot(h.flatten(), target.flatten(), ".", color="black", markersize=3)
    axes.set(xlabel="hidden vector h, here one number", ylabel="f(h), two standard deviations")
    return figure


def shrinkage() -> plt.Figure:
    """How the variance draws a probability to one half."""
    variances = torch.linspace(0, 40, 200)
    figure, axes = plt.subplots(figsize=(7, 3))
    for logit in (1.0, 2.0, 4.0, 8.0):
        logits = torch.tensor([[logit, 0.0]]).expand(200, 2)
        axes.plot(variances, mean_field(logits, variances)[:, 0], label=f"logit {logit:g}")
    axes.set(xlabel="variance v", ylabel="probability of the class", ylim=(0.45, 1.02))
    axes.legend(title="margin in training", fontsize=8)
    return figure


def p_value() -> plt.Figure:
    """A p-value as a part of the reference."""
    reference = torch.distributions.Gamma(3.0, 1.0).sample((199,))
    new = torch.tensor([6.5])
    value = float(conformal_p_value(new, reference.sort().values)[0])
    figure, axes = plt.subplots(figsize=(7, 3))
    _, edges, bars = axes.hist(reference.numpy(), bins=[k / 2 for k in range(21)], color="tab:blue", alpha=0.5)
    for left, bar in zip(edges, bars, strict=False):
        if left >= float(new):
            bar.set(color="tab:red", alpha=0.8)
    axes.axvline(float(new), color="black")
    axes.annotate(f" a new input: p = {value:.3f}", (float(new), axes.get_ylim()[1] * 0.85))
    axes.set(xlabel="score: how far from the training data", ylabel="held-out inputs")
    return figure


PICTURES: dict[str, Callable[[], plt.Figure]] = {
    "how-variance": variance,
    "how-shrinkage": shrinkage,
    "how-p-value": p_value,
}


def main() -> None:
    mpl.use("agg")
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "savefig.bbox": "tight"}):
        for name, draw in PICTURES.items():
            torch.manual_seed(0)
            draw().savefig(DOCS / f"{name}.png", dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    main()
