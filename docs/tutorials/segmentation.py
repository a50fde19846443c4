# %% [markdown]
# # Segmentation
#
# A network names every pixel of an image. It also names the pixels of things that it has never seen. Here it marks them
# instead: a map of where it does not know.
#
# The images are drawn here: red discs and green squares on a noisy ground. The network learns ground, disc and square.
# Later there are white triangles.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

import afield

SIZE = 32
rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")


def draw(count: int, generator: torch.Generator, *, triangle: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 3, 32, 32) and masks (N, 32, 32): 0 ground, 1 disc, 2 square, 3 triangle."""
    images, masks = [], []
    for _ in range(count):
        noise, mask = 0.15 * torch.randn(3, SIZE, SIZE, generator=generator), torch.zeros(SIZE, SIZE, dtype=torch.long)
        image = noise.clone()
        kinds = [1, 2, 3] if triangle else [1, 2]
        for kind in kinds:
            y, x = torch.randint(6, SIZE - 6, (2,), generator=generator)
            r = torch.randint(4, 7, (1,), generator=generator)
            inside = {
                1: (rows - y) ** 2 + (columns - x) ** 2 <= r**2,
                2: ((rows - y).abs() <= r - 1) & ((columns - x).abs() <= r - 1),
                3: (rows - y + r >= 2 * (columns - x).abs()) & (rows - y <= r - 1) & (rows - y >= -r),
            }[kind]
            colour = {1: [1.0, 0.2, 0.2], 2: [0.2, 0.9, 0.2], 3: [1.4, 1.4, 1.4]}[kind]
            image[:, inside] = noise[:, inside] + torch.tensor(colour)[:, None]
            mask[inside] = kind
        images.append(image)
        masks.append(mask)
    return torch.stack(images), torch.stack(masks)


generator = torch.Generator().manual_seed(0)
train, held_out, test = draw(120, generator), draw(60, generator), draw(60, generator)
strange = draw(30, generator, triangle=True)

# %% [markdown]
# ## A small network
#
# Any network that ends in a 1 x 1 convolution over pixels will do.

# %%
torch.manual_seed(0)


def block(inputs: int, outputs: int, dilation: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=dilation, dilation=dilation), nn.ReLU())


net = nn.Sequential(block(3, 16, 1), block(16, 16, 2), block(16, 16, 4), block(16, 16, 1), nn.Conv2d(16, 3, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(12):
    for batch in torch.randperm(120).split(20):
        optimizer.zero_grad()
        F.cross_entropy(net(train[0][batch]), train[1][batch]).backward()
        optimizer.step()
_ = net.eval()

# %% [markdown]
# ## Attach
#
# The same three lines as for any network. Every pixel is a row; p-values count images, because the pixels of one image
# depend on each other.
#
# By default p-values of pixels rest on what the network doubts, averaged over the region around each pixel. What it is
# sure of although it has never seen it wants the distance as well: `score="joined"`. Which of them finds more depends on
# what comes ([on other shapes](../results.md#pixels-drawn-shapes) it is the region), so both are shown here.

# %%
model = afield.attach(net)
afield.fit_posterior(model, [train])
afield.calibrate(model, [held_out], score="joined")
p = model.predict(test[0])
print(tuple(p.probs.shape), tuple(p.p_value.shape))
print(f"right on fresh pixels: {(p.labels == test[1]).float().mean():.1%}")

# %% [markdown]
# ## A map of where it does not know
#
# Red: pixels with a p-value of at most 0.05.

# %%
q = model.predict(strange[0])
figure, places = plt.subplots(3, 5, figsize=(8, 5))
for k in range(5):
    shown = strange[0][k].movedim(0, -1).clamp(0, 1).numpy()
    places[0, k].imshow(shown)
    places[1, k].imshow(q.labels[k].numpy(), vmin=0, vmax=3, cmap="viridis")
    places[2, k].imshow((q.p_value[k] <= 0.05).numpy(), cmap="Reds", vmin=0, vmax=1)
for place, name in zip(places[:, 0], ("image", "answer", "refused"), strict=True):
    place.set_ylabel(name)
for place in places.flat:
    place.set(xticks=[], yticks=[])
figure.suptitle("Triangles, which it has never seen, among discs and squares")

# %%
known, foreign = strange[1] < 3, strange[1] == 3
print(f"refused: {(p.p_value <= 0.05).float().mean():.1%} of fresh pixels")
print(f"refused: {(q.p_value[foreign] <= 0.05).float().mean():.1%} of pixels of triangles")
print(f"their largest probability is {q.confidence[foreign].mean():.2f} on average")

by_region = afield.attach(net)
afield.fit_posterior(by_region, [train])
afield.calibrate(by_region, [held_out])
missed = by_region.predict(strange[0]).p_value[foreign] > 0.05
print(f"by their regions: {1 - missed.float().mean():.1%} of pixels of triangles")

# %% [markdown]
# ## Images as a whole
#
# Is there anything foreign in this image? That is another question, with a p-value of its own, and a promise about
# images: at most a part alpha of good ones is refused.

# %%
for name, batch in (("fresh images", p), ("images with a triangle", q)):
    print(f"{name}: {(~batch.accept_inputs(alpha=0.1)).float().mean():.1%} refused")

# %% [markdown]
# **Next.** What else can be the output of a network: [your network](../network.md). What the promises about pixels say
# and what they do not: [what is promised](../guarantees.md).

# %% tags=["remove-cell"]
assert (p.labels == test[1]).float().mean() > 0.95
assert (p.p_value <= 0.05).float().mean() < 0.1
assert (q.p_value[foreign] <= 0.05).float().mean() > 0.5
assert (~p.accept_inputs(alpha=0.1)).float().mean() < 0.25
