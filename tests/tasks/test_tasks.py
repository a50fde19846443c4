"""Tasks: the contract, over the registry."""

import pytest
import torch

from afield.model.diagnose import nearest_distance
from afield.tasks import PRESETS, TASKS
from afield.tasks.task import far_points

# Tasks on real data have tests of their own.
TOYS = [name for name, recipe in TASKS.items() if recipe.load.__module__ == "afield.tasks.toy"]


@pytest.mark.parametrize("name", TOYS)
def test_task_contract(name: str):
    task = TASKS[name](0)
    assert task.name == name
    for part in (task.train, task.val, task.test):
        x, y = part.tensors
        assert len(x) == len(y) > 0
        if task.settings.likelihood == "categorical":
            assert set(y.tolist()) == set(range(task.num_outputs))
        else:
            assert y.is_floating_point()
            assert y.shape == (len(x), task.num_outputs)
    hidden = task.backbone()(task.train.tensors[0][:3])
    assert hidden.shape == (3, task.backbone().out_features)
    assert task.ood
    for part in task.ood.values():
        assert part.tensors[0].shape[1:] == task.train.tensors[0].shape[1:]


@pytest.mark.parametrize("name", TOYS)
def test_seed_decides_the_data(name: str):
    first, again, other = TASKS[name](1), TASKS[name](1), TASKS[name](2)
    for a, b in ((first.train, again.train), (first.test, again.test)):
        torch.testing.assert_close(a.tensors[0], b.tensors[0], rtol=0, atol=0)
    assert not torch.equal(first.train.tensors[0], other.train.tensors[0])


@pytest.mark.parametrize("name", TOYS)
def test_no_example_is_in_two_parts(name: str):
    task = TASKS[name](0)
    x = torch.cat([part.tensors[0] for part in (task.train, task.val, task.test)])
    assert len(x.unique(dim=0)) == len(x)


@pytest.mark.parametrize("name", ["two-moons", "two-ovals"])
def test_papers_tasks_have_500_training_points_a_class(name: str):
    assert TASKS[name](0).train.tensors[1].bincount().tolist() == [500, 500]


def test_far_points_are_far_from_every_training_point(generator: torch.Generator):
    train = torch.randn(200, 2, generator=generator) * torch.tensor([3.0, 0.5])
    far = far_points(train, 300, generator)
    deviation = (train - train.mean(0)).square().mean().sqrt()
    assert far.shape == (300, 2)
    assert float(nearest_distance(far, train).min()) > 1.5 * float(deviation)


def test_toy_regression_has_two_modes_and_nothing_between():
    task = TASKS["toy-regression"](0)
    x = task.train.tensors[0]
    assert (x < 0).sum() == (x > 0).sum() == 100
    assert float(task.ood["between"].tensors[0].abs().max()) <= 1 < float(x.abs().min())
    assert float(task.ood["ends"].tensors[0].abs().min()) >= 5 > float(x.abs().max())


def test_digits_hold_two_classes_out():
    task = TASKS["digits"](0)
    everything = sum(len(part) for part in (task.train, task.val, task.test)) + len(task.ood["held-out"])
    assert everything == 1797
    assert len(task.ood["held-out"]) == 354  # 174 eights and 180 nines
    assert task.num_outputs == 8
    torch.testing.assert_close(task.ood["inverted"].tensors[0], 1 - task.test.tensors[0])


@pytest.mark.parametrize("name", TASKS)
def test_settings_can_be_read_without_the_data(name: str):
    for preset in PRESETS:
        assert TASKS[name].settings_for(preset).epochs > 0
    assert TASKS[name].settings_for("smoke").epochs <= 2
    with pytest.raises(ValueError, match="Unknown preset 'huge': expected one of smoke, small, paper"):
        TASKS[name](0, "huge")


def test_grid_covers_the_data_and_its_surroundings():
    task = TASKS["two-moons"](0)
    points = torch.cat([task.train.tensors[0], task.ood["far"].tensors[0]])
    assert task.grid.shape == (10_000, 2)
    torch.testing.assert_close(task.grid.amin(0), points.amin(0))
    torch.testing.assert_close(task.grid.amax(0), points.amax(0))
    assert bool((task.grid[1] - task.grid[0])[0] > 0)  # row by row
    assert float((task.grid[1] - task.grid[0])[1]) == 0
