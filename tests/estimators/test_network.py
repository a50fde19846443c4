"""The network of a table: members side by side, columns."""

import pytest
import torch

from afield.estimators.network import Members, member_logits, network


@pytest.mark.parametrize("bound", [None, 0.95])
@pytest.mark.parametrize("members", [1, 3])
def test_members_at_once_are_members_one_by_one(members: int, bound: float | None) -> None:
    """Outputs and gradients; the mean of the members' outputs is that of the head."""
    torch.manual_seed(0)
    model = network(
        [0] * 5, 2, members=members, depth=2, width=8, dropout=0.0, bound=bound, num_random_features=24 * members,
        length_scale=1.5, likelihood="categorical",
    )  # fmt: skip
    hidden = model.net.get_submodule("1")
    assert isinstance(hidden, Members)
    assert hidden.alike == (bound is None)
    x = torch.randn(7, 5, dtype=torch.float64)
    logits = member_logits(model.head, hidden.each(x))
    assert logits.shape == (members, 7, 2)
    torch.testing.assert_close(logits.mean(0), model.head(hidden(x)))
    parameters = list(model.net.parameters())
    slopes = (torch.autograd.grad(f.square().sum(), parameters) for f in (logits.mean(0), model.head(hidden(x))))
    for at_once, one_by_one in zip(*slopes, strict=True):
        torch.testing.assert_close(at_once, one_by_one)


def test_dropout_of_members_at_once() -> None:
    """Each member has masks of its own, those that it would have had alone; in training only."""
    hidden = Members(3, 2, depth=2, width=50, dropout=0.5).double()
    hidden.members[1].load_state_dict(hidden.members[0].state_dict())
    x = torch.randn(4, 3, dtype=torch.float64)
    first, second = hidden.eval().each(x)
    assert torch.equal(first, second)
    hidden.train()
    torch.manual_seed(0)
    at_once = hidden.each(x)
    assert not torch.equal(*at_once)
    torch.manual_seed(0)
    torch.testing.assert_close(at_once, torch.stack([member(x) for member in hidden.members]))
