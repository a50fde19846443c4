"""Defaults that work untouched: the issue's promise, over tasks, learning rates and seeds. 225 trainings: slow."""

from statistics import mean

import pytest

from bench.defaults import RATES, SEEDS, TOYS, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("task", TOYS)
def test_gp_heads_train_wherever_a_dense_network_does_and_know_what_is_far(task: str, rate: float):
    auroc = []
    for seed in SEEDS:
        dense = run(task, "dnn", rate, seed)
        for method in ("dnn-gp", "sngp"):
            record = run(task, method, rate, seed)
            assert record["accuracy"] >= dense["accuracy"] - 0.02, record
        auroc.append(record["auroc"])
    assert min(auroc) >= 0.9
    assert mean(auroc) >= 0.97
