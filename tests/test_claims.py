"""The table of the paper's claims: what counts as holding, and that nothing is silently left out."""

import pytest

from bench import claims
from bench.claims import CLAIMS, CROSSES, ECE, Place, check, check_gap

PLACE = Place("tab:x", "x-small", "x", "X")
ROWS = {
    "a": {"accuracy/clean": 95.8, "ece/clean": 0.01, "auroc/far": 0.9, "auroc/far/energy": 0.8},
    "b": {"accuracy/clean": 96.2, "ece/clean": 0.02, "auroc/far": 0.8},
    "c": {"accuracy/clean": 96.4, "ece/clean": 0.01, "auroc/far": 0.9, "auroc/far/energy": 0.95},
}


@pytest.fixture(autouse=True)
def record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_rows", lambda record, task: ROWS)


@pytest.mark.parametrize(
    ("better", "than", "metrics", "of_than", "answer"),
    [
        ("a", "b", ("accuracy/clean", "ece/clean", "auroc/far"), (), "yes"),  # half a point behind is competitive
        ("a", "c", ("accuracy/clean",), (), "no"),
        ("a", "c", ("ece/clean",), (), "no"),  # as good is not ahead
        ("a", "b c", ("ece/clean", "auroc/far"), (), "in 2 of 4; not in ece/clean (c), auroc/far (c)"),
        ("a c", "a", ("auroc/far/energy",), ("auroc/far",), "in 1 of 2; not in auroc/far/energy (a)"),
        ("a", "d", ("ece/clean",), (), "not run: d"),
        ("a", "b", ("ece/clean", "nll/clean"), (), "not measured: nll/clean"),
        ("a", "b", ("auroc/far/energy",), (), "not measured: auroc/far/energy"),
    ],
)
def test_a_claim_holds_if_every_comparison_does(better, than, metrics, of_than, answer):
    assert check(PLACE.claim("ahead", better, than, metrics, of_than)) == answer


def test_many_failures_are_told_by_metric():
    claim = PLACE.claim("ahead", "b", "a c", ("accuracy/clean", "ece/clean", "auroc/far"))
    assert check(claim) == "in 2 of 6; not in ece/clean, auroc/far"


def test_the_gap_is_between_sums_of_differences(monkeypatch: pytest.MonkeyPatch):
    names = (*ECE, *claims.CIFAR_OOD)
    rows = {name: dict.fromkeys(names, value) for name, value in (("sngp", 0.9), ("dnn-gp", 0.7), ("sngp-augmix", 0.9))}
    monkeypatch.setattr(claims, "_rows", lambda record, task: rows)
    assert check_gap() == "not run"
    for other, answer in ((0.8, "yes"), (0.6, "no")):
        rows["dnn-gp-augmix"] = dict.fromkeys(names, other)
        assert check_gap() == answer


def test_every_claim_compares_metrics_of_equal_number():
    assert CROSSES.task == "cifar10"
    for claim in CLAIMS:
        assert claim.metrics
        assert len(claim.of_than or claim.metrics) == len(claim.metrics)
