"""Positions as rows: which are drawn, what is left out, and networks of all kinds that have them."""

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import afield
from afield.model.posterior import downdate, update
from afield.outputs import positions


def seed(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def pictures(count: int = 40, number: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 3, 5, 6, generator=seed(number), dtype=torch.float64)
    return x, x.argmax(1)


def net(outputs: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, outputs, 1)).double()


def fitted(**options: Any) -> afield.SNGP:
    model = afield.attach(net(), num_random_features=16, generator=seed())
    afield.fit_posterior(model, [pictures()], **options)
    return model


@pytest.fixture(scope="module")
def calibrated() -> afield.SNGP:
    x, y = pictures()
    trained = net()
    optimizer = torch.optim.Adam(trained.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(trained(x), y).backward()
        optimizer.step()
    model = afield.attach(trained, num_random_features=16, generator=seed())
    afield.fit_posterior(model, [(x, y)])
    afield.calibrate(model, [pictures(60, 1)], num_positions=8)
    return model


# Drawing --------------------------------------------------------------------------------------------------------


def test_positions_are_drawn_by_what_an_input_is_and_nothing_else() -> None:
    """Neither order nor batches change the posterior; nor does what else is in the loader."""
    x, y = pictures()
    expected = fitted(num_positions=7).head.precision.data
    order = torch.randperm(40, generator=seed(1))
    for size in (40, 7):
        model = afield.attach(net(), num_random_features=16, generator=seed())
        loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=size)
        assert afield.fit_posterior(model, loader, num_positions=7) == 7 * 40
        torch.testing.assert_close(model.head.precision.data, expected, rtol=1e-9, atol=1e-9)


def test_what_was_added_is_removed_again() -> None:
    model, (x, y) = fitted(num_positions=7), pictures(10, number=3)
    before = model.head.precision.data.clone()
    assert update(model, [(x, y)], num_positions=7) == 350
    assert downdate(model, [(x.flip(0)[:4], y.flip(0)[:4]), (x[:6], y[:6])], num_positions=7) == 280
    torch.testing.assert_close(model.head.precision.data, before, rtol=1e-9, atol=1e-9)


def test_an_image_that_is_no_number_somewhere_is_refused_everywhere(calibrated: afield.SNGP) -> None:
    x = pictures(2, 5)[0]
    x[1, 0, 2, 2] = torch.nan
    p = calibrated.predict(x)
    assert p.p_value[1].max() == p.smallest_p_value < p.p_value[0].max()
    assert float(p.input_p_value[1]) == 1 / (p.num_inputs + 1)
    assert not p.accept_inputs(0.05)[1]


def test_every_position_counts_unless_a_number_is_given() -> None:
    assert fitted(num_positions=None).head.num_observed == 40 * 30 == fitted().head.num_observed
    assert fitted(num_positions=11).head.num_observed == 40 * 11
    assert positions.OBSERVED == 256


def test_ignored_positions_are_left_out() -> None:
    (x, y), kept = pictures(), torch.rand(40, 5, 6, generator=seed(5)) < 0.5
    kept[3] = False  # an input without any label
    models = [afield.attach(net(), num_random_features=16, generator=seed()) for _ in range(2)]
    assert afield.fit_posterior(models[0], [(x, y.where(kept, -100))], num_positions=None) == int(kept.sum())
    afield.fit_posterior(models[1], [(x, y.where(kept, 255))], num_positions=None, ignore_index=255)
    assert torch.equal(*(model.head.precision.data for model in models))


