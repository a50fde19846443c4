"""Regression on tables from the UCI repository, with published splits: one number to predict from 4 to 32 columns.

The seed is the number of the split. Nine sets have the splits of Hernandez-Lobato and Adams (2015; 20, protein 5), 90%
to train and 10% to test; ten have those of the set's own collection (10 splits). A tenth of the training rows, drawn by
the seed, is for validation.

Columns and target have mean 0 and standard deviation 1 over the training rows; a column that is constant there stays as
it is. `Split.scale` is the standard deviation of the target, by which a metric goes back to the target's own units:
RMSE and CRPS times the scale, log loss plus its logarithm.

There are no published OOD rows. OOD are points far from every training row, uniform in a box three times as wide as the
data: an easy test, which a model that ignores distance still fails. (Rows with each column shuffled by itself look
harder, but where the columns are independent, as in kin8nm, they are in-domain.)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from afield.backbones.resffn import ResFFN
from afield.settings import Settings
from afield.tasks.data import arrays
from afield.tasks.task import Recipe, Task, far_points, presets

# Task: file, rows. The number of rows sets the number of epochs, before the file is read.
SETS: Mapping[str, tuple[str, int]] = {
    "uci-boston": ("uci_bostonHousing", 506),
    "uci-concrete": ("uci_concrete", 1030),
    "uci-energy": ("uci_energy", 768),
    "uci-kin8nm": ("uci_kin8nm", 8192),
    "uci-naval": ("uci_naval-propulsion-plant", 11934),
    "uci-power": ("uci_power-plant", 9568),
    "uci-protein": ("uci_protein-tertiary-structure", 45730),
    "uci-wine": ("uci_wine-quality-red", 1599),
    "uci-yacht": ("uci_yacht", 308),
    "uci-airfoil": ("uci2_airfoil", 1503),
    "uci-bike": ("uci2_bike", 17379),
    "uci-elevators": ("uci2_elevators", 16599),
    "uci-keggdirected": ("uci2_keggdirected", 48827),
    "uci-kin40k": ("uci2_kin40k", 40000),
    "uci-parkinsons": ("uci2_parkinsons", 5875),
    "uci-pol": ("uci2_pol", 15000),
    "uci-pumadyn32nm": ("uci2_pumadyn32nm", 8192),
    "uci-skillcraft": ("uci2_skillcraft", 3338),
    "uci-sml": ("uci2_sml", 4137),
}
_FAR = 500
_STEPS = 3000  # of training, about


@dataclass(frozen=True)
class Split:
    """Standardised parts, and the target's standard deviation over the training rows."""

    train: TensorDataset
    val: TensorDataset
    test: TensorDataset
    scale: float


def split(data: Mapping[str, np.ndarray], number: int) -> Split:
    """A published split of the arrays X (N, d), y (N,) and test_mask (splits, N / 8), bits that say "test"."""
    x, y, count = data["X"].astype(np.float64), data["y"].astype(np.float64).reshape(-1, 1), len(data["test_mask"])
    if not 0 <= number < count:
        raise ValueError(f"This set has {count} published splits: the seed must lie in 0 to {count - 1}, got {number}.")
    is_test = np.unpackbits(data["test_mask"][number], count=len(y)).astype(bool)
    rows = np.random.default_rng(number).permutation(np.flatnonzero(~is_test))
    val, train = np.split(rows, [round(0.1 * len(rows))])
    (x_shift, x_scale), (y_shift, y_scale) = _moments(x[train]), _moments(y[train])
    x, y = (x - x_shift) / x_scale, (y - y_shift) / y_scale

    def part(rows: np.ndarray) -> TensorDataset:
        return TensorDataset(_float(x[rows]), _float(y[rows]))

    return Split(part(train), part(val), part(np.flatnonzero(is_test)), scale=float(y_scale[0]))


def recipe(name: str) -> Recipe:
    """The task of that name in `SETS`."""
    file, rows = SETS[name]

    def load(seed: int, preset: str) -> Task:
        parts = split(arrays(f"tabular/{file}.npz"), seed)
        x = parts.train.tensors[0]
        far = far_points(x, _FAR, torch.Generator().manual_seed(seed))
        return Task(
            name,
            parts.train,
            parts.val,
            parts.test,
            ood={"far": TensorDataset(far)},
            num_outputs=1,
            backbone=partial(ResFFN, x.shape[1], depth=2, width=128),
            scale=parts.scale,
        )

    return Recipe(load, presets(settings_for(rows)))


def settings_for(rows: int) -> Settings:
    """Small sets take many passes with small batches, large ones few with large batches.

    Output weights of the Gaussian process start at zero and multiply features of size sqrt(2 / D): at the rate of the
    hidden layers they would take ten times as long.
    """
    batch_size = 32 if rows < 2000 else 128
    epochs = max(20, min(200, round(_STEPS * batch_size / rows)))
    return Settings(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=3e-3,  # both rates by sweep: results/choices/uci-*.json
        head_learning_rate=2e-2,
        likelihood="gaussian",
        members=5,
    )


def _moments(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean, std = a.mean(0), a.std(0)
    return mean, np.where(std > 1e-9 * (1 + np.abs(mean)), std, 1.0)


def _float(a: np.ndarray) -> Tensor:
    return torch.from_numpy(a.astype(np.float32))


RECIPES = {name: recipe(name) for name in SETS}
