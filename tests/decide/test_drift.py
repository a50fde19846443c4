"""Drift: p-values are exactly uniform and independent, the alarm keeps its promise, a killed watch goes on."""

import itertools
import math
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

import afield
from afield.decide import betting
from afield.decide.betting import Bets
from afield.decide.drift import Watch, own_references, unique_rows, watch_model
from afield.decide.drift_file import STATE, WatchFile, load_watch, save_watch
from afield.decide.ranks import Ranks
from afield.decide.risk_evidence import ExpectedAccuracy, RiskEvidence, calibration_gap
from afield.errors import Busy
from afield.prediction.p_values import sort_reference


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


# Ranks -----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(-3, 3) | st.just(math.nan), max_size=40), st.lists(st.integers(-4, 4), max_size=40))
def test_p_value_is_the_rank_among_all_before(reference: list[float], stream: list[float]):
    ranks, before = Ranks(reference), [math.inf if x != x else x for x in reference]
    for score in stream:
        above, equal = sum(x > score for x in before), sum(x == score for x in before)
        assert ranks.p_value(score, 0.3) == pytest.approx((above + 0.3 * (equal + 1)) / (len(before) + 1), abs=1e-15)
        before.append(score)
    assert ranks.scores().tolist() == sorted(before)


def test_blocks_split_and_still_count():
    ranks, scores = Ranks(normal(1500)), normal(4000, seed=1)
    for score in scores:
        p = ranks.p_value(score, 1.0)
    everything = np.concatenate([normal(1500), scores])
    assert p == pytest.approx((everything >= scores[-1]).sum() / 5500)
    assert np.array_equal(ranks.scores(), np.sort(everything))


def test_p_values_are_uniform_and_independent_over_all_orders():
    """The theorem behind the alarm, counted: every combination of ranks comes up equally often."""
    seen: Counter[tuple[int, ...]] = Counter()
    for order in itertools.permutations(range(5)):
        ranks = Ranks(order[:2])
        seen[tuple(math.ceil(ranks.p_value(x, 0.5) * m) for m, x in enumerate(order[2:], 3))] += 1
    assert len(seen) == 3 * 4 * 5
    assert set(seen.values()) == {2}


def test_forgetting_a_random_half_leaves_them_uniform_and_independent(monkeypatch: pytest.MonkeyPatch):
    """Over all orders of five scores and all halves of four that can be kept."""
    seen: Counter[tuple[int, int]] = Counter()
    for order, chosen in itertools.product(itertools.permutations(range(5)), itertools.permutations(range(4))):
        drawn: Any = type("Drawn", (), {"permutation": lambda self, n, chosen=chosen: np.array(chosen)})()
        monkeypatch.setattr(np.random, "default_rng", lambda seed, drawn=drawn: drawn)
        ranks = Ranks(order[:3], most=3)
        fourth = math.ceil(ranks.p_value(order[3], 0.5) * 4)
        assert (len(ranks), ranks.halvings) == (2, 1)
        seen[fourth, math.ceil(ranks.p_value(order[4], 0.5) * 3)] += 1
    assert len(seen) == 4 * 3
    assert len(set(seen.values())) == 1


def test_memory_is_bounded():
    ranks = Ranks(normal(100), most=256)
    for score in normal(2000, seed=1):
        ranks.p_value(score, 0.5)
        assert len(ranks) <= 256
    assert ranks.halvings > 3


# Bets ------------------------------------------------------------------------------------------------------------


def test_every_bet_is_fair_whatever_was_before():
    """E[M_t | past] = M_(t-1): the integral over p of the next capital is the capital."""
    bets = Bets()
    for p in (0.01, 0.4, 0.9, 0.02, 0.003, 0.5, 0.6, 0.1, 0.2):  # capital is spread in between
        bets.bet(np.array([p]))

        def next_capital(x: float, before: dict[str, Any] = bets.state()) -> float:  # noqa: B008
            trial = Bets.restore(before)
            return math.exp(trial.bet(np.array([x]))[0] - bets.log_evidence)

        inside = integrate.quad(next_capital, 1e-9, 1 - 1e-9, points=[1e-6, 1e-3, 1 - 1e-3], limit=200)[0]
        ends = 1e-9 ** min(betting.OUTWARDS) + 1e-9 ** min(betting.INWARDS)  # at most what is left out
        assert 1 - ends < inside < 1 + 1e-6


