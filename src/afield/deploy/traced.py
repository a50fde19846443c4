"""A fitted model as one function of its raw input, which a tracer can follow: no flags, no state, no capture.

    inputs -> h -> f, v -> probs, logits -> score -> p_value -> accepted

Where the network answers at positions of an input, answers have them behind the batch, and a calibrated model gives
input_score, input_p_value and input_accepted of every input as a whole.

Classes give probs, logits (s f), variance, score, p_value, accepted; gaussian and poisson have mean and std in place of
the first two, and covariance where outputs err together. p_value and accepted are there if the model is calibrated. The
head is `GaussianProcessHead` itself and the score is `Prediction.score`, so that there is one formula for each. Two
things are said in other words:

- ONNX has no searchsorted. The number of reference scores below a score is found by a binary search without branches,
  log2 n gathers on a table filled up with infinity: the same count, bit for bit, in memory that grows with the batch
  alone. p-values by class have a binary search of their own, `class_p_value`, here and everywhere.
- Max pooling in ONNX Runtime forgets NaN, and would give an answer where torch gives none. So a row with an input that
  is not finite gets a hidden vector of NaN. Every answer is then NaN and the p-value the smallest there is: refused.
"""

import dataclasses
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from afield.bounds.spectral import fold
from afield.gp.capture import Tap, hidden_vectors
from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS
from afield.model.batches import Field, split_batch
from afield.model.batches import Inputs as Fields
from afield.model.layers import replace_layer
from afield.model.sngp_model import SNGP
from afield.outputs.positions import as_returned, input_scores, looks_around, mask_of
from afield.prediction.p_values import class_p_value, conformal_p_value, fewest_rows, predicted_class
from afield.prediction.positions import from_rows, unflatten
from afield.prediction.prediction import Prediction
from afield.prediction.predictive import PREDICTIVES, of_labels

ALPHA = 0.01
HIDDEN = "hidden"
COVARIANCE = "covariance"
_mean_field = PREDICTIVES["mean_field"]
OF_INPUTS = ("input_score", "input_p_value", "input_accepted")


@dataclass(frozen=True)
class Inputs:
    """The tensors of a batch by name, and how the network is called with them.

    args, kwargs  as the network takes them; what is not a tensor is a constant of the graph
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @staticmethod
    def of(net: nn.Module, batch: Any, *, target: Field | None = None, inputs: Fields = None) -> "Inputs":
        """From a batch as loaders give it, by the rules of `model.batches`; its target is left out."""
        args, kwargs, _ = split_batch(batch, net=net, target=target, inputs=inputs, wants_target=False)
        named = {**dict(zip(_parameters(net, len(args)), args, strict=True)), **kwargs}
        found = {name: _float32(value) for name, value in named.items() if isinstance(value, Tensor)}
        odd = [name for name, value in named.items() if isinstance(value, list | tuple | Mapping)]
        if odd or not found:
            raise ValueError(
                f"An export takes tensors as inputs, got {', '.join(odd) or 'none'}: pass them one by one."
            )
        sizes = {name: tuple(t.shape) for name, t in found.items()}
        if any(not shape or shape[0] != next(iter(sizes.values()))[0] or 0 in shape for shape in sizes.values()):
            raise ValueError(f"All inputs of the example must have the same number of rows, at least one, got {sizes}.")
        for name, t in found.items():
            if not bool(torch.isfinite(t).all()):
                raise ValueError(f"The example must be finite, got NaN or infinity in {name!r}.")
        return Inputs(tuple(found), tuple(found.values()), args, kwargs)

    def call(self, tensors: tuple[Tensor, ...]) -> tuple[list[Any], dict[str, Any]]:
        """args and kwargs with these tensors in the place of the example's."""
        rest = iter(tensors)
        args = [next(rest) if isinstance(value, Tensor) else value for value in self.args]
        return args, {k: next(rest) if isinstance(value, Tensor) else value for k, value in self.kwargs.items()}


