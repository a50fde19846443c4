"""Lightning: the callback fits each example once, on one device and on two, and calibrates."""

import copy
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning", reason='needs pip install "afield[lightning]"')

import lightning.pytorch as pl

import afield
from afield.integrations.lightning import FitPosterior, find_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*Consider tuning `num_workers`"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's own
]
OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


class Small(pl.LightningModule):
    """Two inputs, three classes; batch normalisation and dropout, so that training mode would show."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))
        self.model = afield.sngp(net, num_random_features=32, generator=generator)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("loss", F.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def blobs(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    x = torch.stack([(2.0 * y).cos(), (2.0 * y).sin()], 1) + 0.2 * torch.randn(count, 2, generator=generator)
    return TensorDataset(x, y)


def loaders(train: int = 75, held_out: int = 60) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """The training loader shuffles and drops, as training loaders do."""
    return (
        DataLoader(blobs(train), batch_size=16, shuffle=True, drop_last=True),
        DataLoader(blobs(held_out, seed=1), batch_size=16),
    )


def trained(*callbacks: pl.Callback, module: pl.LightningModule | None = None, **options: Any) -> pl.LightningModule:
    module = module or Small()
    pl.Trainer(**OPTIONS | {"max_epochs": 2, "callbacks": list(callbacks)} | options).fit(module, *loaders())
    return module


def by_hand(model: afield.SNGP, amplitude: float | None = None) -> tuple[afield.SNGP, Any]:
    """The same weights, fitted and calibrated without Lightning."""
    model = copy.deepcopy(model)
    afield.fit_posterior(model, [list(blobs(75).tensors)])
    return model, afield.calibrate(model, [list(blobs(60, seed=1).tensors)], amplitude=amplitude)


def same(one: afield.SNGP, two: afield.SNGP, tolerance: float = 1e-5) -> None:
    x = blobs(20, seed=2).tensors[0]
    p, q = one.predict(x), two.predict(x)
    for name in ("probs", "variance", "p_value"):
        torch.testing.assert_close(getattr(p, name), getattr(q, name), rtol=tolerance, atol=tolerance)


def test_at_the_end_of_training_every_example_counts_once():
    callback = FitPosterior(amplitude=2.0)
    model = find_model(trained(callback))
    assert model.head.num_observed == 75
    expected, calibration = by_hand(model, amplitude=2.0)
    same(expected, model)
    assert callback.calibration is not None
    assert callback.calibration.num_reference == calibration.num_reference
    assert callback.calibration.amplitude == pytest.approx(2.0)


def test_training_itself_is_untouched():
    """Same weights, to the bit, with and without the callback, also when it runs after every epoch."""
    states = []
    for callbacks in ([], [FitPosterior()], [FitPosterior(every_n_epochs=1)]):
        torch.manual_seed(3)
        states.append(dict(trained(*callbacks).named_parameters()))
    for other in states[1:]:
        assert all(torch.equal(p, states[0][name]) for name, p in other.items())


class Watch(pl.Callback):
    """How many examples the posterior has at the end of each epoch, as a checkpoint would see it."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.calibrated: list[bool] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen.append(find_model(pl_module).head.num_observed)
        self.calibrated.append(find_model(pl_module).head.calibrated)


def test_every_n_epochs():
    watch = Watch()
    module = trained(FitPosterior(every_n_epochs=2), watch, max_epochs=5)
    assert watch.seen == [0, 75, 75, 75, 75]
    assert watch.calibrated == [False, True, True, True, True]
    same(by_hand(module.model)[0], module.model)  # of the weights after epoch 5, not of epoch 4
    watch = Watch()
    trained(FitPosterior(), watch)
    assert watch.seen == [0, 0]
    with pytest.raises(ValueError, match=r"every_n_epochs must be at least 1, or None \(only at the end\), got 0"):
        FitPosterior(every_n_epochs=0)


def test_a_second_fit_starts_without_the_old_posterior():
    module, watch = trained(FitPosterior()), Watch()
    assert module.model.head.num_observed == 75
    trained(FitPosterior(), watch, module=module)
    assert watch.seen == [0, 0]
    same(by_hand(module.model)[0], module.model)


def test_a_checkpoint_carries_the_posterior(tmp_path: Path):
    checkpoint = pl.callbacks.ModelCheckpoint(tmp_path, filename="last")
    module = trained(FitPosterior(every_n_epochs=1), checkpoint, enable_checkpointing=True)
    again = Small.load_from_checkpoint(tmp_path / "last.ckpt")
    assert find_model(again).head.calibrated
    same(module.model, find_model(again), 1e-6)


