"""Active learning on scikit-learn's digits: which pictures to label next?

    python examples/active_learning.py --rounds 6 --seeds 3

A batch is chosen picture by picture: take the one of the largest variance, and tell the posterior by an exact `update`,
so that the next one is not its twin. The variance depends on inputs alone, and needs no labels. Then all labels that
there are train a new network. Random batches are the comparison.
"""

import argparse
import copy
from statistics import mean

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import afield

parser, accuracy = argparse.ArgumentParser(), {}
for option, default in {"--rounds": 6, "--seeds": 3, "--batch": 20}.items():
    parser.add_argument(option, type=int, default=default)
args = parser.parse_args()


def train(x: Tensor, y: Tensor, seed: int) -> afield.SNGP:
    torch.manual_seed(seed)
    model = afield.sngp(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), num_random_features=256)
    optimizer = torch.optim.Adam(afield.parameter_groups(model, lr=2e-3))
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    afield.fit_posterior(model, [(x, y)])
    return model


def by_variance(model: afield.SNGP, pool: Tensor) -> list[int]:
    model, chosen = copy.deepcopy(model), []
    for _ in range(args.batch):
        variance = model.predict(pool).score("variance").index_fill(0, torch.tensor(chosen, dtype=torch.int64), -1.0)
        chosen.append(int(variance.argmax()))
        afield.posterior.update(model, [pool[chosen[-1:]]])  # each in the light of those before it
    return chosen


print("labels  chosen by variance  at random")
x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
x = x.float() / 16
for seed, active in [(seed, active) for seed in range(args.seeds) for active in (True, False)]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    labelled, rest, test = order[: args.batch], order[args.batch : 1200], order[1200:]
    for number in range(args.rounds + 1):
        model = train(x[labelled], y[labelled], seed)
        accuracy[seed, active, number] = float((model.predict(x[test]).labels == y[test]).float().mean())
        rows = by_variance(model, x[rest]) if active else list(range(args.batch))  # the order is random
        labelled, rest = torch.cat([labelled, rest[rows]]), rest[~torch.isin(rest, rest[rows])]
for number in range(args.rounds + 1):
    ours, random = (mean(accuracy[seed, active, number] for seed in range(args.seeds)) for active in (True, False))
    print(f"{args.batch * (number + 1):>6} {ours:>19.3f} {random:>10.3f}")
