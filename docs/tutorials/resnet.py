# %% [markdown]
# # Your ResNet in ten lines
#
# You have a trained image classifier. It answers every picture, also one that is none of its business. Here it learns to
# say "I don't know", without training it again. It takes about a minute.
#
# The pictures are scikit-learn's handwritten digits, 8 by 8 pixels. The network learns 0 to 7. It never sees 8 and 9.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import afield
from afield.backbones.resnet_cifar import ResNetCIFAR

torch.manual_seed(0)
pixels, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = (pixels.float() / 16).view(-1, 1, 8, 8).repeat(1, 3, 1, 1)  # the network wants three colours
known = (digits < 8).nonzero().flatten()
known = known[torch.randperm(len(known))]
x, y, foreign = images[known], digits[known], images[digits >= 8]
train = DataLoader(TensorDataset(x[:800], y[:800]), batch_size=64, shuffle=True)
held_out = DataLoader(TensorDataset(x[800:1200], y[800:1200]), batch_size=256)
x_test, y_test = x[1200:], y[1200:]

# %% [markdown]
# ## The network that you have
#
# A small ResNet and a usual training loop. Nothing here knows of afield.

# %%
net = ResNetCIFAR(depth=8, num_classes=8)
epochs = 6
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=epochs * len(train))
for _ in range(epochs):
    for inputs, target in train:
        optimizer.zero_grad()
        F.cross_entropy(net(inputs), target).backward()
        optimizer.step()
        schedule.step()
net.eval()
with torch.no_grad():
    print(f"right on fresh digits: {(net(x_test).argmax(1) == y_test).float().mean():.1%}")

# %% [markdown]
# ## The ten lines
#
# `attach` keeps the network as it is and adds a variance. `fit_posterior` looks at the training data once, without
# gradients. `calibrate` needs pictures that the network has not seen.

# %%
model = afield.attach(net)
afield.fit_posterior(model, train)
found = afield.calibrate(model, held_out)
print(f"log loss on held-out digits: {found.loss_before:.3f} before, {found.loss:.3f} after")

# %% [markdown]
# The most probable class never changes. What is new is the p-value: the part of the held-out digits that lie as far from
# the training data as this picture. `accept(alpha=0.05)` refuses at most 5% of fresh digits, on average.

# %%
with torch.no_grad():
    threshold = net(held_out.dataset.tensors[0]).softmax(1).amax(1).quantile(0.05)
    print(f"{'refused':24}{'by afield':>12}{'by confidence alone':>22}")
    noise = torch.rand(300, 3, 8, 8)
    for name, batch in (("fresh digits 0 to 7", x_test), ("digits 8 and 9", foreign), ("noise", noise)):
        ours = (~model.predict(batch).accept(alpha=0.05)).float().mean()
        theirs = (net(batch).softmax(1).amax(1) < threshold).float().mean()
        print(f"{name:24}{ours:>12.1%}{theirs:>22.1%}")

# %% [markdown]
# Both refuse about a twentieth of the digits that they know; for afield that rate is a promise. Digits that look like known
# ones are hard for both. The difference shows far away: confidence lets part of the noise pass. Here are some pictures
# with their p-values; a red frame is a refusal.

# %%
shown = torch.cat([x_test[:6], foreign[:6], noise[:6]])
p = model.predict(shown)
figure, axes = plt.subplots(3, 6, figsize=(8, 4.6))
for place, image, label, value, accepted in zip(
    axes.flat, shown, p.labels, p.p_value, p.accept(alpha=0.05), strict=True
):
    place.imshow(image[0].numpy(), cmap="gray_r")
    place.set_title(f"{label}?  p = {value:.3f}", fontsize=9)
    place.set(xticks=[], yticks=[])
    for edge in place.spines.values():
        edge.set(visible=True, color="tab:green" if accepted else "tab:red", linewidth=2)
figure.suptitle("Known digits, digits that it never saw, and noise")

# %% [markdown]
# ## Keep it
#
# A folder with one safetensors file and one JSON file. The architecture stays yours: give it when you load.

# %%
import tempfile

with tempfile.TemporaryDirectory() as folder:
    afield.save(model, folder, metadata={"labels": [str(k) for k in range(8)]})
    again = afield.load(folder, ResNetCIFAR(depth=8, num_classes=8))
print(torch.equal(again.predict(x_test).p_value, model.predict(x_test).p_value))

# %% [markdown]
# **Next.** Training anew? `afield.sngp(net)` before training bounds the hidden layers too: [your network](../network.md).
# Which alpha to take, and what else can be promised: [a threshold you can defend](threshold.md).

# %% tags=["remove-cell"]
assert (model.predict(x_test).labels == y_test).float().mean() > 0.9
assert (~model.predict(x_test).accept(0.05)).float().mean() < 0.12
assert (~model.predict(noise).accept(0.05)).float().mean() > 0.9
assert (~model.predict(foreign).accept(0.05)).float().mean() > 0.4