@pytest.mark.parametrize("count", [1, 3, 5, 12])
def test_groups_have_one_size_whatever_there_is_to_draw_from(count: int) -> None:
    valid = torch.zeros(3, 5, dtype=torch.bool)
    valid[0, :2], valid[2] = True, True  # the second input has none
    index, owner = positions.draw(valid, [1, 2, 3], count, exactly=True)
    assert owner.tolist() == [0] * count + [2] * count
    assert bool(valid.flatten()[index].all())
    for group, size in ((index[:count], 2), (index[count:], 5)):
        times = group.bincount(minlength=15)
        assert int(times.max()) == -(-count // size)  # by turns


def test_calibration_reads_images_as_a_whole(calibrated: afield.SNGP) -> None:
    """The reference of inputs is of all their positions, those of the inputs that fix no score."""
    x, _ = pictures(60, 1)
    order = torch.randperm(60, generator=seed())
    scores = calibrated.predict(x[order[40:]]).input_score  # the score depends on the parameters
    assert scores is not None
    torch.testing.assert_close(calibrated.head.input_reference, scores.double().sort().values)
    assert calibrated.head.reference.numel() == 20 * 8
    assert calibrated.predict(x).num_inputs == 20


def test_the_default_score_of_pixels_is_of_their_regions_and_another_can_be_chosen(calibrated: afield.SNGP) -> None:
    x, y = pictures()
    assert calibrated.predict(x).default_score == "region"
    model = copy.deepcopy(calibrated)
    afield.calibrate(model, [(x, y)], score="joined")
    assert model.predict(x).default_score == "joined"
    assert torch.equal(model.predict(x).score(), model.predict(x).joined)


def test_the_joined_score_of_positions_is_made_where_it_is_wanted(calibrated: afield.SNGP) -> None:
    x, y = pictures()
    usual, asked = calibrated.predict(x), calibrated.predict([(x, y)], joined=True)
    assert usual.joined is None
    with pytest.raises(ValueError, match=r"predict\(\.\.\., joined=True\)"):
        usual.score("joined")
    model = copy.deepcopy(calibrated)
    model.head.set_score("joined")
    assert torch.equal(asked.score("joined"), model.predict(x).joined)
    for name in ("logits", "variance", "probs", "features", "p_value", "input_score", "input_p_value"):
        assert torch.equal(getattr(usual, name), getattr(asked, name)), name
    assert torch.equal(usual.features, calibrated.hidden(x).movedim(-1, 1))


def test_calibration_notices_inputs_that_change(calibrated: afield.SNGP) -> None:
    class Augmented(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            x, y = super().__getitem__(index)
            return x + 0.01 * torch.randn_like(x), y

    before = calibrated.head.input_reference
    with pytest.raises(ValueError, match=r"reads the held-out data twice .* without random changes of the inputs"):
        afield.calibrate(calibrated, DataLoader(Augmented(*pictures(60, 1)), batch_size=20), num_positions=8)
    assert calibrated.head.input_reference is before


def test_order_of_the_held_out_data_may_change(calibrated: afield.SNGP) -> None:
    before = calibrated.head.input_reference
    loader = DataLoader(TensorDataset(*pictures(60, 1)), batch_size=20, shuffle=True, generator=seed(4))
    afield.calibrate(calibrated, loader, num_positions=8)
    assert calibrated.head.input_reference.shape == before.shape
    with pytest.raises(ValueError, match="positions of an input have many: leave it out"):
        afield.calibrate(calibrated, loader, num_positions=8, per_class=True)
    afield.calibrate(calibrated, [pictures(60, 1)], num_positions=8)


def test_a_label_that_is_no_class_is_refused() -> None:
    x, y = pictures()
    for wrong in (255, -1):
        with pytest.raises(ValueError, match=rf"model has 3 classes, 0 to 2.+ignore_index={wrong}\."):
            afield.fit_posterior(fitted(), [(x, y.masked_fill(y == 1, wrong))])
    with pytest.raises(ValueError, match="all positions are ignored"):
        afield.fit_posterior(fitted(), [(x, torch.full_like(y, -100))])


def test_targets_of_another_shape_are_refused() -> None:
    x, y = pictures()
    for target in (y[:, 0], y.flatten(1), y[:, :, :5]):
        with pytest.raises(ValueError, match=rf"targets of shape {re.escape('(40, 5, 6)')} for classes or"):
            afield.fit_posterior(fitted(), [(x, target)])


def test_gradients_of_score_and_variance(calibrated: afield.SNGP) -> None:
    """Against finite differences; predictions are the same with and without."""
    x = pictures(2, 7)[0].requires_grad_()
    p = calibrated.predict(x, gradients=True)
    plain = calibrated.predict(x)
    assert not plain.logits.requires_grad
    for name in ("variance", "score"):
        of = (lambda q: q.variance) if name == "variance" else (lambda q: q.score())
        torch.testing.assert_close(of(p).detach(), of(plain))
        (gradient,) = torch.autograd.grad(of(p).sum(), x, retain_graph=True)
        step = 1e-6 * torch.randn(x.shape, generator=seed(8), dtype=x.dtype)
        ends = [of(calibrated.predict((x + sign * step).detach())).sum() for sign in (1, -1)]
        torch.testing.assert_close((gradient * step).sum(), (ends[0] - ends[1]) / 2, rtol=1e-4, atol=1e-9)
    with pytest.raises(ValueError, match=r"gradients=True expects inputs .* that require them"):
        calibrated.predict(x.detach(), gradients=True)


def test_gradients_of_a_sure_answer() -> None:
    """A probability of zero has an infinite slope of its logarithm."""
    model = afield.attach(nn.Linear(3, 3), num_random_features=16)
    x = torch.randn(40, 3, generator=seed())
    afield.fit_posterior(model, [(x, x.argmax(1))])
    model.head.set_scalars(logit_scale=1000.0)
    one = x[:2].clone().requires_grad_()
    p = model.predict(one, gradients=True)
    assert p.probs is not None
    assert float(p.probs.detach().min()) == 0
    p.score("entropy").sum().backward()
    assert one.grad is not None
    assert bool(one.grad.isfinite().all())


def test_gradients_of_one_row() -> None:
    """Which otherwise goes through NumPy."""
    model = afield.attach(nn.Linear(3, 3), num_random_features=16)
    x = torch.randn(40, 3, generator=seed())
    afield.fit_posterior(model, [(x, x.argmax(1))])
    one = x[:1].clone().requires_grad_()
    p = model.predict(one, gradients=True)
    assert p.variance is not None
    p.variance.sum().backward()
    assert one.grad is not None
    assert float(one.grad.abs().sum()) > 0


# Containers -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Returned:
    loss: Tensor | None
    logits: Tensor


class Wrapped(nn.Module):
    """Tied weights, and logits in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Returned:
        return Returned(None, self.out(self.embed(ids).tanh()))


CONTAINERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": lambda inner: torch.compile(inner),  # type: ignore[dict-item]
    "compiled inside": lambda inner: nn.Sequential(torch.compile(inner[0]), *inner[1:]),
    "data parallel": nn.DataParallel,
    "both": lambda inner: nn.DataParallel(torch.compile(inner)),  # type: ignore[arg-type]
}


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
@pytest.mark.parametrize("container", CONTAINERS)
def test_networks_are_taken_out_of_their_containers(container: str) -> None:
    given = CONTAINERS[container](net())
    model = afield.attach(given)
    assert [name for name, _ in model.net.named_modules()][1:4] == ["0", "1", "2"]
    assert model.output == "2"
    x, y = pictures()
    torch.testing.assert_close(model(x), net()(x))
    afield.fit_posterior(model, [(x, y)])
    assert type(given).__name__ in ("OptimizedModule", "Sequential", "DataParallel")  # as it was


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_network_is_refused() -> None:
    with pytest.raises(ValueError, match="convert the network that it was made of"):
        afield.attach(torch.jit.trace(net(), pictures(2)[0]))


def test_a_size_that_is_not_known_yet_is_told() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    for convert in (afield.sngp, afield.attach):
        with pytest.raises(ValueError, match=r"\(0\.weight, 0\.bias\): run one batch through it first"):
            convert(lazy)
    lazy(torch.randn(2, 3))
    assert afield.sngp(lazy).head.in_features == 4


def test_tied_weights_and_dataclasses_keep_working() -> None:
    torch.manual_seed(0)
    wrapped, ids = Wrapped(), torch.randint(5, (40, 7), generator=seed())
    model = afield.attach(wrapped, num_random_features=16)
    assert isinstance(model.head.mean, nn.Linear)
    assert model.head.mean.weight is model.net.embed.weight
    torch.testing.assert_close(model(ids).logits, wrapped(ids).logits)
    afield.fit_posterior(model, [(ids, ids)])
    assert model.predict(ids).logits.shape == (40, 5, 7)


class Tagger(nn.Module):
    """Called as Hugging Face's token classifiers are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.classifier = nn.Embedding(9, 6), nn.Linear(6, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Returned:
        return Returned(None, self.classifier(self.embed(input_ids).tanh()))


def test_padding_is_neither_observed_nor_scored() -> None:
    torch.manual_seed(0)
    tagger, ids = Tagger(), torch.randint(1, 9, (60, 8), generator=seed())
    length = torch.randint(2, 9, (60,), generator=seed(1))
    mask = (torch.arange(8) < length[:, None]).long()
    labels = torch.where(mask.bool(), ids % 4, -100)
    labels[:, 0] = -100  # as of special tokens
    batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}
    model = afield.attach(tagger, num_random_features=16)
    assert afield.fit_posterior(model, [batch]) == int((labels != -100).sum())
    unlabelled = {"input_ids": ids * mask, "attention_mask": mask}
    assert afield.fit_posterior(model, [unlabelled]) == int(mask.sum())
    with pytest.warns(afield.errors.NoBetterThanGuessing):
        afield.calibrate(model, [batch], num_positions=4)
    p = model.predict({"input_ids": ids * mask, "attention_mask": mask})
    assert p.mask is not None
    assert torch.equal(p.mask, mask.bool())
    longer = {k: F.pad(v, (0, 5)) for k, v in unlabelled.items()}
    torch.testing.assert_close(model.predict(longer).input_score, p.input_score)


# Scores that listen to their neighbours ---------------------------------------------------------------------------


def test_p_values_of_pixels_rest_on_regions_and_keep_the_drawn_positions_of_these_maps(
    calibrated: afield.SNGP,
) -> None:
    x, y = pictures(60, 1)
    assert calibrated.head.score == "region"
    order = torch.randperm(60, generator=seed())[40:]
    p, keys = calibrated.predict(x[order]), positions.keys_of((x[order],), {}, 20, 0)
    index, _ = positions.draw(y[order] >= 0, keys, 8, exactly=True)
    torch.testing.assert_close(calibrated.head.reference, p.score("region").flatten()[index].sort().values)
    assert torch.equal(p.score(), p.score("region"))
    assert torch.equal(p.rows().score(), p.score().flatten())  # rows know no neighbours, but their score
    assert p.rows().p_value.shape == (600,)


@pytest.mark.parametrize("score", ["entropy", "max_probability", "variance", "joined"])
def test_another_score_is_chosen_by_its_name(score: str) -> None:
    model = fitted()
    afield.calibrate(model, [pictures(60, 1)], num_positions=8, score=score, logit_scale=1.0, amplitude=1.0)
    p = model.predict(pictures(3, 2)[0])
    assert p.default_score == model.head.score == score
    assert torch.equal(p.score(), p.score(score))
    assert p.fitted is None


def test_what_stands_in_a_row_may_be_tokens_and_is_taken_by_itself() -> None:
    x, y = (t.flatten(2) if t.dim() == 4 else t.flatten(1) for t in pictures(60, 1))
    plain = nn.Sequential(nn.Conv1d(3, 4, 1), nn.Tanh(), nn.Conv1d(4, 3, 1)).double()
    model = afield.attach(plain, num_random_features=16)
    afield.fit_posterior(model, [(x, y)])
    afield.calibrate(model, [(x, y)], num_positions=8, logit_scale=1.0, amplitude=1.0)
    assert model.head.score == "entropy"
    afield.calibrate(model, [(x, y)], num_positions=8, logit_scale=1.0, amplitude=1.0, score="region")
    assert model.predict(x[:3]).p_value.shape == (3, 30)
