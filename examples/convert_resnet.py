"""Convert a ResNet: train it on the digits 0 to 7, and see what it makes of 8 and 9, and of noise.

Needs scikit-learn for its 8 x 8 images of digits. Any ResNet converts the same way, torchvision's and timm's included.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import afield
from afield.backbones.resnet_cifar import ResNetCIFAR

torch.manual_seed(0)
pixels, labels = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
x = (pixels.float() / 16).view(-1, 1, 8, 8).repeat(1, 3, 1, 1)  # the network wants three colours
known = torch.randperm(int((labels < 8).sum()))
x, y, foreign = x[labels < 8][known], labels[labels < 8][known], x[labels >= 8]
train, held_out, test = (TensorDataset(x[a:b], y[a:b]) for a, b in ((0, 700), (700, 1100), (1100, len(x))))


def fit(model: nn.Module, epochs: int = 8) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True)
    steps = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=epochs * 11)
    for _ in range(epochs):
        for images, digits in DataLoader(train, batch_size=64, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(images), digits).backward()
            optimizer.step()
            steps.step()
    return model.eval()


resnet = ResNetCIFAR(depth=8, num_classes=8)
model = afield.sngp(resnet, bound=6.0)  # the paper's bound for convolutions; attach(trained) if you have it trained
fit(resnet)
fit(model)
model.audit()
seen = afield.fit_posterior(model, DataLoader(train, batch_size=256))
found = afield.calibrate(model, DataLoader(held_out, batch_size=256))
print(f"\nposterior of {seen} images; held-out log loss {found.loss_before:.3f}, calibrated {found.loss:.3f}\n")


@torch.no_grad()
def confidence(images: torch.Tensor) -> torch.Tensor:
    return F.softmax(resnet(images), dim=1).amax(1)


threshold = confidence(held_out.tensors[0]).quantile(0.05)
print(f"{'refused at a rate of 5%':24}{'by afield':>12}{'by the ResNet, on its confidence':>36}")
noise = torch.rand(300, 3, 8, 8)
for name, images in (("fresh digits 0 to 7", test.tensors[0]), ("digits 8 and 9", foreign), ("noise", noise)):
    refused = ~model.predict(images).accept(0.05), confidence(images) < threshold
    print(f"{name:24}{refused[0].float().mean():>12.1%}{refused[1].float().mean():>36.1%}")
right = (model.predict(test.tensors[0]).labels == test.tensors[1]).float().mean()
print(f"right on fresh digits: {right:.1%}")
