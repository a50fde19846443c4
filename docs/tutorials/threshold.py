# %% [markdown]
# # A threshold you can defend
#
# "Refuse if the confidence is below 0.9" is a number that somebody liked. This page chooses thresholds that come with a
# promise: how often a good input is refused, how often an answer is wrong, how many of the flagged inputs are flagged
# for nothing. Each promise is a theorem about fresh inputs like the held-out ones, whatever the network.
#
# The data are scikit-learn's digits 0 to 7. 8 and 9 play the part of what should never have arrived.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import afield

torch.manual_seed(0)
pixels, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
pixels = pixels.float() / 16 + 0.25 * torch.randn(pixels.shape)  # a poor scanner, so that there are errors to speak of
known = (digits < 8).nonzero().flatten()
known = known[torch.randperm(len(known))]
x, y, foreign = pixels[known], digits[known], pixels[digits >= 8]
parts = {"train": slice(500), "calibrate": slice(500, 800), "policy": slice(800, 1100), "test": slice(1100, None)}
data = {name: (x[rows], y[rows]) for name, rows in parts.items()}

# %% [markdown]
# Four parts, none of which overlap. The policy's own part is what makes its promise honest: neither the network nor the
# calibration has seen it.

# %%
model = afield.sngp(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)))
optimizer = torch.optim.Adam(afield.parameter_groups(model, lr=3e-3, num_examples=500))
for _ in range(40):
    for rows in torch.randperm(500).split(100):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
afield.fit_posterior(model, [data["train"]])
afield.calibrate(model, [data["calibrate"]])
test = model.predict(data["test"][0])
print(f"right on fresh digits: {(test.labels == data['test'][1]).float().mean():.1%}")

# %% [markdown]
# ## Alpha: how often a good input is refused
#
# Choose it by what a false alarm costs you. At `alpha=0.05` at most one good input in twenty is refused, on average over
# held-out sets. With `delta=0.1` the promise is about the held-out set that you have, with 90% confidence; it is
# stricter, so it refuses a little less.

# %%
strange = model.predict(foreign)
for alpha in (0.01, 0.05, 0.1):
    good, bad = (~test.accept(alpha)).float().mean(), (~strange.accept(alpha)).float().mean()
    print(f"alpha {alpha:4}: refused {good:5.1%} of fresh digits, {bad:5.1%} of 8 and 9")
print(f"alpha 0.05, delta 0.1: {(~test.accept(0.05, delta=0.1)).float().mean():.1%} of fresh digits")

# %% [markdown]
# ## Risk: how often an answer is wrong
#
# Choose it by what a wrong answer costs you. The policy finds the largest set of answers whose error rate it can promise
# from the 300 rows that it is given.

# %%
held_out = model.predict(data["policy"][0])
rule = afield.policy(held_out, data["policy"][1], risk=0.05, delta=0.1)
print(rule.guarantee)
outcome = rule.outcome(test, data["test"][1])
print(f"on the test part: {outcome.coverage:.1%} answered, {outcome.risk:.1%} of the answers wrong")

# %% [markdown]
# What these rows cannot promise, it refuses to promise, and says what they can:

# %%
try:
    afield.policy(held_out, data["policy"][1], risk=0.001)
except ValueError as error:
    print(error)

# %% [markdown]
# Every error rate has its coverage. The dot is where the rule stands.

# %%
order = rule.doubt(test).argsort()
wrong = (test.labels != data["test"][1])[order].double().cumsum(0)
answered = torch.arange(1, len(order) + 1)
figure, axes = plt.subplots(figsize=(6, 3.2))
axes.plot(answered / len(order), wrong / answered)
axes.plot(outcome.coverage, outcome.risk, "o")
axes.axhline(0.05, color="black", linewidth=1, linestyle=":")
axes.set(xlabel="part that is answered", ylabel="part of the answers that is wrong", title="Risk and coverage")

# %% [markdown]
# ## FDR: how many flags are false
#
# A batch of scans arrives, some of them with inverted colours, and somebody will look at those that you flag. Alpha is no
# help: of a million good inputs, `alpha=0.01` flags ten thousand. The false discovery rate counts the false flags among
# all flags.

# %%
inverted = 1 - x[:60]
batch = torch.cat([data["test"][0], inverted])
flagged = afield.selection.flag(model.predict(batch).p_value, fdr=0.2)
false = int(flagged[: len(data["test"][0])].sum())
print(f"{len(batch)} inputs, 60 of them inverted; {int(flagged.sum())} flagged, {false} of these for nothing")

# %% [markdown]
# Which of the three? **Alpha** if you decide about one input at a time and want few complaints. **Risk** if wrong answers
# hurt. **FDR** if people look at a list. Alpha and risk go together: `afield.policy(held_out, y, risk=0.05,
# false_alarms=0.05)`. [Decisions](../decisions.md) has the proofs, costs, and sets of classes.

# %% tags=["remove-cell"]
assert (~test.accept(0.05)).float().mean() < 0.12
assert outcome.risk < 0.08
assert outcome.coverage > 0.5
assert int(flagged.sum()) >= 20
assert false / int(flagged.sum()) < 0.45
