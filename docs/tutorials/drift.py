# %% [markdown]
# # Drift in production
#
# A model answers all day. One morning the scanner is dirty, and the inputs are no longer those that it was calibrated
# with. Nobody sends labels. An alarm should ring, soon, and never for nothing.
#
# `afield.drift` bets against "nothing has changed", with one unit, at fair odds. Without drift the chance that the stake
# ever grows a hundredfold is at most 1%, however often you look. That is the alarm.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import afield

torch.manual_seed(0)
pixels, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
pixels = pixels.float() / 16
order = torch.randperm(len(pixels))
x, y = pixels[order], digits[order]

model = afield.sngp(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
optimizer = torch.optim.Adam(afield.parameter_groups(model, lr=3e-3, num_examples=600))
for _ in range(25):
    for rows in torch.randperm(600).split(100):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
afield.fit_posterior(model, [(x[:600], y[:600])])
found = afield.calibrate(model, [(x[600:1000], y[600:1000])])
print(f"{found.num_reference} reference rows; log loss {found.loss:.3f}")

# %% [markdown]
# ## A stream
#
# Three hundred good digits, then five hundred with a grey veil that grows little by little.

# %%
good, later = x[1000:1300], x[1300:1797]
veil = torch.linspace(0, 0.5, len(later)).unsqueeze(1)
stream = torch.cat([good, later + veil])
right = torch.cat([model.predict(rows).labels for rows in stream.split(100)]) == y[1000:1797]

watch = afield.drift.watch_model(model, alpha=0.01)
for row in stream:
    watch.update(model.predict(row.unsqueeze(0)).score())
print(f"the alarm rang at row {watch.alarm.row}; the change seems to have begun after row {watch.alarm.began}")
print(f"right in rows 1 to 300: {right[:300].float().mean():.1%}; in the last 100: {right[-100:].float().mean():.1%}")

# %% [markdown]
# The alarm needs no labels. It saw the veil while the answers were still mostly right.

# %%
rows, evidence = zip(*watch.curve, strict=True)
figure, axes = plt.subplots(figsize=(7, 3))
axes.plot(rows, evidence)
axes.axhline(watch.line, color="tab:red", linewidth=1)
axes.axvline(300, color="black", linewidth=1, linestyle=":")
axes.set(xlabel="row of the stream", ylabel="evidence, log10", title="Evidence against 'nothing has changed'")
axes.annotate("the alarm rings", (0, watch.line), xytext=(0, 4), textcoords="offset points", color="tab:red")
axes.annotate("the veil begins", (300, max(evidence)), xytext=(4, -4), textcoords="offset points")

# %% [markdown]
# ## The same without drift
#
# Twenty streams of good digits in other orders. At most one in a hundred may ever ring.

# %%
calm = model.predict(good).score()
rang = 0
for seed in range(20):
    quiet = afield.drift.watch_model(model, alpha=0.01)
    quiet.update(calm[torch.randperm(300, generator=torch.Generator().manual_seed(seed))])
    rang += quiet.alarm is not None
print(f"{rang} of 20 rang")

# %% [markdown]
# ## What to do when it rings
#
# Look at the rows furthest out (`watch.smallest`). If the change is harmless and here to stay, take new held-out data and
# call `afield.calibrate` again. If not, the probabilities of this stream are worth nothing: repair the scanner.
#
# **Next.** [How the alarm keeps its word](../drift.md). `afield serve` watches every stream that it answers, and draws
# this curve on its page: [serving](../serving.md). For files: `afield score --watch 0.01`.

# %% tags=["remove-cell"]
assert 300 < watch.alarm.row < 780
assert rang <= 2
assert right[:300].float().mean() > 0.9
