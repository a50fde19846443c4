"""The score of a position from its region: the formula, written once more by loops; padding; inputs as a whole."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from afield.prediction.positions import input_score, to_rows
from afield.prediction.prediction import Prediction
from afield.prediction.regions import EDGE, PRIOR, WINDOW, input_mean, is_inside, region_mean
from afield.prediction.scores import SCORES

few = settings(deadline=None, max_examples=15)
SHAPES = [(9,), (1,), (5, 8), (3, 1), (3, 4, 2)]
shapes = pytest.mark.parametrize("positions", SHAPES, ids=str)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def example(positions: tuple[int, ...], seed: int = 0, inputs: int = 2, classes: int = 3) -> Prediction:
    """Logits that are alike where positions are near, so that there are regions."""
    logits = 2 * torch.randn(inputs, classes, *positions, generator=generator(seed), dtype=torch.float64)
    for d in range(2, logits.dim()):
        logits = logits + logits.roll(1, d)
    variance = torch.rand(inputs, *positions, generator=generator(seed + 1), dtype=torch.float64)
    z = logits / torch.sqrt(1 + math.pi / 8 * variance)[:, None]
    return Prediction(logits, variance, z.softmax(1))


def near(x: tuple[int, ...], positions: tuple[int, ...], reach: int) -> Any:
    return itertools.product(
        *(range(max(0, i - reach), min(n, i + reach + 1)) for i, n in zip(x, positions, strict=True))
    )


def by_loops(p: Prediction, mask: Tensor) -> Tensor:
    """The docstring of `prediction.regions`, position by position."""
    z = p.adjusted_logits() - p.adjusted_logits().mean(1, keepdim=True)
    u, everywhere, found = -z.exp().sum(1).log(), p.positions, torch.zeros(len(p), *p.positions, dtype=torch.float64)
    assert p.probs is not None
    for n, x in itertools.product(range(len(p)), itertools.product(*map(range, everywhere))):
        for k in range(p.probs.shape[1]):
            total, count = 0.0, 0.0
            for y in near(x, everywhere, WINDOW // 2):
                if not mask[(n, *y)]:
                    continue
                around = [o for o in near(y, everywhere, 1) if mask[(n, *o)]]
                inside = all(p.labels[(n, *o)] == p.labels[(n, *y)] for o in around)
                share = (1.0 if inside else EDGE) * float(p.probs[(n, k, *y)])
                total, count = total + share * float(u[(n, *y)]), count + share
            found[(n, *x)] += float(p.probs[(n, k, *x)]) * total / max(count, 1e-300)
    return found


@shapes
def test_the_score_is_its_formula(positions: tuple[int, ...]) -> None:
    p = example(positions)
    expected = by_loops(p, torch.ones(2, *positions, dtype=torch.bool))
    torch.testing.assert_close(SCORES["region"](p), expected, rtol=1e-9, atol=1e-9)


def test_padding_is_as_if_it_were_not_there() -> None:
    """The rest of a picture may be anything, numbers or not."""
    small, wide = example((5, 4)), example((8, 7), seed=5)
    logits, variance = wide.logits.clone(), wide.variance.clone()
    logits[:, :, :5, :4], variance[:, :5, :4] = small.logits, small.variance
    logits[:, :, 6:] = torch.nan
    mask = torch.zeros(2, 8, 7, dtype=torch.bool)
    mask[:, :5, :4] = True
    probs = (logits / torch.sqrt(1 + math.pi / 8 * variance)[:, None]).softmax(1)
    probs = probs.masked_fill(~mask[:, None], 0.5)
    padded = Prediction(logits, variance, probs, mask=mask)
    score = SCORES["region"]
    torch.testing.assert_close(score(padded)[:, :5, :4], score(small), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(score.of_input(score(padded), padded), score.of_input(score(small), small))


@given(st.integers(0, 10**6), st.sampled_from(SHAPES))
@few
def test_inside_is_where_all_neighbours_have_one_class(seed: int, positions: tuple[int, ...]) -> None:
    classes = torch.randint(2, (2, *positions), generator=generator(seed))
    found = is_inside(classes)
    for n, x in itertools.product(range(2), itertools.product(*map(range, positions))):
        assert bool(found[(n, *x)]) == (len({int(classes[(n, *y)]) for y in near(x, positions, 1)}) == 1)


def test_an_edge_between_sure_regions_is_hardly_heard_and_an_object_that_is_in_doubt_is() -> None:
    """Doubt of the same size at every position: of a line between two classes, and of a square within one."""
    values, classes = torch.zeros(1, 24, 24), torch.zeros(1, 24, 24, dtype=torch.int64)
    classes[:, :, 12:] = 1
    values[:, :, 11:13] = 1.0
    values[:, 4:9, 2:7] = 1.0
    probs = torch.nn.functional.one_hot(classes, 2).movedim(-1, 1).float()
    found = region_mean(values, probs, classes)
    assert float(found[0, 6, 4]) > 10 * float(found[0, 18, 12])


def test_the_score_of_an_input_leaves_out_its_commonest_class_and_edges() -> None:
    classes = torch.zeros(2, 10, 12, dtype=torch.int64)
    classes[0, 2:7, 3:8] = 2
    scores = torch.rand(2, 10, 12, generator=generator(0), dtype=torch.float64)
    heard = torch.zeros(10, 12, dtype=torch.bool)
    heard[3:6, 4:7] = True  # the inside of the object
    expected = (scores[0][heard].sum() + PRIOR * scores[0].mean()) / (9 + PRIOR)
    found = input_mean(scores, classes, 3)
    torch.testing.assert_close(found[0], expected)
    torch.testing.assert_close(found[1], scores[1].mean())  # one class alone


def test_other_scores_of_inputs_are_of_the_highest_positions() -> None:
    p = example((6, 7))
    scores = p.score("entropy")
    assert torch.equal(SCORES["entropy"].of_input(scores, p), input_score(scores))


def test_gradients_follow() -> None:
    p = example((5, 6))
    logits = p.logits.requires_grad_()
    SCORES["region"](Prediction(logits, p.variance, logits.softmax(1))).sum().backward()
    assert logits.grad is not None
    assert bool(logits.grad.any(1).all())


def test_what_has_no_regions_is_refused() -> None:
    p = example((4, 4))
    for other, words in (
        (to_rows(p), r"region needs positions that have one class each.*positions \(\)\. Rows"),
        (Prediction(p.logits, probs=p.probs, likelihood="bernoulli"), "several labels"),
    ):
        assert not SCORES["region"].applies(other)
        with pytest.raises(ValueError, match=words):
            SCORES["region"](other)