def test_loaders_of_ones_own():
    callback = FitPosterior(
        train=DataLoader(blobs(30), batch_size=7), held_out=DataLoader(blobs(24, seed=3), batch_size=7)
    )
    model = find_model(trained(callback))
    assert model.head.num_observed == 30
    assert callback.calibration is not None
    assert callback.calibration.num_reference == 12


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_without_validation_nothing_is_calibrated():
    callback, module = FitPosterior(), Small()
    pl.Trainer(**OPTIONS, max_epochs=1, callbacks=[callback]).fit(module, loaders()[0])
    assert module.model.head.num_observed == 75
    assert callback.calibration is None
    with pytest.raises(ValueError, match=r"Call afield\.calibrate"):
        module.model.predict(torch.zeros(1, 2)).accept(0.1)
    trained(callback, check_val_every_n_epoch=5, num_sanity_val_steps=0)
    assert callback.calibration is None
    trained(callback, check_val_every_n_epoch=5, num_sanity_val_steps=1)
    assert callback.calibration is not None


def test_a_fast_run_stays_fast():
    module, callback = Small(), FitPosterior()
    trained(callback, module=module, fast_dev_run=2)
    assert module.model.head.num_observed == 32
    assert callback.calibration is None


def test_what_is_not_clear_is_asked():
    with pytest.raises(ValueError, match=r"expects one model made by afield\.sngp .* inside Linear, found 0"):
        find_model(nn.Linear(2, 2))
    module = Small()
    twice = nn.ModuleList([module.model, copy.deepcopy(module.model)])
    with pytest.raises(ValueError, match="found 2"):
        find_model(twice)
    train, held_out = loaders()
    for arguments, name in (
        ((train, [held_out, held_out]), "held_out"),
        (({"a": train, "b": train}, held_out), "train"),
    ):
        trainer = pl.Trainer(**OPTIONS, max_epochs=1, callbacks=[FitPosterior()])
        with pytest.raises(
            ValueError, match=rf"has 2 loaders, FitPosterior expects one.*FitPosterior\({name}=loader\)"
        ):
            trainer.fit(Several(), *arguments)


class Several(Small):
    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step(batch["a"] if isinstance(batch, dict) else batch, index)

    def validation_step(self, batch: list[Tensor], index: int, dataloader_idx: int = 0) -> None:
        return None


def test_without_lightning_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "afield.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(ImportError, match=r'pip install "afield\[lightning\]"'):
        importlib.import_module("afield.integrations.lightning")


# Two processes ---------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, warnings
from pathlib import Path
import torch
torch.set_num_threads(1)
import lightning.pytorch as pl
from safetensors.torch import save_file
from tests.integrations.test_lightning import OPTIONS, Small, Watch, loaders
from afield.integrations.lightning import FitPosterior

warnings.filterwarnings("error", message="The posterior saw")
train, held_out = loaders()
module, callback, watch = Small(), FitPosterior(every_n_epochs=1, held_out=held_out), Watch()
trainer = pl.Trainer(**OPTIONS | {"devices": 2}, strategy="ddp", max_epochs=2, callbacks=[callback, watch])
trainer.fit(module, train)
sampler = trainer.train_dataloader.sampler
assert type(sampler).__name__ == "DistributedSampler" and len(sampler) == 38, sampler  # 76 of 75
assert watch.seen == [75, 75], watch.seen
state = {name: tensor.contiguous().clone() for name, tensor in module.model.state_dict().items()}
save_file(state, Path(sys.argv[1]) / f"rank{trainer.global_rank}")
"""


@pytest.mark.slow
def test_two_processes_end_with_the_posterior_of_one(tmp_path: Path):
    """The Trainer's sampler repeats an example to make 76 of 75; the posterior counts it once, on both ranks alike.

    Nor do the ranks' own batch statistics come in: DDP shares them before each step and not after the last.
    """
    script = tmp_path / "two.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    states = [load_file(tmp_path / f"rank{rank}") for rank in range(2)]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)
    model = Small().model
    model.load_state_dict(states[0])
    model.eval()
    assert model.head.num_observed == 75
    expected, _ = by_hand(model)
    same(expected, model)
    torch.testing.assert_close(model.head.precision.data, expected.head.precision.data, rtol=0, atol=1e-6)