class Graph(nn.Module):
    """Tensors in the order of `inputs.names` -> answers by name. The model that it is made from is not touched.

    alpha   rate of false alarms behind `accepted`; None: 0.01, or the smallest that the reference can tell
    half    the backbone in half precision; the head stays in float32, whose phases half precision would drown
    hidden  give h as well
    """

    table: Tensor
    input_table: Tensor
    spans: Tensor

    def __init__(
        self, model: SNGP, inputs: Inputs, *, alpha: float | None = None, half: bool = False, hidden: bool = False
    ) -> None:
        super().__init__()
        plain = fold(model).cpu().float().eval().requires_grad_(False)
        head = plain.head
        head.factor()
        head.precision.free()  # the largest tensors of all, behind the factor
        self.alpha = chosen_alpha(model, alpha)
        self.input_alpha = input_alpha(model, self.alpha)
        self.inputs, self.output = inputs, plain.head_name
        self.half_backbone, self.with_hidden = half, hidden
        likelihood = LIKELIHOODS[head.likelihood]
        self.of_classes = likelihood.of_classes
        self.head = head
        self.correlated = _correlated(head)
        self.net = replace_layer(plain.net, plain.head_name, Tap(head.out_features))
        if half:
            self.net.half()
        reference = head.reference if head.calibrated else head.reference[:0]
        self.num_reference = reference.numel()
        self.score = head.score if head.calibrated else None
        self.draws, self.num_inputs = int(head.reference_draws), head.input_reference.numel() if head.calibrated else 0
        self.register_buffer("spans", head.reference_spans)
        self.register_buffer("table", _table(reference))
        self.register_buffer("input_table", _table(head.input_reference[: self.num_inputs]))

    @property
    def outputs(self) -> list[str]:
        """Names of the answers, in order."""
        first = ["probs", "logits"] if self.of_classes else ["mean", "std", *([COVARIANCE] if self.correlated else [])]
        last = [] if self.alpha is None else ["p_value", "accepted"]
        last += list(OF_INPUTS) if self.num_inputs and self.input_alpha is not None else []
        return [*first, "variance", "score", *last, *([HIDDEN] if self.with_hidden else [])]

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        head, found = self.head, self.hidden(tensors)
        h = found.flatten(0, -2)
        mean, variance = head.posterior(h)
        if self.of_classes:
            logits, variance = head.scaled(mean, variance)
            labels = LIKELIHOODS[head.likelihood].has_labels(head.out_features)
            probs = (of_labels(_mean_field) if labels else _mean_field)(logits, variance, 0, None)[0]
            prediction = Prediction(logits, variance, probs, likelihood=head.likelihood)
            answers = {"probs": probs, "logits": logits}
        else:
            prediction = head.of_numbers(mean, variance, h)
            assert prediction.variance is not None
            variance = prediction.variance
            answers = _of_numbers(prediction, self.correlated)
        prediction = dataclasses.replace(prediction, **head.own_fields(head.own_score(mean, variance, h)))
        around = self.score is not None and looks_around(self.score)
        answers |= {"variance": variance} | ({} if around else {"score": prediction.score(self.score)})
        if found.dim() > 2:
            answers = {name: unflatten(values, found.shape[:-1]) for name, values in answers.items()}
            mask = mask_of(self.inputs.call(tensors)[1], found.shape[:-1])
            if around:
                prediction = from_rows(prediction, found.shape[0], found.shape[1:-1])
            prediction = dataclasses.replace(prediction, mask=mask)
            if around:
                answers["score"] = prediction.score(self.score)
        if self.alpha is not None:
            classes = predicted_class(prediction) if len(self.spans) else None
            answers["p_value"] = self.p_value(answers["score"], classes)
            answers["accepted"] = answers["p_value"] > self.alpha
        if found.dim() > 2 and self.num_inputs and self.input_alpha is not None:
            answers |= self.of_inputs(input_scores(answers["score"], prediction, self.head.score))
        return answers | ({HIDDEN: h} if self.with_hidden else {})

    def hidden(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """h (N, d) in float32, NaN in rows with an input that is not finite."""
        finite = [torch.isfinite(t) for t in tensors if t.is_floating_point()]
        # Zero for now: int8 takes one scale from all rows, and one NaN would be the end of them all.
        tensors = tuple(t.masked_fill(~torch.isfinite(t), 0.0) if t.is_floating_point() else t for t in tensors)
        if self.half_backbone:
            tensors = tuple(t.half() if t.is_floating_point() else t for t in tensors)
        args, kwargs = self.inputs.call(tensors)
        h, returned = hidden_vectors(self.net, self.output, args, kwargs)
        h = as_returned(h, returned, self.head.out_features).float()
        for numbers in finite:
            infinite = ~numbers.flatten(1).all(1)
            h = h.masked_fill(infinite.reshape(-1, *[1] * (h.dim() - 1)), math.nan)
        return h

    def of_inputs(self, total: Tensor) -> dict[str, Tensor]:
        """What is said of inputs as a whole, from their scores (N,)."""
        assert self.input_alpha is not None
        p_value = _p_value(total, self.input_table, self.num_inputs, 1)
        return dict(zip(OF_INPUTS, (total, p_value, p_value > self.input_alpha), strict=True))

    def p_value(self, score: Tensor, classes: Tensor | None = None) -> Tensor:
        """(1 + #{reference >= score}) / (n + 1): `conformal_p_value`, or with classes `class_p_value`."""
        if classes is not None:
            return class_p_value(score, classes, self.table, self.spans)[0]
        return _p_value(score, self.table, self.num_reference, self.draws)


def _correlated(head: GaussianProcessHead) -> bool:
    return head.noise_shape is not None and head.noise_shape.correlated


def _of_numbers(prediction: Prediction, correlated: bool) -> dict[str, Tensor]:
    answers = {"mean": prediction.mean, "std": prediction.std}
    return answers | ({COVARIANCE: prediction.covariance} if correlated else {})


def _table(reference: Tensor) -> Tensor:
    """Reference scores, filled up with infinity."""
    size = 2 ** math.ceil(math.log2(reference.numel() + 1)) - 1
    table = torch.cat([reference, reference.new_full((size - reference.numel(),), math.inf)])
    # A float32 model's scores fit in float32, which every runtime can compare.
    return table.float() if torch.equal(table.float().double(), table) else table


def _p_value(score: Tensor, table: Tensor, n: int, draws: int) -> Tensor:
    """`conformal_p_value` by a binary search without branches."""
    key, below = score.to(table.dtype), torch.zeros_like(score, dtype=torch.int64)
    step = (len(table) + 1) // 2
    while step:
        # "not >=" and not "<": a score that is NaN lies beyond all others.
        below = below + step * (~(table[below + (step - 1)] >= key)).long()
        step //= 2
    return (draws + n - below.clamp_max(n)).to(score.dtype) / (n + draws)


def input_alpha(model: SNGP, alpha: float | None) -> float | None:
    """The rate of false alarms of inputs as a whole: alpha, if the held-out inputs can tell; None without positions."""
    n = model.head.input_reference.numel() if model.head.calibrated else 0
    return None if not n or alpha is None else max(alpha, 1 / (n + 1))


def chosen_alpha(model: SNGP, alpha: float | None) -> float | None:
    """The rate of false alarms that a model is exported with; None where it has no p-values."""
    head = model.head
    if not head.calibrated:
        if alpha is None:
            return None
        raise ValueError(
            f"alpha={alpha:g} needs p-values, and this model was never calibrated, or its posterior has changed since. "
            "Call afield.calibrate(model, held_out_loader) first, or leave alpha out to export without p-values."
        )
    draws = int(head.reference_draws)
    smallest_p_value = draws / (fewest_rows(head.reference, head.reference_spans) + draws)
    alpha = max(ALPHA, smallest_p_value) if alpha is None else alpha
    dummy = torch.ones(1)  # `accept` knows what alpha may be, and says so
    Prediction(dummy[:, None], p_value=dummy, smallest_p_value=smallest_p_value).accept(alpha)
    return alpha


def threshold(model: SNGP, alpha: float) -> float | list[float]:
    """The largest score that is accepted, for each class where p-values go by class: score <= threshold is the same as
    p_value > alpha."""
    head = model.head
    spans = head.reference_spans.tolist() or [[0, head.reference.numel()]]
    thresholds, draws = [], int(head.reference_draws)
    for first, end in spans:
        n, reference = end - first, head.reference[first:end]
        above = n - torch.searchsorted(reference, reference)
        p_value = (draws + above).float() / (n + draws)  # in float32, as `accepted` compares them
        thresholds.append(float(reference[p_value > alpha].max()))
    return thresholds if len(head.reference_spans) else thresholds[0]


def implied_p_value(model: SNGP, answers: Mapping[str, Tensor]) -> Tensor:
    """The p-values (N,) that belong to the other answers, by the names of `Graph`."""
    reference, spans = model.head.reference.cpu(), model.head.reference_spans.cpu()
    if not len(spans):
        return conformal_p_value(answers["score"], reference, int(model.head.reference_draws))[0]
    classes = predicted_class(Prediction(answers["logits"], answers["variance"], likelihood=model.head.likelihood))
    return class_p_value(answers["score"], classes, reference, spans)[0]


def expected(model: SNGP, inputs: Inputs, tensors: tuple[Tensor, ...], alpha: float | None) -> dict[str, Tensor]:
    """What the model itself answers, by the names of `Graph`."""
    device = model.head.ridge.device
    args, kwargs = inputs.call(tuple(t.to(device) for t in tensors))
    p = dataclasses.replace(model.predict(*args, **kwargs), features=None).to("cpu")
    answers = _of_numbers(p, _correlated(model.head)) if p.probs is None else {"probs": p.probs, "logits": p.logits}
    assert p.variance is not None
    answers |= {"variance": p.variance, "score": p.score()}
    if alpha is not None:
        assert p.p_value is not None
        answers |= {"p_value": p.p_value, "accepted": p.accept(alpha)}
    if p.input_p_value is not None and (of_inputs := input_alpha(model, alpha)) is not None:
        assert p.input_score is not None
        found = (p.input_score, p.input_p_value, p.accept_inputs(of_inputs))
        answers |= dict(zip(OF_INPUTS, found, strict=True))
    return answers


def _parameters(net: nn.Module, count: int) -> list[str]:
    """Names of the first positional parameters of a network's forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [p.name for p in inspect.signature(net.forward).parameters.values() if p.kind in kinds]
    return [named[i] if i < len(named) else f"input_{i}" for i in range(count)]


def _float32(value: Any) -> Any:
    return value.detach().cpu().float() if value.is_floating_point() else value.detach().cpu()
