"""Tasks: the contract, over the registry."""

import pytest
import torch

from afield.diagnose import nearest_distance
from afield.tasks import TASKS
from afield.tasks.task import far_points


@pytest.mark.parametrize("name", TASKS)
def test_task_contract(name: str):
    task = TASKS[name](0)
    assert task.name == name
    for part in (task.train, task.val, task.test):
        x, y = part.tensors
        assert len(x) == len(y) > 0
        assert set(y.tolist()) == set(range(task.num_outputs))
    hidden = task.backbone()(task.train.tensors[0][:3])
    assert hidden.shape == (3, task.backbone().out_features)
    assert task.ood
    for part in task.ood.values():
        assert part.tensors[0].shape[1:] == task.train.tensors[0].shape[1:]


@pytest.mark.parametrize("name", TASKS)
def test_seed_decides_the_data(name: str):
    first, again, other = TASKS[name](1), TASKS[name](1), TASKS[name](2)
    for a, b in ((first.train, again.train), (first.test, again.test)):
        torch.testing.assert_close(a.tensors[0], b.tensors[0], rtol=0, atol=0)
    assert not torch.equal(first.train.tensors[0], other.train.tensors[0])


@pytest.mark.parametrize("name", TASKS)
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
    spread = (train - train.mean(0)).square().mean().sqrt()
    assert far.shape == (300, 2)
    assert float(nearest_distance(far, train).min()) > 1.5 * float(spread)
