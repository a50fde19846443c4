# %% [markdown]
# # Reading the audit and choosing a bound
#
# A distance in the hidden space means something if the hidden layers neither tear nearby inputs apart nor fold far ones
# together. Spectral bounds see to the first. This page shows how to read what they did, and how to choose them.
#
# The data are two moons, generated here.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import make_moons
from torch import nn

import afield


def moons(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    points, labels = make_moons(count, noise=0.1, random_state=seed)
    return torch.from_numpy(points).float(), torch.from_numpy(labels)


class Residual(nn.Module):
    """x + W relu(x): with a norm of W below one it can neither tear nor fold."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(F.relu(x))


train, held_out = moons(500, 0), moons(300, 1)


def fit(bound: float | None) -> afield.SNGP:
    torch.manual_seed(0)
    first = nn.Linear(2, 64)
    model = afield.sngp(nn.Sequential(first, *(Residual(64) for _ in range(4)), nn.Linear(64, 2)), bound=bound)
    optimizer = torch.optim.Adam(afield.parameter_groups(model, lr=3e-3, num_examples=500))
    for _ in range(60):
        for rows in torch.randperm(500).split(100):
            optimizer.zero_grad()
            F.cross_entropy(model(train[0][rows]), train[1][rows]).backward()
            optimizer.step()
    afield.fit_posterior(model, [train])
    afield.calibrate(model, [held_out])
    return model


models = {bound: fit(bound) for bound in (None, 0.95, 0.3)}

# %% [markdown]
# ## The audit
#
# One line a layer: its norm, its bound, and how often the bound was binding during training.

# %%
_ = models[0.95].audit()

# %% [markdown]
# - **norm** is that of the layer's operator as it acts now. It lies at the bound or below, up to what the last
#   training step added.
# - A bound that was **never binding** costs nothing. One that was binding **always** held the layer back: look whether
#   accuracy suffers.
# - A layer that is **not bounded** says why: no rule names it, or no bound is defined for its type.

# %% [markdown]
# ## Certified and measured
#
# `certified` proves constants L1 and L2 with L1 |x - x'| <= |h(x) - h(x')| <= L2 |x - x'| where it can. `measured` looks
# at pairs of your own examples. Here is what became of distances, and whether the score grows with the distance from
# the training data.

# %%
axis = torch.linspace(-3, 4, 60)
grid = torch.cartesian_prod(axis, axis)
print(f"{'bound':>6}{'smallest ratio':>17}{'largest':>9}{'right':>8}{'rank correlation with distance':>33}")
for bound, model in models.items():
    ratio = afield.diagnose.measured(model, train[0])
    known = (model.predict(held_out[0]).labels == held_out[1]).float().mean()
    correlation = afield.diagnose.distance_correlation(model.predict(grid).score(), grid, train[0])
    print(f"{bound!s:>6}{ratio.lower:>17.3f}{ratio.upper:>9.3f}{known:>8.1%}{correlation:>33.3f}")

# %% [markdown]
# The score of each model over the plane, the darker the further from the training data:

# %%
figure, places = plt.subplots(1, 3, figsize=(9, 3.2), sharex=True, sharey=True)
for place, (bound, model) in zip(places, models.items(), strict=True):
    score = model.predict(grid).score().reshape(60, 60).T
    place.contourf(axis, axis, score, levels=20, cmap="Greys")
    place.scatter(*train[0].T, c=train[1], s=4, cmap="coolwarm")
    place.set_title("no bound" if bound is None else f"bound {bound}", fontsize=10)
figure.suptitle("Two moons with three bounds", y=1.03)

# %% [markdown]
# ## How to choose
#
# 1. Begin with the default: 0.95 for Linear, 6 for convolutions.
# 2. If accuracy is below that of the dense network and the audit says "binding" for most layers, loosen:
#    `bound={nn.Conv2d: 10.0, nn.Linear: 0.95}`.
# 3. If far inputs get high p-values, tighten, or look with `measured` which part of the network folds distances.
# 4. To choose by numbers, on validation data alone: `afield sweep TASK --grid bound=0.5,0.95,2`.
#
# On many networks the bound matters less than the Gaussian process: [what our runs show](../defaults.md).

# %% tags=["remove-cell"]
for bound, model in models.items():
    assert (model.predict(held_out[0]).labels == held_out[1]).float().mean() > 0.9, bound
for row in models[0.3].audit():
    assert row.bound is None or row.norm <= 1.2 * row.bound
assert (~models[0.95].predict(grid).accept(0.05)).float().mean() > 0.5
