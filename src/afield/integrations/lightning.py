"""Lightning: a callback that fits the posterior and calibrates when `Trainer.fit` is done.

    class Digits(LightningModule):
        def __init__(self): ...; self.model = afield.sngp(net)        train it as before
    Trainer(..., callbacks=[FitPosterior()]).fit(digits, train_loader, val_loader)
    digits.model.predict(x).p_value

Training steps leave the posterior alone, so that any loss, optimiser, precision and number of devices will do. The
pass at the end sees every training example exactly once, in evaluation mode. On several devices (DDP) the Trainer's
own sampler pads by repeating, so each process takes its own share of the data set instead, the sums are added up once,
and every process ends with the posterior of a single one. Sharded strategies (FSDP, DeepSpeed) are not supported.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from afield.integrations import every_example_once
from afield.model.calibration import Calibration, calibrate
from afield.model.posterior import fit_posterior
from afield.model.sngp_model import SNGP

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError('The Lightning integration needs lightning: pip install "afield[lightning]".') from error


class FitPosterior(Callback):
    """Fit the posterior on the training data and calibrate on the validation data.

    every_n_epochs   also after every n-th epoch, for checkpoints that can predict; None: only when training is done,
                     which happens in any case
    train            batches for the posterior; None takes the Trainer's training data. Give a loader of your own if
                     that one augments its examples, or if its batches are not (inputs, target) or a mapping of
                     keyword arguments
    held_out         batches for calibration; None takes the Trainer's validation data, if there is any
    options          of `afield.calibrate`

    The model is the one `SNGP` inside the LightningModule. `calibration` has what `afield.calibrate` found. In a
    `fast_dev_run` the posterior sees as few batches as training does, and nothing is calibrated.
    """

    def __init__(
        self,
        *,
        every_n_epochs: int | None = None,
        train: Iterable[Any] | None = None,
        held_out: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        if every_n_epochs is not None and every_n_epochs < 1:
            raise ValueError(f"every_n_epochs must be at least 1, or None (only at the end), got {every_n_epochs}.")
        self.every_n_epochs, self.train, self.held_out, self.options = every_n_epochs, train, held_out, options
        self.calibration: Calibration | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        find_model(pl_module).head.reset_posterior()  # it belongs to weights that are about to change
        self.calibration = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_epochs is not None and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._fit(trainer, find_model(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._fit(trainer, find_model(pl_module))  # also after an epoch that did: averaged weights come back only now

    def _fit(self, trainer: Trainer, model: SNGP) -> None:
        train = self.train if self.train is not None else _only_loader(trainer.train_dataloader, "train")
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set by a connector
            fit_posterior(model, every_example_once(train, max_batches=int(trainer.num_training_batches)))
            return
        fit_posterior(model, every_example_once(train))
        held_out = self.held_out if self.held_out is not None else _only_loader(trainer.val_dataloaders, "held_out")
        if held_out is not None:
            # All of it on every process: the same answer on each.
            self.calibration = calibrate(model, every_example_once(held_out), **self.options)


def find_model(module: nn.Module) -> SNGP:
    """The one `SNGP` inside a module.

    returns  it
    raises   ValueError if there is none, or more than one

    >>> find_model(torch.nn.Sequential(model)) is model
    True
    """
    found = [m for m in module.modules() if isinstance(m, SNGP)]
    if len(found) != 1:
        raise ValueError(
            f"FitPosterior expects one model made by afield.sngp or afield.attach inside {type(module).__name__}, "
            f"found {len(found)}. Call afield.fit_posterior and afield.calibrate on each yourself, in on_train_end."
        )
    return found[0]


def _only_loader(loaders: Any, name: str) -> Any:
    """The one loader among what a Trainer holds, None if it holds none."""
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if not isinstance(loaders, list | tuple):
        return loaders
    if len(loaders) > 1:
        raise ValueError(
            f"The Trainer has {len(loaders)} loaders, FitPosterior expects one. Choose: FitPosterior({name}=loader)."
        )
    return loaders[0] if loaders else None