def test_the_capital_does_not_overflow():
    bets = Bets()
    bets.bet(np.full(2000, 1e-6))
    assert 10_000 < bets.log_evidence < math.inf
    assert bets.began == 0


@pytest.mark.parametrize("size", [1, 3, 8, 50])
def test_the_size_of_updates_changes_nothing(size: int):
    """A watch is a function of its stream, to the bit: so the journal can be replayed row by row."""
    scores, classes = normal(200, seed=1) + 2 * (np.arange(200) > 120), np.arange(200) % 2
    whole, parts = (Watch(normal(60), num_classes=2, seed=4) for _ in range(2))
    whole.update(scores, classes)
    for first in range(0, 200, size):
        parts.update(scores[first : first + size], classes[first : first + size])
    assert whole.alarm is not None
    assert same(whole, parts)


# The promise -----------------------------------------------------------------------------------------------------


def count_alarms(streams: int, rows: int, *, reference: int, alpha: float, num_classes: int | None = None) -> int:
    rung = 0
    for seed in range(streams):
        rng = np.random.default_rng([7, seed])
        watch = Watch(rng.normal(size=reference), alpha=alpha, num_classes=num_classes)
        classes = rng.integers(0, num_classes, rows) if num_classes else None
        watch.update(rng.normal(size=rows), classes)
        rung += watch.alarm is not None
    return rung


def test_without_drift_the_alarm_rings_as_rarely_as_promised():
    rung = count_alarms(200, 60, reference=5, alpha=0.2)
    assert stats.binom.sf(rung - 1, 200, 0.2) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("reference", "num_classes"), [(20, None), (200, 3)])
def test_without_drift_ten_thousand_streams_ring_as_rarely_as_promised(reference: int, num_classes: int | None):
    rung = count_alarms(10_000, 300, reference=reference, alpha=0.1, num_classes=num_classes)
    assert stats.binom.sf(rung - 1, 10_000, 0.1) > 1e-6
    assert rung > 0  # it could ring


def test_a_shift_rings_soon_and_says_when_it_began():
    watch = Watch(normal(300), alpha=0.01, seed=0)
    watch.update(normal(400, seed=1))
    assert watch.alarm is None
    watch.update(2 + normal(100, seed=2), inputs=[f"input {i}" for i in range(100)])
    assert watch.alarm is not None
    assert 400 < watch.alarm.row < 440
    assert abs(watch.alarm.began - 400) < 20
    assert watch.evidence > watch.line == pytest.approx(2)
    assert sum(entry.input is not None for entry in watch.smallest) > 15  # of 20: those of the shifted rows
    assert watch.curve[-1] == (500, watch.evidence)


def test_inputs_that_crowd_further_in_ring_too():
    watch = Watch(normal(500), seed=0)
    watch.update(normal(800, seed=1) - 1.5)
    assert watch.alarm is not None


def test_a_class_that_drifts_alone_is_named():
    rng = np.random.default_rng(0)
    reference = {k: rng.normal(size=200) + 3 * k for k in range(4)}
    watch = Watch(np.concatenate(list(reference.values())), num_classes=4, by_class=reference, seed=0)
    classes = rng.integers(0, 4, 1500)
    watch.update(rng.normal(size=1500) + 3 * classes - 1.5 * (classes == 2), classes)
    assert watch.alarm is not None
    assert watch.alarm.group == 2
    assert max(watch.class_evidence(), key=lambda k: watch.class_evidence()[k]) == 2


