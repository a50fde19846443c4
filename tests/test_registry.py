"""Registries: a dictionary that refuses taken names and helps with unknown ones."""

import pytest

from afield.gp.features import KERNELS
from afield.gp.geometry import GEOMETRIES
from afield.gp.likelihoods import LIKELIHOODS
from afield.prediction.predictive import PREDICTIVES
from afield.prediction.scores import SCORES
from afield.registry import Registry, UnknownName

REGISTRIES = {r.kind: r for r in (KERNELS, GEOMETRIES, LIKELIHOODS, PREDICTIVES, SCORES)}


@pytest.fixture
def shapes():
    return Registry("shape", triangle=3, square=4)


def test_is_a_mapping_in_order_of_registration(shapes):
    shapes["pentagon"] = 5
    assert list(shapes) == ["triangle", "square", "pentagon"]
    assert dict(shapes) == {"triangle": 3, "square": 4, "pentagon": 5}
    assert len(shapes) == 3
    assert "square" in shapes
    assert "circle" not in shapes


def test_get_has_a_default(shapes):
    assert shapes.get("square") == 4
    assert shapes.get("circle") is None
    assert shapes.get("circle", 0) == 0


def test_near_miss_is_suggested(shapes):
    with pytest.raises(
        UnknownName, match=r"^Unknown shape 'sqare'\. Did you mean 'square'\? Known: triangle, square\.$"
    ):
        shapes["sqare"]


def test_two_near_misses_are_suggested():
    with pytest.raises(UnknownName, match=r"Did you mean 'matern[35]2' or 'matern[35]2'"):
        Registry("kernel", matern32=0, rbf=1, matern52=2)["matern"]


def test_far_miss_lists_the_known_names_only(shapes):
    with pytest.raises(UnknownName, match=r"^Unknown shape 'xyz'\. Known: triangle, square\.$"):
        shapes["xyz"]


@pytest.mark.parametrize("wrong", [None, 3, ("a", "b")])
def test_a_name_of_another_type_is_unknown(shapes, wrong):
    with pytest.raises(UnknownName, match=r"Unknown shape"):
        shapes[wrong]


@pytest.mark.parametrize("caught", [KeyError, ValueError])
def test_unknown_name_is_a_key_error_and_a_value_error(shapes, caught):
    with pytest.raises(caught):
        shapes["circle"]


def test_a_taken_name_is_refused_and_keeps_its_value(shapes):
    with pytest.raises(ValueError, match="A shape named 'square' is registered already; delete it first"):
        shapes["square"] = 5
    assert shapes["square"] == 4


def test_delete_then_replace(shapes):
    del shapes["square"]
    assert "square" not in shapes
    shapes["square"] = 5
    assert shapes["square"] == 5


def test_deleting_an_unknown_name_is_an_error(shapes):
    with pytest.raises(KeyError, match="circle"):
        del shapes["circle"]


def test_an_entry_may_be_called_kind():
    assert Registry("thing", kind=1)["kind"] == 1


def test_repr_names_the_entries(shapes):
    assert repr(shapes) == "Registry('shape': triangle, square)"


def test_changing_the_source_leaves_the_registry_alone():
    source = {"a": 1}
    registry = Registry("letter", **source)
    source["b"] = 2
    assert list(registry) == ["a"]


@pytest.mark.parametrize("registry", REGISTRIES.values(), ids=REGISTRIES)
def test_every_registry_answers_a_truncated_name_with_the_full_one(registry):
    for name in registry:
        with pytest.raises(UnknownName, match=f"Unknown {registry.kind} .*Did you mean .*'{name}'"):
            registry[name[:-1]]


def test_check_returns_a_known_name_and_refuses_others(shapes):
    assert shapes.check("square") == "square"
    with pytest.raises(UnknownName, match="Did you mean 'square'"):
        shapes.check("sqare")
