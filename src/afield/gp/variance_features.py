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


def has_own_features(choice: str | Mapping[str, Any], likelihood: str) -> bool:
    """Resolve "auto": own for classification. Regression has the variance of the process that is its mean."""
    if isinstance(choice, str) and choice not in CHOICES:
        raise ValueError(
            f"variance_features must be one of {', '.join(CHOICES)}, or a mapping of options of RandomFeatures, "
            f"got {choice!r}."
        )
    return LIKELIHOODS[likelihood].of_classes if choice == "auto" else choice != "same"


def own_features(
    of_mean: RandomFeatures, choice: str | Mapping[str, Any], features: Mapping[str, Any]
) -> RandomFeatures:
    """As many as the mean's, unless `choice` has other options; `features` are the options of the mean's."""
    options = {"num_random_features": of_mean.num_random_features, **FOR_VARIANCE}
    given = features.get("generator")
    # A copy of the generator: training draws the same numbers whether or not the variance has features of its own.
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state() if given is None else given.get_state())
    return RandomFeatures(
        of_mean.in_features, **options | (dict(choice) if isinstance(choice, Mapping) else {}), generator=generator
    )
