"""Defaults that work untouched: the promise, over tasks, learning rates and seeds.

results/defaults.jsonl has all 225 trainings, and the promise is checked on every one of them. The slow test trains a
part of them again: every task at the highest rate, and `circles`, the task that heads get stuck on, at all rates.
"""

from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest

from bench.defaults import COMPARED, RATES, RECORD, SEEDS, TOYS, lines, run

AGAIN = [*((task, max(RATES)) for task in TOYS), *(("circles", rate) for rate in RATES if rate < max(RATES))]
Result = Callable[[str, int], dict[str, Any]]  # method, seed -> its metrics


def check_promise(result: Result, seeds: range) -> None:
    """GP heads train wherever a dense network does, and SNGP knows what is far."""
    for seed in seeds:
        dense = result("dnn", seed)
        for method in ("dnn-gp", "sngp"):
            assert result(method, seed)["accuracy"] >= dense["accuracy"] - 0.02, (method, seed)
    auroc = [result("sngp", seed)["auroc"] for seed in seeds]
    assert min(auroc) >= 0.9
    assert mean(auroc) >= 0.97


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("task", TOYS)
def test_the_record_keeps_the_promise(task: str, rate: float):
    found = {(r["method"], r["seed"]): r for r in lines(RECORD) if (r["task"], r["learning_rate"]) == (task, rate)}
    assert found.keys() == {(method, seed) for method in COMPARED for seed in SEEDS}
    check_promise(lambda method, seed: found[method, seed], SEEDS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("task", "rate"), AGAIN)
def test_trained_again_the_promise_is_kept(task: str, rate: float):
    found = {method: run(task, method, rate, seed=0) for method in COMPARED}
    check_promise(lambda method, seed: found[method], range(1))
