"""Do targets and likelihood go together? And where nobody has named the likelihood, which one do the targets show?"""

import contextlib
import itertools
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from afield.errors import OtherTargets
from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS, UNDECIDED, shown_by
from afield.gp.precision import choose_curvature
from afield.gp.variance_features import FOR_NUMBERS
from afield.model.batches import Field, Inputs, split_batch
from afield.model.ranks import several_ranks
from afield.model.sngp_model import SNGP

_MOST_CLASSES = 1000


@contextlib.contextmanager
def likelihood_from_targets(
    model: SNGP, loader: Iterable[Any], *, target: Field | None = None, inputs: Inputs = None
) -> Iterator[Iterable[Any]]:
    """The loader to read, while an undecided likelihood is what the targets of its first batch show.

    It stays if the body succeeds; its settings tell, so that `afield.load` builds the same.
    """
    head = model.head
    if head.likelihood != UNDECIDED:
        yield loader
        return
    if several_ranks():  # a rank sees its own targets alone
        LIKELIHOODS.check(UNDECIDED)
    iterator = iter(loader)
    first = list(itertools.islice(iterator, 1))
    if iterator is loader:  # it can be read once
        loader = itertools.chain(first, iterator)
    name = None
    if first:
        found = split_batch(first[0], net=model.net, target=target, inputs=inputs)[2]
        name = shown_by(found) if isinstance(found, Tensor) else None
        if name is None:
            LIKELIHOODS.check(UNDECIDED)
    options = model.settings["head"]
    if name is not None:
        head.curvature = choose_curvature(options.get("curvature", "auto"), name, head.covariance)
        head.likelihood = name
        head.set_score(LIKELIHOODS[name].score)
    of_classes = head.class_distance, head.joined_score
    if name is not None and not LIKELIHOODS[name].of_classes:
        head.class_distance = head.joined_score = None
    try:
        yield loader
    except BaseException:
        head.likelihood, (head.class_distance, head.joined_score) = UNDECIDED, of_classes
        raise
    model.settings = model.settings | {"head": {**FOR_NUMBERS, **options, "likelihood": head.likelihood}}


def is_inferred(model: SNGP) -> bool:
    """Whether the likelihood is what the first targets have shown, and nobody's word."""
    return model.head.out_features == 1 and "likelihood" not in model.settings["head"]


def check_inferred(model: SNGP, target: Tensor) -> None:
    """An error where the likelihood was taken from the first targets, and later ones are of another kind."""
    name = model.head.likelihood
    if is_inferred(model) and LIKELIHOODS[name].of_classes and shown_by(target) != name:
        raise ValueError(
            "The targets of the first batch are zeros and ones, as for two classes, and those of a later batch are "
            'not. Give afield.attach the likelihood: likelihood="gaussian" for numbers.'
        )


def warn_of_kind(reason: str | None) -> None:
    """Warn whoever called the function that calls this one, if there is a reason."""
    if reason is not None:
        warnings.warn(reason, OtherTargets, stacklevel=3)


def other_kind(head: GaussianProcessHead, target: Tensor) -> str | None:
    """What is odd about targets for the likelihood of a head; None if nothing is."""
    likelihood, name = LIKELIHOODS[head.likelihood], head.likelihood
    if not target.numel():
        return None
    whole = not target.is_floating_point() or bool((target == target.round()).all())
    if likelihood.of_classes:
        classes = likelihood.num_classes(head.out_features)
        if not classes:  # labels, whose form is checked
            return None
        if not whole and not _shares(target, classes):
            return (
                f"The targets are real numbers, and the model has {classes} classes ({name}). Targets of classes are "
                'their indices; for real targets convert the network with likelihood="gaussian".'
            )
        if whole and target.numel() == target.shape[0] and float(target.max()) >= classes:
            return (
                f"The targets run to {int(target.max())}, and the model has {classes} classes (0 to {classes - 1}). Is "
                "this the right output layer (output=...), or are labels numbered from 1?"
            )
        return None
    if not likelihood.noisy:
        return None if whole else f"The targets are real numbers, and a {name} model expects counts."
    if head.out_features == 1 and not target.is_floating_point() and _like_classes(target):
        return (
            f"The targets are whole numbers from 0 to {int(target.max())}, like classes, and the model is for real "
            f"numbers ({name}). Give them as floating-point numbers if that is what they are; for classes convert the "
            'network with likelihood="categorical", or "bernoulli" for one logit.'
        )
    return None


def _shares(target: Tensor, classes: int) -> bool:
    """Whether targets are probabilities of the classes: smoothed or mixed labels."""
    if bool(((target < 0) | (target > 1)).any()):
        return False
    if target.dim() == 2 and target.shape[1] == classes:
        return bool(((target.sum(1) - 1).abs() < 1e-2).all())
    return classes == 2 and target.numel() == target.shape[0]


def _like_classes(target: Tensor) -> bool:
    """Every whole number from 0 to the largest, each several times."""
    values = target.unique()
    most = int(values.max())
    return (
        int(values.min()) == 0
        and 1 <= most < _MOST_CLASSES
        and len(values) == most + 1
        and target.numel() >= 5 * len(values)
    )
