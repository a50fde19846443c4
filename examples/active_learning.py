"""Active learning on scikit-learn's digits: which pictures to label next?

    python examples/active_learning.py
    python examples/active_learning.py --rounds 2 --seeds 1      in a minute less

A batch is chosen picture by picture: take the one of the largest variance, and tell the posterior by an exact `update`,
so that the next one is not its twin. Labels are not needed for that: the variance depends on the inputs alone. Then all
labels that there are train a new network. Random batches are the comparison.
"""

import argparse
import copy
from statistics import mean

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import afield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()

    accuracies = {
        choice: [run(choice, seed, args.rounds, args.batch) for seed in range(args.seeds)] for choice in CHOICES
    }
    print(
        f"accuracy on 597 pictures, mean of {args.seeds} seeds\n\nlabels " + "".join(f"{name:>10}" for name in CHOICES)
    )
    for i in range(args.rounds + 1):
        row = "".join(f"{mean(seed[i] for seed in accuracies[choice]):>10.3f}" for choice in CHOICES)
        print(f"{args.batch * (i + 1):>6} {row}")


def run(choice: str, seed: int, rounds: int, batch: int) -> list[float]:
    """Accuracy after each round."""
    digits, generator = load_digits(), torch.Generator().manual_seed(seed)
    order = torch.randperm(len(digits.data), generator=generator)
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32)[order], torch.tensor(digits.target)[order]
    (x, x_test), (y, y_test) = x.split([1200, 597]), y.split([1200, 597])
    labelled, found = torch.arange(batch), []
    for number in range(rounds + 1):
        model = train(x[labelled], y[labelled], seed)
        found.append(float((model(x_test).argmax(-1) == y_test).float().mean()))
        if number < rounds:
            pool = torch.tensor(sorted(set(range(len(x))) - set(labelled.tolist())))
            labelled = torch.cat([labelled, pool[CHOICES[choice](model, x[pool], batch, generator)]])
    return found


def train(x: Tensor, y: Tensor, seed: int) -> afield.SNGP:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = afield.sngp(net, num_random_features=256)
    optimizer = torch.optim.Adam(afield.parameter_groups(model, lr=2e-3))
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    afield.fit_posterior(model, [(x, y)])
    return model.eval()


def by_variance(model: afield.SNGP, pool: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """One after the other, each in the light of those before it."""
    model, chosen = copy.deepcopy(model), []
    for _ in range(count):
        variance = model.predict(pool).score("variance")
        variance[chosen] = -1.0  # once is enough
        chosen.append(int(variance.argmax()))
        afield.posterior.update(model, [pool[chosen[-1:]]])
    return torch.tensor(chosen)


def at_random(model: afield.SNGP, pool: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(len(pool), generator=generator)[:count]


CHOICES = {"random": at_random, "variance": by_variance}

if __name__ == "__main__":
    main()
