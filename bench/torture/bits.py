"""Bit flips, cuts and insertions in the files of saved models and of runs.

Right is an answer identical to the undamaged one, or a message that names a file of the folder.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import afield
from afield.experiment import one_run, run_folder
from afield.experiment.config import Config
from afield.model.saving import read_index
from bench.torture.fault import Inject, Kind, Wrong, refuse_or_fail
from bench.torture.models import fitted, identity, network
from bench.torture.mutations import mutate

FINISHED = ("config.toml", "metrics.json", "predictions.npz", "model.safetensors")
STOPPED = ("config.toml", "checkpoint.pt")
CONFIG = Config.of("two-moons", "sngp", epochs=2, num_random_features=16)


@contextmanager
def opened(folder: Path) -> Iterator[Inject]:
    places: list[tuple[Path, tuple[str, ...], Callable[[Path, str], Any]]] = []
    for make in ("sngp", "attach"):
        saved = afield.save(fitted(make), folder / make, metadata={"labels": ["a", "b", "c"]})
        places.append((saved, tuple(file.name for file in saved.iterdir()), _read_model))
    finished = one_run.run(CONFIG, folder / "finished").folder
    places += [(finished, FINISHED, _read_run), (_stopped(folder / "stopped"), STOPPED, _resume)]
    content = {(place, name): (place / name).read_bytes() for place, names, _ in places for name in names}
    right = {(place, name): read(place, name) for place, names, read in places[:3] for name in names}
    right |= {(places[3][0], name): dict(run_folder.read(finished).metrics) for name in STOPPED}

    def inject(random: Random) -> None:
        place, names, read = random.choices(places, (45, 45, 9, 1))[0]
        name = random.choice(names)
        before = content[place, name]
        damaged, done = mutate(before, random)
        (place / name).write_bytes(damaged)
        done = f"{place.name}/{name}: {done}"
        try:
            answer = read(place, name)
        except Exception as error:
            refuse_or_fail(error, done, names)
        else:
            if answer != right[place, name]:
                raise Wrong(f"{done}: read without a word, and differs")
        finally:
            (place / name).write_bytes(before)

    yield inject


KIND = Kind("bits", "bit flips, cuts and insertions in files of models and runs", opened, share=0.3)


def _read_model(folder: Path, _: str) -> Any:
    return identity(afield.load(folder, network(5))), read_index(folder)


def _read_run(folder: Path, name: str) -> Any:
    """All that reports read; also the model, where the file decides it."""
    run = run_folder.read(folder)
    config = Config.from_dict(run.config)
    predictions = {part: {k: v.tobytes() for k, v in run.prediction(part).numpy().items()} for part in run.parts}
    arrays = {key: run.array(key).numpy().tobytes() for key in ("val/y", "test/y", "train/x", "train/y", "grid/x")}
    model = None
    if name in ("config.toml", "model.safetensors"):
        loaded = afield.load(folder)
        model = {key: value.numpy().tobytes() for key, value in loaded.state_dict().items()}, repr(loaded)
    return config, dict(run.metrics), dict(run.cost), predictions, arrays, model


class _Stop(Exception):
    pass


def _stopped(out: Path) -> Path:
    """A run that was stopped after its first epoch."""

    def stop(epoch: int, loss: float) -> None:
        raise _Stop

    try:
        one_run.run(CONFIG, out, on_epoch=stop)
    except _Stop:
        return out / CONFIG.folder
    raise RuntimeError("the run did not stop")


def _resume(folder: Path, _: str) -> Any:
    """The metrics of the run, after it has gone on; in a copy."""
    out = folder.parents[2].with_name("resumed")
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(folder, out / CONFIG.folder)
    return dict(one_run.run(CONFIG, out).metrics)
