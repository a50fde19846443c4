"""Two moons: a dense network is sure everywhere, the same network with afield only where it has seen data."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import afield

torch.manual_seed(0)


def moons(count):
    y, angle = torch.arange(count) % 2, math.pi * torch.rand(count)
    x = torch.stack([angle.cos(), angle.sin()], dim=1)
    x = torch.where(y[:, None] == 0, x, torch.tensor([1.0, 0.5]) - x)
    return TensorDataset(x + 0.1 * torch.randn(count, 2), y)


class Net(nn.Module):  # any network will do; residual blocks keep distances best
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.last = nn.Linear(64, 2)

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = h + F.relu(block(h))
        return self.last(h)


train, held_out, test = moons(1000), moons(600), moons(1000)
dense = Net()
model = afield.sngp(dense)  # a copy: hidden layers bounded, the last Linear replaced
for net in (dense, model):  # your own loop: nothing changes
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(30):
        for x, y in DataLoader(train, batch_size=128, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
afield.fit_posterior(model, DataLoader(train, batch_size=512))
afield.calibrate(model, DataLoader(held_out, batch_size=512))
rows, columns = torch.linspace(3, -2.5, 20), torch.linspace(-3.5, 4.5, 44)
grid = torch.cartesian_prod(rows, columns).flip(1)
with torch.no_grad():
    sure = F.softmax(dense(grid), dim=1)
answer = model.predict(grid)
left = ["01"[k] if p > 0.9 else "." for p, k in zip(*sure.max(1), strict=True)]
right = ["01"[k] if ok else " " for k, ok in zip(answer.labels, answer.accept(0.01), strict=True)]
print(f"{'dense network: class if p > 0.9':44}  | afield: class if accepted at alpha = 0.01")
for i in range(0, len(grid), 44):
    print("".join(left[i : i + 44]), " |", "".join(right[i : i + 44]))
p, y, accepted = model.predict(test.tensors[0]), test.tensors[1], answer.accept(0.01)
print(f"fresh points: {(p.labels == y).float().mean():.1%} right, {p.accept(0.01).float().mean():.1%} accepted")
print(f"the picture:  {(sure.amax(1) > 0.9).float().mean():.1%} with p > 0.9, {accepted.float().mean():.1%} accepted")
