"""Several labels of an input, on pairs of scikit-learn's digits: which of the ten are there."""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import afield
from afield.decide.conformal import prediction_sets
from afield.decide.policies import label_policies
from afield.prediction.labels import label, label_metrics
from afield.prediction.prediction import Prediction

LABELS = 10


@functools.cache
def pairs() -> tuple[Tensor, Tensor]:
    """Pictures (N, 128) of two digits side by side, and which digits are there (N, 10)."""
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    first, second = torch.randint(len(x), (2, 2600), generator=torch.Generator().manual_seed(0))
    applies = torch.zeros(len(first), LABELS).scatter_(1, torch.stack([y[first], y[second]], 1), 1.0)
    return torch.cat([x[first], x[second]], 1), applies


TRAIN, HELD, NEW = slice(0, 1200), slice(1200, 1700), slice(1700, 2600)


def part(rows: slice) -> tuple[Tensor, Tensor]:
    x, y = pairs()
    return x[rows], y[rows]


@functools.cache
def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, LABELS))
    optimizer, (x, y) = torch.optim.Adam(net.parameters(), lr=3e-3), part(TRAIN)
    for _ in range(25):
        for rows in torch.randperm(len(x)).split(60):
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(net(x[rows]), y[rows]).backward()
            optimizer.step()
    return net


@functools.cache
def attached(**options: Any) -> afield.SNGP:
    model = afield.attach(network(), likelihood="bernoulli", num_random_features=256)
    afield.fit_posterior(model, [part(TRAIN)])
    afield.calibrate(model, [part(HELD)], **options)
    return model


def test_probabilities_are_of_each_label_and_the_decision_stays() -> None:
    x, _ = part(NEW)
    p = attached().predict(x)
    assert p.probs is not None
    assert p.probs.shape == (900, LABELS)
    assert torch.equal(p.labels, (network()(x) > 0).long())
    torch.testing.assert_close(p.probs, torch.sigmoid(p.adjusted_logits()))


def test_calibration_makes_the_log_loss_of_the_labels_smaller() -> None:
    x, y = part(NEW)
    p = attached().predict(x)
    assert p.probs is not None
    before = F.binary_cross_entropy_with_logits(network()(x), y)
    assert F.binary_cross_entropy(p.probs, y) < before


def test_each_label_may_have_a_scale_and_an_amplitude_of_its_own() -> None:
    (x, y), model = part(NEW), attached(per_output=True)
    scales = model.head.label_scales
    assert scales.shape == (LABELS, 2)
    assert float(scales[:, 0].max() / scales[:, 0].min()) > 1.01
    p, shared = model.predict(x), attached().predict(x)
    assert p.variance is not None
    assert p.variance.shape == (900, LABELS)
    assert torch.equal(p.labels, shared.labels)
    nll = [label_metrics(each, y)["mean"]["nll"] for each in (p, shared)]
    assert nll[0] < nll[1] + 0.01


def test_metrics_of_a_label_are_those_of_two_classes() -> None:
    x, y = part(NEW)
    p = attached().predict(x)
    found = label_metrics(p, y)
    assert set(found) == {*map(str, range(LABELS)), "mean"}
    assert p.probs is not None
    torch.testing.assert_close(
        found["3"]["nll"], float(F.binary_cross_entropy(p.probs[:, 3].double(), y[:, 3].double())), rtol=1e-4, atol=1e-6
    )
    assert found["mean"]["auroc"] == pytest.approx(sum(found[str(k)]["auroc"] for k in range(LABELS)) / LABELS)
    assert found["mean"]["auroc"] > 0.97
    assert found["mean"]["ece"] < 0.03


def test_p_values_of_labels_and_of_inputs_are_valid_over_repeated_splits() -> None:
    model = attached()
    x, y = pairs()[0][1200:], pairs()[1][1200:]
    rates = []
    for repeat in range(8):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(repeat))
        held, new = order[:300], order[300:]
        afield.calibrate(model, [(x[held], y[held])], amplitude=1.0, logit_scale=1.0)
        p = model.predict(x[new])
        assert p.p_value is not None and p.label_p_value is not None  # noqa: PT018
        rates.append(torch.cat([(p.p_value <= 0.1)[:, None], p.label_p_value <= 0.1], 1).double().mean(0))
    attached.cache_clear()
    rate = torch.stack(rates)
    assert bool((rate.mean(0) <= 0.1 + 3 * rate.std(0) / len(rates) ** 0.5).all())
    assert float(rate.mean()) > 0.06  # and they are not idle


