"""A few seconds of `make torture`, and a harness that notices what it is there for."""

import json
import re
import signal
import subprocess
from collections import Counter
from random import Random

import pytest

from afield.model import saving
from bench.torture import kinds, record, supervise
from bench.torture.__main__ import run_kind
from bench.torture.fault import Inject, Kind, Lost, Outcome, Refused, Result, Wrong, judge
from bench.torture.mutations import mutate
from bench.torture.worker import inject_here

pytestmark = pytest.mark.filterwarnings("ignore")
CHEAP = ("bits", "edits", "pickles", "tables", "tars", "numbers")


@pytest.mark.parametrize("name", CHEAP)
def test_nothing_is_lost_and_nothing_silently_wrong(name: str) -> None:
    """Here, without a process that is watched: a fault that ends this one is noticed, too."""
    found = results(name, most=25)
    assert len(found) == 25
    assert not [result.text for result in found if result.outcome in (Outcome.LOST, Outcome.WRONG)]


def test_a_watched_process_counts_the_same_outcomes() -> None:
    found = list(supervise.inject("tars", 0, seconds=600, most=20))
    assert [number for number, _ in found] == list(range(20))
    assert [result.outcome for _, result in found] == [result.outcome for result in results("tars", most=20)]


def test_failures_are_told_with_the_way_to_see_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [(0, Result(Outcome.SURVIVED, "")), (1, Result(Outcome.WRONG, "other")), (2, Result(Outcome.REFUSED, "a"))]
    monkeypatch.setattr(supervise, "inject", lambda *arguments, **options: iter(made))
    count, failures = run_kind("tars", seed=3, seconds=1)
    assert count == Counter(result.outcome for _, result in made)
    again = "python -m bench.torture --kinds tars --seed 3 --only 1"
    assert failures == [f"tars 1, wrong: other\n    again: {again}"]


def results(name: str, most: int, seed: int = 0) -> list[Result]:
    """Of the first faults, without the name of the temporary folder."""
    steps = [step for step in inject_here(name, seed, seconds=600, most=most) if isinstance(step, Result)]
    return [Result(step.outcome, re.sub(r"torture-\w+", "", step.text)) for step in steps]


def test_a_loader_that_skips_its_check_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted error: hashes of the index always match."""
    monkeypatch.setattr(saving, "hash_json", lambda value: _Equal())
    found = [result for result in results("edits", 150) if result.outcome == Outcome.WRONG]
    assert found
    assert all("loaded without a word, and differs" in result.text for result in found)


class _Equal(str):
    """A hash that is equal to every other."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def test_a_fault_can_be_played_again() -> None:
    assert results("edits", 30) == results("edits", 30)
    assert results("edits", 30) != results("edits", 30, seed=1)
    content = bytes(range(200))
    assert [mutate(content, Random(i)) for i in range(50)] == [mutate(content, Random(i)) for i in range(50)]


def raising(error: Exception) -> Inject:
    def inject(random: Random) -> None:
        raise error

    return inject


@pytest.mark.parametrize(
    ("inject", "outcome"),
    [
        (lambda random: None, Outcome.SURVIVED),
        (raising(Refused("a message")), Outcome.REFUSED),
        (raising(Lost("gone")), Outcome.LOST),
        (raising(Wrong("other")), Outcome.WRONG),
        (raising(KeyError("foreign")), Outcome.LOST),
        (raising(ValueError("not raised by afield")), Outcome.LOST),
        (lambda random: saving.read_index("/nowhere"), Outcome.REFUSED),
    ],
)
def test_outcomes(inject: Inject, outcome: Outcome) -> None:
    assert judge(inject, Random(0)).outcome == outcome


SCRIPT = """
import os, signal, sys, time
from contextlib import contextmanager
from random import Random
from bench.torture import kinds, worker
from bench.torture.fault import Kind

@contextmanager
def deadly(folder):
    def inject(random):
        drawn = random.random()
        if drawn == Random("deadly 1 0").random():
            os.kill(os.getpid(), signal.SIGSEGV)
        if drawn == Random("deadly 3 0").random():
            time.sleep(60)
    yield inject

kinds.KINDS["deadly"] = Kind("deadly", "", deadly, share=1)
worker.main()
"""


@pytest.mark.slow
def test_a_worker_that_dies_or_hangs_is_noticed_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 1 ends the process, fault 3 hangs it; the others are survived."""
    monkeypatch.setitem(kinds.KINDS, "deadly", Kind("deadly", "", kinds.KINDS["bits"].open, share=1, limit=2))
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda c, **options: popen([c[0], "-c", SCRIPT, *c[3:]], **options))
    found = list(supervise.inject("deadly", 0, seconds=60, most=5))
    assert [number for number, _ in found] == [0, 1, 2, 3, 4]
    assert [result.outcome for _, result in found] == ["survived", "lost", "survived", "lost", "survived"]
    assert f"status {-signal.SIGSEGV}" in found[1][1].text
    assert "hung" in found[3][1].text


def test_the_table_of_the_page_is_that_of_the_record() -> None:
    made = json.loads(record.RECORD.read_text(encoding="utf-8"))
    assert record.table(made) in record.PAGE.read_text(encoding="utf-8")
    assert made["rows"]["all"]["injected"] == sum(
        row["injected"] for name, row in made["rows"].items() if name != "all"
    )
