"""Random features of a variance that has its own: over the hidden space as it is after training.

The length scale that a mean is trained with comes from the first batch of an untrained network, and says little about
the distances between trained hidden vectors; its features are for fitting the targets, not for seeing what is foreign.
"""

from collections.abc import Mapping
from typing import Any

import torch

from afield.gp.features import RandomFeatures
from afield.gp.likelihoods import LIKELIHOODS

CHOICES = ("auto", "own", "same")
FOR_VARIANCE: dict[str, Any] = {"geometry": "direction_length", "fraction": 0.5, "grow": True}  # docs/defaults.md

FOR_NUMBERS: dict[str, Any] = {"geometry": "standardized", "fraction": 0.35}  # where a kept mean is not of classes
_A_UNIT, _FEWEST, _MOST, _MOST_PER_CLASS = 4, 512, 2048, 1024  # random features; docs/defaults.md


def enough_features(width: int, *, covariance: str = "shared") -> int:
    """How many random features a variance gets over hidden vectors of this width; memory goes by their square."""
    return min(_MOST if covariance == "shared" else _MOST_PER_CLASS, max(_FEWEST, _A_UNIT * width))


def has_own_features(choice: str | Mapping[str, Any], likelihood: str) -> bool:
    """Resolve "auto": own for classification. Regression has the variance of the process that is its mean."""
    if isinstance(choice, str) and choice not in CHOICES:
        raise ValueError(
            f"variance_features must be one of {', '.join(CHOICES)}, or a mapping of options of RandomFeatures, "
            f"got {choice!r}."
        )
    return LIKELIHOODS[likelihood].of_classes if choice == "auto" else choice != "same"


def own_features(
    of_mean: RandomFeatures, choice: str | Mapping[str, Any], features: Mapping[str, Any], covariance: str
) -> RandomFeatures:
    """As many as are enough, or as the mean was told to have; `choice` may have other options.

    features  the options of the mean's
    """
    count = features.get("num_random_features", enough_features(of_mean.in_features, covariance=covariance))
    options = {"num_random_features": count, **FOR_VARIANCE}
    given = features.get("generator")
    # A copy of the generator: training draws the same numbers whether or not the variance has features of its own.
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state() if given is None else given.get_state())
    return RandomFeatures(
        of_mean.in_features, **options | (dict(choice) if isinstance(choice, Mapping) else {}), generator=generator
    )