def test_foreign_pictures_have_small_p_values() -> None:
    x, _ = part(NEW)
    p = attached().predict(1 - x)
    assert p.p_value is not None
    assert float((p.p_value <= 0.05).double().mean()) > 0.9


def test_a_policy_for_each_label_and_sets_of_it() -> None:
    (x, y), model = part(NEW), attached()
    p = model.predict(x)
    rules = label_policies(p[:450], y[:450], risk=0.02)
    assert len(rules) == LABELS
    for k in (0, 7):
        each, own = label(p[450:], k), y[450:, k].long()
        kept = rules[k].decide(each)
        wrong = (each.labels != own) & kept
        assert float(wrong.double().sum() / kept.double().sum().clamp_min(1)) < 0.05
        sets = prediction_sets(label(p[:450], k), y[:450, k].long(), level=0.9).sets(each)
        assert float(sets.gather(1, own[:, None]).double().mean()) > 0.85


def test_scores_are_means_over_the_labels() -> None:
    p = attached().predict(part(NEW)[0][:20])
    entropy = torch.stack([label(p, k).score("entropy") for k in range(LABELS)], 1).mean(1)
    torch.testing.assert_close(p.score("entropy"), entropy)
    assert torch.equal(p.score(), p.score("variance"))


def test_samples_and_quadrature_are_of_each_label() -> None:
    model, x = attached(), part(NEW)[0][:30]
    exact = model.predict(x, predictive="quadrature").probs
    drawn = model.predict(x, predictive="monte_carlo", num_samples=2000)
    assert exact is not None and drawn.probs is not None and drawn.members is not None  # noqa: PT018
    assert drawn.members.shape == (2000, 30, LABELS)
    torch.testing.assert_close(drawn.probs, exact.to(drawn.probs), rtol=0, atol=0.05)


def test_one_label_of_two_outputs_is_what_one_output_alone_would_be() -> None:
    """Frozen hidden vectors, output weights solved for: labels do not look at each other."""
    x, y = part(TRAIN)
    body = nn.Sequential(nn.Linear(128, 32), nn.Tanh())

    def solved(columns: list[int]) -> Prediction:
        torch.manual_seed(1)
        net = nn.Sequential(*body, nn.Linear(32, len(columns)))
        model = afield.sngp(net, None, freeze=True, likelihood="bernoulli", num_random_features=64,
                            generator=torch.Generator().manual_seed(0)).double()  # fmt: skip
        target = y[:300, columns] if len(columns) > 1 else y[:300, columns[0]]
        afield.fit_head(model, [(x[:300].double(), target)], tolerance=1e-9)
        afield.fit_posterior(model, [(x[:300].double(), target)])
        return model.predict(x[300:320].double())

    both, alone = solved([3, 5]), solved([3])
    torch.testing.assert_close(label(both, 0).probs, alone.probs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("target", "message"),
    [(torch.zeros(40).long(), "targets must have shape"), (torch.full((40, LABELS), 0.5), "Labels must be 0 or 1")],
)
def test_targets_of_another_form_are_refused(target: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        afield.calibrate(attached(), [(part(NEW)[0][:40], target)])


def test_what_needs_one_class_an_input_says_so() -> None:
    p = attached().predict(part(NEW)[0][:5])
    from afield.deploy.score_files import answers

    with pytest.raises(ValueError, match="several labels"):
        answers(p)
    with pytest.raises(ValueError, match="several labels"):
        label(label(p, 0), 0)
    with pytest.raises(IndexError, match="label 10 out of range"):
        label(p, 10)
    classes = afield.attach(nn.Linear(4, 3), num_random_features=8)
    afield.fit_posterior(classes, [torch.randn(30, 4)])
    with pytest.raises(ValueError, match="needs several labels"):
        afield.calibrate(classes, [], per_output=True)