@pytest.mark.slow
def test_a_step_takes_the_same_time_however_long_the_stream():
    import time

    def seconds(ranks: Ranks) -> float:
        start = time.process_time()
        for score in normal(20_000, seed=1):
            ranks.p_value(score, 0.5)
        return time.process_time() - start

    short, long = (min(seconds(Ranks(normal(n), most=2**22)) for _ in range(3)) for n in (1000, 1_000_000))
    assert long < 4 * short


# Files -----------------------------------------------------------------------------------------------------------


def same(a: Watch, b: Watch) -> bool:
    (about_a, arrays_a), (about_b, arrays_b) = a.state(), b.state()
    return about_a == about_b and all(np.array_equal(arrays_a[name], arrays_b[name]) for name in arrays_a)


def test_a_saved_watch_goes_on_to_the_bit(tmp_path: Path):
    watch = Watch(normal(50), num_classes=2, seed=3)
    classes = np.arange(100) % 2
    watch.update(normal(100, seed=1), classes, [{"i": i} for i in range(100)])
    save_watch(watch, tmp_path / "state", {"more": [1]})
    again, about = load_watch(tmp_path / "state")
    assert about["more"] == [1]
    assert same(watch, again)
    assert np.array_equal(
        watch.update(normal(99, seed=2), classes[:99]), again.update(normal(99, seed=2), classes[:99])
    )
    assert same(watch, again)


