"""Predictions with positions: the same as of rows, put back in place; promises that count inputs."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import afield
from afield.decide.conformal import prediction_intervals, prediction_sets
from afield.deploy.score_files import answers
from afield.prediction.p_values import conformal_p_value
from afield.prediction.positions import LARGEST_PART, from_rows, input_score, to_rows
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import mean_field
from afield.prediction.scores import SCORES

few = settings(deadline=None, max_examples=20)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def dense(inputs: int = 3, positions: tuple[int, ...] = (2, 4), classes: int = 5) -> Prediction:
    count = inputs * math.prod(positions)
    logits, variance = normal(count, classes), normal(count, seed=1).square()
    members = torch.softmax(normal(2, count, classes, seed=2), -1)
    known = {"p_value": torch.rand(count), "joined": variance + 1}
    rows = Prediction(logits, variance, mean_field(logits, variance), members, normal(count, 6, seed=3), **known)
    rows = dataclasses.replace(rows, smallest_p_value=0.1, default_score="joined")
    return from_rows(rows, inputs, positions, mask=None, input_score=torch.rand(inputs), num_inputs=9,
                     input_p_value=torch.tensor([0.05, 0.5, 1.0]))  # fmt: skip


@given(st.integers(1, 4), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 4))
@few
def test_rows_and_positions_are_each_others_inverse(inputs: int, positions: list[int], classes: int) -> None:
    shape = (inputs, *positions)
    logits = normal(math.prod(shape), classes)
    rows = Prediction(logits, logits.square()[:, 0], features=normal(len(logits), 2))
    p = from_rows(rows, inputs, tuple(positions))
    assert p.positions == tuple(positions)
    assert p.logits.shape == (inputs, classes, *positions)
    again = to_rows(p)
    assert torch.equal(again.logits, logits)
    assert torch.equal(again.features, rows.features)
    corner = tuple(n - 1 for n in shape)
    assert torch.equal(p.logits[(corner[0], slice(None), *corner[1:])], logits[-1])


@pytest.mark.parametrize("name", [n for n in SCORES if n != "min_distance" and not SCORES[n].whole])
def test_every_score_is_that_of_the_rows(name: str) -> None:
    p = dense()
    assert torch.equal(SCORES[name](p).flatten(), SCORES[name](p.rows()))
    assert SCORES[name](p).shape == (3, 2, 4)


def test_what_is_read_off_a_prediction_is_that_of_its_rows() -> None:
    p = dense()
    assert torch.equal(p.labels.flatten(), p.rows().labels)
    assert torch.equal(p.confidence.flatten(), p.rows().confidence)
    assert torch.equal(p.adjusted_logits().movedim(1, -1).reshape(-1, 5), p.rows().adjusted_logits())
    assert torch.equal(p.accept(0.2).flatten(), p.rows().accept(0.2))
    assert torch.equal(Prediction.cat([p[0], p[1:]]).probs, p.probs)
    assert p.rows().input_score is None
    assert set(p.numpy()) >= {"input_score", "input_p_value"}


def test_predictions_of_other_positions_are_not_joined() -> None:
    with pytest.raises(ValueError, match=r"different positions, got \[\(2, 4\), \(3, 4\)\].*p\.rows\(\)"):
        Prediction.cat([dense(), dense(positions=(3, 4))])


def test_inputs_are_accepted_as_a_whole() -> None:
    p = dense()
    assert p.accept_inputs(0.1).tolist() == [False, True, True]
    assert p.accept_inputs(0.3, delta=0.3).tolist() == [False, True, True]
    with pytest.raises(ValueError, match=r"alpha = 0.01 is finer .* at least 99 reference examples"):
        p.accept_inputs(0.01)
    with pytest.raises(ValueError, match=r"delta needs p-values of one reference.*accept_inputs"):
        p.accept(0.2, delta=0.1)
    rows = Prediction(normal(4, 2), p_value=torch.tensor([0.1, 0.2, 0.3, 0.4]))
    assert torch.equal(rows.accept_inputs(0.25), rows.accept(0.25))  # one answer an input
    with pytest.raises(ValueError, match=r"accept_inputs needs input_p_value.*afield\.calibrate"):
        from_rows(Prediction(normal(8, 2)), 2, (4,)).accept_inputs()


def test_the_score_of_an_input_is_the_mean_of_its_largest_part() -> None:
    scores = normal(4, 10, 30)
    expected = scores.flatten(1).sort(1, descending=True).values[:, : math.ceil(LARGEST_PART * 300)].mean(1)
    torch.testing.assert_close(input_score(scores), expected)
    torch.testing.assert_close(input_score(scores, part=1e-9), scores.flatten(1).amax(1))
    torch.testing.assert_close(input_score(scores, part=1.0), scores.flatten(1).mean(1))
    torch.testing.assert_close(input_score(scores, torch.ones(4, 10, 30, dtype=torch.bool)), expected)


@given(st.integers(1, 20), st.integers(0, 15), st.floats(0.01, 1.0))
@few
def test_padding_does_not_change_the_score_of_an_input(count: int, padding: int, part: float) -> None:
    scores = normal(2, count)
    mask = torch.ones(2, count, dtype=torch.bool)
    longer = torch.cat([scores, 100 * normal(2, padding, seed=1)], 1)
    padded = torch.cat([mask, torch.zeros(2, padding, dtype=torch.bool)], 1)
    torch.testing.assert_close(input_score(longer, padded, part), input_score(scores, mask, part))


def test_p_values_of_positions_count_inputs() -> None:
    """p = (1 + 1/m #{reference >= score}) / (n + 1), m positions of each of n inputs."""
    reference = normal(40).sort().values  # 10 inputs, 4 positions each
    p, smallest = conformal_p_value(torch.tensor([-100.0, 100.0]).double(), reference, 4)
    assert p.tolist() == [1.0, pytest.approx(1 / 11)]
    assert smallest == pytest.approx(1 / 11)
    assert torch.equal(*(conformal_p_value(normal(7, seed=1), reference, *d)[0] for d in ((), (1,))))


def test_p_values_of_positions_are_valid_however_they_depend_on_each_other() -> None:
    """Positions of one input are all but equal: as if rows were inputs, p-values would be far too small."""
    generator, alpha, refused, naive = torch.Generator().manual_seed(0), 0.15, 0.0, 0.0
    repeats, n, m = 2000, 9, 20
    own = torch.randn(repeats, n + 1, 1, generator=generator)
    scores = own + 0.01 * torch.randn(repeats, n + 1, m, generator=generator)
    for held_out, fresh in zip(scores[:, :n], scores[:, n], strict=True):
        reference = held_out.flatten().sort().values
        refused += float((conformal_p_value(fresh[:1], reference, m)[0] <= alpha).double()) / repeats
        naive += float((conformal_p_value(fresh[:1], reference)[0] <= alpha).double()) / repeats
    error = math.sqrt(alpha * (1 - alpha) / repeats)
    assert refused <= alpha + 3 * error
    assert naive > alpha + 3 * error


def _score(p: Prediction) -> Any:
    return afield.policy(p, coverage=0.5)


@pytest.mark.parametrize(
    "use",
    [
        _score,
        lambda p: afield.policy(false_alarms=0.1, error_cost=1.0, referral_cost=0.5).answer(p),
        lambda p: prediction_sets(p, torch.zeros(3, 2, 4)),
        lambda p: prediction_intervals(Prediction(p.logits, p.variance, noise=1.0, likelihood="gaussian"), p.logits),
    ],
)
def test_what_takes_one_answer_an_input_refuses_positions(use: Callable[[Prediction], Any]) -> None:
    with pytest.raises(ValueError, match=r"takes predictions of one answer an input.*\(2, 4\).*accept_inputs"):
        use(dense())


def test_files_get_the_answers_of_inputs_as_a_whole() -> None:
    found = answers(dense(), 0.1)
    assert list(found) == ["score", "p_value", "accepted"]
    assert found["accepted"].tolist() == [False, True, True]
    with pytest.raises(ValueError, match=r"answers at positions \(4,\).*afield\.calibrate"):
        answers(from_rows(Prediction(normal(8, 2)), 2, (4,)))
