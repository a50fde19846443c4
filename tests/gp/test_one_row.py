"""One row in NumPy: the same as the definition, for every kind of head, and never of another state than the head's."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from afield.gp.features import KERNELS
from afield.gp.geometry import GEOMETRIES
from afield.gp.head import GaussianProcessHead
from afield.gp.likelihoods import LIKELIHOODS
from afield.gp.one_row import OneRow, _product
from afield.prediction.prediction import Prediction

FIELDS = ("logits", "variance", "probs", "joined", "p_value", "num_reference")


def normal(*shape: int, number: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def make(
    likelihood: str = "categorical",
    *,
    score: str = "joined",
    per_class: bool = False,
    outputs: int = 3,
    **options: object,
) -> GaussianProcessHead:
    """A head with output weights, examples, a score and a reference."""
    torch.manual_seed(0)
    outputs = 1 if likelihood == "bernoulli" else outputs
    head = GaussianProcessHead(5, outputs, likelihood=likelihood, num_random_features=48, **options).double().eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
        of_classes = LIKELIHOODS[likelihood].of_classes
        head.observe(normal(60, 5, number=1) + 1, classes=torch.arange(60) % max(outputs, 2) if of_classes else None)
        if of_classes:
            h = normal(300, 5, number=2) + 1
            head.joined_score.fit(head.sources(*head.posterior(h), h))
            head.set_score(score)
        reference = head.predict(normal(700, 5, number=3) + 1)
        head.set_reference(reference.score(head.score), reference.logits.argmax(-1) if per_class else None)
    return head


@torch.no_grad()
def defined(head: GaussianProcessHead, h: Tensor) -> Prediction:
    """A batch has the definition."""
    return head.predict(h.expand(2, -1))[0]


@torch.no_grad()
def check(head: GaussianProcessHead, h: Tensor, **tolerance: float) -> None:
    found, right = head.predict(h), defined(head, h)
    for name in FIELDS:
        a, b = getattr(found, name), getattr(right, name)
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}", **tolerance)
        else:
            assert a == b, name
    assert found.features is h
    assert (found.likelihood, found.default_score, found.noise) == (right.likelihood, right.default_score, right.noise)
    assert found.smallest_p_value == right.smallest_p_value


def is_prepared(head: GaussianProcessHead) -> bool:
    return head.__dict__["_prepared"]._answer is not None


HEADS = {
    **{
        f"{geometry} {kernel}": {"geometry": geometry, "kernel": kernel}
        for geometry in GEOMETRIES
        for kernel in KERNELS
    },
    **{likelihood: {"likelihood": likelihood} for likelihood in LIKELIHOODS},
    "own features": {"variance_features": "own"},
    "own features, two classes": {"variance_features": "own", "likelihood": "bernoulli"},
    "projection": {"geometry": "standardized", "projection": 3},
    "projected direction": {"geometry": "direction_length", "projection": 3},
    "growing": {"grow": True},
    "constant": {"constant": True},
    "kept mean": {"mean": nn.Linear(5, 3).double(), "geometry": "direction_length"},
    "p-values by class": {"per_class": True},
    "another score": {"score": "variance"},
    "moving average": {"momentum": 0.9},
}


@pytest.mark.parametrize("name", HEADS)
def test_one_row_has_the_prediction_of_a_batch(name: str) -> None:
    head = make(**HEADS[name])
    for h in (normal(4, 5, number=9) * torch.tensor([[1.0], [0.1], [10.0], [300.0]])).double().split(1):
        check(head, h, rtol=1e-8, atol=1e-10)
    assert is_prepared(head)


@pytest.mark.parametrize("variance_features", ["own", "same"])
def test_in_single_precision_the_difference_is_rounding(variance_features: str) -> None:
    head = make(variance_features=variance_features).float()
    for h in (normal(20, 5, number=9) + 1).float().split(1):
        check(head, h, rtol=2e-4, atol=2e-5)
    assert is_prepared(head)


@pytest.mark.parametrize(
    "options", [{"covariance": "per_class"}, {"covariance": "per_class", "rank": 8, "curvature": "likelihood"}]
)
def test_other_precisions_have_the_definition(options: dict[str, object]) -> None:
    head = make(**options)
    check(head, normal(1, 5))
    assert not is_prepared(head)


@pytest.mark.parametrize("predictive", ["mean_field", "monte_carlo"])
def test_other_predictives_have_their_own_probabilities(predictive: str) -> None:
    head, h = make(), normal(1, 5)
    with torch.no_grad():
        found = head.predict(h, predictive=predictive, num_samples=7, generator=torch.Generator().manual_seed(0))
    assert (found.members is None) == (predictive == "mean_field")
    if found.members is not None:
        assert found.members.shape == (7, 1, 3)


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_far_near_and_broken_rows_have_the_definition(geometry: str, dtype: torch.dtype) -> None:
    head = make(geometry=geometry, grow=True).to(dtype)
    for factor in (0.0, 1e-37, 1e-20, 1e20, 1e37, float("inf"), float("nan")):
        h = normal(1, 5).to(dtype) * factor
        assert head._one_row()._answer(h) is None
        if GEOMETRIES[geometry].bounded:  # else a phase of 1e20 is known to no digit
            check(head, h, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [{"grow": True}, {"kernel": "arccos"}])
def test_numbers_that_overflow_have_the_definition(options: dict[str, object]) -> None:
    head = make(ridge=1e-12, **options).float()
    for factor in (1e6, 1e9, 1e11):
        h = normal(1, 5).float() * factor
        with torch.no_grad():
            found, right = head.predict(h), defined(head, h)
        assert bool(found.variance > 1e12)
        assert bool(right.variance > 1e12)
        torch.testing.assert_close(found.probs, right.probs, rtol=0, atol=0.1)


CHANGES = {
    "observe": lambda head: head.observe(normal(30, 5, number=5)),
    "ridge": lambda head: head.set_scalars(ridge=3.0),
    "amplitude": lambda head: head.set_scalars(amplitude=3.0),
    "logit scale": lambda head: head.set_scalars(logit_scale=3.0),
    "scale in place": lambda head: head.logit_scale.fill_(3.0),
    "scale behind its back": lambda head: head.logit_scale.data.fill_(3.0),
    "weight in place": lambda head: head.weight.mul_(2),
    "weight behind its back": lambda head: head.weight.data.mul_(2),
    "other weight": lambda head: setattr(head.weight, "data", 2 * head.weight.data),
    "another parameter": lambda head: setattr(head, "weight", nn.Parameter(2 * head.weight)),
    "length scale": lambda head: head.variance_features.length_scale.mul_(2),
    "other length scale": lambda head: setattr(head.random_features, "length_scale", torch.tensor(9.0).double()),
    "moments": lambda head: head.variance_features.shift.add_(1),
    "factor": lambda head: head.precision.root.mul_(2),
    "class distance": lambda head: head.class_distance.offsets.add_(1),
    "score": lambda head: head.joined_score.slopes.mul_(2),
    "another score": lambda head: head.set_score("variance"),
    "reference": lambda head: head.set_reference(normal(99)),
    "reference in place": lambda head: head.reference.sub_(1),
    "no reference": lambda head: head.forget_reference(),
    "state": lambda head: head.load_state_dict(make(variance_features="own", ridge=7.0).state_dict()),
    "precision": lambda head: setattr(head, "precision", make(variance_features="own", ridge=7.0).precision),
    "dropped class": lambda head: (setattr(head, "dropped", (1,)), setattr(head, "out_features", 2)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_the_head_is_noticed(change: str) -> None:
    head, h = make(variance_features="own"), normal(1, 5) + 1
    with torch.no_grad():
        before = head.predict(h)
        CHANGES[change](head)
        after = head.predict(h)
    check(head, h, rtol=1e-8, atol=1e-10)
    values = [[None if (t := getattr(p, name)) is None else t for name in FIELDS[:5]] for p in (before, after)]
    same = [a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(*values, strict=True)]
    assert not all(same)


def test_nothing_is_prepared_twice_for_one_state() -> None:
    head, h = make(), normal(1, 5)
    with torch.no_grad():
        head.predict(h)
        first: OneRow = head.__dict__["_prepared"]
        head.predict(h + 1)
    assert head.__dict__["_prepared"] is first


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head)), copy.copy])
def test_copies_prepare_for_themselves(duplicate) -> None:
    head, h = make(), normal(1, 5)
    with torch.no_grad():
        head.predict(h)
        twin = duplicate(head)
        if duplicate is copy.copy:  # which shares the tensors: a draft of a revision
            twin._buffers = dict(twin._buffers)
        twin.set_scalars(logit_scale=5.0)
        torch.testing.assert_close(twin.predict(h).logits, 5 * head.predict(h).logits)
        check(head, h)
        check(twin, h)


@pytest.mark.parametrize("shape", [(48, 5), (1024, 65), (128, 64), (7, 5), (97, 130), (64, 640), (3, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_those_of_the_matrix_whatever_its_size(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix, x = normal(*shape).to(dtype), normal(shape[1], number=1).to(dtype)
    found = torch.from_numpy(_product(matrix.numpy())(x.numpy()).reshape(-1))
    torch.testing.assert_close(found, matrix @ x, rtol=1e-5, atol=1e-4)  # of sums of 640 terms


def test_with_gradients_they_flow() -> None:
    head, h = make(), normal(1, 5).requires_grad_()
    head.predict(h).logits.sum().backward()
    assert bool((h.grad != 0).any())
    with torch.no_grad():
        assert not head.predict(h).logits.requires_grad


def test_an_answer_is_not_written_into_by_the_next() -> None:
    head = make()
    with torch.no_grad():
        first = head.predict(normal(1, 5))
        kept = {name: value.copy() for name, value in first.numpy().items()}
        head.predict(normal(1, 5, number=4))
    for name, value in first.numpy().items():
        assert (value == kept[name]).all(), name
