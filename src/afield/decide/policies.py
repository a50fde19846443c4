"""Decisions: when a model may answer, and when to refer to somebody else.

    rule = afield.policy(false_alarms=0.01)                            refuse what is far from the training data
    rule = afield.policy(held_out, y, risk=0.02)                       at most 2% of the answers wrong
    rule = afield.policy(held_out, coverage=0.9)                       at least 90% of in-domain inputs answered
    rule = afield.policy(held_out, y, error_cost=10, referral_cost=1)  least expected cost
    rule.decide(model.predict(x))                                      True: answer, False: refer

`held_out` is the `Prediction` of in-domain data that neither the network nor `afield.calibrate` has seen. About fresh
in-domain inputs, whatever the model:

false_alarms     refused at a rate of at most a on average over calibrations, because P(p-value <= a) <= a. It goes with
                 each of the others, which then speak of what it lets pass (risk) or of all inputs (coverage, cost)
risk, coverage   hold with probability 1 - delta over the draw of the held-out data: proofs in `thresholds`
cost             answer with the class of least expected cost if that is no more than a referral costs (Chow's rule):
                 the best there is if the probabilities are right. Held-out data only measures what it costs
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from afield.decide.thresholds import coverage_threshold, risk_threshold
from afield.prediction.checks import check_labels
from afield.prediction.labels import each_label
from afield.prediction.positions import refuse_positions
from afield.prediction.prediction import Prediction, likelihood_of
from afield.prediction.scores import SCORES

Cost = float | Sequence[Sequence[float]]


@dataclass(frozen=True)
class Outcome:
    """What a policy did with some examples; `errors` and `cost` are None where no targets tell.

    cost is the mean over all examples, referred ones included, and cost_error its standard error.
    """

    count: int
    accepted: int
    errors: int | None = None
    cost: float | None = None
    cost_error: float | None = None

    @property
    def coverage(self) -> float:
        """The part that was answered."""
        return self.accepted / self.count

    @property
    def risk(self) -> float:
        """The part of the answers that was wrong; nan where nothing was answered, or nobody knows."""
        return math.nan if self.errors is None or not self.accepted else self.errors / self.accepted


@dataclass(frozen=True)
class Policy:
    """Answer or refer. Made by `afield.policy`; plain numbers, so that `dataclasses.asdict` goes into a JSON file.

    score            name of the score that the threshold is for; None: no threshold
    threshold        the largest score that is answered; None: any. With costs, the largest expected cost: a referral's
    false_alarms     inputs with a p-value of at most this are refused; None: none
    error_cost       of an error, or [k][j] of answering j where k is right; None: errors have no cost
    tolerance        by how much an answer to real targets may miss; None: nothing counts as an error
    risk, coverage   what was asked for, with confidence 1 - delta
    held_out         what the policy did with the data that it was chosen on
    """

    score: str | None = None
    threshold: float | None = None
    false_alarms: float | None = None
    error_cost: Cost | None = None
    tolerance: float | None = None
    risk: float | None = None
    coverage: float | None = None
    delta: float | None = None
    held_out: Outcome | None = None

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Policy":
        """From what `dataclasses.asdict` made of it, after a trip through JSON."""
        known = {field.name for field in fields(Policy)}
        if not isinstance(values, Mapping) or set(values) - known:
            raise ValueError(f"Expected the fields of a Policy, {', '.join(sorted(known))}, got {values!r}.")
        held_out = values.get("held_out")
        return Policy(**{**values, "held_out": None if held_out is None else Outcome(**held_out)})

    def decide(self, prediction: Prediction) -> Tensor:
        """True (N,) where the model may answer. What has no score, because it is NaN, is referred."""
        accept = self.doubt(prediction) <= (math.inf if self.threshold is None else self.threshold)
        if self.false_alarms is not None:
            accept = accept & prediction.accept(self.false_alarms)
        return accept

    def answer(self, prediction: Prediction) -> Tensor:
        """The class (N,) of least expected cost, which is the most probable unless errors differ; else the mean."""
        refuse_positions(prediction, "A policy")
        if prediction.probs is None:
            return prediction.mean
        if self.error_cost is None or isinstance(self.error_cost, int | float):
            return prediction.labels
        return _expected_cost(prediction, self.error_cost).argmin(-1)

    def doubt(self, prediction: Prediction) -> Tensor:
        """What the threshold is compared with (N,), in float64."""
        refuse_positions(prediction, "A policy")
        if self.error_cost is not None:
            return _expected_cost(prediction, self.error_cost).amin(-1)
        if self.score is None:
            return torch.zeros(len(prediction), dtype=torch.float64, device=prediction.logits.device)
        return prediction.score(self.score).detach().double()

    def errors(self, prediction: Prediction, target: Tensor) -> Tensor | None:
        """(N,) whether the answer is wrong; None for real targets without a tolerance."""
        if prediction.probs is not None:
            target = check_labels(target, *prediction.probs.shape)
            return self.answer(prediction) != target.to(prediction.probs.device)
        if self.tolerance is None:
            return None
        shape = prediction.logits.shape
        if target.shape != shape and not (shape[1] == 1 and target.shape == shape[:1]):
            raise ValueError(f"Expected targets of shape {tuple(shape)}, got {tuple(target.shape)}.")
        missed = target.to(prediction.logits.device).double().reshape(shape) - prediction.mean.double()
        return ~(missed.abs() <= self.tolerance).all(-1)

    def outcome(self, prediction: Prediction, target: Tensor | None = None) -> Outcome:
        """What the policy does with these examples."""
        if not len(prediction):
            raise ValueError("A policy expects at least one example, got none.")
        accept = self.decide(prediction)
        outcome = Outcome(len(prediction), int(accept.sum()))
        wrong = None if target is None else self.errors(prediction, target)
        if wrong is None or target is None:
            return outcome
        outcome = replace(outcome, errors=int((wrong & accept).sum()))
        if self.error_cost is None or self.threshold is None:
            return outcome
        costs = _cost_matrix(self.error_cost, _class_probs(prediction))
        paid = costs[target.to(costs.device).long().flatten(), self.answer(prediction)]
        paid = torch.where(accept, paid, self.threshold)
        standard_error = float(paid.std()) / math.sqrt(outcome.count) if outcome.count > 1 else None
        return replace(outcome, cost=float(paid.mean()), cost_error=standard_error)

    @property
    def guarantee(self) -> str:
        """What the policy promises about fresh in-domain inputs, in words."""
        confidence = (
            "" if self.delta is None else f", with confidence {1 - self.delta:.4g} over draws of the held-out data"
        )
        sentences = []
        if self.false_alarms is not None:
            rate = f"{self.false_alarms:.4g}"
            sentences.append(
                f"At most {rate} of in-domain inputs are refused as foreign, on average over calibrations."
            )
        if self.risk is not None:
            sentences.append(f"At most {self.risk:.4g} of the answers are wrong{confidence}.")
        if self.coverage is not None:
            sentences.append(f"At least {self.coverage:.4g} of in-domain inputs are answered{confidence}.")
        if self.error_cost is not None:
            sentences.append("The expected cost is the least there is, if the probabilities are right.")
        return " ".join(sentences)


def policy(
    prediction: Prediction | None = None,
    target: Tensor | None = None,
    *,
    false_alarms: float | None = None,
    risk: float | None = None,
    coverage: float | None = None,
    error_cost: Cost | Tensor | None = None,
    referral_cost: float | None = None,
    delta: float = 0.05,
    score: str | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> Policy:
    """When to answer and when to refer: for one goal, and `false_alarms` with it or alone.

    prediction     of in-domain data that neither the network nor `afield.calibrate` has seen
    target         its classes, or real targets with a tolerance
    false_alarms   refuse in-domain inputs at a rate of at most this, and with them what is not in-domain
    risk           the largest part of the answers that may be wrong
    coverage       the smallest part of in-domain inputs that must be answered
    error_cost     a number, or a matrix [k][j] of answering j where k is right; with referral_cost in the same unit
    delta          how often, over draws of the held-out data, risk or coverage may be missed
    score          doubt, by its name in `afield.scores.SCORES`; None: max_probability, variance for real targets
    tolerance      an answer to real targets that misses by more is wrong
    seed           of the random tenth of the examples that places the thresholds for a risk

    returns  a `Policy`: `decide`, `answer`, `guarantee`
    raises   ValueError without one goal, or with rates outside (0, 1); OutOfReach if the data cannot promise it

    >>> rule = afield.policy(p, y, risk=0.2)
    >>> rule.guarantee
    'At most 0.2 of the answers are wrong, with confidence 0.95 over draws of the held-out data.'
    >>> rule.decide(model.predict(x[:5])).shape
    torch.Size([5])
    """
    _check_rates(false_alarms=false_alarms, risk=risk, coverage=coverage, delta=delta)
    goals: dict[str, Any] = {"risk": risk, "coverage": coverage, "error_cost": error_cost}
    asked = [name for name, value in goals.items() if value is not None]
    if len(asked) > 1 or not (asked or false_alarms is not None):
        raise ValueError(
            "policy expects one goal (risk, coverage, or error_cost with referral_cost), or false_alarms alone; got "
            f"{' and '.join(asked) or 'none'}."
        )
    if (error_cost is None) != (referral_cost is None):
        raise ValueError(
            "policy expects error_cost and referral_cost together: of an answer that is wrong, and of none."
        )
    rule = Policy(false_alarms=false_alarms, tolerance=tolerance)
    if error_cost is not None:
        rule = replace(rule, error_cost=_check_costs(error_cost), threshold=_check_costs(referral_cost))
    elif asked:
        rule = replace(rule, risk=risk, coverage=coverage)
        rule = _with_threshold(rule, asked[0], goals[asked[0]], delta, prediction, target, score, seed)
    return rule if prediction is None else replace(rule, held_out=rule.outcome(prediction, target))


def _with_threshold(
    rule: Policy,
    goal: str,
    level: float,
    delta: float,
    prediction: Prediction | None,
    target: Tensor | None,
    score: str | None,
    seed: int,
) -> Policy:
    """The rule with the threshold that keeps the goal, a risk or a coverage, with confidence 1 - delta."""
    if prediction is None or not len(prediction) or (goal == "risk" and target is None):
        raise ValueError(
            f"A {goal} needs held-out examples{' and their targets' * (goal == 'risk')}: "
            f"afield.policy(model.predict(x){', y' * (goal == 'risk')}, {goal}=...)."
        )
    score = SCORES.check(score or likelihood_of(prediction).doubt)
    rule = replace(rule, score=score)
    doubt = rule.doubt(prediction)
    if bool(doubt.isnan().any()):
        rows = doubt.isnan().nonzero().flatten().tolist()
        raise ValueError(f"Held-out predictions must be numbers, got NaN in {len(rows)} rows (first: {rows[:5]}).")
    passed = rule.decide(prediction)  # no threshold yet: p-values alone
    if goal == "coverage":
        threshold = coverage_threshold(doubt.masked_fill(~passed, math.inf), level, delta)
    else:
        wrong = None if target is None else rule.errors(prediction, target)
        if wrong is None:
            raise ValueError("The risk of real targets needs a tolerance: by how much may an answer miss?")
        threshold = risk_threshold(doubt[passed], wrong[passed], level, delta, seed=seed)
    return replace(rule, delta=delta, threshold=None if threshold == math.inf else threshold)


def _expected_cost(prediction: Prediction, cost: Cost) -> Tensor:
    """(N, C): of answering with each class."""
    probs = _class_probs(prediction)
    return probs @ _cost_matrix(cost, probs)


def _class_probs(prediction: Prediction) -> Tensor:
    """(N, C) in float64."""
    if prediction.probs is None:
        raise ValueError(f"Costs of errors need class probabilities, got a {prediction.likelihood} prediction.")
    return prediction.probs.detach().double()


def _cost_matrix(cost: Cost, probs: Tensor) -> Tensor:
    """[right class][answer] (C, C) in float64, for probabilities (N, C)."""
    classes, device = probs.shape[1], probs.device
    if isinstance(cost, int | float):
        return cost * (1 - torch.eye(classes, dtype=torch.float64, device=device))
    matrix = torch.tensor(cost, dtype=torch.float64, device=device)
    if matrix.shape != (classes, classes):
        raise ValueError(
            f"error_cost must be a number or a matrix [right class][answer] of shape {(classes, classes)}, got shape "
            f"{tuple(matrix.shape)}."
        )
    return matrix


def _check_costs(cost: Any) -> Any:
    """The costs as plain numbers, if they are finite and not negative."""
    values = torch.as_tensor(cost, dtype=torch.float64)
    if not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise ValueError(f"Costs must be finite and not negative, got {cost}.")
    return values.tolist()


def _check_rates(**rates: float | None) -> None:
    for name, value in rates.items():
        if value is not None and not 0 < value < 1:
            raise ValueError(f"{name} must lie strictly between 0 and 1, got {value}.")


def label_policies(prediction: Prediction, target: Tensor, **goals: Any) -> list[Policy]:
    """A policy for each of several labels, by the goals of `policy`; rule k decides about `labels.label(new, k)`.

    target  (N, K) zeros and ones
    goals   of `policy`

    returns  a list with a `Policy` for each label
    raises   ValueError where the held-out data cannot promise it for a label

    >>> logits = torch.tensor([[4.0, 3.0], [-4.0, -3.0]]).repeat(200, 1)
    >>> held_out = afield.Prediction(logits, probs=logits.sigmoid(), likelihood="bernoulli")
    >>> rules = label_policies(held_out, (logits > 0).long(), risk=0.05)
    >>> rules[1].decide(afield.labels.label(held_out, 1)).all()
    tensor(True)
    """
    return [policy(each, target[:, k], **goals) for k, each in enumerate(each_label(prediction))]
