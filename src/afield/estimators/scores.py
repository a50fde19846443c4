"""The score by which an estimator knows rows that are unlike its training rows, chosen by name."""

import torch

from afield.estimators.rows import Rows
from afield.gp.likelihoods import LIKELIHOODS
from afield.model.calibration import JOINED, sources_of
from afield.model.evaluating import evaluating
from afield.model.sngp_model import SNGP
from afield.prediction.distance_scores import FITTED
from afield.prediction.scores import SCORES

_OF_OTHERS = {"mutual_information", "min_distance"}  # of members, and of distances to prototypes
_MOST_ROWS = 10_000  # for the joined score
_NEEDS = {name: make(1, 1).needs for name, make in FITTED.items()}
_OF_ROWS = {name for name, score in SCORES.items() if not score.whole} - _OF_OTHERS
OF_CLASSES = _OF_ROWS | {name for name, needs in _NEEDS.items() if "output" not in needs}
OF_NUMBERS = {"variance"} | {name for name, needs in _NEEDS.items() if not needs}


def fit_score(model: SNGP, rows: Rows, name: str | None) -> None:
    """Fit the score to the training rows: all held-out ones are then left for the reference. None: the default."""
    if model.head.joined_score is not None:
        _fit_joined(model, rows)
    if name is not None:
        model.head.set_score(name)
    if name is not None and name in FITTED:
        _fit_chosen(model, rows, name)


def _fit_joined(model: SNGP, rows: Rows) -> None:
    """Of the variance it takes v_i / (1 - w_i v_i), that of the row without itself."""
    head = model.head
    with evaluating(model):
        some = rows[:: max(1, len(rows) // _MOST_ROWS)]
        sources = sources_of(head, torch.cat([model.hidden(part.x) for part in some.parts()]))
        sources[:, 0] /= (1 - some.weight.to(sources) * sources[:, 0]).clamp_min(1e-6)
        assert head.joined_score is not None
        head.joined_score.fit(sources)
        head.set_score(JOINED)


def _fit_chosen(model: SNGP, rows: Rows, name: str) -> None:
    head = model.head
    classes = LIKELIHOODS[head.likelihood].num_classes(head.out_features)
    score = FITTED[name](head.in_features, classes or 1)
    with evaluating(model):
        for part in rows.parts():
            h = model.hidden(part.x)
            score.update(h, part.y if classes else None, head(h))
    head.chosen_score.take(score.constants)
