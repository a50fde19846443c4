# %% [markdown]
# # Regression with intervals
#
# A number alone is not an answer: how far off may it be? Here a network predicts numbers with an interval that is wide
# where the data are noisy and where there are none, and holds the truth as often as it says.
#
# The data are generated, so that the truth is known: the noise grows with x, and there is a gap.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import afield
from afield.decide.conformal import prediction_intervals

torch.manual_seed(0)


def draw(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.cat([torch.rand(count // 2, 1) * 3 - 4, torch.rand(count // 2, 1) * 3 + 1])  # -4 to -1 and 1 to 4
    x = x[torch.randperm(len(x))]
    return x, torch.sin(1.5 * x) + (0.05 + 0.1 * (x + 4)) * torch.randn(x.shape)


train, held_out, intervals, test = draw(1200), draw(400), draw(400), draw(2000)

# %% [markdown]
# ## The network, and the noise
#
# `likelihood="gaussian"` says that outputs are numbers. `noise="input"` lets the noise differ from input to input; it is
# found from the residuals when the posterior is fitted.

# %%
net = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
model = afield.sngp(net, bound=None, likelihood="gaussian", noise="input")
optimizer = torch.optim.Adam(afield.parameter_groups(model, lr=3e-3))
for _ in range(60):
    for rows in torch.randperm(len(train[0])).split(200):
        optimizer.zero_grad()
        F.mse_loss(model(train[0][rows]), train[1][rows]).backward()
        optimizer.step()
afield.fit_posterior(model, [train])
found = afield.calibrate(model, [held_out])
print(f"log loss on held-out data: {found.loss_before:.3f} before, {found.loss:.3f} after")

# %% [markdown]
# ## Two kinds of not knowing
#
# `p.std` has both: the noise of the targets, which more data cannot cure, and the variance of the function, which it
# can. `p.variance` is the second alone.

# %%
axis = torch.linspace(-8, 8, 400).unsqueeze(1)
p = model.predict(axis)
low, high = p.interval(0.95)
figure, axes = plt.subplots(figsize=(7, 3.4))
line = axis.flatten().numpy()
axes.fill_between(line, low.flatten().numpy(), high.flatten().numpy(), alpha=0.2, label="95% interval")
axes.plot(line, p.mean.flatten().numpy(), label="mean")
axes.plot(train[0].flatten().numpy(), train[1].flatten().numpy(), ".", color="black", markersize=2, alpha=0.4)
axes.set(xlabel="x", ylabel="y", ylim=(-5, 5), title="Wide where the data are noisy, and where there are none")
axes.legend(loc="lower left")

# %% [markdown]
# ## Does it hold what it says?
#
# On fresh data, overall, where it is quiet and where it is loud:

# %%
q = model.predict(test[0])
low, high = q.interval(0.95)
inside = ((low <= test[1]) & (test[1] <= high)).flatten()
quiet = test[0].flatten() < 0
print(f"inside the 95% interval: {inside.float().mean():.1%}")
print(f"quiet part: {inside[quiet].float().mean():.1%}, loud part: {inside[~quiet].float().mean():.1%}")
print(f"mean width: quiet {(high - low)[quiet].mean():.2f}, loud {(high - low)[~quiet].mean():.2f}")

# %% [markdown]
# ## An interval with a promise
#
# The interval above is right if the model is. Conformal intervals stretch it by what held-out data shows, and hold the
# truth at the rate that they promise, whatever the model.

# %%
rule = prediction_intervals(model.predict(intervals[0]), intervals[1], level=0.9)
low, high = rule.intervals(q)
print(f"inside the conformal 90% interval: {((low <= test[1]) & (test[1] <= high)).float().mean():.1%}")

# %% [markdown]
# ## Far away
#
# The promise is about inputs like the held-out ones. Whether an input is one of them, its p-value says; it rests on the
# variance of the function. In the gap and outside:

# %%
asked = torch.tensor([[-2.0], [2.0], [0.0], [7.0], [30.0]])
answer = model.predict(asked)
for x, mean, std, value in zip(asked, answer.mean, answer.std, answer.p_value, strict=True):
    print(f"x = {x.item():5.1f}   y = {mean.item():6.2f} +- {std.item():.2f}   p-value {value:.3f}")

# %% [markdown]
# **Next.** For data frames: `SNGPRegressor` of [scikit-learn](../scikit-learn.md), `predict(X, return_std=True)`. Policies
# for numbers, with a tolerance: [decisions](../decisions.md).

# %% tags=["remove-cell"]
assert 0.9 < inside.float().mean() < 0.99
assert (q.std[~quiet].mean() / q.std[quiet].mean()) > 1.5
assert answer.p_value[-1] < 0.05