def test_nothing_is_lost_by_kill_9(tmp_path: Path):
    """A process that dies between two updates leaves all that `update` returned from."""
    script = f"""if True:
        import numpy as np, os, signal
        from afield.decide import drift_file
        from afield.decide.drift import Watch
        drift_file.SNAPSHOT = 37
        kept = drift_file.WatchFile({str(tmp_path)!r}, Watch(np.arange(20.0), num_classes=2, seed=5), identity="m")
        for i in range(12):
            kept.update(np.sin(np.arange(9.0) + i), np.arange(9) % 2, list(range(9)))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    expected = Watch(np.arange(20.0), num_classes=2, seed=5)
    for i in range(12):
        expected.update(np.sin(np.arange(9.0) + i), np.arange(9) % 2, list(range(9)))
    with next(tmp_path.glob("drift-*.log")).open("ab") as journal:
        journal.write(b"\0" * 30)  # a record that was cut short, or never written
    with WatchFile(tmp_path, Watch(), identity="m") as kept:
        assert same(kept.watch, expected)
        assert [entry.input for entry in kept.watch.smallest] == [entry.input for entry in expected.smallest]
    with WatchFile(tmp_path, Watch(), identity="m") as kept:
        assert same(kept.watch, expected)


def test_a_folder_has_one_watch(tmp_path: Path):
    with WatchFile(tmp_path, Watch(), identity="a") as kept:
        kept.update([1.0, 2.0])
        with pytest.raises(Busy, match="in use by another process"):
            WatchFile(tmp_path, Watch())
    with WatchFile(tmp_path, Watch(), identity="b") as kept:
        assert kept.watch.rows == 0  # another model's state is not taken over
    (tmp_path / STATE).write_bytes(b"nothing")
    with pytest.raises(ValueError, match="no state of a watch, or damaged"):
        WatchFile(tmp_path, Watch(), identity="b")


# Models ----------------------------------------------------------------------------------------------------------


def test_reference_of_a_model_by_class():
    """Each row counts once, and a class has a reference of its own only where no other class shares it."""
    classes = torch.tensor([0] * 150 + [1] * 120 + [2] * 20)
    scores = torch.arange(290.0, dtype=torch.float64)
    reference, spans = (t.numpy() for t in sort_reference(scores, classes, 3))
    assert np.array_equal(np.sort(unique_rows(reference, spans)), np.arange(290.0))
    own = own_references(reference, spans)
    assert list(own) == [0]
    assert np.array_equal(own[0], np.arange(150.0))


def test_watch_of_a_calibrated_model():
    model = afield.sngp(torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
    x, y = torch.randn(200, 2), torch.arange(200) % 2
    afield.fit_posterior(model, [(x, y)])
    with pytest.raises(ValueError, match=r"call afield\.calibrate"):
        watch_model(model)
    afield.calibrate(model, [(x, y)])
    watch = afield.drift.watch_model(model)
    assert watch.num_reference == len(model.head.reference)
    assert watch.update(model.predict(x[:5]).score()).shape == (5,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha": 0.0}, "alpha must lie"),
        ({"num_classes": 0}, "num_classes must be at least 1"),
        ({"by_class": {3: [1.0]}, "num_classes": 3}, r"by_class must have classes below num_classes = 3, got \[3\]"),
        ({"reference": [[1.0]]}, r"scores of shape \(N,\), got \(1, 1\)"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Watch(**arguments)


@pytest.mark.parametrize(
    ("classes", "message"),
    [(None, "update expects classes"), ([0.5, 1.0], "whole numbers"), ([0], "2 whole"), ([0, 7], "0 to 7")],
)
def test_wrong_classes_are_named(classes: Any, message: str):
    with pytest.raises(ValueError, match=message):
        Watch(num_classes=3).update([1.0, 2.0], classes)
    with pytest.raises(ValueError, match="an input for each of 2"):
        Watch().update([1.0, 2.0], inputs=["one"])


# Accuracy --------------------------------------------------------------------------------------------------------


def test_risk_alarm_keeps_its_promise_and_rings_when_it_must():
    rng = np.random.default_rng(0)
    rung = 0
    for _ in range(150):
        evidence = RiskEvidence(0.2, alpha=0.2)
        evidence.update(rng.random(80) < 0.2)
        rung += evidence.alarm
    assert stats.binom.sf(rung - 1, 150, 0.2) > 1e-6
    evidence = RiskEvidence(0.05, alpha=0.01)
    evidence.update(rng.random(300) < 0.2)
    assert evidence.alarm
    assert 0.05 < evidence.lower < 0.2
    assert RiskEvidence(0.05).lower == 0
    with pytest.raises(ValueError, match="risk must lie"):
        RiskEvidence(1.0)


def test_risk_evidence_is_fair_at_the_limit_and_less_below():
    for risk, mean in ((0.1, 0.1), (0.1, 0.03)):
        for errors, count in ((0, 0), (3, 7), (1, 40)):
            now, wrong, right = (RiskEvidence(risk) for _ in range(3))
            now.errors, now.count = errors, count
            wrong.errors, wrong.count = errors + 1, count + 1
            right.errors, right.count = errors, count + 1
            expected = mean * math.exp(wrong.log_evidence()) + (1 - mean) * math.exp(right.log_evidence())
            factor = expected / math.exp(now.log_evidence())
            assert factor == pytest.approx(1) if mean == risk else factor < 1


def test_accuracy_without_labels_holds_at_all_times_and_is_void_after_drift():
    missed = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        confidence = rng.uniform(0.5, 1, 60)
        right = rng.random(60) < confidence
        running, outside = ExpectedAccuracy(delta=0.2), False
        for i in range(60):
            running.update(confidence[i])
            found = running.estimate()
            assert found is not None
            outside |= abs(right[: i + 1].mean() - found.accuracy) > found.error
        missed += outside
    assert stats.binom.sf(missed - 1, 200, 0.2) > 1e-6
    found = running.estimate(drifted=True)
    assert found is not None
    assert "drifted" in str(found.void)
    assert ExpectedAccuracy().estimate() is None


def test_calibration_gap_corrects_overconfidence():
    rng = np.random.default_rng(0)
    confidence = np.full(2000, 0.9)
    gap, error = calibration_gap(confidence, rng.random(2000) < 0.8)
    assert abs(gap + 0.1) < error
    expected = ExpectedAccuracy(gap=gap, gap_error=error)
    expected.update(confidence)
    found = expected.estimate()
    assert found is not None
    assert abs(found.accuracy - 0.8) < found.error
    with pytest.raises(ValueError, match="one shape"):
        calibration_gap([0.5], [True, False])
