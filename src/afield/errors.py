"""The errors that afield raises by a name of its own, for those who catch them."""


class NotFitted(RuntimeError):
    """A variance was asked for before the posterior was fitted."""


class Unsuitable(ValueError):
    """A score was asked of a prediction, or fitted to training data, that it has no meaning for."""


class Stale(RuntimeError):
    """The network has changed since its posterior was fitted: what was asked for would be wrong."""


class StaleWarning(UserWarning):
    """The network has changed since its posterior was fitted: its variance belongs to other weights."""


class DamagedModel(ValueError):
    """A saved model that cannot be read: missing, truncated, foreign, newer, or made for another network."""


class DamagedRun(DamagedModel):
    """A file of a run folder that cannot be read, or is not what the run has written."""


class WrongInput(ValueError, RuntimeError):
    """Inputs of another shape, dtype or range than a layer of the network expects."""


class WrongOutput(ValueError, RuntimeError):
    """A network that does not return the logits of its output layer, or those of several."""


class NoBetterThanGuessing(UserWarning):
    """A calibrated model whose answers on held-out data cannot be told from guessing."""


class OtherTargets(UserWarning):
    """Targets that look like those of another likelihood than the model's."""


class Diverged(ValueError):
    """Training left the finite numbers."""


class Busy(ValueError):
    """Another process is writing to this run folder."""


class Elsewhere(ValueError):
    """The first process met an error, which it reports itself."""


class LostRank(ConnectionError):
    """Another process of torch.distributed is gone, and this one waited for it."""


class LostWorker(ChildProcessError):
    """A task whose workers died again and again."""


class OutOfReach(ValueError):
    """A promise that this held-out data cannot keep; the message says what would be needed."""


class ExportError(ValueError):
    """A model that cannot be exported, or whose export answers differently. Nothing was written."""


class DataMissing(FileNotFoundError):
    """A file that is in none of the folders; the message says which, where to get it and how to point to it."""


class DataDamaged(ValueError):
    """A file that is there and cannot be read, or a download with the wrong hash."""
